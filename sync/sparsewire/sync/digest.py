"""Fingerprints of weights that follow the change: additive per tensor, cryptographic per version.

Pure. The digest of a tensor is the sum modulo 2^64, over its elements, of two independent 64-bit mixes of
(flat index, bits). Being a sum it can be updated in time proportional to the change, and it commutes with sharding:
digests of disjoint ranges of a tensor, taken at their global positions, add up to the tensor's. It finds faults, not
forgers; authenticity comes from the cryptographic hashes in manifests.

The mixes: key = index * 0x9E3779B97F4A7C15 + bits, modulo 2^64; mix A is the finaliser of MurmurHash3 (Appleby),
mix B the one of SplitMix64 (Steele, Lea, Flood 2014, variant 13 of Stafford) on key + 0x632BE59BD9B4E019.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.native import kernel
from sparsewire.sync.types import Bits, Dtype, Indices, Schema, bits_range

_MASK = (1 << 64) - 1
_INDEX_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_OFFSET_B = np.uint64(0x632BE59BD9B4E019)
_BLOCK = 1 << 15
"""Elements mixed at a time: three uint64 scratch arrays of this size stay in a 1 MiB level-2 cache."""
_COPY_ELEMENTS = 1 << 20
"""Elements of a strided or byte-swapped array that are copied at a time."""


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """128 bits as two sums modulo 2^64; addition joins disjoint parts, subtraction takes one away."""

    a: int
    b: int

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.a + other.a) & _MASK, (self.b + other.b) & _MASK)

    def __sub__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.a - other.a) & _MASK, (self.b - other.b) & _MASK)

    def to_bytes(self) -> bytes:
        """Return 16 bytes: a then b, little-endian."""
        return struct.pack("<QQ", self.a, self.b)

    @staticmethod
    def from_bytes(data: bytes) -> TensorDigest:
        """Parse 16 bytes.

        Raises:
            ValueError: another length.
        """
        if len(data) != 16:
            raise ValueError(f"a tensor digest has 16 bytes, not {len(data)}")
        return TensorDigest(*struct.unpack("<QQ", data))

    def __str__(self) -> str:
        return f"{self.a:016x}{self.b:016x}"


ZERO = TensorDigest(0, 0)
"""The digest of no elements."""


def _finish(
    key: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64], shifts: Sequence[int], factors: Sequence[int]
) -> int:
    """Mix `key` in place by xor-shift and multiply rounds, and return its sum modulo 2^64."""
    for round_, shift in enumerate(shifts):
        np.right_shift(key, np.uint64(shift), out=scratch)
        np.bitwise_xor(key, scratch, out=key)
        if round_ < len(factors):
            np.multiply(key, np.uint64(factors[round_]), out=key)
    return int(key.sum(dtype=np.uint64))


def _sum_of_mixes(
    key: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]
) -> TensorDigest:
    np.add(key, _OFFSET_B, out=second)
    a = _finish(key, scratch, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
    b = _finish(second, scratch, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    return TensorDigest(a, b)


def digest_bits(bits: Bits, *, start: int = 0) -> TensorDigest:
    """Return the digest of a flat range of a tensor whose first element has flat index `start`."""
    native = kernel()
    if native is not None:
        return TensorDigest(*native.digest_range(np.ascontiguousarray(bits), start))
    total = ZERO
    ramp = np.arange(_BLOCK, dtype=np.uint64) * _INDEX_FACTOR
    key, second, scratch = (np.empty(_BLOCK, np.uint64) for _ in range(3))
    for at in range(0, len(bits), _BLOCK):
        part = bits[at : at + _BLOCK]
        size = len(part)
        origin = np.uint64(((start + at) * int(_INDEX_FACTOR)) & _MASK)
        np.add(ramp[:size], origin, out=key[:size])
        np.add(key[:size], part, out=key[:size], casting="unsafe")
        total += _sum_of_mixes(key[:size], second[:size], scratch[:size])
    return total


def digest_at(indices: Indices, bits: Bits) -> TensorDigest:
    """Return the digest of the elements at flat positions `indices`; one entry of `bits` for each."""
    native = kernel()
    if native is not None:
        return TensorDigest(*native.digest_at(np.ascontiguousarray(indices, np.int64), np.ascontiguousarray(bits)))
    total = ZERO
    second, scratch = (np.empty(min(_BLOCK, len(bits)), np.uint64) for _ in range(2))
    for at in range(0, len(bits), _BLOCK):
        key = indices[at : at + _BLOCK].astype(np.uint64)
        size = len(key)
        key *= _INDEX_FACTOR
        key += bits[at : at + _BLOCK].astype(np.uint64)
        total += _sum_of_mixes(key, second[:size], scratch[:size])
    return total


def tensor_digest(array: npt.NDArray[Any]) -> TensorDigest:
    """Return the digest of a whole tensor, any supported dtype and shape; only its bits and their order count."""
    total = ZERO
    for start in range(0, array.size, _COPY_ELEMENTS):
        total += digest_bits(bits_range(array, start, _COPY_ELEMENTS), start=start)
    return total


def version_digest(schema: Schema, digests: Iterable[TensorDigest]) -> bytes:
    """Return the 32-byte SHA-256 over (name, dtype, shape, digest) of every tensor in schema order.

    Raises:
        ValueError: not exactly one digest a tensor.
    """
    hasher = hashlib.sha256(b"sparsewire version digest 1\n")
    for tensor, digest in zip(schema, digests, strict=True):
        name = tensor.name.encode()
        hasher.update(struct.pack("<I", len(name)) + name)
        hasher.update(struct.pack("<B", len(tensor.dtype)) + Dtype(tensor.dtype).encode())
        hasher.update(struct.pack(f"<B{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
        hasher.update(digest.to_bytes())
    return hasher.digest()
