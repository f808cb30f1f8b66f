"""Stage segments that are not visible yet, and check them before their job commits.

The tasks of a job write sorted rows as segments. A `Staging` is small and picklable, so that any
machine can stage. Names are new at every call: a task that runs twice leaves segments that no
ingest names, and a sweep deletes them (H39). Rows are streamed in pieces; memory is bounded by a
piece and the writer's current group.

**Checks.** All segments of an ingest become visible for good, so a commit trusts no task. Each
segment must be the job's own and named once, and their range tombstones must cover the range that
the job replaces, or old rows of it would stay visible.

Tasks with arbitrary rows stage segments whose key ranges interleave. That is safe if no key is in
two of them, since nothing decides which row would win (H38). Bounds cannot prove it, so the keys of
overlapping segments are merged, group by group, in bounded memory: only key blocks are read, and
only of segments that overlap another one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import IngestSettings
from reef.engine.log.tail import entry_at
from reef.engine.read.caches import ByteCache
from reef.engine.read.scan import Cursor, SegmentCursor, merged
from reef.engine.read.segments import SegmentStore
from reef.engine.search.specs import load_indexes
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.coding import Codec
from reef.formats.manifest import IndexSpec, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import Lineage, SegmentSummary
from reef.formats.segment_index import hash_keys
from reef.formats.segment_writer import BuildableIndex, SegmentWriter
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions
from reef.formats.wal_object import JobSegment, end_of_keys
from reef.manifest.roots import job_of, staged_id
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

ROW_SEQ = 1
"""Sequence of every row: range tombstones of a replaced range have 0, so they hide older rows
only."""
PIECE_ROWS = 65_536
"""Larger pieces are cut, so that segments can end near their size."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Where and how the segments of one job are written."""

    store: Store
    namespace: Namespace
    job_id: str
    schema: Schema
    settings: IngestSettings
    indexes: tuple[IndexSpec, ...] = ()
    """Search indexes of the segments."""

    def stage(
        self, pieces: Iterable[Versions], replaced: KeyRange | None = None
    ) -> tuple[JobSegment, ...]:
        """Write sorted rows with distinct keys; return the segments as an ingest names them.

        `replaced` is the part of a replaced range that this task covers, rows or none.
        """
        rows = _StagedRows(pieces, replaced)
        indexes = load_indexes(self.store, self.namespace, self.indexes)
        done: list[JobSegment] = []
        start = replaced.start if replaced is not None else b""
        while rows.next_key is not None or (replaced is not None and not done):
            done.append(self._write(rows, start, replaced, indexes))
            start = rows.next_key or b""
        return tuple(done)

    def _write(
        self,
        rows: "_StagedRows",
        start: bytes,
        replaced: KeyRange | None,
        indexes: Sequence[BuildableIndex],
    ) -> JobSegment:
        runtime = self.store.runtime
        segment_id = staged_id(self.job_id, runtime.ulid())
        writer = SegmentWriter(
            self.schema,
            0,
            Lineage(segment_id, int(runtime.wall_s() * 1000), job=self.job_id),
            codec=Codec[self.settings.codec.upper()],
            group_bytes=self.settings.group_bytes,
            indexes=indexes,
        )

        def pieces() -> Iterator[Versions]:
            size = 0  # at least one piece: the head alone may be as long as a segment should be
            while rows.next_key is not None and size < self.settings.segment_bytes:
                yield rows.take()
                size = writer.bytes_written
            if replaced is not None:  # only now is the start of the next segment known
                end = rows.next_key or replaced.end or end_of_keys(self.schema)
                writer.range_tombstones = (RangeTombstone(start, end, 0, 0),)

        self.store.upload(self.namespace.segment(segment_id), writer.write(pieces()))
        return job_segment_of(segment_id, writer.summary)


class _StagedRows:
    """Checked pieces of rows, with the next key read ahead."""

    def __init__(self, pieces: Iterable[Versions], within: KeyRange | None) -> None:
        self._pieces = (part for piece in pieces for part in _cut_pieces(piece))
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
                f"rows to be staged are unsorted or repeat a key near {keys[0]!r}",
                kind=ErrorKind.INVALID_KEY,
                hint="Sort them by key, and choose one row of each key",
            )
        self._last = keys[-1]
        if self._within is not None and not (
            self._within.has(keys[0]) and self._within.has(keys[-1])
        ):
            raise InvalidInputError(
                f"rows from {keys[0]!r} to {keys[-1]!r} are outside of the replaced range",
                kind=ErrorKind.INVALID_KEY,
            )


def _cut_pieces(piece: Versions) -> Iterator[Versions]:
    for start in range(0, len(piece), PIECE_ROWS):
        yield piece.slice(start, min(start + PIECE_ROWS, len(piece)))


def job_segment_of(segment_id: str, summary: SegmentSummary) -> JobSegment:
    """Return the entry of a segment in its job's objects, from its footer."""
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


