"""A snapshot as a `pyarrow.dataset.Dataset`, into which queries push columns and filters.

DuckDB and polars recognize datasets of pyarrow by their class and call `scanner(columns=,
filter=)`. Both classes here are of those types and implement their methods by scans of Reef: a
filter becomes a `where`, which excludes groups, and only the blocks of the named columns are read.
Nothing is inherited from pyarrow's own implementation, which would read files.

A dataset reads one snapshot, however often it is scanned. A scan streams: it holds a few
megabytes, and the consumer decides how fast it continues.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from reef.engine.read.scan import Projection
from reef.engine.read.view import Scan
from reef.engine.where import Where, parse
from reef.engine.where.expressions import columns_of
from reef.errors import ErrorKind, InvalidInputError


class Source(Protocol):
    """The part of a handle that datasets use."""

    namespace: str

    def _batches(self, scan: Scan, limit: int | None = None) -> pa.RecordBatchReader: ...


Columns = Sequence[str] | Mapping[str, pc.Expression] | None


def _refuse_method(method: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise InvalidInputError(
            f"a Dataset of Reef has no {method}()",
            kind=ErrorKind.INVALID_OPTION,
            hint="Use scanner(), to_table() or a query engine, such as db.sql()",
        )

    return refuse


class Dataset(ds.Dataset):  # type: ignore[misc]
    """The rows of one snapshot. Valid as long as the handle that it came from is open."""

    def __init__(self, handle: Source, scan: Scan, where: Where | None = None) -> None:
        self._handle = handle
        self._scan = scan
        self._where = where or Where()
        """Condition of `filter`, applied by every scan."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, key column first."""
        return self._scan.manifest.schema.arrow()

    @property
    def partition_expression(self) -> pc.Expression:
        """True: a dataset of Reef has no partitions."""
        return pc.scalar(True)

    def __repr__(self) -> str:
        where = f" WHERE {self._where}" if self._where.conditions else ""
        return f"<Dataset {self._handle.namespace}{where}, LSN {self._scan.tables[0].last_lsn}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Dataset reads through its handle and is not pickled; pickle the reader")

    def scanner(
        self,
        columns: Columns = None,
        filter: Any = None,
        batch_size: int | None = None,
        **_ignored: Any,
    ) -> "Scanner":
        """Return a scan of some columns, of the rows that match a filter.

        `columns` are names, or expressions by name; `filter` is a pyarrow expression or any other
        `where` of Reef. Settings of pyarrow's own scans, such as read-ahead, have no effect.
        """
        schema = self._scan.manifest.schema
        where = self._where
        if filter is not None:
            where = Where((*where.conditions, *parse(filter, schema).conditions))
        return Scanner(self._handle, self._scan, columns, where, batch_size)

    def filter(self, expression: Any) -> "Dataset":
        """Return the same dataset with a filter that applies to all of its scans."""
        where = parse(expression, self._scan.manifest.schema)
        both = Where((*self._where.conditions, *where.conditions))
        return Dataset(self._handle, self._scan, both)

    def to_batches(self, **scan: Any) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches; takes the arguments of `scanner`."""
        return self.scanner(**scan).to_batches()

    def to_table(self, **scan: Any) -> pa.Table:
        """Return the rows as a table; takes the arguments of `scanner`."""
        return self.scanner(**scan).to_table()

    def head(self, num_rows: int, **scan: Any) -> pa.Table:
        """Return the first rows by key; takes the arguments of `scanner`."""
        return self.scanner(**scan).head(num_rows)

    def take(self, indices: Any, **scan: Any) -> pa.Table:
        """Return rows by their numbers; this reads all of them."""
        return self.scanner(**scan).take(indices)

    def count_rows(self, **scan: Any) -> int:
        """Return the number of rows without reading other columns than those of the filter."""
        return self.scanner(**{**scan, "columns": []}).count_rows()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.scanner().to_reader().__arrow_c_stream__(requested_schema)

    get_fragments = _refuse_method("get_fragments")
    replace_schema = _refuse_method("replace_schema")
    join = _refuse_method("join")
    join_asof = _refuse_method("join_asof")
    sort_by = _refuse_method("sort_by")


class Scanner(ds.Scanner):  # type: ignore[misc]
    """A scan of a dataset; each of its methods reads once."""

    def __init__(
        self,
        handle: Source,
        scan: Scan,
        columns: Columns,
        where: Where,
        batch_size: int | None,
    ) -> None:
        schema = scan.manifest.schema
        expressions = dict(columns) if isinstance(columns, Mapping) else None
        names = _names(expressions) if expressions is not None else columns
        projection = Projection.of(schema, None if names is None else list(names), where)
        self._projected: pa.Schema = projection.arrow_schema(schema)
        if expressions is not None:
            computed = ds.Scanner.from_batches([], schema=self._projected, columns=expressions)
            self._projected = computed.projected_schema
        key_range = scan.key_range.both(where.key_range())
        self._scan = replace(scan, projection=projection, key_range=key_range)
        self._handle, self._expressions = handle, expressions
        self._batch_size = batch_size

    @property
    def dataset_schema(self) -> pa.Schema:
        """The schema of the dataset."""
        return self._scan.manifest.schema.arrow()

    @property
    def projected_schema(self) -> pa.Schema:
        """The schema of the rows."""
        return self._projected

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream of record batches."""
        reader = self._handle._batches(self._scan)
        if self._expressions is not None:
            return ds.Scanner.from_batches(reader, columns=self._expressions).to_reader()
        if self._batch_size is None:
            return reader
        return pa.RecordBatchReader.from_batches(
            self._projected, _cut(reader, max(1, self._batch_size))
        )

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches."""
        yield from self.to_reader()

    def scan_batches(self) -> Iterator[ds.TaggedRecordBatch]:
        """Yield the rows as record batches, without fragments."""
        for batch in self.to_reader():
            yield ds.TaggedRecordBatch(batch, None)

    def to_table(self) -> pa.Table:
        """Return the rows as a table."""
        return self.to_reader().read_all()

    def head(self, num_rows: int) -> pa.Table:
        """Return the first rows by key."""
        batches, left = [], num_rows
        for batch in self.to_batches():
            batches.append(batch[:left])
            left -= len(batches[-1])
            if left <= 0:
                break
        return pa.Table.from_batches(batches, self._projected)

    def take(self, indices: Any) -> pa.Table:
        """Return rows by their numbers; this reads all of them."""
        return self.to_table().take(indices)

    def count_rows(self) -> int:
        """Return the number of rows without reading other columns than those of the filter."""
        schema, where = self._scan.manifest.schema, self._scan.projection.where
        counted = replace(self._scan, projection=Projection.of(schema, [], where))
        with self._handle._batches(counted) as batches:
            return sum(len(batch) for batch in batches)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)


def _names(expressions: Mapping[str, pc.Expression]) -> list[str] | None:
    """Return the columns that expressions use; None means all."""
    names: dict[str, None] = {}
    for expression in expressions.values():
        used = columns_of(expression)
        if used is None:
            return None
        names |= dict.fromkeys(used)
    return list(names)


def _cut(batches: pa.RecordBatchReader, rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, len(batch), rows):
            yield batch.slice(start, rows)
