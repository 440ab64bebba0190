"""The block-fp8 view: which weights of a bf16 model become fp8 with scales, under which names, whole or in shards.

`block_fp8_view` turns what a trainer would publish in bf16 into what a block-fp8 engine loads: for each linear weight
of the decoder layers `NAME` in e4m3 and `NAME_scale_inv` in float32, everything else as it was. The bits are those of
`quantize.py`, a function of the bf16 bits alone, so any number of ranks publishes the same. `quantization_config` is
what config.json must say beside such weights.

Known limits: shards must hold whole rows (FSDP2's do); experts must be one matrix each, as in block-fp8 checkpoints,
since a stacked tensor of three dimensions stays bf16.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from sparsewire.sync.errors import SchemaMismatchError
from sparsewire.sync.quantize import BLOCK, Maxima, band_maxima, bits_of_weight, grid_shape, quantize_rows
from sparsewire.sync.ranks import SOLO, Agreement, Ranks
from sparsewire.sync.view import Shard

SCALE_SUFFIX = "_scale_inv"
"""Appended to a weight's name: the name of its scales."""

MODULES_TO_NOT_CONVERT: tuple[str, ...] = ("gate", "shared_expert_gate", "router", "eh_proj", "shared_head")
"""Modules within layers that block-fp8 checkpoints keep in bf16: what routes tokens, and the ends of extra heads."""

_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_NOT_LINEAR = re.compile(r"norm|embed|conv")
_HEADER = struct.Struct("<IQI")


def is_block_quantized(
    name: str, shape: Sequence[int], *, modules_to_not_convert: Sequence[str] = MODULES_TO_NOT_CONVERT
) -> bool:
    """Return whether a tensor becomes fp8 with scales: the matrix `weight` of a linear module within a decoder layer.

    Args:
        modules_to_not_convert: modules left in bf16, each a full name or a run of whole parts of one: `mlp.gate` covers
            `model.layers.3.mlp.gate`, but not `model.layers.3.mlp.gate_proj`.
    """
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(shape) != 2 or 0 in shape or not _DECODER_LAYER.search(name):
        return False
    if _NOT_LINEAR.search(module.rpartition(".")[2]):
        return False
    return not any(f".{pattern}." in f".{module}." for pattern in modules_to_not_convert)


