"""The task of a write: rows checked, sorted, staged. Without a session."""

import pickle
import random
import tempfile
from decimal import Decimal
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as hs
from pyspark.sql import types as st

import reef
from reef.formats.schema import Schema
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob
from reef.spark.load_check import SAMPLE_BYTES, check_sample, count_partitions
from reef.spark.options import SparkWriteOptions, TableLocation
from reef.spark.rows import RowSorter, RowsPlan, scratch_folder, sorted_places
from reef.spark.sink import arrow_columns, check_collation
from reef.spark.staging import KeySample, PartPlan, stage_part

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])
SCHEMA = Schema.of(COLUMNS)


def plan(columns=COLUMNS, op="put", order=None, schema=SCHEMA):
    """Return how rows with these columns are read."""
    return RowsPlan.of(columns, schema, op, order)


def table(rows, columns=COLUMNS):
    """Return rows as Arrow."""
    return pa.Table.from_pylist(rows, schema=columns)


# --- order --------------------------------------------------------------------------


@pytest.mark.parametrize("alphabet", [b"\x00\x01", b"ab", bytes(range(256))])
@pytest.mark.parametrize("prefix", [b"", b"common/prefix/"])
def test_keys_are_sorted_as_bytes(alphabet, prefix):
    """Short keys, zeros at the end, long common parts: the order is that of bytes, and stable."""
    chance = random.Random(7)
    keys = [
        prefix + bytes(chance.choices(alphabet, k=chance.randrange(0 if prefix else 1, 14)))
        for _ in range(3000)
    ]
    places = sorted_places(pa.array(keys, pa.binary())).tolist()
    assert places == sorted(range(len(keys)), key=lambda place: keys[place])


def test_keys_of_a_slice_are_sorted():
    """Offsets of Arrow's arrays need not begin at zero."""
    keys = pa.array([b"zz", b"b", b"aa", b"c"], pa.binary())[1:]
    assert sorted_places(keys).tolist() == [1, 0, 2]
    assert sorted_places(keys[:0]).tolist() == []


@pytest.mark.parametrize("sort_bytes", [1, 5_000, 1 << 30])
@pytest.mark.parametrize("order", [None, "at"])
def test_the_sorter_gives_each_key_once_whatever_fits_into_memory(sort_bytes, order):
    """Runs on disk change nothing: rows by key, of each key the one with the highest order."""
    chance = random.Random(3)
    columns = COLUMNS.append(pa.field("at", pa.int32()))
    count = 400 if order else 5000
    keys = [f"k{chance.randrange(count):05}" for _ in range(3000)]
    if order is None:
        keys = sorted(set(keys), key=lambda _: chance.random())
    times = chance.sample(range(10**6), len(keys))
    rows = [{"id": k, "n": m, "t": None, "at": m} for k, m in zip(keys, times, strict=True)]
    wanted = plan(columns if order else COLUMNS, order=order)
    sorter = RowSorter(wanted, sort_bytes)
    pieces = [
        wanted.versions(table(rows[at : at + 100], columns if order else COLUMNS))
        for at in range(0, len(rows), 100)
    ]
    found = list(sorter.sorted(pieces))
    expected = {}
    for row in rows:
        expected[row["id"]] = max(row["n"], expected.get(row["id"], -1))
    assert [k.decode() for piece in found for k in piece.keys.to_pylist()] == sorted(expected)
    assert [n for piece in found for n in piece.fields[1].to_pylist()] == [
        expected[key] for key in sorted(expected)
    ]
    assert all(set(piece.fields) == {1, 2} for piece in found), "the order column stays behind"
    assert sorter.rows == len(rows)
    assert sorter.duplicates == len(rows) - len(expected)
    assert (sorter.spilled > 0) == (sort_bytes < 1 << 30)


@pytest.mark.parametrize("sort_bytes", [1, 1 << 30])
def test_rows_that_no_order_decides_are_refused_never_chosen_at_random(sort_bytes):
    """A key twice without an order, or with the same place in it, is an error that names it."""
    twice = [{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "n": 3}]
    wanted = plan()
    pieces = [wanted.versions(table([row])) for row in twice]
    with pytest.raises(reef.InvalidInputError, match="b'a' comes more than once"):
        list(RowSorter(wanted, sort_bytes).sorted(pieces))
    wanted = plan(order="t")
    for times, fits in (
        (["x", "x", "x"], False),
        ([None, "x", None], False),
        (["x", "x", None], True),
        (["1", "x", "2"], True),
    ):
        rows = [{**row, "t": point} for row, point in zip(twice, times, strict=True)]
        pieces = [wanted.versions(table([row])) for row in rows]
        sorter = RowSorter(wanted, sort_bytes)
        if fits:
            assert sum(map(len, sorter.sorted(pieces))) == 2
        else:
            with pytest.raises(reef.InvalidInputError, match="same place in the order"):
                list(sorter.sorted(pieces))


