"""Where a subscriber gets versions from: the seam, and the object store behind it.

A source hands out bytes and makes no promise about them: the subscriber checks every hash and digest itself. The
other implementation is `WeightClient` in `weight_client.py`, which asks a `WeightService`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from sparsewire.sync.chain import Link
from sparsewire.sync.errors import StoreAccessError, StoreError
from sparsewire.sync.history import History
from sparsewire.sync.store.base import Store

logger = logging.getLogger(__name__)

_POLL = timedelta(seconds=0.5)
_READER_TERM = timedelta(minutes=10)
"""How long a reader's note protects its version; renewed at a fifth of it."""


class Source(Protocol):
    """Versions of one run; calls may come from several threads at once."""

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        ...

    def links(self, *, after: int | None) -> Sequence[Link]:
        """Return every step to a version above `after`."""
        ...

    def sealed(self, link: Link) -> bytes:
        """Return the sealed manifest of a link.

        Raises:
            NotFoundError: it is gone.
        """
        ...

    def schema(self, sha256: bytes) -> bytes:
        """Return the schema object of that hash, unchecked."""
        ...

    def read_pack(self, pack_key: str, offset: int, num_bytes: int) -> bytes:
        """Return a byte range of a pack."""
        ...

    def wait_for_newer(self, than: int | None, *, timeout: timedelta) -> int | None:
        """Return the newest version as soon as it is above `than`, or None when the time is over."""
        ...

    def hold(self, version: int) -> None:
        """Say that this reader stands at `version`, so that retention keeps a way on from it; best effort."""
        ...

    def close(self) -> None:
        """Forget the hold and release connections."""
        ...


class StoreSource:
    """Reads a run straight from its object store."""

    def __init__(self, *, store: Store, run: str) -> None:
        self._store = store
        self._history = History(store=store, run=run)
        self._reader = uuid.uuid4().hex
        self._held: int | None = None
        self._hold_again_at = 0.0
        self._may_hold = True

    @property
    def url(self) -> str:
        return self._store.url

    def links(self, *, after: int | None) -> Sequence[Link]:
        return self._history.links(after=after)

    def sealed(self, link: Link) -> bytes:
        return self._history.sealed(link)

    def schema(self, sha256: bytes) -> bytes:
        return self._history.schema(sha256)

    def read_pack(self, pack_key: str, offset: int, num_bytes: int) -> bytes:
        return self._history.read_pack(pack_key, offset, num_bytes)

    def wait_for_newer(self, than: int | None, *, timeout: timedelta) -> int | None:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            head = self._history.head(after=than)
            if head is not None and head != than:
                return head
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _POLL.total_seconds()))

    def hold(self, version: int) -> None:
        if not self._may_hold or (version == self._held and time.monotonic() < self._hold_again_at):
            return
        try:
            expires = time.time() + _READER_TERM.total_seconds()
            self._history.put_reader(self._reader, version=version, expires_unix_seconds=expires)
        except StoreAccessError as error:
            self._may_hold = False
            logger.info("this reader cannot note its version in the store (%s); retention will not wait for it", error)
            return
        except StoreError as error:
            logger.warning("reader note not renewed: %s", error)
            return
        self._held = version
        self._hold_again_at = time.monotonic() + _READER_TERM.total_seconds() / 5

    def close(self) -> None:
        if self._held is not None:
            try:
                self._history.delete_reader(self._reader)
            except StoreError as error:
                logger.info("reader note left to expire: %s", error)
        self._store.close()
