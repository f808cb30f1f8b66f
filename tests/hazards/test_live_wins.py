"""Loads with `live_wins`: H34, H38, H50, H60, and all that reads their rows."""

from itertools import combinations

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.errors import ConflictError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, OpKind, WalKind, WalObject
from reef.jobs import BulkJob, backup, compact, fold, ingest, purge, rebuild, restore, verify
from reef.jobs.fold.task import _pieces
from reef.jobs.ingest.condition import Unchanged
from reef.jobs.purge.job import _Deletes
from reef.manifest.edits import NEVER, hold_lsn_of
from tests.support.backfills import Backfill
from tests.support.bulk_jobs import append
from tests.support.bulk_jobs import stage as stage_by_hand
from tests.support.compaction import SMALL
from tests.support.local_shuffler import LocalShuffler
from tests.support.rebuild import (
    EVENTS,
    NAME,
    compact_these,
    head_of,
    open_mortal,
    rebuilt,
    sweep_now,
    without_manifests,
)

SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])


@pytest.fixture
def db():
    """A namespace with two columns, and one row."""
    found = open_mortal()
    found.create(NAME, SCHEMA)
    with found.writer(NAME, background=False) as writer:
        writer.upsert([row("old", 1)])
    return found


@pytest.fixture
def writer(db):
    """The live writer."""
    with db.writer(NAME, background=False) as opened:
        yield opened


def row(key, x, y=0):
    """Return a row."""
    return {"id": key, "x": x, "y": y}


def rows(db, **where):
    """Return all rows by key, as a new reader sees them."""
    with db.reader(NAME, **where) as reader:
        return dict(reader.scan())


def folded(db):
    """Fold, and return the new head."""
    fold(db, NAME)
    return head_of(db)


def settle(db):
    """Fold, and merge everything."""
    fold(db, NAME)
    compact(db, NAME, full=True, **SMALL)


# --- the rule -------------------------------------------------------------------------------


STEPS = range(5)
GAPS = [gaps for count in range(len(STEPS) + 1) for gaps in combinations(STEPS, count)]


@pytest.mark.parametrize("gaps", GAPS, ids=str)
def test_H60_everything_written_since_the_begin_wins(db, writer, gaps):
    """H60, H34: whatever is folded and merged between any two steps, no deleted row comes back."""
    load = Backfill(db, NAME)
    steps = [
        lambda: None,
        lambda: writer.delete("deleted"),
        lambda: writer.upsert([row("put", 9)]),
        lambda: writer.delete_range("r", "s"),
    ]
    for number, step in enumerate(steps):
        step()
        if number in gaps:
            settle(db)
            writer.refresh()
    load.commit([row(key, 5) for key in ("deleted", "new", "old", "put", "range")])
    expected = {"new": row("new", 5), "old": row("old", 5), "put": row("put", 9)}
    assert rows(db) == expected
    if 4 in gaps:
        settle(db)
    assert rows(db) == expected
    settle(db)
    assert rows(db) == expected
    assert hold_lsn_of(head_of(db).open_jobs) == NEVER
    assert sum(s.tombstones for s in head_of(db).segments) == 0, "the hold is over"


FOLDS = {
    "in one task": lambda db, writer: fold(db, NAME),
    "by shuffle": lambda db, writer: fold(db, NAME, executor=LocalShuffler(), shuffle_bytes_min=0),
}


@pytest.mark.parametrize("fold_once", FOLDS.values(), ids=FOLDS)
def test_H50_patches_and_merges_wait_for_the_row_below_them(db, writer, fold_once):
    """H50: a key that is patched during the load is folded before the load commits."""
    load = Backfill(db, NAME)
    writer.patch([{"id": "new", "x": 7}, {"id": "old", "x": 7}])
    writer.patch([{"id": "new", "y": 8}])
    writer.merge("counter", {"x": reef.add(2)})
    fold_once(db, writer)
    compact(db, NAME, full=True, **SMALL)
    writer.refresh()
    writer.merge("counter", {"x": reef.add(3)})
    fold_once(db, writer)
    before = {"counter": row("counter", 5, None), "old": row("old", 7)}
    assert rows(db) == before
    lsn = load.commit([row("counter", 100, 1), row("new", 5, 5), row("old", 5, 5)])
    expected = {
        "counter": row("counter", 105, 1),
        "new": row("new", 7, 8),
        "old": row("old", 7, 5),
    }
    assert rows(db) == expected
    assert rows(db, as_of={"lsn": lsn - 1}) == before
    settle(db)
    assert rows(db) == expected
    assert sum(s.patches for s in head_of(db).segments) == 0


