"""Jobs under the simulator: rival compactors, sweeps, loads and background work, all at once.

The invariants are those of the engine (`client_log`), and three more, at the end of every history:

- all that the head and snapshots need is there and whole: a deep verification finds nothing;
- unneeded objects are deleted: after a few sweeps without faults nothing else is left;
- the set hash is conserved: segments hold the versions of folds and loads, less those that
  compactions reported as dropped, plus those reported as made.
"""

from contextlib import suppress

from reef.config import BackgroundSettings, CompactSettings
from reef.engine.handles.database import Database
from reef.engine.rows.batch import Batch, encode_batch
from reef.formats.wal_object import WalKind
from reef.jobs import BulkJob, Compactor, fold, sweep
from reef.jobs.background import Background
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.jobs.sweep.plan import peek_headers
from reef.jobs.verify.job import verify
from reef.manifest.head import HeadFinder
from reef.paths import number_of
from reef.types import KeyRange
from tests.simulation.actors import (
    EXPECTED_ERRORS,
    GRACE_S,
    KEYS,
    NAME,
    USERS,
    Calm,
    World,
    fold_some,
    follow_changes,
    keep_house,
    open_writer,
    read_some,
    stream_batches,
    sweep_some,
    write,
)
from tests.support.sweep_world import condemned_keys

TINY = {
    "tier_bytes": 1,
    "tier_segments_min": 2,
    "level0_bytes": 1500,
    "level0_segments_max": 2,
    "segment_bytes_min": 500,
    "segment_bytes": 700,
    "segment_bytes_max": 1000,
    "patience_s": 4.0,
}
"""Sizes at which a few rows are worth a compaction."""


EVERYTHING = {"retain_generations_s": 0.0, "silent_job_s": 0.0, "silent_compactor_s": 0.0}
"""A sweep that keeps nothing for those that have not been heard of."""


class JobWorld(World):
    """A world in which jobs are at work; ends with more questions."""

    def check(self):
        """Check as the engine's world does, then for damage, leftovers and lost versions."""
        super().check()
        calm = Database(self.sim.bucket)
        found = verify(calm, NAME, deep=True)
        assert not found.problems, [str(problem) for problem in found.problems]
        if not self.has_lives:
            self._check_nothing_is_left(calm)

    def _check_nothing_is_left(self, calm):
        """Sweep repeatedly; only objects that the head needs may be left."""
        brushed = []
        while not brushed:  # a broom may break, like any process, but not for ever
            node = self.sim.process(f"broom {self.sim.choices.pick(1000)}")
            node.spawn(lambda node=node: brushed.append(self._brush(node)))
            self.sim.run()
        head = HeadFinder(calm.store, USERS).find().manifest
        names = [info.key for info in calm.store.list(f"{USERS.root}/")]
        named = {USERS.segment(entry.id) for entry in head.segments}
        there = {name for name in names if name.startswith(USERS.segments)}
        assert there == named, f"segments {there - named} are left over, {named - there} are gone"
        leases = [name for name in names if name.startswith(USERS.leases)]
        assert not leases, f"{leases} are left over"
        condemned = {f"{USERS.root}/{key}" for key in condemned_keys(head)}
        manifests = {name for name in names if name.startswith(USERS.manifests)} - condemned
        oldest = min(map(number_of, manifests))
        assert oldest >= head.oldest_retained, f"generation {oldest} is left over"
        self._check_log(calm.store, head)

    def _brush(self, node):
        db = Database(Calm(self, node))
        for snapshot in db.snapshots(NAME):
            snapshot.release()
        for _ in range(6):
            node.runtime.sleep(3 * GRACE_S + 2000.0)
            with suppress(*EXPECTED_ERRORS):
                sweep(db, NAME, apply=True, **EVERYTHING)
            with suppress(*EXPECTED_ERRORS):
                fold(db, NAME)
        return True

    def _check_log(self, store, head):
        slots = [(number_of(info.key), info.size) for info in store.list(USERS.wal)]
        headers = peek_headers(store.runtime, store, USERS, slots)
        batches = {lsn for lsn, header in headers.items() if header.kind is WalKind.BATCHES}
        folded = {lsn for lsn in batches if lsn < head.wal_floor - 1}
        assert not folded, f"batches {folded} are folded, and still there"


