"""A fold's task: replay a part of the log and write its rows as segments. Runs anywhere.

    1  replay the slots from the manifest's floor to the end of the plan; each object is read once
    2  keep the newest version of each key, tombstones and range tombstones included: the versions
       that they hide may be in older segments
    3  apply each patch and merge to the row below it, which may be in a segment; only segments
       whose key range has such a key are opened. A patch without a row below it is dropped, a
       merge makes the row. Above the begin of an open load with `live_wins` they stay as they
       are: its rows will sort there (H50)
    4  write segments, cut by size

The rows come from the bucket (`run_fold_task`), from the memtable of a writer (`fold_rows`), or
from a shuffle, one key range at a time (`reef.jobs.fold.shuffle`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import FoldSettings
from reef.engine.context import NamespaceContext
from reef.engine.log.log import LogRules, RulesState, Scanned, SlotGone, Verdict, replay
from reef.engine.log.tail import ingested_segments
from reef.engine.read.caches import ByteCache
from reef.engine.read.memtable import Memtable
from reef.engine.read.merge import (
    RangeTombstones,
    drop_covered,
    drop_superseded,
    joined_versions,
    newest_versions,
    sorted_places,
)
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View, key_versions, newest_rows
from reef.engine.search.specs import load_indexes
from reef.errors import NotFoundError
from reef.formats.coding import Codec
from reef.formats.covers import Cover
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import (
    KeysInOrder,
    RangeTombstone,
    Versions,
    concat_versions,
    split_ops,
)
from reef.formats.wal_object import WalHeader, WalKind, WalObject, decode_records
from reef.jobs.ingest.staging import entry_of
from reef.manifest.edits import FoldResult
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.types import KeyRange

CACHE_BYTES = 64 << 20


COMMITS = (WalKind.INGEST, WalKind.APPEND)
"""Objects of processes without the writer role that hold rows."""


@dataclass(frozen=True, slots=True)
class FoldTask:
    """A part of the log, from the floor of a generation to `end`."""

    store: Store
    namespace: Namespace
    generation: int
    """The manifest of the plan: small to send, and the same wherever it is read."""
    settings: FoldSettings
    end: int = 0
    ingested: tuple[SegmentEntry, ...] = ()
    """Segments that ingests in this part made visible; set once the part is replayed."""
    begins: tuple[int, ...] = ()
    """Begins of loads with `live_wins` that are open at the end of the part: rows may come in
    there."""
    key_range: KeyRange = field(default_factory=KeyRange)
    """The keys of this task. Range tombstones are written by the first task."""


@dataclass(slots=True)
class LogPart:
    """A part of the log as the rules classify it."""

    manifest: Manifest
    names: Namespace
    objects: int = 0
    applied: list[int] = field(default_factory=list)
    """LSNs of the batches that count."""
    voided: int = 0
    ignored: int = 0
    """Ingests and appends that do not count."""
    ingested: list[SegmentEntry] = field(default_factory=list)
    records: dict[int, WalKind] = field(default_factory=dict)
    """Objects of other kinds than batches, by LSN: a sweep keeps them for ever."""

    def knows_schema(self, header: WalHeader) -> bool:
        return not header.schema_id or any(
            schema.id == header.schema_id for schema in self.manifest.schemas
        )

    def can_decode(self, slot: Scanned) -> bool:
        """Whether the manifest has the schema of a slot's object; a newer one may be needed."""
        return slot.object is None or self.knows_schema(slot.object.header)

    def add(self, header: WalHeader, verdict: Verdict) -> None:
        """Add an object; the segments of an ingest that applies become part of the result."""
        self.count(header.lsn, header.kind, verdict)
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            self.ingested += ingested_segments(header, self.manifest.schema, self.names)

    def count(self, lsn: int, kind: WalKind, verdict: Verdict) -> None:
        """Count an object by its kind and verdict."""
        self.objects += 1
        self.voided += verdict is Verdict.VOID
        self.ignored += kind in COMMITS and verdict is Verdict.IGNORED
        if kind is not WalKind.BATCHES:
            self.records[lsn] = kind
        if verdict is Verdict.APPLIES and kind.has_rows:
            self.applied.append(lsn)

    def task(self, task: FoldTask, end: int, open_jobs: Sequence[OpenJob]) -> FoldTask:
        """Return the task that writes the part, whose end the rules have reached."""
        begins = tuple(sorted(job.begin_lsn for job in open_jobs if job.live_wins))
        return replace(task, end=end, ingested=tuple(self.ingested), begins=begins)


