"""Queries that read the state of an earlier query again: only if it is the newest, under its lease.

Without a session of Spark: a program asks the native reader's own classes, while a namespace is
changed in all ways there are; and a model of the protocol is explored with all its interleavings.
"""

import json
import random
import shutil
import subprocess
import time
from typing import NamedTuple

import pyarrow as pa
import pytest

import reef
import reef.jobs
from tests.spark.test_native import SCHEMA, WIDE, random_step, row_of
from tests.spark.test_native_histories import plan_of

STEPS = 30


@pytest.fixture(scope="module")
def prober(java_program):
    """Start the program; return a call that keeps a plan, or asks whether it is the newest."""
    command = java_program("StateProbe").command
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:

        def is_newest(plan=None):
            run.stdin.write("\n" if plan is None else json.dumps(plan) + "\n")
            run.stdin.flush()
            return json.loads(run.stdout.readline())

        yield is_newest
        run.stdin.close()


@pytest.fixture
def table(db):
    """A namespace with some rows in a segment and some in its log."""
    choices = random.Random(0)
    db.create("t", SCHEMA)
    rows = [row_of(choices, number) for number in range(0, 400, 3)]
    reef.jobs.ingest(db, "t", pa.Table.from_pylist(rows, schema=SCHEMA))
    with db.writer("t", background=False) as writer:
        writer.upsert(rows[:5])
    return db


def position(plan):
    """Return what identifies a state."""
    return plan["generation"], plan["lsn"]


@pytest.mark.parametrize("seed", range(2))
def test_a_state_is_the_newest_until_anything_changes(prober, table, url, seed):
    """A probe finds every change: of the log, of the segments, of the schema."""
    choices = random.Random(seed)
    with table.writer("t", background=False) as writer:
        plan = plan_of(url)
        assert prober(plan)
        for step in range(STEPS):
            if choices.random() < 0.7:
                random_step(choices, table, writer, SCHEMA)
            now = plan_of(url)
            assert prober() == (position(now) == position(plan)), step
            plan = now
            assert prober(plan)
        table.alter("t", WIDE)
        assert not prober()


def test_a_state_does_not_outlive_its_name(prober, table, url):
    """After a drop, also if the name is created again; and after the bucket was restored."""
    assert prober(plan_of(url))
    table.drop("t")
    assert not prober()
    table.create("t", SCHEMA)
    assert not prober()
    assert prober(plan_of(url))
    table.rename("t", "u")
    assert not prober()


def test_a_state_does_not_outlive_its_bucket(prober, table, url):
    """A bucket that was deleted and made again has no lease of an earlier query."""
    plan = plan_of(url)
    assert prober(plan)
    shutil.rmtree(url)
    assert not prober()
    reef.open(url).create("t", SCHEMA)
    assert not prober()


def test_a_lost_lease_ends_a_state(prober, table, url):
    """The newest state without a lease could be swept while it is read."""
    plan = plan_of(url)
    assert prober(plan)
    for info in table.store.list("namespaces/t/leases/"):
        table.store.delete(info.key)
    assert not prober()


@pytest.mark.parametrize("field", ["grace_ms", "ttl_ms"])
def test_a_state_that_was_not_seen_for_long_is_planned_again(prober, table, url, field):
    """After half a grace a miss proves nothing (H47); after half its term a lease may be lost."""
    plan = plan_of(url)
    place = plan["probes"] if field == "grace_ms" else plan["lease"]
    for milliseconds, expected in ((3_600_000, True), (30, False)):
        place[field] = milliseconds
        prober(plan)
        plan["log"] = None  # its file was read
        time.sleep(0.05)
        assert prober() is expected


def test_a_state_is_probed_by_signed_urls(prober, seaweedfs):
    """Without credentials; a state over HTTP ends with the next write, as one in a directory."""
    seaweedfs.make_bucket("reused")
    options, url = {**seaweedfs.options(), "listing": "unsorted"}, "s3://reused/here"
    db = reef.open(url, **options)
    db.create("t", SCHEMA)
    given = {f"store.{name}": str(value) for name, value in options.items()}
    assert prober(plan_of(url, **given))
    with db.writer("t", background=False) as writer:
        writer.upsert([row_of(random.Random(1), 1)])
    assert not prober()


@pytest.mark.parametrize("past", [{"generation": "1"}, {"asOfTime": "2099-01-01T00:00:00Z"}])
def test_past_states_are_planned_each_time(prober, table, url, past):
    """A generation does not change, but its retention ends; Python decides that."""
    plan = plan_of(url, **past)
    assert plan["probes"] is None
    assert not prober(plan)


# --- the protocol -------------------------------------------------------------------------

GRACE, CLOCK_MAX, SLOTS, GENERATIONS = 2, 3, 1, 3
"""Times are in half graces."""
TERMS = (1, 6)
"""Of leases: shorter and longer than it takes to sweep an object."""


