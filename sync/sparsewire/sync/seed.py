"""Reading a local checkpoint (safetensors) so that the starting weights need not cross the WAN.

The safetensors layout is read directly (https://huggingface.co/docs/safetensors: a length, a JSON header, raw bytes),
through memory maps, because bfloat16 and fp8 must arrive as bits. Nothing here trusts the checkpoint: the caller
compares digests with a manifest before it believes a byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.block_fp8 import SCALE_SUFFIX
from sparsewire.sync.digest import TensorDigest, digest_bits
from sparsewire.sync.errors import ConfigError, DamagedError, SchemaMismatchError
from sparsewire.sync.mirror import Weights
from sparsewire.sync.quantize import quantize_blocks
from sparsewire.sync.types import Dtype, Schema, TensorSpec

_MAX_HEADER_BYTES = 100 << 20
_BLOCK_ELEMENTS = 1 << 20


def open_checkpoint(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    """Return the tensors of a safetensors file, or of all those in a directory, as memory-mapped arrays by name.

    Raises:
        ConfigError: there is no such file.
        DamagedError: a file is not a safetensors file; names it.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ConfigError(f"seed {path}: no .safetensors file there; give a local checkpoint directory")
    tensors: dict[str, npt.NDArray[Any]] = {}
    for file in files:
        tensors.update(_open_file(file))
    return tensors


def _open_file(path: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise DamagedError(
                f"{path} is not a safetensors file: its header would have {header_bytes} of {num_bytes} bytes"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        entries = [
            (
                TensorSpec(name=name, dtype=Dtype(entry["dtype"]), shape=tuple(entry["shape"])),
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, SchemaMismatchError) as error:
        raise DamagedError(f"{path} is not a safetensors file: {error}") from error
    origin = 8 + header_bytes
    mapped: npt.NDArray[np.uint8] | None = None
    for spec, begin, end in entries:
        if end - begin != spec.num_bytes or begin < 0 or origin + end > num_bytes:
            raise DamagedError(
                f"{path}: tensor {spec.name} lies at [{begin}, {end}), which does not fit its shape or the file"
            )
        if spec.num_bytes == 0:
            yield spec.name, np.empty(spec.shape, spec.dtype.numpy)
            continue
        if mapped is None:
            mapped = np.memmap(path, np.uint8, "r")
        yield spec.name, np.asarray(mapped[origin + begin : origin + end]).view(spec.dtype.numpy).reshape(spec.shape)


def seed_weights(weights: Weights, checkpoint: Mapping[str, npt.NDArray[Any]]) -> tuple[TensorDigest, ...]:
    """Copy every tensor of the schema from the checkpoint, cast to the view's dtype (round to nearest even) where it differs.

    For a run in block-fp8, bf16 weights are quantised. Returns the digests of what was written, in schema order.

    Raises:
        SchemaMismatchError: a tensor is missing, has another shape, or cannot be quantised; names it.
    """
    digests = []
    scales: dict[str, npt.NDArray[Any]] = {}
    for number, spec in enumerate(weights.schema):
        # A name sorts before that of its scales, so these are made by the time they are needed.
        array = scales.pop(spec.name, None)
        if array is None:
            array = checkpoint.get(spec.name)
        scales_name = spec.name + SCALE_SUFFIX
        if array is not None and _is_to_quantize(array, spec, weights.schema, scales_name):
            try:
                array, scales[scales_name] = quantize_blocks(array, name=spec.name)
            except ConfigError as error:
                raise SchemaMismatchError(f"the run is in block-fp8: {error}") from error
        if array is None or array.shape != spec.shape or prod(array.shape) != spec.num_elements:
            have = "nothing of that name" if array is None else f"shape {list(array.shape)}"
            raise SchemaMismatchError(
                f"the run has tensor {spec.name} of shape {list(spec.shape)}, the checkpoint has {have}"
            )
        target = weights.bits(number)
        flat = array.reshape(-1)
        for at in range(0, len(flat), _BLOCK_ELEMENTS):
            part = flat[at : at + _BLOCK_ELEMENTS].astype(spec.dtype.numpy, copy=False)
            target[at : at + len(part)] = part.view(spec.dtype.bits)
        digests.append(digest_bits(target))
    return tuple(digests)


def _is_to_quantize(array: npt.NDArray[Any], spec: TensorSpec, schema: Schema, scales_name: str) -> bool:
    return spec.dtype is Dtype.F8_E4M3 and array.dtype == Dtype.BF16.numpy and scales_name in schema.index
