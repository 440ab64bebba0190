"""Plans are the cheapest there are, refusals say why, and retention cuts nothing that somebody needs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.sync.chain import Link, LinkKind, anchor_due, plan, retained
from sparsewire.sync.errors import VersionUnavailableError

TOP = 6


@st.composite
def link_sets(draw: st.DrawFn) -> list[Link]:
    ends = [(base, version) for version in range(TOP + 1) for base in (None, *range(version))]
    chosen = draw(st.lists(st.sampled_from(ends), unique=True, max_size=14))
    return [
        Link(
            kind=LinkKind.ANCHOR if base is None else LinkKind.DELTA,
            base_version=base,
            version=version,
            num_bytes=draw(st.integers(0, 9)),
            predicted=bool(base) and draw(st.booleans()),
        )
        for base, version in chosen
    ]


def all_paths(held: int | None, wanted: int, links: list[Link], *, knows_change: bool) -> list[tuple[Link, ...]]:
    """Every path by brute force, walking back from what is wanted."""
    found: list[tuple[Link, ...]] = [()] if held == wanted else []
    for link in links:
        if link.version != wanted:
            continue
        if link.base_version is None:
            found.append((link,))
            continue
        for path in all_paths(held, link.base_version, links, knows_change=knows_change):
            knows = path[-1].base_version == link.base_version - 1 if path else knows_change
            if knows or not link.predicted:
                found.append((*path, link))
    return found


def cost(path: tuple[Link, ...]) -> tuple[int, int]:
    return sum(link.num_bytes for link in path), len(path)


def best(held: int | None, wanted: int, links: list[Link], *, knows_change: bool = False) -> tuple[int, int] | None:
    return min(map(cost, all_paths(held, wanted, links, knows_change=knows_change)), default=None)


@given(link_sets(), st.none() | st.integers(0, TOP), st.integers(0, TOP), st.booleans())
def test_plan_is_the_cheapest_of_all_paths(
    links: list[Link], held: int | None, wanted: int, knows_change: bool
) -> None:
    expected = best(held, wanted, links, knows_change=knows_change)
    if expected is None:
        with pytest.raises(VersionUnavailableError, match=f"version {wanted}"):
            plan(held=held, wanted=wanted, links=links, knows_change=knows_change)
        return
    path = plan(held=held, wanted=wanted, links=links, knows_change=knows_change)
    assert (0, 0) if held == wanted else cost(path) == expected
    at = held
    for link in path:
        assert link.base_version is None or link.base_version == at
        assert link.version <= wanted
        at = link.version
    assert at == wanted


@given(link_sets(), st.data())
def test_plan_does_not_depend_on_the_order_of_links(links: list[Link], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(links))
    for wanted in range(TOP + 1):
        if best(None, wanted, links) is not None:
            assert plan(held=None, wanted=wanted, links=links) == plan(held=None, wanted=wanted, links=shuffled)


def chain(first: int, last: int, *, num_bytes: int = 1) -> list[Link]:
    return [Link.delta(base, version, num_bytes=num_bytes) for base, version in pairwise(range(first, last + 1))]


def test_late_worker_goes_through_the_anchor_when_its_deltas_are_gone() -> None:
    links = [Link.anchor(20, num_bytes=100), *chain(20, 23)]
    assert [str(link) for link in plan(held=0, wanted=23, links=links)] == [
        "anchor 20",
        "delta 20->21",
        "delta 21->22",
        "delta 22->23",
    ]


def test_plan_may_start_from_an_anchor_below_what_is_held() -> None:
    links = [Link.anchor(4, num_bytes=3), Link.delta(4, 9, num_bytes=1), Link.delta(6, 9, num_bytes=50)]
    assert [str(link) for link in plan(held=6, wanted=9, links=links)] == ["anchor 4", "delta 4->9"]


def test_squashed_delta_is_taken_when_it_is_smaller() -> None:
    links = [*chain(0, 4, num_bytes=10), Link.delta(0, 3, num_bytes=25)]
    assert [str(link) for link in plan(held=0, wanted=4, links=links)] == ["delta 0->3", "delta 3->4"]


def test_equal_bytes_prefer_fewer_links() -> None:
    links = [*chain(0, 3, num_bytes=10), Link.delta(0, 3, num_bytes=30)]
    assert [str(link) for link in plan(held=0, wanted=3, links=links)] == ["delta 0->3"]


def predicted(first: int, last: int) -> list[Link]:
    return [Link.delta(base, base + 1, num_bytes=1, predicted=True) for base in range(first, last)]


def test_predicted_delta_is_only_taken_with_the_change_before_it() -> None:
    links = [Link.anchor(0, num_bytes=100), *chain(0, 1), *predicted(1, 4)]
    assert len(plan(held=2, wanted=4, links=links, knows_change=True)) == 2
    assert str(plan(held=2, wanted=4, links=links)[0]) == "anchor 0"
    assert len(plan(held=None, wanted=4, links=links)) == 5
    with pytest.raises(VersionUnavailableError, match="not the change that made it"):
        plan(held=2, wanted=4, links=links[1:])


def test_squashed_delta_does_not_tell_the_change_that_a_predicted_one_needs() -> None:
    links = [*chain(0, 2, num_bytes=10), Link.delta(0, 2, num_bytes=1), *predicted(2, 3)]
    assert [str(link) for link in plan(held=0, wanted=3, links=links)] == ["delta 0->1", "delta 1->2", "delta 2->3"]


def test_anchor_from_which_only_a_predicted_delta_leads_on_is_due_again() -> None:
    assert anchor_due([Link.anchor(3, num_bytes=100), *predicted(3, 4)], 0.5)


def test_current_worker_needs_nothing_even_when_nothing_is_left() -> None:
    assert plan(held=7, wanted=7, links=[]) == ()


def test_version_that_never_existed_is_said_to_be_so() -> None:
    with pytest.raises(VersionUnavailableError, match="version 30 was never published: the newest is 23"):
        plan(held=0, wanted=30, links=[Link.anchor(20, num_bytes=1), *chain(20, 23)])


def test_missing_anchor_names_the_version_that_the_chain_stands_on() -> None:
    with pytest.raises(VersionUnavailableError, match=r"version 0 is held, and the links to version 20 .* pruned"):
        plan(held=0, wanted=23, links=chain(20, 23))


def test_pruned_version_lists_what_remains() -> None:
    with pytest.raises(VersionUnavailableError, match=r"version 5 was pruned: versions 20\.\.23 remain"):
        plan(held=None, wanted=5, links=[Link.anchor(20, num_bytes=1), *chain(20, 23)])


def test_empty_run_says_that_it_has_no_versions() -> None:
    with pytest.raises(VersionUnavailableError, match="no versions yet"):
        plan(held=None, wanted=0, links=[])


@given(link_sets(), st.integers(0, TOP), st.integers(1, 4), st.sets(st.integers(0, TOP), max_size=3))
def test_retention_leaves_everything_needed_as_reachable_and_as_cheap(
    links: list[Link], head: int, window: int, readers: set[int]
) -> None:
    kept = retained(links=links, head=head, window=window, readers=readers)
    assert kept <= set(links)
    left = sorted(kept, key=lambda link: (link.version, link.base_version or -1))
    for version in range(max(0, head - window + 1), head + 1):
        assert best(None, version, left) == best(None, version, links)
    for reader in readers:
        for knows in (True, False):
            assert best(reader, head, left, knows_change=knows) == best(reader, head, links, knows_change=knows)
    settled = [link for link in links if link.version <= head]
    anchors = [link for link in settled if link.kind is LinkKind.ANCHOR]
    if anchors:
        newest = max(anchors, key=lambda link: link.version)
        deltas = [link for link in settled if link.kind is LinkKind.DELTA]
        assert newest in kept
        assert best(newest.version, head, [link for link in left if link in deltas]) == best(
            newest.version, head, deltas
        )
    assert kept >= {link for link in links if link.version > head}


def test_retention_drops_an_old_anchor_and_its_deltas() -> None:
    links = [Link.anchor(0, num_bytes=100), *chain(0, 20), Link.anchor(10, num_bytes=100)]
    kept = retained(links=links, head=20, window=3, readers=())
    assert kept == {Link.anchor(10, num_bytes=100), *chain(10, 20)}


def test_live_reader_keeps_its_way_to_the_head() -> None:
    links = [Link.anchor(0, num_bytes=100), *chain(0, 20), Link.anchor(10, num_bytes=100)]
    kept = retained(links=links, head=20, window=3, readers={6})
    assert kept == {Link.anchor(10, num_bytes=100), *chain(6, 20)}


def test_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window 0"):
        retained(links=[], head=0, window=0, readers=())


def test_anchor_is_due_when_deltas_outweigh_the_fraction() -> None:
    anchor = Link.anchor(0, num_bytes=100)
    assert not anchor_due([anchor, *chain(0, 5, num_bytes=10)], 0.5)
    assert anchor_due([anchor, *chain(0, 6, num_bytes=10)], 0.5)
    assert not anchor_due([anchor, *chain(0, 6, num_bytes=10), Link.anchor(6, num_bytes=100)], 0.5)


def test_anchor_is_due_when_there_is_none_or_the_chain_from_it_is_cut() -> None:
    assert anchor_due([], 0.5)
    assert anchor_due(chain(0, 2), 0.5)
    assert anchor_due([Link.anchor(0, num_bytes=100), *chain(1, 2)], 0.5)
    assert not anchor_due([Link.anchor(3, num_bytes=100), *chain(1, 2)], 0.5)


@pytest.mark.parametrize(
    ("kind", "base", "version", "num_bytes"),
    [
        (LinkKind.ANCHOR, 1, 2, 1),
        (LinkKind.DELTA, None, 2, 1),
        (LinkKind.DELTA, 2, 2, 1),
        (LinkKind.DELTA, 3, 2, 1),
        (LinkKind.DELTA, -1, 2, 1),
        (LinkKind.ANCHOR, None, -1, 1),
        (LinkKind.ANCHOR, None, 1, -1),
    ],
)
def test_link_that_cannot_be_is_refused(kind: LinkKind, base: int | None, version: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="link"):
        Link(kind=kind, base_version=base, version=version, num_bytes=num_bytes)
