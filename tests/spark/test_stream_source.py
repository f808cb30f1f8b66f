"""The stream of changes: exact across restarts, sweeps and limits; a gap is an error (H44)."""

import json
import random

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import reef
import reef.jobs
from reef.errors import ErrorKind
from reef.spark import ReefSource
from tests.spark import data
from tests.spark.streaming import Copy, Stream
from tests.spark.writing import leases_of, sweep_everything

OWN = ["_op", "_key", "_end_key", "_lsn", "_seq", "_touched"]


def step(db, chance, number, name="t"):
    """Change the namespace in some way: a batch, or a load that may replace everything."""
    if chance.random() < 0.3:
        first = chance.randrange(300)
        rows = data.rows(first, first + 150, text=f"load {number} ")
        replace = chance.random() < 0.3
        reef.jobs.ingest(db, name, rows, replace=replace, segment_bytes=1 << 14, group_bytes=2048)
    else:
        with db.writer(name, background=False) as writer:
            data.change(writer, chance, number)
            for _ in range(chance.randrange(3)):
                writer.merge(f"k{chance.randrange(300):07d}", {"n": reef.add(1000)})
    if chance.random() < 0.3:
        reef.jobs.fold(db, name)


def contents(db, name="t"):
    """Return all rows, as Spark gets them."""
    with db.reader(name) as reader:
        return {row["id"]: row for row in reader.to_arrow().to_pylist()}


def numbers(changes):
    """Return where change rows are in the log."""
    return [(change["_lsn"], change["_seq"]) for change in changes]


def sweep_all(db):
    """Compact, and collect everything that nothing pins."""
    reef.jobs.fold(db, "t")
    reef.jobs.compact(db, "t")
    sweep_everything(db)


# --- exact ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_that_is_killed_at_random_rebuilds_an_exact_copy(db, url, seed):
    """Micro-batches of any size are replayed, the log is swept behind the cursor."""
    chance = random.Random(seed)
    db.create("t", data.SCHEMA)
    stream, copy = Stream(url, startingLsn=0, splitBytes=5000), Copy()
    seen, sweeps = [], 0
    for number in range(16):
        step(db, chance, number)
        if chance.random() < 0.5:
            continue
        limit = ReadMaxRows(chance.randrange(1, 300))
        changes = stream.next(limit)
        if chance.random() < 0.3:  # killed before its checkpoint was written
            stream.crash()
            again = stream.next(limit)
            assert again == changes
        if changes is not None:
            seen += numbers(changes)
            copy.apply(changes)
            stream.done()
        if chance.random() < 0.3:
            stream.crash()
        if chance.random() < 0.25:
            sweep_everything(db)
            sweeps += 1
    rest = stream.run()
    copy.apply(rest)
    seen += numbers(rest)
    assert seen == sorted(set(seen)), "each change once, in order"
    assert copy.rows == contents(db)
    assert sweeps


@pytest.mark.parametrize("seed", range(2))
def test_all_rows_then_changes_from_a_namespace_under_load(db, url, seed):
    """The snapshot is swept around and written over meanwhile; it is released in the end."""
    chance = random.Random(seed)
    db.create("t", data.SCHEMA)
    for number in range(8):
        step(db, chance, number)
    stream, copy = Stream(url, starting="all", splitBytes=3000, maxRowsPerTrigger=40), Copy()
    before, rows, changes = contents(db), [], []
    for number in range(100, 130):
        found = stream.next()
        if chance.random() < 0.3:
            stream.crash()
            assert stream.next() == found
        for change in found or []:
            is_row = change["_lsn"] == stream.offsets[0]["lsn"] and not changes
            (rows if is_row else changes).append(change)
        copy.apply(found or [])
        stream.done()
        if number < 116:
            step(db, chance, number)
        if number % 7 == 0:
            sweep_all(db)
    assert {row["id"] for row in rows} == set(before)
    assert len(rows) == len(before)
    assert len({json.dumps(offset) for offset in stream.offsets if "key" in offset}) > 1
    copy.apply(stream.run())
    assert copy.rows == contents(db)
    assert {change["_lsn"] > stream.offsets[0]["lsn"] for change in changes} == {True}
    stream.stop()
    assert db.snapshots("t") == []
    assert leases_of(db) == []


