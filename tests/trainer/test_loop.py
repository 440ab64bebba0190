from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.sync import Subscriber
from sparsewire.sync.errors import ConfigError, DeadlineExceededError
from sparsewire.trainer import LearnerConfig
from sparsewire.trainer.checkpoint import CheckpointStore
from sparsewire.trainer.config import ComputeDtype, ViewKind
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loop import run_learner
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import load_model
from sparsewire.trainer.ranks import open_process_group

_PROGRAM = Path(__file__).with_name("learner_program.py")
_PATIENCE = timedelta(seconds=90)

Event = dict[str, Any]
WaitUntil = Callable[..., None]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> LearnerConfig:
    return LearnerConfig(
        run="r1",
        model=tiny_model,
        store=f"file://{tmp_path}/store",
        directory=tmp_path / "learner",
        weights_address="127.0.0.1:0",
        trajectories_address="127.0.0.1:0",
        task="addition",
        num_steps=5,
        groups_per_step=2,
        samples_per_group=3,
        max_new_tokens=4,
        learning_rate=1e-4,
        checkpoint_every_steps=2,
        compute_dtype=ComputeDtype.FLOAT32,
        lease_seconds=5.0,
        batch_timeout_seconds=60.0,
        drain_seconds=2.0,
    )


def events_of(config: LearnerConfig, kind: str | None = None) -> list[Event]:
    """Return the events written so far, oldest first."""
    path = config.directory / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind or kind is None]


def newest_version(config: LearnerConfig) -> Callable[[], int]:
    """Return a function that tells the newest version the learner has committed."""
    return lambda: max((int(event["version"]) for event in events_of(config, "published")), default=0)


