"""Where batches come from: rank 0 takes them out of the ledger, every other rank receives the same bytes.

    workers ══gRPC══► ledger (rank 0) ──take_batch──► assemble ──broadcast──► every rank: TrainingBatch
                         ▲                               │
                         └── trained / discarded ◄── step ┘

Collective: every rank calls `next_batch` in the same order. While rank 0 waits for workers it tells the others so
every few seconds, and when it stops or fails they learn it by the same way, so no rank waits on a dead one.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

from sparsewire.sync.errors import DeadlineExceededError, SparsewireError
from sparsewire.sync.trajectories.ledger import TrajectoryLedger
from sparsewire.trainer.batch import TrainingBatch, assemble
from sparsewire.trainer.ranks import TorchRanks

logger = logging.getLogger(__name__)

_POLL = timedelta(seconds=1)
"""How soon a stop is noticed while waiting, and how often other ranks hear from rank 0."""
_LOG_EVERY_SECONDS = 30.0
_QUIET_SECONDS = 8.0
"""Without a trajectory for so long, and with none awaited, the workers of a finished run are gone."""

_WAIT, _STOP, _FAIL, _BATCH = b"W", b"S", b"F", b"B"


class BatchFeed:
    """Gives every rank the next batch; for the thread that runs the steps."""

    def __init__(
        self,
        *,
        ranks: TorchRanks,
        ledger: TrajectoryLedger | None,
        stop: threading.Event,
        num_groups: int,
        vocabulary_size: int,
        timeout: timedelta,
    ) -> None:
        """Describe the feed; `ledger` is None on every rank but the first, whose `stop` alone counts."""
        self._ranks = ranks
        self._ledger = ledger
        self._stop = stop
        self._num_groups = num_groups
        self._vocabulary_size = vocabulary_size
        self._timeout = timeout

    def next_batch(self, *, step: int, version: int) -> TrainingBatch | None:
        """Return the batch of `step` for weights of `version`, or None when the learner is to stop. Collective.

        Raises:
            DeadlineExceededError: workers did not bring enough in time; on every rank.
            SparsewireError: the ledger failed; on every rank.
        """
        if self._ledger is None:
            return self._follow()
        try:
            batch = self._take(self._ledger, step=step, version=version)
        except SparsewireError as error:
            self._ranks.broadcast(_FAIL + f"{type(error).__name__}: {error}".encode())
            raise
        self._ranks.broadcast(_STOP if batch is None else _BATCH + self._serialised(batch))
        return batch

    def _serialised(self, batch: TrainingBatch) -> bytes:
        return batch.to_bytes() if self._ranks.size > 1 else b""

    def _take(self, ledger: TrajectoryLedger, *, step: int, version: int) -> TrainingBatch | None:
        started = time.monotonic()
        logged = started
        while not self._stop.is_set():
            if ledger.wait_for_groups(self._num_groups, timeout=_POLL):
                taken = ledger.take_batch(self._num_groups, version=version, step=step)
                if taken is not None:
                    return assemble(taken.groups, version=version, vocabulary_size=self._vocabulary_size)
            now = time.monotonic()
            if now - started > self._timeout.total_seconds():
                raise DeadlineExceededError(
                    f"step {step} got no batch of {self._num_groups} groups within {self._timeout}: "
                    f"{_state(ledger)}; are workers running, and do they reach this learner?"
                )
            if now - logged > _LOG_EVERY_SECONDS:
                logged = now
                logger.info(
                    "step %d waits for %d groups since %.0f s: %s",
                    step,
                    self._num_groups,
                    now - started,
                    _state(ledger),
                )
            self._ranks.broadcast(_WAIT)
        return None

    def _follow(self) -> TrainingBatch | None:
        while True:
            message = self._ranks.broadcast(None)
            match message[:1]:
                case b"W":
                    continue
                case b"S":
                    return None
                case b"B":
                    return TrainingBatch.from_bytes(message[1:])
                case _:
                    raise SparsewireError(f"rank 0 failed: {message[1:].decode()}")


def drain(ledger: TrajectoryLedger, *, stop: threading.Event, timeout: timedelta) -> None:
    """Keep a finished run served until its workers have sent what they hold and fetched the last version.

    Returns once nothing is awaited and nothing has come for some seconds, when `timeout` has passed, or on `stop`.
    """
    started = heard = time.monotonic()
    before = ledger.counts()
    while not stop.wait(_POLL.total_seconds()):
        now = time.monotonic()
        counts = ledger.counts()
        if counts != before:
            before, heard = counts, now
        quiet = now - heard > _QUIET_SECONDS and counts.num_awaited == 0
        if quiet or now - started > timeout.total_seconds():
            logger.info("served %.0f s after the last step; %s", now - started, _state(ledger))
            return


def _state(ledger: TrajectoryLedger) -> str:
    counts = ledger.counts()
    return (
        f"{counts.num_groups_complete} groups complete, {counts.num_groups_open} open with {counts.num_awaited} samples "
        f"awaited; {counts.num_received} trajectories received so far, {counts.num_dropped} dropped, "
        f"{counts.num_refused} refused"
    )
