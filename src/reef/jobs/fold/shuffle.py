"""A fold by shuffle, for a log that is too long for one task.

    1  survey    tasks read parts of the log: headers, range tombstones, a sample of the keys
    2  replay    the driver classifies the headers by the rules of the log
    3  read      tasks decode the objects that count into rows
    4  shuffle   rows go to the range of their key, sorted by key, newest version first
    5  write     one task per range merges and writes, with the code of every fold

Ranges are cut so that each becomes about one segment; a range without rows gets an empty segment,
since the segments of a fold cover all keys together. The result has the rows and the set hash of a
fold in one task, cut at other keys. Segment names are new at every attempt, and only those that
the driver receives are published (H39).

Shuffled rows are plain columns, since a shuffle supports few types:

    key  lsn  seq  kind  expires  f<n>, the values of a column  t<n>, its operators  merged_at

Every value must arrive bit for bit. Types that the shuffle may lack (unsigned integers,
nanoseconds, vectors) or may normalise (text, floats) travel as integers of the same width or as
bytes. Rows are compared by key, LSN and sequence only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from reef.config import FoldSettings
from reef.engine.context import NamespaceContext
from reef.engine.log.log import LogRules, replay_headers
from reef.engine.read.merge import RangeTombstones, newest_versions
from reef.errors import InternalError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema, as_codes
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import WalHeader, WalObject
from reef.jobs.compact.plan import split_keys
from reef.jobs.fold.task import (
    FoldedLog,
    FoldTask,
    LogPart,
    decoded,
    missing_object,
    write_folded,
    write_trace,
)
from reef.types import KeyRange

TASK_BYTES = 32 << 20
"""How much of the log one task reads."""
RANGES_MAX = 512
RANGE_BYTES_MIN = 4 << 20
"""Smaller ranges are not worth a task each."""
SAMPLED_BYTES = 64 << 10
"""One key is sampled per so many bytes of the log."""
SAMPLES_MAX = 64
"""Per object."""
BATCH_ROWS = 65_536
WIDTHS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
AS_BYTES = frozenset(
    example.id
    for example in (pa.string(), pa.binary(), pa.decimal128(1), pa.list_(pa.float32(), 1))
)
FIXED = [
    ("key", pa.binary()),
    ("lsn", pa.int64()),
    ("seq", pa.int64()),
    ("kind", pa.int8()),
    ("expires", pa.int64()),
]

In = TypeVar("In")
Out = TypeVar("Out")
Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A job for a shuffler: tasks that read rows, and a function that writes each range."""

    read: Callable[[Any], Batches]
    tasks: Sequence[Any]
    """`read` of each yields rows, in any order."""
    columns: pa.Schema
    cuts: Sequence[bytes]
    """Keys between ranges; each belongs to the range behind it."""
    write: Callable[[Any, int, Batches], Any]
    """Takes the plan, the number of a range, and its rows: sorted by `key`, then descending by
    `lsn` and `seq`."""
    plan: Any


@runtime_checkable
class Shuffler(Protocol):
    """An executor that can also partition rows by key."""

    def parallelism(self) -> int:
        """Return how many tasks run at once."""

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]: ...

    def shuffle(self, job: Shuffle) -> dict[int, Any]:
        """Return the results of `write` by range; a range without rows has none."""


def fold_by_shuffle(
    shuffler: Shuffler, task: FoldTask, manifest: Manifest, sizes: Mapping[int, int]
) -> FoldedLog:
    """Fold the slots of a plan, given with their sizes, on a shuffler."""
    survey = _survey_log(shuffler, task, manifest, sizes)
    part, rules = LogPart(manifest, task.namespace), LogRules(manifest)
    headers = {lsn: surveyed.header for lsn, surveyed in survey.objects.items()}
    unknown = (lsn for lsn, header in headers.items() if not part.knows_schema(header))
    end = min(unknown, default=task.end)
    for header, verdict in replay_headers(rules, headers, end=end):
        part.add(header, verdict)
    if rules.next_lsn < end:
        raise missing_object(task.namespace, rules.next_lsn)
    replayed = part.task(task, end, rules.open_jobs)
    written = _write_ranges(shuffler, replayed, manifest, survey.only(part.applied))
    return FoldedLog.of(task, part, rules.state(), written)


