"""The store seam: what sparsewire needs of an object store, and nothing more.

Called by the publisher, the subscriber's source and the weight service, from any thread. Keys are relative paths
below the store's URL (`run/versions/000000000007.manifest`), made of [A-Za-z0-9._-] segments joined by `/`.
An object becomes visible whole or not at all. `etag` is an opaque token that changes whenever the bytes change.
Implementations: `memory.py`, `directory.py`, `s3.py`; `open_store` in `open.py` chooses by URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object as a listing shows it."""

    key: str
    num_bytes: int
    modified_unix_seconds: float
    """When it was last written, by the store's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object's bytes with the token for compare-and-set."""

    data: bytes
    etag: str


class ObjectWriter(Protocol):
    """Receives a large object in pieces; see `Store.write`."""

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes; memory use stays bounded whatever the total."""
        ...


class Store(Protocol):
    """An object store with conditional writes. Every call has a deadline and a retry budget of its own."""

    @property
    def url(self) -> str:
        """Where this is, for messages; carries no secret."""
        ...

    def get(self, key: str) -> StoredObject:
        """Return a small object whole.

        Raises:
            NotFoundError, StoreUnavailableError, StoreAccessError.
        """
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`.

        Raises:
            NotFoundError, StoreUnavailableError, StoreAccessError.
            DamagedError: the object ends before `offset + length`.
        """
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write an object unconditionally and return its etag."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create an object; of any number of racing callers exactly one succeeds.

        A retry after a lost reply that finds its own bytes stored counts as success.

        Raises:
            AlreadyExistsError: an object with other bytes is there.
        """
        ...

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace an object only if its etag is still `etag`; returns the new etag.

        Raises:
            PreconditionFailedError: it changed or vanished.
        """
        ...

    def write(self, key: str) -> AbstractContextManager[ObjectWriter]:
        """Write a large object in pieces; it appears when the block ends, and not at all when the block raises."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix`, in key order, above `start_after`."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        ...

    def close(self) -> None:
        """Release connections and threads; further calls are undefined."""
        ...
