"""Rows of the log as plain columns, for a shuffle that knows few types.

    key  lsn  seq  kind  expires  f<n>, a column's values  t<n>, whether a patch touches it

A shuffle has to carry every value to the bit, and need not understand it. What it may not have
(unsigned numbers, nanoseconds, vectors) or may touch on the way (text, floats) goes as integers
of the same width or as bytes, and comes back as it was. Rows are compared by key, LSN and
sequence alone.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from reef.formats.schema import Schema
from reef.formats.versions import Versions

__all__ = ["from_batch", "shuffled_schema", "to_batches"]

BATCH_ROWS = 65_536
WIDTHS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
AS_BYTES = frozenset(
    example.id
    for example in (pa.string(), pa.binary(), pa.decimal128(1), pa.list_(pa.float32(), 1))
)
FIXED = [
    ("key", pa.binary()),
    ("lsn", pa.int64()),
    ("seq", pa.int64()),
    ("kind", pa.int8()),
    ("expires", pa.int64()),
]


def shuffled_schema(schema: Schema, *, patched: bool) -> pa.Schema:
    """Return the columns of rows on their way; those of patches only where there are some."""
    types = schema.types()
    columns = [*FIXED, *((f"f{number}", plain_type(t)) for number, t in types.items())]
    columns += [(f"t{number}", pa.bool_()) for number in types if patched]
    return pa.schema(columns)


def to_batches(rows: Versions, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in the form of `shuffled_schema`."""
    columns = {
        "key": rows.keys,
        "lsn": pa.array(rows.lsns, pa.int64()),
        "seq": pa.array(rows.seqs.astype(np.int64)),
        "kind": pa.array(rows.kinds.astype(np.int8)),
        "expires": rows.expires_at_ms,
    }
    columns |= {f"f{number}": plain(array) for number, array in rows.fields.items()}
    columns |= {f"t{number}": array for number, array in rows.touched.items()}
    found = [columns.get(field.name) for field in target]
    arrays = [
        pa.nulls(len(rows), field.type) if array is None else array
        for field, array in zip(target, found, strict=True)
    ]
    table = pa.Table.from_arrays(arrays, schema=target)
    yield from table.to_batches(max_chunksize=BATCH_ROWS)


def from_batch(batch: pa.RecordBatch, schema: Schema) -> Versions:
    """Return the rows of a batch as they were, whatever layouts the shuffle prefers."""
    patched = any(name.startswith("t") for name in batch.schema.names)
    told = shuffled_schema(schema, patched=patched)
    if batch.schema.types != told.types:
        batch = batch.cast(told)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    expires = columns["expires"]
    return Versions(
        columns["key"],
        columns["lsn"].to_numpy(),
        columns["seq"].to_numpy().astype(np.uint32),
        columns["kind"].to_numpy().astype(np.uint8),
        {number: unplain(columns[f"f{number}"], t) for number, t in schema.types().items()},
        None if expires.null_count == len(expires) else expires,
        {number: columns[f"t{number}"] for number in schema.types() if f"t{number}" in columns},
    )


# --- types ------------------------------------------------------------------------------


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """Return what a column goes as: bool, a signed integer, bytes, or a list of those."""
    if pa.types.is_boolean(data_type):
        return data_type
    if pa.types.is_list(data_type):
        return pa.list_(pa.field("element", plain_type(data_type.value_type)))
    if data_type.id in AS_BYTES:
        return pa.binary()
    return WIDTHS[data_type.bit_width]


def plain(array: pa.Array) -> pa.Array:
    """Return an array as its plain type, bit by bit."""
    data_type = array.type
    target = plain_type(data_type)
    if data_type == target:
        return array
    if pa.types.is_list(data_type):
        array = _from_zero(array)
        offsets, values = array.offsets, plain(array.values)
        return pa.ListArray.from_arrays(offsets, values, type=target, mask=array.is_null())
    if pa.types.is_fixed_size_list(data_type):
        return _placed(_vectors_as_bytes(array.drop_null()), array).cast(target)
    if pa.types.is_decimal(data_type):
        return array.view(pa.binary(data_type.bit_width // 8)).cast(target)
    return array.view(target)


def unplain(array: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Return what `plain` was given."""
    if array.type == data_type:
        return array
    if pa.types.is_list(data_type):
        array = _from_zero(array)
        values = unplain(array.values, data_type.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=data_type, mask=array.is_null())
    if pa.types.is_fixed_size_list(data_type):
        return _placed(_vectors_from_bytes(array.drop_null(), data_type), array)
    if pa.types.is_decimal(data_type):
        return array.cast(pa.binary(data_type.bit_width // 8)).view(data_type)
    return array.view(data_type)


def _vectors_as_bytes(vectors: pa.Array) -> pa.Array:
    """Return vectors, none of them null, as so many bytes each."""
    values = np.ascontiguousarray(vectors.flatten().to_numpy())
    width = vectors.type.list_size * values.itemsize
    buffers = [None, pa.py_buffer(values.view(np.uint8))]
    return pa.Array.from_buffers(pa.binary(width), len(vectors), buffers)


def _vectors_from_bytes(found: pa.Array, data_type: pa.DataType) -> pa.Array:
    width = data_type.list_size * data_type.value_type.bit_width // 8
    data = _from_zero(found.cast(pa.binary(width))).buffers()[1]
    count = len(found) * data_type.list_size
    values = pa.Array.from_buffers(data_type.value_type, count, [None, data])
    return pa.FixedSizeListArray.from_arrays(values, type=data_type)


def _placed(values: pa.Array, original: pa.Array) -> pa.Array:
    """Return values with nulls between them, where the original has them."""
    if not original.null_count:
        return values
    valid = original.is_valid().to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _from_zero(array: pa.Array) -> pa.Array:
    """Return a copy that begins at the beginning of its buffers."""
    return pa.concat_arrays([array, array[:0]])
