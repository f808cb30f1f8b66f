"""The streaming sink: every micro-batch counts once, whatever fails in between (H31, H38–H40)."""

import shutil
import threading
import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as fn
from pyspark.sql import types as st

import reef
import reef.jobs
from reef.engine import registry
from reef.errors import ErrorKind
from reef.jobs.ingest.append import StreamAppender
from reef.spark import stream_sink
from tests.spark import streaming
from tests.spark.streaming import CHECKPOINT, Query, numbered
from tests.spark.writing import (
    TABLE,
    kinds_of,
    leases_of,
    named_segments,
    numbers_of,
    rows_of,
    segments_of,
    struct,
    sweep_everything,
)

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])
SIZES = pytest.mark.parametrize("size", ["append", "ingest"])
"""Micro-batches that go into the log, and such that are staged by tasks."""


@pytest.fixture
def table(db):
    """An empty namespace."""
    db.create("t", SCHEMA)
    return db


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    """Let `appendBytes` alone decide how much a task keeps."""
    monkeypatch.setattr(stream_sink, "SHARE_BYTES_MIN", 1)


def query(url, size="append", **options):
    """Return a query whose micro-batches are committed in one of the two ways."""
    return Query(url, **({"appendBytes": 1} if size == "ingest" else {}) | options)


# --- exactly once ---------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("folded", [False, True])
def test_H40_a_replayed_micro_batch_is_skipped_by_its_number(table, url, size, folded):
    """The driver died between the commit and the checkpoint; the source returns other rows."""
    first = query(url, size)
    first.run(0, numbered(1, 2), numbered(3))
    first.run(1, numbered(2, 4))
    if folded:
        reef.jobs.fold(table, "t")
    again = query(url, size)
    again.run_id = "run 2"
    again.run(1, numbered(5, 6, 7))
    assert numbers_of(table) == {"k0001": 1, "k0002": 2, "k0003": 3, "k0004": 4}
    again.run(2, numbered(8))
    assert "k0008" in numbers_of(table)
    assert leases_of(table) == []
    assert reef.jobs.verify(table, "t", deep=True).problems == []


@SIZES
def test_the_mark_is_in_the_commit_of_the_rows(table, url, size):
    """One object of the log has both: there is no state in which only one of them is there."""
    query(url, size).run(0, numbered(1), numbered(2))
    assert kinds_of(table) == {"append": ["append"], "ingest": ["begin", "ingest"]}[size]
    marks = {"spark/q1": 1, f"spark/q1@{CHECKPOINT}": 1}
    assert StreamAppender(table, "t").marks() == marks


def test_small_shares_and_large_ones_are_committed_together(table, url):
    """Rows in messages are staged too, if another task had to stage its own."""
    one = query(url, appendBytes=2000)
    messages = one.run(0, numbered(1), numbered(*range(100, 200)), numbered(2))
    assert [message.staged is not None for message in messages] == [False, True, False]
    assert kinds_of(table) == ["begin", "ingest"]
    assert set(numbers_of(table).values()) == {1, 2, *range(100, 200)}


def test_many_small_shares_are_one_ingest(table, url):
    """The driver stages them, if they are too many for one object of the log."""
    one = query(url, appendBytes=4000)
    messages = one.run(0, *(numbered(*range(20 * p, 20 * p + 20)) for p in range(3)))
    assert not any(message.staged for message in messages)
    assert kinds_of(table) == ["begin", "ingest"]
    assert len(numbers_of(table)) == 60


@SIZES
def test_a_micro_batch_without_rows_has_a_number_too(table, url, size):
    """When it is replayed, it may have rows; they belong to no commit."""
    one = query(url, size)
    one.run(0, [])
    one.run(0, numbered(1))
    assert numbers_of(table) == {}
    one.run(1, numbered(2))
    assert numbers_of(table) == {"k0002": 2}
    reef.jobs.fold(table, "t")
    assert reef.jobs.verify(table, "t", deep=True).problems == []


