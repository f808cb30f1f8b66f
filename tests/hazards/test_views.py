"""H10, H16, H22, H24, H30, H44, H47: time travel during folds, compactions and sweeps."""

import random
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import pytest

import reef
from reef.jobs import fold, sweep
from reef.manifest.head import HeadFinder, Publisher
from reef.stores import Wrapper
from reef.stores.leases import HeldLease
from reef.testing import Chaos, simulate
from tests.support.bulk_jobs import ingest
from tests.support.grace import set_grace
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, EachRequest, WholeSeconds, World

ROWS = {b"k%d" % number: b"v" for number in range(5)}
LONG = {"lease_ttl_s": 10.0 * DAY_S}
"""Leases that do not expire while a test lets days pass between two requests."""


class EachStep(EachRequest):
    """Leases and clocks count as steps too."""

    def put(self, key, body):
        self._does()
        return self.inner.put(key, body)

    def now(self):
        self._does()
        return self.inner.now()


def old_world():
    """Give a namespace with some generations: folded rows, and one more in the log."""
    world = World()
    world.db.create(NAME)
    world.publish(grace_ms=0)
    with world.db.writer(NAME) as writer:
        for number in range(3):
            writer.put(f"k{number}", b"v")
        world.fold()
        for number in range(3, 5):
            writer.put(f"k{number}", b"v")
    world.snapshot = world.db.snapshot(NAME, "s")
    world.last_lsn = world.head().wal_id_last_seen
    world.time = datetime.fromtimestamp(world.bucket.now(), UTC)
    world.advance(10)
    return world


def churn(world):
    """Change every row, fold, compact, and sweep all that may be swept."""
    with world.db.writer(NAME) as writer:
        writer.delete_range("a", "z")
        writer.put("new", b"1")
    world.fold()
    world.compact()
    for _ in range(3):
        world.advance(60)
        world.sweep()


# --- taking a lease -------------------------------------------------------------------

