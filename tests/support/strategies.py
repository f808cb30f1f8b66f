"""Hypothesis strategies for Reef's data: keys, columns of every type, versions."""

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from reef.formats.schema import Field, Schema, type_name
from reef.formats.versions import Versions

TYPES = [
    pa.bool_(),
    *(getattr(pa, f"{u}int{b}")() for u in ("", "u") for b in (8, 16, 32, 64)),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.timestamp("ms", "Europe/Berlin"),
    pa.date32(),
    pa.decimal128(20, 4),
    pa.list_(pa.int64()),
    pa.list_(pa.string()),
    pa.list_(pa.list_(pa.float64())),
    pa.list_(pa.float32(), 3),
    pa.time32("s"),
    pa.time64("ns"),
    pa.map_(pa.string(), pa.list_(pa.int16())),
    pa.struct([("a", pa.int64()), ('b, "c">', pa.map_(pa.int32(), pa.bool_()))]),
    pa.list_(pa.struct([("text", pa.string()), ("vector", pa.list_(pa.float64(), 2))])),
]

keys = st.binary(min_size=1, max_size=12)


def values(data_type):
    """Return a strategy for values of an Arrow type, extremes included."""
    if pa.types.is_boolean(data_type):
        return st.booleans()
    if pa.types.is_integer(data_type):
        signed = pa.types.is_signed_integer(data_type)
        bits = data_type.bit_width
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return st.integers(low, high)
    if pa.types.is_floating(data_type):
        return st.floats(width=data_type.bit_width)
    if pa.types.is_string(data_type):
        return st.text(max_size=8)
    if pa.types.is_binary(data_type):
        return st.binary(max_size=8)
    if pa.types.is_timestamp(data_type):
        return st.integers(-(2**62), 2**62)
    if pa.types.is_date(data_type):
        return st.dates(datetime.date(1, 1, 1), datetime.date(9999, 12, 31))
    if pa.types.is_decimal(data_type):
        return st.integers(-(10**20) + 1, 10**20 - 1).map(
            lambda n: decimal.Decimal(n).scaleb(-data_type.scale)
        )
    if pa.types.is_time(data_type):
        return _times(data_type)
    return _nested(data_type)


def _times(data_type):
    step = {"s": 1, "ns": 1000}[data_type.unit]  # Python has no nanoseconds of a day
    count = 86_400 if data_type.unit == "s" else 86_400 * 10**6
    return st.integers(0, count - 1).map(lambda number: number * step)


def _nested(data_type):
    if pa.types.is_struct(data_type):
        return st.fixed_dictionaries({f.name: _maybe(values(f.type)) for f in data_type})
    if pa.types.is_map(data_type):
        pairs = st.dictionaries(values(data_type.key_type), _maybe(values(data_type.item_type)))
        return pairs.map(lambda pairs: list(pairs.items())[:3])
    inner = values(data_type.value_type)
    if pa.types.is_fixed_size_list(data_type):
        return st.lists(inner, min_size=data_type.list_size, max_size=data_type.list_size)
    return st.lists(_maybe(inner), max_size=4)


def _maybe(drawn):
    return st.one_of(st.none(), drawn)


@st.composite
def arrays(draw, data_type, length):
    """An array of exactly `length` values, with nulls, and sometimes a slice of another."""
    before = draw(st.integers(0, 3))
    items = draw(
        st.lists(
            st.one_of(st.none(), values(data_type)),
            min_size=before + length,
            max_size=before + length + 3,
        )
    )
    return pa.array(items, data_type)[before : before + length]


@st.composite
def schemas(draw):
    """A schema of a few columns of any types."""
    types = draw(st.lists(st.sampled_from(TYPES), min_size=0, max_size=4))
    numbers = draw(st.permutations(range(1, len(types) + 1)))
    fields = [
        Field(number, f"c{number}", type_name(data_type))
        for number, data_type in zip(sorted(numbers), types, strict=True)
    ]
    return Schema(1, Field(0, "id", "binary"), tuple(fields))


@st.composite
def versions(draw, schema, max_rows=30):
    """Sorted versions, newest first for equal keys, with and without every optional part."""
    drawn = draw(st.lists(st.tuples(keys, st.integers(1, 9), st.integers(0, 3)), unique=True,
                          min_size=1, max_size=max_rows))  # fmt: skip
    drawn.sort(key=lambda version: (version[0], -version[1], -version[2]))
    rows = len(drawn)
    kinds = draw(st.lists(st.sampled_from([0, 1, 3]), min_size=rows, max_size=rows))
    chosen = [field for field in schema.fields if draw(st.booleans())]
    fields = {field.number: draw(arrays(field.arrow, rows)) for field in chosen}
    touched = {field.number: draw(_flags(rows)) for field in chosen if draw(st.booleans())}
    expires = draw(st.one_of(st.none(), arrays(pa.int64(), rows)))
    return Versions(
        pa.array([key for key, _, _ in drawn], pa.binary()),
        np.array([lsn for _, lsn, _ in drawn], np.int64),
        np.array([seq for _, _, seq in drawn], np.uint32),
        np.array(kinds, np.uint8),
        fields,
        expires,
        touched,
    )


def _flags(rows):
    return st.lists(st.booleans(), min_size=rows, max_size=rows).map(
        lambda flags: pa.array(flags, pa.bool_())
    )


def same(left, right):
    """Whether two arrays hold the same values; NaN equals NaN."""
    return (
        left.type == right.type and _comparable(left.to_pylist()) == _comparable(right.to_pylist())
        if not pa.types.is_temporal(left.type)
        else left.equals(right)
    )


def _comparable(value):
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
