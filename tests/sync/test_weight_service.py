"""A learner serves its directory store over gRPC; subscribers elsewhere follow it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest

from sparsewire.sync import Publisher, Subscriber
from sparsewire.sync.errors import (
    ConfigError,
    DeadlineExceededError,
    NotFoundError,
    ProtocolMismatchError,
    StoreUnavailableError,
)
from sparsewire.sync.history import History
from sparsewire.sync.rpc import Server, open_channel, peer_errors, start_server, translate
from sparsewire.sync.store.open import open_store
from sparsewire.sync.weight_service import WeightServicer
from sparsewire.v1 import manifest_pb2, weights_pb2, weights_pb2_grpc

MakeView = Callable[[int], dict[str, Any]]
Change = Callable[..., dict[str, Any]]
SameBits = Callable[[Any, dict[str, Any]], None]


@pytest.fixture
def server(directory_url: str) -> Iterator[Server]:
    """A weight service for run r1 over the directory store."""
    with start_server("127.0.0.1:0", services=[WeightServicer(store=open_store(directory_url), run="r1")]) as server:
        yield server


def test_versions_cross_grpc_bit_for_bit_as_they_are_committed(
    server: Server, directory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with (
        Publisher.open(directory_url, run="r1") as publisher,
        Subscriber.open(f"grpc://127.0.0.1:{server.port}", run="r1") as subscriber,
    ):
        assert not subscriber.wait_for_newer(timeout=timedelta(seconds=0.3))
        for version in range(5):
            publisher.publish(view)
            assert subscriber.wait_for_newer(timeout=timedelta(seconds=10))
            assert subscriber.sync() == version
            assert_same_bits(subscriber.tensors(), view)
            view = change(view, version)
        deadline = time.monotonic() + 10
        history = History(store=open_store(directory_url), run="r1")
        while 4 not in history.readers(now_unix_seconds=time.time()):
            assert time.monotonic() < deadline, "the watch stream holds the subscriber's version against pruning"
            time.sleep(0.05)


def test_a_foreign_run_is_refused_by_name(server: Server) -> None:
    with (
        Subscriber.open(f"grpc://127.0.0.1:{server.port}", run="other") as subscriber,
        pytest.raises(NotFoundError, match="run 'other' is not served here; this learner serves 'r1'"),
    ):
        subscriber.sync()


def test_a_server_that_is_away_is_waited_for_and_found_again(
    directory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    view = make_view(0)
    store = open_store(directory_url)
    with (
        Publisher.open(directory_url, run="r1") as publisher,
        Subscriber.open(f"grpc://127.0.0.1:{port}", run="r1") as subscriber,
    ):
        publisher.publish(view)
        with pytest.raises((StoreUnavailableError, DeadlineExceededError), match=str(port)):
            subscriber.sync(deadline=1.0)
        with start_server(f"127.0.0.1:{port}", services=[WeightServicer(store=store, run="r1")]):
            assert subscriber.wait_for_newer(timeout=timedelta(seconds=20))
            assert subscriber.sync() == 0
        view = change(view, 1)
        publisher.publish(view)
        with start_server(f"127.0.0.1:{port}", services=[WeightServicer(store=store, run="r1")]):
            assert subscriber.wait_for_newer(timeout=timedelta(seconds=20))
            assert subscriber.sync() == 1
            assert_same_bits(subscriber.tensors(), view)


def test_another_protocol_number_is_refused_naming_both_builds(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        metadata = (("sparsewire-protocol", "999"), ("sparsewire-build", "sparsewire/9.9"))
        calls: list[Callable[[], object]] = [
            lambda: stub.ListLinks(weights_pb2.ListLinksRequest(run="r1"), metadata=metadata, timeout=5),
            lambda: list(stub.Watch(weights_pb2.WatchRequest(run="r1"), metadata=metadata, timeout=5)),
            lambda: list(stub.ReadPack(weights_pb2.ReadPackRequest(run="r1"), metadata=metadata, timeout=5)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            error = translate(caught.value, "peer", "call")
            assert isinstance(error, ProtocolMismatchError)
            assert "sparsewire/9.9 speaks protocol 999" in str(error)
            assert "with protocol 1" in str(error)


def test_hostile_requests_are_refused(server: Server, directory_url: str, make_view: MakeView) -> None:
    with Publisher.open(directory_url, run="r1") as publisher:
        pack = publisher.publish(make_view(0)).packs[0]
    with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        for key in ("../../etc/passwd", "epoch.json", "packs/000000000000/../../epoch.json", "", "x" * 10_000):
            with pytest.raises(NotFoundError, match="not the key of a pack"), peer_errors("peer", "read"):
                list(stub.ReadPack(weights_pb2.ReadPackRequest(run="r1", pack_key=key, length=10), timeout=5))
        for offset, length in ((pack.num_bytes, 1), (0, pack.num_bytes + 1), (1 << 62, 5), (0, 1 << 62)):
            with pytest.raises(Exception, match="peer"), peer_errors("peer", "read"):
                list(
                    stub.ReadPack(
                        weights_pb2.ReadPackRequest(run="r1", pack_key=pack.key, offset=offset, length=length),
                        timeout=5,
                    )
                )
        with pytest.raises(NotFoundError), peer_errors("peer", "schema"):
            stub.GetSchema(weights_pb2.GetSchemaRequest(run="r1", schema_sha256=b"x"), timeout=5)
        with pytest.raises(NotFoundError), peer_errors("peer", "manifest"):
            stub.GetManifest(
                weights_pb2.GetManifestRequest(
                    run="r1", kind=manifest_pb2.MANIFEST_KIND_DELTA, base_version=3, version=4
                ),
                timeout=5,
            )


def test_many_watchers_are_told_of_a_commit(server: Server, directory_url: str, make_view: MakeView) -> None:
    seen: list[int] = []

    def follow() -> None:
        with Subscriber.open(f"grpc://127.0.0.1:{server.port}", run="r1") as subscriber:
            if subscriber.wait_for_newer(timeout=timedelta(seconds=20)):
                seen.append(subscriber.sync())

    threads = [threading.Thread(target=follow) for _ in range(6)]
    for thread in threads:
        thread.start()
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
    for thread in threads:
        thread.join(30)
    assert seen == [0] * 6


def test_addresses_are_checked() -> None:
    for address in ("", "localhost", "localhost:", "localhost:http", "http://localhost:1", "user@host:1", "h:99999"):
        with pytest.raises(ConfigError, match="host:port"):
            open_channel(address)
    with start_server("127.0.0.1:0", services=[]) as server, pytest.raises(ConfigError, match="cannot listen"):
        start_server(f"127.0.0.1:{server.port}", services=[])