def test_H50_a_fold_joins_patches_that_it_may_not_resolve(db, writer):
    """H50: a hot key has one version for each fold of a long load, not one for each patch."""
    load = Backfill(db, NAME)
    for number in range(20):
        writer.patch([{"id": "old", "x": number}])
        writer.merge("counter", {"x": reef.add(1)})
    (new,) = folded(db).segments
    assert (new.rows, new.patches) == (3, 2), "and the row from before the load"
    assert rows(db)["counter"]["x"] == 20
    load.abort()
    settle(db)
    assert rows(db) == {"counter": row("counter", 20, None), "old": row("old", 19)}


def test_H50_patches_on_both_sides_of_another_begin_stay_apart(db, writer):
    """H50: a row of the second load comes in between them."""
    first, second = Backfill(db, NAME), None
    writer.patch([{"id": "k", "x": 1}])
    second = Backfill(db, NAME)
    writer.patch([{"id": "k", "y": 2}])
    settle(db)
    second.commit([row("k", 50, 50)])
    assert rows(db)["k"] == row("k", 50, 2)
    settle(db)
    first.commit([row("k", 60, 60)])
    settle(db)
    assert rows(db)["k"] == row("k", 50, 2)


@pytest.mark.parametrize("whole", ["delete", "put", "range"])
def test_H50_a_patch_above_a_whole_row_waits_for_a_load_in_between(db, writer, whole):
    """H50: two loads are open, and the whole row is between their begins."""
    first = Backfill(db, NAME)
    if whole == "put":
        writer.upsert([row("k", 1, 1)])
    elif whole == "delete":
        writer.delete("k")
    else:
        writer.delete_range("k", "l")
    second = Backfill(db, NAME)
    writer.patch([{"id": "k", "x": 7}])
    settle(db)
    second.commit([row("k", 5, 5)])
    first.commit([row("k", 6, 6)])
    for _ in range(3):
        assert rows(db)["k"] == row("k", 7, 5)
        settle(db)


def test_H50_a_later_patch_is_folded_with_the_row_of_the_load(db, writer):
    """H50: the load comes in between two versions that earlier folds have written."""
    load = Backfill(db, NAME)
    writer.patch([{"id": "old", "x": 7}])
    fold(db, NAME)
    load.commit([row("old", 5, 5)])
    writer.refresh()
    writer.merge("old", {"x": reef.add(1)})
    fold(db, NAME)
    assert rows(db) == {"old": row("old", 8, 5)}


def test_loads_sort_by_their_begins_whichever_commits_first(db):
    """The later begin wins, folded or not."""
    first, second = Backfill(db, NAME), Backfill(db, NAME)
    second.commit([row("k", 2)])
    first.commit([row("k", 1), row("only", 1)])
    for _ in range(3):
        assert rows(db)["k"] == row("k", 2)
        assert rows(db)["only"] == row("only", 1)
        settle(db)


def test_a_row_written_before_the_begin_loses(db, writer):
    """As against any load."""
    Backfill(db, NAME).commit([row("old", 5)])
    assert rows(db) == {"old": row("old", 5)}
    ingest(db, NAME, [row("old", 6)], live_wins=True)
    assert rows(db) == {"old": row("old", 6)}


def test_a_search_finds_no_row_that_was_beaten(db):
    """In the index of the load, of the rows that win, and of both merged."""
    schema = pa.schema([("id", pa.string()), ("t", pa.string())])
    db.create("texts", schema, indexes=[reef.text_index("t")])
    load = Backfill(db, "texts")
    with db.writer("texts", background=False) as writer:
        writer.upsert([{"id": "k", "t": "new words"}])
    load.commit([{"id": "k", "t": "old words"}, {"id": "other", "t": "old words"}])
    for job in (lambda: None, lambda: fold(db, "texts"), lambda: compact(db, "texts", full=True)):
        job()
        with db.reader("texts") as reader:
            found = {word: reader.search(text=("t", word), k=5) for word in ("old", "new")}
        assert found["old"]["id"].to_pylist() == ["other"]
        assert found["new"]["id"].to_pylist() == ["k"]


