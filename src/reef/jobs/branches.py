"""Merge a branch into another namespace, and roll a namespace back: one ingest each.

    merge     base (the point in time of the branch) → child: the changes
              of each changed key: base, parent now, child now → which row stays
    rollback  now → a past state: the changes

Changes are found by `reef.engine.handles.branches`, in key order and without reading the groups
that both share, and staged as they are found, in bounded memory. The ingest is conditional
(protocols §4): if the target was written meanwhile, nothing is visible, and the job starts over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from operator import eq, is_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.context import NamespaceContext
from reef.engine.handles.branches import (
    EVERYTHING,
    DifferingRows,
    Side,
    SideRef,
    aligned,
    differing,
    not_equal,
    shared_names,
    unshared,
)
from reef.engine.handles.database import Database
from reef.engine.handles.pinned import PinnedReader
from reef.engine.rows.convert import EXPIRES_AT
from reef.engine.rows.input import to_ops
from reef.errors import ConflictError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.manifest import Origin
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import JobSegment, OpKind
from reef.jobs.compact.plan import split_keys
from reef.jobs.fold.shuffle import Shuffler
from reef.jobs.ingest.condition import Unchanged
from reef.jobs.ingest.job import BulkJob, sorted_rows, staged_rows
from reef.jobs.ingest.staging import ROW_SEQ, Staging
from reef.manifest.branching import check_is_branch
from reef.paths import Namespace
from reef.runtime import Executor
from reef.types import KeyRange

ATTEMPTS_MAX = 5
CONFLICTS_SHOWN = 10
POINTS_MAX = 10_000
"""Changed keys that are checked one by one for later writes; beyond that, their whole range is."""
SPLIT_BYTES = 32 << 20
"""Bytes of segments that one task compares."""

Row = dict[str, Any] | bytes | None
Resolve = Callable[[Any, Row, Row, Row], Row]
"""Called with the key and the rows of base, parent and child, as readers return them.

Returns the row, or None to delete it. A returned side keeps its expiry; another row expires as the
parent's, or the branch's if the parent has none, unless it has a column `_expires_at`.
"""


@dataclass(slots=True)
class BranchReport:
    """The result of a merge or a rollback."""

    namespace: str
    lsn: int = 0
    """LSN of the commit; 0 if nothing had to be changed."""
    written: int = 0
    deleted: int = 0
    conflicts: int = 0
    """Rows that both sides had changed, each in its own way."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Changes:
    """Counts and bounds of the staged changes."""

    written: int = 0
    deleted: int = 0
    conflicts: int = 0
    keys: list[bytes] = field(default_factory=list)
    first: bytes | None = None
    last: bytes = b""
    refused: list[bytes] = field(default_factory=list)

    def add(self, rows: Versions) -> Versions:
        deleted = int((rows.kinds == OpKind.DELETE).sum())
        self.deleted += deleted
        self.written += len(rows) - deleted
        keys = rows.keys
        self.first = keys[0].as_py() if self.first is None else self.first
        self.last = keys[-1].as_py()
        if len(self.keys) <= POINTS_MAX:
            self.keys += keys.to_pylist()
        return rows

    def join(self, later: "_Changes") -> None:
        """Add the changes of the next key range."""
        self.written += later.written
        self.deleted += later.deleted
        self.conflicts += later.conflicts
        self.refused += later.refused
        self.keys += later.keys
        self.first = later.first if self.first is None else self.first
        self.last = later.last or self.last

    def refuse(self) -> None:
        """Raise ConflictError if rows were changed on both sides, and no choice was given."""
        if self.refused:
            shown = ", ".join(repr(key) for key in self.refused[:CONFLICTS_SHOWN])
            more = ", …" if self.conflicts > CONFLICTS_SHOWN else ""
            raise ConflictError(
                f"{self.conflicts} rows were changed on both sides: {shown}{more}",
                hint="Choose with on_conflict='ours', 'theirs' or a function",
                conflicts=self.conflicts,
            )

    def ranges(self) -> tuple[KeyRange, ...]:
        if len(self.keys) <= POINTS_MAX:
            return tuple(KeyRange(key, key + b"\0") for key in self.keys)
        return (KeyRange(self.first or b"", self.last + b"\0"),)


