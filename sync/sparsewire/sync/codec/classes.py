"""Sort the elements of a chunk into exponent classes, and turn ranks within a class into positions and back.

Pure. The key of an element is its exponent field, or the leading bits that hold it; up to 15 ascending cuts divide the
256 keys into classes. A class is held as 64-element words, one bit an element, so that rank and select cost a few
operations per change instead of a pass over every member.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.types import Bits, Indices

NUM_KEYS = 256
MAX_CLASSES = 16

_WORD_BITS = 64
_F64_BIAS_DIFFERENCE = 1023 - 127
_KEY_SHIFTS = {2: 7, 4: 23, 8: 52}

Words = npt.NDArray[np.uint64]


def element_keys(bits: Bits) -> npt.NDArray[np.uint8]:
    """Return the key of each element, by the width of `bits`: the exponent, in docs/format.md."""
    width = bits.dtype.itemsize
    if width == 1:
        return bits & np.uint8(0x7F)
    shifted = bits >> bits.dtype.type(_KEY_SHIFTS[width])
    if width < 8:
        return shifted.astype(np.uint8)
    exponent = (shifted & np.uint64(0x7FF)).astype(np.int16)
    return np.clip(exponent - np.int16(_F64_BIAS_DIFFERENCE), 0, NUM_KEYS - 1).astype(np.uint8)


def class_table(cuts: bytes) -> npt.NDArray[np.uint8]:
    """Return the class of each of the 256 keys.

    Raises:
        ValueError: `cuts` are more than 15, begin with 0 or do not ascend.
    """
    values = np.frombuffer(cuts, np.uint8)
    if len(values) >= MAX_CLASSES or (np.diff(values.astype(np.int16), prepend=0) <= 0).any():
        raise ValueError(f"cuts {list(cuts)} must be at most {MAX_CLASSES - 1} ascending keys from 1 up")
    return np.searchsorted(values, np.arange(NUM_KEYS), side="right").astype(np.uint8)


class ExponentClasses:
    """The elements of a chunk, by class. Without cuts all are of one class, and no element is looked at."""

    __slots__ = ("_classes", "_size")

    def __init__(self, bits: Bits, cuts: bytes) -> None:
        """Sort `bits` by `cuts`.

        Raises:
            ValueError: `cuts` are not ascending keys.
        """
        self._size = len(bits)
        self._classes: npt.NDArray[np.uint8] | None = None
        if cuts:
            # Bytes translate five times as fast as an array is indexed.
            table = class_table(cuts).tobytes()
            self._classes = np.frombuffer(element_keys(bits).tobytes().translate(table), np.uint8)

    def at(self, positions: Indices) -> npt.NDArray[np.uint8]:
        """Return the classes of the elements at `positions`."""
        return np.zeros(len(positions), np.uint8) if self._classes is None else self._classes[positions]

    def members(self, number: int) -> ClassMembers | AllMembers:
        """Return the members of one class."""
        return AllMembers(self._size) if self._classes is None else ClassMembers(self._classes, number)


class AllMembers:
    """The members of the only class: ranks are positions."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def ranks(self, positions: Indices) -> Indices:
        """Return `positions`."""
        return positions

    def positions(self, ranks: Indices) -> Indices:
        """Return `ranks`, all below `size`."""
        return ranks


class ClassMembers:
    """The members of one class among the elements of a chunk: ranks to positions and back."""

    __slots__ = ("_before", "_words", "size")

    def __init__(self, classes: npt.NDArray[np.uint8], number: int) -> None:
        packed = np.packbits(classes == number, bitorder="little")
        bytes_ = np.zeros(-(-len(packed) // 8) * 8, np.uint8)
        bytes_[: len(packed)] = packed
        self._words: Words = bytes_.view("<u8").astype(np.uint64, copy=False)
        self._before = np.zeros(len(self._words) + 1, np.int64)
        np.cumsum(_popcount(self._words), out=self._before[1:])
        self.size = int(self._before[-1])
        """Elements of the class."""

    def ranks(self, positions: Indices) -> Indices:
        """Return the ranks of members at `positions`: how many members stand before each."""
        words = positions >> 6
        below = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        found: Indices = self._before[words] + _popcount(self._words[words] & below)
        return found

    def positions(self, ranks: Indices) -> Indices:
        """Return the positions of the members with these `ranks`, all below `size`."""
        places = np.searchsorted(self._before, ranks, side="right") - 1
        left = ranks - self._before[places]
        words = self._words[places]
        found: Indices = places * _WORD_BITS
        half = _WORD_BITS // 2
        while half:
            low = words & np.uint64((1 << half) - 1)
            inside = _popcount(low)
            above = left >= inside
            left = left - np.where(above, inside, 0)
            words = np.where(above, words >> np.uint64(half), low)
            found += np.where(above, half, 0)
            half //= 2
        return found


def complement(ranks: Indices, size: int) -> Indices:
    """Return the ranks of 0..size-1 that are not among `ranks`."""
    absent = np.ones(size, np.bool_)
    absent[ranks] = False
    return np.flatnonzero(absent)


def _popcount(words: Words) -> npt.NDArray[np.int64]:
    """Bits set in each word (Warren, Hacker's Delight 5-1); NumPy has its own only from 2.0 on."""
    one, two, four = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
    counts: npt.NDArray[Any] = words - ((words >> np.uint64(1)) & one)
    counts = (counts & two) + ((counts >> np.uint64(2)) & two)
    counts = (counts + (counts >> np.uint64(4))) & four
    return ((counts * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.int64)
