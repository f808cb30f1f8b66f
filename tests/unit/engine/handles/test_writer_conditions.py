"""Conditional writes: decided on durable rows, once, and again only after a lost slot."""

import pyarrow as pa
import pytest

import reef
from reef.errors import ConditionFailedError
from reef.formats.wal_object import WalObject
from reef.jobs import fold
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import ingest

NAME = "users"


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


@pytest.fixture(params=["in memory", "folded"])
def writer(request, db):
    """Give a writer with a row, which is in memory or in a segment."""
    with db.writer(NAME) as writer:
        writer.put("there", b"1")
        if request.param == "folded":
            fold(db, NAME)
            writer.refresh()
        yield writer


def test_a_condition_of_an_unknown_kind_is_rejected():
    """A kind that no function makes is an error, and is not evaluated as another kind."""
    with pytest.raises(reef.InvalidInputError, match="absent, present, equals"):
        reef.Condition(b"k", "equal", "value", b"1")


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (reef.absent("new"), True),
        (reef.absent("there"), False),
        (reef.present("there"), True),
        (reef.present("new"), False),
        (reef.equals("there", "value", b"1"), True),
        (reef.equals("there", "value", b"2"), False),
        (reef.equals("there", "value", None), False),
        (reef.equals("new", "value", None), False),
    ],
    ids=str,
)
def test_each_condition(writer, condition, holds):
    """The batch commits if it holds, and otherwise nothing is written."""
    before = dict(writer.scan())
    if holds:
        assert writer.put("k", b"v", when=[condition]).lsn
        assert writer.get("k") == b"v"
    else:
        with pytest.raises(reef.ConditionFailedError, match=condition.kind):
            writer.put("k", b"v", when=[condition])
        assert dict(writer.scan()) == before


def test_all_conditions_must_hold(writer):
    """One that fails is enough, and is the one that is named."""
    with pytest.raises(reef.ConditionFailedError, match=r"absent\(b'there'\)"):
        writer.put("k", b"v", when=[reef.present("there"), reef.absent("there")])
    assert writer.get("k") is None


def test_a_counter_by_compare_and_set(writer):
    """Many increments in flight: each is decided on top of the one before."""
    for number in range(2, 10):
        expected = reef.equals("there", "value", b"%d" % (number - 1))
        writer.put("there", b"%d" % number, when=[expected])
    assert writer.get("there") == b"9"


def test_only_one_of_many_creates_wins(db):
    """Sent together without waiting, with several PUTs in flight."""
    with db.writer(NAME, max_parallel_writes=4) as writer:
        absent = [reef.absent("k")]
        futures = [writer.put("k", b"%d" % n, when=absent, wait=False) for n in range(10)]
        errors = [future.exception(30) for future in futures]
        assert [type(error) for error in errors].count(reef.ConditionFailedError) == 9
        assert writer.get("k") == b"%d" % errors.index(None)


def test_a_conditional_batch_with_a_key_gets_its_first_receipt_again(writer):
    """The receipt comes back although the condition is false by now."""
    options = {"when": [reef.absent("k")], "idempotency_key": "once"}
    first = writer.put("k", b"v", **options)
    again = writer.put("k", b"v", **options)
    assert (again.lsn, again.replayed) == (first.lsn, True)


def test_the_log_records_the_conditions(db, writer):
    """For audits; replay does not read it."""
    receipt = writer.put("k", b"v", when=[reef.absent("k"), reef.equals("there", "value", b"1")])
    key = Namespace(NAME).wal_object(receipt.lsn)
    (batch,) = WalObject.decode(db.store.get(key), key).header.batches
    assert batch.when == [["absent", b"k", None, None], ["equals", b"there", "value", b"1"]]


def test_H20_replay_does_not_decide_again(db):
    """H20: an acknowledged batch stays, although its condition is false of the later state."""
    with db.writer(NAME) as writer:
        writer.put("k", b"v", when=[reef.absent("k")])
    with db.writer(NAME) as again:
        assert again.get("k") == b"v"
    fold(db, NAME)
    assert db.reader(NAME).get("k") == b"v"


def test_H46_a_condition_is_decided_again_after_a_lost_slot(db):
    """H46: a load takes the slot and makes the condition false: the batch is refused."""
    writer = db.writer(NAME)
    writer.put("other", b"1")
    slot = writer._committer.tail.next_lsn

    class LoadsFirst(Wrapper):
        """A bulk load takes the writer's slot just before its PUT arrives."""

        done = False

        def create(self, key, body):
            if not self.done and key == Namespace(NAME).wal_object(slot):
                self.done = True
                ingest(db.store, NAME, {b"k": b"bulk"})
            return self.inner.create(key, body)

    writer._committer.log._store = LoadsFirst(writer._committer.log._store)
    with pytest.raises(reef.ConditionFailedError, match="absent"):
        writer.put("k", b"v", when=[reef.absent("k")])
    assert writer.get("k") == b"bulk"
    assert writer.put("k", b"v", when=[reef.present("k")]).lsn > slot


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (lambda: reef.equals("k", "nope", 1), "column 'nope'"),
        (lambda: reef.equals("k", "value", 17), "17 is not of type binary"),
        (lambda: reef.absent(""), "1 to 65535 bytes"),
        (lambda: reef.present(17), "bytes or str"),
    ],
)
def test_impossible_conditions_are_refused(writer, condition, says):
    """Before anything is written."""
    with pytest.raises(reef.InvalidInputError, match=says):
        writer.put("k", b"v", when=[condition()])
    assert writer.get("k") is None


def test_many_conditions_are_looked_up_together():
    """A hundred keys of two segments, cold: the tails and a range of pages of each; one by one it
    was a request for nearly each of them."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    keys = [b"%05d" % number for number in range(20_000)]
    with db.writer("plain", background=False) as writer:
        for half in (keys[:10_000], keys[10_000:]):
            values = [bytes(key) * 20 for key in half]
            writer.upsert(pa.table({"id": half, "value": values}))
            fold(db, "plain")
    with db.writer("plain", background=False) as writer:
        some = keys[::200]
        when = [reef.equals(key, "value", key * 20) for key in some]
        batch = reef.Batch().put(b"new", b"1")
        meter.reset()
        assert writer.write(batch, when=[*when, reef.absent(b"00000x")]).lsn
        assert meter.requests()["get"] <= 8
        writer.delete(some[7])
        with pytest.raises(ConditionFailedError, match=some[7].decode()):
            writer.write(batch, when=when)
        with pytest.raises(ConditionFailedError, match="00200"):
            writer.write(batch, when=[*when[:5], reef.absent(keys[200])])
