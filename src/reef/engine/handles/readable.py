"""Reads: the part that writers, readers, pinned views and transactions have in common.

In a plain namespace keys and values are bytes; with columns a row is a dict, and many rows are
Arrow. Every read sees one consistent state. If a sweep deletes an object underneath, the read is
re-planned on a newer generation where that gives the same rows.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain, islice
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.read.caches import MISSING, RowCache
from reef.engine.read.counting import count_by_index
from reef.engine.read.memtable import Entry
from reef.engine.read.scan import EVERYTHING, Projection
from reef.engine.read.view import Scan, View, look_up, resume_after_sweeps
from reef.engine.rows.batch import check_text, encode_key, encode_keys
from reef.engine.rows.convert import (
    EXPIRES_AT,
    check_columns,
    expiry_out,
    python_list,
    to_record_batch,
    to_row,
)
from reef.errors import InvalidInputError, NotFoundError, UnavailableError
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.runtime import Runtime, leaf_lock
from reef.telemetry import Metrics, operation
from reef.types import KeyRange

if TYPE_CHECKING:
    from reef.engine.handles.dataset import Dataset


T = TypeVar("T")
RESTARTS_MAX = 10
BATCH_ROWS = 4096
"""Smaller Arrow batches are joined; larger ones are passed on without a copy."""
PYTHON_ROWS_FIRST, PYTHON_ROWS = 128, 1024
"""Arrow rows converted to Python at a time: the conversion holds the GIL."""
FOUND = "_found"
NESTED = frozenset({list, dict})
SIZED = NESTED | {bytes, str}
NUMBER_BYTES, ITEM_BYTES = 32, 60
"""About the memory of a number or date, and of an item of a list besides its value."""


class ScanOptions(TypedDict, total=False):
    """Arguments of `scan_arrow`."""

    start: bytes | str | None
    end: bytes | str | None
    prefix: bytes | str | None
    columns: Sequence[str] | None
    where: Any
    reverse: bool
    limit: int | None


class ForkAware(ABC):
    """A handle that survives a fork: the child reloads all that belongs to its parent (H51)."""

    _runtime: Runtime

    def _set_home(self) -> None:
        """Note this process as the owner of locks and leases."""
        self._guard = leaf_lock()
        self._turn = self._runtime.lock()
        self._home = self._locks_home = self._runtime.process_id()

    def _move_in(self) -> None:
        """Reload in a forked child: other threads of the parent may have been changing it."""
        process_id = self._runtime.process_id()
        with self._guard:
            if self._locks_home != process_id:  # a lock held during the fork has no owner here
                self._turn, self._locks_home = self._runtime.lock(), process_id
        with self._turn:
            if self._home != process_id:
                self._reload()
                self._home = process_id

    @abstractmethod
    def _reload(self) -> None:
        """Replace everything that belongs to the parent process."""


class Readable(ABC):
    """Reads by key, by range, and as Arrow."""

    namespace: str
    _runtime: Runtime
    _metrics: Metrics
    _row_cache: RowCache

    @abstractmethod
    def _view(self) -> View:
        """Return the current view; ClosedError if this handle is closed."""

    @abstractmethod
    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation than one that names a missing object."""

    def _is_ready(self) -> bool:
        """Return whether `_view` would return without a request, a wait or an error."""
        return False

    # --- by key -------------------------------------------------------------------
    def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return the value or row of a key; None if it is missing.

        With `columns`, return a dict of these columns; `_expires_at` is allowed in all reads.
        """
        writes = self._row_cache.writes  # counted before the view is taken: see `RowCache`
        view = self._view()
        if columns is not None:
            check_columns(view.manifest.schema, columns)
            return self._get_columns(key, columns)
        try:
            if isinstance(key, str):
                key = key.encode()
            row = self._row_cache.rows.get(key, MISSING)
        except (TypeError, UnicodeEncodeError):  # reported by the slow path
            row = MISSING
        if row is MISSING:
            row = self._get_uncached(key, view, writes)
        return row if type(row) is bytes else _copy_result(row)

    def _get_cached(self, key: bytes | str) -> Any:
        """Return the result of `get` if it needs neither a request nor a wait, else MISSING."""
        if not self._is_ready():
            return MISSING
        try:
            row = self._row_cache.rows.get(key.encode() if isinstance(key, str) else key, MISSING)
        except (TypeError, UnicodeEncodeError):
            return MISSING
        return row if row is MISSING else _copy_result(row)

    def get_many(
        self, keys: Iterable[bytes | str], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return one row per key, in the given order; `_found` is false for keys without a row."""
        encoded = encode_keys(keys)
        check_text(encoded, self._view().manifest.schema)
        with operation(self._metrics, "get_many"):
            return self._read(lambda view: self._table_of(view, encoded, columns))

    # --- by range -----------------------------------------------------------------
    def scan(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        reverse: bool = False,
        limit: int | None = None,
        where: Any = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (key, row) of [start, end) in key order, or in reverse.

        With `columns`, rows are dicts of these columns, also in a plain namespace. `where` filters
        rows: text such as "amount > 5 AND (state = 'open' OR day >= DATE '2024-01-31')", a list of
        tuples, or a pyarrow expression.
        """
        view = self._view()
        schema = view.manifest.schema
        if columns is not None:
            check_columns(schema, columns)
        limit = _checked_limit(limit)
        selected = None
        if columns is not None:
            selected = tuple({schema.key.name: None, **dict.fromkeys(columns)})
        projection = Projection.of(schema, selected, where)
        pieces = self._pieces(
            self._scan(view, KeyRange.of(start, end, prefix), projection, reverse, limit)
        )
        parts = _rows_of(pieces, schema, projection, columns)
        return islice(chain.from_iterable(parts), limit)

    def scan_arrow(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> pa.RecordBatchReader:
        """Return the rows of [start, end) as a stream of Arrow batches."""
        view = self._view()
        schema = view.manifest.schema
        projection = Projection.of(schema, columns, where)
        limit = _checked_limit(limit)
        scan = self._scan(view, KeyRange.of(start, end, prefix), projection, reverse, limit)
        return self._batches(scan, limit)

    def dataset(self) -> "Dataset":
        """Return the rows as of now as a `pyarrow.dataset.Dataset`.

        DuckDB, polars and pyarrow read from it only the columns and groups that a query needs.
        All scans read the same snapshot, streaming. It is valid as long as this handle is open.
        """
        from reef.engine.handles.dataset import Dataset

        view = self._view()
        return Dataset(self, self._scan(view, KeyRange(), EVERYTHING, False))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export all rows through the Arrow C stream interface: pandas, polars, DuckDB."""
        return self.scan_arrow().__arrow_c_stream__(requested_schema)

    # --- by search ----------------------------------------------------------------
    def search(
        self,
        *,
        vector: tuple[str, Any] | None = None,
        text: tuple[str, str] | None = None,
        where: Any = None,
        k: int = 10,
        columns: Sequence[str] | None = None,
        recall: str | None = None,
        probes: int | None = None,
        weights: Mapping[str, float] | None = None,
        explain: bool = False,
    ) -> Any:
        """Return the `k` best rows for a vector, a text or both, the best first, as an Arrow table.

        The table has the key, `columns` (all by default), and a last column:

        - `vector=(column, values)`: the nearest rows by `_distance`, in the metric of the column's
          index: Euclidean (l2, also without an index), 1 - cosine, or minus the product (dot)
        - `text=(column, query)`: rows with words of the query, by `_score` (BM25); a phrase in
          quotes must be there, and needs an index with positions
        - both: fused by reciprocal ranks, by `_score`; `weights={"vector": 1, "text": 1}`

        Only rows that meet `where` are found. Everything that was committed before is, and nothing
        that was deleted, replaced or has expired. Of vectors the most promising lists are read:
        `probes` of them; `recall="exact"` reads all rows instead. With `explain`, return how the
        search was run, not its rows.
        """
        from reef.engine.search.run import run_search

        with operation(self._metrics, "search"):
            return self._read(
                lambda view: run_search(
                    view,
                    self._now_ms(),
                    self._runtime,
                    explain=explain,
                    vector=vector,
                    text=text,
                    weights=weights,
                    where=where,
                    k=k,
                    columns=columns,
                    recall=recall,
                    probes=probes,
                )
            )

    # --- all rows -----------------------------------------------------------------
    def count(
        self,
        where: Any = None,
        *,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        prefix: bytes | str | None = None,
    ) -> int:
        """Return the number of rows, of all or of those that match.

        Reads no value columns but those in the condition. If they have filter indexes, segments
        whose rows have one version each are counted by these.
        """
        view = self._view()
        projection = Projection.of(view.manifest.schema, [], where)
        scan = self._scan(view, KeyRange.of(start, end, prefix), projection, False)
        return self._count(scan)

    def _count(self, scan: Scan) -> int:
        """Return the number of matching rows of a scan that reads no columns."""
        count, scans = 0, [scan]
        if self._counts_by_index:
            with suppress(NotFoundError):  # a segment was swept: the scan reads a newer generation
                count, scans = count_by_index(scan)
        for part in scans:
            with self._batches(part) as batches:
                count += sum(len(batch) for batch in batches)
        self._view()  # raises if what was counted may not be read any more
        return count

    _counts_by_index = True
    """Whether `count` may leave out rows that it need not read: a transaction records its reads."""

    def to_arrow(self, **scan: Unpack[ScanOptions]) -> pa.Table:
        """Return the rows as an Arrow table; takes the arguments of `scan_arrow`."""
        return self.scan_arrow(**scan).read_all()

    def to_pandas(self, **scan: Unpack[ScanOptions]) -> Any:
        """Return the rows as a pandas DataFrame; takes the arguments of `scan_arrow`."""
        _need("pandas")
        return self.to_arrow(**scan).to_pandas()

    def to_polars(self, **scan: Unpack[ScanOptions]) -> Any:
        """Return the rows as a polars DataFrame; takes the arguments of `scan_arrow`."""
        return _need("polars").from_arrow(self.to_arrow(**scan))

    # --- as a mapping -------------------------------------------------------------
    def __getitem__(self, key: bytes | str) -> Any:
        row = self.get(key)
        if row is None and key not in self:
            raise NotFoundError(f"{key!r} has no row in {self.namespace}", key=key)
        return row

    def __contains__(self, key: object) -> bool:
        return self.get(key, columns=[]) is not None  # type: ignore[arg-type]

    def __len__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has no len(): counting reads the keys of all rows; "
            f"use count()"
        )

    def __bool__(self) -> bool:
        return True

    __iter__ = None
    """Not iterable: `scan` yields the rows."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, key column first."""
        return self._view().manifest.schema.arrow()

    # --- inside -------------------------------------------------------------------
    def _get_uncached(self, key: Any, view: View, writes: int) -> Any:
        encoded = encode_key(key)
        with operation(self._metrics, "get"):
            try:
                found, schema = view.get(encoded, self._now_ms()), view.manifest.schema
            except NotFoundError as error:
                found, schema = self._read(
                    lambda view: (view.get(encoded, self._now_ms()), view.manifest.schema),
                    self._replan(view.manifest.generation, error),
                )
        row = row_of(encoded, found, schema)
        if found is None or found.expires_at_ms is None:
            self._row_cache.keep(encoded, row, _bytes_of(row), writes)
        return row

    def _get_columns(self, key: bytes | str, columns: Sequence[str]) -> dict[str, Any] | None:
        encoded = encode_key(key)

        def read(view: View) -> tuple[Entry | None, Schema]:
            schema = view.manifest.schema
            numbers = Projection.of(schema, columns, None).numbers
            return view.get(encoded, self._now_ms(), numbers), schema

        with operation(self._metrics, "get"):
            found, schema = self._read(read)
        if found is None:
            return None
        row = to_row(encoded, found.values, schema)
        row[EXPIRES_AT] = expiry_out(found.expires_at_ms)
        return {name: row[name] for name in columns}

    def _read(self, read: Callable[[View], T], view: View | None = None) -> T:
        """Call `read` with a view; repeat it on a newer generation if an object was swept."""
        view = view or self._view()
        for _ in range(RESTARTS_MAX):
            try:
                return read(view)
            except NotFoundError as error:
                view = self._replan(view.manifest.generation, error)
        raise UnavailableError(
            f"sweeps of {self.namespace} outran {RESTARTS_MAX} attempts to read it"
        )

    def _scan(
        self,
        view: View,
        key_range: KeyRange,
        projection: Projection,
        reverse: bool,
        limit: int | None = None,
    ) -> Scan:
        return view.scan(
            key_range, self._now_ms(), reverse=reverse, projection=projection, limit=limit
        )

    def _pieces(self, scan: Scan) -> Iterator[Versions]:
        """Yield the rows of a scan; subclasses check that they may still be read."""
        return resume_after_sweeps(scan, self._replan)

    def _batches(self, scan: Scan, limit: int | None = None) -> pa.RecordBatchReader:
        """Return the matching rows of a scan as a stream of Arrow batches."""
        schema, projection = scan.manifest.schema, scan.projection
        batches = (projection.batch(rows, schema) for rows in self._pieces(scan))
        return pa.RecordBatchReader.from_batches(
            projection.arrow_schema(schema), _rebatch(batches, limit)
        )

    def _table_of(self, view: View, asked: list[bytes], columns: Sequence[str] | None) -> pa.Table:
        schema = view.manifest.schema
        projection = Projection.of(schema, columns, None)
        rows = look_up(view, asked, self._now_ms(), self._runtime, projection.numbers)
        places = pc.index_in(pa.array(asked, pa.binary()), value_set=rows.keys)
        found = pa.Table.from_batches([to_record_batch(rows, schema, columns)])
        found = found.append_column(FOUND, pa.repeat(True, len(rows)))
        table = found.take(places)
        if schema.key.name in table.column_names:
            at = table.column_names.index(schema.key.name)
            keys = pa.array(asked, pa.binary()).cast(schema.key.arrow)
            table = table.set_column(at, schema.key.name, keys)
        return table.set_column(table.num_columns - 1, FOUND, places.is_valid())

    def _now_ms(self) -> int:
        return int(self._runtime.wall_s() * 1000)


