"""The memtable against a plain list of everything that was ever written."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.engine.read import memtable as module
from reef.engine.read import runs
from reef.engine.read.memtable import Memtable
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.versions import Versions
from reef.formats.wal_object import OneOp, OpKind
from reef.types import KeyRange
from tests.unit.engine.model import KEYS, LAST, Model, batches, few, ranges, to_ops

objects = st.lists(st.lists(batches, min_size=1, max_size=3), max_size=8)
"""WAL objects: some batches each."""


def filled(objects, order=None):
    """Return a memtable and a model with these objects, from LSN 5 on, applied in some order."""
    memtable, model = Memtable(DEFAULT_SCHEMA, 5), Model()
    numbered = list(enumerate(objects, 5))
    for lsn, groups in order(numbered) if order else numbered:
        memtable.apply(lsn, [to_ops(batch) for batch in groups])
    for lsn, groups in numbered:
        model.apply(lsn, [operation for batch in groups for operation in batch])
    return memtable, model


def newest(memtable, key):
    """Return the newest version of a key, in the form of the model."""
    versions = memtable.cut().versions(key)
    if not versions:
        return None
    first = versions[0]
    return first.lsn, first.seq, first.values.get(1) if first.kind == OpKind.PUT else None


def rows(memtable, start=b"", end=None):
    """Return the rows of a range, merged by hand with the range deletes."""
    return rows_of(memtable.cut(), start, end)


def rows_of(cut, start=b"", end=None):
    """Return the same of a cut."""
    versions, found = cut.rows(KeyRange(start, end)), {}
    seen = set()
    table = zip(
        versions.keys.to_pylist(),
        versions.lsns.tolist(),
        versions.seqs.tolist(),
        versions.kinds.tolist(),
        versions.fields[1].to_pylist() if 1 in versions.fields else [None] * len(versions),
        strict=True,
    )
    for key, lsn, seq, kind, value in table:
        covered = any(
            t.start <= key < t.end and (t.lsn, t.seq) > (lsn, seq) for t in cut.range_tombstones
        )
        if kind == OpKind.PUT and not covered and key not in seen:
            found[key] = value
        seen.add(key)
    return found


@few
@given(objects)
def test_each_key_has_its_newest_version(objects):
    """Puts, deletes and range deletes, by LSN and by place within the object."""
    memtable, model = filled(objects)
    for key in [*KEYS, LAST]:
        assert newest(memtable, key) == model.newest(key)
    assert rows(memtable) == model.rows()
    assert memtable.last_lsn == 4 + len(objects)


@few
@given(objects, ranges())
def test_a_range_is_a_part_of_the_whole(objects, bounds):
    """[start, end): the start is in, the end is not."""
    memtable, model = filled(objects)
    start, end = bounds
    assert rows(memtable, start, end) == {
        key: value for key, value in model.rows().items() if start <= key < end
    }


@few
@given(objects, st.data())
def test_the_order_of_arrival_does_not_matter(objects, data):
    """Independent acknowledgements: an earlier object that comes later is the earlier one still."""
    memtable, model = filled(objects, lambda numbered: data.draw(st.permutations(numbered)))
    for key in KEYS:
        assert newest(memtable, key) == model.newest(key)
    assert rows(memtable) == model.rows()


@few
@given(objects, st.integers(0, 15))
def test_H15_a_cut_falls_between_objects(objects, floor):
    """H15: exactly the rows from the floor on remain; the old one is unchanged."""
    memtable, model = filled(objects)
    kept = memtable.drop_below(floor)
    for key in KEYS:
        expected = model.newest(key, floor)
        found = newest(kept, key)
        assert found == expected or (expected is None and found[0] < floor)
    if floor <= kept.last_lsn:
        assert kept.last_lsn == memtable.last_lsn
    assert kept.first_lsn == floor
    assert rows(memtable) == model.rows()


@few
@given(objects, batches)
def test_a_cut_does_not_change(objects, later):
    """A cut stays as it is, whatever is applied afterwards."""
    memtable, _ = filled(objects)
    before = memtable.cut()
    copy = (before.last_lsn, rows_of(before), list(before.range_tombstones))
    memtable.apply(99, [to_ops(later)])
    assert memtable.cut().last_lsn == 99
    memtable.ingest(100, [entry(100)])
    assert (before.last_lsn, rows_of(before), list(before.range_tombstones)) == copy
    assert before.ingested == ()
    assert memtable.cut().last_lsn == 100


def entry(lsn):
    """Return the entry of an ingested segment."""
    return SegmentEntry("s", 0, 1, 0, 1, 0, b"a", b"b", lsn, lsn, 1, 1, "", visible_lsn=lsn)


def test_ingested_segments_go_with_the_floor():
    """They are dropped when a fold has named them in the manifest."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.ingest(3, [entry(3)])
    memtable.ingest(5, [entry(5)])
    assert [e.lsn_max for e in memtable.drop_below(4).cut().ingested] == [5]
    assert [e.lsn_max for e in memtable.cut().ingested] == [3, 5]


