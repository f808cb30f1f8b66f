"""Crashes after the PUT and before the response: all operations of a writer, and views."""

import pyarrow as pa

import reef
from reef.jobs import fold
from tests.crash.operations import ABSENT, NAME, Operation

OLD = {b"a": b"1", b"b": b"2", b"c": b"3"}
TABLE = pa.schema([("id", pa.string()), ("n", pa.int64()), ("word", pa.string())])


def rows_before(hand):
    """Leave a few rows, one half folded."""
    hand.put({b"a": b"1", b"b": b"2"})
    fold(hand.db, NAME)
    hand.put({b"c": b"3"})


def _first_writer(hand):
    hand.put({b"k0": b"v0", b"k1": b"v1"})


def _writer(hand):
    hand.put({b"a": b"newer", b"b": ABSENT, b"d": b"4"})


def _pipelined(**settings):
    def work(hand):
        with hand.db.writer(NAME, background=False, max_parallel_writes=3, **settings) as writer:
            flying = []
            for number in range(5):
                key, value = b"ab"[number % 2 :][:1], b"flight %d" % number
                hand.ledger.sent(key, value)
                flying.append((key, value, writer.put(key, value, wait=False)))
            for key, value, future in flying:
                future.result()
                hand.ledger.acknowledged(key, value)

    return work


def _takeover(hand):
    """From a writer that is still there, with more in flight than that one had."""
    with hand.db.writer(NAME, background=False) as first:
        hand.write(first, {b"a": b"first"})
        with hand.db.writer(NAME, background=False, max_parallel_writes=2) as second:
            hand.write(second, {b"a": b"second", b"d": b"4"})


def _decided(hand):
    """Writes that are decided before they are sent: keyed, conditional, a transaction."""
    with hand.db.writer(NAME, background=False) as writer:
        hand.write(writer, {b"keyed": b"once"}, idempotency_key="once")
        hand.ledger.sent(b"a", b"from a transaction")
        with writer.transaction() as tx:
            tx.get("b")
            tx.put("a", b"from a transaction")
        hand.ledger.acknowledged(b"a", b"from a transaction")
        if writer.get("new") is None:
            hand.ledger.sent(b"new", b"1")
            writer.write(reef.Batch().put("new", b"1"), when=[reef.absent("new")])
            hand.ledger.acknowledged(b"new", b"1")


def _deletes_a_range(hand):
    """One batch: all of it, or nothing; and a row that has expired at the next read."""
    hand.ledger.noted({b"short": ABSENT})
    with hand.db.writer(NAME, background=False) as writer:
        for key in OLD:
            hand.ledger.sent(key, ABSENT)
        writer.delete_range("a", "d")
        for key in OLD:
            hand.ledger.acknowledged(key, ABSENT)
        writer.put("short", b"lived", ttl_s=1.0)


def _table(hand):
    hand.db.create(NAME, TABLE)
    with hand.db.writer(NAME, background=False) as writer:
        row = {"id": "x", "n": 1, "word": "one"}
        writer.upsert([row])
        hand.ledger.noted({"x": row})


def _patches(hand):
    """Patches, and a schema that grows between them."""
    with hand.db.writer(NAME, background=False) as writer:
        hand.ledger.sent("x", {"id": "x", "n": 2, "word": "one"})
        writer.patch([{"id": "x", "n": 2}])
        hand.ledger.acknowledged("x", {"id": "x", "n": 2, "word": "one"})
    grown = TABLE.append(pa.field("more", pa.string()))
    patched = {"id": "x", "n": 2, "word": "one"}
    hand.ledger.sent("x", {**patched, "more": None})
    hand.db.alter(NAME, grown)
    hand.ledger.acknowledged("x", {**patched, "more": None})
    with hand.db.writer(NAME, background=False) as writer:
        hand.ledger.sent("x", {**patched, "more": "much"})
        writer.patch([{"id": "x", "more": "much"}])
        hand.ledger.acknowledged("x", {**patched, "more": "much"})


def _patches_again(hand):
    """The schema has grown by now, or grows."""
    hand.db.alter(NAME, TABLE.append(pa.field("more", pa.string())))
    with hand.db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "x", "n": 3, "word": "three", "more": None}])
    hand.ledger.noted({"x": {"id": "x", "n": 3, "word": "three", "more": None}})


def _snapshots(hand):
    """Take one, prolong it, and let it go."""
    snapshot = hand.db.snapshot(NAME, ttl_s=60.0)
    snapshot.extend(120.0)
    with hand.db.reader(NAME, snapshot=snapshot) as reader:
        assert dict(reader.scan()) == OLD
    snapshot.release()


def _cursors(hand):
    """Register one, read, commit, and drop it."""
    cursor = hand.db.cursor(NAME, "feed", after_lsn=0)
    hand.facts.setdefault("changes", len(list(cursor)))
    assert hand.facts["changes"]
    cursor.commit()
    hand.db.drop_cursor(NAME, "feed")


def _pinned(hand):
    """A lease is taken, renewed and released; after a crash it expires."""
    with hand.db.reader(NAME, pin=True) as reader:
        assert dict(reader.scan()) == OLD


OPERATIONS = [
    Operation("the first writer of a namespace", _first_writer, reaches=("fence",)),
    Operation("a writer", _writer, rows_before, reaches=("fence",)),
    Operation("writes in flight, in order", _pipelined(), rows_before),
    Operation("writes in flight, on their own", _pipelined(ack="independent"), rows_before),
    Operation("a writer takeover", _takeover, rows_before, reaches=("fence",)),
    Operation("keys, conditions, a transaction", _decided, rows_before),
    Operation("a range delete and a short life", _deletes_a_range, rows_before),
    Operation("patches and a growing schema", _patches, _table, again=_patches_again),
    Operation("a snapshot", _snapshots, rows_before, again=lambda hand: None),
    Operation("a cursor", _cursors, rows_before),
    Operation("a pinned reader", _pinned, rows_before, again=lambda hand: None),
]
