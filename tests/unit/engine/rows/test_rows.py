"""Rows in and out: every form and every type comes back as it was given."""

import datetime
import subprocess
import sys
from decimal import Decimal
from zoneinfo import ZoneInfo

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rows import FORMS, edges, schema_of, table_of, there_and_back
from tests.support.strategies import TYPES, arrays, same

UTC = datetime.UTC
AT = "2026-01-02T03:04:05"


# --- forms --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_every_form_of_every_type_comes_back(form, data_type):
    """Nulls, empty values, NaN, infinities and both ends of the range, through a batch's bytes."""
    table = table_of(edges(data_type))
    back = there_and_back(FORMS[form](table), schema_of(c=data_type))
    back.validate(full=True)
    assert back.schema == table.schema
    assert same(back["id"], table["id"])
    assert same(back["c"], table["c"].combine_chunks())


@pytest.mark.parametrize("data_type", TYPES, ids=str)
@given(data=st.data())
@settings(max_examples=30)
def test_any_values_come_back(data_type, data):
    """Whatever the values, from Arrow and from Python, slices included."""
    column = data.draw(arrays(data_type, data.draw(st.integers(1, 8))))
    form = data.draw(st.sampled_from(sorted(FORMS)))
    # polars does not read slices of vectors with nulls: joining makes a copy that is none.
    whole = pa.concat_arrays([column, column[:0]])
    table = table_of(whole if "polars" in form else column)
    back = there_and_back(FORMS[form](table), schema_of(c=data_type))
    assert same(back["c"], column)


NUMPY = [t for t in TYPES if pa.types.is_integer(t) or pa.types.is_floating(t)]


@pytest.mark.parametrize("data_type", [*NUMPY, pa.bool_()], ids=str)
def test_numpy_columns_come_back(data_type):
    """NaN is a number there, not a null; other byte orders and strides are read as well."""
    array = edges(data_type).drop_null()
    values = array.to_numpy(zero_copy_only=False)
    for given_values in (values, values.astype(values.dtype.newbyteorder(">")), values[::-1][::-1]):
        columns = {"id": np.array([f"k{n}" for n in range(len(array))]), "c": given_values}
        assert same(there_and_back(columns, schema_of(c=data_type))["c"], array)


def test_numpy_vectors_and_timestamps():
    """Two dimensions are a vector for each row; a timestamp is UTC where the column has a zone."""
    schema = schema_of(
        v=pa.list_(pa.float32(), 2), t=pa.timestamp("us", "UTC"), d=pa.date32(), s=pa.string()
    )
    columns = {
        "id": np.array([b"a", b"b"]),
        "v": np.array([[1.0, 2.0], [3.0, 4.0]]),
        "t": np.array([AT, "NaT"], "datetime64[ms]"),
        "d": np.array(["2026-01-02", "NaT"], "datetime64[D]"),
        "s": np.array(["x", None], object),
    }
    assert there_and_back(columns, schema).to_pylist() == [
        {
            "id": "a",
            "v": [1.0, 2.0],
            "t": datetime.datetime.fromisoformat(AT).replace(tzinfo=UTC),
            "d": datetime.date(2026, 1, 2),
            "s": "x",
        },
        {"id": "b", "v": [3.0, 4.0], "t": None, "d": None, "s": None},
    ]


