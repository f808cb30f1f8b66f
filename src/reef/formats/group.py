"""Groups and pages: how the rows of a segment are cut, and the blocks of a page.

A group is a run of pages; a page is some hundred rows: a key block and one block for each column
that has values in the group. The blocks of a column follow each other through the whole group, so
that a scan of a few columns reads long runs, and a point read two short ranges close together.

    keys of page 0, 1, 2 …    column 1 of page 0, 1, 2 …    column 2 of page 0, 1, 2 …

A column block is a column set of one column. The key block is a column set, too:

    1  key       2  LSN        3  sequence      4  kind          5  expiry, absent if no row expires
    6  the writer's clock at a merge, in milliseconds; absent if there is no merge
    16 + n       whether a patch touches column n; absent if there is no patch. In a block with
                 column 6: the operator by which a merge or patch changes it, 0 for none

In front of the set is a common prefix of the keys (u32 length, bytes, padding). Segments of
version 2 have none; those of version 1, whose groups are one page each, take it off as far as
putting it back stays in proportion to the block (`_may_grow`).
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import (
    ALIGNMENT,
    U32,
    BlockKind,
    Buffer,
    Packer,
    corrupt,
    decode_block,
    padding,
)
from reef.formats.columns import ABSENT, ColumnSet, encode_columns
from reef.formats.schema import Field, Schema, as_codes, as_flags
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind, check_merges

KEY, LSN, SEQ, KIND, EXPIRES, MERGED_AT = 1, 2, 3, 4, 5, 6
SYSTEM_COLUMNS = {KEY, LSN, SEQ, KIND}
TOUCHED = 16
KIND_MAX = int(OpKind.MERGE)
Mask = npt.NDArray[np.bool_]
ZEROS = [bytes(count) for count in range(8)]
U8, U32_DTYPE, I64 = np.dtype("<u1"), np.dtype("<u4"), np.dtype("<i8")
GROWTH_MAX = 16
GROWTH_SLACK_BYTES = 1 << 20
PAGE_BYTES = 8 * 1024
"""Average bytes of a column's page; the keys count as a column."""
LARGE_SEGMENT_BYTES = 16 << 20
LARGER_TIMES_MAX = 4
GROUP_BYTES_MAX = 1 << 20
WIDE_GROUP_BYTES_MAX = 8 << 20

KEY_PAGE = struct.Struct("<IIIIHHIIIHHIIHHIIHHII")
"""Prefix length and padding, rows, columns; then of each column its number and buffers."""
KEY_PAGE_BYTES = 72
KEY_PAGE_SHAPE = {
    **{0: 0, 1: 0, 3: 4, 4: KEY, 5: 3, 6: ABSENT},
    **{9: LSN, 10: 2, 11: ABSENT, 13: SEQ, 14: 2, 15: ABSENT, 17: KIND, 18: 2, 19: ABSENT},
}
"""Bits of the words of a plain key page; the others are lengths."""
VARIABLE_PAGE = struct.Struct("<IIHHIII")
"""Rows, columns, number, buffers; then the lengths of validity, offsets and data."""
COLUMN_PAGE_BYTES = 24


# --- where rows are cut -------------------------------------------------------------


def group_ends(
    same_as_next: Mask,
    sizes: npt.NDArray[np.int64],
    group_bytes: int,
    before: int = 0,
    columns: int = 1,
) -> list[int]:
    """Return where to cut rows into groups, between keys only.

    `sizes` are the bytes up to the end of each row, `before` those of the segment's groups so far.
    """
    ends: list[int] = []
    count, start_bytes = len(sizes), 0
    while not ends or ends[-1] < count:
        limit = start_bytes + _next_group_bytes(group_bytes, before + start_bytes, columns)
        end = int(np.searchsorted(sizes, limit, side="right"))
        end = max(end, (ends[-1] if ends else 0) + 1)
        while end < count and same_as_next[end - 1]:
            end += 1
        ends.append(end)
        start_bytes = int(sizes[end - 1])
    return ends


