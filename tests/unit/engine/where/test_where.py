"""The `where=` of scans: what matches, and what may be left unread."""

import datetime as dt
import math
import operator
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reef.engine.where import Bounds, bound_array, parse
from reef.formats.coding import Codec
from reef.formats.schema import Field, Schema, type_name
from reef.formats.segment import Lineage
from reef.formats.segment_index import bounds_of
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.types import KeyRange
from tests.support.segment_checks import check_segment
from tests.support.strategies import TYPES, values

EPOCH = dt.datetime(1970, 1, 1)
SCALARS = [data_type for data_type in TYPES if not pa.types.is_nested(data_type)]
SCALARS += [pa.timestamp("s"), pa.timestamp("ns")]
COMPARISONS = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def may_match(where, bounds, nulls=None, rows=None):
    """Return whether rows can match whose columns have these (smallest, largest) values.

    None is an unknown bound, and so is a column that is not named.
    """
    return all(
        bool(predicate.can_match(column_bounds(predicate, bounds, nulls or {}, rows))[0])
        for predicate in where.conditions
    )


def column_bounds(predicate, bounds, nulls, rows):
    """Return the bounds of the column of a predicate, as for one group of a segment."""
    low, high = (
        None if pa.types.is_nested(predicate.arrow) else bound_array([bound], predicate.arrow)
        for bound in bounds.get(predicate.column, (None, None))
    )
    count = 0 if predicate.is_key else nulls.get(predicate.column)
    all_null = None if None in (count, rows) else np.array([count == rows])
    return Bounds(1, low, high, all_null, None if count is None else np.array([count == 0]))


def schema_of(*types, key="binary"):
    """Return a schema whose columns are c1, c2, …"""
    fields = (Field(n, f"c{n}", type_name(t)) for n, t in enumerate(types, 1))
    return Schema(1, Field(0, "id", key), tuple(fields))


MANY = Schema(
    1,
    Field(0, "id", "string"),
    (
        Field(1, "amount", "float64"),
        Field(2, "count", "int32"),
        Field(3, "small", "int8"),
        Field(4, "note", "string"),
        Field(5, "data", "binary"),
        Field(6, "open", "bool"),
        Field(7, "day", "date"),
        Field(8, "at", "timestamp[us]"),
        Field(9, "seen", "timestamp[ns, UTC]"),
        Field(10, "price", "decimal(10, 2)"),
        Field(11, "tags", "list<string>"),
        Field(12, "embedding", "vector<float32, 3>"),
        Field(13, "odd name", "int64"),
        Field(14, "IN", "int64"),
        Field(15, "date", "date"),
        Field(16, "single", "float32"),
    ),
)


@pytest.mark.parametrize(
    ("low", "high", "possible"),
    [
        ("a", "b5", True),
        ("b5", "c", True),
        ("a", "c", True),
        ("b", "bzz", False),
        (None, "b5", True),
        ("b5", None, True),
    ],
)
def test_groups_that_can_have_text_without_a_prefix(low, high, possible):
    """One value before all with the prefix is enough, and so is one after them."""
    assert may_match(parse("note NOT LIKE 'b%'", MANY), {"note": (low, high)}) is possible


@pytest.mark.parametrize(
    ("where", "start", "end"),
    [
        ("id = 'm' OR id = 'c'", b"c", b"m\0"),
        ("id = 'c' OR id = 'm'", b"c", b"m\0"),
        ("id > 'x' OR id < 'c'", b"", None),
        ("id LIKE 'm%' OR id >= 'q'", b"m", None),
        ("id = 'm' OR FALSE", b"m", b"m\0"),
    ],
)
def test_the_key_range_of_an_or_has_all_its_ranges(where, start, end):
    """A scan reads nothing outside of it, so it may not be smaller than they are together."""
    assert parse(where, MANY).key_range() == KeyRange(start, end)