@dataclass(frozen=True, slots=True)
class FoldedLog:
    """The result of a fold before it is published."""

    result: FoldResult
    written: tuple[SegmentEntry, ...]
    objects: int
    voided: int
    records: dict[int, WalKind]
    """Objects of other kinds than batches, by LSN."""

    @classmethod
    def of(
        cls, task: FoldTask, part: LogPart, state: RulesState, written: Sequence[SegmentEntry]
    ) -> "FoldedLog":
        """Return the result of a replayed part, whose end the rules have reached."""
        if not written and (part.applied or part.voided or part.ignored):
            # A rebuild could not distinguish a fold without rows from a lost segment (H49), nor an
            # ingest that does not count from one that the fold has left out (H67).
            replayed = part.task(task, state.next_lsn, state.open_jobs)
            written = write_trace(replayed, part.manifest, ())
        result = FoldResult(
            floor=part.manifest.wal_floor,
            end=state.next_lsn,
            segments=(*part.ingested, *written),
            dedup=state.dedup,
            open_jobs=state.open_jobs,
            below_floor=state.last_ids,
            marks=state.marks,
            lineages=state.lineages,
        )
        return cls(result, tuple(written), part.objects, part.voided, part.records)


def run_fold_task(task: FoldTask) -> FoldedLog:
    """Replay a part of the log and write its segments; their names are new at every run."""
    manifest = NamespaceContext(task.store, task.namespace).heads.load(task.generation)
    part, rules = LogPart(manifest, task.namespace), LogRules(manifest)
    rows: list[Versions] = [Versions.empty(manifest.schema)]
    tombstones: list[RangeTombstone] = []
    try:
        slots = NamespaceContext(task.store, task.namespace).log.scan(
            manifest.wal_floor, rules.skipped, task.end
        )
        for slot in replay(rules, takewhile(part.can_decode, slots)):
            if slot.object is None:
                continue
            header = slot.object.header
            part.add(header, slot.verdict)
            if slot.verdict is Verdict.APPLIES and header.kind.has_rows:
                versions, deletes = decoded(slot.object, manifest, task.namespace)
                rows += versions
                tombstones += deletes
    except SlotGone as gone:
        raise missing_object(task.namespace, gone.lsn) from gone
    all_rows = concat_versions(rows, manifest.schema)
    in_order = all_rows.take(sorted_places(all_rows))
    return fold_rows(task, part, rules.state(), in_order, tombstones)


def fold_rows(
    task: FoldTask,
    part: LogPart,
    state: RulesState,
    rows: Versions,
    tombstones: Sequence[RangeTombstone],
) -> FoldedLog:
    """Write the sorted rows of a replayed part as segments."""
    written: tuple[SegmentEntry, ...] = ()
    if part.applied:
        replayed = part.task(task, state.next_lsn, state.open_jobs)
        written = write_folded(replayed, part.manifest, rows, tombstones)
    return FoldedLog.of(task, part, state, written)


