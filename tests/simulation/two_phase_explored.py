"""Two-phase creation, explored: a death at each step, recoverers, a rival, and collection (H23).

And a register that is restored from an empty backup between any two requests (H72), except while
the check of a process has passed and its commit has not come: the open slots are known.

A first writer creates a name. A rival creates it too, recoverers finish pending records, and a
collector deletes the name, after which a successor may create it again. Invariants:

- at most one has the outcome "created"; a process with that outcome, or "exists", finds the object;
- the bytes at the name never change while it is there, and none are there after a deletion but
  the successor's;
- a calm recovery at the end finishes everything: no record is stuck, and each acknowledged object
  is there.

Every process checks right after its response: it knows nothing else.
"""

from contextlib import suppress
from dataclasses import dataclass

from reef.errors import NotFoundError, UnavailableError
from reef.stores import Outcome, ReadBack, RetryPolicy
from reef.stores.two_phase import collect, find_two_phase, recover
from reef.stores.two_phase.register import is_temporary
from tests.simulation.two_phase_register import calm_two_phase, simulated_two_phase

KEY = "wal/7"
COLLECTED = "collected"
TWICE = RetryPolicy(attempts_max=2, deadline_s=60.0, first_delay_s=0.01)


def found(store):
    """Return the body at the name."""
    try:
        return store.get(KEY)
    except NotFoundError:
        return None


@dataclass(frozen=True)
class Case:
    """Who takes part. Without collection a name, once there, stays as it is."""

    rival: bool = False
    recoverers: int = 0
    observer: bool = False
    collects: bool = False
    """Deletes the name, once it is there."""
    successor: bool = False
    """Creates the name after it was collected."""
    sweeps: bool = False
    """Removes sources, however young, that are of no use."""
    resends: bool = False
    """An insert that was sent twice may land once more after the name was collected: its record is
    stuck, and goes as all do below the boundary."""
    restores: str = ""
    """The register is restored: "silent", "shown" by its incarnation, or "any time"."""
    bare: bool = False
    """Without the read-back, which makes up for some mistakes."""

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        play = Play(self)
        sim.witness = lambda: tuple(sorted(play.reported.items()))
        sim.recall = lambda states: [play.reported.update(state) for state in states]
        for name, act, *args in play.roles():
            play.start(sim, name, act, *args)
        sim.run()
        play.check(sim.bucket)


class Play:
    """One run of a case, and the outcomes in it."""

    def __init__(self, case):
        self.case = case
        self.reported = {}

    def roles(self):
        """Yield the processes: a name, a function, and its arguments."""
        yield "first", self.create, b"first"
        if self.case.rival:
            yield "rival", self.create, b"rival"
        for number in range(self.case.recoverers):
            yield f"recoverer-{number}", lambda store, _: recover(store)
        others = {
            "observer": (self.case.observer, self.observe),
            "collector": (self.case.collects, self.collect),
            "successor": (self.case.successor, self.succeed),
            "sweeper": (self.case.sweeps, self.sweep),
            "restorer": (self.case.restores, self.restore),
        }
        yield from ((name, act) for name, (is_there, act) in others.items() if is_there)

    def start(self, sim, name, act, *args):
        node = sim.process(name)
        process = (name,) if self.case.restores else ()
        store = simulated_two_phase(sim, node.raw_store(), TWICE, process)
        store = store.inner if self.case.bare else store

        def run():
            with suppress(UnavailableError):  # retries ended, and nothing was written
                act(store, name, *args)

        node.spawn(run)

    # --- processes ---------------------------------------------------------------
    def create(self, store, name, body):
        outcome = store.create(KEY, body).outcome
        self.reported[name] = str(outcome)
        if outcome is Outcome.UNKNOWN or self.case.collects:
            return
        there = found(store)
        assert there is not None, f"{name} was reported {outcome}, and nothing is there"
        assert (there == body) == (outcome is Outcome.CREATED), f"{name}: {outcome}, {there}"

    def observe(self, store, _):
        """Check that an object that was seen once is still there, unchanged."""
        before, after = found(store), found(store)
        assert before is None or before == after, f"{before} became {after}"

    def collect(self, store, _):
        if [info.key for info in store.list("wal/")] != [KEY]:
            return
        store.delete(KEY)
        store.put(COLLECTED, b"")
        self.reported["collector"] = "deleted"

    def succeed(self, store, name):
        """Check that a deleted object does not reappear, and that its successor stays."""
        try:
            store.head(COLLECTED)
        except NotFoundError:
            return
        self.create(store, name, b"successor")
        if self.reported[name] != Outcome.UNKNOWN:
            there = found(store)
            assert there in (b"successor", b"rival", b"first"), there

    def sweep(self, store, _):
        collect(store, "wal/", is_below=lambda _: False, older_than_s=-1.0, apply=True)

    def restore(self, store, _):
        how = self.case.restores
        register = find_two_phase(store).register.inner
        register.restore(shown=how != "silent", any_time=how == "any time")

    # --- the end ------------------------------------------------------------------
    def check(self, bucket):
        store = calm_two_phase(bucket)
        stuck = recover(store).stuck
        assert not stuck or self.case.resends, stuck
        winners = [name for name, outcome in self.reported.items() if outcome == Outcome.CREATED]
        there = found(store)
        if self.case.collects:
            # In the order of their creation: only the last one can be there.
            winners = [name for name in winners if name == "successor"]
        assert len(winners) <= 1, f"{winners} were all reported that they won"
        if winners:
            assert there == winners[0].encode(), f"{winners[0]} won, {there} is there"
        elif not self.case.collects and Outcome.EXISTS in self.reported.values():
            assert there is not None
        self.check_leftovers(store)

    def check_leftovers(self, store):
        """A name that is empty can be used, and all that deaths left goes when it is old."""
        if found(store) is None and not recover(store).stuck:
            assert ReadBack(store, TWICE).create(KEY, b"next").landed, "the name is blocked"
        collect(store, "wal/", is_below=lambda _: True, older_than_s=-1.0, apply=True)
        left = [info.key for info in store.inner.list("wal/") if is_temporary(info.key)]
        assert not left, left
        records = list(store.register.all("wal/", unfinished=True))
        assert not records, f"unfinished records: {records}"
