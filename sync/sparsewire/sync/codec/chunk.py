"""Encode and decode one chunk: choose a mode for each segment, code all of a mode jointly, prove the result.

Pure. The publisher encodes a chunk from old and new bits; the subscriber decodes it against the bits of its mirror.
Decoding touches only the changed elements of sparse segments, and returns nothing before the chunk's check agrees:
the sum over the changed elements of new minus old digest terms (new terms alone in an anchor), so a wrong base is
found here, before any weight is written.

Sparse segments share one body, in the coordinates of their concatenation: gaps between changes, then per change a
sign bit and a magnitude, the modular step `new - old`. Steps are ordered by the exponent of the old value, which the
decoder knows once it knows the positions: weights of one binade move by like steps, so equal tokens come together.
Dense segments share a body of byte planes. No class of positions is conditioned on the base yet: that will be a new
mode number in the same frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.container import Mode, ParsedChunk, parse_chunk, seal
from sparsewire.sync.codec.plan import MAX_CHUNK_BYTES, MAX_SEGMENTS, Segment
from sparsewire.sync.codec.streams import (
    Reader,
    Unsigned,
    read_bytes,
    read_integers,
    split_tokens,
    write_bytes,
    write_integers,
)
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import DamagedError, WrongBaseError
from sparsewire.sync.types import Bits, Dtype, Indices, Schema

SURELY_SPARSE_DENSITY = 1 / 8
"""Below this share of changed elements sparse is smaller for any new bits that are not trivial, and is not compared."""

ESTIMATE_SAMPLE = 1 << 16
"""Changes from which the size of the sparse mode is estimated: the entropy of 200 tokens is then known to 0.2 %."""
TABLE_BITS_PER_TOKEN = 4
"""What a distinct token costs in zstd's Huffman table, about."""

_CLASS_SHIFT: Mapping[Dtype, int] = {
    Dtype.BOOL: 0,
    Dtype.U8: 3,
    Dtype.I8: 3,
    Dtype.F8_E4M3: 3,
    Dtype.F8_E4M3FNUZ: 3,
    Dtype.F8_E5M2: 2,
    Dtype.F8_E5M2FNUZ: 2,
    Dtype.F8_E8M0: 0,
    Dtype.U16: 7,
    Dtype.I16: 7,
    Dtype.BF16: 7,
    Dtype.F16: 10,
    Dtype.U32: 23,
    Dtype.I32: 23,
    Dtype.F32: 23,
    Dtype.U64: 52,
    Dtype.I64: 52,
    Dtype.F64: 52,
}
"""Mantissa bits below the exponent; integer dtypes are taken for the bits of bf16, f32 and f64, as callers pass those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """A chunk ready to be stored, and what it does."""

    payload: bytes
    patches: tuple[TensorPatch, ...]
    """One for each changed segment. Values of dense ones are views of the `new` that was encoded."""
    num_changed: int
    """Elements whose bits differ; all of them in an anchor. A chunk with 0 need not be stored."""
    digest_changes: Mapping[int, TensorDigest]
    """By tensor: what to add to its digest; in an anchor the digest of the ranges covered here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedChunk:
    """A chunk whose check agreed with its base."""

    dtype: Dtype
    segments: tuple[Segment, ...]
    """All ranges that the chunk speaks of, changed or not."""
    patches: tuple[TensorPatch, ...]
    """One for each changed segment, in order; `undo` is None in an anchor."""
    digest_changes: Mapping[int, TensorDigest]
    """By tensor: what to add to its digest; in an anchor the digest of the ranges covered here."""


