"""gRPC in one place: channel and server options, the protocol handshake, and errors to status and back.

Used by the weight and trajectory services and their clients, from any thread (the synchronous API: on two cores it
moved 2 GB/s at 1 MiB messages where grpc.aio moved 0.5). Every call carries this build's protocol number and name in
its metadata; the server refuses another number before the handler runs, and names both builds.

Known limit: transport is plaintext; bind servers to loopback or a private network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sparsewire.sync import errors
from sparsewire.sync.build import PROTOCOL_NUMBER, build_name
from sparsewire.sync.errors import ConfigError, ProtocolMismatchError, SparsewireError, StoreUnavailableError

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Payload bytes per stream message: below the stock 4 MiB limit at every hop, large enough that Python's cost a message vanishes."""

UNARY_DEADLINE = timedelta(seconds=20)
"""Deadline of every unary call."""

MAX_SERVER_THREADS = 128
"""Bound on calls in progress; a Watch stream holds one for as long as it is open."""

_PROTOCOL_KEY = "sparsewire-protocol"
_BUILD_KEY = "sparsewire-build"
_ERROR_KEY = "sparsewire-error"

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 0),
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)

_STATUS: dict[type[SparsewireError], grpc.StatusCode] = {
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.VersionUnavailableError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.PreconditionFailedError: grpc.StatusCode.ABORTED,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.ProtocolMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SchemaMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongBaseError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DamagedError: grpc.StatusCode.DATA_LOSS,
    errors.DigestMismatchError: grpc.StatusCode.DATA_LOSS,
    errors.UnsupportedFormatError: grpc.StatusCode.UNIMPLEMENTED,
    errors.StoreAccessError: grpc.StatusCode.PERMISSION_DENIED,
    errors.StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.LimitExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
}
_BY_NAME = {kind.__name__: kind for kind in _STATUS}


class Service(Protocol):
    """A servicer that can add itself to a server."""

    def register(self, server: grpc.Server) -> None:
        """Add the RPC handlers to `server`."""
        ...


def open_channel(address: str, *, lane: int = 0) -> grpc.Channel:
    """Open a lazy channel to `host:port`; channels of different `lane` never share a TCP connection.

    Raises:
        ConfigError: the address is not `host:port`.
    """
    check_address(address)
    options = (*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("sparsewire.lane", lane))
    channel = grpc.insecure_channel(address, options=options)
    return grpc.intercept_channel(channel, _HandshakeClient())


def check_address(address: str) -> None:
    """Refuse anything that is not `host:port`.

    Raises:
        ConfigError: with an example of what is wanted.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdigit() or not 0 <= int(port) <= 65535 or "/" in host or "@" in host:
        raise ConfigError(f"address {address!r} is not host:port; write for example 127.0.0.1:7070")


@contextmanager
def peer_errors(address: str, what: str) -> Iterator[None]:
    """Turn grpc errors raised inside the block into this package's, naming the peer and the operation."""
    try:
        yield
    except grpc.RpcError as error:
        raise translate(error, address, what) from error


def translate(error: grpc.RpcError, address: str, what: str) -> SparsewireError:
    """Return the error of this package that the peer raised, or the nearest one for a transport failure."""
    if not isinstance(error, grpc.Call):
        return StoreUnavailableError(f"{what} at {address} failed: {error}")
    details = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == _ERROR_KEY and (kind := _BY_NAME.get(str(value))):
            return kind(f"{what} at {address}: {details}")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceededError(f"{what} at {address} did not finish in time: {details}")
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.LimitExceededError(f"{what} at {address}: {details}")
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolMismatchError(f"{what} at {address}: the peer does not serve this call ({details})")
    return StoreUnavailableError(f"{what} at {address} failed ({error.code().name}): {details}")


class Server:
    """A running gRPC server with the health service; stop it or use it as a context manager."""

    def __init__(self, server: grpc.Server, health_servicer: health.HealthServicer, port: int) -> None:
        self._server = server
        self._health = health_servicer
        self.port = port
        """The bound TCP port; differs from the one asked for when that was 0."""

    def stop(self, *, grace: timedelta = timedelta(seconds=2)) -> None:
        """Refuse new calls, wait up to `grace` for those in progress, then end them; returns when all have ended."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace.total_seconds()).wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_server(address: str, *, services: Sequence[Service]) -> Server:
    """Bind `host:port` (port 0 for any), serve `services` and the health service, and return at once.

    Raises:
        ConfigError: the address is malformed or cannot be bound.
    """
    check_address(address)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=MAX_SERVER_THREADS, thread_name_prefix="grpc"),
        interceptors=[_HandshakeServer()],
        options=_SERVER_OPTIONS,
    )
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for service in services:
        service.register(server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; is the port taken?") from error
    if not address.startswith(("127.", "localhost:", "[::1]:")):
        logger.warning(
            "serving plaintext gRPC on %s: anyone who can reach it can read weights and send trajectories", address
        )
    server.start()
    health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    return Server(server, health_servicer, port)


class _HandshakeClient(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds this build's protocol number and name to every call."""

    def _with_metadata(self, details: Any) -> Any:
        metadata = [*(details.metadata or ()), (_PROTOCOL_KEY, str(PROTOCOL_NUMBER)), (_BUILD_KEY, build_name())]
        return _CallDetails(details, metadata)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_metadata(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_metadata(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_metadata(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_metadata(client_call_details), request_iterator)


class _CallDetails(grpc.ClientCallDetails):
    """Call details with other metadata."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = tuple(metadata)
        self.credentials = details.credentials
        self.wait_for_ready = getattr(details, "wait_for_ready", None)
        self.compression = getattr(details, "compression", None)


class _HandshakeServer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses peers of another protocol number and turns this package's errors into status codes."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc.health."):
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        refusal = _refusal(metadata)
        if handler.response_streaming:
            wrapped = _stream_behaviour(handler.unary_stream or handler.stream_stream, refusal)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrapped = _unary_behaviour(handler.unary_unary or handler.stream_unary, refusal)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(
            wrapped, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


def _refusal(metadata: dict[str, Any]) -> ProtocolMismatchError | None:
    theirs = str(metadata.get(_PROTOCOL_KEY, "none"))
    if theirs == str(PROTOCOL_NUMBER):
        return None
    build = str(metadata.get(_BUILD_KEY, "an unknown build"))[:200]
    return ProtocolMismatchError(
        f"{build} speaks protocol {theirs[:20]}, this is {build_name()} with protocol {PROTOCOL_NUMBER}: "
        "install builds with equal protocol numbers on both sides"
    )


def _abort(context: grpc.ServicerContext, error: SparsewireError) -> None:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)
    name = next((kind.__name__ for kind in _STATUS if isinstance(error, kind)), "SparsewireError")
    context.set_trailing_metadata(((_ERROR_KEY, name),))
    context.abort(code, str(error))


def _unary_behaviour(
    behaviour: Callable[[Any, Any], Any], refusal: SparsewireError | None
) -> Callable[[Any, Any], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            if refusal:
                raise refusal
            return behaviour(request, context)
        except SparsewireError as error:
            _abort(context, error)

    return handle


def _stream_behaviour(
    behaviour: Callable[[Any, Any], Any], refusal: SparsewireError | None
) -> Callable[[Any, Any], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            if refusal:
                raise refusal
            yield from behaviour(request, context)
        except SparsewireError as error:
            _abort(context, error)

    return handle
