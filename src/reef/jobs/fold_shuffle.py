"""A fold by shuffle: for a log that is more than one task should take.

    survey    tasks read parts of the log: headers, range deletes, a sample of the keys
    judge     the driver, by the headers alone, as in every fold
    read      tasks decode what counts into rows
    shuffle   rows go to the range of their key, there sorted by key and newest first
    write     a task for each range merges and writes, with the code of every fold

Ranges are cut so that each becomes about one segment; a range of which nothing is left gets an
empty one, since the segments of a fold stand for all keys together. What comes out has the rows
and the set hash of a fold in one task, cut at other keys. Names are new at every attempt, and
only what the driver is handed back is published (H39).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from reef.config import FoldSettings
from reef.engine.log import Log, Slot
from reef.engine.reading.merge import newest_versions
from reef.engine.reading.tombstones import RangeTombstones
from reef.errors import InternalError
from reef.formats.batch import OpKind
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import WalHeader, WalKind
from reef.jobs.compact_plan import split_keys
from reef.jobs.fold_rows import from_batch, shuffled_schema, to_batches
from reef.jobs.fold_task import FoldTask, decoded, missing_object, write_folded, write_trace
from reef.manifest.head import HeadFinder
from reef.types import KeyRange

__all__ = [
    "RANGES_MAX",
    "Shuffle",
    "Shuffler",
    "Survey",
    "count_ranges",
    "survey_log",
    "write_by_shuffle",
]

TASK_BYTES = 32 << 20
"""How much of the log one task reads."""
RANGES_MAX = 512
RANGE_BYTES_MIN = 4 << 20
"""Smaller ranges are not worth a task each."""
SAMPLED_BYTES = 64 << 10
"""One key of so much log is looked at to find the ranges."""
SAMPLES_MAX = 64
"""Of one object."""

In = TypeVar("In")
Out = TypeVar("Out")
Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """What is to be read, how it is brought together, and what becomes of it."""

    read: Callable[[Any], Batches]
    tasks: Sequence[Any]
    """`read` of each gives rows, in any order."""
    columns: pa.Schema
    cuts: Sequence[bytes]
    """Keys between ranges; each one belongs to the range behind it."""
    write: Callable[[Any, int, Batches], Any]
    """Gets the plan, the number of a range, and its rows: sorted by `key`, then from the
    highest `lsn` and `seq` down."""
    plan: Any


@runtime_checkable
class Shuffler(Protocol):
    """An executor that can also bring rows together by key."""

    def parallelism(self) -> int:
        """Return how many tasks run at once."""

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]: ...

    def shuffle(self, job: Shuffle) -> dict[int, Any]:
        """Return what was written, by range; one without rows has no result."""


# --- survey -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartTask:
    """Some WAL objects, to be looked at or to be read."""

    fold: FoldTask
    lsns: tuple[int, ...]
    patched: bool = False
    """Whether rows on their way have the columns of patches."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What a driver needs to know of a WAL object."""

    header: WalHeader
    tombstones: tuple[RangeTombstone, ...] = ()
    samples: tuple[tuple[bytes, int], ...] = ()
    """Keys, each for so many bytes."""
    patched: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """What a driver knows of a part of the log."""

    objects: dict[int, Surveyed]
    sizes: dict[int, int]

    def headers(self, lsns: Sequence[int]) -> list[WalHeader | None]:
        return [self.objects[lsn].header for lsn in lsns]

    def only(self, lsns: Sequence[int]) -> "Survey":
        """Return the part that counts."""
        return Survey({n: self.objects[n] for n in lsns}, {n: self.sizes[n] for n in lsns})

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def tombstones(self) -> tuple[RangeTombstone, ...]:
        return tuple(t for found in self.objects.values() for t in found.tombstones)

    @property
    def samples(self) -> list[tuple[bytes, int]]:
        return [sample for found in self.objects.values() for sample in found.samples]

    @property
    def patched(self) -> bool:
        return any(found.patched for found in self.objects.values())


def survey_log(
    shuffler: Shuffler, empty: FoldTask, slots: Sequence[Slot], lsns: Sequence[int]
) -> Survey:
    """Look at the objects of some slots, wherever the executor has its tasks."""
    sizes = {slot.lsn: slot.size for slot in slots}
    known = {lsn: sizes[lsn] for lsn in lsns if lsn in sizes}
    tasks = [PartTask(empty, part) for part in _parts(known)]
    found = [one for some in shuffler.map(run_survey, tasks) for one in some]
    return Survey({one.header.lsn: one for one in found}, known)


def run_survey(task: PartTask) -> list[Surveyed]:
    """Look at the objects of a task."""
    manifest = _manifest(task.fold)
    known = {0, *(schema.id for schema in manifest.schemas)}
    log = Log(task.fold.store, task.fold.namespace)
    surveyed = []
    for lsn, found in zip(task.lsns, log.read_many(list(task.lsns)), strict=True):
        if found is None:
            raise missing_object(task.fold.namespace, lsn)
        header = found.header
        if header.kind is not WalKind.BATCHES or header.schema_id not in known:
            surveyed.append(Surveyed(header))
            continue
        rows, tombstones = decoded(found, manifest, task.fold.namespace)
        size = sum(len(record) for record in found.records)
        patched = any((part.kinds == OpKind.PATCH).any() for part in rows)
        surveyed.append(Surveyed(header, tuple(tombstones), _samples(rows, size), bool(patched)))
    return surveyed


