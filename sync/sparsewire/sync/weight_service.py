"""Serves the versions of one run from its store to subscribers in other regions.

Runs beside the learner. Byte ranges are read from the store and streamed in messages of 1 MiB; nothing is decoded
and nothing is kept but one message a stream, so a slow peer costs its own stream and no more.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator

import grpc
from prometheus_client import Counter, Gauge

from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.errors import LimitExceededError, NotFoundError, StoreError
from sparsewire.sync.history import History
from sparsewire.sync.manifest import kind_from_wire, kind_to_wire
from sparsewire.sync.rpc import MESSAGE_BYTES
from sparsewire.sync.store.base import Store
from sparsewire.v1 import weights_pb2, weights_pb2_grpc

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_READER_SECONDS = 60.0
"""A watching subscriber's version stays protected this long after its stream ends."""
_MAX_READ_BYTES = 1 << 30
_PACK_KEY = re.compile(r"packs/[0-9]{12}/[A-Za-z0-9._-]{1,200}\.pack")

_SENT_BYTES = Counter("sparsewire_weight_service_sent_bytes_total", "Bytes of packs and manifests sent.", ["kind"])
_WATCHERS = Gauge("sparsewire_weight_service_watchers", "Subscribers with an open watch stream.")


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Implements `WeightService` over a run's history."""

    def __init__(self, *, store: Store, run: str) -> None:
        self._history = History(store=store, run=run)
        self._run = run
        self._wake = threading.Condition()

    def register(self, server: grpc.Server) -> None:
        """Add the RPC handlers to `server`."""
        weights_pb2_grpc.add_WeightServiceServicer_to_server(self, server)

    def announce(self) -> None:
        """Say that a version was committed just now, so that watchers need not wait for the next look at the store."""
        with self._wake:
            self._wake.notify_all()

    def ListLinks(
        self, request: weights_pb2.ListLinksRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ListLinksResponse:
        self._check_run(request.run)
        after = request.after_version if request.HasField("after_version") else None
        links = [
            weights_pb2.Link(
                kind=kind_to_wire(link.kind),
                base_version=link.base_version or 0,
                version=link.version,
                num_bytes=link.num_bytes,
                predicted=link.predicted,
            )
            for link in self._history.links(after=after)
        ]
        return weights_pb2.ListLinksResponse(links=links)

    def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.GetManifestResponse:
        self._check_run(request.run)
        kind = kind_from_wire(request.kind, where="request")
        base = request.base_version if kind is LinkKind.DELTA else None
        sealed = self._history.sealed(Link(kind=kind, base_version=base, version=request.version, num_bytes=0))
        _SENT_BYTES.labels("manifest").inc(len(sealed))
        return weights_pb2.GetManifestResponse(sealed=sealed)

    def GetSchema(
        self, request: weights_pb2.GetSchemaRequest, context: grpc.ServicerContext
    ) -> weights_pb2.GetSchemaResponse:
        self._check_run(request.run)
        if len(request.schema_sha256) != 32:
            raise NotFoundError(f"a schema hash has 32 bytes, not {len(request.schema_sha256)}")
        return weights_pb2.GetSchemaResponse(schema=self._history.schema(request.schema_sha256))

    def ReadPack(
        self, request: weights_pb2.ReadPackRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.ReadPackResponse]:
        self._check_run(request.run)
        if not _PACK_KEY.fullmatch(request.pack_key):
            raise NotFoundError(f"{request.pack_key[:100]!r} is not the key of a pack")
        if request.length > _MAX_READ_BYTES:
            raise LimitExceededError(f"a read has at most {_MAX_READ_BYTES} bytes, not {request.length}")
        end = request.offset + request.length
        for at in range(request.offset, end, MESSAGE_BYTES):
            data = self._history.read_pack(request.pack_key, at, min(MESSAGE_BYTES, end - at))
            _SENT_BYTES.labels("pack").inc(len(data))
            yield weights_pb2.ReadPackResponse(data=data)

    def Watch(
        self, request: weights_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.WatchResponse]:
        self._check_run(request.run)
        held = request.held_version if request.HasField("held_version") else None
        reader = _Reader(self._history, held)
        _WATCHERS.inc()
        try:
            head = self._history.head(after=held)
            yield weights_pb2.WatchResponse(head_version=head)
            while context.is_active():
                reader.renew()
                with self._wake:
                    self._wake.wait(_POLL_SECONDS)
                newest = self._history.head(after=head)
                if newest != head:
                    head = newest
                    yield weights_pb2.WatchResponse(head_version=head)
        finally:
            _WATCHERS.dec()

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise NotFoundError(f"run {run[:128]!r} is not served here; this learner serves {self._run!r}")


class _Reader:
    """Notes a watching subscriber's version in the store, and renews the note while the stream is open."""

    def __init__(self, history: History, held: int | None) -> None:
        self._history = history
        self._held = held
        self._name = f"watch-{uuid.uuid4().hex}"
        self._renew_at = 0.0

    def renew(self) -> None:
        if self._held is None or time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + _READER_SECONDS / 2
        try:
            self._history.put_reader(self._name, version=self._held, expires_unix_seconds=time.time() + _READER_SECONDS)
        except StoreError as error:
            logger.warning("note of a watching subscriber not renewed: %s", error)
