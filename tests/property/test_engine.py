"""The engine against a plain dict: whatever is done in whatever order, both agree."""

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef.jobs import fold
from reef.stores import Outcome, ReadBack, Wrapper, WriteResult, agree_on_cas
from reef.testing import Simulation
from tests.simulation.two_phase_register import TwoPhaseSimulation
from tests.support.bulk_jobs import load
from tests.support.sweep_world import World

KEYS = st.sampled_from([b"a", b"b", b"c", b"ca", b"d", b"\xff", b"\xff\xff"])
VALUES = st.binary(max_size=5)
SINGLE_OPS = st.tuples(KEYS, st.one_of(st.none(), VALUES))
NAME = "users"


class Until(NamedTuple):
    """The end of a range that is deleted."""

    end: bytes


RANGES = st.tuples(KEYS, KEYS).filter(lambda ends: ends[0] < ends[1])
RANGES = RANGES.map(lambda ends: (ends[0], Until(ends[1])))


class LosesResponses(Wrapper):
    """Carries out the next PUT into the log, and does not say so."""

    armed = False

    def create(self, key, body):
        result = self.inner.create(key, body)
        if self.armed and "/wal/" in key:
            self.armed = False
            return WriteResult(Outcome.UNKNOWN)
        return result


class Engine(RuleBasedStateMachine):
    """Puts, deletes, range deletes, batches, keyed retries, reopening, a second writer, folds;
    transactions, conditions, bulk loads, lost responses; snapshots and time travel under sweeps;
    drops, undrops and names that are created again.

    On virtual time, so that sweeps find old objects.
    """

    simulation = Simulation

    @initialize(parallel=st.integers(1, 3), ack=st.sampled_from(["prefix", "independent"]))
    def open(self, parallel, ack):
        self.world = World(simulation=self.simulation)
        agree_on_cas(self.world.bucket)
        self.network = LosesResponses(self.world.bucket)
        self.db = reef.Database(ReadBack(self.network))
        self.snapshots, self.past, self.buried, self.swept = [], [], [], 0
        self.settings = {"max_parallel_writes": parallel, "ack": ack, "group_bytes_max": 300}
        self.writer = self.db.writer(NAME, **self.settings)
        self.reader = self.db.reader(NAME, refresh_interval_ms=1e9)
        self.model = {}
        self.keyed = {}

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        self.writer.put(key, value)
        self.model[key] = value

    @rule(key=KEYS)
    def delete(self, key):
        self.writer.delete(key)
        self.model.pop(key, None)

    @rule(ends=st.tuples(KEYS, KEYS).filter(lambda ends: ends[0] < ends[1]))
    def delete_range(self, ends):
        self.writer.delete_range(*ends)
        self._delete_range(*ends)

    @rule(ops=st.lists(st.one_of(SINGLE_OPS, RANGES), min_size=1, max_size=6))
    def write_batch(self, ops):
        """Operations on the same keys in one batch take effect in their order."""
        batch = reef.Batch()
        for key, value in ops:
            if isinstance(value, Until):
                batch.delete_range(key, value.end)
                self._delete_range(key, value.end)
                continue
            batch.delete(key) if value is None else batch.put(key, value)
            _set(self.model, key, value)
        assert self.writer.write(batch).ops == len(ops)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=8))
    def put_without_waiting(self, pairs):
        def put_all():
            futures = [self.writer.put(key, value, wait=False) for key, value in pairs]
            return [future.result(30) for future in futures]

        receipts = self.world.run(put_all)
        self.model.update(pairs)
        assert [(r.lsn, r.index) for r in receipts] == sorted((r.lsn, r.index) for r in receipts)

    @rule(name=st.sampled_from("xyz"), key=KEYS, value=VALUES)
    def put_keyed(self, name, key, value):
        """A repeated idempotency key returns the receipt, and is not applied."""
        known = self.keyed.get(name)
        if known is not None and known[:2] != (key, value):
            return
        receipt = self.writer.put(key, value, idempotency_key=name)
        assert receipt.replayed == (known is not None)
        if known is None:
            self.keyed[name] = (key, value, receipt.lsn)
            self.model[key] = value
        else:
            assert receipt.lsn == known[2]

    @rule(name=st.sampled_from("xyz"), key=KEYS, value=VALUES)
    def put_keyed_and_lose_the_response(self, name, key, value):
        """First on the network, then with the process: the retry returns the outcome."""
        if name in self.keyed:
            return
        self.network.armed = True
        receipt = self.world.run(lambda: self.writer.put(key, value, idempotency_key=name))
        assert not receipt.replayed
        self.model[key] = value
        self.keyed[name] = (key, value, receipt.lsn)
        self.writer = self.db.writer(NAME, **self.settings)
        again = self.writer.put(key, value, idempotency_key=name)
        assert (again.replayed, again.lsn) == (True, receipt.lsn)

    @rule(key=KEYS, value=VALUES)
    def put_and_lose_the_response(self, key, value):
        self.writer.refresh()  # a sweep may have put the abort of a load into the next slot
        self.network.armed = True
        first = self.writer._committer.tail.next_lsn
        assert self.world.run(lambda: self.writer.put(key, value)).lsn == first
        self.model[key] = value

    # --- conditions, transactions, loads ------------------------------------------------
    @rule(asked=KEYS, wanted=st.sampled_from(["absent", "present", "equals"]), value=VALUES)
    def put_if(self, asked, wanted, value):
        held, there = b"written if", self.model.get(asked)
        condition = {
            "absent": (reef.absent(asked), there is None),
            "present": (reef.present(asked), there is not None),
            "equals": (reef.equals(asked, "value", value), there == value),
        }[wanted]
        try:
            self.writer.put(b"d", held, when=[condition[0]])
        except reef.ConditionFailedError:
            assert not condition[1]
        else:
            assert condition[1]
            self.model[b"d"] = held

    @rule(
        reads=st.lists(KEYS, max_size=3),
        writes=st.lists(st.tuples(KEYS, st.one_of(st.none(), VALUES)), max_size=4),
        scans=st.booleans(),
        ends=st.sampled_from(["commits", "aborts", "meets another"]),
        other=KEYS,
    )
    def transact(self, reads, writes, scans, ends, other):
        """It sees the model and its own writes; a write to a row that it has read is a conflict."""
        seen, before = dict(self.model), dict(self.model)
        try:
            with self.writer.transaction() as tx:
                assert [tx.get(key) for key in reads] == [seen.get(key) for key in reads]
                if scans:
                    assert dict(tx.scan(b"a", b"c")) == _within(seen, b"a", b"c")
                for key, value in writes:
                    tx.delete(key) if value is None else tx.put(key, value)
                    _set(seen, key, value)
                    assert tx.get(key) == value
                if ends == "aborts":
                    raise InterruptedError
                if ends == "meets another":
                    self.writer.put(other, b"the other's")
                    before[other] = b"the other's"
            committed = True
        except InterruptedError:
            committed = False
        except reef.ConflictError:
            assert ends == "meets another"
            assert other in reads or (scans and b"a" <= other < b"c")
            committed = False
        if committed and ends == "meets another":
            assert not (writes and (other in reads or (scans and b"a" <= other < b"c")))
        self.model = before
        for key, value in writes if committed else ():
            _set(self.model, key, value)

    @rule(rows=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), key=st.sampled_from("pqr"))
    def load(self, rows, key):
        """A bulk job takes its place among the writes; a second one with its key does nothing."""
        lsn = self.world.run(lambda: load(self.world.bucket, NAME, rows, key=key))
        assert (lsn is None) == (key in self.keyed)
        if lsn is not None:
            self.keyed[key] = (rows, None, lsn)
            self.model.update(rows)
        self.writer.refresh()

    # --- time travel, sweeping ----------------------------------------------------------
    @rule()
    def take_snapshot(self):
        self.snapshots.append((self.db.snapshot(NAME), dict(self.model)))

    @rule(data=st.data())
    def read_a_snapshot(self, data):
        """However often it was folded and swept since."""
        if self.snapshots:
            place = data.draw(st.integers(0, len(self.snapshots) - 1))
            snapshot, model = self.snapshots.pop(place)
            with self.db.reader(NAME, snapshot=snapshot) as view:
                assert dict(view.scan()) == model
            snapshot.release()

    @rule(key=KEYS, value=VALUES)
    def remember_a_timestamp(self, key, value):
        lsn = self.writer.put(key, value).lsn
        self.model[key] = value
        self.past.append((lsn, dict(self.model), self.swept))

    @rule(data=st.data())
    def read_as_of(self, data):
        """The rows of that time; or an error that it is collected, but only after a sweep."""
        if not self.past:
            return
        lsn, model, swept = data.draw(st.sampled_from(self.past))
        try:
            with self.db.reader(NAME).as_of(lsn=lsn) as view:
                assert dict(view.scan()) == model
        except reef.NotFoundError:
            assert self.swept > swept

    @rule()
    def sweep(self):
        """Days pass, and all unneeded objects are deleted."""
        self.swept += 1
        self.world.advance(2 * 24 * 3600)
        self.world.sweep_twice()

    # --- lives --------------------------------------------------------------------------
    @rule()
    def drop_and_undrop(self):
        """All of it is as it was; only the writer is fenced."""
        old = self.writer
        self.world.run(lambda: self.db.drop(NAME))
        self.world.run(lambda: self.db.undrop(NAME))
        self.writer = self.db.writer(NAME, **self.settings)
        with pytest.raises(reef.FencedError):
            self.world.run(lambda: old.put(b"a", b"by a zombie"))

    @rule(days=st.integers(0, 2), sweeps=st.booleans())
    def drop_and_create(self, days, sweeps):
        """Nothing of the first life is in the second; its snapshots can still be read."""
        old = self.writer
        self.world.run(lambda: self.db.drop(NAME))
        self.world.advance(days * 24 * 3600)
        if sweeps:
            self.world.sweep_twice()
        self.world.run(lambda: self.db.create(NAME))
        self.buried += [lsn for lsn, _, _ in self.past]
        self.past, self.model, self.keyed = [], {}, {}
        self.writer = self.db.writer(NAME, **self.settings)
        with pytest.raises(reef.FencedError):
            self.world.run(lambda: old.put(b"a", b"by a zombie"))
        assert dict(self.writer.scan()) == {}

    @rule(data=st.data())
    def read_before_the_creation(self, data):
        """An LSN of an earlier life is an error in this one."""
        if self.buried:
            lsn = data.draw(st.sampled_from(self.buried))
            with pytest.raises(reef.NotFoundError):
                self.db.reader(NAME).as_of(lsn=lsn)

    # --- handles ------------------------------------------------------------------------
    @rule()
    def reopen(self):
        self.writer.close()
        self.writer = self.db.writer(NAME, **self.settings)

    @rule()
    def crash_and_reopen(self):
        """The old handle is just forgotten; the next one fences it."""
        self.writer = self.db.writer(NAME, **self.settings)

    @rule(key=KEYS)
    def the_old_writer_is_fenced(self, key):
        old, self.writer = self.writer, self.db.writer(NAME, **self.settings)
        try:
            old.put(key, b"by a zombie")
        except reef.FencedError:
            return
        raise AssertionError("two writers at once")

    @rule()
    def fold(self):
        fold(self.db, NAME, segment_bytes_max=100, group_bytes=40)

    @rule()
    def refresh_writer(self):
        self.writer.refresh()

    @rule()
    def refresh_reader(self):
        self.reader.refresh()
        assert dict(self.reader.scan()) == self.model

    @rule(
        start=KEYS, end=KEYS, reverse=st.booleans(), limit=st.one_of(st.none(), st.integers(0, 3))
    )
    def scan(self, start, end, reverse, limit):
        expected = sorted((k, v) for k, v in self.model.items() if start <= k < end)
        expected = (expected[::-1] if reverse else expected)[:limit]
        assert list(self.writer.scan(start, end, reverse=reverse, limit=limit)) == expected

    @rule(prefix=st.sampled_from([b"c", b"\xff", b"zz"]))
    def scan_prefix(self, prefix):
        expected = sorted((k, v) for k, v in self.model.items() if k.startswith(prefix))
        assert list(self.writer.scan(prefix=prefix)) == expected

    @invariant()
    def reads_agree(self):
        if hasattr(self, "writer"):
            for key in (b"a", b"ca", b"\xff\xff"):
                assert self.writer.get(key) == self.model.get(key)

    def _delete_range(self, start, end):
        for key in [key for key in self.model if start <= key < end]:
            del self.model[key]


def _set(rows, key, value):
    rows.pop(key, None)
    if value is not None:
        rows[key] = value


def _within(rows, start, end):
    return {key: value for key, value in rows.items() if start <= key < end}


class EngineOnTwoPhase(Engine):
    """The same on a bucket without conditional writes, with a register."""

    simulation = TwoPhaseSimulation


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestEngineOnTwoPhase = EngineOnTwoPhase.TestCase
TestEngineOnTwoPhase.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
