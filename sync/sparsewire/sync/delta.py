"""What changed between two arrays of bits, and how to apply it: extract and apply, steps forward and back.

Pure. `extract` compares bits, never values (-0.0 and 0.0 differ, NaN payloads count). A patch holds absolute new
bits, so applying it is idempotent; `undo` holds the bits it replaces, so it can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

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


class LastChange:
    """What the change before the one at hand replaced: the data that predicted chunks are coded against.

    It is the same whoever asks and however the change travelled: the positions whose bits differ between the version
    that the base was made from and the base, with their bits at that older version. Holds the patches as they are given,
    which may be views of a file.
    """

    def __init__(self, patches: Iterable[TensorPatch]) -> None:
        self._by_tensor: dict[int, list[TensorPatch]] = {}
        for patch in patches:
            self._by_tensor.setdefault(patch.tensor, []).append(patch)
        for found in self._by_tensor.values():
            found.sort(key=lambda patch: patch.start)

    def within(self, tensor: int, start: int, count: int) -> tuple[Indices, Bits] | None:
        """Return what changed in a range: ascending positions relative to `start`, and the bits before; None if nothing did.

        Raises:
            ValueError: a patch has no undo bits, as those of anchors.
        """
        positions: list[Indices] = []
        before: list[Bits] = []
        for patch in self._by_tensor.get(tensor, ()):
            if patch.start >= start + count or patch.start + patch.count <= start:
                continue
            if patch.undo is None:
                raise ValueError(f"tensor {tensor}: a patch without undo bits tells nothing about the change before")
            if patch.indices is None:
                begin = max(start - patch.start, 0)
                end = min(start + count - patch.start, patch.count)
                old = patch.undo[begin:end]
                changed = changed_positions(old, patch.values[begin:end])
                positions.append(changed + (patch.start + begin - start))
                before.append(old[changed])
            else:
                begin, end = np.searchsorted(patch.indices, (start, start + count)).tolist()
                positions.append(patch.indices[begin:end] - start)
                before.append(patch.undo[begin:end])
        if not any(map(len, positions)):
            return None
        return np.concatenate(positions), np.concatenate(before)


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
