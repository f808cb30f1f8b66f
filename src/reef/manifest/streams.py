"""Streams: sources that know how far they are, and the marks by which each counts once.

A stream numbers what it commits. Every WAL object of its carries the last number in it, and a
fold carries that on in the manifest as the stream's mark. So whatever lies at or below the mark
was committed, even where the object has been folded and collected since (H63).

A local log in front of the bucket is such a stream. It is made known to its namespace in the same
publish that takes the writer role, and by that the two know each other again: a log whose stream
is not known here belongs elsewhere. While the role is held with it, the manifest names it; any
other writer takes its name out, and so whoever comes back with a log knows of every takeover.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from reef.errors import ReefError
from reef.formats.manifest import Manifest

__all__ = ["NO_STREAM", "STREAMS_MAX", "StreamClaim", "moved_on"]

STREAMS_MAX = 10_000
"""Streams that a namespace remembers; what moved on longest ago is forgotten first."""


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


@dataclass(frozen=True, slots=True)
class StreamClaim:
    """With which stream the writer role is taken, and what must be true for that."""

    stream: str = ""
    is_known: bool = False
    """Whether the stream was made known to its namespace before."""
    must_hold: bool = False
    """Whether nobody else may have had the role since: the stream has something to commit yet."""
    unknown: ReefError | None = None
    """What to raise in a namespace that does not know the stream."""
    taken_over: ReefError | None = None
    """What to raise if somebody else has had the role."""

    def check(self, head: Manifest) -> None:
        """Raise if the role may not be taken with this stream."""
        if self.is_known and self.stream not in head.stream_marks and self.unknown is not None:
            raise self.unknown
        if self.must_hold and head.writer_stream != self.stream and self.taken_over is not None:
            raise self.taken_over

    def made(self, raised: Manifest, *, before: Manifest) -> Manifest:
        """Return a manifest in which the role was taken, with the stream in it."""
        self.check(before)
        marks = raised.stream_marks
        if self.stream:
            marks = moved_on(marks, {self.stream: marks.get(self.stream, 0)})
        return msgspec.structs.replace(raised, stream_marks=marks, writer_stream=self.stream)


NO_STREAM = StreamClaim()
"""Of a writer that commits to the bucket alone."""