def row_of(key: bytes, entry: Entry | None, schema: Schema) -> Any:
    """Return a row as the API gives it: bytes in a plain namespace, else a dict."""
    if entry is None:
        return None
    if schema.is_plain:
        return entry.values[schema.fields[0].number]
    row = to_row(key, entry.values, schema)
    return _NestedRow(row) if any(isinstance(value, list | dict) for value in row.values()) else row


class _NestedRow(dict[str, Any]):
    """A row with lists or dicts in it, which needs a deep copy."""


def _copy_result(row: Any) -> Any:
    """Return a copy that the caller may change without affecting the cache."""
    if type(row) is dict:
        return row.copy()
    return _copy_nested(dict(row)) if type(row) is _NestedRow else row


def _copy_nested(value: Any) -> Any:
    """Return a copy of a list or dict, and of those in it."""
    if type(value) is dict:
        return {
            name: _copy_nested(item) if type(item) in NESTED else item
            for name, item in value.items()
        }
    if type(_first_of(value)) not in NESTED:
        return value.copy()
    return [None if item is None else _copy_nested(item) for item in value]


def _first_of(values: list[Any]) -> Any:
    """Return the first value of a list that is not None; all others have its type."""
    return next((value for value in values if value is not None), None)


def _rows_of(
    pieces: Iterable[Versions],
    schema: Schema,
    projection: Projection,
    columns: Sequence[str] | None,
) -> Iterator[Iterable[tuple[Any, Any]]]:
    """Yield the rows in parts, each as pairs of key and row."""
    count = PYTHON_ROWS_FIRST
    for rows in pieces:
        batch, end = projection.batch(rows, schema), 0
        while end < len(batch):
            part, end = batch.slice(end, count), end + count
            count = min(2 * count, PYTHON_ROWS)
            yield zip(python_list(part.column(0)), _values_of(part, schema, columns), strict=True)


