"""A bulk job by hand: begin, staged segments, ingest. What later releases do with Spark."""

import numpy as np
import pyarrow as pa

from reef.engine.log import Log
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, JobSegment, WalHeader, WalKind, WalObject
from reef.paths import Namespace


def append(store, name, kind, job=None, lsn=None):
    """Put a non-writer's object into the first open slot, or into `lsn`; return its LSN."""
    log = Log(store, Namespace(name))
    if lsn is None:
        lsn = max([slot.lsn for slot in log.filled(1)], default=0) + 1
    header = WalHeader(
        lsn=lsn,
        kind=kind,
        epoch=0,
        writer_id="job",
        write_id=store.runtime.ulid(),
        created_at_ms=0,
        schema_id=1,
        job=job,
    )
    assert log.fill(lsn, WalObject.encode(header)).landed
    return lsn


def stage(store, name, rows):
    """Write a segment of puts whose LSN is not known yet; return how an ingest names it."""
    keys = sorted(rows)
    segment_id = store.runtime.ulid()
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage(segment_id, 0))
    versions = Versions(
        pa.array(keys, pa.binary()),
        np.zeros(len(keys), np.int64),
        np.arange(len(keys), dtype=np.uint32),
        np.zeros(len(keys), np.uint8),
        {1: pa.array([rows[key] for key in keys], pa.binary())},
    )
    store.upload(Namespace(name).segment(segment_id), writer.write([versions]))
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
    segment = stage(store, name, rows)
    if abort:
        append(store, name, WalKind.ABORT, Job(job_id, key=key))
    return append(store, name, WalKind.INGEST, Job(job_id, key=key, segments=(segment,)))
