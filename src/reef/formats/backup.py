r"""Objects of a backup set: descriptors, and pieces of logs.

**A descriptor** is JSON that a person can read, one for each backup, written last of all:

    {"crc32c":"1a2b3c4d","format":1,"backup":{…}}

The checksum is over everything after its own comma, as in a manifest.

**A piece** has the objects of consecutive slots of a log, unchanged, so that a restore gets the
same verdicts from the same rules:

    "RFBAK1\0\0" | u32 version | u32 zero
    frame: head            msgpack: which log, which slots, their sizes and dates
    objects of the slots, one after the other
    u32 crc32c of everything before
"""

import struct

import msgspec

from reef.errors import UNDECODABLE
from reef.formats.coding import (
    U32,
    ByteReader,
    corrupt,
    crc32c,
    decode_msgpack,
    encode_frame,
    read_frame,
    unsupported,
)
from reef.formats.manifest import HEAD, HEAD_BYTES
from reef.formats.schema import Schema

FORMAT = 1
MAGIC = b"RFBAK1\0\0"
PIECE_HEAD = struct.Struct("<8sII")


class StoredPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a log that a backup relies on: `[key, size]`."""

    key: str
    size: int


class BackedUp(msgspec.Struct, frozen=True):
    """One namespace in a backup: a generation, and the log from its floor on."""

    namespace: str
    root: str
    """The folder of its incarnation in the source."""
    generation: int
    floor: int
    """The first LSN of the log that the generation needs."""
    last_lsn: int
    """The state that was backed up; pieces that were shipped later may reach further."""
    floor_at_ms: int | None
    """When the last object below the floor was created; None if that is not known any more."""
    covered_ms: int
    """All commits up to then, by the clocks of writer and backup, are in the backup."""
    manifest: str
    manifest_size: int
    manifest_crc32c: int
    set_hash: str
    """The sum over all segments."""
    rows: int
    bytes: int
    segments: int
    pieces: tuple[StoredPiece, ...] = ()


class Backup(msgspec.Struct, frozen=True):
    """A complete backup."""

    id: str
    bucket: str
    """The id of the source bucket."""
    source: str
    """The URL of the source, for people."""
    created_at_ms: int
    namespaces: tuple[BackedUp, ...]
    whole_bucket: bool = False
    snapshot: str = ""
    """The name of the snapshot of the whole bucket that it is a copy of, if that had one."""


class _BackupEnvelope(msgspec.Struct, frozen=True):
    crc32c: str
    format: int
    backup: msgspec.Raw = msgspec.Raw(b"null")


def encode_backup(backup: Backup) -> bytes:
    """Return the bytes of a descriptor."""
    rest = b'"format":%d,"backup":%s}' % (FORMAT, msgspec.json.encode(backup))
    return b'{"crc32c":"%08x",' % crc32c(rest) + rest


def decode_backup(data: bytes, name: str) -> Backup:
    """Return a descriptor; CorruptionError for damage, UnsupportedFormatError for news."""
    head = HEAD.match(data)
    if head is None:
        raise corrupt(name, 0, f"begins with {data[:HEAD_BYTES]!r}, which no backup does")
    found = f"{crc32c(data[HEAD_BYTES:]):08x}"
    if found.encode() != head[1]:
        expected = head[1].decode()
        raise corrupt(name, HEAD_BYTES, f"expected checksum {expected}, found {found}")
    try:
        envelope = msgspec.json.decode(data, type=_BackupEnvelope)
        if envelope.format > FORMAT:
            raise unsupported(name, "backup", envelope.format, FORMAT)
        return msgspec.json.decode(envelope.backup, type=Backup)
    except (*UNDECODABLE, ValueError) as error:
        raise corrupt(name, HEAD_BYTES, f"not a backup: {error}") from error


# --- pieces ---------------------------------------------------------------------------


class PieceSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot of a piece: `[lsn, size, created_at_ms]`."""

    lsn: int
    size: int
    created_at_ms: int


class PieceHead(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of a piece, and the facts of the manifest that its log depends on."""

    bucket: str
    root: str
    first: int
    last: int
    slots: tuple[PieceSlot, ...]
    """In LSN order, without those that a repair has skipped."""
    covered_ms: int
    """When the end of the log was listed: later commits are in later pieces."""
    schemas: tuple[Schema, ...]
    """Batches of the log may have a newer schema than the manifest from which it is replayed."""
    skipped: tuple[int, ...] = ()
    ingests_without_begin: tuple[int, ...] = ()


class LogPiece(msgspec.Struct, frozen=True):
    """A decoded piece."""

    head: PieceHead
    bodies: dict[int, bytes]
    """By LSN."""


def encode_piece(head: PieceHead, bodies: list[bytes]) -> bytes:
    """Return the bytes of a piece; the bodies are in the order of its slots."""
    start = PIECE_HEAD.pack(MAGIC, FORMAT, 0) + encode_frame(msgspec.msgpack.encode(head))
    data = b"".join([start, *bodies])
    return data + U32.pack(crc32c(data))


def decode_piece(data: bytes, name: str) -> LogPiece:
    """Return a piece; CorruptionError for damage, UnsupportedFormatError for news."""
    end = len(data) - U32.size
    if end < PIECE_HEAD.size or not data.startswith(MAGIC):
        raise corrupt(name, 0, f"expected magic {MAGIC!r}, found {data[: len(MAGIC)]!r}")
    (expected,) = U32.unpack_from(data, end)
    found = crc32c(memoryview(data)[:end])
    if found != expected:
        raise corrupt(name, end, f"expected checksum {expected:08x}, found {found:08x}")
    cursor = ByteReader(memoryview(data)[:end], name)
    _, version, _ = PIECE_HEAD.unpack(cursor.take(PIECE_HEAD.size))
    if version > FORMAT:
        raise unsupported(name, "piece of a log", version, FORMAT)
    head = decode_msgpack(read_frame(cursor, "the head"), PieceHead, name, PIECE_HEAD.size)
    assert isinstance(head, PieceHead)
    bodies = {slot.lsn: bytes(cursor.take(slot.size)) for slot in head.slots}
    cursor.end()
    return LogPiece(head, bodies)
