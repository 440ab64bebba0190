"""The worker's bounded queue on disk: finished trajectories wait here until the learner has them.

`append` returns when the trajectory would survive a power failure; it is removed when the learner has acknowledged
it. Both bounds (bytes, count) hold always: a full spool refuses, which slows the producer down. Entries keep the
order of appending and their numbers never repeat. Thread-safe: a producer appends while the sender peeks and removes.
Every payload carries a digest, and all are checked when the spool is opened, so damage is reported, never skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import prometheus_client

from sparsewire.sync.errors import ConfigError, LimitExceededError, SpoolFullError
from sparsewire.sync.trajectories.database import Database
from sparsewire.sync.trajectories.types import Trajectory, TrajectoryKey
from sparsewire.sync.trajectories.wire import encode_trajectory, payload_digest

_FORMAT_NUMBER = 1
_SCHEMA = """
CREATE TABLE trajectories (
    entry INTEGER PRIMARY KEY AUTOINCREMENT,
    group_number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    digest BLOB NOT NULL,
    payload BLOB NOT NULL,
    UNIQUE (group_number, sample, attempt)
);
CREATE TABLE totals (num_appended INTEGER NOT NULL, num_removed INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
"""

_SPOOLED = prometheus_client.Gauge("sparsewire_spool_trajectories", "Trajectories that wait for acknowledgement.")
_SPOOLED_BYTES = prometheus_client.Gauge("sparsewire_spool_bytes", "Payload bytes that wait for acknowledgement.")
_FULL = prometheus_client.Counter("sparsewire_spool_full_total", "Appends that met a full spool.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledTrajectory:
    """A trajectory as it waits to be sent."""

    entry: int
    """Its place in the order of appending; never used twice."""
    key: TrajectoryKey
    payload: bytes
    """The serialised trajectory."""


class TrajectorySpool:
    """A durable first-in first-out queue of trajectories of one run; open it as a context manager."""

    def __init__(self, *, path: Path, run: str, max_bytes: int = 256 << 20, max_trajectories: int = 100_000) -> None:
        """Describe the spool; the file is created or opened by `with`.

        Raises:
            ConfigError: a bound is not positive.
        """
        if max_bytes < 1 or max_trajectories < 1:
            raise ConfigError(
                f"spool {path}: max_bytes {max_bytes} and max_trajectories {max_trajectories} must be > 0"
            )
        self._run = run
        self._max_bytes = max_bytes
        self._max_trajectories = max_trajectories
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._num_trajectories = 0
        self._last_entry = 0
        self._database = Database(
            path=path,
            kind="trajectory spool",
            format_number=_FORMAT_NUMBER,
            identity={"run": run},
            schema=_SCHEMA,
            remedy="move the file away and restart the worker; the learner hands the lost samples out again",
        )

    def __enter__(self) -> TrajectorySpool:
        """Open the file and check every entry.

        Raises:
            ConfigError: another process has it open, or it belongs to another run.
            DamagedError: an entry is damaged or missing; the message names the file and the remedy.
        """
        with self._changed:
            self._database.open()
            try:
                self._check_entries()
            except BaseException:
                self._database.close()
                raise
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._database.close()
            self._changed.notify_all()

    @property
    def num_trajectories(self) -> int:
        """Trajectories not yet acknowledged."""
        with self._changed:
            return self._num_trajectories

    @property
    def num_bytes(self) -> int:
        """Payload bytes not yet acknowledged."""
        with self._changed:
            return self._num_bytes

    def append(self, trajectory: Trajectory) -> None:
        """Store a trajectory durably; appending a key that is already here changes nothing.

        Raises:
            SpoolFullError: it does not fit now; nothing was stored.
            LimitExceededError: it would not fit an empty spool either.
            ConfigError: it belongs to another run.
        """
        self.append_when_room(trajectory, timeout=timedelta(0))

    def append_when_room(self, trajectory: Trajectory, *, timeout: timedelta) -> None:
        """Store a trajectory durably, waiting up to `timeout` for the sender to make room.

        Raises:
            SpoolFullError: there was no room in time; nothing was stored.
            LimitExceededError: it would not fit an empty spool either.
            ConfigError: it belongs to another run.
        """
        if trajectory.run != self._run:
            raise ConfigError(
                f"trajectory {trajectory.key} belongs to run {trajectory.run!r}, the spool to {self._run!r}"
            )
        payload = encode_trajectory(trajectory)
        if len(payload) > self._max_bytes:
            raise LimitExceededError(
                f"trajectory {trajectory.key} has {len(payload)} bytes, spool {self._database.path} holds at most "
                f"{self._max_bytes}: raise max_bytes"
            )
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while not self._fits(len(payload)):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    _FULL.inc()
                    raise SpoolFullError(
                        f"spool {self._database.path} is full: {self._num_trajectories} of {self._max_trajectories} "
                        f"trajectories, {self._num_bytes} of {self._max_bytes} bytes, {len(payload)} more wanted; "
                        "wait until the learner can be reached"
                    )
                self._changed.wait(remaining)
            self._insert(trajectory.key, payload)

    def peek(self, *, after: int, max_trajectories: int, max_bytes: int) -> list[SpooledTrajectory]:
        """Return the oldest entries above number `after` within both bounds, and at least one if there is any.

        Raises:
            DamagedError: a payload is not what was appended.
        """
        found: list[SpooledTrajectory] = []
        num_bytes = 0
        with self._changed, self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT entry, group_number, sample, attempt, digest, num_bytes, payload FROM trajectories"
                " WHERE entry > ? ORDER BY entry LIMIT ?",
                (after, max_trajectories),
            )
            for entry, group, sample, attempt, digest, size, payload in rows:
                num_bytes += size
                if found and num_bytes > max_bytes:
                    break
                key = TrajectoryKey(group=group, sample=sample, attempt=attempt)
                if size != len(payload) or digest != payload_digest(key, payload):
                    raise self._database.damaged(f"the payload of {key} does not have its digest")
                found.append(SpooledTrajectory(entry=entry, key=key, payload=payload))
        return found

    def remove(self, entries: Sequence[int]) -> None:
        """Forget acknowledged entries and make room; removing an absent one is no error."""
        num_bytes = num_removed = 0
        with self._changed:
            # A removal lost in a power failure only means that the learner sees a duplicate.
            with self._database.transaction(durable=False) as connection:
                for entry in entries:
                    row = connection.execute("SELECT num_bytes FROM trajectories WHERE entry = ?", (entry,)).fetchone()
                    if row:
                        connection.execute("DELETE FROM trajectories WHERE entry = ?", (entry,))
                        num_removed += 1
                        num_bytes += row[0]
                connection.execute("UPDATE totals SET num_removed = num_removed + ?", (num_removed,))
            self._num_trajectories -= num_removed
            self._num_bytes -= num_bytes
            self._show()
            self._changed.notify_all()

    def wait_for_entry(self, *, after: int, timeout: timedelta) -> bool:
        """Wait until there is an entry above number `after`; return whether there is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._num_trajectories > 0 and self._last_entry > after, timeout.total_seconds()
            )

    def wait_until_empty(self, *, timeout: timedelta) -> bool:
        """Wait until all entries are acknowledged; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_trajectories == 0, timeout.total_seconds())

    def _fits(self, num_bytes: int) -> bool:
        return self._num_trajectories < self._max_trajectories and self._num_bytes + num_bytes <= self._max_bytes

    def _insert(self, key: TrajectoryKey, payload: bytes) -> None:
        with self._database.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO trajectories (group_number, sample, attempt, num_bytes, digest, payload)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (key.group, key.sample, key.attempt, len(payload), payload_digest(key, payload), payload),
            )
            if cursor.rowcount == 0:
                return
            connection.execute("UPDATE totals SET num_appended = num_appended + 1")
        self._last_entry = cursor.lastrowid or self._last_entry
        self._num_trajectories += 1
        self._num_bytes += len(payload)
        self._show()
        self._changed.notify_all()

    def _check_entries(self) -> None:
        self._num_trajectories = self._num_bytes = self._last_entry = 0
        while found := self.peek(after=self._last_entry, max_trajectories=1000, max_bytes=8 << 20):
            self._num_trajectories += len(found)
            self._num_bytes += sum(len(spooled.payload) for spooled in found)
            self._last_entry = found[-1].entry
        with self._database.transaction() as connection:
            totals = connection.execute("SELECT num_appended, num_removed FROM totals").fetchall()
        if len(totals) != 1 or totals[0][0] - totals[0][1] != self._num_trajectories:
            raise self._database.damaged(f"it holds {self._num_trajectories} entries but its totals say {totals}")

    def _show(self) -> None:
        _SPOOLED.set(self._num_trajectories)
        _SPOOLED_BYTES.set(self._num_bytes)