@pytest.mark.parametrize(
    ("where", "matching"), [("LIKE", [True, False]), ("NOT LIKE", [False, True])]
)
def test_null_is_neither_like_nor_unlike(where, matching):
    """As every comparison with it: not true, whether it is negated or not."""
    batch = pa.record_batch({"note": ["ab", "ba", None]})
    assert parse(f"note {where} 'a%'", MANY).mask(batch).to_pylist() == [*matching, False]


# --- a plain evaluation, row by row ---------------------------------------------------


def small(data_type):
    """Return values of a type that meet often, and any others."""
    if pa.types.is_integer(data_type):
        few = st.integers(0, 9)
    elif pa.types.is_floating(data_type):
        few = st.integers(-8, 8).map(lambda n: n / 4) | st.just(-0.0)
    elif pa.types.is_string(data_type):
        few = st.text("ab%é", max_size=3)
    elif pa.types.is_binary(data_type):
        few = st.text("ab%é", max_size=3).map(str.encode)
    elif pa.types.is_temporal(data_type):
        few = st.integers(0 if pa.types.is_time(data_type) else -5, 5)
    elif pa.types.is_decimal(data_type):
        few = st.integers(-8, 8).map(lambda n: Decimal(n) / 4)
    else:
        few = st.booleans()
    return few | values(data_type)


def literals(data_type):
    """Return Python literals for a column of a type, many of them between its values."""
    numbers = st.one_of(
        st.integers(-9, 9),
        st.integers(),
        st.integers(-9, 9).map(lambda n: n / 4),
        st.integers(-20, 20).map(lambda n: Decimal(n) / 8),
        st.decimals(allow_nan=False, allow_infinity=False),
        st.floats(allow_nan=False),
    )
    if pa.types.is_boolean(data_type):
        return st.booleans()
    if pa.types.is_string(data_type):
        return small(data_type)
    if pa.types.is_binary(data_type):
        return small(data_type) | st.text("ab", max_size=2)
    if not pa.types.is_temporal(data_type):
        return numbers
    if pa.types.is_time(data_type):
        return st.times() | st.integers(0, 9).map(lambda us: dt.time(0, 0, 0, us))
    near = st.integers(-9, 9).map(lambda us: EPOCH + dt.timedelta(microseconds=us))
    times = st.one_of(near, st.datetimes(), st.dates())
    if pa.types.is_timestamp(data_type) and data_type.tz:
        zones = st.integers(-300, 300).map(lambda m: dt.timezone(dt.timedelta(minutes=m)))
        years = dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1)
        times |= st.datetimes(*years, timezones=zones)
    return times


def rows_of(array):
    """Return the values of an array as Python compares them; times as nanoseconds."""
    if pa.types.is_timestamp(array.type) or pa.types.is_time(array.type):
        unit = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[array.type.unit]
        count = pa.int64() if array.type.bit_width == 64 else pa.int32()
        return [n if n is None else n * unit for n in array.view(count).to_pylist()]
    if pa.types.is_date(array.type):
        return [n if n is None else n * 86_400 * 10**9 for n in array.view(pa.int32()).to_pylist()]
    return array.to_pylist()


def comparable(literal, data_type):
    """Return a literal as what `rows_of` gives can be compared with."""
    if pa.types.is_temporal(data_type):
        if isinstance(literal, dt.time):
            literal = dt.datetime.combine(EPOCH, literal)
        if not isinstance(literal, dt.datetime):
            literal = dt.datetime.combine(literal, dt.time())
        if literal.tzinfo:
            literal = literal.astimezone(dt.UTC).replace(tzinfo=None)
        return (literal - EPOCH) // dt.timedelta(microseconds=1) * 1000
    if pa.types.is_floating(data_type):
        try:
            with np.errstate(over="ignore"):
                near = float(data_type.to_pandas_dtype()(float(literal)))
        except OverflowError:
            return literal
        return near if math.isfinite(near) else literal
    if pa.types.is_decimal(data_type) and isinstance(literal, float):
        return Decimal(repr(literal))
    if pa.types.is_binary(data_type) and isinstance(literal, str):
        return literal.encode()
    return literal