def entry_of(segment_id: str, summary: SegmentSummary) -> SegmentEntry:
    """Return the manifest entry of a segment, from its footer."""
    footer = summary.footer
    return SegmentEntry(
        id=segment_id,
        level=footer.level,
        size=summary.size,
        checksum=summary.checksum,
        rows=footer.rows,
        tombstones=footer.tombstones,
        min_key=footer.min_key,
        max_key=footer.max_key,
        lsn_min=footer.lsn_min,
        lsn_max=footer.lsn_max,
        tail_bytes=summary.tail_bytes,
        schema_id=footer.schema.id,
        set_hash=footer.set_hash,
        patches=footer.patches,
    )


CACHE_BYTES = 32 << 20
"""For segment tails: every group is read once."""
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys that are in more than one segment: how many, and some of them."""

    count: int
    examples: tuple[bytes, ...]


def check_named(job_id: str, staged: Sequence[JobSegment]) -> None:
    """Refuse segments of another job, and repeated ones: a manifest names each at most once."""
    seen: set[str] = set()
    for segment in staged:
        if job_of(segment.id) != job_id:
            raise InvalidInputError(
                f"segment {segment.id} was not staged by job {job_id}",
                kind=ErrorKind.INVALID_OPTION,
                hint="Commit the segments that this job's staging returned",
                job=job_id,
            )
        if segment.id in seen:
            raise InvalidInputError(
                f"segment {segment.id} is named twice", kind=ErrorKind.INVALID_OPTION, job=job_id
            )
        seen.add(segment.id)


def check_bounds(staged: Sequence[JobSegment]) -> None:
    """Refuse segments of one job that overlap: nothing decides which row would win (H38).

    A segment without rows only replaces a range.
    """
    ordered = sorted((s for s in staged if s.rows), key=lambda segment: segment.min_key)
    for one, other in pairwise(ordered):
        # The end of a range tombstone is an exclusive bound.
        shares_edge = one.max_key == other.min_key and not one.replaces
        if one.max_key > other.min_key or shares_edge:
            raise InvalidInputError(
                f"staged segments {one.id} and {other.id} overlap near {other.min_key!r}",
                kind=ErrorKind.INVALID_KEY,
                hint="Partition the rows by ranges of keys",
            )


def check_replaced(replaced: KeyRange | None, schema: Schema, staged: Sequence[JobSegment]) -> None:
    """Check that range tombstones cover exactly the replaced range."""
    tombstones = sorted((s.min_key, s.max_key) for s in staged if s.replaces)
    start = replaced.start if replaced is not None else b""
    end = b"" if replaced is None else replaced.end or end_of_keys(schema)
    covered = start
    for low, high in tombstones:
        if low < start or high > end:
            raise InvalidInputError(
                f"a range tombstone from {low!r} to {high!r} was staged; the job replaces "
                f"{'nothing' if replaced is None else f'{start!r} to {end!r}'}",
                kind=ErrorKind.INVALID_KEY,
                hint="Stage with a part of the range that the job replaces",
            )
        if low > covered:
            break
        covered = max(covered, high)
    if covered < end:
        raise InvalidInputError(
            f"the range to replace is not covered from {covered!r} on by any staged segment",
            kind=ErrorKind.INVALID_KEY,
            hint="Stage with `replaced`, or stage the range once more without rows",
        )


def shared_keys(
    store: Store, namespace: Namespace, schema: Schema, segments: Sequence[JobSegment]
) -> SharedKeys | None:
    """Return the keys that several segments share; None if no key is shared."""
    reading = SegmentStore(store, namespace, ByteCache(CACHE_BYTES))
    count = 0
    examples: list[bytes] = []
    for cluster in overlapping_clusters(segments):
        for piece in _pieces(reading, cluster, schema):
            for key in _repeated_keys(piece):
                count += 1
                if len(examples) < EXAMPLES:
                    examples.append(key)
    return SharedKeys(count, tuple(examples)) if count else None


def overlapping_clusters(segments: Sequence[JobSegment]) -> list[list[JobSegment]]:
    """Return groups of segments with rows whose ranges overlap, without lone segments."""
    clusters: list[list[JobSegment]] = []
    highest = b""
    for segment in sorted((s for s in segments if s.rows), key=lambda s: s.min_key):
        if clusters and segment.min_key <= highest:
            clusters[-1].append(segment)
        else:
            clusters.append([segment])
        highest = max(highest, segment.max_key)
    return [cluster for cluster in clusters if len(cluster) > 1]


def _pieces(
    reading: SegmentStore, cluster: Sequence[JobSegment], schema: Schema
) -> Iterator[list[Versions]]:
    everything = KeyRange()
    cursors: list[Cursor] = [
        SegmentCursor(
            reading, entry_at(segment, 0, 0), everything, reverse=False, schema=schema, columns=()
        )
        for segment in cluster
    ]
    return merged(cursors, reverse=False)


def _repeated_keys(piece: Sequence[Versions]) -> list[bytes]:
    """Return the keys that are in more than one part; no part repeats a key."""
    keys = pa.concat_arrays([part.keys for part in piece])
    hashes = hash_keys(keys)
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return []
    # Equal hashes are almost always equal keys; compare the keys.
    suspects = keys.filter(pa.array(np.isin(hashes, twice)))
    counted = suspects.value_counts()
    repeated = np.asarray(counted.field("counts")) > 1
    found: list[bytes] = sorted(counted.field("values").filter(pa.array(repeated)).to_pylist())
    return found