# --- survey -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartTask:
    """Some WAL objects, to be surveyed or read."""

    fold: FoldTask
    lsns: tuple[int, ...]
    patched: bool = False
    """Whether the rows have the columns of patches."""

    def read(self) -> Iterator[WalObject]:
        """Yield the objects; NotFoundError names one that is gone."""
        log = NamespaceContext(self.fold.store, self.fold.namespace).log
        for lsn, wal_object in zip(self.lsns, log.read_many(list(self.lsns)), strict=True):
            if wal_object is None:
                raise missing_object(self.fold.namespace, lsn)
            yield wal_object


@dataclass(frozen=True, slots=True)
class SurveyedObject:
    """The facts about a WAL object that the driver plans with."""

    header: WalHeader
    tombstones: tuple[RangeTombstone, ...] = ()
    samples: tuple[tuple[bytes, int], ...] = ()
    """Keys, each for so many bytes."""
    patched: bool = False


@dataclass(frozen=True, slots=True)
class ShuffleSurvey:
    """The surveyed objects of a part of the log."""

    objects: dict[int, SurveyedObject]
    sizes: dict[int, int]

    def only(self, lsns: Sequence[int]) -> "ShuffleSurvey":
        """Return the survey of some LSNs."""
        return ShuffleSurvey({n: self.objects[n] for n in lsns}, {n: self.sizes[n] for n in lsns})

    @property
    def tombstones(self) -> tuple[RangeTombstone, ...]:
        return tuple(t for surveyed in self.objects.values() for t in surveyed.tombstones)

    @property
    def samples(self) -> list[tuple[bytes, int]]:
        return [sample for surveyed in self.objects.values() for sample in surveyed.samples]

    @property
    def patched(self) -> bool:
        return any(surveyed.patched for surveyed in self.objects.values())


def _survey_log(
    shuffler: Shuffler, task: FoldTask, manifest: Manifest, sizes: Mapping[int, int]
) -> ShuffleSurvey:
    """Survey the objects of some slots, as tasks of the executor."""
    known = {lsn: n for lsn, n in sizes.items() if lsn not in manifest.skipped_lsns}
    tasks = [PartTask(task, part) for part in _parts(known)]
    surveyed = [one for some in shuffler.map(run_survey, tasks) for one in some]
    return ShuffleSurvey({one.header.lsn: one for one in surveyed}, known)


def run_survey(task: PartTask) -> list[SurveyedObject]:
    """Survey the objects of a task."""
    manifest = _manifest(task.fold)
    part = LogPart(manifest, task.fold.namespace)
    surveyed = []
    for wal_object in task.read():
        header = wal_object.header
        if not header.kind.has_rows or not part.knows_schema(header):
            surveyed.append(SurveyedObject(header))
            continue
        rows, tombstones = decoded(wal_object, manifest, task.fold.namespace)
        size = sum(len(record) for record in wal_object.records)
        patched = any(versions.has_partial for versions in rows)
        samples = _samples(rows, size)
        surveyed.append(SurveyedObject(header, tuple(tombstones), samples, bool(patched)))
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


