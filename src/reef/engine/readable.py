"""Reading: the half that writers, readers, pinned views and transactions have in common.

Rows come out as the schema says: in a plain namespace keys and values are bytes, elsewhere a
row is a dict, or all of them are Arrow. Each read takes one moment and sees it to its end; if a
sweep takes an object away underneath, the read is planned again where that gives the same rows.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from operator import index
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.batch import check_text, encode_key, encode_keys
from reef.engine.reading.lookup import look_up
from reef.engine.reading.memtable import Entry
from reef.engine.reading.projection import Projection
from reef.engine.reading.rescan import go_on_after_sweeps
from reef.engine.reading.row_cache import MISSING, RowCache
from reef.engine.reading.view import View
from reef.engine.rows.out import (
    EXPIRES_AT,
    check_columns,
    expiry_out,
    to_record_batch,
    to_row,
)
from reef.errors import InvalidInputError, NotFoundError, UnavailableError
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.runtime import Runtime
from reef.telemetry import Metrics, operation
from reef.types import KeyRange

__all__ = ["Readable"]

T = TypeVar("T")
RESTARTS_MAX = 10
BATCH_ROWS = 4096
"""Smaller Arrow batches are joined: fewer calls. Larger ones are not copied once more."""
PYTHON_ROWS = 1024
"""Arrow rows become Python's so many at a time: other threads stand still meanwhile."""
FOUND = "_found"


