"""`explore` walks all histories: as many as the formula says, also after a wait."""

import functools
import sys
from math import comb

import pytest

from reef.errors import NotFoundError
from reef.testing import (
    Chaos,
    ExplorationFailed,
    Footprint,
    SimulationFailed,
    explore,
    explore_states,
    replay_states,
    simulate,
)

explore_module = sys.modules["reef.testing.explore"]  # a function of the same name hides it


def _two_putters(puts, wait_s=None):
    """Two processes that put objects of their own, perhaps after a wait."""
    orders = set()

    def scenario(sim):
        def work(node):
            if wait_s is not None:
                node.runtime.sleep(wait_s)
            for number in range(puts):
                node.raw_store().put(f"{node.name}/{number}", b"")

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: work(node))
        sim.run()
        orders.add(tuple(step.detail for step in sim.trace if step.kind == "store"))

    return scenario, orders


def _orders(pieces):
    """In how many ways two processes of so many pieces each can interleave."""
    return comb(2 * pieces, pieces)


@pytest.mark.parametrize("puts", [1, 2])
@pytest.mark.parametrize(
    ("wait_s", "histories"),
    [
        (None, _orders),
        (0.0, lambda pieces: _orders(pieces + 1)),  # it hands over: one piece more
        (1.0, lambda pieces: _orders(1) * _orders(pieces)),  # time passes once both sleep
    ],
    ids=["no wait", "sleep(0)", "sleep(1)"],
)
def test_the_number_of_histories_is_the_formulas(puts, wait_s, histories):
    """A put has two yield points, so a process with n of them has 2n + 1 pieces."""
    scenario, orders = _two_putters(puts, wait_s)
    explored = explore(scenario)
    assert explored.complete
    assert explored.histories == histories(2 * puts + 1)
    assert len(orders) == _orders(2 * puts), "every order of the store's yield points is among them"


def _check_then_put_after(wait_s):
    """The planted bug, behind a wait that ends for both at the same time."""

    def scenario(sim):
        winners = []

        def work(node):
            store = node.raw_store()
            node.runtime.sleep(wait_s)
            try:
                store.head("slot")
            except NotFoundError:
                store.put("slot", node.name.encode())
                winners.append(node.name)

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: work(node))
        sim.run()
        assert len(winners) == 1

    return scenario


@pytest.mark.parametrize("wait_s", [0.0, 1e-9, 1.0])
def test_a_check_then_put_after_a_wait_is_found(wait_s):
    """Fibers woken at the same time are interleaved, in explorations and from seeds."""
    with pytest.raises(ExplorationFailed):
        explore(_check_then_put_after(wait_s))
    with pytest.raises(SimulationFailed):
        simulate(_check_then_put_after(wait_s), range(100))


def test_time_passes_only_when_no_fiber_is_ready():
    """What explore does not enumerate: a sleep that ends while another is still busy."""

    def scenario(sim):
        node, order = sim.process("node"), []
        store = node.raw_store()
        node.spawn(lambda: (node.runtime.sleep(1), order.append("slept")), "sleeper")
        node.spawn(lambda: (store.put("k", b""), order.append("put")), "busy")
        sim.run()
        assert order == ["put", "slept"]

    assert explore(scenario).complete


# --- states ---------------------------------------------------------------------------

NO_FOOTPRINT = Footprint()
FOOTPRINT = Footprint(
    private=lambda key: key.startswith("own/"),
    ignored=lambda key: key.startswith("own/"),
    immutable=lambda key, _: key.startswith("slot/"),
)


def _slot_takers(ends, slots=2, names="ab", notes=True):
    """Processes that take slots, read the winners of lost ones, and record them in private."""

    def scenario(sim):
        reported = {}

        def take(node):
            store = node.store()
            for number in range(slots):
                result = store.create(f"slot/{number}", node.name.encode())
                if notes:
                    store.put(f"own/{node.name}", b"%d" % number)
                seen = store.get(f"slot/{number}").decode() if not result.landed else node.name
                reported[node.name] = reported.get(node.name, "") + seen

        sim.witness = lambda: tuple(sorted(reported.items()))
        for name in names:
            node = sim.process(name)
            node.spawn(lambda node=node: take(node))
        sim.run()
        for name, seen in reported.items():
            held = [sim.bucket.get(f"slot/{n}").decode() for n in range(len(seen))]
            assert held == list(seen), f"{name} was reported {seen}"
        objects = [(i.key, sim.bucket.get(i.key)) for i in sim.bucket.list("slot/")]
        ends.add((str(sorted(reported.items())), str(objects)))

    return scenario


