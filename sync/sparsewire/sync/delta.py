"""What changed between two arrays of bits, and how to apply it: extract and apply, steps forward and back.

Pure. `extract` compares bits, never values (-0.0 and 0.0 differ, NaN payloads count). A patch holds absolute new
bits, so applying it is idempotent; `undo` holds the bits it replaces, so it can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsewire.sync.native import kernel
from sparsewire.sync.types import Bits, Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPatch:
    """New bits for some elements of one tensor, at flat C-order positions of the checkpoint tensor."""

    tensor: int
    """Number of the tensor in the schema."""
    start: int
    """First flat position of the range that this patch speaks of."""
    count: int
    """Elements in that range."""
    indices: Indices | None
    """Sorted positions in the tensor (absolute, not relative to `start`); None means every element of the range."""
    values: Bits
    """New bits: one per index, or `count` of them."""
    undo: Bits | None
    """The bits replaced, aligned with `values`; None when the base is not known (anchors)."""

    def __post_init__(self) -> None:
        wanted = self.count if self.indices is None else len(self.indices)
        if len(self.values) != wanted or (self.undo is not None and len(self.undo) != wanted):
            undone = None if self.undo is None else len(self.undo)
            raise ValueError(f"patch: {wanted} positions, {len(self.values)} values, {undone} undo values")

    @property
    def num_changed(self) -> int:
        """Elements written by this patch."""
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What one patch replaced: 4 bytes and the old bits for each element; arrays may be views of a file."""

    tensor: int
    start: int
    count: int
    """Elements of the range that the patch spoke of."""
    offsets: npt.NDArray[np.uint32] | None
    """Ascending positions relative to `start`; None: all of the range, whether their bits changed or not."""
    before: Bits
    """The bits replaced, one for each position."""
    after: Bits | None = None
    """The new bits, where `offsets` is None."""

    @staticmethod
    def of(patch: TensorPatch) -> Replaced:
        """Return what a patch replaced, copied.

        Raises:
            ValueError: the patch has no undo bits, as those of anchors, or more than 2^32 elements.
        """
        if patch.undo is None or patch.count > 1 << 32:
            raise ValueError(f"tensor {patch.tensor}: a patch without undo bits, or of {patch.count} elements")
        if patch.indices is None:
            changed = changed_positions(patch.undo, patch.values)
            before = patch.undo[changed]
        else:
            changed, before = patch.indices - patch.start, patch.undo.copy()
        return Replaced(
            tensor=patch.tensor,
            start=patch.start,
            count=patch.count,
            offsets=changed.astype(np.uint32),
            before=before,
        )

    def within(self, start: int, stop: int) -> tuple[Indices, Bits]:
        """Return the changed positions in a range of the tensor, and their bits before."""
        low, high = max(start - self.start, 0), min(stop - self.start, self.count)
        if self.offsets is None:
            assert self.after is not None
            old = self.before[low:high]
            changed = changed_positions(old, self.after[low:high])
            return changed + (self.start + low), old[changed]
        begin, end = np.searchsorted(self.offsets, (low, high)).tolist()
        return self.offsets[begin:end].astype(np.int64) + self.start, self.before[begin:end]


class LastChange:
    """What the change before the one at hand replaced: the data that predicted chunks are coded against.

    It is the same for everyone, however the change travelled: the positions whose bits differ between the version that
    the base was made from and the base, with their bits at that older version. May be asked from several threads.
    """

    def __init__(self, replaced: Iterable[Replaced]) -> None:
        self._by_tensor: dict[int, list[Replaced]] = {}
        for part in replaced:
            self._by_tensor.setdefault(part.tensor, []).append(part)
        for parts in self._by_tensor.values():
            parts.sort(key=lambda part: part.start)

    @staticmethod
    def of(patches: Iterable[TensorPatch]) -> LastChange:
        """Return what `patches` replaced, which must have undo bits; copies 4 bytes and the bits for each element."""
        return LastChange(map(Replaced.of, patches))

    def within(self, tensor: int, start: int, count: int) -> tuple[Indices, Bits] | None:
        """Return what changed in a range: ascending positions relative to `start`, and the bits before; None if nothing did."""
        stop = start + count
        parts = [
            part.within(start, stop)
            for part in self._by_tensor.get(tensor, ())
            if part.start < stop and start < part.start + part.count
        ]
        if not any(len(positions) for positions, _ in parts):
            return None
        return np.concatenate([positions for positions, _ in parts]) - start, np.concatenate(
            [before for _, before in parts]
        )


def apply_patch(bits: Bits, patch: TensorPatch) -> None:
    """Write the patch into `bits`, the whole tensor flat; writing it again changes nothing."""
    _write(bits, patch, patch.values)


def undo_patch(bits: Bits, patch: TensorPatch) -> None:
    """Write back what `apply_patch` replaced.

    Raises:
        ValueError: the patch carries no undo values.
    """
    if patch.undo is None:
        raise ValueError("patch has no undo values: its base was not known")
    _write(bits, patch, patch.undo)


def _write(bits: Bits, patch: TensorPatch, values: Bits) -> None:
    native = kernel()
    if patch.indices is None:
        bits[patch.start : patch.start + patch.count] = values
    elif (
        native is not None
        and bits.flags.c_contiguous
        and values.flags.c_contiguous
        and patch.indices.flags.c_contiguous
    ):
        native.scatter(bits, patch.indices, values)
    else:
        bits[patch.indices] = values


def changed_positions(old: Bits, new: Bits) -> Indices:
    """Return the sorted positions at which the bits of two flat arrays of equal length differ."""
    return np.flatnonzero(old != new)
