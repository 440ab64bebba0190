"""The learner's end of the wire: hands out leases, and takes trajectories in with acknowledgement when durable.

    stream ──► reader thread: parts ─► assembler ─► checked trajectory ──► bounded inbox
                                                                              │ all that wait, at once
    acks  ◄── handler thread ◄── one ledger transaction ◄─────────────────────┘

A trajectory that cannot be used is answered REFUSED with the reason, and the stream goes on. A stream whose framing is
broken (parts of two trajectories mixed, more bytes than announced, a part above the limit) is ended with an error, and
nothing of the unfinished trajectory is kept. Memory for a stream is bounded by one unfinished trajectory and the
inbox; a full inbox stops reading, and gRPC's flow control then slows the sender.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import grpc

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    DeadlineExceededError,
    LimitExceededError,
    SparsewireError,
)
from sparsewire.sync.rpc import MESSAGE_BYTES
from sparsewire.sync.trajectories.ledger import TrajectoryLedger
from sparsewire.sync.trajectories.types import Refusal, RefusalReason, Trajectory, TrajectoryKey
from sparsewire.sync.trajectories.wire import (
    MAX_GROUPS_PER_LEASE_CALL,
    MAX_TEXT_BYTES,
    OUTCOMES,
    decode_trajectory,
    key_from_proto,
    key_to_proto,
    lease_to_proto,
)
from sparsewire.v1 import trajectories_pb2, trajectories_pb2_grpc

logger = logging.getLogger(__name__)

RETRY_AFTER = timedelta(milliseconds=500)
"""What a worker is told to wait when there is no work: short beside a training step, cheap for the learner."""

IDLE_DEADLINE = timedelta(seconds=120)
"""A stream that brings nothing for so long is ended; the sender opens another when it has something."""

STORE_DEADLINE = timedelta(seconds=60)
"""How long a full inbox may wait for the ledger before the stream is given up."""

_INBOX_TRAJECTORIES = 64
_INBOX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A trajectory whose last part has come, or what is wrong with it."""

    key: TrajectoryKey
    content: Trajectory | Refusal
    num_bytes: int
    """Serialised size, for the bound of the inbox."""


class Assembler:
    """Joins the parts of one stream into trajectories, one at a time and within bounds. For one thread."""

    def __init__(self, *, max_trajectory_bytes: int) -> None:
        self._max_trajectory_bytes = max_trajectory_bytes
        self._run = ""
        self._key: TrajectoryKey | None = None
        self._total_bytes = 0
        self._num_seen_bytes = 0
        self._parts: list[bytes] = []

    @property
    def is_between(self) -> bool:
        """Whether no trajectory is unfinished."""
        return self._key is None

    def add(self, part: trajectories_pb2.SendTrajectoriesRequest) -> Arrival | None:
        """Take the next part; return the trajectory that it completes, if it does.

        A trajectory above the bound is not kept: its parts are counted off, and then it arrives as a refusal.

        Raises:
            LimitExceededError: the part, or all parts together, are longer than allowed or announced.
            DamagedError: the part does not continue the trajectory that is unfinished.
        """
        if len(part.data) > MESSAGE_BYTES:
            raise LimitExceededError(f"a part of {len(part.data)} bytes: send at most {MESSAGE_BYTES} in one")
        if not part.HasField("key") or not part.data:
            raise DamagedError("a part without key or without data: send the trajectory again")
        key = key_from_proto(part.key)
        if self._key is None:
            self._run, self._key, self._total_bytes = part.run, key, part.total_bytes
        elif (part.run, key, part.total_bytes) != (self._run, self._key, self._total_bytes):
            raise DamagedError(
                f"a part of {key} ({part.total_bytes} bytes) came inside {self._key} ({self._total_bytes} bytes): "
                "send one trajectory after the other"
            )
        self._num_seen_bytes += len(part.data)
        if self._num_seen_bytes > self._total_bytes:
            raise LimitExceededError(
                f"trajectory {key} announced {self._total_bytes} bytes and sent {self._num_seen_bytes}: send it again"
            )
        if self._total_bytes <= self._max_trajectory_bytes:
            self._parts.append(part.data)
        return self._complete(key) if self._num_seen_bytes == self._total_bytes else None

    def _complete(self, key: TrajectoryKey) -> Arrival:
        payload, total_bytes, run = b"".join(self._parts), self._total_bytes, self._run
        self._key, self._num_seen_bytes = None, 0
        self._parts.clear()
        if total_bytes > self._max_trajectory_bytes:
            detail = f"{total_bytes} bytes, at most {self._max_trajectory_bytes}"
            return Arrival(key=key, content=Refusal(reason=RefusalReason.TOO_LARGE, detail=detail), num_bytes=0)
        return Arrival(key=key, content=decode_trajectory(payload, run=run, key=key), num_bytes=total_bytes)