class Readable(ABC):
    """What can be read by key, by range, and as Arrow."""

    namespace: str
    _runtime: Runtime
    _metrics: Metrics
    _row_cache: RowCache

    @abstractmethod
    def _view(self) -> View:
        """Return what to read now; ClosedError if this handle may not be used."""

    @abstractmethod
    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation than one that names a missing object."""

    def _is_ready(self) -> bool:
        """Whether `_view` would answer at once: without a request, a wait or an error."""
        return False

    # --- by key -------------------------------------------------------------------
    def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return a key's value or row; None if it has none.

        With `columns`, a dict of just these; `_expires_at` can be one of them here as in all reads.
        """
        view = self._view()
        if columns is not None:
            check_columns(view.manifest.schema, columns)
            return self._get_columns(key, columns)
        try:
            if isinstance(key, str):
                key = key.encode()
            row = self._row_cache.rows.get(key, MISSING)
        except (TypeError, UnicodeEncodeError):  # the slow way says what is wrong with it
            row = MISSING
        if row is MISSING:
            row = self._get_slowly(key)
        return row if type(row) is bytes else _own(row)

    def at_hand(self, key: bytes | str) -> Any:
        """Return what `get` returns, if that takes neither a request nor a wait; else MISSING."""
        if not self._is_ready():
            return MISSING
        try:
            row = self._row_cache.rows.get(key.encode() if isinstance(key, str) else key, MISSING)
        except (TypeError, UnicodeEncodeError):
            return MISSING
        return row if row is MISSING else _own(row)

    def get_many(
        self, keys: Iterable[bytes | str], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return one row per key, in the order asked; `_found` tells which keys have one."""
        asked = encode_keys(keys)
        check_text(asked, self._view().manifest.schema)
        with operation(self._metrics, "get_many"):
            return self._read(lambda view: self._table_of(view, asked, columns))

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
        """Yield keys and rows of [start, end) in order, from either end.

        With `columns`, rows are dicts of just these, in a plain namespace too.
        """
        view = self._view()
        schema = view.manifest.schema
        if columns is not None:
            check_columns(schema, columns)
        wanted = (
            None if columns is None else tuple({schema.key.name: None, **dict.fromkeys(columns)})
        )
        projection = Projection.of(schema, wanted, where)
        pieces = self._pieces(view, KeyRange.of(start, end, prefix), projection, reverse)
        rows = _rows_of(pieces, schema, projection, columns)
        return islice(rows, _checked_limit(limit))

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
        pieces = self._pieces(view, KeyRange.of(start, end, prefix), projection, reverse)
        batches = (projection.batch(rows, schema) for rows in pieces)
        return pa.RecordBatchReader.from_batches(
            projection.arrow_schema(schema), _of_good_size(batches, _checked_limit(limit))
        )

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Hand all rows to whatever speaks Arrow's C stream: pandas, polars, DuckDB."""
        return self.scan_arrow().__arrow_c_stream__(requested_schema)

    @property
    def schema(self) -> pa.Schema:
        """The columns, the key's first."""
        return self._view().manifest.schema.arrow()

    # --- inside -------------------------------------------------------------------
    def _get_slowly(self, key: Any) -> Any:
        encoded = encode_key(key)
        with operation(self._metrics, "get"):
            writes = self._row_cache.writes
            found, schema = self._read(
                lambda view: (view.get(encoded, self._now_ms()), view.manifest.schema)
            )
        row = row_of(encoded, found, schema)
        if found is None or found.expires_at_ms is None:
            self._row_cache.keep(encoded, row, _bytes_of(row), writes)
        return row

    def _get_columns(self, key: bytes | str, columns: Sequence[str]) -> dict[str, Any] | None:
        encoded = encode_key(key)
        with operation(self._metrics, "get"):
            found, schema = self._read(
                lambda view: (view.get(encoded, self._now_ms()), view.manifest.schema)
            )
        if found is None:
            return None
        row = to_row(encoded, found.values, schema)
        row[EXPIRES_AT] = expiry_out(found.expires_at_ms)
        return {name: row[name] for name in columns}

    def _read(self, read: Callable[[View], T]) -> T:
        """Read; if an object was swept underneath, read again from a newer generation."""
        view = self._view()
        for _ in range(RESTARTS_MAX):
            try:
                return read(view)
            except NotFoundError as error:
                view = self._replan(view.manifest.generation, error)
        raise UnavailableError(f"{self.namespace} is swept faster than it can be read")

    def _pieces(
        self, view: View, wanted: KeyRange, projection: Projection, reverse: bool
    ) -> Iterator[Versions]:
        scan = view.scan(wanted, self._now_ms(), reverse=reverse, projection=projection)
        return go_on_after_sweeps(scan, self._replan)

    def _table_of(self, view: View, asked: list[bytes], columns: Sequence[str] | None) -> pa.Table:
        schema = view.manifest.schema
        projection = Projection.of(schema, columns, None)
        rows = look_up(view, asked, self._now_ms(), self._runtime, projection.numbers)
        places = pc.index_in(pa.array(asked, pa.binary()), value_set=rows.keys)
        found = pa.Table.from_batches([to_record_batch(rows, schema, columns)])
        table = found.take(places)
        if schema.key.name in table.column_names:
            at = table.column_names.index(schema.key.name)
            keys = pa.array(asked, pa.binary()).cast(schema.key.arrow)
            table = table.set_column(at, schema.key.name, keys)
        return table.append_column(FOUND, places.is_valid())

    def _now_ms(self) -> int:
        return int(self._runtime.wall_s() * 1000)


def row_of(key: bytes, entry: Entry | None, schema: Schema) -> Any:
    """Return a row as a client sees it: bytes where the namespace is plain, a dict elsewhere."""
    if entry is None:
        return None
    if schema.is_plain:
        return entry.values[schema.fields[0].number]
    row = to_row(key, entry.values, schema)
    return _Nested(row) if any(isinstance(value, list) for value in row.values()) else row


class _Nested(dict[str, Any]):
    """A row with lists in it: these are copied too when it is handed out."""


def _own(row: Any) -> Any:
    """Return a row that the caller may change: what is kept stays as it is."""
    if type(row) is dict:
        return row.copy()
    return deepcopy(dict(row)) if type(row) is _Nested else row


def _rows_of(
    pieces: Iterable[Versions],
    schema: Schema,
    projection: Projection,
    columns: Sequence[str] | None,
) -> Iterator[tuple[Any, Any]]:
    for rows in pieces:
        batch = projection.batch(rows, schema)
        for start in range(0, len(batch), PYTHON_ROWS):
            part = batch.slice(start, PYTHON_ROWS)
            yield from zip(part.column(0).to_pylist(), _rest_of(part, schema, columns), strict=True)


def _rest_of(part: pa.RecordBatch, schema: Schema, columns: Sequence[str] | None) -> list[Any]:
    """Return what stands beside the keys, as Python values."""
    if columns is None:
        rest = part.column(1) if schema.is_plain else part
    else:
        rest = part.select(list(columns))
    found: list[Any] = (
        rest.to_pylist() if columns is None or columns else [{} for _ in range(len(part))]
    )
    return found


def _of_good_size(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Join small batches, and stop after `limit` rows."""
    waiting: list[pa.RecordBatch] = []
    count, left = 0, -1 if limit is None else limit
    for batch in batches:
        piece = batch if left < 0 else batch.slice(0, left)
        left = left if left < 0 else left - len(piece)
        waiting.append(piece)
        count += len(piece)
        if count >= BATCH_ROWS or left == 0:
            yield _joined(waiting)
            waiting, count = [], 0
        if left == 0:
            return
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return them as one; a single one as it is, since joining copies."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _checked_limit(limit: int | None) -> int | None:
    if limit is None:
        return None
    try:
        count = -1 if isinstance(limit, bool) else index(limit)  # NumPy has integers of its own
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidInputError(f"limit={limit!r} is not a number of rows")
    return min(count, sys.maxsize)


def _bytes_of(row: Any) -> int:
    if isinstance(row, dict):
        return sum(map(_bytes_of, row.values())) + 100 * len(row)
    if isinstance(row, list):
        return sum(map(_bytes_of, row)) + 60 * len(row)
    return len(row) if isinstance(row, bytes | str) else 32
