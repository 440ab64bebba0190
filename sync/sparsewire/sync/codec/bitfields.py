"""Streams of bits: fields of any width, and unary numbers.

Pure. Fields fill bytes from the lowest bit up, their lowest bit first; a stream ends at a byte, padded with zeros. The
readers know how many entries to expect and refuse padding that is not zero, so a stream has one form only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.errors import DamagedError

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
Bools = npt.NDArray[np.uint8]
"""One bit an entry, 0 or 1."""


def pack_bits(bits: Bools) -> bytes:
    """Return `bits`, eight to a byte."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(data: memoryview, count: int) -> Bools:
    """Return exactly `count` bits.

    Raises:
        DamagedError: another number of bytes, or padding that is not zero.
    """
    if len(data) != num_bytes(count):
        raise DamagedError(f"chunk: {len(data)} bytes for {count} bits: fetch it again")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[count:].any():
        raise DamagedError("chunk: padding of a bit stream is not zero: fetch it again")
    return bits[:count]


def num_bytes(num_bits: int) -> int:
    """Bytes that hold `num_bits` bits."""
    return (num_bits + 7) // 8


def equal_fields(values: Unsigned, width: int) -> Bools:
    """Return the bits of fields that all have `width` bits; higher bits of `values` are left out."""
    out = np.empty((len(values), width), np.uint8)
    for place in range(width):
        out[:, place] = (values >> values.dtype.type(place)) & values.dtype.type(1)
    return out.reshape(-1)


def read_equal_fields(bits: Bools, width: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` fields of `width` bits each, from exactly as many bits."""
    values = np.zeros(count, np.uint64)
    for place, plane in enumerate(bits.reshape(count, width).T):
        values |= plane.astype(np.uint64) << np.uint64(place)
    return values


def fields(values: Unsigned, widths: npt.NDArray[np.int64]) -> Bools:
    """Return the bits of fields, each with its own width of 0..63; higher bits of `values` are left out."""
    starts = np.cumsum(widths) - widths
    out = np.zeros(int(widths.sum()), np.uint8)
    for place in range(int(widths.max(initial=0))):
        inside = np.flatnonzero(widths > place)
        chosen = values[inside]
        out[starts[inside] + place] = (chosen >> chosen.dtype.type(place)) & chosen.dtype.type(1)
    return out


def read_fields(bits: Bools, widths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return fields, each with its own width of 0..63, from exactly as many bits."""
    starts = np.cumsum(widths) - widths
    values = np.zeros(len(widths), np.uint64)
    for place in range(int(widths.max(initial=0))):
        inside = np.flatnonzero(widths > place)
        values[inside] |= bits[starts[inside] + place].astype(np.uint64) << np.uint64(place)
    return values


def unary(values: npt.NDArray[np.int64]) -> Bools:
    """Return for each value as many zero bits and a one bit."""
    ends = np.cumsum(values + 1)
    bits = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    bits[ends - 1] = 1
    return bits


def read_unary(data: memoryview, count: int) -> npt.NDArray[np.int64]:
    """Return exactly `count` unary numbers that end in the last byte of `data`.

    Raises:
        DamagedError: more or fewer numbers, or whole bytes after the last one.
    """
    if len(data) < num_bytes(count) or (not count and len(data)):
        raise DamagedError(f"chunk: {len(data)} bytes for {count} unary numbers: fetch it again")
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))
    if len(ends) != count or (count and ends[-1] < 8 * (len(data) - 1)):
        raise DamagedError(f"chunk: {len(ends)} unary numbers instead of {count}, or bytes after them: fetch it again")
    return np.diff(ends, prepend=-1) - 1
