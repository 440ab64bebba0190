"""One SQLite file kept with care: created whole, owned by one process, checked when opened, errors in our words.

The ledger and the spool are built on it. A file appears under its name only when its tables are complete, so an
existing file that is empty or short is damage and never mistaken for a new one. One process owns the file until it
closes it or dies. Callers hold a lock of their own around every use. Write-ahead log; a transaction is on disk when
its block ends.

Known limit: a write-ahead log whose last records were damaged while no process had it open looks like one whose last
transactions never happened; the leases of such trajectories expire and are handed out again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    SparsewireError,
    StoreUnavailableError,
    UnsupportedFormatError,
)

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 3.0
"""How long to wait for a dying predecessor to let go of the file."""

_WAL_BYTES = 16 << 20
"""Size to which the write-ahead log is cut back after a large transaction."""

_META = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"


class Database:
    """A SQLite file of one kind, format and identity. Not thread-safe: the owner serialises its calls."""

    def __init__(
        self,
        *,
        path: Path,
        kind: str,
        format_number: int,
        identity: Mapping[str, str],
        schema: str,
        remedy: str,
    ) -> None:
        """Describe the file; nothing is touched until `open`.

        Args:
            kind: What it is, for messages: `trajectory spool`.
            identity: What the file was made for and may never change, such as the run.
            schema: The tables, as one SQL script.
            remedy: What a user should do with a damaged file.
        """
        self.path = path
        self._kind = kind
        self._format_number = format_number
        self._identity = identity
        self._schema = schema
        self._remedy = remedy
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Create the file if it is absent, take ownership of it, and check it.

        Raises:
            ConfigError: another process owns it, it belongs to another run, or it cannot be written.
            DamagedError: its contents are not what was written.
            UnsupportedFormatError: another build made it.
        """
        wal = Path(f"{self.path}-wal")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                if wal.exists():
                    raise self.damaged(f"the file is gone, but its log {wal} is there")
                self._create()
            elif self.path.stat().st_size < 512:
                raise self.damaged(f"it has only {self.path.stat().st_size} bytes")
        except OSError as error:
            raise ConfigError(f"{self._kind} {self.path} cannot be opened: {error}") from error
        with self._our_errors():
            self._connection = self._connect(self.path)
        try:
            with self._our_errors():
                self._check(self._connection)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file; later use raises."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Run a block as one transaction: all of it is on disk afterwards, or none when it raises.

        Args:
            durable: False where losing the transaction in a power failure is harmless; saves the wait for the disk.

        Raises:
            StoreUnavailableError: the disk is full or failed, or the file is closed; nothing changed.
            DamagedError: SQLite found the file damaged.
        """
        connection = self._connection
        if connection is None:
            raise StoreUnavailableError(f"{self._kind} {self.path} is not open: open it before use")
        with self._our_errors():
            connection.execute("PRAGMA synchronous = " + ("FULL" if durable else "NORMAL"))
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def damaged(self, what: str) -> DamagedError:
        """Return the error that names this file, what is wrong with it, and the remedy."""
        return DamagedError(f"{self._kind} {self.path} is damaged: {what}; {self._remedy}")

    def _create(self) -> None:
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        unfinished.unlink(missing_ok=True)
        try:
            connection = sqlite3.connect(unfinished, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(f"BEGIN; {_META} {self._schema} COMMIT;")
                facts = {"kind": self._kind, "format": str(self._format_number), **self._identity}
                connection.executemany("INSERT INTO meta VALUES (?, ?)", facts.items())
            finally:
                connection.close()
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _connect(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        try:
            facts = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        except sqlite3.OperationalError as error:
            raise self.damaged(str(error)) from error
        if facts.get("kind") != self._kind:
            raise ConfigError(f"{self.path} is a {facts.get('kind')}, not a {self._kind}: choose another path")
        if facts.get("format") != str(self._format_number):
            raise UnsupportedFormatError(
                f"{self._kind} {self.path} has format {facts.get('format')}, this build reads {self._format_number}: "
                "finish the run with the build that made it"
            )
        for name, wanted in self._identity.items():
            if facts.get(name) != wanted:
                raise ConfigError(
                    f"{self._kind} {self.path} was made for {name} {facts.get(name)!r}, not {wanted!r}: "
                    f"restore the old {name} or choose another directory"
                )
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(" ".join(verdict.split()))

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: sqlite3.Error) -> SparsewireError | sqlite3.Error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return self.damaged(str(error)) if isinstance(error, sqlite3.OperationalError) else error
        match code & 0xFF:
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self.damaged(str(error))
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return ConfigError(
                    f"{self._kind} {self.path} is in use by another process: stop it or choose another directory"
                )
            case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR | sqlite3.SQLITE_NOMEM:
                return StoreUnavailableError(
                    f"{self._kind} {self.path} could not be written ({error}); nothing changed: free disk space"
                )
            case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
                return ConfigError(f"{self._kind} {self.path} cannot be opened for writing: {error}")
        return error
