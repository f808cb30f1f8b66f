"""Rows of a DataFrame as a bulk job stages them: checked, then sorted by key, each key once.

    op = "put" | "patch" | "merge" | "delete"   for all rows, or by row in a column `_op`
    _expires_at                                 when a row expires, as in an upsert

A put replaces the row, so columns that the DataFrame lacks are null. A patch sets all columns that
the DataFrame has. A merge applies operators to the columns that have one, where they are not null;
others must be null. A delete needs the key only. Values are converted only without loss, by the
rules of an upsert; an error names the column, and nothing is written.

Sorting needs bounded memory. Rows are buffered up to `sort_bytes`, then sorted and written to a
local file as a run; the runs are merged in the end. Most tasks fit in memory and write no file.
Files are in the directories that Spark assigns to its executors. Keys are compared eight bytes at
a time, as numbers: the common prefix of all keys is skipped, the next eight bytes decide, and only
keys that are equal in those are compared as a whole. This is several times as fast as comparing
whole keys.

An order column decides between rows of one key. It may be a column of the namespace or exist for
this purpose only; either way it travels with the rows, under a field number of its own, until each
key is reduced to one row: the one with the highest order (null is the lowest). Without an order
column, or if the two highest are equal, a repeated key is an error (H38). Where other tasks may
have rows of the same keys, the order of each row is kept in `OrderNotes` until the commit.

Merges of one key all count: they are combined into one, and need no order. An order column, which
leaves one row of each key, is refused where there are merges.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.read.scan import Cursor, merged
from reef.engine.rows.convert import EXPIRES_AT, kind_of, may_fit, unknown_column
from reef.engine.rows.input import fit_column, fit_keys, to_ops
from reef.engine.rows.merges import merge_rows_ops, operator_of
from reef.errors import ErrorKind, InternalError, InvalidInputError
from reef.formats.schema import Field, Schema, normal_type, type_name, type_problem
from reef.formats.versions import KeysInOrder, Versions, concat_versions
from reef.formats.wal_object import JobSegment, OpKind, Ops
from reef.jobs.ingest.job import sorted_merges, staged_rows
from reef.jobs.ingest.staging import Staging
from reef.spark.options import SORT_BYTES
from reef.spark.types import OP, OPS


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The meaning of a DataFrame's columns. Picklable: created on the driver, used by tasks."""

    schema: Schema
    op: str = "put"
    """The operation of rows without a column that names it."""
    order: Field | None = None
    """The column that decides between rows of one key, under a number that no column has."""
    merge_ops: Mapping[str, str] = field(default_factory=dict)
    """The operator of each column that merges change."""
    now_ms: int = 0
    """The driver's clock: a row that has expired by now counts as absent to merges."""

    @classmethod
    def of(
        cls,
        given: pa.Schema,
        schema: Schema,
        op: str,
        order_by: str | None,
        merge_ops: Mapping[str, str] | None = None,
    ) -> "RowsPlan":
        """Return the plan for a DataFrame; InvalidInputError names what does not fit."""
        if op not in OPS:
            raise InvalidInputError(
                f"there is no operation {op!r}, only {', '.join(OPS)}",
                kind=ErrorKind.INVALID_OPTION,
            )
        if merge_ops and order_by is not None:
            raise InvalidInputError(
                "orderBy leaves one row of each key; merges of a key all count",
                kind=ErrorKind.INVALID_OPTION,
                hint="Leave out orderBy, or write merges and other rows separately",
            )
        plan = cls(schema, op, _order_field(given, schema, order_by), merge_ops or {})
        plan._check(given)
        return plan

    @property
    def has_merges(self) -> bool:
        """Whether rows may be merges, of which several of a key are combined."""
        return bool(self.merge_ops)

    @property
    def ordered(self) -> Schema:
        """The schema of `versions`: with the order column, if there is one."""
        if self.order is None:
            return self.schema
        return Schema(self.schema.id, self.schema.key, (*self.schema.fields, self.order))

    def versions(self, rows: pa.Table) -> Versions:
        """Return rows as they are staged, in the order they came in."""
        ops = rows.column(OP) if OP in rows.column_names else None
        known = self._known()
        rest = rows.select([name for name in rows.column_names if name in known])
        parts = []
        for kind, part, places in self._split(rest, ops):
            found = self._of_kind(part, kind)
            if self.order is not None:
                order = _take(rows.column(self.order.name), places)
                fitted = fit_column(order, self.order)
                found = found.with_fields({**found.fields, self.order.number: fitted})
            parts.append(found)
        return concat_versions(parts, self.ordered)

    # --- kinds --------------------------------------------------------------------
    def _split(
        self, rows: pa.Table, ops: pa.ChunkedArray | None
    ) -> list[tuple[OpKind, pa.Table, pa.Array | None]]:
        if ops is None:
            return [(OPS[self.op], rows, None)]
        known = pc.is_in(ops, value_set=pa.array(list(OPS), pa.string()))
        wrong = pc.index(known, False).as_py()
        if wrong >= 0:
            raise InvalidInputError(
                f"row {wrong}, column {OP}: expected {', '.join(OPS)}, got {ops[wrong].as_py()!r}",
                row=wrong,
                column=OP,
            )
        parts = []
        for name, kind in OPS.items():
            places = pc.indices_nonzero(pc.equal(ops, name))
            if len(places):
                parts.append((kind, rows.take(places), places))
        return parts

    def _of_kind(self, rows: pa.Table, kind: OpKind) -> Versions:
        if kind is OpKind.PATCH and EXPIRES_AT in rows.column_names:
            expiry = rows.column(EXPIRES_AT)
            if expiry.null_count == len(expiry):  # it is there for the puts among them
                rows = rows.drop_columns(EXPIRES_AT)
        if kind is OpKind.MERGE:
            return self._merges(rows)
        if kind is not OpKind.DELETE:
            return staged_rows(to_ops(rows, self.schema, kind=kind))
        key = self.schema.key
        keys = fit_keys(_whole(rows.column(key.name)), key)
        kinds = pa.array(np.full(len(keys), OpKind.DELETE, np.uint8))
        return staged_rows(Ops(keys, kinds))

    def _merges(self, rows: pa.Table) -> Versions:
        """Return rows as merges; columns without an operator are there for other rows."""
        own = {self.schema.key.name, EXPIRES_AT, *self.merge_ops}
        for name in rows.column_names:
            if name not in own and rows.column(name).null_count < len(rows):
                operator_of(name, self.merge_ops)  # which raises
        merged = rows.select([name for name in rows.column_names if name in own])
        ops = merge_rows_ops(merged, self.merge_ops, self.schema, now_ms=self.now_ms)
        return staged_rows(ops)

    # --- names and types ----------------------------------------------------------
    def _known(self) -> set[str]:
        return {EXPIRES_AT, self.schema.key.name, *(field.name for field in self.schema.fields)}

    def _operator_problems(self, given: pa.Schema) -> Iterator[InvalidInputError]:
        """Yield operators that do not fit their column, and columns of merges without one."""
        fields = {field.name: field for field in self.schema.fields}
        for name in self.merge_ops:
            if name not in fields:
                yield unknown_column(name, list(fields))
                continue
            problem = type_problem(operator_of(name, self.merge_ops), fields[name].arrow)
            if problem:
                yield InvalidInputError(
                    f"column {name}: {problem}, not {fields[name].type}", column=name
                )
        missing = [name for name in given.names if name in fields and name not in self.merge_ops]
        if self.op == "merge" and OP not in given.names and missing:
            yield InvalidInputError(
                f"columns {', '.join(missing)}: merges have an operator for each column",
                kind=ErrorKind.INVALID_OPTION,
                hint="Name them in the option mergeOps: count=add,high=max",
            )

    def _check(self, given: pa.Schema) -> None:
        known = self._known()
        own = {OP} | ({self.order.name} if self.order is not None else set())
        columns = sorted(known - {EXPIRES_AT})
        problems: list[InvalidInputError] = [
            unknown_column(name, columns) for name in given.names if name not in known | own
        ]
        problems += _key_problems(given, self.schema.key.name)
        problems += self._operator_problems(given)
        problems += [
            InvalidInputError(
                f"column {field.name}: expected {field.type}, the DataFrame has "
                f"{given.field(field.name).type}",
                hint="Cast it, or change the namespace's column with db.alter",
                column=field.name,
            )
            for field in self.schema.fields
            if field.name in given.names and not may_fit(given.field(field.name).type, field.arrow)
        ]
        if OP in given.names and kind_of(given.field(OP).type) != "text":
            problems.append(
                InvalidInputError(f"column {OP}: expected text, got {given.field(OP).type}")
            )
        raise_all(problems)


