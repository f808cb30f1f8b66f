"""Transactions: they see their own writes and one snapshot, and the loser gets ConflictError."""

import pyarrow as pa
import pytest

import reef
from reef.engine.handles.transaction import Footprints, Reads
from reef.formats.wal_object import Ops
from reef.jobs import fold
from reef.types import KeyRange
from tests.support.bulk_jobs import ingest

NAME = "accounts"


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


@pytest.fixture(params=["in memory", "folded"])
def writer(request, db):
    """Give a writer with three rows, which are in memory or in a segment."""
    with db.writer(NAME) as writer:
        for key in "abc":
            writer.put(key, b"1")
        if request.param == "folded":
            fold(db, NAME)
            writer.refresh()
        yield writer


def test_a_transaction_commits_as_one(db, writer):
    """All or nothing, with one receipt; others see nothing before."""
    with writer.transaction() as tx:
        tx.put("a", b"2")
        tx.delete("b")
        assert writer.get("a") == b"1"
        assert tx.receipt is None
    assert tx.receipt.ops == 2
    assert dict(db.reader(NAME).scan()) == {b"a": b"2", b"c": b"1"}


def test_it_sees_its_own_writes(writer):
    """In every kind of read: puts, deletes, ranges, on top of the existing rows."""
    with writer.transaction() as tx:
        tx.put("b", b"2")
        tx.put("d", b"2")
        tx.delete("a")
        assert [tx.get(key) for key in "abcde"] == [None, b"2", b"1", b"2", None]
        assert dict(tx.scan()) == {b"b": b"2", b"c": b"1", b"d": b"2"}
        assert list(tx.scan(reverse=True, limit=1)) == [(b"d", b"2")]
        tx.delete_range("b", "d")
        tx.put("ba", b"3")
        assert dict(tx.scan()) == {b"ba": b"3", b"d": b"2"}
        assert tx.get_many(["a", "ba", "c"])["_found"].to_pylist() == [False, True, False]
        assert tx.scan_arrow().read_all()["id"].to_pylist() == [b"ba", b"d"]


def test_an_exception_rolls_back(writer):
    """Nothing is written, and the exception propagates."""

    def work():
        with writer.transaction() as tx:
            tx.put("a", b"2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert writer.get("a") == b"1"


@pytest.mark.parametrize(
    "read",
    [
        lambda tx: tx.get("a"),
        lambda tx: tx.get_many(["a", "b"]),
        lambda tx: list(tx.scan("a", "b")),
        lambda tx: tx.scan_arrow(prefix="a").read_all(),
        lambda tx: next(tx.scan()),
    ],
    ids=["get", "get_many", "scan", "scan_arrow", "first of a scan"],
)
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.put("a", b"2"),
        lambda w: w.delete("a"),
        lambda w: w.delete_range("a", "b"),
    ],
    ids=["put", "delete", "delete_range"],
)
def test_the_loser_gets_a_conflict(writer, read, write):
    """Whatever was read and however it was written since."""
    tx = writer.transaction()
    read(tx)
    write(writer)
    tx.put("z", b"1")
    with pytest.raises(reef.ConflictError, match="was written meanwhile"):
        tx.commit()
    assert writer.get("z") is None


def test_writes_to_unread_keys_do_not_matter(writer):
    """Neither other keys nor blind writes to the same key."""
    with writer.transaction() as tx:
        assert tx.get("a") == b"1"
        writer.put("b", b"2")
        tx.put("b", b"3")
    assert writer.get("b") == b"3"


def test_H41_two_transactions_over_the_same_empty_range(writer):
    """H41: rows that were not there count as read: exactly one commits."""
    one, other = writer.transaction(), writer.transaction()
    for tx, key in ((one, "x1"), (other, "x2")):
        assert list(tx.scan(prefix="x")) == []
        tx.put(key, b"1")
    one.commit()
    with pytest.raises(reef.ConflictError):
        other.commit()
    assert [key for key, _ in writer.scan(prefix="x")] == [b"x1"]


def test_a_late_read_of_a_newer_row_raises_at_once(writer):
    """No transaction mixes two snapshots, not even one that would not commit."""
    with writer.transaction() as tx:
        assert tx.get("a") == b"1"
        writer.write(reef.Batch().put("a", b"2").put("b", b"2"))
        with pytest.raises(reef.ConflictError):
            tx.get("b")
        tx.rollback()


def test_reading_alone_never_conflicts_later(writer):
    """A transaction that writes nothing is as of its beginning."""
    with writer.transaction() as tx:
        assert tx.get("a") == b"1"
        writer.put("a", b"2")
    assert tx.receipt is None


def test_an_ingest_conflicts_where_its_keys_may_be(db, writer):
    """Which keys it has is not known: its key range counts."""
    tx = writer.transaction()
    assert tx.get("b") == b"1"
    ingest(db.store, NAME, {b"a": b"bulk", b"c": b"bulk"})
    tx.put("z", b"1")
    with pytest.raises(reef.ConflictError):
        tx.commit()
    assert writer.get("b") == b"1"
    assert writer.get("a") == b"bulk"