def _parts(sizes: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return LSNs in parts of about TASK_BYTES each."""
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
    """The input of the tasks of all ranges. Picklable."""

    fold: FoldTask
    cuts: tuple[bytes, ...]
    tombstones: tuple[RangeTombstone, ...]
    patched: bool

    def task(self, place: int) -> FoldTask:
        bounds = [b"", *self.cuts, None]
        return replace(self.fold, key_range=KeyRange(bounds[place] or b"", bounds[place + 1]))


def count_ranges(size: int, settings: FoldSettings, parallelism: int) -> int:
    """Return how many ranges a log gets: segments of `segment_bytes_max`, and no idle core.

    >>> count_ranges(580 << 20, FoldSettings(), 4), count_ranges(8 << 20, FoldSettings(), 16)
    (12, 2)
    """
    needed = -(-size // settings.segment_bytes_max)
    even = -(-needed // parallelism) * parallelism
    return min(RANGES_MAX, max(1, needed, min(even, size // RANGE_BYTES_MIN)))


def _write_ranges(
    shuffler: Shuffler, task: FoldTask, manifest: Manifest, survey: ShuffleSurvey
) -> list[SegmentEntry]:
    """Shuffle the rows of the surveyed objects, all of which count, and write each range."""
    if not survey.objects:
        return []
    ranges = count_ranges(sum(survey.sizes.values()), task.settings, shuffler.parallelism())
    cuts = tuple(split_keys(survey.samples, ranges))
    plan = RangePlan(task, cuts, survey.tombstones, survey.patched)
    columns = shuffled_schema(manifest.schema, patched=plan.patched)
    parts = [PartTask(task, part, plan.patched) for part in _parts(survey.sizes)]
    written = shuffler.shuffle(Shuffle(read_part, parts, columns, cuts, write_range, plan))
    if not any(written.values()):
        return list(write_trace(task, manifest, plan.tombstones)) if plan.tombstones else []
    return [
        entry
        for place in range(len(cuts) + 1)
        for entry in written.get(place) or write_trace(plan.task(place), manifest, plan.tombstones)
    ]


def read_part(task: PartTask) -> Batches:
    """Yield the rows of some objects, unsorted."""
    manifest = _manifest(task.fold)
    parts = [Versions.empty(manifest.schema)]
    for wal_object in task.read():
        parts += decoded(wal_object, manifest, task.fold.namespace)[0]
    rows = concat_versions(parts, manifest.schema)
    return to_batches(rows, shuffled_schema(manifest.schema, patched=task.patched))


def write_range(plan: RangePlan, place: int, batches: Batches) -> tuple[SegmentEntry, ...]:
    """Merge and write the rows of one range, which arrive sorted."""
    task, manifest = plan.task(place), _manifest(plan.fold)
    parts: Iterator[Versions] = (from_batch(batch, manifest.schema) for batch in batches)
    if not plan.patched:  # a key may have any number of versions: one of each batch is enough
        deleted = [RangeTombstones.of(plan.tombstones)]
        parts = (newest_versions([p], manifest.schema, deleted) for p in parts)
    rows = concat_versions([Versions.empty(manifest.schema), *parts], manifest.schema)
    _check_range(rows, task.key_range)
    return write_folded(task, manifest, rows, plan.tombstones)


def _check_range(rows: Versions, key_range: KeyRange) -> None:
    """Rows of another range would be in two segments of one level, or in none."""
    if not len(rows):
        return
    keys = KeysInOrder(rows.keys)
    for key in (keys[0], keys[-1]):
        if not key_range.has(key):
            raise InternalError(f"the shuffle sent the key {key!r} to the range {key_range}")


def _manifest(task: FoldTask) -> Manifest:
    return NamespaceContext(task.store, task.namespace).heads.load(task.generation)


# --- plain columns ------------------------------------------------------------------------


def shuffled_schema(schema: Schema, *, patched: bool) -> pa.Schema:
    """Return the columns of shuffled rows; those of patches and merges only if there are any."""
    types = schema.types()
    columns = [*FIXED, *((f"f{number}", plain_type(t)) for number, t in types.items())]
    if patched:
        columns += [*((f"t{number}", pa.int8()) for number in types), ("merged_at", pa.int64())]
    return pa.schema(columns)


def to_batches(rows: Versions, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in the form of `shuffled_schema`."""
    columns = {
        "key": rows.keys,
        "lsn": pa.array(rows.lsns, pa.int64()),
        "seq": pa.array(rows.seqs.astype(np.int64)),
        "kind": pa.array(rows.kinds.astype(np.int8)),
        "expires": rows.expires_at_ms,
    }
    columns |= {f"f{number}": plain(array) for number, array in rows.fields.items()}
    columns |= {f"t{n}": as_codes(array).cast(pa.int8()) for n, array in rows.touched.items()}
    if rows.merged_at_ms is not None:
        columns["merged_at"] = rows.merged_at_ms
    if rows.expires_at_ms is None:
        del columns["expires"]
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(len(rows), field.type)
        for field in target
    ]
    table = pa.Table.from_arrays(arrays, schema=target)
    yield from table.to_batches(max_chunksize=BATCH_ROWS)