def _ends(explorer, chaos, slots=1, notes=True, **options):
    ends = set()
    done = explorer(_slot_takers(ends, slots, notes=notes), chaos=chaos, **options)
    assert done.complete
    return ends, done


@pytest.mark.parametrize(
    "mishaps",
    [{}, {"lost_response": 1.0, "faults_max": 1}, {"fail_before": 1.0, "faults_max": 1}],
    ids=["calm", "lost response", "failed"],
)
def test_states_are_cut_and_no_end_is_lost(mishaps):
    """The same ends as the walk through all histories, in a small part of the runs."""
    chaos = Chaos(latency_s=(0.0, 0.0), **mishaps)
    reduced, few = _ends(explore_states, chaos, notes=False, footprint=FOOTPRINT)
    plain, more = _ends(explore_states, chaos, notes=False, footprint=NO_FOOTPRINT)
    every, histories = _ends(explore, chaos, notes=False)
    assert reduced == plain == every
    assert few.histories <= more.histories < histories.histories


def test_deaths_and_late_requests_come_to_no_other_ends_for_being_reduced():
    """With a death and a late request, the footprint changes the number of states only."""
    chaos = Chaos(crash=1.0, crashes_max=1, late=1.0, faults_max=1, latency_s=(0.0, 0.0))
    reduced, _ = _ends(explore_states, chaos, slots=2, footprint=FOOTPRINT)
    plain, _ = _ends(explore_states, chaos, slots=2, footprint=NO_FOOTPRINT)
    assert reduced == plain
    dead = Chaos(crash=1.0, crashes_max=1, latency_s=(0.0, 0.0))
    every, _ = _ends(explore, dead, notes=False)
    states, _ = _ends(explore_states, dead, notes=False)
    assert every <= states, "a death in which requests land later has all of the others' ends"


@pytest.mark.parametrize("mishaps", [{"crashes_max": 1}, {"crashes_max": 2}], ids=str)
def test_deaths_that_are_left_out_leave_nothing_new(mishaps):
    """Also of processes that continued because another has filled their slot."""
    chaos = Chaos(crash=1.0, latency_s=(0.0, 0.0), **mishaps)
    reduced, few = _ends(explore_states, chaos, slots=3, notes=False, footprint=FOOTPRINT)
    plain, more = _ends(explore_states, chaos, slots=3, notes=False, reduced=False)
    assert reduced == plain
    assert few.states < more.states


def test_a_late_request_lands_between_any_two_steps():
    """It is a fiber of its own, whether its sender lives or not."""
    seen = set()

    def scenario(sim):
        late, other = sim.process("late"), sim.process("other")
        views = []
        sim.witness = lambda: tuple(views)
        sim.can_crash = lambda process: process is late
        late.spawn(lambda: late.raw_store().create("x", b""))

        def read():
            for _ in range(3):
                views.append(len(list(other.raw_store().list())))

        other.spawn(read)
        sim.run()
        seen.add(tuple(views))

    chaos = Chaos(crash=1.0, crashes_max=1, latency_s=(0.0, 0.0))
    assert explore_states(scenario, chaos=chaos).complete
    assert seen == {(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)}


def test_time_passes_at_any_step_or_never():
    """Where the scenario lets it; a clock is read before and after."""
    seen = set()

    def scenario(sim):
        node, read = sim.process("node"), []
        sim.witness = lambda: tuple(read)

        def work():
            for number in range(2):
                node.raw_store().put(f"{number}", b"")
                read.append(node.runtime.boottime_s())

        node.spawn(work)
        sim.let_time_pass(60.0)
        sim.run()
        seen.add(tuple(read))

    assert explore_states(scenario).complete
    assert seen == {(0.0, 0.0), (0.0, 60.0), (60.0, 60.0)}


def test_ids_depend_on_their_drawer_alone_and_are_never_the_same():
    """Equal states have equal ids, whatever the others drew before; two processes never share."""
    drawn = {}

    def scenario(sim):
        def work(node):
            node.raw_store().put(node.name, b"")
            ids = node.runtime.gather([node.runtime.ulid, node.runtime.ulid])
            drawn.setdefault(node.name, set()).add((node.runtime.ulid(), *ids))

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: work(node))
        sim.run()

    assert explore_states(scenario).complete
    assert len(drawn["a"]) == len(drawn["b"]) == 1
    assert len({*drawn["a"].pop(), *drawn["b"].pop()}) == 6


