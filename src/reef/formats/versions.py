"""Versions: rows with the LSN and sequence at which they were written, column by column.

The one representation of rows in the engine: memtables return it, pages of segments decode to
it, merges take and return it. Sorted by key, and for one key the newest first.

**Merges by the compiled kernel** write the newest row of each key straight into columns. Of rows in
memory the kernel takes the buffers of their Arrow arrays. It finds the first key of a
range in each part, merges so many keys, and copies their rows to new buffers: in one call, without
the rows of all parts one after the other in between. Parts with patches and merges, and columns
whose values are neither bytes nor of one width, are left to Python (`reef.engine.read.merge`).
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef import kernel
from reef.formats.columns import BY_PAGE, FIXED_SIZE_LIST, VARIABLE
from reef.formats.schema import Schema, cast_column
from reef.formats.wal_object import (
    FIRST_PARTIAL,
    OpKind,
    Ops,
    concat_numbered,
    concat_or_none,
    concat_touched,
)
from reef.types import KeyRange

_array_take = pc.get_function("array_take")


@dataclass(frozen=True, slots=True, order=True)
class RangeTombstone:
    """All keys in [start, end) were deleted at this LSN and sequence."""

    start: bytes
    end: bytes
    lsn: int
    seq: int


class KeysInOrder:
    """Sorted keys of an Arrow array, for `bisect`: only those that it compares become bytes."""

    __slots__ = ("_keys",)

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> bytes:
        key: bytes = self._keys[place].as_py()
        return key


def key_place(keys: pa.Array, key: bytes, *, above: bool = False) -> int:
    """Return how many of sorted keys are below a key; with `above`, also those that equal it."""
    if (native := kernel.native) is not None and not keys.null_count:
        _, offsets, data = keys.buffers()
        if data is not None:
            place: int | None = native.key_place(offsets, data, keys.offset, len(keys), key, above)
            if place is not None:
                return place
    return (bisect_right if above else bisect_left)(KeysInOrder(keys), key)


@dataclass(frozen=True, slots=True)
class Versions:
    """Equally long columns. `kinds` are those of `OpKind`, without range deletes."""

    keys: pa.Array
    lsns: npt.NDArray[np.int64]
    seqs: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    fields: Mapping[int, pa.Array]
    expires_at_ms: pa.Array | None = None
    touched: Mapping[int, pa.Array] = field(default_factory=dict)
    """Whether a patch sets a column; with merges, the operator of each row (`Operator`)."""
    distinct: bool = False
    """Whether it is known that the rows are sorted by key, and no key comes twice."""
    merged_at_ms: pa.Array | None = None
    """The writer's clock, of merges only."""

    @classmethod
    def empty(cls, schema: Schema) -> "Versions":
        """Return no rows."""
        return cls(
            pa.array([], pa.binary()),
            np.zeros(0, np.int64),
            np.zeros(0, np.uint32),
            np.zeros(0, np.uint8),
            {number: pa.array([], data_type) for number, data_type in schema.types().items()},
        )

    def __len__(self) -> int:
        return len(self.keys)

    def with_fields(self, fields: Mapping[int, pa.Array]) -> "Versions":
        """Return the same rows with these columns."""
        return Versions(
            self.keys,
            self.lsns,
            self.seqs,
            self.kinds,
            fields,
            self.expires_at_ms,
            self.touched,
            self.distinct,
            self.merged_at_ms,
        )

    @property
    def has_partial(self) -> bool:
        """Whether some rows change only some columns of the row below: patches and merges."""
        kinds = self.kinds
        return bool(kinds.any() and kinds.max() >= FIRST_PARTIAL)

    def are_partial(self) -> npt.NDArray[np.bool_]:
        """Return which rows are patches or merges."""
        partial: npt.NDArray[np.bool_] = self.kinds >= FIRST_PARTIAL
        return partial

    def with_lsn(self, lsn: int) -> "Versions":
        """Return the same rows at another LSN: those of an ingest store 0."""
        return replace(self, lsns=np.full(len(self), lsn, np.int64))

    def under(self, schema: Schema) -> "Versions":
        """Return the rows as a newer schema has them: numbers may have been widened."""
        types = schema.types()
        for number, array in self.fields.items():
            if array.type != types.get(number):
                break
        else:
            return self
        known = {number: array for number, array in self.fields.items() if number in types}
        return self.with_fields({n: cast_column(array, types[n]) for n, array in known.items()})

    def within(self, bounds: KeyRange) -> "Versions":
        """Return the rows of a range; they are sorted by key."""
        if not len(self):
            return self
        first, last = key_place(self.keys, bounds.start), len(self)
        if bounds.end is not None:
            last = max(first, key_place(self.keys, bounds.end))
        return self if last - first == len(self) else self.slice(first, last)

    def slice(self, start: int, end: int) -> "Versions":
        """Return the rows [start, end), without copying."""
        return Versions(
            self.keys[start:end],
            self.lsns[start:end],
            self.seqs[start:end],
            self.kinds[start:end],
            {number: array[start:end] for number, array in self.fields.items()},
            None if self.expires_at_ms is None else self.expires_at_ms[start:end],
            {number: array[start:end] for number, array in self.touched.items()},
            self.distinct,
            None if self.merged_at_ms is None else self.merged_at_ms[start:end],
        )

    def take(self, places: npt.NDArray[np.int64], *, distinct: bool = False) -> "Versions":
        """Return the rows at these places, in that order."""
        chosen = pa.array(places)
        expiry = self.expires_at_ms
        return Versions(
            _take(self.keys, chosen),
            self.lsns[places],
            self.seqs[places],
            self.kinds[places],
            {number: _take(array, chosen) for number, array in self.fields.items()},
            None if expiry is None else _take(expiry, chosen),
            {number: _take(array, chosen) for number, array in self.touched.items()},
            distinct,
            merged_at_ms=None if self.merged_at_ms is None else _take(self.merged_at_ms, chosen),
        )


