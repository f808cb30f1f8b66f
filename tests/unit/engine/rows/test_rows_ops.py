"""Rows as operations, rows read again, and what both cost."""

import datetime
import subprocess
import sys
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from reef.engine.rows.convert import to_python, to_record_batch, to_row
from reef.engine.rows.input import to_ops
from reef.errors import CorruptionError, InvalidInputError
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.wal_object import OpKind
from tests.support.rows import ARROW_FORMS, committed, edges, schema_of
from tests.support.strategies import TYPES

PUT, PATCH = OpKind.PUT, OpKind.PATCH
UTC = datetime.UTC


# --- operations ---------------------------------------------------------------------


def test_an_upsert_in_columns():
    """Keys are bytes, kinds puts, and columns that are not named are absent."""
    schema = schema_of(a=pa.int64(), b=pa.string())
    ops = to_ops([{"id": "x", "a": 1}, {"id": b"x"}], schema, kind=PUT)
    assert ops.keys.equals(pa.array([b"x", b"x"]))
    assert ops.kinds.equals(pa.array([PUT, PUT], pa.uint8()))
    assert ops.fields.keys() == {1}
    assert ops.fields[1].equals(pa.array([1, None], pa.int64()))
    assert ops.touched is None
    assert ops.expires_at_ms is None


def test_keys_of_the_plain_schema():
    """Bytes and text mix where the key column is binary."""
    ops = to_ops([{"id": "ж", "value": b"1"}, {"id": b"\xff"}], DEFAULT_SCHEMA, kind=PUT)
    assert ops.keys.to_pylist() == ["ж".encode(), b"\xff"]
    table = pa.table({"id": pa.array(["a"], pa.large_string()), "value": [b"1"]})
    assert to_ops(table, DEFAULT_SCHEMA, kind=PUT).keys.to_pylist() == [b"a"]


def test_a_dict_touches_its_keys():
    """None sets to null; a column that a row does not name keeps its value."""
    schema = schema_of(a=pa.int64(), b=pa.string(), c=pa.bool_())
    rows = [{"id": "x", "a": None}, {"id": "y", "b": "t", "a": 2}, {"b": None, "id": "z"}]
    ops = to_ops(rows, schema, kind=PATCH)
    assert ops.kinds.to_pylist() == [PATCH] * 3
    assert {n: a.to_pylist() for n, a in ops.fields.items()} == {
        1: [None, 2, None],
        2: [None, "t", None],
    }
    assert {n: a.to_pylist() for n, a in ops.touched.items()} == {
        1: [True, True, False],
        2: [False, True, True],
    }


def test_columns_touch_all_rows():
    """A table names its columns for all of them."""
    schema = schema_of(a=pa.int64(), b=pa.string())
    ops = to_ops({"id": ["x", "y"], "b": ["t", None]}, schema, kind=PATCH)
    assert {n: a.to_pylist() for n, a in ops.touched.items()} == {2: [True, True]}


