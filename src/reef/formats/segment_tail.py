"""Reads segments: the tail plans everything, groups are decoded from their ranges."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from reef.formats.block import BlockKind, decode_block
from reef.formats.coding import Buffer, Cursor, corrupt, crc32c, decode_msgpack, unsupported
from reef.formats.filter import KeyFilter
from reef.formats.group import decode_column_block, decode_key_block
from reef.formats.segment import (
    END,
    HEAD,
    MAGIC,
    VERSION,
    Footer,
    Place,
    decode_range_tombstones,
)
from reef.formats.segment_index import SegmentIndex, decode_index
from reef.formats.versions import RangeTombstone, Versions

__all__ = ["SegmentTail", "check_segment", "decode_footer", "decode_tail"]


@dataclass(frozen=True, slots=True)
class SegmentTail:
    """All that is needed to plan reads of a segment."""

    name: str
    footer: Footer
    index: SegmentIndex
    filter: KeyFilter
    range_tombstones: Sequence[RangeTombstone]

    def ranges(self, group: int, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of a group's key block and of these columns."""
        columns = (self.index.column_range(group, number) for number in numbers)
        return [self.index.key_range(group), *(place for place in columns if place)]

    def decode_group(
        self, group: int, numbers: Iterable[int], blocks: Sequence[Buffer]
    ) -> Versions:
        """Return a group's rows from the bytes of `ranges(group, numbers)`."""
        rows = self.decode_keys(group, blocks[0])
        present = [n for n in numbers if self.index.column_range(group, n) is not None]
        fields = {
            number: self.decode_column(group, number, block)
            for number, block in zip(present, blocks[1:], strict=True)
        }
        return rows.with_fields(fields)

    def decode_keys(self, group: int, block: Buffer) -> Versions:
        """Return a group's rows without their columns, from its key block."""
        start, _ = self.index.key_range(group)
        rows = decode_key_block(block, self.footer.schema, self.name, start)
        if len(rows) != int(self.index.rows[group]):
            raise corrupt(
                self.name, start, f"{len(rows)} rows, {self.index.rows[group]} in the index"
            )
        return rows

    def decode_column(self, group: int, number: int, block: Buffer) -> pa.Array:
        """Return one column of a group, from its block."""
        span = self.index.column_range(group, number)
        field, rows = self.footer.schema.field(number), int(self.index.rows[group])
        return decode_column_block(block, field, rows, self.name, span[0] if span else 0)


class _Version(msgspec.Struct):
    """What every version of a footer says: it is looked at before anything else."""

    version: int = 0


def decode_tail(tail: bytes, size: int, name: str) -> SegmentTail:
    """Decode the last bytes of a segment of `size` bytes; they must hold the whole tail."""
    base = size - len(tail)
    footer, footer_start = _decode_footer(tail, base, name)

    def block(kind: BlockKind, place: Place) -> Buffer:
        if not base <= place.offset <= place.offset + place.length <= footer_start:
            raise corrupt(
                name, footer_start, f"{kind.name} at {place.offset} is outside of the tail"
            )
        data = tail[place.offset - base : place.offset - base + place.length]
        return decode_block(data, kind, name, place.offset)

    index = decode_index(
        block(BlockKind.INDEX, footer.index), footer.schema, HEAD.size, name, footer.index.offset
    )
    tombstones: Sequence[RangeTombstone] = ()
    if footer.range_tombstones is not None:
        payload = block(BlockKind.RANGE_TOMBSTONES, footer.range_tombstones)
        tombstones = decode_range_tombstones(payload, name, footer.range_tombstones.offset)
    try:
        key_filter = KeyFilter(bytes(block(BlockKind.FILTER, footer.filter)))
    except ValueError as error:
        raise corrupt(name, footer.filter.offset, str(error)) from error
    return SegmentTail(name, footer, index, key_filter, tombstones)


def decode_footer(tail: bytes, size: int, name: str) -> Footer | int:
    """Return the footer from the last bytes of a segment, or how many bytes that takes."""
    if len(tail) >= END.size:
        length, _, magic = END.unpack(tail[-END.size :])
        if magic == MAGIC and len(tail) < length + END.size <= size:
            return int(length) + END.size
    return _decode_footer(tail, size - len(tail), name)[0]


def _decode_footer(tail: bytes, base: int, name: str) -> tuple[Footer, int]:
    if len(tail) < END.size:
        raise corrupt(name, base, f"{len(tail)} bytes are too few for a segment's tail")
    length, expected, magic = END.unpack(tail[-END.size :])
    if magic != MAGIC:
        raise corrupt(name, base + len(tail) - 8, f"magic is {magic!r}, expected {MAGIC!r}")
    start = len(tail) - END.size - length
    if start < 0:
        raise corrupt(name, base, f"a footer of {length} bytes does not fit")
    encoded = tail[start : -END.size]
    if crc32c(encoded) != expected:
        raise corrupt(name, base + start, "checksum of the footer does not match")
    said = decode_msgpack(encoded, _Version, name, base + start)
    assert isinstance(said, _Version)
    if said.version > VERSION:
        raise unsupported(name, "segment", said.version, VERSION)
    footer = decode_msgpack(encoded, Footer, name, base + start)
    assert isinstance(footer, Footer)
    return footer, base + start


def check_segment(data: bytes, name: str) -> SegmentTail:
    """Decode everything: every bit of the object is covered by one check or another."""
    cursor = Cursor(data, name)
    cursor.expect(MAGIC, "magic")
    if cursor.u32() != VERSION or cursor.u32():
        cursor.fail("version in front differs from the footer's")
    tail = decode_tail(data, len(data), name)
    numbers = sorted(tail.footer.schema.types())
    for group in range(len(tail.index)):
        blocks = [data[slice(*span)] for span in tail.ranges(group, numbers)]
        tail.decode_group(group, numbers, blocks)
    footer = tail.footer
    places = [p for p in (footer.range_tombstones, footer.filter, footer.index) if p]
    end = max(tail.index.end(), HEAD.size)
    for place in places:
        if place.offset != end:
            raise corrupt(name, end, "bytes that belong to no block")
        end = place.offset + place.length
    if end + len(msgspec.msgpack.encode(footer)) + END.size != len(data):
        raise corrupt(name, end, "bytes that belong to no block")
    return tail
