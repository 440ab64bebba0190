"""Whatever happens in whatever order, the ledger adds up and no sample is trained twice in the surviving history."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparsewire.sync.trajectories import (
    FinishReason,
    Lease,
    LedgerSettings,
    Outcome,
    SamplingParams,
    Trajectory,
    TrajectoryKey,
    TrajectoryLedger,
    VersionSpan,
)

SETTINGS = LedgerSettings(
    run="r1",
    task="t",
    samples_per_group=2,
    sampling=SamplingParams(temperature=1.0, max_new_tokens=4),
    max_staleness=2,
    max_open_groups=4,
    seed=1,
    num_items=10,
    lease_duration=timedelta(seconds=10),
)


def trajectory_of(lease: Lease, sample: int, version: int) -> Trajectory:
    return Trajectory(
        run="r1",
        key=TrajectoryKey(group=lease.group, sample=sample, attempt=lease.attempt),
        task=lease.task,
        item=lease.item,
        worker_id="w",
        region="eu",
        prompt_token_ids=np.array([1], np.int32),
        completion_token_ids=np.array([2, 3], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        spans=(VersionSpan(version=version, start=0, stop=2),),
        reward=1.0,
        finish_reason=FinishReason.LENGTH,
        created_unix_seconds=1.0,
    )


class LedgerMachine(RuleBasedStateMachine):
    """Workers, a learner and crashes in any order, against a model of what may have been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.version = 0
        self.step = 0
        self.checkpoint_step = 0
        self.leases: list[Lease] = []
        self.accepted: set[tuple[int, int]] = set()
        self.history: dict[tuple[int, int], int] = {}
        self.ledger = self.open()

    def open(self) -> TrajectoryLedger:
        path = Path(self.directory.name) / "ledger"
        return TrajectoryLedger(path=path, settings=SETTINGS, clock=lambda: self.now).__enter__()

    @rule(max_groups=st.integers(1, 3))
    def lease(self, max_groups: int) -> None:
        leases = self.ledger.lease("w", "eu", max_groups)
        assert len(leases) <= max_groups
        for lease in leases:
            assert not self.accepted & {(lease.group, sample) for sample in lease.samples}
        self.leases += leases

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), age=st.integers(0, 3))
    def send(self, data: st.DataObject, age: int) -> None:
        lease = data.draw(st.sampled_from(self.leases[-12:]))
        sample = data.draw(st.sampled_from(lease.samples))
        outcome = self.ledger.accept(trajectory_of(lease, sample, max(0, self.version - age))).outcome
        here = (lease.group, sample) in self.accepted
        assert (outcome is Outcome.ACCEPTED) <= (not here)
        assert (outcome in (Outcome.DUPLICATE, Outcome.SUPERSEDED)) == here
        if outcome is Outcome.ACCEPTED:
            self.accepted.add((lease.group, sample))

    @precondition(lambda self: self.leases)
    @rule()
    def send_everything(self) -> None:
        for lease in self.leases[-12:]:
            for sample in lease.samples:
                if self.ledger.accept(trajectory_of(lease, sample, self.version)).outcome is Outcome.ACCEPTED:
                    self.accepted.add((lease.group, sample))

    @rule(num_groups=st.integers(1, 2))
    def take(self, num_groups: int) -> None:
        batch = self.ledger.take_batch(num_groups, version=self.version, step=self.step + 1)
        if batch is None:
            return
        self.step += 1
        numbers = [group[0].key.group for group in batch.groups]
        assert numbers == sorted(set(numbers))
        for group in batch.groups:
            assert [trajectory.key.sample for trajectory in group] == [0, 1]
            for trajectory in group:
                assert trajectory.oldest_version >= self.version - SETTINGS.max_staleness
                where = (trajectory.key.group, trajectory.key.sample)
                assert where not in self.history
                self.history[where] = self.step

    @precondition(lambda self: self.step in self.history.values())
    @rule(skipped=st.booleans())
    def end_step(self, skipped: bool) -> None:
        before = self.ledger.counts()
        if skipped:
            self.ledger.discard(self.step)
        else:
            self.ledger.trained(self.step)
            self.version += 1
        after = self.ledger.counts()
        assert (after.num_trained > before.num_trained) <= (not skipped)

    @rule(back=st.integers(0, 2))
    def save_checkpoint(self, back: int) -> None:
        self.checkpoint_step = max(self.checkpoint_step, self.step - back)
        self.ledger.checkpoint(self.checkpoint_step)

    @rule(behind=st.integers(0, 1), abandoned=st.booleans())
    def crash_and_resume(self, behind: int, abandoned: bool) -> None:
        self.ledger.__exit__(None, None, None)
        self.ledger = self.open()
        resumed = max(0, min(self.step, self.checkpoint_step) - behind)
        self.ledger.rollback(resumed)
        if abandoned and self.version > 0:
            self.ledger.abandon([self.version])
            self.version += 1
        self.history = {where: step for where, step in self.history.items() if step <= resumed}
        self.step = self.checkpoint_step = resumed

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def adds_up(self) -> None:
        counts = self.ledger.verify()
        assert counts.num_received == len(self.accepted)
        assert counts.num_trained + counts.num_pending <= len(self.accepted)

    def teardown(self) -> None:
        self.ledger.rollback(self.step)
        self.ledger.finish()
        self.ledger.drop_open()
        counts = self.ledger.verify()
        assert counts.num_pending == 0
        assert counts.num_received == counts.num_trained + counts.num_dropped
        self.ledger.__exit__(None, None, None)
        self.directory.cleanup()


TestAnyOrderOfEventsAddsUp = LedgerMachine.TestCase
TestAnyOrderOfEventsAddsUp.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
