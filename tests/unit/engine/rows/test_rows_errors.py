"""Bad rows: refused whole, with the row and the column named."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from reef.engine.rows import input as rows_fit
from reef.engine.rows.convert import to_record_batch
from reef.engine.rows.input import to_ops
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind

PUT, PATCH = OpKind.PUT, OpKind.PATCH
NAIVE = datetime.datetime(2026, 1, 1)
AWARE = NAIVE.replace(tzinfo=datetime.UTC)

SCHEMA = Schema.of(
    pa.schema(
        [
            ("id", pa.string()),
            ("amount", pa.int32()),
            ("small", pa.uint8()),
            ("price", pa.float64()),
            ("weight", pa.float32()),
            ("name", pa.string()),
            ("blob", pa.binary()),
            ("open", pa.bool_()),
            ("day", pa.date32()),
            ("at", pa.timestamp("ms")),
            ("zoned", pa.timestamp("us", "UTC")),
            ("fine", pa.timestamp("ns")),
            ("cost", pa.decimal128(5, 2)),
            ("tags", pa.list_(pa.string())),
            ("grid", pa.list_(pa.list_(pa.int8()))),
            ("vector", pa.list_(pa.float32(), 3)),
        ]
    )
)


def refusal(data, schema=SCHEMA, kind=PUT, **options):
    """Return the error that the rows raise."""
    with pytest.raises(InvalidInputError) as caught:
        to_ops(data, schema, kind=kind, **options)
    return caught.value


# --- values -------------------------------------------------------------------------

BAD_VALUES = [
    ("amount", "x", "int32, got 'x' (str)"),
    ("amount", 2**31, "int32, got 2147483648 (int)"),
    ("amount", 2**70, "int32, got 1180591620717411303424 (int)"),
    ("amount", 1.5, "int32, got 1.5 (float)"),
    ("amount", float("nan"), "int32, got nan (float)"),
    ("amount", float("inf"), "int32, got inf (float)"),
    ("amount", Decimal("1.5"), "int32, got Decimal('1.5') (Decimal)"),
    ("amount", True, "int32, got True (bool)"),
    ("amount", b"1", "int32, got b'1' (bytes)"),
    ("amount", [1], "int32, got [1] (list of 1)"),
    ("small", -1, "uint8, got -1 (int)"),
    ("price", 2**53 + 1, "float64, got 9007199254740993 (int)"),
    ("price", "1.5", "float64, got '1.5' (str)"),
    ("price", Decimal("1.5"), "float64, got Decimal('1.5') (Decimal)"),
    ("weight", 1e300, "float32, got 1e+300 (float)"),
    ("weight", 2**24 + 1, "float32, got 16777217 (int)"),
    ("name", 5, "string, got 5 (int)"),
    ("name", b"text", "string, got b'text' (bytes)"),
    ("name", "\ud800", r"string, got '\ud800' (str)"),
    ("blob", "text", "binary, got 'text' (str)"),
    ("open", 1, "bool, got 1 (int)"),
    ("day", "2026-01-01", "date, got '2026-01-01' (str)"),
    ("day", NAIVE, "date, got datetime.datetime(2026, 1, 1, 0, 0) (datetime without a zone)"),
    ("day", np.datetime64("2026-01-01T05"), "date, got"),
    ("at", "2026-01-01", "timestamp[ms], got '2026-01-01' (str)"),
    ("at", 5, "timestamp[ms], got 5 (int)"),
    ("at", NAIVE.date(), "timestamp[ms], got datetime.date(2026, 1, 1) (date)"),
    ("at", AWARE, "timestamp[ms], got datetime.datetime"),
    ("at", NAIVE.replace(microsecond=5), "timestamp[ms], got datetime.datetime"),
    ("at", np.datetime64(5, "us"), "timestamp[ms], got"),
    ("zoned", NAIVE, "(datetime without a zone)"),
    ("fine", datetime.datetime.max, "timestamp[ns], got datetime.datetime(9999"),
    ("fine", np.datetime64(2**62, "s"), "timestamp[ns], got"),
    ("cost", Decimal("1.234"), "decimal(5, 2), got Decimal('1.234') (Decimal)"),
    ("cost", Decimal(1000), "decimal(5, 2), got Decimal('1000') (Decimal)"),
    ("cost", Decimal("NaN"), "decimal(5, 2), got Decimal('NaN') (Decimal)"),
    ("cost", 1.5, "decimal(5, 2), got 1.5 (float)"),
    ("tags", "text", "list<string>, got 'text' (str)"),
    ("tags", ["a", 5], "list<string>, got ['a', 5] (list of 2)"),
    ("grid", [[1, 200]], "list<list<int8>>, got [[1, 200]] (list of 1)"),
    ("grid", [[1.5]], "list<list<int8>>, got [[1.5]] (list of 1)"),
    ("grid", [1], "list<list<int8>>, got [1] (list of 1)"),
    ("vector", [1.0, 2.0], "vector<float32, 3>, got [1.0, 2.0] (list of 2)"),
    ("vector", np.ones(4), "vector<float32, 3>, got array([1., 1., 1., 1.]) (ndarray of 4)"),
    ("vector", [1.0, None, 2.0], "vector<float32, 3>, got [1.0, None, 2.0] (list of 3)"),
    ("vector", [1.0, "x", 2.0], "vector<float32, 3>, got [1.0, 'x', 2.0] (list of 3)"),
    ("vector", [1e300, 0.0, 0.0], "vector<float32, 3>, got [1e+300, 0.0, 0.0] (list of 3)"),
    ("vector", 1.0, "vector<float32, 3>, got 1.0 (float)"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES, ids=str)
def test_a_bad_value_is_named(name, value, message):
    """Row, column, the type expected, the value found: in dicts, and in columns."""
    rows = [{"id": f"{n}"} for n in range(20)]
    rows[17][name] = value
    columns = {"id": [row["id"] for row in rows], name: [row.get(name) for row in rows]}
    for data in (rows, columns):
        error = refusal(data)
        assert error.message.startswith(f"row 17, column {name}: expected ")
        assert message in error.message
        assert error.context == {"row": 17, "column": name}


BAD_ARRAYS = [
    ("amount", pa.array(["x"]), "int32, got 'x' (string)"),
    ("amount", pa.array([2**31]), "int32, got 2147483648 (int64)"),
    ("amount", pa.array([1.5]), "int32, got 1.5 (double)"),
    ("amount", pa.array([True]), "int32, got True (bool)"),
    ("amount", pa.array([Decimal("1.5")]), "int32, got Decimal('1.5') (decimal128(2, 1))"),
    ("price", pa.array([2**53 + 1]), "float64, got 9007199254740993 (int64)"),
    ("price", pa.array([Decimal("1.5")]), "float64, got Decimal('1.5')"),
    ("weight", pa.array([1e300]), "float32, got 1e+300 (double)"),
    ("name", pa.array([b"x"]), "string, got b'x' (binary)"),
    ("name", pa.array([5]).dictionary_encode(), "string, got 5 (dictionary"),
    ("name", pa.array([b"\xff"]).view(pa.string()), "string, got"),
    ("blob", pa.array(["x"]), "binary, got 'x' (string)"),
    ("open", pa.array([1]), "bool, got 1 (int64)"),
    ("day", pa.array([NAIVE]), "date, got datetime.datetime"),
    ("day", pa.array([5], pa.date64()), "date, got"),
    ("at", pa.array([5]), "timestamp[ms], got 5 (int64)"),
    ("at", pa.array(["2026-01-01"]), "timestamp[ms], got '2026-01-01' (string)"),
    ("at", pa.array([1], pa.timestamp("us")), "timestamp[ms], got"),
    ("at", pa.array([1], pa.timestamp("ms", "UTC")), "(timestamp[ms, tz=UTC])"),
    ("zoned", pa.array([1], pa.timestamp("us")), "(timestamp[us] without a zone)"),
    ("fine", pa.array([2**62], pa.timestamp("s")), "timestamp[ns], got"),
    ("cost", pa.array([1000]), "decimal(5, 2), got 1000 (int64)"),
    ("cost", pa.array([Decimal("1.234")]), "decimal(5, 2), got Decimal('1.234')"),
    ("tags", pa.array([[5]]), "list<string>, got [5] (list<item: int64> of 1)"),
    ("tags", pa.array(["text"]), "list<string>, got 'text' (string)"),
    ("tags", pa.array([[b"\xff"]]).view(pa.list_(pa.string())), "list<string>, got"),
    ("grid", pa.array([[[1, 200]]]), "list<list<int8>>, got [[1, 200]]"),
    ("grid", pa.array([[[1]]], pa.list_(pa.list_view(pa.int8()))), "list<list<int8>>, got [[1]]"),
    ("vector", pa.array([[1.0, 2.0]]), "vector<float32, 3>, got [1.0, 2.0]"),
    ("vector", pa.array([[1.0] * 4], pa.list_(pa.float32(), 4)), "vector<float32, 3>, got [1.0"),
    ("vector", pa.array([[1.0, None, 2.0]], pa.list_(pa.float32(), 3)), "got [1.0, None, 2.0]"),
    ("vector", pa.array([[1e300, 0.0, 0.0]]), "vector<float32, 3>, got [1e+300, 0.0, 0.0]"),
    ("amount", pa.array([{"a": 1}]), "int32, got {'a': 1} (struct<a: int64>)"),
]


@pytest.mark.parametrize(("name", "array", "message"), BAD_ARRAYS, ids=str)
def test_a_bad_value_in_arrow_is_named(name, array, message):
    """The first row that does not fit, whatever comes before and after it."""
    array = pa.concat_arrays([pa.nulls(17, array.type), array, pa.nulls(2, array.type), array])
    table = pa.table({"id": [f"{n}" for n in range(21)], name: array})
    error = refusal(table)
    assert error.message.startswith(f"row 17, column {name}: expected ")
    assert message in error.message


def test_rows_count_over_chunks():
    """A row's number is its place in all that was given."""
    good = pa.table({"id": ["a", "b"], "amount": [1, 2]})
    bad = pa.table({"id": ["c"], "amount": [2**40]})
    assert "row 2, column amount" in str(refusal(pa.concat_tables([good, bad])))