def encode_chunk(
    dtype: Dtype, segments: Sequence[Segment], old: Sequence[Bits] | None, new: Sequence[Bits]
) -> EncodedChunk:
    """Encode the change of `segments` from `old` to `new`, flat bits of each range; `old` None makes an anchor chunk.

    Equal input gives equal bytes for one version of zstd. Extra memory is some multiple of the bits given.

    Raises:
        ValueError: segments overlap or descend, exceed the limits of a chunk, or do not fit the bits given.
    """
    _check_input(dtype, segments, old, new)
    if old is None:
        patches = [_dense_patch(s, None, bits) for s, bits in zip(segments, new, strict=True)]
        return _encode(dtype, segments, [Mode.DENSE] * len(segments), patches, is_anchor=True)
    modes, changed = [], []
    num_changed = 0
    for segment, before, after in zip(segments, old, new, strict=True):
        positions = changed_positions(before, after)
        num_changed += len(positions)
        if not len(positions):
            modes.append(Mode.UNCHANGED)
            continue
        patch = TensorPatch(
            tensor=segment.tensor,
            start=segment.start,
            count=segment.count,
            indices=positions + segment.start,
            values=after[positions],
            undo=before[positions],
        )
        dense_is_smaller = len(positions) > SURELY_SPARSE_DENSITY * segment.count and (
            _dense_size(dtype, after) < _estimate_sparse_size(dtype, positions, patch)
        )
        modes.append(Mode.DENSE if dense_is_smaller else Mode.SPARSE)
        changed.append(_dense_patch(segment, before, after) if dense_is_smaller else patch)
    return _encode(dtype, segments, modes, changed, is_anchor=False, num_changed=num_changed)


def decode_chunk(
    payload: bytes | memoryview, *, schema: Schema | None, base: Callable[[Segment], Bits] | None
) -> DecodedChunk:
    """Decode one chunk against its base and prove the result by the chunk's check.

    `base` returns the flat bits that the receiver holds for a range; it is asked for changed segments only, and of
    sparse ones only the changed elements are read. It may be None for anchors. With a `schema`, every segment must
    lie within its tensor.

    Raises:
        DamagedError: the bytes are not a sound chunk, or do not fit the schema.
        UnsupportedFormatError: unknown format number, dtype, flag or mode.
        WrongBaseError: the bits of `base` are not those that the chunk was made from.
    """
    chunk = parse_chunk(payload)
    if schema is not None:
        _check_schema(chunk, schema)
    # The streams are read before the base, so that what is wrong with the bytes is said to be damage.
    gaps, signs, magnitudes = _read_sparse(chunk)
    dense = _read_dense(chunk)
    bases = _fetch_bases(chunk, base)
    changed = [(s, m) for s, m in zip(chunk.segments, chunk.modes, strict=True) if m is not Mode.UNCHANGED]
    sparse_patches = _rebuild_sparse(chunk, changed, bases, gaps, signs, magnitudes)
    patches = []
    at = 0
    for number, (segment, mode) in enumerate(changed):
        if mode is Mode.DENSE:
            undo = None if chunk.is_anchor else bases[number].copy()
            patches.append(_dense_patch(segment, undo, dense[at : at + segment.count]))
            at += segment.count
        else:
            patches.append(sparse_patches[number])
    changes = _digest_changes(patches)
    found = sum(changes.values(), ZERO)
    if found != chunk.check:
        if chunk.is_anchor:
            raise DamagedError(f"anchor chunk: its bits have check {found}, it states {chunk.check}: fetch it again")
        raise WrongBaseError(
            f"chunk of tensors {chunk.segments[0].tensor}..{chunk.segments[-1].tensor}: check {found}, it states "
            f"{chunk.check}: it was made from other weights than those held here; catch up from an anchor"
            if chunk.segments
            else f"chunk without segments states check {chunk.check}"
        )
    return DecodedChunk(dtype=chunk.dtype, segments=chunk.segments, patches=tuple(patches), digest_changes=changes)


