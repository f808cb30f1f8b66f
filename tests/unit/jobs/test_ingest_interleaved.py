"""Segments of one job that overlap, and jobs that end in another process than they began in."""

import pickle
import random

import pyarrow as pa
import pytest

import reef
from reef.engine.log.log import Log
from reef.engine.read.scan import Projection
from reef.engine.rows.input import to_ops
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, fold, sweep
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.jobs.ingest.staging import overlapping_clusters, shared_keys
from reef.manifest.roots import find_generation_leases
from reef.paths import Namespace
from reef.types import KeyRange
from tests.support.sweep_world import DAY_S, NAME, World

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])
NAMES = Namespace("t")


@pytest.fixture
def db(tmp_path):
    """Give a database with a table."""
    db = reef.open(str(tmp_path))
    db.create("t", SCHEMA)
    return db


def stage(job, keys, n=0):
    """Stage puts of these keys."""
    ops = to_ops([{"id": key, "n": n} for key in keys], job.schema, kind=OpKind.PUT)
    return job.staging.stage([sorted_rows(staged_rows(ops))])


def rows(db):
    """Return all rows as a reader sees them."""
    return {key: row["n"] for key, row in db.reader("t").scan()}


def kinds(db):
    """Return the objects of the log."""
    log = Log(db.store, NAMES)
    return [str(log.read(slot.lsn).header.kind) for slot in log.filled(1)]


def leases(db):
    """Return the leases there are."""
    return list(find_generation_leases(db.store, NAMES, db.store.now(), 0.0))


# --- overlap --------------------------------------------------------------------------


def test_interleaved_segments_without_a_common_key_are_one_commit(db):
    """Odd and even keys, staged apart, read as one; before and after a fold, and backwards."""
    db.writer("t").upsert([{"id": "k5", "n": -1}, {"id": "zz", "n": -1}])
    with BulkJob(db, "t", segment_bytes=2048, group_bytes=512) as job:
        parts = [stage(job, [f"k{n}" for n in range(at, 300, 3)], at) for at in range(3)]
        job.commit([segment for part in parts for segment in part], interleaved=True)
    expected = {f"k{n}": n % 3 for n in range(300)} | {"zz": -1}
    for _ in range(2):
        assert rows(db) == expected
        assert db.reader("t").get("k5")["n"] == 2
        backwards = [key for key, _ in db.reader("t").scan(reverse=True)]
        assert backwards == sorted(expected, reverse=True)
        fold(db, "t")


def test_H38_a_key_that_is_in_two_segments_is_refused(db):
    """H38: the commit finds it, however deep in the segments, and names it; nothing is seen."""
    job = BulkJob(db, "t", group_bytes=512)
    chance = random.Random(1)
    keys = [f"{chance.randrange(10**6):06}" for _ in range(2000)]
    keys = list(dict.fromkeys(keys))
    one, two = keys[::2], [*keys[1::2], keys[700]]
    staged = [*stage(job, one), *stage(job, two), *stage(job, ["zzz"])]
    found = shared_keys(db.store, NAMES, job.schema, staged)
    assert (found.count, found.examples) == (1, (keys[700].encode(),))
    with pytest.raises(reef.InvalidInputError, match=f"1 keys .*{keys[700]}"):
        job.commit(staged, interleaved=True)
    job.abort()
    assert kinds(db) == ["begin", "abort"]
    assert rows(db) == {}


def test_bounds_that_touch_count_as_overlap(db):
    """The last key of one segment may be the first of the next."""
    with BulkJob(db, "t") as job:
        staged = [*stage(job, ["a", "b"]), *stage(job, ["b", "c"])]
        with pytest.raises(reef.InvalidInputError, match="b'b'"):
            job.commit(staged, interleaved=True)


def test_segments_that_do_not_overlap_are_not_read(db):
    """Bounds alone show it where they are disjoint; a tombstone without rows hides nothing."""
    with BulkJob(db, "t", replace=KeyRange()) as job:
        apart = [*stage(job, ["a", "c"]), *stage(job, ["d"]), *stage(job, ["x", "z"])]
        cover = job.staging.stage([], KeyRange())
        assert overlapping_clusters([*apart, *cover]) == []
        between = stage(job, ["b"])
        assert overlapping_clusters([*apart, *between]) == [[apart[0], *between]]
        job.abort()


