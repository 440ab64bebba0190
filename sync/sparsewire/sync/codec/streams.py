"""Reading and writing what chunks are made of: numbers, and streams of bytes that may be compressed.

Pure. Everything is bounded from outside: the reader is told how much to expect, allocates only for that, and refuses
whatever does not come out exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from sparsewire.sync.errors import DamagedError

Bytes = npt.NDArray[np.uint8]

ZSTD_LEVEL = 1
"""Higher levels gain less than 0.5 % on these streams."""

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


def read_bytes(reader: Reader, size: int) -> Bytes:
    """Read a stream that must hold exactly `size` bytes; allocates no more than that.

    It is the varint of 2 * stored length + coding, then the stored bytes: for coding 1 one zstd frame that names its
    content size, for coding 0 the content itself.

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
