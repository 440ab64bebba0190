"""A publisher and subscribers over real stores: order, gaps, lateness, what counts as change, restarts, fencing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsewire.sync import Publisher, PublisherSettings, Shard, Subscriber, tensor_digest
from sparsewire.sync.chain import LinkKind
from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    FencedError,
    SchemaMismatchError,
    VersionUnavailableError,
)
from sparsewire.sync.history import History
from sparsewire.sync.store.open import open_store

MakeView = Callable[[int], dict[str, Any]]
Change = Callable[..., dict[str, Any]]
SameBits = Callable[[Any, dict[str, Any]], None]


def test_versions_arrive_bit_for_bit(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        first = publisher.publish(view)
        assert (first.version, first.kind, first.num_changed) == (0, LinkKind.ANCHOR, first.num_elements)
        assert subscriber.sync() == 0
        assert_same_bits(subscriber.tensors(), view)
        for seed in range(1, 6):
            view = change(view, seed)
            manifest = publisher.publish(view)
            assert manifest.kind is LinkKind.DELTA
            assert 0 < manifest.num_changed < manifest.num_elements
            assert subscriber.sync() == manifest.version == seed
            assert_same_bits(subscriber.tensors(), view)
            assert subscriber.digests() == {name: tensor_digest(view[name]) for name in sorted(view)}
            assert subscriber.damaged_tensors() == []


def test_a_subscriber_far_behind_catches_up_and_an_older_version_can_be_asked_for(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    views = [make_view(0)]
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(views[0])
        for seed in range(1, 8):
            views.append(change(views[-1], seed))
            publisher.publish(views[-1])
    with Subscriber.open(memory_url, run="r1") as subscriber:
        assert subscriber.sync(version=3) == 3
        assert_same_bits(subscriber.tensors(), views[3])
        assert subscriber.sync() == 7
        assert_same_bits(subscriber.tensors(), views[7])


def test_state_only_moves_forward_and_asking_for_what_is_held_costs_nothing(
    memory_url: str, make_view: MakeView, change: Change
) -> None:
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        view = make_view(0)
        publisher.publish(view)
        publisher.publish(change(view, 1))
        assert subscriber.sync() == 1
        assert subscriber.sync() == subscriber.sync(version=1) == 1
        with pytest.raises(VersionUnavailableError, match="lies behind 1"):
            subscriber.sync(version=0)
        with pytest.raises(VersionUnavailableError, match="version 9 was never published"):
            subscriber.sync(version=9)
        assert subscriber.version == 1


def test_a_run_without_versions_is_refused_by_name(memory_url: str) -> None:
    with Subscriber.open(memory_url, run="nobody") as subscriber:
        with pytest.raises(VersionUnavailableError, match="run nobody has no version yet"):
            subscriber.sync()
        with pytest.raises(VersionUnavailableError, match="call sync"):
            subscriber.tensors()


def test_joining_late_takes_the_anchor_and_joining_without_one_is_refused(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    """FIELD_CASES P6: base weights at v23 when only anchor 20 and deltas 21..23 remain, and with the anchor missing."""
    view = make_view(0)
    settings = PublisherSettings(anchor_fraction=1e9)
    with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
        publisher.publish(view)
    with Subscriber.open(memory_url, run="r1") as late:
        assert late.sync() == 0
        with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
            for seed in range(1, 20):
                view = change(view, seed)
                publisher.publish(view)
        with Publisher.open(memory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e-9)) as publisher:
            view = change(view, 20)
            publisher.publish(view)
        with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
            for seed in range(21, 24):
                view = change(view, seed)
                publisher.publish(view)
        store = open_store(memory_url)
        history = History(store=store, run="r1")
        for link in history.links():
            if link.version < 20 or (link.version == 20 and link.kind is LinkKind.DELTA):
                history.delete(link)
        assert late.sync() == 23
        assert_same_bits(late.tensors(), view)
    with Subscriber.open(memory_url, run="r1") as later:
        assert later.sync() == 23
        for link in history.links():
            if link.kind is LinkKind.ANCHOR:
                history.delete(link)
        assert later.sync() == 23, "a subscriber that is current needs nothing"
    with Subscriber.open(memory_url, run="r1") as stranger, pytest.raises(VersionUnavailableError, match="no anchor"):
        stranger.sync()


def test_what_counts_as_change(memory_url: str, make_view: MakeView, assert_same_bits: SameBits) -> None:
    """FIELD_CASES P8: bits count, a value that comes back is no change, no change is a version, all may change."""
    view = make_view(0)
    weight = "model.layers.0.weight"
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        publisher.publish(view)
        original = view[weight].copy()

        flat = view[weight].reshape(-1)
        flat.view(np.uint16)[5] ^= 0x8000
        assert publisher.publish(view).num_changed == 1, "a sign flip is a change"
        flat[:] = original.reshape(-1)
        back = publisher.publish(view)
        assert back.num_changed == 1
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), view)

        same = publisher.publish(view)
        assert (same.num_changed, same.chunks, same.packs) == (0, (), ())
        assert same.version_digest == back.version_digest
        assert subscriber.sync() == same.version

        flat.view(np.uint16)[:4] = [0x8000, 0x0000, 0x7FC1, 0xFF80]
        assert publisher.publish(view).num_changed == 4
        flat.view(np.uint16)[:4] = [0x0000, 0x8000, 0x7FC2, 0xFF80]
        assert publisher.publish(view).num_changed == 3, "zero signs and NaN payloads count, an equal infinity does not"
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), view)

        for name in view:
            raw = view[name].reshape(-1).view(np.uint8)
            raw ^= 0x55
        everything = publisher.publish(view)
        assert everything.num_changed == everything.num_elements
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), view)


def test_a_hundred_publishes_without_a_step_give_a_hundred_equal_digests(memory_url: str, make_view: MakeView) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher:
        digests = {publisher.publish(view).version_digest for _ in range(100)}
        assert len(digests) == 1
        assert publisher.head is not None
        assert publisher.head.version == 99


def test_a_different_tensor_changed_in_each_step_between_publishes(
    memory_url: str, make_view: MakeView, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    names = [name for name in view if view[name].size]
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        publisher.publish(view)
        for publish in range(4):
            for step in range(3):
                raw = view[names[(3 * publish + step) % len(names)]].reshape(-1).view(np.uint8)
                raw[0] ^= 1 << step
            publisher.publish(view, step=3 * (publish + 1))
            subscriber.sync()
            assert_same_bits(subscriber.tensors(), view)


def test_the_publisher_keeps_no_reference_to_the_callers_arrays(
    memory_url: str, make_view: MakeView, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        publisher.publish(view)
        for name in view:
            raw = view[name].reshape(-1).view(np.uint8)
            raw[:1] ^= 0xFF
        assert publisher.publish(view).num_changed == len([name for name in view if view[name].size])
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), view)


def test_a_restarted_publisher_goes_on_from_the_committed_head(
    directory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits, tmp_path: Path
) -> None:
    """FIELD_CASES P2: resume from older weights; no number has two contents, workers at any version converge."""
    views = [make_view(0)]
    with Publisher.open(directory_url, run="r1") as publisher:
        assert publisher.epoch == 1
        publisher.publish(views[0])
        for seed in range(1, 8):
            views.append(change(views[-1], seed))
            publisher.publish(views[-1], step=seed)
    with (
        Subscriber.open(directory_url, run="r1") as at_7,
        Subscriber.open(directory_url, run="r1") as at_6,
        Subscriber.open(directory_url, run="r1") as at_0,
    ):
        at_7.sync(7)
        at_6.sync(6)
        at_0.sync(0)
        before = {version: _sealed(directory_url, version) for version in range(8)}
        with Publisher.open(directory_url, run="r1") as publisher:
            assert publisher.epoch == 2
            assert publisher.head is not None
            assert publisher.head.version == 7
            resumed = publisher.publish(views[5], step=5)
            assert (resumed.version, resumed.base_version, resumed.epoch, resumed.step) == (8, 7, 2, 5)
            publisher.publish(change(views[5], 99), step=6)
        for subscriber in (at_7, at_6, at_0):
            assert subscriber.sync(8) == 8
            assert_same_bits(subscriber.tensors(), views[5])
            assert subscriber.sync() == 9
        assert {version: _sealed(directory_url, version) for version in range(8)} == before


def _sealed(url: str, version: int) -> bytes:
    store = open_store(url)
    return store.get(f"r1/versions/{version:012d}.manifest").data


def test_a_fenced_publisher_cannot_commit(memory_url: str, make_view: MakeView, change: Change) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as old:
        old.publish(view)
        with Publisher.open(memory_url, run="r1") as new:
            with pytest.raises(FencedError, match="must stop"):
                old.publish(change(view, 1))
            assert new.publish(change(view, 2)).version == 1
            with pytest.raises(FencedError, match="must stop"):
                old.publish(change(view, 3))
    store = open_store(memory_url)
    packs = [info.key for info in store.list("r1/packs/")]
    assert len(packs) == 2, f"packs of refused publishes are removed: {packs}"


def test_a_commit_that_slipped_in_before_the_fence_is_built_upon(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(view)
        stray = change(view, 1)
        _commit_unseen(memory_url, stray)
        mine = change(view, 2)
        manifest = publisher.publish(mine)
        assert manifest.version == 2
    with Subscriber.open(memory_url, run="r1") as subscriber:
        subscriber.sync(1)
        assert_same_bits(subscriber.tensors(), stray)
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), mine)


def _commit_unseen(url: str, view: dict[str, Any]) -> None:
    """Commit a version as an older incarnation whose claim check came before the newer one's claim."""
    store = open_store(url)
    claim = store.get("r1/epoch.json").data
    with Publisher.open(url, run="r1") as stray:
        stray.publish(view)
    manifest = History(store=store, run="r1").commit(1)
    store.put("r1/versions/000000000001.manifest", replace(manifest, epoch=0).seal())
    store.put("r1/epoch.json", claim)