def quantization_config(
    shapes: Mapping[str, Sequence[int]], *, modules_to_not_convert: Sequence[str] = MODULES_TO_NOT_CONVERT
) -> Mapping[str, object]:
    """Return `quantization_config` for the config.json of an engine that serves this view.

    Args:
        shapes: of the bf16 tensors, by name; tells which matrices stay bf16, and an engine must be told all of them.
    """
    kept = [
        name.removesuffix(".weight")
        for name, shape in sorted(shapes.items())
        if len(shape) == 2
        and name.endswith(".weight")
        and not is_block_quantized(name, shape, modules_to_not_convert=modules_to_not_convert)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


@overload
def block_fp8_view(
    view: Mapping[str, Shard], *, ranks: Ranks = ..., modules_to_not_convert: Sequence[str] = ...
) -> dict[str, Shard]: ...
@overload
def block_fp8_view(
    view: Mapping[str, npt.NDArray[Any]], *, ranks: Ranks = ..., modules_to_not_convert: Sequence[str] = ...
) -> dict[str, npt.NDArray[Any]]: ...
def block_fp8_view(
    view: Mapping[str, Any], *, ranks: Ranks = SOLO, modules_to_not_convert: Sequence[str] = MODULES_TO_NOT_CONVERT
) -> dict[str, Any]:
    """Return the block-fp8 form of a bf16 view, to be published in its place.

    Collective where there are several ranks, even for a rank whose shards are all empty. Nothing is gathered: where a
    block's rows lie on two ranks or more, these exchange its largest magnitude, and the rank that holds its first row
    publishes its scale. Tensors that are not quantised are passed on, not copied.

    Args:
        view: bf16 arrays (`ml_dtypes.bfloat16`) by checkpoint name, or this rank's rows of them as `Shard`.
        ranks: the learner's processes, of a group that the publisher does not use: it talks in its own thread.
        modules_to_not_convert: modules whose matrix stays bf16; see `is_block_quantized`.

    Raises:
        SchemaMismatchError: a weight to quantise is not bf16, a shard has broken rows, or a name is taken.
        ConfigError: a weight is infinite or NaN. Both are raised on every rank and name the tensor.
    """
    chosen = [
        name
        for name in sorted(view)
        if is_block_quantized(name, view[name].shape, modules_to_not_convert=modules_to_not_convert)
    ]
    weights: list[_Rows] = []

    def measure() -> bytes:
        for name in chosen:
            if name + SCALE_SUFFIX in view:
                raise SchemaMismatchError(f"the view has a tensor {name}{SCALE_SUFFIX} already: give the bf16 weights")
            weights.append(_Rows(name, view[name]))
        return _packed([rows.partial_maxima() for rows in weights])

    made: dict[str, Any] = {}

    def quantize() -> bytes:
        for number, (name, rows) in enumerate(zip(chosen, weights, strict=True)):
            made[name], made[name + SCALE_SUFFIX] = rows.quantize(shared.get(number, {}))
        return b""

    # Both are agreed on, so that no rank goes on to publish while another refuses its weights.
    agreement = Agreement(ranks)
    shared = _joined(agreement.on_all(measure))
    agreement.on_all(quantize)
    return {**view, **made}


class _Rows:
    """Consecutive rows of one weight: all of them, or a rank's."""

    def __init__(self, name: str, part: npt.NDArray[Any] | Shard) -> None:
        self._name = name
        self._part = part
        array, start = (part.array, part.start) if isinstance(part, Shard) else (part, 0)
        self._num_rows, self._columns = int(part.shape[0]), int(part.shape[1])
        if start % self._columns or array.size % self._columns:
            raise SchemaMismatchError(
                f"tensor {name}: a shard of {array.size} elements from {start} breaks rows of {self._columns}; "
                "block-fp8 needs shards of whole rows"
            )
        self._weight = array.reshape(-1, self._columns)
        self._first = start // self._columns
        self._stop = self._first + len(self._weight)

    def partial_maxima(self) -> Mapping[int, Maxima]:
        """Return own maxima of the bands that other ranks hold rows of, too."""
        bits = bits_of_weight(self._weight, self._name)
        found = {}
        for band in {self._first // BLOCK, (self._stop - 1) // BLOCK} if len(bits) else set():
            start, stop = band * BLOCK, min((band + 1) * BLOCK, self._num_rows)
            if start < self._first or stop > self._stop:
                found[band] = band_maxima(bits[max(start - self._first, 0) : stop - self._first])
        return found

    def quantize(self, shared: Mapping[int, Maxima]) -> tuple[npt.NDArray[Any] | Shard, npt.NDArray[Any] | Shard]:
        """Return the fp8 rows, and the scales of the bands whose first row is here."""
        coded, scales = quantize_rows(self._weight, first_row=self._first, shared=shared, name=self._name)
        if not isinstance(self._part, Shard):
            return coded, scales
        shape = grid_shape(self._num_rows, self._columns)
        begin, end = -(-self._first // BLOCK), -(-self._stop // BLOCK)
        return (
            Shard(coded, self._part.start, self._part.shape),
            Shard(scales[len(scales) - (end - begin) :], begin * shape[1], shape),
        )


def _packed(maxima_of: Sequence[Mapping[int, Maxima]]) -> bytes:
    """Serialise maxima by tensor and band: (tensor, band, count, bf16 bits), repeated."""
    return b"".join(
        _HEADER.pack(number, band, len(maxima)) + maxima.astype("<u2").tobytes()
        for number, by_band in enumerate(maxima_of)
        for band, maxima in by_band.items()
    )


def _joined(payloads: Sequence[bytes]) -> Mapping[int, dict[int, Maxima]]:
    """Return the largest of all ranks' maxima, by number of the tensor and band."""
    joined: dict[int, dict[int, Maxima]] = {}
    for payload in payloads:
        at = 0
        while at < len(payload):
            number, band, count = _HEADER.unpack_from(payload, at)
            at += _HEADER.size
            maxima = np.frombuffer(payload, "<u2", count, at).astype(np.uint16)
            at += maxima.nbytes
            of_tensor = joined.setdefault(number, {})
            of_tensor[band] = np.maximum(of_tensor[band], maxima) if band in of_tensor else maxima
    return joined