def _key_problems(given: pa.Schema, key: str) -> list[InvalidInputError]:
    if key not in given.names:
        message, hint = f"column {key}: the key column is missing", ""
    elif kind_of(given.field(key).type) not in ("text", "bytes"):
        message = f"column {key}: a key is text or bytes, got {given.field(key).type}"
        hint = "Cast it to string"
    else:
        return []
    return [InvalidInputError(message, kind=ErrorKind.INVALID_KEY, hint=hint, column=key)]


def raise_all(problems: Sequence[InvalidInputError]) -> None:
    """Raise all problems as one error; a single problem is raised unchanged."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    nested = (error.context.get("problems", (error.message,)) for error in problems)
    messages = tuple(message for group in nested for message in group)
    first = problems[0]
    raise InvalidInputError(
        "; ".join(messages), kind=first.kind, hint=first.hint, problems=messages
    )


def _order_field(given: pa.Schema, schema: Schema, name: str | None) -> Field | None:
    if name is None:
        return None
    if name not in given.names:
        raise InvalidInputError(
            f"the order column {name!r} is not there, only {', '.join(given.names)}",
            kind=ErrorKind.INVALID_OPTION,
            column=name,
        )
    number = max(field.number for field in (schema.key, *schema.fields)) + 1
    order = Field(number, name, type_name(normal_type(given.field(name).type)))
    if order.type == "bool" or order.type.startswith(("list", "vector")):
        raise InvalidInputError(
            f"the order column {name!r} is {order.type}, which has no useful order", column=name
        )
    return order


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _take(column: pa.ChunkedArray, places: pa.Array | None) -> pa.Array:
    return _whole(column if places is None else column.take(places))


# --- sorting -------------------------------------------------------------------------

LOCAL_DIRS = "SPARK_LOCAL_DIRS"


def scratch_folder() -> TemporaryDirectory[str]:
    """Return a temporary folder on the executor's disks; in the system's outside of Spark.

    Spark empties its local directories when the executor ends, however it ends.
    """
    folders = filter(None, os.environ.get(LOCAL_DIRS, "").split(","))
    parent = next((folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)), None)
    return TemporaryDirectory(prefix="reef-", dir=parent)


Places = npt.NDArray[np.int64]
RUN_ROWS = 16_384
"""Rows of a run that are in memory at a time while runs are merged."""
WIDTH = 8
UNDECIDED = 0
"""Sequence number of a row that ties with another row of its key. Staged rows have 1."""


def sorted_places(keys: pa.Array) -> Places:
    """Return the positions of keys in sorted order; the sort is stable.

    >>> sorted_places(pa.array([b"b", b"a", b"b"])).tolist()
    [1, 0, 2]
    """
    if len(keys) < 2:
        return np.arange(len(keys), dtype=np.int64)
    common = _common_length(keys)
    numbers = _numbers(keys, common)
    places = np.argsort(numbers, kind="stable").astype(np.int64)
    alike = _find_repeats(numbers[places])
    if alike.any():
        # Equal numbers are adjacent: sorting by whole keys permutes them within their positions.
        spots = np.flatnonzero(alike)
        tied = np.sort(places[spots])
        order = pc.sort_indices(keys.take(pa.array(tied))).to_numpy().astype(np.int64)
        places[spots] = tied[order]
    return places


def _common_length(keys: pa.Array) -> int:
    bounds = pc.min_max(keys)
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    differing = (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return next(differing, min(len(low), len(high)))


def _numbers(keys: pa.Array, skipped: int) -> npt.NDArray[np.uint64]:
    """Return the eight bytes after the common prefix as numbers; short keys are zero-padded."""
    _, offsets_buffer, data = keys.buffers()
    end = keys.offset + len(keys) + 1
    offsets = np.frombuffer(offsets_buffer, np.int32, end)[keys.offset :].astype(np.int64)
    if data is None:
        return np.zeros(len(keys), np.uint64)
    stored = np.frombuffer(data, np.uint8)
    padded = np.zeros(offsets[-1] + skipped + WIDTH, np.uint8)
    padded[: offsets[-1]] = stored[: offsets[-1]]
    starts = offsets[:-1] + skipped
    lengths = np.minimum(offsets[1:] - starts, WIDTH)
    numbers = np.zeros(len(keys), np.uint64)
    for place in range(WIDTH):
        byte = np.where(lengths > place, padded[starts + place], 0).astype(np.uint64)
        numbers |= byte << np.uint64(8 * (WIDTH - 1 - place))
    return numbers


def _find_repeats(ordered: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of the sorted numbers are equal to a neighbour."""
    same = ordered[1:] == ordered[:-1]
    alike = np.zeros(len(ordered), bool)
    alike[1:] |= same
    alike[:-1] |= same
    return alike


