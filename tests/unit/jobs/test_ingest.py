"""Bulk jobs: begin, stage, commit, abort, next to live writers."""

import pickle
from itertools import pairwise

import pyarrow as pa
import pytest

import reef
from reef.engine.log.log import Log
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, OpKind, WalKind
from reef.jobs import BulkJob, fold, ingest, sweep
from reef.jobs.ingest.append import Appender
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.jobs.ingest.staging import end_of_keys
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import Outcome, Wrapper, WriteResult
from reef.types import KeyRange
from tests.support.sweep_world import DAY_S, NAME, World

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])


@pytest.fixture
def db(tmp_path):
    """Give a database with a table and a plain namespace."""
    db = reef.open(str(tmp_path))
    db.create("t", SCHEMA)
    db.create(NAME)
    return db


def rows(db, name="t"):
    """Return all rows as a reader sees them."""
    return {key: row["n"] if isinstance(row, dict) else row for key, row in db.reader(name).scan()}


def kinds(db, name="t"):
    """Return the objects of the log."""
    log = Log(db.store, Namespace(name))
    return [str(log.read(slot.lsn).header.kind) for slot in log.filled(1)]


def versions(job, keys):
    """Return sorted puts of a table's keys."""
    from reef.engine.rows.input import to_ops

    data = [{"id": key, "n": place} for place, key in enumerate(keys)]
    return staged_rows(to_ops(data, job.schema, kind=OpKind.PUT))


# --- the course of things -------------------------------------------------------------


def test_a_load_is_visible_at_one_lsn_and_keeps_the_writer_in_its_role(db):
    """Begin and ingest take the next slots; older writes lose, newer ones win."""
    writer = db.writer("t")
    writer.upsert([{"id": "a", "n": 1}, {"id": "b", "n": 2}])
    report = ingest(db, "t", [{"id": "b", "n": 20}, {"id": "c", "n": 30}])
    assert (report.rows, report.segments, report.replayed) == (2, 1, False)
    assert rows(db) == {"a": 1, "b": 20, "c": 30}
    receipt = writer.upsert([{"id": "c", "n": 3}])
    assert receipt.lsn == report.lsn + 1
    assert kinds(db) == ["fence", "batches", "begin", "ingest", "batches"]
    assert rows(db) == {"a": 1, "b": 20, "c": 3}
    fold(db, "t")
    assert rows(db) == {"a": 1, "b": 20, "c": 3}
    assert [c.op for c in db.reader("t").changes(after_lsn=0)] == ["put"] * 5


def test_a_segment_has_rows_however_small_it_should_be(db):
    """A size below that of an empty segment is a size like any other."""
    with BulkJob(db, "t", segment_bytes=1) as job:
        segments = job.staging.stage([versions(job, "ab"), versions(job, "cd")])
        job.commit(segments)
    assert [segment.rows for segment in segments] == [2, 2]
    assert rows(db) == {"a": 0, "b": 1, "c": 0, "d": 1}


def test_a_repeated_key_changes_nothing(db):
    """The receipt of the first commit is returned, before and after a fold."""
    first = ingest(db, "t", [{"id": "a", "n": 1}], idempotency_key="load-1")
    for _ in range(2):
        again = ingest(db, "t", [{"id": "a", "n": 1}], idempotency_key="load-1")
        assert (again.lsn, again.rows, again.replayed) == (first.lsn, 1, True)
        assert rows(db) == {"a": 1}
        fold(db, "t")


def test_a_key_that_a_batch_has_used_is_refused(db):
    """A key identifies one batch or one job."""
    db.writer("t").upsert([{"id": "a", "n": 1}], idempotency_key="k")
    with pytest.raises(reef.InvalidInputError, match="for a batch"):
        ingest(db, "t", [{"id": "b", "n": 1}], idempotency_key="k")
    assert rows(db) == {"a": 1}


def test_of_a_key_that_comes_twice_the_last_row_counts(db):
    """As in an upsert."""
    ingest(db, "t", [{"id": "b", "n": 1}, {"id": "a", "n": 2}, {"id": "b", "n": 3}])
    assert rows(db) == {"a": 2, "b": 3}


