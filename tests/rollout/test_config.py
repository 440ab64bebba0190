"""A worker's configuration: all problems at once, in full sentences, without repeating secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sparsewire.rollout.config import WorkerConfig


def valid(model: Path, directory: Path) -> dict[str, object]:
    return {
        "run": "r1",
        "model": model,
        "weights": "grpc://127.0.0.1:7070",
        "trajectories": "127.0.0.1:7071",
        "region": "eu",
        "worker_id": "eu-0",
        "directory": directory,
    }


def test_minimal_configuration_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    config = WorkerConfig.model_validate(valid(tiny_model, tmp_path))
    assert config.max_groups_per_batch == 2
    assert config.engine == "transformers"


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    broken = {
        **valid(tmp_path, tmp_path),
        "run": "../r1",
        "weights": "http://example.org",
        "trajectories": "nowhere",
        "engine": "magic",
        "max_groups_per_batch": 0,
        "pause_timeout_seconds": -1,
        "secret_key": "hunter2hunter2",
    }
    with pytest.raises(ValidationError) as caught:
        WorkerConfig.model_validate(broken)
    fields = {error["loc"][0] for error in caught.value.errors()}
    assert fields == {
        "run",
        "model",
        "weights",
        "trajectories",
        "engine",
        "max_groups_per_batch",
        "pause_timeout_seconds",
        "secret_key",
    }
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("weights", ["grpc://no-port", "grpc://user@host:1", "/tmp/x", "ftp://host/x"])
def test_bad_weight_url_is_refused(tiny_model: Path, tmp_path: Path, weights: str) -> None:
    with pytest.raises(ValidationError, match="weights"):
        WorkerConfig.model_validate({**valid(tiny_model, tmp_path), "weights": weights})
