r"""WAL objects: one committed step of a namespace's log.

    "RFWAL1\0\0" | u32 version | u32 zero
    frame: header
    frame: record 0 …          one per batch
    u32 record count | u32 crc32c of everything before the footer

The header says what the object is and whose: kind, epoch, writer and write id, and `after`,
the write ids that it expects in the slots before it. A record is one client's batch, as a
column set. The footer's checksum is checked first, then the version: a newer format is
told apart from damage, because the last eight bytes mean the same in all of them.
"""

import struct
from enum import StrEnum
from typing import Any

import msgspec

from reef.formats.coding import Buffer, Cursor, corrupt, crc32c, decode_msgpack, unsupported
from reef.formats.frame import FRAME_HEAD_BYTES, encode_frame, read_frame
from reef.formats.schema import Schema
from reef.formats.streams import Lineage

__all__ = ["BatchHeader", "Job", "JobSegment", "WalHeader", "WalKind", "WalObject"]

MAGIC = b"RFWAL1\0\0"
VERSION = 1
HEAD = struct.Struct("<8sII")
FOOTER = struct.Struct("<II")


class WalKind(StrEnum):
    """What an object in the log is. Kind is judged before epoch."""

    BATCHES = "batches"
    FENCE = "fence"
    BEGIN = "begin"
    INGEST = "ingest"
    ABORT = "abort"
    SKIP = "skip"

    @property
    def of_writer(self) -> bool:
        """Whether only the holder of the writer role puts such objects."""
        return self in (WalKind.BATCHES, WalKind.FENCE)


class BatchHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the header tells of one batch: enough for dedup without decoding the record."""

    ops: int
    key: str | None = None
    """The idempotency key."""
    digest: str | None = None
    """Of the batch's operations; the same key with another digest is refused."""
    when: list[Any] | None = None
    """The conditions under which it was decided: a record for audits, never decided again."""


class JobSegment(msgspec.Struct, frozen=True):
    """A staged segment that an ingest makes visible."""

    id: str
    size: int
    checksum: int
    rows: int
    tombstones: int
    tail_bytes: int
    min_key: bytes
    max_key: bytes
    set_hash: str
    patches: int = 0
    replaces: bool = False
    """Whether a range tombstone lies over all of [min_key, max_key): max_key is then no key."""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """What begin, ingest and abort say of their job."""

    id: str
    key: str | None = None
    live_wins: bool = False
    begin_lsn: int = 0
    replace: tuple[bytes, bytes | None] | None = None
    """The range whose old content goes: for people; range tombstones in the segments do it."""
    segments: tuple[JobSegment, ...] = ()


class WalHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose object this is, and where it stands."""

    lsn: int
    kind: WalKind
    epoch: int
    writer_id: str
    write_id: str
    created_at_ms: int
    after: tuple[str, ...] | None = None
    """Expected write ids of the slots lsn − len(after) … lsn − 1; None: void under no rule."""
    schema_id: int = 0
    batches: tuple[BatchHeader, ...] = ()
    schema: Schema | None = None
    """In fences and begins: so that a log can be read without any manifest."""
    max_parallel_writes: int = 0
    job: Job | None = None
    marks: dict[str, int] = {}
    """How far each stream is with this object: the last place of it that is in here."""
    lineages: dict[str, Lineage] = {}
    """By stream: the last entry in here of each epoch. The last one is at the stream's mark."""


HEAD_NOW = HEAD.pack(MAGIC, VERSION, 0)
HEADER_DECODER = msgspec.msgpack.Decoder(WalHeader)


class WalObject(msgspec.Struct, frozen=True):
    """A decoded object: its header, and the records' bytes, checked."""

    header: WalHeader
    records: tuple[memoryview, ...]
    starts: tuple[int, ...]
    """Where in the object each record begins."""

    @staticmethod
    def encode(header: WalHeader, records: tuple[Buffer, ...] = ()) -> bytes:
        if len(records) != len(header.batches):
            raise ValueError(f"{len(header.batches)} batches, but {len(records)} records")
        encoded = msgspec.msgpack.encode(header)
        # What cannot be read back would be acknowledged and then stop everyone who opens.
        HEADER_DECODER.decode(encoded)
        body = b"".join((HEAD_NOW, encode_frame(encoded), *map(encode_frame, records)))
        return body + FOOTER.pack(len(records), crc32c(body))

    @staticmethod
    def decode(data: bytes, name: str) -> "WalObject":
        """Return the object; CorruptionError for damage, UnsupportedFormatError for news."""
        count = _check_whole(data, name)
        cursor = Cursor(memoryview(data)[: -FOOTER.size], name)
        cursor.take(HEAD.size)
        header = decode_msgpack(read_frame(cursor, "the header"), WalHeader, name, HEAD.size)
        assert isinstance(header, WalHeader)
        if count != len(header.batches) or count * 8 > cursor.left:
            cursor.fail(f"{len(header.batches)} batches in the header, {count} in the footer")
        records, starts = [], []
        for number in range(count):
            starts.append(cursor.offset + FRAME_HEAD_BYTES)
            records.append(read_frame(cursor, f"record {number}"))
        cursor.end()
        return WalObject(header, tuple(records), tuple(starts))


def _check_whole(data: bytes, name: str) -> int:
    """Check the object from end to end; return the number of records."""
    if len(data) < HEAD.size + FOOTER.size:
        raise corrupt(name, len(data), f"{len(data)} bytes are too few for a WAL object")
    count, expected = FOOTER.unpack(data[-FOOTER.size :])
    if crc32c(data[: -FOOTER.size]) != expected:
        raise corrupt(name, len(data) - FOOTER.size, "checksum of the object does not match")
    magic, version, zero = HEAD.unpack(data[: HEAD.size])
    if magic != MAGIC:
        raise corrupt(name, 0, f"magic is {magic!r}, expected {MAGIC!r}")
    if version > VERSION:
        raise unsupported(name, "WAL object", version, VERSION)
    if version == 0 or zero:
        raise corrupt(name, len(MAGIC), f"version {version}, reserved {zero}")
    return int(count)
