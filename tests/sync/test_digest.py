"""Digests add up over any cut, follow a change, and see every bit, index and tensor."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits, tensor_digest, version_digest
from sparsewire.sync.types import Dtype, Schema, TensorSpec

MASK = (1 << 64) - 1


def reference(index: int, bits: int) -> TensorDigest:
    """The mixes of the module docstring, in plain integers."""
    key = (index * 0x9E3779B97F4A7C15 + bits) & MASK
    a = key
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        a = ((a ^ a >> 33) * factor) & MASK
    a ^= a >> 33
    b = (key + 0x632BE59BD9B4E019) & MASK
    b = ((b ^ b >> 30) * 0xBF58476D1CE4E5B9) & MASK
    b = ((b ^ b >> 27) * 0x94D049BB133111EB) & MASK
    b ^= b >> 31
    return TensorDigest(a, b)


def test_digest_is_the_sum_of_the_documented_mixes() -> None:
    bits = np.array([0, 1, 0xFFFF, 0x3F80], np.uint16)
    start = (1 << 40) + 7
    expected = sum((reference(start + i, int(x)) for i, x in enumerate(bits)), ZERO)
    assert digest_bits(bits, start=start) == expected
    assert digest_at(np.arange(start, start + 4), bits) == expected


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5), st.integers(0, 1 << 47))
def test_digest_commutes_with_every_cut(data: bytes, cuts: list[int], start: int) -> None:
    bits = np.frombuffer(data, np.uint8)
    edges = [0, *sorted(min(cut, len(bits)) for cut in cuts), len(bits)]
    parts = [digest_bits(bits[a:b], start=start + a) for a, b in pairwise(edges)]
    assert sum(parts, ZERO) == digest_bits(bits, start=start)


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=60))
def test_digest_follows_a_change_by_the_changed_elements_alone(pairs: list[tuple[int, int]]) -> None:
    old = np.array([pair[0] for pair in pairs], np.uint32)
    new = np.array([pair[1] for pair in pairs], np.uint32)
    at = np.flatnonzero(old != new)
    assert digest_bits(old) - digest_at(at, old[at]) + digest_at(at, new[at]) == digest_bits(new)


def test_blocks_larger_than_the_scratch_space_agree_with_single_positions() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, 100_001).astype(np.uint16)
    assert digest_bits(bits) == digest_at(np.arange(len(bits)), bits)


def test_swapped_elements_and_moved_elements_are_seen() -> None:
    bits = np.array([1, 2], np.uint16)
    assert digest_bits(bits) != digest_bits(bits[::-1].copy())
    assert digest_bits(bits) != digest_bits(bits, start=1)


def test_digest_sees_the_sign_of_zero_and_nan_payloads() -> None:
    zero = np.zeros(3, ml_dtypes.bfloat16)
    assert tensor_digest(zero) != tensor_digest(-zero)
    payload = np.full(3, np.nan, np.float32)
    other = payload.copy()
    other.view(np.uint32)[1] ^= 1
    assert tensor_digest(payload) != tensor_digest(other)


def test_layout_of_an_array_in_memory_does_not_count() -> None:
    array = np.random.default_rng(2).standard_normal((30, 50)).astype(np.float32)
    assert tensor_digest(np.asfortranarray(array)) == tensor_digest(array)
    assert tensor_digest(array.byteswap().view(">f4")) == tensor_digest(array)
    assert tensor_digest(array.reshape(-1)) == tensor_digest(array)


def test_empty_and_zero_dimensional_tensors_have_digests() -> None:
    assert tensor_digest(np.empty((0, 3), np.float16)) == ZERO
    assert tensor_digest(np.array(1, np.int64)) == reference(0, 1)


def test_digest_survives_its_bytes() -> None:
    digest = TensorDigest(1, MASK)
    assert TensorDigest.from_bytes(digest.to_bytes()) == digest
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        TensorDigest.from_bytes(b"abc")


def test_version_digest_depends_on_names_dtypes_shapes_and_digests() -> None:
    def version(name: str = "a", dtype: Dtype = Dtype.BF16, shape: tuple[int, ...] = (2, 3), a: int = 1) -> bytes:
        schema = Schema.of([TensorSpec(name=name, dtype=dtype, shape=shape)])
        return version_digest(schema, [TensorDigest(a, 2)])

    variants = {version(), version(name="b"), version(dtype=Dtype.F16), version(shape=(3, 2)), version(a=2)}
    assert len(variants) == 5
    assert version() == version()


def test_version_digest_needs_one_digest_for_each_tensor() -> None:
    schema = Schema.of([TensorSpec(name="a", dtype=Dtype.U8, shape=())])
    with pytest.raises(ValueError):
        version_digest(schema, [])
