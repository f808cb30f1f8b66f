"""Growth of a sweep: a log of any length is condemned and deleted at a fixed cost (H75)."""

import msgspec
import numpy as np
import pytest

import reef
from reef.formats.manifest import Condemned, CondemnedRange, encode_manifest
from reef.jobs import sweep
from reef.jobs.sweep.job import _Deletable
from reef.jobs.sweep.plan import SweepMemory
from reef.manifest import edits
from reef.manifest.roots import LeasedObjects, narrowed, take_lease
from reef.paths import numbered_key
from reef.stores import Wrapper
from reef.stores.wrappers.base import Meter
from reef.stores.wrappers.policies import Pace, Paced
from reef.telemetry import RequestMeter
from reef.testing import Simulation
from tests.support.sweep_world import (
    GRACE_S,
    NAME,
    USERS,
    World,
    condemned_keys,
    folded_world,
    garbage_keys,
)
from tests.unit.engine.handles.test_handles_hot_paths import calls
from tests.unit.manifest.test_edits import changed


def _commit(world, count):
    with world.db.writer(NAME, background=False) as writer:
        for number in range(count):
            writer.put(f"k{number % 50}", b"v")
    world.fold()


def _requests(world, call):
    meter = RequestMeter()
    db = reef.Database(Meter(world.bucket, meter))
    result = world.run(lambda: call(db))
    return result, meter.requests()


@pytest.mark.parametrize("commits", [30, 300, 3000])
def test_a_condemned_log_of_any_length_is_one_entry(commits):
    """H75: ×1, ×10, ×100. It was a key per object, and at most 10,000 keys in a grace period."""
    world = World()
    _commit(world, commits)
    before = len(encode_manifest(world.head()))
    report = world.sweep()
    assert len(garbage_keys(report)) >= commits - 1
    head = world.head()
    assert len(head.condemned) + len(head.condemned_ranges) == 2  # slots, and manifests
    assert len(encode_manifest(head)) - before < 400
    world.advance(GRACE_S + 10)
    assert len(world.sweep().deleted) >= commits - 1
    assert len(world.slots()) == 2, "the fence, and the slot just below the floor"


def test_a_bucket_does_not_grow_under_steady_commits():
    """H75: as many slots are deleted as were committed, with a list of 12 entries; it kept 12."""
    world = World()
    sizes = []
    for _ in range(12):
        _commit(world, 40)
        world.sweep(condemned_max=12)
        sizes.append(len(world.slots()))
        world.advance(GRACE_S / 3)
    assert max(sizes[6:]) <= max(sizes[:6]) + 6, f"slots after each sweep: {sizes}"


def test_condemned_slots_are_not_listed_again():
    """H75: a sweep lists and reads the new part of the log; the condemned part costs nothing."""
    world = World(page=10)
    _commit(world, 200)
    world.sweep()
    _commit(world, 20)
    report, requests = _requests(world, lambda db: sweep(db, NAME, retain_generations_s=0.0))
    assert len([key for key in garbage_keys(report) if key.startswith("wal/")]) >= 20
    assert requests["list"] < 15
    assert requests["get"] < 40, "the headers of the last 20 slots, not of the 200 before"


def test_an_overtaken_plan_lists_the_log_once():
    """H75: a fold publishes during the plan; the next one continues the listing."""
    world = World(page=10)
    _commit(world, 200)
    listed = []

    class Overtakes(Wrapper):
        def list(self, prefix="", after=None):
            if prefix == USERS.wal:
                listed.append(after)
                if len(listed) == 1:
                    world.publish()
            return self.inner.list(prefix, after)

    report = world.sweep(reef.Database(Overtakes(world.bucket)))
    assert len(garbage_keys(report)) >= 200
    assert [number(after) for after in listed] == [0], "the second plan had nothing left to list"


def number(key):
    """Return the number in a key."""
    return int(key.rpartition("/")[2].removesuffix(".wal"))


def test_a_lower_root_than_that_of_an_overtaken_plan_is_kept():
    """H22: a snapshot is taken between two plans of a sweep; its part of the log stays."""
    world = World()
    _commit(world, 20)
    pinned = world.head()
    _commit(world, 20)
    world.publish()
    taken = []

    class Pins(Wrapper):
        def list(self, prefix="", after=None):
            if prefix == USERS.wal and not taken:
                taken.append(world.db.snapshot(NAME, generation=pinned.generation))
            return self.inner.list(prefix, after)

    world.sweep(reef.Database(Pins(world.bucket)))
    assert taken
    slots = {number(key) for key in condemned_keys(world.head()) if key.startswith("wal/")}
    assert slots
    assert max(slots) < pinned.wal_floor - 1


def test_slots_that_an_older_release_condemned_are_deleted_too():
    """Key by key, as it listed them, and no slot is condemned a second time."""
    world = folded_world()
    old = Condemned(numbered_key("wal", 3), 1, 0)
    world.publish(condemned=(old,))
    report = world.sweep()
    assert numbered_key("wal", 3) not in garbage_keys(report)
    assert report.deleted == (numbered_key("wal", 3),)
    head = world.head()
    assert [(r.first, r.last) for r in head.condemned_ranges if r.folder == "wal"] == [
        (2, 2),
        (4, 5),
    ]
    world.advance(GRACE_S + 10)
    world.sweep()
    assert world.slots() == [1, 6]


def test_a_release_without_ranges_ignores_them():
    """Its next publish drops the field; a later sweep finds the slots again."""
    world = folded_world()
    world.sweep()
    world.publish(condemned_ranges=())
    world.advance(GRACE_S + 10)
    world.sweep()
    world.advance(GRACE_S + 10)
    world.sweep()
    assert world.slots() == [1, 6]


