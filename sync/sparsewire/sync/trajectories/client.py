"""The worker's end of the wire: asks for leases, and sends the spool home with retries that never lose or double.

    spool ──► request generator (bounded window of unacknowledged) ──► stream ──► learner
      ▲ remove                                                           │
      └──────────── acknowledgements ◄── reader thread ◄─────────────────┘
                     sender thread: watches progress, reconnects with backoff

A trajectory leaves the spool only when the learner has said what became of it. Whatever is unacknowledged when a
stream ends is sent again on the next, and the learner recognises it. The sender never gives up while it runs; only a
damaged spool ends it, which `check` and `flush` then raise.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import grpc
import prometheus_client

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    DeadlineExceededError,
    SparsewireError,
    StoreUnavailableError,
)
from sparsewire.sync.rpc import MESSAGE_BYTES, UNARY_DEADLINE, check_address, open_channel, peer_errors, translate
from sparsewire.sync.trajectories.spool import SpooledTrajectory, TrajectorySpool
from sparsewire.sync.trajectories.types import LeaseReply, Outcome, TrajectoryKey
from sparsewire.sync.trajectories.wire import (
    MAX_GROUPS_PER_LEASE_CALL,
    key_from_proto,
    key_to_proto,
    lease_from_proto,
    outcome_from_proto,
)
from sparsewire.v1 import trajectories_pb2, trajectories_pb2_grpc

logger = logging.getLogger(__name__)

PROGRESS_DEADLINE = timedelta(seconds=60)
"""A stream on which nothing is written or acknowledged for so long is given up and opened again."""

_IDLE_CLOSE = timedelta(seconds=5)
"""An idle stream is closed so that it holds no thread of the learner."""

_WINDOW_TRAJECTORIES = 256
_WINDOW_BYTES = 8 << 20
_POLL = timedelta(milliseconds=200)
_READER_DEADLINE = timedelta(seconds=30)
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 10.0
_MAX_RETRY_AFTER_SECONDS = 60.0

_ACKED = prometheus_client.Counter(
    "sparsewire_spool_acknowledged_total", "Trajectories that left the spool, by the learner's answer.", ["outcome"]
)
_SENT_BYTES = prometheus_client.Counter(
    "sparsewire_spool_sent_bytes_total", "Payload bytes handed to the stream, repeats included."
)
_STREAMS = prometheus_client.Counter(
    "sparsewire_spool_streams_total", "Streams to the learner, by how they ended.", ["outcome"]
)


class LeaseClient:
    """Asks the learner for work; open it as a context manager. Thread-safe."""

    def __init__(
        self, *, address: str, run: str, worker_id: str, region: str, timeout: timedelta = UNARY_DEADLINE
    ) -> None:
        """Describe the caller; nothing is sent until `lease`.

        Raises:
            ConfigError: the address is not `host:port`.
        """
        check_address(address)
        self._address = address
        self._run = run
        self._worker_id = worker_id
        self._region = region
        self._timeout = timeout
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> LeaseClient:
        self._channel = open_channel(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def lease(self, max_groups: int, *, version: int | None = None) -> LeaseReply:
        """Ask once for up to `max_groups` groups; a reply that is lost only delays its groups until they expire.

        Args:
            version: What the worker serves now, for diagnosis.

        Raises:
            StoreUnavailableError: the learner cannot be reached; ask again later.
            DeadlineExceededError: it did not answer in time; ask again later.
            ConfigError: it serves another run.
            ProtocolMismatchError: it speaks another protocol number.
            DamagedError: its answer cannot be used.
        """
        if self._channel is None:
            raise ConfigError("the lease client is not open: use it as a context manager")
        worker = trajectories_pb2.Worker(worker_id=self._worker_id, region=self._region, version=version)
        request = trajectories_pb2.LeaseGroupsRequest(
            run=self._run, worker=worker, max_groups=min(max_groups, MAX_GROUPS_PER_LEASE_CALL)
        )
        with peer_errors(self._address, "leasing prompt groups"):
            reply = trajectories_pb2_grpc.TrajectoryServiceStub(self._channel).LeaseGroups(
                request, timeout=self._timeout.total_seconds()
            )
        if len(reply.leases) > request.max_groups:
            raise DamagedError(f"{self._address} sent {len(reply.leases)} leases for {request.max_groups} asked")
        wait_seconds = reply.retry_after_seconds
        if not 0 <= wait_seconds <= _MAX_RETRY_AFTER_SECONDS:
            raise DamagedError(f"{self._address} says to wait {wait_seconds} s, at most {_MAX_RETRY_AFTER_SECONDS}")
        return LeaseReply(
            leases=tuple(lease_from_proto(lease) for lease in reply.leases),
            retry_after=timedelta(seconds=wait_seconds),
            run_complete=reply.run_complete,
        )


class TrajectorySender:
    """Streams an open spool to the learner from a thread of its own; open it as a context manager."""

    def __init__(
        self,
        *,
        spool: TrajectorySpool,
        address: str,
        run: str,
        jitter: random.Random | None = None,
        progress_deadline: timedelta = PROGRESS_DEADLINE,
    ) -> None:
        """Describe the sender; its thread starts with `with`.

        Args:
            jitter: Spreads the reconnects of many workers; a generator of its own if None.

        Raises:
            ConfigError: the address is not `host:port`.
        """
        check_address(address)
        self._spool = spool
        self._address = address
        self._run = run
        self._jitter = jitter or random.Random()
        self._progress_deadline = progress_deadline
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="trajectory-sender", daemon=True)
        self._failure: SparsewireError | None = None
        self._last_error: SparsewireError | None = None

    def __enter__(self) -> TrajectorySender:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def last_error(self) -> SparsewireError | None:
        """Why the last stream failed; None since one has made progress."""
        return self._last_error

    def check(self) -> None:
        """Raise what ended the sender, if anything did.

        Raises:
            DamagedError: the spool is damaged; the message names the file and the remedy.
        """
        if self._failure is not None:
            raise self._failure

    def flush(self, timeout: timedelta) -> None:
        """Return once everything in the spool is acknowledged.

        Raises:
            DeadlineExceededError: it was not within `timeout`; the rest stays in the spool.
            DamagedError: the spool is damaged.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            self.check()
            remaining = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            if self._spool.wait_until_empty(timeout=min(_POLL, remaining)):
                return
            if not remaining:
                raise DeadlineExceededError(
                    f"{self._spool.num_trajectories} trajectories are not acknowledged by {self._address} after "
                    f"{timeout.total_seconds():.0f} s and stay in the spool; last error: {self._last_error}"
                )

    def close(self, *, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Stop sending and end the thread; what is unacknowledged stays in the spool. Safe to repeat.

        Raises:
            DeadlineExceededError: the thread did not end in time.
        """
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout.total_seconds())
        if self._thread.is_alive():
            raise DeadlineExceededError(f"the trajectory sender to {self._address} did not stop within {timeout}")

    def _main(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        channel = open_channel(self._address)
        try:
            while not self._stopping.is_set():
                if not self._spool.wait_for_entry(after=0, timeout=_POLL):
                    continue
                stream = _Stream(
                    spool=self._spool,
                    run=self._run,
                    address=self._address,
                    stopping=self._stopping,
                    progress_deadline=self._progress_deadline,
                )
                error = stream.run_to_end(channel)
                _STREAMS.labels("failed" if error else "ended").inc()
                if stream.num_acked or error is None:
                    backoff_seconds, self._last_error = _FIRST_BACKOFF_SECONDS, None
                if error is None or self._stopping.is_set():
                    continue
                if self._last_error is None:
                    logger.warning("sending trajectories: %s; will keep trying", error)
                self._last_error = error
                channel.close()
                self._stopping.wait(backoff_seconds * self._jitter.uniform(0.5, 1.0))
                backoff_seconds = min(2 * backoff_seconds, _LAST_BACKOFF_SECONDS)
                channel = open_channel(self._address)
        except SparsewireError as error:
            logger.error("the trajectory sender stops: %s", error)
            self._failure = error
        except Exception as error:
            logger.exception("the trajectory sender stops")
            self._failure = SparsewireError(f"the trajectory sender failed: {error!r}")
        finally:
            channel.close()


class _Stream:
    """One SendTrajectories call: from the first entry of the spool until it is idle, cut or stopped."""

    def __init__(
        self,
        *,
        spool: TrajectorySpool,
        run: str,
        address: str,
        stopping: threading.Event,
        progress_deadline: timedelta,
    ) -> None:
        self._spool = spool
        self._run = run
        self._address = address
        self._stopping = stopping
        self._progress_deadline = progress_deadline
        self._changed = threading.Condition()
        self._unacked: dict[TrajectoryKey, SpooledTrajectory] = {}
        self._num_unacked_bytes = 0
        self._progress_at = time.monotonic()
        self._ended = False
        self._transport_error: SparsewireError | None = None
        self._spool_error: Exception | None = None
        self.num_acked = 0

    def run_to_end(self, channel: grpc.Channel) -> SparsewireError | None:
        """Send until there is nothing more; return why the stream failed, None when it ended well.

        Raises:
            DamagedError: the spool is damaged.
        """
        call = trajectories_pb2_grpc.TrajectoryServiceStub(channel).SendTrajectories(self._requests())
        reader = threading.Thread(target=self._read, args=(call,), name="trajectory-acks", daemon=True)
        reader.start()
        try:
            self._watch()
        finally:
            call.cancel()  # type: ignore[no-untyped-call]
            reader.join(_READER_DEADLINE.total_seconds())
            with self._changed:
                self._ended = True
                self._changed.notify_all()
        if isinstance(self._spool_error, StoreUnavailableError):
            return self._spool_error
        if self._spool_error is not None:
            raise self._spool_error
        return self._transport_error

    def _watch(self) -> None:
        """Return when the reader has ended, the process stops, or nothing has moved for too long."""
        with self._changed:
            while not self._ended and not self._stopping.is_set():
                self._changed.wait(_POLL.total_seconds())
                stuck_seconds = time.monotonic() - self._progress_at
                if self._unacked and not self._ended and stuck_seconds > self._progress_deadline.total_seconds():
                    self._transport_error = DeadlineExceededError(
                        f"sending trajectories to {self._address}: no progress for {stuck_seconds:.0f} s with "
                        f"{len(self._unacked)} unacknowledged"
                    )
                    return

    def _requests(self) -> Iterator[trajectories_pb2.SendTrajectoriesRequest]:
        """Yield parts in spool order; runs in gRPC's thread, which stops asking when the call has ended."""
        try:
            after = 0
            while found := self._next_entries(after):
                for spooled in found:
                    after = spooled.entry
                    yield from self._parts(spooled)
        except Exception as error:
            # gRPC would only cancel the call; keep the reason for the sender's thread.
            logger.exception("reading the trajectory spool failed")
            with self._changed:
                self._spool_error = error
                self._ended = True
                self._changed.notify_all()

    def _next_entries(self, after: int) -> list[SpooledTrajectory]:
        """Wait for room in the window and for entries; none when the stream should end."""
        idle_until = time.monotonic() + _IDLE_CLOSE.total_seconds()
        while True:
            with self._changed:
                if self._ended or self._stopping.is_set():
                    return []
                num_room = _WINDOW_TRAJECTORIES - len(self._unacked)
                num_room_bytes = _WINDOW_BYTES - self._num_unacked_bytes
                if num_room <= 0 or num_room_bytes <= 0:
                    self._changed.wait(_POLL.total_seconds())
                    idle_until = time.monotonic() + _IDLE_CLOSE.total_seconds()
                    continue
            if self._spool.wait_for_entry(after=after, timeout=_POLL):
                found = self._spool.peek(after=after, max_trajectories=num_room, max_bytes=num_room_bytes)
                with self._changed:
                    for spooled in found:
                        self._unacked[spooled.key] = spooled
                        self._num_unacked_bytes += len(spooled.payload)
                    self._progress_at = time.monotonic()
                if found:
                    return found
            if time.monotonic() > idle_until:
                return []

    def _parts(self, spooled: SpooledTrajectory) -> Iterator[trajectories_pb2.SendTrajectoriesRequest]:
        key = key_to_proto(spooled.key)
        for start in range(0, len(spooled.payload), MESSAGE_BYTES):
            data = spooled.payload[start : start + MESSAGE_BYTES]
            with self._changed:
                self._progress_at = time.monotonic()
            _SENT_BYTES.inc(len(data))
            yield trajectories_pb2.SendTrajectoriesRequest(
                run=self._run, key=key, total_bytes=len(spooled.payload), data=data
            )

    def _read(self, call: Iterator[trajectories_pb2.SendTrajectoriesResponse]) -> None:
        transport_error: SparsewireError | None = None
        spool_error: Exception | None = None
        try:
            for response in call:
                try:
                    spooled, outcome = self._match(response)
                except DamagedError as error:
                    transport_error = error
                    break
                self._settle(spooled, outcome)
        except grpc.RpcError as error:
            transport_error = translate(error, self._address, "sending trajectories")
        except Exception as error:
            logger.exception("removing acknowledged trajectories from the spool failed")
            spool_error = error
        with self._changed:
            self._ended = True
            self._transport_error = self._transport_error or transport_error
            self._spool_error = self._spool_error or spool_error
            self._changed.notify_all()

    def _match(self, response: trajectories_pb2.SendTrajectoriesResponse) -> tuple[SpooledTrajectory, Outcome]:
        key, outcome = key_from_proto(response.key), outcome_from_proto(response.outcome)
        with self._changed:
            spooled = self._unacked.get(key)
        if spooled is None:
            raise DamagedError(f"{self._address} acknowledged {key}, which was not sent on this stream")
        if outcome is Outcome.REFUSED:
            logger.warning("the learner refused trajectory %s: %s", key, response.reason[:500])
        return spooled, outcome

    def _settle(self, spooled: SpooledTrajectory, outcome: Outcome) -> None:
        self._spool.remove([spooled.entry])
        _ACKED.labels(outcome).inc()
        with self._changed:
            del self._unacked[spooled.key]
            self._num_unacked_bytes -= len(spooled.payload)
            self._progress_at = time.monotonic()
            self.num_acked += 1
            self._changed.notify_all()
