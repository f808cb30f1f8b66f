"""Planning a read: which task reads which groups of which segments. Pure.

    block indexes        ├──┼──┼──┼──┼──┤   segment 1
                            ├────┼────┼────┼────┤   segment 2
    what need not be read goes first: by key range, by conditions on the key, by min/max
    cuts, by bytes       ├──────┼───────┼───────┤
    shares                  1       2       3       key ranges, in order, without overlap

A share carries what its task needs of the block indexes, so that the task asks the bucket only
for the blocks that it reads, and never for an index. Where that would be too much to send, the
task reads the indexes by itself.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from pyspark.sql.datasource import InputPartition

from reef.engine.reading.memtable import Moment
from reef.engine.reading.projection import Projection
from reef.engine.where import Where
from reef.formats.filter import BLOCK_BYTES, KeyFilter
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment_tail import SegmentTail
from reef.formats.versions import Versions
from reef.types import KeyRange

__all__ = ["Piece", "Share", "cut", "piece_of", "ranges_between", "share_of", "weights_of"]

SHARES_MAX = 10_000
"""More tasks than this cost more than they give."""
GROUPS_SENT_MAX = 200_000
"""Of all segments: about 50 MB of index."""
ROWS_WEIGHED = 100
"""Rows in memory count together, so many at a time."""

Weight = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a read needs of one segment: some of its groups, and how many bytes each has."""

    entry: SegmentEntry
    tail: SegmentTail
    groups: npt.NDArray[np.int64]
    first_keys: Sequence[bytes]
    last_keys: Sequence[bytes]
    sizes: npt.NDArray[np.int64]

    def within(self, wanted: KeyRange) -> npt.NDArray[np.int64]:
        """Return the groups that may have keys of a range."""
        first = bisect_left(self.last_keys, wanted.start)
        end = wanted.end
        last = len(self.groups) if end is None else bisect_left(self.first_keys, end)
        return self.groups[first:last]


class Share(InputPartition):
    """One task's part of a read."""

    def __init__(
        self,
        wanted: KeyRange,
        manifest: Manifest,
        tails: dict[str, SegmentTail],
        memory: Moment | None,
        planning: dict[str, int] | None = None,
    ) -> None:
        super().__init__(None)
        self.wanted = wanted
        self.manifest = manifest
        """Names only the segments that have a part in it."""
        self.tails = tails
        self.memory = memory
        self.planning = planning or {}
        """What planning has asked of the bucket: told by the first task."""

    def __repr__(self) -> str:
        return f"Share({self.wanted}, {len(self.manifest.segments)} segments)"


def piece_of(
    entry: SegmentEntry,
    tail: SegmentTail,
    wanted: KeyRange,
    projection: Projection,
    needless: Iterable[int],
) -> Piece:
    """Return what is left of a segment; `needless` groups have nothing that matters."""
    index = tail.index
    kept = np.zeros(len(index), bool)
    first = bisect_left(index.last_keys, wanted.start)
    last = len(index) if wanted.end is None else bisect_left(index.first_keys, wanted.end)
    kept[first:last] = True
    kept[list(needless)] = False
    if projection.where is not None:
        # No other version of a key matches a condition on the key that this one does not.
        on_key = Where(tuple(c for c in projection.where.conditions if c.is_key))
        kept &= on_key.groups(index, tail.footer.schema)
    groups = np.flatnonzero(kept).astype(np.int64)
    sizes = index.key_blocks.copy()
    for number, lengths in index.column_blocks.items():
        if projection.numbers is None or number in projection.numbers:
            sizes += lengths
    return Piece(
        entry,
        tail,
        groups,
        [index.first_keys[group] for group in groups.tolist()],
        [index.last_keys[group] for group in groups.tolist()],
        sizes[groups],
    )