def _check_input(dtype: Dtype, segments: Sequence[Segment], old: Sequence[Bits] | None, new: Sequence[Bits]) -> None:
    if len(segments) != len(new) or (old is not None and len(old) != len(new)):
        raise ValueError(f"chunk: {len(segments)} segments, {len(new)} arrays of new bits: one for each is needed")
    if len(segments) > MAX_SEGMENTS or sum(s.count for s in segments) * dtype.width > MAX_CHUNK_BYTES:
        raise ValueError(f"chunk: more than {MAX_SEGMENTS} segments or {MAX_CHUNK_BYTES} bytes: plan smaller chunks")
    for before, after in pairwise(segments):
        if (after.tensor, after.start) < (before.tensor, before.stop):
            raise ValueError(f"chunk: segments {before} and {after} overlap or descend")
    for arrays in (new, old or ()):
        for segment, bits in zip(segments, arrays, strict=False):
            if bits.shape != (segment.count,) or bits.dtype != dtype.bits:
                raise ValueError(
                    f"chunk: {bits.dtype} bits of shape {bits.shape} for {segment.count} elements of {dtype}"
                )


def _dense_patch(segment: Segment, undo: Bits | None, values: Bits) -> TensorPatch:
    return TensorPatch(
        tensor=segment.tensor, start=segment.start, count=segment.count, indices=None, values=values, undo=undo
    )


def _encode(
    dtype: Dtype,
    segments: Sequence[Segment],
    modes: Sequence[Mode],
    patches: Sequence[TensorPatch],
    *,
    is_anchor: bool,
    num_changed: int | None = None,
) -> EncodedChunk:
    """Code the patches of all segments that are not unchanged, and seal the chunk."""
    sparse, dense = bytearray(), bytearray()
    offsets: list[Indices] = []
    offset = 0
    remaining = iter(patches)
    for segment, mode in zip(segments, modes, strict=True):
        patch = None if mode is Mode.UNCHANGED else next(remaining)
        if mode is Mode.SPARSE and patch is not None and patch.indices is not None:
            offsets.append(patch.indices + (offset - segment.start))
            offset += segment.count
    sparse_patches = [patch for patch in patches if patch.indices is not None]
    if sparse_patches:
        undo = _join([patch.undo for patch in sparse_patches if patch.undo is not None])
        _write_sparse(sparse, dtype, np.concatenate(offsets), undo, _join([p.values for p in sparse_patches]))
    dense_values = [patch.values for patch in patches if patch.indices is None]
    if dense_values:
        _write_dense(dense, dtype, _join(dense_values))
    changes = _digest_changes(patches)
    payload = seal(
        dtype=dtype,
        is_anchor=is_anchor,
        segments=segments,
        modes=modes,
        num_sparse=sum(len(positions) for positions in offsets),
        sparse=sparse,
        dense=dense,
        check=sum(changes.values(), ZERO),
    )
    return EncodedChunk(
        payload=payload,
        patches=tuple(patches),
        num_changed=sum(s.count for s in segments) if num_changed is None else num_changed,
        digest_changes=changes,
    )


def _join(parts: Sequence[Bits]) -> Bits:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _digest_changes(patches: Sequence[TensorPatch]) -> dict[int, TensorDigest]:
    changes: dict[int, TensorDigest] = {}
    for patch in patches:
        if patch.indices is None:
            change = digest_bits(patch.values, start=patch.start)
            if patch.undo is not None:
                change -= digest_bits(patch.undo, start=patch.start)
        else:
            change = digest_at(patch.indices, patch.values)
            if patch.undo is not None:
                change -= digest_at(patch.indices, patch.undo)
        changes[patch.tensor] = changes.get(patch.tensor, ZERO) + change
    return changes


def _write_sparse(out: bytearray, dtype: Dtype, positions: Indices, old: Bits, new: Bits) -> None:
    """Gaps; signs in class order, eight to a byte from the lowest bit up; magnitudes minus one in class order."""
    write_integers(out, _gaps(positions))
    negative, magnitudes = _split_steps(dtype, old, new)
    order = _class_order(dtype, old)
    out += np.packbits(negative[order], bitorder="little").data
    write_integers(out, magnitudes[order])


def _gaps(positions: Indices) -> npt.NDArray[np.uint32]:
    """Unchanged elements before each change; positions lie within a chunk, so they fit."""
    narrow = positions.astype(np.uint32)
    gaps = np.empty_like(narrow)
    gaps[:1] = narrow[:1]
    np.subtract(narrow[1:], narrow[:-1], out=gaps[1:])
    gaps[1:] -= np.uint32(1)
    return gaps


