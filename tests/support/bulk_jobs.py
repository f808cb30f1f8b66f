"""Bulk jobs by hand: begin, staged segments, ingest."""

import msgspec
import numpy as np
import pyarrow as pa

from reef.engine.log.log import Log, LogRules, Verdict, contiguous
from reef.errors import OutcomeUnknownError, UnavailableError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, JobSegment, WalHeader, WalKind, WalObject
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher, newest_incarnation
from reef.manifest.roots import staged_id
from reef.paths import Namespace
from reef.stores import Outcome, agree_on_cas


def append(store, name, kind, job=None, lsn=None, epoch=0):
    """Put a non-writer's object into the first open slot, or into `lsn`; return its LSN."""
    log = Log(store, newest_incarnation(store, name))
    if lsn is None:
        lsn = max([slot.lsn for slot in log.filled(1)], default=0) + 1
    header = WalHeader(
        lsn=lsn,
        kind=kind,
        epoch=epoch,
        writer_id="job",
        write_id=store.runtime.ulid(),
        created_at_ms=int(store.runtime.wall_s() * 1000),
        schema_id=1 if job is None else 0,  # of whichever life: ids continue
        job=job,
    )
    assert log.fill(lsn, WalObject.encode(header)).landed
    return lsn


def stage(store, name, rows, job_id="job", names=None):
    """Write a segment of puts whose LSN is not known yet; return how an ingest names it."""
    keys = sorted(rows)
    segment_id = staged_id(job_id, store.runtime.ulid())
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage(segment_id, 0))
    versions = Versions(
        pa.array(keys, pa.binary()),
        np.zeros(len(keys), np.int64),
        np.arange(len(keys), dtype=np.uint32),
        np.zeros(len(keys), np.uint8),
        {1: pa.array([rows[key] for key in keys], pa.binary())},
    )
    names = names or newest_incarnation(store, name)
    store.upload(names.segment(segment_id), writer.write([versions]))
    summary = writer.summary
    return JobSegment(
        segment_id,
        summary.size,
        summary.checksum,
        summary.footer.rows,
        0,
        summary.tail_bytes,
        summary.footer.min_key,
        summary.footer.max_key,
        summary.footer.set_hash,
    )


def ingest(store, name, rows, key=None, begin=True, abort=False, job_id=None):
    """Run a whole bulk job; return the LSN of its ingest."""
    job_id = job_id or store.runtime.ulid()
    if begin:
        append(store, name, WalKind.BEGIN, Job(job_id, key=key))
    segment = stage(store, name, rows, job_id)
    if abort:
        append(store, name, WalKind.ABORT, Job(job_id, key=key))
    return append(store, name, WalKind.INGEST, Job(job_id, key=key, segments=(segment,)))


def make_with_window(db, name, keys_max):
    """Make a plain namespace that remembers only so many idempotency keys."""
    first = msgspec.structs.replace(new_namespace(DEFAULT_SCHEMA), dedup_keys_max=keys_max)
    agree_on_cas(db.store)
    assert Publisher(db.store, Namespace(name)).create(first)


# --- by the protocol ------------------------------------------------------------------


def load(store, name, rows, *, key=None, staged=None):
    """Run a bulk job concurrently with writers (protocols §4); return its LSN.

    None: another job of this key was first. `staged` notes the rows of the staged segment. A
    job always has a key: below the floor only the window shows whether it has counted.
    """
    job_id = store.runtime.ulid()
    job = Job(job_id, key=key or job_id)
    names = newest_incarnation(store, name)
    append_concurrently(store, names, WalKind.BEGIN, job)
    segment = stage(store, name, rows, job.id, names)
    if staged is not None:
        staged[segment.id] = rows
    ingest = Job(job.id, key=job.key, segments=(segment,))
    return append_concurrently(store, names, WalKind.INGEST, ingest)


def append_concurrently(store, names, kind, job):
    """Append to the first free slot; after the response the head shows whether it counts (H53)."""
    log, heads = Log(store, names), HeadFinder(store, names)
    ids = set()
    for losses in range(30):
        manifest = _head(heads)
        known = {entry.key: entry for entry in manifest.dedup}.get(job.key)
        if kind is WalKind.INGEST and known is not None:
            return known.lsn if known.write_id in ids else None
        filled = [slot.lsn for slot in log.filled(manifest.wal_floor)]
        first = manifest.wal_floor + len(contiguous(filled, manifest.wal_floor))
        lsn = first if losses < 3 else first + manifest.max_parallel_writes
        header = _header(store, lsn, kind, job)
        ids.add(header.write_id)
        outcome = _fill(store, log, header)
        for below in range(first, lsn):
            _fill(store, log, _header(store, below, WalKind.SKIP, None))
        if outcome is not Outcome.CREATED:
            continue
        manifest = _head(heads)
        if lsn >= manifest.wal_floor:
            return lsn if kind is WalKind.BEGIN or _counts(log, manifest, lsn) else None
    raise UnavailableError(f"no slot for a {kind} of {names.name}")


def _head(heads):
    heads.forget()
    return heads.find().manifest


def _counts(log, manifest, lsn):
    """Whether the ingest at an LSN counts: its job was open, and its key was new."""
    rules = LogRules(manifest)
    for slot in range(manifest.wal_floor, lsn):
        found = log.read(slot)
        if found is None:
            raise UnavailableError(f"LSN {slot} was folded and swept meanwhile")
        rules.advance(found.header)
    return rules.advance(log.read(lsn).header) is Verdict.APPLIES


def _header(store, lsn, kind, job):
    now_ms = int(store.runtime.wall_s() * 1000)
    return WalHeader(lsn, kind, 0, "job", store.runtime.ulid(), now_ms, schema_id=0, job=job)


def _fill(store, log, header):
    """PUT until the outcome is definite."""
    body = WalObject.encode(header)
    for _ in range(10):
        outcome = log.fill(header.lsn, body).outcome
        if outcome is not Outcome.UNKNOWN:
            return outcome
        store.runtime.sleep(store.runtime.uniform(0.01, 0.2))
    raise OutcomeUnknownError(f"LSN {header.lsn} may hold a {header.kind}")
