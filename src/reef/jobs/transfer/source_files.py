"""Files of rows that can be imported: Parquet, Arrow, CSV and JSON lines.

Each is read as a stream of batches. Parquet and Arrow files have types of their own. Text has
none: its columns get the types of the namespace, and columns that the namespace does not have, or
all of them before it exists, the types that the first megabyte suggests. Nested columns are JSON
in the cells of a CSV file. An error names the file, the row (the first one is row 0) and the
column.
"""

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from reef.engine.rows.convert import EXPIRES_AT, MISFITS, fit_values, parse_times
from reef.engine.rows.json_values import from_json, parse_object, to_json
from reef.errors import ErrorKind, InvalidInputError
from reef.stores import Store

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".ipc", ".feather", ".arrows")
CSV, TSV = (".csv", ".csv.gz"), (".tsv", ".tsv.gz")
JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
SUFFIXES = PARQUET + ARROW + CSV + TSV + JSON_LINES
"""How the names of files end that can be imported."""
PART_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
"""Text that is parsed at a time; rows are not longer."""
MAGIC = b"ARROW1"
CSV_ROW = re.compile(r"(?:In CSV column #(\d+): )?(?:CSV parse error: )?Row #(\d+): (.*)", re.S)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows."""

    store: Store
    key: str
    size: int

    def __str__(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"

    def digest(self) -> str:
        """Return a hash of the file's contents."""
        summed = hashlib.blake2b(digest_size=16)
        for start in range(0, self.size, PART_BYTES):
            end = min(start + PART_BYTES, self.size)
            summed.update(self.store.get_range(self.key, start, end))
        return summed.hexdigest()

    def open(self, types: pa.Schema | None = None, *, is_patch: bool = False) -> "FileRows":
        """Open the file; InvalidInputError names it if it is damaged or of another format.

        `types` are those of the namespace, for text. A patch has the columns of the first block
        of a file, and no others.
        """
        types = pa.schema([]) if types is None else types
        try:
            if self.key.endswith(PARQUET):
                return _ParquetRows(self)
            if self.key.endswith(CSV + TSV):
                return _CsvRows(self, types)
            if self.key.endswith(JSON_LINES):
                return _JsonRows(self, types, is_patch=is_patch)
            return _arrow_rows(self)
        except InvalidInputError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.bad(error) from error

    def stream(self) -> Any:
        """Return the contents as an Arrow file, decompressed."""
        file = pa.PythonFile(_StoreFile(self), mode="r")
        return pa.CompressedInputStream(file, "gzip") if self.key.endswith(".gz") else file

    def bad(self, error: Exception) -> InvalidInputError:
        return InvalidInputError(
            f"file {self} cannot be read: {error}", kind=ErrorKind.INVALID_INPUT, object=self.key
        )

    def bad_row(self, row: int, column: str | None, problem: str) -> InvalidInputError:
        """Return the error for a row that cannot be parsed."""
        where = f"row {row}" if column is None else f"row {row}, column {column}"
        context: dict[str, Any] = {} if column is None else {"column": column}
        return InvalidInputError(
            f"file {self}, {where}: {problem}", object=self.key, row=row, **context
        )


