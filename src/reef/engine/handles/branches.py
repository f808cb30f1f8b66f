"""Branches of namespaces: create one at a point in time, and compare states (protocols §8).

**Differences** between two states are found without reading the rows that both share. States that
come from one another (a branch and its origin, a namespace now and a while ago) name
mostly the same segments, and where one of them was compacted, mostly the same groups in them. A key
can only differ if one side has a version of it in a group that the other does not have, or in its
unfolded log, or deletes it by a range there. So the candidates are the keys of unshared sources,
merged in key order; both sides are looked up for them, and rows that are equal are left out:

    unshared groups, logs   →  candidate keys  →  look_up in a and b  →  rows that differ

A range delete of an unshared source makes every key of shared groups in its range a candidate.
Columns are compared by name: the schemas of a branch and its origin grow independently.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.context import NamespaceContext
from reef.engine.handles.pinned import PinnedReader
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime, ReadTarget, read_target
from reef.engine.history.snapshots import Snapshot, current_name, resolve_snapshot
from reef.engine.log.log import SlotGone
from reef.engine.namespaces import BranchPoint, Namespaces
from reef.engine.read.caches import ByteCache
from reef.engine.read.memtable import MemtableCut
from reef.engine.read.scan import Cursor, LateCursor, RowsCursor, SegmentCursor, merged
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View, look_up, range_tombstones_of
from reef.engine.rows.convert import EXPIRES_AT, to_record_batch
from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.types import KeyRange

if TYPE_CHECKING:
    from reef.engine.handles.database import Database


KEYS_AT_ONCE = 8192
EVERYTHING = KeyRange()
CACHE_BYTES = 64 << 20
"""Cached blocks of one state, in a task."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that differs: `op` leads from a to b."""

    op: str
    """`insert`, `update` or `delete`."""
    key: Any
    a: Any
    """The row on the left: bytes in a plain namespace, else a dict; None if there is none."""
    b: Any


@dataclass(frozen=True, slots=True)
class Side:
    """A state that takes part in a comparison."""

    view: View
    now_ms: int
    runtime: Runtime

    @property
    def schema(self) -> Schema:
        return self.view.manifest.schema

    def rows(self, keys: pa.Array, names: Sequence[str]) -> pa.Table:
        """Return one row per key, null where there is none, with `_found` and `_expires_at`."""
        found = look_up(self.view, keys.to_pylist(), self.now_ms, self.runtime)
        own = [name for name in names if name in self.schema.arrow().names]
        batch = to_record_batch(found, self.schema, [*own, EXPIRES_AT])
        places = pc.index_in(keys, value_set=found.keys)
        table = pa.Table.from_batches([batch]).take(places)
        return table.append_column("_found", places.is_valid())

    def sources(self) -> tuple[tuple[SegmentEntry, ...], tuple[MemtableCut, ...]]:
        manifest, tables = self.view.cut()
        return (*tables[0].ingested, *manifest.segments), tables


@dataclass(frozen=True, slots=True)
class SideRef:
    """A state that another process can open while a lease or a pin protects it. Picklable."""

    store: Store
    names: Namespace
    generation: int
    last_lsn: int
    now_ms: int

    def open(self) -> Side:
        """Load the generation and replay its log; NotFoundError if it was garbage-collected."""
        heads = NamespaceContext(self.store, self.names).heads
        head = heads.find(dropped=True).manifest
        names = heads.names  # from here on with the folders of a branch's inherited log
        segments = SegmentStore(self.store, names, ByteCache(CACHE_BYTES))
        history = History(self.store, names, segments, heads, dropped=True)
        manifest = heads.load(self.generation)
        tail = history.replay(PointInTime(manifest, self.last_lsn), head)
        return Side(tail.view(), self.now_ms, self.store.runtime)


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """Keys that differ, in key order, and their rows on both sides under the same names."""

    keys: pa.Array
    a: pa.Table
    b: pa.Table


def differing(a: Side, b: Side, bounds: KeyRange = EVERYTHING) -> Iterator[DifferingRows]:
    """Yield the rows of a key range that differ, in key order."""
    names = shared_names(a.schema, b.schema)
    for keys in _candidates(a, b, bounds):
        rows_a, rows_b = aligned(a.rows(keys, names), b.rows(keys, names), names)
        changed = not_equal(rows_a, rows_b)
        if changed.true_count:
            yield DifferingRows(
                keys.filter(changed), rows_a.filter(changed), rows_b.filter(changed)
            )


