"""Trajectories and leases to and from protobuf, with everything that arrives checked as hostile.

Used by both ends. `decode_trajectory` never raises on bad bytes: it returns a `Refusal` that says what is wrong, so
that one bad trajectory is counted and answered without ending the stream it came on. The caller has bounded the
length of what it passes in. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from sparsewire.sync.errors import DamagedError
from sparsewire.sync.trajectories.types import (
    FinishReason,
    Lease,
    Outcome,
    Refusal,
    RefusalReason,
    SamplingParams,
    Trajectory,
    TrajectoryKey,
    VersionSpan,
)
from sparsewire.v1 import trajectories_pb2

MAX_TEXT_BYTES = 256
"""Bound on names: run, task, worker, region."""

MAX_GROUPS_PER_LEASE_CALL = 1024
"""Bound on the leases of one reply."""

MAX_SAMPLES_PER_GROUP = 4096
"""Bound on the samples of one group."""

_MAX_INT64 = (1 << 63) - 1
_MAX_TOKEN_ID = (1 << 31) - 1

OUTCOMES = {
    Outcome.ACCEPTED: trajectories_pb2.TRAJECTORY_OUTCOME_ACCEPTED,
    Outcome.DUPLICATE: trajectories_pb2.TRAJECTORY_OUTCOME_DUPLICATE,
    Outcome.SUPERSEDED: trajectories_pb2.TRAJECTORY_OUTCOME_SUPERSEDED,
    Outcome.REFUSED: trajectories_pb2.TRAJECTORY_OUTCOME_REFUSED,
}


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Serialise a trajectory; equal trajectories give equal bytes."""
    message = trajectories_pb2.Trajectory(
        run=trajectory.run,
        group=trajectory.key.group,
        sample=trajectory.key.sample,
        attempt=trajectory.key.attempt,
        task=trajectory.task,
        item=trajectory.item,
        worker=trajectories_pb2.Worker(worker_id=trajectory.worker_id, region=trajectory.region),
        prompt_token_ids=trajectory.prompt_token_ids.tolist(),
        completion_token_ids=trajectory.completion_token_ids.tolist(),
        logprobs=trajectory.logprobs.tolist(),
        spans=[
            trajectories_pb2.VersionSpan(version=span.version, start=span.start, stop=span.stop)
            for span in trajectory.spans
        ],
        reward=trajectory.reward,
        finish_reason=str(trajectory.finish_reason),
        created_unix_seconds=trajectory.created_unix_seconds,
    )
    return message.SerializeToString(deterministic=True)