def merge_branch(
    db: Database,
    child: str,
    parent: str,
    on_conflict: str | Resolve = "error",
    executor: Executor | None = None,
) -> BranchReport:
    """Apply the changes of a branch since it was made to another namespace, in one commit.

    A row that only the branch has changed becomes the branch's; one that only the parent has
    changed stays. A row that both have changed is a conflict: with "error" nothing is merged and
    ConflictError names some of them; "ours" keeps the parent's row, "theirs" takes the branch's; a
    function is called with the key and the rows of base, parent and branch, as readers return them,
    and returns the row, or None to delete it. A row that it returns unchanged keeps its expiry;
    another one expires as the parent's row, or the branch's if the parent has none, unless it has
    `_expires_at`. An executor runs a task for each key range; all are one commit.
    """
    if not callable(on_conflict) and on_conflict not in ("error", "ours", "theirs"):
        raise InvalidInputError(
            f"on_conflict={on_conflict!r} is neither 'error', 'ours', 'theirs' nor a function",
            kind=ErrorKind.INVALID_OPTION,
        )
    merge = _Merge(db, child, parent, on_conflict, executor)
    return _attempts(parent, merge.run)


def rollback(db: Database, namespace: str, to: Any) -> BranchReport:
    """Give a namespace the rows that it had at a point in time, in one commit.

    `to` is a generation, a Snapshot, a datetime, ISO 8601 text or `{"lsn": 12}`. Writes since then
    are undone for every reader and visible as changes; nothing is removed from the history. The
    log is folded, so that a new generation has the state.
    """
    report = _attempts(namespace, lambda: _rollback_once(db, namespace, to))
    if report.lsn:
        from reef.jobs.fold.job import fold

        fold(db, namespace)
    return report