def _take(array: pa.Array, places: pa.Array) -> pa.Array:
    """Return the values at these places, without pyarrow's wrapper, which takes twice as long."""
    return _array_take.call([array, places])


def merge_places(parts: Sequence[Versions], *, every: bool) -> npt.NDArray[np.int64] | None:
    """Return the order of the rows of sorted parts, among all rows one part after the other: by
    key, newest first; without `every` only the newest of each key. None if Arrow must sort.
    """
    merge = getattr(kernel.native, "merge_places", None)  # earlier builds do not have it
    if merge is None:
        return None
    tuples = []
    for part in parts:
        keys = part.keys
        _, offsets, data = keys.buffers()
        if data is None or keys.null_count:
            return None
        tuples.append((offsets, data, keys.offset, len(keys), part.lsns, part.seqs))
    places: bytes | None = merge(tuples, every)
    return None if places is None else np.frombuffer(places, np.int64)


def split_ops(ops: Ops, lsn: int, first_seq: int) -> tuple[Versions, list[RangeTombstone]]:
    """Return a batch's rows, in their own order, and its range deletes."""
    count = len(ops)
    # Not by `to_numpy`, which would first of all import pandas, where it is installed.
    kinds = np.frombuffer(ops.kinds.buffers()[1], np.uint8)[ops.kinds.offset :][:count]
    rows = Versions(
        ops.keys,
        np.full(count, lsn, np.int64),
        np.arange(first_seq, first_seq + count, dtype=np.uint32),
        kinds,
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
        merged_at_ms=ops.merged_at_ms,
    )
    if ops.end_keys is None:
        return rows, []
    ranges = np.flatnonzero(kinds == OpKind.DELETE_RANGE).astype(np.int64)
    tombstones = [
        RangeTombstone(ops.keys[at].as_py(), ops.end_keys[at].as_py(), lsn, first_seq + at)
        for at in ranges.tolist()
    ]
    return rows.take(np.flatnonzero(kinds != OpKind.DELETE_RANGE).astype(np.int64)), tombstones


