"""What users give, as columns: lists of dicts, dicts of columns, tables, frames, streams.

Nothing of pandas, polars or DuckDB is imported. What speaks the Arrow C interface is read
through that, without a copy; pandas is known by its module's name, since its frames have an
index that the interface would give out as a column.

In pandas a NaN is a missing value, so it arrives as null, inside lists too. Everywhere else,
and in pandas columns that Arrow backs, NaN is a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.engine.rows.fit import Column
from reef.errors import InvalidInputError

__all__ = ["Given", "read_given"]

FORMS = "a list of dicts, a dict of columns, an Arrow table, batch or stream, pandas, or polars"


@dataclass(frozen=True, slots=True)
class Given:
    """Columns of equal length, by name."""

    columns: Mapping[str, Column]
    rows: int
    dicts: Sequence[Mapping[str, Any]] | None = None
    """The rows themselves, where each one says which columns it has."""


def read_given(data: Any, key: str) -> Given:
    """Return any form of rows as columns; streams are read to their end."""
    if isinstance(data, list | tuple):
        return _from_dicts(data)
    if isinstance(data, Mapping):
        return _from_columns(data)
    if _is_pandas(data) and hasattr(data, "columns"):
        return _from_pandas(data, key)
    return _from_table(_as_table(data))


# --- Python -------------------------------------------------------------------------


def _from_dicts(data: Sequence[Any]) -> Given:
    for cls in set(map(type, data)):
        if not issubclass(cls, Mapping):
            row = next(place for place, value in enumerate(data) if type(value) is cls)
            raise InvalidInputError(f"row {row}: a dict expected, got {cls.__name__}", row=row)
    names = {name: None for row in data for name in row}
    columns = {name: [row.get(name) for row in data] for name in names}
    return Given(columns, len(data), data)


def _from_columns(data: Mapping[Any, Any]) -> Given:
    columns = {name: _as_column(values, name) for name, values in data.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidInputError(f"columns of one batch are equally long, but {told}")
    return Given(columns, next(iter(lengths.values()), 0))


def _as_column(values: Any, name: str) -> Column:
    if isinstance(values, list | pa.Array):
        return values
    if isinstance(values, np.ndarray):
        return _from_numpy(values, name)
    if isinstance(values, pa.ChunkedArray) or hasattr(values, "__arrow_c_stream__"):
        return _combined(pa.chunked_array(values), name)
    if hasattr(values, "__arrow_c_array__"):
        return pa.array(values)
    if _is_pandas(values):
        return _from_series(values)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return list(values)
    raise InvalidInputError(
        f"column {name}: a list or an array expected, got {type(values).__name__}",
        hint="A single row is a list of one dict",
        column=name,
    )


def _from_numpy(values: npt.NDArray[np.generic], name: str) -> Column:
    if values.ndim not in (1, 2):
        raise InvalidInputError(
            f"column {name}: an array of 1 or 2 dimensions expected, got {values.ndim}",
            column=name,
        )
    return list(values) if values.dtype == object else values


# --- Arrow --------------------------------------------------------------------------


def _as_table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    try:
        if hasattr(data, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(data)
        elif hasattr(data, "__arrow_c_array__"):
            return pa.Table.from_batches([pa.record_batch(data)])
        else:
            raise InvalidInputError(f"rows are {FORMS}, got {type(data).__name__}")
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"a {type(data).__name__} is not rows: {error}") from error
    return reader.read_all()


def _from_table(table: pa.Table) -> Given:
    names = table.column_names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInputError(f"column {twice} is there twice")
    columns = {name: _combined(table.column(name), name) for name in names}
    return Given(columns, table.num_rows)


def _combined(chunks: pa.ChunkedArray, name: str) -> pa.Array:
    """Return all chunks in one."""
    try:
        joined = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    except pa.ArrowInvalid:
        joined = chunks
    if isinstance(joined, pa.ChunkedArray):
        raise InvalidInputError(
            f"column {name} has {chunks.nbytes} bytes", hint="A batch takes 2 GiB of it: split it"
        )
    return joined


# --- pandas -------------------------------------------------------------------------


def _is_pandas(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas"


def _from_pandas(frame: Any, key: str) -> Given:
    """Read a frame; its index counts only where it has the key column's name."""
    if frame.index.name == key and key not in frame.columns:
        frame = frame.reset_index()
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(f"column {twice} is there twice")
    columns = {str(name): _from_series(frame[name]) for name in frame.columns}
    return Given(columns, len(frame))


def _from_series(series: Any) -> Column:
    try:
        array = pa.array(series, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        # Arrow finds no one type for it: the column's own type decides, value by value.
        values: list[Any] = series.astype(object).where(series.notna(), None).tolist()
        return values
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