def _split_steps(dtype: Dtype, old: Bits, new: Bits) -> tuple[npt.NDArray[np.bool_], Unsigned]:
    """Return (is negative, |step| - 1) of the modular steps read as two's complement."""
    steps = new - old
    negative = steps.view(f"i{dtype.width}") < 0
    sign_fill = np.where(negative, steps.dtype.type(np.iinfo(steps.dtype).max), steps.dtype.type(0))
    magnitudes: Unsigned = (steps ^ sign_fill) - sign_fill
    magnitudes -= magnitudes.dtype.type(1)
    return negative, magnitudes


def _class_order(dtype: Dtype, old: Bits) -> npt.NDArray[np.intp]:
    """The stable order by exponent field, sign left out; both sides compute it from the old bits."""
    one = old.dtype.type(1)
    fields = (old << one) >> old.dtype.type(_CLASS_SHIFT[dtype] + 1)
    return np.argsort(fields.astype(np.uint8 if dtype.width < 8 else np.uint16), kind="stable")


def _write_dense(out: bytearray, dtype: Dtype, bits: Bits) -> None:
    """One byte stream for each byte of an element, lowest first, after a rotation that brings the sign to the bottom.

    The rotation makes the highest byte of bf16 and f32 the whole exponent, which is what compresses.
    """
    for plane in _byte_planes(dtype, bits):
        write_bytes(out, np.ascontiguousarray(plane))


def _byte_planes(dtype: Dtype, bits: Bits) -> list[npt.NDArray[np.uint8]]:
    if dtype.width == 1:
        return [bits.view(np.uint8)]
    top = bits.dtype.type(8 * dtype.width - 1)
    rotated = (bits << bits.dtype.type(1)) | (bits >> top)
    return list(rotated.view(np.uint8).reshape(-1, dtype.width).T)


def _dense_size(dtype: Dtype, bits: Bits) -> int:
    out = bytearray()
    _write_dense(out, dtype, bits)
    return len(out)


