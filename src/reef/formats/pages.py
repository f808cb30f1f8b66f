"""Reading pages without a Python call for each of their rows or buffers.

A scan decodes the payloads of many pages at once: the heads become a table of numbers, checks are
comparisons of its columns, and each buffer of the result is one join of slices. A point read
searches the payload of one key page in place. Both know the shapes that nearly all pages have;
any other page is decoded by itself as a column set.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef import kernel
from reef.formats.coding import BlockKind, Buffer, corrupt
from reef.formats.columns import (
    ABSENT,
    BY_PAGE,
    FIXED_SIZE_LIST,
    OFFSET_MAX,
    VARIABLE,
    equal_offsets,
)
from reef.formats.group import (
    COLUMN_PAGE_BYTES,
    KEY_PAGE,
    KEY_PAGE_BYTES,
    KEY_PAGE_SHAPE,
    VARIABLE_PAGE,
    decode_column_payload,
    decode_key_payload,
)
from reef.formats.schema import Field, Schema
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import OpKind

Numbers = npt.NDArray[np.int64]
BINARY = pa.binary()
PICK_BYTES = 8
FIXED_PAGE = struct.Struct("<IIHHII")
STAMP_LSN, STAMP_SEQ = struct.Struct("<q"), struct.Struct("<I")
KEY_WORDS = np.array([KEY_PAGE_SHAPE.get(place, 0) for place in range(21)])
KEY_TIMES_ROWS = np.zeros(21, np.int64)
KEY_TIMES_ROWS[[2, 12, 16, 20]] = 1, 8, 4, 1
KEY_LENGTHS = [7, 8]
"""Words with the lengths of key offsets and data; all others of a plain page follow from its
rows."""


def _pad_lengths(lengths: Numbers) -> Numbers:
    return lengths + -lengths % 8


# --- by the kernel ------------------------------------------------------------------

BlocksRead = tuple[list[Buffer], Numbers, Numbers, Numbers]
"""Ranges of an object, where they begin, and where the blocks of pages begin and end."""


def join_keys(
    pages: list[Buffer] | BlocksRead, rows: Numbers, picks: bytes | None = None
) -> Versions | None:
    """Return the rows of key pages, payloads or stored blocks, without their columns.

    With `picks` only these, as `search_keys` returns them. None if the kernel leaves it to Python.
    """
    if (native := kernel.native) is None or not len(rows):
        return None
    joined = native.join_keys(pages, BlockKind.KEYS, rows, picks)
    if joined is None:
        return None
    offsets, data, lsns, seqs, kinds = joined
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return Versions(
        pa.Array.from_buffers(BINARY, len(kinds), buffers, 0),
        np.frombuffer(lsns, "<i8"),
        np.frombuffer(seqs, "<u4"),
        np.frombuffer(kinds, np.uint8),
        {},
    )


def join_column(
    pages: list[Buffer] | BlocksRead, rows: Numbers, field: Field, picks: bytes | None = None
) -> pa.Array | None:
    """Return a column of pages, as `join_keys` returns their keys."""
    if (native := kernel.native) is None or not len(rows):
        return None
    data_type = field.arrow
    width = _stored_width(data_type)
    if width is None:
        return None
    joined = native.join_column(pages, BlockKind.COLUMN, rows, field.number, width, picks)
    if joined is None:
        return None
    count = sum(rows.tolist()) if picks is None else len(picks) // PICK_BYTES
    return _column_of(joined, data_type, width, count)


def _column_of(
    joined: Sequence[bytes | None], data_type: pa.DataType, width: int, count: int
) -> pa.Array:
    """Return the column that the kernel has put together."""
    validity, offsets, data = [None if part is None else pa.py_buffer(part) for part in joined]
    if not width:
        return pa.Array.from_buffers(data_type, count, [validity, offsets, data])
    if width > 0:
        return pa.Array.from_buffers(data_type, count, [validity, data])
    items = count * data_type.list_size
    values = pa.Array.from_buffers(data_type.value_type, items, [None, data], 0)
    return pa.Array.from_buffers(data_type, count, [validity], children=[values])


class KernelColumns(NamedTuple):
    """Columns whose values the kernel can read from a file."""

    encoded: bytes
    """The number of each, then the width of each."""
    fields: tuple[Field, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, fields: Sequence[Field]) -> "KernelColumns | None":
        """Return the columns; None if the kernel leaves one of them to Python."""
        widths: list[int] = []
        for field in fields:
            if (width := _stored_width(field.arrow)) is None:
                return None
            widths.append(width)
        numbers = [field.number for field in fields]
        return cls(np.array([*numbers, *widths], np.int64).tobytes(), tuple(fields), tuple(widths))

    def rows(self, found: Sequence[Any]) -> Versions:
        """Return the rows that the kernel has read."""
        offsets, data, lsns, seqs, kinds, *columns = found[:-1]
        count = len(kinds)
        parts = zip(self.fields, columns, self.widths, strict=True)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return Versions(
            pa.Array.from_buffers(BINARY, count, buffers, 0),
            np.frombuffer(lsns, "<i8"),
            np.frombuffer(seqs, "<u4"),
            np.frombuffer(kinds, np.uint8),
            {f.number: _column_of(column, f.arrow, width, count) for f, column, width in parts},
        )


def encode_value_columns(fields: Sequence[Field]) -> bytes:
    """Return how the kernel reads one value of each of some columns: number, type, width, items.

    Of other types it returns the payload of the page.
    """
    words: list[int] = []
    for field in fields:
        kind, width, items = VALUE_KINDS.get(field.type, PAYLOAD_KIND), 0, 0
        data_type = field.arrow
        if data_type.id == FIXED_SIZE_LIST and data_type.value_type.id in FLOATS:
            kind, items = VECTOR_KIND, data_type.list_size
        if kind != PAYLOAD_KIND:
            width = _stored_width(data_type) or 0
        words += field.number, kind, width, items
    return np.array(words, np.int64).tobytes()


PAYLOAD_KIND, VECTOR_KIND = 0, 6
VALUE_KINDS = {
    **{"binary": 1, "string": 2},
    **dict.fromkeys(("int8", "int16", "int32", "int64"), 3),
    **dict.fromkeys(("uint8", "uint16", "uint32", "uint64"), 4),
    **dict.fromkeys(("float32", "float64"), 5),
}
"""Types of which the kernel returns a value as Python has it."""
FLOATS = frozenset({pa.float32().id, pa.float64().id})


def search_keys(
    payloads: list[Buffer], rows: Numbers, keys: list[bytes], places: Numbers
) -> bytes | None:
    """Return the rows of sorted keys in key pages: pairs of page and row; None as above.

    `places` are the pages that may have each key.
    """
    if (native := kernel.native) is None:
        return None
    picks: bytes | None = native.search(payloads, rows, keys, places)
    return picks


def _stored_width(data_type: pa.DataType) -> int | None:
    """Return the bytes of a value: 0 if they differ, negative for vectors, None if neither."""
    if data_type.id in VARIABLE:
        return 0
    if data_type.id in BY_PAGE:
        return None
    bits = data_type.value_type if data_type.id == FIXED_SIZE_LIST else data_type
    if bits.bit_width % 8:
        return None
    return -_width_of(data_type) if data_type.id == FIXED_SIZE_LIST else _width_of(data_type)


# --- many pages at once -------------------------------------------------------------


class _Unlike(Exception):
    """Pages that are not alike, or contradict themselves."""


def _require(is_alike: object) -> None:
    if not is_alike:
        raise _Unlike


def decode_key_pages(
    payloads: Sequence[Buffer], rows: Numbers, schema: Schema, name: str, offsets: Sequence[int]
) -> Versions:
    """Return the rows of several key pages, one after the other, without their columns.

    `rows` and `offsets` are those of each page.
    """
    if len(payloads) > 1:
        with suppress(_Unlike):
            return _plain_keys(payloads, rows)
    parts = []
    for payload, count, offset in zip(payloads, rows.tolist(), offsets, strict=True):
        part = decode_key_payload(payload, schema, name, offset, len(payload))
        if len(part) != count:
            raise corrupt(name, offset, f"{len(part)} rows, {count} in the index")
        parts.append(part)
    return concat_versions(parts, schema)


def decode_column_pages(
    payloads: Sequence[Buffer], rows: Numbers, field: Field, name: str, offsets: Sequence[int]
) -> pa.Array:
    """Return a column of several pages; `rows` and `offsets` are those of each page."""
    if len(payloads) > 1:
        with suppress(_Unlike):
            return _column(payloads, rows, field)
    parts = [
        decode_column_payload(payload, field, count, name, offset)
        for payload, count, offset in zip(payloads, rows.tolist(), offsets, strict=True)
    ]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _plain_keys(payloads: Sequence[Buffer], rows: Numbers) -> Versions:
    """Return the rows of plain pages."""
    heads = _heads(payloads, KEY_PAGE, KEY_PAGE_BYTES)
    expected = KEY_WORDS + rows[:, None] * KEY_TIMES_ROWS
    expected[:, KEY_LENGTHS] = heads[:, KEY_LENGTHS]
    _require((heads == expected).all() and rows.all())
    starts = np.full(len(payloads), KEY_PAGE_BYTES)
    data_at, offsets = _offsets(payloads, rows, starts, heads[:, 7], heads[:, 8])
    lsns_at = data_at + _pad_lengths(heads[:, 8])
    seqs_at = lsns_at + 8 * rows
    kinds_at = seqs_at + _pad_lengths(4 * rows)
    _require(list(map(len, payloads)) == (kinds_at + _pad_lengths(rows)).tolist())
    kinds = np.frombuffer(_join(payloads, kinds_at, rows), np.uint8)
    _require(kinds.max() < OpKind.MERGE)  # whose operators a plain page does not have
    buffers = [None, offsets, pa.py_buffer(_join(payloads, data_at, heads[:, 8]))]
    return Versions(
        pa.Array.from_buffers(pa.binary(), len(kinds), buffers, 0),
        np.frombuffer(_join(payloads, lsns_at, 8 * rows), "<i8"),
        np.frombuffer(_join(payloads, seqs_at, 4 * rows), "<u4"),
        kinds,
        {},
    )


def _column(payloads: Sequence[Buffer], rows: Numbers, field: Field) -> pa.Array:
    """Return a column of pages that are alike: texts, bytes, numbers and vectors."""
    data_type, count = field.arrow, int(rows.sum())
    _require(data_type.id not in BY_PAGE)
    buffers = 3 if data_type.id in VARIABLE or data_type.id == FIXED_SIZE_LIST else 2
    _require(buffers == 3 or not data_type.bit_width % 8)
    heads = _heads(payloads, VARIABLE_PAGE if buffers == 3 else FIXED_PAGE, COLUMN_PAGE_BYTES)
    _require((heads[:, 1:4] == (1, field.number, buffers)).all() and (heads[:, 0] == rows).all())
    validity, data_at = _validity(payloads, rows, heads[:, 4])
    lengths, offsets = heads[:, -1], None
    if data_type.id in VARIABLE:
        data_at, offsets = _offsets(payloads, rows, data_at, heads[:, 5], lengths)
    else:
        _require((lengths == rows * _width_of(data_type)).all())
    _require(list(map(len, payloads)) == (data_at + _pad_lengths(lengths)).tolist())
    data = pa.py_buffer(_join(payloads, data_at, lengths))
    if offsets is not None:
        return pa.Array.from_buffers(data_type, count, [validity, offsets, data])
    if buffers == 2:
        return pa.Array.from_buffers(data_type, count, [validity, data])
    _require((heads[:, 5] == ABSENT).all())  # no null within a vector
    items = count * data_type.list_size
    values = pa.Array.from_buffers(data_type.value_type, items, [None, data], 0)
    return pa.Array.from_buffers(data_type, count, [validity], children=[values])


def _heads(payloads: Sequence[Buffer], layout: struct.Struct, least: int) -> Numbers:
    """Return the first words of each payload as a table."""
    _require(min(map(len, payloads)) >= least)
    return np.array(list(map(layout.unpack_from, payloads)), np.int64)


def _join(payloads: Sequence[Buffer], starts: Numbers, lengths: Numbers) -> bytes:
    """Return the same buffer of all pages, one after the other."""
    slices = zip(payloads, starts.tolist(), (starts + lengths).tolist(), strict=True)
    # A slice of bytes would be a copy of its own.
    return b"".join([memoryview(payload)[start:end] for payload, start, end in slices])


def _width_of(data_type: pa.DataType) -> int:
    if data_type.id == FIXED_SIZE_LIST:
        return int(data_type.list_size * data_type.value_type.bit_width // 8)
    return int(data_type.bit_width // 8)


def _offsets(
    payloads: Sequence[Buffer], rows: Numbers, starts: Numbers, lengths: Numbers, data: Numbers
) -> tuple[Numbers, pa.Buffer]:
    """Return where the data of each page begins, and the offsets of all pages together."""
    _require(int(data.sum()) <= OFFSET_MAX)
    if lengths[0] == ABSENT:
        width = int(data[0] // max(1, rows[0]))
        _require(width and (lengths == ABSENT).all() and (data == width * rows).all())
        return starts, pa.py_buffer(equal_offsets(int(rows.sum()), width))
    _require((lengths == 4 * (rows + 1)).all())
    data_at = starts + _pad_lengths(lengths)
    _require((data_at <= list(map(len, payloads))).all())
    offsets = np.frombuffer(_join(payloads, starts, lengths), "<i4")
    last = np.cumsum(rows + 1) - 1
    sizes = np.delete(np.diff(offsets), last[:-1])
    _require((offsets[last - rows] == 0).all() and (offsets[last] == data).all())
    _require(not len(sizes) or sizes.min() >= 0)
    joined = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=joined[1:])
    return data_at, pa.py_buffer(joined)


def _validity(
    payloads: Sequence[Buffer], rows: Numbers, lengths: Numbers
) -> tuple[pa.Buffer | None, Numbers]:
    """Return the joined bitmap, None if no value is null, and where the next buffers are."""
    starts = np.full(len(payloads), COLUMN_PAGE_BYTES)
    absent = lengths == ABSENT
    if absent.all():
        return None, starts
    lengths = np.where(absent, 0, lengths)
    _require((lengths == np.where(absent, 0, -(-rows // 8))).all())
    _require((starts + lengths <= list(map(len, payloads))).all())
    parts: list[npt.NDArray[np.uint8]] = []
    for payload, count, length in zip(payloads, rows.tolist(), lengths.tolist(), strict=True):
        bitmap = np.frombuffer(payload, np.uint8, length, COLUMN_PAGE_BYTES)
        bits = np.unpackbits(bitmap, count=count, bitorder="little")
        parts.append(bits if length else np.ones(count, np.uint8))
    joined = np.packbits(np.concatenate(parts), bitorder="little")
    return pa.py_buffer(joined), starts + _pad_lengths(lengths)


# --- one key ------------------------------------------------------------------------


class KeyPage:
    """The payload of a key page, searched in place; ValueError if it contradicts itself."""

    __slots__ = ("_data_at", "_keys", "_kinds_at", "_lsns_at", "_payload", "_seqs_at", "rows")

    def __init__(self, payload: bytes, words: tuple[int, ...]) -> None:
        self._payload = payload
        self.rows = rows = words[2]
        offsets, data = words[7], words[8]
        data_at = KEY_PAGE_BYTES + (0 if offsets == ABSENT else offsets + -offsets % 8)
        self._lsns_at = data_at + data + -data % 8
        self._seqs_at = self._lsns_at + 8 * rows
        self._kinds_at = self._seqs_at + 4 * rows + 4 * (rows % 2)
        lengths = (words[12], words[16], words[20])
        if self._kinds_at + rows + -rows % 8 != len(payload) or lengths != (
            8 * rows,
            4 * rows,
            rows,
        ):
            raise ValueError("a key page whose buffers have other lengths than its rows")
        self._keys: Callable[[int], bytes]
        if offsets == ABSENT:
            width = data // rows if rows else 0
            if not width or data % rows:
                raise ValueError("a page without offsets whose keys differ in length")
            self._keys = lambda row: payload[data_at + row * width : data_at + (row + 1) * width]
        else:
            if offsets != 4 * (rows + 1):
                raise ValueError(f"{offsets} bytes of offsets for {rows} keys")
            ends = memoryview(payload)[KEY_PAGE_BYTES : KEY_PAGE_BYTES + offsets].cast("i")
            self._keys = lambda row: payload[data_at + ends[row] : data_at + ends[row + 1]]

    @classmethod
    def of(cls, payload: Buffer) -> "KeyPage | None":
        """Return a plain key page; None if it has a prefix, expiry or patches."""
        if type(payload) is not bytes or len(payload) < KEY_PAGE_BYTES:
            return None
        words = KEY_PAGE.unpack_from(payload)
        if words[:2] + words[3:7] + words[9:12] + words[13:16] + words[17:20] != PLAIN_WORDS:
            return None
        return cls(payload, words)

    def find(self, key: bytes) -> range:
        """Return the rows of a key's versions, newest first."""
        rows = range(self.rows)
        first = bisect_left(rows, key, key=self._keys)
        if first == self.rows or self._keys(first) != key:
            return range(first, first)
        last = first + 1
        if last < self.rows and self._keys(last) == key:
            last = bisect_right(rows, key, lo=last, key=self._keys)
        return range(first, last)

    def stamp(self, row: int) -> tuple[int, int, int]:
        """Return LSN, sequence and kind of a row."""
        payload = self._payload
        (lsn,) = STAMP_LSN.unpack_from(payload, self._lsns_at + 8 * row)
        (seq,) = STAMP_SEQ.unpack_from(payload, self._seqs_at + 4 * row)
        return lsn, seq, payload[self._kinds_at + row]


