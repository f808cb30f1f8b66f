"""H15, H16, H19, H47: replay, its boundaries, and what happens in the middle of it.

A bank: transfers between accounts are batches, so the sum of all balances never changes, for
any reader, at any time. A batch that is seen in part would change it.
"""

import sys
import threading
import time

import msgspec
import pytest

import reef
from reef.engine.log.tail import Tail
from reef.errors import FencedError
from reef.formats.wal_object import WalObject
from reef.jobs import fold
from reef.manifest.head import HeadFinder, ManifestHead, Publisher
from reef.paths import Namespace
from reef.stores import Wrapper, agree_on_cas
from reef.testing import Chaos, Simulation, simulate
from tests.crash.deaths import deaths_of
from tests.crash.operations import Operation
from tests.support.bulk_jobs import ingest

NAME = "bank"
BANK = Namespace(NAME)
ACCOUNTS = ("a", "b", "c")
SUM = 300


class Bank:
    """Balances, and the batches that change them."""

    def __init__(self, balances=None):
        if balances is None:
            balances = dict.fromkeys(ACCOUNTS, SUM // len(ACCOUNTS))
        self.balances = balances

    @classmethod
    def read(cls, rows):
        return cls({key.decode(): int(value) for key, value in rows})

    def opening(self):
        return self._puts(ACCOUNTS, reef.Batch())

    def transfer(self, number):
        """Move some money; every third batch deletes all accounts and writes them again."""
        source, target = ACCOUNTS[number % 3], ACCOUNTS[(number + 1) % 3]
        self.balances[source] -= 7 + number
        self.balances[target] += 7 + number
        if number % 3 == 2:
            return self._puts(ACCOUNTS, reef.Batch().delete_range("a", "z"))
        return self._puts((source, target), reef.Batch())

    def _puts(self, accounts, batch):
        for account in accounts:
            batch.put(account, b"%d" % self.balances[account])
        return batch


def total(rows):
    """Return the sum of all balances; all accounts must be there."""
    balances = Bank.read(rows).balances
    assert set(balances) == set(ACCOUNTS)
    return sum(balances.values())


def opened_bank(db, transfers, folds=()):
    """Make a bank, with folds after some of the transfers."""
    bank = Bank()
    with db.writer(NAME) as writer:
        writer.write(bank.opening())
        for number in range(transfers):
            writer.write(bank.transfer(number))
            if number in folds:
                fold(db, NAME)
    return bank


# --- H15 ------------------------------------------------------------------------------


def test_H15_a_death_at_every_step_of_a_replay():
    """H15: the next to open finds every transfer whole, in the log and in segments."""

    def prepare(hand):
        opened_bank(hand.db, 3, folds=(0,))

    def reopen(hand):
        with hand.db.writer(NAME, background=False) as writer:
            writer.write(Bank.read(writer.scan()).transfer(5))

    deaths, _ = deaths_of(Operation("a replay", reopen, prepare))
    for death in deaths:
        db = reef.Database(death.restore().sim.bucket)
        assert total(db.reader(NAME).scan()) == SUM, death.where
        with db.writer(NAME, background=False) as writer:
            assert total(writer.scan()) == SUM, death.where
            assert writer.recovery.applied >= 2, death.where
            fold(db, NAME)
            writer.refresh()
            assert total(writer.scan()) == SUM, death.where
    points = [point for death in deaths for point in death.yield_points]
    assert len(points) > 80
    assert any("get" in what and "/wal/" in what for what in points), "in the middle of the replay"


def _bank_under_load(sim):
    """Pipelined transfers, folds and a reader concurrently; then one more writer opens."""
    agree_on_cas(sim.bucket)
    calm = reef.Database(sim.bucket)
    bank = opened_bank(calm, 0)
    teller, folder, reader = (sim.process(name) for name in ("teller", "folder", "reader"))
    sums = []

    def transfer():
        db = reef.Database(teller.store())
        with db.writer(NAME, max_parallel_writes=3, group_bytes_max=400) as writer:
            futures = []
            for number in range(12):
                futures.append(writer.write(bank.transfer(number), wait=False))
                sums.append(total(writer.scan()))
                if number % 4 == 3:
                    writer.refresh()
                teller.runtime.sleep(teller.runtime.uniform(0.0, 0.05))
            for future in futures:
                future.result()
            sums.append(total(writer.scan()))

    def fold_often():
        for _ in range(4):
            fold(reef.Database(folder.store()), NAME)
            folder.runtime.sleep(folder.runtime.uniform(0.0, 0.2))

    def read_often():
        view = reef.Database(reader.store()).reader(NAME, refresh_interval_ms=0)
        for _ in range(10):
            sums.append(total(view.scan()))
            sums.append(total(view.scan(reverse=True)))
            reader.runtime.sleep(reader.runtime.uniform(0.0, 0.1))

    teller.spawn(transfer)
    folder.spawn(fold_often)
    reader.spawn(read_often)
    sim.run()
    assert set(sums) == {SUM}
    with calm.writer(NAME) as writer:
        assert Bank.read(writer.scan()).balances == bank.balances
    fold(calm, NAME)
    assert Bank.read(calm.reader(NAME).scan()).balances == bank.balances


@pytest.mark.parametrize("lost_response", [0.0, 0.03])
def test_H15_the_sum_is_constant_for_everyone(lost_response):
    """H15: for readers and writers, during folds, with group commit and pipelining."""
    chaos = Chaos(latency_s=(0.001, 0.05), lost_response=lost_response)
    assert simulate(_bank_under_load, range(10), chaos=chaos) == 10


@pytest.mark.parametrize("cut", range(6))
def test_H15_cuts_fall_between_objects_only(cut):
    """H15: a fold up to any LSN; the rows in memory and in segments fit together."""
    db = reef.open("memory://")
    bank = Bank()
    with db.writer(NAME) as writer, db.reader(NAME, refresh_interval_ms=1e9) as reader:
        writer.write(bank.opening())
        for number in range(6):
            writer.write(bank.transfer(number))
            if number == cut:
                fold(db, NAME)
            reader.refresh()
            assert total(reader.scan()) == SUM
        memtable = writer._committer.tail.view().memtable
        writer.refresh()
        kept = writer._committer.tail.view().memtable
        head = HeadFinder(db.store, BANK).find().manifest
        assert (memtable.first_lsn, kept.first_lsn) == (1, head.wal_floor)
        assert kept.last_lsn == memtable.last_lsn
        assert Bank.read(writer.scan()).balances == bank.balances
        assert {key: int(writer.get(key)) for key in ACCOUNTS} == bank.balances


def test_H15_a_view_captured_in_the_middle_of_a_rebase_is_whole(monkeypatch):
    """H15: manifest and memory are replaced together: at every line of it the sum is right."""
    db = reef.open("memory://")
    bank = Bank()
    with db.writer(NAME) as writer:
        writer.write(bank.opening())
        for number in range(4):
            writer.write(bank.transfer(number))
        fold(db, NAME)
        tail = writer._committer.tail
        seen = []

        def trace(frame, event, arg):
            if frame.f_code is not Tail.rebase.__code__:
                return None
            sys.settrace(None)
            seen.append(list(writer.scan()))
            sys.settrace(trace)
            return trace

        sys.settrace(trace)
        try:
            writer.refresh()
        finally:
            sys.settrace(None)
        assert writer._committer.tail is tail
    assert {total(rows) for rows in seen} == {SUM}
    assert len(seen) > 5


def test_H15_a_scan_shows_the_state_at_its_call():
    """H15: later commits, ingests and folds are not in it, not even in part."""
    db = reef.open("memory://")
    bank = Bank()
    with db.writer(NAME) as writer:
        writer.write(bank.opening())
        writer.write(bank.transfer(0))
        before = dict(bank.balances)
        scans = [writer.scan(), writer.scan(reverse=True), db.reader(NAME).scan()]
        ingest(db.store, NAME, {b"a": b"0", b"b": b"0", b"c": b"300"})
        writer.write(bank.transfer(2))
        fold(db, NAME)
        writer.refresh()
        for scan in scans:
            assert Bank.read(scan).balances == before
        assert Bank.read(writer.scan()).balances == bank.balances


def test_H15_threads_never_see_a_batch_in_part():
    """H15: one thread deletes all accounts and writes them again, the others always see all."""
    db = reef.open("memory://")
    bank = Bank()
    writer = db.writer(NAME)
    writer.write(bank.opening())
    wrong, done = [], threading.Event()

    def read_all():
        while not done.is_set():
            missing = [account for account in ACCOUNTS if writer.get(account) is None]
            balances = Bank.read(writer.scan()).balances
            if missing or sum(balances.values()) != SUM:
                wrong.append((missing, balances))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    watchers = [threading.Thread(target=read_all) for _ in range(2)]
    try:
        for watcher in watchers:
            watcher.start()
        for number in range(2, 300, 3):
            writer.write(bank.transfer(number))
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()
        sys.setswitchinterval(interval_s)
    assert wrong == []


# --- H16 ------------------------------------------------------------------------------


class InTheMiddle(Wrapper):
    """Does something just before the n-th object of the log is read, once."""

    def __init__(self, inner, number, deed):
        super().__init__(inner)
        self.left, self.deed = number, deed

    def get_tagged(self, key):
        if "/wal/" in key:
            self.left -= 1
            if self.left == 0:
                self.deed(self.inner)
        return self.inner.get_tagged(key)


def _fence_and_sweep(store):
    """A newer writer: it folds, and the folded objects are swept."""
    db = reef.Database(store)
    with db.writer(NAME) as writer:
        writer.write(Bank.read(writer.scan()).transfer(9))
    fold(db, NAME)
    floor = HeadFinder(store, BANK).find().manifest.wal_floor
    for info in list(store.list(BANK.wal)):
        header = header_of(store, info.key)
        if header.lsn < floor - 1 and header.kind == "batches":
            store.delete(info.key)


def header_of(store, key):
    """Return the header of a log object."""
    return WalObject.decode(store.get(key), key).header


@pytest.mark.parametrize("step", range(1, 9))
def test_H16_a_new_opener_and_a_sweep_in_the_middle_of_a_replay(step):
    """H16: at every step of the replay: the one that is overtaken is fenced, nothing is lost."""
    db = reef.open("memory://")
    opened_bank(db, 5)
    store = InTheMiddle(db.store, step, _fence_and_sweep)
    errors = []
    try:
        slow = reef.Database(store).writer(NAME)
        slow.write(reef.Batch().put("a", b"0"))
    except FencedError as error:
        errors.append(error)
    assert errors or store.left > 0, "a zombie's write was acknowledged"
    assert total(db.reader(NAME).scan()) == SUM
    with db.writer(NAME) as writer:
        assert total(writer.scan()) == SUM


def test_H16_a_fold_in_the_middle_of_a_replay_is_no_rival():
    """H16: it moves the floor, and the log that the opener has leased can still be replayed."""
    db = reef.open("memory://")
    bank = opened_bank(db, 5)
    store = InTheMiddle(db.store, 3, lambda inner: fold(reef.Database(inner), NAME))
    with reef.Database(store).writer(NAME) as writer:
        assert Bank.read(writer.scan()).balances == bank.balances
        writer.write(bank.transfer(5))
    assert Bank.read(db.reader(NAME).scan()).balances == bank.balances


# --- H19 ------------------------------------------------------------------------------


def test_H19_a_key_that_many_threads_send_at_once_commits_once():
    """H19: check and append are one step: one LSN for all of them."""
    db = reef.open("memory://")
    writer = db.writer(NAME)
    receipts, submit = [], writer._committer.submit

    def submit_slowly(pending):
        time.sleep(0.02)  # all the others have checked by then, if they may
        return submit(pending)

    writer._committer.submit = submit_slowly
    threads = [
        threading.Thread(
            target=lambda: receipts.append(writer.put("k", b"v", idempotency_key="once"))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(receipt.lsn, receipt.index) for receipt in receipts}) == 1
    assert len(receipts) == 8


def test_H19_keys_in_the_log_and_in_the_window_are_both_remembered():
    """H19: one folded, one only in the log; both are replayed after a crash and a new open."""
    db = reef.open("memory://")
    writer = db.writer(NAME)  # never closed: its process dies
    folded = writer.put("a", b"1", idempotency_key="folded")
    fold(db, NAME)
    logged = writer.put("b", b"2", idempotency_key="logged")
    with db.writer(NAME) as successor:
        for key, value, name, first in (
            (b"a", b"1", "folded", folded),
            (b"b", b"2", "logged", logged),
        ):
            again = successor.put(key, value, idempotency_key=name)
            assert (again.lsn, again.write_id, again.replayed) == (first.lsn, first.write_id, True)
            assert successor.resolve(name) == "committed"


# --- H47 ------------------------------------------------------------------------------


def test_H47_a_reader_that_slept_past_retention_wakes_up():
    """H47: the next LSNs and generations were folded and swept; it does not say "no news"."""
    sim = Simulation(0)
    agree_on_cas(sim.bucket)
    sleeper = sim.process("sleeper")
    db = reef.Database(sim.bucket)
    bank = opened_bank(db, 2)
    seen = []

    def sleep():
        reader = reef.Database(sleeper.store()).reader(NAME)
        seen.append(Bank.read(reader.scan()).balances)
        sleeper.runtime.sleep(3600)
        reader.refresh()
        seen.append(Bank.read(reader.scan()).balances)

    def resume():
        sleeper.runtime.sleep(10)
        with db.writer(NAME) as writer:
            for number in range(2, 6):
                writer.write(bank.transfer(number))
        fold(db, NAME)
        head = HeadFinder(sim.bucket, BANK).find().manifest
        for info in list(sim.bucket.list(BANK.manifests))[:-1]:
            sim.bucket.delete(info.key)
        for info in list(sim.bucket.list(BANK.wal)):
            if header_of(sim.bucket, info.key).kind == "batches":
                sim.bucket.delete(info.key)
        assert head.wal_floor > 6

    before = dict(bank.balances)
    sleeper.spawn(sleep)
    sleeper.spawn(resume, "rest")
    sim.run()
    sim.close()
    assert seen == [before, bank.balances]


def test_H10_a_listing_is_trusted_only_while_its_manifest_is(monkeypatch):
    """H10: a stall between manifest and listing; folded and swept meanwhile, the log has a hole.

    Found by the simulator (zombies_and_sweeps, seed 101352): the reader took the hole for the
    end of the log, and showed less than was acknowledged before it began.
    """
    db = reef.open("memory://")
    names = Namespace("users")
    with db.writer("users") as writer:
        for number in range(4):
            writer.put(f"k{number}", b"v")

    class SweptMeanwhile(Wrapper):
        """Everything that is folded goes between the read of the head and the listing."""

        done = swept = False

        def list(self, prefix="", start_after=""):
            if prefix == names.wal and not self.done:
                self.done = True
                fold(db, "users")
                Publisher(db.store, names).publish(
                    lambda head: msgspec.structs.replace(head, oldest_retained=head.generation)
                )
                for lsn in range(3, 6):
                    db.store.delete(names.wal_object(lsn))
                self.swept = True
            return self.inner.list(prefix, start_after)

    store = SweptMeanwhile(db.store)
    fresh, stale = ManifestHead.fresh, [True]

    def fresh_but_once(head, *by):
        """The stall: the first check after the listing finds its manifest old."""
        return fresh(head, *by) and not (store.swept and stale and stale.pop())

    monkeypatch.setattr(ManifestHead, "fresh", fresh_but_once)
    with reef.Database(store).reader("users") as reader:
        assert len(dict(reader.scan())) == 4
        assert reader.last_lsn == 5