# --- visible at the ingest ---------------------------------------------------------------------


def test_rows_are_visible_from_the_ingest_on(db, writer):
    """At no LSN between the begin and the ingest, folded or not."""
    load = Backfill(db, NAME)
    for number in range(3):
        writer.upsert([row("live", number)])
        fold(db, NAME)
    snapshot = db.snapshot(NAME)
    lsn = load.commit([row("k", 5), row("live", 5)])
    for _ in range(2):
        for before in range(load.begin_lsn, lsn):
            assert "k" not in rows(db, as_of={"lsn": before})
        assert rows(db, as_of={"lsn": lsn})["k"] == row("k", 5)
        assert "k" not in rows(db, snapshot=snapshot)
        settle(db)


def test_changes_show_what_the_load_has_changed(db, writer):
    """Beaten rows are left out, patched ones are shown as they become visible."""
    load = Backfill(db, NAME)
    writer.upsert([row("put", 1)])
    writer.delete("deleted")
    writer.delete_range("r", "s")
    fold(db, NAME)
    writer.refresh()
    writer.patch([{"id": "patched", "x": 7}])
    lsn = load.commit([row(k, 5) for k in ("deleted", "new", "patched", "put", "range")])
    for _ in range(2):
        with db.reader(NAME) as reader:
            found = [c for c in reader.changes(after_lsn=0) if c.lsn == lsn]
            table = reader.changes_arrow(after_lsn=lsn - 1).read_all()
        assert [(c.op, c.seq, c.row) for c in found] == [
            ("put", 1, row("new", 5)),
            ("put", 2, row("patched", 7)),
        ]
        assert table["_key"].to_pylist() == [b"new", b"patched"]
        settle(db)


def test_H44_a_cursor_keeps_the_rows_that_win(db, writer):
    """H44: compacted and swept since, it still leaves out exactly the rows that were beaten."""
    load = Backfill(db, NAME, lease_ttl_s=1e6)
    writer.delete("deleted")
    writer.patch([{"id": "patched", "x": 7}])
    settle(db)
    db.cursor(NAME, "follower").close()
    load.commit([row("deleted", 5), row("new", 5), row("patched", 5)])
    for _ in range(2):
        settle(db)
        sweep_now(db)
    with db.cursor(NAME, "follower") as cursor:
        assert [(c.op, c.row) for c in cursor] == [
            ("put", row("new", 5)),
            ("put", row("patched", 7)),
        ]


def test_a_scan_that_outlives_its_segments_shows_no_late_row(db, writer):
    """It sorts below the scan's LSN, but was not visible there: the scan ends with an error."""
    load = Backfill(db, NAME, lease_ttl_s=1e6)
    writer.upsert([row("z", 1)])
    settle(db)
    with db.reader(NAME, refresh_interval_ms=1e9) as reader:
        scan = reader.scan()  # nothing is fetched before it is consumed
        load.commit([row("k", 5)])
        settle(db)
        sweep_now(db)
        with pytest.raises(NotFoundError) as caught:
            list(scan)
    assert caught.value.kind is ErrorKind.COLLECTED


def test_a_scan_that_outlives_its_segments_shows_no_late_row_of_a_folded_load(db, writer):
    """Nor if the load is a segment of its own, and only others were merged."""
    load = Backfill(db, NAME, lease_ttl_s=1e6)
    writer.upsert([row("z", 1)])
    fold(db, NAME)
    with db.reader(NAME, refresh_interval_ms=1e9) as reader:
        scan = reader.scan()
        load.commit([row("k", 5)])
        fold(db, NAME)
        compact_these(db, lambda segment: not segment.visible_lsn)
        sweep_now(db)
        with pytest.raises(NotFoundError) as caught:
            list(scan)
    assert caught.value.kind is ErrorKind.COLLECTED


