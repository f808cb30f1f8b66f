"""Recover the rows of a damaged segment from every source that the bucket still has.

    1  its own groups: those whose checksums match
    2  its ancestors: the segments that an older, retained generation names in its place
    3  the log: batches and loads that the segment covers, if they are still there
    4  merge by compaction's own rule (H68): two versions of a key become one row only if no other
       live segment can hold a version in between, which `reef.jobs.compact.merge.Merger` decides
       from key and LSN bounds. Deletes, range deletes, patches and merges without a row below
       are kept
    5  cut the result to the segment's bounds: other segments decide about versions outside, and
       their deletes may have been dropped since (H34)

Any one complete source recovers everything. Otherwise the intact groups stay as they are, and only
the ranges in between are filled with rows from the log, which may be older than the lost ones; the
report names these ranges. Patches and merges whose row may be missing are dropped there.

The new segment covers the same LSNs and keys, even without rows: otherwise a rebuild would take an
ancestor for live (H49). It has a new name: a condemned or damaged object is never used again.

**Intact parts** are the blocks, groups and range deletes whose checksums match. Blocks state their
length, kind and checksum, so most of a segment can be read without its footer. An intact index
shows which groups are lost; without it the blocks are walked from the front, and behind a damaged
one the walk continues at the next whole block, since blocks are aligned to eight bytes.

A block does not name its segment; the footer does. Without a footer the object may be another
segment that was stored under this name, and whose own footer is damaged. So its blocks count only
if the layout is that of the manifest entry: the tail begins at the same offset, and the index has
the same number of rows and the same bounds.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.context import NamespaceContext
from reef.engine.read.merge import fragments
from reef.engine.read.view import range_tombstones_of
from reef.errors import CorruptionError, NotFoundError, ReefError
from reef.formats.coding import (
    ALIGNMENT,
    BLOCK_HEAD_BYTES,
    CODECS,
    U32,
    BlockKind,
    Buffer,
    decode_block,
    padding,
)
from reef.formats.columns import decode_columns
from reef.formats.covers import Cover
from reef.formats.group import decode_key_block
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import (
    EMPTY,
    HEAD,
    Footer,
    Lineage,
    decode_footer,
    decode_range_tombstones,
    set_hash,
)
from reef.formats.segment_index import KEYS, SegmentIndex, decode_index, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import OpKind
from reef.jobs.compact.merge import Merger
from reef.jobs.compact.plan import Other
from reef.jobs.ingest.staging import entry_of
from reef.jobs.repair.log import log_versions
from reef.jobs.repair.report import LostRange, LostSegment
from reef.manifest.edits import NEVER, hold_lsn_of
from reef.types import KeyRange

KINDS = frozenset(kind.value for kind in BlockKind)
GROUP_KINDS = frozenset({BlockKind.KEYS, BlockKind.COLUMN})


@dataclass(slots=True)
class SegmentRemains:
    """The intact groups of a segment, and the key ranges of the others."""

    groups: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)
    tombstones_lost: bool = False
    lost: list[LostRange] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(len(group) for group in self.groups)

    def has_all_rows(self, entry: SegmentEntry) -> bool:
        """Whether every version is intact, by number and set hash."""
        total = EMPTY
        for group in self.groups:
            total += set_hash(hash_keys(group.keys), group.seqs, group.kinds)
        return self.rows == entry.rows and str(total) == entry.set_hash


@dataclass(frozen=True, slots=True)
class _Block:
    """A whole block, or a damaged range of bytes."""

    kind: BlockKind | None
    start: int
    end: int


def segment_remains(data: bytes, entry: SegmentEntry, schema: Schema, name: str) -> SegmentRemains:
    """Return the intact parts of a segment; none if the object holds another segment."""
    blocks = list(_walk(data, name))
    found = SegmentRemains()
    index = _find_index(data, blocks, schema, name)
    if not _is_own(data, blocks, index, entry, name):
        return SegmentRemains(tombstones_lost=entry.tombstones > 0)
    _add_tombstones(found, data, blocks, name)
    if index is not None:
        _add_indexed(found, data, index, schema, name)
    else:
        _add_walked(found, data, blocks, schema, name)
        found.lost = _gaps(found.groups, entry)
    if not _within(found, entry):
        return SegmentRemains(tombstones_lost=entry.tombstones > 0)
    found.tombstones_lost = _tombstones_lost(found, blocks, entry)
    return found


def _is_own(
    data: bytes,
    blocks: Sequence[_Block],
    index: SegmentIndex | None,
    entry: SegmentEntry,
    name: str,
) -> bool:
    """Whether an object is the segment of its entry: by its footer, otherwise by its layout."""
    with suppress(ReefError):
        footer = decode_footer(data, len(data), name)
        if isinstance(footer, Footer):
            return footer.write_id == entry.id
    tail = entry.size - entry.tail_bytes
    whole = [block for block in blocks if block.kind is not None]
    places = [b.end <= tail if b.kind in GROUP_KINDS else b.start >= tail for b in whole]
    return all(places) and (index is None or _describes(index, entry))


def _describes(index: SegmentIndex, entry: SegmentEntry) -> bool:
    """Whether an index is that of an entry, by its size, rows and bounds."""
    groups = entry.size - entry.tail_bytes - HEAD.size
    if (sum(index.sizes), int(index.rows.sum())) != (groups, entry.rows):
        return False
    if entry.tombstones or not len(index):
        return True  # the bounds of the entry include range deletes
    lsns = (0, 0) if entry.visible_lsn else (entry.lsn_min, entry.lsn_max)
    bounds = (index.first_keys[0], index.last_keys[-1])
    return bounds == (entry.min_key, entry.max_key) and lsns == (
        int(index.lsn_min.min()),
        int(index.lsn_max.max()),
    )


def _within(found: SegmentRemains, entry: SegmentEntry) -> bool:
    """Whether every version is within the bounds of the segment: rows of a load store LSN 0."""
    if found.rows > entry.rows:
        return False
    low, high = (0, 0) if entry.visible_lsn else (entry.lsn_min, entry.lsn_max)
    groups = [group for group in found.groups if len(group)]
    keys = [(g.keys[0].as_py(), g.keys[len(g) - 1].as_py()) for g in groups]
    lsns = [(int(g.lsns.min()), int(g.lsns.max())) for g in groups]
    keys += [(lost.first_key, lost.last_key) for lost in found.lost]
    lsns += [(t.lsn, t.lsn) for t in found.tombstones]
    return all(entry.min_key <= first and last <= entry.max_key for first, last in keys) and all(
        low <= first and last <= high for first, last in lsns
    )


def _walk(data: bytes, name: str) -> Iterator[_Block]:
    """Yield the blocks in order, and the damaged ranges between them."""
    at, lost_from = HEAD.size, -1
    while at + BLOCK_HEAD_BYTES <= len(data):
        block = _block_at(data, at, name)
        if block is None:
            lost_from = at if lost_from < 0 else lost_from
            at += ALIGNMENT
            continue
        if lost_from >= 0:
            yield _Block(None, lost_from, at)
            lost_from = -1
        yield block
        at = block.end


def _block_at(data: bytes, at: int, name: str) -> _Block | None:
    """Return the whole block at an offset; None, at little cost, if there is none."""
    length: int = U32.unpack_from(data, at)[0]
    kind, codec = data[at + 8], data[at + 9]
    end = at + BLOCK_HEAD_BYTES + length + len(padding(length))
    if kind not in KINDS or codec not in CODECS or data[at + 10 : at + 12] != b"\0\0":
        return None
    if end > len(data):
        return None
    try:
        decode_block(data[at:end], BlockKind(kind), name, at)
    except CorruptionError:
        return None
    return _Block(BlockKind(kind), at, end)


def _add_tombstones(
    found: SegmentRemains, data: bytes, blocks: Sequence[_Block], name: str
) -> None:
    for block in blocks:
        if block.kind is BlockKind.RANGE_TOMBSTONES:
            with suppress(CorruptionError):
                payload = decode_block(data[block.start : block.end], block.kind, name, block.start)
                found.tombstones = decode_range_tombstones(payload, name, block.start)


def _tombstones_lost(found: SegmentRemains, blocks: Sequence[_Block], entry: SegmentEntry) -> bool:
    """Whether there were range deletes that cannot be read.

    Their block precedes the filter's: if that is intact and no damage is right before it, there
    were none. Otherwise the count of tombstones decides, which includes deletes of rows.
    """
    if found.tombstones:
        return False
    kinds = [block.kind for block in blocks]
    if BlockKind.FILTER in kinds:
        place = kinds.index(BlockKind.FILTER)
        if place == 0 or kinds[place - 1] is not None:
            return False
    deleted = sum(int((group.kinds == OpKind.DELETE).sum()) for group in found.groups)
    return entry.tombstones > deleted


def _find_index(
    data: bytes, blocks: Sequence[_Block], schema: Schema, name: str
) -> SegmentIndex | None:
    """Return the index, if its block is intact, and the page block too if it has one."""
    try:
        index, pages = (
            _payload_of(data, blocks, kind, name) for kind in (BlockKind.INDEX, BlockKind.PAGES)
        )
        if index is None:
            return None
        return decode_index(index[1], schema, HEAD.size, name, index[0], pages=pages and pages[1])
    except ReefError:
        return None


def _payload_of(
    data: bytes, blocks: Sequence[_Block], kind: BlockKind, name: str
) -> tuple[int, Buffer] | None:
    """Return the offset and the payload of the last block of a kind."""
    for block in reversed(blocks):
        if block.kind is kind:
            return block.start, decode_block(data[block.start : block.end], kind, name, block.start)
    return None


def _add_indexed(
    found: SegmentRemains, data: bytes, index: SegmentIndex, schema: Schema, name: str
) -> None:
    pages, numbers = index.pages, (KEYS, *sorted(schema.types()))
    starts = [index.page_spans(number)[0].tolist() for number in numbers]
    ends = [index.page_spans(number)[1].tolist() for number in numbers]
    groups = np.repeat(np.arange(len(index)), np.diff(pages.firsts)).tolist()
    lasts = set((pages.firsts[1:] - 1).tolist())
    for page, group in enumerate(groups):
        spans = [(a[page], b[page]) for a, b in zip(starts, ends, strict=True) if a[page] < b[page]]
        rows = _decode(data, spans, schema, name)
        if rows is not None and len(rows) == int(pages.rows[page]):
            found.groups.append(rows)
        else:
            high = index.last_keys[group] if page in lasts else pages.keys[page + 1]
            found.lost.append(LostRange(pages.keys[page], high, int(pages.rows[page])))


def _add_walked(
    found: SegmentRemains, data: bytes, blocks: Sequence[_Block], schema: Schema, name: str
) -> None:
    """A group is whole if nothing between its key blocks and the next block is damaged."""
    end = 0
    for is_of_group, run in groupby(blocks, lambda block: block.kind in GROUP_KINDS):
        group = list(run)
        end += len(group)
        if is_of_group:
            cut_short = end == len(blocks) or blocks[end].kind is None
            found.groups += _walked_rows(data, group, cut_short, schema, name)


def _walked_rows(
    data: bytes, blocks: Sequence[_Block], is_cut_short: bool, schema: Schema, name: str
) -> Iterator[Versions]:
    """Yield the rows of neighbouring groups: key blocks, then those of each column in turn."""
    runs = [list(run) for _, run in groupby(blocks, lambda block: _column_of(data, block, name))]
    places = [place for place, run in enumerate(runs) if run[0].kind is BlockKind.KEYS]
    for place, end in pairwise([*places, len(runs)]):
        if is_cut_short and end == len(runs):
            return
        keys, columns = runs[place], runs[place + 1 : end]
        pages = len(columns[0]) if columns else 0
        if pages > len(keys) or any(len(column) != pages for column in columns):
            continue
        for page, block in enumerate(keys, pages - len(keys)):
            own = [block, *(column[page] for column in columns if page >= 0)]
            rows = _decode(data, [(part.start, part.end) for part in own], schema, name)
            if rows is not None:
                yield rows


def _column_of(data: bytes, block: _Block, name: str) -> int:
    """Return the number of a block's column; `KEYS` for a key block."""
    if block.kind is BlockKind.KEYS:
        return KEYS
    payload = decode_block(data[block.start : block.end], BlockKind.COLUMN, name, block.start)
    return int.from_bytes(payload[8:10], "little")


