"""Spark's types for Reef's columns, and record batches in the form that Spark expects.

    Reef                     Spark
    uint8, uint16, uint32    the next larger signed type
    uint64                   decimal(20, 0)
    timestamp with a zone    timestamp, to the microsecond
    timestamp without        timestamp_ntz, to the microsecond
    time                     time(6), to the microsecond
    vector, list             array
    struct, map              the same
    everything else          the same

Nanoseconds are truncated towards the past; a timestamp outside of the range of microseconds is an
error. The key column is never null, the others may be. `_expires_at` is not a column of the
schema, but can be selected: a job that writes rows back keeps their expiry that way. Streams of
changes note Reef's own type in the metadata of each column (`REEF_TYPE`): merges depend on it.
Spark compares the schema of a batch with the declared one down to the names inside of lists, so
batches are cast to exactly that schema here.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from reef.engine.rows.convert import EXPIRES_AT, unknown_column
from reef.errors import InvalidInputError
from reef.formats.schema import Schema, arrow_type, type_name
from reef.formats.wal_object import OpKind

OP = "_op"
OPS = {
    "put": OpKind.PUT,
    "patch": OpKind.PATCH,
    "merge": OpKind.MERGE,
    "delete": OpKind.DELETE,
}

SIMPLE: dict[pa.DataType, st.DataType] = {
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.string(): st.StringType(),
    pa.binary(): st.BinaryType(),
    pa.date32(): st.DateType(),
}
ARROW: dict[type[st.DataType], pa.DataType] = {
    st.BooleanType: pa.bool_(),
    st.ByteType: pa.int8(),
    st.ShortType: pa.int16(),
    st.IntegerType: pa.int32(),
    st.LongType: pa.int64(),
    st.FloatType: pa.float32(),
    st.DoubleType: pa.float64(),
    st.StringType: pa.string(),
    st.BinaryType: pa.binary(),
    st.DateType: pa.date32(),
    st.TimestampType: pa.timestamp("us", tz="UTC"),
    st.TimestampNTZType: pa.timestamp("us"),
}
EXPIRY = st.StructField(EXPIRES_AT, st.TimestampType(), True)
NS_PER_US = 1000
REEF_TYPE = "reef.type"
"""Metadata of a column: its type in the namespace that it comes from."""


def spark_schema(schema: Schema, columns: Sequence[str] | None = None) -> st.StructType:
    """Return the columns that are asked for, all by default, as Spark's schema."""
    every = (schema.key, *schema.fields)
    fields = {
        f.name: st.StructField(f.name, _spark_type(f.arrow), f is not schema.key) for f in every
    }
    known = {**fields, EXPIRES_AT: EXPIRY}
    for place, name in enumerate(columns or ()):
        if name not in known:
            raise unknown_column(name, list(fields))
        if columns and name in columns[:place]:
            raise InvalidInputError(f"column {name} is selected twice", column=name)
    return st.StructType([known[name] for name in (fields if columns is None else columns)])


