"""The condition of an ingest: nothing that its job has read was written since (H76).

    Unchanged     the snapshot that was read, and the key ranges that the job depends on
    KeysWritten   finds out whether an object of the log has written one of these keys

A batch has its keys in the log. An ingest names segments with their first and last key; where the
job depends on keys in between, the keys of the segment are read, and of a large one the bounds
alone decide: a conflict too many is safe. Range deletes and replaced ranges count as a whole.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from reef.engine.handles.transaction import WriteSet, write_set_of
from reef.engine.log.tail import entry_at
from reef.engine.read.caches import ByteCache
from reef.engine.read.scan import SegmentCursor
from reef.engine.read.segments import SegmentStore
from reef.errors import NotFoundError
from reef.formats.schema import Schema
from reef.formats.wal_object import Job, JobSegment, WalKind, WalObject, decode_ops
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

ROWS_READ_MAX = 1 << 20
"""Larger segments count as written everywhere between their bounds."""
CACHE_BYTES = 8 << 20


@dataclass(frozen=True)
class Unchanged:
    """The condition of an ingest: no object behind an LSN has written keys in some ranges."""

    generation: int
    """Generation that was read. A lease keeps it, and the log from its floor on."""
    lsn: int
    """The last LSN that was read."""
    ranges: tuple[KeyRange, ...] = (KeyRange(),)

    @cached_property
    def keys(self) -> "KeyRanges":
        return KeyRanges.of(self.ranges)

    @property
    def hint(self) -> str:
        """The next step after a conflict."""
        again = "Nothing was written. Run it again"
        if KeyRange() not in self.ranges:
            return again
        return f"{again}, or restrict it to a range of keys: it depends on all of them"


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Sorted ranges without overlap, as many as a hundred thousand single keys."""

    starts: Sequence[bytes]
    ends: Sequence[bytes | None]

    @classmethod
    def of(cls, ranges: Iterable[KeyRange]) -> "KeyRanges":
        """Sort ranges and join those that touch.

        >>> KeyRanges.of([KeyRange(b"c", b"d"), KeyRange(b"a", b"b"), KeyRange(b"b", b"bb")])
        KeyRanges(starts=[b'a', b'c'], ends=[b'bb', b'd'])
        """
        starts: list[bytes] = []
        ends: list[bytes | None] = []
        for one in sorted(ranges, key=lambda one: one.start):
            last = ends[-1] if ends else b""
            if starts and (last is None or one.start <= last):
                ends[-1] = None if last is None or one.end is None else max(last, one.end)
            else:
                starts.append(one.start)
                ends.append(one.end)
        return cls(starts, ends)

    def has(self, key: bytes) -> bool:
        place = bisect_right(self.starts, key) - 1
        if place < 0:
            return False
        end = self.ends[place]
        return end is None or key < end

    def has_one_of(self, keys: Sequence[bytes]) -> bool:
        """Whether one of some sorted keys is in a range; the shorter side is searched in the
        other."""
        if len(keys) <= len(self.starts):
            return any(map(self.has, keys))
        return any(
            place < len(keys) and (end is None or keys[place] < end)
            for place, end in (
                (bisect_left(keys, start), end)
                for start, end in zip(self.starts, self.ends, strict=True)
            )
        )

    def overlap(self, other: KeyRange) -> bool:
        """Whether some key may be in a range and in another one."""
        if self.has(other.start):
            return True
        place = bisect_right(self.starts, other.start)
        return place < len(self.starts) and (other.end is None or self.starts[place] < other.end)


@dataclass(frozen=True, slots=True)
class KeysWritten:
    """Whether an object of the log has written one of some keys."""

    store: Store
    namespace: Namespace
    schemas: Sequence[Schema]

    def touch(self, found: WalObject, keys: KeyRanges) -> bool:
        """Return whether a counting object has written one of these keys."""
        if found.header.kind is WalKind.INGEST and found.header.job is not None:
            return self._by_job(found.header.job, keys)
        if not found.header.kind.has_rows:
            return False
        known = {schema.id: schema for schema in self.schemas}
        schema = known.get(found.header.schema_id)
        if schema is None:  # a newer one: its keys cannot be decoded here
            return True
        name = f"LSN {found.header.lsn}"
        return _in_set(
            write_set_of([decode_ops(record, schema, name) for record in found.records]), keys
        )

    def _by_job(self, job: Job, keys: KeyRanges) -> bool:
        if job.replace is not None and keys.overlap(KeyRange(*job.replace)):
            return True
        return any(self._by_segment(segment, keys) for segment in job.segments)

    def _by_segment(self, segment: JobSegment, keys: KeyRanges) -> bool:
        bounds = KeyRange(segment.min_key, segment.max_key + b"\0")
        if not keys.overlap(bounds):
            return False
        if segment.rows > ROWS_READ_MAX or keys.has(segment.min_key):
            return True
        try:
            return self._reads_one_of(segment, bounds, keys)
        except NotFoundError:  # it was compacted and swept: it was there
            return True

    def _reads_one_of(self, segment: JobSegment, bounds: KeyRange, keys: KeyRanges) -> bool:
        reading = SegmentStore(self.store, self.namespace, ByteCache(CACHE_BYTES))
        cursor = SegmentCursor(
            reading,
            entry_at(segment, 0, 0),
            bounds,
            reverse=False,
            schema=self.schemas[-1],
            columns=(),
        )
        while cursor.load():
            rows = cursor.take(cursor.edge(reverse=False), reverse=False)
            if keys.has_one_of(rows.keys.to_pylist()):
                return True
        return False


def _in_set(written: WriteSet, keys: KeyRanges) -> bool:
    return keys.has_one_of(written.ordered) or any(map(keys.overlap, written.ranges))
