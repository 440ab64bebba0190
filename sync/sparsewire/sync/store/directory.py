"""A store in a directory of a local or shared file system.

An object is the file `directory/key`. It appears by an atomic rename (or, for put-if-absent, by a hard link, which
exactly one caller can make) of a temporary file that is complete and on disk, so a crash leaves nothing half-written.
What replaces or removes objects holds one lock file, which makes compare-and-set exact between processes. Etags are
content hashes. Own files have names that no key can have. Readers need no write permission. Thread-safe.

Known limits: a key cannot be both an object and the folder of another; the file system must have hard links and
`flock` (local ones and NFS do); listing holds the names of one folder in memory at a time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from sparsewire.sync.errors import (
    AlreadyExistsError,
    DamagedError,
    LimitExceededError,
    NotFoundError,
    PreconditionFailedError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UnsafeStoreError,
)
from sparsewire.sync.store.base import ObjectInfo, ObjectWriter, StoredObject
from sparsewire.sync.store.keys import MAX_GET_BYTES, MAX_KEY_LENGTH, check_key, check_prefix, check_range, is_key
from sparsewire.sync.store.location import DirectoryLocation

LOCK_DEADLINE = timedelta(seconds=30)
"""The lock is held for a rename or a small write; waiting longer means that its holder hangs."""

LEFTOVER_AGE = timedelta(hours=1)
"""A temporary file untouched for so long belongs to a crashed writer."""

_TEMPORARY = ".~temporary"
_LOCK = ".~lock"
_LOCK_POLL_SECONDS = 0.002
_PLACE_ATTEMPTS = 16


def open_directory_store(location: DirectoryLocation, *, writable: bool) -> DirectoryStore:
    """Return a store over the directory.

    A writer creates the directory and removes what crashed writers left. For a reader a directory that does not exist
    yet is an empty store, so that workers may start before the learner.

    Raises:
        StoreAccessError: the path is not a directory, or may not be created or written.
    """
    store = DirectoryStore(location=location)
    if writable:
        store.prepare()
    elif location.path.exists() and not location.path.is_dir():
        raise StoreAccessError(f"{location.path} is not a directory: give the directory of the store")
    return store


class DirectoryStore:
    """The store seam over files."""

    def __init__(self, *, location: DirectoryLocation) -> None:
        self._url = location.url
        self._root = location.path
        self._temporary_directory = location.path / _TEMPORARY

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._url

    def prepare(self) -> None:
        """Create the directory where it is missing and remove what crashed writers left.

        Raises:
            StoreAccessError: it may not be created or written.
        """
        with _os_errors(self._temporary_directory, "prepare the store"):
            self._temporary_directory.mkdir(parents=True, exist_ok=True)
            with os.scandir(self._temporary_directory) as entries:
                leftovers = [Path(entry) for entry in entries]
            oldest = time.time() - LEFTOVER_AGE.total_seconds()
            for leftover in leftovers:
                try:
                    if leftover.stat().st_mtime < oldest:
                        leftover.unlink()
                except FileNotFoundError:
                    continue  # its writer has finished, or another writer removed it
        with self._temporary(self._root):
            pass  # proves the permission to write before anything is computed

    def get(self, key: str) -> StoredObject:
        """Return a small object whole."""
        with self._reading(key) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes > MAX_GET_BYTES:
                raise LimitExceededError(
                    f"{self._root / key} has {num_bytes} bytes, at most {MAX_GET_BYTES} are read whole: read it by range"
                )
            data = _pread(descriptor, 0, num_bytes)
        return StoredObject(data=data, etag=_etag(data))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`."""
        check_range(key, offset, length)
        with self._reading(key) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            # Compared before reading, so that a hostile length allocates nothing.
            data = _pread(descriptor, offset, length) if offset + length <= num_bytes else b""
        if len(data) < length:
            raise DamagedError(
                f"{self._root / key} ends at byte {num_bytes}, wanted {length} bytes from {offset}: fetch it again; "
                "if it stays short, the object is damaged"
            )
        return data

    def put(self, key: str, data: bytes) -> str:
        """Write an object unconditionally and return its etag."""
        with self.write(key) as writer:
            writer.append(data)
        return _etag(data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create an object; of any number of racing callers exactly one succeeds."""
        check_key(key)
        path = self._root / key
        with self._temporary(path) as temporary:
            temporary.append(data)
            temporary.finish()
            self._place(temporary, path, exclusive=True)
        return _etag(data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace an object only if its etag is still `etag`; returns the new etag."""
        check_key(key)
        path = self._root / key
        with self._temporary(path) as temporary:
            temporary.append(data)
            temporary.finish()
            with self._locked(path):
                try:
                    found = self.get(key).etag
                except NotFoundError as error:
                    raise PreconditionFailedError(
                        f"{path} is gone since it was read: read it again, then decide"
                    ) from error
                if found != etag:
                    raise PreconditionFailedError(
                        f"{path} was changed by somebody else since it was read: read it again, then decide"
                    )
                self._place(temporary, path, exclusive=False)
        return _etag(data)

    @contextmanager
    def write(self, key: str) -> Iterator[ObjectWriter]:
        """Write an object in pieces; it appears when the block ends, and not at all when the block raises."""
        check_key(key)
        path = self._root / key
        with self._temporary(path) as temporary:
            yield temporary
            temporary.finish()
            with self._locked(path):
                self._place(temporary, path, exclusive=False)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix`, in key order, above `start_after`."""
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        base = f"{folder}/" if folder else ""
        return self._walk(base, prefix, start_after)

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that it leaves empty; removing an absent one is no error."""
        check_key(key)
        path = self._root / key
        with _os_errors(path, "delete"):
            if not path.is_file():
                return
        with self._locked(path), _os_errors(path, "delete"):
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break  # something is in it, or it may not be removed: an empty folder that stays does no harm

    def close(self) -> None:
        """Release nothing: no file stays open between calls."""

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        check_key(key)
        path = self._root / key
        with _os_errors(path, "read"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    raise IsADirectoryError(errno.EISDIR, "is a folder of objects, not an object")
                yield descriptor
            finally:
                os.close(descriptor)

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[_TemporaryFile]:
        path = self._temporary_directory / f"{os.getpid()}-{uuid.uuid4().hex}"
        with _os_errors(target, "write"):
            self._temporary_directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield _TemporaryFile(path=path, descriptor=descriptor, target=target)
        finally:
            os.close(descriptor)
            with _os_errors(path, "remove"):
                path.unlink(missing_ok=True)

    def _place(self, temporary: _TemporaryFile, path: Path, *, exclusive: bool) -> None:
        """Give the finished file its name; the folder is made again when a concurrent delete has removed it."""
        with _os_errors(path, "write"):
            for attempt in range(_PLACE_ATTEMPTS):
                self._make_folder(path.parent)
                try:
                    if exclusive:
                        _link(temporary.path, path)
                    else:
                        temporary.path.replace(path)
                    break
                except FileNotFoundError:
                    if attempt == _PLACE_ATTEMPTS - 1:
                        raise
            _sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        missing: list[Path] = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            _sync_folder(each.parent)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold the store's lock against every thread and process that opens the same directory."""
        with _os_errors(path, "lock the store for"):
            descriptor = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + LOCK_DEADLINE.total_seconds()
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreUnavailableError(
                            f"{self._root / _LOCK} has been held by another process for "
                            f"{LOCK_DEADLINE.total_seconds():.0f} s: look for a writer that hangs"
                        ) from error
                    time.sleep(_LOCK_POLL_SECONDS)
                except OSError as error:
                    raise UnsafeStoreError(
                        f"{self._root} is on a file system without flock ({error.strerror}), so two learners could both "
                        "commit a version: use another file system or an S3 store"
                    ) from error
            yield
        finally:
            os.close(descriptor)

    def _walk(self, base: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield the objects in and below the folder `base` ('' or ending in a slash)."""
        for name, is_folder in self._names(base):
            key = base + name
            if is_folder:
                below = f"{key}/"
                if below[: len(prefix)] != prefix[: len(below)]:
                    continue
                if below < start_after and not start_after.startswith(below):
                    continue
                yield from self._walk(below, prefix, start_after)
            elif key.startswith(prefix) and key > start_after:
                try:
                    with _os_errors(self._root / key, "list"):
                        status = (self._root / key).stat()
                except NotFoundError:
                    continue  # deleted since its folder was read
                yield ObjectInfo(key=key, num_bytes=status.st_size, modified_unix_seconds=status.st_mtime)

    def _names(self, base: str) -> Sequence[tuple[str, bool]]:
        """Return the names in a folder in the order of the keys below them: a folder sorts as `name/`."""
        folder = self._root / base
        names: list[tuple[str, bool]] = []
        try:
            with _os_errors(folder, "list"), os.scandir(folder) as entries:
                for entry in entries:
                    if is_key(entry.name) and len(base) + len(entry.name) <= MAX_KEY_LENGTH:
                        is_folder = entry.is_dir()
                        if is_folder or entry.is_file():
                            names.append((entry.name, is_folder))
        except NotFoundError:
            return []  # removed since its parent was read, or nothing was ever written
        return sorted(names, key=lambda pair: pair[0] + "/" if pair[1] else pair[0])


class _TemporaryFile:
    """A file that nobody sees yet."""

    def __init__(self, *, path: Path, descriptor: int, target: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self._target = target

    def append(self, data: bytes | memoryview) -> None:
        """Write all of `data` behind what is there."""
        with memoryview(data) as whole, whole.cast("B") as view, _os_errors(self._target, "write"):
            written = 0
            while written < len(view):
                written += os.write(self._descriptor, view[written:])

    def finish(self) -> None:
        """Force the bytes to disk: a name must never point at bytes that a power cut could take."""
        with _os_errors(self._target, "write"):
            os.fsync(self._descriptor)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError as error:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder of objects already") from error
        raise AlreadyExistsError(f"{target} exists already: read what is there") from error
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise UnsafeStoreError(
                f"{target.parent} is on a file system without hard links ({error.strerror}), so two learners could both "
                "commit a version: use another file system or an S3 store"
            ) from error
        raise


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    """Read up to `length` bytes; fewer only at the end of the file."""
    pieces: list[bytes] = []
    while length > 0 and (piece := os.pread(descriptor, length, offset)):
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the operating system raised inside the block into this package's."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path, what) from error


def _translate(error: OSError, path: Path, what: str) -> StoreError:
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT:
            return NotFoundError(f"{path} does not exist: it was never written, or retention removed it")
        case errno.EISDIR | errno.ENOTDIR | errno.EEXIST if what == "read":
            return NotFoundError(f"{path} is not an object ({reason}): look for it by listing the store")
        case errno.EISDIR | errno.ENOTDIR | errno.EEXIST:
            return StoreAccessError(
                f"cannot {what} {path}: {reason}; a name cannot be both an object and a folder of objects here"
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return StoreAccessError(
                f"cannot {what} {path}: {reason}; give this user the permission or another directory"
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StoreUnavailableError(
                f"cannot {what} {path}: {reason}; nothing was replaced: free space or raise the limit, then try again"
            )
        case errno.ENAMETOOLONG | errno.ELOOP:
            return StoreAccessError(f"cannot {what} {path}: {reason}; use a directory with a shorter path")
        case _:
            return StoreUnavailableError(f"cannot {what} {path}: {reason}; check the file system, then try again")