@pytest.mark.parametrize("interleaved", [False, True])
def test_everything_is_replaced_by_a_segment_without_rows(db, interleaved):
    """Its range tombstone hides the rows from before, and none of the load's own rows."""
    writer = db.writer("t")
    writer.upsert([{"id": key, "n": 1} for key in "abcxyz"])
    fold(db, "t")
    writer.upsert([{"id": "d", "n": 2}])
    with BulkJob(db, "t", replace=KeyRange()) as job:
        staged = [*stage(job, ["a", "m"], 7), *stage(job, ["n", "q"], 8)]
        staged += job.staging.stage([], KeyRange())
        job.commit(staged, interleaved=interleaved)
    expected = {"a": 7, "m": 7, "n": 8, "q": 8}
    for _ in range(2):
        assert rows(db) == expected
        assert db.reader("t").get("x") is None
        assert db.reader("t").get("m")["n"] == 7
        fold(db, "t")
    writer.upsert([{"id": "b", "n": 9}])
    assert rows(db) == {**expected, "b": 9}
    ops = [change.op for change in db.reader("t").changes(after_lsn=3)]
    assert ops == ["delete_range", *["put"] * 5], "the replaced range is deleted first"


def test_conditions_still_skip_groups_below_a_cover_without_rows(db):
    """A segment without rows has nothing that a row could hide."""
    with BulkJob(db, "t", replace=KeyRange(), group_bytes=512) as job:
        ops = to_ops([{"id": f"{n:05}", "n": n} for n in range(2000)], job.schema, kind=OpKind.PUT)
        staged = job.staging.stage([staged_rows(ops)]) + job.staging.stage([], KeyRange())
        job.commit(staged)
    reader = db.reader("t")
    assert reader.scan_arrow(where="n >= 1990").read_all().num_rows == 10
    view = reader._tail.view()
    projection = Projection.of(view.manifest.schema, None, "n >= 1990")
    scan = view.scan(KeyRange(), 0, projection=projection)
    data = next(entry for entry in scan.overlapping() if entry.rows)
    groups = len(view.segments.tail(data).index)
    assert len(scan.needless(data, scan.overlapping())) >= groups - 2


# --- from process to process ------------------------------------------------------------


def test_a_job_can_be_ended_by_another_process(db):
    """Spark plans and commits in two processes: the handle goes from one to the other."""
    job = BulkJob(db, "t", idempotency_key="k", lease_ttl_s=3600.0)
    sent = pickle.dumps((job.handle, stage(job, ["a"], 3)))
    del job
    handle, staged = pickle.loads(sent)
    assert len(leases(db)) == 1
    receipt = BulkJob.resume(handle).commit(staged)
    assert (receipt.lsn, receipt.replayed, receipt.idempotency_key) == (2, False, "k")
    assert rows(db) == {"a": 3}
    assert leases(db) == [], "the old lease and the new one are gone"
    assert kinds(db) == ["begin", "ingest"]
    again = BulkJob(db, "t", idempotency_key="k").handle
    assert again.receipt.replayed
    assert BulkJob.resume(again).commit([]).lsn == 2


def test_H31_an_abort_by_a_third_process_changes_nothing_after_a_commit(db):
    """H31: Spark aborts with all messages after a commit that raised; the log decides."""
    handle = BulkJob(db, "t").handle
    job = BulkJob.resume(handle)
    staged = stage(job, ["a"])
    job.commit(staged)
    BulkJob.resume(handle).abort()
    assert kinds(db) == ["begin", "ingest"]
    assert rows(db) == {"a": 0}
    assert leases(db) == []
    assert db.store.head(NAMES.segment(staged[0].id)).size == staged[0].size


def test_letting_go_keeps_the_job_open(db):
    """The process that could not commit holds nothing; the one that aborts still can."""
    job = BulkJob.resume(BulkJob(db, "t").handle)
    job.let_go()
    assert leases(db) == []
    assert kinds(db) == ["begin"]
    BulkJob.resume(job.handle).abort()
    assert kinds(db) == ["begin", "abort"]


def test_H28_a_job_without_heartbeat_lives_as_long_as_its_lease():
    """H28: between Spark's processes only the lease's own time and its tasks protect a job."""
    world = World()
    world.db.create(NAME)
    job = world.run(lambda: BulkJob(world.db, NAME, lease_ttl_s=6 * 3600.0))
    handle = job.handle
    ops = to_ops([{"id": b"a", "value": b"v"}], job.schema, kind=OpKind.PUT)
    staged = world.run(lambda: job.staging.stage([staged_rows(ops)]))
    job._lease._released = True  # the process has gone: no heartbeat, no release
    world.advance(5 * 3600)
    report = world.run(lambda: sweep(world.db, NAME, apply=True))
    assert report.jobs_reaped == 0
    world.advance(DAY_S)
    report = world.run(lambda: sweep(world.db, NAME, apply=True))
    assert report.jobs_reaped == 1
    with pytest.raises(reef.ConflictError, match="was aborted"):
        world.run(lambda: BulkJob.resume(handle).commit(staged))
