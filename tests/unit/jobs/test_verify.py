"""Verify: read-only, concurrent with all other work, complete; what counts as a problem."""

from contextlib import suppress
from itertools import count

import msgspec
import pytest

import reef
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.formats.manifest import Sums, encode_manifest
from reef.formats.segment import decode_tail
from reef.jobs import ProblemKind, Severity, compact, fold, verify
from reef.jobs.verify.objects import SegmentCheckTask, run_segment_task
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import broken_steps
from reef.stores import Wrapper
from reef.testing import Chaos, Fault, Rule, open_store, simulate
from tests.support.damage import Copies, flip
from tests.support.sweep_world import NAME, USERS, EachRequest, World, folded_world


@pytest.fixture(scope="module")
def copies():
    """Give a namespace with something of everything."""
    return Copies()


def test_an_intact_namespace_has_no_problem(copies):
    """And the report says how much was checked."""
    sample = copies.fresh()
    head = sample.head()
    for deep in (False, True):
        report = verify(sample.db, NAME, deep=deep)
        assert report.ok
        assert report.problems == report.notes == []
        assert report.generation == head.generation == report.generations
        assert report.segments == len(head.segments) + 2  # a snapshot's, and one of an ingest
        assert report.objects == len(list(sample.store.list(USERS.wal)))
        assert report.to_dict()["ok"] is True


def test_nothing_is_written(copies):
    """Not a byte in the namespace, damaged or not."""

    class ReadOnly(Wrapper):
        """Refuses every write."""

        def _refuse(self, *args):
            raise AssertionError("a write")

        put = create = replace = upload = copy = delete_many = _refuse

    sample = copies.fresh()
    assert verify(Database(ReadOnly(sample.store)), NAME, deep=True).ok
    flip(sample.store, sample.places["wal middle"], 40)
    assert not verify(Database(ReadOnly(sample.store)), NAME, deep=True).ok


def test_a_namespace_that_is_not_there():
    """Is reported as such, and not as damage."""
    with pytest.raises(reef.NotFoundError):
        verify(reef.open("memory://"), NAME)


def test_every_problem_is_reported_in_one_run(copies):
    """One damaged object hides no other."""
    sample = copies.fresh()
    places = ["wal middle", "begin", "segment", "old segment", "old manifest", "lease"]
    for place in places:
        flip(sample.store, sample.places[place], 40)
    found = {problem.object for problem in verify(sample.db, NAME, deep=True).problems}
    assert found == {sample.places[place] for place in places}


def test_without_deep_the_blocks_are_not_read(copies):
    """Tails are; a damaged group is found only by reading it."""
    sample = copies.fresh()
    flip(sample.store, sample.places["segment"], 40)
    assert verify(sample.db, NAME).ok
    assert not verify(sample.db, NAME, deep=True).ok


def test_several_damaged_groups_are_reported_one_by_one(copies):
    """Each with its own offset."""
    sample = copies.fresh()
    key = sample.places["segment"]
    body = sample.store.get(key)
    index = decode_tail(body, len(body), key).index
    for group in (0, 2):
        flip(sample.store, key, index.key_range(group)[0] + 20)
    problems = verify(sample.db, NAME, deep=True).problems
    assert [p.offset for p in problems] == [index.key_range(g)[0] + 16 for g in (0, 2)]
    assert {p.segment for p in problems} == {key.rpartition("/")[2].removesuffix(".seg")}


def published(store, generation, **changes):
    """Overwrite a manifest with one that has other content and valid checksums."""
    manifest = HeadFinder(store, USERS).load(generation)
    changed = msgspec.structs.replace(manifest, **changes)
    store.put(USERS.manifest(generation), encode_manifest(changed))


