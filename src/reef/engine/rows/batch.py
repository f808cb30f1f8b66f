"""Batches: operations that commit together.

A batch collects pieces in order: single puts and deletes, and whole tables of rows. It depends on
no namespace until `encode_batch` checks it against a schema, before anything is written.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import pyarrow as pa

from reef.engine.display import human_count
from reef.engine.rows.input import to_ops
from reef.engine.rows.merges import Operand, merge_ops, merge_rows_ops
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.schema import Schema
from reef.formats.wal_object import (
    KEY_BYTES_MAX,
    AnyOps,
    OneOp,
    OpKind,
    Ops,
    concat_ops,
    encode_ops,
)

IDEMPOTENCY_KEY_BYTES_MAX = 1024
"""Idempotency keys are stored in the dedup window, which is part of every manifest."""


def encode_key(key: Any, label: str = "a key") -> bytes:
    """Return a key as bytes; `str` is encoded as UTF-8. `label` names it in errors."""
    if type(key) is bytes and 1 <= len(key) <= KEY_BYTES_MAX:
        return key
    if isinstance(key, str):
        key = _utf8(key, label)
    if not isinstance(key, bytes):
        raise InvalidInputError(
            f"{label} must be bytes or str, got {type(key).__name__}", kind=ErrorKind.INVALID_KEY
        )
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"{label} must have 1 to {KEY_BYTES_MAX} bytes, got {len(key)}",
            kind=ErrorKind.INVALID_KEY,
        )
    return key


def encode_keys(keys: Any) -> list[bytes]:
    """Return keys as bytes; reject a single `str`, whose letters would become keys.

    Arrow arrays, and columns of polars or pandas, are converted without a scalar for each key.
    """
    if hasattr(keys, "__arrow_c_array__") or hasattr(keys, "__arrow_c_stream__"):
        keys = _arrow_keys(keys)
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise InvalidInputError(
            f"keys must be a list, got {keys!r:.40}", kind=ErrorKind.INVALID_KEY
        )
    return [encode_key(key, f"key {position}") for position, key in enumerate(keys)]


def _arrow_keys(keys: Any) -> list[Any]:
    """Return the keys of an Arrow array or stream of text or bytes."""
    try:
        array = keys if isinstance(keys, pa.ChunkedArray) else _arrow_array(keys)
        values: list[Any] = array.cast(pa.large_binary()).to_pylist()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"keys must be text or bytes, got a {type(keys).__name__}: {error}",
            kind=ErrorKind.INVALID_KEY,
        ) from error
    return values


def _arrow_array(keys: Any) -> pa.Array | pa.ChunkedArray:
    if hasattr(keys, "__arrow_c_array__"):
        return pa.array(keys)
    return pa.chunked_array(keys)


def check_live_wins(live_wins: bool, *, replaces: bool = False, partial: bool = False) -> None:
    """Raise InvalidInputError if a load with `live_wins` would do more than put or delete rows.

    A change stream shows its rows at the LSN of the ingest, after the live writes that win over
    them. A deleted range cannot be shown there, and neither can a patch or merge below others.
    """
    if not isinstance(live_wins, bool):
        raise InvalidInputError(
            f"live_wins={live_wins!r:.80} is neither True nor False", kind=ErrorKind.INVALID_OPTION
        )
    if live_wins and (replaces or partial):
        found = "replaces a range" if replaces else "has patches or merges"
        raise InvalidInputError(
            f"a load with live_wins has whole rows and deletes only; this one {found}",
            kind=ErrorKind.INVALID_OPTION,
            hint="Load it without live_wins, or as whole rows without replacing",
        )


def check_idempotency_key(key: Any) -> None:
    """Check the type and size of an idempotency key; None means no key."""
    if key is None:
        return
    if not isinstance(key, str):
        raise InvalidInputError(f"an idempotency key must be str, got {type(key).__name__}")
    length = len(_utf8(key, "an idempotency key"))
    if not 1 <= length <= IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidInputError(
            f"an idempotency key must have 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes, got {length}"
        )


def _utf8(key: str, label: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{label} cannot be encoded as UTF-8: {error}", kind=ErrorKind.INVALID_KEY
        ) from error


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it is committed: operations by column, and the bytes of its WAL record."""

    ops: AnyOps
    record: bytes
    schema_id: int
    """The schema that decodes the record."""
    relative_record: Callable[[], bytes] | None = None
    """With times: encodes the record with times relative to the write, equal for every retry."""

    @property
    def merges(self) -> bool:
        """Whether some operations are merges."""
        return self.ops.merged_at_ms is not None

    def digest(self) -> str:
        """Return a digest that distinguishes a retry from another batch with the same key."""
        record = self.record if self.relative_record is None else self.relative_record()
        return hashlib.blake2b(record, digest_size=12).hexdigest()


