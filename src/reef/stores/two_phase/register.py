"""Records of creations, the interface of the register that keeps them, and one in SQLite.

A record names a destination and the temporary object, its source, that it is copied from. A source
is named `<destination>.<uuid>.<checksum>`, next to its destination. The uuid keeps writers apart;
the checksum shows, without a request to the register, whether the destination has the right bytes.
Names of that form are reserved: the two-phase store hides them from listings and refuses to write
them for its callers.

A writer whose INSERT had no response may have to report "exists" while that INSERT is still in
flight. Before it does, it puts a withdrawal next to its source, `<destination>.<uuid>.<zeros>`:
a record of that uuid that arrives later counts for nothing.

A register is a table of records in a database with transactions. It has five statements, each
atomic, and durable when it responds:

    insert   if there is no record of that destination           who won
    read     the records of some destinations, as of now          who won, and how far it is
    commit   the record of this destination and this source       its object is there
    delete   the records of these destinations and sources        its object is gone
    page     records by destination, in the order of their bytes  for recovery and collection

An `UnavailableError` from a statement that writes may mean that it took effect all the same;
every one of them may be sent again. A register may serve many buckets: its records are kept
apart by `scope`, which is the bucket's URL by default.

A register has an id, generated when it is created: a register that was lost and created again is
another one, and its writers are refused, since it does not know who won before. A register that is
restored from a backup keeps its id, and has lost records all the same. Its `incarnation` shows
that (H72): a value that is compared by each creation, before the copy and again with the commit.

    part                          changes with
    a record in scope RESERVED    `begin_incarnation`: `reef store recover --restored`
    a witness of the database     a restore by the database's own means, as far as it shows one

The record is an ordinary one, so that registers of older releases get one at the first use,
without a change to their tables. Older releases neither read nor change it.

**SQLite** needs no server, and serves processes that share a disk. Every statement is its own
transaction, in write-ahead mode with full syncs: a statement that has returned survives a power
failure. The file may be opened by any number of processes of one machine; a network file system is
not good enough for SQLite's locks. A connection is used by one thread at a time, and never by a
forked child, which opens its own.

Its witness of a restore (H72) is the schema version, which SQLite raises when a backup is copied
into a live database, and the file's inode, for a backup that takes the file's place: a connection
would write to the old file for as long as it is open, so every statement compares the inode first.
"""

import hashlib
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from reef.errors import CorruptionError, ErrorKind, InvalidInputError, ReefError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.wrappers.policies import Backoff, RetryPolicy

# --- records ----------------------------------------------------------------------


CHECKSUM_BYTES = 16
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
WITHDRAWN = "0" * 2 * CHECKSUM_BYTES
TEMPORARY = re.compile(rf"(.+)\.{UUID}\.[0-9a-f]{{32}}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """The winner of a name. Inserted once, committed once, and deleted after its object."""

    destination: str
    source: str
    checksum: str
    """Checksum of the object's bytes."""
    committed: bool = False
    """Whether the object was seen at the destination: the source is not needed any more."""


def new_record(runtime: Runtime, destination: str, body: bytes) -> Record:
    """Return a record with a unique source."""
    checksum = checksum_of(body)
    return Record(destination, f"{destination}.{_uuid(runtime)}.{checksum}", checksum)


def checksum_of(body: bytes) -> str:
    """Return 128 bits as text: enough that bytes with the same checksum are the same bytes."""
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).hexdigest()


def destination_of(key: str) -> str | None:
    """Return the destination that a temporary object is for; None if it is an ordinary object.

    >>> destination_of("w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00112233445566778899aabbccddeeff")
    'w/7'
    >>> destination_of("w/7")
    """
    match = TEMPORARY.fullmatch(key)
    return match[1] if match else None


def is_temporary(key: str) -> bool:
    """Whether a key is the name of a source, or of a withdrawal."""
    return destination_of(key) is not None


def withdrawal_of(source: str) -> str:
    """Return the name of the object that withdraws the attempt of this source.

    >>> withdrawal_of("w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00112233445566778899aabbccddeeff")
    'w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00000000000000000000000000000000'
    """
    return f"{source.rpartition('.')[0]}.{WITHDRAWN}"


def same_attempt(source: str, other: str) -> bool:
    """Whether two temporary objects belong to one attempt: they differ in the checksum at most."""
    return source.rpartition(".")[0] == other.rpartition(".")[0]


def _uuid(runtime: Runtime) -> str:
    """Return a random uuid (version 4) in its usual spelling."""
    number = int.from_bytes(runtime.random_bytes(16), "big")
    number = number & ~(0xF << 76) | 4 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# --- the register -----------------------------------------------------------------


T = TypeVar("T")

PAGE = 500
"""Records in one page."""
RESERVED = "reef-register"
"""The scope of records about the register itself."""
INCARNATION = "incarnation"
"""The destination of the record whose source is the incarnation."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The record of a destination, and the incarnation of the register that has it."""

    record: Record | None
    incarnation: str


