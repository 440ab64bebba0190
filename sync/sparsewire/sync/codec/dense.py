"""The dense body: all new bits of ranges, as byte planes. Anchors hold nothing else; a delta where it is smaller.

Pure. One byte stream for each byte of an element, lowest first, after a rotation that brings the sign to the bottom: the
highest byte of bf16 and f32 is then the whole exponent, which is what compresses. Mantissas do not, and are stored as they
are. Whoever touches all bits anyhow also digests them: both directions return the digests of the ranges.

    bits ──► rotate, split ─┬─► low plane  ── a sample does not shrink ──► verbatim
              and digest    └─► high plane ── it does ───────────────────► zstd, mostly nothing but Huffman codes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import zstandard

from sparsewire.sync.codec.reference import join_bits
from sparsewire.sync.codec.streams import RAW, ZSTD, ZSTD_LEVEL, Bytes, Reader, read_bytes, write_varint
from sparsewire.sync.digest import TensorDigest, digest_bits
from sparsewire.sync.native import kernel
from sparsewire.sync.types import Bits, Dtype

_BLOCK = 1 << 16
"""Elements turned at a time: two arrays of them stay in a level-2 cache, which makes it three times as fast."""

_SAMPLE_PIECES = 8
_SAMPLE_BYTES = 1 << 14
"""What is looked at of a plane to choose its coding: pieces all over it; all of a smaller one."""

_WORTH_MATCHING = 15 / 16
"""Repetitions are looked for when that makes the sample so much smaller than Huffman codes alone: it takes three times as
long, and decoding twice as long. On exponents it makes it larger."""
_WORTH_CODING = 63 / 64
"""A plane is stored verbatim unless its sample shrinks by more than this: reading it then costs nothing."""

Piece = bytes | memoryview


def encode_dense(parts: Sequence[Bits], *, starts: Sequence[int]) -> tuple[list[Piece], list[TensorDigest]]:
    """Return the body that holds all `parts`, in pieces to be joined, and the digest of each part.

    `starts` are the flat positions of the parts in their tensors. At least one part, all of one dtype. The pieces may be
    views of `parts`.
    """
    parts = [np.ascontiguousarray(bits) for bits in parts]
    if parts[0].dtype.itemsize == 1:
        planes: Sequence[Bytes] = [join_bits(parts)]
        digests = _digests(parts, starts)
    elif (native := kernel()) is not None:
        planes, sums = native.split(parts, starts=starts)
        digests = [TensorDigest(*terms) for terms in sums.tolist()]
    else:
        planes, digests = split_planes(join_bits(parts)), _digests(parts, starts)
    return [piece for plane in planes for piece in _store(plane)], digests


def dense_size(bits: Bits) -> int:
    """Return how many bytes the body of these bits has."""
    pieces, _ = encode_dense([bits], starts=[0])
    return sum(map(len, pieces))


def decode_dense(
    body: memoryview, dtype: Dtype, *, counts: Sequence[int], starts: Sequence[int]
) -> list[tuple[Bits, TensorDigest]]:
    """Return the new bits that the body holds for each range, and their digest.

    Ranges have `counts` elements and begin at the flat positions `starts` of their tensors; at least one. Bits of one
    byte are views of the body, others of one new array.

    Raises:
        DamagedError: planes of another size, or bytes left over.
    """
    reader = Reader(body)
    num_elements = sum(counts)
    planes = [read_bytes(reader, num_elements) for _ in range(dtype.width)]
    reader.finish()
    native = kernel()
    if dtype.width > 1 and native is not None:
        bits, sums = native.join(planes, counts=counts, starts=starts)
        digests = [TensorDigest(*terms) for terms in sums.tolist()]
        return list(zip(_cut(bits, counts), digests, strict=True))
    parts = _cut(planes[0] if dtype.width == 1 else join_planes(planes, dtype), counts)
    return list(zip(parts, _digests(parts, starts), strict=True))


def _cut(bits: Bits, counts: Sequence[int]) -> list[Bits]:
    return [bits[a:b] for a, b in pairwise(accumulate(counts, initial=0))]


def _digests(parts: Sequence[Bits], starts: Sequence[int]) -> list[TensorDigest]:
    return [digest_bits(bits, start=start) for bits, start in zip(parts, starts, strict=True)]


def split_planes(bits: Bits) -> list[Bytes]:
    """Return one plane for each byte of an element, lowest byte first; what the kernel does, without it."""
    width = bits.dtype.itemsize
    planes = [np.empty(len(bits), np.uint8) for _ in range(width)]
    one, top = bits.dtype.type(1), bits.dtype.type(8 * width - 1)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        rotated = block << one
        rotated |= block >> top
        for place, plane in enumerate(planes):
            plane[start : start + _BLOCK] = rotated >> bits.dtype.type(8 * place)
    return planes


def join_planes(planes: Sequence[Bytes], dtype: Dtype) -> Bits:
    """Return the elements whose planes these are."""
    num_elements = len(planes[0])
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


def _store(plane: Bytes) -> tuple[Piece, Piece]:
    """Return head and stored bytes of a byte stream; see `streams.write_bytes`."""
    stored: Piece = plane.data
    coding = RAW
    compressor = _compressor(plane)
    if compressor is not None:
        packed = compressor.compress(plane.data)
        if len(packed) < plane.size:
            stored, coding = packed, ZSTD
    head = bytearray()
    write_varint(head, len(stored) << 1 | coding)
    return bytes(head), stored


def _compressor(plane: Bytes) -> zstandard.ZstdCompressor | None:
    """Return what suits the plane by a sample of it, or None if that does not shrink."""
    sample = plane
    if plane.size > _SAMPLE_BYTES:
        rows = plane[: plane.size - plane.size % _SAMPLE_PIECES].reshape(_SAMPLE_PIECES, -1)
        sample = np.ascontiguousarray(rows[:, : _SAMPLE_BYTES // _SAMPLE_PIECES])
    # Too small a table to find any but trivial repetitions, such as runs: what is left is coded by Huffman alone.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=17, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST
    )
    plain = zstandard.ZstdCompressor(compression_params=parameters)
    matching = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    plain_size, matching_size = (len(compressor.compress(sample.data)) for compressor in (plain, matching))
    if min(plain_size, matching_size) >= _WORTH_CODING * sample.size:
        return None
    return matching if matching_size < _WORTH_MATCHING * plain_size else plain
