"""The ledger: leases, acceptance, batches, rollback; every trajectory in exactly one place."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from sparsewire.sync.errors import ConfigError, DamagedError, StoreUnavailableError
from sparsewire.sync.trajectories import (
    DropReason,
    Lease,
    LedgerSettings,
    Outcome,
    Refusal,
    RefusalReason,
    Trajectory,
    TrajectoryLedger,
)
from sparsewire.sync.trajectories.wire import encode_trajectory

Complete = Callable[..., Trajectory]
MakeSettings = Callable[..., LedgerSettings]


def fill(ledger: TrajectoryLedger, complete: Complete, leases: Sequence[Lease], version: int = 0) -> None:
    for lease in leases:
        for sample in lease.samples:
            assert ledger.accept(complete(lease, sample, versions=(version,))).outcome is Outcome.ACCEPTED


def groups_of(ledger: TrajectoryLedger, num_groups: int, *, version: int, step: int) -> list[int] | None:
    batch = ledger.take_batch(num_groups, version=version, step=step)
    return None if batch is None else [group[0].key.group for group in batch.groups]


def test_leases_count_up_and_stop_at_the_bound(ledger: TrajectoryLedger) -> None:
    first, second = ledger.lease("w1", "eu", 5), ledger.lease("w2", "us", 5)
    assert [lease.group for lease in first + second] == list(range(8))
    assert ledger.lease("w3", "ap", 5) == []
    assert all(lease.samples == (0, 1) and lease.attempt == 0 for lease in first)
    assert ledger.verify().num_groups_open == 8


def test_items_depend_on_seed_and_group_only(tmp_path: Path, settings: MakeSettings) -> None:
    items = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with TrajectoryLedger(path=tmp_path / name, settings=settings(seed=seed)) as ledger:
            items.append([lease.item for lease in ledger.lease("w", "eu", 8)])
    assert items[0] == items[1]
    assert items[0] != items[2]


def test_an_expired_lease_is_handed_out_again_for_the_missing_samples_only(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    now = [1000.0]
    with TrajectoryLedger(path=tmp_path / "l", settings=settings(max_open_groups=2), clock=lambda: now[0]) as ledger:
        half, whole = ledger.lease("w1", "eu", 2)
        ledger.accept(complete(half, 1))
        fill(ledger, complete, [whole])
        now[0] += 59.9
        assert ledger.lease("w2", "us", 2) == []
        now[0] += 0.1
        (again,) = ledger.lease("w2", "us", 2)
        assert (again.group, again.attempt, again.samples, again.item) == (half.group, 1, (0,), half.item)
        assert ledger.accept(complete(half, 0)).outcome is Outcome.ACCEPTED
        assert ledger.accept(complete(again, 0)).outcome is Outcome.SUPERSEDED
        counts = ledger.verify()
        assert (counts.num_leases_again, counts.num_superseded, counts.num_received) == (1, 1, 4)


def test_a_restarted_learner_honours_outstanding_leases(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    now = [1000.0]
    path = tmp_path / "l"
    with TrajectoryLedger(path=path, settings=settings(), clock=lambda: now[0]) as ledger:
        leases = ledger.lease("w1", "eu", 3)
        ledger.accept(complete(leases[0], 0))
    now[0] += 30
    with TrajectoryLedger(path=path, settings=settings(), clock=lambda: now[0]) as ledger:
        assert [lease.group for lease in ledger.lease("w2", "us", 1)] == [3]
        assert ledger.accept(complete(leases[0], 1)).outcome is Outcome.ACCEPTED
        assert ledger.accept(complete(leases[0], 0)).outcome is Outcome.DUPLICATE
        now[0] += 30
        assert [(lease.group, lease.attempt) for lease in ledger.lease("w2", "us", 2)] == [(1, 1), (2, 1)]


def test_each_way_to_be_wrong_is_refused_and_counted(ledger: TrajectoryLedger, complete: Complete) -> None:
    (lease,) = ledger.lease("w1", "eu", 1)
    wrong = {
        RefusalReason.WRONG_RUN: complete(lease, 0, run="r2"),
        RefusalReason.UNKNOWN_GROUP: complete(dataclasses.replace(lease, group=99), 0),
        RefusalReason.UNKNOWN_ATTEMPT: complete(dataclasses.replace(lease, attempt=1), 0),
        RefusalReason.WRONG_ITEM: complete(dataclasses.replace(lease, item=lease.item + 1), 0),
        RefusalReason.SAMPLE_OUT_OF_RANGE: complete(lease, 2),
        RefusalReason.EMPTY: complete(lease, 0, versions=(), num_tokens=0),
    }
    for reason, trajectory in wrong.items():
        outcome, text = ledger.accept(trajectory)
        assert outcome is Outcome.REFUSED
        assert text.startswith(f"{reason}: ")
    assert ledger.accept_many([Refusal(reason=RefusalReason.DAMAGED, detail="x")])[0].reason == "damaged: x"
    counts = ledger.verify()
    assert counts.refused == dict.fromkeys([*wrong, RefusalReason.DAMAGED], 1)
    assert counts.num_received == 0


def test_a_trajectory_above_the_bound_is_refused(tmp_path: Path, settings: MakeSettings, complete: Complete) -> None:
    with TrajectoryLedger(path=tmp_path / "l", settings=settings(max_trajectory_bytes=1000)) as ledger:
        (lease,) = ledger.lease("w1", "eu", 1)
        assert ledger.accept(complete(lease, 0, num_tokens=500)).reason.startswith("too_large: ")


def test_batches_hold_complete_groups_oldest_first_with_every_bit(ledger: TrajectoryLedger, complete: Complete) -> None:
    leases = ledger.lease("w1", "eu", 4)
    ledger.accept(complete(leases[0], 0))
    fill(ledger, complete, [leases[3], leases[2], leases[1]])
    assert groups_of(ledger, 4, version=0, step=1) is None
    batch = ledger.take_batch(2, version=0, step=1)
    assert batch is not None
    assert batch.num_trajectories == 4
    for group, lease in zip(batch.groups, leases[1:3], strict=True):
        for sample, got in enumerate(group):
            assert encode_trajectory(got) == encode_trajectory(complete(lease, sample))
    assert groups_of(ledger, 1, version=0, step=2) == [3]
    assert ledger.verify().num_pending == 7


def test_stale_groups_are_dropped_whole_and_free_their_slots(ledger: TrajectoryLedger, complete: Complete) -> None:
    leases = ledger.lease("w1", "eu", 8)
    fill(ledger, complete, leases[:1], version=2)
    ledger.accept(complete(leases[1], 0, versions=(2, 5)))
    ledger.accept(complete(leases[2], 0, versions=(3, 4)))
    ledger.accept(complete(leases[2], 1, versions=(5,)))
    assert ledger.lease("w1", "eu", 8) == []
    assert groups_of(ledger, 1, version=5, step=1) == [2]
    late = ledger.accept(complete(leases[1], 1, versions=(5,)))
    assert late.reason.startswith("group_dropped: ")
    assert ledger.accept(complete(leases[0], 0, versions=(2,))).outcome is Outcome.DUPLICATE
    counts = ledger.verify()
    assert counts.dropped == {DropReason.STALE: 3}
    assert counts.num_never_received == 1
    assert len(ledger.lease("w1", "eu", 8)) == 3


def test_groups_with_tokens_of_abandoned_versions_are_dropped(ledger: TrajectoryLedger, complete: Complete) -> None:
    leases = ledger.lease("w1", "eu", 3)
    fill(ledger, complete, leases[:1], version=6)
    ledger.accept(complete(leases[1], 0, versions=(6, 7)))
    ledger.accept(complete(leases[1], 1, versions=(8,)))
    fill(ledger, complete, leases[2:], version=8)
    ledger.abandon([7])
    assert groups_of(ledger, 2, version=8, step=1) == [0, 2]
    assert ledger.verify().dropped == {DropReason.ABANDONED: 2}


def test_rollback_makes_later_steps_pending_again_and_each_is_trained_once(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    path = tmp_path / "l"
    with TrajectoryLedger(path=path, settings=settings()) as ledger:
        fill(ledger, complete, ledger.lease("w1", "eu", 6))
        for step in (1, 2, 3):
            assert groups_of(ledger, 1, version=0, step=step) == [step - 1]
            ledger.trained(step)
        ledger.checkpoint(1)
        assert groups_of(ledger, 1, version=0, step=4) == [3]
    with TrajectoryLedger(path=path, settings=settings()) as ledger:
        assert ledger.rollback(2) == 4
        counts = ledger.verify()
        assert (counts.num_trained, counts.num_pending, counts.num_rolled_back) == (4, 8, 4)
        assert groups_of(ledger, 3, version=0, step=3) == [2, 3, 4]
        ledger.trained(3)
        ledger.trained(3)
        assert ledger.verify().num_trained == 10


def test_rollback_counts_what_the_checkpoint_contains_as_trained(ledger: TrajectoryLedger, complete: Complete) -> None:
    fill(ledger, complete, ledger.lease("w1", "eu", 2))
    assert groups_of(ledger, 1, version=0, step=1) == [0]
    assert ledger.rollback(1) == 0
    assert ledger.verify().num_trained == 2


def test_rollback_behind_a_checkpoint_drops_what_was_forgotten(ledger: TrajectoryLedger, complete: Complete) -> None:
    fill(ledger, complete, ledger.lease("w1", "eu", 3))
    for step in (1, 2, 3):
        groups_of(ledger, 1, version=0, step=step)
        ledger.trained(step)
    ledger.checkpoint(2)
    assert ledger.rollback(1) == 2
    counts = ledger.verify()
    assert (counts.num_trained, counts.num_pending, counts.dropped) == (2, 2, {DropReason.FORGOTTEN: 2})


def test_a_rolled_back_group_can_become_too_stale(ledger: TrajectoryLedger, complete: Complete) -> None:
    fill(ledger, complete, ledger.lease("w1", "eu", 1), version=0)
    assert groups_of(ledger, 1, version=2, step=1) == [0]
    ledger.rollback(0)
    assert groups_of(ledger, 1, version=3, step=1) is None
    assert ledger.verify().dropped == {DropReason.STALE: 2}


def test_a_step_takes_once_and_a_skipped_step_is_counted(ledger: TrajectoryLedger, complete: Complete) -> None:
    fill(ledger, complete, ledger.lease("w1", "eu", 3))
    assert groups_of(ledger, 1, version=0, step=5) == [0]
    for step in (4, 5):
        with pytest.raises(ConfigError, match="step 5 has one: call rollback"):
            ledger.take_batch(1, version=0, step=step)
    with pytest.raises(ConfigError, match="step 6 has taken no batch"):
        ledger.trained(6)
    ledger.discard(5)
    assert ledger.verify().dropped == {DropReason.SKIPPED_STEP: 2}
    assert groups_of(ledger, 1, version=0, step=6) == [1]


def test_checkpoints_keep_the_file_bounded(tmp_path: Path, settings: MakeSettings, complete: Complete) -> None:
    path = tmp_path / "l"
    with TrajectoryLedger(path=path, settings=settings(max_open_groups=2)) as ledger:
        sizes = []
        for step in range(1, 41):
            for lease in ledger.lease("w1", "eu", 2):
                for sample in lease.samples:
                    ledger.accept(complete(lease, sample, num_tokens=20_000))
            assert groups_of(ledger, 2, version=0, step=step) is not None
            ledger.trained(step)
            ledger.checkpoint(step)
            sizes.append(path.stat().st_size)
        assert sizes[-1] <= sizes[19] + (64 << 10)
        assert path.with_name("l-wal").stat().st_size < 20 << 20
        assert ledger.verify().num_trained == 160


def test_the_end_of_a_run_counts_what_is_left(ledger: TrajectoryLedger, complete: Complete) -> None:
    leases = ledger.lease("w1", "eu", 3)
    fill(ledger, complete, leases[:1])
    ledger.accept(complete(leases[1], 0))
    ledger.finish()
    assert ledger.run_complete
    assert ledger.lease("w1", "eu", 1) == []
    assert ledger.accept(complete(leases[1], 1)).outcome is Outcome.ACCEPTED
    assert ledger.drop_open() == 4
    counts = ledger.verify()
    assert (counts.num_pending, counts.dropped) == (0, {DropReason.RUN_COMPLETE: 4})
    assert (counts.num_never_received, counts.num_awaited) == (2, 0)
    assert json.loads(json.dumps(dataclasses.asdict(counts)))["dropped"] == {"run_complete": 4}


def test_waiting_for_groups_wakes_up_when_they_are_complete(ledger: TrajectoryLedger, complete: Complete) -> None:
    leases = ledger.lease("w1", "eu", 2)
    assert not ledger.wait_for_groups(1, timeout=timedelta(milliseconds=10))
    thread = threading.Thread(target=fill, args=(ledger, complete, leases))
    thread.start()
    assert ledger.wait_for_groups(2, timeout=timedelta(seconds=30))
    thread.join()
    with pytest.raises(ConfigError, match="wants 9 groups but max_open_groups is 8"):
        ledger.wait_for_groups(9, timeout=timedelta(0))


def test_a_ledger_of_other_settings_or_in_use_is_refused(tmp_path: Path, settings: MakeSettings) -> None:
    path = tmp_path / "l"
    with TrajectoryLedger(path=path, settings=settings()):
        pass
    for other, named in (
        (settings(run="r2"), "run 'r1', not 'r2'"),
        (settings(samples_per_group=3), "samples_per_group '2', not '3'"),
        (settings(seed=8), "seed '7', not '8'"),
    ):
        with pytest.raises(ConfigError, match=named), TrajectoryLedger(path=path, settings=other):
            pass
    with TrajectoryLedger(path=path, settings=settings()) as ledger:
        outside = sqlite3.connect(path, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            outside.execute("SELECT * FROM meta")
        outside.close()
    with pytest.raises(StoreUnavailableError, match="not open"):
        ledger.lease("w", "eu", 1)


def test_damage_of_a_stored_payload_is_reported_and_not_trained(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    path = tmp_path / "l"
    with TrajectoryLedger(path=path, settings=settings()) as ledger:
        (lease,) = ledger.lease("w1", "eu", 1)
        fill(ledger, complete, [lease])
    payload = encode_trajectory(complete(lease, 1))
    content = path.read_bytes()
    at = content.index(payload) + len(payload) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with TrajectoryLedger(path=path, settings=settings()) as ledger:
        with pytest.raises(
            DamagedError, match=r"ledger .*/l is damaged: the payload of TrajectoryKey\(group=0, sample=1"
        ):
            ledger.take_batch(1, version=0, step=1)
        assert ledger.verify().num_pending == 2


def test_bad_settings_are_reported_together(settings: MakeSettings) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(samples_per_group=0, max_staleness=-1, max_open_groups=0, lease_duration=timedelta(0))
    for name in ("samples_per_group 0", "max_staleness -1", "max_open_groups 0", "lease_duration"):
        assert name in str(caught.value)
