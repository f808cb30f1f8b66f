"""Staging: a job's tasks write sorted rows as segments that nobody sees yet.

A `Staging` is small and picklable, so that any machine can stage. Names are new at every call:
a task that runs twice leaves segments that no ingest names, and the sweep takes them (H39).
Rows stream through in pieces; memory is bounded by a piece and what a writer keeps of a group.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow.compute as pc

from reef.config import IngestSettings
from reef.errors import InvalidInputError, Kind
from reef.formats.block import Codec
from reef.formats.schema import Schema
from reef.formats.segment import Lineage, SegmentSummary
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions
from reef.formats.wal_object import JobSegment
from reef.manifest.roots import staged_id
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["ROW_SEQ", "Staging", "end_of_keys"]

ROW_SEQ = 1
"""Of every row: the range tombstones of a replaced range have 0, and so hide only older rows."""
PIECE_ROWS = 65_536
"""Larger pieces are cut, so that segments can end near their size."""
KEY_BYTES_MAX = 65_535


def end_of_keys(schema: Schema) -> bytes:
    """Return a bound above every key: text never has the byte 255, bytes may be full of them."""
    return b"\xff" if schema.key.type == "string" else b"\xff" * (KEY_BYTES_MAX + 1)


@dataclass(frozen=True, slots=True)
class Staging:
    """Where and how the segments of one job are written."""

    store: Store
    namespace: Namespace
    job_id: str
    schema: Schema
    settings: IngestSettings

    def stage(
        self, pieces: Iterable[Versions], replaced: KeyRange | None = None
    ) -> tuple[JobSegment, ...]:
        """Write rows, sorted by key and each key once; return how an ingest names the segments.

        `replaced` is the part of a replaced range that this task covers, rows or none.
        """
        rows = _Rows(pieces, replaced)
        done: list[JobSegment] = []
        start = replaced.start if replaced is not None else b""
        while rows.next_key is not None or (replaced is not None and not done):
            done.append(self._write(rows, start, replaced))
            start = rows.next_key or b""
        return tuple(done)

    def _write(self, rows: "_Rows", start: bytes, replaced: KeyRange | None) -> JobSegment:
        runtime = self.store.runtime
        segment_id = staged_id(self.job_id, runtime.ulid())
        writer = SegmentWriter(
            self.schema,
            0,
            Lineage(segment_id, int(runtime.wall_s() * 1000), job=self.job_id),
            codec=Codec[self.settings.codec.upper()],
            group_bytes=self.settings.group_bytes,
        )

        def pieces() -> Iterator[Versions]:
            size = 0  # at least one piece: the head alone may be as long as a segment should be
            while rows.next_key is not None and size < self.settings.segment_bytes:
                yield rows.take()
                size = writer.bytes_written
            if replaced is not None:  # known only now: it ends where the next segment begins
                end = rows.next_key or replaced.end or end_of_keys(self.schema)
                writer.range_tombstones = (RangeTombstone(start, end, 0, 0),)

        self.store.upload(self.namespace.segment(segment_id), writer.write(pieces()))
        return _named(segment_id, writer.summary)


class _Rows:
    """Pieces of rows, checked and with a look at the key that comes next."""

    def __init__(self, pieces: Iterable[Versions], within: KeyRange | None) -> None:
        self._pieces = (part for piece in pieces for part in _cut(piece))
        self._within = within
        self._last: bytes | None = None
        self._next: Versions | None = None
        self._advance()

    @property
    def next_key(self) -> bytes | None:
        return None if self._next is None else KeysInOrder(self._next.keys)[0]

    def take(self) -> Versions:
        taken = self._next
        if taken is None:
            raise ValueError("there are no more rows")
        self._advance()
        return taken

    def _advance(self) -> None:
        self._next = next(self._pieces, None)
        if self._next is None:
            return
        keys = KeysInOrder(self._next.keys)
        rising = pc.all(pc.less(self._next.keys[:-1], self._next.keys[1:]), min_count=0).as_py()
        if not rising or (self._last is not None and keys[0] <= self._last):
            raise InvalidInputError(
                f"rows to be staged are not sorted, or have a key twice, near {keys[0]!r}",
                kind=Kind.INVALID_KEY,
                hint="Sort them by key, and choose one row of each key",
            )
        self._last = keys[-1]
        if self._within is not None and not (
            self._within.has(keys[0]) and self._within.has(keys[-1])
        ):
            raise InvalidInputError(
                f"rows from {keys[0]!r} to {keys[-1]!r} lie outside of the range that is replaced",
                kind=Kind.INVALID_KEY,
            )


def _cut(piece: Versions) -> Iterator[Versions]:
    for start in range(0, len(piece), PIECE_ROWS):
        yield piece.slice(start, min(start + PIECE_ROWS, len(piece)))


def _named(segment_id: str, summary: SegmentSummary) -> JobSegment:
    footer = summary.footer
    return JobSegment(
        segment_id,
        summary.size,
        summary.checksum,
        footer.rows,
        footer.tombstones,
        summary.tail_bytes,
        footer.min_key,
        footer.max_key,
        footer.set_hash,
        footer.patches,
        footer.range_tombstones is not None,
    )
