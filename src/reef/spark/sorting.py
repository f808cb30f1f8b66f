"""Rows in any order become rows by key, each key once, in bounded memory.

Rows gather until they are `sort_bytes`; then they are sorted and go to a local file. In the end
what was sorted is merged, piece by piece. Most tasks never need the file.

Keys are compared by eight bytes at a time, as numbers: the part that all of them have in common
is passed over, the next eight bytes decide, and only keys that are alike in those are compared
whole. That is several times as fast as comparing whole keys.

Of a key that comes twice the row with the highest order counts (no order at all is the lowest).
Where nothing decides, or two are equally high, it is an error: never chance (H38).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.cursors import Cursor, merged
from reef.errors import InvalidInputError, Kind
from reef.formats.versions import KeysInOrder, Versions, concat_versions
from reef.spark.rows import RowsPlan
from reef.spark.scratch import scratch_folder

__all__ = ["RUN_ROWS", "SORT_BYTES", "UNDECIDED", "RowSorter", "sorted_places"]

Places = npt.NDArray[np.int64]
SORT_BYTES = 256 << 20
"""What a task holds in memory; sorting needs as much again."""
RUN_ROWS = 16_384
"""Rows of a run that are in memory at a time while runs are merged."""
WIDTH = 8
UNDECIDED = 0
"""As a row's sequence: another one of its key has the same order. Staged rows have 1."""


def sorted_places(keys: pa.Array) -> Places:
    """Return the order of keys, those that are equal as they came.

    >>> sorted_places(pa.array([b"b", b"a", b"b"])).tolist()
    [1, 0, 2]
    """
    if len(keys) < 2:
        return np.arange(len(keys), dtype=np.int64)
    common = _common_length(keys)
    numbers = _numbers(keys, common)
    places = np.argsort(numbers, kind="stable").astype(np.int64)
    alike = _alike(numbers[places])
    if alike.any():
        # Alike means in a row: sorted as whole keys they stay within their places.
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
    """Return the bytes behind the common ones as numbers; short keys are filled with zeros."""
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


def _alike(ordered: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of sorted numbers stand beside an equal one."""
    same = ordered[1:] == ordered[:-1]
    alike = np.zeros(len(ordered), bool)
    alike[1:] |= same
    alike[:-1] |= same
    return alike


@dataclass
class RowSorter:
    """Takes rows in pieces, gives them out by key. For one task."""

    plan: RowsPlan
    sort_bytes: int = SORT_BYTES
    apart: bool = False
    """Rows of other tasks may stand higher: the order column stays on, and a draw is no error."""
    rows: int = 0
    duplicates: int = 0
    """Rows that gave way to another one of their key."""
    spilled: int = 0

    def sorted(self, pieces: Iterable[Versions]) -> Iterator[Versions]:
        """Yield all rows by key, each key once."""
        with scratch_folder() as folder:
            runs: list[_Run] = []
            gathered: list[Versions] = []
            size = 0
            for piece in pieces:
                gathered.append(piece)
                self.rows += len(piece)
                size += _bytes_of(piece)
                if size >= self.sort_bytes:
                    path = os.path.join(folder, f"{len(runs)}.arrow")
                    runs.append(_Run.write(path, self._settled(gathered)))
                    gathered, size = [], 0
            self.spilled = len(runs)
            last = self._settled(gathered) if gathered else None
            yield from self._merged(runs, last)

    def _merged(self, runs: "list[_Run]", last: Versions | None) -> Iterator[Versions]:
        if not runs:
            if last is not None:
                yield self._bare(last)
            return
        yield from self.merge([*runs, *([_Run([last])] if last is not None else [])])

    def merge(self, runs: Sequence[Cursor]) -> Iterator[Versions]:
        """Yield the rows of sorted runs by key, each key once."""
        for parts in merged(list(runs), reverse=False):
            yield self._bare(self._settled(parts))

    def _settled(self, parts: list[Versions]) -> Versions:
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
        if self.plan.order is None:
            raise _repeated(rows, int(np.flatnonzero(same)[0]), int(same.sum()))
        self.duplicates += int(same.sum())
        return _highest(rows, same, self.plan.order.number)

    def _bare(self, rows: Versions) -> Versions:
        """Without the order column, which has done its work."""
        if self.plan.order is None or self.apart:
            return rows
        undecided = np.flatnonzero(rows.seqs == UNDECIDED)
        if len(undecided):
            raise _undecided(rows, int(undecided[0]))
        number = self.plan.order.number
        return rows.with_fields({n: a for n, a in rows.fields.items() if n != number})


def _highest(rows: Versions, same: npt.NDArray[np.bool_], number: int) -> Versions:
    """Return of each key the row with the highest order, marked where two are equally high.

    It is no error yet: in another run there may be a higher one.
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


def _repeated(rows: Versions, place: int, count: int) -> InvalidInputError:
    key = KeysInOrder(rows.keys)[place]
    return InvalidInputError(
        f"the key {key!r} comes more than once, as do {count} rows in all",
        kind=Kind.INVALID_KEY,
        hint="Choose one row of each key, or name the column that decides (orderColumn, order_by)",
        key=key,
    )


def _undecided(rows: Versions, place: int) -> InvalidInputError:
    key = KeysInOrder(rows.keys)[place]
    return InvalidInputError(
        f"two rows of the key {key!r} have the same place in the order column",
        kind=Kind.INVALID_KEY,
        hint="The order column must tell all rows of a key apart",
        key=key,
    )


def _bytes_of(rows: Versions) -> int:
    arrays = [rows.keys, *rows.fields.values(), *rows.touched.values()]
    return int(sum(array.nbytes for array in arrays)) + 13 * len(rows)


# --- runs -----------------------------------------------------------------------------


class _Run(Cursor):
    """Sorted rows, in memory or in a local file, read piece by piece."""

    def __init__(self, pieces: Iterable[Versions]) -> None:
        super().__init__()
        self._pieces = iter(pieces)

    @classmethod
    def write(cls, path: str, rows: Versions) -> "_Run":
        table = _to_table(rows)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=RUN_ROWS)
        return cls(_read(path))

    def _next(self) -> Versions | None:
        return next(self._pieces, None)


def _to_table(rows: Versions) -> pa.Table:
    columns = {"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs, "kind": rows.kinds}
    if rows.expires_at_ms is not None:
        columns["expires"] = rows.expires_at_ms
    columns |= {f"f{number}": array for number, array in rows.fields.items()}
    columns |= {f"t{number}": array for number, array in rows.touched.items()}
    return pa.table(columns)


def _read(path: str) -> Iterator[Versions]:
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        for place in range(reader.num_record_batches):
            yield _from_batch(reader.get_batch(place))


def _from_batch(batch: pa.RecordBatch) -> Versions:
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
    )
