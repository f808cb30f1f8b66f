"""Branches of namespaces: create one at a point in time, and compare states (protocols §8)."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from reef.engine.handles.pinned import PinnedReader
from reef.engine.history.as_of import ConcurrentSweep, History, ReadTarget, read_target
from reef.engine.history.diff import Difference, DifferingRows, Side, differing
from reef.engine.history.snapshots import Snapshot, current_name, resolve_snapshot
from reef.engine.log.log import SlotGone
from reef.engine.namespaces import BranchPoint, Namespaces
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.formats.manifest import Manifest
from reef.manifest.head import HeadFinder, locate

if TYPE_CHECKING:
    from reef.engine.handles.database import Database

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
