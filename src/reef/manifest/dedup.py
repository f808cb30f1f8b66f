"""Exactly once: the dedup window of idempotency keys, and the marks of streams.

**The window** has the keyed batches that were committed, so that a repeat gets the receipt of the
first. The manifest has the window up to its floor, the log has the rest: together they are
complete at every open (H19). A key is stored with the digest of its batch; the same key with
another body is a mistake of the client, and is rejected. The window is the last `dedup_keys_max`
committed keys, whatever their age. It advances object by object and never by a clock, so it is
the same at an LSN for every process, whichever manifest it started from, and all agree on which
ingests count.

**A stream** numbers its entries. Every WAL object with entries of a stream carries the last
number in it, and a fold keeps that in the manifest as the stream's mark. So every entry at or
below the mark was committed, even if its object has been folded and collected since (H63).

A number alone does not identify an entry: a local log may be copied, and both copies continue the
numbering (H71). So a mark comes with its lineage, the last committed entry of each epoch with a
digest of all entries up to it. Uploads of one stream are serialized by the writer role, and every
opener compares its log with the lineage before it uploads: the lineage is one chain.

A local log in front of the bucket is such a stream. The publish that takes the writer role
registers it in its namespace, so that a log whose stream is not registered belongs to another
namespace. While the role is held with it, the manifest has its name and the life with which it
was opened. Every other opening replaces both, so the owner of a log learns of every takeover,
also by a copy of it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from reef.errors import InvalidInputError, ReefError
from reef.formats.manifest import DedupEntry, Lineage, Manifest, StreamPoint
from reef.formats.wal_object import JOB_DIGEST, BatchHeader, WalHeader


class DedupWindow:
    """Committed keys, in the order of their commits."""

    def __init__(self, entries: Iterable[DedupEntry], keys_max: int) -> None:
        self._entries = OrderedDict((entry.key, entry) for entry in entries)
        self._keys_max = keys_max
        self._trim()  # a manifest of an older release may have more

    @classmethod
    def of(cls, manifest: Manifest) -> "DedupWindow":
        return cls(manifest.dedup, manifest.dedup_keys_max)

    def add(self, header: WalHeader) -> None:
        """Add the keyed batches of an object that applies, or an ingest's key (H57)."""
        if header.job is not None and header.job.key is not None:
            rows = sum(segment.rows for segment in header.job.segments)
            digest = f"{JOB_DIGEST}{header.job.digest}" if header.job.digest else None
            keyed = BatchHeader(rows, header.job.key, digest)
            header = msgspec.structs.replace(header, batches=(keyed,))
        for index, batch in enumerate(header.batches):
            if batch.key is not None:
                self._entries.pop(batch.key, None)
                self._entries[batch.key] = DedupEntry(
                    batch.key,
                    batch.digest or "",
                    header.lsn,
                    index,
                    batch.counted,
                    header.epoch,
                    header.write_id,
                    header.created_at_ms,
                )
        self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self._keys_max:
            self._entries.popitem(last=False)

    def find(self, key: str, digest: str) -> DedupEntry | None:
        """Return the commit of a key, if any; InvalidInputError if it had another body."""
        entry = self._entries.get(key)
        if entry is not None and entry.digest != digest:
            raise InvalidInputError(
                f"idempotency key {key!r} was used at LSN {entry.lsn} for another batch",
                hint="Use a new key for a new batch",
                idempotency_key=key,
            )
        return entry

    def get(self, key: str) -> DedupEntry | None:
        return self._entries.get(key)

    def reaches_back_to(self, lsn: int) -> bool:
        """Whether no key that was committed at or after an LSN has left the window."""
        if len(self._entries) < self._keys_max:
            return True
        return any(entry.lsn < lsn for entry in self._entries.values())

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> tuple[DedupEntry, ...]:
        """Return the window for a manifest, the newest key last."""
        return tuple(self._entries.values())


# --- streams -------------------------------------------------------------------------

STREAMS_MAX = 10_000
"""Streams of a namespace; those that advanced longest ago are dropped first."""
LINEAGE_MAX = 16
"""Epochs in a lineage."""


def advance_marks(marks: Mapping[str, int], newer: Mapping[str, int]) -> dict[str, int]:
    """Return the marks advanced to those of the log: none ever falls.

    >>> advance_marks({"a": 4, "b": 7}, {"a": 5, "b": 2})
    {'b': 7, 'a': 5}
    """
    moved = {stream: place for stream, place in newer.items() if place > marks.get(stream, -1)}
    kept = {stream: place for stream, place in marks.items() if stream not in moved} | moved
    for stream in list(kept)[: max(0, len(kept) - STREAMS_MAX)]:
        del kept[stream]
    return kept


