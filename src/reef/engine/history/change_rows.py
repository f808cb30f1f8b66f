"""Change rows: what an object of the log did, row by row or as Arrow.

    _op          put, patch, delete or delete_range
    _key         the key's bytes; of a range, its first
    _end_key     of a range, where it ends; itself not included
    _lsn, _seq   where in the log; sequences count the rows of one LSN from 0
    _touched     of a patch, the names of the columns that it sets
    _expires_at  when a row expires, if it does
    …            the columns, the key's first; null in a range and, but for the key, in a delete

Keys are bytes here, whatever the key column's type: the bounds of a range need not be text.
The columns are those of the schema that the caller reads with, so that all of a stream have
the same. Rows of an ingest come by segment and key, at the ingest's LSN.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import range_tombstones_of
from reef.engine.rows.out import to_record_batch
from reef.engine.tail import ingested_segments
from reef.formats.batch import OpKind, Ops, decode_records
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import WalKind, WalObject

__all__ = ["Change", "change_batches", "change_schema", "changes_of"]

OP_NAMES = ["put", "delete", "delete_range", "patch"]
"""By number, as `OpKind` has them."""
GROUPS_AT_ONCE = 16
ROWS_AT_ONCE = 1024
"""Rows that become Python values at a time."""
EXPIRES = pa.timestamp("ms", "UTC")
UNHOLDABLE = (ValueError, OverflowError, LookupError)
"""What Arrow raises for a value that Python has no place for."""


@dataclass(frozen=True, slots=True)
class Change:
    """One operation that was committed.

    A value that Python cannot hold, such as a date in the year 20000, is its Arrow scalar here,
    whose `value` is the number: a stream must not end at it for ever.
    """

    op: str
    """`put`, `patch`, `delete` or `delete_range`."""
    key: Any
    """As the key column has it; of a range, its first, which is bytes where it is no text."""
    lsn: int
    seq: int
    row: Any = None
    """Of a put: bytes in a plain namespace, elsewhere a dict of all columns. Of a patch, a dict
    of the columns that it sets."""
    end_key: Any = None
    """Of a range: where it ends, itself not included."""
    expires_at: datetime | pa.Scalar | None = None

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))
        return f"Change({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it flat: Reef's own names with a leading underscore, as no column has."""
        row = self.row if isinstance(self.row, dict) else {}
        plain = {"value": self.row} if isinstance(self.row, bytes) else {}
        own = {name: getattr(self, name) for name in ("op", "key", "end_key", "lsn", "seq")}
        return {f"_{name}": value for name, value in own.items()} | plain | row


