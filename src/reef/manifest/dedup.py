"""The dedup window: keyed batches that were committed, and how a repeat is answered.

The manifest has the window up to its floor; the log has the rest. Together they are complete
at every open (H19). A key is remembered with the digest of its batch: the same key with
another body is a mistake of the client, and is refused.

The window is the last keys that were committed, so many as the namespace was made with, whatever
their age. It is brought up to date object by object and never by a clock: so it is the same at an
LSN for whoever comes there from whichever manifest, and all agree on which ingests count.
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

    def __init__(self, entries: Iterable[DedupEntry], keys_max: int) -> None:
        self._entries = OrderedDict((entry.key, entry) for entry in entries)
        self._keys_max = keys_max
        self._trim()  # a manifest of an older release may have more

    @classmethod
    def of(cls, manifest: Manifest) -> "DedupWindow":
        return cls(manifest.dedup, manifest.dedup_keys_max)

    def add(self, header: WalHeader) -> None:
        """Take in the keyed batches of an object that applies, or an ingest's key (H57)."""
        if header.job is not None and header.job.key is not None:
            rows = sum(segment.rows for segment in header.job.segments)
            keyed = BatchHeader(rows, header.job.key)
            header = msgspec.structs.replace(header, batches=(keyed,))
        for index, batch in enumerate(header.batches):
            if batch.key is not None:
                self._entries.pop(batch.key, None)
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
        self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self._keys_max:
            self._entries.popitem(last=False)

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

    def reaches_back_to(self, lsn: int) -> bool:
        """Whether no key that was committed at or behind an LSN has left the window."""
        if len(self._entries) < self._keys_max:
            return True
        return any(entry.lsn < lsn for entry in self._entries.values())

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> tuple[DedupEntry, ...]:
        """Return the window for a manifest, the last committed key last."""
        return tuple(self._entries.values())
