"""The worked examples of writer fencing, slot by slot, in both acknowledgement orders.

Each table gives the order in which PUTs reach the log: (slot, writer's epoch, whether it
succeeds). Slots count from 1 here. Writers are driven step by step: a gate in front of the
bucket lets one PUT through at a time, in the order of the table.
"""

import threading

import msgspec
import pytest

import reef
from reef.errors import FencedError, InternalError
from reef.formats.wal_object import WalObject
from reef.paths import Namespace, number_of
from reef.stores import Meter, ReadBack, Retry, Wrapper
from reef.stores.memory import MemoryStore

NAME = "users"


class Gate(Wrapper):
    """Holds back every PUT into the log until the schedule says that it is its turn."""

    def __init__(self, inner, schedule):
        super().__init__(inner)
        self.schedule = list(schedule)
        self.moved = threading.Condition()
        self.waiting = []
        self.log = []
        self.needs = {}
        """By place in the schedule: a PUT that must have come to the gate before."""

    def create(self, key, body):
        if not key.startswith(Namespace(NAME).wal):  # the probe has a log of its own
            return self.inner.create(key, body)
        lsn, epoch = number_of(key), WalObject.decode(body, key).header.epoch
        with self.moved:
            self.waiting.append((lsn, epoch))
            self.moved.notify_all()
            if not self.moved.wait_for(lambda: self._turn(lsn, epoch), 120):
                raise AssertionError(f"slot {lsn} of epoch {epoch} is not in {self.schedule}")
            result = self.inner.create(key, body)
            if self.schedule:
                self.log.append((lsn, epoch, result.landed))
                self.schedule.pop(0)
            self.moved.notify_all()
        return result

    def _turn(self, lsn, epoch):
        needed = self.needs.get(len(self.log))
        if needed is not None and needed not in self.waiting:
            return False
        return not self.schedule or self.schedule[0][:2] == (lsn, epoch)


class Run:
    """Some writers on one gated bucket."""

    def __init__(self, schedule, **settings):
        self.bucket = MemoryStore()
        self.gate = Gate(self.bucket, [])
        self.expected = schedule
        self.settings = settings
        self.threads = []
        self.outcomes = {}

    def database(self):
        return reef.Database(ReadBack(Retry(Meter(self.gate))))

    def start(self, name, call):
        """Run `call` concurrently; record its result or error."""

        def run():
            try:
                self.outcomes[name] = call()
            except reef.ReefError as error:
                self.outcomes[name] = error

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)

    def until_waiting(self, *puts):
        """Return when all of these PUTs have come to the gate."""
        with self.gate.moved:
            assert self.gate.moved.wait_for(lambda: set(puts) <= set(self.gate.waiting), 120)

    def play(self):
        """Let the schedule run its course; check that every PUT ended as the table says."""
        with self.gate.moved:
            self.gate.schedule = list(self.expected)
            self.gate.moved.notify_all()
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        assert self.gate.log == self.expected

    def rows(self):
        return dict(reef.Database(self.bucket).reader(NAME).scan())

    def epochs(self):
        """Return who holds each slot."""
        keys = [info.key for info in self.bucket.list(Namespace(NAME).wal)]
        return [WalObject.decode(self.bucket.get(key), key).header.epoch for key in keys]


ORDERS = pytest.mark.parametrize("ack", ["prefix", "independent"])


@ORDERS
def test_a_new_writer_fences_an_older_one(ack):
    """Outcome 1: the fence takes the slot that the old writer wanted."""
    run = Run([(2, 2, True), (2, 1, False), (3, 2, True)], ack=ack)
    old = run.database().writer(NAME, ack=ack)  # its fence is slot 1
    run.gate.schedule = [(0, 0)]  # nothing passes from here on
    run.start("new", lambda: run.database().writer(NAME, ack=ack).put("k", b"new"))
    run.start("old", lambda: old.put("k", b"old"))
    run.until_waiting((2, 1), (2, 2))
    run.play()
    assert isinstance(run.outcomes["old"], FencedError)
    assert run.rows() == {b"k": b"new"}
    assert run.epochs() == [1, 2, 2]


@ORDERS
def test_a_new_writer_tries_again_behind_an_older_ones_write(ack):
    """Outcome 2: the old writer took the slot, the fence goes to the next one."""
    run = Run([(2, 1, True), (2, 2, False), (3, 2, True)], ack=ack)
    old = run.database().writer(NAME, ack=ack)
    run.gate.schedule = [(0, 0)]
    run.start("old", lambda: old.put("k", b"old"))
    run.start("new", lambda: run.database().writer(NAME, ack=ack).get("k"))
    run.until_waiting((2, 1), (2, 2))
    run.play()
    assert run.outcomes["old"].lsn == 2
    assert run.outcomes["new"] == b"old", "acknowledged writes are replayed"
    with pytest.raises(FencedError):
        old.put("k", b"again")


@ORDERS
def test_a_new_writer_is_fenced_before_its_own_fence(ack):
    """Outcome 4: an even newer writer was quicker; the one in between stops."""
    run = Run([(2, 3, True), (2, 2, False), (3, 3, True)], ack=ack)
    run.database().writer(NAME, ack=ack)
    run.gate.schedule = [(0, 0)]
    run.start("second", lambda: run.database().writer(NAME, ack=ack))
    run.until_waiting((2, 2))
    run.start("third", lambda: run.database().writer(NAME, ack=ack).put("k", b"third"))
    run.until_waiting((2, 3))
    run.gate.needs = {2: (3, 3)}
    run.play()
    assert isinstance(run.outcomes["second"], FencedError)
    assert run.outcomes["third"].lsn == 3
    assert run.rows() == {b"k": b"third"}
    assert run.epochs() == [1, 3, 3]


