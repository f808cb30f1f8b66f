"""Short scans: the first rows of a range in all sources at once, merged by the kernel.

A scan with a small limit spends its time between the steps of the ordinary merge, not in them. Here
the kernel reads the first pages of each segment (one call each) and merges them with the rows in
memory (one call), up to the first key that some source might have behind what was read:

    memtable   a b . d . f . h . . .        to the end of a chunk
    segment    . b c . e . g | . . .        two pages end here: rows before the third are complete

The rest of a range is left to the ordinary merge wherever this does not apply: range deletes,
patches, rows that a fold has moved, columns that the kernel does not merge, and buckets, where the
time goes into requests that are sent ahead. Both read the same pages, and have the same rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reef.engine.read.memtable import MemtableCut
from reef.engine.read.merge import drop_deleted
from reef.engine.read.segments import SegmentStore
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RowBuffers, Versions, can_merge, merge_rows
from reef.types import KeyRange

LIMIT_MAX = 1024
"""Longer scans take the ordinary merge, which reads ahead."""
PAGES_FIRST, PAGES_MAX = 2, 16
"""Pages of the first read of a segment; each further read is twice as large, up to these."""


class Sources(NamedTuple):
    """The sources that a scan merges, as of one cut."""

    schema: Schema
    segments: SegmentStore
    tables: tuple[MemtableCut, ...]
    entries: Sequence[SegmentEntry]
    """Segments that may have a part in it, in the order of their first keys."""
    columns: Sequence[int] | None
    now_ms: int
    keep: bool
    """Whether pages that are read are kept in memory."""

    def can_be_merged(self) -> bool:
        """Whether the kernel merges such rows; not what is in each segment, of which there may be
        very many behind the first rows.
        """
        if self.segments.waits or not can_merge(self.schema):
            return False
        return not any([table.range_tombstones for table in self.tables])

    def has_whole_rows(self, entry: SegmentEntry) -> bool:
        """Whether a segment has nothing but whole rows and deletes of single keys."""
        if entry.patches or not entry.rows:
            return False
        return not entry.tombstones or not self.segments.deletes(entry)


class ShortScan:
    """The first rows of a range; `rest` is the part of it that is left to the ordinary merge."""

    def __init__(self, sources: Sources, key_range: KeyRange, limit: int) -> None:
        self._sources, self._limit = sources, limit
        self.rest: KeyRange | None = key_range

    def __iter__(self) -> Iterator[Versions]:
        """Yield rows in key order, as far as the kernel reads and merges them."""
        left, pages = self._limit, PAGES_FIRST
        while self.rest is not None and left > 0:
            found = _first_rows(self._sources, self.rest, left, pages)
            if found is None:
                return
            rows, self.rest = found
            if len(rows):
                yield rows
            left, pages = left - len(rows), min(2 * pages, PAGES_MAX)


def _first_rows(
    sources: Sources, key_range: KeyRange, rows_max: int, pages: int
) -> tuple[Versions, KeyRange | None] | None:
    """Return the first rows of a range, and the rest of it; None if the kernel leaves it."""
    schema, start = sources.schema, key_range.start
    in_memory = _rows_in_memory(sources, key_range)
    if in_memory is None:
        return None
    parts, end = in_memory
    has_read = False
    for entry in sources.entries:
        if end is not None and entry.min_key >= end:
            break
        if has_read and entry.min_key > start:  # only needed if there are too few rows before it
            end = entry.min_key
            break
        has_read = True
        if not sources.has_whole_rows(entry):
            return None
        buffers, follows = sources.segments.first_pages(
            entry, start, schema, sources.columns, pages, keep=sources.keep
        )
        if buffers is None:
            return None
        parts.append(buffers)
        end = _nearer(end, follows)
    rows = merge_rows(parts, schema, start, end, rows_max) if parts else Versions.empty(schema)
    if rows is None:
        return None
    rest = None if end is None or end == key_range.end else KeyRange(end, key_range.end)
    if len(rows) == rows_max:
        rest = KeyRange(rows.keys[-1].as_py() + b"\0", key_range.end)
    return drop_deleted(rows, sources.now_ms), rest


def _rows_in_memory(
    sources: Sources, key_range: KeyRange
) -> tuple[list[RowBuffers], bytes | None] | None:
    """Return the chunks of all runs that have the first rows of a range, and where they end; None
    if some of their rows are no longer those of the table, or cannot be merged.
    """
    parts, end = list[RowBuffers](), key_range.end
    for table in sources.tables:
        for run in table.all_runs():
            chunk, follows = run.part_at(key_range.start)
            is_whole = run.lsn_min >= table.first_lsn
            buffers = chunk.buffers(sources.schema) if is_whole else None
            if buffers is None:
                return None
            parts.append(buffers)
            end = _nearer(end, follows)
    return parts, end


def _nearer(end: bytes | None, follows: bytes | None) -> bytes | None:
    """Return the smaller of two keys that end a range, where None is behind all."""
    if follows is None or (end is not None and end < follows):
        return end
    return follows