def test_numpy_values_are_named_too():
    """Numbers out of range, widths that are wrong, types that no column has."""
    ids = ["a", "b"]
    assert "row 1, column amount: expected int32, got 1.5" in refusal(
        {"id": ids, "amount": np.array([1, 1.5])}
    ).message.replace("np.float64(1.5)", "1.5")
    assert "row 0, column vector: expected vector<float32, 3>" in str(
        refusal({"id": ids, "vector": np.ones((2, 4))})
    )
    assert "row 0, column amount: " in str(refusal({"id": ids, "amount": np.ones(2, complex)}))
    assert "column vector: expected an array of 1 or 2 dimensions, got 3" in str(
        refusal({"id": ids, "vector": np.ones((2, 3, 1))})
    )


def test_pandas_values_are_named_too():
    """A column of mixed objects is read by the column's type; a missing value is null there."""
    frame = pd.DataFrame({"id": ["a", "b", "c"], "amount": [1, float("nan"), "x"]})
    assert "row 2, column amount: expected int32, got 'x' (str)" in str(refusal(frame))


def test_long_values_are_cut():
    """A message stays a line."""
    assert len(str(refusal([{"id": "a", "amount": "x" * 10_000}]))) < 200


def test_a_column_that_fits_only_row_by_row_is_rejected(monkeypatch):
    """Arrow's text and lists end at 2 GiB: then no single row is to blame."""

    def too_much(values, _):
        if len(values) > 1:
            raise pa.ArrowInvalid("offset overflow")
        return pa.array(values)

    monkeypatch.setattr(rows_fit, "fit_values", too_much)
    error = refusal({"id": ["a", "b"], "name": ["x", "y"]})
    assert "column name: each row fits, but not all 2 together" in str(error)