def test_patches_can_be_loaded(db):
    """They are applied to the rows below them, by reads and by the fold."""
    db.writer("t").upsert([{"id": "a", "n": 1, "t": "x"}])
    ingest(db, "t", [{"id": "a", "n": 5}, {"id": "missing", "n": 6}], op="patch")
    for _ in range(2):
        assert db.reader("t").get("a") == {"id": "a", "n": 5, "t": "x"}
        assert db.reader("t").get("missing") is None
        fold(db, "t")


@pytest.mark.parametrize("folds", [False, True])
def test_replace_leaves_exactly_the_new_rows(db, folds):
    """Old content is deleted by the same commit; rows written after it stay."""
    writer = db.writer("t")
    writer.upsert([{"id": key, "n": 1} for key in "abcxyz"])
    if folds:
        fold(db, "t")
    report = ingest(db, "t", [{"id": "c", "n": 7}, {"id": "m", "n": 8}], replace=True)
    assert rows(db) == {"c": 7, "m": 8}
    writer.upsert([{"id": "a", "n": 9}])
    for _ in range(2):
        assert rows(db) == {"a": 9, "c": 7, "m": 8}
        assert db.reader("t").get("x") is None
        assert [key for key, _ in db.reader("t").scan(reverse=True)] == ["m", "c", "a"]
        fold(db, "t")
    assert db.reader("t", as_of=reef.AsOf(lsn=report.lsn - 1)).get("x")["n"] == 1


def test_replace_with_nothing_empties_a_namespace(db):
    """Also where keys are bytes full of 255."""
    writer = db.writer(NAME)
    for key in (b"a", b"\xff" * 300, b"\xff" * 65_535):
        writer.put(key, b"1")
    everything = KeyRange()
    with BulkJob(db, NAME, replace=everything) as job:
        job.commit(job.staging.stage([], everything))
    assert rows(db, NAME) == {}
    fold(db, NAME)
    assert rows(db, NAME) == {}
    writer.put(b"b", b"2")
    assert rows(db, NAME) == {b"b": b"2"}


def test_large_loads_are_cut_into_segments_whose_tombstones_meet(db):
    """H36: fragments of a replaced range end where segments do, and leave no key out."""
    writer = db.writer("t")
    writer.upsert([{"id": f"{n:05}x", "n": -1} for n in range(3000)])
    with BulkJob(db, "t", replace=KeyRange(), segment_bytes=4096, group_bytes=1024) as job:
        pieces = [
            versions(job, [f"{n:05}" for n in range(at, at + 250)]) for at in range(0, 3000, 250)
        ]
        staged = job.staging.stage(pieces, KeyRange())
        assert len(staged) > 2
        assert staged[0].min_key == b""
        assert all(a.max_key == b.min_key for a, b in pairwise(staged))
        assert staged[-1].max_key == end_of_keys(job.schema)
        job.commit(staged)
    assert set(rows(db)) == {f"{n:05}" for n in range(3000)}


# --- bad input, and other ends ----------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "why"), [(["b", "a"], "unsorted"), (["a", "a"], "repeat a key"), (["zz"], "outside")]
)
def test_rows_that_cannot_be_staged_raise(db, keys, why):
    """Unsorted rows, a key twice, a key outside of the range; the job is aborted."""
    part = KeyRange(b"a", b"m")
    with pytest.raises(reef.InvalidInputError, match=why), BulkJob(db, "t", replace=part) as job:
        job.staging.stage([versions(job, keys)], part)
    assert kinds(db) == ["begin", "abort"]
    assert rows(db) == {}


def test_parts_that_overlap_are_refused(db):
    """H38: which row would win is undefined; overlap is checked again at the commit."""
    job = BulkJob(db, "t")
    one = job.staging.stage([versions(job, ["a", "c"])])
    two = job.staging.stage([versions(job, ["b"])])
    with pytest.raises(reef.InvalidInputError, match="overlap"):
        job.commit([*one, *two])
    job.abort()
    assert kinds(db) == ["begin", "abort"]


def test_a_segment_that_is_gone_is_not_committed(db):
    """H29: every segment that a commit names must exist."""
    job = BulkJob(db, "t")
    (segment,) = job.staging.stage([versions(job, ["a"])])
    db.store.delete(Namespace("t").segment(segment.id))
    with pytest.raises(reef.ConflictError, match="gone"):
        job.commit([segment])
    assert rows(db) == {}