def matches(value, op, literal, data_type):
    """Whether one value meets one condition, as SQL has it."""
    if op in ("is null", "is not null"):
        return (value is None) == (op == "is null")
    if value is None:
        return False
    if op in COMPARISONS:
        return COMPARISONS[op](value, comparable(literal, data_type))
    if op == "like":
        prefix = literal.removesuffix("%").replace("\\%", "%")
        return value.startswith(prefix.encode() if isinstance(value, bytes) else prefix)
    return (value in [comparable(item, data_type) for item in literal]) == (op == "in")


@st.composite
def conditions(draw, column, data_type):
    """A condition on a column, as a tuple."""
    ops = [*COMPARISONS, "in", "not in", "is null", "is not null"]
    if data_type in (pa.string(), pa.binary()):
        ops.append("like")
    op = draw(st.sampled_from(ops))
    if op.startswith("is"):
        return (column, op, None)
    if op == "like":
        return (column, op, draw(st.text("abé%", max_size=2)).replace("%", "\\%") + "%")
    one = literals(data_type)
    return (column, op, draw(st.lists(one, max_size=4) if op.endswith("in") else one))


@st.composite
def cases(draw, rows_max=12):
    """A schema of two columns, rows, and conditions on them and the key."""
    types = draw(st.lists(st.sampled_from(SCALARS), min_size=1, max_size=2))
    schema = schema_of(*types, key=draw(st.sampled_from(["binary", "string"])))
    keys = draw(st.lists(st.text("abé", min_size=1, max_size=3), unique=True, max_size=rows_max))
    columns = {"id": pa.array(sorted(keys), schema.key.arrow)}
    for field in schema.fields:
        drawn = st.lists(st.none() | small(field.arrow), min_size=len(keys), max_size=len(keys))
        columns[field.name] = pa.array(draw(drawn), field.arrow)
    wanted = st.one_of(*(conditions(f.name, f.arrow) for f in (schema.key, *schema.fields)))
    return schema, pa.record_batch(columns), draw(st.lists(wanted, max_size=3))


def expected(batch, tuples):
    """Return which rows match, by a plain evaluation."""
    found = [True] * len(batch)
    for column, op, literal in tuples:
        array = batch.column(column)
        for row, value in enumerate(rows_of(array)):
            found[row] &= matches(value, op, literal, array.type)
    return found


# --- what matches -----------------------------------------------------------------------


@given(cases())
def test_the_mask_equals_a_plain_evaluation(case):
    """Every type and operator, with nulls, NaN, and literals between a column's values."""
    schema, batch, tuples = case
    mask = parse(tuples, schema).mask(batch)
    assert mask.type == pa.bool_()
    assert mask.null_count == 0
    assert mask.to_pylist() == expected(batch, tuples)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("amount NOT IN (0, 1)", [0, 0, 0, 1, 1]),
        ("amount IN (0, 1)", [1, 1, 0, 0, 0]),
        ("amount != 0", [0, 0, 0, 1, 1]),
        ("amount >= 0", [1, 1, 0, 1, 0]),
        ("amount IS NOT NULL", [1, 1, 0, 1, 1]),
    ],
)
def test_null_and_nan_and_minus_zero(where, found):
    """Null meets only IS NULL; NaN is unlike every number; -0.0 equals 0.0."""
    batch = pa.record_batch({"amount": [0.0, -0.0, None, 5.0, math.nan]})
    assert parse(where, MANY).mask(batch).to_pylist() == list(map(bool, found))


@given(cases(rows_max=0))
def test_the_text_of_conditions_reads_back(case):
    """`str` gives a text that parses to the same conditions."""
    schema, _, tuples = case
    where = parse(tuples, schema)
    assert parse(str(where), schema) == where
    assert pickle.loads(pickle.dumps(where)) == where


@given(cases())
def test_matching_keys_are_in_the_key_range(case):
    """The range that conditions on the key imply leaves no match out."""
    schema, batch, tuples = case
    wanted = parse(tuples, schema).key_range()
    for key, found in zip(batch.column("id").to_pylist(), expected(batch, tuples), strict=True):
        key = key.encode() if isinstance(key, str) else key  # noqa: PLW2901
        assert wanted.touches(key, key) or not found