def _decode(
    data: bytes, spans: Sequence[tuple[int, int]], schema: Schema, name: str
) -> Versions | None:
    """Return the rows of a group; None if any of its blocks is damaged."""
    try:
        (start, end), *columns = spans
        rows = decode_key_block(data[start:end], schema, name, start)
        fields: dict[int, pa.Array] = {}
        for first, last in columns:
            payload = decode_block(data[first:last], BlockKind.COLUMN, name, first)
            count, arrays = decode_columns(payload, schema.types(), name, first)
            if count != len(rows):
                return None
            fields |= arrays
        return rows.with_fields(fields)
    except CorruptionError:
        return None


def _gaps(groups: Sequence[Versions], entry: SegmentEntry) -> list[LostRange]:
    """Return the key ranges between intact groups. They may have been empty."""
    if sum(map(len, groups)) == entry.rows:
        return []
    bounds = [(g.keys[0].as_py(), g.keys[len(g) - 1].as_py()) for g in groups if len(g)]
    ranges, low = [], entry.min_key
    for first, last in bounds:
        if low < first:
            ranges.append(LostRange(low, first))
        low = last
    return [*ranges, LostRange(low, entry.max_key)]


Mask = npt.NDArray[np.bool_]


def in_order(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return each version once, sorted by key, newest first.

    A row that a job has resolved has the LSN and sequence of its newest patch or merge: if one
    source has the row and another the patch, the row is kept.
    """
    rows = concat_versions([Versions.empty(schema), *parts], schema)
    columns = {"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs}
    table = pa.table({**columns, "partial": rows.are_partial()})
    order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
    places = pc.sort_indices(table, [*order, ("partial", "ascending")]).to_numpy().astype(np.int64)
    rows = rows.take(places)
    if len(rows) < 2:
        return rows
    same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    same &= (rows.lsns[1:] == rows.lsns[:-1]) & (rows.seqs[1:] == rows.seqs[:-1])
    return rows.take(np.flatnonzero(np.concatenate(([True], ~same))).astype(np.int64))


def collapsed(
    parts: Sequence[Versions],
    tombstones: Iterable[RangeTombstone],
    schema: Schema,
    others: Iterable[SegmentEntry],
    hold_lsn: int,
) -> Versions:
    """Merge versions; `others` are the live segments that are not merged."""
    rows = in_order(parts, schema)
    if not len(rows):
        return rows
    bounds = [Other(o.min_key, o.max_key, o.lsn_min, o.lsn_max) for o in others]
    # An older segment over all keys: so the merger drops no version that hides another.
    bounds.append(Other(b"", KeysInOrder(rows.keys)[len(rows) - 1], 0, 0))
    return Merger(schema, bounds, fragments(tombstones), hold_lsn).merge([rows])


def covered_by(rows: Versions, covers: Iterable[Cover], visible_lsn: int = 0) -> Versions:
    """Return the versions within some covers; those of a load count at the slot of its ingest."""
    inside = np.zeros(len(rows), dtype=bool)
    keys, slots = rows.keys, np.full(len(rows), visible_lsn) if visible_lsn else rows.lsns
    for cover in covers:
        mask: Mask = (slots >= cover.first) & (slots < cover.end)
        mask &= pc.greater_equal(keys, cover.start).to_numpy(zero_copy_only=False)
        if cover.stop is not None:
            mask &= pc.less(keys, cover.stop).to_numpy(zero_copy_only=False)
        inside |= mask
    return rows.take(np.flatnonzero(inside).astype(np.int64))


def within_bounds(rows: Versions, entry: SegmentEntry) -> Versions:
    """Return the merged versions that a segment with these bounds may hold.

    Versions outside were hidden when the segment was written, and the version that hid them may
    have been dropped since (H34). The exceptions are versions below a patch or merge inside: the
    segment had all as one row, at the newest LSN.
    """
    if not len(rows):
        return rows
    inside = (rows.lsns >= entry.lsn_min) & (rows.lsns <= entry.lsn_max)
    partial = inside & rows.are_partial()
    patched = pc.is_in(rows.keys, rows.keys.filter(pa.array(partial)))
    below = (rows.lsns < entry.lsn_min) & patched.to_numpy(zero_copy_only=False)
    low = pc.greater_equal(rows.keys, entry.min_key).to_numpy(zero_copy_only=False)
    high = pc.less_equal(rows.keys, entry.max_key).to_numpy(zero_copy_only=False)
    return rows.take(np.flatnonzero((inside | below) & low & high).astype(np.int64))


CACHE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SalvageTask:
    """A damaged segment, and the other sources of its rows."""

    context: NamespaceContext
    generation: int
    """Generation of the manifest with its schemas."""
    entry: SegmentEntry
    covers: tuple[Cover, ...] = ()
    """The LSNs and keys that it covers; more if its footer is lost."""
    claimed: tuple[Cover, ...] = ()
    """The LSNs and keys that its replacement covers."""
    lsns: tuple[int, ...] = ()
    """Objects of the log with batches that count in those LSNs."""
    ingested: tuple[SegmentEntry, ...] = ()
    """Intact segments of loads that count in those LSNs."""
    log_from: int = NEVER
    """From this LSN on those two are complete."""
    ancestors: tuple[SegmentEntry, ...] = ()
    """The inputs of the merge that wrote it, if all of them are intact."""
    others: tuple[SegmentEntry, ...] = ()
    """All other segments of the head."""
    in_head: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The replacement of a damaged segment, and the rows that are lost."""

    segment: str
    entries: tuple[SegmentEntry, ...]
    lost: LostSegment


@dataclass(frozen=True, slots=True)
class _VersionSource:
    """Versions and range deletes from one source."""

    rows: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)
    loads: list[tuple[int, Versions]] = field(default_factory=list)
    """Loads: the slot of each ingest, and its rows, which may sort at another LSN."""

    def since(self, lsn: int) -> "_VersionSource":
        """Return the versions of slots from an LSN on."""
        rows = [part.take(np.flatnonzero(part.lsns >= lsn).astype(np.int64)) for part in self.rows]
        tombstones = [t for t in self.tombstones if t.lsn >= lsn]
        return _VersionSource(rows, tombstones, [load for load in self.loads if load[0] >= lsn])

    def parts(self) -> list[Versions]:
        """Return all rows, in parts."""
        return [*self.rows, *(rows for _, rows in self.loads)]

    def without(self, groups: Sequence[Versions]) -> "_VersionSource":
        """Return versions of keys outside intact groups, which have all versions of their keys.

        A group may have several merges as one: together with the merges it would count twice.
        """
        known = pa.concat_arrays([pa.array([], pa.binary()), *(group.keys for group in groups)])

        def others(rows: Versions) -> Versions:
            there = pc.is_in(rows.keys, known).to_numpy(zero_copy_only=False)
            return rows.take(np.flatnonzero(~there))

        loads = [(lsn, others(rows)) for lsn, rows in self.loads]
        return _VersionSource([others(part) for part in self.rows], self.tombstones, loads)


