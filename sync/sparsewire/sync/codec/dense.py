"""The dense body: all new bits of a range, as byte planes. Anchors hold nothing else; a delta where it is smaller.

Pure. One byte stream for each byte of an element, lowest first, after a rotation that brings the sign to the bottom: the
highest byte of bf16 and f32 is then the whole exponent, which is what compresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.streams import Reader, read_bytes, write_bytes
from sparsewire.sync.types import Bits, Dtype


def encode_dense(bits: Bits) -> bytes:
    """Return the body that holds `bits`."""
    out = bytearray()
    for plane in _byte_planes(bits):
        write_bytes(out, np.ascontiguousarray(plane))
    return bytes(out)


def decode_dense(body: memoryview, dtype: Dtype, num_elements: int) -> Bits:
    """Return the `num_elements` new bits that the body holds.

    Raises:
        DamagedError: planes of another size, or bytes left over.
    """
    reader = Reader(body)
    rotated = np.empty((num_elements, dtype.width), np.uint8)
    for plane in range(dtype.width):
        rotated[:, plane] = read_bytes(reader, num_elements)
    reader.finish()
    bits: Bits = rotated.reshape(-1).view(dtype.bits)
    if dtype.width == 1:
        return bits
    top = bits.dtype.type(8 * dtype.width - 1)
    return (bits >> bits.dtype.type(1)) | (bits << top)


def _byte_planes(bits: Bits) -> list[npt.NDArray[np.uint8]]:
    width = bits.dtype.itemsize
    if width == 1:
        return [bits.view(np.uint8)]
    rotated = (bits << bits.dtype.type(1)) | (bits >> bits.dtype.type(8 * width - 1))
    return list(rotated.view(np.uint8).reshape(-1, width).T)
