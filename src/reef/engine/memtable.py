"""The newest rows, in memory: what was committed and is not folded yet.

It knows the LSNs that it covers, and changes by whole WAL objects only, so that a cut never
falls inside a batch (H15). For each key it keeps the newest version; range deletes stand
beside them as versions of their own. When a fold has passed, `drop_below` removes what the
segments now hold.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from reef.formats.batch import OpKind, Ops
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions
from reef.runtime import leaf_lock

__all__ = ["Entry", "Memtable"]

ENTRY_BYTES = 200
"""About what Python needs around a key and a value."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of a row."""

    lsn: int
    seq: int
    kind: int
    values: tuple[object, ...]
    """In the order of the schema's columns."""
    expires_at_ms: int | None = None


class Memtable:
    """Applied to by one thread at a time, read by any number."""

    def __init__(self, schema: Schema, first_lsn: int) -> None:
        self.schema = schema
        self.first_lsn = first_lsn
        self.last_lsn = first_lsn - 1
        self.bytes = 0
        self._lock = leaf_lock()
        self._entries: dict[bytes, Entry] = {}
        self._keys: list[bytes] = []
        self._unsorted = False
        self.range_tombstones: tuple[RangeTombstone, ...] = ()

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, lsn: int, batches: Sequence[Ops]) -> None:
        """Take in one WAL object whole; sequences count over all its batches."""
        with self._lock:
            rows = chain.from_iterable(_rows(ops, self.schema) for ops in batches)
            for seq, row in enumerate(rows):
                self._apply_row(lsn, seq, row)
            self.last_lsn = max(self.last_lsn, lsn)

    def pass_over(self, lsn: int) -> None:
        """Note an LSN that changes no row."""
        self.last_lsn = max(self.last_lsn, lsn)

    def get(self, key: bytes) -> Entry | None:
        """Return the newest version here, a range delete included; None if there is none."""
        entry = self._entries.get(key)
        for tombstone in self.range_tombstones:
            if tombstone.start <= key < tombstone.end and _newer(tombstone, entry):
                entry = Entry(tombstone.lsn, tombstone.seq, OpKind.DELETE, ())
        return entry

    def versions(self, start: bytes, end: bytes | None) -> Versions:
        """Return the rows of [start, end) as they are now, sorted by key."""
        with self._lock:
            if self._unsorted:
                self._keys.sort()
                self._unsorted = False
            last = len(self._keys) if end is None else bisect_left(self._keys, end)
            keys = self._keys[bisect_left(self._keys, start) : last]
            entries = [self._entries[key] for key in keys]
        return _to_versions(keys, entries, self.schema)

    def drop_below(self, floor: int) -> "Memtable":
        """Return a memtable without what lies below `floor`."""
        kept = Memtable(self.schema, floor)
        with self._lock:
            kept._entries = {key: e for key, e in self._entries.items() if e.lsn >= floor}
            kept.range_tombstones = tuple(t for t in self.range_tombstones if t.lsn >= floor)
            kept.last_lsn = max(self.last_lsn, floor - 1)
        kept._keys = sorted(kept._entries)
        kept.bytes = sum(_entry_bytes(key, e) for key, e in kept._entries.items())
        return kept

    def _apply_row(self, lsn: int, seq: int, row: "_Row") -> None:
        if row.kind == OpKind.DELETE_RANGE:
            tombstone = RangeTombstone(row.key, row.end or b"", lsn, seq)
            self.range_tombstones = (*self.range_tombstones, tombstone)
            return
        entry = Entry(lsn, seq, row.kind, row.values, row.expires_at_ms)
        before = self._entries.get(row.key)
        if before is None:
            self._keys.append(row.key)
            self._unsorted = self._unsorted or (len(self._keys) > 1 and self._keys[-2] > row.key)
            self.bytes += _entry_bytes(row.key, entry)
        elif (before.lsn, before.seq) > (lsn, seq):
            return  # independent acknowledgements may arrive out of order
        else:
            self.bytes += _entry_bytes(row.key, entry) - _entry_bytes(row.key, before)
        self._entries[row.key] = entry


class _Row(NamedTuple):
    kind: int
    key: bytes
    end: bytes | None
    values: tuple[object, ...]
    expires_at_ms: int | None


def _newer(tombstone: RangeTombstone, entry: Entry | None) -> bool:
    return entry is None or (tombstone.lsn, tombstone.seq) > (entry.lsn, entry.seq)


def _entry_bytes(key: bytes, entry: Entry) -> int:
    return (
        ENTRY_BYTES
        + len(key)
        + sum(len(v) if isinstance(v, bytes | str) else 8 for v in entry.values)
    )


def _rows(ops: Ops, schema: Schema) -> Iterator[_Row]:
    """Yield the operations of a batch, in order."""
    count = len(ops)
    nothing: list[object] = [None] * count
    ends = ops.end_keys.to_pylist() if ops.end_keys is not None else nothing
    expiries = ops.expires_at_ms.to_pylist() if ops.expires_at_ms is not None else nothing
    given = ops.fields or {}
    columns = [
        given[field.number].to_pylist() if field.number in given else nothing
        for field in schema.fields
    ]
    values = zip(*columns, strict=True) if columns else iter([()] * count)
    return map(_Row, ops.kinds.to_pylist(), ops.keys.to_pylist(), ends, values, expiries)


def _to_versions(keys: list[bytes], entries: list[Entry], schema: Schema) -> Versions:
    expires = [entry.expires_at_ms for entry in entries]
    fields = {
        field.number: pa.array(
            [entry.values[place] if entry.values else None for entry in entries], field.arrow
        )
        for place, field in enumerate(schema.fields)
    }
    return Versions(
        pa.array(keys, pa.binary()),
        np.array([entry.lsn for entry in entries], np.int64),
        np.array([entry.seq for entry in entries], np.uint32),
        np.array([entry.kind for entry in entries], np.uint8),
        fields,
        pa.array(expires, pa.int64()) if any(e is not None for e in expires) else None,
    )
