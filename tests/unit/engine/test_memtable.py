"""The memtable against a plain list of everything that was ever written."""

from hypothesis import given
from hypothesis import strategies as st

from reef.engine.reading.memtable import INDEXED_LATER, Memtable
from reef.formats.batch import OpKind
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import DEFAULT_SCHEMA
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
    """Return what a memtable says of a key, as the model says it."""
    versions = memtable.chain(key).entries
    if not versions:
        return None
    first = versions[0]
    return first.lsn, first.seq, first.values.get(1) if first.kind == OpKind.PUT else None


def rows(memtable, start=b"", end=None):
    """Return the rows of a range, merged by hand with the range deletes beside them."""
    moment = memtable.moment(KeyRange(start, end))
    found = {}
    table = zip(
        moment.rows.keys.to_pylist(),
        moment.rows.lsns.tolist(),
        moment.rows.seqs.tolist(),
        moment.rows.kinds.tolist(),
        moment.rows.fields[1].to_pylist() if 1 in moment.rows.fields else [None] * len(moment.rows),
        strict=True,
    )
    for key, lsn, seq, kind, value in table:
        covered = any(
            t.start <= key < t.end and (t.lsn, t.seq) > (lsn, seq) for t in moment.range_tombstones
        )
        if kind == OpKind.PUT and not covered:
            found.setdefault(key, value)
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
    """H15: what is left is exactly what was written from the floor on; the old one is as it was."""
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
def test_a_moment_does_not_change(objects, later):
    """What was taken at one moment stays, whatever is applied afterwards."""
    memtable, _ = filled(objects)
    before = memtable.moment(KeyRange())
    copy = (before.last_lsn, before.rows.keys.to_pylist(), list(before.range_tombstones))
    memtable.apply(99, [to_ops(later)])
    memtable.ingest(100, [entry(100)])
    assert (before.last_lsn, before.rows.keys.to_pylist(), list(before.range_tombstones)) == copy
    assert before.ingested == ()
    assert memtable.moment(KeyRange()).last_lsn == 100


def entry(lsn):
    """Return the entry of an ingested segment."""
    return SegmentEntry("s", 0, 1, 0, 1, 0, b"a", b"b", lsn, lsn, 1, 1, "", visible_lsn=lsn)


def test_ingested_segments_go_with_the_floor():
    """They are dropped when a fold has named them in the manifest."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.ingest(3, [entry(3)])
    memtable.ingest(5, [entry(5)])
    assert [e.lsn_max for e in memtable.drop_below(4).chain(b"a").ingested] == [5]
    assert [e.lsn_max for e in memtable.chain(b"a").ingested] == [3, 5]


def test_lsns_that_change_nothing_are_covered_too():
    """A fence moves the memtable's end."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.pass_over(7)
    memtable.pass_over(3)
    assert memtable.last_lsn == 7
    assert len(memtable) == 0


def test_a_key_of_a_large_batch_is_found():
    """Large batches are indexed by the first read after them, whatever kind of read that is."""
    keys = [b"%05d" % number for number in range(INDEXED_LATER)]
    for read in (lambda m: m.chain(keys[7]).entries[0].lsn, lambda m: len(m.look_up(keys).rows)):
        memtable = Memtable(DEFAULT_SCHEMA, 1)
        memtable.apply(1, [to_ops([(OpKind.PUT, key, b"v") for key in keys])])
        assert memtable._unindexed
        assert read(memtable) in (1, INDEXED_LATER)