def concat_versions(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return all rows, one part after the other; columns that a part lacks are null there."""
    if len(parts) == 1:
        return parts[0]
    types = schema.types()
    return Versions(
        pa.concat_arrays([part.keys for part in parts]),
        np.concatenate([part.lsns for part in parts]),
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        concat_numbered([(len(p), p.fields) for p in parts], types),
        concat_or_none([(len(p), p.expires_at_ms) for p in parts], pa.int64()),
        concat_touched([(len(p), p.touched) for p in parts]),
        merged_at_ms=concat_or_none([(len(p), p.merged_at_ms) for p in parts], pa.int64()),
    )


BINARY, EXPIRY = pa.binary(), pa.int64()
RowBuffers = tuple[Any, ...]
"""A part as the kernel takes it."""


_widths: dict[int, tuple[Schema, bytes | None]] = {}
"""By the identity of a schema: to hash its types takes longer than to merge some rows."""
SCHEMAS_MAX = 64


def _widths_of(schema: Schema) -> bytes | None:
    known = _widths.get(id(schema))
    if known is None or known[0] is not schema:
        if len(_widths) >= SCHEMAS_MAX:
            _widths.clear()
        known = _widths[id(schema)] = schema, _plan(schema)
    return known[1]


def _plan(schema: Schema) -> bytes | None:
    """Return the width of each column's values, the last one of expiry; None if one has none."""
    widths = []
    for data_type in schema.types().values():
        if data_type.id in VARIABLE:
            widths.append(0)
        elif data_type.id in BY_PAGE or data_type.id == FIXED_SIZE_LIST or data_type.bit_width % 8:
            return None
        else:
            widths.append(data_type.bit_width // 8)
    return np.array([*widths, 8], np.int64).tobytes()


def can_merge(schema: Schema) -> bool:
    """Whether the kernel merges rows with these columns."""
    return getattr(kernel.native, "merge_rows", None) is not None and _widths_of(schema) is not None


def row_buffers(rows: Versions, schema: Schema) -> RowBuffers | None:
    """Return the buffers of sorted rows; None if the kernel cannot merge their columns."""
    keys = rows.keys
    _, offsets, data = keys.buffers()
    if data is None or keys.null_count or rows.touched or rows.merged_at_ms is not None:
        return None
    columns: list[tuple[Any, ...] | None] = []
    for number, data_type in schema.types().items():
        array = rows.fields.get(number)
        if array is not None and array.type != data_type:
            return None
        columns.append(_column_buffers(array))
    columns.append(_column_buffers(rows.expires_at_ms))
    places = (offsets, data, keys.offset, len(keys), rows.lsns, rows.seqs)
    return places, rows.kinds, tuple(columns)


def buffers_read(response: Sequence[Any], places: Sequence[int], lsn: int) -> RowBuffers:
    """Return rows that the kernel has read, for `merge_rows`.

    `places` has for each column of the schema its place among those that were read, -1 for others.
    With `lsn` all rows have this one.
    """
    offsets, data, lsns, seqs, kinds, *columns = response[:-1]
    count = len(kinds)
    if lsn:
        lsns = np.full(count, lsn, np.int64)
    chosen = tuple([None if place < 0 else (*columns[place], 0) for place in places])
    return (offsets, data, 0, count, lsns, seqs), kinds, (*chosen, None)


def _column_buffers(array: pa.Array | None) -> tuple[Any, ...] | None:
    if array is None:
        return None
    buffers = array.buffers()
    if len(buffers) == 2:
        return None if buffers[1] is None else (buffers[0], None, buffers[1], array.offset)
    if buffers[1] is None:
        return None
    return buffers[0], buffers[1], b"" if buffers[2] is None else buffers[2], array.offset


def merge_rows(
    parts: list[RowBuffers],
    schema: Schema,
    start: bytes = b"",
    end: bytes | None = None,
    keys_max: int = sys.maxsize,
) -> Versions | None:
    """Return the newest row of each key from `start` to `end`, the first so many of them; None if
    Python must merge.
    """
    merge = getattr(kernel.native, "merge_rows", None)  # earlier builds do not have it
    if merge is None:
        return None
    types, widths = schema.types(), _widths_of(schema)
    if widths is None:
        return None
    merged = merge(parts, widths, start, end, keys_max)
    if merged is None:
        return None
    offsets, data, lsns, seqs, kinds, *columns = merged
    count = len(kinds)
    # A column that no part has stays absent.
    present = [any(some) for some in zip(*(part[2] for part in parts), strict=True)]
    arrays = [
        _array(data_type, count, column) if is_there else None
        for data_type, column, is_there in zip(
            (*types.values(), EXPIRY), columns, present, strict=True
        )
    ]
    return Versions(
        pa.Array.from_buffers(BINARY, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0),
        np.frombuffer(lsns, np.int64),
        np.frombuffer(seqs, np.uint32),
        np.frombuffer(kinds, np.uint8),
        {n: array for n, array in zip(types, arrays, strict=False) if array is not None},
        arrays[-1],
        distinct=True,
    )


def _array(data_type: pa.DataType, count: int, parts: Sequence[bytes | None]) -> pa.Array:
    buffers = [None if part is None else pa.py_buffer(part) for part in parts]
    if buffers[1] is None:
        del buffers[1]
    return pa.Array.from_buffers(data_type, count, buffers)