def _estimate_sparse_size(dtype: Dtype, positions: Indices, patch: TensorPatch) -> float:
    """Bytes that the sparse body of one segment needs, by the entropy of a sample of its tokens."""
    assert patch.undo is not None
    stride = -(-len(positions) // ESTIMATE_SAMPLE)
    _, magnitudes = _split_steps(dtype, patch.undo[::stride], patch.values[::stride])
    bits_per_change, table_bits = 1.0, 0
    for values in (_gaps(positions)[::stride], magnitudes):
        tokens, shifts, _ = split_tokens(values)
        shares = np.bincount(tokens) / len(tokens)
        shares = shares[shares > 0]
        table_bits += TABLE_BITS_PER_TOKEN * len(shares)
        bits_per_change += float(-(shares * np.log2(shares)).sum()) + float(shifts.mean())
    return (bits_per_change * len(positions) + table_bits) / 8


def _check_schema(chunk: ParsedChunk, schema: Schema) -> None:
    for segment in chunk.segments:
        if segment.tensor >= len(schema):
            raise DamagedError(f"chunk: tensor number {segment.tensor}, the run has {len(schema)}: foreign or damaged")
        spec = schema[segment.tensor]
        if spec.dtype != chunk.dtype or segment.stop > spec.num_elements:
            raise DamagedError(
                f"chunk: {chunk.dtype} range {segment.start}..{segment.stop} for tensor {spec.name}, "
                f"{spec.dtype} of {spec.num_elements} elements: foreign or damaged"
            )


def _fetch_bases(chunk: ParsedChunk, base: Callable[[Segment], Bits] | None) -> list[Bits]:
    """Return the base of each changed segment, checked for size and width; none for an anchor."""
    if chunk.is_anchor:
        return []
    bases = []
    for segment, mode in zip(chunk.segments, chunk.modes, strict=True):
        if mode is Mode.UNCHANGED:
            continue
        if base is None:
            raise WrongBaseError("chunk: it holds a delta and no base was given: start from an anchor")
        bits = base(segment)
        if bits.shape != (segment.count,) or bits.dtype != chunk.dtype.bits:
            raise WrongBaseError(
                f"chunk: tensor {segment.tensor} at {segment.start} needs {segment.count} elements of {chunk.dtype} "
                f"as base, got {bits.dtype} bits of shape {bits.shape}: wrong weights; start from an anchor"
            )
        bases.append(bits)
    return bases


def _read_sparse(chunk: ParsedChunk) -> tuple[Unsigned, npt.NDArray[np.bool_], Unsigned]:
    """Return (gaps, is negative, |step| - 1), the last two in class order, each within its range."""
    body = Reader(chunk.sparse)
    num_elements = chunk.count(Mode.SPARSE)
    if not num_elements:
        body.finish()
        empty: npt.NDArray[Any] = np.empty(0, np.uint64)
        return empty, np.empty(0, np.bool_), empty
    gaps = read_integers(body, chunk.num_sparse, num_elements)
    packed = np.frombuffer(body.take((chunk.num_sparse + 7) // 8), np.uint8)
    signs = np.unpackbits(packed, count=chunk.num_sparse, bitorder="little").view(np.bool_)
    magnitudes = read_integers(body, chunk.num_sparse, (1 << (8 * chunk.dtype.width - 1)) - 1)
    body.finish()
    return gaps, signs, magnitudes


def _read_dense(chunk: ParsedChunk) -> Bits:
    """Return the new bits of all dense segments, one after the other."""
    body = Reader(chunk.dense)
    num_elements = chunk.count(Mode.DENSE)
    dtype = chunk.dtype
    if Mode.DENSE not in chunk.modes:
        body.finish()
        return np.empty(0, dtype.bits)
    rotated = np.empty((num_elements, dtype.width), np.uint8)
    for plane in range(dtype.width):
        rotated[:, plane] = read_bytes(body, num_elements)
    body.finish()
    bits: Bits = rotated.reshape(-1).view(dtype.bits)
    if dtype.width == 1:
        return bits
    top = bits.dtype.type(8 * dtype.width - 1)
    return (bits >> bits.dtype.type(1)) | (bits << top)


def _rebuild_sparse(
    chunk: ParsedChunk,
    changed: Sequence[tuple[Segment, Mode]],
    bases: Sequence[Bits],
    gaps: Unsigned,
    signs: npt.NDArray[np.bool_],
    magnitudes: Unsigned,
) -> dict[int, TensorPatch]:
    """Return the patches of sparse segments by their place in `changed`."""
    numbers = [number for number, (_, mode) in enumerate(changed) if mode is Mode.SPARSE]
    if not numbers:
        return {}
    segments = [changed[number][0] for number in numbers]
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    ends = np.cumsum([segment.count for segment in segments])
    if len(positions) and positions[-1] >= ends[-1]:
        raise DamagedError(f"chunk: a change at {positions[-1]} in sparse segments of {ends[-1]}: fetch it again")
    cuts = [0, *np.searchsorted(positions, ends).tolist()]
    local, old = [], []
    for place, number in enumerate(numbers):
        part = positions[cuts[place] : cuts[place + 1]] - (ends[place] - segments[place].count)
        local.append(part)
        old.append(bases[number][part])
    before = _join(old)
    order = _class_order(chunk.dtype, before)
    steps = magnitudes.astype(chunk.dtype.bits) + chunk.dtype.bits.type(1)
    np.negative(steps, out=steps, where=signs)
    after = np.empty_like(before)
    after[order] = before[order] + steps
    return {
        number: TensorPatch(
            tensor=segment.tensor,
            start=segment.start,
            count=segment.count,
            indices=local[place] + segment.start,
            values=after[cuts[place] : cuts[place + 1]],
            undo=before[cuts[place] : cuts[place + 1]],
        )
        for place, (number, segment) in enumerate(zip(numbers, segments, strict=True))
    }
