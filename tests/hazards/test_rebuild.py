"""Rebuild: H28, H37, H49, H54, and the processes that outlive a manifest."""

import msgspec
import pyarrow as pa
import pytest

from reef.engine.log.log import Log
from reef.engine.rows.input import to_ops
from reef.errors import ConflictError, FencedError
from reef.formats.coding import crc32c
from reef.formats.segment import END, MAGIC
from reef.formats.wal_object import BatchHeader, OpKind, WalHeader, WalKind, WalObject, encode_ops
from reef.jobs import BulkJob, fold, ingest, rebuild
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.head import Publisher
from tests.support.bulk_jobs import ingest as ingest_by_hand
from tests.support.rebuild import (
    EVENTS,
    NAME,
    compact_these,
    dying,
    head_of,
    open_mortal,
    rebuilt,
    rows_of,
    segment_ids,
    sweep_now,
    without_manifests,
)
from tests.support.segment_checks import check_segment

SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64())])


@pytest.fixture
def db():
    """An empty namespace with a column."""
    found = open_mortal()
    found.create(NAME, SCHEMA)
    return found


@pytest.fixture
def writer(db):
    """Its writer, behind which nothing happens by itself."""
    with db.writer(NAME, background=False) as found:
        yield found


def put(writer, **values):
    """Upsert rows by their keys."""
    writer.upsert([{"id": key, "x": x} for key, x in values.items()])


def folded(db, **settings):
    """Fold, and return the ids of the segments that came in."""
    before = {segment.id for segment in head_of(db).segments}
    fold(db, NAME, **settings)
    return [segment.id for segment in head_of(db).segments if segment.id not in before]


def merge(db, *ids, **settings):
    """Merge segments, and return the ids of the outputs."""
    before = {segment.id for segment in head_of(db).segments}
    compact_these(db, lambda segment: segment.id in ids, **settings)
    return [segment.id for segment in head_of(db).segments if segment.id not in before]


def check(db, *, problems=()):
    """A bucket without manifests shows the rows that it has with them."""
    report = rebuild(db, NAME)
    assert (report.rows_equal, report.problems) == (True, problems)
    copy, report = rebuilt(db)
    assert rows_of(copy) == rows_of(db)
    assert report.problems == problems
    return report


def staged(job, **values):
    """Stage rows for a job."""
    rows = [{"id": key, "x": x} for key, x in values.items()]
    return job.staging.stage([sorted_rows(staged_rows(to_ops(rows, job.schema, kind=OpKind.PUT)))])


# --- H49: objects in the bucket that do not count ------------------------------------


def test_h49_a_pinned_ancestor_does_not_bring_deleted_rows_back(db, writer):
    """Only the snapshot's segment has the row, and the delete is merged away: only the
    LSNs that the merged segment covers show it."""
    put(writer, a=1, b=1)
    (pinned,) = folded(db)
    db.snapshot(NAME)
    writer.delete("a")
    folded(db)
    merge(db, *(segment.id for segment in head_of(db).segments))
    sweep_now(db)
    assert pinned in segment_ids(db)
    report = check(db)
    assert report.left_out == (pinned,)


def test_h49_nor_where_nothing_at_all_is_left(db, writer):
    """A merge of which no row is left says so in an empty segment."""
    put(writer, a=1)
    (pinned,) = folded(db)
    db.snapshot(NAME)
    writer.delete("a")
    folded(db)
    merge(db, *(segment.id for segment in head_of(db).segments))
    put(writer, b=1)
    folded(db)
    sweep_now(db)
    assert segment_ids(db) == {pinned, *(segment.id for segment in head_of(db).segments)}
    assert rows_of(db) == [{"id": "b", "x": 1}]
    check(db)


def test_h49_a_pinned_grandparent_does_not_either(db, writer):
    """Two merges later, and the segments between them are swept."""
    put(writer, a=1, b=1)
    (pinned,) = folded(db)
    db.snapshot(NAME)
    writer.delete("a")
    (between,) = merge(db, pinned, *folded(db))
    put(writer, c=1)
    (last,) = merge(db, between, *folded(db))
    sweep_now(db)
    assert segment_ids(db) == {pinned, last}
    check(db)


