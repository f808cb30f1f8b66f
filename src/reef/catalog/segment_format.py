"""Segments of a catalog: what one transaction changed, as framed records.

    magic       8 bytes, "RFCSEG1" and a zero
    header      a frame: msgpack of everything but the records
    records     a frame: msgpack list of [key, value], null for a deletion

A segment is numbered, has a write id of its own, and names that of the segment before it, so
that a chain has one history. An abandoned segment holds nothing: it takes a name away from a
write that might still arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from reef.errors import UNDECODABLE
from reef.formats.coding import Cursor, unsupported
from reef.formats.frame import encode_frame, read_frame

__all__ = ["Segment", "decode_segment", "encode_segment"]

MAGIC = b"RFCSEG1\0"
FORMAT = 1


class _Header(msgspec.Struct, frozen=True):
    format: int
    seq: int
    txn_id: int
    write_id: str
    base_write_id: str
    lease_id: str
    created_at_ms: int
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """One transaction: None in `records` is a deletion."""

    seq: int
    txn_id: int
    write_id: str
    base_write_id: str
    """The segment before it: empty for the first."""
    records: Mapping[bytes, bytes | None]
    lease_id: str = ""
    """Of its session: while that lease is alive, nobody else publishes the segment."""
    created_at_ms: int = 0
    abandoned: bool = False


def encode_segment(segment: Segment) -> bytes:
    """Return the object's bytes; records in the order of their keys."""
    header = _Header(
        FORMAT,
        segment.seq,
        segment.txn_id,
        segment.write_id,
        segment.base_write_id,
        segment.lease_id,
        segment.created_at_ms,
        segment.abandoned,
    )
    records = msgspec.msgpack.encode(sorted(segment.records.items()))
    return MAGIC + encode_frame(msgspec.msgpack.encode(header)) + encode_frame(records)


def decode_segment(data: bytes, name: str) -> Segment:
    """Return the segment; CorruptionError with the place of the damage."""
    cursor = Cursor(data, name)
    cursor.expect(MAGIC, "magic of a catalog's segment")
    offset = cursor.offset
    try:
        header = msgspec.msgpack.decode(read_frame(cursor, "the header"), type=_Header)
    except UNDECODABLE as error:
        cursor.position = offset
        cursor.fail(f"not a segment's header: {error}")
    if header.format > FORMAT:
        raise unsupported(name, "segment of a catalog", header.format, FORMAT)
    offset = cursor.offset
    try:
        pairs = msgspec.msgpack.decode(
            read_frame(cursor, "the records"), type=list[tuple[bytes, bytes | None]]
        )
    except UNDECODABLE as error:
        cursor.position = offset
        cursor.fail(f"not a segment's records: {error}")
    cursor.end()
    return Segment(
        header.seq,
        header.txn_id,
        header.write_id,
        header.base_write_id,
        dict(pairs),
        header.lease_id,
        header.created_at_ms,
        header.abandoned,
    )