@dataclass(frozen=True, slots=True)
class _Saved:
    rows: Versions
    tombstones: list[RangeTombstone]
    whole: bool

    def source(self) -> _VersionSource:
        return _VersionSource([self.rows], self.tombstones)


def run_salvage_task(task: SalvageTask) -> Salvaged:
    """Recover the rows of a segment; write them unless this is a dry run."""
    manifest = task.context.heads.load(task.generation)
    own = _own(task, manifest)
    saved = _salvage_versions(task, manifest, own)
    entries: tuple[SegmentEntry, ...] = ()
    if task.in_head and task.write and (len(saved.rows) or saved.tombstones or task.claimed):
        lineage = Lineage(
            "",
            0,
            ancestors=(task.entry.id,),
            covers=task.claimed,
            generation=manifest.generation,
        )
        writer = SegmentWriter(
            manifest.schema, task.entry.level, lineage, range_tombstones=saved.tombstones
        )
        entries = (write_saved(task.context, writer, saved.rows),)
    return Salvaged(
        task.entry.id, entries, _lost_segment(task, own, len(saved.rows), whole=saved.whole)
    )


def _lost_segment(
    task: SalvageTask, own: SegmentRemains, saved_rows: int, *, whole: bool
) -> LostSegment:
    return LostSegment.of(
        task.entry,
        task.context.names.segment(task.entry.id, task.entry.home),
        saved_rows=task.entry.rows if whole else min(saved_rows, task.entry.rows),
        ranges=() if whole else _ranges(task, own),
        tombstones_lost=own.tombstones_lost and not whole,
        history_only=not task.in_head,
    )


