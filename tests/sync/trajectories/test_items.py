"""Groups visit the items of a task in a fixed, thorough order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.trajectories.items import MAX_ITEMS, item_of


@given(seed=st.integers(-(2**63), 2**63), num_items=st.integers(1, 300), epoch=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_pass_meets_every_item_once(seed: int, num_items: int, epoch: int) -> None:
    groups = range(epoch * num_items, (epoch + 1) * num_items)
    items = [item_of(seed=seed, group=group, num_items=num_items) for group in groups]
    assert sorted(items) == list(range(num_items))


def test_seed_and_pass_change_the_order() -> None:
    orders = [
        tuple(item_of(seed=seed, group=group, num_items=100) for group in range(start, start + 100))
        for seed, start in ((1, 0), (2, 0), (1, 100))
    ]
    assert len(set(orders)) == 3


def test_items_of_huge_tasks_are_in_range() -> None:
    items = {item_of(seed=3, group=group, num_items=MAX_ITEMS) for group in range(1000)}
    assert len(items) == 1000
    assert min(items) >= 0
    assert max(items) < MAX_ITEMS


def test_a_task_without_items_is_refused() -> None:
    with pytest.raises(ValueError, match="group 0 of 0 items"):
        item_of(seed=0, group=0, num_items=0)