VIEWS = {
    "generation": lambda world: {"as_of": world.snapshot.generation},
    "lsn": lambda world: {"as_of": reef.AsOf(lsn=world.last_lsn)},
    "snapshot": lambda world: {"snapshot": "s"},
    "now": lambda _: {"pin": True},
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("released", [False, True], ids=["pinned", "released"])
def test_H22_a_sweep_between_any_two_steps_of_taking_a_lease(kind, released):
    """H22: everything changes, is compacted and swept there; the view is whole, or is refused."""
    outcomes = []
    for number in range(1, 60):
        world, count = old_world(), [0]

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                if released:
                    world.snapshot.release()
                churn(world)

        db = reef.Database(EachStep(world.bucket, strike))
        try:
            view = db.reader(NAME, **VIEWS[kind](world), **LONG)
        except reef.NotFoundError as error:
            outcomes.append(f"refused, {error.kind}")
        else:
            churn(world)
            expected = ROWS if view.last_lsn == world.last_lsn else {b"new": b"1"}
            assert dict(view.scan()) == expected, (number, view)
            assert view.get("k0") == expected.get(b"k0")
            outcomes.append("whole")
            view.close()
        if count[0] < number:
            break
    assert outcomes[-1] == "whole"
    assert len(outcomes) > 5
    if not released or kind == "now":
        assert set(outcomes) == {"whole"}
    else:
        assert set(outcomes) == {"whole", "refused, collected"}, (
            "and so the sweep did come in between"
        )


@pytest.mark.parametrize(
    ("kind", "folded"),
    [("generation", False), ("generation", True), ("lsn", False), ("now", False)],
)
def test_H22_a_view_that_is_opened_between_any_two_steps_of_a_sweep(kind, folded):
    """H22: just before the sweep deletes it sees no lease; so the view must see the sweep."""
    outcomes = []
    for number in range(1, 90):
        world, count, views = old_world(), [0], []
        if folded:
            world.fold()
            world.snapshot.release()
            world.snapshot = world.db.snapshot(NAME)
        view_options = VIEWS[kind](world)
        world.snapshot.release()
        with world.db.writer(NAME) as writer:
            writer.delete_range("a", "z")
        world.fold()
        world.compact()

        def strike(world=world, count=count, number=number, views=views, view_options=view_options):
            count[0] += 1
            if count[0] == number:
                try:
                    views.append(world.db.reader(NAME, **view_options, **LONG))
                except reef.NotFoundError as error:
                    outcomes.append(f"refused, {error.kind}")

        db = reef.Database(EachStep(world.bucket, strike))
        for _ in range(2):
            world.advance(60)
            world.sweep(db)
        for view in views:
            outcomes.append("whole")
            assert dict(view.scan()) == (ROWS if kind != "now" else {}), (number, view)
            view.close()
        if count[0] < number:
            break
    assert len(outcomes) > 20
    assert set(outcomes) <= {"whole", "refused, collected"}
    assert ("refused, collected" in outcomes) == (kind != "now")


class Stalls(Wrapper):
    """Stalls the process that deletes, and deletes later."""

    class Stalled(Exception):
        """Stall the process here."""

    def __init__(self, inner):
        super().__init__(inner)
        self.late = []

    def delete_many(self, keys):
        self.late.extend(keys)
        raise self.Stalled


@pytest.mark.parametrize("kind", ["generation", "lsn", "now"])
def test_H22_a_sweep_that_has_seen_no_lease_deletes_when_the_view_is_open(kind):
    """H22: it comes between any two steps of opening, stalls, and continues afterwards.

    If it has seen the lease it keeps the view's objects; if not, the view has seen the objects it
    condemned, in the head that it read after its lease was written.
    """
    outcomes = []
    for number in range(1, 60):
        world, count = old_world(), [0]
        world.fold()  # so that opening reads nothing but manifests
        world.snapshot.release()
        world.snapshot = world.db.snapshot(NAME)
        view_options, stalls = VIEWS[kind](world), Stalls(world.bucket)
        world.snapshot.release()

        def strike(world=world, count=count, number=number, stalls=stalls):
            count[0] += 1
            if count[0] == number:
                with world.db.writer(NAME) as writer:
                    writer.delete_range("a", "z")
                world.fold()
                world.compact()
                world.advance(60)
                world.sweep()
                world.advance(60)
                with suppress(Stalls.Stalled):
                    sweep(reef.Database(stalls), NAME, apply=True, retain_generations_s=0.0)

        db = reef.Database(EachStep(world.bucket, strike))
        try:
            view = db.reader(NAME, **view_options, **LONG)
            world.bucket.delete_many(stalls.late)
            assert dict(view.scan()) == (ROWS if view.last_lsn == world.last_lsn else {}), number
            outcomes.append("whole")
        except reef.NotFoundError as error:
            outcomes.append(f"refused, {error.kind}")
        if count[0] < number:
            break
    assert outcomes[-1] == "whole"
    assert set(outcomes) <= {"whole", "refused, collected"}
    assert ("refused, collected" in outcomes) == (kind != "now")


@pytest.mark.parametrize("pin", ["snapshot", "cursor"])
def test_H22_a_sweep_between_any_two_steps_of_pinning_an_old_generation(pin):
    """H22: a registered view is whole from then on; otherwise nothing is registered."""
    outcomes = []
    for number in range(1, 60):
        world, count = old_world(), [0]
        world.snapshot.release()
        world.fold()

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                churn(world)

        db = reef.Database(EachStep(world.bucket, strike))
        try:
            if pin == "snapshot":
                generation = world.snapshot.generation
                take = partial(db.snapshot, NAME, "old", generation=generation)
            else:
                take = partial(db.cursor, NAME, "old", after_lsn=world.last_lsn - 1)
            world.run(take)
        except (reef.NotFoundError, reef.OutcomeUnknownError) as error:  # the latter: H14
            outcomes.append(error.kind)
            assert world.head().snapshots == ()
            assert world.db.cursors(NAME) == {}
        else:
            outcomes.append("whole")
            churn(world)
            if pin == "snapshot":
                assert dict(world.db.reader(NAME, snapshot="old").scan()) == ROWS
            else:
                assert next(iter(world.db.cursor(NAME, "old"))).key == b"k4"
        if count[0] < number:
            break
    assert {"whole", "collected"} <= set(outcomes) <= {"whole", "collected", "outcome_unknown"}


UNPINNED = {
    "generation": lambda world: {"generation": world.snapshot.generation},
    "lsn": lambda world: {"lsn": world.last_lsn},
    "time": lambda world: {"time": world.time},
}


@pytest.mark.parametrize("kind", UNPINNED)
def test_H10_a_sweep_between_any_two_steps_of_a_view_without_a_lease(kind):
    """H10, H16: it reads all rows of its snapshot or raises; it never reads a part."""
    outcomes = []
    for number in range(1, 60):
        world, count = old_world(), [0]
        world.snapshot.release()

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                churn(world)

        reader = world.db.reader(NAME)
        reader._store = EachStep(world.bucket, strike)
        try:
            view = reader.as_of(**UNPINNED[kind](world))
            outcomes.append("whole")
            assert view.last_lsn == world.last_lsn, (number, view)
            assert dict(view.scan()) == ROWS
        except reef.NotFoundError as error:
            outcomes.append(f"refused, {error.kind}")
        if count[0] < number:
            break
    assert outcomes[-1] == "whole"
    assert set(outcomes) == {"whole", "refused, collected"}


def test_H22_a_lease_on_an_old_generation_holds_that_one():
    """H22: the sweep keeps the newest few generations, and the lease one from before them."""
    world = old_world()
    old = world.head().generation
    world.snapshot.release()
    for number in range(5):
        with world.db.writer(NAME) as writer:
            writer.delete(f"k{number}")
        world.fold()
        world.compact()
    view = world.db.reader(NAME, as_of=old, **LONG)
    for _ in range(3):
        world.advance(60)
        world.sweep(retain_generations_s=DAY_S, retain_generations_max=6)
    assert old < world.head().oldest_retained < world.head().generation - 4
    assert dict(view.scan()) == ROWS
    view.close()
    world.sweep(retain_generations_s=DAY_S, retain_generations_max=6)
    with pytest.raises(reef.NotFoundError):
        HeadFinder(world.bucket, USERS).load(old)


def test_H22_a_lease_that_expires_while_it_is_being_taken(monkeypatch):
    """H22: the process stalled between the lease and the head; it does not read on."""
    monkeypatch.setattr(HeldLease, "renew_in_background", lambda self: None)  # all of it did
    world = old_world()

    def stall():
        if armed and list(world.bucket.list(USERS.leases)):
            armed.clear()
            world.advance(3600)
            churn(world)

    armed = [True]
    db = reef.Database(EachStep(world.bucket, stall))
    with world.run(lambda: db.reader(NAME, pin=True)) as view:
        assert not armed
        assert dict(view.scan()) == {b"new": b"1"}, "it took another lease, on the head of now"


# --- retention ------------------------------------------------------------------------


def test_H24_an_old_snapshot_replays_its_log_after_a_sweep():
    """H24: the log is kept from the lowest floor of any root, not from the head's."""
    world = old_world()
    churn(world)
    churn(world)
    floor = HeadFinder(world.bucket, USERS).load(world.snapshot.generation).wal_floor
    assert set(range(floor, world.last_lsn + 1)) <= set(world.slots())
    with world.db.reader(NAME, snapshot="s") as view:
        assert dict(view.scan()) == ROWS


class Life:
    """A namespace that is written to, folded, compacted and swept, with pins that come and go."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.world = World()
        self.db = self.world.db
        self.writer = self.db.writer(NAME)
        self.world.publish(grace_ms=0)
        self.rows, self.log, self.pins = {}, [], []

    def step(self):
        """Run one random operation, and check that every pin still has its objects."""
        write, clean = self.write, self.clean
        what = [write, write, write, self.world.fold, self.world.compact, self.pin, clean, clean]
        self.chance.choice([*what, self.end])()
        for kind, held, expected in self.pins:
            assert getattr(self, f"read_{kind}")(held) == (
                self.log[expected:] if kind == "cursor" else expected
            )

    def write(self):
        key, value = b"k%d" % self.chance.randrange(5), b"%d" % self.chance.randrange(1000)
        if self.chance.random() < 0.2:
            value = b"bulk"
            lsn = ingest(self.world.bucket, NAME, {key: value})
        else:
            lsn = self.writer.put(key, value).lsn
        self.log.append((lsn, key, value))
        self.rows = {**self.rows, key: value}

    def clean(self):
        self.world.advance(self.chance.choice([1, 60, DAY_S]))
        self.world.sweep(retain_generations_s=self.chance.choice([0.0, 100.0]))

    def pin(self):
        kind, name = self.chance.choice(["lease", "snapshot", "cursor"]), f"{len(self.log)}"
        name += f"-{self.chance.random()}"
        if kind == "lease":
            held = self.db.reader(NAME, pin=True, **LONG)
        elif kind == "snapshot":
            held = self.db.snapshot(NAME, name)
        else:
            held = self.db.cursor(NAME, name)
        self.pins.append((kind, held, len(self.log) if kind == "cursor" else self.rows))

    def end(self):
        if self.pins:
            kind, held, _ = self.pins.pop(self.chance.randrange(len(self.pins)))
            ends = {"lease": "close", "snapshot": "release"}
            if kind == "cursor":
                self.db.drop_cursor(NAME, held.name)
            else:
                getattr(held, ends[kind])()

    def read_lease(self, view):
        return dict(view.scan())

    def read_snapshot(self, snapshot):
        with self.db.reader(NAME, snapshot=snapshot) as view:
            return dict(view.scan())

    def read_cursor(self, cursor):
        with self.db.cursor(NAME, cursor.name) as again:
            return [(change.lsn, change.key, change.row) for change in again]


@pytest.mark.parametrize("seed", range(20))
def test_each_pin_keeps_its_objects_and_nothing_after_its_end(seed):
    """Leases, snapshots and cursors come and go while the namespace is changed and swept.

    In between each of them reads its rows; when all have ended, the bucket has the objects it
    would have if there had been none.
    """
    life = Life(seed)
    world = life.world
    for _ in range(60):
        life.step()
    while life.pins:
        life.end()
    world.fold()
    for _ in range(3):
        world.advance(DAY_S)
        world.sweep()
    head = world.head()
    assert world.keys("segments") == sorted(f"{entry.id}.seg" for entry in head.segments)
    assert world.keys("leases") == []
    oldest = min(int(name[:20]) for name in world.keys("manifest"))
    assert head.generation - oldest <= 4, "those that the last sweep itself has condemned"
    batches = {lsn for lsn, _, value in life.log if value != b"bulk"}
    assert batches & set(world.slots()) <= {head.wal_floor - 1}
    assert dict(world.db.reader(NAME).scan()) == life.rows


# --- clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [-600.0, 0.0, 600.0])
def test_H30_a_snapshot_ends_by_the_stores_clock(skew_s):
    """H30: whatever the clocks of those say who take, list, extend and sweep it."""
    world = World()
    world.db.writer(NAME).put("a", b"1")
    node = world.sim.process("skewed", skew_s=skew_s)
    db = reef.Database(WholeSeconds(node.store()))
    seen = []

    def run():
        snapshot = db.snapshot(NAME, "s", ttl_s=60)
        seen.append(round(snapshot.expires_at.timestamp() - world.bucket.now()))
        node.runtime.sleep(55)
        seen.append(len(db.snapshots(NAME)))
        seen.append(db.reader(NAME, snapshot="s").get("a"))
        snapshot.extend(60)
        node.runtime.sleep(55)
        seen.append(len(db.snapshots(NAME)))
        sweep(db, NAME, apply=True, retain_generations_s=0.0)
        seen.append(len(world.head().snapshots))
        node.runtime.sleep(6)
        seen.append(len(db.snapshots(NAME)))
        fold(db, NAME)
        node.runtime.sleep(10)
        sweep(db, NAME, apply=True, retain_generations_s=0.0)
        seen.append(len(world.head().snapshots))

    node.spawn(run)
    world.sim.run()
    assert seen[0] in (59, 60)
    assert seen[1:] == [1, b"1", 1, 1, 0, 0]


# --- changes --------------------------------------------------------------------------


def test_H44_a_stretch_of_fences_moves_the_position():
    """H44: 150 writers in a row write nothing; who stops there does not begin before them."""
    db = reef.open("memory://")
    for _ in range(150):
        db.writer(NAME)
    reader = db.reader(NAME)
    changes = reader.changes()
    assert list(changes) == []
    assert changes.position == 150
    cursor = db.cursor(NAME, "c", after_lsn=0)
    assert list(cursor) == []
    assert cursor.commit() == 150
    fold(db, NAME)
    db.writer(NAME).put("a", b"1")
    assert [change.key for change in reader.changes(150)] == [b"a"]
    assert [change.key for change in db.cursor(NAME, "c")] == [b"a"]


def test_H44_a_sweep_past_an_unregistered_position():
    """H44: the fences that stay make the log appear whole; it is an error all the same."""
    world = World()
    for _ in range(3):
        with world.db.writer(NAME) as writer:
            for number in range(3):
                writer.put("k", b"%d" % number)
    world.fold()
    world.sweep_twice()
    fences = [1, 5, 9]
    assert world.slots() == [*fences, 12]
    reader = world.db.reader(NAME)
    for after in range(12):
        with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
            list(reader.changes(after))
        assert caught.value.kind == "collected"
    assert list(reader.changes(12)) == []


def test_H44_a_sweep_between_any_two_steps_of_a_stream():
    """H44: all changes in order, or an error that names the first that is missing."""
    refused = 0
    for number in range(1, 60):
        world, count = old_world(), [0]
        world.snapshot.release()
        expected = [(c.lsn, c.key) for c in world.db.reader(NAME).changes()]

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                churn(world)

        reader = reef.Database(EachStep(world.bucket, strike)).reader(NAME)
        seen, raised = [], None
        try:
            changes = reader.changes()
            seen.extend((change.lsn, change.key) for change in changes)
        except reef.NotFoundError as error:
            raised = error
        if raised is None:
            assert len(seen) >= len(expected), "an end where there is more is a gap"
        else:
            assert raised.kind == "collected"
            assert raised.context["lsn"] < world.head().wal_floor
            assert seen == [change for change in expected if change[0] < raised.context["lsn"]]
            refused += 1
        assert seen[: len(expected)] == expected[: len(seen)], number
        assert seen == expected[: len(seen)] or [key for _, key in seen[5:]] == [b"a", b"new"]
        if count[0] < number:
            assert seen == expected
            break
    assert refused > 3


def test_H44_a_fold_between_any_two_steps_of_a_stream():
    """H44: what came and was folded since the log was listed is not taken for collected."""
    for number in range(1, 60):
        world, count = old_world(), [0]
        expected = [c.key for c in world.db.reader(NAME).changes()]

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                with world.db.writer(NAME) as writer:
                    writer.put("new", b"1")
                world.fold()

        reader = world.db.reader(NAME)
        reader._store = EachStep(world.bucket, strike)
        stream = reader.changes()
        seen = [change.key for change in stream]
        assert seen in (expected, [*expected, b"new"]), number
        if count[0] < number:
            break
        assert [*seen, *(change.key for change in stream)] == [*expected, b"new"], number


def test_H47_a_stream_that_sleeps_past_its_next_lsn():
    """H47: both of its probes would miss when it wakes; it does not wait for ever."""
    world = World()
    writer, received = world.db.writer(NAME), []
    changes = world.db.reader(NAME).changes(follow=True, timeout_s=100)
    sleeper = world.sim.process("sleeper")

    def follow():
        try:
            received.extend(changes)
        except reef.NotFoundError as error:
            received.append(error)

    def overtake():
        for number in range(3):
            writer.put("k", b"%d" % number)
        fold(world.db, NAME)
        for _ in range(2):
            sleeper.runtime.sleep(GRACE_S + 60)
            sweep(world.db, NAME, apply=True, retain_generations_s=0.0)

    follower = changes._follower
    probe = follower.probe

    def slow_probe():
        if not received and follower._rules.next_lsn == 2:
            overtake()
        return probe()

    follower.probe = slow_probe
    sleeper.spawn(follow)
    world.sim.run()
    (error,) = received
    assert (error.kind, error.context["lsn"]) == ("collected", 2)


# --- all of it at once ----------------------------------------------------------------


TRANSIENT = (reef.ConflictError, reef.UnavailableError, reef.OutcomeUnknownError)


class Busy:
    """A writer, a fold, a sweep and viewers, on a bucket with a grace of two seconds."""

    def __init__(self, sim):
        self.sim = sim
        reef.Database(sim.bucket).create(NAME)
        Publisher(sim.bucket, USERS).publish(lambda head: set_grace(head, 2000, 0))
        self.history, self.done, self.scans = {}, [], 0
        for name, work in (("writer", self.write), ("cleaner", self.clean)):
            self.start(name, work)
        for name in ("viewer-1", "viewer-2"):
            self.start(name, self.view)
        sim.run()
        assert len(self.history) > 15
        assert self.scans > 2
        head = HeadFinder(sim.bucket, USERS).find().manifest
        kept = len(list(sim.bucket.list(USERS.manifests)))
        assert kept < head.generation - 5, "the sweep did its work"

    def start(self, name, work):
        node = self.sim.process(name)
        node.spawn(lambda: work(reef.Database(node.store()), node.runtime))

    def write(self, db, runtime):
        writer = db.writer(NAME)
        for number in range(25):
            try:
                self.history[writer.put(b"k%d" % (number % 3), b"%d" % number).lsn] = number
            except reef.ReefError:
                writer = db.writer(NAME)
            runtime.sleep(1)
        self.done.append(True)

    def clean(self, db, runtime):
        while not self.done:
            runtime.sleep(runtime.uniform(0.0, 2.0))
            with suppress(*TRANSIENT):
                fold(db, NAME)
            with suppress(*TRANSIENT):
                sweep(db, NAME, apply=True, retain_generations_s=0.0)

    def view(self, db, runtime):
        while not self.done:
            with suppress(*TRANSIENT):
                self.check_views(db, runtime)
            runtime.sleep(runtime.uniform(0.0, 3.0))

    def check_views(self, db, runtime):
        snapshot = db.snapshot(NAME, ttl_s=20)
        with db.reader(NAME, snapshot=snapshot) as pinned, db.reader(NAME, pin=True) as now:
            runtime.sleep(runtime.uniform(0.0, 8.0))
            for seen in (pinned, now):
                rows = dict(seen.scan())
                for number in [n for lsn, n in self.history.items() if lsn <= seen.last_lsn]:
                    assert int(rows[b"k%d" % (number % 3)]) >= number
                self.scans += 1


def test_H22_viewers_during_a_fold_and_a_sweep():
    """H22, H24: on many schedules, with slow calls and lost responses, no view misses a row."""
    chaos = Chaos(lost_response=0.02, fail_before=0.02, latency_s=(0, 0.05))
    assert simulate(Busy, range(12), chaos=chaos) == 12