def _attempts(namespace: str, run: Callable[[], BranchReport]) -> BranchReport:
    """Run a conditional job again while the namespace is being written."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            return run()
        except ConflictError as error:
            if error.context.get("conflicts") or attempt == ATTEMPTS_MAX - 1:
                raise
    raise ConflictError(f"{namespace} was written during each of {ATTEMPTS_MAX} attempts")


# --- rollback -------------------------------------------------------------------------


def _rollback_once(db: Database, namespace: str, to: Any) -> BranchReport:
    with ExitStack() as stack:
        now = stack.enter_context(db.reader(namespace, pin=True))
        past = stack.enter_context(open_point(db, namespace, to))
        pieces = (
            _versions(rows.keys, rows.b, now._view().manifest.schema)
            for rows in differing(side_of(now), side_of(past))
        )
        return _commit(db, now, pieces, _Changes())


def open_point(db: Database, namespace: str, at: Any) -> PinnedReader:
    """Open a pinned view of a point in time, or of a snapshot."""
    if hasattr(at, "release"):
        return db.reader(namespace, snapshot=at)
    return db.reader(namespace, as_of=at)


def ref_of(reader: PinnedReader) -> SideRef:
    """Return an open pinned view as one side of a comparison in tasks, while it stays open."""
    names = reader._names
    return SideRef(reader._store, names, reader.generation, reader.last_lsn, reader._now_ms())


def side_of(reader: PinnedReader) -> Side:
    """Return an open pinned view as one side of a comparison."""
    return Side(reader._view(), reader._now_ms(), reader._runtime)


# --- merge ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Merge:
    """A merge, which may be attempted several times."""

    db: Database
    child: str
    parent: str
    on_conflict: str | Resolve
    executor: Executor | None

    def run(self) -> BranchReport:
        with ExitStack() as stack:
            theirs = stack.enter_context(self.db.reader(self.child, pin=True))
            ours = stack.enter_context(self.db.reader(self.parent, pin=True))
            origin = check_is_branch(theirs._view().manifest, self.child)
            base = _base(self.db, origin, self.child)
            _check_columns(theirs, ours)
            with BulkJob(self.db, self.parent) as job:
                if self.executor is None:
                    sides = base.open(), side_of(ours), side_of(theirs)
                    parts = [merge_part(sides, self.on_conflict, job.staging)]
                else:
                    refs = base, ref_of(ours), ref_of(theirs)
                    parts = self._on_executor(self.executor, refs, job.staging)
                return _commit_parts(job, ours, parts)

    def _on_executor(
        self, executor: Executor, refs: tuple[SideRef, SideRef, SideRef], staging: Staging
    ) -> "list[MergedPart]":
        base, _, theirs = refs
        ranges = split(base.open(), theirs.open(), executor)
        tasks = [MergeTask(*refs, self.on_conflict, staging, bounds) for bounds in ranges]
        return executor.map(run_merge_task, tasks)


@dataclass(frozen=True, slots=True)
class MergeTask:
    """A key range of a merge. Picklable; nothing that it stages is visible."""

    base: SideRef
    ours: SideRef
    theirs: SideRef
    on_conflict: str | Resolve
    staging: Staging
    bounds: KeyRange


@dataclass(frozen=True, slots=True)
class MergedPart:
    """The segments that a task staged, and their changes."""

    staged: tuple[JobSegment, ...]
    changes: _Changes


def run_merge_task(task: MergeTask) -> MergedPart:
    """Merge one key range, on any machine."""
    sides = task.base.open(), task.ours.open(), task.theirs.open()
    return merge_part(sides, task.on_conflict, task.staging, task.bounds)


def merge_part(
    sides: tuple[Side, Side, Side],
    on_conflict: str | Resolve,
    staging: Staging,
    bounds: KeyRange = EVERYTHING,
) -> MergedPart:
    """Decide which rows of a key range the parent gets, and stage them.

    `sides` are the base, the parent and the branch.
    """
    merger = _Merger(*sides, on_conflict)
    staged = staging.stage(merger.changes.add(piece) for piece in merger.pieces(bounds))
    return MergedPart(staged, merger.changes)


def split(a: Side, b: Side, executor: Executor) -> list[KeyRange]:
    """Return key ranges with about equal shares of the groups that only one state has."""
    groups: list[tuple[bytes, int]] = []
    for one in unshared(a, b):
        index = one.side.view.segments.tail(one.entry).index
        sizes = index.sizes
        groups += ((index.first_keys[group], sizes[group]) for group in one.other_groups())
    by_size = -(-sum(size for _, size in groups) // SPLIT_BYTES)
    least = executor.parallelism() if isinstance(executor, Shuffler) else 1
    cuts = split_keys(groups, max(1, by_size, least)) if groups else []
    return [KeyRange(*ends) for ends in zip([b"", *cuts], [*cuts, None], strict=True)]


def _base(db: Database, origin: Origin, child: str) -> SideRef:
    """Return the state that a branch was made from; NotFoundError if it was released."""
    names = Namespace.of_root(origin.root)
    if (
        origin.id
        not in NamespaceContext(db.store, names).heads.find(dropped=True).manifest.branches
    ):
        raise NotFoundError(
            f"{child} has released the namespace that it was made of: the common state is gone",
            kind=ErrorKind.COLLECTED,
            hint="Merge before the branch is compacted and swept",
            namespace=child,
        )
    # The pin of the branch holds all of it, and the lease of the branch's reader holds the pin.
    now_ms = int(db.store.runtime.wall_s() * 1000)
    return SideRef(db.store, names, origin.generation, origin.last_lsn, now_ms)


def _check_columns(theirs: PinnedReader, ours: PinnedReader) -> None:
    missing = set(theirs.schema.names) - set(ours.schema.names)
    if missing:
        raise InvalidInputError(
            f"{theirs.namespace} has columns that {ours.namespace} lacks: "
            f"{', '.join(sorted(missing))}",
            hint=f"Add them first: db.alter({ours.namespace!r}, …)",
            namespace=ours.namespace,
        )


@dataclass
class _Merger:
    """Decides, for the keys that a branch has changed, which row stays."""

    base: Side
    ours: Side
    theirs: Side
    on_conflict: str | Resolve
    changes: _Changes = field(default_factory=_Changes)

    def pieces(self, bounds: KeyRange) -> Iterator[Versions]:
        """Yield the rows of a range to write into the parent, in key order."""
        for rows in differing(self.base, self.theirs, bounds):
            piece = self._piece(rows)
            if piece is not None and len(piece):
                yield piece

    def _piece(self, rows: DifferingRows) -> Versions | None:
        names = shared_names(self.base.schema, self.ours.schema, self.theirs.schema)
        current = self.ours.rows(rows.keys, names)
        ours, theirs = aligned(current, rows.b, names)
        ours_too, base = aligned(current, rows.a, names)
        differs, moved = not_equal(ours, theirs), not_equal(ours_too, base)
        clean = pc.and_(differs, pc.invert(moved))
        conflict = pc.and_(differs, moved)
        taken = [(rows.keys.filter(clean), theirs.filter(clean))]
        if conflict.true_count:
            taken.append(self._resolve_conflicts(rows.keys, base, ours, theirs, conflict))
        parts = [_versions(keys, table, self.ours.schema) for keys, table in taken if len(keys)]
        return sorted_rows(concat_versions(parts, self.ours.schema)) if parts else None

    def _resolve_conflicts(
        self,
        keys: pa.Array,
        base: pa.Table,
        ours: pa.Table,
        theirs: pa.Table,
        conflict: pa.BooleanArray,
    ) -> tuple[pa.Array, pa.Table]:
        keys = keys.filter(conflict)
        self.changes.conflicts += len(keys)
        if self.on_conflict == "theirs":
            return keys, theirs.filter(conflict)
        if callable(self.on_conflict):
            sides = [table.filter(conflict) for table in (base, ours, theirs)]
            chosen = _Chooser(self.on_conflict, self.ours.schema).choose(keys, sides)
            return keys, pa.Table.from_pylist(chosen, schema=theirs.schema)
        if self.on_conflict == "error":
            named = keys.slice(0, CONFLICTS_SHOWN).cast(self.ours.schema.key.arrow)
            self.changes.refused += named.to_pylist()
        return keys.slice(0, 0), theirs.slice(0, 0)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Asks the caller's function for the rows of keys in conflict."""

    resolve: Resolve
    schema: Schema

    def choose(self, keys: pa.Array, sides: Sequence[pa.Table]) -> list[dict[str, Any]]:
        """Return resolved rows; the sides are base, parent and branch."""
        named = keys.cast(self.schema.key.arrow).to_pylist()
        rows = [self._rows(table, named) for table in sides]
        expiries = [table.column(EXPIRES_AT).to_pylist() for table in sides]
        asked = zip(named, zip(*rows, strict=True), zip(*expiries, strict=True), strict=True)
        return [self._one(key, three, expire) for key, three, expire in asked]

    def _rows(self, table: pa.Table, keys: list[Any]) -> list[Row]:
        """Return rows as readers return them; None where there is none."""
        value, key_name = self._value, self.schema.key.name
        found = table.column("_found").to_pylist()
        rows = table.drop_columns(["_found", EXPIRES_AT]).to_pylist()
        return [
            None if not there else row[value] if value else {key_name: key, **row}
            for key, row, there in zip(keys, rows, found, strict=True)
        ]

    @property
    def _value(self) -> str | None:
        """The only column of a plain namespace."""
        return self.schema.fields[0].name if self.schema.is_plain else None

    def _one(self, key: Any, sides: Sequence[Row], expiries: Sequence[Any]) -> dict[str, Any]:
        row = self.resolve(key, *sides)
        if row is None:
            return {"_found": False}
        expiry = _expiry_of(row, sides, expiries)
        if self._value is not None:
            return {self._value: row, EXPIRES_AT: expiry, "_found": True}
        return {EXPIRES_AT: expiry, **self._checked(key, row), "_found": True}

    def _checked(self, key: Any, row: Any) -> dict[str, Any]:
        """Return the columns of a row without its key; InvalidInputError if it is no such row."""
        if not isinstance(row, dict):
            raise InvalidInputError(f"on_conflict returned {row!r} for key {key!r}, not a dict")
        name = self.schema.key.name
        if row.get(name, key) != key:
            raise InvalidInputError(
                f"on_conflict returned the row of another key, {row[name]!r}, for key {key!r}"
            )
        columns = {column: value for column, value in row.items() if column != name}
        known = {*(field.name for field in self.schema.fields), EXPIRES_AT}
        if unknown := columns.keys() - known:
            shown = ", ".join(sorted(map(str, unknown)))
            raise InvalidInputError(f"on_conflict returned unknown columns: {shown}")
        return columns


