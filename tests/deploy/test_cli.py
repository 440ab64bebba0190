"""The command: help that helps, exit codes, one message an error, and signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sparsewire.deploy.cli import run
from sparsewire.deploy.sim_plan import write_config
from sparsewire.sync import Publisher

COMMANDS = ("sim", "learner", "worker", "inspect", "report", "version")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands point the root logger at the standard error of this moment."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"sparsewire {command}" in text
    if command != "version":
        assert "Example" in text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["sim", "--steps", "0"], ["sim", "--nope"], ["inspect"], ["report"], ["sim", "--steps", "x"]],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err
    assert "Traceback" not in captured.err


def test_a_wrong_configuration_is_exit_code_2_and_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path / "worker.toml", {"run": "r1", "wieghts": "x"}, comment="broken")
    assert run(["worker", "--config", str(tmp_path / "worker.toml"), "--region", "a b"]) == 2
    text = capsys.readouterr().err
    assert "wieghts: unknown key; did you mean weights?" in text
    assert "region: must be 1 to 64 letters" in text
    assert "Traceback" not in text


def test_debug_adds_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learner", "--config", str(tmp_path / "absent.toml"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_is_exit_code_1_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", tmp_path.as_uri(), "--run", "r1"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("sparsewire: ")
    assert "holds no version of run 'r1'" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "ftp://x", "s3://user:hunter2hunter2@bucket"])
def test_a_store_url_that_is_none_is_refused_without_its_secrets(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", url, "--run", "r1"]) == 2
    assert "hunter2" not in capsys.readouterr().err


def test_a_report_is_drawn_again_from_a_folder(
    recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(recorded_run), "--output", str(tmp_path / "again.html")]) == 0
    assert "all 74 updates" in (tmp_path / "again.html").read_text()
    assert "Trajectory ledger" in capsys.readouterr().out
    assert run(["report", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_a_store_is_explained_as_tables_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path.as_uri()
    with Publisher.open(url, run="r1") as publisher:
        weights = np.arange(100, dtype=np.float32).astype(ml_dtypes.bfloat16)
        publisher.publish({"w": weights})
        changed = weights.copy()
        changed[7] = 1.5
        publisher.publish({"w": changed})
    assert run(["inspect", url, "--run", "r1"]) == 0
    assert "anchor" in capsys.readouterr().out
    assert run(["inspect", url, "--run", "r1", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["version"] for entry in listed if entry["kind"] != "squashed"][:2] == [0, 1]
    assert run(["inspect", url, "--run", "r1", "--version", "1"]) == 0
    assert "1.000%" in capsys.readouterr().out
    assert run(["inspect", url, "--run", "r1", "--version", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["num_changed"] == 1


def test_the_version_names_build_protocol_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    text = capsys.readouterr().out
    assert "sparsewire/" in text
    assert "protocol" in text
    assert "format" in text


def test_help_is_quick_because_it_loads_no_torch() -> None:
    program = "import sys; from sparsewire.deploy.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, capture_output=True)
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_worker_stops_cleanly_on_a_signal(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    values = {
        "run": "r1",
        "model": str(tiny_model),
        "weights": (tmp_path / "store").as_uri(),
        "trajectories": "127.0.0.1:1",
        "region": "eu",
        "worker_id": "worker-eu",
        "directory": str(tmp_path / "worker"),
        "num_threads": 1,
    }
    write_config(tmp_path / "worker.toml", values, comment="waits for its learner")
    command = [sys.executable, "-m", "sparsewire.deploy.cli", "worker", "--config", str(tmp_path / "worker.toml")]
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while "waiting for the first version" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait(10)
    assert "Traceback" not in log.read_text()