def test_h49_a_part_of_a_merge_may_be_empty(db, writer):
    """Nothing was left of its range, which an empty segment says."""
    put(writer, **{key: 1 for key in "abcdef"})
    (pinned,) = folded(db, group_bytes=1)
    db.snapshot(NAME)
    writer.delete_range("a", "c")
    outputs = merge(db, pinned, *folded(db), bytes_each=60)
    assert len(outputs) > 2
    assert 0 in [segment.rows for segment in head_of(db).segments]
    put(writer, z=1)
    folded(db)
    sweep_now(db)
    assert len(rows_of(db)) == 5
    check(db)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("keys", ["a", "ab"])
def test_h49_a_bulk_load_that_was_merged_and_swept_is_not_lost(db, writer, keys, replace):
    """H49: the merged segment covers all of its keys, be it a single one."""
    put(writer, z=1)
    ingest(db, NAME, [{"id": key, "x": 2} for key in keys], replace=replace)
    fold(db, NAME)
    compact_these(db, lambda _: True)
    put(writer, y=3)  # a newer generation, so that the older ones can go
    sweep_now(db)
    check(db)


def test_h49_nor_is_an_ingest_lost_that_went_into_such_a_part(db, writer):
    """Its segment was merged away with a delete, and swept: nothing is missing."""
    put(writer, **{key: 1 for key in "cdef"})
    with BulkJob(db, NAME) as job:
        job.commit(staged(job, a=5, b=5))
    writer.refresh()
    writer.delete_range("a", "c")
    folded(db, group_bytes=1)
    outputs = merge(db, *(segment.id for segment in head_of(db).segments), bytes_each=60)
    assert len(outputs) > 2
    assert 0 in [segment.rows for segment in head_of(db).segments]
    sweep_now(db)
    check(db)


def test_h49_a_merged_load_that_no_sweep_has_deleted_yet_does_not_count(db, writer):
    """Its segment is superseded: it would bring a row back whose delete was merged away."""
    load = ingest(db, NAME, [{"id": "a", "x": 1}, {"id": "b", "x": 1}])
    writer.refresh()
    writer.delete("a")
    folded(db)
    inputs = {segment.id for segment in head_of(db).segments if segment.visible_lsn == load.lsn}
    merge(db, *(segment.id for segment in head_of(db).segments))
    report = check(db)
    assert inputs <= set(report.left_out)


def test_h49_staged_segments_do_not_count(db, writer):
    """Neither those of a job that is open nor those of one that was aborted."""
    put(writer, a=1)
    folded(db)
    with BulkJob(db, NAME) as gone:
        staged(gone, a=2, b=2)
    job = BulkJob(db, NAME)
    segments = staged(job, a=3, c=3)
    writer.refresh()
    put(writer, d=1)
    folded(db)
    report = check(db)
    assert set(report.staged) >= {segment.id for segment in segments}
    assert report.open_jobs == (job.id,)
    job.abort()


def test_h28_segments_staged_by_an_open_job_survive_rebuild_and_sweep(db, writer):
    """Its begin was folded; the rebuilt manifest knows of it."""
    put(writer, a=1)
    job = BulkJob(db, NAME)
    segments = staged(job, b=2)
    writer.refresh()
    put(writer, a=1)
    folded(db)
    writer.close()
    lose_manifests(db)
    rebuild(db, NAME, apply=True)
    sweep_now(db, silent_job_s=1e9)
    assert [open_job.id for open_job in head_of(db).open_jobs] == [job.id]
    job.commit(segments)
    assert rows_of(db) == [{"id": "a", "x": 1}, {"id": "b", "x": 2}]
    check(db)


def test_h49_an_ingest_that_does_not_count_does_not_count(db, writer):
    """Without a begin, after an abort, or with a key that was committed before."""
    name = "plain"
    db.create(name)
    for given in ({"begin": False}, {"abort": True}, {"key": "k"}, {"key": "k"}):
        ingest_by_hand(db.store, name, {b"a": repr(given).encode(), b"b": b"x"}, **given)
    for _ in range(2):  # before and after a fold
        copy = without_manifests(db)
        report = rebuild(copy, name, apply=True)
        with copy.reader(name) as reader:
            assert dict(reader.scan()) == {b"a": b"{'key': 'k'}", b"b": b"x"}
        assert len(report.staged) == 3
        fold(db, name)


def test_h54_an_ingest_that_no_manifest_names_counts(db, writer):
    """It is in the log, and a sweep leaves it alone; so does a rebuild before the fold."""
    put(writer, a=1)
    folded(db)
    with BulkJob(db, NAME) as job:
        job.commit(staged(job, a=5, z=5))
    writer.refresh()
    sweep_now(db)
    check(db)
    put(writer, b=2)
    folded(db)
    check(db)


