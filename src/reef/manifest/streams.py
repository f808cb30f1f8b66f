"""Streams: sources that know how far they are, and the marks by which each counts once.

A stream numbers what it commits. Every WAL object of its carries the last number in it, and a
fold carries that on in the manifest as the stream's mark. So every entry at or below the mark
was committed, even where the object has been folded and collected since (H63).

A number alone does not say whose entry was committed: a local log may be copied, and both copies
number on (H71). So a mark comes with its lineage, the last committed entry of each epoch with a
digest of all entries up to there. Uploads of one stream are serialized by the writer role, and
every opener compares its log with the lineage before it uploads: the lineage is one chain.

A local log in front of the bucket is such a stream. It is made known to its namespace in the same
publish that takes the writer role, and by that the two know each other again: a log whose stream
is not known here belongs elsewhere. While the role is held with it, the manifest names it and the
life with which it was opened; any other opening replaces both, and so the owner of a log learns of
every takeover, by a copy of the same log too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from reef.errors import ReefError
from reef.formats.manifest import Manifest
from reef.formats.streams import Lineage, StreamPoint

__all__ = [
    "LINEAGE_MAX",
    "NO_STREAM",
    "STREAMS_MAX",
    "StreamClaim",
    "StreamHistory",
    "extend_lineage",
    "join_lineages",
    "moved_on",
]

STREAMS_MAX = 10_000
"""Streams that a namespace remembers; what moved on longest ago is forgotten first."""
LINEAGE_MAX = 16
"""Epochs that a lineage remembers."""


def moved_on(marks: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    """Return the marks with what was found in the log: none ever falls.

    >>> moved_on({"a": 4, "b": 7}, {"a": 5, "b": 2})
    {'b': 7, 'a': 5}
    """
    moved = {stream: place for stream, place in found.items() if place > marks.get(stream, -1)}
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


def merged_streams(manifests: Iterable[Manifest]) -> tuple[dict[str, int], dict[str, Lineage]]:
    """Return the marks and lineages that any of several manifests knows: none is forgotten."""
    marks: dict[str, int] = {}
    lineages: dict[str, Lineage] = {}
    for one in manifests:
        marks = moved_on(marks, one.stream_marks)
        lineages = join_lineages(marks, lineages, one.stream_lineages)
    return marks, lineages


def _end(lineage: Lineage) -> int:
    return lineage[-1].index if lineage else -1


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """The committed part of one stream, as a bucket remembers it."""

    mark: int = 0
    lineage: Lineage = ()

    @classmethod
    def of(cls, manifest: Manifest, stream: str) -> "StreamHistory":
        """Return the part that lies below a manifest's floor."""
        mark = manifest.stream_marks.get(stream, 0)
        return cls(mark, manifest.stream_lineages.get(stream, ()))

    @property
    def is_proven(self) -> bool:
        """Whether the lineage reaches the mark. A release that does not know lineages moves the
        mark alone; nothing but the index is known then."""
        return _end(self.lineage) == self.mark

    @property
    def digest(self) -> bytes:
        """The digest at the mark; empty where it is not known."""
        return self.lineage[-1].digest if self.is_proven else b""

    def has(self, epoch: int, index: int) -> bool:
        """Whether the entry that a writer of this epoch appended at this index was committed.

        False also for an entry whose epoch the lineage does not remember any more.
        """
        point = next((point for point in self.lineage if point.index >= index), None)
        return point is not None and point.epoch == epoch

    def has_point(self, point: StreamPoint) -> bool:
        """The same of an entry whose digest is known."""
        same = next((known for known in self.lineage if known.index == point.index), point)
        return self.has(point.epoch, point.index) and same.digest == point.digest


@dataclass(frozen=True, slots=True)
class StreamClaim:
    """With which stream the writer role is taken, and what must be true for that."""

    stream: str = ""
    is_known: bool = False
    """Whether the stream was made known to its namespace before."""
    must_hold: bool = False
    """Whether no other writer may have had the role since: the stream has entries to commit."""
    unknown: ReefError | None = None
    """What to raise in a namespace that does not know the stream."""
    taken_over: ReefError | None = None
    """What to raise if another writer has had the role."""
    life: str = ""
    """Names this opening in the manifest."""
    lives: tuple[str, ...] = ()
    """Earlier openings of this very log: the role is still held if it was taken by one of them."""

    def check(self, head: Manifest) -> None:
        """Raise if the role may not be taken with this stream."""
        if self.is_known and self.stream not in head.stream_marks and self.unknown is not None:
            raise self.unknown
        if self.must_hold and not self.is_held(head) and self.taken_over is not None:
            raise self.taken_over

    def is_held(self, head: Manifest) -> bool:
        """Whether the last to take the role was this log, and no copy of it.

        A manifest without a life was published by a release that does not know them.
        """
        return head.writer_stream == self.stream and head.writer_life in ("", *self.lives)

    def made(self, raised: Manifest, *, before: Manifest) -> Manifest:
        """Return a manifest in which the role was taken, with the stream in it."""
        self.check(before)
        marks = raised.stream_marks
        if self.stream:
            marks = moved_on(marks, {self.stream: marks.get(self.stream, 0)})
        return msgspec.structs.replace(
            raised,
            stream_marks=marks,
            stream_lineages=join_lineages(marks, raised.stream_lineages, {}),
            writer_stream=self.stream,
            writer_life=self.life,
        )


NO_STREAM = StreamClaim()
"""Of a writer that commits to the bucket alone."""
