"""Rows for tests: every form they are given in, the ends of every type, and the way back."""

import datetime
from decimal import Decimal

import numpy as np
import polars as pl
import pyarrow as pa

from reef.engine.rows.convert import to_record_batch
from reef.engine.rows.input import to_ops
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind, decode_ops, encode_ops


def schema_of(**columns):
    """Return a schema of these columns and a text key."""
    return Schema.of(pa.schema([("id", pa.string()), *columns.items()]))


def committed(ops, schema):
    """Return the operations as versions, by way of the bytes of a batch."""
    ops = decode_ops(encode_ops(ops), schema, "x")
    rows = len(ops)
    return Versions(
        ops.keys,
        np.full(rows, 7, np.int64),
        np.arange(rows, dtype=np.uint32),
        ops.kinds.to_numpy(),
        ops.fields,
        ops.expires_at_ms,
    )


def there_and_back(data, schema):
    """Return the rows as they are read after an upsert."""
    return to_record_batch(committed(to_ops(data, schema, kind=OpKind.PUT), schema), schema)


# --- forms ---------------------------------------------------------------------------


class Stream:
    """Speaks the Arrow C stream interface and nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


class Batch:
    """Speaks the Arrow C array interface and nothing else."""

    def __init__(self, table):
        self._batch = table.combine_chunks().to_batches()[0]

    def __arrow_c_array__(self, requested_schema=None):
        return self._batch.__arrow_c_array__(requested_schema)


def python_values(column):
    """Return Python values; timestamps as numpy values, which represent all of them."""
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    counts = column.combine_chunks().view(pa.int64()).to_pylist()
    return [None if c is None else np.datetime64(c, column.type.unit) for c in counts]


def python_columns(table):
    """Return a dict of lists."""
    return {name: python_values(table[name]) for name in table.column_names}


def python_rows(table):
    """Return a list of dicts."""
    columns = python_columns(table)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


ARROW_FORMS = {
    "table": lambda table: table,
    "chunks": lambda table: pa.concat_tables([table[:2], table[2:]]),
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "reader": lambda table: table.to_reader(max_chunksize=-(-len(table) // 2)),
    "C stream": Stream,
    "C array": Batch,
    "dict of chunks": lambda table: {n: table[n] for n in table.column_names},
    "dict of arrays": lambda table: {n: table[n].combine_chunks() for n in table.column_names},
    "polars": pl.from_arrow,
    "dict of polars": lambda table: {n: pl.from_arrow(table[n]) for n in table.column_names},
}
FORMS = ARROW_FORMS | {
    "list of dicts": python_rows,
    "tuple of dicts": lambda table: tuple(python_rows(table)),
    "dict of lists": python_columns,
    "dict of tuples": lambda table: {n: tuple(v) for n, v in python_columns(table).items()},
}

EDGES = {
    pa.bool_(): [True, False],
    pa.float32(): [float("nan"), float("inf"), -float("inf"), -0.0, 2.0**-149],
    pa.float64(): [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 2.0**53],
    pa.string(): ["", "a", "\x00", "ж𝄞", "x" * 1000],
    pa.binary(): [b"", b"a", b"\x00\xff", b"x" * 1000],
    pa.date32(): [datetime.date.min, datetime.date.max, datetime.date(1970, 1, 1)],
    pa.decimal128(20, 4): [Decimal("-9999999999999999.9999"), Decimal("0.0001"), Decimal(0)],
    pa.list_(pa.int64()): [[], [None], [2**63 - 1, None, -(2**63)]],
    pa.list_(pa.string()): [[], [""], ["a", None]],
    pa.list_(pa.list_(pa.float64())): [[], [[]], [None], [[float("nan"), None], [1.5]]],
    pa.time32("s"): [datetime.time(0, 0), datetime.time(23, 59, 59)],
    pa.time64("ns"): [datetime.time(0, 0), datetime.time(23, 59, 59, 999999)],
    pa.map_(pa.string(), pa.list_(pa.int16())): [{}, {"": None}, {"a": [1, None], "b": []}],
    pa.struct([("a", pa.int64()), ('b, "c">', pa.map_(pa.int32(), pa.bool_()))]): [
        {"a": None, 'b, "c">': None},
        {"a": 2**62, 'b, "c">': {1: True, 2: None}},
    ],
    pa.list_(pa.struct([("text", pa.string()), ("vector", pa.list_(pa.float64(), 2))])): [
        [],
        [None, {"text": "ä", "vector": [1.5, float("nan")]}, {"text": None, "vector": None}],
    ],
    pa.list_(pa.float32(), 3): [[0.0, -1.5, 2.5], [float("inf"), 0.0, 1.0]],
}


def edges(data_type):
    """Return an array with the ends of a type, and nulls between."""
    if pa.types.is_integer(data_type):
        bits, signed = data_type.bit_width, pa.types.is_signed_integer(data_type)
        values = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1]
    elif pa.types.is_timestamp(data_type):
        values = [-(2**63) + 1, 0, 2**63 - 1]
    else:
        values = EDGES[data_type]
    return pa.array([None, *values, None], data_type)


def table_of(column):
    """Return a table with a key for each value."""
    keys = pa.array([f"k{n}" for n in range(len(column))])
    return pa.table({"id": keys, "c": column})
