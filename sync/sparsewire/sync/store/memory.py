"""A store in this process's memory: for tests, and for a publisher and subscriber that share one process.

Contents are held in a registry by name until `forget_memory_store` drops them or the process ends; every store opened
under one name sees the same objects. Etags are write counts. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sparsewire.sync.errors import AlreadyExistsError, DamagedError, NotFoundError, PreconditionFailedError
from sparsewire.sync.store.base import ObjectInfo, ObjectWriter, StoredObject
from sparsewire.sync.store.keys import check_key, check_prefix, check_range
from sparsewire.sync.store.location import MemoryLocation


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    etag: str
    modified_unix_seconds: float


@dataclass(slots=True)
class MemoryContents:
    """The objects under one name, with the lock that guards them."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    num_writes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, key: str, data: bytes) -> str:
        """Store `data` and return its etag; the caller holds the lock."""
        self.num_writes += 1
        etag = str(self.num_writes)
        self.entries[key] = _Entry(bytes(data), etag, time.time())
        return etag


_registry: dict[str, MemoryContents] = {}
_registry_lock = threading.Lock()


def open_memory_store(location: MemoryLocation) -> MemoryStore:
    """Return a store over the contents of that name, which come into being with their first opening."""
    with _registry_lock:
        contents = _registry.setdefault(location.name, MemoryContents())
    return MemoryStore(location=location, contents=contents)


def forget_memory_store(name: str) -> None:
    """Drop the contents of `memory://name`; stores that are open keep what they see."""
    with _registry_lock:
        _registry.pop(name, None)


class MemoryStore:
    """The store seam over a dictionary."""

    def __init__(self, *, location: MemoryLocation, contents: MemoryContents) -> None:
        self._location = location
        self._contents = contents
        self._base = f"{location.prefix}/" if location.prefix else ""

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._location.url

    def get(self, key: str) -> StoredObject:
        """Return an object whole."""
        entry = self._entry(key)
        return StoredObject(data=entry.data, etag=entry.etag)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`."""
        check_range(key, offset, length)
        data = self._entry(key).data
        if offset + length > len(data):
            raise DamagedError(
                f"{self.url}/{key} ends at byte {len(data)}, wanted {length} bytes from {offset}: fetch it again; "
                "if it stays short, the object is damaged"
            )
        return data[offset : offset + length]

    def put(self, key: str, data: bytes) -> str:
        """Write an object unconditionally and return its etag."""
        check_key(key)
        with self._contents.lock:
            return self._contents.replace(self._base + key, data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create an object; of any number of racing callers exactly one succeeds."""
        check_key(key)
        with self._contents.lock:
            if self._base + key in self._contents.entries:
                raise AlreadyExistsError(f"{self.url}/{key} exists already: read what is there")
            return self._contents.replace(self._base + key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace an object only if its etag is still `etag`; returns the new etag."""
        check_key(key)
        with self._contents.lock:
            entry = self._contents.entries.get(self._base + key)
            if entry is None or entry.etag != etag:
                found = "is gone" if entry is None else "was changed by somebody else"
                raise PreconditionFailedError(f"{self.url}/{key} {found} since it was read: read it again, then decide")
            return self._contents.replace(self._base + key, data)

    @contextmanager
    def write(self, key: str) -> Iterator[ObjectWriter]:
        """Write an object in pieces; it appears when the block ends, and not at all when the block raises."""
        check_key(key)
        writer = _MemoryWriter()
        yield writer
        self.put(key, b"".join(writer.pieces))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix`, in key order, above `start_after`, as they were at the call."""
        check_prefix(prefix)
        with self._contents.lock:
            found = [
                ObjectInfo(
                    key=full.removeprefix(self._base),
                    num_bytes=len(entry.data),
                    modified_unix_seconds=entry.modified_unix_seconds,
                )
                for full, entry in self._contents.entries.items()
                if full.startswith(self._base + prefix) and full.removeprefix(self._base) > start_after
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        check_key(key)
        with self._contents.lock:
            self._contents.entries.pop(self._base + key, None)

    def close(self) -> None:
        """Release nothing: the contents outlive the store."""

    def _entry(self, key: str) -> _Entry:
        check_key(key)
        with self._contents.lock:
            entry = self._contents.entries.get(self._base + key)
        if entry is None:
            raise NotFoundError(f"{self.url}/{key} does not exist: it was never written, or retention removed it")
        return entry


class _MemoryWriter:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def append(self, data: bytes | memoryview) -> None:
        self.pieces.append(bytes(data))