# --- H37: jobs that died, and their rivals ----------------------------------------------


def test_h37_siblings_of_merged_siblings(db, writer):
    """One output of a merge was merged again, the other was not: both count, through it."""
    put(writer, **{key: 1 for key in "abcdef"})
    first = merge(db, *folded(db, group_bytes=1), bytes_each=60)
    assert len(first) >= 2
    put(writer, a=2)
    again = merge(db, first[0], *folded(db), bytes_each=10_000)
    check(db)
    sweep_now(db)
    assert segment_ids(db) == {*again, *first[1:]}
    check(db)


@pytest.mark.parametrize("lost", [0, 1])
def test_h37_a_merge_that_died_half_way(db, writer, lost):
    """Some of its outputs are there: its inputs count, and none of them."""
    put(writer, **{key: 1 for key in "abcdef"})
    (first,) = folded(db, group_bytes=1)
    writer.delete("a")
    (second,) = folded(db)
    left = dying(db, lambda: merge(db, first, second, bytes_each=60), publishes=1)
    assert len(left) >= 2
    db.store.delete(EVENTS.segment(sorted(left)[lost]))
    report = check(db)
    assert set(report.segments) == {first, second}


def test_h37_a_fold_that_died_half_way(db, writer):
    """The log has it all: the piece that was written does not move the floor."""
    put(writer, **{key: 1 for key in "abcdef"})
    left = dying(db, lambda: folded(db, segment_bytes_max=30))
    assert len(left) >= 2
    db.store.delete(EVENTS.segment(min(left)))
    report = check(db)
    assert report.segments == ()


def test_h37_a_whole_fold_or_merge_that_was_never_published(db, writer):
    """Its rows equal those of its inputs, and may replace them."""
    put(writer, a=1, b=1)
    dying(db, lambda: folded(db))
    check(db)
    folded(db)
    writer.delete("a")
    folded(db)
    dying(db, lambda: merge(db, *(s.id for s in head_of(db).segments)), publishes=1)
    check(db)


@pytest.mark.parametrize("swept", [False, True])
def test_h37_rivals_that_share_an_input(db, writer, swept):
    """The first died with the row and its delete merged away; the second took the row along.

    Both together would bring the row back. The first one's output arrives after the sweep.
    """
    put(writer, a=1, b=1)
    (row,) = folded(db)
    writer.delete("a")
    (delete,) = folded(db)
    put(writer, c=1)
    (other,) = folded(db)
    (orphan,) = dying(db, lambda: merge(db, row, delete), publishes=1)
    body = db.store.get(EVENTS.segment(orphan))
    merge(db, row, other)
    if swept:
        sweep_now(db)
        db.store.put(EVENTS.segment(orphan), body)
    assert rows_of(db) == [{"id": "b", "x": 1}, {"id": "c", "x": 1}]
    report = check(db)
    assert orphan in report.left_out


def test_h37_the_later_plan_that_was_overtaken(db, writer):
    """A publish without a response lands after the next plan: that job is the one to be left out,
    though it was planned later, since its inputs are swept."""
    put(writer, a=1, b=1)
    (row,) = folded(db)
    writer.delete("a")
    (delete,) = folded(db)
    put(writer, c=1)
    (other,) = folded(db)
    (orphan,) = dying(db, lambda: merge(db, row, delete), publishes=1)
    body = _planned_later(db, orphan)
    merge(db, row, other)
    put(writer, d=1)
    folded(db)
    sweep_now(db)
    db.store.put(EVENTS.segment(orphan), body)
    assert [row["id"] for row in rows_of(db)] == ["b", "c", "d"]
    report = check(db)
    assert orphan in report.left_out


def _planned_later(db, segment_id):
    """Return a segment's bytes with a footer that names a later generation."""
    body = db.store.get(EVENTS.segment(segment_id))
    footer = check_segment(body, segment_id).footer
    length, _, _ = END.unpack(body[-END.size :])
    later = msgspec.msgpack.encode(msgspec.structs.replace(footer, generation=1000))
    front = body[: -END.size - length]
    return front + later + END.pack(len(later), crc32c(later), MAGIC)


# --- the log ------------------------------------------------------------------------------


def test_a_fold_without_output_is_not_the_end_of_the_log(db, writer):
    """Patches over nothing leave no segment, and are swept: the log continues after the gap."""
    put(writer, a=1)
    folded(db)
    for _ in range(3):
        writer.patch([{"id": "zz", "x": 1}])
    folded(db)
    sweep_now(db)
    put(writer, b=2)
    put(writer, c=3)
    assert len(rows_of(db)) == 3
    check(db)