def test_lsns_that_change_nothing_are_covered_too():
    """A fence moves the memtable's end."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.pass_over(7)
    memtable.pass_over(3)
    assert memtable.cut().last_lsn == memtable.last_lsn == 7
    assert not memtable.cut().all_runs()


def test_a_key_of_a_large_batch_is_found():
    """A batch is sorted by the first read after it, whatever kind of read that is."""
    keys = [b"%05d" % number for number in range(1000)]
    everything = KeyRange()
    for read in (
        lambda cut: len(cut.versions(keys[7])),
        lambda cut: len(cut.look_up([keys[7]])[0]),
        lambda cut: len(cut.rows(KeyRange(keys[7], keys[8]))),
        lambda cut: len(cut.look_up(keys)[0]) // 1000,
        lambda cut: sum(map(len, next(cut.pieces(everything, reverse=True)))) // 1000,
    ):
        memtable = Memtable(DEFAULT_SCHEMA, 1)
        memtable.apply(1, [to_ops([(OpKind.PUT, key, b"v") for key in reversed(keys)])])
        assert isinstance(memtable._runs[0]._rows, Versions), "not sorted yet"
        assert read(memtable.cut()) == 1


# --- cuts without older versions --------------------------------------------------------


def removed(start, end):
    """Return a range delete."""
    return to_ops([(OpKind.DELETE_RANGE, start, end)])


def test_a_cut_from_an_lsn_has_no_older_version():
    """Neither single rows, nor batches, nor range deletes; in any way of reading."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(1, [to_ops([(OpKind.PUT, key, b"1") for key in KEYS])])
    memtable.apply(2, [OneOp(b"b", 1, b"2"), removed(b"c", b"d")])
    memtable.apply(3, [OneOp(b"e", 1, b"3"), removed(b"a", b"b")])
    everything = memtable.cut()
    assert [e.lsn for e in everything.versions(b"c")] == [2]
    cut = everything.from_lsn(3)
    assert [len(cut.versions(key)) for key in (b"a", b"b", b"c", b"d", b"e")] == [1, 0, 0, 0, 1]
    assert [rows.keys.to_pylist() for rows in cut.look_up(KEYS)] == [[b"e"]]
    assert cut.rows(KeyRange()).keys.to_pylist() == [b"e"]
    pieces = [rows for run in cut.pieces(KeyRange(), False) for rows in run]
    assert [rows.keys.to_pylist() for rows in pieces] == [[b"e"]]
    assert [(t.start, t.lsn) for t in cut.range_tombstones] == [(b"a", 3)]
    assert everything.from_lsn(1) is everything


