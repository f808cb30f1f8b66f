"""Column sets: Arrow arrays as bytes, laid out so that reading them copies nothing.

    u32 rows | u32 columns
    columns × ( u16 number | u16 buffers | buffers × u32 length )      0xFFFFFFFF: absent
    padding
    buffers, in order, each padded to 8

The buffers are those of the Arrow columnar format: validity bitmap, offsets, data, depth
first for nested types. Offsets of texts and bytes are absent if all values have the same
length, which is not 0. The type of a column is not stored here; the reader has a schema.
Lengths and offsets are checked before Arrow sees them, since Arrow trusts its buffers.
"""

import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import ALIGNMENT, Buffer, corrupt, padding

ABSENT = 0xFFFFFFFF
HEAD = struct.Struct("<II")
COLUMN = struct.Struct("<HH")
COLUMNS_MAX = 65_535
OFFSET_MAX = (1 << 31) - 1
VARIABLE = frozenset({pa.string().id, pa.binary().id})
LIST, FIXED_SIZE_LIST = pa.list_(pa.int8()).id, pa.list_(pa.int8(), 1).id
STRUCT, MAP = pa.struct([]).id, pa.map_(pa.int8(), pa.int8()).id
BY_PAGE = frozenset({LIST, STRUCT, MAP})
"""Types whose pages are decoded one by one."""


def encode_columns(rows: int, columns: Mapping[int, pa.Array | np.ndarray[Any, Any]]) -> bytes:
    """Return the bytes of equally long arrays, by column number; NumPy's have plain numbers."""
    head = [HEAD.pack(rows, len(columns))]
    body: list[Buffer] = []
    for number, array in columns.items():
        buffers = [None, array.tobytes()] if isinstance(array, np.ndarray) else _buffers(array)
        lengths = []
        for buffer in buffers:
            if buffer is None:
                lengths.append(ABSENT)
                continue
            length = len(buffer)
            lengths.append(length)
            body.append(buffer)
            if length % ALIGNMENT:
                body.append(padding(length))
        head += (COLUMN.pack(number, len(buffers)), _words(len(buffers)).pack(*lengths))
    start = b"".join(head)
    return b"".join((start, padding(len(start)), *body))


def decode_columns(
    data: Buffer, types: Mapping[int, pa.DataType], name: str, offset: int = 0
) -> tuple[int, dict[int, pa.Array]]:
    """Return the number of rows and the arrays whose numbers are in `types`."""
    columns = ColumnSet(data, name, offset)
    arrays = {n: columns.array(n, types[n]) for n in columns.buffers if n in types}
    return columns.rows, arrays


