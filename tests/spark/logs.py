"""Random logs with something of everything in them, and the state that all folds of them must agree
on."""

import random
import shutil
from decimal import Decimal

import msgspec
import pyarrow as pa

import reef
from reef.engine.log.log import Log
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs import fold, rebuild, verify
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import total
from reef.paths import Namespace
from tests.spark.data import SCHEMA, change, rows
from tests.support.bulk_jobs import append

NAME = "events"
SMALL = {"segment_bytes_max": 8192, "group_bytes": 1024}
WIDER = SCHEMA.append(pa.field("late", pa.decimal128(20, 3)))


def write_log(db, seed, steps=10):
    """Segments, and above them a log of all kinds of objects, all kinds of rows."""
    chance = random.Random(seed)
    db.create(NAME, SCHEMA)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(rows(0, 200))
        fold(db, NAME, **SMALL)
        for step in range(steps):
            change(writer, chance, step)
            if step == steps // 3:
                writer.write(reef.Batch().delete("k0000007"), idempotency_key=f"key-{seed}")
            if step == steps // 2:
                first = chance.randrange(200)
                reef.jobs.ingest(db, NAME, rows(first, first + 40, text="loaded"))
                keys = [f"k{n:07d}" for n in range(first + 20, first + 60)]
                patch = {"id": keys, "text": ["patched by a load"] * 40}
                reef.jobs.ingest(db, NAME, patch, op="patch")
    append_void(db)
    append(db.store, NAME, WalKind.SKIP)
    db.alter(NAME, WIDER)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(rows(150, 260, text="later"), ttl_s=10_000)
        writer.patch([{"id": f"k{n:07d}", "late": Decimal(f"{n}.125")} for n in range(100, 160)])
        change(writer, chance, steps)


def append_void(db):
    """Put an object into the log that expects another one before it: no process may read it."""
    log = Log(db.store, Namespace(NAME))
    filled = [log.read(slot.lsn) for slot in log.filled(1)]
    last = [found for found in filled if found.header.kind is WalKind.BATCHES][-1]
    lsn = filled[-1].header.lsn + 1
    after = (filled[-2].header.write_id, "another")
    header = msgspec.structs.replace(last.header, lsn=lsn, write_id="void", after=after)
    log.fill(lsn, WalObject.encode(header, last.records))


def twins(tmp_path, seed, **options):
    """Return two databases with the same random log."""
    write_log(reef.open(str(tmp_path / "threads")), seed, **options)
    shutil.copytree(tmp_path / "threads", tmp_path / "shuffled")
    return reef.open(str(tmp_path / "threads")), reef.open(str(tmp_path / "shuffled"))


def state(db):
    """Return all that two folds of one log must agree on."""
    head = HeadFinder(db.store, Namespace(NAME)).find().manifest
    rest = (head.wal_floor, head.dedup, head.open_jobs, head.below_floor, head.generation)
    tombstones = sum(segment.tombstones for segment in head.segments)
    return dict(db.reader(NAME).scan()), total(head.segments), tombstones, rest


def check_fold(threads, shuffled, executor, **settings):
    """Fold both; compare all there is, before and after, and let verify and rebuild read it."""
    wanted = SMALL | settings
    before = state(threads)[0]
    here = fold(threads, NAME, **wanted)
    there = fold(shuffled, NAME, executor=executor, shuffle_bytes_min=0, **wanted)
    assert state(shuffled) == state(threads)
    assert state(shuffled)[0] == before
    assert (there.rows, there.objects, there.voided) == (here.rows, here.objects, here.voided)
    assert verify(shuffled, NAME, deep=True).problems == []
    rebuilt = rebuild(shuffled, NAME)
    assert rebuilt.rows_equal
    assert rebuilt.problems == rebuild(threads, NAME).problems
    return there
