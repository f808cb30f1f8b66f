"""The rows of a load with `live_wins` as changes: those that win, as they become visible.

Such a load begins at LSN b and commits at n. Its rows sort at b, below everything written in
(b, n), and become visible at n. A change stream that has shown the writes in (b, n) must show at n
exactly the difference that the load makes:

    a put, delete or range delete in (b, n)   the row of the load was beaten: nothing
    patches and merges in (b, n)              the row of the load with all of them applied
    none of them                              the row of the load

All versions above b are in the state just before n: from b until the ingest is folded, no fold or
compaction drops or resolves one (H50, H60). So that state, a generation with a floor of at most n
and the log from there, is all that is read, and of its segments only those with rows above b. The
load and the versions are merged piece by piece, in bounded memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.history.as_of import History, PointInTime
from reef.engine.read.merge import RangeTombstones, drop_covered, newest_versions, sorted_places
from reef.engine.read.scan import Cursor, LateCursor, RowsCursor, SegmentCursor, merged
from reef.engine.read.view import View
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions
from reef.types import KeyRange


def state_before(history: History, start: Manifest, head: Manifest, lsn: int) -> View:
    """Return the state just before an LSN, from a generation whose floor is at or below it.

    The log may have been written with newer schemas than the generation has.
    """
    known = msgspec.structs.replace(start, schemas=head.schemas)
    return history.replay(PointInTime(known, lsn - 1), head).view()


class LiveWrites:
    """The versions above the begin of a load, as of just before its ingest."""

    def __init__(self, view: View, begin_lsn: int, schema: Schema) -> None:
        self._begin_lsn, self._schema = begin_lsn, schema
        self._segments = view.segments
        manifest, self._tables = view.cut()
        everything = (*self._tables[0].ingested, *manifest.segments)
        self._entries = [entry for entry in everything if entry.lsn_max > begin_lsn]

    def visible(self, rows: Versions) -> Versions:
        """Return the rows of a load that become visible, each with its own sequence.

        The rows are sorted, and have distinct keys and sequences.
        """
        if not len(rows):
            return rows
        span = KeyRange(rows.keys[0].as_py(), rows.keys[len(rows) - 1].as_py() + b"\0")
        entries = [e for e in self._entries if span.touches(e.min_key, e.max_key)]
        deletes = [table.range_tombstones for table in self._tables]
        deletes += [self._segments.deletes(entry) for entry in entries]
        loaded = rows.under(self._schema).with_lsn(self._begin_lsn)
        cursors = [RowsCursor(iter([loaded])), *self._newer(entries, span)]
        parts = [self._winning(piece, deletes) for piece in merged(cursors, reverse=False)]
        return concat_versions([Versions.empty(self._schema), *parts], self._schema)

    def _newer(self, entries: Sequence[SegmentEntry], span: KeyRange) -> Iterator[Cursor]:
        """Yield the sources that may have versions above the begin in a key range."""
        for table in self._tables:
            for pieces in table.pieces(span, False):
                yield RowsCursor(piece.under(self._schema) for piece in pieces)
        yield from (self._late_cursor(entry, span) for entry in entries)

    def _late_cursor(self, entry: SegmentEntry, span: KeyRange) -> LateCursor:
        return LateCursor(
            max(entry.min_key, span.start),
            lambda: SegmentCursor(self._segments, entry, span, reverse=False, schema=self._schema),
        )

    def _winning(self, piece: Sequence[Versions], deletes: Sequence[RangeTombstones]) -> Versions:
        """Return the rows of the load that no whole version hides, with those above applied."""
        rows = concat_versions([Versions.empty(self._schema), *piece], self._schema)
        loaded = rows.take(np.flatnonzero(rows.lsns == self._begin_lsn))
        newer = rows.take(np.flatnonzero(rows.lsns > self._begin_lsn))
        partial = newer.are_partial()
        loaded = drop_covered(loaded, deletes)
        hidden = _are_in(loaded.keys, newer.keys.filter(pa.array(~partial)))
        loaded = loaded.take(np.flatnonzero(~hidden))
        above = newer.take(np.flatnonzero(partial & _are_in(newer.keys, loaded.keys)))
        if not len(above):
            return loaded
        above = above.take(sorted_places(above))
        resolved = newest_versions([loaded, above], self._schema, deletes)
        return replace(resolved, seqs=loaded.seqs)


def _are_in(keys: pa.Array, known: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(keys, value_set=known).to_numpy(zero_copy_only=False)
    return found
