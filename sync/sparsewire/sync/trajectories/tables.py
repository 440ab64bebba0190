"""The tables of the ledger, and the statements that more than one of its operations needs.

`groups` has a row for every group ever leased and `trajectories` one for every sample received; both stay for the
run. `payloads` and `span_versions` hold what may still be trained and are emptied by drops and checkpoints.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

FORMAT_NUMBER = 1
SCHEMA = """
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    item INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'taken', 'trained', 'dropped')),
    attempt INTEGER NOT NULL,
    expires_unix_seconds REAL NOT NULL,
    worker_id TEXT NOT NULL,
    region TEXT NOT NULL,
    num_received INTEGER NOT NULL DEFAULT 0,
    step INTEGER,
    drop_reason TEXT
);
CREATE INDEX groups_by_state ON groups (state, number);
CREATE INDEX groups_by_step ON groups (step, state) WHERE step IS NOT NULL;
CREATE TABLE trajectories (
    group_number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    PRIMARY KEY (group_number, sample)
) WITHOUT ROWID;
CREATE TABLE payloads (
    group_number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    digest BLOB NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (group_number, sample)
);
CREATE TABLE span_versions (
    group_number INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (group_number, sample, version)
) WITHOUT ROWID;
CREATE TABLE abandoned_versions (version INTEGER PRIMARY KEY);
CREATE TABLE counters (
    name TEXT NOT NULL,
    reason TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (name, reason)
) WITHOUT ROWID;
"""


def num_open(connection: sqlite3.Connection) -> int:
    """Count groups that are leased or buffered and not yet taken."""
    (number,) = connection.execute("SELECT COUNT(*) FROM groups WHERE state = 'open'").fetchone()
    return int(number)


def num_complete(connection: sqlite3.Connection, samples_per_group: int) -> int:
    """Count open groups of which every sample is here."""
    (number,) = connection.execute(
        "SELECT COUNT(*) FROM groups WHERE state = 'open' AND num_received = ?", (samples_per_group,)
    ).fetchone()
    return int(number)


def add_to_counter(connection: sqlite3.Connection, name: str, by: int, *, reason: str = "") -> None:
    """Move the durable counter of this name and reason."""
    connection.execute(
        "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (name, reason) DO UPDATE SET value = value + excluded.value",
        (name, reason, by),
    )


def forget_payloads(connection: sqlite3.Connection, groups: Collection[int]) -> None:
    """Delete what only a group that may still be trained needs."""
    for table in ("payloads", "span_versions"):
        connection.executemany(f"DELETE FROM {table} WHERE group_number = ?", [(group,) for group in groups])
