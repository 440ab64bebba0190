"""Spool, stream and ledger together: whatever is lost, cut, killed or restarted, every sample counts once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import grpc
import pytest

from sparsewire.sync.errors import DamagedError, DeadlineExceededError, SpoolFullError, StoreUnavailableError
from sparsewire.sync.rpc import start_server
from sparsewire.sync.trajectories import (
    LeaseClient,
    LedgerSettings,
    Outcome,
    Trajectory,
    TrajectoryLedger,
    TrajectorySender,
    TrajectoryServicer,
    TrajectorySpool,
)
from sparsewire.sync.trajectories.wire import encode_trajectory
from sparsewire.v1 import trajectories_pb2, trajectories_pb2_grpc

Complete = Callable[..., Trajectory]
MakeSettings = Callable[..., LedgerSettings]
SOON = timedelta(seconds=60)


class Link(Protocol):
    """A TCP link that can be cut; see conftest."""

    server_byte_budgets: list[int]
    num_cut: int
    is_down: bool

    @property
    def address(self) -> str: ...

    def take_down(self) -> None: ...


WORKER = """
import json, sys, time
from pathlib import Path
import numpy as np
from sparsewire.sync.trajectories import *

address, path, num_samples = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
ints = np.arange(9, dtype=np.int32)

def made(lease, sample):
    return Trajectory(run="r1", key=TrajectoryKey(group=lease.group, sample=sample, attempt=lease.attempt),
        task=lease.task, item=lease.item, worker_id="w1", region="eu", prompt_token_ids=ints, completion_token_ids=ints,
        logprobs=-np.ones(9, np.float32), spans=(VersionSpan(version=0, start=0, stop=9),), reward=1.0,
        finish_reason=FinishReason.STOP, created_unix_seconds=1.0)

with TrajectorySpool(path=path, run="r1") as spool, \\
        TrajectorySender(spool=spool, address=address, run="r1") as sender, \\
        LeaseClient(address=address, run="r1", worker_id="w1", region="eu") as client:
    num_recovered = spool.num_trajectories
    for lease in client.lease(1).leases:
        for sample in lease.samples[:num_samples]:
            spool.append(made(lease, sample))
    print(json.dumps({"recovered": num_recovered, "spooled": spool.num_trajectories}), flush=True)
    if sys.stdin.readline():
        from datetime import timedelta
        sender.flush(timedelta(seconds=60))
        print("flushed", flush=True)
