"""Whether what was staged is what an ingest may name: one job's own, disjoint, and covering.

A commit trusts nobody with its segments, since all of them become visible for good. Each has to
be the job's own and named once, and the range that the job replaces has to lie below their range
tombstones, or old rows of it would stay.

Whether segments of one job share a key is proved by reading keys, where ranges overlap. Tasks
that were given arbitrary rows stage segments whose key ranges interleave. That harms nobody as
long as no key stands in two of them: which row would win is nobody's choice (H38). Bounds alone
cannot show it, so the keys of overlapping segments are merged, group by group, in bounded
memory: only key blocks are read, and only of segments that overlap another one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.cursors import Cursor, SegmentCursor, merged
from reef.engine.reading.segments import SegmentStore
from reef.errors import InvalidInputError, Kind
from reef.formats.filter import hash_keys
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import JobSegment
from reef.jobs.staging import end_of_keys
from reef.manifest.roots import job_of
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = [
    "SharedKeys",
    "check_bounds",
    "check_named",
    "check_replaced",
    "overlapping_clusters",
    "shared_keys",
    "staged_entry",
]

CACHE_BYTES = 32 << 20
"""For segment tails: every group is read once."""
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys that stand in more than one segment: how many, and some of them."""

    count: int
    examples: tuple[bytes, ...]


def check_named(job_id: str, staged: Sequence[JobSegment]) -> None:
    """Refuse segments of another job, which are not this one's to give, and one that comes twice:
    each segment is in a manifest once at most.
    """
    seen: set[str] = set()
    for segment in staged:
        if job_of(segment.id) != job_id:
            raise InvalidInputError(
                f"segment {segment.id} was not staged by job {job_id}",
                kind=Kind.INVALID_OPTION,
                hint="Commit what this job's own staging returned",
                job=job_id,
            )
        if segment.id in seen:
            raise InvalidInputError(
                f"segment {segment.id} is named twice", kind=Kind.INVALID_OPTION, job=job_id
            )
        seen.add(segment.id)


def check_bounds(staged: Sequence[JobSegment]) -> None:
    """Parts of one job never overlap (H38): which row would win is nobody's choice.

    A segment without rows has nothing that could win, only what is replaced.
    """
    ordered = sorted((s for s in staged if s.rows), key=lambda segment: segment.min_key)
    for one, other in pairwise(ordered):
        # A range tombstone's end is a bound, and not itself a key.
        shares_edge = one.max_key == other.min_key and not one.replaces
        if one.max_key > other.min_key or shares_edge:
            raise InvalidInputError(
                f"staged segments {one.id} and {other.id} overlap near {other.min_key!r}",
                kind=Kind.INVALID_KEY,
                hint="Partition the rows by ranges of keys",
            )


def check_replaced(replaced: KeyRange | None, schema: Schema, staged: Sequence[JobSegment]) -> None:
    """Range tombstones cover what is replaced, all of it and nothing else: no old row stays, and
    none goes that was not to go.
    """
    tombstones = sorted((s.min_key, s.max_key) for s in staged if s.replaces)
    start = replaced.start if replaced is not None else b""
    end = b"" if replaced is None else replaced.end or end_of_keys(schema)
    covered = start
    for low, high in tombstones:
        if low < start or high > end:
            raise InvalidInputError(
                f"a range tombstone from {low!r} to {high!r} was staged; the job replaces "
                f"{'nothing' if replaced is None else f'{start!r} to {end!r}'}",
                kind=Kind.INVALID_KEY,
                hint="Stage with a part of the range that the job replaces",
            )
        if low > covered:
            break
        covered = max(covered, high)
    if covered < end:
        raise InvalidInputError(
            f"rows from {covered!r} on are to be replaced, and nothing that was staged does it",
            kind=Kind.INVALID_KEY,
            hint="Stage with `replaced`, or stage the range once more without rows",
        )


def shared_keys(
    store: Store, namespace: Namespace, schema: Schema, segments: Sequence[JobSegment]
) -> SharedKeys | None:
    """Return which keys stand in more than one of the segments; None if none does."""
    reading = SegmentStore(store, namespace, ByteCache(CACHE_BYTES))
    count = 0
    examples: list[bytes] = []
    for cluster in overlapping_clusters(segments):
        for piece in _pieces(reading, cluster, schema):
            for key in _repeated(piece):
                count += 1
                if len(examples) < EXAMPLES:
                    examples.append(key)
    return SharedKeys(count, tuple(examples)) if count else None


def overlapping_clusters(segments: Sequence[JobSegment]) -> list[list[JobSegment]]:
    """Return the segments that have rows, by groups whose ranges touch; lone ones are left out."""
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
            reading, staged_entry(segment), everything, reverse=False, schema=schema, columns=()
        )
        for segment in cluster
    ]
    return merged(cursors, reverse=False)


def _repeated(piece: Sequence[Versions]) -> list[bytes]:
    """Return the keys that more than one part has; no part has one twice."""
    keys = pa.concat_arrays([part.keys for part in piece])
    hashes = hash_keys(keys)
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return []
    # Equal hashes are almost always equal keys; what counts is the keys.
    suspects = keys.filter(pa.array(np.isin(hashes, twice)))
    counted = suspects.value_counts()
    repeated = np.asarray(counted.field("counts")) > 1
    found: list[bytes] = sorted(counted.field("values").filter(pa.array(repeated)).to_pylist())
    return found


def staged_entry(segment: JobSegment) -> SegmentEntry:
    """Return what reading goes by; a staged segment has no LSN yet."""
    return SegmentEntry(
        id=segment.id,
        level=0,
        size=segment.size,
        checksum=segment.checksum,
        rows=segment.rows,
        tombstones=segment.tombstones,
        min_key=segment.min_key,
        max_key=segment.max_key,
        lsn_min=0,
        lsn_max=0,
        tail_bytes=segment.tail_bytes,
        schema_id=0,
        set_hash=segment.set_hash,
        patches=segment.patches,
    )