def _ranges(task: SalvageTask, own: SegmentRemains) -> tuple[LostRange, ...]:
    """Return the key ranges that are lost, unless another source is complete."""
    if own.lost or own.has_all_rows(task.entry):
        return tuple(own.lost)
    return (LostRange(task.entry.min_key, task.entry.max_key, task.entry.rows),)


# --- sources ----------------------------------------------------------------------------


def _salvage_versions(task: SalvageTask, manifest: Manifest, own: SegmentRemains) -> _Saved:
    """Return the versions of the first complete source, or of all of them."""
    groups = [group.under(manifest.schema) for group in own.groups]
    if own.has_all_rows(task.entry) and not own.tombstones_lost:
        return _Saved(in_order(groups, manifest.schema), own.tombstones, whole=True)
    mine = _VersionSource(groups, own.tombstones)
    if task.ancestors:
        source = _from_segments(task, task.ancestors, manifest).without(groups)
        return _merge_sources(task, manifest, [mine, source], whole=True)
    log = _from_log(task, manifest).without(groups)
    if _is_complete(task, manifest, log):
        return _merge_sources(task, manifest, [mine, log.since(task.log_from)], whole=True)
    newer = _merge_sources(task, manifest, [log.since(task.log_from)], whole=False)
    rest = [_whole_rows(source, _ranges(task, own)) for source in (log, newer.source())]
    return _merge_sources(task, manifest, [mine, *rest], whole=False)


