"""Batches: operations that commit together, checked before anything is written.

A batch is gathered piece by piece, in order: single puts and deletes, and whole tables of rows.
What it means in columns is known only when it meets a namespace's schema, in `encode`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from reef.engine.display import human_count
from reef.engine.rows import to_ops
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import (
    KEY_BYTES_MAX,
    AnyOps,
    OneOp,
    OpKind,
    Ops,
    concat_ops,
    encode_ops,
)
from reef.formats.schema import Schema

__all__ = [
    "Batch",
    "EncodedBatch",
    "check_idempotency_key",
    "check_text",
    "encode_key",
    "encode_keys",
    "encoded",
]

IDEMPOTENCY_KEY_BYTES_MAX = 1024
"""Keys are kept in the window, which is part of every manifest."""


def encode_key(key: Any, what: str = "a key") -> bytes:
    """Return a key as bytes; text is UTF-8. InvalidInputError names what is wrong."""
    if isinstance(key, str):
        key = _utf8(key, what)
    if not isinstance(key, bytes):
        raise InvalidInputError(
            f"{what} is bytes or text, got {type(key).__name__}", kind=Kind.INVALID_KEY
        )
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"{what} has 1 to {KEY_BYTES_MAX} bytes, got {len(key)}", kind=Kind.INVALID_KEY
        )
    return key


def encode_keys(keys: Any) -> list[bytes]:
    """Return several as bytes; a text alone would be the keys of its letters, and is refused."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise InvalidInputError(f"keys are a list, got {keys!r:.40}", kind=Kind.INVALID_KEY)
    return [encode_key(key, f"key {place}") for place, key in enumerate(keys)]


def check_idempotency_key(key: Any) -> None:
    """Refuse what could not be read back from the log by everyone; None is no key."""
    if key is None:
        return
    if not isinstance(key, str):
        raise InvalidInputError(f"an idempotency key is text, got {type(key).__name__}")
    length = len(_utf8(key, "an idempotency key"))
    if not 1 <= length <= IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidInputError(
            f"an idempotency key has 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes, got {length}"
        )


def _utf8(key: str, what: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what} is not text: {error}", kind=Kind.INVALID_KEY) from error


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch in the shape in which it is committed."""

    ops: AnyOps
    record: bytes
    schema_id: int
    """The schema by which the record is read."""
    said: bytes | None = None
    """The record with times to live as they were given, if there are any: the same each time."""

    def digest(self) -> str:
        """Tell a repeated batch from another one with the same idempotency key."""
        return hashlib.blake2b(self.said or self.record, digest_size=12).hexdigest()


def encoded(parts: Sequence[AnyOps], schema: Schema, bytes_max: int) -> EncodedBatch:
    """Return operations as one batch; refuses one that is too large."""
    ops = concat_ops(parts, schema)
    record = encode_ops(ops)
    if len(record) > bytes_max:
        raise InvalidInputError(
            f"a batch of {len(record)} bytes, the largest has {bytes_max}",
            hint="Split it, raise batch_bytes_max, or load it with a bulk job",
        )
    return EncodedBatch(ops, record, schema.id)


@dataclass(slots=True, repr=False)
class Batch:
    """Puts, patches and deletes, in order: `Batch().put("a", b"1").delete("b")`."""

    _pieces: "list[_Singles | _Rows]" = field(default_factory=list)
    _ops: int = 0

    def __len__(self) -> int:
        """How many operations were named one by one; tables count once."""
        return self._ops

    def __repr__(self) -> str:
        """Without what is in it, which may be megabytes."""
        return f"<Batch, {human_count(self._ops, 'operation')}>"

    def put(
        self, key: bytes | str, value: bytes | Mapping[str, Any], *, ttl_s: float | None = None
    ) -> Self:
        """Set a key to bytes, or in a namespace with columns to a row."""
        encoded = encode_key(key, f"row {self._ops}: a key")
        if isinstance(value, Mapping):
            return self._add_rows(_Rows(OpKind.PUT, _Keyed([(encoded, dict(value))]), ttl_s))
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInputError(
                f"row {self._ops}, column value: bytes expected, got {type(value).__name__}"
            )
        if ttl_s is not None:
            return self._add_rows(
                _Rows(OpKind.PUT, _Keyed([(encoded, {"value": bytes(value)})]), ttl_s)
            )
        return self._add(OpKind.PUT, encoded, None, bytes(value))

    def upsert(self, rows: Any, *, ttl_s: float | None = None) -> Self:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars."""
        return self._add_rows(_Rows(OpKind.PUT, _kept(rows), ttl_s))

    def patch(self, rows: Any) -> Self:
        """Set only the named columns, of rows that are there."""
        return self._add_rows(_Rows(OpKind.PATCH, _kept(rows), None))

    def delete(self, key: bytes | str) -> Self:
        return self._add(OpKind.DELETE, encode_key(key, f"row {self._ops}: a key"), None, None)

    def delete_range(self, start: bytes | str, end: bytes | str) -> Self:
        """Delete all keys of [start, end)."""
        first = encode_key(start, f"row {self._ops}: the start of a range")
        last = encode_key(end, f"row {self._ops}: the end of a range")
        if first >= last:
            raise InvalidInputError(
                f"row {self._ops}: the range from {start!r} to {end!r} is empty",
                kind=Kind.INVALID_RANGE,
            )
        return self._add(OpKind.DELETE_RANGE, first, last, None)

    def encode(self, schema: Schema, bytes_max: int, now_ms: int = 0) -> EncodedBatch:
        """Return the batch as columns and as bytes; refuses an empty or too large one."""
        if not self._pieces:
            raise InvalidInputError("a batch without operations")
        batch = encoded(self._to_ops(schema, now_ms), schema, bytes_max)
        if isinstance(batch.ops, OneOp) or not any(
            isinstance(piece, _Rows) and piece.ttl_s is not None for piece in self._pieces
        ):
            return batch
        said = encode_ops(concat_ops(self._to_ops(schema, 0), schema))
        return EncodedBatch(batch.ops, batch.record, batch.schema_id, said)

    def _to_ops(self, schema: Schema, now_ms: int) -> list[AnyOps]:
        return [piece.to_ops(schema, now_ms) for piece in self._pieces]

    def _add(self, kind: OpKind, key: bytes, end: bytes | None, value: bytes | None) -> Self:
        last = self._pieces[-1] if self._pieces else None
        if not isinstance(last, _Singles):
            last = _Singles()
            self._pieces.append(last)
        last.ops.append((kind, key, end, value))
        self._ops += 1
        return self

    def _add_rows(self, rows: "_Rows") -> Self:
        last = self._pieces[-1] if self._pieces else None
        if not (isinstance(last, _Rows) and last.join(rows)):
            self._pieces.append(rows)
        self._ops += 1
        return self