PLAIN_WORDS = tuple(
    KEY_PAGE_SHAPE[place] for place in (0, 1, 3, 4, 5, 6, 9, 10, 11, 13, 14, 15, 17, 18, 19)
)


Reader = Callable[[Buffer, int, int], Any]


def value_reader(field: Field) -> Reader | None:
    """Return a function that reads one value of a column page; None if Arrow must do it.

    It raises ValueError, IndexError or struct.error if the page contradicts itself.
    """
    return READERS.get(field.type)


def _bytes_at(payload: Buffer, row: int, rows: int) -> bytes | None:
    if (native := kernel.native) is not None and row >= 0:
        found: tuple[bytes | None] | None = native.bytes_at(payload, row, rows)
        if found is not None:
            return found[0]
    count, columns, _, buffers, validity, offsets, data = VARIABLE_PAGE.unpack_from(payload)
    at = COLUMN_PAGE_BYTES
    if count != rows or columns != 1 or buffers != 3 or at + data > len(payload):
        raise ValueError(f"a column page of {count} rows, its keys have {rows}")
    if validity != ABSENT:
        if not payload[at + row // 8] >> row % 8 & 1:
            return None
        at += validity + -validity % 8
    if offsets == ABSENT:
        width = data // rows
        first, last = row * width, (row + 1) * width
    else:
        first, last = TWO.unpack_from(payload, at + 4 * row)
        at += offsets + -offsets % 8
    if not 0 <= first <= last <= data or at + data > len(payload):
        raise ValueError(f"value {row} is outside of its page")
    return bytes(payload[at + first : at + last])


TWO = struct.Struct("<ii")


def _text_at(payload: Buffer, row: int, rows: int) -> str | None:
    value = _bytes_at(payload, row, rows)
    return None if value is None else value.decode()


def _number_at(layout: struct.Struct) -> Reader:
    width = layout.size

    def read(payload: Buffer, row: int, rows: int) -> Any:
        count, columns, _, buffers, validity, data = FIXED_PAGE.unpack_from(payload)
        at = COLUMN_PAGE_BYTES
        if count != rows or columns != 1 or buffers != 2 or data != rows * width:
            raise ValueError(f"a column page of {count} rows, its keys have {rows}")
        if validity != ABSENT:
            if not payload[at + row // 8] >> row % 8 & 1:
                return None
            at += validity + -validity % 8
        return layout.unpack_from(payload, at + row * width)[0]

    return read


READERS: dict[str, Reader] = {
    "binary": _bytes_at,
    "string": _text_at,
    **{
        name: _number_at(struct.Struct(f"<{letter}"))
        for name, letter in {
            **{"int8": "b", "int16": "h", "int32": "i", "int64": "q"},
            **{"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"},
            **{"float32": "f", "float64": "d"},
        }.items()
    },
}
