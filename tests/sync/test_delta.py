"""What counts as a change, and patches forward and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.sync.delta import TensorPatch, apply_patch, changed_positions, undo_patch
from sparsewire.sync.types import Bits, bits_of


def patch_between(old: Bits, new: Bits) -> TensorPatch:
    positions = changed_positions(old, new)
    return TensorPatch(tensor=0, start=0, count=len(old), indices=positions, values=new[positions], undo=old[positions])


def test_bits_are_compared_not_values() -> None:
    old = np.array([0.0, 1.0, np.nan, np.nan], ml_dtypes.bfloat16)
    new = np.array([-0.0, 1.0, np.nan, np.nan], ml_dtypes.bfloat16)
    new.view(np.uint16)[3] ^= 1
    assert changed_positions(bits_of(old), bits_of(new)).tolist() == [0, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_patch_leads_to_the_new_bits_twice_and_undo_leads_back(pairs: list[tuple[int, int]]) -> None:
    old = np.array([pair[0] for pair in pairs], np.uint16)
    new = np.array([pair[1] for pair in pairs], np.uint16)
    patch = patch_between(old, new)
    live = old.copy()
    for _ in range(2):
        apply_patch(live, patch)
        assert live.tolist() == new.tolist()
    undo_patch(live, patch)
    assert live.tolist() == old.tolist()
    assert patch.num_changed == sum(a != b for a, b in pairs)


def test_whole_range_patch_touches_nothing_else() -> None:
    live = np.arange(6, dtype=np.uint8)
    patch = TensorPatch(
        tensor=0,
        start=2,
        count=3,
        indices=None,
        values=np.array([9, 8, 7], np.uint8),
        undo=np.array([2, 3, 4], np.uint8),
    )
    apply_patch(live, patch)
    assert live.tolist() == [0, 1, 9, 8, 7, 5]
    undo_patch(live, patch)
    assert live.tolist() == list(range(6))


def test_patch_without_base_cannot_be_undone() -> None:
    patch = TensorPatch(tensor=0, start=0, count=1, indices=None, values=np.zeros(1, np.uint8), undo=None)
    with pytest.raises(ValueError, match="no undo"):
        undo_patch(np.zeros(1, np.uint8), patch)


def test_patch_whose_parts_disagree_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 positions, 2 values"):
        TensorPatch(tensor=0, start=0, count=9, indices=np.arange(3), values=np.zeros(2, np.uint8), undo=None)
