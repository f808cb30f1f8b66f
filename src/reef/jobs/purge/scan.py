"""The proof of an erasure: read every object of a namespace for rows of some keys.

    log          every record is decoded: its keys, the ends of range deletes, and the keys that
                 conditions of a batch name
    segments     of every generation, staged or orphaned: block index, and the key blocks of all
                 groups whose range holds a key. Filters are not asked
    manifests    the key bounds of segments
    quarantine   as the object was before it was copied there
    others       leases and records of the namespace have no rows; they are counted

A key that is only named as the *bound* of a range (of a loaded segment, of a range delete, of a
segment's lineage) is counted apart: no row of it is there. The end of a range that includes its last
key is that key with a zero byte behind it. An object that cannot be decoded is
reported as such, and nothing is proved of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.columns import decode_columns
from reef.formats.manifest import ManifestDecoder
from reef.formats.segment import Footer, SegmentTail, decode_footer, decode_tail
from reef.formats.wal_object import END_KEY, KEY, KIND, OpKind, WalHeader, WalKind, WalObject
from reef.jobs.compact.merge import read_range
from reef.jobs.purge.rewrite import matching_rows
from reef.jobs.rebuild.evidence import LAST_BYTES, FoundSegment
from reef.runtime import Executor
from reef.stores import ObjectInfo, Store, fetch
from reef.stores.base import reread_if_damaged

TASK_OBJECTS = 256
TASK_BYTES = 64 << 20
"""Objects that one task reads: at most so many, and about so many bytes."""


@dataclass(slots=True)
class ScannedObject:
    """The traces of some keys in one object."""

    key: str
    size: int
    modified_s: float
    rows: int = 0
    """Versions of the keys, tombstones too, and conditions that name one."""
    bounds: int = 0
    """Bounds of ranges that are one of the keys."""
    problem: str = ""
    """Why it cannot be decoded."""
    ingested: tuple[str, ...] = ()
    """Of an ingest in the log: the segments that it names."""
    marks: dict[str, int] = field(default_factory=dict)
    """Of an append: the batches of streams that it is."""
    is_gone: bool = False
    """Whether a sweep deleted it after it was listed."""

    @property
    def is_of_interest(self) -> bool:
        return bool(self.rows or self.bounds or self.problem or self.ingested)


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Objects to be searched for sorted keys."""

    store: Store
    objects: tuple[ObjectInfo, ...]
    keys: pa.Array


@dataclass(slots=True)
class ScanResult:
    """The objects in which something was found, and how many were read."""

    found: list[ScannedObject] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    gone: list[str] = field(default_factory=list)
    """Objects that were deleted after they were listed."""

    def add(self, other: "ScanResult") -> None:
        self.found += other.found
        self.gone += other.gone
        self.objects += other.objects
        self.bytes += other.bytes


def scan_objects(
    executor: Executor, store: Store, objects: Iterable[ObjectInfo], keys: pa.Array
) -> ScanResult:
    """Search objects for sorted keys, in parallel."""
    tasks = [ScanTask(store, chunk, keys) for chunk in _chunks(objects)]
    result = ScanResult()
    for part in executor.map(run_scan_task, tasks):
        result.add(part)
    return result


def _chunks(objects: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, ...]]:
    chunk: list[ObjectInfo] = []
    total = 0
    for info in objects:
        chunk.append(info)
        total += info.size
        if len(chunk) >= TASK_OBJECTS or total >= TASK_BYTES:
            yield tuple(chunk)
            chunk, total = [], 0
    if chunk:
        yield tuple(chunk)


def run_scan_task(task: ScanTask) -> ScanResult:
    """Search the objects of a task."""
    found = task.store.runtime.map(lambda info: _scan(task, info), task.objects)
    present = [one for one in found if not one.is_gone]
    interesting = [one for one in present if one.is_of_interest]
    gone = [one.key for one in found if one.is_gone]
    return ScanResult(interesting, len(present), sum(one.size for one in present), gone)


def _scan(task: ScanTask, info: ObjectInfo) -> ScannedObject:
    found = ScannedObject(info.key, info.size, info.last_modified_s)
    try:
        if info.key.endswith(".wal"):
            _scan_log(task, found)
        elif info.key.endswith(".seg"):
            reread_if_damaged(lambda: _scan_segment(task, found))
        elif info.key.endswith(".manifest.json"):
            _scan_manifest(task, found)
    except (CorruptionError, UnsupportedFormatError) as error:
        found.problem = error.message
    except NotFoundError:
        found.is_gone = True
    return found