def _is_complete(task: SalvageTask, manifest: Manifest, log: _VersionSource) -> bool:
    """Whether the part of the log that is complete has all rows of the segment.

    The newest version of each of its keys is within its LSN bounds. If that is a whole row or a
    delete, nothing below the bounds matters; a patch or merge needs everything that the segment
    covers.
    """
    if not task.covers or task.entry.visible_lsn:
        return False  # rows of a load are in no other place
    if task.log_from <= min(cover.first for cover in task.covers):
        return True
    found = _merge_sources(task, manifest, [log.since(task.log_from)], whole=False)
    return task.log_from <= task.entry.lsn_min and not found.rows.has_partial


def _whole_rows(source: _VersionSource, ranges: Sequence[LostRange]) -> _VersionSource:
    """Return the whole rows and deletes of an incomplete source in lost ranges.

    A patch or merge may have been written for a missing row, and would show one that never existed.
    """
    found = _VersionSource(tombstones=source.tombstones)
    for rows in source.parts():
        kept = np.zeros(len(rows), dtype=bool)
        for lost in ranges:
            low = pc.greater_equal(rows.keys, lost.first_key).to_numpy(zero_copy_only=False)
            high = pc.less_equal(rows.keys, lost.last_key).to_numpy(zero_copy_only=False)
            kept |= low & high
        kept &= ~rows.are_partial()
        found.rows.append(rows.take(np.flatnonzero(kept).astype(np.int64)))
    return found


