"""The ranks of one learner, as far as publishing needs them: one collective over bytes, and agreement over it.

The trainer implements `Ranks` over its own process group; `SOLO` serves a learner of one process. `Agreement` makes
sure that no rank waits for one that failed: what a rank raises is what all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sparsewire.sync import errors
from sparsewire.sync.errors import SparsewireError


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
        """Return every rank's payload in rank order; blocks, within a bound of its own, until all ranks have called."""
        ...


class _Solo:
    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        return [payload]


SOLO: Ranks = _Solo()
"""A learner of one process."""


class Agreement:
    """Runs work on ranks so that all of them end with its results, or all with the error of the first that failed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def on_all(self, work: Callable[[], bytes]) -> Sequence[bytes]:
        """Run `work` on every rank and return all results in rank order."""
        return [_unwrap(reply, rank) for rank, reply in enumerate(self._ranks.all_gather(_wrap(work)))]

    def on_first(self, work: Callable[[], bytes]) -> bytes:
        """Run `work` on rank 0 alone and return its result on every rank."""
        return _unwrap(self._ranks.all_gather(_wrap(work) if self._ranks.rank == 0 else b"")[0], 0)


def _wrap(work: Callable[[], bytes]) -> bytes:
    """Return the result behind `+`, or this package's error behind `-`."""
    try:
        return b"+" + work()
    except SparsewireError as error:
        return b"-" + f"{type(error).__name__}:{error}".encode()


def _unwrap(reply: bytes, rank: int) -> bytes:
    if reply[:1] == b"+":
        return reply[1:]
    name, _, message = reply[1:].decode().partition(":")
    kind: type[SparsewireError] = getattr(errors, name, SparsewireError)
    raise kind(message if rank == 0 else f"rank {rank}: {message}")
