"""A register in a SQLite file: nothing to run, for processes that share a disk.

Every statement is its own transaction, in the write-ahead mode with full syncs: what was answered
survives a power failure. The file may be opened by any number of processes of one machine; a
network file system is not good enough for SQLite's locks. A connection is used by one thread at a
time, and never by a forked child: that one opens its own.

Its witness of a restore (H72) is the schema version, which SQLite raises when a backup is copied
into a live database, and the file's inode, for a backup that takes the file's place: a connection
would write to the old file for as long as it is open, so every statement compares the inode first.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from reef.errors import CorruptionError, InvalidInputError, Kind, ReefError, UnavailableError
from reef.runtime import REAL, leaf_lock
from reef.stores.two_phase.record import Record
from reef.stores.two_phase.register import (
    INCARNATION,
    PAGE,
    RESERVED,
    Holding,
    Register,
    end_of,
)

__all__ = ["SqliteRegister"]

BUSY_S = 30.0
NAMES_AT_ONCE = 500
SCHEMA = """
CREATE TABLE IF NOT EXISTS reef_records (
    scope TEXT NOT NULL,
    destination TEXT NOT NULL,
    source TEXT NOT NULL,
    committed INTEGER NOT NULL,
    checksum TEXT NOT NULL,
    PRIMARY KEY (scope, destination)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reef_records_open ON reef_records (scope, destination)
    WHERE committed = 0;
CREATE TABLE IF NOT EXISTS reef_register (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL)
"""
COLUMNS = "destination, source, checksum, committed"
WITNESSED = (
    "coalesce((SELECT source FROM reef_records "
    f"WHERE scope = '{RESERVED}' AND destination = '{INCARNATION}'), '') "
    "|| '/' || (SELECT schema_version FROM pragma_schema_version)"
)
"""The incarnation, without the file's inode."""
REFUSALS = (
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
)
"""What the file will be tomorrow, too: no database, or not ours to write."""
_abandoned: list[Any] = []
"""Connections from before a fork. Closing one would drop the locks of whoever has the file open."""


class SqliteRegister(Register):
    """Records of one bucket in a file."""

    def __init__(self, path: str, scope: str) -> None:
        self.path = os.path.abspath(path)
        self.scope = scope
        self._lock = leaf_lock()
        self._connection: sqlite3.Connection | None = None
        self._process_id = -1
        self._inode = ""
        self._name: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SqliteRegister, (self.path, self.scope)

    @property
    def name(self) -> str:
        if self._name is None:
            self._name = self.current_name()
        return self._name

    def current_name(self) -> str:
        with self._connected() as connection:
            ((number,),) = connection.execute("SELECT id FROM reef_register")
        return f"sqlite-{number} for {self.scope}"

    def insert(self, record: Record) -> bool:
        row = (self.scope, record.destination, record.source, record.checksum)
        words = f"INSERT OR IGNORE INTO reef_records (scope, {COLUMNS}) VALUES (?, ?, ?, ?, 0)"
        with self._connected() as connection:
            return connection.execute(words, row).rowcount == 1

    def read(self, destinations: Sequence[str]) -> list[Record]:
        found: list[Record] = []
        for at in range(0, len(destinations), NAMES_AT_ONCE):
            some = destinations[at : at + NAMES_AT_ONCE]
            marks = ", ".join("?" * len(some))
            found += self._select(f"destination IN ({marks})", some)
        return found

    def commit(self, record: Record) -> None:
        words = (
            "UPDATE reef_records SET committed = 1 "
            "WHERE scope = ? AND destination = ? AND source = ? AND committed = 0"
        )
        with self._connected() as connection:
            connection.execute(words, (self.scope, record.destination, record.source))

    def incarnation(self) -> str:
        return self.holding(INCARNATION).incarnation

    def holding(self, destination: str) -> Holding:
        words = (
            f"SELECT now.incarnation, {COLUMNS} FROM (SELECT {WITNESSED} AS incarnation) AS now "
            "LEFT JOIN reef_records ON scope = ? AND destination = ?"
        )
        with self._connected() as connection:
            ((shown, *row),) = connection.execute(words, (self.scope, destination))
            incarnation = f"{self._inode}/{shown}"
        found = None if row[0] is None else Record(row[0], row[1], row[2], committed=bool(row[3]))
        return Holding(found, incarnation)

    def commit_in(self, record: Record, incarnation: str) -> bool:
        words = (
            "UPDATE reef_records SET committed = 1 "
            f"WHERE scope = ? AND destination = ? AND source = ? AND ? || '/' || {WITNESSED} = ?"
        )
        with self._connected() as connection:
            row = (self.scope, record.destination, record.source, self._inode, incarnation)
            return connection.execute(words, row).rowcount == 1

    def begin_incarnation(self) -> str:
        words = (
            f"INSERT OR REPLACE INTO reef_records (scope, {COLUMNS}) "
            f"VALUES ('{RESERVED}', '{INCARNATION}', ?, '', 1)"
        )
        with self._connected() as connection:
            connection.execute(words, (REAL.ulid(),))
        return self.incarnation()

    def delete(self, records: Sequence[Record]) -> None:
        words = "DELETE FROM reef_records WHERE scope = ? AND destination = ? AND source = ?"
        rows = [(self.scope, record.destination, record.source) for record in records]
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(words, rows)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        which = "AND committed = 0 " if unfinished else ""
        return self._select(
            f"destination > ? AND destination >= ? AND destination < ? {which}"
            f"ORDER BY destination LIMIT {PAGE}",
            (start_after, prefix, end_of(prefix)),
        )

    def _select(self, where: str, values: Sequence[str]) -> list[Record]:
        words = f"SELECT {COLUMNS} FROM reef_records WHERE scope = ? AND {where}"
        with self._connected() as connection:
            rows = connection.execute(words, (self.scope, *values)).fetchall()
        return [Record(row[0], row[1], row[2], committed=bool(row[3])) for row in rows]

    # --- the connection -----------------------------------------------------------
    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._open()
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> ReefError:
        code = getattr(error, "sqlite_errorcode", None)
        code = None if code is None else code & 0xFF  # the rest tells which kind of it
        told = f"the register {self.path} cannot be used: {error}"
        if code == sqlite3.SQLITE_CORRUPT:
            hint = "Restore it from a backup; the page on two-phase says what to do without one"
            return CorruptionError(told, hint=hint, object=self.path)
        if code in REFUSALS:
            return InvalidInputError(told, kind=Kind.REFUSED_BY_STORE, register=self.path)
        return UnavailableError(told, register=self.path)

    def _open(self) -> sqlite3.Connection:
        process_id = REAL.process_id()
        if self._connection is not None and self._process_id != process_id:
            _abandoned.append(self._connection)
            self._connection = None
        if self._connection is not None and self._inode_now() != self._inode:
            self._connection.close()
            self._connection = None
        if self._connection is None:
            self._connection, self._process_id = self._connect(), process_id
            self._inode = self._inode_now()
        return self._connection

    def _inode_now(self) -> str:
        """Return what names the file at the path. One that is open keeps its inode for itself."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise UnavailableError(
                f"the register {self.path} was removed while it is in use",
                hint="Put it back, or restore it as the page on two-phase says",
                register=self.path,
            ) from error
        return f"{status.st_dev}.{status.st_ino}"

    def _connect(self) -> sqlite3.Connection:
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise InvalidInputError(
                f"the register {self.path} cannot be made: there is no directory {folder}",
                kind=Kind.INVALID_OPTION,
            )
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")  # one schema version for all who open it
            for words in SCHEMA.split(";\n"):
                connection.execute(words)
            connection.execute(
                "INSERT OR IGNORE INTO reef_register (one, id) VALUES (1, ?)", (REAL.ulid(),)
            )
            connection.execute(
                f"INSERT OR IGNORE INTO reef_records (scope, {COLUMNS}) "
                f"VALUES ('{RESERVED}', '{INCARNATION}', ?, '', 1)",
                (REAL.ulid(),),
            )
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection
