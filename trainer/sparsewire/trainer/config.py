"""What a learner is told, checked all at once before anything is opened or loaded.

Read by deploy's loader from TOML and by tests directly. After construction every field is usable as it is; nothing
here touches the disk, the network or torch. Values never appear in messages about unknown keys, since a key that was
mistyped may hold a secret.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from sparsewire.sync.block_fp8 import MODULES_TO_NOT_CONVERT
from sparsewire.sync.errors import ConfigError
from sparsewire.sync.rpc import check_address

PROBE_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
)
"""Prose and code: 42 tokens of a usual vocabulary."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Device(StrEnum):
    """Where the learner computes."""

    AUTO = "auto"
    """CUDA when there is one, else the CPU."""
    CPU = "cpu"
    CUDA = "cuda"


class ComputeDtype(StrEnum):
    """Dtype of forward and backward; master weights, gradients and optimizer state are always float32."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class ViewKind(StrEnum):
    """What the learner publishes of its float32 weights, rounded to nearest even."""

    BF16 = "bf16"
    FP16 = "fp16"
    """Magnitudes from 65,520 become infinite."""
    FP32 = "fp32"
    """Every step changes nearly every element, so versions cost nearly a full checkpoint."""
    FP8_BLOCK = "fp8-block"
    """The bf16 view with its linear weights in e4m3 and a float32 scale for every 128 x 128 elements."""


class LearnerConfig(BaseModel):
    """One learner of one run; every rank gets the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Everything in the store lives under this id."""
    model: Path
    """A local Hugging Face directory of a causal language model, with safetensors weights."""
    store: str = Field(min_length=1)
    """URL of the object store that versions are published to."""
    directory: Path
    """Ledger, checkpoints and events of this learner; survives restarts."""
    weights_address: str | None = None
    """host:port at which rank 0 serves the store's versions over gRPC; none: workers read the store themselves."""
    trajectories_address: str
    """host:port at which rank 0 leases work and receives trajectories."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)

    task: str = Field(min_length=1)
    """Name of the task that workers sample prompts from."""
    seed: int = Field(default=0, ge=0)
    num_steps: int = Field(ge=1)
    """Optimizer steps of the whole run, those before a restart included."""
    groups_per_step: int = Field(default=8, ge=1)
    samples_per_group: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=12, ge=1)
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)

    learning_rate: float = Field(default=3e-6, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to `learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(default=0.28, gt=0.0)
    """Importance ratios count within [1 - clip_low, 1 + clip_high]."""
    max_staleness: int = Field(default=2, ge=0)
    """Versions by which the oldest token of a trajectory may trail the learner's weights when it is trained."""

    micro_batch_size: int = Field(default=16, ge=1)
    """Sequences in one forward and backward of one rank."""
    device: Device = Device.AUTO
    compute_dtype: ComputeDtype = ComputeDtype.BFLOAT16
    activation_checkpointing: bool = False
    compile: bool = False
    num_threads: int = Field(default=1, ge=1)
    """Threads that torch may use for one operator on the CPU."""

    publish_every_steps: int = Field(default=1, ge=1)
    view: ViewKind = ViewKind.BF16
    """Dtype of the weights that workers get."""
    modules_to_not_convert: tuple[str, ...] = MODULES_TO_NOT_CONVERT
    """With `view = "fp8-block"`: modules within layers whose matrix stays bf16, by name or by parts of it."""
    anchor_fraction: float = Field(default=0.5, gt=0.0)
    """An anchor is written once the deltas since the last outweigh this fraction of it."""
    predict: bool = True
    """Code a delta against the one before where that is smaller."""
    retain_versions: int = Field(default=32, ge=2)
    probe_texts: tuple[Annotated[str, Field(max_length=2000)], ...] = Field(default=PROBE_TEXTS, max_length=13)
    """Scored with each version's weights, so that workers can compare what their engine makes of them: at least two
    tokens each, of which the first 32 count; two completions of the newest batch join them. None: no version has a
    probe, and the learner saves a small forward pass for each."""
    checkpoint_every_steps: int = Field(default=8, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)

    num_batches_ahead: int = Field(default=1, ge=1)
    """Batches leased or buffered besides the one in training. 1 overlaps generation with training and keeps data
    fresh; more serve fleets whose generation takes longer than a step, at the price of staleness."""
    lease_seconds: float = Field(default=120.0, gt=0.0)
    """Time a worker has for a leased group before it is handed out again."""
    batch_timeout_seconds: float = Field(default=900.0, gt=0.0)
    """Longest wait for one batch; the learner ends with an error after it."""
    drain_seconds: float = Field(default=60.0, ge=0.0)
    """Longest time that a finished run keeps serving workers that still fetch or send."""

    # Checks across fields hang on the later field, so that they are reported together with every other problem.

    @field_validator("weights_address", "trajectories_address")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_address(value)
            except ConfigError as error:
                raise _problem(str(error)) from error
        return value

    @field_validator("samples_per_group")
    @classmethod
    def _group_has_advantages(cls, value: int) -> int:
        if value == 1:
            raise _problem(
                "samples_per_group is 1: a group of one has no advantage, nothing would be learned; use 2 or more"
            )
        return value

    @field_validator("warmup_steps")
    @classmethod
    def _warmup_ends(cls, value: int, info: ValidationInfo) -> int:
        num_steps = info.data.get("num_steps")
        if num_steps is not None and value > num_steps:
            raise _problem(
                f"warmup_steps is {value} and num_steps is {num_steps}: the learning rate would never be reached"
            )
        return value

    @field_validator("betas")
    @classmethod
    def _averages_forget(cls, value: tuple[float, float]) -> tuple[float, float]:
        if max(value) >= 1.0:
            raise _problem(f"betas are {value}: both must be below 1")
        return value

    @field_validator("modules_to_not_convert")
    @classmethod
    def _something_is_converted(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        view = info.data.get("view")
        if value != MODULES_TO_NOT_CONVERT and view is not None and view is not ViewKind.FP8_BLOCK:
            raise _problem(
                f'modules_to_not_convert means something for view = "{ViewKind.FP8_BLOCK}" only, and view is "{view}": '
                "remove one of them"
            )
        if not all(value):
            raise _problem("modules_to_not_convert holds an empty name: remove it")
        return value

    @field_validator("retain_versions")
    @classmethod
    def _retention_covers_staleness(cls, value: int, info: ValidationInfo) -> int:
        max_staleness = info.data.get("max_staleness")
        if max_staleness is not None and value <= max_staleness:
            raise _problem(
                f"retain_versions is {value} and max_staleness is {max_staleness}: versions would be deleted while "
                f"workers may still use them; set retain_versions to at least {max_staleness + 1}"
            )
        return value

    @property
    def batch_timeout(self) -> timedelta:
        """Longest wait for one batch."""
        return timedelta(seconds=self.batch_timeout_seconds)

    @property
    def checkpoint_directory(self) -> Path:
        """Where checkpoints live."""
        return self.directory / "checkpoints"


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("learner_config", "{problem}", {"problem": message})