def write_folded(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> tuple[SegmentEntry, ...]:
    """Write the newest versions among sorted rows: all rows of the task's keys in this part."""
    if rows.has_partial:
        rows = _resolved_below_begins(task, manifest, rows, tombstones)
    else:
        rows = newest_versions([rows], manifest.schema, [RangeTombstones.of(tombstones)])
    own = () if task.key_range.start else tombstones
    if not len(rows) and not own:
        return ()
    return tuple(_write_segments(task, manifest, rows, own))


def write_trace(
    task: FoldTask, manifest: Manifest, tombstones: Sequence[RangeTombstone]
) -> tuple[SegmentEntry, ...]:
    """Write a segment without rows for a key range that has none.

    The segments of a fold cover all keys together; a rebuild recognises them by that (H49).
    """
    own = () if task.key_range.start else tombstones
    return tuple(_write_segments(task, manifest, Versions.empty(manifest.schema), own))


def missing_object(namespace: Namespace, lsn: int) -> NotFoundError:
    """Return the error for a WAL object that was listed and is gone."""
    return NotFoundError(
        f"LSN {lsn} of {namespace.name} was listed and is gone",
        object=namespace.wal_object(lsn),
        offset=0,
    )


def decoded(
    wal_object: WalObject, manifest: Manifest, namespace: Namespace
) -> tuple[list[Versions], list[RangeTombstone]]:
    """Return the rows of each record of a WAL object, unsorted, and its range tombstones."""
    lsn = wal_object.header.lsn
    name = namespace.wal_object(lsn)
    schemas = {schema.id: schema for schema in manifest.schemas}
    schema = schemas.get(wal_object.header.schema_id, manifest.schema)
    parts: list[Versions] = []
    tombstones: list[RangeTombstone] = []
    first_seq = 0
    for ops in decode_records(wal_object, schema, name):
        rows, ranges = split_ops(ops, lsn, first_seq)
        parts.append(rows.under(manifest.schema))
        tombstones += ranges
        first_seq += len(ops)
    return parts, tombstones


# --- patches and merges ---------------------------------------------------------------


def _resolved_below_begins(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> Versions:
    """Apply patches and merges, but those that may be above a row that is not there yet (H50).

    The row of an open load with `live_wins` comes in below them, unless a whole row is in between.
    """
    if not task.begins:
        return _resolve_patches(task, manifest, rows, tombstones)
    rows = drop_superseded(drop_covered(rows, [RangeTombstones.of(tombstones)]))
    held = _are_held(rows, np.array(task.begins, np.int64))
    rest = _resolve_patches(task, manifest, rows.take(np.flatnonzero(~held)), tombstones)
    # Between two of these LSNs nothing comes in: patches there become one.
    edges = sorted({*task.begins, *(entry.rows_lsn for entry in task.ingested)})
    places = np.searchsorted(np.array(edges, np.int64), rows.lsns)
    parts = [
        joined_versions(rows.take(np.flatnonzero(held & (places == place))), manifest.schema)
        for place in np.unique(places[held]).tolist()
    ]
    both = concat_versions([rest, *parts], manifest.schema)
    return both.take(sorted_places(both))


def _are_held(rows: Versions, begins: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return the partial rows with an open begin between them and the whole row of their key.

    Rows are sorted, and of each key the last one alone may be whole.
    """
    last = np.ones(len(rows), dtype=bool)
    if len(rows) > 1:
        last[:-1] = pc.not_equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    key_of = np.cumsum(last) - last
    partial = rows.are_partial()
    whole_lsns = np.where(partial, 0, rows.lsns)[np.flatnonzero(last)][key_of]
    begin_below = np.append(0, begins)[np.searchsorted(begins, rows.lsns)]
    held: npt.NDArray[np.bool_] = partial & (begin_below > whole_lsns)
    return held


def _resolve_patches(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> Versions:
    """Apply patches and merges to the rows below them, in the log or in segments."""
    patched = pc.unique(rows.keys.filter(pa.array(rows.are_partial()))).to_pylist()
    base = msgspec.structs.replace(manifest, segments=_having(manifest.segments, patched))
    ingested = _having(task.ingested, patched)
    segments = SegmentStore(task.store, task.namespace, ByteCache(CACHE_BYTES))
    parts = [rows, *_older_rows(base, ingested, segments, patched, task.store.runtime)]
    deleted = [RangeTombstones.of(tombstones)]
    deleted += [segments.deletes(entry) for entry in (*ingested, *base.segments)]
    newest = newest_versions(parts, manifest.schema, deleted)
    # Versions of segments and ingests are stored already.
    loads = np.array([entry.rows_lsn for entry in task.ingested], np.int64)
    ours = (newest.lsns >= manifest.wal_floor) & ~np.isin(newest.lsns, loads)
    kept = newest.take(np.flatnonzero(ours & ~newest.are_partial()).astype(np.int64))
    if not task.ingested:
        return kept
    # The newest version of a key may be that of an ingest. If it is a patch or a merge, the row
    # below counts.
    last_load = max(entry.rows_lsn for entry in task.ingested)
    hidden = ~pc.is_in(rows.keys, value_set=kept.keys).to_numpy(zero_copy_only=False)
    hidden &= rows.lsns < last_load
    older = tuple(entry for entry in task.ingested if entry.rows_lsn < last_load)
    rest = rows.take(np.flatnonzero(hidden).astype(np.int64))
    if not len(rest):
        return kept
    below_load = _resolve_patches(replace(task, ingested=older), manifest, rest, tombstones)
    both = concat_versions([kept, below_load], manifest.schema)
    return both.take(sorted_places(both))


def _having(segments: Sequence[SegmentEntry], keys: Sequence[bytes]) -> tuple[SegmentEntry, ...]:
    """Return the segments whose key range has one of the keys."""
    ordered = sorted(keys)
    firsts = [bisect_left(ordered, segment.min_key) for segment in segments]
    return tuple(
        segment
        for segment, first in zip(segments, firsts, strict=True)
        if first < len(ordered) and ordered[first] <= segment.max_key
    )


def _older_rows(
    base: Manifest,
    ingested: Sequence[SegmentEntry],
    segments: SegmentStore,
    keys: list[bytes],
    runtime: Runtime,
) -> Iterator[Versions]:
    """Yield the rows of some keys in segments: of those below the log merged, and of each ingest
    alone, since rows of the log may be between it and the rows below. The rows of a load with
    `live_wins` may be between those of segments too, which then stay apart.
    """
    below = View(base, segments, Memtable(base.schema, base.wal_floor))
    if any(entry.rows_lsn < base.wal_floor for entry in ingested):
        yield from key_versions(below, keys, runtime)[0]
    else:
        yield newest_rows(below, keys, runtime)
    bare = msgspec.structs.replace(base, segments=())
    for entry in ingested:
        memtable = Memtable(base.schema, base.wal_floor)
        memtable.ingest(base.wal_floor, [entry])
        yield from key_versions(View(bare, segments, memtable), keys, runtime)[0]


# --- segments -------------------------------------------------------------------------


def _write_segments(
    task: FoldTask, manifest: Manifest, rows: Versions, tombstones: Sequence[RangeTombstone]
) -> Iterator[SegmentEntry]:
    """Write segments, cut by size; the first has the range tombstones, and bounds around them."""
    pieces = list(_pieces(rows, task.settings.segment_bytes_max))
    runtime = task.store.runtime
    indexes = load_indexes(task.store, task.namespace, manifest.indexes)
    ids = [runtime.ulid() for _ in pieces]
    starts = [task.key_range.start, *(piece.keys[0].as_py() for piece in pieces[1:])]
    for place, piece in enumerate(pieces):
        lineage = Lineage(
            ids[place],
            int(runtime.wall_s() * 1000),
            siblings=tuple(other for other in ids if other != ids[place]),
            covers=_covers(task, manifest, *[*starts, task.key_range.end][place : place + 2]),
            generation=manifest.generation,
        )
        writer = SegmentWriter(
            manifest.schema,
            0,
            lineage,
            codec=Codec[task.settings.codec.upper()],
            group_bytes=task.settings.group_bytes,
            range_tombstones=tombstones if place == 0 else (),
            indexes=indexes,
        )
        key = task.namespace.segment(ids[place])
        task.store.upload(key, writer.write([piece]))
        yield entry_of(ids[place], writer.summary)


def _covers(
    task: FoldTask, manifest: Manifest, start: bytes, stop: bytes | None
) -> tuple[Cover, ...]:
    """Return the LSNs and keys of a piece: this part of the log without its ingests."""
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
    start, keys = 0, KeysInOrder(rows.keys)
    while start < len(rows):
        end = min(start + step, len(rows))
        while end < len(rows) and keys[end] == keys[end - 1]:  # the versions of a key stay together
            end += 1
        yield rows.slice(start, end)
        start = end