# --- actors -----------------------------------------------------------------------------


def compact_some(world, node, count, pause_s=4.0, *, strategy="tiered"):
    """Compact, job by job, as a background compactor does: waiting for others, stepping down."""
    with suppress(*EXPECTED_ERRORS):  # the first request may fail already
        compactor = Compactor(Database(node.store()), NAME, strategy, **TINY)
        for _ in range(count):
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))
            with suppress(*EXPECTED_ERRORS):
                compactor.step()
        compactor.close()


def load_by_job(world, node, count, *, replace=False, live_wins=False):
    """Run real bulk jobs; with `replace`, everything that was there before goes."""
    for number in range(count):
        rows = {k.encode(): f"{node.name}-{number}-{k}".encode() for k in KEYS[:2]}
        with suppress(*EXPECTED_ERRORS):
            load_rows(world, Database(node.store()), rows, replace=replace, live_wins=live_wins)
        node.runtime.sleep(node.runtime.uniform(0.0, 2.0))


def load_rows(world, db, rows, *, replace=False, live_wins=False):
    """Run one bulk job, and note its outcome."""
    everything = KeyRange() if replace else None
    with world.clients.trying(rows.values()):
        job = BulkJob(db, NAME, replace=everything, live_wins=live_wins, lease_ttl_s=GRACE_S)
        if live_wins:  # for as long as others write, fold and merge
            db.store.runtime.sleep(db.store.runtime.uniform(0.0, 12.0))
        batch = Batch()
        for key, value in rows.items():
            batch.put(key, value)
        ops = encode_batch(batch, job.schema, 1 << 20, 0).ops
        staged = job.staging.stage([sorted_rows(staged_rows(ops))], everything)
        world.oracle.note_staged(staged, rows, replaces=replace)
        world.clients.loaded(rows, job.commit(staged).lsn)


def write_with_background(world, node, count, *, pause_s=1.0, **settings):
    """Write, and take a background step now and then, in any order."""
    with suppress(*EXPECTED_ERRORS):
        writer = open_writer(world, node, **settings)
        wanted = BackgroundSettings(
            fold_bytes=1,
            fold_interval_s=0.0,
            sweep_interval_s=1.0,
            retain_generations_s=0.0,
            requests_per_s=0,
            bytes_per_s=0,
        )
        worker = Background(Database(node.store()), writer, wanted)
        worker._compactor.settings = CompactSettings().changed(TINY)
        for number in range(count):
            if node.runtime.uniform(0.0, 1.0) < 0.5:
                with suppress(*EXPECTED_ERRORS):
                    worker.step()
            key = KEYS[number % len(KEYS)]
            if number % 5 == 4:
                world.clients.delete(writer, key)
            else:
                world.clients.put(writer, key, f"{node.name}-{number}".encode())
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def snapshot_some(world, node, count, pause_s=6.0):
    """Take snapshots, and read them much later: exactly the rows of that LSN are there."""
    db = Database(node.store())
    for _ in range(count):
        node.runtime.sleep(node.runtime.uniform(0.0, pause_s))
        with suppress(*EXPECTED_ERRORS):
            snapshot = db.snapshot(NAME, ttl_s=None)
            node.runtime.sleep(node.runtime.uniform(0.0, 5 * GRACE_S))
            with db.reader(NAME, snapshot=snapshot) as reader:
                world.clients.seen.append((node.name, reader.last_lsn, dict(reader.scan())))
            snapshot.release()


def read_slowly(world, node, count):
    """Read a pinned view row by row, with naps longer than every grace between the rows."""
    for _ in range(count):
        with suppress(*EXPECTED_ERRORS), _pinned(node) as reader:
            rows, lsn = {}, reader.last_lsn
            for key, value in reader.scan():
                rows[key] = value
                node.runtime.sleep(node.runtime.uniform(0.0, 2 * GRACE_S))
            world.clients.seen.append((node.name, lsn, rows))


def _pinned(node):
    return Database(node.store()).reader(NAME, pin=True, lease_ttl_s=4 * GRACE_S)


# --- scenarios --------------------------------------------------------------------------


