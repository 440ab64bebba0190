"""What becomes of a trajectory that arrives: accepted once, recognised when repeated, or refused with a reason.

The order of the checks matters: a sample that is here already is a duplicate or superseded even when its group has
long been trained or dropped, so that a late repeat is never counted as a loss.
"""

from __future__ import annotations

import sqlite3

from sparsewire.sync.trajectories.settings import LedgerSettings
from sparsewire.sync.trajectories.tables import add_to_counter
from sparsewire.sync.trajectories.types import Outcome, Refusal, RefusalReason, Trajectory
from sparsewire.sync.trajectories.wire import payload_digest


def admit(
    connection: sqlite3.Connection, arrival: Trajectory | Refusal, payload: bytes, *, settings: LedgerSettings
) -> tuple[Outcome, Refusal | None]:
    """Judge one arrival, store it when it is new, and count it; part of the caller's transaction.

    Args:
        payload: The trajectory serialised; ignored for a refusal.
    """
    verdict = arrival if isinstance(arrival, Refusal) else _verdict(connection, arrival, len(payload), settings)
    if isinstance(verdict, Refusal):
        add_to_counter(connection, "refused", 1, reason=verdict.reason)
        return Outcome.REFUSED, verdict
    add_to_counter(connection, verdict, 1)
    if verdict is Outcome.ACCEPTED and isinstance(arrival, Trajectory):
        _insert(connection, arrival, payload)
    return verdict, None


def _verdict(
    connection: sqlite3.Connection, trajectory: Trajectory, num_bytes: int, settings: LedgerSettings
) -> Outcome | Refusal:
    key = trajectory.key
    if trajectory.run != settings.run:
        return Refusal(reason=RefusalReason.WRONG_RUN, detail=f"this is run {settings.run!r}")
    group = connection.execute(
        "SELECT item, state, attempt, drop_reason FROM groups WHERE number = ?", (key.group,)
    ).fetchone()
    if group is None:
        return Refusal(reason=RefusalReason.UNKNOWN_GROUP, detail=f"group {key.group} was never leased")
    item, state, attempt, drop_reason = group
    if trajectory.task != settings.task or trajectory.item != item:
        return Refusal(reason=RefusalReason.WRONG_ITEM, detail=f"{key} was leased for {settings.task} item {item}")
    if not 0 <= key.sample < settings.samples_per_group:
        return Refusal(
            reason=RefusalReason.SAMPLE_OUT_OF_RANGE, detail=f"{key}: a group has {settings.samples_per_group}"
        )
    if key.attempt > attempt:
        return Refusal(reason=RefusalReason.UNKNOWN_ATTEMPT, detail=f"{key}: the newest attempt is {attempt}")
    row = connection.execute(
        "SELECT attempt FROM trajectories WHERE group_number = ? AND sample = ?", (key.group, key.sample)
    ).fetchone()
    if row is not None:
        return Outcome.DUPLICATE if row[0] == key.attempt else Outcome.SUPERSEDED
    if state == "dropped":
        return Refusal(reason=RefusalReason.GROUP_DROPPED, detail=f"group {key.group} was dropped: {drop_reason}")
    if not trajectory.spans:
        return Refusal(reason=RefusalReason.EMPTY, detail=f"{key} has no completion token")
    if num_bytes > settings.max_trajectory_bytes:
        return Refusal(
            reason=RefusalReason.TOO_LARGE,
            detail=f"{key} has {num_bytes} bytes, at most {settings.max_trajectory_bytes}",
        )
    return Outcome.ACCEPTED


def _insert(connection: sqlite3.Connection, trajectory: Trajectory, payload: bytes) -> None:
    key = trajectory.key
    connection.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (key.group, key.sample, key.attempt))
    connection.execute(
        "INSERT INTO payloads VALUES (?, ?, ?, ?)", (key.group, key.sample, payload_digest(key, payload), payload)
    )
    connection.executemany(
        "INSERT INTO span_versions VALUES (?, ?, ?)",
        [(key.group, key.sample, version) for version in {span.version for span in trajectory.spans}],
    )
    connection.execute("UPDATE groups SET num_received = num_received + 1 WHERE number = ?", (key.group,))