@given(cases(), st.booleans(), st.booleans())
def test_bounds_never_deny_a_match(case, with_nulls, with_low):
    """Bounds exclude no group in which some row matches, whatever is known."""
    schema, batch, tuples = case
    bounds = {name: bounds_of(batch.column(name)) for name in batch.schema.names}
    if not with_low:
        bounds = {name: (None, high) for name, (_, high) in bounds.items()}
    nulls = {name: batch.column(name).null_count for name in batch.schema.names}
    where = parse(tuples, schema)
    possible = (
        may_match(where, bounds, nulls, len(batch)) if with_nulls else may_match(where, bounds)
    )
    assert possible or not any(expected(batch, tuples))


def index_of(batch, schema, group_bytes=1):
    """Return the block index of a segment with these rows, as it is read back."""
    rows = Versions(
        batch.column("id").cast(pa.binary()),
        np.ones(len(batch), np.int64),
        np.zeros(len(batch), np.uint32),
        np.zeros(len(batch), np.uint8),
        {field.number: batch.column(field.name) for field in schema.fields},
    )
    writer = SegmentWriter(schema, 0, Lineage("s", 0), codec=Codec.NONE, group_bytes=group_bytes)
    return check_segment(b"".join(writer.write([rows])), "s").index


@given(cases(), st.sampled_from([1, 100, 300]))
def test_no_group_with_a_match_is_passed_over(case, group_bytes):
    """Every group that has a matching row is read, in a segment that was written and read."""
    schema, batch, tuples = case
    assume(len(batch))
    index = index_of(batch, schema, group_bytes)
    possible = parse(tuples, schema).groups(index, schema)
    assert possible.shape == (len(index),)
    group_of_row = np.repeat(np.arange(len(index)), index.rows)
    for group, found in zip(group_of_row, expected(batch, tuples), strict=True):
        assert possible[group] or not found


@given(
    st.lists(st.binary(min_size=60, max_size=70) | st.just(b"\xff" * 66), min_size=1, max_size=4),
    st.sampled_from([*COMPARISONS, "in", "not in"]),
    st.data(),
)
def test_rounded_bounds_are_bounds(items, op, data):
    """Texts past 64 bytes are cut in the index; a filter on one of them finds it."""
    schema = schema_of(pa.binary())
    literal = data.draw(st.sampled_from(items))
    tuples = [("c1", op, [literal] if op.endswith("in") else literal)]
    ids = [f"{n}" for n in range(len(items))]
    batch = pa.record_batch({"id": pa.array(ids, pa.binary()), "c1": pa.array(items, pa.binary())})
    possible = parse(tuples, schema).groups(index_of(batch, schema, 10**6), schema)
    assert possible[0] or not any(expected(batch, tuples))


# --- what is passed over --------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("amount > 20", [0, 0, 1, 0]),
        ("amount >= 20", [0, 1, 1, 0]),
        ("amount < 10.5", [1, 0, 0, 0]),
        ("amount = 20", [0, 1, 0, 0]),
        ("amount IN (5, 10, 35)", [1, 0, 0, 0]),
        ("amount IN ()", [0, 0, 0, 0]),
        ("amount != 20", [1, 0, 1, 0]),
        ("amount NOT IN (10, 30)", [0, 1, 0, 0]),
        ("amount IS NULL", [1, 1, 1, 1]),
        ("amount IS NOT NULL", [1, 1, 1, 0]),
        ("amount > 10 AND amount < 30", [0, 1, 0, 0]),
        ("id = 'k2'", [0, 0, 1, 0]),
        ("id IN ('k0', 'k3', 'x')", [1, 0, 0, 1]),
        ("id LIKE 'k%' AND id > 'k1'", [0, 0, 1, 1]),
        ("id IS NULL", [0, 0, 0, 0]),
        ("", [1, 1, 1, 1]),
    ],
)
def test_groups_are_passed_over(where, read):
    """One row in each group: 10, 20, 30 and null, with the keys k0 to k3."""
    schema = Schema(1, Field(0, "id", "string"), (Field(1, "amount", "int64"),))
    batch = pa.record_batch({"id": ["k0", "k1", "k2", "k3"], "amount": [10, 20, 30, None]})
    index = index_of(batch, schema)
    assert parse(where, schema).groups(index, schema).astype(int).tolist() == read