def test_a_segment_of_another_size_is_not_committed(db):
    """H29: a truncated upload is not the staged segment."""
    job = BulkJob(db, "t")
    (segment,) = job.staging.stage([versions(job, ["a"])])
    key = Namespace("t").segment(segment.id)
    db.store.put(key, db.store.get(key)[:-1])
    with pytest.raises(reef.ConflictError, match=f"{segment.size - 1} bytes, {segment.size} were"):
        job.commit([segment])
    assert rows(db) == {}


def test_segments_of_another_job_are_refused(db):
    """A segment that one job committed is in the manifest, and cannot be committed again."""
    one, two = BulkJob(db, "t"), BulkJob(db, "t")
    staged = one.staging.stage([versions(one, ["a"])])
    one.commit(staged)
    with pytest.raises(reef.InvalidInputError, match="was not staged by job"):
        two.commit(staged)
    two.abort()
    fold(db, "t")
    assert rows(db) == {"a": 0}


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_segment_that_comes_twice_is_refused(db, interleaved):
    """Also one without rows, which overlaps nothing."""
    with BulkJob(db, "t", replace=KeyRange()) as job:
        cover = job.staging.stage([], KeyRange())
        with pytest.raises(reef.InvalidInputError, match="named twice"):
            job.commit([*cover, *cover], interleaved=interleaved)


def test_H38_a_key_at_the_edge_of_two_segments_is_refused_in_a_replaced_range_too(db):
    """H38: only the end of a range tombstone is a bound; the last key of a segment is a key."""
    with BulkJob(db, "t", replace=KeyRange()) as job:
        staged = [*job.staging.stage([], KeyRange())]
        staged += job.staging.stage([versions(job, ["a", "c"])])
        staged += job.staging.stage([versions(job, ["c", "e"])])
        with pytest.raises(reef.InvalidInputError, match="overlap near b'c'"):
            job.commit(staged)


PARTS = {
    "nothing": [],
    "a gap": [KeyRange(b"b", b"g"), KeyRange(b"h", b"m")],
    "not its start": [KeyRange(b"c", b"m")],
    "not its end": [KeyRange(b"b", b"h"), KeyRange(b"b", b"g")],
    "too much below": [KeyRange(b"a", b"m")],
    "too much above": [KeyRange(b"b", b"m"), KeyRange(b"h", b"n")],
}


@pytest.mark.parametrize("case", PARTS)
def test_a_replaced_range_is_covered_by_tombstones_exactly(db, case):
    """The range is replaced as a whole, and nothing outside it; nothing is seen before."""
    db.writer("t").upsert([{"id": key, "n": 1} for key in "abghmn"])
    with BulkJob(db, "t", replace=KeyRange(b"b", b"m")) as job:
        staged = [*job.staging.stage([versions(job, ["c"])])]
        for part in PARTS[case]:
            staged += job.staging.stage([], part)
        with pytest.raises(reef.InvalidInputError, match="replace"):
            job.commit(staged)
    assert set(rows(db)) == set("abghmn")
    with BulkJob(db, "t", replace=KeyRange(b"b", b"m")) as job:
        staged = [*job.staging.stage([versions(job, ["c"])], KeyRange(b"b", b"h"))]
        staged += job.staging.stage([], KeyRange(b"h", b"m"))
        job.commit(staged)
    assert set(rows(db)) == set("acmn")


def test_a_job_that_replaces_nothing_brings_no_tombstones(db):
    """Rows would go of which the job says nothing."""
    with BulkJob(db, "t") as job:
        staged = job.staging.stage([versions(job, ["c"])], KeyRange(b"b", b"m"))
        with pytest.raises(reef.InvalidInputError, match="the job replaces nothing"):
            job.commit(staged)


@pytest.mark.parametrize("key", [5, "", "x" * 100_000, "\ud800", b"k"])
def test_keys_that_could_not_be_read_back_are_refused(db, key):
    """As a writer refuses them; nothing was written."""
    with pytest.raises(reef.InvalidInputError, match="idempotency key"):
        BulkJob(db, "t", idempotency_key=key)
    assert kinds(db) == []


def test_H39_only_segments_handed_to_the_commit_count(db):
    """H39: an attempt that failed after its upload leaves segments that no reader sees."""
    with BulkJob(db, "t") as job:
        job.staging.stage([versions(job, ["a", "b"])])
        job.commit(job.staging.stage([versions(job, ["a"])]))
    assert rows(db) == {"a": 0}


