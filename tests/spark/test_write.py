"""Writing as Spark's processes do it, without Spark: staged, committed and refused rows."""

from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import types as st

import reef
from reef.errors import ErrorKind
from reef.jobs import BulkJob, fold, sweep
from reef.jobs.ingest.append import Appender
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores.leases import SharedLease
from tests.spark.writing import (
    TABLE,
    Write,
    kinds_of,
    leases_of,
    named_segments,
    numbers_of,
    rows_of,
    segments_of,
    struct,
    sweep_everything,
)

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])


@pytest.fixture
def table(db):
    """Give a database with a table of three rows."""
    db.create("t", COLUMNS)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": key, "n": 0, "t": "old"} for key in "abc"])
    return db


def some(keys, n=1, **more):
    """Return rows of these keys."""
    return [{"id": key, "n": n, **more} for key in keys]


# --- what a write does ------------------------------------------------------------------


def test_append_is_an_upsert_by_key_at_one_lsn(table, url):
    """Rows of interleaving partitions are visible together; columns that are not given are null."""
    Write(url).run(some("bxd"), [], some("ey", 2, t="new"))
    assert rows_of(table) == {
        "a": {"n": 0, "t": "old"},
        "b": {"n": 1, "t": None},
        "c": {"n": 0, "t": "old"},
        "d": {"n": 1, "t": None},
        "e": {"n": 2, "t": "new"},
        "x": {"n": 1, "t": None},
        "y": {"n": 2, "t": "new"},
    }
    assert kinds_of(table) == ["fence", "batches", "begin", "ingest"]
    assert leases_of(table) == []


def test_overwrite_leaves_exactly_the_new_rows(table, url):
    """In one commit: readers as of before see the old rows, and no reader sees neither."""
    fold(table, "t")
    Write(url, overwrite=True).run(some("bz"), some("mc", 2))
    expected = {"b": 1, "z": 1, "m": 2, "c": 2}
    for _ in range(2):
        assert numbers_of(table) == expected
        assert table.reader("t").get("a") is None
        fold(table, "t")
    assert kinds_of(table)[-2:] == ["begin", "ingest"]
    assert len(dict(table.reader("t", as_of=reef.AsOf(lsn=2)).scan())) == 3


@pytest.mark.parametrize("partitions", [[], [[]], [[], []]])
def test_a_dataframe_without_rows(table, url, partitions):
    """An append changes nothing, an overwrite empties the namespace."""
    Write(url).run(*partitions)
    assert len(rows_of(table)) == 3
    Write(url, overwrite=True).run(*partitions)
    assert rows_of(table) == {}


def test_deletes_patches_and_puts_by_option(table, url):
    """`op` says it for all rows. A patch of a key that is not there does nothing."""
    Write(url, op="patch", schema=struct(id=st.StringType(), n=st.LongType())).run(
        some("a", 5), some("q", 6)
    )
    Write(url, op="delete", schema=struct(id=st.StringType())).run([{"id": "b"}, {"id": "unknown"}])
    for _ in range(2):
        assert rows_of(table) == {"a": {"n": 5, "t": "old"}, "c": {"n": 0, "t": "old"}}
        fold(table, "t")


def test_each_row_may_have_its_own_op(table, url):
    """The column `_op` is not stored."""
    columns = struct(id=st.StringType(), n=st.LongType(), _op=st.StringType())
    Write(url, schema=columns).run(
        [{"id": "a", "_op": "delete"}, {"id": "b", "n": 7, "_op": "patch"}],
        [{"id": "c", "n": 8, "_op": "put"}],
    )
    assert rows_of(table) == {"b": {"n": 7, "t": "old"}, "c": {"n": 8, "t": None}}


def test_rows_may_expire(table, url):
    """`_expires_at` is read as in an upsert."""
    columns = struct(id=st.StringType(), _expires_at=st.TimestampType())
    Write(url, schema=columns).run([{"id": "a", "_expires_at": 1_000_000}, {"id": "b"}])
    assert sorted(rows_of(table)) == ["b", "c"]


def test_only_puts_say_when_they_expire(table, url):
    """Patches and deletes may occur with puts that expire; a patch that expires is refused."""
    columns = struct(
        id=st.StringType(), n=st.LongType(), _op=st.StringType(), _expires_at=st.TimestampType()
    )
    Write(url, schema=columns).run(
        [
            {"id": "a", "n": 1, "_op": "put", "_expires_at": 1_000_000},
            {"id": "b", "n": 2, "_op": "patch"},
            {"id": "c", "_op": "delete", "_expires_at": 1_000_000},
        ]
    )
    assert rows_of(table) == {"b": {"n": 2, "t": "old"}}
    with pytest.raises(reef.InvalidInputError, match="a patch cannot change when a row expires"):
        Write(url, schema=columns).run([{"id": "b", "_op": "patch", "_expires_at": 1_000_000}])


