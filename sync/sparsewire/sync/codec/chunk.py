"""Encode and decode one chunk: choose a mode for each segment, code all of a mode jointly, prove the result.

Pure. The publisher encodes a chunk from old and new bits; the subscriber decodes it against the bits of its mirror.
Decoding returns nothing before the chunk's check agrees: the sum over the changed elements of new minus old digest terms
(new terms alone in an anchor), so a wrong base is found here, before any weight is written.

    segments ─┬─ nothing differs ──────────────► unchanged
              ├─ dense is smaller ─────────────► dense body     (dense.py)
              └─ else, by the run's profile ─┬─► classed body   (classed.py; the reader scans its base)
                                             └─► sparse body    (sparse.py; it reads changed elements only)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from sparsewire.sync.codec.classed import ParsedBody, encode_classed, parse_classed, rebuild
from sparsewire.sync.codec.container import Mode, ParsedChunk, Profile, parse_chunk, seal
from sparsewire.sync.codec.cuts import fit_partition
from sparsewire.sync.codec.dense import decode_dense, encode_dense
from sparsewire.sync.codec.plan import MAX_CHUNK_BYTES, MAX_SEGMENTS, Segment
from sparsewire.sync.codec.sparse import SparseStreams, encode_sparse, estimate_sparse_size, parse_sparse
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import DamagedError, WrongBaseError
from sparsewire.sync.types import Bits, Dtype, Indices, Schema

SURELY_SPARSE_DENSITY = 1 / 8
"""Below this share of changed elements dense is larger for any new bits that are not trivial, and is not tried."""

_Item = TypeVar("_Item")


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
    cuts: bytes | None
    """The cuts of the classed body, which also suit the next change of the same elements; None without such a body."""


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
    dtype: Dtype,
    segments: Sequence[Segment],
    old: Sequence[Bits] | None,
    new: Sequence[Bits],
    *,
    profile: Profile = Profile.CLASSED,
    cuts: bytes | None = None,
) -> EncodedChunk:
    """Encode the change of `segments` from `old` to `new`, flat bits of each range; `old` None makes an anchor chunk.

    In the classed profile `cuts` are those of an earlier change of the same elements; None fits them to this one.
    Equal input gives equal bytes for one version of zstd. Extra memory is some multiple of the bits given.

    Raises:
        ValueError: segments overlap or descend, exceed the limits of a chunk, or do not fit the bits given; `cuts` are
            not ascending keys.
    """
    _check_input(dtype, segments, old, new)
    if old is None:
        patches = [_dense_patch(s, None, bits) for s, bits in zip(segments, new, strict=True)]
        return _seal(dtype, segments, [Mode.DENSE] * len(segments), patches, num_changed=sum(map(len, new)))
    positions = [changed_positions(before, after) for before, after in zip(old, new, strict=True)]
    modes = [_mode(profile, *change) for change in zip(positions, old, new, strict=True)]
    patches = []
    for segment, mode, changed, before, after in zip(segments, modes, positions, old, new, strict=True):
        if mode is Mode.DENSE:
            patches.append(_dense_patch(segment, before, after))
        elif mode is profile.mode:
            patches.append(_sparse_patch(segment, changed, before[changed], after[changed]))
    changes = b""
    if profile.mode in modes:
        joint = _join_positions(_of(profile.mode, modes, segments), _of(profile.mode, modes, positions))
        undo = _join([p.undo for p in patches if p.indices is not None and p.undo is not None])
        values = _join([p.values for p in patches if p.indices is not None])
        if profile is Profile.BASE_FREE:
            changes = encode_sparse(dtype, joint, undo, values)
        else:
            before_parts = _of(profile.mode, modes, old)
            if cuts is None:
                cuts = fit_partition(before_parts, _of(profile.mode, modes, new)).cuts
            changes = encode_classed(_join(before_parts), joint, values - undo, cuts)
    return _seal(
        dtype,
        segments,
        modes,
        patches,
        changes=changes,
        cuts=cuts if Mode.CLASSED in modes else None,
        num_changed=sum(map(len, positions)),
    )


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
    streams = _parse_changes(chunk)
    dense = _parse_dense(chunk)
    bases = _fetch_bases(chunk, base)
    coded = iter(_rebuild(chunk, streams, bases))
    patches = []
    at = 0
    for number, (segment, mode) in enumerate(zip(chunk.segments, chunk.modes, strict=True)):
        if mode is Mode.DENSE:
            undo = None if chunk.is_anchor else bases[number].copy()
            patches.append(_dense_patch(segment, undo, dense[at : at + segment.count]))
            at += segment.count
        elif mode is not Mode.UNCHANGED:
            patches.append(next(coded))
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


def _mode(profile: Profile, positions: Indices, old: Bits, new: Bits) -> Mode:
    """Return the mode in which one segment is smallest."""
    if not len(positions):
        return Mode.UNCHANGED
    if len(positions) <= SURELY_SPARSE_DENSITY * len(old):
        return profile.mode
    if profile is Profile.CLASSED:
        size = fit_partition([old], [new]).num_bits / 8
    else:
        size = estimate_sparse_size(Dtype.of(old.dtype), positions, old[positions], new[positions])
    return Mode.DENSE if len(encode_dense(new)) < size else profile.mode


def _dense_patch(segment: Segment, undo: Bits | None, values: Bits) -> TensorPatch:
    return TensorPatch(
        tensor=segment.tensor, start=segment.start, count=segment.count, indices=None, values=values, undo=undo
    )


def _sparse_patch(segment: Segment, positions: Indices, undo: Bits, values: Bits) -> TensorPatch:
    return TensorPatch(
        tensor=segment.tensor,
        start=segment.start,
        count=segment.count,
        indices=positions + segment.start,
        values=values,
        undo=undo,
    )


def _seal(
    dtype: Dtype,
    segments: Sequence[Segment],
    modes: Sequence[Mode],
    patches: Sequence[TensorPatch],
    *,
    num_changed: int,
    changes: bytes = b"",
    cuts: bytes | None = None,
) -> EncodedChunk:
    dense = [patch.values for patch in patches if patch.indices is None]
    digest_changes = _digest_changes(patches)
    payload = seal(
        dtype=dtype,
        is_anchor=any(patch.undo is None for patch in patches),
        segments=segments,
        modes=modes,
        num_changed=sum(patch.num_changed for patch in patches if patch.indices is not None),
        changes=changes,
        dense=encode_dense(_join(dense)) if dense else b"",
        check=sum(digest_changes.values(), ZERO),
    )
    return EncodedChunk(
        payload=payload, patches=tuple(patches), num_changed=num_changed, digest_changes=digest_changes, cuts=cuts
    )


def _of(mode: Mode, modes: Sequence[Mode], items: Sequence[_Item]) -> list[_Item]:
    return [item for item, its in zip(items, modes, strict=True) if its is mode]


def _join(parts: Sequence[Bits]) -> Bits:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_positions(segments: Sequence[Segment], positions: Sequence[Indices]) -> Indices:
    """Return positions within each segment as positions in the space of all of them, end to end."""
    starts = np.cumsum([0, *(segment.count for segment in segments[:-1])])
    return np.concatenate([part + start for part, start in zip(positions, starts, strict=True)])


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


def _parse_changes(chunk: ParsedChunk) -> SparseStreams | ParsedBody | None:
    num_changed, num_elements = chunk.num_changed, chunk.count(chunk.profile.mode)
    if chunk.profile.mode not in chunk.modes:
        if len(chunk.changes):
            raise DamagedError(f"chunk: {len(chunk.changes)} bytes of changes and no segment for them: fetch it again")
        return None
    if chunk.profile is Profile.BASE_FREE:
        return parse_sparse(chunk.changes, dtype=chunk.dtype, num_changed=num_changed, num_elements=num_elements)
    return parse_classed(chunk.changes, num_changed=num_changed, num_elements=num_elements, width=chunk.dtype.width)


def _parse_dense(chunk: ParsedChunk) -> Bits:
    if Mode.DENSE in chunk.modes:
        return decode_dense(chunk.dense, chunk.dtype, chunk.count(Mode.DENSE))
    if len(chunk.dense):
        raise DamagedError(f"chunk: {len(chunk.dense)} bytes and no dense segment: fetch it again")
    return np.empty(0, chunk.dtype.bits)


def _fetch_bases(chunk: ParsedChunk, base: Callable[[Segment], Bits] | None) -> Mapping[int, Bits]:
    """Return the base of each changed segment by its place, checked for size and width; none for an anchor."""
    if chunk.is_anchor:
        return {}
    bases = {}
    for number, (segment, mode) in enumerate(zip(chunk.segments, chunk.modes, strict=True)):
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
        bases[number] = bits
    return bases


def _rebuild(
    chunk: ParsedChunk, streams: SparseStreams | ParsedBody | None, bases: Mapping[int, Bits]
) -> list[TensorPatch]:
    """Return the patches of the sparse or classed segments, in order."""
    if streams is None:
        return []
    numbers = [number for number, mode in enumerate(chunk.modes) if mode is chunk.profile.mode]
    segments = [chunk.segments[number] for number in numbers]
    old = [bases[number] for number in numbers]
    ends = np.cumsum([segment.count for segment in segments])
    starts = [0, *ends[:-1].tolist()]
    positions, new = rebuild(streams, _join(old)) if isinstance(streams, ParsedBody) else (streams.positions(), None)
    if len(positions) and positions[-1] >= ends[-1]:
        raise DamagedError(f"chunk: a change at {positions[-1]} in segments of {ends[-1]} elements: fetch it again")
    cuts = [0, *np.searchsorted(positions, ends).tolist()]
    local = [positions[a:b] - start for (a, b), start in zip(pairwise(cuts), starts, strict=True)]
    undo = [bits[part] for bits, part in zip(old, local, strict=True)]
    if isinstance(streams, SparseStreams):
        new = streams.new_bits(chunk.dtype, _join(undo))
    assert new is not None
    return [
        _sparse_patch(segment, part, before, new[a:b])
        for segment, part, before, (a, b) in zip(segments, local, undo, pairwise(cuts), strict=True)
    ]