def _values_of(part: pa.RecordBatch, schema: Schema, columns: Sequence[str] | None) -> list[Any]:
    """Return the values of a batch, without the keys, as Python objects."""
    if columns is None and schema.is_plain:
        return python_list(part.column(1))
    rest = part if columns is None else part.select(list(columns))
    if not rest.num_columns:
        return [{} for _ in range(len(part))]
    names, lists = rest.schema.names, map(python_list, rest.columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def _rebatch(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Join small batches, and stop after `limit` rows."""
    waiting: list[pa.RecordBatch] = []
    count, left = 0, -1 if limit is None else limit
    for batch in batches:
        piece = batch if left < 0 else batch.slice(0, left)
        left = left if left < 0 else left - len(piece)
        waiting.append(piece)
        count += len(piece)
        if count >= BATCH_ROWS or left == 0:
            yield _concat_batches(waiting)
            waiting, count = [], 0
        if left == 0:
            return
    if waiting:
        yield _concat_batches(waiting)


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches; a single one is returned without a copy."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _checked_limit(limit: int | None) -> int | None:
    if limit is None:
        return None
    try:
        count = -1 if isinstance(limit, bool) else index(limit)  # NumPy has integers of its own
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidInputError(f"limit={limit!r} is not a non-negative integer")
    return min(count, sys.maxsize)


def _need(package: str) -> Any:
    """Import an optional package."""
    try:
        return import_module(package)
    except ImportError as error:
        raise InvalidInputError(
            f"to_{package}() needs {package}: {error}", hint=f"pip install {package}"
        ) from error


def _bytes_of(row: Any) -> int:
    """Estimate the memory of a row or of one of its values."""
    kind = type(row)
    if kind is bytes or kind is str:
        return len(row)
    if isinstance(row, dict):
        return sum(map(_bytes_of, row.values())) + 100 * len(row)
    if kind is not list:
        return NUMBER_BYTES
    is_sized = type(_first_of(row)) in SIZED
    return ITEM_BYTES * len(row) + (
        sum(map(_bytes_of, row)) if is_sized else NUMBER_BYTES * len(row)
    )
