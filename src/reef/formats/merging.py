"""Merging sorted rows by the compiled kernel: the newest row of each key, straight into columns.

Of rows in memory the kernel takes the buffers of their Arrow arrays. It finds the first key of a
range in each part, merges so many keys, and copies their rows to new buffers: in one call, without
the rows of all parts one after the other in between. Parts with patches and merges, and columns
whose values are neither bytes nor of one width, are left to Python (`reef.engine.read.merge`).
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from reef import kernel
from reef.formats.columns import BY_PAGE, FIXED_SIZE_LIST, VARIABLE
from reef.formats.schema import Schema
from reef.formats.versions import Versions

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


def buffers_read(found: Sequence[Any], places: Sequence[int], lsn: int) -> RowBuffers:
    """Return rows that the kernel has read, for `merge_rows`.

    `places` has for each column of the schema its place among those that were read, -1 for others.
    With `lsn` all rows have this one.
    """
    offsets, data, lsns, seqs, kinds, *columns = found[:-1]
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