@dataclass
class RowSorter:
    """Sorts the rows of one task by key, in bounded memory."""

    plan: RowsPlan
    sort_bytes: int = SORT_BYTES
    keeps_order: bool = False
    """Other tasks may have higher rows: keep the order column, and accept ties."""
    rows: int = 0
    duplicates: int = 0
    """Rows that were dropped in favour of another row of their key, or combined with it."""
    spilled: int = 0

    def sorted(self, pieces: Iterable[Versions]) -> Iterator[Versions]:
        """Yield all rows by key, each key once."""
        with scratch_folder() as folder:
            runs: list[_SortedRun] = []
            gathered: list[Versions] = []
            size = 0
            for piece in pieces:
                gathered.append(piece)
                self.rows += len(piece)
                size += bytes_of(piece)
                if size >= self.sort_bytes:
                    path = os.path.join(folder, f"{len(runs)}.arrow")
                    runs.append(_SortedRun.write(path, self._deduplicate(gathered)))
                    gathered, size = [], 0
            self.spilled = len(runs)
            last = self._deduplicate(gathered) if gathered else None
            yield from self._merge_sorted(runs, last)

    def _merge_sorted(self, runs: "list[_SortedRun]", last: Versions | None) -> Iterator[Versions]:
        if not runs:
            if last is not None:
                yield self._drop_order_column(last)
            return
        yield from self.merge([*runs, *([_SortedRun([last])] if last is not None else [])])

    def merge(self, runs: Sequence[Cursor]) -> Iterator[Versions]:
        """Yield the rows of sorted runs by key, each key once."""
        for parts in merged(list(runs), reverse=False):
            yield self._drop_order_column(self._deduplicate(parts))

    def _deduplicate(self, parts: list[Versions]) -> Versions:
        """Return rows by key, each key once."""
        rows = concat_versions(
            [part for part in parts if len(part)] or parts[:1], self.plan.ordered
        )
        rows = rows.take(sorted_places(rows.keys))
        if len(rows) < 2:
            return rows
        same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
        if not same.any():
            return rows
        self.duplicates += int(same.sum())
        if self.plan.order is None:
            return _with_combined_merges(rows, same, self.plan.schema)
        return _highest(rows, same, self.plan.order.number)

    def _drop_order_column(self, rows: Versions) -> Versions:
        """Return rows without the order column; InvalidInputError on an unresolved tie."""
        if self.plan.order is None or self.keeps_order:
            return rows
        undecided = np.flatnonzero(rows.seqs == UNDECIDED)
        if len(undecided):
            raise _undecided_error(rows, int(undecided[0]))
        number = self.plan.order.number
        return rows.with_fields({n: a for n, a in rows.fields.items() if n != number})


