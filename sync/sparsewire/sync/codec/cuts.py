"""Where to cut the exponents of a chunk into classes: the partition that makes its classed body smallest.

Pure. Any cuts give a correct body; these come from dynamic programming over the keys, with the size that each range of
keys would take as one class, estimated from a sample. They change slowly: those of the version before serve as well, so
a publisher remembers them and fits again now and then. Measured on real traces: a 1/8 sample costs 0.1 % of the body, the
cuts of the version before nothing, those of another model 1-2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.classes import MAX_CLASSES, NUM_KEYS, element_keys
from sparsewire.sync.codec.plan import Segment
from sparsewire.sync.codec.steps import num_raw_bits, num_tokens, split_steps
from sparsewire.sync.native import kernel
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

REFIT_PERIOD = 16
"""Remembered cuts serve so many times before they are fitted again."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partition:
    """Cuts, and what they should give."""

    cuts: bytes
    num_bits: float
    """About the size of the classed body that they give."""


class CutsMemory:
    """The cuts of the last change at each place, to be used for the next one: one small entry a chunk."""

    __slots__ = ("_cuts",)

    def __init__(self) -> None:
        self._cuts: dict[Segment, tuple[bytes, int]] = {}

    def suggest(self, place: Segment) -> bytes | None:
        """Return cuts for a chunk that begins with the segment `place`, None when they should be fitted."""
        cuts, left = self._cuts.get(place, (None, 0))
        return cuts if left else None

    def remember(self, place: Segment, cuts: bytes | None) -> None:
        """Take note of the cuts that a chunk at `place` was coded with."""
        if cuts is None:
            return
        before, left = self._cuts.get(place, (None, 0))
        # Those just fitted begin at a number that depends on the place, so that not all are fitted anew at once.
        first = REFIT_PERIOD - (place.tensor + place.start) % REFIT_PERIOD // 2
        self._cuts[place] = (cuts, left - 1 if cuts == before and left else first)


def fit_partition(old: Sequence[Bits], new: Sequence[Bits]) -> Partition:
    """Return the partition that suits the change of these arrays, not all empty; the same for equal input."""
    width = new[0].dtype.itemsize
    native = kernel()
    elements, counts = _histograms(old, new) if native is None else native.sample(old, new)
    if not counts.any():
        return Partition(b"", 0.0)
    scale = 1.0 if sum(map(len, old)) <= _MIN_SAMPLE else _SAMPLES_PER_BLOCK
    tokens: Floats = counts.astype(np.float64) * scale
    raw: Floats = tokens @ num_raw_bits(np.arange(num_tokens(width)), width)
    return _best_partition(elements.astype(np.float64) * scale, tokens, raw)


def _histograms(old: Sequence[Bits], new: Sequence[Bits]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the elements of a sample by key, and its changes by key and token."""
    stride = 1 if sum(map(len, old)) <= _MIN_SAMPLE else _SAMPLES_PER_BLOCK
    before, after = _sample(old, stride), _sample(new, stride)
    elements = np.bincount(element_keys(before), minlength=NUM_KEYS)
    changed = np.flatnonzero(before != after)
    before, after = before[changed], after[changed]
    tokens, _, _ = split_steps(after - before)
    width = num_tokens(before.dtype.itemsize)
    counts = np.bincount(element_keys(before).astype(np.int64) * width + tokens, minlength=NUM_KEYS * width)
    return elements.astype(np.uint64), counts.reshape(NUM_KEYS, width).astype(np.uint64)


def _sample(parts: Sequence[Bits], stride: int) -> Bits:
    """Return one block in `stride` of the space that the parts make end to end."""
    if stride == 1:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    period = stride * _BLOCK
    blocks, phase = [], 0
    for part in parts:
        blocks += [part[max(at, 0) : max(at + _BLOCK, 0)] for at in range(-phase, len(part), period)]
        phase = (phase + len(part)) % period
    return np.concatenate(blocks)


def _best_partition(elements: Floats, tokens: Floats, raw: Floats) -> Partition:
    """Return the cheapest partition into at most 16 ranges, given [key], [key, token] and [key]."""
    coarse = 0
    while np.count_nonzero(elements) > _MAX_GROUPS:
        elements, raw = (values.reshape(-1, 2).sum(axis=1) for values in (elements, raw))
        tokens = tokens.reshape(len(elements), 2, -1).sum(axis=1)
        coarse += 1
    groups = np.flatnonzero(elements)
    cost = _range_costs(elements[groups], tokens[groups], raw[groups])
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
    return Partition(bytes(reversed(cuts)), float(min(totals)))


def _range_costs(elements: Floats, tokens: Floats, raw: Floats) -> Floats:
    """Return the bits that groups i..j-1 take as one class, at [i, j]; infinite unless i < j."""
    changes = tokens.sum(axis=1)
    num_groups = len(elements)
    starts, ends = np.triu_indices(num_groups + 1, 1)

    def over(values: Floats) -> Floats:
        sums = np.concatenate((np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)))
        within: Floats = sums[ends] - sums[starts]
        return within

    n, k, by_token = over(elements), over(changes), over(tokens[:, tokens.any(axis=0)])
    # Steps of +1 and -1 have the first two tokens; a class with others is taken to be wide.
    units = over(tokens[:, :2].sum(axis=1))
    positions = _xlogx(n) - _xlogx(k) - _xlogx(n - k)
    steps = _xlogx(k) - _xlogx(by_token).sum(axis=1) + over(raw)
    table = (_CODE_BITS + 2 * _PRESENCE_BITS) * np.count_nonzero(by_token, axis=1)
    cost = np.full((num_groups + 1, num_groups + 1), np.inf)
    cost[starts, ends] = positions + np.where(k > units, steps + table, k) + np.where(k > 0, _ENTRY_BITS, 8.0)
    return cost


def _xlogx(values: Floats) -> Floats:
    product: Floats = values * np.log2(np.maximum(values, 1.0))
    return product
