"""Encode and decode one chunk: choose a mode for each segment, code all of a mode jointly, prove the result.

Pure. The publisher encodes a chunk from old and new bits; the subscriber decodes it against the bits of its mirror.
Decoding returns nothing before the chunk's check agrees: the sum over the changed elements of new minus old digest terms
(new terms alone in an anchor), so a wrong base is found here, before any weight is written.

    segments ─┬─ nothing differs ───► unchanged
              ├─ dense is smaller ──► dense body     (dense.py)
              └─ else ──────────────► classed body   (classed.py)

The reader of a classed body scans its base, unless it has one class only, as the base-free profile writes it. A body of
bfloat16 may be coded against the change before as well, where its writer has it: a *predicted* chunk, which only those
who hold that change can decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from sparsewire.sync.codec.classed import is_predicted
from sparsewire.sync.codec.container import Mode, ParsedChunk, Profile, parse_chunk, seal
from sparsewire.sync.codec.cuts import fit_partition
from sparsewire.sync.codec.dense import Piece, decode_dense, dense_size, encode_dense
from sparsewire.sync.codec.plan import MAX_CHUNK_BYTES, MAX_SEGMENTS, Segment
from sparsewire.sync.codec.reference import Reference
from sparsewire.sync.delta import LastChange, TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import DamagedError, UnsupportedFormatError, WrongBaseError
from sparsewire.sync.native import Found, Kernel, LastBits, NativeDecoding, NativeEncoding, Wish, kernel
from sparsewire.sync.types import Bits, Dtype, Indices, Schema

CROWDED = 8
"""A segment is tried as dense when more than one element in so many changed; below, dense is larger unless its new bits are
trivial."""

_PREDICTED = (Dtype.BF16, Dtype.U16)
"""Dtypes whose bits are predicted as those of bfloat16; callers pass such bits as uint16 as well."""

SMALL_ELEMENTS = 1 << 10
MANY_SMALL = 64
"""With more than so many small segments, those that did not change are classed as well: their elements cost less than a
mode of their own does in the segment table."""


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
    predicted: bool
    """It takes the change before to decode."""


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
    last: LastChange | None = None,
) -> EncodedChunk:
    """Encode the change of `segments` from `old` to `new`, flat bits of each range; `old` None makes an anchor chunk.

    In the classed profile `cuts` are those of an earlier change of the same elements; None fits them to this one. With
    `last`, the change that led to `old`, a chunk of bfloat16 (or of uint16, which may hold its bits) comes out predicted
    where that is smaller. Equal input gives equal bytes for one version of zstd. Extra memory is some multiple of the
    bits given.

    Raises:
        ValueError: segments overlap or descend, exceed the limits of a chunk, or do not fit the bits given; `cuts` are
            not ascending keys.
    """
    _check_input(dtype, segments, old, new)
    if old is None:
        whole = [_dense_patch(s, None, bits) for s, bits in zip(segments, new, strict=True)]
        return _seal(dtype, segments, [Mode.DENSE] * len(segments), whole, num_changed=sum(map(len, new)))
    if not segments:
        return _seal(dtype, segments, [], [], num_changed=0)
    if profile is Profile.BASE_FREE:
        return _encode_classed(dtype, segments, old, new, b"", None)
    return _encode_classed(dtype, segments, old, new, cuts, last)


def decode_chunk(
    payload: bytes | memoryview,
    *,
    schema: Schema | None,
    base: Callable[[Segment], Bits] | None,
    last: LastChange | None = None,
) -> DecodedChunk:
    """Decode one chunk against its base and prove the result by the chunk's check.

    `base` returns the flat bits that the receiver holds for a range; it is asked for changed segments only. It may be None for anchors. With a `schema`, every segment must
    lie within its tensor. `last` is the change that led to the base; only predicted chunks look at it.

    Raises:
        DamagedError: the bytes are not a sound chunk, or do not fit the schema.
        UnsupportedFormatError: unknown format number, dtype, flag or mode.
        WrongBaseError: the bits of `base`, or those that `last` replaced, are not those that the chunk was made from.
        LastChangeMissingError: the chunk is predicted and `last` is None.
    """
    chunk = parse_chunk(payload)
    if schema is not None:
        _check_schema(chunk, schema)
    # The dense body is read before the base, so that what is wrong with the bytes is said to be damage.
    dense = _parse_dense(chunk)
    bases = _fetch_bases(chunk, base)
    patches, digests = _decode_changes(chunk, bases, last)
    numbers = [number for number, mode in enumerate(chunk.modes) if mode is Mode.DENSE]
    for number, (bits, _) in zip(numbers, dense, strict=True):
        undo = None if chunk.is_anchor else bases[number].copy()
        patches.append(_dense_patch(chunk.segments[number], undo, bits))
    patches.sort(key=_place)
    changes = _digest_changes(patches, digests, [digest for _, digest in dense])
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
    kind = dtype.bits
    for arrays in (new, old or ()):
        for segment, bits in zip(segments, arrays, strict=False):
            if bits.shape != (segment.count,) or bits.dtype != kind:
                raise ValueError(
                    f"chunk: {bits.dtype} bits of shape {bits.shape} for {segment.count} elements of {dtype}"
                )


def _encode_classed(
    dtype: Dtype,
    segments: Sequence[Segment],
    old: Sequence[Bits],
    new: Sequence[Bits],
    cuts: bytes | None,
    last: LastChange | None,
) -> EncodedChunk:
    coder = _coder()
    replaced = None if last is None or dtype not in _PREDICTED else _replaced(last, segments)
    old, new = ([np.ascontiguousarray(bits) for bits in arrays] for arrays in (old, new))
    starts = [segment.start for segment in segments]
    used = fit_partition(old, new).cuts if cuts is None else cuts
    encoding = coder.encode(old, new, starts=starts, cuts=used, crowded=CROWDED, last=replaced)
    num_changed = sum(encoding.num_changed.tolist())
    # Plain lists from here on: most chunks have few segments, for which every call of NumPy costs more than it saves.
    found = encoding.found.tolist()
    wishes = [Wish.AUTO] * len(segments)
    crowded = [number for number, what in enumerate(found) if what == Found.CROWDED]
    for number in crowded:
        estimate = fit_partition([old[number]], [new[number]]).num_bits / 8
        wishes[number] = Wish.SKIP if dense_size(new[number]) < estimate else Wish.CLASSED
    has_body = Wish.CLASSED in wishes or Found.CLASSED in found
    if has_body and len(small := _small_unchanged(segments, found)) > MANY_SMALL:
        for number in small:
            wishes[number] = Wish.CLASSED
    rest = [number for number, wish in enumerate(wishes) if wish is not Wish.SKIP]
    if rest and (Wish.CLASSED in wishes or (crowded and cuts is None)):
        if cuts is None:
            used = fit_partition([old[number] for number in rest], [new[number] for number in rest]).cuts
        encoding = coder.encode(old, new, starts=starts, cuts=used, crowded=CROWDED, wishes=wishes, last=replaced)
        found = encoding.found.tolist()
    modes = [
        Mode.UNCHANGED if what == Found.UNCHANGED else Mode.CLASSED if what == Found.CLASSED else Mode.DENSE
        for what in found
    ]
    in_body = [
        count if mode is Mode.CLASSED else 0 for count, mode in zip(encoding.num_changed.tolist(), modes, strict=True)
    ]
    patches = _split(segments, in_body, encoding)
    for segment, mode, before, after in zip(segments, modes, old, new, strict=True):
        if mode is Mode.DENSE:
            patches.append(_dense_patch(segment, before, after))
    return _seal(
        dtype,
        segments,
        modes,
        sorted(patches, key=_place),
        digests=[terms for terms, count in zip(encoding.digests.tolist(), in_body, strict=True) if count],
        changes=encoding.body,
        cuts=used if Mode.CLASSED in modes else None,
        predicted=is_predicted(encoding.body),
        num_changed=num_changed,
    )


def _replaced(last: LastChange, segments: Sequence[Segment]) -> LastBits | None:
    """Return what `last` replaced in the space that the segments make end to end; None if nothing."""
    places, before, origin = [], [], 0
    for segment in segments:
        found = last.within(segment.tensor, segment.start, segment.count)
        if found is not None:
            places.append(found[0] + origin if origin else found[0])
            before.append(found[1])
        origin += segment.count
    if not places:
        return None
    return (places[0], before[0]) if len(places) == 1 else (np.concatenate(places), np.concatenate(before))


def _small_unchanged(segments: Sequence[Segment], found: Sequence[int]) -> list[int]:
    return [
        number
        for number, (segment, what) in enumerate(zip(segments, found, strict=True))
        if what == Found.UNCHANGED and segment.count < SMALL_ELEMENTS
    ]


def _coder() -> Kernel | Reference:
    native = kernel()
    return Reference() if native is None else native


def _split(
    segments: Sequence[Segment], num_changed: Sequence[int], coded: NativeEncoding | NativeDecoding
) -> list[TensorPatch]:
    """Return the patch of each segment that changed out of those of all of them, one after the other."""
    return [
        _coded_patch(segment, coded.indices[a:b], coded.old[a:b], coded.new[a:b])
        for segment, (a, b) in zip(segments, pairwise(accumulate(num_changed, initial=0)), strict=True)
        if b > a
    ]


def _place(patch: TensorPatch) -> tuple[int, int]:
    return patch.tensor, patch.start


def _dense_patch(segment: Segment, undo: Bits | None, values: Bits) -> TensorPatch:
    return TensorPatch(
        tensor=segment.tensor, start=segment.start, count=segment.count, indices=None, values=values, undo=undo
    )


def _coded_patch(segment: Segment, indices: Indices, undo: Bits, values: Bits) -> TensorPatch:
    return TensorPatch(
        tensor=segment.tensor,
        start=segment.start,
        count=segment.count,
        indices=indices,
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
    digests: Sequence[Sequence[int]] | None = None,
    changes: bytes = b"",
    cuts: bytes | None = None,
    predicted: bool = False,
) -> EncodedChunk:
    whole = [patch for patch in patches if patch.indices is None]
    dense: Sequence[Piece] = []
    dense_digests: Sequence[TensorDigest] = []
    if whole:
        dense, dense_digests = encode_dense([patch.values for patch in whole], starts=[patch.start for patch in whole])
    digest_changes = _digest_changes(patches, digests, dense_digests)
    payload = seal(
        dtype=dtype,
        is_anchor=any(patch.undo is None for patch in patches),
        segments=segments,
        modes=modes,
        num_changed=sum(patch.num_changed for patch in patches if patch.indices is not None),
        changes=changes,
        dense=dense,
        check=sum(digest_changes.values(), ZERO),
    )
    return EncodedChunk(
        payload=payload,
        patches=tuple(patches),
        num_changed=num_changed,
        digest_changes=digest_changes,
        cuts=cuts,
        predicted=predicted,
    )


def _digest_changes(
    patches: Sequence[TensorPatch], digests: Sequence[Sequence[int]] | None, dense_digests: Sequence[TensorDigest]
) -> dict[int, TensorDigest]:
    """Return what the patches add to the digests of tensors.

    `digests` has it of each coded patch where it is known, `dense_digests` has that of the new bits of each dense one.
    """
    changes: dict[int, TensorDigest] = {}
    known = None if digests is None else iter(digests)
    whole = iter(dense_digests)
    for patch in patches:
        if patch.indices is None:
            change = next(whole)
            if patch.undo is not None:
                change -= digest_bits(patch.undo, start=patch.start)
        elif known is not None:
            change = TensorDigest(*next(known))
        else:
            assert patch.undo is not None
            change = digest_at(patch.indices, patch.values) - digest_at(patch.indices, patch.undo)
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


def _parse_dense(chunk: ParsedChunk) -> list[tuple[Bits, TensorDigest]]:
    """Return the new bits of each dense segment, and their digest."""
    segments = [segment for segment, mode in zip(chunk.segments, chunk.modes, strict=True) if mode is Mode.DENSE]
    if segments:
        return decode_dense(
            chunk.dense,
            chunk.dtype,
            counts=[segment.count for segment in segments],
            starts=[segment.start for segment in segments],
        )
    if len(chunk.dense):
        raise DamagedError(f"chunk: {len(chunk.dense)} bytes and no dense segment: fetch it again")
    return []


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


def _decode_changes(
    chunk: ParsedChunk, bases: Mapping[int, Bits], last: LastChange | None
) -> tuple[list[TensorPatch], Sequence[Sequence[int]] | None]:
    """Return the patches of classed segments, and their digests."""
    numbers = [number for number, mode in enumerate(chunk.modes) if mode is Mode.CLASSED]
    if not numbers:
        if len(chunk.changes) or chunk.num_changed:
            raise DamagedError(f"chunk: {len(chunk.changes)} bytes of changes and no segment for them: fetch it again")
        return [], None
    segments = [chunk.segments[number] for number in numbers]
    old = [bases[number] for number in numbers]
    replaced = None
    if is_predicted(chunk.changes):
        if chunk.dtype not in _PREDICTED:
            raise UnsupportedFormatError(f"chunk: predictions of {chunk.dtype} are unknown: upgrade the older side")
        if last is not None:
            replaced = _replaced(last, segments) or (np.empty(0, np.int64), np.empty(0, chunk.dtype.bits))
    decoding = _coder().decode(
        chunk.changes,
        num_changed=chunk.num_changed,
        old=[np.ascontiguousarray(bits) for bits in old],
        starts=[segment.start for segment in segments],
        last=replaced,
    )
    num_changed = decoding.num_changed.tolist()
    digests = [terms for terms, count in zip(decoding.digests.tolist(), num_changed, strict=True) if count]
    return _split(segments, num_changed, decoding), digests
