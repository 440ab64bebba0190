"""The emulated link delays, limits, counts and cuts real TCP connections as it says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from sparsewire.deploy.wan import LinkCount, WanLink
from sparsewire.sync.errors import ConfigError


@contextmanager
def echo_server() -> Iterator[str]:
    """Serve connections that send back all they get, and end when the client's side ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            connection.close()
        thread.join(5)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(1 << 16)
        if not part:
            break
        data += part
    return bytes(data)


def test_a_ping_takes_one_round_trip_and_the_first_one_another_for_the_connection() -> None:
    with (
        echo_server() as target,
        WanLink(
            region="eu", round_trip=timedelta(milliseconds=80), bits_per_second=1e9, services={"weights": target}
        ) as link,
        connect(link.address("weights")) as connection,
    ):
        seconds = []
        for _ in range(5):
            started = time.monotonic()
            connection.sendall(b"ping")
            assert read_exactly(connection, 4) == b"ping"
            seconds.append(time.monotonic() - started)
    assert seconds[0] >= 0.155
    assert min(seconds[1:]) >= 0.079
    assert min(seconds[1:]) < 0.12


def test_connections_of_a_link_share_its_rate_and_every_byte_is_counted_once() -> None:
    size = 1_000_003
    received: dict[str, bytes] = {}

    def exchange(name: str, address: str) -> None:
        payload = name.encode() * (size // len(name) + 1)
        with connect(address) as connection:
            sender = threading.Thread(target=connection.sendall, args=(payload[:size],), daemon=True)
            sender.start()
            received[name] = read_exactly(connection, size)
            sender.join(10)

    with (
        echo_server() as first,
        echo_server() as second,
        WanLink(
            region="ap",
            round_trip=timedelta(milliseconds=20),
            bits_per_second=16e6,
            services={"weights": first, "trajectories": second},
        ) as link,
    ):
        started = time.monotonic()
        threads = [
            threading.Thread(target=exchange, args=(name, link.address(name))) for name in ("weights", "trajectories")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        seconds = time.monotonic() - started
        counts = link.counts()
    assert all(received[name] == (name.encode() * size)[:size] for name in ("weights", "trajectories"))
    assert counts == {name: LinkCount(down_bytes=size, up_bytes=size) for name in ("weights", "trajectories")}
    assert 1.0 <= seconds < 2.5, "two times 1 MB share 2 MB/s in each direction"


def test_half_closing_a_connection_arrives_at_the_other_side_after_all_bytes() -> None:
    with (
        echo_server() as target,
        WanLink(
            region="us", round_trip=timedelta(milliseconds=2), bits_per_second=1e8, services={"weights": target}
        ) as link,
        connect(link.address("weights")) as connection,
    ):
        connection.sendall(b"x" * 300_000)
        connection.shutdown(socket.SHUT_WR)
        assert read_exactly(connection, 1 << 30) == b"x" * 300_000


def test_a_sender_is_held_back_when_the_path_is_full() -> None:
    with (
        echo_server() as target,
        WanLink(
            region="ap", round_trip=timedelta(milliseconds=100), bits_per_second=1e6, services={"weights": target}
        ) as link,
        connect(link.address("weights")) as connection,
    ):
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.sendall(b"\0" * (64 << 20))
        assert link.counts()["weights"].up_bytes < 1 << 20


def test_a_pause_holds_bytes_and_a_partition_cuts_and_refuses_until_resume() -> None:
    with (
        echo_server() as target,
        WanLink(
            region="us", round_trip=timedelta(milliseconds=2), bits_per_second=1e8, services={"weights": target}
        ) as link,
    ):
        with connect(link.address("weights")) as connection:
            connection.sendall(b"a")
            assert read_exactly(connection, 1) == b"a"
            link.pause()
            connection.sendall(b"b")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            link.resume()
            connection.settimeout(5)
            assert read_exactly(connection, 1) == b"b"
            link.partition()
            assert is_cut(connection)
        with connect(link.address("weights")) as refused:
            assert is_cut(refused)
        link.resume()
        with connect(link.address("weights")) as connection:
            connection.sendall(b"c")
            assert read_exactly(connection, 1) == b"c"


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_link_to_a_service_that_is_not_up_yet_refuses_and_works_once_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        target = f"127.0.0.1:{placeholder.getsockname()[1]}"
        placeholder.close()
        with WanLink(
            region="us", round_trip=timedelta(milliseconds=2), bits_per_second=1e8, services={"weights": target}
        ) as link:
            with connect(link.address("weights")) as connection:
                assert is_cut(connection)
            host, _, port = target.rpartition(":")
            with socket.create_server((host, int(port))) as late, connect(link.address("weights")) as connection:
                connection.sendall(b"hello")
                served, _ = late.accept()
                with served:
                    assert read_exactly(served, 5) == b"hello"


def test_stopping_a_link_ends_its_thread_and_frees_its_ports() -> None:
    with echo_server() as target:
        link = WanLink(
            region="us", round_trip=timedelta(milliseconds=2), bits_per_second=1e8, services={"weights": target}
        )
        link.start()
        address = link.address("weights")
        with connect(address) as connection:
            connection.sendall(b"x")
            assert read_exactly(connection, 1) == b"x"
            link.stop()
            assert is_cut(connection)
        assert not any(thread.name == "wan-us" for thread in threading.enumerate())
        with pytest.raises(ConnectionRefusedError):
            connect(address)
        link.stop()


@pytest.mark.parametrize(
    ("round_trip", "bits_per_second", "target"),
    [
        (timedelta(seconds=-1), 1e8, "127.0.0.1:1"),
        (timedelta(0), 0.0, "127.0.0.1:1"),
        (timedelta(0), float("nan"), "127.0.0.1:1"),
        (timedelta(0), 1e8, "nowhere"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(round_trip: timedelta, bits_per_second: float, target: str) -> None:
    with pytest.raises(ConfigError):
        WanLink(region="us", round_trip=round_trip, bits_per_second=bits_per_second, services={"weights": target})
