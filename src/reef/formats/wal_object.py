r"""WAL objects: one committed step of a namespace's log, and the batches in it.

    "RFWAL1\0\0" | u32 version | u32 zero
    frame: header
    frame: record 0 …          one per batch
    u32 record count | u32 crc32c of everything before the footer

The header has the kind of the object and its owner: epoch, writer and write id, and `after`, the
write ids that it expects in the slots before it. The footer's checksum is checked first, then the
version: a newer format is distinguished from damage, because the last eight bytes mean the same in
all of them.

A record is one client's batch, as a column set. Columns by number:

    0  key            bytes, never null
    1  kind           0 put, 1 delete, 2 delete_range, 3 patch, 4 merge
    2  end_key        of range deletes; absent where there are none
    3  expires_at_ms  null: never; absent where no row expires
    4  merged_at_ms   the writer's clock at a merge; absent where there is none
    16 + n            the schema's column n; absent where no row has it
    32784 + n         whether a patch touches column n; absent where there is no patch. In a record
                      with column 4: the operator by which a merge or patch changes it, 0 for none

A row's sequence is its position in the batch, counted over the whole WAL object.

A single put or delete of bytes is so common, and so small compared with the fixed cost of Arrow,
that it has a class and an encoder of its own: `OneOp`. Its bytes are the same.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import (
    FRAME_HEAD_BYTES,
    Buffer,
    ByteReader,
    corrupt,
    crc32c,
    decode_msgpack,
    encode_frame,
    read_frame,
    unsupported,
)
from reef.formats.columns import ABSENT, ColumnSet, encode_columns
from reef.formats.manifest import Lineage
from reef.formats.schema import Operator, Schema, as_codes

MAGIC = b"RFWAL1\0\0"
VERSION = 4
"""Version of begins and ingests with `live_wins`: older releases would resolve patches above the
begin, or show the rows at the wrong place."""
MERGE_VERSION = 3
"""Version of objects with merges."""
STREAM_VERSION = 2
"""Version of objects that a stream appends."""
PLAIN_VERSION = 1
"""Version of all others: older releases can read them, and must not read those above."""
HEAD = struct.Struct("<8sII")
FOOTER = struct.Struct("<II")


class WalKind(StrEnum):
    """The kind of an object in the log, which is checked before its epoch."""

    BATCHES = "batches"
    APPEND = "append"
    """Rows of a stream, from a process without the writer role."""
    FENCE = "fence"
    BEGIN = "begin"
    INGEST = "ingest"
    ABORT = "abort"
    SKIP = "skip"

    @property
    def of_writer(self) -> bool:
        """Whether only the holder of the writer role puts such objects."""
        return self in (WalKind.BATCHES, WalKind.FENCE)

    @property
    def has_rows(self) -> bool:
        """Whether its records hold rows; those of an ingest are in segments."""
        return self in (WalKind.BATCHES, WalKind.APPEND)


class BatchHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The entry of one batch in the header: enough for dedup without decoding the record."""

    ops: int
    key: str | None = None
    """The idempotency key."""
    digest: str | None = None
    """Digest of the batch's operations; the same key with another digest is refused."""
    when: list[Any] | None = None
    """The conditions under which it was decided: a record for audits, never decided again."""
    merges: bool = False
    """Whether some of its operations are merges."""
    changes: int | None = None
    """The operations without patches of missing rows, if there were some and they were counted."""

    @property
    def counted(self) -> int:
        """The operations, for a receipt."""
        return self.ops if self.changes is None else self.changes

    def with_changes(self, count: int) -> "BatchHeader":
        """Return this entry with the number of operations that are not patches of missing rows."""
        return msgspec.structs.replace(self, changes=None if count == self.ops else count)


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
    """Rows that change only some columns of the row below: patches and merges."""
    replaces: bool = False
    """Whether a range tombstone covers all of [min_key, max_key): max_key is then no key."""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of begin, ingest and abort objects that concern their job."""

    id: str
    key: str | None = None
    live_wins: bool = False
    """Whether its rows sort at its begin, below everything written since."""
    begin_lsn: int = 0
    """In the ingest of a job with `live_wins`: the LSN that its rows have."""
    replace: tuple[bytes, bytes | None] | None = None
    """The range whose old content goes: for people; range tombstones in the segments do it."""
    segments: tuple[JobSegment, ...] = ()
    digest: str = ""
    """Digest of the rows with relative expiry times; empty if they are not known at the begin."""


JOB_DIGEST = "job:"
"""Prefix of a job's digest in the dedup window: no batch has it, so that they are never equal."""


class WalHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The owner of an object, and its position."""

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

    @property
    def version(self) -> int:
        """The format version: releases that know only the first ignore marks of non-writers."""
        if self.job is not None and self.job.live_wins:
            return VERSION
        if any([batch.merges for batch in self.batches]):
            return MERGE_VERSION
        return STREAM_VERSION if self.marks and not self.kind.of_writer else PLAIN_VERSION


HEADS = {version: HEAD.pack(MAGIC, version, 0) for version in range(PLAIN_VERSION, VERSION + 1)}
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
        # A header that cannot be read back would be acknowledged, and then fail every opening.
        HEADER_DECODER.decode(encoded)
        body = b"".join((HEADS[header.version], encode_frame(encoded), *map(encode_frame, records)))
        return body + FOOTER.pack(len(records), crc32c(body))

    @staticmethod
    def decode(data: bytes, name: str) -> "WalObject":
        """Return the object; CorruptionError for damage, UnsupportedFormatError for news."""
        count = _check_whole(data, name)
        cursor = ByteReader(memoryview(data)[: -FOOTER.size], name)
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
        raise corrupt(name, 0, f"expected magic {MAGIC!r}, found {magic!r}")
    if version > VERSION:
        raise unsupported(name, "WAL object", version, VERSION)
    if version == 0 or zero:
        raise corrupt(name, len(MAGIC), f"version {version}, reserved {zero}")
    return int(count)


KEY, KIND, END_KEY, EXPIRES, MERGED_AT = 0, 1, 2, 3, 4
FIRST_FIELD = 16
FIRST_TOUCHED = 0x8010
KEY_BYTES_MAX = 65_535
COLUMN = "HH3I"
ONE_PUT = struct.Struct(f"<2I {COLUMN} HH2I {COLUMN} 4x 2I")
ONE_DELETE = struct.Struct(f"<2I {COLUMN} HH2I 4x 2I")
"""Rows and columns; of each column its number, its buffers and their lengths; then padding, and
the first buffer, which has the key's two offsets."""
KIND_AND_OFFSETS = struct.Struct("<B7x2I")
KIND_ALONE = struct.Struct("<B7x")


def end_of_keys(schema: Schema) -> bytes:
    """Return a bound above every key: text never has the byte 255, bytes may be full of them."""
    return b"\xff" if schema.key.type == "string" else b"\xff" * (KEY_BYTES_MAX + 1)


class OpKind(IntEnum):
    """The kind of an operation."""

    PUT = 0
    DELETE = 1
    DELETE_RANGE = 2
    PATCH = 3
    MERGE = 4

    @property
    def is_whole(self) -> bool:
        """Whether a version of this kind hides all older ones."""
        return self < FIRST_PARTIAL


FIRST_PARTIAL = 3
"""Kinds of rows from this one on change some columns of the row below."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations, column by column. Arrays are equally long."""

    keys: pa.Array
    kinds: pa.Array
    end_keys: pa.Array | None = None
    expires_at_ms: pa.Array | None = None
    fields: Mapping[int, pa.Array] | None = None
    touched: Mapping[int, pa.Array] | None = None
    """Whether a patch sets a column; with merges, the operator of each row (`Operator`)."""
    merged_at_ms: pa.Array | None = None
    """The writer's clock, of merges only: a row that had expired by then counts as absent."""

    def __len__(self) -> int:
        return len(self.keys)

    def columns(self) -> "Ops":
        return self

    def key_list(self) -> list[bytes]:
        keys: list[bytes] = self.keys.to_pylist()
        return keys


