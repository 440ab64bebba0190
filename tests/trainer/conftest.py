"""What the trainer's tests share: trajectories as a worker would make them, and a worker that plays a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from sparsewire.sync.errors import DeadlineExceededError, StoreUnavailableError
from sparsewire.sync.trajectories import (
    FinishReason,
    Lease,
    LeaseClient,
    Trajectory,
    TrajectoryKey,
    TrajectorySender,
    TrajectorySpool,
    VersionSpan,
)
from sparsewire.trainer.ranks import ProcessGroup, open_process_group

VOCABULARY = 256


def make_trajectory(
    *,
    group: int = 0,
    sample: int = 0,
    reward: float = 0.0,
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    versions: Sequence[int] = (0,),
    run: str = "r1",
    attempt: int = 0,
    task: str = "addition",
    item: int = 0,
) -> Trajectory:
    """Return a trajectory whose tokens were made by `versions`, one after the other, and the last for the rest."""
    spans = [VersionSpan(version=version, start=at, stop=at + 1) for at, version in enumerate(versions[:-1])]
    spans.append(VersionSpan(version=versions[-1], start=len(spans), stop=len(completion)))
    return Trajectory(
        run=run,
        key=TrajectoryKey(group=group, sample=sample, attempt=attempt),
        task=task,
        item=item,
        worker_id="w",
        region="eu",
        prompt_token_ids=np.asarray(prompt, np.int32),
        completion_token_ids=np.asarray(completion, np.int32),
        logprobs=np.linspace(-6.0, -4.0, len(completion), dtype=np.float32),
        spans=tuple(spans),
        reward=reward,
        finish_reason=FinishReason.LENGTH,
        created_unix_seconds=0.0,
    )


def make_groups(*, seed: int, num_groups: int = 4, num_samples: int = 4) -> list[list[Trajectory]]:
    """Return groups of random prompts, completions of random lengths, and rewards 0 or 1."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        prompt = random.integers(3, VOCABULARY, random.integers(4, 12)).tolist()
        groups.append(
            [
                make_trajectory(
                    group=group,
                    sample=sample,
                    prompt=prompt,
                    completion=random.integers(3, VOCABULARY, random.integers(1, 9)).tolist(),
                    reward=float(random.integers(0, 2)),
                )
                for sample in range(num_samples)
            ]
        )
    return groups


class ScriptedWorker:
    """Leases over gRPC and sends random completions through a real spool until told that the run is complete."""

    def __init__(self, *, address: str, run: str, directory: Path, version: Callable[[], int], seed: int) -> None:
        self._address = address
        self._run = run
        self._directory = directory
        self._version = version
        self._random = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scripted-worker", daemon=True)
        self.saw_completion = False
        self.num_made = 0

    def __enter__(self) -> ScriptedWorker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the scripted worker did not end"

    def join(self, timeout: timedelta) -> None:
        """Wait until the worker has been told that the run is complete."""
        self._thread.join(timeout.total_seconds())
        assert self.saw_completion, "the worker was never told that the run is complete"

    def _work(self) -> None:
        with (
            TrajectorySpool(path=self._directory / "spool.sqlite", run=self._run) as spool,
            TrajectorySender(spool=spool, address=self._address, run=self._run) as sender,
            LeaseClient(address=self._address, run=self._run, worker_id="w", region="eu") as client,
        ):
            while not self._stop.is_set():
                try:
                    reply = client.lease(2)
                except (StoreUnavailableError, DeadlineExceededError):
                    self._stop.wait(0.1)
                    continue
                if reply.run_complete:
                    sender.flush(timedelta(seconds=30))
                    self.saw_completion = True
                    return
                for lease in reply.leases:
                    for trajectory in self._sample(lease):
                        spool.append(trajectory)
                        self.num_made += 1
                if not reply.leases:
                    self._stop.wait(0.05)

    def _sample(self, lease: Lease) -> Iterator[Trajectory]:
        version = self._version()
        for sample in lease.samples:
            completion = self._random.integers(3, VOCABULARY, lease.sampling.max_new_tokens).tolist()
            yield make_trajectory(
                run=self._run,
                group=lease.group,
                sample=sample,
                attempt=lease.attempt,
                task=lease.task,
                item=lease.item,
                prompt=[1, 2, 3 + lease.item % 7],
                completion=completion,
                reward=float(np.mean(completion) / VOCABULARY),
                versions=(version,),
            )


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """The function `make_trajectory`."""
    return make_trajectory


@pytest.fixture
def groups() -> Callable[..., list[list[Trajectory]]]:
    """The function `make_groups`."""
    return make_groups


@pytest.fixture
def scripted_worker() -> type[ScriptedWorker]:
    """The class `ScriptedWorker`."""
    return ScriptedWorker


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A learner of one rank on the CPU."""
    with open_process_group() as group:
        yield group


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """A function that waits for a condition with a deadline."""

    def wait(condition: Callable[[], bool], *, timeout: timedelta, what: str) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout}"
            time.sleep(0.05)

    return wait