def rival_compactors(sim):
    """Two compactors, of either strategy, with a writer, folds and a sweep."""
    world = JobWorld(sim, grace_s=GRACE_S)
    strategies = [("tiered", "leveled")[sim.choices.pick(2)] for _ in range(2)]
    world.start("w1", write, 8, pause_s=2.0)
    world.start("folder", fold_some, 6, 2.0)
    for number, strategy in enumerate(strategies):
        world.start(f"c{number}", compact_some, 4, strategy=strategy)
    world.start("sweeper", sweep_some, 3)
    world.start("reader", read_some, 3, 8.0)
    world.finish()


def jobs_and_pins(sim):
    """Loads, compactions and sweeps around snapshots and readers that take their time."""
    world = JobWorld(sim, grace_s=GRACE_S)
    world.start("w1", write, 6, pause_s=3.0)
    world.start("j1", load_by_job, 2, after_s=6.0)
    world.start("j2", load_by_job, 1, replace=True, after_s=12.0)
    world.start("folder", fold_some, 5, 4.0)
    world.start("c1", compact_some, 4, 6.0)
    world.start("s1", snapshot_some, 2)
    world.start("r1", read_slowly, 2, after_s=5.0)
    world.start("sweeper", sweep_some, 4)
    world.finish()


def backfills(sim):
    """Loads with `live_wins`, several at once, while all that they lose against is written, folded
    and merged.
    """
    world = JobWorld(sim, grace_s=GRACE_S)
    world.start("w1", write_with_background, 8, pause_s=2.0)
    for number in range(2):
        world.start(f"b{number}", load_by_job, 2, live_wins=True, after_s=4.0)
    world.start("j1", load_by_job, 1, after_s=8.0)
    world.start("folder", fold_some, 4, 3.0)
    world.start("c1", compact_some, 4, 4.0)
    world.start("s1", snapshot_some, 1)
    world.start("changes", follow_changes, 2)
    world.start("sweeper", sweep_some, 3)
    world.finish()


def background_and_other_jobs(sim):
    """Two writers that do their own background work, and jobs that are run elsewhere."""
    world = JobWorld(sim, grace_s=GRACE_S)
    world.start("w1", write_with_background, 8)
    world.start("w2", write_with_background, 6, after_s=12.0)
    world.start("c1", compact_some, 2, 8.0)
    world.start("folder", fold_some, 2, 8.0)
    world.start("j1", load_by_job, 1, after_s=8.0)
    world.finish()


def hardly_any_grace(sim):
    """The same with a grace period that every other request outlasts."""
    world = JobWorld(sim, grace_s=0.5)
    world.start("w1", write_with_background, 5)
    world.start("c1", compact_some, 2, 3.0)
    world.start("sweeper", sweep_some, 3, 2.0)
    world.start("j1", load_by_job, 1, after_s=4.0)
    world.start("reader", read_some, 3, 2.0)
    world.finish()


def two_drivers_of_a_stream(sim):
    """A driver that was restarted and its zombie commit the same batches, in the log or by jobs,
    while a writer, folds, compactions and sweeps are at work.
    """
    world = JobWorld(sim, grace_s=GRACE_S)
    nodes = [
        world.start("d1", stream_batches, 4),
        world.start("d2", stream_batches, 5, after_s=8.0),
    ]
    world.start("w1", write, 5, pause_s=2.0)
    world.start("folder", fold_some, 4, 3.0)
    world.start("c1", compact_some, 2, 6.0)
    world.start("changes", follow_changes, 2)
    world.start("reader", read_some, 3, 5.0)
    world.start("sweeper", sweep_some, 3)
    world.suspend_some(nodes, 1, (1.0, 40.0))
    world.finish()


def slots_filled_again(sim):
    """Writers and loads compete for each slot while streams follow, and hardly anything is kept:
    requests that were issued for a slot arrive after it was collected.
    """
    world = World(sim, grace_s=60.0)
    world.start("w1", write, 8, pause_s=20.0)
    if sim.choices.pick(2):
        world.start("w2", write, 3, after_s=200.0)
    for number in range(3):
        world.start(f"j{number}", load_by_job, 1, after_s=100.0)
    world.start("s1", follow_changes, 4)
    world.start("s2", follow_changes, 4)
    world.start("house", keep_house, 8, pause_s=(20.0, 80.0))
    world.finish()