def _own(task: SalvageTask, manifest: Manifest) -> SegmentRemains:
    """Return the intact parts of the object itself."""
    entry = task.entry
    key = task.context.names.segment(entry.id, entry.home)
    schemas = [s for s in manifest.schemas if s.id == entry.schema_id] or [manifest.schema]
    try:
        found = segment_remains(task.context.store.get(key), entry, schemas[0], key)
    except NotFoundError:
        return SegmentRemains(tombstones_lost=entry.tombstones > 0)
    if entry.rows_lsn:
        found.groups = [group.with_lsn(entry.rows_lsn) for group in found.groups]
        found.tombstones = [replace(t, lsn=entry.rows_lsn) for t in found.tombstones]
    return found


def _from_segments(
    task: SalvageTask, entries: Sequence[SegmentEntry], manifest: Manifest
) -> _VersionSource:
    segments = task.context.segments(CACHE_BYTES)
    found = _VersionSource()
    for entry in entries:
        pages = len(segments.tail(entry).index.pages.rows)
        if pages:
            rows = segments.rows(entry, range(pages)).under(manifest.schema)
            if entry.visible_lsn:
                found.loads.append((entry.visible_lsn, rows.with_lsn(entry.rows_lsn)))
            else:
                found.rows.append(rows)
        found.tombstones.extend(range_tombstones_of(segments, entry))
    return found