def test_a_stream_is_the_changes_of_a_batch(db, url):
    """The same rows in the same order, with images too, whatever the micro-batches are."""
    chance = random.Random(5)
    db.create("t", data.SCHEMA)
    for number in range(10):
        step(db, chance, number)
    expected = data.Planned(url, "t", readChanges=True, images=True).table().to_pylist()
    options = {"startingLsn": 0, "images": True, "splitBytes": 3000}
    found = Stream(url, **options).run(ReadMaxRows(40))
    assert found == expected
    reading = Stream(url, starting="all", images=True).run()
    assert {row["_key"].decode(): row["_after"] for row in reading} == contents(db)
    assert {row["_before"] for row in reading} == {None}


def test_starting_points(db, url):
    """An LSN, a generation, a snapshot, now."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 5))
        first = writer.upsert(data.rows(5, 7)).lsn
        snapshot = db.snapshot("t", name="monday")
        writer.upsert(data.rows(7, 10))
        now = Stream(url, starting="now")
        assert now.next() == []
        now.done()
        later = writer.upsert(data.rows(20, 22)).lsn
    every = Stream(url, startingLsn=0).run()
    assert [row["n"] for row in every] == [*range(10), 20, 21]
    assert numbers(Stream(url, startingLsn=first).run()) == numbers(every)[7:]
    by_generation = Stream(url, startingGeneration=snapshot.generation).run()
    assert numbers(by_generation) == numbers(every)[7:]
    rows = Stream(url, startingSnapshot="monday").run()
    assert [row["n"] for row in rows] == [*range(10), 20, 21]
    assert {row["_lsn"] for row in rows[:7]} == {first}
    assert numbers(now.run()) == [(later, 0), (later, 1)]
    assert [snapshot.name for snapshot in db.snapshots("t")] == ["monday"]


def test_the_replay_of_the_first_micro_batch_begins_where_it_began(db, url):
    """Its start is not in Spark's checkpoint: `now` and `all` must not be resolved again."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        for starting, expected in (("now", 0), ("all", 8)):
            stream = Stream(url, starting=starting)
            if starting == "all":
                writer.upsert(data.rows(0, 5))
            assert len(stream.next()) == expected
            writer.upsert(data.rows(5, 8))
            stream.crash()
            assert len(stream.next()) == expected
            stream.done()
            assert [row["n"] for row in stream.run()] == [5, 6, 7]


def test_expiry_travels_with_rows_and_changes(db, url):
    """A copy can let its rows expire at the same time."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 2), ttl_s=1000)
    for start in ({"starting": "all"}, {"startingLsn": 0}):
        assert all(row["_expires_at"] is not None for row in Stream(url, **start).run())


# --- admission control ----------------------------------------------------------------


def test_micro_batches_keep_to_their_limit(db, url):
    """Batches of the log are whole; a load is divided between its pages, for tasks too."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        for number in range(6):
            writer.upsert(data.rows(number * 10, number * 10 + 10))
    reef.jobs.ingest(db, "t", data.rows(0, 400), group_bytes=1024)
    stream = Stream(url, startingLsn=0, maxRowsPerTrigger=25, splitBytes=2000)
    sizes, parts = [], []
    while (rows := stream.next()) is not None:
        sizes.append(len(rows))
        parts.append(len(stream.parts))
        stream.done()
    assert sum(sizes) == 460
    assert sizes[:3] == [20, 20, 20]
    assert max(sizes[3:]) <= 25
    assert max(parts) > 1
    assert len(stream.next(ReadAllAvailable()) or []) == 0
    every = Stream(url, startingLsn=0, maxRowsPerTrigger=25)
    assert len(every.next(ReadAllAvailable())) == 460, "the option does not count"
    small = Stream(url, startingLsn=0, maxBytesPerTrigger=1)
    assert len(small.next()) == 10, "at least one object"
    rows, sizes = Stream(url, starting="all", maxRowsPerTrigger=100), []
    while (found := rows.next()) is not None:
        sizes.append(len(found))
        rows.done()
    assert sum(sizes) == 400
    assert max(sizes) <= 100
    assert len(sizes) < 10