def shared_names(*schemas: Schema) -> list[str]:
    """Return the columns of all schemas but the key, by name."""
    names = [field.name for schema in schemas for field in schema.fields]
    return list(dict.fromkeys(names))


def aligned(a: pa.Table, b: pa.Table, names: Iterable[str]) -> tuple[pa.Table, pa.Table]:
    """Return both with the same columns: null where one lacks a column, numbers widened."""
    columns = [*names, EXPIRES_AT, "_found"]
    pairs = [_align(_column(a, name), _column(b, name), len(a)) for name in columns]
    left, right = zip(*pairs, strict=True)
    return pa.table(dict(zip(columns, left, strict=True))), pa.table(
        dict(zip(columns, right, strict=True))
    )


def _column(table: pa.Table, name: str) -> pa.Array | None:
    if name not in table.column_names:
        return None
    return table.column(name).combine_chunks()


def _align(a: pa.Array | None, b: pa.Array | None, rows: int) -> tuple[pa.Array, pa.Array]:
    if a is None or b is None:
        known = b if a is None else a
        assert known is not None
        absent = pa.nulls(rows, known.type)
        return (absent, known) if a is None else (known, absent)
    if a.type == b.type:
        return a, b
    try:
        return a.cast(b.type), b
    except pa.ArrowInvalid:
        return a, b.cast(a.type)


def not_equal(a: pa.Table, b: pa.Table) -> pa.BooleanArray:
    """Return which rows of two aligned tables differ in any column."""
    changed = pa.array([False] * len(a))
    for name in a.column_names:
        same = _same(a.column(name).combine_chunks(), b.column(name).combine_chunks())
        changed = pc.or_(changed, pc.invert(same))
    return changed.combine_chunks() if isinstance(changed, pa.ChunkedArray) else changed


def _same(a: pa.Array, b: pa.Array) -> pa.BooleanArray:
    """Return which values are the same: null is null, NaN is NaN, and 0.0 is not -0.0.

    Zeros of both signs are different values: a division by them differs, and lists compare them.
    """
    if pa.types.is_nested(a.type):
        pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
        return pa.array([repr(one) == repr(other) for one, other in pairs], pa.bool_())
    if pa.types.is_floating(a.type):
        bits = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[a.type.bit_width]
        same = pc.fill_null(pc.equal(a.view(bits), b.view(bits)), False)
        same = pc.or_(same, pc.fill_null(pc.and_(pc.is_nan(a), pc.is_nan(b)), False))
    else:
        same = pc.fill_null(pc.equal(a, b), False)
    return pc.or_(same, pc.and_(pc.is_null(a), pc.is_null(b)))


# --- candidates -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnsharedSegment:
    """A segment that only one of two states names."""

    side: Side
    entry: SegmentEntry
    across: Side
    rivals: Sequence[SegmentEntry]
    """Those that only the other state names."""

    def shared_groups(self, bounds: KeyRange = EVERYTHING) -> frozenset[int]:
        """Return its groups that the other state has in a segment of another name.

        Those outside of the bounds may be left out, with the requests that they would take.

        Compactions copy groups, and two that merge the same inputs write the same ones. Rows of
        groups are stored without the LSN of a load, and columns without their names.
        """
        own = self.side.view.segments.tail(self.entry)
        groups: set[int] = set()
        for rival in self.rivals:
            near = bounds.touches(rival.min_key, rival.max_key) and _overlap(rival, self.entry)
            if near and rival.rows_lsn == self.entry.rows_lsn:
                tail = self.across.view.segments.tail(rival)
                if _are_columns_alike(own.footer.schema, tail.footer.schema):
                    groups |= own.index.shared_groups(tail.index)
        return frozenset(groups)

    def other_groups(self, bounds: KeyRange = EVERYTHING) -> frozenset[int]:
        """Return its groups that the other state does not have."""
        index = self.side.view.segments.tail(self.entry).index
        return frozenset(range(len(index))) - self.shared_groups(bounds)

    def own_keys(self, bounds: KeyRange) -> Cursor:
        """Return a source of the keys in groups that only this state has."""
        return _keys_of(self.side, self.entry, bounds, partial(self.shared_groups, bounds))

    def shared_keys(self, bounds: KeyRange) -> Cursor:
        """Return a source of the keys in groups that both states have."""
        return _keys_of(self.side, self.entry, bounds, partial(self.other_groups, bounds))