class Register(ABC):
    """Records of one bucket. Safe for threads and forks; picklable where it can be shared."""

    scope: str

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind of database, the register's own id, and the scope: equal for equal records."""

    def current_name(self) -> str:
        """Return the name as the database has it now; `name` may be cached."""
        return self.name

    @abstractmethod
    def insert(self, record: Record) -> bool:
        """Add a record; False if the destination has one already, even the same."""

    @abstractmethod
    def read(self, destinations: Sequence[str]) -> list[Record]:
        """Return the records that there are, in any order."""

    @abstractmethod
    def commit(self, record: Record) -> None:
        """Mark the object as copied; does nothing if the destination has another record now."""

    @abstractmethod
    def delete(self, records: Sequence[Record]) -> None:
        """Remove records, each only if it still has the same source."""

    @abstractmethod
    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        """Return up to PAGE records after a destination; optionally only those not committed."""

    # --- incarnations -------------------------------------------------------------
    def incarnation(self) -> str:
        """Return the incarnation, as of now; empty for a register that has none."""
        return ""

    def holding(self, destination: str) -> Holding:
        """Return a destination's record and the incarnation, as of now."""
        return Holding(self.read_one(destination), self.incarnation())

    def commit_in(self, record: Record, incarnation: str) -> bool:
        """Commit; False unless exactly this record is now committed, in this incarnation."""
        self.commit(record)
        now = self.holding(record.destination)
        is_there = now.record is not None and now.record.source == record.source
        return is_there and now.incarnation == incarnation

    def begin_incarnation(self) -> str:
        """Generate a new incarnation, after a restore; return it."""
        raise InvalidInputError(
            f"{self!r} has no incarnations", kind=ErrorKind.UNSUPPORTED_BY_STORE, scope=self.scope
        )

    def all(self, prefix: str = "", *, unfinished: bool = False) -> Iterator[Record]:
        """Yield the records whose destinations begin with `prefix`, in order."""
        last = ""
        while found := self.page(prefix, last, unfinished=unfinished):
            yield from found
            last = found[-1].destination

    def read_one(self, destination: str) -> Record | None:
        return next(iter(self.read([destination])), None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self.scope}>"


class DatabaseRegister(Register):
    """A register in a database that has an id of its own. Picklable; connects after a fork."""

    kind: str

    def __init__(self, *arguments: Any) -> None:
        """Keep the arguments that a copy is made with, the last of them the scope."""
        self._arguments = arguments
        self.scope = arguments[-1]
        self._lock = leaf_lock()
        self._process_id = -1
        self._name: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    @property
    def name(self) -> str:
        if self._name is None:
            self._name = self.current_name()
        return self._name

    def current_name(self) -> str:
        return f"{self.kind}-{self._identity()} for {self.scope}"

    @abstractmethod
    def _identity(self) -> str:
        """Read the id of the database."""


class RetryingRegister(Register):
    """Retries the statements of a register; an insert is sent once."""

    def __init__(self, inner: Register, runtime: Runtime, policy: RetryPolicy) -> None:
        self.inner = inner
        self.scope = inner.scope
        self._runtime = runtime
        self._policy = policy

    @property
    def name(self) -> str:
        return self._try(lambda: self.inner.name)

    def current_name(self) -> str:
        return self._try(self.inner.current_name)

    def incarnation(self) -> str:
        return self._try(self.inner.incarnation)

    def holding(self, destination: str) -> Holding:
        return self._try(lambda: self.inner.holding(destination))

    def commit_in(self, record: Record, incarnation: str) -> bool:
        return self._try(lambda: self.inner.commit_in(record, incarnation))

    def begin_incarnation(self) -> str:
        return self._try(self.inner.begin_incarnation)

    def insert(self, record: Record) -> bool:
        return self.inner.insert(record)

    def read(self, destinations: Sequence[str]) -> list[Record]:
        return self._try(lambda: self.inner.read(destinations))

    def commit(self, record: Record) -> None:
        self._try(lambda: self.inner.commit(record))

    def delete(self, records: Sequence[Record]) -> None:
        self._try(lambda: self.inner.delete(records))

    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        return self._try(lambda: self.inner.page(prefix, start_after, unfinished=unfinished))

    def _try(self, call: Callable[[], T]) -> T:
        backoff = Backoff(self._runtime, self._policy)
        while True:
            try:
                return call()
            except UnavailableError:
                if not backoff.wait():
                    raise

    def __repr__(self) -> str:
        return repr(self.inner)


def end_of(prefix: str) -> str:
    """Return a key that sorts after every key with this prefix: no key has this character."""
    return prefix + "\U0010ffff"


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
"""Permanent errors: not a database, or not writable."""
_abandoned: list[Any] = []
"""Connections from before a fork. Closing one would drop the locks of the parent."""