class FileRows(ABC):
    """The rows of an open file."""

    schema: pa.Schema

    def __init__(self, source: SourceFile) -> None:
        self._source = source

    def batches(self, rows: int) -> Iterator[pa.Table]:
        """Yield tables of exactly so many rows; the last one may have fewer."""
        waiting: list[pa.RecordBatch] = []
        count = 0
        for batch in self._read_checked(rows):
            start = 0
            while start < len(batch):
                waiting.append(batch.slice(start, rows - count))
                start += len(waiting[-1])
                count += len(waiting[-1])
                if count == rows:
                    yield pa.Table.from_batches(waiting)
                    waiting, count = [], 0
        if waiting:
            yield pa.Table.from_batches(waiting)

    def _read_checked(self, rows: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._read(rows)
        except (pa.ArrowException, OSError) as error:
            raise self._source.bad(error) from error

    @abstractmethod
    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of about so many rows, if the format allows a choice."""


class _ParquetRows(FileRows):
    def __init__(self, source: SourceFile) -> None:
        import pyarrow.parquet as pq

        super().__init__(source)
        self._file = pq.ParquetFile(pa.PythonFile(_StoreFile(source), mode="r"))
        self.schema = self._file.schema_arrow

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(batch_size=rows, use_threads=False)


class _ArrowRows(FileRows):
    def __init__(self, source: SourceFile, reader: Any) -> None:
        super().__init__(source)
        self._reader = reader
        self.schema = reader.schema

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        if isinstance(self._reader, pa.RecordBatchStreamReader):
            yield from self._reader
        else:
            for place in range(self._reader.num_record_batches):
                yield self._reader.get_batch(place)


def _arrow_rows(source: SourceFile) -> _ArrowRows:
    file = pa.PythonFile(_StoreFile(source), mode="r")
    if source.store.get_range(source.key, 0, min(source.size, len(MAGIC))) == MAGIC:
        return _ArrowRows(source, pa.ipc.open_file(file))
    return _ArrowRows(source, pa.ipc.open_stream(file))


# --- text -----------------------------------------------------------------------------


class _CsvRows(FileRows):
    """Rows of a CSV file with a header. An empty cell is null, unless it is quoted: "".

    The cells of nested columns are JSON.
    """

    def __init__(self, source: SourceFile, types: pa.Schema) -> None:
        super().__init__(source)
        self._types = {field.name: field.type for field in types}
        self._reader = self._open()
        self.schema = pa.schema(map(self._field, self._reader.schema))

    def _open(self) -> Any:
        from pyarrow import csv

        parsed = {n: pa.string() if _is_nested(t) else t for n, t in self._types.items()}
        try:
            return csv.open_csv(
                self._source.stream(),
                read_options=csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=csv.ParseOptions(
                    delimiter="\t" if self._source.key.endswith(TSV) else ",",
                    newlines_in_values=True,
                ),
                convert_options=csv.ConvertOptions(
                    column_types=parsed,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise self._name_row(error) from error

    def _field(self, field: pa.Field) -> pa.Field:
        return field.with_type(self._types.get(field.name, _suggest_type(field.type)))

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        first = 0
        while True:
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            except pa.ArrowInvalid as error:
                raise self._name_row(error) from error
            columns = [
                self._parse_column(column, field, first)
                for column, field in zip(batch.columns, self.schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
            first += len(batch)

    def _parse_column(self, column: pa.Array, field: pa.Field, first: int) -> pa.Array:
        """Return a column as its type; parse the JSON of a nested one."""
        if not _is_nested(field.type):
            return column.cast(field.type)
        values = []
        for row, text in enumerate(column.to_pylist(), first):
            try:
                value = None if text is None else json.loads(text)
                pa.array([value], field.type)
            except (ValueError, TypeError, pa.ArrowException) as error:
                problem = f"{text[:80]!r} is not JSON of the type {field.type}: {error}"
                raise self._source.bad_row(row, field.name, problem) from error
            values.append(value)
        return pa.array(values, field.type)

    def _name_row(self, error: pa.ArrowInvalid) -> InvalidInputError:
        """Return an error with the row and the column; Arrow numbers lines, the header is 1."""
        match = CSV_ROW.match(str(error))
        if match is None:
            return self._source.bad(error)
        column = None if match[1] is None else self._names()[int(match[1])]
        return self._source.bad_row(int(match[2]) - 2, column, match[3])

    def _names(self) -> list[str]:
        from pyarrow import csv

        parse = csv.ParseOptions(delimiter="\t" if self._source.key.endswith(TSV) else ",")
        header = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        text = csv.ConvertOptions(column_types={})
        names: list[str] = csv.open_csv(
            io.BytesIO(self._source.stream().read(BLOCK_BYTES).partition(b"\n")[0] + b"\n"),
            read_options=header,
            parse_options=parse,
            convert_options=text,
        ).schema.names
        return names


class _JsonRows(FileRows):
    """Rows of a file with a JSON object on each line; a field that is missing is null.

    Arrow parses them, as far as it can: it has no maps, no NaN and no base64. From the first block
    that it refuses on they are parsed one by one, and errors name the row and the column.
    """

    def __init__(self, source: SourceFile, types: pa.Schema, *, is_patch: bool) -> None:
        super().__init__(source)
        self._types = types
        if is_patch:
            first = self._first_names()
            self._types = pa.schema([field for field in types if field.name in first])
        elif len(types) and EXPIRES_AT not in types.names:
            self._types = types.append(pa.field(EXPIRES_AT, pa.timestamp("ms", "UTC")))
        self._reader: Any = None
        self.schema = self._types
        self._open()

    def _open(self) -> None:
        from pyarrow import json as arrow_json

        try:
            self._reader = arrow_json.open_json(
                self._source.stream(),
                read_options=arrow_json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=_json_options(self._types),
            )
        except pa.ArrowException as error:
            if not len(self._types):
                raise self._name_row(error) from error
            return
        known = {field.name: field.type for field in self._types}
        self.schema = pa.schema(
            [
                field.with_type(known.get(field.name, _suggest_type(field.type)))
                for field in self._reader.schema
            ]
        )

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        first = 0
        while self._reader is not None:
            try:
                batch = self._reader.read_next_batch()
                columns = [
                    _cast(column, field.type)
                    for column, field in zip(batch.columns, self.schema, strict=True)
                ]
            except StopIteration:
                return
            except MISFITS:
                break
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
            first += len(batch)
        yield from self._read_lines(first)

    # --- one by one -------------------------------------------------------------------
    def _read_lines(self, first: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `first` on, about a block of text at a time."""
        waiting: list[dict[str, Any]] = []
        size = 0
        for row, line in enumerate(self._lines()):
            if row < first:
                continue
            waiting.append(self._parse(row, line))
            size += len(line)
            if size >= BLOCK_BYTES:
                yield self._batch(waiting, row + 1 - len(waiting))
                waiting, size = [], 0
        if waiting:
            yield self._batch(waiting, row + 1 - len(waiting))

    def _lines(self) -> Iterator[str]:
        text = io.TextIOWrapper(self._source.stream(), encoding="utf-8", errors="replace")
        return (line for line in text if line.strip())

    def _parse(self, row: int, line: str) -> dict[str, Any]:
        """Return the values of a line, by column."""
        found = self._object(row, line)
        for name in found:
            if name not in self.schema.names:
                owner = "namespace has" if self._reader is None else "first rows of the file have"
                raise self._source.bad_row(row, name, f"the {owner} no such column")
        return found

    def _object(self, row: int, line: str) -> dict[str, Any]:
        try:
            found = parse_object(line)
        except (ValueError, RecursionError) as error:
            raise self._source.bad_row(row, None, f"not JSON: {error}") from error
        if not isinstance(found, dict):
            shown = line.strip()[:80]
            raise self._source.bad_row(row, None, f"expected an object, found {shown}")
        return found

    def _batch(self, rows: list[dict[str, Any]], first: int) -> pa.RecordBatch:
        columns = [
            self._column(field, [row.get(field.name) for row in rows], first)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, field: pa.Field, values: list[Any], first: int) -> pa.Array:
        """Return values as a column's type; the error names the first one that does not fit."""
        try:
            return _fit_json(field, values)
        except MISFITS:
            for row, value in enumerate(values, first):
                try:
                    _fit_json(field, [value])
                except MISFITS as error:
                    shown = json.dumps(to_json(value))[:80]
                    problem = f"{shown} is not a value of the type {field.type}: {error}"
                    raise self._source.bad_row(row, field.name, problem) from error
            raise

    def _first_names(self) -> set[str]:
        """Return the names in the first block of the file."""
        names: set[str] = set()
        size = 0
        for line in self._lines():
            with suppress(ValueError, RecursionError, AttributeError):  # reported when it is read
                names |= parse_object(line).keys()
            size += len(line)
            if size >= BLOCK_BYTES:
                break
        return names

    def _name_row(self, error: Exception) -> InvalidInputError:
        """Return the error for the first line that is no object: Arrow does not number it."""
        for row, line in enumerate(self._lines()):
            try:
                self._object(row, line)
            except InvalidInputError as named:
                return named
        return self._source.bad(error)


def _fit_json(field: pa.Field, values: list[Any]) -> pa.Array:
    parsed = [from_json(field.name, value, field.type) for value in values]
    return fit_values(parsed, field.type)


def _json_options(types: pa.Schema) -> Any:
    from pyarrow import json as arrow_json

    parsed = pa.schema([field.with_type(_json_type(field.type)) for field in types])
    return arrow_json.ParseOptions(explicit_schema=parsed, unexpected_field_behavior="infer")


def _json_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type that Arrow parses, and that can be cast to the column's."""
    if pa.types.is_date(data_type) or pa.types.is_time(data_type):
        return pa.string()
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(data_type.value_type)
    return data_type


def _cast(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Return a parsed column as its own type."""
    if pa.types.is_time(data_type) and pa.types.is_string(column.type):
        return parse_times(column, data_type)
    return column.cast(data_type)


def _is_nested(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_nested(data_type))


def _suggest_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of a new column for the type that was inferred from text."""
    if pa.types.is_null(data_type):
        return pa.string()
    if pa.types.is_timestamp(data_type):  # the unit follows from the first values only
        return pa.timestamp("us", data_type.tz)
    return data_type


# --- objects as files -----------------------------------------------------------------


class _StoreFile(io.RawIOBase):
    """An object as a seekable file."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._source.size - self._at
        count = left if size < 0 else min(size, left)
        if count <= 0:
            return b""
        start, self._at = self._at, self._at + count
        return self._source.store.get_range(self._source.key, start, self._at)