def unshared(a: Side, b: Side) -> list[UnsharedSegment]:
    """Return the segments that only one of two states has."""
    of_a, of_b = a.sources()[0], b.sources()[0]
    shared = {_identity(entry) for entry in of_a} & {_identity(entry) for entry in of_b}
    own_a, own_b = (
        [entry for entry in entries if _identity(entry) not in shared] for entries in (of_a, of_b)
    )
    return [
        *(UnsharedSegment(a, entry, b, own_b) for entry in own_a),
        *(UnsharedSegment(b, entry, a, own_a) for entry in own_b),
    ]


def _overlap(one: SegmentEntry, other: SegmentEntry) -> bool:
    return one.min_key <= other.max_key and other.min_key <= one.max_key


def _are_columns_alike(one: Schema, other: Schema) -> bool:
    """Whether no number is that of two different columns."""
    fields = {field.number: field for field in one.fields}
    return all(fields.get(field.number, field) == field for field in other.fields)


def _candidates(a: Side, b: Side, bounds: KeyRange) -> Iterator[pa.Array]:
    """Yield keys that may differ, in key order and each once, some thousands at a time."""
    own = [one for one in unshared(a, b) if bounds.touches(one.entry.min_key, one.entry.max_key)]
    cursors = [one.own_keys(bounds) for one in own]
    deleted: list[KeyRange] = []
    for side in (a, b):
        for table in side.sources()[1]:
            cursors += [RowsCursor(pieces) for pieces in table.pieces(bounds, False)]
            deleted += [KeyRange(t.start, t.end) for t in table.range_tombstones]
    for one in own:
        found = range_tombstones_of(one.side.view.segments, one.entry)
        deleted += [KeyRange(t.start, t.end) for t in found]
    within = [part.both(bounds) for part in _join_ranges(deleted) if part.overlaps(bounds)]
    cursors += _covered(a, b, own, within)
    return _batches(cursors)


def _identity(entry: SegmentEntry) -> tuple[str, int]:
    return entry.id, entry.visible_lsn


def _covered(
    a: Side, b: Side, own: Sequence[UnsharedSegment], ranges: Sequence[KeyRange]
) -> Iterator[Cursor]:
    """Yield the keys of segments and groups that both have, in deleted ranges."""
    shared = {_identity(entry) for entry in b.sources()[0]}
    for part in ranges:
        for entry in a.sources()[0]:
            if _identity(entry) in shared and part.touches(entry.min_key, entry.max_key):
                yield _keys_of(a, entry, part, frozenset)
        for one in own:
            if one.side is a and part.touches(one.entry.min_key, one.entry.max_key):
                yield one.shared_keys(part)


def _keys_of(
    side: Side, entry: SegmentEntry, bounds: KeyRange, needless: Callable[[], frozenset[int]]
) -> Cursor:
    """Return a source of a segment's keys; no column is read."""
    return LateCursor(
        max(entry.min_key, bounds.start),
        lambda: SegmentCursor(
            side.view.segments,
            entry,
            bounds,
            reverse=False,
            schema=side.schema,
            columns=(),
            needless=needless(),
        ),
    )


