"""Trajectories and leases as values; the wire form is `sparsewire/v1/trajectories.proto`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Outcome(StrEnum):
    """What the learner did with a trajectory it received; after any of these the sender may forget it."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are sampled; set by the learner for all workers."""

    temperature: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not self.temperature > 0 or self.max_new_tokens < 1:
            raise ValueError(
                f"sampling: temperature {self.temperature} and max_new_tokens {self.max_new_tokens} must be > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, stop) were made by `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TrajectoryKey:
    """Identity of a trajectory within a run; sending it twice changes nothing."""

    group: int
    sample: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to produce some samples of a prompt group until it expires."""

    group: int
    attempt: int
    """How often the group was handed out before."""
    task: str
    item: int
    """Number of the item within the task; task and item together give the prompt."""
    samples: tuple[int, ...]
    """Samples of the group still wanted."""
    expires_in: timedelta
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One finished sample, as the worker made it and the learner trains on it."""

    run: str
    key: TrajectoryKey
    task: str
    item: int
    worker_id: str
    region: str
    prompt_token_ids: npt.NDArray[np.int32]
    completion_token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Natural log-probability of each completion token under the distribution it was sampled from."""
    spans: tuple[VersionSpan, ...]
    """Consecutive, covering every completion token."""
    reward: float
    finish_reason: FinishReason
    created_unix_seconds: float

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_token_ids)
        if len(self.logprobs) != num_tokens:
            raise ValueError(
                f"trajectory {self.key}: {num_tokens} completion tokens but {len(self.logprobs)} log-probabilities"
            )
        at = 0
        for span in self.spans:
            if span.start != at or span.stop <= span.start or span.version < 0:
                raise ValueError(f"trajectory {self.key}: version spans {self.spans} do not follow each other")
            at = span.stop
        if at != num_tokens:
            raise ValueError(f"trajectory {self.key}: version spans end at {at}, completion has {num_tokens} tokens")
        if not np.isfinite(self.reward) or not np.isfinite(self.logprobs).all():
            raise ValueError(f"trajectory {self.key}: reward and log-probabilities must be finite")