class OneOp(msgspec.Struct, frozen=True):
    """A put of bytes (`value` is set), or a delete (it is None), without any Arrow."""

    key: bytes
    field: int
    """The number of the value's column."""
    value: bytes | None
    end_keys: None = None
    merged_at_ms: None = None

    def __len__(self) -> int:
        return 1

    def columns(self) -> Ops:
        """Return the same as columns."""
        keys, value = pa.array([self.key], pa.binary()), self.value
        if value is None:
            return Ops(keys, pa.array([OpKind.DELETE], pa.uint8()), fields={})
        fields = {self.field: pa.array([value], pa.binary())}
        return Ops(keys, pa.array([OpKind.PUT], pa.uint8()), fields=fields)

    def key_list(self) -> list[bytes]:
        return [self.key]

    def encode(self) -> bytes:
        """Return the record, the same bytes as of its columns: kept so by a property test."""
        key, value = self.key, self.value
        size = len(key)
        of_key, pad = (KEY, 3, ABSENT, 8, size), b"\0" * (-size % 8)
        if value is None:
            head = ONE_DELETE.pack(1, 2, *of_key, KIND, 2, ABSENT, 1, 0, size)
            return head + key + pad + KIND_ALONE.pack(1)
        length = len(value)
        of_value = (FIRST_FIELD + self.field, 3, ABSENT, 8, length)
        head = ONE_PUT.pack(1, 3, *of_key, KIND, 2, ABSENT, 1, *of_value, 0, size)
        kind_and_offsets = KIND_AND_OFFSETS.pack(0, 0, length)
        return b"".join((head, key, pad, kind_and_offsets, value, b"\0" * (-length % 8)))


AnyOps = Ops | OneOp


def encode_ops(ops: AnyOps) -> bytes:
    """Return the record of a batch."""
    if isinstance(ops, OneOp):
        return ops.encode()
    columns = {KEY: ops.keys, KIND: ops.kinds}
    if ops.end_keys is not None:
        columns[END_KEY] = ops.end_keys
    if ops.expires_at_ms is not None:
        columns[EXPIRES] = ops.expires_at_ms
    columns |= {FIRST_FIELD + number: array for number, array in (ops.fields or {}).items()}
    touched = dict(ops.touched or {})
    if ops.merged_at_ms is not None:
        columns[MERGED_AT] = ops.merged_at_ms
        touched = {number: as_codes(array) for number, array in touched.items()}
    columns |= {FIRST_TOUCHED + number: array for number, array in touched.items()}
    return encode_columns(len(ops), columns)


def decode_ops(data: Buffer, schema: Schema, name: str, offset: int = 0) -> Ops:
    """Return the operations of a record."""
    stored = ColumnSet(data, name, offset)
    types = _types(stored, schema)
    columns = {n: stored.array(n, typed) for n, typed in types if n in stored.buffers}
    if KEY not in columns or KIND not in columns:
        raise corrupt(name, offset, "a batch without keys or kinds")
    if columns[KEY].null_count or columns[KIND].null_count:
        raise corrupt(name, offset, "a batch with a null key or kind")
    highest = pc.max(columns[KIND]).as_py() if len(columns[KIND]) else 0
    if highest > max(OpKind):
        raise corrupt(name, offset, "a batch with an unknown kind of operation")
    if highest >= OpKind.DELETE_RANGE and not _ranges_end(columns[KIND], columns.get(END_KEY)):
        raise corrupt(name, offset, "a batch with a range that has no end")
    touched = _numbered(columns, FIRST_TOUCHED, 0x10000)
    if highest >= OpKind.MERGE or MERGED_AT in columns:
        check_merges(columns[KIND], columns.get(MERGED_AT), touched, name, offset)
    return Ops(
        columns[KEY],
        columns[KIND],
        columns.get(END_KEY),
        columns.get(EXPIRES),
        _numbered(columns, FIRST_FIELD, FIRST_TOUCHED),
        touched,
        columns.get(MERGED_AT),
    )


def _types(column_set: ColumnSet, schema: Schema) -> Iterator[tuple[int, pa.DataType]]:
    yield from ((KEY, pa.binary()), (KIND, pa.uint8()), (END_KEY, pa.binary()))
    yield from ((EXPIRES, pa.int64()), (MERGED_AT, pa.int64()))
    touched = pa.uint8() if MERGED_AT in column_set.buffers else pa.bool_()
    for number, data_type in schema.types().items():
        yield FIRST_FIELD + number, data_type
        yield FIRST_TOUCHED + number, touched


