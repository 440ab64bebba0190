"""An emulated WAN link in user space: round-trip time, shared rate limit and exact byte counts over plain TCP.

A `WanLink` stands between one region and the services of another: for each service it listens on a loopback port and
relays every connection to the real address, in its own thread.

    worker ──connect──► port of "weights"      ─┐   up:   one line, rate-limited, half a round trip long
                        port of "trajectories" ─┴─► ──────────────────────────────────────────────► learner
                                                 ◄── down: another line of the same rate and length

All connections of a link share one line per direction, so two downloads halve each other; they take turns of at most
`_TURN_BYTES`. Setting a connection up costs one round trip. What is on its way per connection is bounded by
the path's own capacity plus `_SLACK_BYTES`; beyond it the sender is not read from, so TCP pushes back. Bytes are
counted as they enter the line. `pause` holds every byte where it is (a stall), `partition` also cuts all connections
and refuses new ones.

Known limits: no loss and no reordering; delays are as exact as the event loop's timers (about a millisecond).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

from sparsewire.sync.errors import ConfigError, DeadlineExceededError
from sparsewire.sync.rpc import check_address

logger = logging.getLogger(__name__)

_TURN_BYTES = 64 << 10
"""Bytes a connection may put on the line before the next one's turn."""
_SLACK_BYTES = 256 << 10
"""Bytes in flight per connection beyond the capacity of the path itself."""
_LINE_QUEUE_SECONDS = 0.02
"""How far the line may be booked ahead; short, so that connections share it fairly."""
_START_DEADLINE = timedelta(seconds=10)
_STOP_DEADLINE = timedelta(seconds=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCount:
    """Payload bytes of one service that entered the link, since it started."""

    down_bytes: int
    """Towards the region."""
    up_bytes: int
    """From the region."""


@dataclass(slots=True, kw_only=True)
class _Line:
    """One direction of a link: who may send when. Times are the event loop's seconds."""

    seconds_per_byte: float
    delay_seconds: float
    free_at: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def book(self, num_bytes: int) -> float:
        """Wait for a turn on the line and return when the last of `num_bytes` will have arrived."""
        loop = asyncio.get_running_loop()
        async with self.turn:
            ahead = self.free_at - loop.time() - _LINE_QUEUE_SECONDS
            if ahead > 0:
                await asyncio.sleep(ahead)
            self.free_at = max(self.free_at, loop.time()) + num_bytes * self.seconds_per_byte
            return self.free_at + self.delay_seconds


@dataclass(slots=True)
class _Counter:
    """Bytes of one service in one direction."""

    num_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Service:
    """A relayed service: where it really is, where the link offers it, and what went through."""

    target: str
    port: int = 0
    down: _Counter = field(default_factory=_Counter)
    up: _Counter = field(default_factory=_Counter)


class WanLink:
    """The link of one region; `start` and `stop` it, or use it as a context manager. Thread-safe once started."""

    def __init__(
        self, *, region: str, round_trip: timedelta, bits_per_second: float, services: Mapping[str, str]
    ) -> None:
        """Describe a link to `services`, which maps each service's name to its real `host:port`.

        Raises:
            ConfigError: an address, the round trip or the rate makes no sense.
        """
        if round_trip < timedelta() or round_trip > timedelta(seconds=10):
            raise ConfigError(f"link {region}: round trip {round_trip} must be between 0 and 10 s")
        if not bits_per_second >= 1e4:
            raise ConfigError(f"link {region}: rate {bits_per_second} bit/s must be at least 10,000")
        for target in services.values():
            check_address(target)
        self.region = region
        self._round_trip_seconds = round_trip.total_seconds()
        self._bytes_per_second = bits_per_second / 8
        self._services = {name: _Service(target=target) for name, target in services.items()}
        self._flowing: asyncio.Event | None = None
        self._cut = False
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen on one loopback port a service; on return `address` is valid.

        Raises:
            ConfigError: a port could not be bound.
        """
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"wan-{self.region}", daemon=True)
        self._thread.start()
        try:
            ready.result(timeout=_START_DEADLINE.total_seconds())
        except OSError as error:
            raise ConfigError(f"link {self.region} cannot listen on loopback: {error}") from error

    def stop(self) -> None:
        """Cut all connections, close the ports and end the thread; stopping twice is no error.

        Raises:
            DeadlineExceededError: the thread did not end in time.
        """
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_DEADLINE.total_seconds())
        if self._thread.is_alive():
            raise DeadlineExceededError(f"link {self.region} did not stop within {_STOP_DEADLINE}")
        self._thread = None

    def __enter__(self) -> WanLink:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def address(self, service: str) -> str:
        """Return the `host:port` at which the region reaches a service."""
        return f"127.0.0.1:{self._services[service].port}"

    def counts(self) -> Mapping[str, LinkCount]:
        """Return the bytes that entered the link so far, by service."""
        return {
            name: LinkCount(down_bytes=service.down.num_bytes, up_bytes=service.up.num_bytes)
            for name, service in self._services.items()
        }

    def pause(self) -> None:
        """Stop reading from every connection; connections stay open, bytes on the line still arrive."""
        self._call(lambda: self._flow(False))

    def partition(self) -> None:
        """Cut every connection and refuse new ones."""
        self._call(self._partition)

    def resume(self) -> None:
        """End a pause or a partition."""
        self._call(lambda: self._flow(True))

    def _call(self, action: Callable[[], None]) -> None:
        if self._loop is None or self._thread is None:
            raise ConfigError(f"link {self.region} is not running; start it first")
        done: Future[None] = Future()

        def act() -> None:
            action()
            done.set_result(None)

        self._loop.call_soon_threadsafe(act)
        done.result(timeout=_START_DEADLINE.total_seconds())

    def _flow(self, flowing: bool) -> None:
        assert self._flowing is not None
        if flowing:
            self._cut = False
            self._flowing.set()
        else:
            self._flowing.clear()

    def _partition(self) -> None:
        self._cut = True
        for connection in self._connections:
            connection.cancel()

    def _run(self, ready: Future[None]) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        up, down = (
            _Line(seconds_per_byte=1 / self._bytes_per_second, delay_seconds=self._round_trip_seconds / 2)
            for _ in range(2)
        )
        servers: list[asyncio.Server] = []
        try:
            for service in self._services.values():

                def accept(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: _Service = service
                ) -> None:
                    task = asyncio.ensure_future(self._relay(service, reader, writer, up, down))
                    self._connections.add(task)
                    task.add_done_callback(self._connections.discard)

                server = await asyncio.start_server(accept, "127.0.0.1", service.port, limit=_TURN_BYTES)
                servers.append(server)
                service.port = server.sockets[0].getsockname()[1]
        except OSError as error:
            for server in servers:
                server.close()
            ready.set_exception(error)
            return
        ready.set_result(None)
        await self._stopping.wait()
        for server in servers:
            server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _relay(
        self,
        service: _Service,
        client_reader: asyncio.StreamReader,
        client_writer: asyncio.StreamWriter,
        up: _Line,
        down: _Line,
    ) -> None:
        """Carry one connection until both directions have ended, or either breaks."""
        server_writer: asyncio.StreamWriter | None = None
        try:
            if self._cut:
                return
            host, _, port = service.target.rpartition(":")
            server_reader, server_writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_TURN_BYTES)
            await asyncio.sleep(self._round_trip_seconds)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(service.up, client_reader, server_writer, up))
                both.create_task(self._carry(service.down, server_reader, client_writer, down))
            client_writer.close()
            server_writer.close()
        except* OSError as errors:
            logger.debug("link %s: connection to %s ended: %s", self.region, service.target, errors.exceptions[0])
        finally:
            for writer in (client_writer, server_writer):
                if writer is not None and not writer.is_closing():
                    writer.transport.abort()

    async def _carry(
        self,
        counter: _Counter,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: _Line,
    ) -> None:
        """Carry one direction of one connection: read, book the line, and deliver when it has arrived."""
        capacity = int(self._bytes_per_second * line.delay_seconds) + _SLACK_BYTES
        window = _Window(capacity)
        arrivals: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            assert self._flowing is not None
            while True:
                await self._flowing.wait()
                data = await reader.read(_TURN_BYTES)
                await self._flowing.wait()
                await window.take(len(data))
                arrives_at = await line.book(len(data))
                counter.num_bytes += len(data)
                arrivals.put_nowait((arrives_at, data))
                if not data:
                    return

        async def deliver() -> None:
            loop = asyncio.get_running_loop()
            while True:
                arrives_at, data = await arrivals.get()
                await asyncio.sleep(max(0.0, arrives_at - loop.time()))
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
                window.give(len(data))

        async with asyncio.TaskGroup() as pair:
            pair.create_task(send())
            pair.create_task(deliver())


class _Window:
    """Bytes that may be on their way at once; `take` waits until there is room, a full window admits one piece."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._waiting: asyncio.Future[None] | None = None

    async def take(self, num_bytes: int) -> None:
        while self._used_bytes and self._used_bytes + num_bytes > self._capacity_bytes:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._used_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
