"""What the trajectory tests share: made-up but valid trajectories, an open ledger, and a TCP link that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from sparsewire.sync.trajectories import (
    FinishReason,
    Lease,
    LedgerSettings,
    SamplingParams,
    Trajectory,
    TrajectoryKey,
    TrajectoryLedger,
    VersionSpan,
)

RUN = "r1"


def _complete(
    lease: Lease, sample: int, *, versions: tuple[int, ...] = (0,), num_tokens: int = 6, run: str = RUN
) -> Trajectory:
    rng = np.random.default_rng([lease.group, sample, lease.attempt])
    edges = np.linspace(0, num_tokens, len(versions) + 1).astype(int).tolist()
    return Trajectory(
        run=run,
        key=TrajectoryKey(group=lease.group, sample=sample, attempt=lease.attempt),
        task=lease.task,
        item=lease.item,
        worker_id="w1",
        region="eu",
        prompt_token_ids=rng.integers(0, 50_000, 5).astype(np.int32),
        completion_token_ids=rng.integers(0, 50_000, num_tokens).astype(np.int32),
        logprobs=-rng.random(num_tokens).astype(np.float32),
        spans=tuple(
            VersionSpan(version=version, start=start, stop=stop)
            for version, start, stop in zip(versions, edges[:-1], edges[1:], strict=True)
        ),
        reward=float(rng.random()),
        finish_reason=FinishReason.STOP,
        created_unix_seconds=1.7e9,
    )


@pytest.fixture
def complete() -> Callable[..., Trajectory]:
    """Makes the trajectory of one sample of a lease; the same arguments give the same trajectory."""
    return _complete


@pytest.fixture
def settings() -> Callable[..., LedgerSettings]:
    """Makes ledger settings: groups of two samples, eight groups open at most."""

    def make(
        *,
        run: str = RUN,
        samples_per_group: int = 2,
        max_staleness: int = 2,
        max_open_groups: int = 8,
        lease_duration: timedelta = timedelta(seconds=60),
        max_trajectory_bytes: int = 16 << 20,
        seed: int = 7,
    ) -> LedgerSettings:
        return LedgerSettings(
            run=run,
            task="addition",
            samples_per_group=samples_per_group,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=12),
            max_staleness=max_staleness,
            max_open_groups=max_open_groups,
            seed=seed,
            num_items=1000,
            lease_duration=lease_duration,
            max_trajectory_bytes=max_trajectory_bytes,
        )

    return make


@pytest.fixture
def ledger(tmp_path: Path, settings: Callable[..., LedgerSettings]) -> Iterator[TrajectoryLedger]:
    """An open ledger with the default settings and the real clock."""
    with TrajectoryLedger(path=tmp_path / "ledger.sqlite3", settings=settings()) as opened:
        yield opened


class CuttableLink:
    """A TCP relay to 127.0.0.1:`target_port` that can lose the server's answers or everything.

    Each new connection takes the next number from `server_byte_budgets`: after so many bytes from the server the
    relay closes both sides, so that what the server did is done but never heard of. With no number left it relays all.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.server_byte_budgets: list[int] = []
        self.num_cut = 0
        self.is_down = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def take_down(self) -> None:
        """Cut every connection and refuse new ones until `is_down` is reset."""
        self.is_down = True
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.take_down()
        for thread in self._threads:
            thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.is_down:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self.target_port), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                budget = self.server_byte_budgets.pop(0) if self.server_byte_budgets else None
                self._sockets |= {client, server}
            for source, sink, limit in ((client, server, None), (server, client, budget)):
                thread = threading.Thread(target=self._pump, args=(source, sink, limit), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                num_bytes += len(data)
                if budget is not None and num_bytes > budget:
                    self.num_cut += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            known = source in self._sockets
            self._sockets.discard(source)
        if known:
            source.close()


@pytest.fixture
def open_link() -> Iterator[Callable[[int], CuttableLink]]:
    """Opens links to local ports and closes them when the test ends."""
    links: list[CuttableLink] = []

    def make(target_port: int) -> CuttableLink:
        links.append(CuttableLink(target_port))
        return links[-1]

    yield make
    for link in links:
        link.close()