"""


def start_worker(address: str, spool: Path, *, num_samples: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, address, str(spool), str(num_samples)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def sender_to(spool: TrajectorySpool, address: str, *, seed: int = 1) -> TrajectorySender:
    return TrajectorySender(spool=spool, address=address, run="r1", jitter=random.Random(seed))


def test_lost_acknowledgements_end_with_each_sample_once(
    tmp_path: Path, settings: MakeSettings, complete: Complete, open_link: Callable[[int], Link]
) -> None:
    with (
        TrajectoryLedger(path=tmp_path / "l", settings=settings(max_open_groups=100)) as ledger,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
        TrajectorySpool(path=tmp_path / "s", run="r1") as spool,
    ):
        link = open_link(server.port)
        link.server_byte_budgets += [0, 60, 200, 300, 500, 700, 900, 1500]
        for lease in ledger.lease("w1", "eu", 100):
            for sample in lease.samples:
                spool.append(complete(lease, sample))
        with sender_to(spool, link.address) as sender:
            sender.flush(SOON)
        counts = ledger.verify()
        assert link.num_cut >= 4
        assert counts.num_received == 200
        assert counts.num_duplicates > 0
        assert counts.num_groups_complete == 100
        assert spool.num_trajectories == 0


def test_a_network_that_goes_away_and_comes_back_loses_nothing(
    tmp_path: Path, settings: MakeSettings, complete: Complete, open_link: Callable[[int], Link]
) -> None:
    with (
        TrajectoryLedger(path=tmp_path / "l", settings=settings(max_open_groups=20)) as ledger,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
        TrajectorySpool(path=tmp_path / "s", run="r1") as spool,
    ):
        link = open_link(server.port)
        leases = ledger.lease("w1", "eu", 20)
        with sender_to(spool, link.address) as sender:
            for start in range(0, 20, 5):
                for lease in leases[start : start + 4]:
                    for sample in lease.samples:
                        spool.append(complete(lease, sample, num_tokens=500))
                link.take_down()
                for sample in leases[start + 4].samples:
                    spool.append(complete(leases[start + 4], sample))
                with pytest.raises(DeadlineExceededError, match="stay in the spool"):
                    sender.flush(timedelta(milliseconds=300))
                link.is_down = False
                sender.flush(SOON)
        assert ledger.verify().num_groups_complete == 20


def test_a_learner_that_is_down_for_a_while_gets_everything_when_it_is_back(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    path = tmp_path / "l"
    with TrajectorySpool(path=tmp_path / "s", run="r1", max_trajectories=5) as spool:
        with TrajectoryLedger(path=path, settings=settings()) as ledger:
            server = start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)])
            address = f"127.0.0.1:{server.port}"
            leases = ledger.lease("w1", "eu", 4)
            sender = sender_to(spool, address)
            sender.__enter__()
            spool.append(complete(leases[0], 0))
            sender.flush(SOON)
            server.stop(grace=timedelta(0))
        with LeaseClient(address=address, run="r1", worker_id="w1", region="eu") as client:
            with pytest.raises(StoreUnavailableError, match="leasing prompt groups"):
                client.lease(1)
            made = [complete(lease, sample) for lease in leases for sample in lease.samples][1:]
            for trajectory in made[:5]:
                spool.append_when_room(trajectory, timeout=SOON)
            with pytest.raises(SpoolFullError, match="wait until the learner can be reached"):
                spool.append_when_room(made[5], timeout=timedelta(milliseconds=500))
            sender.check()
            assert isinstance(sender.last_error, StoreUnavailableError)
            with (
                TrajectoryLedger(path=path, settings=settings()) as ledger,
                start_server(address, services=[TrajectoryServicer(ledger)]),
            ):
                for trajectory in made[5:]:
                    spool.append_when_room(trajectory, timeout=SOON)
                sender.flush(SOON)
                sender.close()
                counts = ledger.verify()
                assert (counts.num_received, counts.num_groups_complete) == (8, 4)
                assert sender.last_error is None
                reply = client.lease(1)
                assert [lease.group for lease in reply.leases] == [4]


def test_a_worker_killed_with_half_a_group_delivers_it_after_restart(tmp_path: Path, settings: MakeSettings) -> None:
    """SIGKILL a real worker whose learner is away, restart it on the same spool; the other half is leased again."""
    now = [1000.0]
    path = tmp_path / "l"
    wanted = settings(samples_per_group=4)
    with TrajectoryLedger(path=path, settings=wanted, clock=lambda: now[0]) as ledger:
        server = start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)])
        address = f"127.0.0.1:{server.port}"
        with start_worker(address, tmp_path / "s", num_samples=2) as worker:
            assert json.loads(line_of(worker))["recovered"] == 0
            worker.kill()
        server.stop(grace=timedelta(0))
        with start_server(address, services=[TrajectoryServicer(ledger)]):
            with start_worker(address, tmp_path / "s", num_samples=4) as worker:
                line_of(worker)
                say(worker, "flush\n")
                assert line_of(worker) == "flushed"
            counts = ledger.verify()
            assert (counts.num_received, counts.num_groups_complete) == (6, 1)
            now[0] += 61
            with start_worker(address, tmp_path / "s2", num_samples=4) as other:
                assert json.loads(line_of(other)) == {"recovered": 0, "spooled": 2}
                say(other, "flush\n")
                assert line_of(other) == "flushed"
        counts = ledger.verify()
        assert (counts.num_received, counts.num_groups_complete, counts.num_leases_again) == (8, 2, 1)
        assert ledger.take_batch(2, version=0, step=1) is not None


def test_a_worker_killed_while_it_sends_ends_with_each_sample_once(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    now = [1000.0]
    wanted = settings(samples_per_group=64, max_open_groups=4)
    with (
        TrajectoryLedger(path=tmp_path / "l", settings=wanted, clock=lambda: now[0]) as ledger,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
    ):
        address = f"127.0.0.1:{server.port}"
        for num_more in (1, 20, 45):
            with start_worker(address, tmp_path / "s", num_samples=64) as worker:
                enough = ledger.counts().num_received + num_more
                deadline = time.monotonic() + 60
                while ledger.counts().num_received < enough:
                    assert time.monotonic() < deadline
                    threading.Event().wait(0.001)
                worker.kill()
        with start_worker(address, tmp_path / "s", num_samples=64) as worker:
            line_of(worker)
            say(worker, "flush\n")
            assert line_of(worker) == "flushed"
        now[0] += 61
        for lease in ledger.lease("w2", "us", 4):
            for sample in lease.samples:
                assert ledger.accept(complete(lease, sample)).outcome is Outcome.ACCEPTED
        counts = ledger.verify()
        assert (counts.num_received, counts.num_groups_complete, counts.num_awaited) == (256, 4, 0)
        assert (counts.num_refused, counts.num_superseded) == (0, 0)


def test_a_learner_resumed_from_a_checkpoint_trains_each_sample_once(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    """The buffer is not empty and steps were taken after the checkpoint when the learner dies."""
    path = tmp_path / "l"
    trained: dict[tuple[int, int], int] = {}

    def train(ledger: TrajectoryLedger, step: int) -> None:
        assert ledger.wait_for_groups(2, timeout=SOON)
        batch = ledger.take_batch(2, version=0, step=step)
        assert batch is not None
        for group in batch.groups:
            for trajectory in group:
                where = (trajectory.key.group, trajectory.key.sample)
                assert where not in trained
                trained[where] = step
        ledger.trained(step)

    with TrajectorySpool(path=tmp_path / "s", run="r1") as spool:
        with TrajectoryLedger(path=path, settings=settings(max_open_groups=20)) as ledger:
            server = start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)])
            address = f"127.0.0.1:{server.port}"
            with sender_to(spool, address) as sender:
                leases = ledger.lease("w1", "eu", 10)
                for lease in leases[:9]:
                    for sample in lease.samples:
                        spool.append(complete(lease, sample))
                sender.flush(SOON)
                train(ledger, 1)
                train(ledger, 2)
                ledger.checkpoint(1)
                train(ledger, 3)
            server.stop(grace=timedelta(0))
            for sample in leases[9].samples:
                spool.append(complete(leases[9], sample))
        with (
            TrajectoryLedger(path=path, settings=settings(max_open_groups=20)) as ledger,
            start_server(address, services=[TrajectoryServicer(ledger)]),
            sender_to(spool, address) as sender,
        ):
            assert ledger.rollback(1) == 8
            trained = {where: step for where, step in trained.items() if step <= 1}
            for step in (2, 3, 4, 5):
                train(ledger, step)
            sender.flush(SOON)
            counts = ledger.verify()
            assert (counts.num_trained, counts.num_pending, counts.num_received) == (20, 0, 20)
            assert len(trained) == 20


def test_many_senders_at_once_fill_the_groups_they_share(
    tmp_path: Path, settings: MakeSettings, complete: Complete
) -> None:
    """Sixteen workers make every sample twice over; the learner keeps one of each."""
    num_workers, num_groups = 16, 40
    with (
        TrajectoryLedger(
            path=tmp_path / "l", settings=settings(samples_per_group=8, max_open_groups=num_groups)
        ) as ledger,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
    ):
        address = f"127.0.0.1:{server.port}"
        leases = ledger.lease("w1", "eu", num_groups)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                with (
                    TrajectorySpool(path=tmp_path / f"s{number}", run="r1", max_trajectories=10) as spool,
                    sender_to(spool, address, seed=number) as sender,
                ):
                    for lease in leases:
                        sample = number % 8
                        spool.append_when_room(complete(lease, sample, num_tokens=200), timeout=SOON)
                    sender.flush(SOON)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
        counts = ledger.verify()
        assert counts.num_groups_complete == num_groups
        assert (counts.num_received, counts.num_duplicates) == (num_groups * 8, num_groups * 8)
        batch = ledger.take_batch(num_groups, version=0, step=1)
        assert batch is not None
        for group, lease in zip(batch.groups, leases, strict=True):
            assert [encode_trajectory(got) for got in group] == [
                encode_trajectory(complete(lease, sample, num_tokens=200)) for sample in range(8)
            ]


def test_a_trajectory_of_200000_tokens_arrives_with_stock_limits(
    ledger: TrajectoryLedger, tmp_path: Path, complete: Complete
) -> None:
    with (
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
        TrajectorySpool(path=tmp_path / "s", run="r1") as spool,
        sender_to(spool, f"127.0.0.1:{server.port}") as sender,
    ):
        (lease,) = ledger.lease("w1", "eu", 1)
        for sample in lease.samples:
            spool.append(complete(lease, sample, num_tokens=200_000, versions=(0, 1, 2)))
        assert spool.num_bytes > 2 << 20
        sender.flush(SOON)
        batch = ledger.take_batch(1, version=2, step=1)
        assert batch is not None
        (group,) = batch.groups
        for sample, got in enumerate(group):
            wanted = complete(lease, sample, num_tokens=200_000, versions=(0, 1, 2))
            assert got.completion_token_ids.tobytes() == wanted.completion_token_ids.tobytes()
            assert got.logprobs.tobytes() == wanted.logprobs.tobytes()
            assert got.spans == wanted.spans


def test_a_refused_trajectory_leaves_the_spool_and_blocks_nothing(
    ledger: TrajectoryLedger, tmp_path: Path, complete: Complete
) -> None:
    with (
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
        TrajectorySpool(path=tmp_path / "s", run="r1") as spool,
        sender_to(spool, f"127.0.0.1:{server.port}") as sender,
    ):
        (lease,) = ledger.lease("w1", "eu", 1)
        spool.append(complete(lease, 9))
        spool.append(complete(lease, 0))
        sender.flush(SOON)
        counts = ledger.verify()
        assert (counts.num_received, counts.refused) == (1, {"sample_out_of_range": 1})


class _ForgetfulServicer(trajectories_pb2_grpc.TrajectoryServiceServicer):
    """Reads everything and answers nothing, or answers what was never sent."""

    def __init__(self, answers: list[trajectories_pb2.SendTrajectoriesResponse]) -> None:
        self.answers = answers
        self.num_streams = 0

    def register(self, server: grpc.Server) -> None:
        trajectories_pb2_grpc.add_TrajectoryServiceServicer_to_server(self, server)

    def LeaseGroups(self, request: object, context: object) -> trajectories_pb2.LeaseGroupsResponse:  # noqa: N802
        return trajectories_pb2.LeaseGroupsResponse(
            leases=[trajectories_pb2.Lease(group=1, task="t", samples=[0])] * 3, retry_after_seconds=1
        )

    def SendTrajectories(  # noqa: N802
        self, request_iterator: object, context: grpc.ServicerContext
    ) -> Iterator[trajectories_pb2.SendTrajectoriesResponse]:
        self.num_streams += 1
        yield from self.answers
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(60)


def test_a_learner_that_answers_nothing_or_nonsense_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, complete: Complete, settings: MakeSettings
) -> None:
    answers: list[trajectories_pb2.SendTrajectoriesResponse] = []
    servicer = _ForgetfulServicer(answers)
    with TrajectoryLedger(path=tmp_path / "l", settings=settings()) as ledger:
        (lease,) = ledger.lease("w", "eu", 1)
    with (
        start_server("127.0.0.1:0", services=[servicer]) as server,
        TrajectorySpool(path=tmp_path / "s", run="r1") as spool,
    ):
        address = f"127.0.0.1:{server.port}"
        spool.append(complete(lease, 0))
        deadline = timedelta(milliseconds=300)
        with TrajectorySender(spool=spool, address=address, run="r1", progress_deadline=deadline) as sender:
            with pytest.raises(DeadlineExceededError, match="no progress"):
                sender.flush(timedelta(seconds=2))
            assert servicer.num_streams >= 2
            answers.append(
                trajectories_pb2.SendTrajectoriesResponse(
                    key=trajectories_pb2.TrajectoryKey(group=77),
                    outcome=trajectories_pb2.TRAJECTORY_OUTCOME_ACCEPTED,
                )
            )
            with pytest.raises(DeadlineExceededError, match="group=77, sample=0, attempt=0\\), which was not sent"):
                sender.flush(timedelta(seconds=4))
        assert spool.num_trajectories == 1
        with (
            LeaseClient(address=address, run="r1", worker_id="w", region="eu") as client,
            pytest.raises(DamagedError, match="3 leases for 1 asked"),
        ):
            client.lease(1)


def test_damage_of_the_open_spool_ends_the_sender_with_the_reason(
    ledger: TrajectoryLedger, tmp_path: Path, complete: Complete
) -> None:
    path = tmp_path / "s"
    (lease,) = ledger.lease("w1", "eu", 1)
    with TrajectorySpool(path=path, run="r1") as spool:
        for sample in range(20):
            spool.append(complete(lease, sample, num_tokens=50_000))
    with (
        TrajectorySpool(path=path, run="r1") as spool,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
    ):
        # More than SQLite keeps in memory, so that the sender reads what the disk now holds.
        path.write_bytes(b"\xff" * path.stat().st_size)
        with (
            sender_to(spool, f"127.0.0.1:{server.port}") as sender,
            pytest.raises(DamagedError, match="move the file away"),
        ):
            sender.flush(SOON)