def test_a_bug_is_found_by_states_and_its_script_brings_it_back():
    """The planted check-then-put, and an exploration that was cut short says so."""
    with pytest.raises(ExplorationFailed) as found:
        explore_states(_check_then_put_after(1.0))
    with pytest.raises(ExplorationFailed, match="store  put slot"):
        replay_states(_check_then_put_after(1.0), found.value.script)
    short = explore_states(_slot_takers(set(), names="abc"), states_max=3)
    assert short.states >= 3
    assert not short.complete


def test_a_bound_on_switches_bounds_how_often_a_process_is_left():
    """None: one after the other, in any order. More switches have more ends."""
    calm = Chaos(latency_s=(0.0, 0.0))
    few, _ = _ends(explore_states, calm, slots=2, switches_max=0)
    reports = {reported for reported, _ in few}
    assert reports == {"[('a', 'aa'), ('b', 'aa')]", "[('a', 'bb'), ('b', 'bb')]"}
    more, _ = _ends(explore_states, calm, slots=2, switches_max=1)
    every, _ = _ends(explore_states, calm, slots=2)
    assert few < more <= every


# --- reductions -----------------------------------------------------------------------
def _readers_and_a_deleter(ends, prepared=False, recalls=False):
    """Two read and fill slots that a third reads and takes away; they share the bucket only."""

    def scenario(sim):
        reported = {}
        sim.witness = lambda: tuple(sorted(reported.items()))
        if recalls:
            sim.recall = lambda states: [reported.update(state) for state in states]
        sim.bucket.put("slot/0", b"first")
        sim.bucket.put("slot/1", b"second")

        def read(node):
            store = node.raw_store()
            for key in ("slot/0", "slot/1"):
                try:
                    seen = store.get(key).decode()
                except NotFoundError:
                    seen = store.create(key, node.name.encode()).outcome
                reported[node.name] = f"{reported.get(node.name, '')} {seen}"

        def take_away(node):
            store = node.raw_store()
            for key in ("slot/0", "slot/1"):
                reported["deleter"] = f"{reported.get('deleter', '')} {store.get(key).decode()}"
                store.delete(key)

        for name, work in {"a": read, "b": read, "deleter": take_away}.items():
            node = sim.process(name)
            start = functools.partial(node.spawn, functools.partial(work, node))
            sim.prepare(node, start) if prepared else start()
        sim.run()
        ends.add((tuple(sorted(reported.items())), *(info.key for info in sim.bucket.list())))

    return scenario


DELETER = Footprint(deleter=("deleter", Footprint(immutable=lambda *_: True)))


@pytest.mark.parametrize("options", [{}, {"prepared": True}, {"recalls": True}], ids=str)
def test_deletions_by_one_process_are_fixed_for_it_and_when_it_is_gone(options):
    """The same ends as without leaving anything out, also where processes are prepared apart."""
    reduced, plain = set(), set()
    few = explore_states(_readers_and_a_deleter(reduced, **options), footprint=DELETER)
    more = explore_states(_readers_and_a_deleter(plain), reduced=False)
    assert few.complete
    assert more.complete
    assert reduced == plain
    assert few.states < more.states / 10


def test_uncaught_errors_and_deadlocks_are_found():
    """With their scripts; so is a scenario that does not run."""

    def fails(sim):
        node = sim.process("node")
        node.spawn(lambda: (node.raw_store().put("x", b""), 1 / 0))
        sim.run()

    def waits(sim):
        node = sim.process("node")
        node.spawn(lambda: (node.raw_store().put("x", b""), node.runtime.future().result()))
        sim.run()

    with pytest.raises(ExplorationFailed, match="ZeroDivisionError"):
        explore_states(fails)
    with pytest.raises(ExplorationFailed, match="all wait for each other: node"):
        explore_states(waits)
    with pytest.raises(RuntimeError, match="must run"):
        explore_states(lambda sim: None)


def test_progress_is_reported_and_can_end_the_walk(monkeypatch):
    """Once every so many states."""
    monkeypatch.setattr(explore_module, "PROGRESS_STATES", 5)
    calm = Chaos(latency_s=(0.0, 0.0))
    seen = []
    assert explore_states(_slot_takers(set()), chaos=calm, progress=seen.append).complete
    assert [so_far.states for so_far in seen] == list(range(5, 5 * len(seen) + 5, 5))
    ended = explore_states(_slot_takers(set()), chaos=calm, progress=lambda so_far: True)
    assert not ended.complete
