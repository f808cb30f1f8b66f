"""Batches: operations that commit together, checked before anything is written."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from reef.errors import InvalidInputError, Kind
from reef.formats.batch import KEY_BYTES_MAX, OpKind, Ops, encode_ops
from reef.formats.schema import Schema

__all__ = ["Batch", "EncodedBatch", "encode_key"]


def encode_key(key: Any, what: str = "a key") -> bytes:
    """Return a key as bytes; text is UTF-8. InvalidInputError names what is wrong."""
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, bytes):
        raise InvalidInputError(
            f"{what} is bytes or text, got {type(key).__name__}", kind=Kind.INVALID_KEY
        )
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"{what} has 1 to {KEY_BYTES_MAX} bytes, got {len(key)}", kind=Kind.INVALID_KEY
        )
    return key


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch in the shape in which it is committed."""

    ops: Ops
    record: bytes
    digest: str
    """Tells a repeated batch from another one with the same idempotency key."""


@dataclass(slots=True)
class Batch:
    """Puts and deletes, in order. Chain them: `Batch().put("a", b"1").delete("b")`."""

    _kinds: list[int] = field(default_factory=list)
    _keys: list[bytes] = field(default_factory=list)
    _ends: list[bytes | None] = field(default_factory=list)
    _values: list[bytes | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, key: bytes | str, value: bytes) -> Self:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInputError(
                f"row {len(self)}, column value: bytes expected, got {type(value).__name__}"
            )
        return self._add(OpKind.PUT, key, None, bytes(value))

    def delete(self, key: bytes | str) -> Self:
        return self._add(OpKind.DELETE, key, None, None)

    def delete_range(self, start: bytes | str, end: bytes | str) -> Self:
        """Delete all keys of [start, end)."""
        last = encode_key(end, f"row {len(self)}: the end of a range")
        if encode_key(start, f"row {len(self)}: the start of a range") >= last:
            raise InvalidInputError(
                f"row {len(self)}: the range from {start!r} to {end!r} is empty",
                kind=Kind.INVALID_RANGE,
            )
        return self._add(OpKind.DELETE_RANGE, start, last, None)

    def _add(self, kind: OpKind, key: Any, end: bytes | None, value: bytes | None) -> Self:
        self._keys.append(encode_key(key, f"row {len(self)}: a key"))
        self._kinds.append(kind)
        self._ends.append(end)
        self._values.append(value)
        return self

    def encode(self, schema: Schema, bytes_max: int) -> EncodedBatch:
        """Return the batch as columns and as bytes; refuses an empty or too large one."""
        if not self._keys:
            raise InvalidInputError("a batch without operations")
        columns = {}
        if any(value is not None for value in self._values):
            columns[schema.fields[0].number] = pa.array(self._values, pa.binary())
        ends = self._ends if any(end is not None for end in self._ends) else None
        ops = Ops(
            pa.array(self._keys, pa.binary()),
            pa.array(self._kinds, pa.uint8()),
            None if ends is None else pa.array(ends, pa.binary()),
            fields=columns,
        )
        record = encode_ops(ops)
        if len(record) > bytes_max:
            raise InvalidInputError(
                f"a batch of {len(record)} bytes, the largest has {bytes_max}",
                hint="Split it, raise batch_bytes_max, or load it with a bulk job",
            )
        return EncodedBatch(ops, record, hashlib.blake2b(record, digest_size=12).hexdigest())
