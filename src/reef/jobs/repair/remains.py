"""The intact parts of a damaged segment: blocks, groups and range deletes whose checksums match.

Blocks state their length, kind and checksum, so most of a segment can be read without its footer.
An intact index shows which groups are lost; without it the blocks are walked from the front, and
behind a damaged one the walk continues at the next whole block, since blocks are aligned to eight
bytes.

A block does not name its segment; the footer does. Without a footer the object may be another
segment that was stored under this name, and whose own footer is damaged. So its blocks count only
if the layout is that of the manifest entry: the tail begins at the same offset, and the index has
the same number of rows and the same bounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa

from reef.errors import CorruptionError, ReefError
from reef.formats.block import BLOCK_HEAD_BYTES, CODECS, BlockKind, decode_block
from reef.formats.coding import ALIGNMENT, U32, Buffer, padding
from reef.formats.columns import decode_columns
from reef.formats.group import decode_key_block
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import (
    EMPTY,
    HEAD,
    Footer,
    decode_footer,
    decode_range_tombstones,
    set_hash,
)
from reef.formats.segment_index import KEYS, SegmentIndex, decode_index, hash_keys
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import OpKind
from reef.jobs.repair.report import LostRange

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