@pytest.mark.parametrize("folds", [False, True])
def test_a_repeated_idempotency_key_changes_nothing(table, url, folds):
    """The tasks stage nothing at all, before and after a fold."""
    Write(url, idempotencyKey="k").run(some("z"))
    if folds:
        fold(table, "t")
    before = kinds_of(table), segments_of(table)
    for overwrite in (False, True):
        Write(url, idempotencyKey="k", overwrite=overwrite).run(some("yz", 9))
    assert (kinds_of(table), segments_of(table)) == before
    assert numbers_of(table)["z"] == 1
    assert "y" not in numbers_of(table)
    assert leases_of(table) == []


def test_H57_two_drivers_with_one_key(table, url):
    """H57: both have begun; the second commit returns the first one's receipt, and its rows never
    count."""
    one, two = Write(url, idempotencyKey="k"), Write(url, idempotencyKey="k")
    staged = [one.task(some("x", 1)), two.task(some("x", 2))]
    two.writer.commit(staged[1:])
    one.writer.commit(staged[:1])
    assert numbers_of(table)["x"] == 2
    fold(table, "t")
    assert numbers_of(table)["x"] == 2


# --- duplicates -------------------------------------------------------------------------


def test_H38_a_key_twice_is_refused_within_and_across_partitions(table, url):
    """H38: by default, and with the key in the message; nothing is visible."""
    with pytest.raises(reef.InvalidInputError, match="b'x' comes more than once"):
        Write(url).run(some("xyx"))
    with pytest.raises(reef.InvalidInputError, match=r"1 keys .* b'x'"):
        Write(url).run(some("axz"), some("bxy"))
    assert sorted(rows_of(table)) == ["a", "b", "c"]
    assert kinds_of(table)[2:] == ["begin", "abort"] * 2
    assert sweep_everything(table) == set()


@pytest.mark.parametrize("order", ["n", "_at"])
@pytest.mark.parametrize("named", [{}, {"duplicates": "order"}])
def test_an_order_column_decides_between_rows_of_a_partition(table, url, order, named):
    """It may be a column of the table, or one that is there for this only."""
    columns = struct(
        **{"id": st.StringType(), "n": st.LongType(), "t": st.StringType(), "_at": st.IntegerType()}
    )
    rows = [
        {"id": "a", "n": 1, "t": "x", "_at": 1},
        {"id": "a", "n": 3, "t": "z", "_at": 3},
        {"id": "a", "n": 2, "t": "y", "_at": 2},
        {"id": "a", "n": None, "t": "w", "_at": None},
    ]
    if order == "n":
        columns = st.StructType(columns.fields[:3])
        rows = [{k: v for k, v in row.items() if k != "_at"} for row in rows]
    Write(url, schema=columns, orderBy=order, **named).run(rows, some("x"))
    assert rows_of(table)["a"] == {"n": 3, "t": "z"}


# --- namespaces -------------------------------------------------------------------------