@pytest.mark.parametrize("sort_bytes", [1, 1 << 30])
def test_a_draw_that_a_higher_row_settles_is_no_error(sort_bytes):
    """Whether two rows are equally high matters only if none is higher, in whatever run."""
    wanted = plan(order="n")
    rows = [{"id": "a", "n": 1, "t": "x"}, {"id": "a", "n": 1, "t": "y"}]
    rows += [{"id": "a", "n": 2, "t": "z"}]
    pieces = [wanted.versions(table(rows[:2])), wanted.versions(table(rows[2:]))]
    (found,) = RowSorter(wanted, sort_bytes).sorted(pieces)
    assert found.fields[2].to_pylist() == ["z"]
    assert found.seqs.tolist() == [1]


# --- rows ---------------------------------------------------------------------------


def test_each_row_is_applied_by_its_op():
    """A put has all columns, a patch touches those of the DataFrame, a delete has its key."""
    columns = pa.schema([("id", pa.string()), ("n", pa.int64()), ("_op", pa.string())])
    rows = [
        {"id": "p", "n": 1, "_op": "put"},
        {"id": "d", "n": 2, "_op": "delete"},
        {"id": "u", "n": None, "_op": "patch"},
    ]
    found = plan(columns).versions(table(rows, columns))
    by_key = dict(zip(found.keys.to_pylist(), found.kinds.tolist(), strict=True))
    assert by_key == {b"p": OpKind.PUT, b"d": OpKind.DELETE, b"u": OpKind.PATCH}
    place = found.keys.to_pylist().index(b"u")
    assert found.touched[1][place].as_py()
    assert 2 not in found.touched


@pytest.mark.parametrize("op", [None, "Put", "upsert"])
def test_an_op_that_is_none_is_refused(op):
    """Null and unknown words are errors that name the row."""
    columns = COLUMNS.append(pa.field("_op", pa.string()))
    rows = [{"id": "a", "_op": "put"}, {"id": "b", "_op": op}]
    with pytest.raises(reef.InvalidInputError, match="row 1, column _op: expected put"):
        plan(columns).versions(table(rows, columns))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([("n", pa.int64())], "the key column is missing"),
        ([("id", pa.int64())], "a key is text or bytes, got int64"),
        ([("id", pa.string()), ("m", pa.int64())], "column m: there is no such column"),
        ([("id", pa.string()), ("n", pa.string())], "column n: expected int64"),
        ([("id", pa.string()), ("_op", pa.int32())], "column _op: expected text"),
    ],
)
def test_columns_that_do_not_fit_are_rejected_before_any_row(columns, why):
    """Names and types are known on the driver."""
    with pytest.raises(reef.InvalidInputError, match=why):
        plan(pa.schema(columns))


@pytest.mark.parametrize(
    ("order", "why"), [("unknown", "is not there"), ("v", "no useful order"), ("b", "no useful")]
)
def test_an_order_column_must_have_an_order(order, why):
    """Lists and booleans have none worth the name."""
    columns = pa.schema(
        [("id", pa.string()), ("v", pa.list_(pa.int8())), ("b", pa.bool_()), ("n", pa.int64())]
    )
    with pytest.raises(reef.InvalidInputError, match=why):
        plan(columns, order=order, schema=Schema.of(columns))


# --- parts --------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path):
    """Give a database with a table."""
    db = reef.open(str(tmp_path))
    db.create("t", COLUMNS)
    return db


def test_a_part_is_staged_and_can_be_sent_about(db):
    """Plan and result cross process borders; only the segments in the commit count (H39)."""
    with BulkJob(db, "t") as job:
        sent = pickle.loads(pickle.dumps(PartPlan(job.staging, plan())))
        rows = table([{"id": f"{n}", "n": n} for n in range(50, 0, -1)])
        again = [stage_part(sent, rows.to_batches(max_chunksize=7), 3, n) for n in (0, 1)]
        part = pickle.loads(pickle.dumps(again[1]))
        assert (part.partition, part.attempt, part.rows) == (3, 1, 50)
        job.commit(part.segments)
    assert {key: row["n"] for key, row in db.reader("t").scan()} == {
        f"{n}": n for n in range(1, 51)
    }


