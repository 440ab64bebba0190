"""`sparsewire sim` as a user runs it: real processes, emulated links, a tiny model; with faults, and over S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsewire.sync.history import History
from sparsewire.sync.store.open import open_store

SIM = [sys.executable, "-m", "sparsewire.deploy.cli"]
CHANGING = ["--learner-set", "learning_rate=1e-3", "--learner-set", "weight_decay=0.1"]
"""A random model earns no reward, so weight decay has to change its weights."""
DEADLINE_SECONDS = 240.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a command of sparsewire; whatever still runs at the end is ended."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"output-{len(processes)}.txt").open("wb") as output:
            process = subprocess.Popen(
                [*SIM, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path
            )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _events(run: Path, role: str) -> list[dict[str, Any]]:
    path = run / role / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _wait_for_step(run: Path, step: int, sim: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any(event["event"] == "step" and event["step"] >= step for event in _events(run, "learner")):
        assert sim.poll() is None, "the simulation ended early"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


def _pid(run: Path, role: str) -> int:
    return int(json.loads((run / role / "pid").read_text())["pid"])


def _kill(run: Path, role: str) -> None:
    pid = _pid(run, role)
    os.kill(pid, signal.SIGKILL)


def _assert_all_is_well(run: Path, store_url: str, run_id: str, regions: list[str]) -> dict[str, Any]:
    """Check digests, versions and the ledger of a finished run; returns the learner's last event."""
    history = History(store=open_store(store_url), run=run_id)
    versions = history.versions()
    head = history.commit(versions[-1])
    for region in regions:
        events = _events(run, f"worker-{region}")
        for event in events:
            if event["event"] == "version_applied":
                assert event["digest"] == history.commit(event["version"]).version_digest.hex()
        live = [event for event in events if event["event"] == "live_weights"]
        assert (live[-1]["version"], live[-1]["digest"]) == (head.version, head.version_digest.hex())
    published = [event for event in _events(run, "learner") if event["event"] == "published"]
    numbers = [event["version"] for event in published]
    assert len(numbers) == len(set(numbers)), "no version is published twice"
    assert sum(event["num_changed"] > 0 for event in published) > len(published) // 2
    end = _events(run, "learner")[-1]
    assert end["event"] == "learner_end"
    counts = end["counts"]
    assert counts["num_received"] == counts["num_trained"] + counts["num_pending"] + sum(counts["dropped"].values())
    assert counts["num_pending"] == 0
    return end


@pytest.mark.slow
def test_a_run_survives_sigkill_of_a_worker_and_then_of_the_learner(
    tmp_path: Path, tiny_model: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "runs" / "k1"
    sim = start(
        "sim", "--steps", "40", "--run", "k1", "--model", str(tiny_model), "--regions", "us=2,eu=40", "--no-live",
        "--learner-set", "checkpoint_every_steps=4", "--learner-set", "lease_seconds=5", *CHANGING,
    )  # fmt: skip
    _wait_for_step(run, 3, sim)
    _kill(run, "worker-eu")
    worker = start("worker", "--config", "runs/k1/worker-eu.toml")
    _wait_for_step(run, 11, sim)
    _kill(run, "learner")
    learner = start("learner", "--config", "runs/k1/learner.toml")
    assert sim.wait(DEADLINE_SECONDS) == 0
    assert worker.wait(30) == 0
    assert learner.wait(30) == 0
    end = _assert_all_is_well(run, f"file://{run / 'store'}", "k1", ["us", "eu"])
    assert end["step"] == 40
    starts = [event for event in _events(run, "learner") if event["event"] == "learner_start"]
    assert [event["epoch"] for event in starts] == [1, 2]
    assert end["counts"]["num_trained"] == 40 * 64, "each step trained its full batch once in the surviving history"
    output = (tmp_path / "output-0.txt").read_text()
    assert "sparsewire worker --config runs/k1/worker-eu.toml" in output
    assert "holds" in output
    assert (run / "report.html").stat().st_size > 20_000


@pytest.mark.slow
def test_a_run_goes_over_a_real_s3_server_with_a_learner_of_two_ranks(
    tmp_path: Path, tiny_model: Path, s3_url: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "runs" / "s1"
    sim = start(
        "sim", "--steps", "6", "--run", "s1", "--model", str(tiny_model), "--regions", "us=2,eu=40", "--no-live",
        "--ranks", "2", "--store", s3_url, *CHANGING,
    )  # fmt: skip
    assert sim.wait(DEADLINE_SECONDS) == 0, (tmp_path / "output-0.txt").read_text()
    end = _assert_all_is_well(run, s3_url, "s1", ["us", "eu"])
    assert end["step"] == 6
    output = (tmp_path / "output-0.txt").read_text()
    assert "verified" in output


@pytest.mark.slow
def test_ctrl_c_ends_every_process(
    tmp_path: Path, tiny_model: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "runs" / "c1"
    sim = start("sim", "--steps", "500", "--run", "c1", "--model", str(tiny_model), "--no-live", "--regions", "us=2")
    _wait_for_step(run, 2, sim)
    pids = [_pid(run, role) for role in ("learner", "worker-us")]
    sim.send_signal(signal.SIGINT)
    assert sim.wait(60) == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
