"""Dtypes by width, bits of arrays of every layout, and the canonical form of a schema."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparsewire.sync.errors import DamagedError, SchemaMismatchError
from sparsewire.sync.types import Dtype, Schema, TensorSpec, bits_of, bits_range, describe_difference


def spec(name: str, *shape: int, dtype: Dtype = Dtype.BF16) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_every_dtype_is_found_again_from_its_numpy_dtype_and_has_bits_of_its_width(dtype: Dtype) -> None:
    assert Dtype.of(dtype.numpy) is dtype
    assert dtype.bits.itemsize == dtype.width == dtype.numpy.itemsize
    assert bits_of(np.zeros(3, dtype.numpy)).dtype == dtype.bits


@pytest.mark.parametrize("dtype", ["c8", "S4", "O", "M8[s]", ml_dtypes.int4])
def test_dtype_without_counterpart_is_refused(dtype: Any) -> None:
    with pytest.raises(SchemaMismatchError, match="cannot be published"):
        Dtype.of(dtype)


def test_bits_of_a_contiguous_array_are_a_view() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.shares_memory(bits_of(array), array)
    assert np.shares_memory(bits_range(array, 5, 4), array)


def test_bits_of_a_zero_dimensional_array_are_one_element() -> None:
    assert bits_of(np.array(1.0, ml_dtypes.bfloat16)).tolist() == [0x3F80]
    assert bits_range(np.array(1.0, ml_dtypes.bfloat16), 0, 1).tolist() == [0x3F80]


def test_big_endian_arrays_keep_their_nan_payloads() -> None:
    patterns = np.array([0x7FA00001, 0xFFC12345, 0x80000000], np.uint32)
    big = patterns.byteswap().view(">f4")
    assert bits_of(big).tolist() == patterns.tolist()
    assert bits_range(big[::2], 0, 2).tolist() == patterns[::2].tolist()


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype("<f8"), np.dtype(">u2"), np.dtype("u1")])
def test_range_of_a_strided_array_is_the_range_of_its_copy(dtype: np.dtype[Any]) -> None:
    base = np.arange(7 * 11, dtype=np.int64).astype(dtype).reshape(7, 11)
    for array in (base, base.T, base[::2, 1::3], base[::-1]):
        whole = bits_of(array)
        for start, count in ((0, array.size), (3, 5), (array.size - 2, 10), (array.size, 4)):
            assert bits_range(array, start, count).tolist() == whole[start : start + count].tolist()


def test_schema_survives_its_canonical_bytes() -> None:
    schema = Schema.of([spec("b", 2, 3), spec("a"), spec("c", 0, dtype=Dtype.F8_E4M3)])
    assert [tensor.name for tensor in schema] == ["a", "b", "c"]
    assert Schema.from_bytes(schema.to_bytes()) == schema
    assert schema.num_elements == 7
    assert schema.num_bytes == 14
    assert schema.index == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "data",
    [
        b"a\0BF16\0002,3",
        b"a\0BF16\0\n\n",
        b"a\0NO\0\n",
        b"b\0U8\0\na\0U8\0\n",
        b"a\0U8\0-1\n",
        b"a\0U8\0 1\n",
        b"\xff\n",
    ],
)
def test_bytes_that_are_no_canonical_schema_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        Schema.from_bytes(data)


def test_names_must_be_distinct_and_not_empty() -> None:
    with pytest.raises(SchemaMismatchError, match="sorted and distinct"):
        Schema.of([spec("a"), spec("a", 2)])
    with pytest.raises(SchemaMismatchError, match="must have"):
        spec("")


def test_difference_names_what_is_missing_unknown_and_of_another_shape() -> None:
    ours = Schema.of([spec("a", 2), spec("b", 3)])
    theirs = Schema.of([spec("b", 4), spec("c", 1)])
    text = describe_difference(ours, theirs)
    assert "c missing" in text
    assert "a unknown to the run" in text
    assert "b is BF16[3], the run has BF16[4]" in text
    assert describe_difference(ours, ours) == ""


def test_name_that_would_break_the_canonical_form_is_refused() -> None:
    for name in ("a\0b", "a\nb"):
        with pytest.raises(SchemaMismatchError):
            spec(name)
