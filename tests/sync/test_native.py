from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.codec.classed import encode_classed, is_predicted
from sparsewire.sync.codec.classes import element_keys
from sparsewire.sync.codec.reference import Reference
from sparsewire.sync.codec.steps import num_tokens, split_steps
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    LastChangeMissingError,
    SparsewireError,
    WrongBaseError,
)
from sparsewire.sync.native import ABI, LIBRARY, Found, Isa, Kernel, LastBits, NativeDecoding, Wish, load_kernel
from sparsewire.sync.types import Bits

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
REFERENCE = Reference()

Segments = Sequence[tuple[Bits, Bits]]


@pytest.fixture(params=list(Isa), ids=[isa.name.lower() for isa in Isa], scope="module")
def native(request: pytest.FixtureRequest) -> Kernel:
    """Return the kernel at each instruction set that this processor has."""
    if not LIBRARY.exists():
        pytest.skip("the package was installed without a C compiler: there is no kernel to test")
    best = load_kernel()
    assert best is not None
    if request.param > best.isa:
        pytest.skip(f"this processor does not have {request.param.name.lower()}")
    kernel = load_kernel(isa=request.param)
    assert kernel is not None
    return kernel


def weights(draws: np.random.Generator, count: int, width: int) -> Bits:
    """Return bits as models have them: normal floats, or for one byte anything."""
    if width == 1:
        return draws.integers(0, 256, count).astype(np.uint8)
    values = draws.standard_normal(count) * 0.02
    if width == 8:
        return values.view(np.uint64)
    singles = values.astype(np.float32).view(np.uint32)
    return singles if width == 4 else (singles >> np.uint32(16)).astype(np.uint16)


def changed(draws: np.random.Generator, old: Bits, density: float, odd_share: float) -> Bits:
    """Return a version of `old` in which steps of one unit and, for `odd_share` of them, of any size were taken."""
    width = old.dtype.itemsize
    new = old.copy()
    at = np.flatnonzero(draws.random(len(old)) < density)
    steps = draws.choice([1, -1], len(at)).astype(np.int64)
    odd = draws.random(len(at)) < odd_share
    sizes = 2.0 ** (draws.random(int(odd.sum())) * (8 * width - 1))
    steps[odd] = (sizes * draws.choice([1.0, -1.0], len(sizes))).astype(np.int64)
    new[at] += steps.astype(np.uint64).astype(old.dtype)
    return new


SPECIAL = np.array([0, 0x8000, 1, 0x807F, 0x0080, 0x1000, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF], np.uint16)
"""Zeros, subnormals, tiny, largest, infinities and NaNs of bfloat16."""


def before_it(draws: np.random.Generator, old: Bits, new: Bits) -> tuple[LastBits, Bits]:
    """Return a change that led to `old` and has much in common with the one to `new`, and the bits before it."""
    again = (new != old) & (draws.random(len(old)) < 0.7) | (draws.random(len(old)) < 0.02)
    before = old - (new - old) + draws.integers(-3, 4, len(old)).astype(np.uint16)
    special = draws.random(len(old)) < 0.02
    before[special] = draws.choice(SPECIAL, int(special.sum()))
    before = np.where(again, before, old)
    at = np.flatnonzero(before != old)
    return (at, before[at]), before


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[Bits], list[Bits], bytes, LastBits | None]:
    """Draw segments of equal dtype, their change, cuts, and for two bytes maybe the change before."""
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = draw(st.sampled_from([1, 2, 4, 8]))
    lowest, highest = draw(st.sampled_from([(1, 255), (100, 130), (1, 127)]))
    cuts = bytes(sorted(draw(st.sets(st.integers(lowest, highest), max_size=15))))
    sizes = draw(st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 300, 2047, 2048, 4096, 9000]), min_size=1, max_size=5))
    density = draw(st.sampled_from([0.0, 0.002, 0.01, 0.06, 0.3, 0.9, 1.0]))
    odd_share = draw(st.sampled_from([0.0, 0.002, 0.1, 1.0]))
    old = [weights(draws, size, width) for size in sizes]
    new = [bits if draws.random() < 0.2 else changed(draws, bits, density, odd_share) for bits in old]
    last = None
    if width == 2 and draw(st.booleans()):
        for bits in (*old, *new):
            special = np.flatnonzero(draws.random(len(bits)) < draw(st.sampled_from([0.0, 0.01])))
            bits[special] = draws.choice(SPECIAL, len(special))
        last = before_it(draws, np.concatenate(old), np.concatenate(new))[0]
    return old, new, cuts, last