def test_available_now_ends_where_the_log_ended(db, url):
    """Rows written since are for the next run."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 5))
        stream = Stream(url, startingLsn=0, maxRowsPerTrigger=2)
        stream.reader.prepareForTriggerAvailableNow()
        last = writer.upsert(data.rows(5, 9)).lsn
        assert [row["n"] for row in stream.run()] == [0, 1, 2, 3, 4]
        assert stream.reader.reportLatestOffset() == {"lsn": last}
    stream.start()
    stream.reader.prepareForTriggerAvailableNow()
    assert [row["n"] for row in stream.run()] == [5, 6, 7, 8]
    rows = Stream(url, starting="all")
    rows.reader.prepareForTriggerAvailableNow()
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(9, 10))
        assert len(rows.next()) == 10, "the snapshot is taken later"
        rows.done()
        writer.upsert(data.rows(10, 11))
        assert rows.next() is None, "the query ends all the same"


def test_spark_4_1_passes_no_position(db, url):
    """The cap is our own option; a stream that is resumed reads all there is, once."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        for number in range(4):
            writer.upsert(data.rows(number * 10, number * 10 + 10))
        stream = Stream(url, starting="all", cursor="mine", maxRowsPerTrigger=10)
        reader = stream.reader
        offsets = [reader.initialOffset(), reader.latestOffset()]
        assert "key" not in offsets[1], "all rows are one micro-batch"
        assert len(reader.partitions(*offsets)) == 1
        for number in range(4, 8):
            writer.upsert(data.rows(number * 10, number * 10 + 10))
        offsets.append(reader.latestOffset())
        assert offsets[2]["lsn"] == offsets[1]["lsn"] + 1, "capped"
        reader.partitions(*offsets[1:])
        reader.commit(offsets[2])
    stream.start()
    end = stream.reader.latestOffset()
    parts = stream.reader.partitions(offsets[2], end)
    rows = [row for part in parts for b in stream.reader.read(part) for row in b.to_pylist()]
    assert [row["n"] for row in rows] == [*range(50, 80)]
    stream.reader.commit(end)
    assert db.cursors("t") == {"mine": end["lsn"]}


# --- cursors --------------------------------------------------------------------------


def test_H44_fences_move_the_cursor(db, url):
    """They are objects of the log without rows."""
    db.create("t", data.SCHEMA)
    for _ in range(5):
        db.writer("t", background=False).close()
    stream = Stream(url, startingLsn=0, cursor="mine")
    assert stream.next() == []
    stream.done()
    stream.stop()
    assert stream.next() is None
    with db.writer("t", background=False) as writer:
        lsn = writer.upsert(data.rows(0, 1)).lsn
    assert numbers(stream.run()) == [(lsn, 0)]
    stream.stop()
    before = stream.offsets[-2]["lsn"]
    assert db.cursors("t") == {"mine": before}, "moved when the next micro-batch is planned"


