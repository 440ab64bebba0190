"""Encode the change of one whole tensor and decode it again: the smallest way to use the format.

Pure. A payload is one or more chunks back to back that cover the tensor from its first element to its last, so extra
memory is bounded by the size of a chunk beyond the payload and the patch themselves; arrays may be strided or
memory-mapped. Publisher and subscriber do not use this: they encode many tensors to a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.chunk import decode_chunk, encode_chunk
from sparsewire.sync.codec.container import Profile, chunk_length
from sparsewire.sync.codec.cuts import REFIT_PERIOD
from sparsewire.sync.codec.plan import ChunkPlan, Segment, plan_segments
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.errors import DamagedError, SchemaMismatchError, WrongBaseError
from sparsewire.sync.types import Bits, Dtype, Indices, bits_range


@dataclass(frozen=True, slots=True)
class FlatPatch:
    """New bits for the changed elements of one tensor."""

    indices: Indices
    """Flat C-order positions, sorted and distinct."""
    values: npt.NDArray[Any]
    """The new element at each index, with the dtype of the tensor; bits are exact."""


def encode_tensor(old: npt.NDArray[Any], new: npt.NDArray[Any], *, profile: Profile = Profile.CLASSED) -> bytes:
    """Return the change from `old` to `new`; bits are compared, whatever they mean. Equal arrays give a short payload.

    Classes are fitted to one chunk in 16; those between use the same.

    Raises:
        SchemaMismatchError: shapes or dtypes differ, or the dtype is not supported.
    """
    dtype = Dtype.of(new.dtype)
    if old.shape != new.shape or Dtype.of(old.dtype) != dtype:
        raise SchemaMismatchError(
            f"old is {old.dtype}{list(old.shape)}, new is {new.dtype}{list(new.shape)}: "
            "a delta needs equal shape and dtype; publish the tensor under another name"
        )
    payload = bytearray()
    cuts = None
    for number, plan in enumerate(_plans(new.size, dtype)):
        before = [bits_range(old, segment.start, segment.count) for segment in plan.segments]
        after = [bits_range(new, segment.start, segment.count) for segment in plan.segments]
        if number % REFIT_PERIOD == 0:
            cuts = None
        chunk = encode_chunk(dtype, plan.segments, before, after, profile=profile, cuts=cuts)
        cuts = chunk.cuts if chunk.cuts is not None else cuts
        payload += chunk.payload
    return bytes(payload)


def decode_tensor(old: npt.NDArray[Any], payload: bytes | memoryview) -> FlatPatch:
    """Return what `encode_tensor` found, given the same `old`.

    Raises:
        DamagedError: the payload is cut off, altered, or not a payload.
        UnsupportedFormatError: unknown format number, dtype or mode.
        WrongBaseError: `old` has another size or dtype, or other bits where it matters.
    """
    dtype = Dtype.of(old.dtype)

    def base(segment: Segment) -> Bits:
        return bits_range(old, segment.start, segment.count)

    indices: list[Indices] = []
    values: list[Bits] = []
    covered = 0
    rest = memoryview(payload).cast("B")
    while True:
        length = chunk_length(rest)
        chunk = decode_chunk(rest[:length], schema=None, base=base)
        rest = rest[length:]
        if chunk.dtype != dtype:
            raise WrongBaseError(f"payload: it changes {chunk.dtype} elements, the base holds {dtype}: wrong tensor")
        for segment in chunk.segments:
            if segment.tensor != 0 or segment.start != covered:
                raise DamagedError(
                    f"payload: a chunk covers tensor {segment.tensor} from {segment.start}, expected tensor 0 from "
                    f"{covered}: chunks are missing or swapped; fetch it again"
                )
            covered = segment.stop
        for patch in chunk.patches:
            positions, bits = _changed_only(patch)
            indices.append(positions)
            values.append(bits)
        if not rest:
            break
    if covered != old.size:
        raise WrongBaseError(
            f"payload: it covers {covered} elements, the base has {old.size}: it was made from another tensor, "
            "or whole chunks are missing at its end"
        )
    bits = np.concatenate(values) if values else np.empty(0, dtype.bits)
    elements = bits.view(dtype.numpy)
    if old.dtype.byteorder == ">":
        elements = elements.byteswap().view(old.dtype)
    return FlatPatch(np.concatenate(indices) if indices else np.empty(0, np.int64), elements)


def _plans(num_elements: int, dtype: Dtype) -> Iterator[ChunkPlan]:
    """Yield the chunks of one tensor; an empty tensor still gets one, so that its dtype can be checked."""
    if num_elements:
        return plan_segments([(0, 0, num_elements, dtype)])
    return iter([ChunkPlan(dtype, (Segment(0, 0, 0),))])


def _changed_only(patch: TensorPatch) -> tuple[Indices, Bits]:
    """Return positions and new bits of the elements that differ, whatever the mode was."""
    if patch.indices is not None:
        return patch.indices, patch.values
    if patch.undo is None:
        raise DamagedError("payload: it holds an anchor chunk, which is no change of a tensor: fetch it again")
    positions = changed_positions(patch.undo, patch.values)
    return positions + patch.start, patch.values[positions]