@SIZES
def test_H31_a_commit_that_counted_and_then_raised(table, url, size, monkeypatch):
    """Spark calls abort with all messages: nothing is deleted, and the replay changes nothing."""
    one = query(url, size)
    kind = StreamAppender if size == "append" else stream_sink.BulkJob
    name = "append" if size == "append" else "commit"
    real = getattr(kind, name)

    def raises(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise OSError("the response is lost")

    monkeypatch.setattr(kind, name, raises)
    with pytest.raises(OSError, match="lost"):
        one.run(0, numbered(1), numbered(2))
    monkeypatch.undo()
    assert set(numbers_of(table).values()) == {1, 2}
    one.run_id = "run 2"
    one.run(0, numbered(1), numbered(9))
    one.run(1, numbered(3))
    assert set(numbers_of(table).values()) == {1, 2, 3}
    assert sweep_everything(table) == named_segments(table)
    assert set(numbers_of(table).values()) == {1, 2, 3}


def test_H31_an_aborted_micro_batch_leaves_nothing_visible(table, url):
    """A task failed: its message is None. The job of the others is aborted, and swept later."""
    one = query(url, "ingest")
    messages = [one.task(0, numbered(1)), None]
    one.writer.abort(messages, 0)
    one.writer.abort(messages, 0)
    assert kinds_of(table) == ["begin", "abort"]
    assert len(segments_of(table)) == 1
    one.run_id = "run 2"
    one.run(0, numbered(1), numbered(2))
    assert numbers_of(table) == {"k0001": 1, "k0002": 2}
    assert sweep_everything(table) == named_segments(table)
    assert numbers_of(table) == {"k0001": 1, "k0002": 2}
    assert leases_of(table) == []


@SIZES
def test_H39_a_task_that_ran_twice_counts_once(table, url, size):
    """Only the message that reached the driver counts."""
    one = query(url, size)
    one.task(0, numbered(1, 2), attempt=0)
    message = one.task(0, numbered(1, 3), attempt=1)
    one.writer.commit([message], 0)
    assert numbers_of(table) == {"k0001": 1, "k0003": 3}
    assert sweep_everything(table) == named_segments(table)
    assert numbers_of(table) == {"k0001": 1, "k0003": 3}


def job_threads():
    """Return the threads of jobs and leases in this process."""
    named = ("job-board", "lease")
    return {thread for thread in threading.enumerate() if thread.name.startswith(named)}


def kept_threads(before):
    """Return new threads of jobs and leases that do not end by themselves."""
    for _ in range(100):
        kept = sorted(thread.name for thread in job_threads() - before)
        if not kept:
            break
        time.sleep(0.1)
    return kept


def test_processes_of_tasks_keep_no_threads_and_report_no_jobs(table, url, monkeypatch):
    """A worker of Spark outlives its tasks: none may leave a thread, or a load that has ended."""
    monkeypatch.setattr(registry, "START_S", 0.01)
    before = job_threads()
    staging = query(url, "ingest")
    for batch_id in range(3):
        staging.run(batch_id, numbered(1), numbered(2))
    with pytest.raises(reef.InvalidInputError, match="more than once"):
        staging.task(3, numbered(4, 4))
    staged = [staging.task(3, numbered(4), 0), staging.task(3, numbered(5), 1)]
    assert kept_threads(before) == []
    assert [job.kind for job in table.jobs("t")] == ["bulk load"]
    staging.writer.commit(staged, 3)
    assert table.jobs("t") == []
    assert leases_of(table) == []


def test_a_driver_that_restarts_stages_under_another_job(table, url):
    """The first run's job may be aborted by then; ids of jobs are never used twice (H35)."""
    one = query(url, "ingest")
    left = one.task(0, numbered(1))
    again = query(url, "ingest")
    again.run_id = "run 2"
    again.run(0, numbered(2))
    assert numbers_of(table) == {"k0002": 2}
    one.writer.commit([left], 0)  # the first driver comes back, as a zombie
    assert numbers_of(table) == {"k0002": 2}


# --- checkpoints ----------------------------------------------------------------------


def refused(error):
    """Return the message of a checkpoint that was refused."""
    assert error.value.kind is ErrorKind.WRONG_CHECKPOINT
    assert "adoptCheckpoint" in error.value.hint
    return error.value.message


@SIZES
def test_a_deleted_checkpoint_is_refused(table, url, size):
    """The query has another id and begins with its first micro-batch, at the same location."""
    query(url, size).run(0, numbered(1))
    fresh = query(url, size, query="q2")
    with pytest.raises(reef.InvalidInputError) as error:
        fresh.run(0, numbered(1, 2))
    assert f"checkpoint at {CHECKPOINT} was deleted or replaced: query q1" in refused(error)
    assert numbers_of(table) == {"k0001": 1}
    adopted = query(url, size, query="q2", adoptCheckpoint=True)
    adopted.run(0, numbered(1, 2))
    fresh.run(1, numbered(3))
    assert len(numbers_of(table)) == 3


@SIZES
def test_a_moved_checkpoint_is_refused(table, url, size):
    """Both copies may be in use: each would commit some of the micro-batches."""
    query(url, size).run(0, numbered(1))
    moved = query(url, size, checkpointLocation="/elsewhere/")
    with pytest.raises(reef.InvalidInputError) as error:
        moved.run(1, numbered(2))
    assert f"was at {CHECKPOINT} and is at /elsewhere now" in refused(error)
    adopted = query(url, size, checkpointLocation="/elsewhere", adoptCheckpoint=True)
    adopted.run(0, numbered(9))  # was committed: skipped, wherever the checkpoint is
    adopted.run(1, numbered(2))
    moved.run(2, numbered(3))
    assert set(numbers_of(table).values()) == {1, 2, 3}


@SIZES
def test_an_older_copy_of_a_checkpoint_is_refused(table, url, size):
    """Its next micro-batches would be skipped by their numbers, whatever rows they have."""
    for number in range(3):
        query(url, size).run(number, numbered(number))
    with pytest.raises(reef.InvalidInputError) as error:
        query(url, size).run(1, numbered(5))
    assert "an older copy" in refused(error)
    with pytest.raises(reef.InvalidInputError, match="older copy"):
        query(url, size, adoptCheckpoint=True).run(0, numbered(6))
    query(url, size).run(3, numbered(7))


@SIZES
def test_a_gap_between_micro_batches_is_refused(table, url, size):
    """The namespace was restored or re-created, or the rows went elsewhere."""
    with pytest.raises(reef.InvalidInputError) as error:
        query(url, size).run(4, numbered(1))
    assert "committed elsewhere" in refused(error)
    query(url, size, adoptCheckpoint=True).run(4, numbered(1))
    with pytest.raises(reef.InvalidInputError) as error:
        query(url, size).run(6, numbered(1))
    assert "those in between are missing" in refused(error)
    assert numbers_of(table) == {"k0001": 1}


def test_a_query_name_identifies_a_checkpoint_of_the_session(table, url):
    """Under `spark.sql.streaming.checkpointLocation` the folder has the name of the query."""
    query(url, checkpointLocation="", queryName="orders").run(0, numbered(1))
    assert "spark/q1@queryName=orders" in StreamAppender(table, "t").marks()
    with pytest.raises(reef.InvalidInputError, match="needs the option checkpointLocation"):
        query(url, checkpointLocation="").run(0, numbered(1))


@pytest.mark.parametrize(
    "option", [{"idempotencyKey": "k"}, {"createOnly": True}, {"unlessChangedSince": "1:1"}]
)
def test_options_of_a_batch_write_are_refused(table, url, option):
    """A stream has numbers instead."""
    with pytest.raises(reef.InvalidInputError, match="a stream has no option"):
        query(url, **option).run(0, numbered(1))


# --- rows -----------------------------------------------------------------------------


@SIZES
def test_operations_by_row(table, url, size):
    """A column `_op` decides, as in a batch write."""
    with table.writer("t", background=False) as writer:
        writer.upsert(numbered(1, 2, 3))
    columns = struct(id=st.StringType(), n=st.LongType(), t=st.StringType(), _op=st.StringType())
    rows = [
        {"id": "k0001", "n": 10, "t": "y", "_op": "patch"},
        {"id": "k0002", "n": None, "t": None, "_op": "delete"},
        {"id": "k0003", "n": 30, "t": None, "_op": "put"},
        {"id": "k0004", "n": 40, "t": "z", "_op": "put"},
    ]
    query(url, size, schema=columns).run(0, rows[:2], rows[2:])
    assert rows_of(table) == {
        "k0001": {"n": 10, "t": "y"},
        "k0003": {"n": 30, "t": None},
        "k0004": {"n": 40, "t": "z"},
    }
    patches = struct(id=st.StringType(), n=st.LongType())
    query(url, size, schema=patches, op="patch").run(1, [{"id": "k0004", "n": 41}])
    assert rows_of(table)["k0004"] == {"n": 41, "t": "z"}


@SIZES
def test_H38_a_key_in_two_tasks_is_refused_unless_an_order_decides(table, url, size):
    """The highest value of the order column counts, wherever the row is."""
    with pytest.raises(reef.InvalidInputError, match="more than once"):
        query(url, size).run(0, numbered(1, 2), numbered(2, 3))
    assert numbers_of(table) == {}
    ordered = query(url, size, orderBy="n")
    ordered.run_id = "run 2"
    rows = [{"id": "a", "n": n, "t": str(n)} for n in (1, 7, 3)]
    ordered.run(0, rows[:1], [rows[1], *numbered(5)], rows[2:])
    assert numbers_of(table) == {"a": 7, "k0005": 5}


MERGES = st.StructType(
    [
        st.StructField("id", st.StringType()),
        st.StructField("n", st.LongType()),
        st.StructField("t", st.StringType()),
        st.StructField("_op", st.StringType()),
        st.StructField("_expires_at", st.TimestampType()),
    ]
)


def merge_row(key, n=None, t=None, op="merge", expires=None):
    """Return a row with its operation."""
    return {"id": key, "n": n, "t": t, "_op": op, "_expires_at": expires}


@SIZES
def test_H38_all_merges_of_a_key_count(table, url, size):
    """Merges of one key are combined, in one task and across tasks, and count once."""
    counts = query(url, size, schema=MERGES, mergeOps="n=add,t=max", sortBytes=1)
    parts = [
        [merge_row("a", 1), *(merge_row(f"k{n:03}", n) for n in range(150)), merge_row("a", 10)],
        [merge_row("b", 5, "x", "put"), merge_row("a", 100, "y"), merge_row("k007", t="z")],
        [merge_row("a", t="x"), merge_row("c", op="delete")],
    ]
    for _ in range(2):
        counts.run(0, *parts)
    rows = rows_of(table)
    assert rows["a"] == {"n": 111, "t": "y"}
    assert rows["b"] == {"n": 5, "t": "x"}
    assert rows["k007"] == {"n": 7, "t": "z"}
    assert len(rows) == 152
    assert reef.jobs.verify(table, "t", deep=True).problems == []


@SIZES
@pytest.mark.parametrize("op", ["put", "delete"])
def test_H38_a_merge_and_another_row_of_its_key_are_refused(table, url, size, op):
    """Nothing says which of them comes first."""
    mixed = query(url, size, schema=MERGES, mergeOps="n=add")
    for parts in (
        [[merge_row("a", 1)], [merge_row("a", 2, op=op)]],
        [[merge_row("a", 1), merge_row("a", 2, op=op)]],
    ):
        with pytest.raises(reef.InvalidInputError, match="more than once"):
            mixed.run(0, *parts)
    assert rows_of(table) == {}


@SIZES
def test_of_several_expiries_of_merges_the_latest_counts(table, url, size):
    """Whatever the order in which tasks end."""
    counts = query(url, size, schema=MERGES, mergeOps="n=add")
    soon, late = (datetime(year, 1, 1, tzinfo=UTC) for year in (2090, 2091))
    counts.run(
        0,
        [merge_row("a", 1, expires=late), merge_row("a", 1, expires=soon), merge_row("b", 1)],
        [merge_row("a", 1, expires=soon), merge_row("b", 1, expires=late)],
    )
    with table.reader("t") as reader:
        expiries = {change.key: change.expires_at for change in reader.changes(0)}
    assert expiries == {"a": late, "b": None}


def test_merges_with_an_order_column_are_refused(table, url):
    """The order would leave one merge of each key: the others would be lost."""
    with pytest.raises(reef.InvalidInputError, match="merges of a key all count"):
        _ = query(url, schema=MERGES, mergeOps="n=add", orderBy="t").writer


@SIZES
def test_complete_mode_replaces_everything(table, url, size):
    """Rows that are not in the last micro-batch are gone, in the same commit."""
    one = query(url, size, overwrite=True)
    one.run(0, numbered(1, 2), numbered(3))
    one.run(1, numbered(2), numbered(4))
    assert numbers_of(table) == {"k0002": 2, "k0004": 4}
    one.run(1, numbered(9))
    assert numbers_of(table) == {"k0002": 2, "k0004": 4}
    reef.jobs.fold(table, "t")
    assert numbers_of(table) == {"k0002": 2, "k0004": 4}
    with pytest.raises(reef.InvalidInputError, match="puts only"):
        query(url, size, overwrite=True, op="delete").run(2, numbered(1))


@SIZES
def test_a_schema_that_grows_during_a_micro_batch(table, url, size):
    """Rows keep the columns that their tasks knew."""
    one = query(url, size)
    message = one.task(0, numbered(1))
    table.alter("t", SCHEMA.append(pa.field("more", pa.int64())))
    one.writer.commit([message], 0)
    one.run(1, numbered(2))
    assert rows_of(table)["k0001"] == {"n": 1, "t": "x", "more": None}
    assert rows_of(table)["k0002"] == {"n": 2, "t": "x", "more": None}


@SIZES
def test_a_live_writer_and_a_second_query_are_not_disturbed(table, url, size):
    """All three commit to one log; the later commit of a key wins."""
    other = query(url, size, query="q2", checkpointLocation="/checkpoints/q2")
    with table.writer("t", background=False) as writer:
        for number in range(4):
            query(url, size).run(number, numbered(1, 10 + number))
            writer.upsert(numbered(2, 20 + number, t=f"writer {number}"))
            other.run(number, numbered(1, 30 + number, t=f"other {number}"))
        writer.upsert(numbered(2))  # applies the commits of others, and goes behind them
        assert writer.get("k0001")["t"] == "other 3"
    assert len(numbers_of(table)) == 14
    marks = StreamAppender(table, "t").marks()
    assert (marks["spark/q1"], marks["spark/q2"]) == (4, 4)


@SIZES
def test_a_namespace_is_created_from_the_columns(db, url, size):
    """With the key column as an option, as in a batch write."""
    with pytest.raises(reef.NotFoundError, match="no namespace t"):
        query(url, size).run(0, numbered(1))
    query(url, size, key="id").run(0, numbered(1))
    assert rows_of(db) == {"k0001": {"n": 1, "t": "x"}}


def test_wrong_columns_are_refused_before_any_task(table, url):
    """As in a batch write, with all problems."""
    wrong = struct(id=st.StringType(), n=st.StringType(), u=st.LongType())
    with pytest.raises(reef.InvalidInputError, match="column n"):
        _ = query(url, schema=wrong).writer
    assert TABLE.names == ["id", "n", "t"]


# --- on Spark -------------------------------------------------------------------------


def replayed(checkpoint):
    """Make Spark repeat the last micro-batch, as after a crash between commit and checkpoint."""
    commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    commits[-1].unlink()
    (checkpoint / "commits" / f".{commits[-1].name}.crc").unlink()
    return int(commits[-1].name)


def test_H40_a_query_that_is_restarted(spark, url, tmp_path):
    """Spark replays its last micro-batch; a lost checkpoint is refused, with a hint."""
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    expected = streaming.write_files(folder, [range(10), range(5, 15)])
    source = streaming.read_files(spark, folder)
    streaming.start(source, url, "t", checkpoint).awaitTermination()
    db = reef.open(url)
    assert {key: row["n"] for key, row in expected.items()} == numbers_of(db)
    lsn = db.reader("t").last_lsn
    assert replayed(checkpoint) == 1
    streaming.start(source, url, "t", checkpoint).awaitTermination()
    assert db.reader("t").last_lsn == lsn, "the replay has appended nothing"
    assert kinds_of(db) == ["append", "append"]
    shutil.rmtree(checkpoint)
    with pytest.raises(StreamingQueryException, match="was deleted or replaced"):
        streaming.start(source, url, "t", checkpoint).awaitTermination()
    assert numbers_of(db) == {key: row["n"] for key, row in expected.items()}


def test_large_micro_batches_and_aggregates_on_spark(spark, url, tmp_path):
    """Tasks stage segments under one job; update mode upserts, complete mode replaces."""
    folder = tmp_path / "in"
    expected = streaming.write_files(folder, [range(4000), range(2000, 6000)])
    source = streaming.read_files(spark, folder)
    large = source.repartition(2)
    streaming.start(large, url, "t", tmp_path / "a", appendBytes=1000).awaitTermination()
    db = reef.open(url)
    assert {key: row["n"] for key, row in expected.items()} == numbers_of(db)
    assert kinds_of(db) == ["begin", "ingest"] * 2
    assert leases_of(db) == []
    for mode in ("update", "complete"):
        sums = source.groupBy(fn.col("batch").cast("string").alias("id")).agg(
            fn.sum("n").alias("n")
        )
        streaming.start(sums, url, mode, tmp_path / mode, mode=mode).awaitTermination()
        assert numbers_of(db, mode) == {"0": sum(range(4000)), "1": sum(range(2000, 6000))}
