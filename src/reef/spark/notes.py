"""Notes on an order column: how high each row of a task stands, beside the segments it stages.

Where rows of a key may be in several tasks, none of them can decide alone. The order column is
not stored with the rows (deletes have no columns, and it may be no column of the namespace), so
a task notes it: in a local file while its rows are written, then as a segment of its own, with
the job in its name and so with the job's root. No ingest names it: a sweep takes it.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from reef.errors import InternalError
from reef.formats.batch import OpKind
from reef.formats.schema import Field, Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import JobSegment
from reef.jobs.staging import Staging
from reef.spark.rows import RowsPlan
from reef.spark.scratch import scratch_folder
from reef.spark.sorting import RUN_ROWS, UNDECIDED

__all__ = ["OrderNotes", "notes_schema", "order_of"]


def order_of(plan: RowsPlan) -> Field:
    """Return the order column of a plan that has one."""
    if plan.order is None:
        raise InternalError("these rows have no order column")
    return plan.order


def notes_schema(plan: RowsPlan) -> Schema:
    """Return the columns of notes: the key, and its row's place in the order."""
    return Schema(plan.schema.id, plan.schema.key, (order_of(plan),))


class OrderNotes:
    """The notes of one task, from the first row to their staging."""

    def __init__(self, plan: RowsPlan) -> None:
        self._plan = plan
        self._order = order_of(plan)
        self._open = ExitStack()
        self.undecided = 0
        """Keys of which two rows stand equally high, and none of this task higher. Where there
        are some, what this task stages is never committed as it is.
        """

    def __enter__(self) -> Self:
        folder = self._open.enter_context(scratch_folder())
        self._path = os.path.join(folder, "notes.arrow")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def taken(self, pieces: Iterable[Versions]) -> Iterator[Versions]:
        """Note the order of sorted rows; yield them as they are staged, without it."""
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
        """Write what was noted where the driver finds it."""
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
