"""Namespaces that go and come back under writers, readers, loads and sweeps (H48)."""

from contextlib import suppress

import msgspec

from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.engine.rows.batch import Batch, encode_batch
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import BulkJob, fold, sweep, verify
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.edits import new_namespace
from reef.manifest.head import Publisher
from reef.paths import Namespace
from tests.simulation.actors import EXPECTED_ERRORS, GRACE_S
from tests.support.proven_buckets import remember_probe

NAME = "users"
DROPPED_S = 8.0


class Lives:
    """Acknowledged writes by life of a name; each life has a base of its own."""

    def __init__(self, sim):
        self.sim = sim
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        """By base and LSN: the value of the key that is named after the LSN's writer."""
        create_with_a_short_grace(sim)

    def start(self, name, act, *args):
        node = self.sim.process(name, skew_s=self.sim.choices.uniform(-600.0, 600.0))

        def run():
            for number in range(3):
                node.runtime.sleep(node.runtime.uniform(0.0, 12.0))
                with suppress(*EXPECTED_ERRORS):
                    act(self, node, number, *args)

        node.spawn(run)
        return node


def create_with_a_short_grace(sim):
    """Make the namespace, before anything runs; later lives have its grace period."""
    remember_probe(sim.bucket)
    first = new_namespace(DEFAULT_SCHEMA)
    first = msgspec.structs.replace(first, grace_ms=int(GRACE_S * 1000))
    Publisher(sim.bucket, Namespace(NAME)).create(first)


def database(node):
    """Return a process's database, with the registry that `reef.open` gives it."""
    store = node.store()
    return Database(store, registry=Registry(store))


def write(lives, node, number, parallel):
    """Open, write, wait, write again; record acknowledgements by life."""
    with database(node).writer(NAME, max_parallel_writes=parallel, background=False) as writer:
        base = writer._manifest.wal_base
        for turn in range(2):
            value = f"{node.name}-{number}-{turn}".encode()
            receipt = writer.put(value, value)
            lives.acknowledged[base, receipt.lsn] = value
            node.runtime.sleep(node.runtime.uniform(0.0, 20.0))


def drop(lives, node, number):
    """Drop, and half of the time bring it back."""
    db = database(node)
    db.drop(NAME)
    if lives.sim.choices.pick(2):
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * DROPPED_S))
        db.undrop(NAME)


def keep_house(lives, node, number):
    """Fold and sweep, for as long as a dropped one needs to go."""
    db = database(node)
    for _ in range(3):
        with suppress(*EXPECTED_ERRORS):
            fold(db, NAME)
        with suppress(*EXPECTED_ERRORS):
            sweep(db, NAME, apply=True, force=True, retain_generations_s=0.0, dropped_s=DROPPED_S)
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * GRACE_S))


def read(lives, node, number):
    """Check that a reader shows rows of one life only: that of its manifest."""
    with database(node).reader(NAME) as reader:
        base = reader._tail.manifest.wal_base
        seen = {value for _, value in reader.scan()}
        if reader._tail.manifest.wal_base == base:
            others = {v for (b, _), v in list(lives.acknowledged.items()) if b != base}
            assert not seen & others, "rows of another life"


def names_come_and_go(sim):
    """Drops and undrops with concurrent writers, readers and sweeps.

    In the end the last life has every row that was acknowledged in it, none of another one, and
    registry and manifest agree.
    """
    lives = Lives(sim)
    lives.start("w1", write, 1)
    lives.start("w2", write, 1 + sim.choices.pick(3))
    lives.start("d1", drop)
    lives.start("house", keep_house)
    lives.start("reader", read)
    sim.run()
    calm = Database(sim.bucket, registry=Registry(sim.bucket))
    assert calm.namespaces() == Database(sim.bucket).namespaces()
    with suppress(*EXPECTED_ERRORS):
        calm.undrop(NAME)
    with calm.writer(NAME, background=False) as writer:
        base = writer._manifest.wal_base
        rows = {value for _, value in writer.scan()}
    assert not verify(calm, NAME, deep=True).problems
    own = {value for (life, _), value in lives.acknowledged.items() if life == base}
    assert own <= rows, "acknowledged in this life, and lost"
    others = set(lives.acknowledged.values()) - own
    assert not rows & others, "rows of another life"
    assert calm.namespaces() == [NAME]


# --- loads that make their namespace ----------------------------------------------------