# --- the log ----------------------------------------------------------------------------


def _scan_log(task: ScanTask, found: ScannedObject) -> None:
    name = found.key
    decoded = fetch(task.store, name, lambda body: WalObject.decode(body, name))
    header = decoded.header
    for record, start in zip(decoded.records, decoded.starts, strict=True):
        _scan_record(task.keys, record, name, start, found)
    found.rows += _conditions(header, task.keys)
    if header.kind is WalKind.APPEND:
        found.marks = dict(header.marks)
    if header.kind is WalKind.INGEST and header.job is not None:
        found.ingested = tuple(segment.id for segment in header.job.segments)
    if header.job is not None:
        ends = [key for s in header.job.segments for key in (s.min_key, s.max_key)]
        found.bounds += _bounds([*ends, *(header.job.replace or ())], task.keys)


def _scan_record(
    keys: pa.Array, record: memoryview, name: str, start: int, found: ScannedObject
) -> None:
    """Count the keys of a batch; no schema is needed for that."""
    types = {KEY: pa.binary(), KIND: pa.uint8(), END_KEY: pa.binary()}
    _, columns = decode_columns(record, types, name, start)
    named = pc.is_in(columns[KEY], value_set=keys)
    is_range = pc.equal(columns[KIND], pa.scalar(OpKind.DELETE_RANGE, pa.uint8()))
    found.rows += pc.and_not(named, is_range).true_count
    found.bounds += pc.and_(named, is_range).true_count
    if END_KEY in columns:
        found.bounds += _bounds(columns[END_KEY].drop_null().to_pylist(), keys)


def _conditions(header: WalHeader, keys: pa.Array) -> int:
    """Return how many conditions of batches name one of the keys."""
    named = [condition[1] for batch in header.batches for condition in batch.when or ()]
    return _equal(named, keys)


def _equal(named: Sequence[bytes | None], keys: pa.Array) -> int:
    given = [key for key in named if isinstance(key, bytes)]
    return int(pc.is_in(pa.array(given, pa.binary()), value_set=keys).true_count)


def _bounds(named: Sequence[bytes | None], keys: pa.Array) -> int:
    """Return how many bounds of ranges are one of the keys, or what follows it directly."""
    following = pc.binary_join_element_wise(keys, pa.scalar(b"\0"), pa.scalar(b""))
    return _equal(named, pa.concat_arrays([keys, following]))


# --- segments and manifests ---------------------------------------------------------------


def _scan_segment(task: ScanTask, found: ScannedObject) -> None:
    tail = _tail(task.store, found)
    found.rows = sum(len(rows) for rows in matching_rows(task.store, tail, task.keys))
    ends = [key for cover in tail.footer.covers for key in (cover.start, cover.stop)]
    ends += [key for one in tail.range_tombstones for key in (one.start, one.end)]
    found.bounds = _bounds(ends, task.keys)


def _tail(store: Store, found: ScannedObject) -> SegmentTail:
    """Read the tail of a segment that no manifest needs to name: the footer says how long it is."""
    length = LAST_BYTES
    while True:
        last = read_range(store, found.key, max(0, found.size - length), found.size)
        footer = decode_footer(last, found.size, found.key)
        if isinstance(footer, Footer):
            break
        length = footer
    tail_bytes = FoundSegment("", found.size, footer).tail_bytes
    if tail_bytes > len(last):
        last = read_range(store, found.key, found.size - tail_bytes, found.size)
    return decode_tail(last, found.size, found.key)


def _scan_manifest(task: ScanTask, found: ScannedObject) -> None:
    name = found.key
    manifest = fetch(task.store, name, lambda body: ManifestDecoder().decode(body, name))
    ends = [key for entry in manifest.segments for key in (entry.min_key, entry.max_key)]
    found.bounds = _bounds(ends, task.keys)


def sorted_keys(keys: Iterable[bytes]) -> pa.Array:
    """Return keys in order, each once."""
    return pa.array(sorted(set(keys)), pa.binary())


def limits_of(keys: pa.Array, lsn: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return one LSN for all keys."""
    return np.full(len(keys), lsn, np.int64)
