"""The dedup window: keyed batches that were committed, and how a repeat is answered.

The manifest has the window up to its floor; the log has the rest. Together they are complete
at every open (H19). A key is remembered with the digest of its batch: the same key with
another body is a mistake of the client, and is refused.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from reef.errors import InvalidInputError
from reef.formats.manifest import DedupEntry, Manifest
from reef.formats.wal_object import BatchHeader, WalHeader

__all__ = ["DedupWindow"]


class DedupWindow:
    """Keys in the order of their commits."""

    def __init__(self, entries: Iterable[DedupEntry] = ()) -> None:
        self._entries = OrderedDict((entry.key, entry) for entry in entries)

    @classmethod
    def of(cls, manifest: Manifest) -> "DedupWindow":
        return cls(manifest.dedup)

    def add(self, header: WalHeader) -> None:
        """Take in the keyed batches of an object that applies, or an ingest's key (H57)."""
        if header.job is not None and header.job.key is not None:
            rows = sum(segment.rows for segment in header.job.segments)
            keyed = BatchHeader(rows, header.job.key)
            header = msgspec.structs.replace(header, batches=(keyed,))
        for index, batch in enumerate(header.batches):
            if batch.key is not None:
                self._entries[batch.key] = DedupEntry(
                    batch.key,
                    batch.digest or "",
                    header.lsn,
                    index,
                    batch.ops,
                    header.epoch,
                    header.write_id,
                    header.created_at_ms,
                )

    def find(self, key: str, digest: str) -> DedupEntry | None:
        """Return how a key was committed; None if it was not. Refuses another body."""
        entry = self._entries.get(key)
        if entry is not None and entry.digest != digest:
            raise InvalidInputError(
                f"idempotency key {key!r} was used at LSN {entry.lsn} for another batch",
                hint="A key stands for one batch; use a new one for a new batch",
                idempotency_key=key,
            )
        return entry

    def get(self, key: str) -> DedupEntry | None:
        return self._entries.get(key)

    def keys(self) -> frozenset[str]:
        return frozenset(self._entries)

    def rebased(self, manifest: Manifest) -> "DedupWindow":
        """Return a newer manifest's window, with what was committed from its floor on."""
        later = [e for e in self._entries.values() if e.lsn >= manifest.wal_floor]
        return DedupWindow([*manifest.dedup, *later])

    def trimmed(self, count_max: int, oldest_ms: int) -> tuple[DedupEntry, ...]:
        """Return the window, bounded by count and age, for a manifest."""
        young = [e for e in self._entries.values() if e.committed_at_ms >= oldest_ms]
        return tuple(young[-count_max:])