def test_a_transaction_that_read_a_key_conflicts_with_its_load(db, writer):
    """The load makes the key visible at its ingest, though it sorts before the transaction."""
    load = Backfill(db, NAME)
    tx = writer.transaction()
    assert tx.get("k") is None
    tx.upsert([row("other", 1)])
    load.commit([row("k", 5)])
    writer.refresh()
    with pytest.raises(ConflictError):
        tx.commit()


# --- jobs -----------------------------------------------------------------------------------


def test_H60_a_purge_waits_for_an_open_load(db, writer):
    """H60: without their deletes, keys that the load has would be back. Nothing is changed."""
    writer.upsert([row("k", 1)])
    load = Backfill(db, NAME)
    with pytest.raises(ConflictError, match=f"open since LSN {load.begin_lsn}"):
        purge(db, NAME, ["k", "new"], apply=True)
    assert rows(db) == {"k": row("k", 1), "old": row("old", 1)}
    load.commit([row("k", 5), row("new", 5)])
    purge(db, NAME, ["k"], apply=True)
    assert rows(db) == {"new": row("new", 5), "old": row("old", 1)}


def test_H60_a_load_that_begins_during_a_purge_is_waited_for(db, writer, monkeypatch):
    """H60: it began below the delete, which must stay until the load is folded."""
    writer.upsert([row("k", 1)])
    loads, present = [], _Deletes._present

    def begins(self):
        found = present(self)
        loads.append(Backfill(db, NAME))
        return found

    monkeypatch.setattr(_Deletes, "_present", begins)
    with pytest.raises(ConflictError, match="open since"):
        purge(db, NAME, ["k"], apply=True)
    loads[0].commit([row("k", 5)])
    settle(db)
    assert rows(db) == {"old": row("old", 1)}


def test_a_job_whose_driver_is_gone_is_reaped_and_its_hold_ends(db, writer):
    """By the sweep, through an abort in the log."""
    load = Backfill(db, NAME, lease_ttl_s=1.0)
    load.job.let_go()
    writer.delete("k")
    settle(db)
    assert hold_lsn_of(head_of(db).open_jobs) == load.begin_lsn
    assert sum(s.tombstones for s in head_of(db).segments) == 1
    sweep_now(db)
    settle(db)
    assert hold_lsn_of(head_of(db).open_jobs) == NEVER
    assert sum(s.tombstones for s in head_of(db).segments) == 0
    with pytest.raises(ConflictError):
        load.commit([row("k", 5)])
    assert rows(db) == {"old": row("old", 1)}


def test_an_open_job_shows_where_it_holds(db):
    """In the list of jobs, with the begin above which nothing is dropped."""
    load = Backfill(db, NAME)
    (job,) = db.jobs(NAME)
    assert job.progress["live_wins_lsn"] == load.begin_lsn
    load.abort()
    BulkJob(db, NAME)
    (job,) = db.jobs(NAME)
    assert "live_wins_lsn" not in job.progress


def test_H60_an_ingest_counts_only_with_the_begin_that_was_held(db):
    """H60: since another begin, deletes above the one that it names may be gone."""
    segment = stage_by_hand(db.store, NAME, {b"k": b"bulk"})
    begin = append(db.store, NAME, WalKind.BEGIN, Job("j", live_wins=True))
    append(db.store, NAME, WalKind.ABORT, Job("j"))
    append(db.store, NAME, WalKind.BEGIN, Job("j", live_wins=True))
    ends = Job("j", segments=(segment,), live_wins=True, begin_lsn=begin)
    append(db.store, NAME, WalKind.INGEST, ends)
    plain = append(db.store, NAME, WalKind.BEGIN, Job("plain"))
    late = Job("plain", segments=(segment,), live_wins=True, begin_lsn=plain)
    append(db.store, NAME, WalKind.INGEST, late)
    assert rows(db) == {"old": row("old", 1)}


def test_a_load_is_whole_rows_and_deletes(db):
    """A range or a patch could not be shown as a change at the ingest; nothing is begun."""
    end = db.reader(NAME).last_lsn
    with pytest.raises(InvalidInputError, match="replaces a range"):
        ingest(db, NAME, [row("k", 1)], live_wins=True, replace=True)
    for op in ("patch", "merge"):
        with pytest.raises(InvalidInputError, match="patches or merges"):
            ingest(db, NAME, [row("k", 1)], live_wins=True, op=op, operators={"x": "add"})
    assert db.reader(NAME).last_lsn == end
    with pytest.raises(InvalidInputError, match="patches or merges"), Backfill(db, NAME).job as job:
        Backfill.commit(_holding(job), [{"id": "old", "x": 5}], OpKind.PATCH)
    assert rows(db) == {"old": row("old", 1)}