def test_groups_of_an_older_schema():
    """A column that was widened since is compared; one that was added since is null there."""
    old = Schema(1, Field(0, "id", "string"), (Field(1, "amount", "int32"),))
    new = Schema(
        2, Field(0, "id", "string"), (Field(1, "amount", "float64"), Field(2, "b", "int8"))
    )
    batch = pa.record_batch({"id": ["a", "b"], "amount": pa.array([1, 5], pa.int32())})
    index = index_of(batch, old)
    assert parse("amount > 2.5", new).groups(index, old).tolist() == [False, True]
    assert parse("b = 1", new).groups(index, old).tolist() == [False, False]
    assert parse("b IS NULL", new).groups(index, old).tolist() == [True, True]
    assert parse("b = 1", new).groups(index, new).tolist() == [True, True]
    assert parse("amount > 2.5", new).mask(batch).to_pylist() == [False, True]


@pytest.mark.parametrize(
    ("where", "bounds", "nulls", "possible"),
    [
        ("amount > 5", {}, {}, True),
        ("amount > 5", {"amount": (1.0, 5.0)}, {}, False),
        ("amount > 5", {"amount": (1.0, None)}, {}, True),
        ("amount > 5", {"amount": (1.0, math.nan)}, {}, True),
        ("amount > 5", {"amount": (None, None)}, {"amount": 3}, False),
        ("amount IS NULL", {"amount": (1.0, 5.0)}, {"amount": 0}, False),
        ("amount IS NULL", {"amount": (1.0, 5.0)}, {}, True),
        ("amount != 0", {"amount": (-0.0, 0.0)}, {}, False),
        ("note LIKE 'b%'", {"note": ("a", "az")}, {}, False),
        ("note LIKE 'b%'", {"note": ("a", "b")}, {}, True),
        ("note LIKE 'b%'", {"note": ("c", "d")}, {}, False),
        ("id = 'b'", {"id": (b"c", b"d")}, {}, False),
        ("tags IS NULL", {"tags": (None, None)}, {"tags": 0}, False),
        ("count = 5", {"count": ("not", "numbers")}, {}, True),
    ],
)
def test_bounds_decide(where, bounds, nulls, possible):
    """Three rows, of which bounds and nulls are known or not."""
    assert may_match(parse(where, MANY), bounds, nulls, 3) is possible


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("amount > 5", KeyRange()),
        ("id = 'b'", KeyRange(b"b", b"b\0")),
        ("id >= 'b' AND id < 'd'", KeyRange(b"b", b"d")),
        ("id > 'b' AND id <= 'd'", KeyRange(b"b\0", b"d\0")),
        ("id IN ('x', 'c')", KeyRange(b"c", b"x\0")),
        ("id LIKE 'ab%'", KeyRange(b"ab", b"ac")),
        ("id LIKE 'ab'", KeyRange(b"ab", b"ab\0")),
        ("id LIKE 'a%' AND id > 'ab' AND amount < 1", KeyRange(b"ab\0", b"b")),
        ("id != 'b'", KeyRange()),
        ("id NOT IN ('b', 'c')", KeyRange()),
        ("id IS NOT NULL", KeyRange()),
        ("id > 'x' AND id < 'b'", KeyRange(b"", b"")),
        ("id IN ()", KeyRange(b"", b"")),
        ("id IS NULL", KeyRange(b"", b"")),
    ],
)
def test_the_key_range(where, wanted):
    """Conditions on the key narrow the scan; contradictions leave nothing of it."""
    assert parse(where, MANY).key_range() == wanted
