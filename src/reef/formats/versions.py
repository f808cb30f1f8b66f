"""Versions: rows with the LSN and sequence at which they were written, column by column.

The one shape in which rows move through the engine: what a memtable gives out, what a
segment's group decodes to, what merges take and return. Sorted by key, and for one key
the newest first.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.formats.batch import OpKind, Ops, concat_numbered, concat_or_none
from reef.formats.schema import Schema, cast_column
from reef.types import KeyRange

__all__ = ["KeysInOrder", "RangeTombstone", "Versions", "concat_versions", "split_ops"]


@dataclass(frozen=True, slots=True, order=True)
class RangeTombstone:
    """All keys in [start, end) were deleted at this LSN and sequence."""

    start: bytes
    end: bytes
    lsn: int
    seq: int


class KeysInOrder:
    """Sorted keys of an Arrow array, for `bisect`: only those that it looks at become bytes."""

    __slots__ = ("_keys",)

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> bytes:
        key: bytes = self._keys[place].as_py()
        return key


@dataclass(frozen=True, slots=True)
class Versions:
    """Equally long columns. `kinds` are those of `OpKind`, without range deletes."""

    keys: pa.Array
    lsns: npt.NDArray[np.int64]
    seqs: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    fields: Mapping[int, pa.Array]
    expires_at_ms: pa.Array | None = None
    touched: Mapping[int, pa.Array] = field(default_factory=dict)
    distinct: bool = False
    """Whether it is known that the rows are sorted by key, and no key comes twice."""

    @classmethod
    def empty(cls, schema: Schema) -> "Versions":
        """Return no rows."""
        return cls(
            pa.array([], pa.binary()),
            np.zeros(0, np.int64),
            np.zeros(0, np.uint32),
            np.zeros(0, np.uint8),
            {number: pa.array([], data_type) for number, data_type in schema.types().items()},
        )

    def __len__(self) -> int:
        return len(self.keys)

    def with_fields(self, fields: Mapping[int, pa.Array]) -> "Versions":
        """Return the same rows with these columns."""
        return Versions(
            self.keys,
            self.lsns,
            self.seqs,
            self.kinds,
            fields,
            self.expires_at_ms,
            self.touched,
            self.distinct,
        )

    def with_lsn(self, lsn: int) -> "Versions":
        """Return the same rows at another LSN: those of an ingest store 0."""
        return replace(self, lsns=np.full(len(self), lsn, np.int64))

    def under(self, schema: Schema) -> "Versions":
        """Return the rows as a newer schema has them: numbers may have been widened."""
        types = schema.types()
        if all(array.type == types.get(number) for number, array in self.fields.items()):
            return self
        known = {number: array for number, array in self.fields.items() if number in types}
        return self.with_fields({n: cast_column(array, types[n]) for n, array in known.items()})

    def within(self, wanted: KeyRange) -> "Versions":
        """Return the rows of a range; they are sorted by key."""
        if not len(self):
            return self
        keys = KeysInOrder(self.keys)
        first = 0 if keys[0] >= wanted.start else bisect_left(keys, wanted.start)
        last = len(keys)
        if wanted.end is not None and keys[-1] >= wanted.end:
            last = bisect_left(keys, wanted.end)
        return self if last - first == len(keys) else self.slice(first, last)

    def slice(self, start: int, end: int) -> "Versions":
        """Return the rows [start, end), without copying."""
        return Versions(
            self.keys[start:end],
            self.lsns[start:end],
            self.seqs[start:end],
            self.kinds[start:end],
            {number: array[start:end] for number, array in self.fields.items()},
            None if self.expires_at_ms is None else self.expires_at_ms[start:end],
            {number: array[start:end] for number, array in self.touched.items()},
            self.distinct,
        )

    def take(self, places: npt.NDArray[np.int64]) -> "Versions":
        """Return the rows at these places, in that order."""
        chosen = pa.array(places)
        return Versions(
            self.keys.take(chosen),
            self.lsns[places],
            self.seqs[places],
            self.kinds[places],
            {number: array.take(chosen) for number, array in self.fields.items()},
            None if self.expires_at_ms is None else self.expires_at_ms.take(chosen),
            {number: array.take(chosen) for number, array in self.touched.items()},
        )


def split_ops(ops: Ops, lsn: int, first_seq: int) -> tuple[Versions, list[RangeTombstone]]:
    """Return a batch's rows, in their own order, and its range deletes."""
    count = len(ops)
    # Not by `to_numpy`, which would first of all import pandas, where it is installed.
    kinds = np.frombuffer(ops.kinds.buffers()[1], np.uint8)[ops.kinds.offset :][:count]
    rows = Versions(
        ops.keys,
        np.full(count, lsn, np.int64),
        np.arange(first_seq, first_seq + count, dtype=np.uint32),
        kinds,
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
    )
    if ops.end_keys is None:
        return rows, []
    ranges = np.flatnonzero(kinds == OpKind.DELETE_RANGE).astype(np.int64)
    tombstones = [
        RangeTombstone(ops.keys[at].as_py(), ops.end_keys[at].as_py(), lsn, first_seq + at)
        for at in ranges.tolist()
    ]
    return rows.take(np.flatnonzero(kinds != OpKind.DELETE_RANGE).astype(np.int64)), tombstones


def concat_versions(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return all rows, one part after the other; columns that a part lacks are null there."""
    if len(parts) == 1:
        return parts[0]
    types = schema.types()
    return Versions(
        pa.concat_arrays([part.keys for part in parts]),
        np.concatenate([part.lsns for part in parts]),
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        concat_numbered([(len(p), p.fields) for p in parts], types),
        concat_or_none([(len(p), p.expires_at_ms) for p in parts], pa.int64()),
        concat_numbered([(len(p), p.touched) for p in parts], dict.fromkeys(types, pa.bool_())),
    )