def check_merges(
    kinds: pa.Array,
    merged_at_ms: pa.Array | None,
    touched: Mapping[int, pa.Array],
    name: str,
    offset: int,
) -> None:
    """Check that merges have a time, and that all operators are known."""
    merges = pc.equal(kinds, pa.scalar(OpKind.MERGE, pa.uint8()))
    if merged_at_ms is None:
        if merges.true_count:
            raise corrupt(name, offset, "a merge without its operators")
        return
    if pc.any(pc.and_(merges, merged_at_ms.is_null())).as_py():
        raise corrupt(name, offset, "a merge without a time")
    if any((pc.max(codes).as_py() or 0) > max(Operator) for codes in touched.values()):
        raise corrupt(name, offset, "an unknown merge operator")


def decode_records(wal_object: WalObject, schema: Schema, name: str) -> Iterator[Ops]:
    """Yield the operations of a WAL object, record by record; `name` is the object's."""
    for record, start in zip(wal_object.records, wal_object.starts, strict=True):
        yield decode_ops(record, schema, name, start)


def concat_ops(given: Sequence[AnyOps], schema: Schema) -> AnyOps:
    """Return the operations of all parts in order; columns that a part lacks are null there."""
    if len(given) == 1:
        return given[0]
    parts = [part.columns() for part in given]
    types = schema.types()
    return Ops(
        pa.concat_arrays([part.keys for part in parts]),
        pa.concat_arrays([part.kinds for part in parts]),
        concat_or_none([(len(p), p.end_keys) for p in parts], pa.binary()),
        concat_or_none([(len(p), p.expires_at_ms) for p in parts], pa.int64()),
        concat_numbered([(len(p), p.fields or {}) for p in parts], types),
        concat_touched([(len(p), p.touched or {}) for p in parts]),
        concat_or_none([(len(p), p.merged_at_ms) for p in parts], pa.int64()),
    )


def concat_or_none(
    parts: Sequence[tuple[int, pa.Array | None]], data_type: pa.DataType
) -> pa.Array | None:
    """Concatenate arrays of these lengths, with nulls for missing ones; None if all are missing."""
    if all(array is None for _, array in parts):
        return None
    return pa.concat_arrays(
        [pa.nulls(length, data_type) if array is None else array for length, array in parts]
    )


def concat_numbered(
    parts: Sequence[tuple[int, Mapping[int, pa.Array]]], types: Mapping[int, pa.DataType]
) -> dict[int, pa.Array]:
    """Return the columns that any part has, in a row, null where a part lacks one."""
    present = sorted({number for _, columns in parts for number in columns})
    return {
        number: concat_or_none([(length, c.get(number)) for length, c in parts], types[number])
        for number in present
    }


def concat_touched(parts: Sequence[tuple[int, Mapping[int, pa.Array]]]) -> dict[int, pa.Array]:
    """Return flags of patches in a row; operators of all rows if any part has operators."""
    arrays = [array for _, columns in parts for array in columns.values()]
    data_type = pa.bool_()
    if any(array.type != data_type for array in arrays):
        data_type = pa.uint8()
        parts = [
            (length, {number: as_codes(array) for number, array in columns.items()})
            for length, columns in parts
        ]
    present = {number for _, columns in parts for number in columns}
    return concat_numbered(parts, dict.fromkeys(present, data_type))


def _ranges_end(kinds: pa.Array, end_keys: pa.Array | None) -> bool:
    ranges = pc.equal(kinds, pa.scalar(OpKind.DELETE_RANGE, pa.uint8()))
    if end_keys is None:
        return not pc.any(ranges).as_py()
    return not pc.any(pc.and_(ranges, end_keys.is_null())).as_py()


def _numbered(columns: Mapping[int, pa.Array], first: int, end: int) -> dict[int, pa.Array]:
    return {n - first: array for n, array in columns.items() if first <= n < end}
