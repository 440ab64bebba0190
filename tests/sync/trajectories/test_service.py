"""The learner's end of the wire against well-behaved, careless and hostile peers."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from sparsewire.sync.build import build_name
from sparsewire.sync.errors import ConfigError, DamagedError, LimitExceededError, ProtocolMismatchError
from sparsewire.sync.rpc import MESSAGE_BYTES, open_channel, peer_errors, start_server
from sparsewire.sync.trajectories import (
    LeaseClient,
    LedgerSettings,
    Outcome,
    Trajectory,
    TrajectoryKey,
    TrajectoryLedger,
    TrajectoryServicer,
)
from sparsewire.sync.trajectories.wire import encode_trajectory, key_to_proto, outcome_from_proto
from sparsewire.v1 import trajectories_pb2, trajectories_pb2_grpc

Complete = Callable[..., Trajectory]
Part = trajectories_pb2.SendTrajectoriesRequest


@pytest.fixture
def address(ledger: TrajectoryLedger) -> Iterator[str]:
    """Address of a server of `ledger`."""
    with start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server:
        yield f"127.0.0.1:{server.port}"


def parts_of(
    payload: bytes, key: TrajectoryKey, *, run: str = "r1", total_bytes: int | None = None, part_bytes: int = 1000
) -> list[Part]:
    total_bytes = len(payload) if total_bytes is None else total_bytes
    return [
        Part(run=run, key=key_to_proto(key), total_bytes=total_bytes, data=payload[start : start + part_bytes])
        for start in range(0, len(payload), part_bytes)
    ]


def send(address: str, parts: list[Part]) -> list[tuple[int, Outcome, str]]:
    """Send parts on one stream; return (sample, outcome, reason) of each answer."""
    with open_channel(address) as channel, peer_errors(address, "sending"):
        answers = trajectories_pb2_grpc.TrajectoryServiceStub(channel).SendTrajectories(iter(parts), timeout=30)
        return [(a.key.sample, outcome_from_proto(a.outcome), a.reason) for a in answers]


def test_leases_come_with_everything_a_worker_needs(address: str, ledger: TrajectoryLedger) -> None:
    with LeaseClient(address=address, run="r1", worker_id="w1", region="eu") as client:
        reply = client.lease(6, version=3)
        assert [lease.group for lease in reply.leases] == [0, 1, 2, 3, 4, 5]
        assert reply.leases[0].sampling == ledger.settings.sampling
        assert reply.leases[0].task == "addition"
        assert timedelta(0) < reply.leases[0].expires_in <= timedelta(seconds=60)
        assert len(client.lease(6).leases) == 2
        full = client.lease(6)
        assert full.leases == ()
        assert full.retry_after > timedelta(0)
        assert not full.run_complete
        ledger.finish()
        assert client.lease(6).run_complete


def test_a_worker_of_another_run_or_without_a_name_is_told_so(address: str) -> None:
    with (
        LeaseClient(address=address, run="r2", worker_id="w1", region="eu") as client,
        pytest.raises(ConfigError, match="serves run 'r1', not 'r2'"),
    ):
        client.lease(1)
    with (
        LeaseClient(address=address, run="r1", worker_id="", region="eu") as client,
        pytest.raises(ConfigError, match="worker_id"),
    ):
        client.lease(1)


def test_another_protocol_number_is_refused_naming_both_builds(address: str) -> None:
    metadata = (("sparsewire-protocol", "99"), ("sparsewire-build", "sparsewire/7.7"))
    with grpc.insecure_channel(address) as channel:
        stub = trajectories_pb2_grpc.TrajectoryServiceStub(channel)
        for call in (
            lambda: stub.LeaseGroups(trajectories_pb2.LeaseGroupsRequest(run="r1"), timeout=30, metadata=metadata),
            lambda: list(stub.SendTrajectories(iter([Part()]), timeout=30, metadata=metadata)),
        ):
            with (
                pytest.raises(ProtocolMismatchError, match=f"sparsewire/7.7 speaks protocol 99.*{build_name()}"),
                peer_errors(address, "calling"),
            ):
                call()


def test_answers_keep_the_order_and_say_what_happened(
    address: str, ledger: TrajectoryLedger, complete: Complete
) -> None:
    (lease,) = ledger.lease("w1", "eu", 1)
    first, second, outside = complete(lease, 0), complete(lease, 1, num_tokens=3000), complete(lease, 7)
    parts = [
        part
        for trajectory in (first, outside, second, first)
        for part in parts_of(encode_trajectory(trajectory), trajectory.key)
    ]
    answers = send(address, parts)
    assert [(sample, outcome) for sample, outcome, _ in answers] == [
        (0, Outcome.ACCEPTED),
        (7, Outcome.REFUSED),
        (1, Outcome.ACCEPTED),
        (0, Outcome.DUPLICATE),
    ]
    assert answers[1][2].startswith("sample_out_of_range: ")
    batch = ledger.take_batch(1, version=0, step=1)
    assert batch is not None
    assert encode_trajectory(batch.groups[0][1]) == encode_trajectory(second)


def test_a_bad_trajectory_is_refused_and_the_stream_goes_on(
    address: str, ledger: TrajectoryLedger, complete: Complete
) -> None:
    (lease,) = ledger.lease("w1", "eu", 1)
    good = complete(lease, 1)
    other_run = complete(lease, 0, run="r2")
    bad_key = TrajectoryKey(group=0, sample=0, attempt=0)
    answers = send(
        address,
        [
            *parts_of(b"\xff" * 3000, bad_key),
            *parts_of(encode_trajectory(good), bad_key),
            *parts_of(encode_trajectory(other_run), other_run.key, run="r2"),
            *parts_of(b"z" * 5, TrajectoryKey(group=(1 << 64) - 1, sample=3, attempt=3)),
            *parts_of(encode_trajectory(good), good.key),
        ],
    )
    assert [reason.split(":")[0] for _, _, reason in answers] == ["damaged", "damaged", "wrong_run", "damaged", ""]
    assert ledger.verify().refused == {"damaged": 3, "wrong_run": 1}


def test_a_trajectory_above_the_bound_is_refused_without_being_kept(
    tmp_path: Path, settings: Callable[..., LedgerSettings], complete: Complete
) -> None:
    with (
        TrajectoryLedger(path=tmp_path / "l", settings=settings(max_trajectory_bytes=2000)) as ledger,
        start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)]) as server,
    ):
        (lease,) = ledger.lease("w1", "eu", 1)
        large, small = complete(lease, 0, num_tokens=2000), complete(lease, 1)
        answers = send(
            f"127.0.0.1:{server.port}",
            parts_of(encode_trajectory(large), large.key) + parts_of(encode_trajectory(small), small.key),
        )
        assert [(outcome, reason.split(":")[0]) for _, outcome, reason in answers] == [
            (Outcome.REFUSED, "too_large"),
            (Outcome.ACCEPTED, ""),
        ]


def test_broken_framing_ends_the_stream_and_keeps_what_was_whole(
    address: str, ledger: TrajectoryLedger, complete: Complete
) -> None:
    (lease,) = ledger.lease("w1", "eu", 1)
    whole, cut = complete(lease, 0), complete(lease, 1, num_tokens=3000)
    payload = encode_trajectory(cut)
    head = parts_of(payload, cut.key)[:2]
    before = parts_of(encode_trajectory(whole), whole.key)
    other_key, other_total = Part(), Part()
    other_key.CopyFrom(head[1])
    other_key.key.sample = 0
    other_total.CopyFrom(head[1])
    other_total.total_bytes += 1
    cases: list[tuple[list[Part], type[Exception]]] = [
        ([head[0], other_key], DamagedError),
        ([head[0], other_total], DamagedError),
        ([head[0]], DamagedError),
        ([head[0], Part(run="r1", key=key_to_proto(cut.key), total_bytes=len(payload))], DamagedError),
        ([Part(run="r1", total_bytes=5, data=b"12345")], DamagedError),
        (parts_of(payload, cut.key, total_bytes=len(payload) - 1), LimitExceededError),
        (parts_of(payload, cut.key, total_bytes=0), LimitExceededError),
        (parts_of(bytes(MESSAGE_BYTES + 1), cut.key, part_bytes=MESSAGE_BYTES + 1), LimitExceededError),
    ]
    for parts, error in cases:
        with pytest.raises(error):
            send(address, before + parts)
    counts = ledger.verify()
    assert (counts.num_received, counts.num_duplicates) == (1, len(cases) - 1)
    assert send(address, parts_of(payload, cut.key))[0][1] is Outcome.ACCEPTED


def test_mutated_streams_change_nothing_but_the_counts(
    address: str, ledger: TrajectoryLedger, complete: Complete
) -> None:
    rng = random.Random(11)
    (lease,) = ledger.lease("w1", "eu", 1)
    trajectory = complete(lease, 0, num_tokens=300)
    good = parts_of(encode_trajectory(trajectory), trajectory.key, part_bytes=400)
    with open_channel(address) as channel:
        raw = channel.stream_stream(
            "/sparsewire.v1.TrajectoryService/SendTrajectories",
            request_serializer=bytes,
            response_deserializer=trajectories_pb2.SendTrajectoriesResponse.FromString,
        )
        for _ in range(300):
            parts = [bytearray(part.SerializeToString()) for part in good]
            for _ in range(rng.randint(1, 4)):
                part = rng.choice(parts)
                part[rng.randrange(len(part))] = rng.randrange(256)
            if rng.random() < 0.3:
                rng.shuffle(parts)
            call = raw(iter([bytes(part) for part in parts]), timeout=30)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    counts = ledger.verify()
    assert counts.num_refused > 50
    assert counts.num_received <= 1
    other = complete(lease, 1)
    assert send(address, parts_of(encode_trajectory(other), other.key))[0][1] is Outcome.ACCEPTED


def test_a_stopped_server_ends_streams_that_wait(ledger: TrajectoryLedger, complete: Complete) -> None:
    (lease,) = ledger.lease("w1", "eu", 1)
    trajectory = complete(lease, 0)
    hold = threading.Event()

    def parts() -> Iterator[Part]:
        yield from parts_of(encode_trajectory(trajectory), trajectory.key)
        hold.wait(30)

    server = start_server("127.0.0.1:0", services=[TrajectoryServicer(ledger)])
    address = f"127.0.0.1:{server.port}"
    with open_channel(address) as channel:
        answers = iter(trajectories_pb2_grpc.TrajectoryServiceStub(channel).SendTrajectories(parts(), timeout=30))
        assert next(answers).outcome == trajectories_pb2.TRAJECTORY_OUTCOME_ACCEPTED
        server.stop(grace=timedelta(milliseconds=100))
        with pytest.raises(grpc.RpcError):
            next(answers)
        hold.set()
