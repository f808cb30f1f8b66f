"""H13, H30, H62: clocks that stop, are set back, or differ between machines."""

from dataclasses import replace

import pytest

import reef
from reef import stores
from reef.errors import OutcomeUnknownError, UnavailableError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import fold
from reef.manifest import edits
from reef.manifest.head import HeadFinder, ManifestHead, Publisher
from reef.manifest.roots import find_generation_leases, take_lease
from reef.paths import Namespace
from reef.stores import Meter, ReadBack, Retry, Wrapper, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.telemetry import RequestMeter
from reef.testing import Simulation
from tests.support.grace import set_grace

NAME = "users"
USERS = Namespace(NAME)
GRACE_S = 15 * 60


class Stalls(Wrapper):
    """Does something in the middle of one PUT into the log."""

    deed = None
    part = "/wal/"

    def create(self, key, body):
        if self.deed is not None and self.part in key:
            deed, self.deed = self.deed, None
            deed(key)
        return self.inner.create(key, body)


class Machine:
    """A writer on a simulated machine, one of whose PUTs is held up."""

    def __init__(self, name="slow", **settings):
        self.sim = Simulation(0)
        agree_on_cas(self.sim.bucket)
        self.node = self.sim.process(name)
        self.store = Stalls(self.node.store())
        self.settings = settings
        self.outcome = None

    def put(self, held_up, before=lambda writer: None):
        """Open, do what comes before, and put with `held_up` in the middle of the PUT."""

        def write():
            writer = reef.Database(self.store).writer(NAME, **self.settings)
            writer.put("k", b"first")
            before(writer)
            self.store.deed = held_up
            try:
                self.outcome = writer.put("k", b"slow")
            except reef.ReefError as error:
                self.outcome = error

        self.node.spawn(write)
        self.sim.run()
        self.sim.close()
        return self.outcome

    def overtake(self, key):
        """Another writer acquires the role, folds, and the folded objects are swept."""
        db = reef.Database(self.sim.bucket)
        with db.writer(NAME) as writer:
            writer.put("k", b"newer")
        fold(db, NAME)
        self.sim.bucket.delete(key)

    def rows(self):
        return dict(reef.Database(self.sim.bucket).reader(NAME).scan())


def suspend(machine):
    """Close the lid for an hour: the monotonic clock stops."""
    machine.node.freeze(3600, suspended=True)


def suspend_without_boottime(machine):
    """The same on a machine that has no clock for it: only the wall clock shows it."""
    machine.node.runtime.boottime_s = machine.node.runtime.monotonic_s
    machine.node.freeze(3600, suspended=True)


def set_back(machine):
    """An hour passes, and the wall clock is set back by two."""
    machine.node.runtime.sleep(3600)
    machine.node.runtime.skew_s -= 7200


def pause(machine):
    """A virtual machine is paused for an hour, and none of its clocks knows: the store does."""
    machine.node.freeze(3600, suspended=True)
    machine.node.runtime.boottime_s = machine.node.runtime.monotonic_s
    machine.node.runtime.skew_s -= 3600


CLOCKS = [suspend, suspend_without_boottime, set_back, pause]


@pytest.mark.parametrize("clocks", CLOCKS, ids=lambda deed: deed.__name__)
def test_H62_a_put_across_a_suspension_is_proved_by_the_floor(clocks):
    """H62, H13: its slot was used, folded and collected meanwhile: it is not acknowledged."""
    machine = Machine()

    def held_up(key):
        clocks(machine)
        machine.overtake(key)

    outcome = machine.put(held_up)
    assert isinstance(outcome, OutcomeUnknownError)
    assert machine.rows() == {b"k": b"newer"}


@pytest.mark.parametrize("clocks", CLOCKS, ids=lambda deed: deed.__name__)
def test_H62_a_put_that_was_only_slow_is_acknowledged(clocks):
    """H62: no other process was active meanwhile: above the floor it counts."""
    machine = Machine()
    outcome = machine.put(lambda key: clocks(machine))
    assert outcome.lsn == 3
    assert machine.rows() == {b"k": b"slow"}


def test_H62_a_pause_before_a_put_counts_too():
    """H62: the dates do not show whether the pause was before the send, so it is proved, once."""
    machine = Machine()
    proofs = []

    def before(writer):
        pause(machine)
        find = writer._committer.heads.find
        writer._committer._sender.heads.find = lambda **how: (proofs.append(1), find(**how))[1]

    assert machine.put(lambda key: None, before).lsn == 3
    assert proofs == [1]


