"""Dense bodies: every build writes the same bytes, they are small where they can be, and damage is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.codec.chunk import decode_chunk, encode_chunk
from sparsewire.sync.codec.dense import decode_dense, dense_size, encode_dense, join_planes, split_planes
from sparsewire.sync.codec.plan import Segment
from sparsewire.sync.codec.streams import write_varint
from sparsewire.sync.digest import TensorDigest, digest_at
from sparsewire.sync.errors import DamagedError
from sparsewire.sync.native import LIBRARY, Isa, Kernel, load_kernel
from sparsewire.sync.types import Bits, Dtype

DTYPES = {1: Dtype.F8_E4M3, 2: Dtype.BF16, 4: Dtype.F32, 8: Dtype.F64}


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


def noise(draws: np.random.Generator, count: int, width: int) -> Bits:
    return draws.integers(0, 256, count * width).astype(np.uint8).view(f"<u{width}")


def model_weights(draws: np.random.Generator, count: int) -> Bits:
    """Return bf16 bits of normal weights."""
    singles = (draws.standard_normal(count) * 0.02).astype(np.float32).view(np.uint32)
    return (singles >> np.uint32(16)).astype(np.uint16)


def body_of(parts: Sequence[Bits], starts: Sequence[int]) -> tuple[bytes, list[TensorDigest]]:
    pieces, digests = encode_dense(parts, starts=starts)
    return b"".join(pieces), digests


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(st.sampled_from([0, 1, 7, 63, 64, 511, 512, 513, 1500, 4097]), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.integers(0, 1 << 40),
    st.booleans(),
)
def test_kernel_splits_joins_and_digests_as_the_numpy_form_does(
    native: Kernel, width: int, sizes: list[int], seed: int, start: int, odd_address: bool
) -> None:
    draws = np.random.default_rng(seed)
    parts = [noise(draws, size, width) for size in sizes]
    if odd_address:
        parts = [np.frombuffer(b"x" + bits.tobytes(), bits.dtype, offset=1) for bits in parts]
    starts = [start + 10_000 * number for number in range(len(parts))]
    planes, sums = native.split(parts, starts=starts)
    expected = split_planes(np.concatenate(parts))
    assert all(np.array_equal(a, b) for a, b in zip(planes, expected, strict=True))
    joined, joined_sums = native.join(planes, counts=sizes, starts=starts)
    assert np.array_equal(joined, np.concatenate(parts))
    assert np.array_equal(joined, join_planes(planes, DTYPES[width]))
    digests = [digest_at(np.arange(s, s + len(bits)), bits) for s, bits in zip(starts, parts, strict=True)]
    assert [TensorDigest(*terms) for terms in sums.tolist()] == digests
    assert np.array_equal(sums, joined_sums)


def test_every_rotation_of_every_16_bit_pattern_is_undone(native: Kernel) -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    planes, _ = native.split([bits], starts=[0])
    assert planes[1][0x3F80] == 0x7F
    assert planes[0][0x8000] == 1
    assert np.array_equal(native.join(planes, counts=[len(bits)], starts=[0])[0], bits)


def test_kernel_refuses_what_does_not_fit(native: Kernel) -> None:
    plane = np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match="10 elements"):
        native.join([plane, plane[:9]], counts=[10], starts=[0])
    with pytest.raises(ValueError, match="10 elements"):
        native.join([plane, np.zeros(20, np.uint8)[::2]], counts=[10], starts=[0])
    with pytest.raises(ValueError, match="no planes"):
        native.join([plane], counts=[10], starts=[0])
    with pytest.raises(ValueError, match="not contiguous"):
        native.split([np.zeros(20, np.uint16)[::2]], starts=[0])


def test_checksum_is_that_of_zlib(native: Kernel) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8).tobytes()
    for size in (*range(200), 255, 256, 1023, 4096, 5000):
        for value in (0, 0xFFFFFFFF, 0x12345678):
            assert native.crc32(memoryview(data)[:size], value) == zlib.crc32(data[:size], value)
    whole = native.crc32(data, 0)
    for bit in range(0, 8 * len(data), 97):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert native.crc32(bytes(flipped), 0) != whole


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_parts_of_any_size_come_back(width: int) -> None:
    draws = np.random.default_rng(width)
    for sizes in ([0], [1], [0, 3, 0], [70_000, 1, 20_001]):
        parts = [noise(draws, size, width) & np.array(0x77).astype(f"<u{width}") for size in sizes]
        starts = [5 + 100_000 * number for number in range(len(sizes))]
        body, digests = body_of(parts, starts)
        found = decode_dense(memoryview(body), DTYPES[width], counts=sizes, starts=starts)
        assert all(np.array_equal(bits, part) for (bits, _), part in zip(found, parts, strict=True))
        assert [digest for _, digest in found] == digests
        assert digests == [digest_at(np.arange(s, s + len(p)), p) for s, p in zip(starts, parts, strict=True)]


def test_model_weights_take_at_most_seven_tenths() -> None:
    bits = model_weights(np.random.default_rng(3), 1 << 20)
    assert dense_size(bits) < 0.67 * bits.nbytes


def test_noise_is_stored_as_it_is_and_repetition_is_found() -> None:
    draws = np.random.default_rng(4)
    bits = noise(draws, 1 << 18, 2)
    assert bits.nbytes < dense_size(bits) < bits.nbytes + 20
    assert dense_size(np.tile(noise(draws, 100, 2), 2000)) < 2000
    assert dense_size(np.zeros(1 << 20, np.uint16)) < 1000
    # Half of it zero: what a sample of a part alone could miss.
    bits[len(bits) // 2 :] = 0
    assert dense_size(bits) < 0.52 * bits.nbytes


def test_hostile_bodies_are_refused() -> None:
    bits = model_weights(np.random.default_rng(5), 5000)
    body, _ = body_of([bits], [0])

    def decode(data: bytes, *, counts: Sequence[int] = (5000,)) -> None:
        decode_dense(memoryview(data), Dtype.BF16, counts=counts, starts=[0] * len(counts))

    for length in range(0, len(body), 7):
        with pytest.raises(DamagedError):
            decode(body[:length])
    for data, counts in ((body + b"x", [5000]), (body, [5001]), (body, [4999]), (body, [2500, 2501]), (b"", [5000])):
        with pytest.raises(DamagedError):
            decode(data, counts=counts)
    for stated in (0, 4999, 5001, 1 << 40):
        frame = zstandard.ZstdCompressor().compress(bytes(min(stated, 5001)))
        if stated > 5001:
            # A frame header that claims far more than the frame holds: single segment, content size of 8 bytes.
            frame = frame[:4] + b"\xe0" + stated.to_bytes(8, "little") + frame[6:]
        made = bytearray()
        write_varint(made, 5000 << 1)
        made += bytes(5000)
        write_varint(made, len(frame) << 1 | 1)
        made += frame
        with pytest.raises(DamagedError):
            decode(bytes(made))


def test_every_damaged_byte_of_an_anchor_chunk_is_refused() -> None:
    bits = model_weights(np.random.default_rng(6), 20_000)
    payload = encode_chunk(Dtype.BF16, [Segment(0, 3, 20_000)], None, [bits]).payload
    for at in range(0, len(payload), 61):
        damaged = bytearray(payload)
        damaged[at] ^= 0x10
        with pytest.raises(DamagedError):
            decode_chunk(bytes(damaged), schema=None, base=None)


PROGRAM = """
import hashlib, sys
import numpy as np
from sparsewire.sync.codec.chunk import decode_chunk, encode_chunk
from sparsewire.sync.codec.plan import Segment
from sparsewire.sync.types import Dtype
draws = np.random.default_rng(9)
hasher = hashlib.sha256()
for dtype in (Dtype.F8_E4M3, Dtype.BF16, Dtype.F32, Dtype.F64):
    values = (draws.standard_normal(50_001) * 0.02).astype(np.float32)
    bits = np.repeat(values.view(np.uint32) >> np.uint32(16), 2).astype(dtype.bits)
    parts = [bits[:3], bits[3:70_000], bits[70_000:]]
    segments = [Segment(n, 7, len(part)) for n, part in enumerate(parts)]
    chunk = encode_chunk(dtype, segments, None, parts)
    decoded = decode_chunk(chunk.payload, schema=None, base=None)
    assert all(np.array_equal(a.values, b) for a, b in zip(decoded.patches, parts, strict=True))
    assert decoded.digest_changes == chunk.digest_changes
    hasher.update(chunk.payload)
print(hasher.hexdigest())
"""


def test_every_build_writes_the_same_anchor() -> None:
    def run(**variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    expected = run(SPARSEWIRE_NATIVE="0")
    assert len(expected) == 2 * hashlib.sha256().digest_size
    best = load_kernel() if LIBRARY.exists() else None
    for isa in Isa if best is not None else ():
        if best is not None and isa <= best.isa:
            assert run(SPARSEWIRE_NATIVE="require", SPARSEWIRE_ISA=isa.name.lower()) == expected