def _highest(rows: Versions, same: npt.NDArray[np.bool_], number: int) -> Versions:
    """Return the row with the highest order of each key; ties are marked as UNDECIDED.

    A tie is not an error yet: another run may have a higher row.
    """
    group = np.concatenate(([0], np.cumsum(~same)))
    values = rows.fields[number]
    ranks = pc.rank(values, tiebreaker="dense").to_numpy().astype(np.int64)
    ranks[values.is_null().to_numpy(zero_copy_only=False)] = -1
    order = np.lexsort((ranks, group))
    group, ranks = group[order], ranks[order]
    last = np.concatenate((group[1:] != group[:-1], [True]))
    tied = np.zeros(len(rows), bool)
    tied[1:] = (group[1:] == group[:-1]) & (ranks[1:] == ranks[:-1])
    chosen = rows.take(order[last].astype(np.int64))
    undecided = tied[last] | (chosen.seqs == UNDECIDED)
    return replace(chosen, seqs=np.where(undecided, UNDECIDED, chosen.seqs).astype(np.uint32))


def _with_combined_merges(rows: Versions, same: npt.NDArray[np.bool_], schema: Schema) -> Versions:
    """Return sorted rows with the merges of each key as one; InvalidInputError at another repeat.

    Sums of floats depend on the order in which rows came. Of several expiries the latest counts.
    """
    repeats = np.append(same, False) | np.append(False, same)
    wrong = np.flatnonzero(repeats & (rows.kinds != OpKind.MERGE))
    if len(wrong):
        raise _repeated_key_error(rows, int(wrong[0]), int(same.sum()))
    merges = rows.take(np.flatnonzero(repeats).astype(np.int64))
    if merges.expires_at_ms is not None:
        expiry = merges.expires_at_ms.fill_null(2**63 - 1).to_numpy()
        merges = merges.take(np.argsort(expiry, kind="stable").astype(np.int64))
    others = rows.take(np.flatnonzero(~repeats).astype(np.int64))
    combined = concat_versions([others, sorted_merges(merges, schema)], schema)
    return combined.take(sorted_places(combined.keys))