def weights_of(pieces: Iterable[Piece], memory: Versions | None) -> list[Weight]:
    """Return where the bytes lie: first keys of groups, and of rows in memory, with their size."""
    weights = [
        weight
        for piece in pieces
        for weight in zip(piece.first_keys, piece.sizes.tolist(), strict=True)
    ]
    if memory is not None and len(memory):
        total = memory.keys.nbytes + sum(array.nbytes for array in memory.fields.values())
        places = range(0, len(memory), ROWS_WEIGHED)
        keys = (memory.keys[place].as_py() for place in places)
        weights += [(key, total // len(places)) for key in keys]
    return sorted(weights)


def cut(weights: Sequence[Weight], split_bytes: int) -> list[bytes]:
    """Return keys that cut what is there into parts of about `split_bytes`."""
    total = sum(size for _, size in weights)
    parts = min(-(-total // split_bytes), SHARES_MAX, max(1, len(weights)))
    if parts <= 1:
        return []
    ends = np.cumsum([size for _, size in weights])
    goals = total * np.arange(1, parts) / parts
    places = np.searchsorted(ends, goals, side="left") + 1
    keys = {weights[place][0] for place in places.tolist() if place < len(weights)}
    return sorted(keys - {weights[0][0]})


def ranges_between(wanted: KeyRange, keys: Sequence[bytes]) -> list[KeyRange]:
    """Return a range cut at some keys: in order, without overlap, nothing left out."""
    first, last = bisect_right(keys, wanted.start), len(keys)
    if wanted.end is not None:
        last = bisect_left(keys, wanted.end)
    inner = list(keys[first:last])
    starts: list[bytes] = [wanted.start, *inner]
    ends: list[bytes | None] = [*inner, wanted.end]
    return [KeyRange(start, end) for start, end in zip(starts, ends, strict=True)]


def share_of(
    wanted: KeyRange,
    manifest: Manifest,
    pieces: Sequence[Piece],
    memory: Moment | None,
    *,
    ingested: Iterable[SegmentEntry],
    with_tails: bool,
) -> Share:
    """Return what the task of one range needs; `ingested` are the segments of the log."""
    tails: dict[str, SegmentTail] = {}
    entries: list[SegmentEntry] = []
    for piece in pieces:
        groups = piece.within(wanted)
        tombstones = [
            t for t in piece.tail.range_tombstones if wanted.overlaps(KeyRange(t.start, t.end))
        ]
        if len(groups) or tombstones:
            entries.append(piece.entry)
            if with_tails:
                tails[piece.entry.id] = _trimmed(piece.tail, groups, tombstones)
    loaded = {entry.id for entry in ingested}
    if memory is not None:
        memory = replace(memory, ingested=tuple(e for e in entries if e.id in loaded))
    named = tuple(entry for entry in entries if entry.id not in loaded)
    return Share(wanted, msgspec.structs.replace(manifest, segments=named), tails, memory)


EVERY_KEY = KeyFilter(b"\xff" * BLOCK_BYTES)
"""Says of no key that it is not there: scans do not ask."""


def _trimmed(tail: SegmentTail, groups: Any, tombstones: Sequence[Any]) -> SegmentTail:
    """Return a tail that knows of some groups only; what was judged by min/max is settled."""
    index = tail.index
    numbers = groups.tolist()
    kept = replace(
        index,
        first_keys=[index.first_keys[number] for number in numbers],
        last_keys=[index.last_keys[number] for number in numbers],
        rows=index.rows[groups],
        lsn_min=index.lsn_min[groups],
        lsn_max=index.lsn_max[groups],
        starts=index.starts[groups],
        key_blocks=index.key_blocks[groups],
        column_blocks={n: lengths[groups] for n, lengths in index.column_blocks.items()},
        smallest={},
        largest={},
        _spans={},
    )
    footer = msgspec.structs.replace(tail.footer, ancestors=(), siblings=())
    return SegmentTail(tail.name, footer, kept, EVERY_KEY, tombstones)