def test_H62_a_publish_across_a_pause_is_proved_by_recent():
    """H62, H14: only the store's clock advanced by the hour; the generation was used since."""
    machine = Machine()
    outcomes = []

    def publish():
        store = Stalls(machine.node.store())
        publisher = Publisher(store, USERS)
        publisher.create(edits.new_namespace(DEFAULT_SCHEMA))
        key = USERS.manifest(2)

        def held_up(name):
            pause(machine)
            rival = Publisher(machine.sim.bucket, USERS)
            rival.publish(lambda head: edits.raise_writer_epoch(head, 1))
            rival.publish(lambda head: edits.raise_writer_epoch(head, 1))
            machine.sim.bucket.delete(key)  # a sweep, after so long

        store.deed, store.part = held_up, "/manifest/"
        try:
            outcomes.append(publisher.publish(lambda head: edits.raise_writer_epoch(head, 4)))
        except OutcomeUnknownError as error:
            outcomes.append(error)

    machine.node.spawn(publish)
    machine.sim.run()
    machine.sim.close()
    # The head names another publish of that generation, so this one was applied after it, once.
    assert (outcomes[0].generation, outcomes[0].writer_epoch) == (4, 3)


def test_H62_the_dates_of_a_directory_are_known_without_a_request(tmp_path):
    """H62: a file's own date is the third clock, and a commit stays one PUT."""
    meter = RequestMeter()
    with reef.Database(stores.open(str(tmp_path), meter=meter)).writer(NAME) as writer:
        writer.put("k", b"1")
        date_s, _ = writer._committer.heads.dates._last
        written = tmp_path / USERS.wal_object(2)
        assert abs(date_s - written.stat().st_ctime_ns / 1e9) < 60
        meter.reset()
        writer.put("k", b"2")
        assert meter.requests() == {"put": 1}


def lower_grace(bucket, grace_ms):
    """Publish a lower grace."""
    now_ms = int(bucket.now() * 1000)
    Publisher(bucket, USERS).publish(lambda head: set_grace(head, grace_ms, now_ms))


def test_H62_a_grace_that_was_lowered_while_a_writer_slept():
    """H62: it knows the old grace only; once that has passed, it does not go by it any more."""
    machine = Machine()

    def before(writer):
        lower_grace(machine.sim.bucket, 10_000)
        machine.node.runtime.sleep(GRACE_S + 60)  # from now on sweeps go by ten seconds

    def held_up(key):
        machine.node.runtime.sleep(60)  # quick, by the old grace
        machine.overtake(key)

    assert isinstance(machine.put(held_up, before), OutcomeUnknownError)
    assert machine.rows() == {b"k": b"newer"}


def test_H62_a_grace_that_was_lowered_and_seen():
    """H62: a process that has read the lower one uses it at once, although sweeps still wait."""
    machine = Machine()

    def before(writer):
        lower_grace(machine.sim.bucket, 10_000)
        writer.refresh()

    def held_up(key):
        machine.node.runtime.sleep(60)
        machine.overtake(key)

    assert isinstance(machine.put(held_up, before), OutcomeUnknownError)


def test_H62_how_long_a_head_shows_a_slot_open():
    """H62: half a grace since the head was seen, half a grace for the PUT; and not below its
    floor."""
    sim = Simulation(0)
    node = sim.process("node")
    manifest = Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    shown = []

    def check():
        head = ManifestHead(manifest, node.runtime.stopwatch())
        for pause_s in (0, GRACE_S / 2 - 1, 2):
            node.runtime.sleep(pause_s)
            shown.append(head.shows_open(manifest.wal_floor))
        head = ManifestHead(manifest, node.runtime.stopwatch())
        shown.append(head.shows_open(manifest.wal_floor - 1))
        shown.append(head.is_quick(GRACE_S / 2))
        shown.append(head.is_quick(GRACE_S / 2 + 1))

    node.spawn(check)
    sim.run()
    sim.close()
    assert shown == [True, True, False, False, True, False]


def test_H62_an_idle_writer_reads_head_and_log_once_per_half_grace(tmp_path):
    """H62, H52: before it sends; in the steady state a commit stays one PUT."""
    sim = Simulation(0)
    agree_on_cas(sim.bucket)
    node = sim.process("idle")
    meter = RequestMeter()
    counts = []

    def write():
        store = ReadBack(Retry(Meter(node.raw_store(), meter)))
        writer = reef.Database(store).writer(NAME)
        for pause_s in (0, GRACE_S / 2 + 1, 0, GRACE_S / 2 - 10):
            node.runtime.sleep(pause_s)
            meter.reset()
            writer.put("k", b"v")
            counts.append(dict(meter.requests()))

    node.spawn(write)
    sim.run()
    sim.close()
    assert counts[0] == counts[2] == counts[3] == {"put": 1}
    assert counts[1] == {"list": 2, "get": 2, "put": 1}


