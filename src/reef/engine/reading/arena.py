"""Rows in the order in which they came, as columns, found by a number that never changes.

Every batch is appended as one chunk, as it was decoded: no row is touched one by one. Many
small chunks are joined now and then, each row at most a few times in its life, so that
gathering rows from all over stays a few vector operations. Rows that come one by one become a
chunk only when somebody reads, or when there are many of them.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.formats.batch import OneOp, OpKind
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions

__all__ = ["Arena", "Numbers"]

Numbers = npt.NDArray[np.int64]
"""Of rows, or what belongs to them."""

FAN = 32
"""This many neighbouring chunks of one size class become one."""
FRESH_MAX = 256
"""So many rows that came one by one become a chunk, read or not."""
ONE_ROW_BYTES = 29
"""What a row takes beside its key and its value."""


class Arena:
    """Used by one thread at a time: it is for the memtable, which has a lock."""

    def __init__(self, schema: Schema, first_row: int = 0) -> None:
        self._schema = schema
        self._pair: tuple[list[Versions], list[int]] = ([], [])
        self._fresh: list[tuple[OneOp, int, int]] = []
        """Rows that came one by one, each with its LSN and sequence: the last ones of all."""
        self.next_row = first_row
        self.bytes = 0

    def append(self, rows: Versions) -> int:
        """Keep rows; return the number of the first one."""
        first = self._whole().next_row
        self.next_row += len(rows)
        self.bytes += rows_bytes(rows)
        self._add_chunk(rows, first)
        return first

    def append_one(self, op: OneOp, lsn: int, seq: int) -> int:
        """Keep a single row; return its number."""
        if len(self._fresh) >= FRESH_MAX:
            self._whole()
        self._fresh.append((op, lsn, seq))
        self.bytes += ONE_ROW_BYTES + len(op.key) + len(op.value or b"")
        row = self.next_row
        self.next_row = row + 1
        return row

    def locate(self, row: int) -> tuple[Versions, int]:
        """Return the chunk that has a row, and the row's place in it."""
        chunks, starts = self._whole()._pair
        number = bisect_right(starts, row) - 1
        return chunks[number], row - starts[number]

    def take(self, rows: Numbers) -> Versions:
        """Return these rows, in this order."""
        if not len(rows):
            return Versions.empty(self._schema)
        order, found = self._by_chunk(rows)
        parts = [chunk.take(places) for chunk, places in found]
        gathered = concat_versions(parts, self._schema)
        if (np.diff(order) == 1).all():
            return gathered
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return gathered.take(back.astype(np.int64))

    def stamps(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the LSNs and sequences of these rows."""
        lsns, seqs = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        if len(rows):
            order, found = self._by_chunk(rows)
            lsns[order] = np.concatenate([chunk.lsns[places] for chunk, places in found])
            seqs[order] = np.concatenate([chunk.seqs[places] for chunk, places in found])
        return lsns, seqs

    def from_lsn(self, floor: int, schema: Schema) -> "Arena":
        """Return an arena without the leading rows that lie below `floor`; numbers stay."""
        kept = Arena(schema, self.next_row)
        chunks, starts = kept._pair
        for chunk, start in zip(*self._whole()._pair, strict=True):
            above = np.flatnonzero(chunk.lsns >= floor)
            if chunks or len(above):
                first = 0 if chunks else int(above[0])
                chunks.append(chunk.slice(first, len(chunk)).under(schema))
                starts.append(start + first)
        kept.bytes = sum(rows_bytes(chunk) for chunk in chunks)
        return kept

    def below_lsn(self, floor: int) -> set[int]:
        """Return the rows that lie below an LSN, though they stand behind others that do not."""
        found: set[int] = set()
        for chunk, start in zip(*self._whole()._pair, strict=True):
            below = np.flatnonzero(chunk.lsns < floor)
            if len(below):
                found.update((below + start).tolist())
        return found

    @property
    def first_row(self) -> int:
        starts = self._whole()._pair[1]
        return starts[0] if starts else self.next_row

    def _by_chunk(
        self, rows: Numbers
    ) -> tuple[npt.NDArray[np.intp], list[tuple[Versions, Numbers]]]:
        """Return an order of rows by chunk, and in that order each chunk's places."""
        chunks, starts = self._whole()._pair[0], np.array(self._pair[1], np.int64)
        numbers = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        used, firsts = np.unique(numbers[order], return_index=True)
        bounds = [*firsts.tolist(), len(rows)]
        return order, [
            (chunks[number], rows[order[bounds[i] : bounds[i + 1]]] - starts[number])
            for i, number in enumerate(used.tolist())
        ]

    def _whole(self) -> "Arena":
        """Make a chunk of the rows that came one by one, and return this arena."""
        fresh, self._fresh = self._fresh, []
        if fresh:
            self._add_chunk(_chunk_of(fresh).under(self._schema), self.next_row - len(fresh))
        return self

    def _add_chunk(self, rows: Versions, first: int) -> None:
        chunks, starts = self._pair
        chunks.append(rows)
        starts.append(first)
        self._join_small_ones()

    def _join_small_ones(self) -> None:
        size = 1
        while len(self._pair[0]) >= FAN:
            chunks, starts = self._pair
            if any(len(chunk) > size * FAN for chunk in chunks[-FAN:]):
                return
            joined = concat_versions(chunks[-FAN:], self._schema)
            self._pair = ([*chunks[:-FAN], joined], starts[: -FAN + 1])
            size *= FAN


def _chunk_of(fresh: list[tuple[OneOp, int, int]]) -> Versions:
    ops, lsns, seqs = zip(*fresh, strict=True)
    fields = {
        number: pa.array([op.value if op.field == number else None for op in ops], pa.binary())
        for number in {op.field for op in ops if op.value is not None}
    }
    kinds = [OpKind.DELETE if op.value is None else OpKind.PUT for op in ops]
    return Versions(
        pa.array([op.key for op in ops], pa.binary()),
        np.array(lsns, np.int64),
        np.array(seqs, np.uint32),
        np.array(kinds, np.uint8),
        fields,
    )


def rows_bytes(rows: Versions) -> int:
    """Return about what rows take in memory."""
    columns = [rows.keys, *rows.fields.values(), *rows.touched.values()]
    return int(13 * len(rows) + sum(column.nbytes for column in columns))