def test_H44_the_cursor_holds_the_sweep_back_and_a_swept_position_is_an_error(db, url):
    """A dropped cursor lets the log go: the stream says so, and what to do."""
    chance = random.Random(3)
    db.create("t", data.SCHEMA)
    stream = Stream(url, startingLsn=0)
    for number in range(6):
        step(db, chance, number)
    rows = stream.next(ReadMaxRows(20))
    stream.done()
    sweep_all(db)
    stream.crash()
    rows += stream.next(ReadMaxRows(20))
    stream.done()
    (name,) = db.cursors("t")
    assert name.startswith("spark-")
    db.drop_cursor("t", name)
    sweep_all(db)
    stream.crash()
    with pytest.raises(reef.NotFoundError, match="garbage-collected") as error:
        stream.run()
    assert error.value.kind is ErrorKind.COLLECTED
    assert 'empty checkpoint and starting="all"' in error.value.hint


def test_H44_a_swept_start_is_an_error(db, url):
    """Never a silent start somewhere else."""
    chance = random.Random(3)
    db.create("t", data.SCHEMA)
    for number in range(6):
        step(db, chance, number)
    sweep_all(db)
    for start in ({"startingLsn": 1}, {"startingGeneration": 1}, {"startingSnapshot": "gone"}):
        with pytest.raises(reef.NotFoundError) as error:
            Stream(url, **start).next()
        assert error.value.kind is ErrorKind.COLLECTED
    with pytest.raises(reef.InvalidInputError, match="past the end of the log"):
        Stream(url, startingLsn=10_000).next()


def test_a_stream_that_processes_nothing_leaves_no_cursor(db, url):
    """It was stopped before its first micro-batch was committed."""
    db.create("t", data.SCHEMA)
    stream = Stream(url, starting="all")
    stream.next()
    assert len(db.cursors("t")) == len(db.snapshots("t")) == 1
    stream.reader.stop()
    assert db.cursors("t") == {}
    assert db.snapshots("t") == []


def test_the_cursor_is_moved_now_and_then(db, url):
    """Each time is a manifest; an orderly end moves it to the last position."""
    db.create("t", data.SCHEMA)
    stream = Stream(url, starting="now", cursor="mine", cursorSeconds=3600)
    lsns = []
    with db.writer("t", background=False) as writer:
        for number in range(4):
            stream.next()
            stream.done()
            lsns.append(writer.upsert(data.rows(number, number + 1)).lsn)
    stream.reader.commit(stream.offsets[-1])
    moved = db.cursors("t")["mine"]
    assert moved < lsns[-2]
    stream.stop()
    assert db.cursors("t")["mine"] == lsns[-2]


def test_a_dropped_and_recreated_namespace_is_an_error(db, url):
    """Its log begins again: the position means nothing in it."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 5))
    stream = Stream(url, startingLsn=0)
    stream.run()
    db.drop("t")
    db.create("t", data.SCHEMA)
    stream.start()
    with pytest.raises(reef.NotFoundError, match="dropped and created again"):
        stream.run()


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"starting": "then"},
        {"startingLsn": "x"},
        {"startingGeneration": 0},
        {"starting": "all", "startingLsn": 0},
        {"starting": "all", "where": "n > 5"},
        {"starting": "all", "maxRowsPerTrigger": 0},
    ],
)
def test_wrong_options_are_refused(db, url, options):
    """A stream of changes has options of its own."""
    db.create("t", data.SCHEMA)
    with pytest.raises(reef.InvalidInputError):
        Stream(url, **options)


def test_a_stream_says_where_it_begins(db, url):
    """Without it, Spark would get rows in place of changes."""
    db.create("t", data.SCHEMA)
    source = ReefSource({"path": url, "namespace": "t"})
    with pytest.raises(reef.InvalidInputError, match="needs one of the options starting"):
        source.streamReader(source.schema())


def test_an_offset_of_another_source_is_refused(db, url):
    """A checkpoint belongs to one query."""
    db.create("t", data.SCHEMA)
    stream = Stream(url, starting="all")
    with pytest.raises(reef.InvalidInputError, match="not an offset") as error:
        stream.reader.latestOffset({"partition": 3}, ReadAllAvailable())
    assert error.value.kind is ErrorKind.WRONG_CHECKPOINT
