r"""Segments: immutable sorted files.

    "RFSEG1\0\0" | u32 version | u32 zero
    groups                 each a key block and its column blocks
    range-tombstone block  absent where there are none
    filter block
    index block
    footer                 MessagePack
    u32 footer length | u32 crc32c of the footer | "RFSEG1\0\0"

All that is needed to plan reads stands at the end, from the range tombstones on: the tail,
whose length the manifest knows, comes with one ranged GET.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from reef.formats.coding import Buffer, corrupt
from reef.formats.columns import decode_columns, encode_columns
from reef.formats.covers import Cover
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone

__all__ = [
    "END",
    "GROUP_BYTES",
    "HEAD",
    "MAGIC",
    "VERSION",
    "Footer",
    "Lineage",
    "Place",
    "SegmentSummary",
    "covers_of",
    "decode_range_tombstones",
    "encode_range_tombstones",
]

MAGIC = b"RFSEG1\0\0"
VERSION = 1
HEAD = struct.Struct("<8sII")
END = struct.Struct("<II8s")
GROUP_BYTES = 64 * 1024


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies."""

    offset: int
    length: int


class Footer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a segment says of itself: enough to rebuild a manifest from it."""

    version: int
    schema: Schema
    level: int
    rows: int
    tombstones: int
    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    set_hash: str
    write_id: str
    created_at_ms: int
    filter: Place
    index: Place
    range_tombstones: Place | None = None
    patches: int = 0
    ancestors: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    job: str | None = None
    key_id: str | None = None
    """For encryption, which comes later."""
    covers: tuple[Cover, ...] = ()
    """What it stands for; empty where the log says so, of a bulk job's."""
    generation: int = 0
    """Of the manifest on which its job was planned: of two that claim the same, the later wins."""


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What the manifest keeps of a segment that was just written."""

    footer: Footer
    size: int
    checksum: int
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a segment comes from."""

    write_id: str
    created_at_ms: int
    ancestors: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    job: str | None = None
    covers: tuple[Cover, ...] = ()
    generation: int = 0


def covers_of(footer: Footer, visible_lsn: int) -> tuple[Cover, ...]:
    """Return what a segment stands for: as its footer says, or of an ingest, its keys in its slot.

    Neighbours of one ingest may share an edge, where a range tombstone of one ends.
    """
    if not visible_lsn:
        return footer.covers
    stop = footer.max_key if footer.range_tombstones is not None else footer.max_key + b"\0"
    return (Cover(visible_lsn, visible_lsn + 1, footer.min_key, stop),)


def encode_range_tombstones(tombstones: Sequence[RangeTombstone]) -> bytes:
    """Return the payload of the range-tombstone block; empty where there is none."""
    if not tombstones:
        return b""
    ordered = sorted(tombstones)
    return encode_columns(
        len(ordered),
        {
            0: pa.array([t.start for t in ordered], pa.binary()),
            1: pa.array([t.end for t in ordered], pa.binary()),
            2: pa.array([t.lsn for t in ordered], pa.int64()),
            3: pa.array([t.seq for t in ordered], pa.uint32()),
        },
    )


def decode_range_tombstones(data: Buffer, name: str, offset: int) -> list[RangeTombstone]:
    """Return the range tombstones of a segment, in order."""
    types = {0: pa.binary(), 1: pa.binary(), 2: pa.int64(), 3: pa.uint32()}
    _, columns = decode_columns(data, types, name, offset)
    if columns.keys() != types.keys():
        raise corrupt(name, offset, "range tombstones without their columns")
    lists = [columns[number].to_pylist() for number in types]
    return [RangeTombstone(*values) for values in zip(*lists, strict=True)]
