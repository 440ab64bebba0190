"""Golomb-Rice codes of gaps: a geometric distribution coded within 0.05 bits of its entropy, without a dependence.

Pure. A gap splits into `gap >> r` in unary and its r low bits; the two go into streams of their own, so that both
sides work on whole arrays. Rice parameters are the choice of the writer and stand in the head of the body.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsewire.sync.types import Indices

MAX_PARAMETER = 24
"""Gaps within a chunk are below 2^24."""


def rice_parameter(gaps: npt.NDArray[np.int64]) -> int:
    """Return the parameter that needs the fewest bits, the smallest of equals; the cost is convex in it."""
    parameter = 0
    quotients = int(gaps.sum())
    while parameter < MAX_PARAMETER:
        halved = int((gaps >> (parameter + 1)).sum())
        if len(gaps) + halved >= quotients:
            break
        parameter, quotients = parameter + 1, halved
    return parameter


def gaps_of(ranks: Indices) -> npt.NDArray[np.int64]:
    """Return how many numbers lie between each of the ascending `ranks` and the one before it, or the beginning."""
    return np.diff(ranks, prepend=-1) - 1


def ranks_of(gaps: npt.NDArray[np.int64]) -> Indices:
    """Return the ranks that have these gaps."""
    return np.cumsum(gaps + 1) - 1