@contextmanager
def learner_thread(config: LearnerConfig, stop: threading.Event) -> Iterator[Future[None]]:
    """Run the learner in a thread; it is stopped when the block ends."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(run_learner, config, stop=stop)
        try:
            yield future
        finally:
            stop.set()


def _port(config: LearnerConfig, wait_until: WaitUntil, *, starts: int = 1) -> int:
    wait_until(lambda: len(events_of(config, "serving")) >= starts, timeout=_PATIENCE, what="serving")
    return int(events_of(config, "serving")[-1]["trajectories_port"])


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(f"u{array.itemsize}")


def _final_bits(config: LearnerConfig) -> dict[str, Any]:
    """Return the bits of the view of the newest checkpoint."""
    with open_process_group() as group:
        model = load_model(config.model, mesh=group.mesh, device=group.device)
        settings = LearnerSettings(learning_rate=1.0, clip=ClipRange(low=0.2, high=0.2))
        learner = Learner(model=model, group=group, settings=settings)
        store = CheckpointStore(directory=config.checkpoint_directory, ranks=group.control, keep=2)
        seal = store.load_newest(learner)
        assert seal is not None
        assert seal.step == config.num_steps
        return {name: _bits(shard.array) for name, shard in local_view(model, kind=config.view).items()}


def _check_complete(config: LearnerConfig) -> None:
    """Check what must hold after any complete run, interrupted or not."""
    end = events_of(config, "learner_end")[-1]
    counts = end["counts"]
    num_step_trajectories = config.groups_per_step * config.samples_per_group
    assert end["reason"] == "complete"
    assert end["step"] == config.num_steps
    assert counts["num_trained"] == config.num_steps * num_step_trajectories
    assert counts["num_pending"] == 0
    assert counts["num_received"] == counts["num_trained"] + sum(counts["dropped"].values())
    versions = [event["version"] for event in events_of(config, "published")]
    assert versions == list(range(len(versions)))
    assert end["version"] == versions[-1]
    for event in events_of(config, "step"):
        assert max(event["staleness"]) <= config.max_staleness
        assert event["num_trajectories"] == num_step_trajectories
    with Subscriber.open(config.store, run=config.run) as subscriber:
        assert subscriber.sync() == versions[-1]
        tensors = {name: _bits(tensor) for name, tensor in subscriber.tensors().items()}
    final = _final_bits(config)
    assert tensors.keys() == final.keys()
    for name, bits in final.items():
        np.testing.assert_array_equal(tensors[name], bits)


@pytest.mark.parametrize("view", [ViewKind.BF16, ViewKind.FP8_BLOCK])
def test_a_run_trains_publishes_every_step_and_accounts_for_every_trajectory(
    config: LearnerConfig, tmp_path: Path, scripted_worker: Callable[..., Any], wait_until: WaitUntil, view: ViewKind
) -> None:
    config = config.model_copy(update={"view": view})
    with learner_thread(config, threading.Event()) as done:
        port = _port(config, wait_until)
        weights = f"grpc://127.0.0.1:{events_of(config, 'serving')[0]['weights_port']}"
        with (
            Subscriber.open(weights, run="r1", seed=config.model) as subscriber,
            scripted_worker(
                address=f"127.0.0.1:{port}", run="r1", directory=tmp_path, version=newest_version(config), seed=0
            ) as worker,
        ):
            assert subscriber.sync() >= 0
            assert subscriber.seeded_version == 0
            worker.join(_PATIENCE)
        done.result(_PATIENCE.total_seconds())
    _check_complete(config)
    assert len(events_of(config, "published")) == config.num_steps + 1
    start = events_of(config, "learner_start")[0]
    assert (start["step"], start["version"], start["resumed"]) == (0, 0, False)
    published = events_of(config, "published")
    assert published[0]["kind"] == "anchor"
    assert all(0 < event["density"] < 1 for event in published[1:])
    assert all(event["wire_bytes"] < event["full_bytes"] for event in published[1:])


def test_a_run_of_another_directory_is_refused_before_its_learner_is_fenced(
    config: LearnerConfig, tmp_path: Path, wait_until: WaitUntil
) -> None:
    stop = threading.Event()
    with learner_thread(config, stop) as done:
        _port(config, wait_until)
        stop.set()
        done.result(_PATIENCE.total_seconds())
    assert events_of(config, "learner_end")[0]["reason"] == "stopped"
    foreign = config.model_copy(update={"directory": tmp_path / "other"})
    with pytest.raises(ConfigError, match=r"run r1 exists in .* up to version 0, but .*other has no ledger"):
        run_learner(foreign, stop=threading.Event())


def test_a_store_that_lost_the_run_is_refused(
    config: LearnerConfig, tmp_path: Path, scripted_worker: Callable[..., Any], wait_until: WaitUntil
) -> None:
    stop = threading.Event()
    with learner_thread(config, stop) as done, scripted_worker(
        address=f"127.0.0.1:{_port(config, wait_until)}", run="r1", directory=tmp_path,
        version=newest_version(config), seed=0,
    ):  # fmt: skip
        wait_until(lambda: len(events_of(config, "step")) >= 1, timeout=_PATIENCE, what="a step")
        stop.set()
        done.result(_PATIENCE.total_seconds())
    elsewhere = config.model_copy(update={"store": f"file://{tmp_path}/empty"})
    with pytest.raises(ConfigError, match="give the store that the run was started with"):
        run_learner(elsewhere, stop=threading.Event())


def test_without_workers_the_learner_ends_with_an_error_that_says_what_it_waited_for(config: LearnerConfig) -> None:
    impatient = config.model_copy(update={"batch_timeout_seconds": 1.5})
    with pytest.raises(DeadlineExceededError, match=r"step 1 got no batch of 2 groups .* are workers running"):
        run_learner(impatient, stop=threading.Event())
    assert events_of(config, "learner_end")[0]["reason"] == "failed"


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_checkpoint_and_ends_complete(
    config: LearnerConfig, tmp_path: Path, scripted_worker: Callable[..., Any], wait_until: WaitUntil
) -> None:
    stop = threading.Event()
    with learner_thread(config, stop) as done:
        port = _port(config, wait_until)
        worker = scripted_worker(
            address=f"127.0.0.1:{port}", run="r1", directory=tmp_path, version=newest_version(config), seed=0
        )
        with worker:
            wait_until(lambda: len(events_of(config, "step")) >= 2, timeout=_PATIENCE, what="two steps")
            stop.set()
            done.result(_PATIENCE.total_seconds())
            stopped_at = events_of(config, "learner_end")[0]["step"]
            again = config.model_copy(update={"trajectories_address": f"127.0.0.1:{port}"})
            with learner_thread(again, threading.Event()) as done_again:
                worker.join(_PATIENCE)
                done_again.result(_PATIENCE.total_seconds())
    starts = events_of(config, "learner_start")
    assert starts[1]["step"] == stopped_at
    assert starts[1]["resumed"]
    assert starts[1]["epoch"] > starts[0]["epoch"]
    _check_complete(config)


@contextmanager
def learner_process(config: LearnerConfig, directory: Path, *, num_ranks: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """Run the learner as processes of its own; they are killed when the block ends."""
    path = directory / "config.json"
    path.write_text(config.model_dump_json())
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [*(launcher if num_ranks > 1 else [sys.executable]), str(_PROGRAM), str(path)],
            env=environment,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.mark.slow
def test_a_killed_learner_comes_back_without_reusing_a_version_or_training_anything_twice(
    config: LearnerConfig, tmp_path: Path, scripted_worker: Callable[..., Any], wait_until: WaitUntil
) -> None:
    long = config.model_copy(update={"num_steps": 9, "checkpoint_every_steps": 4})
    with learner_process(long, tmp_path) as first:
        port = _port(long, wait_until)
        worker = scripted_worker(
            address=f"127.0.0.1:{port}", run="r1", directory=tmp_path, version=newest_version(long), seed=0
        )
        with worker:
            wait_until(lambda: len(events_of(long, "step")) >= 6, timeout=_PATIENCE, what="six steps")
            os.kill(first.pid, signal.SIGKILL)
            first.wait(30)
            again = long.model_copy(update={"trajectories_address": f"127.0.0.1:{port}"})
            with learner_process(again, tmp_path) as second:
                worker.join(_PATIENCE)
                assert second.wait(_PATIENCE.total_seconds()) == 0
    start = events_of(long, "learner_start")[1]
    assert start["step"] in (4, 8)
    before = [event for event in events_of(long, "published") if event["epoch"] < start["epoch"]]
    # The kill may fall between a commit and its event.
    assert start["version"] - before[-1]["version"] in (1, 2)
    versions = [event["version"] for event in events_of(long, "published")]
    assert len(versions) == len(set(versions))
    end = events_of(long, "learner_end")[-1]
    assert end["reason"] == "complete"
    assert end["counts"]["num_trained"] == 9 * 6
    assert end["counts"]["num_received"] == 9 * 6 + sum(end["counts"]["dropped"].values())
    with Subscriber.open(long.store, run="r1") as subscriber:
        assert subscriber.sync() == end["version"]
        for name, bits in _final_bits(long).items():
            np.testing.assert_array_equal(subscriber.tensors()[name].view(np.uint16), bits)


@pytest.mark.slow
def test_two_ranks_run_to_the_end(
    config: LearnerConfig, tmp_path: Path, scripted_worker: Callable[..., Any], wait_until: WaitUntil
) -> None:
    with learner_process(config, tmp_path, num_ranks=2) as process:
        port = _port(config, wait_until)
        with scripted_worker(
            address=f"127.0.0.1:{port}", run="r1", directory=tmp_path, version=newest_version(config), seed=0
        ) as worker:
            worker.join(_PATIENCE)
        assert process.wait(_PATIENCE.total_seconds()) == 0, (tmp_path / "log").read_text()[-3000:]
    _check_complete(config)


@pytest.mark.slow
def test_when_rank_0_gives_up_the_other_rank_ends_too(config: LearnerConfig, tmp_path: Path) -> None:
    impatient = config.model_copy(update={"batch_timeout_seconds": 1.5})
    with learner_process(impatient, tmp_path, num_ranks=2) as process:
        assert process.wait(_PATIENCE.total_seconds()) != 0
    assert "step 1 got no batch of 2 groups" in (tmp_path / "log").read_text()