def test_rows_may_hold_arrays():
    """A vector in a dict is a list, a tuple or a numpy array, of any float type."""
    schema = schema_of(v=pa.list_(pa.float32(), 2), l=pa.list_(pa.int64()))
    vectors = [np.array([1.0, 2.0]), None, [1, 2.0], (1.0, 2), np.array([1, 2], np.float32)]
    lists = [np.array([1, 2]), [], None, (1, None), np.array([], np.int8)]
    rows = [
        {"id": f"{n}", "v": v, "l": items}
        for n, (v, items) in enumerate(zip(vectors, lists, strict=True))
    ]
    back = there_and_back(rows, schema)
    assert back["v"].to_pylist() == [[1.0, 2.0], None, [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]
    assert back["l"].to_pylist() == [[1, 2], [], None, [1, None], []]
    same_kind = there_and_back(rows[:1], schema)
    assert same_kind["v"].to_pylist() == [[1.0, 2.0]]


# --- pandas, polars, DuckDB ---------------------------------------------------------

PANDAS = [t for t in TYPES if not pa.types.is_timestamp(t)]


@pytest.mark.parametrize("data_type", PANDAS, ids=str)
def test_pandas_frames_come_back(data_type):
    """A NaN is a missing value in pandas, and becomes null; what Arrow backs keeps it."""
    table = table_of(edges(data_type))
    schema = schema_of(c=data_type)
    backed = table.to_pandas(types_mapper=pd.ArrowDtype)
    assert same(there_and_back(backed, schema)["c"], table["c"].combine_chunks())
    if pa.types.is_integer(data_type) or pa.types.is_nested(data_type):
        return  # with nulls these are floats in pandas, or arrays of them
    frame = table.to_pandas()
    expected = pa.array(table["c"].to_pylist(), data_type, from_pandas=True)
    assert same(there_and_back(frame, schema)["c"], expected)


def test_pandas_integers_with_holes():
    """They arrive as floats and are integers again, since all of them are whole."""
    frame = pd.DataFrame({"id": ["a", "b"], "c": [1, None]})
    assert there_and_back(frame, schema_of(c=pa.int64()))["c"].to_pylist() == [1, None]


def test_the_index_of_a_frame_counts_only_as_key():
    """By its name; any other index is left out."""
    named = pd.DataFrame({"c": [1]}, index=pd.Index(["a"], name="id"))
    assert there_and_back(named, schema_of(c=pa.int64())).to_pylist() == [{"id": "a", "c": 1}]
    other = pd.DataFrame({"id": ["b"], "c": [1]}, index=pd.Index([9], name="other"))
    assert there_and_back(other, schema_of(c=pa.int64())).to_pylist() == [{"id": "b", "c": 1}]


def test_pandas_objects_are_read_by_the_columns_type():
    """Where Arrow finds no common type, each value is converted by itself."""
    frame = pd.DataFrame({"id": ["a", b"b", "c"], "c": [Decimal("1.5"), 2, None]})
    back = there_and_back(frame, schema_of(c=pa.decimal128(20, 4)))
    assert back["c"].to_pylist() == [Decimal("1.5"), Decimal(2), None]
    assert back["id"].to_pylist() == ["a", "b", "c"]


def test_pandas_timestamps():
    """Zones are kept, nanoseconds too, in frames, in columns and one by one."""
    schema = schema_of(t=pa.timestamp("ns", "Europe/Berlin"))
    times = [pd.Timestamp(5, tz="UTC"), pd.NaT]
    frame = pd.DataFrame({"id": ["a", "b"], "t": pd.Series(times, dtype="datetime64[ns, UTC]")})
    expected = pa.array([5, None], pa.timestamp("ns", "Europe/Berlin"))
    for data in (
        frame,
        {"id": frame["id"], "t": frame["t"]},
        [{"id": "a", "t": times[0]}, {"id": "b", "t": times[1]}],
    ):
        assert there_and_back(data, schema)["t"].equals(expected)


def test_polars_categories():
    """They are text."""
    frame = pl.DataFrame({"id": ["a"], "c": pl.Series(["x"], dtype=pl.Categorical)})
    assert there_and_back(frame, schema_of(c=pa.string()))["c"].to_pylist() == ["x"]


DUCKDB = [t for t in TYPES if not pa.types.is_timestamp(t) or t.unit == "us"]


@pytest.mark.parametrize("data_type", DUCKDB, ids=str)
def test_duckdb_relations_come_back(data_type):
    """DuckDB reads what Reef gives out and gives it back."""
    column = edges(data_type)
    if pa.types.is_date(data_type):
        column = column.filter(pa.compute.not_equal(column, datetime.date.max))
    table = table_of(column)
    back = there_and_back(duckdb.from_arrow(table), schema_of(c=data_type))
    assert same(back["c"], column)


def test_duckdb_sums_are_integers():
    """They come as decimals of 38 digits, and fit if they are whole and small enough."""
    relation = duckdb.sql("SELECT 'a' AS id, sum(x) AS c FROM range(10) AS r(x)")
    assert there_and_back(relation, schema_of(c=pa.int64()))["c"].to_pylist() == [45]


def test_frames_are_no_dependency():
    """The engine does not import them."""
    frames = "{'pandas', 'polars', 'duckdb'}"
    code = f"import sys, reef.engine.rows.input; print({frames} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_other_layouts_are_read():
    """Runs, dictionaries, views and extended types are the values that they represent."""
    schema = schema_of(c=pa.int64(), s=pa.string(), b=pa.binary())
    table = pa.table(
        {
            "id": pa.array(["a", "b"], pa.string_view()),
            "c": pa.compute.run_end_encode(pa.array([5, 5])),
            "s": pa.array(["x", None]).dictionary_encode(),
            "b": pa.ExtensionArray.from_storage(
                pa.uuid(), pa.array([bytes(16)] * 2, pa.binary(16))
            ),
        }
    )
    assert there_and_back(table, schema).to_pylist() == [
        {"id": "a", "c": 5, "s": "x", "b": bytes(16)},
        {"id": "b", "c": 5, "s": None, "b": bytes(16)},
    ]


def test_numbers_fit_where_they_are_exact():
    """Whole floats and decimals in integers, integers in floats and decimals."""
    schema = schema_of(i=pa.int8(), f=pa.float32(), d=pa.decimal128(5, 2))
    rows = [
        {"id": "a", "i": 3.0, "f": 2**24, "d": 5},
        {"id": "b", "i": Decimal(4), "f": np.int8(1), "d": np.int64(-7)},
    ]
    expected = {"i": [3, 4], "f": [2.0**24, 1.0], "d": [Decimal("5.00"), Decimal("-7.00")]}
    table = pa.table({"id": ["a", "b"], "i": [3.0, 4.0], "f": [2**24, 1], "d": pa.array([5, -7])})
    for data in (rows, table):
        back = there_and_back(data, schema)
        assert {name: back[name].to_pylist() for name in expected} == expected


def test_zones_of_one_instant_are_one():
    """A column has one zone; a value in another zone is converted to it."""
    schema = schema_of(t=pa.timestamp("ms", "Europe/Berlin"))
    tokyo = datetime.datetime(2026, 1, 1, 9, tzinfo=ZoneInfo("Asia/Tokyo"))
    table = pa.table({"id": ["a"], "t": pa.array([tokyo])})
    for data in (table, [{"id": "a", "t": tokyo}]):
        assert there_and_back(data, schema)["t"][0].as_py() == tokyo
