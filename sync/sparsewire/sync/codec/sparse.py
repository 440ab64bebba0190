"""The sparse body: what changed, coded so that a reader needs the base at the changed elements only.

Pure. The base-free profile uses it: for receivers that cannot scan their weights, and links faster than the scan. Gaps
between changes stand in the coordinates of all sparse segments end to end; then come a sign bit and a magnitude for each
change, ordered by the exponent of the old value, which the decoder knows once it knows the positions: weights of one
binade move by like steps, so equal tokens come together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.rice import gaps_of
from sparsewire.sync.codec.streams import Reader, Unsigned, read_integers, split_tokens, write_integers
from sparsewire.sync.types import Bits, Dtype, Indices

ESTIMATE_SAMPLE = 1 << 16
"""Changes from which the size of the sparse mode is estimated: the entropy of 200 tokens is then known to 0.2 %."""
TABLE_BITS_PER_TOKEN = 4
"""What a distinct token costs in zstd's Huffman table, about."""

_CLASS_SHIFT: Mapping[Dtype, int] = {
    Dtype.BOOL: 0,
    Dtype.U8: 3,
    Dtype.I8: 3,
    Dtype.F8_E4M3: 3,
    Dtype.F8_E4M3FNUZ: 3,
    Dtype.F8_E5M2: 2,
    Dtype.F8_E5M2FNUZ: 2,
    Dtype.F8_E8M0: 0,
    Dtype.U16: 7,
    Dtype.I16: 7,
    Dtype.BF16: 7,
    Dtype.F16: 10,
    Dtype.U32: 23,
    Dtype.I32: 23,
    Dtype.F32: 23,
    Dtype.U64: 52,
    Dtype.I64: 52,
    Dtype.F64: 52,
}
"""Mantissa bits below the exponent; integer dtypes are taken for the bits of bf16, f32 and f64, as callers pass those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseStreams:
    """A sparse body taken apart; steps are in class order, each within its range."""

    gaps: Unsigned
    negative: npt.NDArray[np.bool_]
    magnitudes: Unsigned
    """|step| - 1."""

    def positions(self) -> Indices:
        """Return the changed positions in the space of all sparse segments, ascending."""
        return np.cumsum(self.gaps.astype(np.int64) + 1) - 1

    def new_bits(self, dtype: Dtype, old: Bits) -> Bits:
        """Return the new bits of the changed elements, given their `old` ones by position."""
        order = _class_order(dtype, old)
        steps = self.magnitudes.astype(dtype.bits) + dtype.bits.type(1)
        np.negative(steps, out=steps, where=self.negative)
        new = np.empty_like(old)
        new[order] = old[order] + steps
        return new


def encode_sparse(dtype: Dtype, positions: Indices, old: Bits, new: Bits) -> bytes:
    """Return the body for changes at `positions`: gaps; signs in class order; magnitudes minus one in class order."""
    out = bytearray()
    write_integers(out, gaps_of(positions).astype(np.uint32))
    negative, magnitudes = _split_steps(dtype, old, new)
    order = _class_order(dtype, old)
    out += np.packbits(negative[order], bitorder="little").data
    write_integers(out, magnitudes[order])
    return bytes(out)


def parse_sparse(body: memoryview, *, dtype: Dtype, num_changed: int, num_elements: int) -> SparseStreams:
    """Read what `encode_sparse` wrote; it needs no base.

    Raises:
        DamagedError: streams of another length, numbers beyond their range, or bytes left over.
    """
    reader = Reader(body)
    gaps = read_integers(reader, num_changed, num_elements)
    packed = np.frombuffer(reader.take((num_changed + 7) // 8), np.uint8)
    negative = np.unpackbits(packed, count=num_changed, bitorder="little").view(np.bool_)
    magnitudes = read_integers(reader, num_changed, (1 << (8 * dtype.width - 1)) - 1)
    reader.finish()
    return SparseStreams(gaps=gaps, negative=negative, magnitudes=magnitudes)


def estimate_sparse_size(dtype: Dtype, positions: Indices, old: Bits, new: Bits) -> float:
    """Return about how many bytes the body needs, by the entropy of a sample of its tokens."""
    stride = -(-len(positions) // ESTIMATE_SAMPLE)
    _, magnitudes = _split_steps(dtype, old[::stride], new[::stride])
    bits_per_change, table_bits = 1.0, 0
    for values in (gaps_of(positions)[::stride].astype(np.uint32), magnitudes):
        tokens, shifts, _ = split_tokens(values)
        shares = np.bincount(tokens) / len(tokens)
        shares = shares[shares > 0]
        table_bits += TABLE_BITS_PER_TOKEN * len(shares)
        bits_per_change += float(-(shares * np.log2(shares)).sum()) + float(shifts.mean())
    return (bits_per_change * len(positions) + table_bits) / 8


def _split_steps(dtype: Dtype, old: Bits, new: Bits) -> tuple[npt.NDArray[np.bool_], Unsigned]:
    """Return (is negative, |step| - 1) of the modular steps read as two's complement."""
    steps = new - old
    negative = steps.view(f"i{dtype.width}") < 0
    sign_fill = np.where(negative, steps.dtype.type(np.iinfo(steps.dtype).max), steps.dtype.type(0))
    magnitudes: Unsigned = (steps ^ sign_fill) - sign_fill
    magnitudes -= magnitudes.dtype.type(1)
    return negative, magnitudes


def _class_order(dtype: Dtype, old: Bits) -> npt.NDArray[np.intp]:
    """The stable order by exponent field, sign left out; both sides compute it from the old bits."""
    one = old.dtype.type(1)
    fields = (old << one) >> old.dtype.type(_CLASS_SHIFT[dtype] + 1)
    return np.argsort(fields.astype(np.uint8 if dtype.width < 8 else np.uint16), kind="stable")