def _expiry_of(row: Any, sides: Sequence[Row], expiries: Sequence[Any]) -> Any:
    """Return when a returned row expires: as the side that it is, else as the parent's row.

    A row that equals none of the sides expires as the branch's row if the parent has none.
    """
    base, ours, theirs = zip(sides, expiries, strict=True)
    for is_same in (is_, eq):
        for side, expiry in (ours, theirs, base):
            if side is not None and is_same(row, side):
                return expiry
    return theirs[1] if ours[0] is None else ours[1]


# --- committing -----------------------------------------------------------------------


def _versions(keys: pa.Array, table: pa.Table, schema: Schema) -> Versions:
    """Return resolved rows as a job stages them: puts, and deletes where there is no row."""
    found = table.column("_found").combine_chunks()
    absent = keys.filter(pc.invert(found))
    parts = []
    if found.true_count:
        names = [field.name for field in schema.fields if field.name in table.column_names]
        rows = table.select([*names, EXPIRES_AT]).filter(found)
        key = keys.filter(found).cast(schema.key.arrow)
        rows = rows.add_column(0, schema.key.name, key)
        parts.append(staged_rows(to_ops(rows, schema, kind=OpKind.PUT)))
    if len(absent):
        parts.append(_deletes(absent, schema))
    return sorted_rows(concat_versions(parts, schema))