def test_objects_behind_a_put_in_flight_do_not_count(db, writer):
    """As for every reader: its writer has no response yet, and the object may still be void."""
    put(writer, a=1)
    log = Log(db.store, EVENTS)
    last = log.filled(1)[-1].lsn
    seen = log.read(last).header
    ops = to_ops([{"id": "x", "x": 9}], head_of(db).schema, kind=OpKind.PUT)
    header = WalHeader(
        last + 2,
        WalKind.BATCHES,
        seen.epoch,
        seen.writer_id,
        db.store.runtime.ulid(),
        seen.created_at_ms,
        after=(seen.write_id, db.store.runtime.ulid()),
        schema_id=1,
        batches=(BatchHeader(1),),
    )
    assert log.fill(last + 2, WalObject.encode(header, (encode_ops(ops),))).landed
    report = check(db)
    assert (report.rows, report.last_lsn) == (1, last)


def test_a_void_object_just_above_the_floor_stays_void(db, writer):
    """The write ids below the floor are known from the rest of the log."""
    put(writer, a=1)
    log = Log(db.store, EVENTS)
    seen = log.read(log.filled(1)[-1].lsn).header
    with BulkJob(db, NAME):  # begin and abort: two slots that the writer did not expect
        pass
    writer.refresh()
    folded(db)
    ops = to_ops([{"id": "x", "x": 9}], head_of(db).schema, kind=OpKind.PUT)
    lsn = head_of(db).wal_floor
    header = WalHeader(
        lsn,
        WalKind.BATCHES,
        seen.epoch,
        seen.writer_id,
        db.store.runtime.ulid(),
        seen.created_at_ms,
        after=(seen.write_id, db.store.runtime.ulid(), db.store.runtime.ulid()),
        schema_id=1,
        batches=(BatchHeader(1),),
    )
    assert log.fill(lsn, WalObject.encode(header, (encode_ops(ops),))).landed
    assert rows_of(db) == [{"id": "a", "x": 1}]
    check(db)


# --- processes that continue with a lost manifest -------------------------------------------


def lose_manifests(db):
    """Delete every manifest there is."""
    db.store.delete_many([info.key for info in db.store.list(EVENTS.manifests)])


def test_a_publish_of_the_lost_chain_lands_below_the_head(db, writer):
    """Its process finds that it was fenced, and its manifest never becomes the head."""
    put(writer, a=1)
    late = Publisher(db.store, EVENTS)
    seen = late.heads.find()
    lose_manifests(db)
    rebuild(db, NAME, apply=True)
    head = head_of(db)
    assert head.generation > seen.manifest.generation + 1000
    late.publish(lambda m: msgspec.structs.replace(m, max_parallel_writes=3))
    assert head_of(db).max_parallel_writes == 1
    assert rows_of(db) == [{"id": "a", "x": 1}]


def test_a_new_writer_fences_the_one_from_before(db, writer):
    """Epochs continue above all that the log names, whatever was raised and never fenced."""
    put(writer, a=1)
    lose_manifests(db)
    rebuild(db, NAME, apply=True)
    with db.writer(NAME, background=False) as new:
        put(new, b=2)
        with pytest.raises((FencedError, ConflictError)):
            put(writer, c=3)
        assert [row["id"] for _, row in new.scan()] == ["a", "b"]
    check(db)


def test_a_schema_that_grew_behind_the_fences_is_in_the_log(db, writer):
    """Rows of columns that no fence and no segment knows yet are not lost with the manifests."""
    put(writer, a=1)
    db.alter(NAME, SCHEMA.append(pa.field("y", pa.int64())))
    writer.refresh()
    writer.upsert([{"id": "b", "x": 2, "y": 3}])
    check(db)


def test_no_fresh_namespace_is_made_over_a_log_without_manifests(db, writer):
    """It would hide every row there is; rebuild is the way."""
    from reef.errors import CorruptionError

    put(writer, a=1)
    copy = without_manifests(db)
    for use in (copy.writer, lambda name: copy.create(name, SCHEMA)):
        with pytest.raises(CorruptionError, match="a log and no manifest") as raised:
            use(NAME)
        assert "rebuild" in raised.value.hint
    rebuild(copy, NAME, apply=True)
    assert rows_of(copy) == rows_of(db)
