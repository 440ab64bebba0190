"""The two byte streams that chunks are made of: whole bytes, and unsigned integers of any size.

Pure. Both are bounded from outside: the reader is told how many entries to expect, allocates only for those, and
refuses whatever does not come out exactly. Integers are split into a token (the position of the highest bit and the
two bits below it), which zstd codes with Huffman tables, and the bits below that, which are noise and go out raw as
bit planes. Measured on real deltas against bytes with an escape: 0.3 % smaller at 1 % density, and no worse at any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from sparsewire.sync.errors import DamagedError

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
Bytes = npt.NDArray[np.uint8]

ZSTD_LEVEL = 1
"""Higher levels gain less than 0.5 % on these streams."""

_MANTISSA_BITS = 2
_IMPLICIT = 1 << _MANTISSA_BITS
MAX_INTEGER = (1 << 63) - 1
"""The largest integer that a stream may carry."""
_MAX_TOKEN = ((62 - _MANTISSA_BITS + 1) << _MANTISSA_BITS) + _IMPLICIT - 1
MAX_VARINT_BYTES = 9

RAW, ZSTD = 0, 1
"""Codings of a byte stream."""


def write_varint(out: bytearray, value: int) -> None:
    """Append `value` (0..2^63-1) as LEB128: seven bits a byte, low bits first."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


class Reader:
    """A cursor over received bytes; every read is checked against what is left."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes.

        Raises:
            DamagedError: fewer are left.
        """
        if size > self.left:
            raise DamagedError(f"chunk: {size} bytes expected, {self.left} left: fetch it again")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def peek(self, size: int) -> memoryview:
        """Return the next `size` bytes and leave them to be read.

        Raises:
            DamagedError: fewer are left.
        """
        part = self.take(size)
        self._at -= size
        return part

    def varint(self) -> int:
        """Return the next LEB128 number.

        Raises:
            DamagedError: it is cut off or longer than nine bytes.
        """
        value = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value
        raise DamagedError(f"chunk: a number has more than {MAX_VARINT_BYTES} bytes: fetch it again")

    def finish(self) -> None:
        """Check that everything was read.

        Raises:
            DamagedError: bytes are left over.
        """
        if self.left:
            raise DamagedError(f"chunk: {self.left} bytes left over: fetch it again")


def write_bytes(out: bytearray, data: Bytes) -> None:
    """Append a byte stream: varint of 2 * stored length + coding, then the stored bytes.

    Coding 1 is one zstd frame that names its content size; coding 0, taken where that is not smaller, is verbatim.
    """
    stored = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data.data) if data.size else b""
    if data.size and len(stored) < data.size:
        write_varint(out, len(stored) << 1 | ZSTD)
        out += stored
    else:
        write_varint(out, data.size << 1 | RAW)
        out += data.data


def read_bytes(reader: Reader, size: int) -> Bytes:
    """Read a byte stream that must hold exactly `size` bytes; allocates no more than that.

    Raises:
        DamagedError: another size, or not a zstd frame.
    """
    head = reader.varint()
    stored = reader.take(head >> 1)
    if head & 1 == RAW:
        if len(stored) != size:
            raise DamagedError(f"chunk: a stream has {len(stored)} bytes instead of {size}: fetch it again")
        return np.frombuffer(stored, np.uint8)
    try:
        # The frame states its own size and zstd would allocate that much, so it is compared first.
        stated = zstandard.frame_content_size(stored)
        if stated != size:
            raise DamagedError(f"chunk: a stream states {stated} bytes instead of {size}: fetch it again")
        data = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"chunk: a stream is not a zstd frame ({error}): fetch it again") from error
    if len(data) != size:
        raise DamagedError(f"chunk: a stream has {len(data)} bytes instead of {size}: fetch it again")
    return np.frombuffer(data, np.uint8)


def split_tokens(values: Unsigned) -> tuple[Bytes, Bytes, Unsigned]:
    """Return (tokens, number of low bits, values + 4) of integers up to `MAX_INTEGER`."""
    wide: type[np.unsignedinteger[Any]] = np.uint64 if values.dtype.itemsize > 2 else np.uint32
    lifted: Unsigned = values.astype(wide)
    lifted += wide(_IMPLICIT)
    exponents = ((lifted.astype(np.float64).view(np.uint64) >> np.uint64(52)) - np.uint64(1023)).astype(np.uint8)
    if values.dtype.itemsize == 8:
        # Above 2^53 the conversion may round up to the next power of two.
        exponents -= (lifted >> exponents.astype(np.uint64)) == 0
    shifts = exponents - np.uint8(_MANTISSA_BITS)
    leading = (lifted >> shifts.astype(lifted.dtype)).astype(np.uint8)
    tokens = (shifts << np.uint8(_MANTISSA_BITS)) + (leading - np.uint8(_IMPLICIT))
    return tokens, shifts, lifted


def write_integers(out: bytearray, values: Unsigned) -> None:
    """Append integers of 0..`MAX_INTEGER`: a byte stream of tokens, then bit planes.

    With w = value + 4 and s = floor(log2 w) - 2, the token is 4 * s + (w >> s) - 4. Plane j holds bit j of w for
    every value whose s exceeds j, in order, eight to a byte from the lowest bit up, padded with zeros to a whole byte.
    """
    tokens, shifts, lifted = split_tokens(values)
    write_bytes(out, tokens)
    for plane in range(int(shifts.max(initial=0))):
        inside = shifts > plane
        shifts, lifted = shifts[inside], lifted[inside]
        bits = (lifted >> lifted.dtype.type(plane)).astype(np.uint8) & np.uint8(1)
        out += np.packbits(bits, bitorder="little").data


def read_integers(reader: Reader, count: int, limit: int) -> npt.NDArray[np.uint64]:
    """Read `count` integers, none above `limit`.

    Raises:
        DamagedError: tokens or planes are not what `count` asks for, or a value exceeds `limit`.
    """
    tokens = read_bytes(reader, count)
    if count and int(tokens.max()) > _MAX_TOKEN:
        raise DamagedError(f"chunk: integer token {int(tokens.max())} exceeds {_MAX_TOKEN}: fetch it again")
    shifts = tokens >> np.uint8(_MANTISSA_BITS)
    values = ((tokens & np.uint8(_IMPLICIT - 1)) + np.uint8(_IMPLICIT)).astype(np.uint64)
    values <<= shifts.astype(np.uint64)
    inside = np.flatnonzero(shifts)
    shifts = shifts[inside]
    low = np.zeros(len(inside), np.uint64)
    at = np.arange(len(inside))
    for plane in range(int(shifts.max(initial=0))):
        if plane:
            chosen = shifts > plane
            shifts, at = shifts[chosen], at[chosen]
        packed = np.frombuffer(reader.take((len(at) + 7) // 8), np.uint8)
        bits = np.unpackbits(packed, count=len(at), bitorder="little").astype(np.uint64)
        bits <<= np.uint64(plane)
        if len(at) == len(low):
            low |= bits
        else:
            low[at] |= bits
    values[inside] |= low
    values -= np.uint64(_IMPLICIT)
    if count and int(values.max()) > limit:
        raise DamagedError(f"chunk: integer {int(values.max())} exceeds {limit}: fetch it again")
    return values
