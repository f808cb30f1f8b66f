"""Repair at its edges: lost begins, rivals, a head that is made again, and its sources."""

import sys
from types import SimpleNamespace

import msgspec
import pytest

import reef
from reef.engine.context import NamespaceContext
from reef.engine.rows.batch import encode_batch
from reef.errors import ConflictError
from reef.formats.manifest import Condemned, Dropped, SnapshotEntry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import EMPTY
from reef.formats.wal_object import BatchHeader, Job, WalKind
from reef.jobs import repair
from reef.jobs.evidence.gather import Evidence, FoundSegment
from reef.jobs.repair import log as repair_log
from reef.jobs.repair.job import _not_condemned, restart_of
from reef.jobs.repair.plan import SalvagePlanner
from reef.jobs.sweep.job import _is_finished
from reef.manifest import edits
from reef.manifest import invariants as sums
from reef.manifest.repairs import Repairs, apply_repairs
from reef.paths import Namespace
from tests.support.bulk_jobs import append, stage
from tests.support.sweep_world import NAME, USERS, World, folded_world

DAMAGE = b"damage" * 20


@pytest.fixture
def world():
    """An empty namespace."""
    world = World()
    world.db.create(NAME)
    return world


def damage(world, key):
    """Overwrite an object."""
    world.bucket.put(key, DAMAGE)


def damaged_head():
    """Return a namespace with rows in a segment, whose newest manifest is damaged."""
    world = folded_world()
    world.publish()
    damage(world, world.names.manifest(world.head().generation))
    return world


def repaired(world):
    """Repair, and return the rows."""
    world.run(lambda: repair(world.db, NAME, apply=True))
    return dict(world.db.reader(NAME).scan())


def job_of(world, rows):
    """Return a job that has staged some rows."""
    segment = stage(world.bucket, NAME, rows)
    return Job("job", key="load-1", segments=(segment,))


# --- the log ----------------------------------------------------------------------------


def test_a_load_counts_though_its_begin_is_lost(world):
    """An acknowledged ingest is not lost because the object that opened its job is damaged."""
    job = job_of(world, {b"a": b"1"})
    begin = append(world.bucket, NAME, WalKind.BEGIN, Job("job", key="load-1"))
    append(world.bucket, NAME, WalKind.INGEST, job)
    damage(world, world.names.wal_object(begin))
    assert repaired(world) == {b"a": b"1"}


def test_a_load_that_was_aborted_does_not_count_if_its_begin_is_lost(world):
    """The abort can be read: whatever the begin said, the ingest behind the abort came too late."""
    job = job_of(world, {b"a": b"1"})
    begin = append(world.bucket, NAME, WalKind.BEGIN, Job("job", key="load-1"))
    append(world.bucket, NAME, WalKind.ABORT, Job("job", key="load-1"))
    append(world.bucket, NAME, WalKind.INGEST, job)
    damage(world, world.names.wal_object(begin))
    assert repaired(world) == {}


def test_a_load_without_a_begin_does_not_count_if_all_before_it_can_be_read(world):
    """Damage behind an ingest cannot be its begin."""
    append(world.bucket, NAME, WalKind.INGEST, job_of(world, {b"a": b"1"}))
    damage(world, world.names.wal_object(append(world.bucket, NAME, WalKind.SKIP)))
    assert repaired(world) == {}


def test_a_repair_that_a_fold_has_overtaken_is_reported(monkeypatch):
    """Nothing was published then: the caller must run it again."""
    world = folded_world()
    damage(world, world.names.segment(world.head().segments[0].id))
    monkeypatch.setattr(sys.modules["reef.jobs.repair.job"], "apply_repairs", lambda *_: None)
    with pytest.raises(ConflictError, match="has folded"):
        repaired(world)


def test_operations_behind_a_lost_batch_keep_their_sequences(monkeypatch):
    """The batch before cannot be read: those behind it are the same versions as before."""
    record = encode_batch(reef.Batch().put("a", b"1"), DEFAULT_SCHEMA, 1000).record
    header = SimpleNamespace(lsn=4, schema_id=1, batches=(BatchHeader(2), BatchHeader(1)))
    manifest = edits.new_namespace(DEFAULT_SCHEMA)
    monkeypatch.setattr(repair_log, "_objects", lambda *_: [(header, (None, record))])
    rows, _ = repair_log.log_versions(
        NamespaceContext(reef.stores.open("memory://"), USERS), manifest, [4], {}
    )
    assert rows.seqs.tolist() == [2]