def test_staging_can_be_sent_to_another_process(tmp_path):
    """Tasks run anywhere: their arguments and results are picklable."""
    db = reef.open(str(tmp_path))
    db.create("t", SCHEMA)
    with BulkJob(db, "t") as job:
        staging = pickle.loads(pickle.dumps(job.staging))
        job.commit(pickle.loads(pickle.dumps(staging.stage([versions(job, ["a"])]))))
    assert rows(db) == {"a": 0}


def test_rows_are_sorted_stably():
    """The last of a key is the one that was given last."""
    import numpy as np

    given = Versions(
        pa.array([b"b", b"a", b"b"], pa.binary()),
        np.zeros(3, np.int64),
        np.ones(3, np.uint32),
        np.zeros(3, np.uint8),
        {1: pa.array([1, 2, 3])},
    )
    found = sorted_rows(given)
    assert found.keys.to_pylist() == [b"a", b"b"]
    assert found.fields[1].to_pylist() == [2, 3]


# --- races ------------------------------------------------------------------------------


class Racing(Wrapper):
    """Runs another process just before some PUTs into the log."""

    def __init__(self, inner, acts):
        super().__init__(inner)
        self._acts = list(acts)

    def create(self, key, body):
        """Act first, if there is an act left."""
        if "/wal/" in key and self._acts:
            self._acts.pop(0)()
        return self.inner.create(key, body)


def test_H57_of_two_drivers_with_one_key_one_counts(db):
    """H57: the second one gets the first one's receipt, and its rows are never seen."""
    one = BulkJob(db, "t", idempotency_key="k")
    two = BulkJob(db, "t", idempotency_key="k")
    staged = [job.staging.stage([versions(job, [name])]) for job, name in ((one, "a"), (two, "b"))]
    first = one.commit(staged[0])
    second = two.commit(staged[1])
    assert (second.lsn, second.replayed, first.replayed) == (first.lsn, True, False)
    assert rows(db) == {"a": 0}
    fold(db, "t")
    assert rows(db) == {"a": 0}
    assert two.commit(staged[1]) == second


def test_H57_a_rival_that_takes_the_slot_is_seen(db):
    """H57: after a lost slot the key is checked again."""
    job = BulkJob(db, "t", idempotency_key="k")
    staged = job.staging.stage([versions(job, ["mine"])])
    rival = BulkJob(db, "t", idempotency_key="k")
    theirs = rival.staging.stage([versions(rival, ["theirs"])])
    job._appender._log._store = Racing(db.store, [lambda: rival.commit(theirs)])
    assert job.commit(staged).replayed
    assert rows(db) == {"theirs": 0}


def test_H59_a_saturated_writer_does_not_starve_a_job(db):
    """H59: after three losses it aims ahead, and fills the open slots below with skips."""
    writer = db.writer("t", max_parallel_writes=4)
    job = BulkJob(db, "t")
    staged = job.staging.stage([versions(job, ["mine"])])
    acts = [lambda: writer.upsert([{"id": "w", "n": 1}])] * 4
    job._appender._log._store = Racing(db.store, acts)
    receipt = job.commit(staged)
    assert kinds(db)[receipt.lsn - 1] == "ingest"
    assert "skip" in kinds(db)
    writer.upsert([{"id": "after", "n": 2}])
    assert rows(db) == {"w": 1, "mine": 0, "after": 2}