def test_another_model_is_refused_with_the_differences(memory_url: str, make_view: MakeView) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(view)
        wrong = dict(view)
        wrong["model.step"] = np.array(3, np.int32)
        with pytest.raises(SchemaMismatchError, match=r"model\.step is I32\[\], the run has I64"):
            publisher.publish(wrong)
        del wrong["model.step"]
        with pytest.raises(SchemaMismatchError, match=r"model\.step missing"):
            publisher.publish(wrong)
        assert publisher.publish(view).version == 1
    with Publisher.open(memory_url, run="r1") as publisher, pytest.raises(SchemaMismatchError, match="another model"):
        publisher.publish({"something": np.zeros(3, np.float32)})


def test_retention_keeps_the_window_and_live_readers(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    settings = PublisherSettings(anchor_fraction=0.02, retain_versions=3)
    with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
        publisher.publish(view)
        with Subscriber.open(memory_url, run="r1") as reader:
            reader.sync()
            for seed in range(1, 12):
                view = change(view, seed)
                publisher.publish(view)
            versions = History(store=publisher.store, run="r1").versions()
            assert versions[-11:] == list(range(1, 12)), "a live reader at 0 holds all"
            assert reader.sync() == 11
            assert_same_bits(reader.tensors(), view)
        for seed in range(12, 18):
            view = change(view, seed)
            publisher.publish(view)
        history = History(store=publisher.store, run="r1")
        assert len(history.versions()) < 10
        packs = {info.key for info in publisher.store.list("r1/packs/")}
        named = {f"r1/{pack.key}" for link in history.links() for pack in history.manifest(link).packs}
        assert packs == named, "no pack outlives its manifest and none is missing"
    with Subscriber.open(memory_url, run="r1") as newcomer:
        assert newcomer.sync() == 17
        assert_same_bits(newcomer.tensors(), view)


class ThreadRanks:
    """Ranks as threads of one process, gathering over a barrier."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        self._slots[self.rank] = payload
        self._barrier.wait(30)
        gathered = list(self._slots)
        self._barrier.wait(30)
        return gathered


def _run_ranks(size: int, work: Callable[[ThreadRanks], None]) -> None:
    slots, barrier = [b""] * size, threading.Barrier(size)
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            work(ThreadRanks(rank, slots, barrier))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


def _shards(view: dict[str, Any], rank: int, size: int) -> dict[str, Shard]:
    shards = {}
    for name, array in view.items():
        flat = array.reshape(-1)
        begin, end = (len(flat) * rank // size, len(flat) * (rank + 1) // size)
        shards[name] = Shard(flat[begin:end], begin, array.shape)
    return shards


def test_three_ranks_publish_what_one_would(
    memory_url: str, directory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    views = [make_view(0)]
    views += [change(views[0], 1, 0.02)]
    views += [change(views[1], 2, 0.02)]

    def work(ranks: ThreadRanks) -> None:
        with Publisher.open(memory_url, run="r1", ranks=ranks) as publisher:
            for view in views[:2]:
                publisher.publish(_shards(view, ranks.rank, ranks.size))

    _run_ranks(3, work)

    def resume(ranks: ThreadRanks) -> None:
        with Publisher.open(memory_url, run="r1", ranks=ranks) as publisher:
            assert publisher.head is not None
            assert publisher.head.version == 1
            manifest = publisher.publish(_shards(views[2], ranks.rank, ranks.size))
            assert len(manifest.packs) == ranks.size

    _run_ranks(2, resume)
    with Publisher.open(directory_url, run="r1") as alone:
        digests = [alone.publish(view).version_digest for view in views]
    with Subscriber.open(memory_url, run="r1") as subscriber:
        history = History(store=open_store(memory_url), run="r1")
        for version, view in enumerate(views):
            assert subscriber.sync(version) == version
            assert_same_bits(subscriber.tensors(), view)
            assert history.commit(version).version_digest == digests[version]


def test_shards_that_leave_a_gap_are_refused_on_every_rank(memory_url: str, make_view: MakeView) -> None:
    view = make_view(0)

    def work(ranks: ThreadRanks) -> None:
        shards = _shards(view, ranks.rank, ranks.size)
        if ranks.rank == 1:
            shard = shards["model.layers.0.weight"]
            shards["model.layers.0.weight"] = Shard(shard.array[:-1], shard.start, shard.shape)
        with Publisher.open(memory_url, run="r1", ranks=ranks) as publisher:
            with pytest.raises(SchemaMismatchError, match=r"model\.layers\.0\.weight end at element 4095 of 4096"):
                publisher.publish(shards)
            assert publisher.head is None

    _run_ranks(2, work)
    assert not list(open_store(memory_url).list("r1/packs/"))


def test_publishing_in_the_background_keeps_order(memory_url: str, make_view: MakeView, change: Change) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher:
        futures = []
        for seed in range(5):
            futures.append(publisher.publish_in_background(view, step=seed))
            view = change(view, seed)
        assert [future.result(30).version for future in futures] == [0, 1, 2, 3, 4]
        assert [future.result(30).step for future in futures] == [0, 1, 2, 3, 4]


def test_run_ids_and_urls_are_checked(memory_url: str) -> None:
    for run in ("", "../x", "a/b", "a b", ".hidden", "x" * 200):
        with pytest.raises(ConfigError, match="not a run id"):
            Publisher.open(memory_url, run=run)
        with pytest.raises(ConfigError, match="not a run id"):
            Subscriber.open(memory_url, run=run)
    with pytest.raises(ConfigError):
        Subscriber.open("ftp://somewhere", run="r1")


def test_uint16_bits_can_be_published_as_they_are(memory_url: str) -> None:
    view = {"w": np.arange(1000, dtype=np.uint16)}
    with Publisher.open(memory_url, run="r1") as publisher, Subscriber.open(memory_url, run="r1") as subscriber:
        publisher.publish(view)
        view["w"][7] = 0x7FC0
        publisher.publish(view)
        subscriber.sync()
        assert subscriber.tensors()["w"].dtype == np.uint16
        np.testing.assert_array_equal(subscriber.tensors()["w"], view["w"])
        assert not subscriber.tensors()["w"].flags.writeable


def test_a_refused_view_after_a_restart_leaves_the_publisher_usable(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(view)
    with Publisher.open(memory_url, run="r1") as publisher:
        cut = dict(view)
        whole = view["model.layers.0.weight"]
        cut["model.layers.0.weight"] = Shard(whole.reshape(-1)[:10], 0, whole.shape)
        with pytest.raises(SchemaMismatchError, match="end at element 10"):
            publisher.publish(cut)
        view = change(view, 1)
        assert publisher.publish(view).version == 1
    with Subscriber.open(memory_url, run="r1") as subscriber:
        subscriber.sync()
        assert_same_bits(subscriber.tensors(), view)


def test_a_damaged_old_manifest_does_not_stop_pruning(memory_url: str, make_view: MakeView, change: Change) -> None:
    view = make_view(0)
    settings = PublisherSettings(anchor_fraction=1e-9, retain_versions=2)
    with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
        for seed in range(6):
            publisher.publish(view)
            view = change(view, seed)
        key = f"r1/versions/{5:012d}.manifest"
        data = bytearray(publisher.store.get(key).data)
        data[len(data) // 2] ^= 1
        publisher.store.put(key, bytes(data))
        for seed in range(6, 12):
            publisher.publish(view)
            view = change(view, seed)
        assert History(store=publisher.store, run="r1").versions() == [10, 11]


def test_a_path_past_many_damaged_anchors_is_found(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    settings = PublisherSettings(anchor_fraction=1e-9, retain_versions=64)
    with Publisher.open(memory_url, run="r1", settings=settings) as publisher:
        for seed in range(9):
            view = change(view, seed)
            publisher.publish(view)
        history = History(store=publisher.store, run="r1")
        for link in history.links():
            if link.kind is LinkKind.ANCHOR and link.version >= 3:
                key = f"r1/{history.manifest(link).packs[0].key}"
                publisher.store.put(key, publisher.store.get(key).data[:-1] + b"x")
    with Subscriber.open(memory_url, run="r1") as subscriber:
        assert subscriber.sync() == 8
        assert_same_bits(subscriber.tensors(), view)


def test_what_strangers_leave_in_the_store_and_what_listeners_raise_stops_no_publish(
    memory_url: str, make_view: MakeView
) -> None:
    heard: list[int] = []

    def failing(manifest: object) -> None:
        raise ValueError("listener")

    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.on_commit(failing)
        publisher.on_commit(lambda manifest: heard.append(manifest.version))
        publisher.store.put("r1/readers/d.json", b'{"version":1e400,"expires_unix_seconds":1e18}')
        assert publisher.publish(make_view(0)).version == 0
        assert publisher.publish(make_view(0)).version == 1
    assert heard == [0, 1]


def test_packs_of_killed_publishers_are_swept_once_nobody_can_name_them(memory_url: str, make_view: MakeView) -> None:
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
        publisher.store.put("r1/packs/000000000000/00000001-stray-00000.pack", b"x")
        publisher.store.put("r1/packs/000000000007/00000001-ahead-00000.pack", b"x")
        history = History(store=publisher.store, run="r1")
        assert history.sweep(up_to=0, older_than_unix_seconds=0.0) == 0
        assert history.sweep(up_to=0, older_than_unix_seconds=1e12) == 1
        assert len(list(publisher.store.list("r1/packs/"))) == 2


def test_a_run_whose_commits_are_gone_is_not_begun_again(memory_url: str, make_view: MakeView, change: Change) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e-9)) as publisher:
        publisher.publish(view)
        publisher.publish(change(view, 1))
        publisher.store.delete(f"r1/versions/{1:012d}.manifest")
    with (
        pytest.raises(DamagedError, match="holds version 1, but its newest commit is 0"),
        Publisher.open(memory_url, run="r1"),
    ):
        pass


def test_settings_and_deadlines_that_make_no_sense_are_refused(memory_url: str, make_view: MakeView) -> None:
    for wrong in ({"chunk_bytes": 0}, {"chunk_bytes": 64 << 20}, {"retain_versions": 1.5}, {"profile": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PublisherSettings(**wrong)
    with Publisher.open(memory_url, run="r1") as publisher:
        with pytest.raises(ConfigError, match="step -1"):
            publisher.publish(make_view(0), step=-1)
        publisher.publish(make_view(0))
    subscriber = Subscriber.open(memory_url, run="r1")
    with pytest.raises(ConfigError, match="not open"):
        subscriber.sync()
    with subscriber:
        for wrong_deadline in (float("nan"), "3"):
            with pytest.raises(ConfigError, match="number of seconds"):
                subscriber.sync(deadline=wrong_deadline)  # type: ignore[arg-type]
        assert subscriber.sync(deadline=float("inf")) == 0
        with pytest.raises(VersionUnavailableError, match="count from 0"):
            subscriber.sync(version=-1)
    with pytest.raises(ConfigError, match="not open"):
        publisher.publish(make_view(0))