def page_ends(
    same_as_next: Mask, sizes: npt.NDArray[np.int64], before: int, page_bytes: int
) -> list[int]:
    """Return where to cut a group into pages of about the same size, between keys only.

    `sizes` are the bytes up to the end of each row, counted from a row `before` bytes earlier.
    """
    total, rows = int(sizes[-1]) - before, len(sizes)
    count = -(-total // page_bytes)
    if count < 2:
        return [rows]
    limits = before + total * np.arange(1, count) // count
    ends = {rows}
    for cut in np.searchsorted(sizes, limits, side="right").tolist():
        end = cut
        while 0 < end < rows and same_as_next[end - 1]:
            end += 1
        ends.add(end)
    return sorted(ends - {0})


def distinct_keys(same_as_next: Mask, ends: Sequence[int]) -> list[int]:
    """Return how many different keys each page has; a key never spans two pages."""
    starts = [0, *ends[:-1]]
    rows = [end - start for start, end in zip(starts, ends, strict=True)]
    if not same_as_next.any():
        return rows
    repeats = np.add.reduceat(np.append(same_as_next, False), starts, dtype=np.int64).tolist()
    return [count - repeated for count, repeated in zip(rows, repeats, strict=True)]


def same_as_next(keys: pa.Array) -> Mask:
    """Return of each key but the last whether the next one is the same."""
    same: Mask = pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    return same


def _next_group_bytes(group_bytes: int, before: int, columns: int) -> int:
    """Return the size of the next group.

    It grows with the number of columns, so that the run of each column is long enough to be read
    by itself, and in a large segment, which is mostly scanned, up to four times.
    """
    wide = group_bytes * max(1, columns)
    least = min(wide, max(group_bytes, WIDE_GROUP_BYTES_MAX))
    larger = group_bytes * before // LARGE_SEGMENT_BYTES
    return max(least, min(larger, LARGER_TIMES_MAX * group_bytes, GROUP_BYTES_MAX))


def row_bytes(rows: Versions) -> npt.NDArray[np.int64]:
    """Return about how many bytes each row takes."""
    sizes = np.full(len(rows), 13, dtype=np.int64)  # LSN, sequence and kind
    sizes += pc.binary_length(rows.keys).to_numpy(zero_copy_only=False)
    for array in rows.fields.values():
        if pa.types.is_binary(array.type) or pa.types.is_string(array.type):
            lengths = pc.binary_length(array).fill_null(0)
            sizes += lengths.to_numpy(zero_copy_only=False)
        elif len(array):
            sizes += -(-array.nbytes // len(array))
    return sizes


# --- encoding -----------------------------------------------------------------------


def encode_group(
    rows: Versions, ends: Sequence[int], packer: Packer
) -> tuple[list[bytes], dict[int, list[bytes]]]:
    """Return the key block of each page, and the blocks of each column that has values."""
    keys = [packer.block(BlockKind.KEYS, payload) for payload in _key_payloads(rows, ends)]
    columns = {
        number: [
            packer.block(BlockKind.COLUMN, payload, number)
            for payload in _column_payloads(number, array, ends)
        ]
        for number, array in rows.fields.items()
        if array.null_count < len(array)
    }
    return keys, columns


def _key_payloads(rows: Versions, ends: Sequence[int]) -> Iterator[bytes]:
    expires = rows.expires_at_ms
    if (expires is None or expires.null_count == len(rows)) and not rows.touched:
        yield from _plain_key_payloads(rows, ends)
        return
    start = 0
    for end in ends:
        page = rows.slice(start, end)
        columns: dict[int, Any] = {KEY: page.keys, LSN: page.lsns, SEQ: page.seqs, KIND: page.kinds}
        if page.expires_at_ms is not None and page.expires_at_ms.null_count < len(page):
            columns[EXPIRES] = page.expires_at_ms
        touched = page.touched
        if page.merged_at_ms is not None and page.merged_at_ms.null_count < len(page):
            columns[MERGED_AT] = page.merged_at_ms
            touched = {number: as_codes(array) for number, array in touched.items()}
        else:
            touched = {number: as_flags(array) for number, array in touched.items()}
        columns |= {TOUCHED + number: array for number, array in touched.items()}
        yield U32.pack(0) + bytes(4) + encode_columns(len(page), columns)
        start = end


def _plain_key_payloads(rows: Versions, ends: Sequence[int]) -> Iterator[bytes]:
    """Yield the key pages of rows that neither expire nor are patches or merges."""
    lsns = memoryview(rows.lsns.astype(I64, copy=False).tobytes())
    seqs = memoryview(rows.seqs.astype(U32_DTYPE, copy=False).tobytes())
    kinds, start = memoryview(rows.kinds.astype(U8, copy=False).tobytes()), 0
    for end, (offsets, data) in zip(ends, _variable_parts(rows.keys, ends), strict=True):
        count, size = end - start, len(data)
        offsets_length = ABSENT if offsets is None else len(offsets)
        head = KEY_PAGE.pack(
            *(0, 0, count, 4, KEY, 3, ABSENT, offsets_length, size),
            *(LSN, 2, ABSENT, 8 * count, SEQ, 2, ABSENT, 4 * count, KIND, 2, ABSENT, count),
        )
        buffers: list[Buffer] = [head, ZEROS[4], data, ZEROS[-size % 8], lsns[8 * start : 8 * end]]
        buffers += (seqs[4 * start : 4 * end], ZEROS[-4 * count % 8], kinds[start:end])
        if offsets is not None:
            buffers[2:2] = (offsets, ZEROS[-len(offsets) % 8])
        buffers.append(ZEROS[-count % 8])
        yield b"".join(buffers)
        start = end


def _column_payloads(number: int, array: pa.Array, ends: Sequence[int]) -> Iterator[bytes]:
    if array.null_count or not (pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        start = 0
        for end in ends:
            yield encode_columns(end - start, {number: array[start:end]})
            start = end
        return
    start = 0
    for end, (offsets, data) in zip(ends, _variable_parts(array, ends), strict=True):
        length = ABSENT if offsets is None else len(offsets)
        head = VARIABLE_PAGE.pack(end - start, 1, number, 3, ABSENT, length, len(data))
        if offsets is None:
            yield b"".join((head, data, padding(len(data))))
        else:
            yield b"".join((head, offsets, padding(length), data, padding(len(data))))
        start = end


def _variable_parts(
    array: pa.Array, ends: Sequence[int]
) -> Iterator[tuple[bytes | None, memoryview]]:
    """Yield offsets and data of each page of texts or bytes without nulls.

    There are no offsets if all values of a page have the same length.
    """
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i4", len(array) + 1, 4 * array.offset)
    data = memoryview(b"" if data_buffer is None else data_buffer)
    starts = [0, *ends[:-1]]
    lengths = offsets[1:] - offsets[:-1]
    least, most = int(lengths.min()), int(lengths.max())
    shortest, longest = [least] * len(ends), [most] * len(ends)
    if least != most:
        shortest = np.minimum.reduceat(lengths, starts).tolist()
        longest = np.maximum.reduceat(lengths, starts).tolist()
    bounds = offsets[[0, *ends]].tolist()
    for page, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, last = bounds[page], bounds[page + 1]
        if shortest[page] == longest[page] > 0:
            yield None, data[first:last]
        else:
            yield (offsets[start : end + 1] - np.int32(first)).tobytes(), data[first:last]


# --- decoding, a block at a time ----------------------------------------------------


def decode_key_block(data: Buffer, schema: Schema, name: str, offset: int) -> Versions:
    """Return a page's rows without their columns."""
    payload = decode_block(data, BlockKind.KEYS, name, offset)
    return decode_key_payload(payload, schema, name, offset, len(data))


def decode_key_payload(
    payload: Buffer, schema: Schema, name: str, offset: int, stored_bytes: int
) -> Versions:
    """Return the same from the payload of a key block of `stored_bytes`."""
    prefix, rest = _prefix_and_rest(payload, name, offset)
    columns = ColumnSet(rest, name, offset)
    present = columns.buffers.keys()
    if not present >= SYSTEM_COLUMNS:
        raise corrupt(name, offset, "a key block without its system columns")
    if not _may_grow(stored_bytes, prefix, columns.rows):
        raise corrupt(name, offset, f"{columns.rows} keys with {len(prefix)} in common")
    kinds = columns.numbers(KIND, U8, pa.uint8())
    _check_kinds(kinds, name, offset)
    keys = columns.array(KEY, pa.binary())
    touched = _decode_touched(columns, schema) if len(present) > len(SYSTEM_COLUMNS) else {}
    merged_at = columns.array(MERGED_AT, pa.int64()) if MERGED_AT in present else None
    if merged_at is not None or (len(kinds) and kinds.max() == OpKind.MERGE):
        check_merges(pa.array(kinds), merged_at, touched, name, offset)
    return Versions(
        _add_prefix(keys, prefix) if prefix else keys,
        columns.numbers(LSN, I64, pa.int64()),
        columns.numbers(SEQ, U32_DTYPE, pa.uint32()),
        kinds,
        {},
        columns.array(EXPIRES, pa.int64()) if EXPIRES in present else None,
        touched,
        merged_at_ms=merged_at,
    )


def _check_kinds(kinds: npt.NDArray[np.uint8], name: str, offset: int) -> None:
    if len(kinds) and (highest := kinds.max()) > KIND_MAX:
        raise corrupt(name, offset, f"unknown kind of row {highest}")


def _may_grow(stored_bytes: int, prefix: bytes, rows: int) -> bool:
    """Whether a prefix, put back in front of each key, is in proportion to its block."""
    return len(prefix) * rows <= GROWTH_MAX * stored_bytes + GROWTH_SLACK_BYTES


def _prefix_and_rest(payload: Buffer, name: str, offset: int) -> tuple[bytes, memoryview]:
    """Return the keys' common prefix, and the column set behind it."""
    size, length = len(payload), 0
    if size >= U32.size:
        length = U32.unpack_from(payload)[0]
    end = U32.size + length
    start = end + -end % ALIGNMENT
    if start > size:
        raise corrupt(name, offset, f"a prefix of {length} bytes in a key block of {size}")
    view = memoryview(payload)
    return bytes(view[U32.size : end]), view[start:]


def _add_prefix(keys: pa.Array, prefix: bytes) -> pa.Array:
    """Return the keys with `prefix` in front of each."""
    offsets = np.array([0, len(prefix), len(prefix)], dtype=np.int32)
    # `pa.scalar` would import pandas, if it is installed, to check whether this is its type.
    both = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(prefix)]
    )
    return pc.binary_join_element_wise(both[0], keys, both[1])


def _decode_touched(columns: ColumnSet, schema: Schema) -> dict[int, pa.Array]:
    """Return which columns of the schema patches touch, or their operators if there are merges."""
    data_type = pa.uint8() if MERGED_AT in columns.buffers else pa.bool_()
    numbers = [field.number for field in schema.fields]
    present = [number for number in numbers if TOUCHED + number in columns.buffers]
    return {number: columns.array(TOUCHED + number, data_type) for number in present}


def decode_column_payload(
    payload: Buffer, field: Field, rows: int, name: str, offset: int
) -> pa.Array:
    """Return one column of a page from the payload of its block."""
    columns = ColumnSet(payload, name, offset)
    number = field.number
    if columns.rows != rows or number not in columns.buffers:
        problem = f"column {field.name} has {columns.rows} rows, its keys {rows}"
        raise corrupt(name, offset, problem)
    return columns.array(number, field.arrow)