def test_a_namespace_is_made_from_the_columns(db, url):
    """With the key that is named; vectors and columns that begin with _ as documented."""
    columns = struct(
        user=st.BinaryType(),
        v=st.ArrayType(st.FloatType()),
        at=st.TimestampType(),
        local=st.TimestampNTZType(),
        d=st.DecimalType(12, 3),
        tags=st.ArrayType(st.StringType()),
        _op=st.StringType(),
    )
    Write(url, "new", columns, key="user", vectors="v=2").run(
        [{"user": b"\x00\xff", "v": [1.0, 2.0], "tags": ["x", None], "_op": "put"}]
    )
    assert db.info("new").schema == pa.schema(
        [
            ("user", pa.binary()),
            ("v", pa.list_(pa.float32(), 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("d", pa.decimal128(12, 3)),
            ("tags", pa.list_(pa.string())),
        ]
    )
    assert db.reader("new").get(b"\x00\xff")["v"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("columns", "options", "error", "why"),
    [
        (TABLE, {"namespace": "none"}, reef.NotFoundError, "no namespace none.*key"),
        (TABLE, {"namespace": "a/b"}, reef.InvalidInputError, "not the name"),
        (TABLE, {"namespace": "new", "key": "x"}, reef.InvalidInputError, "no key column 'x'"),
        (TABLE, {"namespace": "new", "key": "n"}, reef.InvalidInputError, "key"),
        (
            struct(id=st.StringType(), _n=st.LongType()),
            {"namespace": "new", "key": "id"},
            reef.InvalidInputError,
            "_n: names that begin with _ are Reef's own",
        ),
        (
            struct(_id=st.StringType()),
            {"namespace": "new", "key": "_id"},
            reef.InvalidInputError,
            "_id: names that begin with _ are Reef's own",
        ),
        (TABLE, {"key": "n"}, reef.InvalidInputError, "is 'id', not 'n'"),
        (TABLE, {"duplicates": "order"}, reef.InvalidInputError, "go together"),
        (
            TABLE,
            {"duplicates": "refuse", "orderBy": "n"},
            reef.InvalidInputError,
            "go together",
        ),
        (
            TABLE,
            {"namespace": "new", "key": "id", "idempotencyKey": "x" * 5000},
            reef.InvalidInputError,
            "idempotency key must have 1 to",
        ),
        (TABLE, {"vectors": "q=2"}, reef.InvalidInputError, "'q' is missing"),
        (TABLE, {"vectors": "n=2"}, reef.InvalidInputError, "array of float"),
        (struct(n=st.LongType()), {}, reef.InvalidInputError, "key column is missing"),
        (struct(id=st.LongType()), {}, reef.InvalidInputError, "text or bytes"),
        (struct(id=st.StringType(), m=st.LongType()), {}, reef.InvalidInputError, "column m"),
        (struct(id=st.StringType(), n=st.StringType()), {}, reef.InvalidInputError, "column n"),
        (
            struct(id=st.StringType(), t=st.DayTimeIntervalType()),
            {},
            reef.InvalidInputError,
            "column t: Reef has no interval",
        ),
        (
            st.StructType([*TABLE.fields, TABLE.fields[1]]),
            {},
            reef.InvalidInputError,
            "column n is there twice",
        ),
    ],
)
def test_invalid_writes_are_rejected_before_anything_is_written(
    table, url, columns, options, error, why
):
    """Nothing is begun, and no namespace is made."""
    before = kinds_of(table)
    with pytest.raises(error, match=why):
        Write(url, **{"schema": columns, **options})
    assert kinds_of(table) == before
    assert leases_of(table) == []
    assert table.namespaces() == ["t"]


@pytest.mark.parametrize("schema", [TABLE, st.StructType([*TABLE.fields]).add("_op", "string")])
def test_an_overwrite_has_puts_only(table, url, schema):
    """Patches of replaced rows make no sense."""
    op = "put" if "_op" in schema.names else "patch"
    with pytest.raises(reef.InvalidInputError, match="puts only"):
        Write(url, schema=schema, overwrite=True, op=op)


def test_a_bucket_in_memory_is_refused():
    """Other processes would see another bucket."""
    with pytest.raises(reef.InvalidInputError, match="memory of one process"):
        Write("memory://x")


# --- bad rows, and other ends -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"id": None}], "a key cannot be null"),
        ([{"id": ""}], "1 to 65535 bytes, got 0"),
        ([{"id": "x" * 70_000}], "got 70000"),
    ],
)
def test_a_bad_row_fails_the_whole_write_and_leaves_nothing(table, url, rows, why):
    """The driver names row and column; segments that other tasks have staged are swept."""
    with pytest.raises(reef.InvalidInputError, match=why):
        Write(url).run(some("xyz"), rows)
    assert sorted(rows_of(table)) == ["a", "b", "c"]
    assert leases_of(table) == []
    assert segments_of(table) != set()
    assert sweep_everything(table) == set()


def test_a_write_that_fails_takes_back_the_namespace_it_made(table, url):
    """Nothing is visible, and what tasks have staged is swept with it; the next one may succeed."""
    with pytest.raises(reef.InvalidInputError, match="a key cannot be null"):
        Write(url, "new", key="id").run(some("xyz"), [{"id": None}])
    assert table.namespaces() == ["t"]
    assert leases_of(table, "new") == []
    assert segments_of(table, "new") != set()
    assert sweep_everything(table, "new") == set()
    with pytest.raises(reef.NotFoundError, match=r"dropped\. .*option key") as caught:
        Write(url, "new")
    assert caught.value.kind is ErrorKind.DROPPED
    Write(url, "new", key="id").run(some("xy", 1), some("z", 1))
    assert numbers_of(table, "new") == {"x": 1, "y": 1, "z": 1}


