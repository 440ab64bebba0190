from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.sync.codec.chunk import EncodedChunk, decode_chunk, encode_chunk
from sparsewire.sync.codec.classed import encode_classed, is_predicted, parse_classed
from sparsewire.sync.codec.container import Mode, seal
from sparsewire.sync.codec.plan import Segment
from sparsewire.sync.codec.predict import GAINS, choose_gain, find_common, predict
from sparsewire.sync.codec.streams import write_varint
from sparsewire.sync.delta import LastChange, TensorPatch, changed_positions
from sparsewire.sync.digest import ZERO
from sparsewire.sync.errors import DamagedError, LastChangeMissingError, UnsupportedFormatError, WrongBaseError
from sparsewire.sync.types import Bits, Dtype

SPECIAL = [0, 0x8000, 1, 0x807F, 0x0080, 0x0F80, 0x1000, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80]


def rounded(value: float) -> float:
    """Round to single precision, which doubles do exactly for one operation; too large gives infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def predict_plainly(old: int, before: int, gain: int) -> int:
    """Follow docs/format.md one element at a time, in doubles that are rounded after every operation."""
    if not all(32 <= (bits >> 7 & 0xFF) <= 254 for bits in (old, before)):
        return old
    value, earlier = (struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in (old, before))
    moved = rounded(value + rounded(gain / 128 * rounded(value - earlier)))
    bits = int(struct.unpack("<I", struct.pack("<f", moved))[0])
    half, odd = bits & 0xFFFF, bits >> 16 & 1
    nearest = (bits >> 16) + (half > 0x8000 or (half == 0x8000 and odd == 1))
    return old if nearest & 0x7F80 == 0x7F80 else nearest


@given(
    st.lists(st.tuples(*[st.one_of(st.integers(0, 0xFFFF), st.sampled_from(SPECIAL))] * 2), min_size=1),
    st.integers(1, 255),
)
def test_predictions_are_those_of_the_format(pairs: list[tuple[int, int]], gain: int) -> None:
    old, before = (np.array(column, np.uint16) for column in zip(*pairs, strict=True))
    expected = [predict_plainly(*pair, gain) for pair in pairs]
    assert predict(old, before, gain).tolist() == expected


def test_tiny_infinite_and_undefined_values_predict_themselves() -> None:
    odd = np.array([bits for bits in SPECIAL if not 32 <= (bits >> 7 & 0xFF) <= 254], np.uint16)
    one = np.full_like(odd, 0x3F80)
    assert predict(odd, one, 112).tolist() == odd.tolist()
    assert predict(one, odd, 112).tolist() == one.tolist()
    largest, lowest = np.array([0x7F7F], np.uint16), np.array([0xFF7F], np.uint16)
    assert predict(largest, lowest, 112).tolist() == [0x7F7F]


def test_gain_follows_how_steps_go_on() -> None:
    draws = np.random.default_rng(1)
    before = np.float32(1e-3) * draws.standard_normal(5000).astype(np.float32)
    step = np.float32(1e-4) * draws.standard_normal(5000).astype(np.float32)
    versions = {}
    for gain in (64, 96, 112, 128, 144):
        parts = before, before + step, before + step + np.float32(gain / 128) * step
        earlier, old, new = ((part.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for part in parts)
        versions[gain] = choose_gain(old, earlier, new)
    assert all(abs(found - gain) <= 8 for gain, found in versions.items())
    assert all(a < b for a, b in pairwise(versions.values()))
    assert choose_gain(old, old + np.uint16(1), new) == GAINS[0]


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_common_places_are_found(ours: set[int], theirs: set[int]) -> None:
    left, right = (np.array(sorted(part), np.int64) for part in (ours, theirs))
    in_left, in_right = find_common(left, right)
    assert left[in_left].tolist() == right[in_right].tolist() == sorted(ours & theirs)


def three_versions(seed: int, count: int) -> tuple[Bits, Bits, Bits]:
    """Return bf16 weights before, after one step, and after another that goes on for the most part in the same way."""
    draws = np.random.default_rng(seed)
    first = draws.normal(0, 0.02, count)
    step = draws.normal(0, 2e-5, count)
    second = first + step
    third = second + 0.9 * step + draws.normal(0, 4e-6, count)
    versions = [np.asarray(part, np.float32).view(np.uint32) >> np.uint32(16) for part in (first, second, third)]
    before, old, new = (part.astype(np.uint16) for part in versions)
    return before, old, new


def patch_of(before: Bits, after: Bits, tensor: int = 0, start: int = 0) -> TensorPatch:
    at = changed_positions(before, after)
    return TensorPatch(
        tensor=tensor, start=start, count=len(before), indices=at + start, values=after[at], undo=before[at]
    )


def encode(before: Bits, old: Bits, new: Bits) -> EncodedChunk:
    last = LastChange.of([patch_of(before, old)])
    return encode_chunk(Dtype.BF16, [Segment(0, 0, len(old))], [old], [new], last=last)


def test_predicted_chunk_is_smaller_and_comes_back() -> None:
    before, old, new = three_versions(2, 40_000)
    predicted = encode(before, old, new)
    plain = encode_chunk(Dtype.BF16, [Segment(0, 0, len(old))], [old], [new])
    assert predicted.predicted
    assert not plain.predicted
    assert len(predicted.payload) < 0.93 * len(plain.payload)
    last = LastChange.of([patch_of(before, old)])
    (patch,) = decode_chunk(predicted.payload, schema=None, base=lambda _: old, last=last).patches
    assert patch.indices is not None
    assert np.array_equal(patch.indices, np.flatnonzero(old != new))
    assert np.array_equal(patch.values, new[patch.indices])
    # Those who hold the change before can decode what does without it.
    assert decode_chunk(plain.payload, schema=None, base=lambda _: old, last=last).patches[0].num_changed


def test_last_change_may_come_in_any_form_and_in_pieces() -> None:
    before, old, new = three_versions(3, 30_000)
    segments = [Segment(1, 5, 9_000), Segment(1, 9_500, 1), Segment(4, 0, 20_000)]
    bounds = [slice(0, 9_000), slice(9_000, 9_001), slice(9_001, 29_001)]
    held = dict(zip(segments, (old[part] for part in bounds), strict=True))
    dense = TensorPatch(
        tensor=4, start=0, count=20_000, indices=None, values=old[bounds[2]], undo=before[bounds[2]].copy()
    )
    sparse = [
        patch_of(before[bounds[0]], old[bounds[0]], tensor=1, start=5),
        patch_of(before[bounds[1]] ^ np.uint16(3), old[bounds[1]], tensor=1, start=9_500),
    ]
    one_by_one = LastChange.of([*reversed(sparse), dense])
    rest = patch_of(before[bounds[2]], old[bounds[2]], tensor=4)
    as_sparse = LastChange.of([rest, *sparse])
    payloads = [
        encode_chunk(
            Dtype.BF16, segments, list(held.values()), [new[part] for part in bounds], cuts=b"\x70\x78", last=last
        ).payload
        for last in (one_by_one, as_sparse)
    ]
    assert payloads[0] == payloads[1]
    patches = decode_chunk(payloads[0], schema=None, base=held.__getitem__, last=as_sparse).patches
    for patch in patches:
        part = bounds[[s.tensor for s in segments].index(patch.tensor) if patch.start != 9_500 else 1]
        assert patch.indices is not None
        assert np.array_equal(patch.values, new[part][patch.indices - patch.start])
    assert sum(patch.num_changed for patch in patches) == sum(int((new[p] != old[p]).sum()) for p in bounds)


def test_change_before_that_shares_nothing_gives_the_plain_chunk() -> None:
    _, old, new = three_versions(4, 5_000)
    same = np.flatnonzero(old == new)[:50]
    before = old.copy()
    before[same] ^= np.uint16(2)
    segments = [Segment(0, 0, len(old))]
    plain = encode_chunk(Dtype.BF16, segments, [old], [new])
    assert encode(before, old, new).payload == plain.payload
    assert encode_chunk(Dtype.BF16, segments, [old], [new], last=LastChange.of([])).payload == plain.payload


def test_predictions_that_mislead_are_left_out() -> None:
    _, old, new = three_versions(5, 20_000)
    before = np.random.default_rng(5).integers(0, 1 << 16, len(old)).astype(np.uint16)
    chunk = encode(before, old, new)
    assert not chunk.predicted


def test_other_dtypes_are_not_predicted() -> None:
    before, old, new = three_versions(6, 20_000)
    segments = [Segment(0, 0, len(old))]
    last = LastChange.of([patch_of(before, old)])
    for dtype in (Dtype.I16, Dtype.F16):
        assert not encode_chunk(dtype, segments, [old], [new], last=last).predicted
    wide = [bits.astype(np.uint32) << np.uint32(16) for bits in (before, old, new)]
    last = LastChange.of([patch_of(wide[0], wide[1])])
    assert not encode_chunk(Dtype.F32, segments, [wide[1]], [wide[2]], last=last).predicted


def test_predicted_chunk_without_the_change_before_asks_for_another_path() -> None:
    before, old, new = three_versions(7, 20_000)
    with pytest.raises(LastChangeMissingError, match="another path"):
        decode_chunk(encode(before, old, new).payload, schema=None, base=lambda _: old)


def test_another_change_before_is_refused_like_a_wrong_base() -> None:
    before, old, new = three_versions(8, 20_000)
    payload = encode(before, old, new).payload
    right = patch_of(before, old)
    assert right.indices is not None
    assert right.undo is not None
    shifted = right.undo.copy()
    far = np.argmax(np.abs((old[right.indices] - right.undo).astype(np.int16)))
    shifted[far] ^= np.uint16(0x8000)
    fewer = slice(0, len(right.values) // 2)
    wrong = [
        LastChange.of([]),
        LastChange.of([patch_of(np.where(old == new, before, old), old)]),
        LastChange.of([TensorPatch(tensor=0, start=0, count=len(old), indices=right.indices, values=right.values, undo=shifted)]),
        LastChange.of(
            [
                TensorPatch(
                    tensor=0,
                    start=0,
                    count=len(old),
                    indices=right.indices[fewer],
                    values=right.values[fewer],
                    undo=right.undo[fewer],
                )
            ]
        ),
        LastChange.of([patch_of(before, old, tensor=1)]),
        LastChange.of([patch_of(np.random.default_rng(8).permutation(before), old)]),
    ]  # fmt: skip
    for last in wrong:
        with pytest.raises(WrongBaseError):
            decode_chunk(payload, schema=None, base=lambda _: old, last=last)


def test_another_base_is_refused_whatever_the_change_before() -> None:
    before, old, new = three_versions(9, 20_000)
    payload = encode(before, old, new).payload
    other = old.copy()
    other[np.flatnonzero(old != new)[::7]] ^= np.uint16(1)
    with pytest.raises(WrongBaseError):
        decode_chunk(payload, schema=None, base=lambda _: other, last=LastChange.of([patch_of(before, other)]))


def test_every_truncation_and_every_flipped_bit_of_a_predicted_chunk_is_refused() -> None:
    before, old, new = three_versions(10, 1_200)
    chunk = encode(before, old, new)
    assert chunk.predicted
    last = LastChange.of([patch_of(before, old)])
    for size in range(len(chunk.payload)):
        with pytest.raises(DamagedError):
            decode_chunk(chunk.payload[:size], schema=None, base=lambda _: old, last=last)
    for bit in range(8 * len(chunk.payload)):
        flipped = bytearray(chunk.payload)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DamagedError, UnsupportedFormatError)):
            decode_chunk(bytes(flipped), schema=None, base=lambda _: old, last=last)


def test_bfloat16_that_comes_as_uint16_is_predicted_as_well() -> None:
    before, old, new = three_versions(12, 20_000)
    last = LastChange.of([patch_of(before, old)])
    ours = encode_chunk(Dtype.U16, [Segment(0, 0, len(old))], [old], [new], last=last)
    assert ours.predicted
    assert len(ours.payload) == len(encode(before, old, new).payload)
    (patch,) = decode_chunk(ours.payload, schema=None, base=lambda _: old, last=last).patches
    assert patch.values.tolist() == new[old != new].tolist()


def test_predictions_of_other_dtypes_ask_for_an_upgrade() -> None:
    before, old, new = three_versions(11, 2_000)
    at, last_at = changed_positions(old, new), changed_positions(before, old)
    body = encode_classed(old, at, new[at] - old[at], b"\x70\x78", (last_at, before[last_at]))
    assert is_predicted(body)
    for dtype in (Dtype.I16, Dtype.F16):
        payload = seal(
            dtype=dtype,
            is_anchor=False,
            segments=[Segment(0, 0, len(old))],
            modes=[Mode.CLASSED],
            num_changed=len(at),
            changes=body,
            dense=[],
            check=ZERO,
        )
        with pytest.raises(UnsupportedFormatError, match="upgrade"):
            decode_chunk(payload, schema=None, base=lambda _: old, last=LastChange.of([patch_of(before, old)]))
    for width in (1, 4, 8):
        with pytest.raises(UnsupportedFormatError, match="upgrade"):
            parse_classed(memoryview(body), num_changed=len(at), num_elements=len(old), width=width)


WIDE, PREDICTED = 0x40, 0xC0
TABLE_OF_ZERO = bytes([0, 0x03])
"""Token 0 alone: its presence bit and code 1."""
TABLE_OF_ONE = bytes([1, 0x06])
"""Token 1 alone."""


def forged(num_changed: int, form: int, *numbers: int, tables: bytes = b"", flags: int = 1, rest: bytes = b"") -> bytes:
    """Return the head of a body of one class, up to the gain."""
    out = bytearray([flags, 1])
    write_varint(out, num_changed)
    out.append(form)
    for number in numbers:
        write_varint(out, number)
    return bytes(out) + tables + rest


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (forged(2, WIDE, tables=TABLE_OF_ZERO, rest=b"\x70"), "do not fit"),
        (forged(2, PREDICTED, 2, tables=TABLE_OF_ZERO, flags=0, rest=b"\1\0\0"), "do not fit"),
        (forged(2, PREDICTED, 2, tables=TABLE_OF_ZERO, rest=b"\0\1\0\0"), "gain 0"),
        (forged(2, PREDICTED, 0, tables=TABLE_OF_ZERO, rest=b"\x70"), "0 predicted in 2"),
        (forged(2, PREDICTED, 3, tables=TABLE_OF_ZERO, rest=b"\x70"), "3 predicted in 2"),
        (forged(2, PREDICTED, 1 << 60, tables=TABLE_OF_ZERO, rest=b"\x70"), "predicted in 2"),
        (forged(2, PREDICTED, 2, tables=TABLE_OF_ONE, rest=b"\x70"), "token 1"),
        (forged(2, PREDICTED, 1, tables=TABLE_OF_ONE + TABLE_OF_ONE, rest=b"\x70"), "token 1"),
        (forged(2, PREDICTED, 2, tables=bytes([114]), rest=b"\x70"), "there are 114"),
        (forged(2, PREDICTED, 2, tables=TABLE_OF_ZERO), "expected"),
    ],
)
def test_forged_predictions_are_refused_before_anything_is_allocated(body: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        parse_classed(memoryview(body), num_changed=2, num_elements=100, width=2)
