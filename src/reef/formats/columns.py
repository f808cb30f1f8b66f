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
from functools import lru_cache
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import ALIGNMENT, Buffer, corrupt, padding

__all__ = ["decode_columns", "encode_columns"]

ABSENT = 0xFFFFFFFF
HEAD = struct.Struct("<II")
COLUMN = struct.Struct("<HH")
COLUMNS_MAX = 65_535
VARIABLE = frozenset({pa.string().id, pa.binary().id})
LIST, FIXED_SIZE_LIST = pa.list_(pa.int8()).id, pa.list_(pa.int8(), 1).id


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
    reader = _Reader(memoryview(data), name, offset)
    rows, layout = reader.layout()
    arrays = {}
    for number, lengths in layout:
        buffers = reader.buffers(lengths)
        if number in types:
            arrays[number] = reader.array(types[number], rows, buffers)
    reader.end()
    return rows, arrays


class _Reader:
    """Walks over a column set once. Every scan goes through here, for each block."""

    __slots__ = ("data", "name", "offset", "position", "size")

    def __init__(self, data: memoryview, name: str, offset: int) -> None:
        self.data, self.name, self.offset = data, name, offset
        self.position, self.size = 0, len(data)

    def layout(self) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Return the number of rows, and of each column its number and buffers' lengths."""
        rows, count = self._unpack(HEAD)
        if count > COLUMNS_MAX:
            self.fail(f"{count} columns")
        layout = []
        for _ in range(count):
            number, buffers = self._unpack(COLUMN)
            layout.append((number, self._unpack(_words(buffers))))
        self._step(-self.position % ALIGNMENT)
        return rows, layout

    def buffers(self, lengths: tuple[int, ...]) -> list[pa.Buffer | None]:
        """Return a column's buffers, those that come first at the list's end."""
        found: list[pa.Buffer | None] = []
        for length in lengths:
            if length == ABSENT:
                found.append(None)
                continue
            start = self.position
            self._step(length + -length % ALIGNMENT)
            found.append(pa.py_buffer(self.data[start : start + length]))
        found.reverse()
        return found

    def array(self, data_type: pa.DataType, rows: int, buffers: list[pa.Buffer | None]) -> pa.Array:
        """Put an array together, after checking that the buffers can hold it."""
        built = self._build(data_type, rows, buffers)
        if buffers:
            self.fail(f"{len(buffers)} buffers too many for {data_type}")
        return built

    def _build(
        self, data_type: pa.DataType, rows: int, buffers: list[pa.Buffer | None]
    ) -> pa.Array:
        validity = self._next(buffers, -(-rows // 8), optional=True)
        kind = data_type.id
        if kind in VARIABLE:
            offsets, end = self._offsets(buffers, rows)
            data = self._next(buffers, end)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets, data])
        if kind == FIXED_SIZE_LIST:
            child = self._build(data_type.value_type, rows * data_type.list_size, buffers)
            return pa.Array.from_buffers(data_type, rows, [validity], children=[child])
        if kind == LIST:
            offsets, end = self._offsets(buffers, rows)
            child = self._build(data_type.value_type, end, buffers)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets], children=[child])
        data = self._next(buffers, -(-rows * data_type.bit_width // 8))
        return pa.Array.from_buffers(data_type, rows, [validity, data])

    def _offsets(self, buffers: list[pa.Buffer | None], rows: int) -> tuple[pa.Buffer | None, int]:
        """Return the offsets and where the last one points, once they are known to rise."""
        buffer = self._next(buffers, 4 * (rows + 1))
        assert buffer is not None  # it may not be absent
        offsets = np.frombuffer(buffer, dtype="<i4", count=rows + 1)
        if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            self.fail("offsets do not rise from 0")
        return buffer, int(offsets[-1])

    def _next(
        self, buffers: list[pa.Buffer | None], least: int, *, optional: bool = False
    ) -> pa.Buffer | None:
        if not buffers:
            self.fail("a buffer is missing")
        buffer = buffers.pop()
        if buffer is None:
            if not optional:
                self.fail("a buffer is absent that cannot be")
            return None
        if buffer.size < least:
            self.fail(f"a buffer has {buffer.size} bytes, {least} are needed")
        return buffer

    def _unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        start = self.position
        self._step(layout.size)
        return layout.unpack_from(self.data, start)

    def _step(self, length: int) -> None:
        self.position += length
        if self.position > self.size:
            self.position -= length
            self.fail(f"{length} bytes expected, {self.size - self.position} are left")

    def end(self) -> None:
        if self.position != self.size:
            self.fail(f"{self.size - self.position} bytes too many")

    def fail(self, what: str) -> NoReturn:
        raise corrupt(self.name, self.offset + self.position, what)


@lru_cache(maxsize=256)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


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
