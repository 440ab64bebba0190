"""The ranks of one learner, as far as publishing needs them: one collective over bytes.

The trainer implements it over its own process group; `SOLO` serves a learner of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Ranks(Protocol):
    """The learner's processes; every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0; rank 0 seals manifests."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        """Return every rank's payload in rank order; blocks until all ranks have called."""
        ...


class _Solo:
    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        return [payload]


SOLO: Ranks = _Solo()
"""A learner of one process."""
