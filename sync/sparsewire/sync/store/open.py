"""From a URL to a store, and the probe that keeps writers away from servers on which a commit is not safe."""

from __future__ import annotations

import uuid
from contextlib import suppress

from sparsewire.sync.errors import AlreadyExistsError, PreconditionFailedError, StoreError, UnsafeStoreError
from sparsewire.sync.store.base import Store
from sparsewire.sync.store.directory import open_directory_store
from sparsewire.sync.store.location import DirectoryLocation, MemoryLocation, S3Location, parse_store_url
from sparsewire.sync.store.memory import open_memory_store
from sparsewire.sync.store.s3 import connect_s3

_PROBE_FOLDER = ".sparsewire-probe"
_NOBODYS_ETAG = '"00000000000000000000000000000000"'


def check_store_url(url: str) -> None:
    """Refuse a URL that `open_store` could not open, without any I/O.

    Raises:
        ConfigError: with what is wrong and what is supported; never with a value that could be a secret.
    """
    parse_store_url(url)


def open_store(url: str, *, writable: bool = False) -> Store:
    """Open the store at `url`; the caller closes it.

    `writable` is for the publisher: it creates a directory, removes what crashed writers left there, and makes an S3
    server prove that it honours conditional writes. A reader sends no request and writes nothing.

    Raises:
        ConfigError: the URL or the AWS configuration is wrong.
        StoreAccessError, StoreUnavailableError: the store cannot be written to.
        UnsafeStoreError: the server ignores conditional writes.
    """
    match parse_store_url(url):
        case MemoryLocation() as location:
            return open_memory_store(location)
        case DirectoryLocation() as location:
            return open_directory_store(location, writable=writable)
        case S3Location() as location:
            store = connect_s3(location)
            if writable:
                try:
                    probe_conditional_writes(store)
                except BaseException:
                    store.close()
                    raise
            return store


def probe_conditional_writes(store: Store) -> None:
    """Make the store prove that put-if-absent and compare-and-set refuse when they must; five small requests.

    Raises:
        UnsafeStoreError: a write went through although its condition did not hold.
        StoreAccessError, StoreUnavailableError: the store cannot be written to.
    """
    key = f"{_PROBE_FOLDER}/{uuid.uuid4().hex}"
    try:
        _probe(store, key)
    except StoreError:
        # What the probe found matters more than whether its object could be removed.
        with suppress(StoreError):
            store.delete(key)
        raise
    store.delete(key)


def _probe(store: Store, key: str) -> None:
    etag = store.put_if_absent(key, b"first")
    try:
        store.put_if_absent(key, b"second")
    except AlreadyExistsError:
        pass
    else:
        raise _unsafe(store, "If-None-Match")
    try:
        store.put_if_match(key, b"third", _NOBODYS_ETAG)
    except PreconditionFailedError:
        pass
    else:
        raise _unsafe(store, "If-Match")
    if store.get(key).data != b"first":
        raise _unsafe(store, "If-None-Match or If-Match, although it answers as if it did not")
    try:
        store.put_if_match(key, b"fourth", etag)
    except PreconditionFailedError as error:
        raise UnsafeStoreError(
            f"{store.url}: the server refuses a compare-and-set whose condition holds, so no learner could ever claim a "
            "run: use a server with conditional writes (Amazon S3, SeaweedFS, MinIO, Ceph)"
        ) from error


def _unsafe(store: Store, condition: str) -> UnsafeStoreError:
    return UnsafeStoreError(
        f"{store.url}: the server ignores {condition}, so two learners could both commit a version and workers would "
        "apply different weights under one number: use a server with conditional writes (Amazon S3, SeaweedFS, MinIO, Ceph)"
    )
