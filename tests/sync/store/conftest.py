"""Stores of every kind under one contract, and an S3 server that misbehaves on demand."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from sparsewire.sync.store import Store, forget_memory_store, open_store


@pytest.fixture(params=["memory", "directory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store, of each kind in turn."""
    match request.param:
        case "memory":
            name = f"t{uuid.uuid4().hex}"
            yield f"memory://{name}/some/prefix"
            forget_memory_store(name)
        case "directory":
            yield f"file://{tmp_path}/store"
        case _:
            yield request.getfixturevalue("s3_url")


@pytest.fixture
def open_another(store_url: str) -> Iterator[Callable[[], Store]]:
    """Return a function that opens the same store once more, as another process would."""
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(open_store(store_url))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An empty store, of each kind in turn."""
    store = open_store(store_url, writable=True)
    yield store
    store.close()


class FaultKind(StrEnum):
    """What goes wrong with a request."""

    REFUSE = "refuse"
    """Answered with an error; nothing is done."""
    LOSE_REPLY = "lose_reply"
    """Done, but the connection is closed before the answer."""
    TRUNCATE = "truncate"
    """Half of the announced body is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one request fails."""

    method: str
    kind: FaultKind
    status: int
    code: str


@dataclass(slots=True)
class _Object:
    data: bytes
    token: str | None

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass(slots=True)
class FaultyS3:
    """A small S3 server in this process: Amazon's listing order, small pages, faults from a script."""

    endpoint_url: str = ""
    ignores_conditions: bool = False
    drops_metadata: bool = False
    page_keys: int = 3
    faults: deque[Fault] = field(default_factory=deque)
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, tuple[str | None, dict[int, bytes]]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    before_next_answer: Callable[[], None] | None = None
    """Called once when a request has been carried out and before it is answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, prefix: str = "run") -> str:
        """Return the store URL of a prefix."""
        return f"s3://faulty/{prefix}?endpoint_url={self.endpoint_url}"

    def fail(self, method: str, kind: str, *, times: int = 1, status: int = 503, code: str = "SlowDown") -> None:
        """Let the next `times` requests with this method fail; other methods pass in between."""
        self.faults.extend([Fault(method=method, kind=FaultKind(kind), status=status, code=code)] * times)

    def next_fault(self, method: str) -> Fault | None:
        """Take the next fault if it is for this method."""
        with self.lock:
            return self.faults.popleft() if self.faults and self.faults[0].method == method else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    disable_nagle_algorithm = True
    state: ClassVar[FaultyS3]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep test output clean."""

    def handle_one(self) -> None:
        state = self.state
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        state.requests.append((self.command, key))
        fault = state.next_fault(self.command)
        if fault and fault.kind is FaultKind.REFUSE:
            self.answer_error(fault.status, fault.code)
            return
        if fault and fault.kind is FaultKind.LOSE_REPLY:
            self.wfile = open("/dev/null", "wb")  # noqa: SIM115, PTH123 - closed by the handler
            self.close_connection = True
        match self.command:
            case "PUT" if "partNumber" in query:
                state.uploads[query["uploadId"]][1][int(query["partNumber"])] = body
                self.answer(200, b"", ETag=f'"{len(body)}"')
            case "PUT":
                self.put(key, body)
            case "GET" if "list-type" in query:
                self.list(query)
            case "GET" | "HEAD":
                self.get(key, truncate=fault is not None)
            case "DELETE" if "uploadId" in query:
                state.uploads.pop(query["uploadId"], None)
                self.answer(204, b"")
            case "DELETE":
                state.objects.pop(key, None)
                self.answer(204, b"")
            case _:
                self.upload(key, query)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815

    def put(self, key: str, body: bytes) -> None:
        state = self.state
        with state.lock:
            found = state.objects.get(key)
            if not state.ignores_conditions:
                if_match = self.headers.get("If-Match")
                if (self.headers.get("If-None-Match") == "*" and found) or (
                    if_match and (found is None or found.etag != if_match)
                ):
                    self.answer_error(412, "PreconditionFailed")
                    return
            token = None if state.drops_metadata else self.headers.get("x-amz-meta-sparsewire-write")
            stored = state.objects[key] = _Object(body, token)
        self.answer(200, b"", ETag=stored.etag)

    def get(self, key: str, *, truncate: bool) -> None:
        found = self.state.objects.get(key)
        if found is None:
            self.answer_error(404, "NoSuchKey")
            return
        headers = {"ETag": found.etag} | ({"x-amz-meta-sparsewire-write": found.token} if found.token else {})
        if_match = self.headers.get("If-Match")
        if if_match and if_match != found.etag:
            self.answer_error(412, "PreconditionFailed")
            return
        data, status = found.data, 200
        if wanted := self.headers.get("Range"):
            first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            data, status = found.data[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{len(found.data)}"
        self.answer(status, data, truncate=truncate, **headers)

    def list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(key for key in self.state.objects if key.startswith(query["prefix"]) and key > after)
        page = keys[: self.state.page_keys]
        entries = "".join(
            f"<Contents><Key>{quote(key)}</Key><Size>{len(self.state.objects[key].data)}</Size>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for key in page
        )
        is_cut = len(keys) > len(page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if is_cut else ""
        self.answer(
            200,
            f"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{entries}{token}</ListBucketResult>".encode(),
        )

    def upload(self, key: str, query: dict[str, str]) -> None:
        if "uploads" in query:
            upload_id = uuid.uuid4().hex
            self.state.uploads[upload_id] = (self.headers.get("x-amz-meta-sparsewire-write"), {})
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
            return
        found = self.state.uploads.pop(query["uploadId"], None)
        if found is None:
            self.answer_error(404, "NoSuchUpload")
            return
        token, uploaded = found
        self.state.objects[key] = _Object(b"".join(uploaded[number] for number in sorted(uploaded)), token)
        self.answer(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def answer(self, status: int, body: bytes, *, truncate: bool = False, **headers: str) -> None:
        action, self.state.before_next_answer = self.state.before_next_answer, None
        if action:
            action()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if truncate:
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode())


@pytest.fixture
def faulty_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A misbehaving S3 server on a free port, and credentials for it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    state = FaultyS3()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)