def _repeated_key_error(rows: Versions, place: int, count: int) -> InvalidInputError:
    key = KeysInOrder(rows.keys)[place]
    return InvalidInputError(
        f"the key {key!r} comes more than once; {count} rows repeat the key of another row",
        kind=ErrorKind.INVALID_KEY,
        hint="Choose one row of each key, or name the column that decides (orderBy, order_by)",
        key=key,
    )


def _undecided_error(rows: Versions, place: int) -> InvalidInputError:
    key = KeysInOrder(rows.keys)[place]
    return InvalidInputError(
        f"two rows of the key {key!r} have the same place in the order column",
        kind=ErrorKind.INVALID_KEY,
        hint="The order column must be different in all rows of a key",
        key=key,
    )


def bytes_of(rows: Versions) -> int:
    """Return how much memory rows take."""
    arrays = [rows.keys, *rows.fields.values(), *rows.touched.values()]
    return int(sum(array.nbytes for array in arrays)) + 13 * len(rows)


# --- runs -----------------------------------------------------------------------------


class _SortedRun(Cursor):
    """Sorted rows, in memory or in a local file, read piece by piece."""

    def __init__(self, pieces: Iterable[Versions]) -> None:
        super().__init__()
        self._pieces = iter(pieces)

    @classmethod
    def write(cls, path: str, rows: Versions) -> "_SortedRun":
        table = to_table(rows)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=RUN_ROWS)
        return cls(_read(path))

    def _next(self) -> Versions | None:
        return next(self._pieces, None)