def test_has_newer_checks_the_range_alone():
    """Rows and range deletes above an LSN, within a range."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(1, [to_ops([(OpKind.PUT, key, b"1") for key in KEYS])])
    memtable.apply(2, [OneOp(b"b", 1, b"2")])
    memtable.apply(3, [removed(b"d", b"e")])
    cut = memtable.cut()
    assert cut.has_newer(1, KeyRange(b"b", b"b\0"))
    assert not cut.has_newer(2, KeyRange(b"b", b"b\0"))
    assert cut.has_newer(2, KeyRange(b"d\xff", None))
    assert not cut.has_newer(2, KeyRange(b"e", None))
    assert not cut.has_newer(1, KeyRange(b"", b"b"))


@pytest.mark.parametrize("folded", [3, 8])
def test_a_fold_frees_the_rows_below_its_floor(monkeypatch, folded):
    """At once where they are the greater part of a chunk, otherwise with the next merge."""
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    for lsn in range(1, 11):
        memtable.apply(
            lsn, [to_ops([(OpKind.PUT, b"%02d%03d" % (n, lsn), b"v") for n in range(50)])]
        )
    memtable.tidy()
    assert [run.count for run in memtable.cut().runs] == [500]
    kept = memtable.drop_below(folded + 1)
    left = 50 * (10 - folded)
    assert sum(run.count for run in kept.cut().runs) == (500 if folded == 3 else left)
    assert len(kept.cut().rows(KeyRange())) == left
    assert not kept.cut().versions(b"00001")
    kept.apply(11, [to_ops([(OpKind.PUT, b"x%05d" % n, b"v") for n in range(400)])])
    before = kept.cut()
    kept.tidy()
    assert [run.count for run in kept.cut().runs] == [left + 400]
    assert len(before.rows(KeyRange())) == left + 400, "a cut from before still has all"
    assert [run.count for run in memtable.cut().runs] == [500], "the old one is as it was"


# --- for folds --------------------------------------------------------------------------


def put(key):
    """Return a batch of one row."""
    return to_ops([(OpKind.PUT, key, b"v")])


@pytest.mark.parametrize(
    ("first", "third", "count"),
    [
        ([OneOp(b"k", 1, b"1")], [OneOp(b"k", 1, b"3")], 1),
        ([put(b"k")], [put(b"k")], 1),
        ([put(b"k")], [removed(b"a", b"z")], 1),
        ([removed(b"a", b"n")], [removed(b"c", b"d")], 0),
    ],
    ids=["single rows", "merged batches", "range delete over a row", "range delete over another"],
)
def test_versions_that_newer_ones_have_replaced_are_missing_for_a_fold(
    monkeypatch, first, third, count
):
    """LSN 3 landed before LSN 2: a fold up to LSN 1 needs what LSN 3 has replaced. None says so."""
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(1, first)
    rows, deletes = memtable.cut().all_versions(1, 1)
    assert (len(rows), len(deletes)) == (count, 1 - count)
    memtable.apply(3, [*third, put(b"zz")], is_early=True)
    memtable.tidy()
    assert memtable.cut().last_lsn == 1
    assert memtable.cut().all_versions(1, 1) is None
    memtable.apply(2, [OneOp(b"other", 1, b"2")])
    memtable.pass_over(3)
    rows, deletes = memtable.cut().all_versions(1, 3)
    assert rows.keys.to_pylist()[-1] == b"zz"
    assert rows.keys.to_pylist() == sorted(rows.keys.to_pylist())
    assert memtable.cut().all_versions(1, 2) is None


def test_versions_between_two_lsns():
    """In key order, with the range deletes; not those outside."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(1, [put(b"a"), put(b"z")])
    memtable.apply(2, [OneOp(b"m", 1, b"2"), put(b"b"), removed(b"x", b"y")])
    memtable.apply(3, [put(b"c")])
    rows, deletes = memtable.cut().all_versions(2, 2)
    assert rows.keys.to_pylist() == [b"b", b"m"]
    assert [(t.start, t.end, t.lsn) for t in deletes] == [(b"x", b"y", 2)]
    assert memtable.cut().all_versions(1, 3)[0].keys.to_pylist() == [b"a", b"b", b"c", b"m", b"z"]


# --- merging ----------------------------------------------------------------------------


def test_commits_leave_the_runs_of_a_merge_alone(monkeypatch):
    """A read merges part by part; commits in between merge only runs that are newer."""
    monkeypatch.setattr(module, "PART_ROWS", 20)
    monkeypatch.setattr(module, "SMALL_RUNS", 3)
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    numbers = iter(range(10_000))

    def commit(rows):
        lsn = memtable.last_lsn + 1
        some = [(OpKind.PUT, b"%05d" % (next(numbers) * 7919 % 10_000), b"v") for _ in range(rows)]
        memtable.apply(lsn, [to_ops(some)])

    for _ in range(2):
        commit(60)
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable.tidy()
    merge = memtable._merge
    assert merge is not None
    merging = memtable.cut().runs[: merge.end]
    for _ in range(10):
        commit(1)
        assert memtable.cut().runs[: merge.end] == merging
    assert len(memtable.cut().runs) < merge.end + 10, "the new ones are merged"
    while memtable._merge is not None:
        memtable.tidy()
    assert len(memtable.cut().rows(KeyRange())) == 130


def test_versions_of_many_keys_cross_fences(monkeypatch):
    """Many keys at once, each with more patches than there are rows between two fences."""
    monkeypatch.setattr(runs, "FENCE_ROWS", 2)
    keys = [b"%03d" % number for number in range(400)]
    each = np.repeat(np.arange(400), 5)
    rows = Versions(
        pa.array([keys[n] for n in each], pa.binary()),
        np.tile(np.arange(5, 0, -1), 400),
        np.zeros(2_000, np.uint32),
        np.full(2_000, OpKind.PATCH, np.uint8),
        {},
    )
    run = runs.Run.of_sorted(rows)
    for some in (keys[::40], keys[::20], keys[::2], keys[7:8]):
        found = [key for part in run.look_up(some) for key in part.keys.to_pylist()]
        assert found == [key for key in some for _ in range(5)]
