"""Column sets: Arrow arrays as bytes, laid out so that reading them copies nothing.

    u32 rows | u32 columns
    columns × ( u16 number | u16 buffers | buffers × u32 length )      0xFFFFFFFF: absent
    padding
    buffers, in order, each padded to 8

The buffers are those of the Arrow columnar format: validity bitmap, offsets, data, depth
first for nested types. The type of a column is not stored here; whoever reads has a schema.
Lengths and offsets are checked before Arrow sees them, since Arrow trusts its buffers.
"""

import struct
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import Buffer, Cursor, padding

__all__ = ["decode_columns", "encode_columns"]

ABSENT = 0xFFFFFFFF
HEAD = struct.Struct("<II")
COLUMN = struct.Struct("<HH")
COLUMNS_MAX = 65_535


def encode_columns(rows: int, columns: Mapping[int, pa.Array]) -> bytes:
    """Return the bytes of equally long arrays, by column number."""
    head = [HEAD.pack(rows, len(columns))]
    body: list[Buffer] = []
    for number, array in columns.items():
        buffers = _buffers(array)
        head.append(COLUMN.pack(number, len(buffers)))
        for buffer in buffers:
            head.append(struct.pack("<I", ABSENT if buffer is None else len(buffer)))
            if buffer is not None:
                body += (buffer, padding(len(buffer)))
    start = b"".join(head)
    return b"".join((start, padding(len(start)), *body))


def decode_columns(
    data: Buffer, types: Mapping[int, pa.DataType], name: str, offset: int = 0
) -> tuple[int, dict[int, pa.Array]]:
    """Return the number of rows and the arrays whose numbers stand in `types`."""
    cursor = Cursor(data, name, offset)
    rows, count = cursor.u32(), cursor.u32()
    layout = _read_layout(cursor, count)
    # Padding is relative to the set's own beginning, wherever it lies in the object.
    cursor.take(-cursor.position % 8)
    arrays = {}
    for number, lengths in layout:
        buffers = [_read_buffer(cursor, length) for length in lengths]
        if number in types:
            arrays[number] = _Assembly(buffers, cursor).array(types[number], rows)
    cursor.end()
    return rows, arrays


def _read_layout(cursor: Cursor, count: int) -> list[tuple[int, list[int]]]:
    if count > COLUMNS_MAX:
        cursor.fail(f"{count} columns")
    layout = []
    for _ in range(count):
        number, buffers = COLUMN.unpack(cursor.take(COLUMN.size))
        layout.append((number, [cursor.u32() for _ in range(buffers)]))
    return layout


def _read_buffer(cursor: Cursor, length: int) -> pa.Buffer | None:
    if length == ABSENT:
        return None
    data = cursor.take(length)
    cursor.take(-cursor.position % 8)
    return pa.py_buffer(data)


class _Assembly:
    """Puts an array together from its buffers, after checking that they can hold it."""

    def __init__(self, buffers: list[pa.Buffer | None], cursor: Cursor) -> None:
        self._buffers = buffers[::-1]
        self._cursor = cursor

    def array(self, data_type: pa.DataType, rows: int) -> pa.Array:
        built = self._build(data_type, rows)
        if self._buffers:
            self._cursor.fail(f"{len(self._buffers)} buffers too many for {data_type}")
        return built

    def _build(self, data_type: pa.DataType, rows: int) -> pa.Array:
        validity = self._next(-(-rows // 8), optional=True)
        if pa.types.is_fixed_size_list(data_type):
            child = self._build(data_type.value_type, rows * data_type.list_size)
            return pa.Array.from_buffers(data_type, rows, [validity], children=[child])
        if pa.types.is_list(data_type):
            offsets, end = self._offsets(rows)
            child = self._build(data_type.value_type, end)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets], children=[child])
        if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
            offsets, end = self._offsets(rows)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets, self._next(end)])
        bits = 1 if pa.types.is_boolean(data_type) else data_type.bit_width
        data = self._next(-(-rows * bits // 8))
        return pa.Array.from_buffers(data_type, rows, [validity, data])

    def _offsets(self, rows: int) -> tuple[pa.Buffer | None, int]:
        """Return the offsets and where the last one points, once they are known to rise."""
        buffer = self._next(4 * (rows + 1))
        if buffer is None:
            return buffer, 0
        offsets = np.frombuffer(buffer, dtype="<i4", count=rows + 1)
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            self._cursor.fail("offsets do not rise from 0")
        return buffer, int(offsets[-1])

    def _next(self, least: int, *, optional: bool = False) -> pa.Buffer | None:
        if not self._buffers:
            self._cursor.fail("a buffer is missing")
        buffer = self._buffers.pop()
        if buffer is None:
            if not optional:
                self._cursor.fail("a buffer is absent that cannot be")
            return None
        if buffer.size < least:
            self._cursor.fail(f"a buffer has {buffer.size} bytes, {least} are needed")
        return buffer


def _buffers(array: pa.Array) -> list[Buffer | None]:
    """Return an array's buffers, cut to its length and without an offset."""
    if array.offset or _begins_late(array):
        # Joining with nothing makes a copy that begins at zero.
        array = pa.concat_arrays([array, array[:0]])
    rows, data_type, buffers = len(array), array.type, array.buffers()
    validity = _cut(pc.is_valid(array).buffers()[1], -(-rows // 8)) if array.null_count else None
    if pa.types.is_fixed_size_list(data_type):
        return [validity, *_buffers(array.values[: rows * data_type.list_size])]
    if pa.types.is_list(data_type):
        return [validity, _offsets_of(array), *_buffers(array.values[: _end_of(array)])]
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return [validity, _offsets_of(array), _cut(buffers[2], _end_of(array))]
    bits = 1 if pa.types.is_boolean(data_type) else data_type.bit_width
    return [validity, _cut(buffers[1], -(-rows * bits // 8))]


def _has_offsets(data_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(data_type)
        or pa.types.is_string(data_type)
        or pa.types.is_binary(data_type)
    )


def _begins_late(array: pa.Array) -> bool:
    """Whether the first value of a variable-length array is not at its data's beginning."""
    if not _has_offsets(array.type) or not len(array):
        return False
    return bool(np.frombuffer(array.buffers()[1], dtype="<i4", count=1)[0])


def _end_of(array: pa.Array) -> int:
    rows = len(array)
    if not rows:
        return 0
    return int(np.frombuffer(array.buffers()[1], dtype="<i4", count=rows + 1)[rows])


def _offsets_of(array: pa.Array) -> Buffer:
    return _cut(array.buffers()[1], 4 * (len(array) + 1)) if len(array) else bytes(4)


def _cut(buffer: pa.Buffer | None, size: int) -> Buffer:
    if buffer is None or not size:
        return b""
    return memoryview(buffer)[:size]
