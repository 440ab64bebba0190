"""The dense body: all new bits of a range, as byte planes. Anchors hold nothing else; a delta where it is smaller.

Pure. One byte stream for each byte of an element, lowest first, after a rotation that brings the sign to the bottom: the
highest byte of bf16 and f32 is then the whole exponent, which is what compresses.
"""

from __future__ import annotations

import numpy as np

from sparsewire.sync.codec.streams import Reader, read_bytes, write_bytes
from sparsewire.sync.types import Bits, Dtype

_BLOCK = 1 << 16
"""Elements turned at a time: two arrays of them stay in a level-2 cache, which makes it three times as fast."""


def encode_dense(bits: Bits) -> bytes:
    """Return the body that holds `bits`."""
    width = bits.dtype.itemsize
    out = bytearray()
    if width == 1:
        write_bytes(out, np.ascontiguousarray(bits))
        return bytes(out)
    planes = [np.empty(len(bits), np.uint8) for _ in range(width)]
    one, top = bits.dtype.type(1), bits.dtype.type(8 * width - 1)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        rotated = block << one
        rotated |= block >> top
        for place, plane in enumerate(planes):
            plane[start : start + _BLOCK] = rotated >> bits.dtype.type(8 * place)
    for plane in planes:
        write_bytes(out, plane)
    return bytes(out)


def decode_dense(body: memoryview, dtype: Dtype, num_elements: int) -> Bits:
    """Return the `num_elements` new bits that the body holds.

    Raises:
        DamagedError: planes of another size, or bytes left over.
    """
    reader = Reader(body)
    planes = [read_bytes(reader, num_elements) for _ in range(dtype.width)]
    reader.finish()
    if dtype.width == 1:
        return planes[0]
    bits: Bits = np.empty(num_elements, dtype.bits)
    kind = bits.dtype.type
    for start in range(0, num_elements, _BLOCK):
        rotated = planes[-1][start : start + _BLOCK].astype(dtype.bits)
        for plane in planes[-2::-1]:
            rotated <<= kind(8)
            rotated |= plane[start : start + _BLOCK]
        block = bits[start : start + _BLOCK]
        np.right_shift(rotated, kind(1), out=block)
        rotated <<= kind(8 * dtype.width - 1)
        block |= rotated
    return bits
