"""The learner's durable account of work: who was given what, what came home, and what was trained, each once.

    lease ──► open ──(every sample accepted)──► complete ──take_batch──► taken ──trained──► trained
               │ expired: leased again             │  ▲                    │ └─discard─┐       │
               └──────────── stale, abandoned, run_complete ───► dropped ◄─────────────┘       │
                                                      └────────────── rollback ◄───────────────┘

Every method is one transaction on one SQLite file: it has happened when the method returns, and after a crash it has
happened whole or not at all. gRPC threads lease and accept while the learner's thread takes; all calls are
thread-safe. A group is trained whole or dropped whole. Payloads live on disk only: memory is bounded by one batch.
Disk is bounded by `max_open_groups` and by what was trained since the last checkpoint; small rows stay for the run,
so that a duplicate is recognised however late it comes.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import prometheus_client

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.trajectories.admission import admit
from sparsewire.sync.trajectories.counts import LedgerCounts
from sparsewire.sync.trajectories.database import Database
from sparsewire.sync.trajectories.items import item_of
from sparsewire.sync.trajectories.settings import LedgerSettings
from sparsewire.sync.trajectories.tables import (
    FORMAT_NUMBER,
    SCHEMA,
    add_to_counter,
    forget_payloads,
    num_complete,
    num_open,
)
from sparsewire.sync.trajectories.types import (
    Batch,
    DropReason,
    Lease,
    Receipt,
    Refusal,
    Trajectory,
    TrajectoryKey,
)
from sparsewire.sync.trajectories.wire import decode_trajectory, encode_trajectory, payload_digest

__all__ = ["LedgerSettings", "TrajectoryLedger"]

logger = logging.getLogger(__name__)

_RECEIVED = prometheus_client.Counter(
    "sparsewire_trajectories_received_total", "Trajectories that arrived, by what became of them.", ["outcome"]
)
_REFUSED = prometheus_client.Counter(
    "sparsewire_trajectories_refused_total", "Trajectories that were not usable.", ["reason"]
)
_DROPPED = prometheus_client.Counter(
    "sparsewire_trajectories_dropped_total", "Accepted trajectories that will never be trained.", ["reason"]
)
_TRAINED = prometheus_client.Counter("sparsewire_trajectories_trained_total", "Trajectories that a step trained.")
_ROLLED_BACK = prometheus_client.Counter(
    "sparsewire_trajectories_rolled_back_total", "Trajectories made pending again by resuming from a checkpoint."
)
_LEASED = prometheus_client.Counter("sparsewire_groups_leased_total", "Groups handed out to workers.", ["kind"])
_OPEN = prometheus_client.Gauge("sparsewire_groups_open", "Groups handed out or buffered, not yet taken by a step.")
_COMPLETE = prometheus_client.Gauge("sparsewire_groups_complete", "Buffered groups of which every sample is here.")


class TrajectoryLedger:
    """The account of one run in one file; open it as a context manager. All methods are thread-safe."""

    def __init__(self, *, path: Path, settings: LedgerSettings, clock: Callable[[], float] = time.time) -> None:
        """Describe the ledger; the file is created or opened by `with`.

        Args:
            clock: Seconds since 1970; leases outlive a restart by it.
        """
        self.settings = settings
        self._clock = clock
        self._changed = threading.Condition()
        self._run_complete = False
        self._database = Database(
            path=path,
            kind="trajectory ledger",
            format_number=FORMAT_NUMBER,
            identity={
                "run": settings.run,
                "task": settings.task,
                "seed": str(settings.seed),
                "num_items": str(settings.num_items),
                "samples_per_group": str(settings.samples_per_group),
            },
            schema=SCHEMA,
            remedy="start a new run from the newest checkpoint, or restore the file from a backup",
        )

    def __enter__(self) -> TrajectoryLedger:
        """Open the file.

        Raises:
            ConfigError: another process has it open, or it was made with other settings.
            DamagedError: its contents are not what was written.
        """
        with self._changed:
            self._database.open()
            with self._database.transaction() as connection:
                self._show(connection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._database.close()
            self._changed.notify_all()

    @property
    def run_complete(self) -> bool:
        """Whether `finish` was called on this object: no work will be handed out any more."""
        with self._changed:
            return self._run_complete

    def lease(self, worker_id: str, region: str, max_groups: int) -> list[Lease]:
        """Hand out up to `max_groups` groups: first those whose lease expired, then new ones while there is room.

        An empty list means wait: all open groups are leased or buffered and their number is at its bound.
        """
        leases: list[Lease] = []
        with self._changed:
            if self._run_complete:
                return leases
            now = self._clock()
            expires = now + self.settings.lease_duration.total_seconds()
            with self._database.transaction() as connection:
                for group, item, attempt in self._expired(connection, now, max_groups):
                    connection.execute(
                        "UPDATE groups SET attempt = ?, expires_unix_seconds = ?, worker_id = ?, region = ?"
                        " WHERE number = ?",
                        (attempt + 1, expires, worker_id, region, group),
                    )
                    add_to_counter(connection, "leases_again", 1)
                    samples = self._missing_samples(connection, group)
                    leases.append(self._lease(group=group, attempt=attempt + 1, item=item, samples=samples))
                num_again = len(leases)
                (group,) = connection.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()
                room = self.settings.max_open_groups - num_open(connection)
                for number in range(group, group + max(0, min(room, max_groups - num_again))):
                    item = item_of(seed=self.settings.seed, group=number, num_items=self.settings.num_items)
                    connection.execute(
                        "INSERT INTO groups (number, item, state, attempt, expires_unix_seconds, worker_id, region)"
                        " VALUES (?, ?, 'open', 0, ?, ?, ?)",
                        (number, item, expires, worker_id, region),
                    )
                    samples = tuple(range(self.settings.samples_per_group))
                    leases.append(self._lease(group=number, attempt=0, item=item, samples=samples))
                self._show(connection)
            _LEASED.labels("again").inc(num_again)
            _LEASED.labels("new").inc(len(leases) - num_again)
        return leases

    def accept(self, trajectory: Trajectory) -> Receipt:
        """Take one trajectory in; durable and counted when this returns, and harmless to repeat."""
        return self.accept_many([trajectory])[0]

    def accept_many(self, arrivals: Sequence[Trajectory | Refusal]) -> list[Receipt]:
        """Take several in, or count what could not be read, in one transaction; receipts keep the order."""
        payloads = [encode_trajectory(arrival) if isinstance(arrival, Trajectory) else b"" for arrival in arrivals]
        with self._changed:
            with self._database.transaction() as connection:
                judged = [
                    admit(connection, arrival, payload, settings=self.settings)
                    for arrival, payload in zip(arrivals, payloads, strict=True)
                ]
                self._show(connection)
            self._changed.notify_all()
        for outcome, refusal in judged:
            _RECEIVED.labels(outcome).inc()
            if refusal:
                _REFUSED.labels(refusal.reason).inc()
        return [
            Receipt(outcome, f"{refusal.reason}: {refusal.detail}" if refusal else "") for outcome, refusal in judged
        ]

    def wait_for_groups(self, num_groups: int, *, timeout: timedelta) -> bool:
        """Wait until so many complete groups are here; return whether they are.

        Staleness is not looked at, so a `take_batch` that follows may still find too few; then wait again.

        Raises:
            ConfigError: `max_open_groups` is lower, so they never would be.
        """
        if num_groups > self.settings.max_open_groups:
            raise ConfigError(
                f"a step wants {num_groups} groups but max_open_groups is {self.settings.max_open_groups}: raise it"
            )
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while True:
                with self._database.transaction() as connection:
                    if num_complete(connection, self.settings.samples_per_group) >= num_groups:
                        return True
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)

    def take_batch(self, num_groups: int, *, version: int, step: int) -> Batch | None:
        """Give the oldest complete groups to optimizer step `step`, or None while there are too few.

        Groups with a token older than `version - max_staleness`, or of an abandoned version, are dropped first, also
        when the answer is None.

        Raises:
            ConfigError: a step as late as this one has already taken a batch; steps ascend, `rollback` undoes them.
            DamagedError: a payload on disk is not what was received.
        """
        with self._changed:
            with self._database.transaction() as connection:
                (last,) = connection.execute(
                    "SELECT MAX(step) FROM groups WHERE step IS NOT NULL AND state IN ('taken', 'trained')"
                ).fetchone()
                if last is not None and step <= last:
                    raise ConfigError(
                        f"step {step} wants a batch but step {last} has one: call rollback({step - 1}) first"
                    )
                self._drop_unfit(connection, version)
                self._show(connection)
            with self._database.transaction() as connection:
                numbers = [
                    number
                    for (number,) in connection.execute(
                        "SELECT number FROM groups WHERE state = 'open' AND num_received = ? ORDER BY number LIMIT ?",
                        (self.settings.samples_per_group, num_groups),
                    )
                ]
                if len(numbers) < num_groups:
                    return None
                groups = tuple(self._read_group(connection, number) for number in numbers)
                connection.executemany(
                    "UPDATE groups SET state = 'taken', step = ? WHERE number = ?",
                    [(step, number) for number in numbers],
                )
                self._show(connection)
        return Batch(step=step, version=version, groups=groups)

    def trained(self, step: int) -> None:
        """Note that the optimizer step has used what it took; repeating it changes nothing.

        Raises:
            ConfigError: the step has taken nothing.
        """
        with self._changed, self._database.transaction() as connection:
            numbers = self._taken_by(connection, step)
            connection.executemany("UPDATE groups SET state = 'trained' WHERE number = ?", [(n,) for n in numbers])
            _TRAINED.inc(len(numbers) * self.settings.samples_per_group)

    def discard(self, step: int) -> None:
        """Drop what a step took that was then skipped, such as one with a non-finite gradient; safe to repeat.

        Raises:
            ConfigError: the step has taken nothing.
        """
        with self._changed, self._database.transaction() as connection:
            self._drop(connection, self._taken_by(connection, step), DropReason.SKIPPED_STEP)

    def rollback(self, step: int) -> int:
        """Undo all steps after `step`, when the learner resumes from the checkpoint made at it.

        What they took is pending again (and dropped later if it has become too stale); where a later checkpoint let
        the payload go it is dropped as forgotten. What `step` and earlier ones took counts as trained, because the
        checkpoint contains it. Returns the number of trajectories that are pending again.
        """
        with self._changed:
            with self._database.transaction() as connection:
                connection.execute(
                    "UPDATE groups SET state = 'trained' WHERE state = 'taken' AND step <= ?",
                    (step,),
                )
                undone = connection.execute(
                    "SELECT number, EXISTS (SELECT 1 FROM payloads WHERE group_number = number) FROM groups"
                    " WHERE step > ? AND state IN ('taken', 'trained') ORDER BY number",
                    (step,),
                ).fetchall()
                self._drop(connection, [number for number, held in undone if not held], DropReason.FORGOTTEN)
                back = [number for number, held in undone if held]
                connection.executemany(
                    "UPDATE groups SET state = 'open', step = NULL WHERE number = ?", [(number,) for number in back]
                )
                num_back = len(back) * self.settings.samples_per_group
                add_to_counter(connection, "rolled_back", num_back)
                self._show(connection)
            _ROLLED_BACK.inc(num_back)
            self._changed.notify_all()
        if undone:
            logger.info("rolled back to step %d: %d groups pending again of %d undone", step, len(back), len(undone))
        return num_back

    def checkpoint(self, step: int) -> None:
        """Let go of payloads trained at or before `step`: no resume will start before its checkpoint any more.

        Pass the step of the oldest checkpoint that is kept.
        """
        with self._changed, self._database.transaction() as connection:
            numbers = connection.execute(
                "SELECT DISTINCT number FROM payloads JOIN groups ON number = group_number"
                " WHERE state = 'trained' AND step <= ?",
                (step,),
            ).fetchall()
            forget_payloads(connection, [number for (number,) in numbers])

    def abandon(self, versions: Iterable[int]) -> None:
        """Note versions that a resume left behind; groups with a token of one are dropped by the next `take_batch`."""
        with self._changed, self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO abandoned_versions VALUES (?) ON CONFLICT DO NOTHING",
                [(version,) for version in versions],
            )

    def finish(self) -> None:
        """Hand out no more work; workers are told that the run is complete. Trajectories are still accepted."""
        with self._changed:
            self._run_complete = True
            self._changed.notify_all()

    def drop_open(self, reason: DropReason = DropReason.RUN_COMPLETE) -> int:
        """Drop every group that no step took; return the number of trajectories dropped."""
        with self._changed, self._database.transaction() as connection:
            numbers = connection.execute("SELECT number FROM groups WHERE state = 'open'").fetchall()
            num_dropped = self._drop(connection, [number for (number,) in numbers], reason)
            self._show(connection)
        return num_dropped

    def counts(self) -> LedgerCounts:
        """Return all totals at one moment."""
        with self._changed, self._database.transaction() as connection:
            states = connection.execute(
                "SELECT state, COALESCE(drop_reason, ''), COUNT(*), SUM(num_received) FROM groups GROUP BY 1, 2"
            ).fetchall()
            counters = {
                (name, reason): value
                for name, reason, value in connection.execute("SELECT name, reason, value FROM counters")
            }
            num_groups_complete = num_complete(connection, self.settings.samples_per_group)
        groups = {(state, reason): number for state, reason, number, _ in states}
        received = {(state, reason): number for state, reason, _, number in states}
        size = self.settings.samples_per_group
        num_dropped_groups = sum(number for (state, _), number in groups.items() if state == "dropped")
        dropped = {reason: number for (state, reason), number in received.items() if state == "dropped"}
        num_groups_open = groups.get(("open", ""), 0)
        return LedgerCounts(
            num_groups_leased=sum(groups.values()),
            num_samples_leased=sum(groups.values()) * size,
            num_groups_open=num_groups_open,
            num_groups_complete=num_groups_complete,
            num_received=counters.get(("accepted", ""), 0),
            num_trained=received.get(("trained", ""), 0),
            num_pending=received.get(("open", ""), 0) + received.get(("taken", ""), 0),
            dropped=dropped,
            num_awaited=num_groups_open * size - received.get(("open", ""), 0),
            num_never_received=num_dropped_groups * size - sum(dropped.values()),
            num_duplicates=counters.get(("duplicate", ""), 0),
            num_superseded=counters.get(("superseded", ""), 0),
            refused={reason: value for (name, reason), value in counters.items() if name == "refused"},
            num_rolled_back=counters.get(("rolled_back", ""), 0),
            num_leases_again=counters.get(("leases_again", ""), 0),
        )

    def verify(self) -> LedgerCounts:
        """Recount every row against the totals and return them; reads the whole file, payloads excepted.

        Raises:
            DamagedError: something does not add up.
        """
        with self._changed:
            with self._database.transaction() as connection:
                wrong = connection.execute(
                    "SELECT number, state, num_received,"
                    " (SELECT COUNT(*) FROM trajectories WHERE group_number = number) AS num_rows,"
                    " (SELECT COUNT(*) FROM payloads WHERE group_number = number) AS num_payloads FROM groups"
                    " WHERE num_rows != num_received"
                    " OR (state IN ('open', 'taken') AND num_payloads != num_received)"
                    " OR (state = 'dropped' AND num_payloads != 0)"
                    " OR (state IN ('taken', 'trained') AND num_received != ?) LIMIT 1",
                    (self.settings.samples_per_group,),
                ).fetchone()
                if wrong:
                    group, state, num_received, num_rows, num_payloads = wrong
                    raise self._database.damaged(
                        f"{state} group {group} counts {num_received} trajectories, has {num_rows} rows and "
                        f"{num_payloads} payloads"
                    )
            counts = self.counts()
        counts.check()
        return counts

    def _lease(self, *, group: int, attempt: int, item: int, samples: tuple[int, ...]) -> Lease:
        return Lease(
            group=group,
            attempt=attempt,
            task=self.settings.task,
            item=item,
            samples=samples,
            expires_in=self.settings.lease_duration,
            sampling=self.settings.sampling,
        )

    def _expired(self, connection: sqlite3.Connection, now: float, limit: int) -> list[tuple[int, int, int]]:
        return connection.execute(
            "SELECT number, item, attempt FROM groups WHERE state = 'open' AND num_received < ?"
            " AND expires_unix_seconds <= ? ORDER BY number LIMIT ?",
            (self.settings.samples_per_group, now, limit),
        ).fetchall()

    def _missing_samples(self, connection: sqlite3.Connection, group: int) -> tuple[int, ...]:
        rows = connection.execute("SELECT sample FROM trajectories WHERE group_number = ?", (group,))
        here = {sample for (sample,) in rows}
        return tuple(sample for sample in range(self.settings.samples_per_group) if sample not in here)

    def _read_group(self, connection: sqlite3.Connection, group: int) -> tuple[Trajectory, ...]:
        rows = connection.execute(
            "SELECT sample, attempt, digest, payload FROM trajectories JOIN payloads USING (group_number, sample)"
            " WHERE group_number = ? ORDER BY sample",
            (group,),
        ).fetchall()
        if len(rows) != self.settings.samples_per_group:
            raise self._database.damaged(f"group {group} has {len(rows)} of {self.settings.samples_per_group} payloads")
        trajectories = []
        for sample, attempt, digest, payload in rows:
            key = TrajectoryKey(group=group, sample=sample, attempt=attempt)
            if digest != payload_digest(key, payload):
                raise self._database.damaged(f"the payload of {key} does not have its digest")
            trajectory = decode_trajectory(payload, run=self.settings.run, key=key)
            if isinstance(trajectory, Refusal):
                raise self._database.damaged(f"the payload of {key} is {trajectory.reason}: {trajectory.detail}")
            trajectories.append(trajectory)
        return tuple(trajectories)

    def _taken_by(self, connection: sqlite3.Connection, step: int) -> list[int]:
        rows = connection.execute("SELECT number, state FROM groups WHERE step = ?", (step,)).fetchall()
        if not rows:
            raise ConfigError(f"step {step} has taken no batch: call take_batch first")
        return [number for number, state in rows if state == "taken"]

    def _drop_unfit(self, connection: sqlite3.Connection, version: int) -> None:
        oldest = version - self.settings.max_staleness
        for reason, condition, arguments in (
            (DropReason.ABANDONED, "version IN (SELECT version FROM abandoned_versions)", ()),
            (DropReason.STALE, "version < ?", (oldest,)),
        ):
            numbers = connection.execute(
                "SELECT DISTINCT number FROM groups JOIN span_versions ON group_number = number"
                f" WHERE state = 'open' AND {condition} ORDER BY number",
                arguments,
            ).fetchall()
            num_dropped = self._drop(connection, [number for (number,) in numbers], reason)
            if numbers:
                logger.info(
                    "dropped %d groups (%d trajectories) as %s at version %d",
                    len(numbers),
                    num_dropped,
                    reason,
                    version,
                )

    def _drop(self, connection: sqlite3.Connection, numbers: Collection[int], reason: DropReason) -> int:
        num_dropped = 0
        for number in numbers:
            (num_received,) = connection.execute(
                "SELECT num_received FROM groups WHERE number = ?", (number,)
            ).fetchone()
            connection.execute(
                "UPDATE groups SET state = 'dropped', drop_reason = ? WHERE number = ?", (reason, number)
            )
            num_dropped += num_received
        forget_payloads(connection, numbers)
        _DROPPED.labels(reason).inc(num_dropped)
        return num_dropped

    def _show(self, connection: sqlite3.Connection) -> None:
        _OPEN.set(num_open(connection))
        _COMPLETE.set(num_complete(connection, self.settings.samples_per_group))
