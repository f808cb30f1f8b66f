"""Change rows: the operations of a WAL object, as Python values or Arrow.

    _op          put, patch, merge, delete or delete_range
    _key         the key's bytes; the start of a deleted range
    _end_key     the end of a deleted range, exclusive; null for one that has none
    _lsn, _seq   the LSN, and the number of the row within it, from 0
    _touched     the names of the columns that a patch sets or a merge changes
    _operators   of a merge: the operator of each touched column; the columns have the operands
    _expires_at  when the row expires, if it does
    …            the columns, key column first; null for a range; for a delete, only the key is set

`_key` is bytes whatever the key column's type, since the bounds of a range need not be text. The
columns are those of the caller's schema, so that a whole stream has one schema. Rows of an ingest
are ordered by segment and key, and have the LSN of the ingest. Of a load with `live_wins` those are
left out that were beaten before they became visible; the others keep their numbers.

A load with `live_wins` begins at LSN b and commits at n. Its rows sort at b, below everything
written in (b, n), and become visible at n. A change stream that has shown the writes in (b, n) must
show at n exactly the difference that the load makes:

    a put, delete or range delete in (b, n)   the row of the load was beaten: nothing
    patches and merges in (b, n)              the row of the load with all of them applied
    none of them                              the row of the load

All versions above b are in the state just before n: from b until the ingest is folded, no fold or
compaction drops or resolves one (H50, H60). So that state, a generation with a floor of at most n
and the log from there, is all that is read, and of its segments only those with rows above b. The
load and the versions are merged piece by piece, in bounded memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.history.as_of import History, PointInTime
from reef.engine.log.tail import ingested_segments
from reef.engine.read.memtable import Entry
from reef.engine.read.merge import RangeTombstones, drop_covered, newest_versions, sorted_places
from reef.engine.read.scan import Cursor, LateCursor, RowsCursor, SegmentCursor, merged
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View, range_tombstones_of, resolve
from reef.engine.rows.convert import to_record_batch
from reef.engine.rows.merges import Operand
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import OPERATORS, Operator, Schema, codes_of
from reef.formats.versions import RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import (
    OpKind,
    Ops,
    WalHeader,
    WalKind,
    WalObject,
    decode_records,
    end_of_keys,
)
from reef.types import KeyRange

OP_NAMES = ["put", "delete", "delete_range", "patch", "merge"]
"""Indexed by `OpKind`."""
PAGES_AT_ONCE = 256
ROWS_AT_ONCE = 1024
"""Rows converted to Python values at a time."""
EXPIRES = pa.timestamp("ms", "UTC")
LIST_OF_NAMES = pa.list_(pa.string())
UNREPRESENTABLE = (ValueError, OverflowError, LookupError)
"""Raised by Arrow for a value that no Python object can represent."""


def state_before(history: History, start: Manifest, head: Manifest, lsn: int) -> View:
    """Return the state just before an LSN, from a generation whose floor is at or below it.

    The log may have been written with newer schemas than the generation has.
    """
    known = msgspec.structs.replace(start, schemas=head.schemas)
    return history.replay(PointInTime(known, lsn - 1), head).view()


class LiveWrites:
    """The versions above the begin of a load, as of just before its ingest."""

    def __init__(self, view: View, begin_lsn: int, schema: Schema) -> None:
        self._begin_lsn, self._schema = begin_lsn, schema
        self._segments = view.segments
        manifest, self._tables = view.cut()
        everything = (*self._tables[0].ingested, *manifest.segments)
        self._entries = [entry for entry in everything if entry.lsn_max > begin_lsn]

    def visible(self, rows: Versions) -> Versions:
        """Return the rows of a load that become visible, each with its own sequence.

        The rows are sorted, and have distinct keys and sequences.
        """
        if not len(rows):
            return rows
        span = KeyRange(rows.keys[0].as_py(), rows.keys[len(rows) - 1].as_py() + b"\0")
        entries = [e for e in self._entries if span.touches(e.min_key, e.max_key)]
        deletes = [table.range_tombstones for table in self._tables]
        deletes += [self._segments.deletes(entry) for entry in entries]
        loaded = rows.under(self._schema).with_lsn(self._begin_lsn)
        cursors = [RowsCursor(iter([loaded])), *self._newer(entries, span)]
        parts = [self._winning(piece, deletes) for piece in merged(cursors, reverse=False)]
        return concat_versions([Versions.empty(self._schema), *parts], self._schema)

    def _newer(self, entries: Sequence[SegmentEntry], span: KeyRange) -> Iterator[Cursor]:
        """Yield the sources that may have versions above the begin in a key range."""
        for table in self._tables:
            for pieces in table.pieces(span, False):
                yield RowsCursor(piece.under(self._schema) for piece in pieces)
        yield from (self._late_cursor(entry, span) for entry in entries)

    def _late_cursor(self, entry: SegmentEntry, span: KeyRange) -> LateCursor:
        return LateCursor(
            max(entry.min_key, span.start),
            lambda: SegmentCursor(self._segments, entry, span, reverse=False, schema=self._schema),
        )

    def _winning(self, piece: Sequence[Versions], deletes: Sequence[RangeTombstones]) -> Versions:
        """Return the rows of the load that no whole version hides, with those above applied."""
        rows = concat_versions([Versions.empty(self._schema), *piece], self._schema)
        loaded = rows.take(np.flatnonzero(rows.lsns == self._begin_lsn))
        newer = rows.take(np.flatnonzero(rows.lsns > self._begin_lsn))
        partial = newer.are_partial()
        loaded = drop_covered(loaded, deletes)
        hidden = _are_in(loaded.keys, newer.keys.filter(pa.array(~partial)))
        loaded = loaded.take(np.flatnonzero(~hidden))
        above = newer.take(np.flatnonzero(partial & _are_in(newer.keys, loaded.keys)))
        if not len(above):
            return loaded
        above = above.take(sorted_places(above))
        resolved = newest_versions([loaded, above], self._schema, deletes)
        return replace(resolved, seqs=loaded.seqs)


def _are_in(keys: pa.Array, known: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(keys, value_set=known).to_numpy(zero_copy_only=False)
    return found


@dataclass(frozen=True, slots=True)
class Change:
    """One committed operation.

    A value that Python cannot represent, such as a date in the year 20000, is given as its Arrow
    scalar, whose `value` is the number: a stream must be able to pass it.
    """

    op: str
    """`put`, `patch`, `merge`, `delete` or `delete_range`."""
    key: Any
    """In the key column's type. For a range its start, as bytes if that is not UTF-8."""
    lsn: int
    seq: int
    row: Any = None
    """For a put: bytes in a plain namespace, else a dict of all columns. For a patch: a dict of
    the columns that it sets; for a merge: of operands, as `Writer.merge` takes them."""
    end_key: Any = None
    """The end of a deleted range, exclusive; like `key`. None if the range has no end, as that of a
    load with `replace=True`, and for other operations."""
    expires_at: datetime | pa.Scalar | None = None

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={_format_value(getattr(self, field.name))}" for field in fields(self)
        )
        return f"Change({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dict; Reef's own fields have a leading underscore, as no column has."""
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
        ("_operators", pa.list_(pa.string())),
        ("_expires_at", EXPIRES),
    ]
    return pa.schema([*map(pa.field, *zip(*own, strict=True)), *schema.arrow()])


