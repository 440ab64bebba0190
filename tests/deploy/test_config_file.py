"""One list of all problems, before anything loads, and no secret in it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsewire.deploy.config_file import load_learner_config, load_worker_config, parse_setting, value_problems
from sparsewire.deploy.sim_plan import write_config
from sparsewire.sync.errors import ConfigError
from sparsewire.trainer.config import LearnerConfig

SECRETS = ("wJalrXUtnFEMI-K7MDENG", "AKIAPLANTEDEXAMPLE", "hunter2hunter2")


def learner_values(tmp_path: Path, model: Path) -> dict[str, Any]:
    return {
        "run": "r1",
        "model": str(model),
        "store": (tmp_path / "store").as_uri(),
        "directory": str(tmp_path / "learner"),
        "trajectories_address": "127.0.0.1:0",
        "weights_address": "127.0.0.1:0",
        "task": "addition",
        "num_steps": 4,
    }


def worker_values(tmp_path: Path, model: Path) -> dict[str, Any]:
    return {
        "run": "r1",
        "model": str(model),
        "weights": "grpc://127.0.0.1:7070",
        "trajectories": "127.0.0.1:7071",
        "region": "eu",
        "worker_id": "worker-eu",
        "directory": str(tmp_path / "worker"),
    }


def refusal(load: Callable[..., object], path: Path, values: dict[str, Any]) -> str:
    write_config(path, values, comment="broken on purpose")
    with pytest.raises(ConfigError) as refused:
        load(path, {})
    message = str(refused.value)
    for secret in SECRETS:
        assert secret not in message
    return message


def test_good_files_load_and_given_values_override_them(tmp_path: Path, tiny_model: Path) -> None:
    write_config(tmp_path / "learner.toml", learner_values(tmp_path, tiny_model), comment="good")
    config = load_learner_config(tmp_path / "learner.toml", {"num_steps": 9, "seed": None})
    assert (config.num_steps, config.seed, config.model) == (9, 0, tiny_model)
    write_config(tmp_path / "worker.toml", worker_values(tmp_path, tiny_model), comment="good")
    assert load_worker_config(tmp_path / "worker.toml", {"region": "ap"}).region == "ap"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"retain_versions": 2, "max_staleness": 4}, ["retain_versions is 2 and max_staleness is 4"]),
        ({"codec": "zip"}, ["codec: unknown key"]),
        ({"lerning_rate": 1e-6}, ["lerning_rate: unknown key; did you mean learning_rate?"]),
        ({"store": "htp://bucket"}, ["store: ", "'htp'", "s3://bucket/prefix"]),
        ({"store": "s3://bucket/x?endpoint_url=ftp://host"}, ["store: ", "endpoint_url must be https://host"]),
        ({"model": "/nowhere/model"}, ["model: ", "/nowhere/model", "is not a directory"]),
        ({"task": "additoin"}, ["task: ", "did you mean addition"]),
        ({"trajectories_address": "7071"}, ["trajectories_address", "is not host:port", "127.0.0.1:7070"]),
        ({"num_steps": 0}, ["num_steps: input should be greater than or equal to 1"]),
        ({"learning_rate": "hunter2hunter2"}, ["learning_rate: input should be a valid number"]),
        ({"directory": "/proc/nothing/here"}, ["directory: /proc/nothing/here cannot be written"]),
        ({"device": "tpu"}, ["device: input should be 'auto', 'cpu' or 'cuda'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_broken_key_of_a_learner_is_named_with_the_remedy(
    tmp_path: Path, tiny_model: Path, change: dict[str, Any], wanted: list[str]
) -> None:
    message = refusal(load_learner_config, tmp_path / "c.toml", {**learner_values(tmp_path, tiny_model), **change})
    assert str(tmp_path / "c.toml") in message
    assert "has a problem:" in message
    for text in wanted:
        assert text in message, message


def test_ten_problems_of_a_learner_are_one_list(tmp_path: Path, tiny_model: Path) -> None:
    values = {
        **learner_values(tmp_path, tiny_model),
        "run": "not a run",
        "model": str(tmp_path),
        "store": f"s3://AKIAPLANTEDEXAMPLE:{SECRETS[0]}@bucket/prefix",
        "directory": "/proc/nothing/here",
        "task": "reasoning-gym:no_such_dataset",
        "retain_versions": 2,
        "max_staleness": 5,
        "learning_rate": -1.0,
        "aws_secret_access_key": SECRETS[0],
        "codec": "zip",
        "betas": [0.9],
    }
    message = refusal(load_learner_config, tmp_path / "learner.toml", values)
    assert message.startswith(f"{tmp_path / 'learner.toml'} has 10 problems:")
    for key in ("run", "model", "store", "directory", "task", "learning_rate", "codec", "betas.1"):
        assert f" {key}: " in message, key
    assert "retain_versions is 2 and max_staleness is 5" in message
    assert "aws_secret_access_key: unknown key" in message


def test_many_problems_of_a_worker_are_one_list(tmp_path: Path) -> None:
    values = {
        "model": str(tmp_path / "absent"),
        "weights": f"grpc://user:{SECRETS[2]}@nowhere",
        "trajectories": "nowhere",
        "region": "a region",
        "worker_id": "w1",
        "directory": "/proc/nothing/here",
        "pause_timeout_seconds": 0,
        "max_spool_bytes": 5,
        "engine": "vlllm",
        "api_key": SECRETS[1],
    }
    message = refusal(load_worker_config, tmp_path / "worker.toml", values)
    for key in (
        "run: is missing",
        "model",
        "weights",
        "trajectories",
        "region",
        "directory",
        "pause_timeout_seconds",
        "max_spool_bytes",
        "engine",
        "api_key: unknown key",
    ):
        assert f" {key}" in message, key
    assert "has 10 problems:" in message


def test_credentials_of_the_environment_never_come_back(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    values = {**learner_values(tmp_path, tiny_model), "run": f"run {SECRETS[0]}", "task": f"task {SECRETS[0]}"}
    message = refusal(load_learner_config, tmp_path / "learner.toml", values)
    assert "***" in message


def test_ports_that_are_taken_or_claimed_twice_are_found_before_the_start(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        port = taken.getsockname()[1]
        free.bind(("127.0.0.1", 0))
        other = free.getsockname()[1]
        free.close()
        values = {
            **learner_values(tmp_path, tiny_model),
            "weights_address": f"127.0.0.1:{port}",
            "trajectories_address": f"127.0.0.1:{other}",
            "metrics_port": other,
        }
        message = refusal(load_learner_config, tmp_path / "learner.toml", values)
    assert f"weights_address: cannot listen on 127.0.0.1:{port}" in message
    assert f"metrics_port: port {other} is also that of trajectories_address" in message


def test_a_rank_that_serves_nothing_does_not_ask_for_free_ports(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {
            **learner_values(tmp_path, tiny_model),
            "weights_address": f"127.0.0.1:{taken.getsockname()[1]}",
        }
        write_config(tmp_path / "learner.toml", values, comment="rank 1")
        load_learner_config(tmp_path / "learner.toml", {}, serving=False)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"run = \n", "is not TOML (at line 1"),
        (b"secret = 'hunter2hunter2\n", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "there is no configuration file"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes | None, wanted: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=wanted.replace("(", r"\(")) as refused:
        load_learner_config(path, {})
    assert "hunter2" not in str(refused.value)


def test_a_missing_bucket_is_found_before_the_start(tmp_path: Path, tiny_model: Path, s3_url: str) -> None:
    bucket, question, options = s3_url.removeprefix("s3://").partition("?")
    missing = f"s3://no-such-bucket{question}{options}"
    assert bucket
    message = refusal(
        load_learner_config, tmp_path / "learner.toml", {**learner_values(tmp_path, tiny_model), "store": missing}
    )
    assert "store: " in message
    assert "no-such-bucket" in message


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("num_steps=12", ("num_steps", 12)),
        ("learning_rate = 1e-6", ("learning_rate", 1e-6)),
        ("compile=true", ("compile", True)),
        ("betas=[0.9, 0.95]", ("betas", [0.9, 0.95])),
        ("region=eu", ("region", "eu")),
        ('region="eu"', ("region", "eu")),
        ("store=s3://b/p?region=x", ("store", "s3://b/p?region=x")),
    ],
)
def test_settings_of_the_command_line_are_toml_or_text(text: str, setting: tuple[str, object]) -> None:
    assert parse_setting(text) == setting


@pytest.mark.parametrize("text", ["", "novalue", "=5", "two words=1"])
def test_settings_without_a_key_are_refused_without_repeating_them(text: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_setting(text)


def test_single_values_are_checked_without_the_rest() -> None:
    assert value_problems(LearnerConfig, {"num_threads": 2}) == []
    assert [problem.key for problem in value_problems(LearnerConfig, {"num_threads": 0, "nope": 1})] == [
        "num_threads",
        "nope",
    ]


def test_configuration_is_checked_without_loading_torch() -> None:
    program = "import sys; import sparsewire.deploy.config_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
