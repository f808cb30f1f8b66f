"""Schemas and batches, as Spark has them.

    Reef                     Spark
    uint8, uint16, uint32    the next larger signed type
    uint64                   decimal(20, 0)
    timestamp with a zone    timestamp, to the microsecond
    timestamp without        timestamp_ntz, to the microsecond
    vector, list             array
    everything else          the same

Nanoseconds are cut, always towards the past; a moment that microseconds cannot reach is an
error. The key column is never null, the others may be. When a row expires (`_expires_at`) is no
column, but can be asked for like one: whoever writes rows back keeps it so. Spark wants the very
schema that it was told, to the names inside of lists, so batches are brought into that form here.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from reef.engine.rows.out import EXPIRES_AT, unknown_column
from reef.errors import InvalidInputError
from reef.formats.schema import Schema

__all__ = ["arrow_schema", "check_same", "spark_schema", "to_spark"]

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
            raise InvalidInputError(f"column {name} is asked for twice", column=name)
    return st.StructType([known[name] for name in (fields if columns is None else columns)])


def arrow_schema(struct: st.StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of the batches of a schema."""
    return pa.schema([pa.field(f.name, _arrow_type(f.dataType), f.nullable) for f in struct])


def check_same(given: st.StructType, ours: st.StructType) -> None:
    """Raise unless a schema that a user gave says of each column what is there."""
    for told, found in zip(given, ours, strict=True):
        if told.dataType != found.dataType and told.dataType != _with_nulls(found.dataType):
            raise InvalidInputError(
                f"column {told.name} is {found.dataType.simpleString()}, "
                f"the given schema says {told.dataType.simpleString()}",
                hint="Leave the schema away: it comes from the namespace. Cast afterwards",
                column=told.name,
            )


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
        _converted(batch.column(place), field.type, field.name)
        for place, field in enumerate(target)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _spark_type(data_type: pa.DataType) -> st.DataType:
    if data_type in SIMPLE:
        return SIMPLE[data_type]
    if pa.types.is_timestamp(data_type):
        return st.TimestampType() if data_type.tz else st.TimestampNTZType()
    if pa.types.is_decimal(data_type):
        return st.DecimalType(data_type.precision, data_type.scale)
    # A list may hold nulls, a vector never does.
    may_be_null = not pa.types.is_fixed_size_list(data_type)
    return st.ArrayType(_spark_type(data_type.value_type), may_be_null)


def _arrow_type(data_type: st.DataType) -> pa.DataType:
    if isinstance(data_type, st.DecimalType):
        return pa.decimal128(data_type.precision, data_type.scale)
    if isinstance(data_type, st.ArrayType):
        element = _arrow_type(data_type.elementType)
        return pa.list_(pa.field("element", element, data_type.containsNull))
    return ARROW[type(data_type)]


def _with_nulls(data_type: st.DataType) -> st.DataType:
    if isinstance(data_type, st.ArrayType):
        return st.ArrayType(_with_nulls(data_type.elementType), True)
    return data_type


def _converted(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
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
    """Cut moments to microseconds, towards the past; also those in lists."""
    data_type = array.type
    if pa.types.is_list(data_type) and _has_nanoseconds(data_type):
        # Offsets of a slice do not go together with nulls: count from the slice's own start.
        offsets = pc.subtract(array.offsets, array.offsets[0])
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        values = _without_nanoseconds(array.values[start:end])
        return pa.ListArray.from_arrays(offsets, values, mask=array.is_null())
    if not pa.types.is_timestamp(data_type) or data_type.unit != "ns":
        return array
    counts = array.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    floored = np.floor_divide(counts, NS_PER_US)
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    return pa.array(floored, pa.int64(), mask=nulls).view(pa.timestamp("us", tz=data_type.tz))


def _has_nanoseconds(data_type: pa.DataType) -> bool:
    if pa.types.is_list(data_type):
        return _has_nanoseconds(data_type.value_type)
    return bool(pa.types.is_timestamp(data_type) and data_type.unit == "ns")
