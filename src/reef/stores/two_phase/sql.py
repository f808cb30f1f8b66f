"""A register in PostgreSQL, MySQL or MariaDB, through SQLAlchemy.

One table for all buckets, and one with the register's id. Every statement is its own transaction
(autocommit), and is sent to the primary: a replica that lags would forget who won. Names compare
by their bytes: in MySQL they are binary columns, since its usual collations take `A` for `a`.

Their witness of a restore (H72): PostgreSQL's is the start of the server, which every physical
restore and every failover changes, and the file of the table, which a logical restore changes.
MariaDB and MySQL show when the table was made, and no more: a physical restore of theirs is only
shown by `begin_incarnation`.

A pool of connections belongs to the process that opened it; a forked child has its own.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Dialect, Engine, make_url
from sqlalchemy.types import TypeDecorator, TypeEngine

from reef.errors import ErrorKind, InvalidInputError, ReefError, UnavailableError
from reef.runtime import REAL
from reef.stores.two_phase.register import (
    INCARNATION,
    PAGE,
    RESERVED,
    DatabaseRegister,
    Holding,
    Record,
    end_of,
)

NAME_BYTES_MAX = 1024
SOURCE_BYTES_MAX = 1200
CHECKSUM_CHARS = 32
NAMES_AT_ONCE = 500
POOL_SIZE = 8
"""Connections of a process, each held for one statement."""
TIMEOUT_S = 30
MAKES_MAX = 3
DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
REFUSALS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "Unknown database",
    "Access denied",
    "permission denied",
)
"""Texts of permanent refusals: a refused connection comes without a code."""
CONNECT_ARGUMENTS: dict[str, dict[str, Any]] = {
    "psycopg": {
        "connect_timeout": TIMEOUT_S,
        "options": f"-c statement_timeout={TIMEOUT_S * 1000}",
        "tcp_user_timeout": TIMEOUT_S * 1000,
        # A pooler in between may hand each statement to another session.
        "prepare_threshold": None,
    },
    "pymysql": {
        "connect_timeout": TIMEOUT_S,
        "read_timeout": TIMEOUT_S,
        "write_timeout": TIMEOUT_S,
    },
}
"""Every call has a timeout."""


class _Name(TypeDecorator[str]):
    """Text that is equal only to itself, and sorts by its bytes."""

    impl = sa.String
    cache_ok = True

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.bytes_max = bytes_max

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.VARBINARY(self.bytes_max))
        return dialect.type_descriptor(sa.Text(collation="C"))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        binary = value is not None and dialect.name in ("mysql", "mariadb")
        return value.encode() if binary and value is not None else value

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


METADATA = sa.MetaData()
RECORDS = sa.Table(
    "reef_records",
    METADATA,
    sa.Column("scope", _Name(NAME_BYTES_MAX), primary_key=True),
    sa.Column("destination", _Name(NAME_BYTES_MAX), primary_key=True),
    sa.Column("source", _Name(SOURCE_BYTES_MAX), nullable=False),
    sa.Column("checksum", sa.String(CHECKSUM_CHARS), nullable=False),
    sa.Column("committed", sa.SmallInteger, nullable=False, index=True),
)
IDENTITY = sa.Table(
    "reef_register",
    METADATA,
    sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("id", sa.String(26), nullable=False),
)
OWN = (
    f"SELECT source FROM reef_records WHERE scope = '{RESERVED}' AND destination = '{INCARNATION}'"
)
WITNESSED = {
    "postgresql": f"coalesce(({OWN}), '') "
    "|| '/' || extract(epoch FROM pg_postmaster_start_time())::text "
    "|| '/' || coalesce(pg_relation_filenode('reef_records')::text, '')",
    # A table that is updated is read by way of another: MySQL refuses it otherwise.
    "mysql": f"concat(coalesce((SELECT cast(own.source AS char) FROM ({OWN}) AS own), ''), '/', "
    "coalesce((SELECT cast(create_time AS char) FROM information_schema.tables "
    "WHERE table_schema = database() AND table_name = 'reef_records'), ''))",
}
"""The incarnation, as an expression of each dialect."""
_abandoned: list[Any] = []
"""Pools from before a fork: their connections belong to the parent."""


class SqlRegister(DatabaseRegister):
    """Records of one bucket in a table."""

    def __init__(self, url: str, scope: str) -> None:
        super().__init__(url, scope)
        self._url = url
        self._engine: Engine | None = None
        self._made = False
        kind = self._connect().dialect.name  # a missing driver raises here
        self.kind = "mysql" if kind == "mariadb" else kind  # one server has both names

    def _identity(self) -> str:
        with self._session() as connection:
            return str(connection.execute(sa.select(IDENTITY.c.id)).scalar_one())

    def _make(self, engine: Engine) -> None:
        """Create the tables and the id, unless they exist; several processes may do so at once."""
        for attempt in range(MAKES_MAX):
            try:
                METADATA.create_all(engine)
                break
            except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError):
                if attempt + 1 == MAKES_MAX:
                    raise
        with suppress(exc.IntegrityError), engine.connect() as connection:
            if connection.execute(sa.select(IDENTITY.c.id)).scalar() is None:
                connection.execute(sa.insert(IDENTITY).values(one=1, id=REAL.ulid()))
        with suppress(exc.IntegrityError), engine.connect() as connection:
            if connection.execute(sa.text(OWN)).scalar() is None:
                connection.execute(sa.insert(RECORDS).values(_incarnation_row()))
        self._made = True

    def insert(self, record: Record) -> bool:
        row = {
            "scope": self.scope,
            "destination": record.destination,
            "source": record.source,
            "checksum": record.checksum,
            "committed": 0,
        }
        with self._session() as connection:
            try:
                connection.execute(sa.insert(RECORDS).values(row))
            except exc.IntegrityError:  # the primary key is taken
                return False
        return True

    def read(self, destinations: Sequence[str]) -> list[Record]:
        found: list[Record] = []
        for at in range(0, len(destinations), NAMES_AT_ONCE):
            some = list(destinations[at : at + NAMES_AT_ONCE])
            found += self._select(self._mine().where(RECORDS.c.destination.in_(some)))
        return found

    def commit(self, record: Record) -> None:
        update = sa.update(RECORDS).where(*self._is(record)).values(committed=1)
        with self._session() as connection:
            connection.execute(update)

    def incarnation(self) -> str:
        return self.holding(INCARNATION).incarnation

    def holding(self, destination: str) -> Holding:
        now = sa.select(self._witnessed().label("incarnation")).subquery("now")
        key = sa.and_(RECORDS.c.scope == self.scope, RECORDS.c.destination == destination)
        query = sa.select(
            now.c.incarnation,
            RECORDS.c.destination,
            RECORDS.c.source,
            RECORDS.c.checksum,
            RECORDS.c.committed,
        ).select_from(now.outerjoin(RECORDS, key))
        with self._session() as connection:
            shown, *row = connection.execute(query).one()
        found = None if row[0] is None else Record(row[0], row[1], row[2], committed=bool(row[3]))
        return Holding(found, str(shown))

    def commit_in(self, record: Record, incarnation: str) -> bool:
        update = sa.update(RECORDS).where(*self._is(record), self._witnessed() == incarnation)
        with self._session() as connection:
            return connection.execute(update.values(committed=1)).rowcount == 1

    def begin_incarnation(self) -> str:
        row = _incarnation_row()
        own = (RECORDS.c.scope == RESERVED, RECORDS.c.destination == INCARNATION)
        with self._session() as connection:
            changed = sa.update(RECORDS).where(*own).values(source=row["source"])
            if connection.execute(changed).rowcount == 0:
                connection.execute(sa.insert(RECORDS).values(row))
        return self.incarnation()

    def _witnessed(self) -> sa.ColumnElement[str]:
        return sa.literal_column(f"({WITNESSED[self.kind]})", sa.String())

    def delete(self, records: Sequence[Record]) -> None:
        for record in records:
            with self._session() as connection:
                connection.execute(sa.delete(RECORDS).where(*self._is(record)))

    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        name = RECORDS.c.destination
        query = self._mine().where(name > start_after, name >= prefix, name < end_of(prefix))
        if unfinished:
            query = query.where(RECORDS.c.committed == 0)
        return self._select(query.order_by(name).limit(PAGE))

    def _mine(self) -> sa.Select[Any]:
        columns = RECORDS.c
        query = sa.select(columns.destination, columns.source, columns.checksum, columns.committed)
        return query.where(columns.scope == self.scope)

    def _is(self, record: Record) -> tuple[sa.ColumnElement[bool], ...]:
        return (
            RECORDS.c.scope == self.scope,
            RECORDS.c.destination == record.destination,
            RECORDS.c.source == record.source,
        )

    def _select(self, query: sa.Select[Any]) -> list[Record]:
        with self._session() as connection:
            rows = connection.execute(query).all()
        return [Record(row[0], row[1], row[2], committed=bool(row[3])) for row in rows]

    # --- the connections ----------------------------------------------------------
    @contextmanager
    def _session(self) -> Iterator[Connection]:
        """Yield a connection; turn the driver's errors into Reef's own, without any secret."""
        try:
            engine = self._connect()
            if not self._made:
                self._make(engine)
            with engine.connect() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            raise self._translate_error(error) from None

    def _translate_error(self, error: exc.SQLAlchemyError) -> ReefError:
        """Distinguish permanent refusals from transient failures."""
        original = getattr(error, "orig", None) or error
        message = self._without_secrets(f"{type(original).__name__}: {original}".strip())
        wrong = isinstance(error, exc.ProgrammingError | exc.DataError | exc.ArgumentError)
        if wrong or any(text in message for text in REFUSALS):
            return InvalidInputError(
                f"{self!r} refuses: {message}", kind=ErrorKind.REFUSED_BY_STORE
            )
        return UnavailableError(f"{self!r} cannot be used: {message}")

    def _without_secrets(self, text: str) -> str:
        password = make_url(self._url).password
        return text.replace(str(password), "***") if password else text

    def _connect(self) -> Engine:
        process_id = REAL.process_id()
        with self._lock:
            if self._engine is None or self._process_id != process_id:
                if self._engine is not None:
                    _abandoned.append(self._engine)
                self._engine, self._process_id = self._new_engine(), process_id
                weakref.finalize(self, _close, self._engine, process_id)
            return self._engine

    def _new_engine(self) -> Engine:
        try:
            url = make_url(self._url)
            driver = DRIVERS.get(url.drivername, url.drivername)
            url = url.set(drivername=driver)
            arguments = CONNECT_ARGUMENTS.get(driver.partition("+")[2], {})
            given = {k: v for k, v in arguments.items() if k not in url.query}
            return sa.create_engine(
                url,
                isolation_level="AUTOCOMMIT",
                pool_size=POOL_SIZE,
                max_overflow=0,
                pool_pre_ping=True,
                skip_autocommit_rollback=True,  # there is never anything to roll back
                hide_parameters=True,
                connect_args=given,
            )
        except (exc.SQLAlchemyError, ValueError, TypeError):
            raise InvalidInputError(
                "option 'cas' is not a URL that SQLAlchemy understands",
                kind=ErrorKind.INVALID_OPTION,
            ) from None

    def __repr__(self) -> str:
        url = make_url(self._url)
        return f"<SqlRegister {url.get_backend_name()} at {url.host}/{url.database}>"


def _incarnation_row() -> dict[str, Any]:
    return {
        "scope": RESERVED,
        "destination": INCARNATION,
        "source": REAL.ulid(),
        "checksum": "",
        "committed": 1,
    }


def _close(engine: Engine, process_id: int) -> None:
    """Close the pool with its register; a forked child leaves that to its parent."""
    if REAL.process_id() == process_id:
        engine.dispose()
