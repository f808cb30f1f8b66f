"""What a batch looks like in a local log: one entry each, its bytes those of its WAL record.

    u32 crc32c of the rest | msgpack: [version, schema id, operations, key, digest, record]

The checksum is for what lies long: a log checks its commits when it is opened after a crash, and
not what it has sealed before. The record goes into a WAL object as it is, so that an upload
encodes nothing again. The entry's index is the batch's place in the stream; its time is when it
was written. Its extensions hold the digest of all entries before it, so that a log and a bucket
can find out whether they mean the same entries (H71); entries of older releases have none.

    digest = blake2b-128 of: u64 index | u64 term | u8 length of the extensions | extensions | data
"""

import struct
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from reef.engine.batch import EncodedBatch
from reef.errors import UNDECODABLE, CorruptionError, UnsupportedFormatError
from reef.formats.coding import crc32c
from reef.formats.streams import StreamPoint
from reef.formats.wal_object import BatchHeader
from reef.locallog import EntryTime, LogEntry

__all__ = ["LocalBatch", "decode_entry", "encode_entry", "point_of"]

VERSION = 1
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = 112
"""About what an entry needs beside its record."""
DIGEST_BYTES = 16
DIGEST_HEAD = struct.Struct("<QQB")


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    schema_id: int
    ops: int
    key: str | None
    digest: str | None
    record: bytes


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """A batch as the local log keeps it."""

    record: bytes
    header: BatchHeader
    schema_id: int

    @classmethod
    def of(cls, encoded: EncodedBatch, key: str | None) -> "LocalBatch":
        digest = encoded.digest() if key is not None else None
        header = BatchHeader(len(encoded.ops), key, digest)
        return cls(encoded.record, header, encoded.schema_id)

    @property
    def size(self) -> int:
        return len(self.record) + HEADER_BYTES


def encode_entry(index: int, epoch: int, batch: LocalBatch, now_ns: int, before: bytes) -> LogEntry:
    """Return the entry of a batch, behind one with the digest `before`; its term is the epoch of
    the writer that took it."""
    header = batch.header
    stored = _Stored(VERSION, batch.schema_id, header.ops, header.key, header.digest, batch.record)
    time = EntryTime.from_unix_ns(now_ns)
    body = msgspec.msgpack.encode(stored)
    data = CHECKSUM.pack(crc32c(body)) + body
    return LogEntry(index=index, term=epoch, data=data, extensions=before, appended_at=time)


def point_of(entry: LogEntry) -> StreamPoint:
    """Return what identifies an entry, with all entries before it."""
    before = entry.extensions
    digest = blake2b(
        DIGEST_HEAD.pack(entry.index, entry.term, len(before)), digest_size=DIGEST_BYTES
    )
    digest.update(before)
    digest.update(entry.data)
    return StreamPoint(entry.term, entry.index, digest.digest())


def decode_entry(entry: LogEntry, path: str) -> LocalBatch:
    """Return the batch of an entry; CorruptionError if it holds something else."""
    body = memoryview(entry.data)[CHECKSUM.size :]
    if len(entry.data) < CHECKSUM.size or CHECKSUM.unpack_from(entry.data)[0] != crc32c(body):
        raise CorruptionError(
            f"entry {entry.index} of {path}: the checksum does not match",
            hint=f"Run `reef log verify {path}`; what is in the bucket is not touched by this",
            object=path,
            offset=0,
        )
    try:
        stored = msgspec.msgpack.decode(body, type=_Stored)
    except UNDECODABLE as error:
        raise CorruptionError(
            f"entry {entry.index} of {path} is not a batch: {error}", object=path, offset=0
        ) from error
    if stored.version > VERSION:
        raise UnsupportedFormatError(
            f"entry {entry.index} of {path} has version {stored.version}, known is {VERSION}",
            hint="Upgrade Reef",
        )
    header = BatchHeader(stored.ops, stored.key, stored.digest)
    return LocalBatch(stored.record, header, stored.schema_id)