def test_H39_only_messages_that_reach_the_commit_count(table, url):
    """H39: a task that failed after its upload, a second attempt, a failed task's None."""
    write = Write(url)
    write.task(some("xyz", 99))
    good = write.task(some("xy", 1))
    write.writer.commit([good])
    assert numbers_of(table) == {"a": 0, "b": 0, "c": 0, "x": 1, "y": 1}
    assert len(segments_of(table)) == 2
    failed = Write(url)
    failed.writer.abort([failed.task(some("q")), None])
    assert "q" not in rows_of(table)
    assert kinds_of(table)[-2:] == ["begin", "abort"]
    assert sweep_everything(table) == named_segments(table)
    assert numbers_of(table)["y"] == 1


def test_a_commit_with_a_message_missing_is_refused(table, url):
    """Part of a write is no write."""
    write = Write(url)
    with pytest.raises(reef.InternalError, match="1 of 2 tasks"):
        write.writer.commit([write.task(some("x")), None])
    write.writer.abort([None])
    assert "x" not in rows_of(table)


def test_H31_an_abort_after_a_commit_that_counted_deletes_nothing(table, url):
    """H31: Spark calls it with all messages when commit has raised, whatever had happened."""
    write = Write(url)
    messages = [write.task(some("xy")), write.task(some("z"))]
    write.writer.commit(messages)
    write.writer.abort(messages)
    assert sorted(rows_of(table)) == ["a", "b", "c", "x", "y", "z"]
    assert kinds_of(table)[-1] == "ingest"
    assert leases_of(table) == []
    assert sweep_everything(table) == named_segments(table)
    assert sorted(rows_of(table)) == ["a", "b", "c", "x", "y", "z"]


def test_H31_a_commit_whose_response_was_lost_and_its_abort(table, url, monkeypatch):
    """H31: the ingest landed and the driver raised: the rows are there, once, and stay."""
    write = Write(url)
    messages = [write.task(some("x"))]
    append = Appender.append

    def raises(self, *args):
        append(self, *args)
        raise reef.OutcomeUnknownError("the response did not arrive")

    monkeypatch.setattr(Appender, "append", raises)
    with pytest.raises(reef.OutcomeUnknownError):
        write.writer.commit(messages)
    monkeypatch.undo()
    write.writer.abort(messages)
    assert numbers_of(table)["x"] == 1
    assert kinds_of(table)[-1] == "ingest"


def test_a_commit_that_is_called_twice_counts_once(table, url):
    """The second one returns the first one's receipt."""
    write = Write(url, idempotencyKey="k")
    messages = [write.task(some("x"))]
    write.writer.commit(messages)
    write.writer.commit(messages)
    assert kinds_of(table).count("ingest") == 1


def test_H28_a_write_that_was_reaped_fails_cleanly(table, url):
    """H28: the lease was not renewed for too long and a sweep aborted the job: the commit
    raises."""
    write = Write(url)
    messages = [write.task(some("x"))]
    assert sweep_everything(table) == set()
    with pytest.raises(reef.ConflictError, match=r"aborted|gone"):
        write.writer.commit(messages)
    write.writer.abort(messages)
    assert "x" not in rows_of(table)


def test_H28_tasks_keep_the_job_alive(table, url, monkeypatch):
    """H28: only Spark's processes renew it; a third of the term is enough."""
    write = Write(url, leaseSeconds=90)
    (lease,) = leases_of(table)
    assert lease.owner.startswith("job ")
    before = table.store.get(lease.key)
    write.task(some("x"))
    assert table.store.get(lease.key) == before, "it is young"
    monkeypatch.setattr(SharedLease, "_age_s", lambda self: 40.0)
    monkeypatch.setattr(SharedLease, "check", SharedLease.verify)  # as it does at that age
    write.task(some("y"))
    assert table.store.get(lease.key) != before
    report = sweep(table, "t", apply=True, silent_job_s=0)
    assert report.jobs_reaped == 0


def test_a_live_writer_continues_and_later_lsns_win(table, url):
    """H45: it is never fenced; its writes before the commit lose, later ones win."""
    live = table.writer("t", background=False)
    write = Write(url)
    live.upsert(some("xy", 10))
    messages = [write.task(some("xyz", 20))]
    live.upsert(some("x", 11))
    write.writer.commit(messages)
    live.upsert(some("y", 12))
    live.delete("c")
    for _ in range(2):
        assert numbers_of(table) == {"a": 0, "b": 0, "x": 20, "y": 12, "z": 20}
        fold(table, "t")