def change_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of change rows."""
    own = [
        ("_op", pa.string()),
        ("_key", pa.binary()),
        ("_end_key", pa.binary()),
        ("_lsn", pa.int64()),
        ("_seq", pa.int64()),
        ("_touched", pa.list_(pa.string())),
        ("_expires_at", EXPIRES),
    ]
    return pa.schema([*map(pa.field, *zip(*own, strict=True)), *schema.arrow()])


# --- objects of the log -------------------------------------------------------------


def change_batches(
    found: WalObject, schemas: Mapping[int, Schema], schema: Schema, segments: SegmentStore
) -> Iterator[pa.RecordBatch]:
    """Yield what an object that counts did, in order."""
    header = found.header
    if header.kind is WalKind.INGEST:
        yield from _of_ingest(ingested_segments(header, schema), header.lsn, schema, segments)
        return
    seq, written = 0, schemas[header.schema_id]
    name = segments.namespace.wal_object(header.lsn)
    for ops in decode_records(found, written, name):
        yield _to_batch(_rows(ops, header.lsn, seq), ops.end_keys, schema)
        seq += len(ops)


def _rows(ops: Ops, lsn: int, seq: int) -> Versions:
    count = len(ops)
    return Versions(
        ops.keys,
        np.full(count, lsn, np.int64),
        np.arange(seq, seq + count, dtype=np.uint32),
        ops.kinds.to_numpy(zero_copy_only=False).astype(np.uint8),
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
    )


def _of_ingest(
    entries: Sequence[SegmentEntry], lsn: int, schema: Schema, segments: SegmentStore
) -> Iterator[pa.RecordBatch]:
    """Ranges come first: what an ingest deletes is what was there before it."""
    seq = 0
    for entry in entries:
        tombstones = range_tombstones_of(segments, entry)
        if tombstones:
            yield _of_ranges(tombstones, lsn, seq, schema)
            seq += len(tombstones)
    for entry in entries:
        numbers = range(len(segments.tail(entry).index))
        for at in range(0, len(numbers), GROUPS_AT_ONCE):
            for group in segments.groups(entry, numbers[at : at + GROUPS_AT_ONCE]):
                rows = _oldest_first(group.rows)
                yield _to_batch(_numbered(rows, lsn, seq), None, schema)
                seq += len(rows)


def _of_ranges(
    tombstones: Sequence[RangeTombstone], lsn: int, seq: int, schema: Schema
) -> pa.RecordBatch:
    ops = Ops(
        pa.array([tombstone.start for tombstone in tombstones], pa.binary()),
        pa.array([OpKind.DELETE_RANGE] * len(tombstones), pa.uint8()),
        pa.array([tombstone.end for tombstone in tombstones], pa.binary()),
    )
    return _to_batch(_rows(ops, lsn, seq), ops.end_keys, schema)


def _numbered(rows: Versions, lsn: int, seq: int) -> Versions:
    return Versions(
        rows.keys,
        np.full(len(rows), lsn, np.int64),
        np.arange(seq, seq + len(rows), dtype=np.uint32),
        rows.kinds,
        rows.fields,
        rows.expires_at_ms,
        rows.touched,
    )


def _oldest_first(rows: Versions) -> Versions:
    """Segments have the newest version of a key first; changes come as they were made."""
    keys = rows.keys
    same = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    if not same.any():
        return rows
    key_numbers = np.concatenate([[0], np.cumsum(~same)])
    return rows.take(np.lexsort((rows.seqs, rows.lsns, key_numbers)).astype(np.int64))


# --- Arrow --------------------------------------------------------------------------


def _to_batch(rows: Versions, end_keys: pa.Array | None, schema: Schema) -> pa.RecordBatch:
    rows = rows.under(schema)
    is_range = pa.array(rows.kinds == OpKind.DELETE_RANGE)
    columns = _columns(rows, is_range, schema)
    expires = rows.expires_at_ms
    own = [
        pa.array(OP_NAMES, pa.string()).take(pa.array(rows.kinds)),
        rows.keys,
        pa.nulls(len(rows), pa.binary()) if end_keys is None else end_keys,
        pa.array(rows.lsns),
        pa.array(rows.seqs.astype(np.int64)),
        _touched(rows, schema),
        pa.nulls(len(rows), EXPIRES) if expires is None else expires.cast(EXPIRES),
    ]
    return pa.RecordBatch.from_arrays([*own, *columns], schema=change_schema(schema))


def _columns(rows: Versions, is_range: pa.Array, schema: Schema) -> list[pa.Array]:
    """Return the columns; a range has no key of its own, and its bounds need not be text."""
    if not is_range.true_count:
        return list(to_record_batch(rows, schema).columns)
    places = np.flatnonzero(rows.kinds != OpKind.DELETE_RANGE)
    batch = to_record_batch(rows.take(places.astype(np.int64)), schema)
    back = np.full(len(rows), -1, np.int64)
    back[places] = np.arange(len(places))
    chosen = pa.array(back, mask=back < 0)
    return [column.take(chosen) for column in batch.columns]


def _touched(rows: Versions, schema: Schema) -> pa.Array:
    patches = np.flatnonzero(rows.kinds == OpKind.PATCH).tolist()
    if not patches:
        return pa.nulls(len(rows), pa.list_(pa.string()))
    known = [(f.name, rows.touched[f.number]) for f in schema.fields if f.number in rows.touched]
    flags = [(name, array.to_pylist()) for name, array in known]
    names: list[list[str] | None] = [None] * len(rows)
    for place in patches:
        names[place] = [name for name, touched in flags if touched[place]]
    return pa.array(names, pa.list_(pa.string()))


# --- Python -------------------------------------------------------------------------


def changes_of(batch: pa.RecordBatch, schema: Schema) -> Iterator[Change]:
    """Yield the rows of a batch of changes."""
    for at in range(0, len(batch), ROWS_AT_ONCE):
        for values in _values(batch.slice(at, ROWS_AT_ONCE)):
            yield _change(values, schema)


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except UNHOLDABLE:
        columns = {name: _each(batch.column(name)) for name in batch.schema.names}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _each(column: pa.Array) -> list[Any]:
    """Return the values of a column; Arrow scalars in place of those that Python cannot hold."""
    try:
        return list(column.to_pylist())
    except UNHOLDABLE:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UNHOLDABLE:
        return scalar


def _shown(value: Any) -> str:
    """Return how a value is printed; Arrow's own words for a scalar may need Python's value."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_shown(of)}' for name, of in value.items())}}}"
    if isinstance(value, pa.Scalar):
        return f"<{value.type}: {getattr(value, 'value', '…')}>"
    return repr(value)


def _change(values: dict[str, Any], schema: Schema) -> Change:
    op, key, end_key = values["_op"], values["_key"], values["_end_key"]
    if schema.key.type != "binary":
        key, end_key = (None if k is None else _text(k) for k in (key, end_key))
    columns = [schema.key, *schema.fields]
    row: Any = None
    if op == "put" and schema.is_plain:
        row = values[schema.fields[0].name]
    elif op == "put":
        row = {column.name: values[column.name] for column in columns}
    elif op == "patch":
        row = {name: values[name] for name in values["_touched"]}
    return Change(op, key, values["_lsn"], values["_seq"], row, end_key, values["_expires_at"])


def _text(key: bytes) -> str | bytes:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key