@dataclass(slots=True)
class _Singles:
    """Operations on plain keys and bytes, one behind the other."""

    ops: list[tuple[OpKind, bytes, bytes | None, bytes | None]] = field(default_factory=list)
    """Of each: what it is, its key, the end of its range, its value."""

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
        """Return a lone put or delete in a plain namespace; None if it is something else."""
        _, key, end, value = self.ops[0]
        if end is not None or not schema.is_plain:
            return None
        return OneOp(key, schema.fields[0].number, value)


@dataclass(slots=True)
class _Rows:
    """Rows in whatever form they came, or a list of keys with their columns."""

    kind: OpKind
    data: Any
    ttl_s: float | None

    def join(self, other: "_Rows") -> bool:
        """Take in another piece of single rows, if both are of one kind."""
        alike = self.kind == other.kind and self.ttl_s == other.ttl_s
        if alike and _is_keyed(self.data) and _is_keyed(other.data):
            self.data.extend(other.data)  # made here by `put`, and nobody else's
            return True
        return False

    def to_ops(self, schema: Schema, now_ms: int) -> Ops:
        data = self.data
        if _is_keyed(data):
            data = [_with_key(row, key, schema.key.name) for key, row in data]
        return to_ops(data, schema, kind=self.kind, ttl_s=self.ttl_s, now_ms=now_ms)


class _Keyed(list[tuple[bytes, dict[str, Any]]]):
    """Rows that were put one by one: keys, and what their columns are."""


def _is_keyed(data: Any) -> bool:
    return isinstance(data, _Keyed)


def _with_key(row: dict[str, Any], key: bytes, name: str) -> dict[str, Any]:
    if name in row and encode_key(row[name], f"column {name}") != key:
        raise InvalidInputError(
            f"column {name}: the row of key {key!r} says {row[name]!r}", kind=Kind.INVALID_KEY
        )
    return {**row, name: key}


def _kept(rows: Any) -> Any:
    """Return rows that stay as they are: a stream is read once, lists belong to the caller."""
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
            f"a row is expected, not bytes: this namespace has the columns {names}",
            hint='put(key, {"column": value}) or upsert(rows)',
        )


def check_text(keys: list[bytes], schema: Schema) -> None:
    """Where keys are text, bytes that are none would never come out again."""
    if schema.key.type != "string":
        return
    for place, key in enumerate(keys):
        try:
            key.decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"row {place}, column {schema.key.name}: the key {key!r} is not UTF-8",
                kind=Kind.INVALID_KEY,
            ) from error