def _join_ranges(ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """Return the union of ranges, in order and apart."""
    joined: list[KeyRange] = []
    for one in sorted(ranges, key=lambda one: one.start):
        last = joined[-1] if joined else None
        if last is not None and (last.end is None or one.start <= last.end):
            end = None if last.end is None or one.end is None else max(last.end, one.end)
            joined[-1] = KeyRange(last.start, end)
        else:
            joined.append(one)
    return joined


def _batches(cursors: Sequence[Cursor]) -> Iterator[pa.Array]:
    waiting: list[pa.Array] = []
    for piece in merged(cursors, False):
        waiting.append(_distinct(piece))
        if sum(map(len, waiting)) >= KEYS_AT_ONCE:
            yield pa.concat_arrays(waiting)
            waiting = []
    if waiting:
        yield pa.concat_arrays(waiting)


def _distinct(piece: Sequence[Versions]) -> pa.Array:
    """Return the keys of sources up to one bound, sorted, each once."""
    keys = pc.unique(pa.concat_arrays([part.keys for part in piece]))
    return keys.take(pc.sort_indices(keys))


RESTARTS_MAX = 10


def make_branch(namespaces: Namespaces, source: str, name: str, at: Any) -> Manifest:
    """Create a branch of a namespace at a point in time; return its first manifest."""
    heads, target = _locate_source(namespaces, source, at)
    history = _history(namespaces, heads)

    def find(head: Manifest) -> BranchPoint:
        if target is None:
            return BranchPoint(head, 0, history.end_of_log(head))
        manifest, last_lsn = history.resolve(head, target)
        return BranchPoint(manifest, manifest.generation, last_lsn)

    for _ in range(RESTARTS_MAX):
        try:
            return namespaces.branch(heads, name, find)
        except (ConcurrentSweep, SlotGone):
            heads.forget()
    raise UnavailableError(f"sweeps of {source} outran {RESTARTS_MAX} attempts to branch it")


def _locate_source(
    namespaces: Namespaces, source: str, at: Any
) -> tuple[HeadFinder, ReadTarget | None]:
    """Return the incarnation to branch, and the point in time; None for its newest state."""
    if isinstance(at, Snapshot):
        heads, entry = resolve_snapshot(namespaces.store, source, at)
        return heads, ReadTarget(generation=entry.generation)
    return locate(namespaces.store, source), None if at is None else read_target(at)


def _history(namespaces: Namespaces, heads: HeadFinder) -> History:
    segments = SegmentStore(namespaces.store, heads.names, ByteCache(0, namespaces.metrics))
    return History(namespaces.store, heads.names, segments, heads, dropped=True)


# --- differences ----------------------------------------------------------------------


State = str | Snapshot | PinnedReader
"""The newest state of a namespace, a snapshot, or an open view."""


def differences(db: "Database", a: State, b: State) -> Iterator[Difference]:
    """Yield the rows that differ between two states; names are pinned while this runs."""
    for state in (a, b):
        if not isinstance(state, str | Snapshot | PinnedReader):
            raise InvalidInputError(
                f"{state!r} is neither the name of a namespace, a Snapshot, nor an open view",
                kind=ErrorKind.INVALID_OPTION,
                hint="db.reader(namespace, as_of=…) opens a view of a past state",
            )
    return _differences(db, a, b)


def _opened(db: "Database", state: State, stack: ExitStack) -> PinnedReader:
    if isinstance(state, PinnedReader):
        return state
    if isinstance(state, Snapshot):
        name = current_name(db.store, state)
        return stack.enter_context(db.reader(name, snapshot=state))
    return stack.enter_context(db.reader(state, pin=True))


def _differences(db: "Database", a: State, b: State) -> Iterator[Difference]:
    with ExitStack() as stack:
        readers = [_opened(db, state, stack) for state in (a, b)]
        left, right = (Side(one._view(), one._now_ms(), one._runtime) for one in readers)
        for rows in differing(left, right):
            yield from _as_differences(rows, left, right)


def _as_differences(rows: DifferingRows, a: Side, b: Side) -> Iterator[Difference]:
    keys = rows.keys.cast(b.schema.key.arrow).to_pylist()
    for key, left, right in zip(keys, _rows(rows.a, a), _rows(rows.b, b), strict=True):
        op = "insert" if left is None else "delete" if right is None else "update"
        yield Difference(op, key, _with_key(key, left, a), _with_key(key, right, b))


def _rows(table: pa.Table, side: Side) -> list[dict[str, Any] | None]:
    names = [field.name for field in side.schema.fields]
    found = table.column("_found").to_pylist()
    rows = table.select(names).to_pylist()
    return [row if there else None for row, there in zip(rows, found, strict=True)]


def _with_key(key: Any, row: dict[str, Any] | None, side: Side) -> Any:
    """Return a row as readers return it."""
    if row is None:
        return None
    if side.schema.is_plain:
        return row[side.schema.fields[0].name]
    return {side.schema.key.name: key, **row}
