"""Helpers of the tests of compaction: ingests of every kind of row, and plans made by hand."""

import numpy as np
import pyarrow as pa

from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import Job, OpKind, WalKind
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.jobs.ingest.staging import job_segment_of
from reef.manifest.head import locate, newest_incarnation
from reef.manifest.roots import staged_id
from tests.support.bulk_jobs import append

SMALL = {
    "tier_bytes": 600,
    "tier_segments_min": 2,
    "level0_bytes": 1200,
    "level0_segments_max": 4,
    "segment_bytes_min": 400,
    "segment_bytes": 600,
    "segment_bytes_max": 800,
    "group_bytes": 60,
    "merge_bytes": 500,
    "expiry_margin_s": 0.0,
}
"""Kilobytes instead of gigabytes: every rule comes into play with a handful of rows."""


def head_of(db, name):
    """Return the newest manifest."""
    return locate(db.store, name).found.manifest


def versions_of(schema, rows, lsn=0):
    """Return sorted versions of (key, kind, {column: value}), one for each key."""
    rows = sorted(rows, key=lambda row: row[0])
    types = schema.types()
    patched = any(kind == OpKind.PATCH for _, kind, _ in rows)
    return Versions(
        pa.array([key for key, _, _ in rows], pa.binary()),
        np.full(len(rows), lsn, np.int64),
        np.arange(len(rows), dtype=np.uint32),
        np.array([kind for _, kind, _ in rows], np.uint8),
        {n: pa.array([values.get(n) for _, _, values in rows], t) for n, t in types.items()},
        None,
        {n: pa.array([n in values for _, _, values in rows]) for n in types} if patched else {},
    )


def ingest_rows(db, name, rows, tombstones=()):
    """Commit an ingest of puts, deletes and patches; range deletes are below its rows."""
    store, schema = db.store, head_of(db, name).schema
    job_id = store.runtime.ulid()
    append(store, name, WalKind.BEGIN, Job(job_id))
    segment_id = staged_id(job_id, store.runtime.ulid())
    rows = versions_of(schema, rows)
    rows = Versions(
        rows.keys, rows.lsns, rows.seqs + 1, rows.kinds, rows.fields, None, rows.touched
    )
    ranges = [RangeTombstone(start, end, 0, 0) for start, end in tombstones]
    writer = SegmentWriter(schema, 0, Lineage(segment_id, 0), range_tombstones=ranges)
    store.upload(newest_incarnation(store, name).segment(segment_id), writer.write([rows]))
    segment = job_segment_of(segment_id, writer.summary)
    return append(store, name, WalKind.INGEST, Job(job_id, segments=(segment,)))


def choose(monkeypatch, pick, level=1):
    """Make a strategy `chosen`, which merges the segments that `pick` picks."""

    def plan(segments, settings):
        inputs = tuple(pick(segments))
        return CompactPlan(level, inputs, why="chosen by a test") if inputs else None

    monkeypatch.setitem(STRATEGIES, "chosen", plan)