def extend_lineage(lineage: Lineage, points: Lineage) -> Lineage:
    """Return a lineage with later points: the last one of each epoch, of the last epochs.

    >>> first, more = StreamPoint(1, 4, b"a"), (StreamPoint(1, 6, b"b"), StreamPoint(3, 7, b"c"))
    >>> extend_lineage((first,), more)
    (StreamPoint(epoch=1, index=6, digest=b'b'), StreamPoint(epoch=3, index=7, digest=b'c'))
    """
    by_epoch = {point.epoch: point for point in (*lineage, *points)}
    return tuple(by_epoch.values())[-LINEAGE_MAX:]


def join_lineages(
    marks: Mapping[str, int], one: Mapping[str, Lineage], other: Mapping[str, Lineage]
) -> dict[str, Lineage]:
    """Return for each stream that has a mark the lineage that reaches further."""
    joined = {}
    for stream in marks:
        furthest = max(one.get(stream, ()), other.get(stream, ()), key=_end)
        if furthest:
            joined[stream] = furthest
    return joined


def merge_streams(manifests: Iterable[Manifest]) -> tuple[dict[str, int], dict[str, Lineage]]:
    """Return the union of the marks and lineages of several manifests."""
    marks: dict[str, int] = {}
    lineages: dict[str, Lineage] = {}
    for one in manifests:
        marks = advance_marks(marks, one.stream_marks)
        lineages = join_lineages(marks, lineages, one.stream_lineages)
    return marks, lineages


def _end(lineage: Lineage) -> int:
    return lineage[-1].index if lineage else -1


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """The committed part of one stream, as the bucket records it."""

    mark: int = 0
    lineage: Lineage = ()

    @classmethod
    def of(cls, manifest: Manifest, stream: str) -> "StreamHistory":
        """Return the part below a manifest's floor."""
        mark = manifest.stream_marks.get(stream, 0)
        return cls(mark, manifest.stream_lineages.get(stream, ()))

    @property
    def is_proven(self) -> bool:
        """Whether the lineage reaches the mark. A release that does not know lineages moves the
        mark alone; nothing but the index is known then."""
        return _end(self.lineage) == self.mark

    @property
    def digest(self) -> bytes:
        """The digest at the mark; empty if it is not known."""
        return self.lineage[-1].digest if self.is_proven else b""

    def has(self, epoch: int, index: int) -> bool:
        """Whether the entry that a writer of this epoch appended at this index was committed.

        False also for an entry whose epoch has left the lineage.
        """
        point = next((point for point in self.lineage if point.index >= index), None)
        return point is not None and point.epoch == epoch

    def has_point(self, point: StreamPoint) -> bool:
        """Whether an entry with a known digest was committed."""
        same = next((known for known in self.lineage if known.index == point.index), point)
        return self.has(point.epoch, point.index) and same.digest == point.digest


@dataclass(frozen=True, slots=True)
class StreamClaim:
    """The stream with which the writer role is taken, and the conditions for that."""

    stream: str = ""
    is_known: bool = False
    """Whether the stream was registered in its namespace before."""
    must_hold: bool = False
    """Whether no other writer may have had the role since: the stream has entries to commit."""
    unknown: ReefError | None = None
    """The error for a namespace in which the stream is not registered."""
    taken_over: ReefError | None = None
    """The error if another writer has had the role."""
    life: str = ""
    """Names this opening in the manifest."""
    lives: tuple[str, ...] = ()
    """Earlier openings of this log: the role is still held if one of them acquired it."""

    def check(self, head: Manifest) -> None:
        """Raise if the role may not be taken with this stream."""
        if self.is_known and self.stream not in head.stream_marks and self.unknown is not None:
            raise self.unknown
        if self.must_hold and not self.is_held(head) and self.taken_over is not None:
            raise self.taken_over

    def is_held(self, head: Manifest) -> bool:
        """Whether this log was the last to take the role, and no copy of it.

        A manifest without a life was published by a release before lives.
        """
        return head.writer_stream == self.stream and head.writer_life in ("", *self.lives)

    def register(self, raised: Manifest, *, before: Manifest) -> Manifest:
        """Return a manifest in which the role was taken, with the stream registered."""
        self.check(before)
        marks = raised.stream_marks
        if self.stream:
            marks = advance_marks(marks, {self.stream: marks.get(self.stream, 0)})
        return msgspec.structs.replace(
            raised,
            stream_marks=marks,
            stream_lineages=join_lineages(marks, raised.stream_lineages, {}),
            writer_stream=self.stream,
            writer_life=self.life,
        )


NO_STREAM = StreamClaim()
"""For a writer without a local log."""