def _samples(rows: Sequence[Versions], size: int) -> tuple[tuple[bytes, int], ...]:
    """Return keys from the middles of even parts: batches are often sorted."""
    keys = pa.chunked_array([part.keys for part in rows], pa.binary())
    if not len(keys):
        return ()
    count = min(len(keys), SAMPLES_MAX, 1 + size // SAMPLED_BYTES)
    places = (np.arange(count) * 2 + 1) * len(keys) // (2 * count)
    chosen: list[bytes] = keys.take(pa.array(places)).to_pylist()
    return tuple((key, max(1, size // count)) for key in chosen)


def _parts(sizes: dict[int, int]) -> list[tuple[int, ...]]:
    """Return LSNs in parts, each of about as many bytes as a task reads."""
    parts: list[list[int]] = []
    total = TASK_BYTES
    for lsn, size in sizes.items():
        if total + size > TASK_BYTES or not parts:
            parts.append([])
            total = 0
        parts[-1].append(lsn)
        total += size
    return [tuple(part) for part in parts]


# --- shuffle ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangePlan:
    """What the tasks of all ranges need. Picklable."""

    fold: FoldTask
    cuts: tuple[bytes, ...]
    tombstones: tuple[RangeTombstone, ...]
    patched: bool

    def task(self, place: int) -> FoldTask:
        bounds = [b"", *self.cuts, None]
        return replace(self.fold, wanted=KeyRange(bounds[place] or b"", bounds[place + 1]))


def count_ranges(size: int, settings: FoldSettings, parallelism: int) -> int:
    """Return how many ranges a log gets: segments of the wanted size, and no idle core.

    >>> count_ranges(580 << 20, FoldSettings(), 4), count_ranges(8 << 20, FoldSettings(), 16)
    (12, 2)
    """
    wanted = -(-size // settings.segment_bytes_max)
    even = -(-wanted // parallelism) * parallelism
    return min(RANGES_MAX, max(1, wanted, min(even, size // RANGE_BYTES_MIN)))


def write_by_shuffle(
    shuffler: Shuffler, task: FoldTask, manifest: Manifest, counting: Survey
) -> list[SegmentEntry]:
    """Fold what counts: `task` names it, and the survey knows where its keys lie."""
    if not counting.objects:
        return []
    ranges = count_ranges(counting.total_bytes, task.settings, shuffler.parallelism())
    cuts = tuple(split_keys(counting.samples, ranges))
    plan = RangePlan(task, cuts, counting.tombstones, counting.patched)
    columns = shuffled_schema(manifest.schema, patched=plan.patched)
    parts = [PartTask(task, part, plan.patched) for part in _parts(counting.sizes)]
    written = shuffler.shuffle(Shuffle(read_part, parts, columns, cuts, write_range, plan))
    if not any(written.values()):
        return list(write_trace(task, manifest, plan.tombstones)) if plan.tombstones else []
    entries: list[SegmentEntry] = []
    for place in range(len(cuts) + 1):
        found = written.get(place) or write_trace(plan.task(place), manifest, plan.tombstones)
        entries += found
    return entries


def read_part(task: PartTask) -> Batches:
    """Yield the rows of some objects, in no order."""
    manifest = _manifest(task.fold)
    log = Log(task.fold.store, task.fold.namespace)
    parts = [Versions.empty(manifest.schema)]
    for lsn, found in zip(task.lsns, log.read_many(list(task.lsns)), strict=True):
        if found is None:
            raise missing_object(task.fold.namespace, lsn)
        parts += decoded(found, manifest, task.fold.namespace)[0]
    rows = concat_versions(parts, manifest.schema)
    return to_batches(rows, shuffled_schema(manifest.schema, patched=task.patched))


def write_range(plan: RangePlan, place: int, batches: Batches) -> tuple[SegmentEntry, ...]:
    """Merge and write the rows of one range, which come sorted."""
    task, manifest = plan.task(place), _manifest(plan.fold)
    parts: Iterator[Versions] = (from_batch(batch, manifest.schema) for batch in batches)
    if not plan.patched:  # a key may have any number of versions: one of each batch is enough
        deleted = [RangeTombstones.of(plan.tombstones)]
        parts = (newest_versions([p], manifest.schema, deleted) for p in parts)
    rows = concat_versions([Versions.empty(manifest.schema), *parts], manifest.schema)
    _check_range(rows, task.wanted)
    return write_folded(task, manifest, rows, plan.tombstones)


def _check_range(rows: Versions, wanted: KeyRange) -> None:
    """Rows of another range would be in two segments of one level, or in none."""
    if not len(rows):
        return
    keys = KeysInOrder(rows.keys)
    for key in (keys[0], keys[-1]):
        if not wanted.has(key):
            raise InternalError(f"the shuffle brought the key {key!r} into {wanted}")


def _manifest(task: FoldTask) -> Manifest:
    return HeadFinder(task.store, task.namespace).load(task.generation)
