"""The least that positions and steps can cost, given the exponent of the old weight and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from inputs import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bits in all, by an ideal coder that knows the statistics for nothing."""

    position_bits: float
    step_bits: float

    @property
    def num_bytes(self) -> float:
        return (self.position_bits + self.step_bits) / 8


def exponent_bound(old: Words, new: Words) -> Bound:
    """Return the conditional entropy of who changes and of the step of bf16 weights, summed over exponents."""
    exponent = (old >> 7) & 0xFF
    changed = old != new
    all_of, changed_of = np.bincount(exponent, minlength=256), np.bincount(exponent[changed], minlength=256)
    positions = sum(_code_length(np.array([k, n - k])) for n, k in zip(all_of, changed_of, strict=True))
    pairs = exponent[changed].astype(np.int64) << 16 | (new - old)[changed]
    joint = _code_length(np.unique(pairs, return_counts=True)[1])
    return Bound(position_bits=positions, step_bits=joint - _code_length(changed_of))


def _code_length(counts: npt.NDArray[Any]) -> float:
    """Return the bits that symbols with these counts take under their own distribution."""
    present = counts[counts > 0].astype(np.float64)
    return float(-(present * np.log2(present / present.sum())).sum())
