"""Retry budgets and listing order, without any server."""

from __future__ import annotations

from datetime import timedelta
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.store.base import ObjectInfo
from sparsewire.sync.store.keys import is_key
from sparsewire.sync.store.retry import RetryBudget, RetryPolicy
from sparsewire.sync.store.s3_listing import in_key_order, start_position

SEGMENTS = st.text(alphabet="a0_.-z", min_size=1, max_size=4)
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join).filter(is_key)


def has_no_object_as_folder(keys: set[str]) -> bool:
    """Tell whether no key is also the folder of another, which a server with folders cannot hold."""
    return not any(other.startswith(f"{key}/") for key in keys for other in keys)


def by_bytes(key: str) -> str:
    """Amazon's order."""
    return key


def by_segments(key: str) -> list[str]:
    """The order of a server with real folders."""
    return key.split("/")


@pytest.mark.parametrize("order", [by_bytes, by_segments])
@given(
    keys=st.sets(KEYS, max_size=25).filter(has_no_object_as_folder),
    start_after=st.one_of(st.just(""), KEYS),
    folder=st.sampled_from(["", "a/", "a/0/"]),
)
@settings(max_examples=300, deadline=None)
def test_a_listing_is_in_key_order_whatever_the_order_of_the_server(
    order: object, keys: set[str], start_after: str, folder: str
) -> None:
    assert callable(order)
    start = start_position(start_after, folder=folder)
    served = (
        [key for key in keys if key.startswith(folder) and (not start or order(key) > order(start))]
        if start is not None
        else []
    )
    infos = [ObjectInfo(key=key, num_bytes=0, modified_unix_seconds=0.0) for key in sorted(served, key=order)]
    listed = [info.key for info in in_key_order(infos, folder=folder) if info.key > start_after]
    assert listed == sorted(key for key in keys if key.startswith(folder) and key > start_after)


def test_a_poll_for_new_versions_does_not_read_old_ones_again() -> None:
    start = start_position("run/versions/000000000107.manifest", folder="run/versions/")
    assert start is not None
    assert "run/versions/000000000106.manifest" < start < "run/versions/000000000107.manifest"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def budget(policy: RetryPolicy, clock: Clock, num_bytes: int = 0) -> RetryBudget:
    """A budget whose pauses are as long as they may be."""
    return RetryBudget(policy, num_bytes=num_bytes, clock=clock, uniform=lambda _, high: high)


def test_pauses_double_up_to_their_bound_and_end_with_the_tries() -> None:
    policy = RetryPolicy(max_attempts=6, first_pause=timedelta(seconds=1), max_pause=timedelta(seconds=5))
    pauses = iter(budget(policy, Clock()).next_pause_seconds, None)
    assert list(islice(pauses, 10)) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_no_try_begins_after_the_deadline() -> None:
    clock = Clock()
    policy = RetryPolicy(max_attempts=100, deadline=timedelta(seconds=10), first_pause=timedelta(seconds=1))
    spent = budget(policy, clock)
    assert spent.next_pause_seconds() == 1.0
    clock.now += 9
    assert spent.next_pause_seconds() is None
    assert not spent.expired
    clock.now += 2
    assert spent.expired


def test_a_large_payload_extends_the_deadline() -> None:
    clock = Clock()
    policy = RetryPolicy(deadline=timedelta(seconds=10), min_bytes_per_second=1000)
    large = budget(policy, clock, num_bytes=50_000)
    clock.now += 55
    assert not large.expired
    clock.now += 10
    assert large.expired


def test_a_policy_without_tries_is_refused() -> None:
    with pytest.raises(ValueError, match="max_attempts 0"):
        RetryPolicy(max_attempts=0)