class Used:
    """A name that is never dropped, and its acknowledgements: rows, or its creation."""

    def __init__(self, sim):
        self.sim = sim
        self.rows: dict[bytes, bytes] = {}
        self.refused: set[bytes] = set()
        self.is_there = False

    def start(self, name, act):
        node = self.sim.process(name, skew_s=self.sim.choices.uniform(-600.0, 600.0))

        def run():
            for number in range(2):
                node.runtime.sleep(node.runtime.uniform(0.0, 3.0))
                with suppress(*EXPECTED_ERRORS):
                    act(self, node, f"{node.name}-{number}".encode())

        node.spawn(run)


def load_or_fail(used, node, row):
    """Load into a namespace that is created if missing; abort more often than not."""
    job = BulkJob(database(node), NAME, make=DEFAULT_SCHEMA, lease_ttl_s=GRACE_S)
    staged = _staged(job, row)
    node.runtime.sleep(node.runtime.uniform(0.0, 4.0))
    if used.sim.choices.pick(3):
        used.refused.add(row)
        BulkJob.resume(job.handle).abort()
    else:
        job.commit(staged)
        used.rows[row] = row


def load_into_existing(used, node, row):
    """Load, if there is anything to load into."""
    job = BulkJob(database(node), NAME, lease_ttl_s=GRACE_S)
    job.commit(_staged(job, row))
    used.rows[row] = row


def _staged(job, row):
    batch = Batch()
    for key in (row, row + b" too"):
        batch.put(key, row)
    ops = encode_batch(batch, job.schema, 1 << 20, 0).ops
    return job.staging.stage([sorted_rows(staged_rows(ops))])


def write_one(used, node, row):
    """Open, which makes the namespace if there is none, and write."""
    with database(node).writer(NAME, background=False) as writer:
        used.is_there = True
        writer.put(row, row)
        used.rows[row] = row


def create_it(used, node, row):
    """Ask for the namespace, without a row."""
    database(node).create(NAME)
    used.is_there = True


def alter_it(used, node, row):
    """Ask for the columns that it has."""
    database(node).alter(NAME, DEFAULT_SCHEMA.arrow())
    used.is_there = True


def undrop_it(used, node, row):
    """Undrop it, or get the error that it exists."""
    database(node).undrop(NAME)
    used.is_there = True


def snapshot_it(used, node, row):
    """Take a snapshot of the namespace, if it exists."""
    database(node).snapshot(NAME)
    used.is_there = True


def fold_it(used, node, row):
    """Fold, and sweep."""
    db = database(node)
    fold(db, NAME)
    sweep(db, NAME, apply=True, force=True, retain_generations_s=0.0, dropped_s=DROPPED_S)


USES = (
    load_into_existing,
    write_one,
    create_it,
    alter_it,
    undrop_it,
    snapshot_it,
    fold_it,
)


def use_it(used):
    """Start the loads, and processes that use the namespace."""
    used.start("l1", load_or_fail)
    used.start("l2", load_or_fail)
    for number in range(used.sim.choices.pick(4)):
        used.start(f"o{number}", USES[used.sim.choices.pick(len(USES))])


def after_an_earlier_life(used):
    """Drop the namespace under a writer, start the other processes, and resume that writer."""
    node = used.sim.process("zombie")

    def run():
        db = database(node)
        with suppress(*EXPECTED_ERRORS):
            writer = db.writer(NAME, background=False)
            writer.put(b"old", b"old")
            db.drop(NAME)
            used.refused.add(b"late")
            use_it(used)
            node.runtime.sleep(node.runtime.uniform(0.0, 20.0))
            writer.put(b"late", b"late")
            raise AssertionError("acknowledged in a life that was over")

    node.spawn(run)


def loads_make_their_namespace(sim):
    """Loads that create a namespace and may fail, with processes that use it.

    Only loads that abort drop a namespace that they created. In the end all acknowledged rows are
    there, in a namespace that exists if its creation was acknowledged; no aborted row is; and
    registry and manifest agree. Some begin after an earlier life, whose writer does not know that
    it is over.
    """
    used = Used(sim)
    if sim.choices.pick(3):
        remember_probe(sim.bucket)
        use_it(used)
    else:
        create_with_a_short_grace(sim)
        after_an_earlier_life(used)
    sim.run()
    calm = Database(sim.bucket, registry=Registry(sim.bucket))
    assert calm.namespaces() == Database(sim.bucket).namespaces()
    if calm.namespaces() != [NAME]:
        assert not used.rows, f"{used.rows} were acknowledged"
        assert not used.is_there, "its creation was acknowledged"
        return
    with calm.writer(NAME, background=False) as writer:
        rows = dict(writer.scan())
    assert not verify(calm, NAME, deep=True).problems
    assert used.rows.items() <= rows.items(), "acknowledged, and lost"
    assert not used.refused & rows.keys(), "aborted, and visible"
