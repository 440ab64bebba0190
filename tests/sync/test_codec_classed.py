"""The classed body: every code against a plain reading of docs/format.md, its size, and what hostile bodies may not do."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.codec import Mode, Profile, Segment, decode_chunk, encode_chunk, parse_chunk, plan_segments
from sparsewire.sync.codec.bitfields import (
    equal_fields,
    fields,
    pack_bits,
    read_equal_fields,
    read_fields,
    read_unary,
    unary,
    unpack_bits,
)
from sparsewire.sync.codec.classed import encode_classed, parse_classed, rebuild
from sparsewire.sync.codec.classes import ClassMembers, class_table, complement, element_keys
from sparsewire.sync.codec.cuts import REFIT_PERIOD, CutsMemory, fit_partition
from sparsewire.sync.codec.rans import STATES_BYTES, read_table, read_tokens, write_table, write_tokens
from sparsewire.sync.codec.rice import gaps_of, ranks_of, rice_parameter
from sparsewire.sync.codec.steps import join_steps, num_raw_bits, num_tokens, split_steps
from sparsewire.sync.codec.streams import Reader, write_varint
from sparsewire.sync.errors import DamagedError, UnsupportedFormatError, WrongBaseError
from sparsewire.sync.types import Bits, Dtype, Indices, bits_of

WIDTHS = [1, 2, 4, 8]


def normal_weights(
    rng: np.random.Generator, size: int, *, step: float, dtype: str = "bfloat16", scale: float = 1.0
) -> tuple[Bits, Bits]:
    """Two versions of weights whose float32 masters differ by normal steps."""
    master = rng.standard_normal(size).astype(np.float32) * np.float32(0.02 * scale)
    moved = master + rng.standard_normal(size).astype(np.float32) * np.float32(step * scale)
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return bits_of(master.astype(target)), bits_of(moved.astype(target))


def entropy_bound_bits(old: Bits, new: Bits) -> float:
    """Entropy of who changes and by what, given the exponent of bfloat16 weights."""

    def total(counts: np.ndarray) -> float:
        counts = counts[counts > 0].astype(np.float64)
        return float(-(counts * np.log2(counts / counts.sum())).sum())

    keys, changed = element_keys(old).astype(np.int64), old != new
    bits = 0.0
    for key in np.unique(keys):
        inside = keys == key
        steps = (new - old)[inside & changed]
        bits += total(np.array([len(steps), inside.sum() - len(steps)]))
        bits += total(np.unique(steps, return_counts=True)[1])
    return bits


def body_of(old: Bits, new: Bits, cuts: bytes) -> bytes:
    positions = np.flatnonzero(old != new)
    return encode_classed(old, positions, new[positions] - old[positions], cuts)


def read_body(body: bytes, old: Bits, num_changed: int) -> tuple[Indices, Bits]:
    parsed = parse_classed(memoryview(body), num_changed=num_changed, num_elements=len(old), width=old.dtype.itemsize)
    return rebuild(parsed, old)


def assert_body_round_trip(old: Bits, new: Bits, cuts: bytes) -> bytes:
    positions = np.flatnonzero(old != new)
    body = body_of(old, new, cuts)
    found, values = read_body(body, old, len(positions))
    assert found.tolist() == positions.tolist()
    assert values.tolist() == new[positions].tolist()
    return body


@pytest.mark.parametrize("width", WIDTHS)
def test_key_is_the_exponent_as_documented(width: int) -> None:
    rng = np.random.default_rng(width)
    bits = rng.integers(0, 256, 4000 * width).astype(np.uint8).view(f"<u{width}")
    rules = {
        1: [b & 0x7F for b in bits.tolist()],
        2: [b >> 7 & 0xFF for b in bits.tolist()],
        4: [b >> 23 & 0xFF for b in bits.tolist()],
        8: [min(max((b >> 52 & 0x7FF) - 896, 0), 255) for b in bits.tolist()],
    }
    assert element_keys(bits).tolist() == rules[width]
    floats = {2: ml_dtypes.bfloat16, 4: np.float32, 8: np.float64}
    if width in floats:
        values = np.array([1e-20, 1.0, -1.5, 3e5], np.float64).astype(floats[width])
        assert element_keys(bits_of(values)).tolist() == [60, 127, 127, 145]


@given(st.lists(st.integers(0, 5), max_size=300), st.integers(0, 5))
def test_ranks_and_positions_of_a_class_are_inverse(classes: list[int], number: int) -> None:
    array = np.array(classes, np.uint8)
    members = ClassMembers(array, number)
    positions = np.flatnonzero(array == number)
    assert members.size == len(positions)
    assert members.ranks(positions).tolist() == list(range(len(positions)))
    assert members.positions(np.arange(len(positions))).tolist() == positions.tolist()


@given(st.sets(st.integers(0, 99)))
def test_complement_holds_all_other_ranks(ranks: set[int]) -> None:
    assert complement(np.array(sorted(ranks), np.int64), 100).tolist() == sorted(set(range(100)) - ranks)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_cuts_are_ascending_keys_from_one_up(cuts: list[int]) -> None:
    ascending = all(a < b for a, b in zip([0, *cuts], cuts, strict=False)) and len(cuts) < 16
    if not ascending:
        with pytest.raises(ValueError, match="ascending"):
            class_table(bytes(cuts))
        return
    assert class_table(bytes(cuts)).tolist() == [sum(cut <= key for cut in cuts) for key in range(256)]


@given(st.lists(st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, 63)), max_size=50))
def test_fields_of_any_width_fill_bytes_from_the_lowest_bit_up(entries: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in entries], np.uint64)
    widths = np.array([width for _, width in entries], np.int64)
    data = pack_bits(fields(values, widths))
    plain, at = 0, 0
    for value, width in entries:
        plain |= (value & ((1 << width) - 1)) << at
        at += width
    assert data == plain.to_bytes((at + 7) // 8, "little")
    bits = unpack_bits(memoryview(data), at)
    assert read_fields(bits, widths).tolist() == [value & ((1 << width) - 1) for value, width in entries]


@given(st.lists(st.integers(0, 255), max_size=40), st.integers(0, 24))
def test_equal_fields_are_fields(values: list[int], width: int) -> None:
    array = np.array(values, np.uint64)
    bits = equal_fields(array, width)
    assert bits.tolist() == fields(array, np.full(len(values), width, np.int64)).tolist()
    assert read_equal_fields(bits, width, len(values)).tolist() == [value & ((1 << width) - 1) for value in values]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_unary_numbers_come_back_and_end_in_the_last_byte(values: list[int]) -> None:
    data = pack_bits(unary(np.array(values, np.int64)))
    assert read_unary(memoryview(data), len(values)).tolist() == values
    for wrong in (data + b"\0", data + b"\1", data[:-1]):
        if wrong != data:
            with pytest.raises(DamagedError):
                read_unary(memoryview(wrong), len(values))
    with pytest.raises(DamagedError):
        read_unary(memoryview(data), len(values) + 1)


@given(st.sets(st.integers(0, 3000), min_size=1))
def test_rice_parameter_is_the_smallest_of_the_cheapest(ranks: set[int]) -> None:
    ordered = np.array(sorted(ranks), np.int64)
    gaps = gaps_of(ordered)
    assert ranks_of(gaps).tolist() == ordered.tolist()
    costs = [len(gaps) * (r + 1) + int((gaps >> r).sum()) for r in range(25)]
    assert rice_parameter(gaps) == costs.index(min(costs))


@pytest.mark.parametrize("width", WIDTHS)
@given(data=st.data())
def test_step_becomes_token_and_raw_bits_as_documented(width: int, data: st.DataObject) -> None:
    w = 8 * width
    edges = [k % (1 << w) for e in range(w) for k in ((1 << e) - 1, 1 << e, (1 << e) + 1, -(1 << e), -(1 << e) - 1)]
    steps = data.draw(
        st.lists(st.one_of(st.integers(1, (1 << w) - 1), st.sampled_from(edges)).filter(bool), max_size=50)
    )
    array = np.array(steps, f"<u{width}")
    tokens, magnitudes, widths = split_steps(array)
    for step, token, magnitude, raw_bits in zip(steps, tokens, magnitudes, widths, strict=True):
        s = step - (1 << w) if step >> (w - 1) else step
        f = abs(s) > 1 << (w - 2)
        if f:
            s += (1 << (w - 1)) if s < 0 else -(1 << (w - 1))
        a, b = abs(s), abs(s).bit_length() - 1
        t = a if a < 4 else 2 * b + (a >> (b - 1) & 1)
        assert token == ((4 * w - 8) + 2 * t + (s < 0) if f else 2 * (t - 1) + (s < 0))
        assert (magnitude, raw_bits) == (a, b - 1 if a >= 4 else 0)
    assert num_raw_bits(tokens, width).tolist() == widths.tolist()
    raw = np.array([int(m) & ((1 << int(k)) - 1) for m, k in zip(magnitudes, widths, strict=True)], np.uint64)
    assert join_steps(tokens, raw, width).tolist() == steps


@pytest.mark.parametrize("width", WIDTHS)
def test_every_token_with_any_raw_bits_stands_for_a_step(width: int) -> None:
    tokens = np.arange(num_tokens(width))
    widths = num_raw_bits(tokens, width).astype(np.uint64)
    for raw in (np.zeros(len(tokens), np.uint64), (np.uint64(1) << widths) - np.uint64(1)):
        assert join_steps(tokens, raw, width).all()


def read_tokens_plainly(data: bytes, tables: Sequence[np.ndarray]) -> list[int]:
    """The reader of docs/format.md, one token at a time; one table for each token."""
    states = [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(8)]
    words = [int.from_bytes(data[i : i + 2], "little") for i in range(STATES_BYTES, len(data), 2)]
    found = []
    for number, frequencies in enumerate(tables):
        x = states[number % 8]
        slot, below, token = x & 4095, 0, 0
        while below + frequencies[token] <= slot:
            below += int(frequencies[token])
            token += 1
        x = int(frequencies[token]) * (x >> 12) + slot - below
        if x < 1 << 16:
            x = x << 16 | words.pop(0)
        states[number % 8] = x
        found.append(token)
    assert states == [1 << 16] * 8
    assert not words
    return found


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 111), min_size=1, max_size=120), min_size=1, max_size=4))
def test_token_streams_come_back_and_a_plain_reader_agrees(parts: list[list[int]]) -> None:
    arrays = [np.array(part, np.int64) for part in parts]
    tables = []
    for array in arrays:
        head = bytearray()
        frequencies = write_table(head, array)
        reader = Reader(memoryview(head))
        assert read_table(reader, 112).tolist() == frequencies.tolist()
        reader.finish()
        assert frequencies.sum() == 4096
        assert (frequencies > 0).tolist() == (np.bincount(array) > 0).tolist()
        tables.append(frequencies)
    data = write_tokens(list(zip(arrays, tables, strict=True)))
    found = read_tokens(memoryview(data), [(len(a), t) for a, t in zip(arrays, tables, strict=True)])
    assert [part.tolist() for part in found] == parts
    each = [table for array, table in zip(arrays, tables, strict=True) for _ in array]
    assert read_tokens_plainly(data, each) == [token for part in parts for token in part]
    for wrong in (data[:-2], data + b"\0\0"):
        if len(wrong) >= STATES_BYTES:
            with pytest.raises(DamagedError):
                read_tokens(memoryview(wrong), [(len(a), t) for a, t in zip(arrays, tables, strict=True)])


def test_frequencies_follow_the_documented_rule() -> None:
    head = bytearray()
    frequencies = write_table(head, np.array([0] * 90 + [3] * 9 + [5], np.int64))
    # Shares of 2^16 are 58982, 5898 and 655; the codes nearest in ratio have weights 65536, 6144 and 512 (or 768).
    weights = [65536, 6144, 768 if 655 * 655 >= 512 * 768 else 512]
    plain = [1 + weight * (4096 - 3) // sum(weights) for weight in weights]
    plain[0] += 4096 - sum(plain)
    assert frequencies[[0, 3, 5]].tolist() == plain
    assert frequencies.tolist() == [plain[0], 0, 0, plain[1], 0, plain[2]]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 2**32),
    st.integers(1, 700),
    st.sampled_from([0.0, 0.01, 0.3, 0.7, 0.97, 1.0]),
    st.sampled_from(["ulp", "few exceptions", "small", "any"]),
    st.sets(st.integers(1, 255), max_size=15),
)
def test_any_change_with_any_cuts_comes_back(
    width: int, seed: int, size: int, density: float, kind: str, cuts: set[int]
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * width).astype(np.uint8).view(f"<u{width}")
    steps = rng.choice(np.array([1, -1]), size)
    if kind == "small":
        steps = rng.integers(-40, 41, size)
    if kind == "few exceptions":
        steps[:: size // 2 + 1] = rng.integers(-100, 100)
    new = old + steps.astype(f"<i{width}").view(f"<u{width}")
    if kind == "any":
        new = rng.integers(0, 256, size * width).astype(np.uint8).view(f"<u{width}")
    keep = rng.random(size) >= density
    new[keep] = old[keep]
    assert_body_round_trip(old, new, bytes(sorted(cuts)))


def test_hand_made_body_has_the_documented_bytes() -> None:
    # Keys 126 (0.5) and 127 (1.0), cut between them: two changes of rank 1 and 4 in the first, all of the second.
    low, high = 126 << 7, 127 << 7
    old = np.array([low, low, high, low, low, low, high, high, high, low], np.uint16)
    new = old.copy()
    new[[1, 5]] += np.array([1, 0xFFFF], np.uint16)
    new[[2, 6, 7, 8]] += np.array([1, 0xFFFF, 2, 1], np.uint16)
    # Gaps of the first class: 1 and 2, so r = 0 and five bits; no gaps in the inverse form of the second.
    head = bytes([0, 2, 127, 2, 0x00, 4, 0xA0, 0, 1, 1])
    unary_bits = 0b10010
    signs = 0b001010
    exception = bytes([2, 2, 0])
    assert assert_body_round_trip(old, new, bytes([127])) == head + bytes([unary_bits, signs]) + exception


def test_real_densities_cost_at_most_three_percent_more_than_the_bound() -> None:
    rng = np.random.default_rng(11)
    for step in (1.2e-7, 3.4e-7):
        old, new = normal_weights(rng, 2 << 20, step=step)
        size = len(encode_chunk(Dtype.BF16, [Segment(0, 0, len(old))], [old], [new]).payload)
        assert 8 * size <= 1.05 * entropy_bound_bits(old, new)


@pytest.mark.parametrize(
    ("dtype", "scale", "step"),
    [
        ("float16", 1, 3e-7),
        ("float32", 1, 1e-10),
        ("float8_e4m3fn", 5e3, 1e-5),
        ("float8_e5m2", 5e3, 1e-5),
    ],
)
def test_classes_pay_for_every_float(dtype: str, scale: float, step: float) -> None:
    old, new = normal_weights(np.random.default_rng(12), 1 << 19, step=step, scale=scale, dtype=dtype)
    changed = int((old != new).sum())
    assert 0 < changed < len(old) // 4
    kind = Dtype.of(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    sizes = {
        profile: len(encode_chunk(kind, [Segment(0, 0, len(old))], [old], [new], profile=profile).payload)
        for profile in Profile
    }
    assert sizes[Profile.CLASSED] < 0.92 * sizes[Profile.BASE_FREE]


def test_twenty_thousand_small_tensors_cost_what_one_large_one_does() -> None:
    old, new = normal_weights(np.random.default_rng(13), 20_000 * 64, step=3.4e-7)
    whole = len(encode_chunk(Dtype.BF16, [Segment(0, 0, len(old))], [old], [new]).payload)
    split = 0
    for plan in plan_segments([(number, 0, 64, Dtype.BF16) for number in range(20_000)]):
        before, after = ([bits[64 * s.tensor : 64 * s.tensor + 64] for s in plan.segments] for bits in (old, new))
        split += len(encode_chunk(plan.dtype, plan.segments, before, after).payload)
    changed = int((old != new).sum())
    assert split <= 1.02 * whole
    assert changed > 10_000


def test_given_cuts_are_used_and_returned() -> None:
    old, new = normal_weights(np.random.default_rng(14), 1 << 16, step=1e-6)
    segments = [Segment(0, 0, len(old))]
    fitted = encode_chunk(Dtype.BF16, segments, [old], [new])
    assert fitted.cuts == fit_partition([old], [new]).cuts
    assert encode_chunk(Dtype.BF16, segments, [old], [new], cuts=fitted.cuts).payload == fitted.payload
    coarse = encode_chunk(Dtype.BF16, segments, [old], [new], cuts=bytes([118]))
    assert coarse.cuts == bytes([118])
    assert len(coarse.payload) > len(fitted.payload)
    assert encode_chunk(Dtype.BF16, segments, [old], [old], cuts=fitted.cuts).cuts is None


def test_estimated_size_of_a_partition_is_near_the_body() -> None:
    for step in (2e-7, 2e-6, 2e-5):
        old, new = normal_weights(np.random.default_rng(15), 1 << 18, step=step)
        partition = fit_partition([old], [new])
        size = len(body_of(old, new, partition.cuts))
        assert abs(log2(partition.num_bits / 8 / size)) < 0.05


def test_sampled_partition_is_nearly_as_good_as_the_full_one() -> None:
    old, new = normal_weights(np.random.default_rng(16), 1 << 21, step=3.4e-7)
    sampled = len(body_of(old, new, fit_partition([old], [new]).cuts))
    halves = [part for a in range(0, len(old), 1 << 18) for part in [slice(a, a + (1 << 18))]]
    full = min(len(body_of(old, new, fit_partition([old[part]], [new[part]]).cuts)) for part in halves)
    assert sampled <= 1.01 * full


def test_remembered_cuts_are_fitted_anew_now_and_then() -> None:
    memory = CutsMemory()
    place = Segment(3, 0, 10)
    assert memory.suggest(place) is None
    used = 0
    memory.remember(place, b"\x70")
    while memory.suggest(place) is not None:
        memory.remember(place, memory.suggest(place))
        used += 1
    assert REFIT_PERIOD // 2 <= used <= REFIT_PERIOD
    memory.remember(place, b"\x71")
    assert memory.suggest(place) == b"\x71"
    memory.remember(place, None)
    assert memory.suggest(place) == b"\x71"


def rich_change() -> tuple[Bits, Bits, bytes]:
    """A small change with every kind of class: empty, plain, inverse, exceptions, wide, sign flips."""
    rng = np.random.default_rng(17)
    old, new = normal_weights(rng, 1200, step=2e-5)
    new[np.flatnonzero(element_keys(old) == 124)[::9]] ^= np.uint16(0x8000)
    cuts = fit_partition([old], [new]).cuts
    few = np.flatnonzero(element_keys(old) >= 122)
    new[few] = old[few]
    new[few[:40]] += np.uint16(1)
    new[few[7]] = old[few[7]] + np.uint16(5)
    return old, new, cuts


def test_every_flipped_bit_of_a_body_is_refused_or_gives_another_change() -> None:
    old, new, cuts = rich_change()
    body = assert_body_round_trip(old, new, cuts)
    num_changed = int((old != new).sum())
    positions = np.flatnonzero(old != new)
    for bit in range(8 * len(body)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found, values = read_body(bytes(damaged), old, num_changed)
        except (DamagedError, WrongBaseError, UnsupportedFormatError):
            continue
        # A cut may move to a key that no element has; every other bit counts.
        same = found.tolist() == positions.tolist() and values.tolist() == new[positions].tolist()
        assert not same or 2 <= bit // 8 < 2 + len(cuts)
        assert len(found) == num_changed
        assert (np.diff(found) > 0).all()
        assert (values != old[found]).all()


def test_every_truncation_and_extension_of_a_body_is_refused() -> None:
    old, new, cuts = rich_change()
    body = body_of(old, new, cuts)
    num_changed = int((old != new).sum())
    for size in range(len(body)):
        with pytest.raises(DamagedError):
            read_body(body[:size], old, num_changed)
    with pytest.raises(DamagedError, match="left over"):
        read_body(body + b"\0", old, num_changed)


def forged_head(*entries: bytes, cuts: bytes = b"", flags: int = 0, rest: bytes = b"\0") -> bytes:
    return bytes([flags, len(cuts) + 1]) + cuts + b"".join(entries) + rest


def entry(n: int, flags: int, *numbers: int) -> bytes:
    out = bytearray()
    write_varint(out, n)
    out.append(flags)
    for number in numbers:
        write_varint(out, number)
    return bytes(out)


HUGE = (1 << 62) + 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected"),
        (bytes([0, 0]), "0 classes"),
        (bytes([0, 17]), "17 classes"),
        (forged_head(b"\0", cuts=b"\0"), "do not ascend"),
        (forged_head(b"\0", b"\0", b"\0", cuts=b"\5\5"), "do not ascend"),
        (forged_head(entry(HUGE, 0)), "exceeds the limits"),
        (forged_head(entry(1, 25)), "exceeds the limits"),
        (forged_head(entry(1, 0x20, HUGE)), "exceeds the limits"),
        (forged_head(entry(1, 0x80, 0)), "0 exceptions"),
        (forged_head(entry(1, 0x80, 2)), "2 exceptions"),
        (forged_head(entry(1, 0xC0, 1) + b"\x00\x07", rest=b"\0\0\0"), "do not fit its predicted"),
        (forged_head(entry(90, 0x80, 3)), "3 exceptions, 0 predicted in 90"),
        (forged_head(entry(1, 0x40, HUGE)), "table of tokens"),
        (forged_head(entry(1, 0x40, 3) + b"\x00\x00\x00"), "absent token"),
        (forged_head(entry(1, 0x40, 0) + b"\x01"), "code of 0"),
        (forged_head(entry(1, 0x40, 0) + b"\x41"), "padding"),
        (forged_head(entry(2, 0)), "2 changes in the classes"),
        (forged_head(entry(1, 0), entry(1, 0), cuts=b"\5"), "2 changes in the classes"),
        (forged_head(entry(1, 0x20, 99), b"\0", cuts=b"\5"), "unary numbers"),
        (forged_head(entry(1, 0), rest=bytes([1, 0, 0])), "unary numbers"),
        (forged_head(entry(1, 0), rest=bytes([1, 3, 0])), "unary numbers"),
        (forged_head(entry(1, 0), rest=bytes([2, 1, 0, 0])), "unary numbers"),
        (forged_head(entry(1, 0), rest=bytes([14, 1])), "14 bytes of unary"),
        (forged_head(entry(1, 0), rest=bytes([1, 1, 2])), "padding"),
        (forged_head(entry(1, 2), rest=bytes([1, 4, 1, 0])), "padding"),
        (forged_head(entry(1, 0x20, 50 + 49), rest=bytes([0, 0])), "unary"),
        (forged_head(entry(1, 0x80, 1), rest=bytes([1, 1, 0, 0, 0, 0])), "exception 0"),
        (forged_head(entry(1, 0x80, 1), rest=bytes([1, 1, 0, 0, 1, 0])), "exception 1"),
        (forged_head(entry(1, 0x80, 1), rest=bytes([1, 1, 0, 0, 255, 255])), "exception 65535"),
        (forged_head(entry(1, 0x80, 1), rest=bytes([1, 1, 0, 1, 9, 0])), "at change 1 of 1"),
        (forged_head(entry(1, 0x80, 1), rest=bytes([1, 1, 1, 0, 9, 0])), "exception 9"),
    ],
)
def test_forged_bodies_are_refused_before_anything_is_allocated(body: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        parse_classed(memoryview(body), num_changed=1, num_elements=100, width=2)


def test_unknown_flags_of_a_body_ask_for_an_upgrade() -> None:
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        parse_classed(memoryview(forged_head(b"\0", flags=2)), num_changed=0, num_elements=100, width=2)


def test_remainders_beyond_what_a_writer_would_choose_are_refused() -> None:
    body = forged_head(entry(8, 24), rest=bytes([1]) + bytes(24) + b"\xff\0")
    with pytest.raises(DamagedError, match="192 bits of remainders"):
        parse_classed(memoryview(body), num_changed=8, num_elements=191, width=2)


def test_base_whose_classes_have_other_sizes_is_refused() -> None:
    old, new, cuts = rich_change()
    body = body_of(old, new, cuts)
    num_changed = int((old != new).sum())
    with pytest.raises(WrongBaseError, match="other weights"):
        read_body(body, np.zeros_like(old), num_changed)


def test_many_small_unchanged_segments_beside_a_dense_one_need_no_body() -> None:
    rng = np.random.default_rng(18)
    segments = [Segment(0, 0, 5000), *(Segment(n, 0, 10) for n in range(1, 200))]
    old = [rng.integers(0, 1 << 16, segment.count).astype(np.uint16) for segment in segments]
    new = [rng.integers(0, 1 << 16, 5000).astype(np.uint16), *old[1:]]
    encoded = encode_chunk(Dtype.BF16, segments, old, new)
    assert parse_chunk(encoded.payload).modes == (Mode.DENSE, *[Mode.UNCHANGED] * 199)
    held = dict(zip(segments, old, strict=True))
    (patch,) = decode_chunk(encoded.payload, schema=None, base=held.__getitem__).patches
    assert patch.values.tolist() == new[0].tolist()


def test_patches_are_of_changed_segments_only_even_where_unchanged_ones_are_classed() -> None:
    old = [np.full(10, 0x3C00 + n, np.uint16) for n in range(200)]
    new = [bits.copy() for bits in old]
    new[7][3] += np.uint16(1)
    new[150][0] += np.uint16(1)
    segments = [Segment(n, 5, 10) for n in range(200)]
    encoded = encode_chunk(Dtype.BF16, segments, old, new)
    assert set(parse_chunk(encoded.payload).modes) == {Mode.CLASSED}
    decoded = decode_chunk(encoded.payload, schema=None, base=lambda segment: old[segment.tensor])
    for patches in (encoded.patches, decoded.patches):
        assert [(p.tensor, p.indices.tolist()) for p in patches if p.indices is not None] == [(7, [8]), (150, [5])]
    assert decoded.digest_changes == encoded.digest_changes