def among(last: LastBits, old: Sequence[Bits], chosen: Sequence[int]) -> LastBits:
    """Return the part of `last` that lies in the chosen segments, by its places there."""
    is_last = np.zeros(sum(map(len, old)), np.bool_)
    is_last[last[0]] = True
    borders = [0, *np.cumsum([len(bits) for bits in old]).tolist()]
    before = np.zeros(len(is_last), np.uint16)
    before[last[0]] = last[1]
    parts = [slice(borders[number], borders[number + 1]) for number in chosen]
    places = np.flatnonzero(np.concatenate([is_last[part] for part in parts]))
    return places, np.concatenate([before[part] for part in parts])[places]


@settings(max_examples=200, deadline=None)
@given(chunks(), st.data())
def test_kernel_does_what_the_numpy_form_does(
    native: Kernel, chunk: tuple[list[Bits], list[Bits], bytes, LastBits | None], data: st.DataObject
) -> None:
    old, new, cuts, last = chunk
    starts = [1000 * number for number in range(len(old))]
    wishes = data.draw(st.lists(st.sampled_from(list(Wish)), min_size=len(old), max_size=len(old)))
    ours = native.encode(old, new, starts=starts, cuts=cuts, crowded=8, wishes=wishes, last=last)
    theirs = REFERENCE.encode(old, new, starts=starts, cuts=cuts, crowded=8, wishes=wishes, last=last)
    assert ours.found.tolist() == theirs.found.tolist()
    assert ours.num_changed.tolist() == theirs.num_changed.tolist()
    for name in ("indices", "old", "new", "digests"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    if not len(ours.indices):
        return
    assert ours.body == theirs.body
    chosen = [number for number, found in enumerate(ours.found) if found == Found.CLASSED]
    base, begins = [old[number] for number in chosen], [starts[number] for number in chosen]
    held = None if last is None else among(last, old, chosen)
    decoded = native.decode(ours.body, num_changed=len(ours.indices), old=base, starts=begins, last=held)
    assert np.array_equal(decoded.indices, ours.indices)
    assert np.array_equal(decoded.old, ours.old)
    assert np.array_equal(decoded.new, ours.new)
    assert np.array_equal(decoded.digests, ours.digests[chosen])
    assert np.array_equal(decoded.num_changed, ours.num_changed[chosen])


def outcome(
    coder: Kernel | Reference, body: bytes, num_changed: int, old: Bits, last: LastBits | None = None
) -> NativeDecoding | type[SparsewireError]:
    try:
        return coder.decode(body, num_changed=num_changed, old=[old], starts=[0], last=last)
    except SparsewireError as error:
        return type(error)


def assert_same_outcome(native: Kernel, body: bytes, num_changed: int, old: Bits, last: LastBits | None = None) -> None:
    ours, theirs = (outcome(coder, body, num_changed, old, last) for coder in (native, REFERENCE))
    if isinstance(ours, NativeDecoding) and isinstance(theirs, NativeDecoding):
        assert np.array_equal(ours.indices, theirs.indices)
        assert np.array_equal(ours.new, theirs.new)
        assert np.array_equal(ours.digests, theirs.digests)
    else:
        assert ours is theirs


def test_fuzz_corpus_is_taken_or_refused_like_by_the_numpy_form(native: Kernel) -> None:
    num_bodies = num_predicted = 0
    for path in sorted(CORPUS.iterdir()):
        data = path.read_bytes()
        options, count, num_changed, _ = struct.unpack_from("<BHHB", data)
        if options & 16:
            continue
        bits = np.dtype(f"<u{1 << (options & 3)}")
        count = min(count, (len(data) - 6) // bits.itemsize)
        old = np.frombuffer(data, bits, count, 6)
        body, last = data[6 + count * bits.itemsize :], None
        if options & 32 and bits.itemsize == 2 and len(body) >= 2:
            num_last = min(struct.unpack_from("<H", body)[0], (len(body) - 2) // 4)
            entries = np.frombuffer(body, "<u2", 2 * num_last, 2).reshape(-1, 2)
            places = np.cumsum(entries[:, 0].astype(np.int64) + 1) - 1
            inside = places < count
            body, last = body[2 + 4 * num_last :], (places[inside], entries[inside, 1].astype(np.uint16))
            num_predicted += is_predicted(body)
        if count:
            assert_same_outcome(native, body, num_changed, old, last)
            num_bodies += 1
    assert num_bodies >= 30
    assert num_predicted >= 4


def sample_body() -> tuple[bytes, int, Bits]:
    draws = np.random.default_rng(8)
    old = weights(draws, 700, 2)
    new = changed(draws, old, 0.15, 0.0)
    wide = np.flatnonzero(element_keys(old) < 117)[:20]
    new[wide] = old[wide] + draws.integers(2, 3000, len(wide)).astype(np.uint16)
    new[600] = old[600] + np.uint16(9)
    at = np.flatnonzero(new != old)
    return encode_classed(old, at, new[at] - old[at], bytes([117, 119, 120, 121, 122])), len(at), old


def test_every_truncation_and_every_flipped_bit_is_judged_like_by_the_numpy_form(native: Kernel) -> None:
    body, num_changed, old = sample_body()
    for length in range(len(body)):
        assert outcome(native, body[:length], num_changed, old) is DamagedError
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        assert_same_outcome(native, bytes(flipped), num_changed, old)


def predicted_body() -> tuple[bytes, Bits, Bits, LastBits]:
    """Return a predicted body with plain and predicted steps in a class, its change, and the change before."""
    draws = np.random.default_rng(9)
    old = weights(draws, 1500, 2)
    new = changed(draws, old, 0.2, 0.0)
    wide = np.flatnonzero(element_keys(old) < 119)[::2]
    new[wide] = old[wide] + draws.integers(2, 90, len(wide)).astype(np.uint16)
    last, _ = before_it(draws, old, new)
    body = REFERENCE.encode([old], [new], starts=[0], cuts=bytes([117, 119, 121]), crowded=1, last=last).body
    assert is_predicted(body)
    return body, old, new, last


def test_damaged_predicted_body_is_judged_like_by_the_numpy_form(native: Kernel) -> None:
    body, old, new, last = predicted_body()
    num_changed = int(np.count_nonzero(old != new))
    for length in range(len(body)):
        assert outcome(native, body[:length], num_changed, old, last) is DamagedError
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        assert_same_outcome(native, bytes(flipped), num_changed, old, last)


def test_predicted_body_needs_the_change_before(native: Kernel) -> None:
    body, old, new, last = predicted_body()
    num_changed = int(np.count_nonzero(old != new))
    assert outcome(native, body, num_changed, old, None) is LastChangeMissingError
    none = np.empty(0, np.int64), np.empty(0, np.uint16)
    for wrong in (none, (last[0][::2], last[1][::2]), (np.arange(len(old)), old ^ np.uint16(1))):
        assert outcome(native, body, num_changed, old, wrong) is WrongBaseError
        assert outcome(REFERENCE, body, num_changed, old, wrong) is WrongBaseError
    assert isinstance(outcome(native, body, num_changed, old, last), NativeDecoding)


def test_change_before_of_other_widths_is_refused(native: Kernel) -> None:
    bits = np.zeros(100, np.uint16)
    with pytest.raises(ValueError, match="change before"):
        native.encode(
            [bits], [bits + np.uint16(1)], starts=[0], cuts=b"", crowded=1, last=(np.arange(3), np.zeros(3, np.uint32))
        )


def test_changes_stated_must_be_those_of_the_body(native: Kernel) -> None:
    body, num_changed, old = sample_body()
    for stated in (0, num_changed - 1, num_changed + 1, 2**32 - 1):
        assert outcome(native, body, stated, old) is DamagedError


def test_bits_at_any_address_are_taken(native: Kernel) -> None:
    draws = np.random.default_rng(2)
    for width in (2, 4, 8):
        old = weights(draws, 5000, width)
        new = changed(draws, old, 0.02, 0.1)
        odd_old = np.frombuffer(b"x" + old.tobytes(), old.dtype, offset=1)
        odd_new = np.frombuffer(b"xyz" + new.tobytes(), new.dtype, offset=3)
        even = native.encode([old], [new], starts=[0], cuts=b"\x70\x78", crowded=8)
        odd = native.encode([odd_old], [odd_new], starts=[0], cuts=b"\x70\x78", crowded=8)
        assert odd.body == even.body
        assert np.array_equal(odd.digests, even.digests)
        decoded = native.decode(odd.body, num_changed=len(odd.indices), old=[odd_old], starts=[0])
        assert np.array_equal(decoded.new, odd.new)


def test_bits_that_are_not_contiguous_are_refused(native: Kernel) -> None:
    strided = np.zeros(100, np.uint16)[::2]
    with pytest.raises(ValueError, match="not contiguous"):
        native.encode([strided], [strided.copy()], starts=[0], cuts=b"", crowded=8)


def test_cuts_that_do_not_ascend_are_refused(native: Kernel) -> None:
    bits = np.zeros(100, np.uint16)
    for cuts in (b"\x00", b"\x05\x05", bytes(range(1, 17))):
        with pytest.raises(ValueError, match="ascend"):
            native.encode([bits], [bits + np.uint16(1)], starts=[0], cuts=cuts, crowded=8)


def plain_digest(indices: Sequence[int], bits: Bits) -> tuple[int, int]:
    """Follow docs/format.md one element at a time."""
    mask = 2**64 - 1
    total_a = total_b = 0
    for index, value in zip(indices, bits.tolist(), strict=True):
        a = (index * 0x9E3779B97F4A7C15 + value) & mask
        b = (a + 0x632BE59BD9B4E019) & mask
        a = ((a ^ a >> 33) * 0xFF51AFD7ED558CCD) & mask
        a = ((a ^ a >> 33) * 0xC4CEB9FE1A85EC53) & mask
        b = ((b ^ b >> 30) * 0xBF58476D1CE4E5B9) & mask
        b = ((b ^ b >> 27) * 0x94D049BB133111EB) & mask
        total_a, total_b = total_a + (a ^ a >> 33), total_b + (b ^ b >> 31)
    return total_a & mask, total_b & mask


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_digests_are_those_of_the_format(native: Kernel, width: int) -> None:
    draws = np.random.default_rng(width)
    for size in (*range(20), 1000):
        bits = draws.integers(0, 2 ** (8 * width), size, dtype=np.uint64).astype(f"<u{width}")
        start = int(draws.integers(0, 2**47))
        assert native.digest_range(bits, start) == plain_digest(range(start, start + size), bits)
        indices = np.sort(draws.integers(0, 2**48, size))
        assert native.digest_at(indices, bits) == plain_digest(indices.tolist(), bits)


def test_sample_counts_keys_and_tokens_of_the_first_eighth_of_every_period(native: Kernel) -> None:
    draws = np.random.default_rng(4)
    for width in (1, 2, 4, 8):
        for count in (3000, 1 << 18, (1 << 18) + 1, 400_000):
            old = weights(draws, count, width)
            new = changed(draws, old, 0.05, 0.2)
            looked_at = np.arange(count) % (32768 if count > 1 << 18 else 4096) < 4096
            before, after = old[looked_at], new[looked_at]
            at = np.flatnonzero(before != after)
            tokens, _, _ = split_steps(after[at] - before[at])
            expected = np.zeros((256, num_tokens(width)), np.int64)
            np.add.at(expected, (element_keys(before[at]), tokens), 1)
            borders = [0, *sorted(draws.integers(0, count, 5).tolist()), count]
            parts = [slice(a, b) for a, b in pairwise(borders)]
            elements, counts = native.sample([old[part] for part in parts], [new[part] for part in parts])
            assert np.array_equal(elements, np.bincount(element_keys(before), minlength=256))
            assert np.array_equal(counts, expected)


def test_scatter_writes_all_values_or_none(native: Kernel) -> None:
    target = np.zeros(1000, np.uint32)
    native.scatter(target, np.array([0, 5, 999]), np.array([7, 8, 9], np.uint32))
    assert target[[0, 5, 999]].tolist() == [7, 8, 9]
    for beyond in (1000, -1):
        with pytest.raises(DamagedError):
            native.scatter(target, np.array([1, beyond]), np.array([7, 8], np.uint32))
    assert np.count_nonzero(target) == 3
    target.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        native.scatter(target, np.array([1]), np.array([7], np.uint32))


def test_threads_share_a_kernel(native: Kernel) -> None:
    draws = np.random.default_rng(6)
    old = [weights(draws, 200_000, 2) for _ in range(4)]
    new = [changed(draws, bits, 0.01, 0.1) for bits in old]
    cuts = bytes([112, 116, 118, 120, 121, 122])

    def encode(number: int) -> bytes:
        return native.encode([old[number]], [new[number]], starts=[0], cuts=cuts, crowded=8).body

    expected = [encode(number) for number in range(4)]
    found: dict[int, list[bytes]] = {}
    threads = [
        threading.Thread(target=lambda n=number: found.update({n: [encode(n) for _ in range(10)]}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {number: [expected[number]] * 10 for number in range(4)}


def test_library_that_is_not_there_is_said_once_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_kernel(tmp_path / "kernel.so") is None
    assert len(caplog.records) == 1
    assert "NumPy form" in caplog.text


def test_library_of_another_abi_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: a library of another ABI cannot be made")
    source = tmp_path / "other.c"
    source.write_text(f"int sparsewire_abi(void) {{ return {ABI + 1}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "kernel.so")], check=True)
    assert load_kernel(tmp_path / "kernel.so") is None
    assert f"ABI {ABI + 1}" in caplog.text


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_environment_chooses_the_kernel() -> None:
    show = "from sparsewire.sync.native import kernel; k = kernel(); print('none' if k is None else k.isa.name)"
    assert run_python(show, SPARSEWIRE_NATIVE="0").stdout == "none\n"
    assert "must be 0, auto or require" in run_python(show, SPARSEWIRE_NATIVE="yes").stderr
    if not LIBRARY.exists():
        assert "there is no kernel" in run_python(show, SPARSEWIRE_NATIVE="require").stderr
        return
    assert run_python(show, SPARSEWIRE_NATIVE="require", SPARSEWIRE_ISA="base").stdout == "BASE\n"
    assert "must be base, avx2 or avx512" in run_python(show, SPARSEWIRE_NATIVE="auto", SPARSEWIRE_ISA="mmx").stderr


def test_instruction_set_that_the_processor_lacks_is_refused(native: Kernel) -> None:
    best = load_kernel()
    assert best is not None
    for isa in Isa:
        if isa > best.isa:
            with pytest.raises(ConfigError, match="this processor has"):
                load_kernel(isa=isa)


def test_digests_of_whole_tensors_do_not_depend_on_the_kernel(native: Kernel) -> None:
    bits = weights(np.random.default_rng(7), 3000, 4)
    whole = tensor_digest(bits.reshape(3, 1000))
    assert native.digest_range(bits, 0) == (whole.a, whole.b) == plain_digest(range(3000), bits)