class _Inbox:
    """Arrivals between the reader of a stream and its handler; bounded by count and bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._num_bytes = 0
        self._ended = False
        self._failure: SparsewireError | None = None
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """Note that a part came: the stream is not idle."""
        self._heard_at = time.monotonic()

    def put(self, arrival: Arrival) -> bool:
        """Add an arrival, waiting for room; return False when nobody will take it any more.

        Raises:
            DeadlineExceededError: the ledger made no room in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, STORE_DEADLINE.total_seconds()):
                raise DeadlineExceededError("the ledger did not store in time: send again later")
            if self._ended:
                return False
            self._arrivals.append(arrival)
            self._num_bytes += arrival.num_bytes
            self._changed.notify_all()
            return True

    def end(self, failure: SparsewireError | None = None) -> None:
        """Note that nothing more will come, or that nothing more will be taken; the first failure counts."""
        with self._changed:
            self._ended = True
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take(self) -> list[Arrival]:
        """Wait for arrivals and return all that are here; none when the stream has ended or is idle.

        Raises:
            SparsewireError: what ended the stream, after everything before it was taken.
        """
        with self._changed:
            while not self._arrivals and not self._ended:
                remaining = self._heard_at + IDLE_DEADLINE.total_seconds() - time.monotonic()
                if remaining <= 0:
                    return []
                self._changed.wait(remaining)
            taken, self._arrivals, self._num_bytes = self._arrivals, [], 0
            self._changed.notify_all()
            if not taken and self._failure:
                raise self._failure
            return taken

    def _has_room(self) -> bool:
        return self._ended or (len(self._arrivals) < _INBOX_TRAJECTORIES and self._num_bytes < _INBOX_BYTES)


class TrajectoryServicer(trajectories_pb2_grpc.TrajectoryServiceServicer):
    """Serves one open ledger; give it to `start_server`."""

    def __init__(self, ledger: TrajectoryLedger) -> None:
        self._ledger = ledger

    def register(self, server: grpc.Server) -> None:
        """Add the RPC handlers to `server`."""
        trajectories_pb2_grpc.add_TrajectoryServiceServicer_to_server(self, server)

    def LeaseGroups(
        self, request: trajectories_pb2.LeaseGroupsRequest, context: grpc.ServicerContext
    ) -> trajectories_pb2.LeaseGroupsResponse:
        """Hand out groups; see the .proto."""
        run = self._ledger.settings.run
        if request.run != run:
            raise ConfigError(f"this learner serves run {run!r}, not {request.run[:80]!r}: correct `run` in the worker")
        for name, text in (("worker_id", request.worker.worker_id), ("region", request.worker.region)):
            if not text or len(text.encode()) > MAX_TEXT_BYTES:
                raise ConfigError(f"{name} {text[:40]!r} must have 1..{MAX_TEXT_BYTES} bytes")
        if not 1 <= request.max_groups <= MAX_GROUPS_PER_LEASE_CALL:
            raise LimitExceededError(f"{request.max_groups} groups wanted: ask for 1..{MAX_GROUPS_PER_LEASE_CALL}")
        leases = self._ledger.lease(request.worker.worker_id, request.worker.region, request.max_groups)
        return trajectories_pb2.LeaseGroupsResponse(
            leases=[lease_to_proto(lease) for lease in leases],
            retry_after_seconds=0.0 if leases else RETRY_AFTER.total_seconds(),
            run_complete=self._ledger.run_complete,
        )

    def SendTrajectories(
        self,
        request_iterator: Iterator[trajectories_pb2.SendTrajectoriesRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[trajectories_pb2.SendTrajectoriesResponse]:
        """Take trajectories in and answer each once it is durable; see the .proto."""
        inbox = _Inbox()
        reader = threading.Thread(
            target=self._read, args=(request_iterator, inbox), name="trajectory-reader", daemon=True
        )
        reader.start()
        try:
            while arrivals := inbox.take():
                receipts = self._ledger.accept_many([arrival.content for arrival in arrivals])
                for arrival, receipt in zip(arrivals, receipts, strict=True):
                    yield trajectories_pb2.SendTrajectoriesResponse(
                        key=key_to_proto(arrival.key), outcome=OUTCOMES[receipt.outcome], reason=receipt.reason
                    )
        finally:
            inbox.end()

    def _read(self, parts: Iterator[trajectories_pb2.SendTrajectoriesRequest], inbox: _Inbox) -> None:
        assembler = Assembler(max_trajectory_bytes=self._ledger.settings.max_trajectory_bytes)
        try:
            for part in parts:
                inbox.heard()
                arrival = assembler.add(part)
                if arrival and not inbox.put(arrival):
                    return
            inbox.end(
                None if assembler.is_between else DamagedError("the stream ended inside a trajectory: send it again")
            )
        except SparsewireError as error:
            inbox.end(error)
        except grpc.RpcError:
            logger.debug("a trajectory stream was cut by its sender or by the network")
            inbox.end()
        except Exception as error:
            logger.exception("reading a trajectory stream failed")
            inbox.end(SparsewireError(f"reading the stream failed: {error!r}"))