def encode_batch(batch: "Batch", schema: Schema, bytes_max: int, now_ms: int = 0) -> EncodedBatch:
    """Check a batch against a schema and encode it; reject an empty or oversized one."""
    pieces = batch._pieces
    if not pieces:
        raise InvalidInputError("a batch without operations")
    if len(pieces) == 1:
        parts = [pieces[0].to_ops(schema, now_ms)]
    else:
        parts = [piece.to_ops(schema, now_ms) for piece in pieces]
    result = encode_parts(parts, schema, bytes_max)
    if type(result.ops) is OneOp or not any(piece.has_times for piece in pieces):
        return result

    def relative() -> bytes:
        return encode_ops(concat_ops([piece.to_ops(schema, 0) for piece in pieces], schema))

    return EncodedBatch(result.ops, result.record, result.schema_id, relative)


def as_first_sent(
    batch: "Batch", encoded: EncodedBatch, digest: str, schemas: Sequence[Schema], bytes_max: int
) -> EncodedBatch:
    """Return a retry with the digest of its first commit, if an earlier schema gives that.

    A digest is of a record, whose columns have the types of the schema: after a column was widened,
    the same batch has another record.
    """
    if encoded.digest() == digest:
        return encoded
    for schema in schemas:
        with suppress(InvalidInputError):  # a column or a value that it cannot have had
            before = encode_batch(batch, schema, bytes_max)
            if before.digest() == digest:
                record = before.relative_record or partial(bytes, before.record)
                return replace(encoded, relative_record=record)
    return encoded


def encode_parts(parts: Sequence[AnyOps], schema: Schema, bytes_max: int) -> EncodedBatch:
    """Encode operations as one batch; reject an oversized one."""
    ops = concat_ops(parts, schema)
    record = encode_ops(ops)
    if len(record) > bytes_max:
        raise InvalidInputError(
            f"a batch of {len(record)} bytes exceeds batch_bytes_max={bytes_max}",
            hint="Split it, raise batch_bytes_max, or use a bulk load",
        )
    return EncodedBatch(ops, record, schema.id)


