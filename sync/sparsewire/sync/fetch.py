"""Fetching a version's chunks: few large range reads, several at a time, every chunk checked by hash.

Neighbouring chunks are read together up to `READ_BYTES`, since over a WAN a request costs a round trip however small
it is. Memory: at most `MAX_READS` reads in flight or waiting. A chunk whose bytes are wrong is fetched again a
bounded number of times, alone.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sparsewire.sync.deadline import Deadline
from sparsewire.sync.errors import DamagedError, DeadlineExceededError, NotFoundError, StoreUnavailableError
from sparsewire.sync.manifest import ChunkRef, Manifest
from sparsewire.sync.source import Source

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""A read is closed once it has this many bytes."""

MAX_READS = 8
"""Reads in flight at once."""

_ATTEMPTS = 4
_BACKOFF_SECONDS = 0.2

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Read:
    pack_key: str
    chunks: tuple[ChunkRef, ...]

    @property
    def offset(self) -> int:
        return self.chunks[0].offset

    @property
    def num_bytes(self) -> int:
        return self.chunks[-1].offset + self.chunks[-1].num_bytes - self.offset


def plan_reads(manifest: Manifest) -> Sequence[_Read]:
    """Return the range reads that bring all chunks of a manifest, in chunk order."""
    reads: list[_Read] = []
    group: list[ChunkRef] = []
    for chunk in manifest.chunks:
        if group and (chunk.pack != group[0].pack or chunk.offset + chunk.num_bytes - group[0].offset > READ_BYTES):
            reads.append(_Read(manifest.packs[group[0].pack].key, tuple(group)))
            group = []
        group.append(chunk)
    if group:
        reads.append(_Read(manifest.packs[group[0].pack].key, tuple(group)))
    return reads


def retry(what: str, call: Callable[[], _T], *, deadline: Deadline) -> _T:
    """Call until it succeeds; damage and passing failures are tried again a few times, with jittered growing pauses.

    Raises:
        DamagedError, StoreUnavailableError: the last failure, when the attempts are used up.
        DeadlineExceededError: the time is over.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        deadline.check(what)
        try:
            return call()
        except (DamagedError, StoreUnavailableError, DeadlineExceededError) as error:
            if attempt == _ATTEMPTS:
                raise
            logger.warning("%s: attempt %d of %d failed: %s", what, attempt, _ATTEMPTS, error)
        pause = _BACKOFF_SECONDS * 2 ** (attempt - 1) * (0.5 + random.random())
        time.sleep(min(pause, deadline.left_seconds))
    raise AssertionError("unreachable")


def fetch_chunks(source: Source, manifest: Manifest, *, deadline: Deadline) -> Iterator[bytes]:
    """Yield the payload of every chunk in order, each with the hash that the manifest states.

    Raises:
        NotFoundError: a pack is absent; names pack and version.
        DamagedError: a chunk stayed damaged; names pack, offset and version.
        StoreUnavailableError, DeadlineExceededError.
    """
    where = f"{source.url}: version {manifest.version}"

    def run(read: _Read) -> list[bytes]:
        what = f"{where} pack {read.pack_key}"
        data = retry(what, lambda: _read(source, read.pack_key, read.offset, read.num_bytes, where), deadline=deadline)
        payloads = []
        for chunk in read.chunks:
            payload = data[chunk.offset - read.offset : chunk.offset - read.offset + chunk.num_bytes]
            try:
                chunk.check(payload, where=what)
            except DamagedError as error:
                logger.warning("fetching again: %s", error)
                payload = retry(what, lambda c=chunk: _checked(source, read.pack_key, c, where), deadline=deadline)  # type: ignore[misc]
            payloads.append(payload)
        return payloads

    waiting: deque[Future[list[bytes]]] = deque()
    with ThreadPoolExecutor(MAX_READS, thread_name_prefix="fetch") as executor:
        try:
            for read in plan_reads(manifest):
                while len(waiting) >= MAX_READS:
                    yield from _result(waiting.popleft(), deadline, where)
                waiting.append(executor.submit(run, read))
            while waiting:
                yield from _result(waiting.popleft(), deadline, where)
        finally:
            for future in waiting:
                future.cancel()


def _result(future: Future[list[bytes]], deadline: Deadline, where: str) -> list[bytes]:
    try:
        return future.result(timeout=deadline.left_seconds)
    except TimeoutError:
        deadline.check(where)
        raise


def _read(source: Source, pack_key: str, offset: int, num_bytes: int, where: str) -> bytes:
    try:
        data = source.read_pack(pack_key, offset, num_bytes)
    except NotFoundError as error:
        raise NotFoundError(f"{where}: its pack {pack_key} is absent ({error})") from error
    except DamagedError as error:
        raise DamagedError(f"{where}: {error}") from error
    if len(data) != num_bytes:
        raise DamagedError(f"{where}: pack {pack_key} gave {len(data)} of {num_bytes} bytes at {offset}")
    return data


def _checked(source: Source, pack_key: str, chunk: ChunkRef, where: str) -> bytes:
    payload = _read(source, pack_key, chunk.offset, chunk.num_bytes, where)
    chunk.check(payload, where=f"{where} pack {pack_key}")
    return payload