class ColumnSet:
    """A column set whose layout was read and checked; arrays are made on request.

    Every scan goes through here, for each block: buffers are cut out of one that spans all.
    """

    __slots__ = ("_data", "_name", "_offset", "buffers", "rows")

    def __init__(self, data: Buffer, name: str, offset: int = 0) -> None:
        self._data, self._name, self._offset = data, name, offset
        self.buffers: dict[int, list[pa.Buffer | None]] = {}
        """Buffers of each column, by number; the first ones at the list's end."""
        size = len(data)
        self.rows, lengths, position = self._layout(size)
        whole = pa.py_buffer(data)
        for number, of_column in lengths:
            found: list[pa.Buffer | None] = []
            for length in of_column:
                if length == ABSENT:
                    found.append(None)
                    continue
                end = position + length + -length % ALIGNMENT
                if end > size:
                    self._too_short(end - position, position)
                found.append(whole.slice(position, length))
                position = end
            found.reverse()
            self.buffers[number] = found
        if position != size:
            self._fail(f"{size - position} bytes too many", position)

    def _layout(self, size: int) -> tuple[int, list[tuple[int, tuple[int, ...]]], int]:
        """Return the number of rows, each column's number and buffers' lengths, and the end."""
        data, position = self._data, HEAD.size
        if position > size:
            self._too_short(HEAD.size, 0)
        rows, count = HEAD.unpack_from(data)
        if count > COLUMNS_MAX:
            self._fail(f"{count} columns", position)
        lengths = []
        for _ in range(count):
            if position + COLUMN.size > size:
                self._too_short(COLUMN.size, position)
            number, buffers = COLUMN.unpack_from(data, position)
            position += COLUMN.size
            words = _words(buffers)
            if position + words.size > size:
                self._too_short(words.size, position)
            lengths.append((number, words.unpack_from(data, position)))
            position += words.size
        padded = position + -position % ALIGNMENT
        if padded > size:
            self._too_short(padded - position, position)
        return rows, lengths, padded

    def array(self, number: int, data_type: pa.DataType) -> pa.Array:
        """Put an array together, after checking that the buffers can hold it."""
        buffers = self.buffers[number]
        built = self._build(data_type, self.rows, buffers)
        if buffers:
            self._fail(f"{len(buffers)} buffers too many for {data_type}")
        return built

    def numbers(self, number: int, dtype: "np.dtype[Any]", data_type: pa.DataType) -> Any:
        """Return a column of plain numbers as a NumPy array."""
        buffers, rows = self.buffers[number], self.rows
        data = buffers[0] if len(buffers) == 2 and buffers[1] is None else None
        if data is not None and data.size >= rows * dtype.itemsize > 0:
            return np.frombuffer(data, dtype, rows)
        return self.array(number, data_type).to_numpy(zero_copy_only=False)

    def _build(
        self, data_type: pa.DataType, rows: int, buffers: list[pa.Buffer | None]
    ) -> pa.Array:
        validity = self._next(buffers, -(-rows // 8), optional=True)
        kind = data_type.id
        if kind in VARIABLE:
            offsets, end = self._offsets(buffers, rows) or self._equal_offsets(buffers, rows)
            data = self._next(buffers, end)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets, data])
        if kind == FIXED_SIZE_LIST:
            child = self._build(data_type.value_type, rows * data_type.list_size, buffers)
            return pa.Array.from_buffers(data_type, rows, [validity], children=[child])
        if kind == LIST:
            found = self._offsets(buffers, rows)
            if found is None:
                self._fail("the offsets of a list are absent")
            offsets, end = found
            child = self._build(data_type.value_type, end, buffers)
            return pa.Array.from_buffers(data_type, rows, [validity, offsets], children=[child])
        if kind == STRUCT:
            children = [self._build(field.type, rows, buffers) for field in data_type]
            return pa.Array.from_buffers(data_type, rows, [validity], children=children)
        if kind == MAP:
            return self._map(data_type, rows, validity, buffers)
        data = self._next(buffers, -(-rows * data_type.bit_width // 8))
        return pa.Array.from_buffers(data_type, rows, [validity, data])

    def _map(
        self,
        data_type: pa.DataType,
        rows: int,
        validity: pa.Buffer | None,
        buffers: list[pa.Buffer | None],
    ) -> pa.Array:
        """Assemble a map: a list of pairs, neither pairs nor keys null."""
        found = self._offsets(buffers, rows)
        if found is None:
            self._fail("the offsets of a map are absent")
        offsets, end = found
        entries = self._build(data_type.field(0).type, end, buffers)
        if entries.null_count or entries.field(0).null_count:
            self._fail("a map with a key that is null")
        return pa.Array.from_buffers(data_type, rows, [validity, offsets], children=[entries])

    def _offsets(
        self, buffers: list[pa.Buffer | None], rows: int
    ) -> tuple[pa.Buffer | None, int] | None:
        """Return the offsets and the last of them, once they are known to rise; None if absent."""
        buffer = self._next(buffers, 4 * (rows + 1), optional=True)
        if buffer is None:
            return None
        offsets = np.frombuffer(buffer, dtype="<i4", count=rows + 1)
        if offsets[0] != 0 or np.less(offsets[1:], offsets[:-1]).any():
            self._fail("offsets do not rise from 0")
        return buffer, int(offsets[-1])

    def _equal_offsets(
        self, buffers: list[pa.Buffer | None], rows: int
    ) -> tuple[pa.Buffer | None, int]:
        """Return the offsets of values that have the same length, each at least a byte."""
        data = buffers[-1] if buffers else None
        size = 0 if data is None else data.size
        if not rows or not size or size % rows or size > OFFSET_MAX:
            self._fail(f"{size} bytes are not {rows} values of the same length")
        return pa.py_buffer(equal_offsets(rows, size // rows)), size

    def _next(
        self, buffers: list[pa.Buffer | None], least: int, *, optional: bool = False
    ) -> pa.Buffer | None:
        if not buffers:
            self._fail("a buffer is missing")
        buffer = buffers.pop()
        if buffer is None:
            if not optional:
                self._fail("a buffer is absent that cannot be")
            return None
        if buffer.size < least:
            self._fail(f"a buffer has {buffer.size} bytes, {least} are needed")
        return buffer

    def _too_short(self, length: int, position: int) -> NoReturn:
        left = len(self._data) - position
        self._fail(f"expected {length} bytes, found {left}", position)

    def _fail(self, problem: str, position: int = 0) -> NoReturn:
        raise corrupt(self._name, self._offset + position, problem)


@lru_cache(maxsize=64)
def equal_offsets(rows: int, width: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Return the offsets of so many values of one length; pages of a column share them."""
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
    offsets.flags.writeable = False
    return offsets


@lru_cache(maxsize=256)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def _buffers(array: pa.Array) -> list[Buffer | None]:
    """Return an array's buffers, cut to its length and without an offset."""
    if array.type.id in VARIABLE and len(array) and not array.null_count:
        return [None, *_variable(array)]
    if array.offset or _begins_late(array):
        # Joining with nothing makes a copy that begins at zero.
        array = pa.concat_arrays([array, array[:0]])
    rows, data_type, buffers = len(array), array.type, array.buffers()
    validity = _cut_bits(pc.is_valid(array).buffers()[1], rows) if array.null_count else None
    if pa.types.is_nested(data_type):
        return [validity, *_nested_buffers(array)]
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return [validity, _offsets_of(array), _cut(buffers[2], _end_of(array))]
    if pa.types.is_boolean(data_type):
        return [validity, _cut_bits(buffers[1], rows)]
    return [validity, _cut(buffers[1], rows * data_type.bit_width // 8)]


def _nested_buffers(array: pa.Array) -> list[Buffer | None]:
    """Return the buffers of an array that begins at zero, after its validity, depth first."""
    data_type = array.type
    if pa.types.is_fixed_size_list(data_type):
        return _buffers(array.values[: len(array) * data_type.list_size])
    if pa.types.is_struct(data_type):
        return list(chain.from_iterable(_buffers(child) for child in _children(array)))
    end = _end_of(array)
    if pa.types.is_list(data_type):
        return [_offsets_of(array), *_buffers(array.values[:end])]
    # A map is a list of pairs, none of which is null.
    return [_offsets_of(array), None, *_buffers(array.keys[:end]), *_buffers(array.items[:end])]


def _children(array: pa.Array) -> list[pa.Array]:
    return [array.field(place) for place in range(array.type.num_fields)]


def _variable(array: pa.Array) -> tuple[Buffer, Buffer]:
    """Return offsets from 0 and data of texts or bytes without nulls, wherever they begin.

    Groups are slices of larger arrays: this way their bytes are copied once, into the block.
    """
    _, buffer, data = array.buffers()
    offsets = np.frombuffer(buffer, "<i4", len(array) + 1, 4 * array.offset)
    first, last = int(offsets[0]), int(offsets[-1])
    if first:
        offsets = offsets - np.int32(first)
    return offsets.tobytes(), b"" if data is None else memoryview(data)[first:last]


def _has_offsets(data_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(data_type)
        or pa.types.is_map(data_type)
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


def _cut_bits(buffer: pa.Buffer | None, rows: int) -> Buffer:
    """Cut a bitmap; the rest of its last byte may hold bits of the next rows, and is cleared."""
    bitmap = _cut(buffer, -(-rows // 8))
    spare = rows % 8
    if not spare or not bitmap or not bitmap[-1] >> spare:
        return bitmap
    return bytes(bitmap[:-1]) + bytes((bitmap[-1] & (1 << spare) - 1,))
