"""Steps of wide classes as tokens and raw bits: the size of a step to one bit below its highest, then the rest of it.

Pure. A step that crosses the sign of a float is a small difference of magnitudes with a flipped sign bit, so steps
beyond a quarter of the range are brought back by half of it and flagged. Numbers are given in docs/format.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsewire.sync.types import Bits

Tokens = npt.NDArray[np.int64]


def num_tokens(width: int) -> int:
    """Return how many tokens there are for elements of `width` bytes; half of them are flipped ones."""
    return 64 * width - 16


def split_steps(steps: Bits) -> tuple[Tokens, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return (tokens, magnitudes, number of their low bits that the token leaves out) of steps that are not zero."""
    num_bits = 8 * steps.dtype.itemsize
    half, one = np.uint64(1 << (num_bits - 1)), np.uint64(1)
    # A quarter turn makes the flipped ones the upper half: |s| > 2^(W-2) is then one comparison without a sign.
    wide = steps.astype(np.uint64)
    mask = np.uint64((1 << num_bits) - 1)
    quarter = np.uint64(1 << (num_bits - 2))
    flipped = ((wide + quarter) & mask) > half
    brought = np.where(flipped, (wide + half) & mask, wide)
    negative = brought > half
    magnitudes = np.where(negative, (~brought + one) & mask, brought)
    lengths = bit_lengths(magnitudes) - 1
    dropped = np.maximum(lengths - 1, 0)
    leading = (magnitudes >> dropped.astype(np.uint64)).astype(np.int64) & 1
    large = magnitudes >= 4
    kinds = np.where(large, 2 * lengths + leading, np.where(large, np.uint64(0), magnitudes).astype(np.int64))
    tokens = 2 * kinds + negative + np.where(flipped, num_tokens(steps.dtype.itemsize) // 2, -2)
    return tokens, magnitudes, np.where(large, dropped, 0)


def num_raw_bits(tokens: Tokens, width: int) -> npt.NDArray[np.int64]:
    """Return how many raw bits follow each token."""
    kinds = (tokens - np.where(tokens >= num_tokens(width) // 2, num_tokens(width) // 2, -2)) >> 1
    return np.where(kinds >= 4, (kinds >> 1) - 1, 0)


def join_steps(tokens: Tokens, raw: npt.NDArray[np.uint64], width: int) -> Bits:
    """Return the steps, modulo 2^width, that `split_steps` took apart; none of them is zero."""
    flipped = tokens >= num_tokens(width) // 2
    lifted = tokens - np.where(flipped, num_tokens(width) // 2, -2)
    kinds = lifted >> 1
    dropped = num_raw_bits(tokens, width)
    leading = np.where(kinds >= 4, 2 + (kinds & 1), kinds).astype(np.uint64)
    magnitudes = (leading << dropped.astype(np.uint64)) | raw
    steps = np.where(lifted & 1, ~magnitudes + np.uint64(1), magnitudes)
    steps += np.where(flipped, np.uint64(1 << (8 * width - 1)), np.uint64(0))
    return steps.astype(f"<u{width}")


def num_predicted_tokens(width: int) -> int:
    """Return how many tokens there are for steps from a prediction: two more, 0 for no step, and 1, which never occurs."""
    return num_tokens(width) + 2


def split_predicted_steps(steps: Bits) -> tuple[Tokens, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Do what `split_steps` does for steps that may be zero."""
    tokens, magnitudes, widths = split_steps(steps)
    exact = steps == 0
    return np.where(exact, 0, tokens + 2), magnitudes, np.where(exact, 0, widths)


def num_predicted_raw_bits(tokens: Tokens, width: int) -> npt.NDArray[np.int64]:
    """Return how many raw bits follow each token of `split_predicted_steps`."""
    return np.where(tokens < 2, 0, num_raw_bits(np.maximum(tokens - 2, 0), width))


def join_predicted_steps(tokens: Tokens, raw: npt.NDArray[np.uint64], width: int) -> Bits:
    """Return the steps, modulo 2^width, that `split_predicted_steps` took apart."""
    steps = join_steps(np.maximum(tokens - 2, 0), raw, width)
    steps[tokens == 0] = 0
    return steps


def bit_lengths(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the number of bits of each value, 0 for 0."""
    left = values.copy()
    lengths = np.zeros(len(values), np.int64)
    half = 32
    while half:
        above = left >= np.uint64(1 << half)
        left = np.where(above, left >> np.uint64(half), left)
        lengths += np.where(above, half, 0)
        half //= 2
    return lengths + (left > 0)