def to_table(rows: Versions) -> pa.Table:
    """Return rows as a table, for a file or a message."""
    columns = {"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs, "kind": rows.kinds}
    if rows.expires_at_ms is not None:
        columns["expires"] = rows.expires_at_ms
    columns |= {f"f{number}": array for number, array in rows.fields.items()}
    columns |= {f"t{number}": array for number, array in rows.touched.items()}
    if rows.merged_at_ms is not None:
        columns["merged_at"] = rows.merged_at_ms
    return pa.table(columns)


def _read(path: str) -> Iterator[Versions]:
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        for place in range(reader.num_record_batches):
            yield from_batch(reader.get_batch(place))


def from_batch(batch: pa.RecordBatch) -> Versions:
    """Return the rows of a batch of such a table."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    numbers = {name: array for name, array in columns.items() if name[1:].isdigit()}
    return Versions(
        columns["key"],
        columns["lsn"].to_numpy(),
        columns["seq"].to_numpy(),
        columns["kind"].to_numpy(),
        {int(name[1:]): array for name, array in numbers.items() if name[0] == "f"},
        columns.get("expires"),
        {int(name[1:]): array for name, array in numbers.items() if name[0] == "t"},
        merged_at_ms=columns.get("merged_at"),
    )


def order_of(plan: RowsPlan) -> Field:
    """Return the order column of a plan that has one."""
    if plan.order is None:
        raise InternalError("these rows have no order column")
    return plan.order


def notes_schema(plan: RowsPlan) -> Schema:
    """Return the columns of notes: the key, and the order column of its row."""
    return Schema(plan.schema.id, plan.schema.key, (order_of(plan),))


class OrderNotes:
    """The order column of a task's rows: collected in a local file, then staged as a segment.

    The order column is not stored with the rows: deletes have no columns, and it may be no column
    of the namespace. No ingest names the notes, so a sweep deletes them.
    """

    def __init__(self, plan: RowsPlan) -> None:
        self._plan = plan
        self._order = order_of(plan)
        self._open = ExitStack()
        self.undecided = 0
        """Keys whose highest order occurs in two rows of this task; its segments are merged
        with those of other tasks before the commit.
        """

    def __enter__(self) -> Self:
        folder = self._open.enter_context(scratch_folder())
        self._path = os.path.join(folder, "notes.arrow")
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def record(self, pieces: Iterable[Versions]) -> Iterator[Versions]:
        """Write the order column of sorted rows to a file; yield the rows without it."""
        schema = pa.schema(
            [("key", pa.binary()), ("seq", pa.uint32()), ("order", self._order.arrow)]
        )
        with pa.OSFile(self._path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for rows in pieces:
                order = rows.fields[self._order.number]
                table = pa.table([rows.keys, pa.array(rows.seqs), order], schema=schema)
                writer.write_table(table, max_chunksize=RUN_ROWS)
                self.undecided += int((rows.seqs == UNDECIDED).sum())
                bare = {n: a for n, a in rows.fields.items() if n != self._order.number}
                yield rows.with_fields(bare)

    def stage(self, staging: Staging) -> tuple[JobSegment, ...]:
        """Write the notes as segments of the job."""
        return replace(staging, schema=notes_schema(self._plan)).stage(self._read())

    def _read(self) -> Iterator[Versions]:
        with pa.memory_map(self._path) as file:
            reader = pa.ipc.open_file(file)
            for place in range(reader.num_record_batches):
                keys, seqs, order = reader.get_batch(place).columns
                count = len(keys)
                kinds = np.full(count, OpKind.PUT, np.uint8)
                lsns = np.zeros(count, np.int64)
                fields = {self._order.number: order}
                yield Versions(keys, lsns, seqs.to_numpy(), kinds, fields)