def _deletes(keys: pa.Array, schema: Schema) -> Versions:
    count = len(keys)
    return Versions(
        keys,
        np.zeros(count, np.int64),
        np.full(count, ROW_SEQ, np.uint32),
        np.full(count, OpKind.DELETE, np.uint8),
        {field.number: pa.nulls(count, field.arrow) for field in schema.fields},
    )


def _commit_parts(job: BulkJob, target: PinnedReader, parts: Sequence[MergedPart]) -> BranchReport:
    """Commit the parts of a merge as one ingest, unless a row is in conflict."""
    changes = _Changes()
    for part in parts:
        changes.join(part.changes)
    changes.refuse()
    report = BranchReport(target.namespace, 0, changes.written, changes.deleted, changes.conflicts)
    staged = tuple(segment for part in parts for segment in part.staged)
    if staged:
        condition = Unchanged(target.generation, target.last_lsn, changes.ranges())
        report.lsn = job.commit(staged, unless=condition).lsn or 0
    return report


def _commit(
    db: Database,
    target: PinnedReader,
    pieces: Iterator[Versions],
    changes: _Changes,
) -> BranchReport:
    """Stage rows and commit them, unless anything was written since the target was read."""
    report = BranchReport(target.namespace)
    with BulkJob(db, target.namespace) as job:
        staged = job.staging.stage(changes.add(piece) for piece in pieces)
        if staged:
            condition = Unchanged(target.generation, target.last_lsn)
            report.lsn = job.commit(staged, unless=condition).lsn or 0
    report.written, report.deleted = changes.written, changes.deleted
    return report