def _holding(job):
    load = Backfill.__new__(Backfill)
    load.job = job
    return load


def test_deletes_of_a_load_lose_too(db, writer):
    """A delete sorts at the begin, as its rows do."""
    writer.upsert([row("gone", 1)])
    load = Backfill(db, NAME)
    writer.upsert([row("old", 9)])
    lsn = load.commit([{"id": "gone"}, {"id": "old"}], OpKind.DELETE)
    for _ in range(2):
        assert rows(db) == {"old": row("old", 9)}
        with db.reader(NAME) as reader:
            found = [(c.op, c.key) for c in reader.changes(after_lsn=lsn - 1)]
        assert found == [("delete", "gone")]
        settle(db)


def test_a_condition_is_checked_up_to_the_ingest(db, writer):
    """A key that the job has read was written since: nothing is visible."""
    with db.reader(NAME) as reader:
        read = Unchanged(head_of(db).generation, reader.last_lsn)
    load = Backfill(db, NAME)
    writer.upsert([row("old", 2)])
    with pytest.raises(ConflictError):
        load.commit([row("k", 5)], unless=read)
    load.abort()
    other = Backfill(db, NAME)
    with db.reader(NAME) as reader:
        read = Unchanged(head_of(db).generation, reader.last_lsn)
    other.commit([row("k", 5)], unless=read)
    assert rows(db) == {"k": row("k", 5), "old": row("old", 2)}


def test_a_repeated_key_loads_once(db, writer):
    """Also if live writes came in between, and it was folded."""
    first = ingest(db, NAME, [row("k", 5)], live_wins=True, idempotency_key="load")
    writer.refresh()
    writer.delete("k")
    settle(db)
    again = ingest(db, NAME, [row("k", 5)], live_wins=True, idempotency_key="load")
    assert (again.replayed, again.lsn) == (True, first.lsn)
    assert "k" not in rows(db)
    with pytest.raises(InvalidInputError, match="another load"):
        ingest(db, NAME, [row("k", 5)], idempotency_key="load")


# --- branches, rebuild, verify --------------------------------------------------------------


def test_a_branch_made_during_a_load_goes_without_it(db, writer):
    """The load commits in the origin; in the branch a sweep ends its hold."""
    load = Backfill(db, NAME)
    writer.delete("k")
    fold(db, NAME)
    db.branch(NAME, "branch")
    load.commit([row("k", 5), row("new", 5)])
    assert "new" in rows(db)
    with db.reader("branch") as reader:
        assert dict(reader.scan()) == {"old": row("old", 1)}
    db.branch(NAME, "later")
    fold(db, "later")
    compact(db, "later", full=True, **SMALL)
    with db.reader("later") as reader:
        assert dict(reader.scan()) == rows(db)


@pytest.mark.parametrize("settles", [0, 1, 2])
def test_H49_a_rebuild_sorts_the_rows_at_the_begin(db, writer, settles):
    """H49: from the log, from the segments of the load, or merged into others."""
    load = Backfill(db, NAME)
    writer.delete("k")
    writer.patch([{"id": "new", "x": 7}])
    fold(db, NAME)
    open_load = Backfill(db, NAME)
    load.commit([row("k", 5), row("new", 5)])
    for _ in range(settles):
        settle(db)
    expected = {"new": row("new", 7), "old": row("old", 1)}
    assert not verify(db, NAME, deep=True).problems
    assert rebuild(db, NAME).rows_equal
    copy, report = rebuilt(db)
    assert report.problems == ()
    assert rows(copy) == expected
    assert hold_lsn_of(head_of(copy).open_jobs) == (
        open_load.begin_lsn if settles else load.begin_lsn
    )
    settle(copy)
    assert rows(copy) == expected