class Twin(Wrapper):
    """Puts an object of another writer with the same epoch into a slot, just before its owner."""

    def __init__(self, inner, lsn):
        super().__init__(inner)
        self.lsn = lsn

    def create(self, key, body):
        if key.startswith(Namespace(NAME).wal) and number_of(key) == self.lsn:
            found = WalObject.decode(body, key)
            header = msgspec.structs.replace(found.header, writer_id="twin", write_id="other")
            self.inner.create(key, WalObject.encode(header, tuple(map(bytes, found.records))))
        return self.inner.create(key, body)


@ORDERS
@pytest.mark.parametrize("lsn", [1, 2], ids=["at its fence", "at its write"])
def test_another_writer_of_the_same_epoch_is_a_bug_and_stops_everything(ack, lsn):
    """Outcome 3: it cannot happen, since epochs are raised by CAS; who sees it writes no more."""
    bucket = MemoryStore()
    db = reef.Database(ReadBack(Retry(Meter(Twin(bucket, lsn)))))
    with pytest.raises(InternalError, match="epoch"):
        db.writer(NAME, ack=ack).put("k", b"v")
    assert len(list(bucket.list(Namespace(NAME).wal))) == lsn, "and nothing behind it"


@ORDERS
def test_a_writer_that_met_its_twin_is_ended(ack):
    """Not only that write: the commits of the other writer are unknown here."""
    writer = reef.Database(ReadBack(Retry(Meter(Twin(MemoryStore(), 2))))).writer(NAME, ack=ack)
    for _ in range(2):
        with pytest.raises(InternalError, match="another writer's object of our epoch"):
            writer.put("k", b"v")
    assert not writer.is_open


@ORDERS
def test_parallel_writes_of_a_fenced_writer(ack):
    """Two in flight: the second lands behind the fence. In prefix order it does not count."""
    run = Run(
        [(3, 2, True), (4, 1, True), (3, 1, False), (4, 2, False), (5, 2, True), (6, 2, True)],
        ack=ack,
    )
    settings = {"max_parallel_writes": 2, "ack": ack, "group_window_ms": 0.0, "group_bytes_max": 1}
    old = run.database().writer(NAME, **settings)  # its fences are slots 1 and 2
    run.gate.schedule = [(0, 0)]
    one = old.put("a", b"1", wait=False)
    two = old.put("b", b"2", wait=False)
    old._committer.drive_in_background()
    run.start("new", lambda: run.database().writer(NAME, **settings))
    run.until_waiting((3, 1), (4, 1), (3, 2))
    run.play()
    assert isinstance(one.exception(120), FencedError)
    if ack == "prefix":
        assert isinstance(two.exception(120), FencedError)
        assert run.rows() == {}, "a failed write is not visible"
    else:
        assert two.result(120).lsn == 4
        assert run.rows() == {b"b": b"2"}
    assert run.epochs() == [1, 1, 2, 1, 2, 2]


class LateLister(Wrapper):
    """Reads the log only once the first PUT of the schedule has landed."""

    def __init__(self, inner, gate):
        super().__init__(inner)
        self.gate = gate
        self.at_the_log = threading.Event()

    def list(self, prefix="", start_after=""):
        if prefix.endswith("/wal/"):
            self.at_the_log.set()
            with self.gate.moved:
                assert self.gate.moved.wait_for(lambda: self.gate.log, 120)
        return self.inner.list(prefix, start_after)


@ORDERS
def test_three_writers_at_once(ack):
    """The old one and two openers, two fences each: the youngest ends up alone."""
    run = Run(
        [
            (3, 3, True),
            (4, 1, True),
            (3, 1, False),
            (4, 2, False),
            (4, 3, False),
            (5, 2, True),
            (5, 3, False),
            (6, 3, True),
            (6, 2, False),
            (7, 3, True),
        ],
        ack=ack,
    )
    settings = {"max_parallel_writes": 2, "ack": ack, "group_window_ms": 0.0, "group_bytes_max": 1}
    old = run.database().writer(NAME, **settings)
    run.gate.schedule = [(0, 0)]
    one = old.put("a", b"1", wait=False)
    two = old.put("b", b"2", wait=False)
    old._committer.drive_in_background()
    late = LateLister(run.gate, run.gate)
    second = reef.Database(ReadBack(Retry(Meter(late))))
    run.start("second", lambda: second.writer(NAME, **settings))
    assert late.at_the_log.wait(120)
    run.start("third", lambda: run.database().writer(NAME, **settings).get("b"))
    run.until_waiting((3, 1), (4, 1), (3, 3))
    run.gate.needs = {1: (4, 2)}  # the second opener lists before the old one's write lands
    run.play()
    assert isinstance(one.exception(120), FencedError)
    assert isinstance(run.outcomes["second"], FencedError)
    expected = None if ack == "prefix" else b"2"
    assert run.outcomes["third"] == expected
    assert (two.exception(120) is None) == (ack == "independent")
    assert run.epochs() == [1, 1, 3, 1, 2, 3, 3]
