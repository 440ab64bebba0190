"""Trajectories and leases as values; the wire form is `sparsewire/v1/trajectories.proto`.

Pure: no I/O, no clock. Shared by workers, which make trajectories, and the learner, which counts and trains on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

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


class RefusalReason(StrEnum):
    """Why a received trajectory is not usable; the closed set by which refusals are counted."""

    WRONG_RUN = "wrong_run"
    UNKNOWN_GROUP = "unknown_group"
    """The learner never leased this group."""
    UNKNOWN_ATTEMPT = "unknown_attempt"
    """The learner has not handed the group out so often."""
    WRONG_ITEM = "wrong_item"
    """Task or item differ from those of the lease."""
    SAMPLE_OUT_OF_RANGE = "sample_out_of_range"
    GROUP_DROPPED = "group_dropped"
    """It came late: the group was dropped before."""
    EMPTY = "empty"
    """No completion token: nothing to train on."""
    NOT_FINITE = "not_finite"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    """Its fields contradict each other or exceed a bound."""
    DAMAGED = "damaged"
    """Its bytes are no trajectory, or not the announced one."""


class DropReason(StrEnum):
    """Why a received trajectory will never be trained; the closed set by which drops are counted."""

    STALE = "stale"
    """A trajectory of the group has tokens of a version older than the staleness bound."""
    ABANDONED = "abandoned"
    """A trajectory of the group has tokens of a version that left the surviving history."""
    SKIPPED_STEP = "skipped_step"
    """The optimizer step that took the group was skipped."""
    FORGOTTEN = "forgotten"
    """The step that trained it was undone after a later checkpoint had let its payload go."""
    RUN_COMPLETE = "run_complete"
    """The run ended before a step wanted it."""


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
        if (self.prompt_token_ids < 0).any() or (self.completion_token_ids < 0).any():
            raise ValueError(f"trajectory {self.key}: token ids must not be negative")
        at = 0
        for span in self.spans:
            if span.start != at or span.stop <= span.start or span.version < 0:
                raise ValueError(f"trajectory {self.key}: version spans {self.spans} do not follow each other")
            at = span.stop
        if at != num_tokens:
            raise ValueError(f"trajectory {self.key}: version spans end at {at}, completion has {num_tokens} tokens")
        if not np.isfinite(self.reward) or not np.isfinite(self.logprobs).all():
            raise ValueError(f"trajectory {self.key}: reward and log-probabilities must be finite")

    @property
    def oldest_version(self) -> int:
        """The oldest version that made a token; what staleness is measured from."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Received bytes that are no usable trajectory."""

    reason: RefusalReason
    detail: str
    """What disagrees, for the log of the sender."""


class Receipt(NamedTuple):
    """The learner's answer to one trajectory."""

    outcome: Outcome
    reason: str
    """`<RefusalReason>: <detail>` when refused, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Complete groups that one optimizer step takes; equal ledgers give equal batches, order included."""

    step: int
    version: int
    """Version that staleness was measured against."""
    groups: tuple[tuple[Trajectory, ...], ...]
    """Groups by ascending number, each with its samples in order."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories of all groups together."""
        return sum(len(group) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """What a worker gets when it asks for work."""

    leases: tuple[Lease, ...]
    retry_after: timedelta
    """How long to wait before asking again when there is no lease."""
    run_complete: bool
    """No work will come any more."""
