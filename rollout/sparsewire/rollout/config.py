"""What one worker is told: a frozen model whose problems are reported all together.

Read by the loader in `deploy`, which turns pydantic's list of errors into one message; `run_worker` takes the result
and nothing below the entry point sees it. Holds no secrets, and error messages never repeat what was given for an
unknown key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.rpc import check_address

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE_SCHEMES = ("s3://", "file://", "memory://")


class WorkerConfig(BaseModel):
    """One worker: where its model, its weights and its work come from, and its bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)

    run: str
    """Id of the run to follow."""
    model: Path
    """Hugging Face directory with the starting weights, config and tokenizer; seeds the mirror."""
    weights: str
    """Where versions come from: grpc://host:port of a weight service, or the URL of a store."""
    trajectories: str
    """host:port of the learner's trajectory service."""
    region: str
    """Name of this worker's datacenter; a label of metrics, so keep it to a small set."""
    worker_id: str
    """Name of this worker, distinct among all workers of the run."""
    directory: Path
    """Where the mirror, the spool and the events live; must survive a restart of the worker."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates tokens; vllm must be installed beside sparsewire."""
    max_model_len: int | None = Field(default=None, ge=16)
    """vllm: longest prompt plus completion; unset for the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """vllm: requests decoded together."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """vllm: memory of the KV cache; unset lets vLLM take its own share, which on a CPU is most of the memory."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """vllm: ranks that share the model."""
    device: str = "cpu"
    """Torch device of the engine."""
    max_groups_per_batch: int = Field(default=2, ge=1, le=256)
    """Prompt groups leased and generated together."""
    sync_poll_seconds: float = Field(default=2.0, gt=0, le=60)
    """Longest wait for news of a newer version before looking for a request to stop."""
    pause_timeout_seconds: float = Field(default=30.0, gt=0, le=600)
    """The engine is never paused longer than this."""
    probe_interval_seconds: float = Field(default=30.0, ge=0, le=86400)
    """Least time between two comparisons with the learner's log-probabilities; they take at most 5 % of the time anyhow."""
    probe_threshold: float = Field(default=1.0, gt=0)
    """Nats by which a probe's token may differ from the learner's before that is an alarm; docs/publishing.md has figures."""
    max_spool_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bound on trajectories not yet acknowledged by the learner; generation waits when it is reached."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of one torch operation; unset leaves torch's own choice."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus endpoint; unset for none."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds all sampling of this run together with group, sample and attempt."""
    idle_timeout_seconds: float = Field(default=900.0, gt=0)
    """Longest wait for a first version, and for any work or answer from the learner, before the worker ends with an error."""

    @field_validator("run", "region", "worker_id")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "must be 1 to 64 letters, digits, dots, dashes or underscores, starting with a letter or digit."
            )
        return value

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: Path) -> Path:
        if not (value / "config.json").is_file():
            raise ValueError(
                f"{value} is not a Hugging Face model directory (it has no config.json); "
                "give the path of a directory with config.json, safetensors and tokenizer."
            )
        return value

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: str) -> str:
        if value.startswith("grpc://"):
            return f"grpc://{_checked_address(value.removeprefix('grpc://'))}"
        if not value.startswith(_STORE_SCHEMES):
            raise ValueError(
                "is not a URL of weights; write grpc://host:port for a weight service, "
                "or s3://bucket/prefix or file:///directory for a store."
            )
        return value

    @field_validator("trajectories")
    @classmethod
    def _check_trajectories(cls, value: str) -> str:
        return _checked_address(value)


def _checked_address(value: str) -> str:
    try:
        check_address(value)
    except ConfigError as error:
        raise ValueError(f"{error}.") from error
    return value