class SqliteRegister(DatabaseRegister):
    """Records of one bucket in a file."""

    kind = "sqlite"

    def __init__(self, path: str, scope: str) -> None:
        self.path = os.path.abspath(path)
        super().__init__(self.path, scope)
        self._connection: sqlite3.Connection | None = None
        self._inode = ""

    def _identity(self) -> str:
        with self._connected() as connection:
            ((number,),) = connection.execute("SELECT id FROM reef_register")
        return str(number)

    def insert(self, record: Record) -> bool:
        row = (self.scope, record.destination, record.source, record.checksum)
        statement = f"INSERT OR IGNORE INTO reef_records (scope, {COLUMNS}) VALUES (?, ?, ?, ?, 0)"
        with self._connected() as connection:
            return connection.execute(statement, row).rowcount == 1

    def read(self, destinations: Sequence[str]) -> list[Record]:
        found: list[Record] = []
        for at in range(0, len(destinations), NAMES_AT_ONCE):
            some = destinations[at : at + NAMES_AT_ONCE]
            marks = ", ".join("?" * len(some))
            found += self._select(f"destination IN ({marks})", some)
        return found

    def commit(self, record: Record) -> None:
        statement = (
            "UPDATE reef_records SET committed = 1 "
            "WHERE scope = ? AND destination = ? AND source = ? AND committed = 0"
        )
        with self._connected() as connection:
            connection.execute(statement, (self.scope, record.destination, record.source))

    def incarnation(self) -> str:
        return self.holding(INCARNATION).incarnation

    def holding(self, destination: str) -> Holding:
        statement = (
            f"SELECT now.incarnation, {COLUMNS} FROM (SELECT {WITNESSED} AS incarnation) AS now "
            "LEFT JOIN reef_records ON scope = ? AND destination = ?"
        )
        with self._connected() as connection:
            ((shown, *row),) = connection.execute(statement, (self.scope, destination))
            incarnation = f"{self._inode}/{shown}"
        found = None if row[0] is None else Record(row[0], row[1], row[2], committed=bool(row[3]))
        return Holding(found, incarnation)

    def commit_in(self, record: Record, incarnation: str) -> bool:
        statement = (
            "UPDATE reef_records SET committed = 1 "
            f"WHERE scope = ? AND destination = ? AND source = ? AND ? || '/' || {WITNESSED} = ?"
        )
        with self._connected() as connection:
            row = (self.scope, record.destination, record.source, self._inode, incarnation)
            return connection.execute(statement, row).rowcount == 1

    def begin_incarnation(self) -> str:
        statement = (
            f"INSERT OR REPLACE INTO reef_records (scope, {COLUMNS}) "
            f"VALUES ('{RESERVED}', '{INCARNATION}', ?, '', 1)"
        )
        with self._connected() as connection:
            connection.execute(statement, (REAL.ulid(),))
        return self.incarnation()

    def delete(self, records: Sequence[Record]) -> None:
        statement = "DELETE FROM reef_records WHERE scope = ? AND destination = ? AND source = ?"
        rows = [(self.scope, record.destination, record.source) for record in records]
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(statement, rows)
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
        statement = f"SELECT {COLUMNS} FROM reef_records WHERE scope = ? AND {where}"
        with self._connected() as connection:
            rows = connection.execute(statement, (self.scope, *values)).fetchall()
        return [Record(row[0], row[1], row[2], committed=bool(row[3])) for row in rows]

    # --- the connection -----------------------------------------------------------
    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._open()
            except sqlite3.Error as error:
                raise self._translate_error(error) from error

    def _translate_error(self, error: sqlite3.Error) -> ReefError:
        code = getattr(error, "sqlite_errorcode", None)
        code = None if code is None else code & 0xFF  # without the extended code
        message = f"the register {self.path} cannot be used: {error}"
        if code == sqlite3.SQLITE_CORRUPT:
            hint = "Restore it from a backup; the page on two-phase says what to do without one"
            return CorruptionError(message, hint=hint, object=self.path)
        if code in REFUSALS:
            return InvalidInputError(message, kind=ErrorKind.REFUSED_BY_STORE, register=self.path)
        return UnavailableError(message, register=self.path)

    def _open(self) -> sqlite3.Connection:
        process_id = REAL.process_id()
        if self._connection is not None and self._process_id != process_id:
            _abandoned.append(self._connection)
            self._connection = None
        if self._connection is not None and self._inode_now() != self._inode:
            self._connection.close()
            self._connection = None
        while self._connection is None:
            inode = self._inode_at_path()
            connection = self._connect()
            if self._inode_at_path() == inode:
                self._connection, self._process_id, self._inode = connection, process_id, inode
            else:  # it was just made, or replaced after it was opened: the next one is sure
                connection.close()
        return self._connection

    def _inode_now(self) -> str:
        """Return the inode of the file in use, which must be there."""
        inode = self._inode_at_path()
        if not inode:
            raise UnavailableError(
                f"the register {self.path} was removed while it is in use",
                hint="Put it back, or restore it as the page on two-phase says",
                register=self.path,
            )
        return inode

    def _inode_at_path(self) -> str:
        """Return the inode of the file at the path, empty without one. An open file keeps its own:
        no other file gets the same number meanwhile."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return ""
        return f"{status.st_dev}.{status.st_ino}"

    def _connect(self) -> sqlite3.Connection:
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise InvalidInputError(
                f"the register {self.path} cannot be made: there is no directory {folder}",
                kind=ErrorKind.INVALID_OPTION,
            )
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")  # one schema version for all who open it
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
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