# --- H30 ------------------------------------------------------------------------------


class WholeSeconds(Wrapper):
    """A store that dates its objects by the second, as S3 does."""

    def list(self, prefix="", start_after=""):
        for info in self.inner.list(prefix, start_after):
            yield replace(info, last_modified_s=float(int(info.last_modified_s)))


@pytest.mark.parametrize("skew_s", [-600.0, 0.0, 600.0])
@pytest.mark.parametrize("resolution_s", [0.0, 1.0])
def test_H30_a_lease_expires_by_the_stores_clock(skew_s, resolution_s):
    """H30: its holder's clock is ten minutes off, the store counts in seconds: no difference."""
    sim = Simulation(0)
    Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    node = sim.process("holder", skew_s=skew_s)
    seen = []

    store = WholeSeconds(sim.bucket) if resolution_s else sim.bucket

    def expired():
        found = find_generation_leases(store, USERS, store.now(), resolution_s)
        return [lease.expired for lease in found]

    def hold():
        manifest = HeadFinder(node.store(), USERS).find().manifest
        lease = take_lease(node.store(), USERS, manifest, owner="me", ttl_s=60)
        seen.append(expired())
        node.runtime.sleep(59)
        seen.append(expired())
        lease.renew()
        node.runtime.sleep(59)
        seen.append(expired())
        node.runtime.sleep(3 + resolution_s)
        seen.append(expired())

    node.spawn(hold)
    sim.run()
    sim.close()
    assert seen == [[False], [False], [False], [True]]


@pytest.mark.parametrize("first_skew_s", [-600.0, 600.0])
def test_H30_machines_whose_clocks_differ_agree_on_what_comes_first(first_skew_s):
    """H30: generations, epochs and LSNs decide, dates never: the newest write wins for everyone."""
    sim = Simulation(0)
    agree_on_cas(sim.bucket)
    skews = {"w1": first_skew_s, "w2": -first_skew_s, "folder": first_skew_s * 2}
    nodes = [sim.process(name, skew_s=skew_s) for name, skew_s in skews.items()]
    seen = []

    def take_turns():
        for turn in range(4):
            db = reef.Database(nodes[turn % 2].store())
            with db.writer(NAME) as writer:
                assert writer.put("once", b"1", idempotency_key="once").replayed == (turn > 0)
                receipt = writer.put("k", b"%d" % turn)
                seen.append((receipt.epoch, receipt.lsn))
            fold(reef.Database(nodes[2].store()), NAME)
            reader = reef.Database(nodes[(turn + 1) % 2].store()).reader(NAME)
            reader.refresh()
            assert reader.get("k") == b"%d" % turn

    nodes[0].spawn(take_turns)
    sim.run()
    sim.close()
    assert seen == sorted(seen)
    assert [epoch for epoch, _ in seen] == [1, 2, 3, 4]
    assert list(sim.bucket.list(USERS.leases)) == []
    head = HeadFinder(sim.bucket, USERS).find().manifest
    dates = [recent.published_at_ms for recent in head.recent]
    assert dates != sorted(dates), "their dates do go back and forth"


def test_H30_the_age_of_a_head_is_counted_from_before_it_was_asked_for():
    """H30: by the asker's own stopwatch, so that no clock makes a head seem fresher.

    Where every response is older than it may be trusted, none is used.
    """
    bucket = MemoryStore()
    Publisher(bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    sim = Simulation(0, bucket=bucket)
    node = sim.process("slow", skew_s=-600.0)
    fresh = []

    class SlowResponses(Wrapper):
        """Responses of long ago."""

        def get_tagged(self, key):
            try:
                return self.inner.get_tagged(key)
            finally:
                self.runtime.sleep(GRACE_S)

    def check():
        fresh.append(HeadFinder(node.store(), USERS).find().fresh())
        try:
            HeadFinder(SlowResponses(node.store()), USERS).find()
        except UnavailableError as error:
            fresh.append(error.message)

    node.spawn(check)
    sim.run()
    sim.close()
    assert fresh == [True, "manifests of users are swept faster than they can be read"]
