"""Values that cross module borders in `sync`: dtypes by bit width, tensor descriptions, the schema of a run.

Pure: no I/O, no clock, no randomness. Every value checks itself on construction. Dtype names are those of the
safetensors format (https://huggingface.co/docs/safetensors), so a schema can be compared with a checkpoint as is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sparsewire.sync.errors import DamagedError, SchemaMismatchError

Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""A flat array of unsigned integers holding the bit patterns of elements."""

Indices: TypeAlias = npt.NDArray[np.int64]
"""Sorted, distinct flat positions."""

MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 4096
MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48


class Dtype(StrEnum):
    """Element types, by their safetensors names; what matters to the sync path is only the width."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    U16 = "U16"
    I16 = "I16"
    U32 = "U32"
    I32 = "I32"
    U64 = "U64"
    I64 = "I64"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E8M0 = "F8_E8M0"
    F16 = "F16"
    BF16 = "BF16"
    F32 = "F32"
    F64 = "F64"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (little-endian) whose arrays carry this dtype."""
        return _NUMPY[self]

    @property
    def bits(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The unsigned integer dtype of equal width, through which bits are compared."""
        return _BITS[self.width]

    @property
    def width(self) -> int:
        """Bytes per element: 1, 2, 4 or 8."""
        return int(_NUMPY[self].itemsize)

    @staticmethod
    def of(dtype: npt.DTypeLike) -> Dtype:
        """Return the Dtype of a NumPy dtype.

        Raises:
            SchemaMismatchError: the dtype has no counterpart (complex, strings, objects, sub-byte types).
        """
        wanted = np.dtype(dtype).newbyteorder("<")
        found = _FROM_NUMPY.get(wanted)
        if found is None:
            raise SchemaMismatchError(
                f"dtype {np.dtype(dtype)} cannot be published; supported are {', '.join(sorted(Dtype))}: "
                "cast the tensor or view its bytes as an integer dtype"
            )
        return found


_NUMPY: Mapping[Dtype, np.dtype[Any]] = {
    Dtype.BOOL: np.dtype(np.bool_),
    Dtype.U8: np.dtype("<u1"),
    Dtype.I8: np.dtype("<i1"),
    Dtype.U16: np.dtype("<u2"),
    Dtype.I16: np.dtype("<i2"),
    Dtype.U32: np.dtype("<u4"),
    Dtype.I32: np.dtype("<i4"),
    Dtype.U64: np.dtype("<u8"),
    Dtype.I64: np.dtype("<i8"),
    Dtype.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    Dtype.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    Dtype.F8_E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    Dtype.F8_E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
    Dtype.F8_E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    Dtype.F16: np.dtype("<f2"),
    Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    Dtype.F32: np.dtype("<f4"),
    Dtype.F64: np.dtype("<f8"),
}
_FROM_NUMPY = {numpy_dtype: dtype for dtype, numpy_dtype in _NUMPY.items()}
_BITS: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def bits_of(array: npt.NDArray[Any]) -> Bits:
    """Return the bits of `array` as a flat unsigned array in C order; a view where the memory layout allows.

    Big-endian arrays are byte-swapped, never converted, so NaN payloads survive.

    Raises:
        SchemaMismatchError: the dtype is not supported.
    """
    dtype = Dtype.of(array.dtype)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        array = array.byteswap().view(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(dtype.bits)


def bits_range(array: npt.NDArray[Any], start: int, count: int) -> Bits:
    """Return the bits of flat positions `start`.. of `array` in C order, as many of `count` as there are.

    A view where the memory layout allows; a strided or memory-mapped array is never copied beyond the range.

    Raises:
        SchemaMismatchError: the dtype is not supported.
    """
    if array.flags.c_contiguous:
        return bits_of(array.reshape(-1)[start : start + count])
    bits = array.view(f"{array.dtype.byteorder if array.dtype.byteorder == '>' else '<'}u{array.dtype.itemsize}")
    return bits_of(bits.flat[start : start + count])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of the view."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise SchemaMismatchError(f"tensor name {self.name!r} must be printable text: rename the tensor")
        if not self.name or len(self.name.encode()) > MAX_NAME_BYTES:
            raise SchemaMismatchError(f"tensor name {self.name[:80]!r} must have 1..{MAX_NAME_BYTES} bytes")
        if len(self.shape) > MAX_DIMS or any(extent < 0 for extent in self.shape):
            raise SchemaMismatchError(f"tensor {self.name}: shape {self.shape} is not a shape")
        if self.num_elements > MAX_ELEMENTS:
            raise SchemaMismatchError(f"tensor {self.name}: {self.num_elements} elements, at most {MAX_ELEMENTS}")

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor; 1 for a 0-dim tensor."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the view's dtype."""
        return self.num_elements * self.dtype.width


@dataclass(frozen=True, slots=True)
class Schema:
    """All tensors of a run in name order; a tensor's place in it is its number in chunks and manifests."""

    tensors: tuple[TensorSpec, ...]
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise SchemaMismatchError("schema: tensor names must be sorted and distinct")
        if len(names) > MAX_TENSORS:
            raise SchemaMismatchError(f"schema: {len(names)} tensors, at most {MAX_TENSORS}")
        object.__setattr__(self, "index", {name: number for number, name in enumerate(names)})

    @staticmethod
    def of(specs: Sequence[TensorSpec]) -> Schema:
        """Return the schema of `specs`, in any order.

        Raises:
            SchemaMismatchError: two specs share a name.
        """
        return Schema(tuple(sorted(specs, key=lambda spec: spec.name)))

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, number: int) -> TensorSpec:
        return self.tensors[number]

    @property
    def num_elements(self) -> int:
        """Elements of all tensors together."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full view: what shipping a version whole would cost before compression."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def to_bytes(self) -> bytes:
        """Serialise: one line a tensor, `name NUL dtype NUL shape` with extents joined by commas; see docs/format.md."""
        lines = (f"{t.name}\0{t.dtype}\0{','.join(map(str, t.shape))}\n" for t in self.tensors)
        return "".join(lines).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Schema:
        """Parse what `to_bytes` wrote.

        Raises:
            DamagedError: the bytes are not a schema.
        """
        specs = []
        try:
            for line in data.decode().split("\n")[:-1]:
                name, dtype, shape = line.split("\0")
                extents = tuple(int(extent) for extent in shape.split(",")) if shape else ()
                specs.append(TensorSpec(name=name, dtype=Dtype(dtype), shape=extents))
            schema = Schema(tuple(specs))
        except (ValueError, SchemaMismatchError) as error:
            raise DamagedError(f"schema object is not a schema: {error}") from error
        if schema.to_bytes() != data:
            raise DamagedError("schema object is not in canonical form")
        return schema

    @property
    def sha256(self) -> bytes:
        """The identity of the schema: 32 bytes, named by every manifest."""
        return hashlib.sha256(self.to_bytes()).digest()


def describe_difference(ours: Schema, theirs: Schema, *, limit: int = 5) -> str:
    """Return a short text naming tensors that `ours` and `theirs` do not share; empty when they are equal."""
    mine = {tensor.name: tensor for tensor in ours}
    other = {tensor.name: tensor for tensor in theirs}
    parts = [f"{name} missing" for name in other if name not in mine]
    parts += [f"{name} unknown to the run" for name in mine if name not in other]
    parts += [
        f"{name} is {mine[name].dtype}{list(mine[name].shape)}, the run has {other[name].dtype}{list(other[name].shape)}"
        for name in mine
        if name in other and mine[name] != other[name]
    ]
    more = f" and {len(parts) - limit} more" if len(parts) > limit else ""
    return "; ".join(parts[:limit]) + more