def test_an_overwrite_concurrent_with_a_live_writer(table, url):
    """Rows written before its LSN are gone, also those after its begin; later rows stay."""
    live = table.writer("t", background=False)
    write = Write(url, overwrite=True)
    messages = [write.task(some("xb", 20))]
    live.upsert(some("qx", 10))
    write.writer.commit(messages)
    live.upsert(some("a", 30))
    live.patch([{"id": "b", "t": "patched"}, {"id": "q", "t": "patched"}])
    for _ in range(2):
        assert rows_of(table) == {
            "a": {"n": 30, "t": None},
            "b": {"n": 20, "t": "patched"},
            "x": {"n": 20, "t": None},
        }
        fold(table, "t")


def test_segments_get_about_the_size_that_is_asked_for(table, url):
    """A task whose rows need several writes them in order, without overlap."""
    write = Write(url, segmentBytes=10_000, sortBytes=50_000)
    rows = [{"id": f"{n:06}", "n": n, "t": f"{n * 7919 % 10007:0200}"} for n in range(3000)]
    message = write.task(rows, batch_rows=64)
    segments = message.part.segments
    assert len(segments) > 2
    assert all(a.max_key < b.min_key for a, b in pairwise(segments))
    write.writer.commit([message])
    assert len(rows_of(table)) == 3003


def before_the_begin(monkeypatch, act):
    """Let something happen between the checks of the driver and the begin of its job."""
    begin = BulkJob.__init__

    def acted(self, *args, **settings):
        act()
        begin(self, *args, **settings)

    monkeypatch.setattr(BulkJob, "__init__", acted)


def test_a_namespace_that_grows_before_the_begin(table, url, monkeypatch):
    """Rows are written as the job's schema says, not as the one that was read first: a segment has
    no other word for the width of its numbers.
    """
    table.create(
        "narrow",
        pa.schema([("id", pa.string()), ("n", pa.int32()), ("v", pa.list_(pa.float32(), 2))]),
    )
    wide = [("id", pa.string()), ("n", pa.int64()), ("v", pa.list_(pa.float64(), 2))]
    grown = pa.schema([*wide, ("m", pa.int8())])
    before_the_begin(monkeypatch, lambda: table.alter("narrow", grown))
    columns = struct(id=st.StringType(), n=st.IntegerType(), v=st.ArrayType(st.FloatType()))
    Write(url, "narrow", columns).run(some("abcdefg", 7, v=[1.5, 2.5]))
    expected = {key: {"n": 7, "v": [1.5, 2.5], "m": None} for key in "abcdefg"}
    for _ in range(2):
        assert rows_of(table, "narrow") == expected
        fold(table, "narrow")


def test_a_namespace_that_is_another_one_by_the_begin(table, url, monkeypatch):
    """Dropped and made again with other columns: the write is refused, and its job abandoned."""

    def created_again():
        table.drop("t")
        table.create("t", pa.schema([("id", pa.string()), ("other", pa.int64())]))

    before_the_begin(monkeypatch, created_again)
    with pytest.raises(reef.InvalidInputError, match="column n: there is no such column"):
        Write(url)
    assert kinds_of(table)[-2:] == ["begin", "abort"]
    assert leases_of(table) == []


def test_a_namespace_with_another_key_by_the_begin(table, url, monkeypatch):
    """Another process has created it meanwhile, with another key: rows would be upserts of
    others."""
    columns = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])
    before_the_begin(monkeypatch, lambda: table.create("new", columns, key="t"))
    with pytest.raises(reef.InvalidInputError, match="key column of new is 't', not 'id'"):
        Write(url, "new", key="id")
    assert kinds_of(table, "new") == ["begin", "abort"]


def test_errors_come_without_the_frames_inside_of_reef(table, url):
    """Spark shows the whole traceback and every cause: only where Spark has called is left."""
    with pytest.raises(reef.InvalidInputError) as caught:
        Write(url, schema=struct(id=st.StringType(), m=st.LongType()))
    assert "wrapped" in [entry.name for entry in caught.traceback][-1]
    with pytest.raises(reef.NotFoundError) as caught:
        Write(url, "none")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_schema_is_that_of_the_begin(table, url):
    """A namespace that grows meanwhile takes the rows as they are."""
    write = Write(url)
    messages = [write.task(some("x"))]
    table.alter("t", COLUMNS.append(pa.field("more", pa.int8())))
    write.writer.commit(messages)
    fold(table, "t")
    assert rows_of(table)["x"] == {"n": 1, "t": None, "more": None}
    schema = HeadFinder(table.store, Namespace("t")).find().manifest.schema
    assert BulkJob(table, "t").schema == schema
