"""How many rows a patch changes: `ops` of its receipt counts no patch of a key without a row.

    submitted   the keys are looked up, as reads do: the only requests
    sent        batches that were submitted before decide about the rows since: those in memory,
                those in flight, and those ahead in the same object. The count goes into the header
                of the batch, so that a repeat of its key has the same receipt

A batch that has lost its slot is sent again, and counted again. Exceptions, where the count is of
the rows as they were when the batch was submitted: a bulk load, or a fold together with the writes
that it has folded, that came in between.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.read.memtable import Entry, Memtable
from reef.formats.wal_object import AnyOps, OneOp, OpKind, Ops

PATCHES_COUNTED_MAX = 100
"""Rows of a batch's patches that are looked up: a page each, at worst. Above it all are counted."""


@dataclass(frozen=True, slots=True)
class PatchedKeys:
    """The keys that a batch patches, and those of them that had a row when it was submitted."""

    keys: frozenset[bytes]
    existing: frozenset[bytes]
    lsn: int
    """The last LSN of the state in which they were looked up."""

    def count(
        self, ops: AnyOps, before: Iterable[AnyOps], tables: Sequence[Memtable], now_ms: int
    ) -> int:
        """Return the operations without patches of missing rows.

        `before` are the batches that apply first and are not in `tables`, the newest of which is
        the first.
        """
        exists = {key: self._exists(key, tables, now_ms) for key in self.keys}
        for earlier in before:
            _apply(earlier, exists, now_ms)
        return _apply(ops, exists, now_ms)

    def _exists(self, key: bytes, tables: Sequence[Memtable], now_ms: int) -> bool:
        for table in tables:
            for entry in table.cut().versions(key, values=False):
                if entry.lsn > self.lsn and entry.kind != OpKind.PATCH:
                    return _is_row(entry, now_ms)
        return key in self.existing


def patched_keys(ops: AnyOps) -> list[bytes] | None:
    """Return the keys that a batch patches; None if they are too many to be counted, or none."""
    if isinstance(ops, OneOp):
        return None
    keys = ops.keys.filter(pc.equal(ops.kinds, OpKind.PATCH.value))
    return keys.to_pylist() if 0 < len(keys) <= PATCHES_COUNTED_MAX else None


def _is_row(entry: Entry, now_ms: int) -> bool:
    if entry.kind == OpKind.DELETE:
        return False
    return entry.expires_at_ms is None or entry.expires_at_ms > now_ms


def _apply(ops: AnyOps, exists: dict[bytes, bool], now_ms: int) -> int:
    """Note which keys have a row after a batch; return its operations but patches of no row."""
    if isinstance(ops, OneOp):
        if ops.key in exists:
            exists[ops.key] = ops.value is not None
        return 1
    missing = 0
    for place in _places(ops, exists):
        key, kind = ops.keys[place].as_py(), ops.kinds[place].as_py()
        if kind == OpKind.PATCH:
            missing += not exists[key]
        elif kind == OpKind.DELETE_RANGE and ops.end_keys is not None:
            end = ops.end_keys[place].as_py()
            exists.update({other: False for other in exists if key <= other < end})
        else:
            expiry = None if ops.expires_at_ms is None else ops.expires_at_ms[place].as_py()
            exists[key] = kind != OpKind.DELETE and (expiry is None or expiry > now_ms)
    return len(ops) - missing


def _places(ops: Ops, keys: Iterable[bytes]) -> list[int]:
    """Return the places of the operations that concern some keys."""
    concerned = pc.is_in(ops.keys, pa.array(list(keys), ops.keys.type))
    if ops.end_keys is not None:
        concerned = pc.or_(concerned, pc.equal(ops.kinds, OpKind.DELETE_RANGE.value))
    places: list[int] = np.flatnonzero(concerned.to_numpy(zero_copy_only=False)).tolist()
    return places
