"""Levels: where segments stand to each other by their keys.

Nothing that is read depends on a level, since every version carries its LSN. Levels tell the
compaction what has been put in order already: the deeper, the longer it may rest. A load that
has sorted its rows, and lies over nothing, needs no compaction at all, so its segments go to the
bottom as soon as a fold names them.
"""

from collections.abc import Iterable, Sequence

import msgspec

from reef.formats.manifest import SegmentEntry

__all__ = ["at_their_level", "by_key", "is_plain", "overlapping_groups", "replace_level"]


def at_their_level(
    folded: Sequence[SegmentEntry], known: Sequence[SegmentEntry]
) -> tuple[SegmentEntry, ...]:
    """Return a fold's segments, those of loads that overlap nothing at the bottom level."""
    loaded = {s.id for s in folded if s.visible_lsn and is_plain(s)}
    if not loaded:
        return tuple(folded)
    bottom = max([1, *(segment.level for segment in known)])
    groups = overlapping_groups([*folded, *known])
    alone = loaded & {group[0].id for group in groups if len(group) == 1}
    return tuple(replace_level(s, bottom) if s.id in alone else s for s in folded)


def replace_level(segment: SegmentEntry, level: int) -> SegmentEntry:
    """Return the entry of the same object in another level."""
    return msgspec.structs.replace(segment, level=level)


def is_plain(segment: SegmentEntry) -> bool:
    """Whether a merge of it alone would change nothing: no deletes, no patches."""
    return not segment.tombstones and not segment.patches


def by_key(segment: SegmentEntry) -> tuple[bytes, bytes, str]:
    """Sort segments by what they begin with."""
    return segment.min_key, segment.max_key, segment.id


def overlapping_groups(segments: Iterable[SegmentEntry]) -> list[list[SegmentEntry]]:
    """Return the segments in groups whose key ranges are joined.

    Where a range tombstone was cut, one segment ends with the key with which the next begins:
    that alone is no overlap, or neighbours would be merged for ever.
    """
    groups: list[list[SegmentEntry]] = []
    last: SegmentEntry | None = None
    for segment in sorted(segments, key=by_key):
        if last is not None and _reaches(last, segment.min_key):
            groups[-1].append(segment)
        else:
            groups.append([segment])
        if last is None or segment.max_key >= last.max_key:
            last = segment
    return groups


def _reaches(segment: SegmentEntry, key: bytes) -> bool:
    """Whether a segment that begins before a key may have it too."""
    if segment.tombstones:
        return key < segment.max_key
    return key <= segment.max_key