@dataclass(slots=True, repr=False)
class Batch:
    """Operations that commit together: `Batch().put("a", b"1").delete("b")`.

    Methods return the batch, so that calls can be chained. Operations apply in order.
    """

    _pieces: "list[_SinglePiece | _RowPiece | _MergePiece]" = field(default_factory=list)
    _ops: int = 0
    _has_patches: bool = False

    def __len__(self) -> int:
        """Return the number of calls that added operations; a table of rows counts once."""
        return self._ops

    def __repr__(self) -> str:
        return f"<Batch, {human_count(self._ops, 'operation')}>"

    def put(
        self, key: bytes | str, value: bytes | Mapping[str, Any], *, ttl_s: float | None = None
    ) -> Self:
        """Set a key to bytes, or in a namespace with columns to a row."""
        encoded = encode_key(key, f"row {self._ops}: a key")
        if type(value) is bytes and ttl_s is None:
            return self._add(OpKind.PUT, encoded, None, value)
        if isinstance(value, Mapping):
            return self._add_rows(
                _RowPiece(OpKind.PUT, _KeyedRows([(encoded, dict(value))]), ttl_s)
            )
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInputError(
                f"row {self._ops}: expected bytes, or a dict of columns, "
                f"got {type(value).__name__}",
                hint="A plain namespace stores bytes: text is encoded first, 'Ada'.encode()",
            )
        if ttl_s is not None:
            return self._add_rows(
                _RowPiece(OpKind.PUT, _KeyedRows([(encoded, {"value": bytes(value)})]), ttl_s)
            )
        return self._add(OpKind.PUT, encoded, None, bytes(value))

    def upsert(self, rows: Any, *, ttl_s: float | None = None) -> Self:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars."""
        return self._add_rows(_RowPiece(OpKind.PUT, _copy_rows(rows), ttl_s))

    def patch(self, rows: Any) -> Self:
        """Set only the named columns of rows that exist."""
        self._has_patches = True
        return self._add_rows(_RowPiece(OpKind.PATCH, _copy_rows(rows), None))

    def merge(
        self, key: bytes | str, columns: Mapping[str, Operand], *, ttl_s: float | None = None
    ) -> Self:
        """Apply operators to columns: `merge("k", {"count": reef.add(1)})`.

        A key without a row gets one, with the operands as values. The row expires after `ttl_s`,
        or never.
        """
        encoded = encode_key(key, f"row {self._ops}: a key")
        if not isinstance(columns, Mapping) or not columns:
            raise InvalidInputError(
                f"row {self._ops}: expected a dict of columns and operands, got {columns!r:.40}",
                hint='For instance merge("k", {"count": reef.add(1)})',
            )
        return self._add_rows(_MergePiece(_KeyedRows([(encoded, dict(columns))]), None, ttl_s))

    def merge_rows(
        self, rows: Any, operators: Mapping[str, str], *, ttl_s: float | None = None
    ) -> Self:
        """Merge rows in any form, with one operator for each column: `{"count": "add"}`.

        A null leaves the column of its row alone.
        """
        if not isinstance(operators, Mapping):
            raise InvalidInputError(
                f"row {self._ops}: expected a dict of columns and operators, got {operators!r:.40}",
                hint='For instance merge_rows(rows, {"count": "add"})',
            )
        return self._add_rows(_MergePiece(_copy_rows(rows), dict(operators), ttl_s))

    def delete(self, key: bytes | str) -> Self:
        """Delete the row of a key, if it has one."""
        return self._add(OpKind.DELETE, encode_key(key, f"row {self._ops}: a key"), None, None)

    def delete_range(self, start: bytes | str, end: bytes | str) -> Self:
        """Delete all keys of [start, end)."""
        first = encode_key(start, f"row {self._ops}: the start of a range")
        last = encode_key(end, f"row {self._ops}: the end of a range")
        if first >= last:
            raise InvalidInputError(
                f"row {self._ops}: the range from {start!r} to {end!r} is empty",
                kind=ErrorKind.INVALID_RANGE,
            )
        return self._add(OpKind.DELETE_RANGE, first, last, None)

    def _add(self, kind: OpKind, key: bytes, end: bytes | None, value: bytes | None) -> Self:
        last = self._pieces[-1] if self._pieces else None
        if not isinstance(last, _SinglePiece):
            last = _SinglePiece()
            self._pieces.append(last)
        last.ops.append((kind, key, end, value))
        self._ops += 1
        return self

    def _add_rows(self, rows: "_RowPiece | _MergePiece") -> Self:
        last = self._pieces[-1] if self._pieces else None
        if last is None or isinstance(last, _SinglePiece) or not last.join(rows):
            self._pieces.append(rows)
        self._ops += 1
        return self


@dataclass(slots=True)
class _SinglePiece:
    """Consecutive operations on single keys with bytes values."""

    ops: list[tuple[OpKind, bytes, bytes | None, bytes | None]] = field(default_factory=list)
    """Kind, key, end of the range, value."""
    has_times = False

    def to_ops(self, schema: Schema, now_ms: int) -> AnyOps:
        if len(self.ops) == 1 and (one := self._one(schema)) is not None:
            return one
        kinds, keys, ends, values = map(list, zip(*self.ops, strict=True))
        check_text(keys, schema)
        columns = {}
        if any(value is not None for value in values):
            _check_plain(schema)
            columns[schema.fields[0].number] = pa.array(values, pa.binary())
        has_ends = any(end is not None for end in ends)
        return Ops(
            pa.array(keys, pa.binary()),
            pa.array(kinds, pa.uint8()),
            pa.array(ends, pa.binary()) if has_ends else None,
            fields=columns,
        )

    def _one(self, schema: Schema) -> OneOp | None:
        """Return a single put or delete in a plain namespace; None for any other operation."""
        _, key, end, value = self.ops[0]
        if end is not None or not schema.is_plain:
            return None
        return OneOp(key, schema.fields[0].number, value)


@dataclass(slots=True)
class _RowPiece:
    """Rows as the caller passed them, or keys with their columns."""

    kind: OpKind
    data: Any
    ttl_s: float | None

    @property
    def has_times(self) -> bool:
        """Whether its operations depend on the clock."""
        return self.ttl_s is not None

    def join(self, other: "_RowPiece | _MergePiece") -> bool:
        """Append another piece of keyed rows if both are of the same kind."""
        if not isinstance(other, _RowPiece) or self.kind != other.kind:
            return False
        return self.ttl_s == other.ttl_s and _extend_rows(self.data, other.data)

    def to_ops(self, schema: Schema, now_ms: int) -> Ops:
        data = self.data
        if _is_keyed(data):
            data = [_with_key(row, key, schema.key.name) for key, row in data]
        return to_ops(data, schema, kind=self.kind, ttl_s=self.ttl_s, now_ms=now_ms)


@dataclass(slots=True)
class _MergePiece:
    """Merges: keys with operands, or rows with one operator for each column."""

    data: Any
    operators: Mapping[str, str] | None
    ttl_s: float | None
    has_times = True

    def join(self, other: "_RowPiece | _MergePiece") -> bool:
        """Append another piece of keys with operands."""
        if not isinstance(other, _MergePiece) or self.ttl_s != other.ttl_s:
            return False
        return _extend_rows(self.data, other.data)

    def to_ops(self, schema: Schema, now_ms: int) -> Ops:
        if self.operators is not None:
            return merge_rows_ops(
                self.data, self.operators, schema, ttl_s=self.ttl_s, now_ms=now_ms
            )
        rows = [_with_key(row, key, schema.key.name) for key, row in self.data]
        return merge_ops(rows, schema, ttl_s=self.ttl_s, now_ms=now_ms)


class _KeyedRows(list[tuple[bytes, dict[str, Any]]]):
    """Rows that were put one by one: keys with their columns."""


def _is_keyed(data: Any) -> bool:
    return isinstance(data, _KeyedRows)


def _extend_rows(data: Any, other: Any) -> bool:
    """Append keyed rows to others, which are not shared with the caller."""
    if _is_keyed(data) and _is_keyed(other):
        data.extend(other)
        return True
    return False


def _with_key(row: dict[str, Any], key: bytes, name: str) -> dict[str, Any]:
    if name in row and encode_key(row[name], f"column {name}") != key:
        raise InvalidInputError(
            f"column {name}: the row of key {key!r} has {row[name]!r}", kind=ErrorKind.INVALID_KEY
        )
    return {**row, name: key}


def _copy_rows(rows: Any) -> Any:
    """Return rows that the caller cannot change: lists are copied, streams are read."""
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if isinstance(rows, list):
        return [dict(row) if isinstance(row, dict) else row for row in rows]
    if isinstance(rows, dict):
        return {name: list(c) if isinstance(c, list) else c for name, c in rows.items()}
    return rows


def _check_plain(schema: Schema) -> None:
    if not schema.is_plain:
        names = ", ".join(column.name for column in schema.fields)
        raise InvalidInputError(
            f"expected a row, got bytes: this namespace has the columns {names}",
            hint='put(key, {"column": value}) or upsert(rows)',
        )


def check_text(keys: list[bytes], schema: Schema) -> None:
    """Reject keys that are not UTF-8 where the key column is a string."""
    if schema.key.type != "string":
        return
    for place, key in enumerate(keys):
        try:
            key.decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"row {place}, column {schema.key.name}: the key {key!r} is not UTF-8",
                kind=ErrorKind.INVALID_KEY,
            ) from error