class SaysNothing(Wrapper):
    """Applies one PUT into the log and loses its response."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lost = 1

    def create(self, key, body):
        """Apply, then say unknown once."""
        result = self.inner.create(key, body)
        if "/wal/" in key and self.lost:
            self.lost -= 1
            return WriteResult(Outcome.UNKNOWN)
        return result


def test_H31_a_lost_response_is_resolved_by_the_log(db):
    """H31: the ingest landed, its response did not: it counts once, and nothing is cleaned up."""
    job = BulkJob(db, "t")
    staged = job.staging.stage([versions(job, ["a"])])
    job._appender._log._store = SaysNothing(db.store)
    receipt = job.commit(staged)
    assert kinds(db) == ["begin", "ingest"]
    assert receipt.lsn == 2
    assert rows(db) == {"a": 0}


def test_H31_an_abort_after_a_commit_that_counted_changes_nothing(db):
    """H31: Spark calls abort after a commit that raised; visible rows stay visible."""
    job = BulkJob(db, "t")
    staged = job.staging.stage([versions(job, ["a"])])
    job.commit(staged)
    job.receipt = None  # as if the response had not come
    job.abort()
    assert kinds(db) == ["begin", "ingest"]
    assert rows(db) == {"a": 0}


def test_H53_a_slot_below_the_floor_does_not_count(db):
    """H53: a driver with an old listing put its begin into a slot that was folded long ago."""
    with db.writer("t") as writer:
        for n in range(4):
            writer.upsert([{"id": f"k{n}", "n": n}])
    fold(db, "t")
    db.store.delete(Namespace("t").wal_object(3))  # as a sweep would
    appender = Appender(db.store, Namespace("t"))
    real, stale = appender.read_log, appender.read_log()
    stale.open_slot = 3
    readings = iter([stale])
    appender.read_log = lambda: next(readings, None) or real()
    schema = HeadFinder(db.store, Namespace("t")).find().manifest.schema
    state = appender.append(WalKind.BEGIN, Job("j", key="j"), schema)
    assert state.counts
    assert state.lsn == 6, "a new slot at the end of the log"


def test_H53_an_ingest_that_was_folded_at_once_counts(db):
    """H53: the fold has passed it before the driver checks: the window has it."""
    job = BulkJob(db, "t")
    staged = job.staging.stage([versions(job, ["a"])])

    class FoldsAfter(Wrapper):
        def create(self, key, body):
            result = self.inner.create(key, body)
            fold(db, "t")
            return result

    job._appender._log._store = FoldsAfter(db.store)
    receipt = job.commit(staged)
    assert not receipt.replayed
    assert HeadFinder(db.store, Namespace("t")).find().manifest.wal_floor > receipt.lsn
    assert rows(db) == {"a": 0}


# --- the sweep --------------------------------------------------------------------------


def test_H28_a_job_lives_while_its_lease_does_and_is_reaped_after():
    """H28: segments of an open job stay, however old; a dead driver's job is aborted first."""
    world = World()
    world.db.create(NAME)
    job = world.run(lambda: BulkJob(world.db, NAME))
    ops = world.run(lambda: job.staging.stage([_plain([b"a"])]))
    world.advance(10 * DAY_S)  # the heartbeat continues
    report = world.run(lambda: sweep(world.db, NAME, apply=True, retain_generations_s=0))
    assert (report.jobs_reaped, report.deleted) == (0, ())
    job._lease.release()  # as if the driver had died, and its lease had expired
    dry = world.run(lambda: sweep(world.db, NAME))
    report = world.run(lambda: sweep(world.db, NAME, apply=True, retain_generations_s=0))
    assert (dry.jobs_reaped, report.jobs_reaped) == (1, 1)
    assert not any("segments/" in doomed.key for doomed in report.condemned)
    for _ in range(2):
        world.run(lambda: sweep(world.db, NAME, apply=True, retain_generations_s=0))
        world.advance(DAY_S)
    world.run(lambda: sweep(world.db, NAME, apply=True, retain_generations_s=0))
    assert [i.key for i in world.bucket.list(Namespace(NAME).segments)] == []
    with pytest.raises(reef.ConflictError, match="gone"):
        world.run(lambda: job.commit(ops))
    assert dict(world.db.reader(NAME).scan()) == {}


def test_H28_a_job_that_was_reaped_cannot_commit():
    """H28: the abort is in the log before its ingest, and decides for every reader."""
    world = World()
    world.db.create(NAME)
    job = world.run(lambda: BulkJob(world.db, NAME))
    staged = world.run(lambda: job.staging.stage([_plain([b"a"])]))
    job._lease.release()
    world.advance(DAY_S)
    world.run(lambda: sweep(world.db, NAME, apply=True))
    with pytest.raises(reef.ConflictError, match="was aborted"):
        world.run(lambda: job.commit(staged))
    assert dict(world.db.reader(NAME).scan()) == {}


def _plain(keys):
    import numpy as np

    return Versions(
        pa.array(keys, pa.binary()),
        np.zeros(len(keys), np.int64),
        np.ones(len(keys), np.uint32),
        np.zeros(len(keys), np.uint8),
        {1: pa.array([b"v"] * len(keys), pa.binary())},
    )
