from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sparsewire.trainer import LearnerConfig, ViewKind


def _fields(**changes: object) -> dict[str, Any]:
    sound = {
        "run": "r1",
        "model": Path("model"),
        "store": "file:///tmp/store",
        "directory": Path("learner"),
        "trajectories_address": "127.0.0.1:7070",
        "task": "addition",
        "num_steps": 10,
    }
    return {**sound, **changes}


def test_a_minimal_config_is_accepted() -> None:
    config = LearnerConfig(**_fields())
    assert config.groups_per_step == 8
    assert config.checkpoint_directory == Path("learner/checkpoints")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        LearnerConfig(
            **_fields(
                run="a/b",
                trajectories_address="nowhere",
                weights_address="grpc://x:1",
                samples_per_group=1,
                max_staleness=4,
                retain_versions=4,
                warmup_steps=11,
                learning_rate=0.0,
                betas=(0.9, 1.0),
                surprise=1,
            )
        )
    named = {str(problem["loc"][0]) for problem in caught.value.errors()}
    assert named == {
        "run",
        "trajectories_address",
        "weights_address",
        "samples_per_group",
        "retain_versions",
        "warmup_steps",
        "learning_rate",
        "betas",
        "surprise",
    }


def test_retention_shorter_than_the_staleness_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValidationError, match="retain_versions is 3 and max_staleness is 5"):
        LearnerConfig(**_fields(max_staleness=5, retain_versions=3))


def test_values_of_unknown_keys_are_never_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        LearnerConfig(**_fields(s3_secret="hunter2-hunter2"))
    assert "hunter2" not in str(caught.value)
    assert "s3_secret" in str(caught.value)


def test_the_view_is_bf16_unless_told_otherwise() -> None:
    assert LearnerConfig(**_fields()).view is ViewKind.BF16
    config = LearnerConfig(**_fields(view="fp8-block", modules_to_not_convert=["gate", "self_attn"]))
    assert config.view is ViewKind.FP8_BLOCK
    assert config.modules_to_not_convert == ("gate", "self_attn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"view": "fp8"}, "'bf16', 'fp16', 'fp32' or 'fp8-block'"),
        ({"modules_to_not_convert": ["self_attn"]}, 'for view = "fp8-block" only, and view is "bf16"'),
        ({"view": "fp8-block", "modules_to_not_convert": [""]}, "empty name"),
    ],
)
def test_a_view_that_means_nothing_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(**_fields(**changes))