EXPIRY = datetime.datetime(2030, 1, 1, tzinfo=UTC)
MS = int(EXPIRY.timestamp() * 1000)
EXPIRIES = {
    "int": [MS, None],
    "numpy int": [np.int64(MS), None],
    "datetime": [EXPIRY, None],
    "zone": [EXPIRY.astimezone(ZoneInfo("Asia/Tokyo")), None],
    "naive is UTC": [EXPIRY.replace(tzinfo=None), None],
    "pandas": [pd.Timestamp(EXPIRY), pd.NaT],
    "numpy": [np.datetime64(MS, "ms"), np.datetime64("NaT")],
    "numpy array": np.array([MS, "NaT"], "datetime64[ms]"),
    "arrow int": pa.array([MS, None], pa.int64()),
    "s": pa.array([MS // 1000, None], pa.timestamp("s")),
    "ms": pa.array([MS, None], pa.timestamp("ms", "UTC")),
    "us": pa.array([MS * 1000 + 999, None], pa.timestamp("us", "Asia/Tokyo")),
    "ns": pa.array([MS * 10**6 + 1, None], pa.timestamp("ns")),
}


@pytest.mark.parametrize("given_as", EXPIRIES)
def test_expiry_by_row(given_as):
    """A timestamp in any unit or zone, or milliseconds; null means never."""
    data = {"id": ["a", "b"], "_expires_at": EXPIRIES[given_as]}
    ops = to_ops(data, schema_of(), kind=PUT)
    assert ops.expires_at_ms.equals(pa.array([MS, None], pa.int64()))


def test_expiry_for_all():
    """`ttl_s` counts from now, and is never cut to nothing."""
    ops = to_ops([{"id": "a"}, {"id": "b"}], schema_of(), kind=PUT, ttl_s=1.5, now_ms=1000)
    assert ops.expires_at_ms.equals(pa.array([2500, 2500], pa.int64()))
    assert to_ops([{"id": "a"}], schema_of(), kind=PUT, ttl_s=1e-9).expires_at_ms[0].as_py() == 1


@pytest.mark.parametrize("nothing", [[None], pa.nulls(1), pa.nulls(1, pa.timestamp("s"))])
def test_rows_that_never_expire_carry_nothing(nothing):
    """The column is absent where no row expires."""
    data = {"id": ["a"], "_expires_at": nothing}
    assert to_ops(data, schema_of(), kind=PUT).expires_at_ms is None


# --- out ----------------------------------------------------------------------------


def test_columns_come_in_the_order_asked():
    """The key too, if it is asked for; none at all still counts the rows."""
    schema = schema_of(a=pa.int64(), b=pa.string())
    rows = committed(to_ops([{"id": "x", "a": 1, "b": "t"}], schema, kind=PUT), schema)
    assert to_record_batch(rows, schema, ["b", "id"]).to_pydict() == {"b": ["t"], "id": ["x"]}
    assert to_record_batch(rows, schema, ["a"]).schema.names == ["a"]
    assert to_record_batch(rows, schema, []).num_rows == 1
    assert to_record_batch(rows, schema).schema == schema.arrow()


def test_polars_reads_slices():
    """Vectors with nulls too, which it refuses as slices of a longer array."""
    schema = schema_of(v=pa.list_(pa.float32(), 2))
    rows = [{"id": "a", "v": [1, 2]}, {"id": "b", "v": None}, {"id": "c", "v": [3, 4]}]
    versions = committed(to_ops(rows, schema, kind=PUT), schema)
    frame = pl.from_arrow(to_record_batch(versions.slice(1, 3), schema))
    assert frame["v"].to_list() == [None, [3.0, 4.0]]


def test_older_data_reads_with_a_newer_schema():
    """A column that was not there is null, a number that was narrow is cast."""
    old = schema_of(a=pa.int8())
    new = old.grown(pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.string())]))
    rows = committed(to_ops([{"id": "x", "a": 1}], old, kind=PUT), old)
    back = to_record_batch(rows, new)
    assert back.schema == new.arrow()
    assert back.to_pylist() == [{"id": "x", "a": 1, "b": None}]


def test_a_row_is_a_dict():
    """In the schema's order, with the key in its type and None for missing values."""
    schema = schema_of(a=pa.int64(), b=pa.string())
    row = to_row("ж".encode(), {2: "t"}, schema)
    assert list(row.items()) == [("id", "ж"), ("a", None), ("b", "t")]
    assert to_row(b"\xff", {1: b"v"}, DEFAULT_SCHEMA) == {"id": b"\xff", "value": b"v"}


def test_a_stored_key_that_is_no_text_is_damage():
    """Keys were checked when they were written."""
    schema = schema_of()
    with pytest.raises(CorruptionError, match="not UTF-8"):
        to_row(b"\xff", {}, schema)
    rows = committed(to_ops([{"id": b"\xff"}], DEFAULT_SCHEMA, kind=PUT), DEFAULT_SCHEMA)
    with pytest.raises(CorruptionError, match="not UTF-8"):
        to_record_batch(rows, schema)