def test_H49_a_load_whose_begin_is_lost_sorts_there_all_the_same(db, writer):
    """H49: its ingest names the begin; the deletes above it are there."""
    load = Backfill(db, NAME)
    writer.delete("k")
    load.commit([row("k", 5), row("new", 5)])
    db.store.delete(EVENTS.wal_object(load.begin_lsn))
    copy = without_manifests(db)
    report = rebuild(copy, NAME, apply=True, force=True)
    assert rows(copy) == {"new": row("new", 5), "old": row("old", 1)}
    assert any(str(load.begin_lsn) in problem for problem in report.problems)


def test_H67_a_late_begin_in_a_collected_slot_does_not_hide_its_load_in_a_rebuild(db, writer):
    """H67: the driver has proved it lost and sent another, at which the rows sort. The rebuild took
    the first one, so that the ingest did not count (simulator: backfills, seed 788).
    """
    collected = writer.upsert([{"id": "old", "x": 2}]).lsn
    load = Backfill(db, NAME)
    writer.delete("k")
    fold(db, NAME)
    load.commit([row("k", 5), row("new", 5)])
    begin = WalObject.decode(db.store.get(EVENTS.wal_object(load.begin_lsn)), "begin")
    late = msgspec.structs.replace(
        begin.header, lsn=collected, write_id=begin.header.write_id[::-1]
    )
    db.store.delete(EVENTS.wal_object(collected))
    db.store.create(EVENTS.wal_object(collected), WalObject.encode(late))
    expected = rows(db)
    assert expected == {"new": row("new", 5), "old": row("old", 2, None)}
    copy, report = rebuilt(db)
    assert report.problems == ()
    assert rows(copy) == expected


def test_a_restore_shows_the_load_from_its_ingest_on(db, writer):
    """From a backup that began while the load was open, at any LSN."""
    load = Backfill(db, NAME)
    writer.delete("k")
    writer.patch([{"id": "new", "x": 7}])
    settle(db)
    target = stores.open("memory://")
    backup(db, NAME, target)
    lsn = load.commit([row("k", 5), row("new", 5)])
    backup(db, NAME, target)
    restore(target, db, "before", namespace=NAME, lsn=lsn - 1)
    restore(target, db, "after", namespace=NAME, lsn=lsn)
    for name, expected in (("before", {}), ("after", {"new": row("new", 7)})):
        with db.reader(name) as reader:
            assert dict(reader.scan()) == {"old": row("old", 1)} | expected


# --- the writer's memory ---------------------------------------------------------------------


def test_a_load_stays_in_memory_until_its_ingest_is_folded(db, writer):
    """Its begin may be far below the floor by then."""
    load = Backfill(db, NAME)
    for number in range(3):
        writer.upsert([row("live", number)])
        fold(db, NAME)
        writer.refresh()
    load.commit([row("k", 5), row("live", 5)])
    writer.refresh()
    compact_these(db, lambda _: True)
    writer.refresh()
    assert writer.get("k") == row("k", 5)
    assert writer.get("live") == row("live", 2)
    assert dict(writer.scan(reverse=True)) == rows(db)


def test_the_versions_of_a_key_stay_in_one_segment_of_a_fold():
    """Segments of one fold do not overlap, also if a key has several versions."""
    keys, lsns = [b"a", b"b", b"b", b"b", b"c"], [3, 5, 4, 2, 1]
    zeros = np.zeros(5, np.uint32)
    found = Versions(
        pa.array(keys, pa.binary()), np.array(lsns, np.int64), zeros, zeros.astype(np.uint8), {}
    )
    pieces = [piece.keys.to_pylist() for piece in _pieces(found, 1)]
    assert pieces == [[b"a"], [b"b"] * 3, [b"c"]]


def test_begun_in_a_plain_store(tmp_path):
    """A load with `live_wins` on a directory, read by another process's database."""
    db = reef.Database(stores.open(str(tmp_path)))
    db.create(NAME, SCHEMA)
    with BulkJob(db, NAME, live_wins=True) as job, db.writer(NAME) as writer:
        writer.upsert([row("k", 9)])
        Backfill.commit(_holding(job), [row("k", 1), row("new", 1)])
    assert rows(reef.open(str(tmp_path))) == {"k": row("k", 9), "new": row("new", 1)}