def test_sums_follow_a_repair():
    """The counts of a lost segment are subtracted: verify compares the sums with the segments."""
    head = folded_world().head()
    counted = msgspec.structs.replace(head, sums=sums.compacted(head, EMPTY, EMPTY))
    lost = head.segments[0]
    repaired = apply_repairs(counted, Repairs(replaced={lost.id: ()}))
    assert repaired.sums.dropped == str(sums.total([lost]))
    assert repaired.sums.dropped != counted.sums.dropped


# --- a head that is made again ------------------------------------------------------------


def test_two_repairs_of_a_damaged_head():
    """The generation after it is published once; the other repair does not take it for its own."""
    world, raced = damaged_head(), []
    inner = world.bucket.create

    def create(key, body):
        if "/manifest/" in key and not raced:
            raced.append(key)
            repair(world.db, NAME, apply=True)
        return inner(key, body)

    world.bucket.create = create
    with pytest.raises(ConflictError, match="another repair"):
        repaired(world)
    world.bucket.create = inner
    assert len(world.rows()) == 5


def restart_for(world, monkeypatch):
    """Return the problems a dry run found about the time since the newest intact manifest."""
    found = []

    def capture(*arguments):
        found.append(restart_of(*arguments))
        return found[-1]

    monkeypatch.setattr(sys.modules["reef.jobs.repair.job"], "restart_of", capture)
    world.run(lambda: repair(world.db, NAME))
    return found[0]


def test_a_new_head_is_made_from_all_generations_that_can_be_read(monkeypatch):
    """H70: an older one may know idempotency keys and streams that the newest does not."""
    known = restart_for(damaged_head(), monkeypatch).known
    assert len(known) > 1
    assert len({manifest.generation for manifest in known}) == len(known)


def test_a_lost_object_of_the_log_was_not_swept(monkeypatch):
    """No segment has its rows: the segments of the newest intact manifest stay as they are."""
    world = folded_world()
    with world.db.writer(NAME) as writer:
        lost, last = writer.put("lost", b"v").lsn, writer.put("last", b"v").lsn
    world.publish(wal_id_last_seen=last)
    world.bucket.delete(world.names.wal_object(lost))
    damage(world, world.names.manifest(world.publish().generation))
    restart = restart_for(world, monkeypatch)
    assert restart.rebuilt is None


def test_condemned_segments_are_not_named_again():
    """A sweep may be deleting them, whatever a new head would show."""
    segments = tuple(FoundSegment(name, 1, None) for name in ("doomed", "kept"))
    nothing = frozenset()
    evidence = Evidence(Namespace("n"), segments, (), nothing, {}, nothing, nothing, 1, 0)
    head = folded_world().head()
    condemned = (Condemned("segments/doomed.seg", 0, 1),)
    known = msgspec.structs.replace(head, condemned=condemned)
    assert [s.id for s in _not_condemned(evidence, [known]).segments] == ["kept"]


def test_ancestors_are_those_of_the_same_floor():
    """The generation just before a merge is gone, and a fold was in between: rows the merge
    replaced is not known, so nothing is taken for all of its inputs."""
    world = folded_world()
    older = world.head()
    with world.db.writer(NAME) as writer:
        writer.put("later", b"v")
    world.fold()
    world.compact()
    newer = world.head()
    chain = SimpleNamespace(
        named={newer.segments[0].id: SimpleNamespace(first=newer.generation)},
        floors={older.generation: older.wal_floor},
        roots=SimpleNamespace(keep=lambda generation: True),
    )
    survey = SimpleNamespace(chain=chain, damaged_segments=set, head=newer)
    planner = SalvagePlanner(NamespaceContext(world.bucket, world.names), survey, write=False)
    assert planner._ancestors(newer.segments[0]) == ()


# --- earlier incarnations -----------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "snapshots", "segments"])
def test_an_earlier_life_is_forgotten_when_nothing_is_left(left):
    """H65: while it has snapshots or segments, later sweeps have something to delete there."""
    world = folded_world()
    dropped = Dropped(0, 1, (), is_cleared=True)
    head = msgspec.structs.replace(world.head(), dropped=dropped, condemned=())
    if left == "snapshots":
        kept = SnapshotEntry(id="s", generation=1)
        head = msgspec.structs.replace(head, snapshots=(kept,))
    if left != "segments":
        for info in list(world.bucket.list(world.names.segments)):
            world.bucket.delete(info.key)
    heads = SimpleNamespace(found=SimpleNamespace(manifest=head), names=world.names)
    report = SimpleNamespace(condemned=())
    assert _is_finished(world.bucket, heads, report) == (left == "nothing")
