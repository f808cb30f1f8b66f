"""SQL over the namespaces of a database, by DuckDB: `db.sql("SELECT …")`, `db.sql_stream(…)`.

A statement sees every namespace as a view. Those that it names are opened when it starts, each
pinned to one snapshot until its result was read, and registered as datasets, into which DuckDB
pushes columns and filters (`handles.dataset`). The past has names of its own:

    users                              the newest state
    "users@12"    users AS OF 12       generation 12
    "users@nightly"    users AS OF 'nightly'                the snapshot of this name
    "users@2026-01-31T12:00"    users AS OF TIMESTAMP '2026-01-31 12:00'     a time, in UTC
    "users@lsn:42"    users AS OF LSN 42

`AS OF` is not of DuckDB: it is replaced by the quoted name before DuckDB sees the text. Each
statement has a DuckDB of its own, in memory, so that nothing remains of it. It may read files, but
installs no extensions, and sees no variables of the program. Only queries are accepted; rows are
written by `db.writer`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from reef.engine.handles.dataset import Dataset
from reef.engine.handles.pinned import PinnedReader
from reef.engine.handles.reader import Reader
from reef.engine.namespaces import similar_name
from reef.engine.read.view import Scan
from reef.errors import ClosedError, ErrorKind, InvalidInputError, NotFoundError, ReefError

if TYPE_CHECKING:
    from reef.engine.handles.database import Database

BATCH_ROWS = 65_536
QUERIES = {"SELECT", "EXPLAIN", "MULTI"}
"""Types of statements that only read; PIVOT is one of several statements."""
SETTINGS = {
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "TimeZone": "'UTC'",
}
SHOW_TABLES = re.compile(r"\s*SHOW\s+(ALL\s+)?TABLES\s*;?\s*", re.IGNORECASE)
MISSING_TABLE = re.compile(r'Table with name "?(.+?)"? does not exist', re.DOTALL)
ISO_TIME = re.compile(r"\d{4}-\d{2}-\d{2}.*")
TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<string>'(?:[^']|'')*')
      | (?P<dollar>\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)
      | (?P<name>"(?:[^"]|"")*")
      | (?P<word>[^\W\d][\w$]*)
      | (?P<number>\d+)
      | (?P<unclosed>['"].*|/\*.*)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


class SqlResult:
    """The rows of a query, streamed; closed when all of them were read.

    A result can be read once: as batches, as dicts, or by anything that takes an Arrow stream.
    """

    def __init__(
        self, batches: pa.RecordBatchReader, resources: ExitStack, watch: "_Errors"
    ) -> None:
        self._batches = batches
        self._resources = resources
        self._watch = watch
        self._is_read = False

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self._batches.schema

    def batches(self) -> pa.RecordBatchReader:
        """Return the rows as a stream of Arrow batches."""
        return pa.RecordBatchReader.from_batches(self.schema, self._rows())

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        schema = self.schema
        return pa.Table.from_batches(list(self._rows()), schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.batches().__arrow_c_stream__(requested_schema)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts."""
        for batch in self._rows():
            yield from batch.to_pylist(maps_as_pydicts="lossy")

    def close(self) -> None:
        """Release the snapshots of the query; also done when all rows were read."""
        self._is_read = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "read" if self._is_read else "not read yet"
        return f"<SqlResult {', '.join(self.schema.names)}, {state}>"

    def _rows(self) -> Iterator[pa.RecordBatch]:
        if self._is_read:
            raise ClosedError("this result was read or closed", hint="Run the query again")
        self._is_read = True
        return self._stream()

    def _stream(self) -> Iterator[pa.RecordBatch]:
        with self._resources:
            try:
                yield from self._batches
            except (pa.ArrowException, OSError) as error:
                raise self._watch.cause(error) from error


def run_sql(
    db: "Database", query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
) -> SqlResult:
    """Run one query; see `Database.sql_stream`."""
    duckdb = _duckdb()
    if not isinstance(query, str):
        raise InvalidInputError(f"a query is text, got {type(query).__name__}")
    if not isinstance(parameters, Sequence | Mapping | None) or isinstance(parameters, str | bytes):
        raise InvalidInputError(
            f"expected parameters in a list, or by name in a dict, found {parameters!r:.80}",
            hint="For instance db.sql('SELECT * FROM users WHERE age > ?', [42])",
        )
    with ExitStack() as resources:
        connection = resources.enter_context(duckdb.connect())
        for name, value in SETTINGS.items():
            connection.execute(f"SET {name} = {value}")
        statement = _Statement(db, duckdb, connection, resources)
        batches = statement.run(query, parameters)
        return SqlResult(batches, resources.pop_all(), statement.errors)