# --- Python values ------------------------------------------------------------------


@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_python_values_are_those_of_arrow(data_type):
    """Nothing is changed on the way, where Python has the value."""
    for scalar in edges(data_type):
        if not pa.types.is_timestamp(data_type):
            assert repr(to_python(scalar)) == repr(scalar.as_py(maps_as_pydicts="strict"))
    assert to_python(pa.scalar(None, data_type)) is None


BEYOND = [
    pa.scalar(2**62, pa.timestamp("us")),
    pa.scalar(-(2**62), pa.timestamp("s", "UTC")),
    pa.array([253402300799999999]).view(pa.timestamp("us", "Asia/Tokyo"))[0],
    pa.array([2**31 - 1], pa.int32()).view(pa.date32())[0],
    pa.array([[None], [2**62]], pa.list_(pa.timestamp("us")))[1],
    pa.scalar(0, pa.timestamp("us", "Nowhere/Land")),
]


@pytest.mark.parametrize("scalar", BEYOND, ids=lambda scalar: str(scalar.type))
def test_timestamps_beyond_python_are_rejected(scalar):
    """The error names the type and where such values can be read."""
    with pytest.raises(InvalidInputError, match="scan_arrow") as caught:
        to_python(scalar)
    assert str(scalar.type) in str(caught.value)


NANOSECONDS = """
import sys
class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, NoPandas())
import pyarrow as pa
from reef.engine.rows.convert import to_python
from reef.errors import InvalidInputError
print(to_python(pa.scalar(1000, pa.timestamp("ns"))))
try:
    to_python(pa.scalar(1, pa.timestamp("ns")))
except InvalidInputError as error:
    print(error.hint)
"""


def test_nanoseconds_need_pandas():
    """Without it, a value that datetime cannot hold is an error, not a wrong timestamp."""
    done = subprocess.run(
        [sys.executable, "-c", NANOSECONDS], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["1970-01-01 00:00:00.000001", "Read it with scan_arrow"]
    assert to_python(pa.scalar(1, pa.timestamp("ns"))).nanosecond == 1


# --- cost ---------------------------------------------------------------------------


def calls(work):
    """Return how many functions Python called, C functions included."""
    count = 0

    def note(_frame, event, _what):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def wide_table(rows):
    """Return a table of five columns, one of which needs a cast."""
    numbers = np.arange(rows)
    return pa.table(
        {
            "id": pa.array(numbers).cast(pa.string()),
            "a": pa.array(numbers, pa.int32()),
            "b": pa.array(numbers * 0.5),
            "s": pa.array(numbers).cast(pa.large_string()),
            "t": pa.array(numbers, pa.timestamp("us", "UTC")),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(2 * rows, np.float32)), 2),
        }
    )


@pytest.mark.parametrize("kind", [PUT, PATCH])
@pytest.mark.parametrize("form", ARROW_FORMS)
def test_no_python_work_for_each_row(kind, form):
    """100,000 rows take as many calls as 1,000, in and out."""
    schema = Schema.of(wide_table(1).schema).grown(
        wide_table(1).schema.set(1, pa.field("a", pa.int64()))
    )
    counts = []
    for rows in (10, 1_000, 100_000):  # the first one imports what pyarrow imports late
        data = ARROW_FORMS[form](wide_table(rows))
        counts.append(calls(lambda data=data: to_ops(data, schema, kind=kind)))
        versions = committed(to_ops(wide_table(rows), schema, kind=kind), schema)
        counts[-1] += calls(lambda versions=versions: to_record_batch(versions, schema))
    # Some forms come in a few more chunks when they are large.
    assert abs(counts[2] - counts[1]) < 20
    assert counts[2] < 1_500
