"""A batch's operations as a column set: what a WAL record holds.

Columns by number:

    0  key            bytes, never null
    1  kind           0 put, 1 delete, 2 delete_range, 3 patch
    2  end_key        of range deletes; absent where there are none
    3  expires_at_ms  null: never; absent where no row expires
    16 + n            the schema's column n; absent where no row has it
    32784 + n         whether a patch touches column n; absent where there is no patch

A row's sequence is its place in the batch, counted over the whole WAL object.

A single put or delete of bytes is so common, and so small beside what Arrow needs to begin, that
it has a shape and an encoder of its own: `OneOp`. Its bytes are the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import Buffer, corrupt
from reef.formats.columns import ABSENT, decode_columns, encode_columns
from reef.formats.schema import Schema
from reef.formats.wal_object import WalObject

__all__ = [
    "AnyOps",
    "OneOp",
    "OpKind",
    "Ops",
    "concat_ops",
    "decode_ops",
    "decode_records",
    "encode_ops",
]

KEY, KIND, END_KEY, EXPIRES = 0, 1, 2, 3
FIRST_FIELD = 16
FIRST_TOUCHED = 0x8010
KEY_BYTES_MAX = 65_535
COLUMN = "HH3I"
ONE_PUT = Struct(f"<2I {COLUMN} HH2I {COLUMN} 4x 2I")
ONE_DELETE = Struct(f"<2I {COLUMN} HH2I 4x 2I")
"""Rows and columns; of each column its number, its buffers and their lengths; then padding, and
the first buffer, which has the key's two offsets."""
KIND_AND_OFFSETS = Struct("<B7x2I")
KIND_ALONE = Struct("<B7x")


class OpKind(IntEnum):
    """What an operation does."""

    PUT = 0
    DELETE = 1
    DELETE_RANGE = 2
    PATCH = 3


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations, column by column. Arrays are equally long."""

    keys: pa.Array
    kinds: pa.Array
    end_keys: pa.Array | None = None
    expires_at_ms: pa.Array | None = None
    fields: Mapping[int, pa.Array] | None = None
    touched: Mapping[int, pa.Array] | None = None

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
    columns |= {FIRST_TOUCHED + number: array for number, array in (ops.touched or {}).items()}
    return encode_columns(len(ops), columns)


def decode_ops(data: Buffer, schema: Schema, name: str, offset: int = 0) -> Ops:
    """Return the operations of a record."""
    types = {KEY: pa.binary(), KIND: pa.uint8(), END_KEY: pa.binary(), EXPIRES: pa.int64()}
    for number, data_type in schema.types().items():
        types[FIRST_FIELD + number] = data_type
        types[FIRST_TOUCHED + number] = pa.bool_()
    _, columns = decode_columns(data, types, name, offset)
    if KEY not in columns or KIND not in columns:
        raise corrupt(name, offset, "a batch without keys or kinds")
    if columns[KEY].null_count or columns[KIND].null_count:
        raise corrupt(name, offset, "a batch with a null key or kind")
    highest = pc.max(columns[KIND]).as_py() if len(columns[KIND]) else 0
    if highest > max(OpKind):
        raise corrupt(name, offset, "a batch with an unknown kind of operation")
    if highest >= OpKind.DELETE_RANGE and not _ranges_end(columns[KIND], columns.get(END_KEY)):
        raise corrupt(name, offset, "a batch with a range that has no end")
    return Ops(
        columns[KEY],
        columns[KIND],
        columns.get(END_KEY),
        columns.get(EXPIRES),
        _numbered(columns, FIRST_FIELD, FIRST_TOUCHED),
        _numbered(columns, FIRST_TOUCHED, 0x10000),
    )


def decode_records(found: WalObject, schema: Schema, name: str) -> Iterator[Ops]:
    """Yield the operations of a WAL object, record by record; `name` is the object's."""
    for record, start in zip(found.records, found.starts, strict=True):
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
        concat_numbered(
            [(len(p), p.touched or {}) for p in parts], dict.fromkeys(types, pa.bool_())
        ),
    )


def concat_or_none(
    parts: Sequence[tuple[int, pa.Array | None]], data_type: pa.DataType
) -> pa.Array | None:
    """Return arrays of these lengths in a row, null where there is none; None if all lack it."""
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


def _ranges_end(kinds: pa.Array, end_keys: pa.Array | None) -> bool:
    ranges = pc.equal(kinds, pa.scalar(OpKind.DELETE_RANGE, pa.uint8()))
    if end_keys is None:
        return not pc.any(ranges).as_py()
    return not pc.any(pc.and_(ranges, end_keys.is_null())).as_py()


def _numbered(columns: Mapping[int, pa.Array], first: int, end: int) -> dict[int, pa.Array]:
    return {n - first: array for n, array in columns.items() if first <= n < end}
