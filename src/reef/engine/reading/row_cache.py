"""Rows that were read lately, ready to hand out: a warm `get` is one dict lookup.

Before a write is applied its keys are dropped. While any write is being applied no row is kept,
and neither is a row whose read began before the end of a write. So a row in here is never older
than a row that was read elsewhere. There may be several writes at a time: with a local log, one
thread applies uploads and another one new batches. A fold changes no row and drops nothing. Rows
that expire are never kept. Bounded in bytes; the oldest rows leave first.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from reef.formats.batch import AnyOps
from reef.formats.manifest import SegmentEntry
from reef.runtime import leaf_lock

__all__ = ["MISSING", "RowCache"]

MISSING = object()
"""What `rows.get(key, MISSING)` returns for a key that is not here; None means "no such row"."""
ROW_BYTES = 200
"""About what a row takes beside its own bytes."""
WRITES_LOOKED_AT = 10_000
"""A larger write forgets everything: cheaper than looking up each of its keys."""


class RowCache:
    """Final answers by key. `rows` is read without a lock, changed only here."""

    def __init__(self, bytes_max: int) -> None:
        self.rows: dict[bytes, Any] = {}
        self.writes = 0
        """Counts beginnings and ends of writes."""
        self._applying = 0
        """Writes that have begun and not ended."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._lock = leaf_lock()

    def keep(self, key: bytes, row: Any, size: int, writes: int) -> None:
        """Keep a row that was read when `writes` was the count."""
        size += ROW_BYTES + len(key)
        with self._lock:
            if (
                writes != self.writes
                or self._applying
                or key in self.rows
                or size > self._bytes_max // 8
            ):
                return
            self.rows[key] = row
            self._sizes[key] = size
            self._bytes += size
            if self._bytes > self._bytes_max:
                self._drop(list(islice(self.rows, len(self.rows) // 8 + 1)))

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None:
        """Forget what is about to be written; of an ingest the keys are not known."""
        with self._lock:
            self.writes += 1
            self._applying += 1
            if segments:
                self._clear()
            for ops in batches:
                if ops.end_keys is not None or len(ops) > WRITES_LOOKED_AT:
                    self._clear()
                elif self.rows:
                    self._drop(ops.key_list())

    def applied(self) -> None:
        with self._lock:
            self.writes += 1
            self._applying -= 1

    def lost_track(self) -> None:
        with self._lock:
            self.writes += 1
            self._clear()

    def _clear(self) -> None:
        self.rows.clear()
        self._sizes.clear()
        self._bytes = 0

    def _drop(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.rows.pop(key, MISSING) is not MISSING:
                self._bytes -= self._sizes.pop(key)
