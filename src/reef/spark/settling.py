"""Rows of one key in several parts of a write: the order column decides between them too.

Spark gives a sink whatever partitions there are, so that rows of a key may meet only when the
driver commits. Each task has by then come down to one row of a key, and has noted, beside its
segments, how high that row stands:

    part 1    segments   a  c  f        notes   a 5   c 1   f 9
    part 2    segments   b  c           notes   b 2   c 7

If no key stands in two parts, the segments are committed as they are. Otherwise the parts are
merged here, in bounded memory and by the rules of every sort, into segments that do not
overlap: work of one process, for writes that have such keys and for no others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.cursors import Cursor, SegmentCursor
from reef.engine.reading.segments import SegmentStore
from reef.errors import InternalError
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import JobSegment
from reef.jobs.disjoint import shared_keys, staged_entry
from reef.jobs.staging import Staging
from reef.spark.notes import notes_schema, order_of
from reef.spark.parts import StagedPart
from reef.spark.rows import RowsPlan
from reef.spark.sorting import RowSorter
from reef.types import KeyRange

__all__ = ["settled"]

CACHE_BYTES = 32 << 20
"""For segment tails: every group is read once."""


def settled(staging: Staging, plan: RowsPlan, parts: Sequence[StagedPart]) -> list[JobSegment]:
    """Return the segments of all parts, or new ones if the order column has to decide."""
    segments = [segment for part in parts for segment in part.segments]
    if plan.order is None or not _meet(staging, segments, parts):
        return segments
    reading = SegmentStore(staging.store, staging.namespace, ByteCache(CACHE_BYTES))
    runs = [_Part(reading, part, staging.schema, plan) for part in parts if part.segments]
    return list(staging.stage(RowSorter(plan).merge(runs)))


def _meet(staging: Staging, segments: list[JobSegment], parts: Sequence[StagedPart]) -> bool:
    """Whether a key stands in two parts, or in one of them with two rows equally high."""
    if any(part.undecided for part in parts):
        return True
    found = shared_keys(staging.store, staging.namespace, staging.schema, segments)
    return found is not None


class _Part(Cursor):
    """The rows of one part, each with its place in the order."""

    def __init__(
        self, reading: SegmentStore, part: StagedPart, schema: Schema, plan: RowsPlan
    ) -> None:
        super().__init__()
        self._number = order_of(plan).number
        self._noted = notes_schema(plan)
        self._data = _pieces(reading, part.segments, schema)
        self._notes = _pieces(reading, part.notes, self._noted)
        self._ahead = Versions.empty(self._noted)

    def _next(self) -> Versions | None:
        rows = next(self._data, None)
        if rows is None:
            return None
        notes = self._notes_of(rows)
        fields = {**rows.fields, self._number: notes.fields[self._number]}
        return replace(rows.with_fields(fields), seqs=notes.seqs)

    def _notes_of(self, rows: Versions) -> Versions:
        """Return as many notes: they were written in the order of the rows."""
        parts, count = [self._ahead], len(self._ahead)
        while count < len(rows):
            parts.append(next(self._notes, Versions.empty(self._noted)))
            if not len(parts[-1]):
                break
            count += len(parts[-1])
        found = concat_versions(parts, self._noted)
        notes, self._ahead = found.slice(0, len(rows)), found.slice(len(rows), len(found))
        if not notes.keys.equals(rows.keys):
            raise InternalError("rows and their notes were staged in different orders")
        return notes


def _pieces(
    reading: SegmentStore, segments: Sequence[JobSegment], schema: Schema
) -> Iterator[Versions]:
    for segment in segments:
        entry = staged_entry(segment)
        cursor = SegmentCursor(reading, entry, KeyRange(), reverse=False, schema=schema)
        while cursor.load():
            yield cursor.take(cursor.edge(reverse=False), reverse=False)
