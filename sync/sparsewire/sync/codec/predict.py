"""Predict a bfloat16 weight from its last step: momentum moves it on by nearly as much again.

Pure. Both sides compute the prediction of a changed element from its bits in the base and in the version before, in single
precision, each operation rounded on its own, so that it is the same on every machine. Tiny, infinite and undefined
values predict themselves: no operation here has a subnormal operand or result, whose treatment a process may change.
"""

from __future__ import annotations

import numpy as np

from sparsewire.sync.codec.steps import bit_lengths
from sparsewire.sync.types import Bits, Indices

GAIN_UNIT = 128
"""Gains are in units of 1/128."""

GAINS = (112, 116, 120, 124, 128, 108, 104, 96, 80, 64, 136, 144)
"""What the writer tries, the most likely first. Adam with beta1 = 0.9 at a constant rate is best served by 0.875 on the traces,
at a rate that rises or with a short second moment by more."""

SAMPLE = 1024
"""Pairs, at most, that gains are tried on."""

_LOWEST_EXPONENT, _HIGHEST_EXPONENT = 32, 254


def predict(old: Bits, before: Bits, gain: int) -> Bits:
    """Return old + gain/128 * (old - before), rounded to bfloat16: what the new bits of each element are coded against."""
    value, earlier = (_single(bits) for bits in (old, before))
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (value + np.float32(gain / GAIN_UNIT) * (value - earlier)).view(np.uint32)
    rounded = ((moved + np.uint32(0x7FFF) + (moved >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    usable = _is_usable(old) & _is_usable(before) & ((rounded & np.uint16(0x7F80)) != 0x7F80)
    predicted: Bits = np.where(usable, rounded, old)
    return predicted


def choose_gain(old: Bits, before: Bits, new: Bits) -> int:
    """Return the gain of `GAINS` that leaves the shortest steps, on those of a sample that last moved by more than a unit."""
    old, before, new = (bits[:: max(-(-len(old) // SAMPLE), 1)] for bits in (old, before, new))
    last = old - before
    far = (last != 1) & (last != 0xFFFF)
    costs = [_num_bits((new - predict(old, before, gain))[far]) for gain in GAINS]
    return GAINS[costs.index(min(costs))]


def find_common(positions: Indices, others: Indices) -> tuple[Indices, Indices]:
    """Return where the numbers that two ascending arrays have in common stand in each of them."""
    if not len(others):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(others, positions), len(others) - 1)
    common = np.flatnonzero(others[places] == positions)
    return common, places[common]


def _single(bits: Bits) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_usable(bits: Bits) -> np.ndarray:
    exponent = bits >> np.uint16(7) & np.uint16(0xFF)
    return (exponent >= _LOWEST_EXPONENT) & (exponent <= _HIGHEST_EXPONENT)


def _num_bits(steps: Bits) -> int:
    """Return the bits of all magnitudes, steps read as two's complement."""
    sizes = np.minimum(steps, np.uint16(0) - steps)
    return int(bit_lengths(sizes.astype(np.uint64)).sum())
