"""The engine against a plain dict: whatever is done in whatever order, both agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef import stores
from reef.jobs import fold

KEYS = st.sampled_from([b"a", b"b", b"c", b"ca", b"d", b"\xff", b"\xff\xff"])
VALUES = st.binary(max_size=5)
NAME = "users"


class Engine(RuleBasedStateMachine):
    """Puts, deletes, range deletes, batches, keyed retries, reopening, a second writer, folds."""

    @initialize(parallel=st.integers(1, 3), ack=st.sampled_from(["prefix", "independent"]))
    def open(self, parallel, ack):
        self.db = reef.Database(stores.open("memory://"))
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

    @rule(ops=st.lists(st.tuples(KEYS, st.one_of(st.none(), VALUES)), min_size=1, max_size=6))
    def write_batch(self, ops):
        batch = reef.Batch()
        for key, value in ops:
            batch.delete(key) if value is None else batch.put(key, value)
            self.model.pop(key, None)
            if value is not None:
                self.model[key] = value
        assert self.writer.write(batch).ops == len(ops)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=8))
    def put_without_waiting(self, pairs):
        futures = [self.writer.put(key, value, wait=False) for key, value in pairs]
        self.model.update(pairs)
        receipts = [future.result(30) for future in futures]
        assert [(r.lsn, r.index) for r in receipts] == sorted((r.lsn, r.index) for r in receipts)

    @rule(name=st.sampled_from("xyz"), key=KEYS, value=VALUES)
    def put_keyed(self, name, key, value):
        """The same idempotency key again is answered, not applied."""
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


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
