"""What is left of a damaged segment: every group whose own checksums hold.

Blocks tell their length, kind and checksum, so most of a segment can be read without its footer,
and all of it without its filter. Where the index is sound it says which groups there are, and so
exactly which are lost. Without it the blocks are walked from the front; behind one that is damaged
the walk goes on at the next place where a whole block stands, since blocks begin at multiples of
eight.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from reef.errors import CorruptionError, ReefError
from reef.formats.batch import OpKind
from reef.formats.block import BLOCK_HEAD_BYTES, CODECS, BlockKind, decode_block
from reef.formats.coding import ALIGNMENT, U32, padding
from reef.formats.columns import decode_columns
from reef.formats.group import decode_key_block
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import HEAD, Footer, decode_range_tombstones
from reef.formats.segment_index import SegmentIndex, decode_index
from reef.formats.segment_tail import decode_footer
from reef.formats.versions import RangeTombstone, Versions
from reef.jobs.repair_report import LostRange

__all__ = ["SegmentRemains", "segment_remains"]

KINDS = frozenset(kind.value for kind in BlockKind)


@dataclass(slots=True)
class SegmentRemains:
    """The rows that can be read, group by group, and which cannot."""

    groups: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)
    tombstones_lost: bool = False
    lost: list[LostRange] = field(default_factory=list)
    footer: Footer | None = None

    @property
    def rows(self) -> int:
        return sum(len(group) for group in self.groups)


@dataclass(frozen=True, slots=True)
class _Block:
    """A whole block, or a stretch of bytes that is none."""

    kind: BlockKind | None
    start: int
    end: int


def segment_remains(data: bytes, entry: SegmentEntry, schema: Schema, name: str) -> SegmentRemains:
    """Return what can be read of a segment."""
    blocks = list(_walk(data, name))
    found = SegmentRemains()
    _take_tombstones(found, data, blocks, name)
    index = _find_index(data, blocks, schema, name)
    if index is not None:
        _take_indexed(found, data, index, schema, name)
    else:
        _take_walked(found, data, blocks, schema, name)
        found.lost = _gaps(found.groups, entry)
    found.tombstones_lost = _tombstones_lost(found, blocks, entry)
    with suppress(ReefError):
        footer = decode_footer(data, len(data), name)
        found.footer = footer if isinstance(footer, Footer) else None
    return found


def _walk(data: bytes, name: str) -> Iterator[_Block]:
    """Yield the blocks in order, and what lies between them where it is damaged."""
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
    """Return the block that begins here, if a whole one does. Cheap where none does."""
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


def _take_tombstones(
    found: SegmentRemains, data: bytes, blocks: Sequence[_Block], name: str
) -> None:
    for block in blocks:
        if block.kind is BlockKind.RANGE_TOMBSTONES:
            with suppress(CorruptionError):
                payload = decode_block(data[block.start : block.end], block.kind, name, block.start)
                found.tombstones = decode_range_tombstones(payload, name, block.start)


def _tombstones_lost(found: SegmentRemains, blocks: Sequence[_Block], entry: SegmentEntry) -> bool:
    """Whether there were range deletes that cannot be read.

    Their block stands in front of the filter's: if that is sound and nothing damaged is right
    before it, there were none. Otherwise counting tells, which includes the deletes of rows.
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
    for block in reversed(blocks):
        if block.kind is BlockKind.INDEX:
            try:
                payload = decode_block(data[block.start : block.end], block.kind, name, block.start)
                return decode_index(payload, schema, HEAD.size, name, block.start)
            except ReefError:
                return None
    return None


def _take_indexed(
    found: SegmentRemains, data: bytes, index: SegmentIndex, schema: Schema, name: str
) -> None:
    for group in range(len(index)):
        spans = [index.key_range(group)]
        columns = [index.column_range(group, number) for number in sorted(schema.types())]
        spans += [span for span in columns if span is not None]
        rows = _decode(data, spans, schema, name)
        if rows is not None and len(rows) == int(index.rows[group]):
            found.groups.append(rows)
        else:
            low, high = index.first_keys[group], index.last_keys[group]
            found.lost.append(LostRange(low, high, int(index.rows[group])))


def _take_walked(
    found: SegmentRemains, data: bytes, blocks: Sequence[_Block], schema: Schema, name: str
) -> None:
    """A group is whole if nothing between its key block and what follows it is damaged."""
    starts = [place for place, block in enumerate(blocks) if block.kind is BlockKind.KEYS]
    for place in starts:
        spans, at = [], place
        while at < len(blocks) and (at == place or blocks[at].kind is BlockKind.COLUMN):
            spans.append((blocks[at].start, blocks[at].end))
            at += 1
        cut_short = at < len(blocks) and blocks[at].kind is None
        at_the_end = at == len(blocks)
        rows = None if cut_short or at_the_end else _decode(data, spans, schema, name)
        if rows is not None:
            found.groups.append(rows)


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
    """Return the ranges of keys between groups that were found. They may have been empty."""
    if sum(map(len, groups)) == entry.rows:
        return []
    bounds = [(g.keys[0].as_py(), g.keys[len(g) - 1].as_py()) for g in groups if len(g)]
    ranges, low = [], entry.min_key
    for first, last in bounds:
        if low < first:
            ranges.append(LostRange(low, first))
        low = last
    return [*ranges, LostRange(low, entry.max_key)]