def test_a_slot_is_condemned_once():
    """H32: its grace period does not begin again."""
    head = changed(condemned_ranges=(CondemnedRange("wal", 4, 6, 5, 99),), wal_floor=20)
    ranges = (("wal", 2, 8), ("manifest", 4, 6))
    after = edits.condemn(head, edits.Condemnation(head.generation, 7, (), 200, ranges=ranges))
    assert sorted(after.condemned_ranges, key=msgspec.structs.astuple) == [
        CondemnedRange("manifest", 4, 6, 7, 200),
        CondemnedRange("wal", 2, 3, 7, 200),
        CondemnedRange("wal", 4, 6, 5, 99),
        CondemnedRange("wal", 7, 8, 7, 200),
    ]


def test_a_deleted_part_of_a_range_leaves_the_rest():
    """H32: a number leaves the manifest only after its deletion."""
    one = CondemnedRange("wal", 2, 9, 5, 99)
    head = changed(condemned_ranges=(one,), wal_floor=20)
    hole = msgspec.structs.replace(one, first=4, last=6)
    after = edits.forget_condemned(head, frozenset(), [hole])
    assert [(r.first, r.last) for r in after.condemned_ranges] == [(2, 3), (7, 9)]
    other = msgspec.structs.replace(one, folder="manifest")
    assert edits.forget_condemned(head, frozenset(), [other]) is None


@pytest.mark.parametrize(
    ("room", "parts", "left"), [(0, [], 8), (3, [(2, 4)], 5), (9, [(2, 9)], 0)]
)
def test_a_bounded_sweep_deletes_a_part_of_a_range(room, parts, left):
    """The rest is for the next call."""
    deletable = _Deletable(room)
    assert deletable.add([CondemnedRange("wal", 2, 9, 5, 99)]) == left
    assert [(r.first, r.last) for r in deletable.ranges] == parts


def test_H74_a_narrow_lease_holds_its_part_of_a_range():
    """H74: its slots, the one below its floor, and its manifest; a wide one holds all of it."""
    world = folded_world()
    lease = take_lease(world.bucket, USERS, world.head(), owner="me", ttl_s=60)
    lease.narrow(**narrowed(changed(generation=3, wal_floor=4), 5))
    record = lease.record
    slots, manifests = CondemnedRange("wal", 1, 9, 7, 0), CondemnedRange("manifest", 2, 4, 7, 0)
    held = LeasedObjects([_found(record)], lambda g: None, lambda first, last: None)
    assert [(r.first, r.last) for r in held.unpinned(slots)] == [(1, 2), (6, 9)]
    assert [(r.first, r.last) for r in held.unpinned(manifests)] == [(2, 2), (4, 4)]
    later = msgspec.structs.replace(slots, generation=3)
    assert held.unpinned(later) == [later], "condemned as of its own generation: never needed"
    wide = LeasedObjects(
        [_found(msgspec.structs.replace(record, last_lsn=None))], lambda g: None, lambda a, b: None
    )
    assert wide.unpinned(slots) == []


def _found(record):
    return type("Found", (), {"record": record, "expired": False})()


def test_deletes_of_a_sweep_are_paced_by_the_thousand():
    """H75: on a store that deletes one by one too, or deletes would be slower than commits."""
    sim = Simulation(0)
    node = sim.process("sweeper")
    store = Paced(node.store(), Pace(node.runtime, 1, 0))
    took = []

    def delete():
        start_s = node.runtime.monotonic_s()
        store.delete_many([f"k{number}" for number in range(1000)])
        took.append(node.runtime.monotonic_s() - start_s)

    node.spawn(delete)
    sim.run()
    sim.close()
    assert took[0] < 5


def test_a_second_sweep_of_one_process_begins_a_new_listing():
    """The slots that an earlier sweep examined are not remembered: roots may have changed."""
    world = World()
    memory = SweepMemory()
    for _ in range(2):
        _commit(world, 10)
        world.sweep(memory=memory)
    slots = [key for key in condemned_keys(world.head()) if key.startswith("wal/")]
    assert len(slots) == len(set(slots)) >= 18


def _calls_for(segments, generations):
    """Return the Python calls of verify and of a dry sweep."""
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        for number in range(segments):
            writer.put(f"k{number:04}", b"v")
    world.run(lambda: reef.jobs.fold(world.db, NAME, segment_bytes_max=1, group_bytes=1))
    for number in range(generations):
        world.publish(max_parallel_writes=1 + number % 2)
    assert len(world.head().segments) == segments
    counts = []
    for job in (reef.jobs.verify, sweep):
        with calls() as counted:
            job(world.db, NAME)
        counts.append(counted[0])
    return np.array(counts)


def test_retained_generations_are_not_decoded_whole():
    """H75: twenty times the segments add work once, and not in each retained generation; it was
    generations × segments in verify and sweep.
    """
    few, many = 20, 100
    small = _calls_for(5, many) - _calls_for(5, few)
    large = _calls_for(100, many) - _calls_for(100, few)
    assert (large < 1.2 * small + 100).all(), f"of {many - few} generations: {small}, {large}"


def test_verify_notes_a_range_once():
    """Not a note for each of a million slots."""
    world = World()
    _commit(world, 30)
    world.sweep()
    report = world.run(lambda: reef.jobs.verify(world.db, NAME))
    notes = [note.message for note in report.notes if note.kind == "condemned"]
    assert report.ok
    assert len(notes) == 2
    assert any("up to number 30" in message for message in notes)