def decode_trajectory(payload: bytes, *, run: str, key: TrajectoryKey) -> Trajectory | Refusal:
    """Return the trajectory in `payload` when it is the announced one and its fields agree, else why not."""
    message = trajectories_pb2.Trajectory()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        return Refusal(reason=RefusalReason.DAMAGED, detail=f"{len(payload)} bytes are no trajectory: {error}")
    inner = TrajectoryKey(group=message.group, sample=message.sample, attempt=message.attempt)
    if inner != key or message.run != run:
        return Refusal(
            reason=RefusalReason.DAMAGED,
            detail=f"announced as {key} of run {run[:80]!r}, is {inner} of run {message.run[:80]!r}",
        )
    arrays = _Arrays(
        prompt=np.fromiter(message.prompt_token_ids, dtype=np.int64, count=len(message.prompt_token_ids)),
        completion=np.fromiter(message.completion_token_ids, dtype=np.int64, count=len(message.completion_token_ids)),
        logprobs=np.fromiter(message.logprobs, dtype=np.float32, count=len(message.logprobs)),
    )
    return _not_finite(message, arrays) or _out_of_bounds(message, arrays) or _build(message, key, arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """The repeated fields, each read once: going through protobuf's containers is what decoding costs."""

    prompt: npt.NDArray[np.int64]
    completion: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


def _not_finite(message: trajectories_pb2.Trajectory, arrays: _Arrays) -> Refusal | None:
    if not np.isfinite(message.reward):
        return Refusal(reason=RefusalReason.NOT_FINITE, detail=f"reward is {message.reward}")
    if not np.isfinite(arrays.logprobs).all():
        return Refusal(reason=RefusalReason.NOT_FINITE, detail="a log-probability is not finite")
    if not np.isfinite(message.created_unix_seconds):
        return Refusal(reason=RefusalReason.NOT_FINITE, detail="the time of creation is not finite")
    return None


def _out_of_bounds(message: trajectories_pb2.Trajectory, arrays: _Arrays) -> Refusal | None:
    texts = {
        "run": message.run,
        "task": message.task,
        "worker_id": message.worker.worker_id,
        "region": message.worker.region,
    }
    for name, text in texts.items():
        if not text or len(text.encode()) > MAX_TEXT_BYTES:
            return _invalid(f"{name} must have 1..{MAX_TEXT_BYTES} bytes")
    largest = max([message.group, message.item, *(span.version for span in message.spans)])
    if largest > _MAX_INT64:
        return _invalid(f"group, item or version {largest} exceeds {_MAX_INT64}")
    for name, ids in (("prompt", arrays.prompt), ("completion", arrays.completion)):
        if ids.size and ids.max() > _MAX_TOKEN_ID:
            return _invalid(f"{name} token id {ids.max()} exceeds {_MAX_TOKEN_ID}")
    if message.finish_reason not in set(FinishReason):
        return _invalid(f"finish_reason {message.finish_reason[:40]!r} is none of {', '.join(FinishReason)}")
    return None


def _invalid(detail: str) -> Refusal:
    return Refusal(reason=RefusalReason.INVALID, detail=detail)


def _build(message: trajectories_pb2.Trajectory, key: TrajectoryKey, arrays: _Arrays) -> Trajectory | Refusal:
    try:
        return Trajectory(
            run=message.run,
            key=key,
            task=message.task,
            item=message.item,
            worker_id=message.worker.worker_id,
            region=message.worker.region,
            prompt_token_ids=arrays.prompt.astype(np.int32),
            completion_token_ids=arrays.completion.astype(np.int32),
            logprobs=arrays.logprobs,
            spans=tuple(VersionSpan(version=span.version, start=span.start, stop=span.stop) for span in message.spans),
            reward=message.reward,
            finish_reason=FinishReason(message.finish_reason),
            created_unix_seconds=message.created_unix_seconds,
        )
    except ValueError as error:
        return _invalid(str(error)[:400])


def payload_digest(key: TrajectoryKey, payload: bytes) -> bytes:
    """Return 16 bytes that tie a stored payload to its key, so that damage on disk is found when it is read."""
    head = struct.pack("<qqq", key.group, key.sample, key.attempt)
    return hashlib.blake2b(payload, key=head, digest_size=16).digest()


def key_to_proto(key: TrajectoryKey) -> trajectories_pb2.TrajectoryKey:
    """Return the wire form of a key."""
    return trajectories_pb2.TrajectoryKey(group=key.group, sample=key.sample, attempt=key.attempt)


def key_from_proto(message: trajectories_pb2.TrajectoryKey) -> TrajectoryKey:
    """Return the key that `message` states."""
    return TrajectoryKey(group=message.group, sample=message.sample, attempt=message.attempt)


def outcome_from_proto(value: trajectories_pb2.TrajectoryOutcome.ValueType) -> Outcome:
    """Return the outcome.

    Raises:
        DamagedError: the peer sent a value this build does not know; the trajectory must be kept and sent again.
    """
    for outcome, number in OUTCOMES.items():
        if number == value:
            return outcome
    raise DamagedError(f"the learner answered with unknown outcome {value}: upgrade the older side")


def lease_to_proto(lease: Lease) -> trajectories_pb2.Lease:
    """Return the wire form of a lease."""
    return trajectories_pb2.Lease(
        group=lease.group,
        attempt=lease.attempt,
        task=lease.task,
        item=lease.item,
        samples=lease.samples,
        expires_in_seconds=lease.expires_in.total_seconds(),
        sampling=trajectories_pb2.SamplingParams(
            temperature=lease.sampling.temperature, max_new_tokens=lease.sampling.max_new_tokens
        ),
    )


def lease_from_proto(message: trajectories_pb2.Lease) -> Lease:
    """Return the lease that `message` states.

    Raises:
        DamagedError: its fields are out of bounds.
    """
    samples = tuple(message.samples)
    if not 1 <= len(samples) <= MAX_SAMPLES_PER_GROUP or len(set(samples)) != len(samples):
        raise DamagedError(f"lease of group {message.group}: {len(samples)} samples are none, repeated or too many")
    if not message.task or len(message.task.encode()) > MAX_TEXT_BYTES:
        raise DamagedError(f"lease of group {message.group}: task must have 1..{MAX_TEXT_BYTES} bytes")
    try:
        return Lease(
            group=message.group,
            attempt=message.attempt,
            task=message.task,
            item=message.item,
            samples=samples,
            expires_in=timedelta(seconds=message.expires_in_seconds),
            sampling=SamplingParams(
                temperature=message.sampling.temperature, max_new_tokens=message.sampling.max_new_tokens
            ),
        )
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"lease of group {message.group} cannot be used: {error}") from error