def from_batch(batch: pa.RecordBatch, schema: Schema) -> Versions:
    """Return the rows of a batch, whatever Arrow layout the shuffle returns them in."""
    patched = "merged_at" in batch.schema.names
    expected = shuffled_schema(schema, patched=patched)
    if batch.schema.types != expected.types:
        batch = batch.cast(expected)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    expires = columns["expires"]
    return Versions(
        columns["key"],
        columns["lsn"].to_numpy(),
        columns["seq"].to_numpy().astype(np.uint32),
        columns["kind"].to_numpy().astype(np.uint8),
        {number: unplain(columns[f"f{number}"], t) for number, t in schema.types().items()},
        None if expires.null_count == len(expires) else expires,
        {n: columns[f"t{n}"].cast(pa.uint8()) for n in schema.types()} if patched else {},
        merged_at_ms=columns["merged_at"] if patched else None,
    )


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type that carries a column: bool, a signed integer, bytes, lists and structs.

    A map is carried as the list of its pairs.
    """
    if pa.types.is_boolean(data_type):
        return data_type
    if pa.types.is_list(data_type):
        return pa.list_(pa.field("element", plain_type(data_type.value_type)))
    if pa.types.is_map(data_type):
        return pa.list_(pa.field("element", plain_type(_pair_type(data_type))))
    if pa.types.is_struct(data_type):
        parts = enumerate(data_type)
        return pa.struct([(f"f{place}", plain_type(field.type)) for place, field in parts])
    if data_type.id in AS_BYTES:
        return pa.binary()
    return WIDTHS[data_type.bit_width]


def plain(array: pa.Array) -> pa.Array:
    """Return an array as its plain type, bit by bit."""
    data_type = array.type
    target = plain_type(data_type)
    if data_type == target:
        return array
    if pa.types.is_list(data_type) or pa.types.is_map(data_type):
        array = _from_zero(array)
        offsets, values = array.offsets, plain(_items_of(array))
        return pa.ListArray.from_arrays(offsets, values, type=target, mask=array.is_null())
    if pa.types.is_struct(data_type):
        parts = [plain(part) for part in array.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(target), mask=array.is_null())
    if pa.types.is_fixed_size_list(data_type):
        return _spread_values(_vectors_as_bytes(array.drop_null()), array).cast(target)
    if pa.types.is_decimal(data_type):
        return array.view(pa.binary(data_type.bit_width // 8)).cast(target)
    return array.view(target)


def unplain(array: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Invert `plain`."""
    if array.type == data_type:
        return array
    if pa.types.is_fixed_size_list(data_type):
        return _spread_values(_vectors_from_bytes(array.drop_null(), data_type), array)
    if pa.types.is_nested(data_type):
        return _unplain_nested(array, data_type)
    if pa.types.is_decimal(data_type):
        return array.cast(pa.binary(data_type.bit_width // 8)).view(data_type)
    return array.view(data_type)


def _unplain_nested(array: pa.Array, data_type: pa.DataType) -> pa.Array:
    nulls = array.is_null()
    if pa.types.is_struct(data_type):
        fields = list(data_type)
        parts = [unplain(part, f.type) for part, f in zip(array.flatten(), fields, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=nulls)
    array = _from_zero(array)
    if pa.types.is_map(data_type):
        pairs = unplain(array.values, _pair_type(data_type)).flatten()
        return pa.MapArray.from_arrays(array.offsets, *pairs, type=data_type, mask=nulls)
    values = unplain(array.values, data_type.value_type)
    return pa.ListArray.from_arrays(array.offsets, values, type=data_type, mask=nulls)


def _pair_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of the pairs of a map."""
    return pa.struct([("key", data_type.key_type), ("value", data_type.item_type)])


def _items_of(array: pa.Array) -> pa.Array:
    """Return the items of lists, or the pairs of maps."""
    if not pa.types.is_map(array.type):
        return array.values
    fields = list(_pair_type(array.type))
    return pa.StructArray.from_arrays([array.keys, array.items], fields=fields)


def _vectors_as_bytes(vectors: pa.Array) -> pa.Array:
    """Return vectors, none of them null, as bytes of fixed width."""
    values = np.ascontiguousarray(vectors.flatten().to_numpy())
    width = vectors.type.list_size * values.itemsize
    buffers = [None, pa.py_buffer(values.view(np.uint8))]
    return pa.Array.from_buffers(pa.binary(width), len(vectors), buffers)


def _vectors_from_bytes(array: pa.Array, data_type: pa.DataType) -> pa.Array:
    width = data_type.list_size * data_type.value_type.bit_width // 8
    data = _from_zero(array.cast(pa.binary(width))).buffers()[1]
    count = len(array) * data_type.list_size
    values = pa.Array.from_buffers(data_type.value_type, count, [None, data])
    return pa.FixedSizeListArray.from_arrays(values, type=data_type)


def _spread_values(values: pa.Array, original: pa.Array) -> pa.Array:
    """Return values with nulls between them where the original has nulls."""
    if not original.null_count:
        return values
    valid = original.is_valid().to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _from_zero(array: pa.Array) -> pa.Array:
    """Return a copy whose buffers start at offset 0."""
    return pa.concat_arrays([array, array[:0]])
