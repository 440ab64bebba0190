"""Round trips over every dtype, automatic modes, sizes, and what hostile or damaged bytes may not do."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync import decode_tensor, encode_tensor
from sparsewire.sync.codec import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    EncodedChunk,
    Mode,
    Profile,
    Segment,
    chunk_length,
    decode_chunk,
    encode_chunk,
    parse_chunk,
    plan_segments,
)
from sparsewire.sync.codec.container import HEADER
from sparsewire.sync.delta import apply_patch
from sparsewire.sync.digest import ZERO, digest_bits
from sparsewire.sync.errors import (
    DamagedError,
    SchemaMismatchError,
    SparsewireError,
    UnsupportedFormatError,
    WrongBaseError,
)
from sparsewire.sync.types import Bits, Dtype, Schema, TensorSpec, bits_of

Array = npt.NDArray[Any]


def random_bits(rng: np.random.Generator, dtype: Dtype, size: int) -> Bits:
    if dtype is Dtype.BOOL:
        return rng.integers(0, 2, size).astype(np.uint8)
    return rng.integers(0, 256, size * dtype.width).astype(np.uint8).view(dtype.bits)


def real_weights(rng: np.random.Generator, size: int, *, step: float) -> tuple[Bits, Bits]:
    """Two versions of bfloat16 weights whose float32 masters differ by normal steps."""
    master = rng.standard_normal(size).astype(np.float32) * np.float32(0.02)
    moved = master + rng.standard_normal(size).astype(np.float32) * np.float32(step)
    return bits_of(master.astype(ml_dtypes.bfloat16)), bits_of(moved.astype(ml_dtypes.bfloat16))


def assert_round_trip(old: Array, new: Array) -> dict[Profile, bytes]:
    payloads = {profile: encode_tensor(old, new, profile=profile) for profile in Profile}
    for profile, payload in payloads.items():
        patch = decode_tensor(old, payload)
        before, after = bits_of(old), bits_of(new)
        assert patch.indices.dtype == np.int64
        assert patch.indices.tolist() == np.flatnonzero(before != after).tolist()
        assert patch.values.dtype == new.dtype
        assert bits_of(patch.values).tolist() == after[patch.indices].tolist()
        assert encode_tensor(old, new, profile=profile) == payload
    return payloads


@settings(deadline=None)
@given(
    st.sampled_from(list(Dtype)),
    st.integers(0, 2**32),
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (7, 11), (1000,), (3, 5, 7)]),
    st.sampled_from(["none", "one", "few", "half", "all", "ulp"]),
)
def test_any_change_of_any_dtype_comes_back_bit_for_bit(
    dtype: Dtype, seed: int, shape: tuple[int, ...], what: str
) -> None:
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    old = random_bits(rng, dtype, size)
    new = random_bits(rng, dtype, size)
    share = {"none": 0.0, "one": 0.0, "few": 0.03, "half": 0.5, "all": 1.0, "ulp": 0.2}[what]
    keep = rng.random(size) >= share
    if what == "one" and size:
        keep[rng.integers(size)] = False
    if what == "ulp" and dtype is not Dtype.BOOL:
        new = old + rng.choice(np.array([1, -1]), size).astype(f"i{dtype.width}").view(dtype.bits)
    new[keep] = old[keep]
    assert_round_trip(old.view(dtype.numpy).reshape(shape), new.view(dtype.numpy).reshape(shape))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_signed_zeros_and_nan_payloads_are_changes(dtype: Any) -> None:
    old = np.array([0.0, -0.0, np.nan, np.nan, np.inf, 1.0], dtype)
    new = np.array([-0.0, 0.0, np.nan, np.nan, -np.inf, 1.0], dtype)
    bits_of(new)[2] ^= 1
    for payload in assert_round_trip(old, new).values():
        assert decode_tensor(old, payload).indices.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_extreme_steps_wrap_around(width: int) -> None:
    dtype = np.dtype(f"u{width}")
    top = int(np.iinfo(dtype).max)
    edges = [0, 1, top, top - 1, top // 2, top // 2 + 1]
    old = np.array([a for a in edges for _ in edges], dtype)
    new = np.array([b for _ in edges for b in edges], dtype)
    assert_round_trip(old, new)
    spread = np.zeros(1000, dtype)
    after = spread.copy()
    after[::50] = np.resize(new, 20)
    assert_round_trip(spread, after)


def test_strided_byte_swapped_and_read_only_arrays_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(3)
    old, new = (bits.view(ml_dtypes.bfloat16).reshape(60, 50) for bits in real_weights(rng, 3000, step=1e-5))
    old.flags.writeable = False
    straight = encode_tensor(old.copy(order="C"), new)
    assert encode_tensor(np.asfortranarray(old), np.asfortranarray(new)) == straight
    assert (
        decode_tensor(np.asfortranarray(old), straight).indices.tolist()
        == np.flatnonzero(old.view(np.uint16) != new.view(np.uint16)).tolist()
    )
    big_old, big_new = (array.astype(np.float32).astype(">f4") for array in (old, new))
    patch = decode_tensor(big_old, encode_tensor(big_old, big_new))
    assert patch.values.tolist() == big_new.reshape(-1)[patch.indices].tolist()
    assert_round_trip(old[::2, ::3], new[::2, ::3])


def test_shapes_and_dtypes_must_agree() -> None:
    array = np.zeros((2, 3), np.uint16)
    with pytest.raises(SchemaMismatchError, match="equal shape and dtype"):
        encode_tensor(array, array.reshape(3, 2))
    with pytest.raises(SchemaMismatchError, match="equal shape and dtype"):
        encode_tensor(array, array.view(np.int16))
    with pytest.raises(SchemaMismatchError, match="cannot be published"):
        encode_tensor(array.astype(np.complex64), array.astype(np.complex64))


@pytest.mark.parametrize("profile", Profile)
def test_wrong_base_is_refused(profile: Profile) -> None:
    old, new = real_weights(np.random.default_rng(4), 20_000, step=1e-6)
    payload = encode_tensor(old, new, profile=profile)
    at = int(np.flatnonzero(old != new)[17])
    wrong = old.copy()
    wrong[at] ^= 1
    wide = old.astype(np.uint32)
    for base in (wrong, new, old[:-1], np.append(old, old[:1]), old.view(np.int16), wide, old[:0]):
        with pytest.raises(WrongBaseError):
            decode_tensor(base, payload)
    unchanged = encode_tensor(old, old)
    for base in (old[:-1], np.append(old, old[:1]), old.view(np.int16), wide, old[:0]):
        with pytest.raises(WrongBaseError):
            decode_tensor(base, unchanged)
    with pytest.raises(WrongBaseError):
        decode_tensor(old, encode_tensor(old[:0], old[:0]))


def test_tensor_of_many_chunks_refuses_missing_swapped_and_repeated_ones() -> None:
    old = np.zeros(3 * CHUNK_BYTES, np.uint8)
    new = old.copy()
    new[:: CHUNK_BYTES // 2 + 1] = 7
    payload = encode_tensor(old, new)
    parts = []
    rest = memoryview(payload)
    while rest:
        parts.append(rest[: chunk_length(rest)])
        rest = rest[len(parts[-1]) :]
    assert len(parts) == 3
    assert_round_trip(old, new)
    a, b, c = parts
    for order in ([a, c, b], [a, c], [b, c], [a, a, b, c], [a, b, c, c]):
        with pytest.raises(DamagedError):
            decode_tensor(old, b"".join(order))
    for order in ([a], [a, b]):
        with pytest.raises(WrongBaseError, match="missing at its end"):
            decode_tensor(old, b"".join(order))
    with pytest.raises(DamagedError):
        decode_tensor(old, b"")


@pytest.mark.parametrize(
    ("make_new", "mode"),
    [
        (lambda old, rng: old, Mode.UNCHANGED),
        (lambda old, rng: np.where(rng.random(len(old)) < 0.01, old + np.uint16(1), old), None),
        (lambda old, rng: np.where(rng.random(len(old)) < 0.5, old + np.uint16(1), old), None),
        (lambda old, rng: old + np.uint16(1), None),
        (lambda old, rng: rng.integers(0, 1 << 16, len(old)).astype(np.uint16), Mode.DENSE),
        (lambda old, rng: np.zeros_like(old), Mode.DENSE),
    ],
)
def test_mode_is_chosen_by_size(make_new: Callable[[Bits, np.random.Generator], Bits], mode: Mode | None) -> None:
    rng = np.random.default_rng(5)
    old, _ = real_weights(rng, 1 << 16, step=0.0)
    new = make_new(old, rng)
    for payload in assert_round_trip(old.view(ml_dtypes.bfloat16), new.view(ml_dtypes.bfloat16)).values():
        assert parse_chunk(payload).modes == (Mode.CLASSED if mode is None else mode,)
        assert len(payload) <= old.nbytes + 100


@pytest.mark.parametrize(("profile", "limit"), [(Profile.CLASSED, 0.9), (Profile.BASE_FREE, 1.5)])
def test_a_hundredth_of_bfloat16_weights_costs_few_bytes_a_change(profile: Profile, limit: float) -> None:
    old, new = real_weights(np.random.default_rng(6), 4 << 20, step=2.5e-7)
    changed = int((old != new).sum())
    assert 0.008 < changed / len(old) < 0.015
    assert len(encode_tensor(old, new, profile=profile)) <= limit * changed


def test_anchor_of_bfloat16_weights_needs_at_most_70_percent() -> None:
    old, _ = real_weights(np.random.default_rng(7), 1 << 20, step=0.0)
    anchor = encode_chunk(Dtype.BF16, [Segment(0, 0, len(old))], None, [old])
    assert len(anchor.payload) <= 0.7 * old.nbytes


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([Dtype.BF16, Dtype.F32, Dtype.U8])), max_size=12),
    st.sampled_from([8, 64, 1000]),
)
def test_plans_cover_every_extent_once_within_the_size_of_a_chunk(
    tensors: list[tuple[int, Dtype]], chunk_bytes: int
) -> None:
    extents = [(number, 5, count, dtype) for number, (count, dtype) in enumerate(tensors)]
    plans = list(plan_segments(extents, chunk_bytes=chunk_bytes))
    covered = {
        (segment.tensor, at) for plan in plans for segment in plan.segments for at in range(segment.start, segment.stop)
    }
    assert covered == {(n, at) for n, start, count, _ in extents for at in range(start, start + count)}
    assert sum(segment.count for plan in plans for segment in plan.segments) == len(covered)
    for plan in plans:
        assert 0 < plan.num_bytes <= chunk_bytes
        assert all(tensors[segment.tensor][1] is plan.dtype for segment in plan.segments)
        assert all((a.tensor, a.stop) <= (b.tensor, b.start) or a.tensor < b.tensor for a, b in pairwise(plan.segments))
    for dtype in {dtype for _, dtype in tensors}:
        assert all(plan.num_bytes == chunk_bytes for plan in plans[:-3] if plan.dtype is dtype)


def test_plan_size_beyond_what_decoders_take_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_bytes"):
        next(plan_segments([], chunk_bytes=MAX_CHUNK_BYTES + 1))


def mixed_chunk(profile: Profile) -> tuple[list[Segment], list[Bits], list[Bits], EncodedChunk]:
    """Unchanged, classed and dense segments, one of them the middle of a tensor."""
    rng = np.random.default_rng(8)
    segments = [Segment(0, 0, 50), Segment(1, 100, 400), Segment(1, 500, 60), Segment(4, 0, 300), Segment(9, 7, 1)]
    old = [real_weights(rng, segment.count, step=0.0)[0] for segment in segments]
    new = [bits.copy() for bits in old]
    new[1][[3, 77, 399]] += np.uint16(1)
    new[2][:] = rng.integers(0, 1 << 16, 60)
    new[3][[0, 5, 6, 7, 100]] -= np.array([1, 1, 2, 300, 1], np.uint16)
    new[4][0] ^= 0x8000
    return segments, old, new, encode_chunk(Dtype.BF16, segments, old, new, profile=profile)


@pytest.mark.parametrize("profile", Profile)
def test_chunk_of_many_tensors_gives_patches_with_undo_and_digest_changes(profile: Profile) -> None:
    segments, old, new, encoded = mixed_chunk(profile)
    held = dict(zip(segments, old, strict=True))
    asked: list[Segment] = []

    def base(segment: Segment) -> Bits:
        asked.append(segment)
        return held[segment]

    decoded = decode_chunk(encoded.payload, schema=None, base=base)
    assert decoded.segments == tuple(segments)
    assert parse_chunk(encoded.payload).modes[:4] == (Mode.UNCHANGED, Mode.CLASSED, Mode.DENSE, Mode.CLASSED)
    assert asked == segments[1:]
    assert encoded.num_changed == 3 + int((old[2] != new[2]).sum()) + 5 + 1
    assert decoded.digest_changes == encoded.digest_changes
    for tensor in (1, 4, 9):
        ranges = [number for number, segment in enumerate(segments) if segment.tensor == tensor]
        before = sum((digest_bits(old[n], start=segments[n].start) for n in ranges), ZERO)
        after = sum((digest_bits(new[n], start=segments[n].start) for n in ranges), ZERO)
        assert before + decoded.digest_changes[tensor] == after
    for ours, theirs in zip(encoded.patches, decoded.patches, strict=True):
        assert (ours.tensor, ours.start, ours.count) == (theirs.tensor, theirs.start, theirs.count)
        assert (ours.indices is None) == (theirs.indices is None)
        if ours.indices is not None and theirs.indices is not None:
            assert ours.indices.tolist() == theirs.indices.tolist()
        assert ours.undo is not None
        assert theirs.undo is not None
        assert ours.values.tolist() == theirs.values.tolist()
        assert ours.undo.tolist() == theirs.undo.tolist()
    live = np.zeros(560, np.uint16)
    live[100:560] = np.concatenate(old[1:3])
    for patch in decoded.patches[:2]:
        apply_patch(live, patch)
    assert live[100:560].tolist() == np.concatenate(new[1:3]).tolist()


def test_chunk_without_change_says_so() -> None:
    bits = np.arange(10, dtype=np.uint16)
    encoded = encode_chunk(Dtype.U16, [Segment(3, 0, 10)], [bits], [bits])
    assert encoded.num_changed == 0
    assert encoded.patches == ()
    assert encoded.digest_changes == {}


def test_anchor_needs_no_base_and_carries_whole_digests() -> None:
    bits = [np.arange(10, dtype=np.uint16), np.empty(0, np.uint16)]
    segments = [Segment(3, 20, 10), Segment(5, 0, 0)]
    encoded = encode_chunk(Dtype.U16, segments, None, bits)
    decoded = decode_chunk(encoded.payload, schema=None, base=None)
    assert encoded.num_changed == 10
    assert decoded.digest_changes == {3: digest_bits(bits[0], start=20), 5: ZERO}
    assert [patch.values.tolist() for patch in decoded.patches] == [list(range(10)), []]
    assert all(patch.undo is None and patch.indices is None for patch in decoded.patches)


def test_delta_without_a_base_is_refused() -> None:
    with pytest.raises(WrongBaseError, match="no base"):
        decode_chunk(mixed_chunk(Profile.CLASSED)[3].payload, schema=None, base=None)


def test_chunk_must_fit_the_schema() -> None:
    segments, old, _, encoded = mixed_chunk(Profile.CLASSED)
    held = dict(zip(segments, old, strict=True))

    def schema(*, count: int = 10, size: int = 560, dtype: Dtype = Dtype.BF16) -> Schema:
        return Schema.of([TensorSpec(name=f"t{n}", dtype=dtype, shape=(size,)) for n in range(count)])

    decode_chunk(encoded.payload, schema=schema(), base=held.__getitem__)
    for foreign in (schema(count=9), schema(size=559), schema(dtype=Dtype.F16)):
        with pytest.raises(DamagedError, match="foreign or damaged"):
            decode_chunk(encoded.payload, schema=foreign, base=held.__getitem__)


def test_decoding_without_a_scan_reads_nothing_of_an_unchanged_element() -> None:
    segments, old, _, encoded = mixed_chunk(Profile.BASE_FREE)
    touched = {(patch.tensor, patch.start): patch.indices for patch in encoded.patches}
    held = {}
    for segment, bits in zip(segments, old, strict=True):
        scrambled = bits + np.uint16(12345)
        if (segment.tensor, segment.start) in touched:
            indices = touched[segment.tensor, segment.start]
            at = slice(None) if indices is None else indices - segment.start
            scrambled[at] = bits[at]
        held[segment] = scrambled
    decoded = decode_chunk(encoded.payload, schema=None, base=held.__getitem__)
    assert decoded.digest_changes == encoded.digest_changes


@pytest.mark.parametrize(
    ("segments", "sizes", "message"),
    [
        ([Segment(1, 0, 4), Segment(0, 0, 4)], [4, 4], "overlap or descend"),
        ([Segment(0, 0, 4), Segment(0, 3, 4)], [4, 4], "overlap or descend"),
        ([Segment(0, 0, 4)], [5], "of shape"),
        ([Segment(0, 0, 4)], [4, 4], "one for each"),
        ([Segment(0, 0, MAX_CHUNK_BYTES)], [1], "plan smaller chunks"),
    ],
)
def test_input_that_no_decoder_would_take_is_not_encoded(
    segments: list[Segment], sizes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_chunk(Dtype.U16, segments, None, [np.zeros(size, np.uint16) for size in sizes])


def sample_chunks() -> dict[str, tuple[bytes, Callable[[Segment], Bits] | None]]:
    segments, old, _, mixed = mixed_chunk(Profile.CLASSED)
    _, _, _, base_free = mixed_chunk(Profile.BASE_FREE)
    weights = real_weights(np.random.default_rng(9), 200, step=0.0)[0]
    anchor = encode_chunk(Dtype.BF16, [Segment(2, 0, 200)], None, [weights])
    held = dict(zip(segments, old, strict=True))

    def base(segment: Segment) -> Bits:
        # A forged table may ask for any range within bounds.
        return held.get(segment, np.zeros(segment.count, np.uint16))

    return {
        "classed": (mixed.payload, base),
        "base-free": (base_free.payload, base),
        "anchor": (anchor.payload, None),
    }


KINDS = ["classed", "base-free", "anchor"]
REFUSALS = (DamagedError, UnsupportedFormatError, WrongBaseError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_every_extension_and_every_flipped_bit_is_refused(kind: str) -> None:
    payload, base = sample_chunks()[kind]
    decode_chunk(payload, schema=None, base=base)
    for size in range(len(payload)):
        with pytest.raises(DamagedError):
            decode_chunk(payload[:size], schema=None, base=base)
    for extra in (b"\0", b"\xff", payload):
        with pytest.raises(DamagedError):
            decode_chunk(payload + extra, schema=None, base=base)
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError if not 32 <= bit < 48 else UnsupportedFormatError):
            decode_chunk(bytes(damaged), schema=None, base=base)


def reseal(payload: bytearray, *, fix_length: bool = True) -> bytes:
    """Give altered bytes a length and a checksum that agree, as an attacker would."""
    if len(payload) < HEADER.size:
        return bytes(payload)
    if fix_length:
        struct.pack_into("<I", payload, 8, len(payload))
    crc = zlib.crc32(payload[HEADER.size :], zlib.crc32(payload[: HEADER.size - 4]))
    struct.pack_into("<I", payload, HEADER.size - 4, crc)
    return bytes(payload)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_under_a_forged_checksum_is_refused_or_harmless(kind: str) -> None:
    payload, base = sample_chunks()[kind]
    honest = decode_chunk(payload, schema=None, base=base)
    for bit in range(8 * len(payload)):
        forged = bytearray(payload)
        forged[bit // 8] ^= 1 << bit % 8
        try:
            decoded = decode_chunk(reseal(forged, fix_length=False), schema=None, base=base)
        except REFUSALS:
            continue
        # What passes the check writes the same bits, unless it names other tensors, which the manifest's hash covers.
        assert [p.values.tolist() for p in decoded.patches] == [p.values.tolist() for p in honest.patches]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_forged_chunks_raise_nothing_but_our_errors(data: st.DataObject) -> None:
    payload, base = sample_chunks()[data.draw(st.sampled_from(KINDS))]
    forged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(6, len(forged) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                forged[at : at + 4] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del forged[at : at + data.draw(st.integers(1, 8))]
            case _:
                forged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        if len(forged) <= HEADER.size:
            return
    try:
        decode_chunk(reseal(forged), schema=None, base=base)
    except REFUSALS:
        return


@given(st.binary(max_size=200))
def test_noise_is_no_payload(noise: bytes) -> None:
    with pytest.raises(SparsewireError):
        decode_tensor(np.zeros(4, np.uint16), noise)


def forge(profile: Profile, **fields: int) -> bytes:
    """A chunk of one changed segment with chosen header numbers and table."""
    names = ["dtype", "flags", "total", "segments", "table_bytes", "num_changed", "changes_bytes"]
    segments, old, new, _ = mixed_chunk(profile)
    payload = bytearray(encode_chunk(Dtype.BF16, segments[1:2], old[1:2], new[1:2], profile=profile).payload)
    values = dict(zip(names, struct.unpack_from("<BBIIIII", payload, 6), strict=True)) | fields
    struct.pack_into("<BBIIIII", payload, 6, *(values[name] for name in names))
    return reseal(payload, fix_length="total" not in fields)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dtype": 0}, UnsupportedFormatError),
        ({"dtype": 99}, UnsupportedFormatError),
        ({"flags": 4}, UnsupportedFormatError),
        ({"flags": 2}, DamagedError),
        ({"flags": 1}, DamagedError),
        ({"total": 0xFFFFFFFF}, DamagedError),
        ({"total": 10}, DamagedError),
        ({"segments": 0xFFFFFFFF}, DamagedError),
        ({"segments": 2}, UnsupportedFormatError),
        ({"segments": 0}, DamagedError),
        ({"table_bytes": 0xFFFFFFFF}, DamagedError),
        ({"num_changed": 0xFFFFFFFF}, DamagedError),
        ({"num_changed": 401}, DamagedError),
        ({"num_changed": 4}, DamagedError),
        ({"num_changed": 0}, DamagedError),
        ({"changes_bytes": 0xFFFFFFFF}, DamagedError),
        ({"changes_bytes": 1}, DamagedError),
    ],
)
@pytest.mark.parametrize("profile", Profile)
def test_header_numbers_are_bounded_before_use(
    profile: Profile, fields: dict[str, int], error: type[SparsewireError]
) -> None:
    base = mixed_chunk(profile)[1][1]
    with pytest.raises(error):
        decode_chunk(forge(profile, **fields), schema=None, base=lambda segment: base)


def test_unknown_mode_and_format_ask_for_an_upgrade() -> None:
    payload = bytearray(mixed_chunk(Profile.CLASSED)[3].payload)
    payload[HEADER.size] = 1
    with pytest.raises(UnsupportedFormatError, match=r"modes \[1\].*upgrade"):
        parse_chunk(reseal(payload))
    payload[4:6] = b"\x02\x00"
    with pytest.raises(UnsupportedFormatError, match=r"format number 2.*upgrade"):
        parse_chunk(reseal(payload))


def test_decompression_bomb_allocates_nothing() -> None:
    size = 1 << 28
    bomb = zstandard.ZstdCompressor().compress(bytes(size))
    body = bytearray()
    value = len(bomb) << 1 | 1
    while value > 0x7F:
        body.append(value & 0x7F | 0x80)
        value >>= 7
    body.append(value)
    body += bomb
    table = bytes([Mode.DENSE, 0, 0, 100])
    header = HEADER.pack(b"SWCH", 1, 2, 1, 0, 1, len(table), 0, 0, bytes(16), 0)
    payload = reseal(bytearray(header + table + body))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=f"states {size} bytes instead of 100"):
            decode_chunk(payload, schema=None, base=None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_sizes_around_a_chunk_come_back(size: int) -> None:
    old = np.zeros(size, np.uint16)
    new = old.copy()
    new[[0, size // 2, size - 1]] = [1, 0x8000, 0xFFFF]
    patch = decode_tensor(old, encode_tensor(old, new))
    assert patch.indices.tolist() == [0, size // 2, size - 1]
    assert patch.values.tolist() == [1, 0x8000, 0xFFFF]


@pytest.mark.slow
def test_tensor_beyond_2_31_elements_is_coded_in_memory_bounded_by_the_chunk(tmp_path: Path) -> None:
    size = (1 << 31) + 8
    arrays = []
    for name in ("old", "new"):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size)
        arrays.append(np.memmap(path, np.uint8, "r+", shape=(size,)))
    old, new = arrays
    changed = [0, CHUNK_BYTES - 1, CHUNK_BYTES, (1 << 31) - 1, 1 << 31, size - 1]
    new[changed] = np.arange(1, 7, dtype=np.uint8)
    tracemalloc.start()
    try:
        payload = encode_tensor(old, new)
        patch = decode_tensor(old, payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert patch.indices.tolist() == changed
    assert patch.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert peak < 8 * CHUNK_BYTES
