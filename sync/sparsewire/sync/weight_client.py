"""A source that asks a `WeightService`: what a subscriber in another region uses as `grpc://host:port`.

Known limit: one connection a client; several in parallel are not opened yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import grpc

from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.errors import DamagedError, DeadlineExceededError, SparsewireError, StoreUnavailableError
from sparsewire.sync.manifest import kind_from_wire, kind_to_wire
from sparsewire.sync.rpc import UNARY_DEADLINE, open_channel, peer_errors, translate
from sparsewire.v1 import weights_pb2, weights_pb2_grpc

logger = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_SECOND = 100_000
"""A read gets this long for its bytes on top of the unary deadline before the link counts as dead."""
_RECONNECT_SECONDS = 1.0


class WeightClient:
    """Reads a run from a learner or relay; a background stream tells it of new versions. Thread-safe."""

    def __init__(self, *, address: str, run: str) -> None:
        self._address = address
        self._run = run
        self._channel = open_channel(address)
        self._stub = weights_pb2_grpc.WeightServiceStub(self._channel)
        self._condition = threading.Condition()
        self._head: int | None = None
        self._held: int | None = None
        self._failure: SparsewireError | None = None
        self._closed = False
        self._watcher: threading.Thread | None = None
        self._stream: grpc.Call | None = None

    @property
    def url(self) -> str:
        return f"grpc://{self._address}"

    def links(self, *, after: int | None) -> Sequence[Link]:
        request = weights_pb2.ListLinksRequest(run=self._run, after_version=after)
        with peer_errors(self._address, "listing versions"):
            response = self._stub.ListLinks(request, timeout=UNARY_DEADLINE.total_seconds())
        return [
            Link(
                kind=(kind := kind_from_wire(link.kind, where=self.url)),
                base_version=link.base_version if kind is LinkKind.DELTA else None,
                version=link.version,
                num_bytes=link.num_bytes,
                predicted=link.predicted,
            )
            for link in response.links
        ]

    def sealed(self, link: Link) -> bytes:
        request = weights_pb2.GetManifestRequest(
            run=self._run, kind=kind_to_wire(link.kind), base_version=link.base_version or 0, version=link.version
        )
        with peer_errors(self._address, f"manifest of version {link.version}"):
            return self._stub.GetManifest(request, timeout=UNARY_DEADLINE.total_seconds()).sealed

    def schema(self, sha256: bytes) -> bytes:
        request = weights_pb2.GetSchemaRequest(run=self._run, schema_sha256=sha256)
        with peer_errors(self._address, f"schema {sha256.hex()}"):
            return self._stub.GetSchema(request, timeout=UNARY_DEADLINE.total_seconds()).schema

    def read_pack(self, pack_key: str, offset: int, num_bytes: int) -> bytes:
        request = weights_pb2.ReadPackRequest(run=self._run, pack_key=pack_key, offset=offset, length=num_bytes)
        timeout = UNARY_DEADLINE.total_seconds() + num_bytes / _SLOWEST_BYTES_PER_SECOND
        data = bytearray()
        with peer_errors(self._address, f"pack {pack_key}"):
            for response in self._stub.ReadPack(request, timeout=timeout):
                if len(data) + len(response.data) > num_bytes:
                    raise DamagedError(
                        f"{self.url}: pack {pack_key} gave more than the {num_bytes} bytes asked for at {offset}"
                    )
                data += response.data
        return bytes(data)

    def wait_for_newer(self, than: int | None, *, timeout: timedelta) -> int | None:
        self._start_watching()
        deadline = time.monotonic() + timeout.total_seconds()
        with self._condition:
            while self._head is None or (than is not None and self._head <= than):
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return None
                self._condition.wait(left)
            return self._head

    def hold(self, version: int) -> None:
        """Tell the server at the next (re)connection of the watch stream, which is made anew when this changes."""
        with self._condition:
            changed, self._held = version != self._held, version
            stream = self._stream
        if changed and stream is not None:
            stream.cancel()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        with self._condition:
            self._closed = True
            stream = self._stream
            self._condition.notify_all()
        if stream is not None:
            stream.cancel()  # type: ignore[no-untyped-call]
        if self._watcher is not None:
            self._watcher.join(timeout=UNARY_DEADLINE.total_seconds())
        self._channel.close()

    def _start_watching(self) -> None:
        with self._condition:
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        while not self._closed:
            try:
                for response in self._open_stream():
                    with self._condition:
                        if response.HasField("head_version"):
                            self._head = response.head_version
                        self._condition.notify_all()
            except grpc.RpcError as error:
                if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.CANCELLED:
                    continue
                self._report(translate(error, self._address, f"watching run {self._run}"))
            with self._condition:
                if not self._closed:
                    self._condition.wait(_RECONNECT_SECONDS)

    def _report(self, failure: SparsewireError) -> None:
        """Hand a refusal to whoever waits; a passing failure of the transport is only logged, the stream comes back."""
        logger.info("%s; watching again in %g s", failure, _RECONNECT_SECONDS)
        if isinstance(failure, StoreUnavailableError | DeadlineExceededError):
            return
        with self._condition:
            self._failure = failure
            self._condition.notify_all()

    def _open_stream(self) -> Iterable[weights_pb2.WatchResponse]:
        with self._condition:
            if self._closed:
                return ()
            stream = self._stub.Watch(weights_pb2.WatchRequest(run=self._run, held_version=self._held))
            self._stream = stream
        return stream