def test_a_row_that_cannot_be_written_fails_its_task_at_once(db):
    """The error names partition and row; no further batch is read."""
    with BulkJob(db, "t") as job:
        rows = table([{"id": "a", "n": 1}, {"id": None, "n": 2}, {"id": "c", "n": 3}])
        batches = iter(rows.to_batches(max_chunksize=1))
        message = "partition 5, after 1 rows: .*a key cannot be null"
        with pytest.raises(reef.InvalidInputError, match=message):
            stage_part(PartPlan(job.staging, plan()), batches, 5, 0)
        assert next(batches).column(0).to_pylist() == ["c"], "was not read"
        job.abort()


def hashed(keys):
    """Return keys with a hash of each, as Spark sends them."""
    hashes = [None if key is None else xxhash.xxh64_intdigest(key) - (1 << 63) for key in keys]
    return pa.record_batch([pa.array(hashes, pa.int64()), pa.array(keys)], names=["hash", "key"])


@settings(max_examples=50)
@given(hs.lists(hs.lists(hs.binary(min_size=1, max_size=3)), max_size=5), hs.integers(1, 20))
def test_a_sample_of_keys_is_that_of_the_lowest_hashes(partitions, keys_max):
    """However the keys are distributed over batches and tasks, and however often one comes."""
    samples = []
    for keys in partitions:
        sample = KeySample.empty()
        for part in (keys[::2], keys[1::2]):
            sample = sample.add(hashed([*part, None])).cut(keys_max, 1 << 20)
        samples.append(sample)
    merged = reduce(KeySample.merge, samples, KeySample.empty()).cut(keys_max, 1 << 20)
    distinct = {key for keys in partitions for key in keys}
    by_hash = sorted(distinct, key=xxhash.xxh64_intdigest)
    assert merged.to_list() == by_hash[: len(merged.to_list())], "none in between is missing"
    assert min(keys_max, len(distinct)) == len(merged.to_list())


def test_a_sample_of_keys_is_bounded_in_bytes():
    """Also one of long keys; one key is always there."""
    sample = KeySample.empty().add(hashed([bytes([65 + number]) * 50_000 for number in range(10)]))
    assert len(sample.cut(100, 120_000).to_list()) == 2
    assert len(sample.cut(100, 10).to_list()) == 1


def test_a_sample_is_bounded_in_bytes():
    """Large values end it early, so that a check never holds many of them in memory."""
    large = "x" * (1 << 20)
    read = []

    def batches():
        for number in range(100):
            read.append(number)
            yield table([{"id": f"{number}", "n": number, "t": large}]).to_batches()[0]

    report = check_sample(plan(), batches())
    assert report.rows == len(read) <= SAMPLE_BYTES // len(large) + 1
    assert report.bytes >= SAMPLE_BYTES
    assert report.problems == ()


def test_a_sample_reports_every_column_that_cannot_be_converted():
    """One problem for each column, not only the first."""
    schema = Schema.of(pa.schema([("id", pa.string()), ("n", pa.int8()), ("m", pa.int8())]))
    columns = pa.schema([("id", pa.string()), ("n", pa.int64()), ("m", pa.int64())])
    rows = table([{"id": "a", "n": 1000, "m": 2000}], columns)
    report = check_sample(plan(columns, schema=schema), rows.to_batches())
    assert len(report.problems) == 2
    assert [name in problem for name, problem in zip("nm", report.problems, strict=True)]
    assert "column n" in report.problems[0]
    assert "column m" in report.problems[1]


def test_all_columns_that_do_not_fit_are_reported_at_once():
    """Unknown columns, wrong types, types that Reef does not have: one error with all of them."""
    given = pa.schema(
        [("id", pa.string()), ("n", pa.string()), ("t", pa.int64()), ("u", pa.int8())]
    )
    with pytest.raises(reef.InvalidInputError) as caught:
        plan(given)
    assert [f"column {name}:" in str(caught.value) for name in "ntu"] == [True] * 3
    interval, variant = st.DayTimeIntervalType(), st.VariantType()
    columns = st.StructType([st.StructField("a", interval), st.StructField("b", variant)])
    with pytest.raises(reef.InvalidInputError, match=r"column a: .*; column b: "):
        arrow_columns(columns, {})


