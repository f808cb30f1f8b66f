"""Counts of matching rows by filter indexes, without reading a row.

An index counts a segment's rows if each of them is the only version of its key, none expires, and
every column in the condition has an index. Such segments leave gaps between their keys, which are
scanned: they have the rows of memory and of all other segments.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from reef.engine.read.skipping import count_matching, filter_indexes
from reef.engine.read.view import Scan
from reef.engine.where import ArrowFilter, Predicate, Where
from reef.errors import CorruptionError
from reef.formats.filter_index import FilterIndex
from reef.formats.manifest import SegmentEntry
from reef.types import KeyRange

_log = logging.getLogger(__name__)


def count_by_index(scan: Scan) -> tuple[int, list[Scan]]:
    """Return how many rows match in segments that are counted by their indexes, and scans of the
    rest.
    """
    where = scan.projection.where
    if where is None or not where.conditions:
        return 0, [scan]
    entries = sorted(scan.overlapping(), key=lambda entry: entry.min_key)
    if not any(entry.rows for entry in entries):
        return 0, [scan]
    count, gaps, start = 0, [], scan.key_range.start
    for entry in _apart(entries):
        found = _count(scan, entry, where) if _has_only_newest(scan, entry) else None
        if found is not None:
            count += found
            gaps.append(KeyRange(start, entry.min_key))
            start = entry.max_key + b"\0"
    gaps.append(KeyRange(start, scan.key_range.end))
    return count, [replace(scan, key_range=gap) for gap in gaps if _has_rows(scan, entries, gap)]


def _apart(entries: Sequence[SegmentEntry]) -> list[SegmentEntry]:
    """Return the segments, sorted by their first keys, that overlap no other one."""
    found, reached = [], b""
    for place, entry in enumerate(entries):
        below = not place or reached < entry.min_key
        reached = max(reached, entry.max_key)
        above = place + 1 == len(entries) or entry.max_key < entries[place + 1].min_key
        if below and above:
            found.append(entry)
    return found


def _has_only_newest(scan: Scan, entry: SegmentEntry) -> bool:
    """Whether all rows of a segment are in the range, whole, and the only ones of their keys."""
    key_range, own = scan.key_range, KeyRange(entry.min_key, entry.max_key + b"\0")
    if entry.tombstones or entry.patches or not entry.rows:
        return False
    if not (key_range.has(entry.min_key) and key_range.has(entry.max_key)) or _in_memory(scan, own):
        return False
    tail = scan.segments.tail(entry)
    return tail.footer.expiring == 0 and tail.index.pages.is_distinct


def _in_memory(scan: Scan, part: KeyRange) -> bool:
    """Whether memory has a version of a key in a range, or a delete that may cover one."""
    return any(
        len(table.rows(part)) or any(part.touches(t.start, t.end) for t in table.range_tombstones)
        for table in scan.tables
        if not table.is_empty
    )


def _has_rows(scan: Scan, entries: Sequence[SegmentEntry], gap: KeyRange) -> bool:
    if gap.end is not None and gap.end <= gap.start:
        return False
    return _in_memory(scan, gap) or any(gap.touches(e.min_key, e.max_key) for e in entries)


def _count(scan: Scan, entry: SegmentEntry, where: Where) -> int | None:
    """Return how many rows of a segment match; None if its indexes do not know all of it."""
    try:
        indexes = filter_indexes(scan.segments, entry)
        return count_matching(where, indexes, entry.rows) if _is_known(where, indexes) else None
    except CorruptionError as error:
        _log.warning("segment %s is counted without its indexes: %s", entry.id, error)
        return None


def _is_known(where: Where, indexes: dict[int, FilterIndex]) -> bool:
    """Whether indexes have the values of all columns of a condition."""

    def of_leaf(leaf: Predicate | ArrowFilter) -> bool:
        return isinstance(leaf, Predicate) and not leaf.is_key and leaf.number in indexes

    return where.fold(of_leaf, bool.__and__, bool.__and__, lambda _: True)
