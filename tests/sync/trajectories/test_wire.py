"""The wire form keeps every bit of a trajectory, and bad bytes become refusals, never exceptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from sparsewire.sync.errors import DamagedError
from sparsewire.sync.trajectories import (
    Lease,
    Outcome,
    Refusal,
    RefusalReason,
    SamplingParams,
    Trajectory,
    TrajectoryKey,
)
from sparsewire.sync.trajectories.wire import (
    OUTCOMES,
    decode_trajectory,
    encode_trajectory,
    lease_from_proto,
    lease_to_proto,
    outcome_from_proto,
)
from sparsewire.v1 import trajectories_pb2

LEASE = Lease(
    group=5,
    attempt=1,
    task="addition",
    item=11,
    samples=(0, 1),
    expires_in=timedelta(seconds=60),
    sampling=SamplingParams(temperature=0.7, max_new_tokens=12),
)


def message_of(trajectory: Trajectory) -> trajectories_pb2.Trajectory:
    return trajectories_pb2.Trajectory.FromString(encode_trajectory(trajectory))


def decode(message: trajectories_pb2.Trajectory, key: TrajectoryKey) -> Trajectory | Refusal:
    return decode_trajectory(message.SerializeToString(), run="r1", key=key)


def test_a_trajectory_survives_the_wire_bit_for_bit(complete: Callable[..., Trajectory]) -> None:
    sent = complete(LEASE, 1, versions=(3, 4, 9), num_tokens=1000)
    got = decode_trajectory(encode_trajectory(sent), run="r1", key=sent.key)
    assert isinstance(got, Trajectory)
    assert got.logprobs.tobytes() == sent.logprobs.tobytes()
    assert got.logprobs.dtype == np.float32
    assert got.completion_token_ids.tobytes() == sent.completion_token_ids.tobytes()
    assert got.prompt_token_ids.tobytes() == sent.prompt_token_ids.tobytes()
    assert got.prompt_token_ids.dtype == np.int32
    assert (got.key, got.spans, got.reward, got.item) == (sent.key, sent.spans, sent.reward, sent.item)
    assert encode_trajectory(got) == encode_trajectory(sent)


def test_a_lease_survives_the_wire() -> None:
    assert lease_from_proto(lease_to_proto(LEASE)) == LEASE


@pytest.mark.parametrize(
    ("samples", "max_new_tokens", "expires"), [((), 12, 60.0), ((1, 1), 12, 60.0), ((0,), 0, 60.0), ((0,), 1, 1e300)]
)
def test_an_unusable_lease_is_damage(samples: tuple[int, ...], max_new_tokens: int, expires: float) -> None:
    message = lease_to_proto(LEASE)
    del message.samples[:]
    message.samples.extend(samples)
    message.sampling.max_new_tokens = max_new_tokens
    message.expires_in_seconds = expires
    with pytest.raises(DamagedError, match="lease of group 5"):
        lease_from_proto(message)


def test_every_outcome_has_a_number_and_unknown_numbers_are_damage() -> None:
    assert {outcome_from_proto(number) for number in OUTCOMES.values()} == set(Outcome)
    with pytest.raises(DamagedError, match="unknown outcome 0"):
        outcome_from_proto(trajectories_pb2.TRAJECTORY_OUTCOME_UNSPECIFIED)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("reward", float("nan"), RefusalReason.NOT_FINITE),
        ("reward", float("inf"), RefusalReason.NOT_FINITE),
        ("created_unix_seconds", float("-inf"), RefusalReason.NOT_FINITE),
        ("finish_reason", "tired", RefusalReason.INVALID),
        ("task", "", RefusalReason.INVALID),
        ("task", "t" * 300, RefusalReason.INVALID),
        ("item", 1 << 63, RefusalReason.INVALID),
        ("run", "other", RefusalReason.DAMAGED),
        ("sample", 7, RefusalReason.DAMAGED),
        ("attempt", 0, RefusalReason.DAMAGED),
    ],
)
def test_a_bad_field_is_refused_with_its_reason(
    complete: Callable[..., Trajectory], field: str, value: object, reason: RefusalReason
) -> None:
    trajectory = complete(LEASE, 1)
    message = message_of(trajectory)
    setattr(message, field, value)
    refusal = decode(message, trajectory.key)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason


def test_arrays_that_disagree_are_refused(complete: Callable[..., Trajectory]) -> None:
    trajectory = complete(LEASE, 1, versions=(1, 2))
    shorter, gap, huge_id, huge_version, nan = (message_of(trajectory) for _ in range(5))
    del shorter.logprobs[-1]
    gap.spans[1].start += 1
    huge_id.completion_token_ids[0] = 1 << 31
    huge_version.spans[0].version = 1 << 63
    nan.logprobs[2] = float("nan")
    for message in (shorter, gap, huge_id, huge_version, nan):
        refusal = decode(message, trajectory.key)
        assert isinstance(refusal, Refusal)
        assert refusal.reason in (RefusalReason.INVALID, RefusalReason.NOT_FINITE)


def test_mutated_bytes_never_raise_and_never_pass_with_another_key(complete: Callable[..., Trajectory]) -> None:
    rng = random.Random(5)
    trajectory = complete(LEASE, 1, num_tokens=40)
    good = encode_trajectory(trajectory)
    num_refused = 0
    for _ in range(600):
        payload = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            match rng.randrange(4):
                case 0:
                    payload[rng.randrange(len(payload))] = rng.randrange(256)
                case 1:
                    del payload[rng.randrange(len(payload)) :]
                    payload += b"\x00"
                case 2:
                    payload.insert(rng.randrange(len(payload)), rng.randrange(256))
                case _:
                    payload += rng.randbytes(rng.randint(1, 8))
        decoded = decode_trajectory(bytes(payload), run="r1", key=trajectory.key)
        if isinstance(decoded, Refusal):
            num_refused += 1
        else:
            assert decoded.key == trajectory.key
            assert len(decoded.logprobs) == len(decoded.completion_token_ids)
    assert num_refused > 300