def _from_log(task: SalvageTask, manifest: Manifest) -> _VersionSource:
    """Return the batches and loads that the segment covers."""
    found = _from_segments(task, task.ingested, manifest)
    rows, tombstones = log_versions(task.context, manifest, task.lsns, {})
    loads = [(lsn, covered_by(part, task.covers, lsn)) for lsn, part in found.loads]
    logged = covered_by(rows, task.covers)
    return _VersionSource([logged], [*found.tombstones, *tombstones], loads)


# --- merging ----------------------------------------------------------------------------


def _merge_sources(
    task: SalvageTask, manifest: Manifest, sources: Sequence[_VersionSource], *, whole: bool
) -> _Saved:
    """Merge some sources, and cut the result to the segment's own keys and LSNs."""
    entry, end = task.entry, task.entry.max_key + b"\0"
    tombstones = [tombstone for source in sources for tombstone in source.tombstones]
    parts = [part for source in sources for part in source.parts()]
    hold_lsn = hold_lsn_of(manifest.open_jobs)
    rows = collapsed(parts, tombstones, manifest.schema, task.others, hold_lsn)
    keys = KeyRange(entry.min_key, end)
    cut = {
        RangeTombstone(max(t.start, entry.min_key), min(t.end, end), t.lsn, t.seq)
        for t in tombstones
        if entry.lsn_min <= t.lsn <= entry.lsn_max and keys.overlaps(KeyRange(t.start, t.end))
    }
    return _Saved(within_bounds(rows, entry), sorted(cut), whole)


def write_saved(context: NamespaceContext, writer: SegmentWriter, rows: Versions) -> SegmentEntry:
    """Write recovered rows as a segment under a new name; return its entry."""
    segment_id = context.runtime.ulid()
    now_ms = int(context.runtime.wall_s() * 1000)
    writer.lineage = replace(writer.lineage, write_id=segment_id, created_at_ms=now_ms)
    pieces = [rows] if len(rows) else []
    context.store.upload(context.names.segment(segment_id), writer.write(pieces))
    return entry_of(segment_id, writer.summary)
