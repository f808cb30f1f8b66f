"""Single rows wait in the head before they become columns: no read may see a difference."""

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.engine.read import memtable as module
from reef.engine.read.memtable import Memtable
from reef.engine.read.merge import drop_superseded
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OneOp, OpKind
from reef.types import KeyRange

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
OPS = st.builds(OneOp, KEYS, st.just(1), st.none() | st.binary(max_size=3))
EVERYTHING = KeyRange(b"", None)


def seen(memtable):
    """Return the newest versions of a memtable as plain values, and its last LSN."""
    cut = memtable.cut()
    rows = drop_superseded(cut.rows(EVERYTHING))
    values = rows.fields[1].to_pylist() if 1 in rows.fields else [None] * len(rows)
    stamps = zip(rows.lsns.tolist(), rows.seqs.tolist(), rows.kinds.tolist(), strict=True)
    return list(zip(rows.keys.to_pylist(), stamps, values, strict=True)), cut.last_lsn


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(OPS, max_size=4), st.booleans(), st.booleans()), max_size=12),
    st.integers(1, 14),
)
def test_they_are_the_same_as_columns(objects, floor):
    """Whatever is read in between, in order or late, before a fold and after it."""
    fresh, plain = Memtable(DEFAULT_SCHEMA, 1), Memtable(DEFAULT_SCHEMA, 1)
    late = []
    for lsn, (ops, is_late, is_read) in enumerate(objects, start=1):
        if is_late:
            late.append((lsn, ops))
            continue
        fresh.apply(lsn, ops)
        plain.apply(lsn, [op.columns() for op in ops])
        if is_read:
            assert seen(fresh) == seen(plain)
    for lsn, ops in late:
        fresh.apply(lsn, ops)
        plain.apply(lsn, [op.columns() for op in ops])
    assert seen(fresh) == seen(plain)
    for key in (b"a", b"b", b"z"):
        assert fresh.cut().versions(key) == plain.cut().versions(key)
    assert seen(fresh.drop_below(floor)) == seen(plain.drop_below(floor))


def test_many_of_them_become_columns_by_themselves():
    """So that no read has to make columns of all that was ever written."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    for lsn in range(1, 1001):
        memtable.apply(lsn, [OneOp(b"%05d" % lsn, 1, b"v")])
        assert len(memtable._head) < module.HEAD_ROWS
    assert len(memtable.cut().rows(EVERYTHING)) == 1000
    assert memtable.cut().versions(b"00001")[0].values == {1: b"v"}


def test_a_delete_of_one_row_is_there_to_be_seen():
    """Deletes alone have no columns, among puts they have nulls: they stay deletes."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(1, [OneOp(b"a", 1, None)])
    assert memtable.cut().versions(b"a")[0].kind == OpKind.DELETE
    memtable.apply(2, [OneOp(b"a", 1, b"v"), OneOp(b"b", 1, None)])
    assert [memtable.cut().versions(key)[0].kind for key in (b"a", b"b")] == [
        OpKind.PUT,
        OpKind.DELETE,
    ]


def test_their_size_in_memory_is_counted():
    """At once, not when they become columns: bounds on memory hold."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    before = memtable.size
    memtable.apply(1, [OneOp(b"key", 1, bytes(1000))])
    assert memtable.size >= before + 1000
    counted = memtable.size
    seen(memtable)
    assert memtable.size == counted
