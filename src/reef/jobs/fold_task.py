"""A fold's task: the rows of some WAL objects become segments. Runs anywhere.

A task either reads its objects by itself, all of the keys, or is handed the rows of one range of
keys that a shuffle has brought together (`fold_shuffle`); from there on it is the same. Of each
key the newest version is kept, deletes and range deletes too: what they hide may lie in
older segments. A patch is laid over the row below it, which may stand in a segment: only those
rows are looked up. A patch over nothing is left out, since it does nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import FoldSettings
from reef.engine.log import Log
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.lookup import newest_rows
from reef.engine.reading.memtable import Memtable
from reef.engine.reading.merge import newest_versions, sorted_places
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.tombstones import RangeTombstones
from reef.engine.reading.view import View
from reef.errors import NotFoundError
from reef.formats.batch import OpKind, decode_records
from reef.formats.block import Codec
from reef.formats.covers import Cover
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions, concat_versions, split_ops
from reef.formats.wal_object import WalObject
from reef.jobs.segment_entries import entry_of
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["FoldTask", "decoded", "missing_object", "run_fold_task", "write_folded", "write_trace"]

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FoldTask:
    """The rows of some WAL objects, to be written as segments."""

    store: Store
    namespace: Namespace
    generation: int
    """The manifest of the plan: small to send, and the same wherever it is read."""
    settings: FoldSettings
    lsns: tuple[int, ...] = ()
    """Only those whose batches count."""
    ingested: tuple[SegmentEntry, ...] = ()
    """What ingests among them made visible: patches may lie on top of it."""
    end: int = 0
    """The first LSN behind this part of the log, which begins at the manifest's floor."""
    wanted: KeyRange = field(default_factory=KeyRange)
    """The keys of this task. Range tombstones stand with those of the first one."""


def run_fold_task(task: FoldTask) -> tuple[SegmentEntry, ...]:
    """Write the segments of a task; their names are new at every run."""
    manifest = HeadFinder(task.store, task.namespace).load(task.generation)
    rows, tombstones = _read_rows(task, manifest)
    return write_folded(task, manifest, rows, tombstones)


