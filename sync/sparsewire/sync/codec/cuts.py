"""Where to cut the exponents of a chunk into classes: the partition that makes its classed body smallest.

Pure. Any cuts give a correct body; these come from dynamic programming over the keys, with the size that each range of
keys would take as one class, estimated from a sample. They change slowly: those of the version before serve as well, so
a publisher keeps them and fits again now and then. Measured on the traces of docs/codec.md: fitting to a 1/16 sample costs
0.2 % of the body, the cuts of the version before nothing, those of another model 1-2 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.classes import MAX_CLASSES, NUM_KEYS, element_keys
from sparsewire.sync.codec.steps import num_tokens, split_steps
from sparsewire.sync.types import Bits

_BLOCK = 1 << 12
"""Elements sampled at a time."""
_SAMPLES_PER_BLOCK = 8
"""One block in so many is looked at."""
_MIN_SAMPLE = 1 << 18
"""Spaces up to this size are looked at whole."""
_MAX_GROUPS = 64
"""Keys are halved until no more than so many hold an element; bfloat16 weights have about 40."""
_ENTRY_BITS = 40.0
"""What a class costs in the head: counts and parameter."""
_CODE_BITS, _PRESENCE_BITS = 5.0, 1.0

Floats = npt.NDArray[np.float64]


def fit_cuts(old: Sequence[Bits], new: Sequence[Bits]) -> bytes:
    """Return the cuts that suit the change of these arrays, at least one element in all, the same for equal input."""
    num_elements = sum(map(len, old))
    stride = 1 if num_elements <= _MIN_SAMPLE else _SAMPLES_PER_BLOCK
    before, after = _sample(old, stride), _sample(new, stride)
    elements = np.bincount(element_keys(before), minlength=NUM_KEYS).astype(np.float64)
    changed = np.flatnonzero(before != after)
    before, after = before[changed], after[changed]
    width = before.dtype.itemsize
    tokens, _, raw_bits = split_steps(after - before)
    keys = element_keys(before).astype(np.int64)
    histogram = np.bincount(keys * num_tokens(width) + tokens, minlength=NUM_KEYS * num_tokens(width))
    counts = histogram.reshape(NUM_KEYS, num_tokens(width)).astype(np.float64)
    raw = np.bincount(keys, weights=raw_bits, minlength=NUM_KEYS)
    return _best_partition(elements * stride, counts * stride, raw * stride)


def _sample(parts: Sequence[Bits], stride: int) -> Bits:
    """Every `stride`-th block of the space; a part that ends within a block ends the block."""
    if stride == 1:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    blocks, skipped = [], 0
    for part in parts:
        first = -skipped % (stride * _BLOCK)
        blocks += [part[at : at + _BLOCK] for at in range(first, len(part), stride * _BLOCK)]
        skipped = (skipped + len(part)) % (stride * _BLOCK)
    return np.concatenate(blocks)


def _best_partition(elements: Floats, tokens: Floats, raw: Floats) -> bytes:
    """Return the cuts of the cheapest partition into at most 16 ranges, given [key], [key, token] and [key]."""
    coarse = 0
    while np.count_nonzero(elements) > _MAX_GROUPS:
        elements, raw = (values.reshape(-1, 2).sum(axis=1) for values in (elements, raw))
        tokens = tokens.reshape(len(elements), 2, -1).sum(axis=1)
        coarse += 1
    groups = np.flatnonzero(elements)
    cost = _range_costs(elements[groups], tokens[groups][:, tokens.any(axis=0)], raw[groups])
    # best[j]: cost of groups 0..j-1 in the classes so far; came[k][j]: where the last of k + 1 classes begins.
    best, came = cost[0].copy(), []
    totals = [best[-1]]
    for _ in range(1, min(MAX_CLASSES, len(groups))):
        through = best[:, None] + cost
        came.append(np.argmin(through, axis=0))
        best = through[came[-1], np.arange(len(best))]
        totals.append(best[-1])
    cuts = []
    end = len(groups)
    for starts in reversed(came[: int(np.argmin(totals))]):
        end = int(starts[end])
        cuts.append(int(groups[end]) << coarse)
    return bytes(reversed(cuts))


def _range_costs(elements: Floats, tokens: Floats, raw: Floats) -> Floats:
    """Return the bits that groups i..j-1 take as one class, at [i, j]; infinite unless i < j."""
    changes = tokens.sum(axis=1)
    num_groups = len(elements)
    starts, ends = np.triu_indices(num_groups + 1, 1)

    def over(values: Floats) -> Floats:
        sums = np.concatenate((np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)))
        return sums[ends] - sums[starts]

    n, k, by_token = over(elements), over(changes), over(tokens)
    # A step of +-1 has the first two tokens; in a class that is not wide all others are exceptions.
    units = over(tokens[:, :2].sum(axis=1)) if tokens.shape[1] else k
    positions = _xlogx(n) - _xlogx(k) - _xlogx(n - k)
    steps = _xlogx(k) - _xlogx(by_token).sum(axis=1) + over(raw)
    table = (_CODE_BITS + 2 * _PRESENCE_BITS) * np.count_nonzero(by_token, axis=1)
    cost = np.full((num_groups + 1, num_groups + 1), np.inf)
    cost[starts, ends] = positions + np.where(k > units, steps + table, k) + np.where(k > 0, _ENTRY_BITS, 8.0)
    return cost


def _xlogx(values: Floats) -> Floats:
    return values * np.log2(np.maximum(values, 1.0))