WRONG_FACTS = {
    "rows": 99,
    "tombstones": 7,
    "min_key": b"",
    "max_key": b"zzz",
    "lsn_min": 0,
    "set_hash": "0" * 32,
    "patches": 1,
    "checksum": 1,
    "size": 5,
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_manifest_that_says_something_else_than_the_segment(copies, fact):
    """Counts, bounds, hash and checksum are compared; the bytes may be intact."""
    sample = copies.fresh()
    head = sample.head()
    entry = next(e for e in head.segments if USERS.segment(e.id) == sample.places["segment"])
    wrong = msgspec.structs.replace(entry, **{fact: WRONG_FACTS[fact]})
    task = SegmentCheckTask(NamespaceContext(sample.store, USERS), (wrong,), deep=True)
    assert run_segment_task(task), fact
    assert not run_segment_task(
        SegmentCheckTask(NamespaceContext(sample.store, USERS), (entry,), deep=True)
    )


def test_a_generation_that_does_not_follow_from_the_one_before(copies):
    """Floors, epochs and the like never fall; write ids are those that the head remembers."""
    sample = copies.fresh()
    generation = sample.head().generation - 2
    before = HeadFinder(sample.store, USERS).load(generation)
    published(sample.store, generation, wal_id_last_seen=10**6)
    (problem,) = verify(sample.db, NAME).problems
    assert (problem.kind, problem.generation) == (ProblemKind.MANIFEST_DISAGREES, generation + 1)
    recent = (*before.recent[:-1], msgspec.structs.replace(before.recent[-1], write_id="OTHER"))
    published(sample.store, generation, write_id="OTHER", recent=recent, wal_id_last_seen=0)
    problems = verify(sample.db, NAME).problems
    assert generation in {problem.generation for problem in problems}


def test_generations_may_be_skipped(copies):
    """The next one names all in between, or it does not follow."""
    head = copies.sample.head()
    after = msgspec.structs.replace(head, generation=head.generation + 3, write_id="NEXT")
    skipped = (head.generation + 1, head.generation + 2)
    assert broken_steps(head, after) == ["generations follow each other"]
    assert not broken_steps(head, msgspec.structs.replace(after, skipped_generations=skipped))
    assert broken_steps(head, msgspec.structs.replace(after, skipped_generations=skipped[:1]))
    assert broken_steps(head, msgspec.structs.replace(head, write_id="NEXT"))


def test_sums_that_do_not_add_up(copies):
    """The set hash is conserved by every job; where it is not, a version was lost."""
    sample = copies.fresh()
    zero = "0" * 32
    published(sample.store, sample.head().generation, sums=Sums(zero, zero, zero))
    (problem,) = verify(sample.db, NAME).problems
    assert problem.kind is ProblemKind.MANIFEST_DISAGREES
    assert "add up" in problem.message


def test_a_put_in_flight_is_no_gap():
    """With several in flight the slots in front may be open yet: not missing, until proved so."""
    db = reef.open("memory://")
    with db.writer(NAME, max_parallel_writes=4, ack="independent") as writer:
        lsns = [writer.put(f"k{n}", b"v").lsn for n in range(6)]
    db.store.delete(USERS.wal_object(lsns[-2]))
    assert verify(db, NAME).ok, "it may be on its way"
    db = reef.open("memory://")
    with db.writer(NAME) as writer:
        lsns = [writer.put(f"k{n}", b"v").lsn for n in range(6)]
    db.store.delete(USERS.wal_object(lsns[-2]))
    (problem,) = verify(db, NAME).problems
    assert (problem.kind, problem.lsn) == (ProblemKind.WAL_MISSING, lsns[-2])


def test_notes_are_no_problems():
    """Condemned keys, orphans and expired leases are reported as info."""
    world = folded_world()
    world.lease(ttl_s=5.0)
    world.compact()
    world.bucket.put(USERS.segment("ORPHAN"), b"x")
    world.advance(20)
    world.sweep()
    report = verify(world.db, NAME)
    assert report.ok
    kinds = {note.kind for note in report.notes}
    assert kinds >= {ProblemKind.CONDEMNED, ProblemKind.ORPHAN}
    assert {note.severity for note in report.notes} == {Severity.INFO}


def test_bytes_damaged_in_transit_are_read_again(tmp_path):
    """H8: once garbled on its way is no damage."""
    with reef.open(str(tmp_path)).writer(NAME) as writer:
        writer.put("a", b"1")
        fold(reef.open(str(tmp_path)), NAME)
        writer.put("b", b"2")
    rules = [Rule(Fault.WRONG_BYTES, "get", "*/wal/*", times=1)]
    rules += [Rule(Fault.WRONG_BYTES, "get_range", "*/segments/*", times=1, skip=n) for n in (0, 3)]
    report = verify(reef.Database(open_store(tmp_path, faults=rules)), NAME, deep=True)
    assert report.ok, report.problems
    assert any(rule.struck for rule in rules)


# --- concurrent work --------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_H32_everything_changes_between_any_two_requests(deep):
    """H32: folds, merges and sweeps delete objects that were needed when it began: no problem."""
    world = World()
    with world.db.writer(NAME) as writer:
        for number in range(4):
            writer.put(f"k{number}", b"v")
            world.fold()
    state = {"turn": 0, "calls": 0}

    def mischief():
        state["calls"] += 1
        if state["turn"] or state["calls"] % 11:
            return
        state["turn"] = 1
        if state["calls"] % 22:
            with world.db.writer(NAME) as writer:
                writer.put(f"n{state['calls']}", b"v")
            world.fold()
        world.compact()
        world.advance(10)
        world.sweep()
        world.advance(16 * 60)
        world.sweep()
        state["turn"] = 0

    for _ in range(2):
        report = verify(Database(EachRequest(world.bucket, mischief)), NAME, deep=deep)
        assert report.problems == []
    assert state["calls"] > 20


def test_H32_really_missing_objects_are_reported_during_concurrent_work():
    """H32: the second check drops swept objects, and nothing else."""
    world = folded_world()
    (entry,) = world.head().segments
    world.bucket.delete(USERS.segment(entry.id))

    turns = count(1)

    def publish():
        if next(turns) % 4 == 0:  # at every request, a probe for the newest would never end
            world.publish(wal_id_last_seen=world.head().wal_id_last_seen)

    quiet = verify(world.db, NAME)
    busy = verify(Database(EachRequest(world.bucket, publish)), NAME)
    for report in (quiet, busy):
        assert [(p.kind, p.segment) for p in report.problems] == [
            (ProblemKind.SEGMENT_MISSING, entry.id)
        ]
    assert next(turns) > 8


def _write(db):
    with db.writer(NAME, max_parallel_writes=2) as writer:
        for number in range(6):
            writer.put(f"k{number % 3}", b"%d" % number)


def _maintain(db):
    for _ in range(12):
        with suppress(reef.ReefError):
            fold(db, NAME)
            compact(db, NAME, tier_bytes=1, tier_segments_min=2)
        db.store.runtime.sleep(0.4)


def test_verify_in_the_simulator():
    """A writer, folds and merges in any order meanwhile: never a problem."""

    def scenario(sim):
        reports = []

        def check(db):
            for _ in range(60):
                with suppress(reef.NotFoundError):
                    reports.append(verify(db, NAME, deep=True))
                if len(reports) == 4:
                    break
                db.store.runtime.sleep(0.2)

        for does in (_write, _maintain, check):
            node = sim.process(does.__name__)
            node.spawn(lambda node=node, does=does: does(Database(node.store())))
        sim.run()
        assert reports
        for report in reports:
            assert report.problems == []

    simulate(scenario, seeds=range(3), chaos=Chaos(latency_s=(0.001, 0.05)))
