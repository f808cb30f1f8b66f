"""Rows in the order in which they came, as columns, found by a number that never changes.

Every batch is appended as one chunk, as it was decoded: no row is touched one by one. Many
small chunks are joined now and then, each row at most a few times in its life, so that
gathering rows from all over stays a few vector operations.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions

__all__ = ["Arena"]

FAN = 32
"""This many neighbouring chunks of one size class become one."""


class Arena:
    """Appended to by one thread at a time, read by any number.

    Chunks and their first row numbers are one pair, replaced as a whole when chunks are joined
    and only ever longer otherwise, so that a reader needs no lock.
    """

    def __init__(self, schema: Schema, first_row: int = 0) -> None:
        self._schema = schema
        self._pair: tuple[list[Versions], list[int]] = ([], [])
        self.next_row = first_row
        self.bytes = 0

    def append(self, rows: Versions) -> int:
        """Keep rows; return the number of the first one."""
        first = self.next_row
        chunks, starts = self._pair
        chunks.append(rows)
        starts.append(first)  # last: whoever sees the number finds the chunk
        self.next_row += len(rows)
        self.bytes += rows_bytes(rows)
        self._join_small_ones()
        return first

    def locate(self, row: int) -> tuple[Versions, int]:
        """Return the chunk that has a row, and the row's place in it."""
        chunks, starts = self._pair
        number = bisect_right(starts, row) - 1
        return chunks[number], row - starts[number]

    def take(self, rows: npt.NDArray[np.int64]) -> Versions:
        """Return these rows, in this order."""
        if not len(rows):
            return Versions.empty(self._schema)
        chunks, starts = self._pair[0], np.array(self._pair[1], np.int64)
        numbers = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        used, firsts = np.unique(numbers[order], return_index=True)
        bounds = [*firsts.tolist(), len(rows)]
        parts = [
            chunks[number].take(rows[order[bounds[i] : bounds[i + 1]]] - starts[number])
            for i, number in enumerate(used.tolist())
        ]
        gathered = concat_versions(parts, self._schema)
        if (np.diff(order) == 1).all():
            return gathered
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return gathered.take(back.astype(np.int64))

    def from_lsn(self, floor: int, schema: Schema) -> "Arena":
        """Return an arena without the leading rows that lie below `floor`; numbers stay."""
        kept = Arena(schema, self.next_row)
        chunks, starts = kept._pair
        for chunk, start in zip(*self._pair, strict=True):
            above = np.flatnonzero(chunk.lsns >= floor)
            if chunks or len(above):
                first = 0 if chunks else int(above[0])
                chunks.append(chunk.slice(first, len(chunk)).under(schema))
                starts.append(start + first)
        kept.bytes = sum(rows_bytes(chunk) for chunk in chunks)
        return kept

    @property
    def first_row(self) -> int:
        starts = self._pair[1]
        return starts[0] if starts else self.next_row

    def _join_small_ones(self) -> None:
        size = 1
        while len(self._pair[0]) >= FAN:
            chunks, starts = self._pair
            if any(len(chunk) > size * FAN for chunk in chunks[-FAN:]):
                return
            joined = concat_versions(chunks[-FAN:], self._schema)
            self._pair = ([*chunks[:-FAN], joined], starts[: -FAN + 1])
            size *= FAN


def rows_bytes(rows: Versions) -> int:
    """Return about what rows take in memory."""
    columns = [rows.keys, *rows.fields.values(), *rows.touched.values()]
    return int(13 * len(rows) + sum(column.nbytes for column in columns))