# --- objects of the log -------------------------------------------------------------


def change_batches(
    found: WalObject,
    schemas: Mapping[int, Schema],
    schema: Schema,
    segments: SegmentStore,
    state: Callable[[int], View],
) -> Iterator[pa.RecordBatch]:
    """Yield the change rows of an applied object, in order.

    `state` returns the state just before an LSN; it is called for loads with `live_wins`.
    """
    header = found.header
    if header.kind is WalKind.INGEST:
        live = live_writes(header, schema, state)
        yield from _of_ingest(header, schema, segments, live)
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
        merged_at_ms=ops.merged_at_ms,
    )


def live_writes(
    header: WalHeader, schema: Schema, state: Callable[[int], View]
) -> LiveWrites | None:
    """Return the versions that win over the rows of an ingest; None if none can."""
    if header.job is None or not header.job.live_wins:
        return None
    return LiveWrites(state(header.lsn), header.job.begin_lsn, schema)


def _of_ingest(
    header: WalHeader, schema: Schema, segments: SegmentStore, live: LiveWrites | None
) -> Iterator[pa.RecordBatch]:
    """Yield ranges first: an ingest deletes rows that were written before it."""
    entries, lsn = ingested_segments(header, schema, segments.namespace), header.lsn
    seq = 0
    for entry in entries:
        tombstones = range_tombstones_of(segments, entry)
        if tombstones:
            yield range_changes(tombstones, lsn, seq, schema)
            seq += len(tombstones)
    for entry in entries:
        rows = segments.tail(entry).index.pages.rows
        yield from segment_changes(
            entry, range(len(rows)), lsn, seq, schema=schema, segments=segments, live=live
        )
        seq += int(np.sum(rows))