class _Errors:
    """Errors of Reef that DuckDB reports as text of its own."""

    def __init__(self) -> None:
        self._first: ReefError | None = None

    def note(self, error: ReefError) -> None:
        self._first = self._first or error

    def cause(self, error: Exception) -> ReefError:
        """Return the error of Reef behind one of DuckDB; that is the user's otherwise."""
        return self._first or InvalidInputError(f"the query failed: {error}")


class _Watched:
    """A reader as datasets use it, whose errors are noted."""

    def __init__(self, reader: Reader | PinnedReader, errors: _Errors) -> None:
        self.namespace = reader.namespace
        self._reader = reader
        self._errors = errors

    def _batches(self, scan: Scan, limit: int | None = None) -> pa.RecordBatchReader:
        inner = self._reader._batches(scan, limit)
        return pa.RecordBatchReader.from_batches(inner.schema, self._note_errors(inner))

    def _note_errors(self, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except ReefError as error:
            self._errors.note(error)
            raise


class _Statement:
    """A statement, its DuckDB, and the namespaces it has named so far."""

    def __init__(self, db: "Database", duckdb: Any, connection: Any, resources: ExitStack) -> None:
        self._db, self._duckdb, self._connection = db, duckdb, connection
        self._resources = resources
        self._known: dict[str, str] | None = None
        self._registered: dict[str, str] = {}
        """The names of views by their lower case: DuckDB does not distinguish it."""
        self.errors = _Errors()

    def run(self, query: str, parameters: Any) -> pa.RecordBatchReader:
        """Run a query; return its rows."""
        if SHOW_TABLES.fullmatch(query):
            return _namespace_list(self._db.namespaces())
        text = replace_as_of(query, self._reserved())
        self._check(text)
        try:
            names = self._connection.get_table_names(text)
        except self._duckdb.Error:
            names = ()  # found out one by one below
        for name in sorted(names):
            self._register(name)
        while True:
            try:
                return _stream_of(self._connection.sql(text, params=parameters))
            except self._duckdb.CatalogException as error:
                missing = MISSING_TABLE.search(str(error))
                if missing is None or not self._register(missing[1]):
                    raise self._unknown(error, missing) from error
            except self._duckdb.Error as error:
                raise self.errors.cause(error) from error

    def _check(self, text: str) -> None:
        """Raise unless the text is one statement that only reads."""
        try:
            statements = self._duckdb.extract_statements(text)
        except (self._duckdb.Error, TypeError) as error:  # TypeError: text that is not Unicode
            raise InvalidInputError(f"the query is not valid SQL: {error}") from error
        if len(statements) != 1:
            raise InvalidInputError(
                f"a query is one statement, this is {len(statements)}",
                hint="Run them one after the other" if statements else "",
            )
        kind = str(statements[0].type).rpartition(".")[2]
        if kind not in QUERIES:
            raise InvalidInputError(
                f"SQL is read-only here, and this is {kind}",
                kind=ErrorKind.INVALID_OPTION,
                hint="Write with reef put, reef delete and reef import; in Python with "
                "db.writer(namespace): upsert, update_where, delete_where",
            )

    def _register(self, name: str) -> bool:
        """Register a namespace, or a past state, as a view; False if it does not exist."""
        other = self._registered.setdefault(name.lower(), name)
        if other != name:
            if self._namespace(other) == self._namespace(name):
                return True
            raise InvalidInputError(
                f"namespaces {other} and {name} differ only in case, which DuckDB ignores",
                hint="Read them in separate queries",
            )
        base, at, when = name.partition("@")
        namespace = self._namespace(base)
        if namespace is None:
            del self._registered[name.lower()]
            return False
        reader = self._open(namespace, _target(when) if at else {"pin": True})
        scan = reader.dataset()._scan
        self._connection.register(name, Dataset(_Watched(reader, self.errors), scan))
        return True

    def _namespace(self, name: str) -> str | None:
        """Return the namespace of a name; another case is fine if it is the only one."""
        if self._known is None:
            self._known = {known: known for known in self._db.namespaces()}
        if name in self._known:
            return name
        alike = [known for known in self._known if known.lower() == name.lower()]
        return alike[0] if len(alike) == 1 else None

    def _open(self, namespace: str, target: dict[str, Any]) -> Reader | PinnedReader:
        """Open a snapshot, with a lease unless the credentials allow none."""
        reader: Reader | PinnedReader
        try:
            reader = self._db.reader(namespace, **target)
        except InvalidInputError as error:
            if error.kind is not ErrorKind.ACCESS_DENIED or "snapshot" in target:
                raise
            plain = self._db.reader(namespace)
            self._resources.callback(plain.close)
            reader = plain.as_of(**target["as_of"]) if "as_of" in target else plain
        self._resources.callback(reader.close)
        return reader

    def _unknown(self, error: Exception, missing: re.Match[str] | None) -> ReefError:
        if missing is None:
            return self.errors.cause(error)
        name = missing[1].partition("@")[0]
        similar = similar_name(name, list(self._known or ()))
        return NotFoundError(
            f"there is no namespace {name} in {self._db.store.url}",
            hint=f"Did you mean {similar}?" if similar else "SHOW TABLES lists the namespaces",
            namespace=name,
        )

    def _reserved(self) -> frozenset[str]:
        words = self._connection.execute(
            "SELECT keyword_name FROM duckdb_keywords() "
            "WHERE keyword_category IN ('reserved', 'type_function')"
        ).fetchall()
        return frozenset(word.upper() for (word,) in words)


def _duckdb() -> Any:
    try:
        return import_module("duckdb")
    except ImportError as error:
        raise InvalidInputError(
            f"SQL needs DuckDB: {error}", hint="pip install 'reef[sql]'"
        ) from error


def _stream_of(relation: Any) -> pa.RecordBatchReader:
    """Run a query and return its rows; DuckDB 2 has another name for it."""
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    return read(BATCH_ROWS)


def _namespace_list(names: Sequence[str]) -> pa.RecordBatchReader:
    table = pa.table({"name": pa.array(names, pa.string())})
    return table.to_reader()


def _target(when: str) -> dict[str, Any]:
    """Return the arguments of `Database.reader` for the suffix of a name, after its @."""
    kind, colon, value = when.partition(":")
    if colon and kind in ("lsn", "generation") and value.isdecimal():
        return {"as_of": {kind: int(value)}}
    if colon and kind == "snapshot":
        return {"snapshot": value}
    if colon and kind == "time":
        return {"as_of": {"time": value}}
    if when.isdecimal():
        return {"as_of": {"generation": int(when)}}
    return {"as_of": {"time": when}} if ISO_TIME.fullmatch(when) else {"snapshot": when}


# --- text -------------------------------------------------------------------------------


def split_statements(text: str) -> tuple[list[str], str]:
    """Return the statements that a semicolon ends, and the rest of the text."""
    statements: list[str] = []
    start = 0
    for match in TOKEN.finditer(text):
        if match[0] == ";":
            statement = text[start : match.start()]
            start = match.end()
            if statement.strip():
                statements.append(statement)
    return statements, text[start:]


# --- AS OF ------------------------------------------------------------------------------


def replace_as_of(query: str, reserved: frozenset[str]) -> str:
    """Replace `users AS OF 12` by the name `"users@12"`, with the alias users if it has none."""
    tokens = [(str(match.lastgroup), match[0]) for match in TOKEN.finditer(query)]
    tokens = [("dollar" if kind == "tag" else kind, text) for kind, text in tokens]
    solid = [place for place, (kind, _) in enumerate(tokens) if kind != "skip"]
    texts = [text for _, text in tokens]
    number = 0
    while number < len(solid) - 3:
        name, taken = _past(tokens, solid[number : number + 5])
        if name is None:
            number += 1
            continue
        base = tokens[solid[number]][1]
        following = tokens[solid[number + taken]] if number + taken < len(solid) else ("end", "")
        alias = "" if _is_alias(following, reserved) else f" AS {base}"
        first, last = solid[number], solid[number + taken - 1]
        texts[first : last + 1] = [f"{name}{alias}", *[""] * (last - first)]
        number += taken
    return "".join(texts)


def _past(tokens: list[tuple[str, str]], places: list[int]) -> tuple[str | None, int]:
    """Return the quoted name for `name AS OF value`, and its number of tokens."""
    (kind, name), *rest = (tokens[place] for place in places)
    words = [text.upper() for _, text in rest]
    if kind not in ("word", "name") or words[:2] != ["AS", "OF"]:
        return None, 0
    (value_kind, value), *more = rest[2:]
    word, taken = "", 4
    if value_kind == "word" and value.upper() in POINTS and more:
        word, taken = POINTS[value.upper()], 5
        value_kind, value = more[0]
    if value_kind not in ("number", "string"):
        return None, 0
    when = value[1:-1].replace("''", "'") if value_kind == "string" else value
    base = name[1:-1] if kind == "name" else name.replace('"', '""')
    return f'"{base}@{word}{when.replace(chr(34), chr(34) * 2)}"', taken


POINTS = {
    "GENERATION": "generation:",
    "VERSION": "generation:",
    "LSN": "lsn:",
    "SNAPSHOT": "snapshot:",
    "TIMESTAMP": "time:",
    "TIMESTAMPTZ": "time:",
}


def _is_alias(token: tuple[str, str], reserved: frozenset[str]) -> bool:
    """Whether a table is followed by an alias."""
    kind, text = token
    return kind == "name" or (
        kind == "word" and (text.upper() == "AS" or text.upper() not in reserved)
    )
