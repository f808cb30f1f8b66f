"""Many keys at once: one look at each source, whatever the number of keys.

The filters of all segments are asked for all keys together; the groups that may have some are
fetched side by side, with one request for each segment. So a thousand cold keys wait for two
round trips, not for a thousand.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.merge import drop_deleted, newest_versions
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.tombstones import RangeTombstones
from reef.engine.reading.view import View
from reef.formats.batch import OpKind
from reef.formats.filter import hash_keys
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions
from reef.runtime import Runtime

__all__ = ["look_up", "newest_rows"]

GROUPS_AT_ONCE = 32
"""Joined before they are searched: a copy, and yet less than to begin on each by itself."""


def look_up(
    view: View,
    keys: Iterable[bytes],
    now_ms: int,
    runtime: Runtime,
    columns: Sequence[int] | None = None,
) -> Versions:
    """Return the rows that these keys have now, sorted by key, each once."""
    return drop_deleted(newest_rows(view, keys, runtime, columns), now_ms)


def newest_rows(
    view: View, keys: Iterable[bytes], runtime: Runtime, columns: Sequence[int] | None = None
) -> Versions:
    """Return the newest version of each key, deletes and expired rows too."""
    ordered = sorted(set(keys))
    if not ordered:
        return Versions.empty(view.manifest.schema)
    manifest, moments = view.look_up(ordered)
    in_memory = [moment.rows for moment in moments]
    entries = [
        entry
        for entry in (*moments[0].ingested, *manifest.segments)
        if entry.min_key <= ordered[-1] and ordered[0] <= entry.max_key
    ]
    runtime.gather([lambda e=entry: view.segments.tail(e) for entry in entries])  # type: ignore[misc]
    open_keys = _unsettled(ordered, in_memory, entries)
    parts = runtime.gather(
        [
            lambda e=entry: _in_segment(view.segments, manifest.schema, e, open_keys, columns)  # type: ignore[misc]
            for entry in entries
        ]
    )
    tombstones = [RangeTombstones(moment.range_tombstones) for moment in moments]
    tombstones += [view.segments.deletes(entry) for entry in entries]
    return newest_versions([*in_memory, *parts], manifest.schema, tombstones)


def _unsettled(
    ordered: list[bytes], in_memory: Sequence[Versions], entries: Sequence[SegmentEntry]
) -> list[bytes]:
    """Return the keys whose newest whole row in memory may not be the newest there is."""
    newest = max((entry.lsn_max for entry in entries), default=0)
    known: set[bytes] = set()
    for rows in in_memory:
        settled = (rows.kinds != OpKind.PATCH) & (rows.lsns > newest)
        known.update(rows.keys.filter(pa.array(settled)).to_pylist())
    return [key for key in ordered if key not in known] if known else ordered


def _in_segment(
    segments: SegmentStore,
    schema: Schema,
    entry: SegmentEntry,
    keys: list[bytes],
    columns: Sequence[int] | None,
) -> Versions:
    """Return the versions that one segment has of some sorted keys."""
    stored = segments.tail(entry).footer.schema
    within = keys[bisect_left(keys, entry.min_key) :]
    may = segments.tail(entry).filter.may_have_many(hash_keys(within))
    wanted = [within[place] for place in np.flatnonzero(may).tolist()]
    numbers = _groups_with(segments, entry, wanted)
    sought = pa.array(wanted, pa.binary())
    parts = [Versions.empty(schema)]
    groups = segments.groups(entry, numbers, columns)
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        some = [group.rows for group in groups[start : start + GROUPS_AT_ONCE]]
        parts.append(_chosen(concat_versions(some, stored), sought).under(schema))
    found = concat_versions(parts, schema)
    return found.with_lsn(entry.visible_lsn) if entry.visible_lsn else found


def _chosen(rows: Versions, sought: pa.Array) -> Versions:
    """Return the rows that have one of the keys."""
    mask = pc.is_in(rows.keys, value_set=sought).to_numpy(zero_copy_only=False)
    return rows.take(np.flatnonzero(mask).astype(np.int64))


def _groups_with(segments: SegmentStore, entry: SegmentEntry, keys: list[bytes]) -> list[int]:
    """Return the groups whose bounds have room for some of the sorted keys."""
    index = segments.tail(entry).index
    first_keys, last_keys, count = index.first_keys, index.last_keys, len(index)
    found: list[int] = []
    place = 0
    while place < len(keys):
        number = bisect_left(last_keys, keys[place])
        if number == count:
            break
        end = bisect_right(keys, last_keys[number], place)
        if bisect_left(keys, first_keys[number], place, end) < end:
            found.append(number)
        place = end
    return found