def test_a_fold_is_no_conflict(db, writer):
    """It changes no row."""
    with writer.transaction() as tx:
        assert tx.get("a") == b"1"
        fold(db, NAME)
        writer.refresh()
        tx.put("a", b"2")
    assert writer.get("a") == b"2"


def test_transfers_keep_the_sum(writer):
    """Many transactions by many threads, each retried until it wins."""
    from concurrent.futures import ThreadPoolExecutor

    def transfer(number):
        source, target = "abc"[number % 3], "abc"[(number + 1) % 3]
        for _ in range(1000):
            try:
                with writer.transaction() as tx:
                    tx.put(source, b"%d" % (int(tx.get(source)) - 1))
                    tx.put(target, b"%d" % (int(tx.get(target)) + 1))
                return
            except reef.ConflictError:
                pass
        raise AssertionError("lost a thousand times")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(transfer, range(30)))
    assert {key: int(value) for key, value in writer.scan()} == {b"a": 1, b"b": 1, b"c": 1}


def test_a_table_in_a_transaction(db):
    """Rows, patches over committed and over staged rows."""
    db.create("events", pa.schema([("id", pa.string()), ("n", pa.int64()), ("s", pa.string())]))
    with db.writer("events") as events:
        events.upsert([{"id": "a", "n": 1, "s": "x"}])
        with events.transaction() as tx:
            tx.patch([{"id": "a", "n": 2}])
            tx.upsert([{"id": "b", "n": 5}])
            tx.patch([{"id": "b", "s": "y"}, {"id": "none", "s": "z"}])
            assert tx.get("a") == {"id": "a", "n": 2, "s": "x"}
            assert dict(tx.scan()) == {
                "a": {"id": "a", "n": 2, "s": "x"},
                "b": {"id": "b", "n": 5, "s": "y"},
            }
        assert tx.receipt.ops == 3, "none has no row"
        assert events.get("b") == {"id": "b", "n": 5, "s": "y"}


def test_a_row_read_below_a_staged_patch_counts_as_read(db):
    """H41: a patch alone does not show the rest of the row: another write to it is a conflict."""
    db.create("events", pa.schema([("id", pa.string()), ("n", pa.int64()), ("s", pa.string())]))
    with db.writer("events") as events:
        events.upsert([{"id": "a", "n": 1, "s": "x"}])
        tx = events.transaction()
        tx.patch([{"id": "a", "n": 2}])
        assert tx.get("a") == {"id": "a", "n": 2, "s": "x"}
        events.upsert([{"id": "a", "n": 1, "s": "other"}])
        with pytest.raises(reef.ConflictError):
            tx.commit()


def test_a_transaction_that_is_over_refuses(writer):
    """After its end, in whatever way it came."""
    with writer.transaction() as tx:
        tx.put("k", b"v")
    for call in (lambda: tx.get("k"), lambda: tx.put("k", b"w"), tx.commit):
        with pytest.raises(reef.ClosedError, match="has ended"):
            call()


def test_bad_input_is_rejected_when_it_is_staged(writer):
    """And nothing of it is kept."""
    with writer.transaction() as tx:
        with pytest.raises(reef.InvalidInputError):
            tx.put("k", 17)
        with pytest.raises(reef.InvalidInputError):
            tx.put("", b"v")
        tx.put("k", b"v")
    assert tx.receipt.ops == 1


def test_bounds(db):
    """Too many reads are refused; a transaction that is too old has to begin again."""
    with db.writer(NAME, transaction_reads_max=3, footprint_bytes_max=200) as writer:
        greedy = writer.transaction()
        for number in range(3):
            greedy.get(f"k{number}")
        with pytest.raises(reef.InvalidInputError, match="more than transaction_reads_max=3 reads"):
            greedy.get("k4")
        greedy.rollback()
        old = writer.transaction()
        old.get("k")
        for number in range(5):
            writer.put(f"other{number}", b"v")
        old.put("k", b"v")
        with pytest.raises(reef.ConflictError, match="open for too long"):
            old.commit()
        assert writer._footprints._open == {}, "none is open: nothing is remembered"
        assert not writer._footprints._kept


def ops(*keys):
    """Return puts of some keys."""
    return Ops(pa.array(keys, pa.binary()), pa.array([0] * len(keys), pa.uint8()))


def test_footprints_are_kept_only_while_they_are_needed():
    """Each transaction minds what came after its beginning."""
    footprints = Footprints(10_000)
    footprints.applying([ops(b"before")])
    assert not footprints._kept, "none was open"
    first = footprints.begin()
    footprints.applying([ops(b"k1")])
    second = footprints.begin()
    footprints.applying([ops(b"k2")])
    assert footprints.conflict(first, Reads({b"k1"}))
    assert not footprints.conflict(second, Reads({b"k1"}))
    assert footprints.conflict(second, Reads(ranges=[KeyRange(b"k", b"l")]))
    assert not footprints.conflict(second, Reads({b"x"}, [KeyRange(b"l")]))
    footprints.end(first)
    assert len(footprints._kept) == 1
    footprints.end(second)
    assert not footprints._kept
