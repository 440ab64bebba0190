"""A whole worker against a real learner's services: leases in, trajectories home, versions in between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.rollout.config import WorkerConfig
from sparsewire.rollout.loop import DRAIN_TIMEOUT, run_worker
from sparsewire.sync.block_fp8 import block_fp8_view
from sparsewire.sync.errors import ConfigError, DeadlineExceededError, HandshakeError, SparsewireError
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.rpc import start_server
from sparsewire.sync.trajectories.ledger import LedgerSettings, TrajectoryLedger
from sparsewire.sync.trajectories.service import TrajectoryServicer
from sparsewire.sync.trajectories.types import DropReason, SamplingParams

Weights = dict[str, npt.NDArray[Any]]
Nudged = Callable[[Weights, int], Weights]


@dataclass
class Learner:
    """What a learner offers to workers."""

    publisher: Publisher
    ledger: TrajectoryLedger
    address: str
    url: str


def settings(*, task: str = "addition", max_new_tokens: int = 4) -> LedgerSettings:
    return LedgerSettings(
        run="r1",
        task=task,
        samples_per_group=4,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens),
        max_staleness=8,
        max_open_groups=8,
        seed=5,
        lease_duration=timedelta(seconds=60),
    )


@contextmanager
def open_learner(directory: Path, ledger_settings: LedgerSettings) -> Iterator[Learner]:
    url = f"file://{directory}/store"
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher.open(url, run="r1"))
        ledger = stack.enter_context(TrajectoryLedger(path=directory / "ledger.sqlite", settings=ledger_settings))
        server = stack.enter_context(start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]))
        yield Learner(publisher, ledger, f"127.0.0.1:{server.port}", url)


def config(learner: Learner, model: Path, directory: Path, **changes: Any) -> WorkerConfig:
    values = {
        "run": "r1",
        "model": model,
        "weights": learner.url,
        "trajectories": learner.address,
        "region": "eu",
        "worker_id": "eu-0",
        "directory": directory,
        "sync_poll_seconds": 0.1,
        "idle_timeout_seconds": 30,
        "num_threads": 1,
    }
    return WorkerConfig.model_validate({**values, **changes})


class Worker:
    """`run_worker` in a thread."""

    def __init__(self, worker_config: WorkerConfig, *, drain_timeout: timedelta = DRAIN_TIMEOUT) -> None:
        self._drain_timeout = drain_timeout
        self.config = worker_config
        self.stop = threading.Event()
        self.error: SparsewireError | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            run_worker(self.config, stop=self.stop, drain_timeout=self._drain_timeout)
        except SparsewireError as error:
            self.error = error

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def events(self, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (self.config.directory / "events.jsonl").read_text().splitlines()]
        return [record for record in records if record["event"] == name]


def test_worker_feeds_a_learner_through_versions_until_the_run_is_complete(
    tiny_model: Path, tiny_weights: Weights, nudged: Nudged, tmp_path: Path
) -> None:
    with open_learner(tmp_path, settings()) as learner:
        weights = tiny_weights
        learner.publisher.publish(weights)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as worker:
            for step in range(1, 4):
                assert learner.ledger.wait_for_groups(3, timeout=timedelta(seconds=30))
                batch = learner.ledger.take_batch(3, version=step - 1, step=step)
                assert batch is not None
                for group in batch.groups:
                    for trajectory in group:
                        assert trajectory.region == "eu"
                        assert trajectory.spans
                        assert trajectory.reward in (0.0, 1.0)
                        assert np.isfinite(trajectory.logprobs).all()
                learner.ledger.trained(step)
                weights = nudged(weights, step)
                manifest = learner.publisher.publish(weights, step=step)
            learner.ledger.finish()
            worker.join()
            assert worker.error is None
            (started,) = worker.events("worker_start")
            assert started["seeded"]
            assert started["engine"] == "transformers"
            (ended,) = worker.events("worker_end")
            assert ended["reason"] == "run_complete"
            applied = worker.events("version_applied")
            assert applied[-1]["version"] == 3
            assert applied[-1]["digest"] == manifest.version_digest.hex()
            assert sum(event["wire_bytes"] for event in applied) < 0.5 * len(applied) * manifest.num_elements * 2
            (live,) = worker.events("live_weights")
            assert (live["version"], live["digest"]) == (3, manifest.version_digest.hex())
            generated = worker.events("generated")
            assert sum(event["num_trajectories"] for event in generated) == ended["num_trajectories"]
            assert {"group", "num_tokens", "seconds", "version", "reward_mean"} <= set(generated[0])
        learner.ledger.drop_open(DropReason.RUN_COMPLETE)
        counts = learner.ledger.counts()
        counts.check()
        assert counts.num_received == ended["num_trajectories"]


def test_stopped_worker_leaves_nothing_behind_and_its_successor_goes_on(
    tiny_model: Path, tiny_weights: Weights, nudged: Nudged, tmp_path: Path
) -> None:
    with open_learner(tmp_path, settings()) as learner:
        learner.publisher.publish(tiny_weights)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as first:
            assert learner.ledger.wait_for_groups(1, timeout=timedelta(seconds=30))
        assert first.error is None
        assert first.events("worker_end")[-1]["reason"] == "stopped"
        assert not [
            thread for thread in threading.enumerate() if thread.name in ("updater", "trajectory-sender", "drain")
        ]
        learner.publisher.publish(nudged(tiny_weights, 1))
        assert learner.ledger.take_batch(1, version=0, step=1) is not None
        learner.ledger.trained(1)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as second:
            deadline = time.monotonic() + 30
            step = 2
            while second.events("generated")[-1]["version"] != 1 and time.monotonic() < deadline:
                if learner.ledger.take_batch(1, version=1, step=step) is not None:
                    learner.ledger.trained(step)
                    step += 1
                threading.Event().wait(0.05)
            assert second.events("generated")[-1]["version"] == 1
        assert second.error is None
        starts = second.events("worker_start")
        assert [start["mirror_version"] for start in starts] == [None, 0]
        assert [start["seeded"] for start in starts] == [True, False]


def test_long_batch_is_aborted_within_a_bound_when_the_worker_stops(
    tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    with open_learner(tmp_path, settings(max_new_tokens=1900)) as learner:
        learner.publisher.publish(tiny_weights)
        worker_config = config(learner, tiny_model, tmp_path / "worker")
        with Worker(worker_config, drain_timeout=timedelta(seconds=0.3)) as worker:
            deadline = time.monotonic() + 30
            while not (worker.config.directory / "events.jsonl").exists() or not worker.events("worker_start"):
                assert time.monotonic() < deadline
                threading.Event().wait(0.02)
            started = time.monotonic()
            worker.stop.set()
            worker.join()
            assert time.monotonic() - started < 15
        assert worker.error is None


def test_no_first_version_in_time_is_a_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    with (
        open_learner(tmp_path, settings()) as learner,
        Worker(config(learner, tiny_model, tmp_path / "worker", idle_timeout_seconds=0.5)) as worker,
    ):
        worker.join()
        assert isinstance(worker.error, DeadlineExceededError)
        assert "start the learner" in str(worker.error)
        assert "'r1'" in str(worker.error)


def test_wrong_model_is_refused_before_the_first_version(
    tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    with open_learner(tmp_path, settings()) as learner:
        fewer = {name: array for name, array in tiny_weights.items() if "layers.2" not in name}
        learner.publisher.publish(fewer)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as worker:
            worker.join()
        assert isinstance(worker.error, HandshakeError)
        assert "model.layers.2.mlp.up_proj.weight" in str(worker.error)
        assert not worker.events("version_applied")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_run_in_another_dtype_is_seeded_loaded_and_followed_in_it(
    tiny_model: Path, tiny_weights: Weights, nudged: Nudged, tmp_path: Path, dtype: type[np.generic]
) -> None:
    with open_learner(tmp_path, settings()) as learner:
        weights = {name: array.astype(dtype) for name, array in tiny_weights.items()}
        learner.publisher.publish(weights)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as worker:
            assert learner.ledger.wait_for_groups(1, timeout=timedelta(seconds=30))
            manifest = learner.publisher.publish(nudged(weights, 1), step=1)
            learner.ledger.finish()
            worker.join()
        assert worker.error is None
        assert worker.events("worker_start")[0]["seeded"]
        (live,) = worker.events("live_weights")
        assert (live["version"], live["digest"]) == (1, manifest.version_digest.hex())


def test_a_block_fp8_run_is_refused_with_what_to_do(tiny_model: Path, tiny_weights: Weights, tmp_path: Path) -> None:
    with open_learner(tmp_path, settings()) as learner:
        learner.publisher.publish(block_fp8_view(tiny_weights))
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as worker:
            worker.join()
        assert isinstance(worker.error, HandshakeError)
        assert 'view = "bf16"' in str(worker.error)
        assert "model.layers.0.mlp.up_proj.weight is F8_E4M3[128, 64] in the run" in str(worker.error)


def test_unknown_task_ends_the_worker_with_suggestions(tiny_model: Path, tiny_weights: Weights, tmp_path: Path) -> None:
    with open_learner(tmp_path, settings(task="additoin")) as learner:
        learner.publisher.publish(tiny_weights)
        with Worker(config(learner, tiny_model, tmp_path / "worker")) as worker:
            worker.join()
        assert isinstance(worker.error, ConfigError)
        assert "addition" in str(worker.error)
        assert worker.events("worker_end")[-1]["reason"] == "failed"
