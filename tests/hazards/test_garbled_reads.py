"""H1 with H8: the read that identifies the owner of an object may be truncated or garbled."""

import pytest

import reef
from reef.formats.wal_object import WalKind, WalObject
from reef.paths import Namespace
from reef.stores import Outcome, ReadBack, Retry
from reef.stores.memory import MemoryStore
from reef.stores.probe import probe
from reef.testing import Fault, Faults, Rule
from tests.support.bulk_jobs import ingest

NAME = "users"
IN_TRANSIT = pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.WRONG_BYTES], ids=str)


def kinds(bucket):
    """Return the objects in the slots of the log."""
    keys = [info.key for info in bucket.list(Namespace(NAME).wal)]
    return [WalObject.decode(bucket.get(key), key).header.kind for key in keys]


@IN_TRANSIT
def test_H8_H1_a_garbled_read_of_ones_own_write_is_not_a_lost_slot(fault):
    """The response is lost, and the read is garbled, once: one LSN, one object, one ack."""
    bucket = MemoryStore()
    rules = [Rule(Fault.FAIL_AFTER, "create", "*/wal/*2.wal", times=1)]
    rules.append(Rule(fault, "get", "*/wal/*2.wal", times=1))
    writer = reef.Database(ReadBack(Retry(Faults(bucket, rules)))).writer(NAME, background=False)
    assert writer.put("k", b"v").lsn == 2
    assert rules[1].struck == 1
    assert kinds(bucket) == [WalKind.FENCE, WalKind.BATCHES]
    assert writer.put("k", b"w").lsn == 3


@IN_TRANSIT
def test_H8_H1_a_garbled_read_does_not_deny_a_row_that_a_successor_replayed(fault):
    """The same, and a second writer opens meanwhile: it has the row, the first its receipt."""
    bucket = MemoryStore()
    slot = Namespace(NAME).wal_object(2)

    class TakenOver(Faults):
        """A second writer comes as soon as the first one's object is in its slot."""

        second = None

        def create(self, key, body):
            result = super().create(key, body)
            if key == slot and self.second is None:
                self.second = reef.Database(bucket).writer(NAME, background=False)
            return result

    rules = [Rule(Fault.FAIL_AFTER, "create", slot, times=1), Rule(fault, "get", slot, times=1)]
    network = TakenOver(bucket, rules)
    first = reef.Database(ReadBack(Retry(network))).writer(NAME, background=False)
    assert first.put("k", b"v").lsn == 2
    assert network.second.get("k") == b"v"
    with pytest.raises(reef.FencedError):
        first.put("k", b"w")


@IN_TRANSIT
def test_H8_an_opener_that_reads_a_garbled_winner_reads_again(fault):
    """It loses a slot to a bulk job; that object is intact, though the first read of it is not."""
    bucket = MemoryStore()
    reef.Database(bucket).writer(NAME, background=False).put("k", b"v")

    class Late(Faults):
        """A job's object comes into the slot of the opener's fence, just before it."""

        def create(self, key, body):
            if key.endswith("/wal/" + "3".zfill(20) + ".wal") and not self.came:
                self.came = True
                ingest(bucket, NAME, {b"loaded": b"v"})
            return super().create(key, body)

        came = False

    rules = [Rule(fault, "get", "*/wal/*3.wal", times=1)]
    writer = reef.Database(ReadBack(Retry(Late(bucket, rules)))).writer(NAME, background=False)
    assert rules[0].struck == 1
    assert dict(writer.scan()) == {b"k": b"v", b"loaded": b"v"}


def test_H8_an_object_that_was_torn_in_its_slot_still_belongs_to_its_writer():
    """Damage at rest reads the same each time: the slot is taken, and the opener gets an error."""
    bucket = MemoryStore()
    assert bucket.create("slot", b"beginning").landed
    result = ReadBack(Retry(bucket)).create("slot", b"beginning and end")
    assert (result.outcome, result.winner) == (Outcome.EXISTS, b"beginning")


@IN_TRANSIT
@pytest.mark.parametrize("name", ["*twice*", "*create-0*"])
def test_H8_a_probe_that_reads_garbled_bytes_reads_again(fault, name):
    """One garbled read does not make a valid store one without exclusive creation."""
    rules = [Rule(fault, "get", name, times=1)]
    verdict = probe(Faults(MemoryStore(), rules))
    assert rules[0].struck == 1
    assert (verdict.cas, verdict.if_match) == ("native", True)
