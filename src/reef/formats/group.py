"""Groups: some 64 KiB of a segment's rows, a key block and one block per column.

The key block is a column set:

    1  each key without the common prefix
    2  LSN       3  sequence      4  kind          5  expiry, absent where no row expires
    16 + n       whether a patch touches column n; absent where there is no patch

In front of the set stands the keys' common prefix: u32 length, bytes, padding. It is taken off
only as far as putting it back stays in proportion to the block (`_may_grow`): otherwise a few
bytes could ask for gigabytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.batch import OpKind
from reef.formats.block import BlockKind, Packer, decode_block
from reef.formats.coding import ALIGNMENT, U32, Buffer, corrupt, padding, shared_bytes
from reef.formats.columns import ColumnSet, encode_columns
from reef.formats.prefix import add_prefix, strip_prefix
from reef.formats.schema import Field, Schema
from reef.formats.versions import Versions

__all__ = ["decode_column_block", "decode_key_block", "encode_group", "group_ends", "row_bytes"]

KEY_REST, LSN, SEQ, KIND, EXPIRES = 1, 2, 3, 4, 5
SYSTEM_COLUMNS = {KEY_REST, LSN, SEQ, KIND}
TOUCHED = 16
KIND_MAX = int(OpKind.PATCH)
U8, U32_DTYPE, I64 = np.dtype("<u1"), np.dtype("<u4"), np.dtype("<i8")
GROWTH_MAX = 16
GROWTH_SLACK_BYTES = 1 << 20
LARGE_SEGMENT_BYTES = 16 << 20
LARGER_TIMES_MAX = 4
GROUP_BYTES_MAX = 1 << 20


def encode_group(rows: Versions, packer: Packer) -> tuple[bytes, dict[int, bytes]]:
    """Return the key block, and the column blocks of the columns that have values."""
    first, last = rows.keys[0].as_py(), rows.keys[len(rows) - 1].as_py()
    prefix = first[: shared_bytes(first, last)]  # sorted: what the ends share, all share
    keys = _encode_keys(rows, prefix, packer)
    if not _may_grow(keys, prefix, len(rows)):
        keys = _encode_keys(rows, b"", packer)
    blocks = {
        number: packer.block(BlockKind.COLUMN, encode_columns(len(rows), {number: array}), number)
        for number, array in rows.fields.items()
        if array.null_count < len(array)
    }
    return keys, blocks


def _may_grow(block: Buffer, prefix: bytes, rows: int) -> bool:
    """Whether a key block's prefix, put back in front of each key, is in proportion to it."""
    return len(prefix) * rows <= GROWTH_MAX * len(block) + GROWTH_SLACK_BYTES


def _encode_keys(rows: Versions, prefix: bytes, packer: Packer) -> bytes:
    columns: dict[int, Any] = {
        KEY_REST: strip_prefix(rows.keys, len(prefix)) if prefix else rows.keys,
        LSN: rows.lsns,
        SEQ: rows.seqs,
        KIND: rows.kinds,
    }
    if rows.expires_at_ms is not None and rows.expires_at_ms.null_count < len(rows):
        columns[EXPIRES] = rows.expires_at_ms
    columns |= {TOUCHED + number: array for number, array in rows.touched.items()}
    head = U32.pack(len(prefix)) + prefix
    payload = head + padding(len(head)) + encode_columns(len(rows), columns)
    return packer.block(BlockKind.KEYS, payload)


def decode_key_block(data: Buffer, schema: Schema, name: str, offset: int) -> Versions:
    """Return a group's rows without their columns."""
    payload = decode_block(data, BlockKind.KEYS, name, offset)
    prefix, rest = _prefix_and_rest(payload, name, offset)
    columns = ColumnSet(rest, name, offset)
    present = columns.buffers.keys()
    if not present >= SYSTEM_COLUMNS:
        raise corrupt(name, offset, "a key block without its system columns")
    if not _may_grow(data, prefix, columns.rows):
        raise corrupt(name, offset, f"{columns.rows} keys with {len(prefix)} in common")
    kinds = columns.numbers(KIND, U8, pa.uint8())
    if len(kinds) and (highest := kinds.max()) > KIND_MAX:
        raise corrupt(name, offset, f"unknown kind of row {highest}")
    keys = columns.array(KEY_REST, pa.binary())
    return Versions(
        add_prefix(keys, prefix) if prefix else keys,
        columns.numbers(LSN, I64, pa.int64()),
        columns.numbers(SEQ, U32_DTYPE, pa.uint32()),
        kinds,
        {},
        columns.array(EXPIRES, pa.int64()) if EXPIRES in present else None,
        _touched(columns, schema) if len(present) > len(SYSTEM_COLUMNS) else {},
    )


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


def _touched(columns: ColumnSet, schema: Schema) -> dict[int, pa.Array]:
    """Return which columns of the schema patches touch, where there are patches."""
    numbers = [field.number for field in schema.fields]
    present = [number for number in numbers if TOUCHED + number in columns.buffers]
    return {number: columns.array(TOUCHED + number, pa.bool_()) for number in present}


def decode_column_block(data: Buffer, field: Field, rows: int, name: str, offset: int) -> pa.Array:
    """Return one column of a group."""
    payload = decode_block(data, BlockKind.COLUMN, name, offset)
    columns = ColumnSet(payload, name, offset)
    found, number = columns.rows, field.number
    if found != rows or number not in columns.buffers:
        raise corrupt(name, offset, f"column {field.name} has {found} rows, its keys {rows}")
    return columns.array(number, field.arrow)


def group_ends(
    keys: pa.Array, sizes: npt.NDArray[np.int64], group_bytes: int, before: int = 0
) -> list[int]:
    """Return where to cut rows into groups, between keys only.

    `sizes` are the bytes up to the end of each row, `before` those of the segment's groups so far.
    """
    same_as_next = pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    ends: list[int] = []
    start_bytes = 0
    while not ends or ends[-1] < len(keys):
        wanted = start_bytes + _next_group_bytes(group_bytes, before + start_bytes)
        end = int(np.searchsorted(sizes, wanted, side="right"))
        end = max(end, (ends[-1] if ends else 0) + 1)
        while end < len(keys) and same_as_next[end - 1]:
            end += 1
        ends.append(end)
        start_bytes = int(sizes[end - 1])
    return ends


def _next_group_bytes(group_bytes: int, before: int) -> int:
    """Return how large the next group is to be: in a large segment up to four times as large.

    A small segment is read key by key, a large one is mostly scanned, and what a scan costs is
    by the group.
    """
    larger = group_bytes * before // LARGE_SEGMENT_BYTES
    return max(group_bytes, min(larger, LARGER_TIMES_MAX * group_bytes, GROUP_BYTES_MAX))


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