def arrow_schema(struct: st.StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of the batches of a schema."""
    return pa.schema([pa.field(f.name, _arrow_type(f.dataType), f.nullable) for f in struct])


def with_reef_types(struct: st.StructType, schema: Schema) -> st.StructType:
    """Return the same columns with the types of a namespace in their metadata."""
    names = {field.name: type_name(field.arrow) for field in (schema.key, *schema.fields)}
    return st.StructType(
        [st.StructField(f.name, f.dataType, f.nullable, {REEF_TYPE: names[f.name]}) for f in struct]
    )


def reef_type(field: st.StructField) -> pa.DataType | None:
    """Return the type that a column has in the namespace that it comes from.

    None if it comes from elsewhere, or was cast since: Spark keeps the metadata of a column.
    """
    name = (field.metadata or {}).get(REEF_TYPE)
    if not isinstance(name, str):
        return None
    try:
        known = arrow_type(name)
    except InvalidInputError:  # of a newer release
        return None
    same = field.dataType in (_spark_type(known), _with_nulls(_spark_type(known)))
    return known if same else None


def check_same(given: st.StructType, ours: st.StructType) -> None:
    """Raise unless a schema that a user gave has the type of each column."""
    for column, found in zip(given, ours, strict=True):
        if not same_type(column.dataType, found.dataType):
            raise InvalidInputError(
                f"column {column.name} is {found.dataType.simpleString()}, "
                f"the given schema says {column.dataType.simpleString()}",
                hint="Omit the schema: it comes from the namespace. Cast afterwards",
                column=column.name,
            )


def same_type(given: st.DataType, found: st.DataType) -> bool:
    """Whether a type is that of a column, with or without nulls within its values."""
    return given in (found, _with_nulls(found))


def to_spark(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Return the same rows in the form that Spark expects."""
    for place, field in enumerate(target):
        if not field.nullable and batch.column(place).null_count:
            raise InvalidInputError(
                f"column {field.name} has nulls, the given schema says that it has none",
                hint="Leave the schema away: it comes from the namespace",
                column=field.name,
            )
    arrays = [
        _convert(batch.column(place), field.type, field.name) for place, field in enumerate(target)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _spark_type(data_type: pa.DataType) -> st.DataType:
    if data_type in SIMPLE:
        return SIMPLE[data_type]
    if pa.types.is_timestamp(data_type):
        return st.TimestampType() if data_type.tz else st.TimestampNTZType()
    if pa.types.is_decimal(data_type):
        return st.DecimalType(data_type.precision, data_type.scale)
    if pa.types.is_time(data_type):
        return st.TimeType(6)
    return _spark_nested(data_type)


def _spark_nested(data_type: pa.DataType) -> st.DataType:
    if pa.types.is_struct(data_type):
        return st.StructType([st.StructField(f.name, _spark_type(f.type)) for f in data_type])
    if pa.types.is_map(data_type):
        return st.MapType(_spark_type(data_type.key_type), _spark_type(data_type.item_type))
    # A list may hold nulls, a vector never does.
    may_be_null = not pa.types.is_fixed_size_list(data_type)
    return st.ArrayType(_spark_type(data_type.value_type), may_be_null)


def _arrow_type(data_type: st.DataType) -> pa.DataType:
    if isinstance(data_type, st.DecimalType):
        return pa.decimal128(data_type.precision, data_type.scale)
    if isinstance(data_type, st.ArrayType):
        element = _arrow_type(data_type.elementType)
        return pa.list_(pa.field("element", element, data_type.containsNull))
    if isinstance(data_type, st.MapType):
        items = pa.field("value", _arrow_type(data_type.valueType), data_type.valueContainsNull)
        return pa.map_(_arrow_type(data_type.keyType), items)
    if isinstance(data_type, st.StructType):
        return pa.struct([pa.field(f.name, _arrow_type(f.dataType), f.nullable) for f in data_type])
    if isinstance(data_type, st.TimeType):
        return pa.time64("ns")
    return ARROW[type(data_type)]


def _with_nulls(data_type: st.DataType) -> st.DataType:
    if isinstance(data_type, st.ArrayType):
        return st.ArrayType(_with_nulls(data_type.elementType), True)
    if isinstance(data_type, st.MapType):
        return st.MapType(data_type.keyType, _with_nulls(data_type.valueType), True)
    if isinstance(data_type, st.StructType):
        return st.StructType([st.StructField(f.name, _with_nulls(f.dataType)) for f in data_type])
    return data_type


def _convert(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    if array.type == target:
        return array
    try:
        return _without_nanoseconds(array).cast(target)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(
            f"column {name}: Spark cannot hold a value of {array.type}: {error}",
            hint="Leave the column away with the option columns",
            column=name,
        ) from error


def _without_nanoseconds(array: pa.Array) -> pa.Array:
    """Truncate times to microseconds, towards the past; also those in lists, maps and structs."""
    data_type = array.type
    if not _has_nanoseconds(data_type):
        return array
    if pa.types.is_struct(data_type):
        parts = [_without_nanoseconds(part) for part in array.flatten()]
        names = [field.name for field in data_type]
        return pa.StructArray.from_arrays(parts, names, mask=array.is_null())
    if pa.types.is_map(data_type):
        array = pa.concat_arrays([array, array[:0]])
        keys, items = _without_nanoseconds(array.keys), _without_nanoseconds(array.items)
        return pa.MapArray.from_arrays(array.offsets, keys, items, mask=array.is_null())
    if pa.types.is_list(data_type):
        # Offsets of a slice do not go together with nulls: count from the slice's own start.
        offsets = pc.subtract(array.offsets, array.offsets[0])
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        values = _without_nanoseconds(array.values[start:end])
        return pa.ListArray.from_arrays(offsets, values, mask=array.is_null())
    if pa.types.is_time(data_type):
        return array.cast(pa.time64("us"), safe=False)
    counts = array.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    floored = np.floor_divide(counts, NS_PER_US)
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    return pa.array(floored, pa.int64(), mask=nulls).view(pa.timestamp("us", tz=data_type.tz))


def _has_nanoseconds(data_type: pa.DataType) -> bool:
    if pa.types.is_list(data_type):
        return _has_nanoseconds(data_type.value_type)
    if pa.types.is_struct(data_type):
        return any(_has_nanoseconds(field.type) for field in data_type)
    if pa.types.is_map(data_type):
        return _has_nanoseconds(data_type.key_type) or _has_nanoseconds(data_type.item_type)
    timed = pa.types.is_timestamp(data_type) or pa.types.is_time(data_type)
    return bool(timed and data_type.unit == "ns")
