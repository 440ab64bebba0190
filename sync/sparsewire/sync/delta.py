"""What changed between two arrays of bits, and how to apply it: extract and apply, steps forward and back.

Pure. `extract` compares bits, never values (-0.0 and 0.0 differ, NaN payloads count). A patch holds absolute new
bits, so applying it is idempotent; `undo` holds the bits it replaces, so it can be taken back.
"""

from __future__ import annotations

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