# --- keys ---------------------------------------------------------------------------

BAD_KEYS = [
    (None, "a key cannot be null"),
    ("", "a key has 1 to 65535 bytes, got 0"),
    ("x" * 65_536, "a key has 1 to 65535 bytes, got 65536"),
    ("ж" * 32_768, "a key has 1 to 65535 bytes, got 65536"),
    (5, "got 5 (int)"),
    (b"\xff", r"expected text or UTF-8 bytes, got b'\xff' (bytes)"),
    ("\ud800", r"got '\ud800' (str)"),
]


@pytest.mark.parametrize(("key", "message"), BAD_KEYS, ids=lambda part: str(part)[:20])
def test_a_bad_key_is_named(key, message):
    """In a dict and in a column."""
    for data in ([{"id": "a"}, {"id": key}], {"id": ["a", key]}):
        error = refusal(data)
        assert error.message.startswith("row 1, column id: ")
        assert message in error.message
        assert error.kind == ErrorKind.INVALID_KEY
        assert error.context == {"row": 1, "column": "id"}


BAD_KEY_ARRAYS = [
    (pa.array(["a", None]), "a key cannot be null"),
    (pa.array(["a", ""], pa.large_string()), "bytes, got 0"),
    (pa.array([b"a", b"\xff"]), "expected text or UTF-8 bytes"),
    (pa.array(["a", None]).dictionary_encode(), "a key cannot be null"),
    (pa.array([None, 5]), "got 5 (int64)"),
    (pa.array([b"a", b"\xff"]).view(pa.string()), "expected text or UTF-8 bytes"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_KEY_ARRAYS, ids=str)
def test_a_bad_key_in_arrow_is_named(keys, message):
    """Without reading the rows one by one."""
    error = refusal(pa.table({"id": keys}))
    assert error.message.startswith("row 1, column id: ")
    assert message in error.message
    assert error.kind == ErrorKind.INVALID_KEY


def test_keys_of_other_types_come_with_a_way_out():
    """Numbers and tuples can be packed."""
    assert "reef.keys.pack" in refusal([{"id": 7}]).hint


def test_a_row_without_its_key_is_named():
    """Apart from one whose key is null."""
    error = refusal([{"id": "a"}, {"amount": 1}])
    assert error.message == "row 1, column id: the key is missing"
    assert error.kind == ErrorKind.INVALID_KEY


@pytest.mark.parametrize(
    "data", [{"amount": [1]}, [{"amount": 1}], pa.table({"amount": [1]})], ids=repr
)
def test_a_key_column_that_is_missing_is_named(data):
    """In every form."""
    assert refusal(data).message == "column id: the key column is missing"


@pytest.mark.parametrize(
    ("column", "value", "hint"),
    [
        ("zoned", "2026-01-01", "Pass a datetime with a time zone: datetime.now(UTC)"),
        ("zoned", 1.5e9, "Pass a datetime with a time zone: datetime.now(UTC)"),
        ("zoned", NAIVE, "Pass a datetime with a time zone: datetime.now(UTC)"),
        ("at", AWARE, "Pass a datetime without a zone"),
        ("at", NAIVE.replace(microsecond=5), ""),
        ("amount", "much", ""),
    ],
)
def test_the_error_of_a_timestamp_says_what_to_pass(column, value, hint):
    """Text, numbers, and datetimes with the wrong kind of zone; not one that is too precise."""
    assert refusal([{"id": "a", column: value}]).hint == hint


# --- names and forms ----------------------------------------------------------------


def test_an_unknown_column_is_named():
    """With the first row that has it, the existing columns, and the closest name."""
    error = refusal([{"id": "a"}, {"id": "b", "amuont": 1}])
    assert error.message.startswith(
        "row 1, column amuont: there is no such column, only id, amount"
    )
    assert error.hint == "Did you mean amount?"
    error = refusal({"id": ["a"], "zzz": [1]})
    assert error.message.startswith("column zzz: there is no such column")
    assert error.hint == ""
    assert "column 7: " in refusal([{"id": "a", 7: 1}]).message
    assert "column _found: " in refusal({"id": ["a"], "_found": [True]}).message


@pytest.mark.parametrize("data", [[], (), {}, {"id": []}, pa.table({"id": pa.array([], "string")})])
def test_no_rows_are_refused(data):
    """A batch does something."""
    assert refusal(data).message == "a batch without operations"


BAD_FORMS = [
    (5, "a list of dicts, .* got int"),
    ("text", "got str"),
    (pa.array([1]), "is not rows"),
    (pl.LazyFrame({"id": ["a"]}), "got LazyFrame"),
    ((row for row in [{"id": "a"}]), "got generator"),
    ([{"id": "a"}, ["b"]], "row 1: expected a dict, got list"),
    ({"id": "a"}, "column id: expected a list or an array, got str.*one dict"),
    ({"id": ["a"], "amount": 5}, "column amount: expected a list or an array, got int"),
    ({"id": ["a"], "amount": [1, 2]}, "id has 1, amount has 2"),
    (pa.table([["a"], ["b"]], names=["id", "id"]), "column id is there twice"),
    (pd.DataFrame([["a", "b"]], columns=["id", "id"]), "column id is there twice"),
]


@pytest.mark.parametrize(("data", "message"), BAD_FORMS, ids=lambda part: str(part)[:20])
def test_other_forms_are_refused(data, message):
    """The error names the existing ones, or the problem with this one."""
    with pytest.raises(InvalidInputError, match=message):
        to_ops(data, SCHEMA, kind=PUT)


def test_only_puts_and_patches_have_rows():
    """A delete has keys."""
    assert "put or patched" in str(refusal([{"id": "a"}], kind=OpKind.DELETE))


# --- patches and expiry -------------------------------------------------------------


def test_a_patch_that_changes_nothing_is_named():
    """It names the key only, in a row or in all of them."""
    error = refusal([{"id": "a", "amount": 1}, {"id": "b"}], kind=PATCH)
    assert error.message == "row 1: a patch that names the key only, column id"
    assert refusal({"id": ["a"]}, kind=PATCH).message.startswith("row 0: a patch that names")
    assert refusal(pa.table({"id": ["a"]}), kind=PATCH).message.startswith("row 0: ")


def test_a_patch_sets_no_expiry():
    """The whole row expires, so the whole row is written."""
    for data, options in (
        ([{"id": "a", "amount": 1, "_expires_at": 5}], {}),
        ([{"id": "a", "amount": 1}], {"ttl_s": 5}),
    ):
        error = refusal(data, kind=PATCH, **options)
        assert "a patch cannot change when a row expires" in error.message
        assert "upsert" in error.hint


BAD_EXPIRIES = [
    ["tomorrow"],
    [1.5],
    [True],
    [datetime.date(2030, 1, 1)],
    [2**63],
    pa.array(["2030-01-01"]),
    pa.array([1.5]),
    pa.array([2**62], pa.timestamp("s")),
    np.array([2.5]),
]


@pytest.mark.parametrize("expires", BAD_EXPIRIES, ids=str)
def test_a_bad_expiry_is_named(expires):
    """Only timestamps and whole milliseconds are valid."""
    error = refusal({"id": ["a"], "_expires_at": expires})
    assert error.message.startswith("row 0, column _expires_at: expected a datetime or an integer")


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 1e300, "5", True])
def test_a_bad_time_to_live_is_refused(ttl_s):
    """It is a number of seconds above 0 that has an end."""
    assert "ttl_s" in refusal([{"id": "a"}], ttl_s=ttl_s).message


def test_one_expiry_is_enough():
    """By row or for all, not both."""
    error = refusal([{"id": "a", "_expires_at": None}], ttl_s=5)
    assert "give one of them" in error.message


# --- out ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["valeu"], "column valeu: there is no such column, only id, value. Did you mean value?"),
        (["id", "id"], "column id is selected twice"),
        ("id", "columns is a list of names"),
    ],
)
def test_columns_that_cannot_be_read_are_named(columns, message):
    """Before any data is touched."""
    none = np.array([], np.int64)
    rows = Versions(pa.array([], pa.binary()), none, none.astype("u4"), none.astype("u1"), {})
    with pytest.raises(InvalidInputError) as caught:
        to_record_batch(rows, DEFAULT_SCHEMA, columns)
    assert message in str(caught.value)