class World(NamedTuple):
    """A log, manifests, a sweep, and one session that pins a state and reads it again."""

    clock: int = 0
    slots: frozenset[int] = frozenset()
    last: int = 0
    manifests: tuple[tuple[int, int, bool], ...] = ((1, 0, True),)
    """Of each generation: its floor, when it was published, and whether it still exists."""
    step: str = "idle"
    state: tuple[int, int] | None = None
    """The generation and the LSN that the session has pinned."""
    seen: int = 0
    started: int = 0
    durable: tuple[int, int] = (1, 0)
    """The newest generation and LSN when the reuse began."""
    leased: bool = False
    renewed: int = 0
    term: int = 1

    @property
    def head(self) -> int:
        return len(self.manifests)


def following(world, protections):
    """Yield all worlds that one step leads to."""
    if world.clock < CLOCK_MAX:
        now = world.clock + 1
        if world.leased and is_valid(world, 1):
            yield world._replace(clock=now, renewed=now)  # by the heartbeat
        if world.step != "using":
            yield world._replace(clock=now)
        elif not world.leased:
            yield world._replace(clock=now)  # it reads on, and may miss an object
    if world.last < SLOTS:
        yield world._replace(slots=world.slots | {world.last + 1}, last=world.last + 1)
    if world.head < GENERATIONS:
        published = (world.last + 1, world.clock, True)
        yield world._replace(manifests=(*world.manifests, published))
    yield swept(world)
    yield from session(world, protections)


def is_valid(world, share):
    """Whether less than a share of the lease's term has passed."""
    return world.clock - world.renewed <= world.term * share


def swept(world):
    """Delete what was superseded a grace ago, except for what the lease pins."""
    leased = world.leased and is_valid(world, 1)
    pinned = world.state if leased else None
    manifests, slots = list(world.manifests), world.slots
    for generation in range(1, world.head):
        floor, superseded = world.manifests[generation][:2]
        if world.clock - superseded < GRACE:
            continue
        if pinned is None or pinned[0] != generation:
            manifests[generation - 1] = (*manifests[generation - 1][:2], False)
        kept = range(0) if pinned is None else range(world.manifests[pinned[0] - 1][0], SLOTS + 1)
        slots = frozenset(slot for slot in slots if slot >= floor or slot in kept)
    return world._replace(manifests=tuple(manifests), slots=slots, leased=leased)


def session(world, protections):
    """Pin a state; later read it again if the probes allow it."""
    gone = world._replace(step="idle", state=None, leased=False)
    if world.step == "idle" and world.state is None:
        state = (world.head, world.last)
        now = {"seen": world.clock, "renewed": world.clock, "leased": True}
        yield world._replace(state=state, **now)
    elif world.step == "idle":
        yield world._replace(step="slot", started=world.clock, durable=(world.head, world.last))
    elif world.step == "slot":
        missing = world.state[1] + 1 not in world.slots or "slot" not in protections
        yield world._replace(step="manifest") if missing else gone
    elif world.step == "manifest":
        following = world.manifests[world.state[0] : world.state[0] + 1]
        missing = not following or not following[0][2] or "manifest" not in protections
        yield world._replace(step="lease") if missing else gone
    elif world.step == "lease":
        valid = world.leased and is_valid(world, 1 / 2)
        fresh = world.clock - world.seen <= GRACE / 2
        held = (valid or "lease" not in protections) and (fresh or "grace" not in protections)
        yield world._replace(step="using", seen=world.started) if held else gone
    else:
        yield world._replace(step="idle")


def violation(world):
    """Return what is wrong in a world."""
    if world.step != "using":
        return None
    generation, lsn = world.state
    if generation < world.durable[0] or lsn < world.durable[1]:
        return f"{world.durable} was durable before the query, which reads {world.state}"
    return None if world.manifests[generation - 1][2] else f"generation {generation} was swept"


def explored(protections):
    """Visit all worlds; return the first violation."""
    frontier = [World(term=term) for term in TERMS]
    seen = set(frontier)
    while frontier:
        for world in following(frontier.pop(), protections):
            if world not in seen:
                seen.add(world)
                frontier.append(world)
                if (found := violation(world)) is not None:
                    return found
    return None


PROTECTIONS = frozenset({"slot", "manifest", "lease", "grace"})


def test_no_order_of_steps_reads_an_old_or_swept_state():
    """Writes, publications, sweeps and time between every two steps of a reuse."""
    assert explored(PROTECTIONS) is None


@pytest.mark.parametrize("left_out", sorted(PROTECTIONS))
def test_every_part_of_the_probe_is_needed(left_out):
    """Without it, some order reads a state that is old or gone (H13, H14, H22, H47)."""
    assert explored(PROTECTIONS - {left_out}) is not None