def write_folded(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> tuple[SegmentEntry, ...]:
    """Write what is left of sorted rows: all that this part of the log has of the task's keys."""
    if (rows.kinds == OpKind.PATCH).any():
        rows = _resolved(task, manifest, rows, tombstones)
    else:
        rows = newest_versions([rows], manifest.schema, [RangeTombstones.of(tombstones)])
    own = () if task.wanted.start else tombstones
    if not len(rows) and not own:
        return ()
    return tuple(_write_segments(task, manifest, rows, own))


def write_trace(
    task: FoldTask, manifest: Manifest, tombstones: Sequence[RangeTombstone]
) -> tuple[SegmentEntry, ...]:
    """Write a segment for keys of which nothing is left, while there is something of others.

    The segments of a fold stand for all keys together: that is how a rebuild knows them (H49).
    """
    own = () if task.wanted.start else tombstones
    return tuple(_write_segments(task, manifest, Versions.empty(manifest.schema), own))


def missing_object(namespace: Namespace, lsn: int) -> NotFoundError:
    """Return the error for a WAL object that was listed and is gone."""
    return NotFoundError(
        f"LSN {lsn} of {namespace.name} was listed and is gone",
        object=namespace.wal_object(lsn),
        offset=0,
    )


def _read_rows(task: FoldTask, manifest: Manifest) -> tuple[Versions, list[RangeTombstone]]:
    log = Log(task.store, task.namespace)
    parts: list[Versions] = [Versions.empty(manifest.schema)]
    tombstones: list[RangeTombstone] = []
    for lsn, found in zip(task.lsns, log.read_many(list(task.lsns)), strict=True):
        if found is None:
            raise missing_object(task.namespace, lsn)
        found_rows, ranges = decoded(found, manifest, task.namespace)
        parts += found_rows
        tombstones += ranges
    rows = concat_versions(parts, manifest.schema)
    return rows.take(sorted_places(rows)), tombstones


def decoded(
    found: WalObject, manifest: Manifest, namespace: Namespace
) -> tuple[list[Versions], list[RangeTombstone]]:
    """Return the rows of each record of a WAL object, unsorted, and its range deletes."""
    lsn = found.header.lsn
    name = namespace.wal_object(lsn)
    schemas = {schema.id: schema for schema in manifest.schemas}
    schema = schemas.get(found.header.schema_id, manifest.schema)
    parts: list[Versions] = []
    tombstones: list[RangeTombstone] = []
    first_seq = 0
    for ops in decode_records(found, schema, name):
        rows, ranges = split_ops(ops, lsn, first_seq)
        parts.append(rows.under(manifest.schema))
        tombstones += ranges
        first_seq += len(ops)
    return parts, tombstones


def _resolved(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> Versions:
    """Lay patches over what is below them, in the log or in segments."""
    patched = pc.unique(rows.keys.filter(pa.array(rows.kinds == OpKind.PATCH))).to_pylist()
    segments = SegmentStore(task.store, task.namespace, ByteCache(CACHE_BYTES))
    parts = [rows, *_below(task, manifest, segments, patched)]
    deleted = [RangeTombstones.of(tombstones)]
    deleted += [segments.deletes(entry) for entry in (*task.ingested, *manifest.segments)]
    found = newest_versions(parts, manifest.schema, deleted)
    # What is not of this part of the log stands in a segment already.
    ours = np.isin(found.lsns, np.array(task.lsns, np.int64)) & (found.kinds != OpKind.PATCH)
    kept = found.take(np.flatnonzero(ours).astype(np.int64))
    if not task.ingested:
        return kept
    # An ingest may lie on top of the others. If it is a patch, it needs the row below it.
    newest = max(entry.visible_lsn for entry in task.ingested)
    hidden = ~pc.is_in(rows.keys, value_set=kept.keys).to_numpy(zero_copy_only=False)
    hidden &= rows.lsns < newest
    older = tuple(entry for entry in task.ingested if entry.visible_lsn < newest)
    rest = rows.take(np.flatnonzero(hidden).astype(np.int64))
    if not len(rest):
        return kept
    below_it = _resolved(replace(task, ingested=older), manifest, rest, tombstones)
    both = concat_versions([kept, below_it], manifest.schema)
    return both.take(sorted_places(both))


def _below(
    task: FoldTask, manifest: Manifest, segments: SegmentStore, keys: list[bytes]
) -> Iterator[Versions]:
    """Yield what segments have of some keys: together, as they are older than the log, and of
    each ingest by itself, since rows of the log may lie between it and what is below.
    """
    runtime = task.store.runtime
    memtable = Memtable(manifest.schema, manifest.wal_floor)
    yield newest_rows(View(manifest, segments, memtable), keys, runtime)
    bare = msgspec.structs.replace(manifest, segments=())
    for entry in task.ingested:
        memtable = Memtable(manifest.schema, manifest.wal_floor)
        memtable.ingest(manifest.wal_floor, [entry])
        yield newest_rows(View(bare, segments, memtable), keys, runtime)


def _write_segments(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> Iterator[SegmentEntry]:
    """Cut by size; range tombstones go with the first piece, whose bounds then include them."""
    pieces = list(_pieces(rows, task.settings.segment_bytes_max))
    runtime = task.store.runtime
    ids = [runtime.ulid() for _ in pieces]
    starts = [task.wanted.start, *(piece.keys[0].as_py() for piece in pieces[1:])]
    for place, piece in enumerate(pieces):
        lineage = Lineage(
            ids[place],
            int(runtime.wall_s() * 1000),
            siblings=tuple(other for other in ids if other != ids[place]),
            covers=_covers(task, manifest, *[*starts, task.wanted.end][place : place + 2]),
            generation=manifest.generation,
        )
        writer = SegmentWriter(
            manifest.schema,
            0,
            lineage,
            codec=Codec[task.settings.codec.upper()],
            group_bytes=task.settings.group_bytes,
            range_tombstones=tombstones if place == 0 else (),
        )
        key = task.namespace.segment(ids[place])
        task.store.upload(key, writer.write([piece]))
        yield entry_of(ids[place], writer.summary)


def _covers(
    task: FoldTask, manifest: Manifest, start: bytes, stop: bytes | None
) -> tuple[Cover, ...]:
    """What a piece stands for: this part of the log, less the ingests, which have segments."""
    ingests = sorted({entry.visible_lsn for entry in task.ingested})
    firsts = [manifest.wal_floor, *(lsn + 1 for lsn in ingests)]
    ends = [*ingests, task.end]
    spans = zip(firsts, ends, strict=True)
    return tuple(Cover(first, end, start, stop) for first, end in spans if first < end)


def _pieces(rows: Versions, bytes_max: int) -> Iterator[Versions]:
    total = rows.keys.nbytes + sum(array.nbytes for array in rows.fields.values())
    count = max(1, -(-total // bytes_max))
    step = max(1, -(-len(rows) // count))
    if not len(rows):
        yield rows
    for start in range(0, len(rows), step):
        yield rows.slice(start, min(start + step, len(rows)))