def segment_changes(
    entry: SegmentEntry,
    pages: Sequence[int],
    lsn: int,
    seq: int,
    *,
    schema: Schema,
    segments: SegmentStore,
    live: LiveWrites | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some pages of an ingest's segment, numbered from `seq` on.

    Rows that lose against `live` are left out.
    """
    for at in range(0, len(pages), PAGES_AT_ONCE):
        rows = _oldest_first(segments.rows(entry, pages[at : at + PAGES_AT_ONCE]))
        changed = _number_rows(rows, lsn, seq)
        if live is not None:
            changed = live.visible(changed).with_lsn(lsn)
        yield _to_batch(changed, None, schema)
        seq += len(rows)


def range_changes(
    tombstones: Sequence[RangeTombstone], lsn: int, seq: int, schema: Schema
) -> pa.RecordBatch:
    """Return the ranges that an ingest deletes, numbered from `seq` on."""
    ops = Ops(
        pa.array([tombstone.start for tombstone in tombstones], pa.binary()),
        pa.array([OpKind.DELETE_RANGE] * len(tombstones), pa.uint8()),
        pa.array([tombstone.end for tombstone in tombstones], pa.binary()),
    )
    return _to_batch(_rows(ops, lsn, seq), ops.end_keys, schema)


def _number_rows(rows: Versions, lsn: int, seq: int) -> Versions:
    return Versions(
        rows.keys,
        np.full(len(rows), lsn, np.int64),
        np.arange(seq, seq + len(rows), dtype=np.uint32),
        rows.kinds,
        rows.fields,
        rows.expires_at_ms,
        rows.touched,
        merged_at_ms=rows.merged_at_ms,
    )


def _oldest_first(rows: Versions) -> Versions:
    """Order the versions of a key oldest first; segments store the newest first."""
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
        _ends(end_keys, len(rows), schema),
        pa.array(rows.lsns),
        pa.array(rows.seqs.astype(np.int64)),
        *_changed_columns(rows, schema),
        pa.nulls(len(rows), EXPIRES) if expires is None else expires.cast(EXPIRES),
    ]
    return pa.RecordBatch.from_arrays([*own, *columns], schema=change_schema(schema))


def _ends(end_keys: pa.Array | None, count: int, schema: Schema) -> pa.Array:
    """Return the ends of ranges, null where it is behind every key: that bound is no key itself."""
    if end_keys is None or end_keys.null_count == count:
        return pa.nulls(count, pa.binary())
    has_none = pc.greater_equal(end_keys, pa.scalar(end_of_keys(schema), pa.binary()))
    return pc.if_else(has_none, pa.scalar(None, pa.binary()), end_keys)


def _columns(rows: Versions, is_range: pa.Array, schema: Schema) -> list[pa.Array]:
    """Return the columns, null for ranges, whose bounds need not be valid keys."""
    if not is_range.true_count:
        return list(to_record_batch(rows, schema).columns)
    places = np.flatnonzero(rows.kinds != OpKind.DELETE_RANGE)
    batch = to_record_batch(rows.take(places.astype(np.int64)), schema)
    back = np.full(len(rows), -1, np.int64)
    back[places] = np.arange(len(places))
    chosen = pa.array(back, mask=back < 0)
    return [column.take(chosen) for column in batch.columns]


def _changed_columns(rows: Versions, schema: Schema) -> tuple[pa.Array, pa.Array]:
    """Return the columns that patches and merges change, and the operators of merges."""
    partial = np.flatnonzero(rows.are_partial()).tolist()
    if not partial:
        return pa.nulls(len(rows), LIST_OF_NAMES), pa.nulls(len(rows), LIST_OF_NAMES)
    known = [(f.name, rows.touched[f.number]) for f in schema.fields if f.number in rows.touched]
    codes = [(name, codes_of(array, len(rows)).tolist()) for name, array in known]
    names: list[list[str] | None] = [None] * len(rows)
    operators: list[list[str] | None] = [None] * len(rows)
    for place in partial:
        changed = [(name, of_column[place]) for name, of_column in codes if of_column[place]]
        names[place] = [name for name, _ in changed]
        if rows.kinds[place] == OpKind.MERGE:
            operators[place] = [Operator(code).name.lower() for _, code in changed]
    return pa.array(names, LIST_OF_NAMES), pa.array(operators, LIST_OF_NAMES)


# --- Python -------------------------------------------------------------------------


def changes_of(batch: pa.RecordBatch, schema: Schema) -> Iterator[Change]:
    """Yield a batch of change rows as `Change` objects."""
    for at in range(0, len(batch), ROWS_AT_ONCE):
        for values in _values(batch.slice(at, ROWS_AT_ONCE)):
            yield _change(values, schema)


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist(maps_as_pydicts="strict"))
    except UNREPRESENTABLE:
        columns = {name: _each(batch.column(name)) for name in batch.schema.names}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _each(column: pa.Array) -> list[Any]:
    """Return the values of a column; Arrow scalars where Python cannot represent the value."""
    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except UNREPRESENTABLE:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except UNREPRESENTABLE:
        return scalar


def _format_value(value: Any) -> str:
    """Format a value; Arrow's repr of a scalar fails if Python cannot represent the value."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_format_value(of)}' for name, of in value.items())}}}"
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
    elif op == "merge":
        operators = zip(values["_touched"], values["_operators"], strict=True)
        row = {name: Operand(OPERATORS[operator], values[name]) for name, operator in operators}
    return Change(op, key, values["_lsn"], values["_seq"], row, end_key, values["_expires_at"])


def merged_row(
    row: Mapping[str, Any] | None, change: Mapping[str, Any], schema: Schema
) -> dict[str, Any]:
    """Return the row that a merge produced; None if it had no effect."""
    numbers = {field.name: field.number for field in schema.fields}
    versions = []
    if row is not None:
        versions.append(Entry(1, 0, OpKind.PUT, {n: row[name] for name, n in numbers.items()}))
    named = zip(change["_touched"], change["_operators"], strict=True)
    changes = {numbers[name]: int(OPERATORS[operator]) for name, operator in named}
    values = {numbers[name]: change[name] for name in change["_touched"]}
    versions.append(Entry(2, 0, OpKind.MERGE, values, changes, merged_at_ms=0))
    merged = resolve(versions, schema)
    assert merged is not None
    key = {schema.key.name: change[schema.key.name]}
    return key | {name: merged.values.get(number) for name, number in numbers.items()}


def _text(key: bytes) -> str | bytes:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key