def test_a_collated_key_column_is_refused():
    """Keys are compared as bytes: a collation would be lost silently."""
    columns = st.StructType(
        [st.StructField("id", st.StringType("UTF8_LCASE")), st.StructField("t", st.StringType())]
    )
    with pytest.raises(reef.InvalidInputError, match="UTF8_BINARY, not UTF8_LCASE"):
        check_collation(columns, "id")
    check_collation(columns, "t")


def test_a_part_without_rows_stages_nothing(db):
    """An empty partition leaves no object."""
    with BulkJob(db, "t") as job:
        part = stage_part(PartPlan(job.staging, plan()), table([]).to_batches(), 0, 0)
        assert (part.rows, part.segments) == (0, ())
        job.abort()


def test_values_are_converted_only_where_nothing_is_lost(db):
    """Spark's types for unsigned numbers, vectors and timestamps convert back exactly."""
    stored = pa.schema(
        [
            ("id", pa.binary()),
            ("u", pa.uint64()),
            ("v", pa.list_(pa.float32(), 2)),
            ("s", pa.timestamp("s", "UTC")),
        ]
    )
    given = pa.schema(
        [
            ("id", pa.binary()),
            ("u", pa.decimal128(20, 0)),
            ("v", pa.list_(pa.float32())),
            ("s", pa.timestamp("us", "UTC")),
        ]
    )
    wanted = plan(given, schema=Schema.of(stored))
    fine = {"id": b"\xff", "u": Decimal(2**64 - 1), "v": [1.5, 2.5], "s": 5_000_000}
    found = wanted.versions(table([fine], given))
    assert [found.fields[n][0].as_py() for n in (1, 2)] == [2**64 - 1, [1.5, 2.5]]
    for bad in ({"u": Decimal(-1)}, {"v": [1.0]}, {"v": [1.0, None]}, {"s": 1}):
        with pytest.raises(reef.InvalidInputError, match=f"column {next(iter(bad))}"):
            wanted.versions(table([{**fine, **bad}], given))


def test_what_does_not_fit_into_memory_goes_where_spark_keeps_its_own(tmp_path, monkeypatch):
    """The first disk of the executor that can be written; elsewhere, the system's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'gone'},{disk}")
    with scratch_folder() as folder:
        assert Path(folder).parent == disk
    assert list(disk.iterdir()) == []
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    with scratch_folder() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())


# --- options ------------------------------------------------------------------------

GIVEN = {"path": "/tmp/x", "namespace": "t"}


def test_options_are_read_whatever_their_case():
    """Spark hands them over in lower case."""
    wanted = SparkWriteOptions.of(
        {**GIVEN, "idempotencykey": "k", "vectors": "a=2, b=3", "segmentbytes": "9", "OP": "PATCH"}
    )
    assert (wanted.idempotency_key, wanted.vectors, wanted.op) == ("k", {"a": 2, "b": 3}, "patch")
    assert wanted.settings["segment_bytes"] == 9
    assert wanted.location == TableLocation.of(GIVEN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "upsert"},
        {"duplicates": "last"},
        {"duplicates": "order"},
        {"duplicates": "refuse", "orderBy": "n"},
        {"idempotencyKey": ""},
        {"vectors": "a"},
        {"vectors": "a=x"},
        {"segmentBytes": "0"},
        {"leaseSeconds": "-1"},
        {"mode": "append"},
        {"generation": "3"},
    ],
)
def test_a_wrong_option_is_an_error(wrong):
    """A misspelt option would otherwise write something else."""
    with pytest.raises(reef.InvalidInputError):
        SparkWriteOptions.of({**GIVEN, **wrong})


def test_partitions_follow_from_size_and_cores():
    """Segments of about the wanted size, no idle core, and no tasks for next to nothing."""
    mib = 1 << 20
    assert count_partitions(None, 256 * mib, 4) == 8
    assert count_partitions(0, 256 * mib, 8) == 1
    assert count_partitions(40 * mib, 256 * mib, 8) == 2
    assert count_partitions(580 * mib, 256 * mib, 2) == 4
    assert count_partitions(10_000 * mib, 256 * mib, 8) == 40
    assert np.all([count_partitions(n << 40, 1, 64) <= 10_000 for n in (1, 2)])
