"""A writer with a local log is a sorted map, whatever of it is on the disk, in the bucket, folded,
or recovered after a crash."""

import random

import pytest

import reef
from reef.engine.handles.database import Database
from reef.errors import ConditionFailedError
from reef.jobs import fold
from reef.stores.memory import MemoryStore
from reef.testing.disk import SimulatedDisk
from reef.testing.power_failures import random_crash

NAME = "users"
SETTINGS = {
    "durability": "local",
    "local_log": "/log",
    "background": False,
    "upload_interval_ms": 1e9,
    "local_segment_bytes": 2048,
    "write_deadline_s": 5.0,
}
KEYS = [b"%c%c" % (a, b) for a in b"abc" for b in b"abcd"]


class Machine:
    """A writer, its expected rows, and its disk."""

    def __init__(self, rng):
        self.rng, self.store, self.rows, self.keyed = rng, MemoryStore(), {}, []
        self.disk = SimulatedDisk()
        self.start()

    def start(self):
        db = Database(self.store)
        db._log_files = self.disk
        self.writer = db.writer(NAME, **SETTINGS)

    def stop(self):
        """Crash, with a power failure or without: acknowledged writes stay."""
        self.writer._uploader.stop()
        self.writer._closed = True
        if self.rng.random() < 0.5:
            _, content = random_crash(self.disk, self.rng.randrange, len(self.disk.trace))
            self.disk = SimulatedDisk(content)
        else:
            self.disk.restart()
        self.start()

    def step(self):
        choices = [self.put] * 8 + [self.delete] * 2 + [self.batch] * 3 + [self.repeat, self.remove]
        choices += [self.condition, self.transaction, self.upload, self.fold, self.stop, self.close]
        self.rng.choice(choices)()
        self.check_rows()

    # --- writes -------------------------------------------------------------------
    def put(self):
        key, value = self.rng.choice(KEYS), self.rng.randbytes(self.rng.choice((0, 3, 300)))
        if self.rng.random() < 0.3:
            self.writer.put(key, value, wait=False).result()
        else:
            self.writer.put(key, value)
        self.rows[key] = value

    def delete(self):
        key = self.rng.choice(KEYS)
        self.writer.delete(key)
        self.rows.pop(key, None)

    def remove(self):
        low, high = sorted(self.rng.sample(KEYS, 2))
        self.writer.delete_range(low, high)
        self.rows = {key: row for key, row in self.rows.items() if not low <= key < high}

    def batch(self):
        one, two = self.rng.sample(KEYS, 2)
        number = f"job-{self.rng.random()}"
        batch = reef.Batch().put(one, number.encode()).delete(two)
        self.writer.write(batch, idempotency_key=number)
        self.keyed.append((number, one, two))
        self.rows[one] = number.encode()
        self.rows.pop(two, None)

    def repeat(self):
        """Hand a batch over again: it counts once, wherever it is by now."""
        if self.keyed:
            number, one, two = self.rng.choice(self.keyed)
            batch = reef.Batch().put(one, number.encode()).delete(two)
            assert self.writer.write(batch, idempotency_key=number).replayed

    def condition(self):
        key, value = self.rng.choice(KEYS), b"only if"
        try:
            self.writer.put(key, value, when=[reef.absent(key)])
        except ConditionFailedError:
            assert key in self.rows
        else:
            assert key not in self.rows
            self.rows[key] = value

    def transaction(self):
        key, other = self.rng.sample(KEYS, 2)
        with self.writer.transaction() as tx:
            assert tx.get(key) == self.rows.get(key)
            value = (tx.get(key) or b"")[:20] + b"!"
            tx.put(other, value)
        self.rows[other] = value

    # --- what must not matter -----------------------------------------------------
    def upload(self):
        self.writer.flush()

    def fold(self):
        fold(Database(self.store), NAME)
        self.writer.refresh()

    def close(self):
        self.writer.close()
        self.start()
        assert self.writer.local_recovery.replayed == 0

    # --- reads --------------------------------------------------------------------
    def check_rows(self):
        low, high = sorted(self.rng.sample(KEYS, 2))
        within = [(k, v) for k, v in sorted(self.rows.items()) if low <= k < high]
        assert list(self.writer.scan()) == sorted(self.rows.items())
        assert list(self.writer.scan(start=low, end=high, reverse=True)) == within[::-1]
        assert (
            list(self.writer.scan(prefix=b"b", limit=2))
            == [(k, v) for k, v in sorted(self.rows.items()) if k.startswith(b"b")][:2]
        )
        key = self.rng.choice(KEYS)
        assert self.writer.get(key) == self.rows.get(key)
        found = self.writer.get_many(KEYS).column("value").to_pylist()
        assert found == [self.rows.get(key) for key in KEYS]


@pytest.mark.parametrize("seed", range(6))
def test_a_sorted_map(seed):
    """Puts, deletes, ranges, keyed batches, conditions and transactions, between uploads, folds,
    deaths and returns: every read returns the acknowledged rows."""
    machine = Machine(random.Random(seed))
    for _ in range(60):
        machine.step()
    machine.writer.close()
    assert list(Database(machine.store).reader(NAME).scan()) == sorted(machine.rows.items())
