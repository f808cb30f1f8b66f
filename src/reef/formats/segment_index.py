"""The block index: where each group of a segment lies, and what can be in it.

One row per group, as a column set: key bounds, row count, LSN bounds, block lengths, and
for each column the smallest and the largest value. Keys are delta-encoded: each says how
many bytes it shares with the one before it, and what follows; where that would make long keys
out of next to nothing (`_may_grow`), none shares any. Offsets are not stored, they are sums of
lengths.

    0 / 1   first key: shared bytes, rest      2 / 3   last key: shared bytes, rest
    4       rows                               5 / 6   lowest and highest LSN
    7       length of the key block
    16 + n      length of column n's block; 0 where the group has no value of it
    0x4010 + n  smallest value of column n     0x8010 + n  largest; null where not known
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.coding import Buffer, corrupt, shared_bytes
from reef.formats.columns import decode_columns, encode_columns
from reef.formats.schema import Schema

__all__ = ["GroupEntry", "SegmentIndex", "bounds_of"]

FIRST_SHARED, FIRST_REST, LAST_SHARED, LAST_REST, ROWS, LSN_MIN, LSN_MAX, KEY_BLOCK = range(8)
KEYS = -1
"""Stands for the key block where blocks are named by column."""
LENGTHS, SMALLEST, LARGEST = 0x10, 0x4010, 0x8010
GROWTH_MAX = 64
GROWTH_SLACK_BYTES = 1 << 20
BOUND_BYTES_MAX = 64
"""Longer texts are cut: a bound need not be a value, only a bound."""

SYSTEM_TYPES = {
    FIRST_SHARED: pa.uint16(),
    FIRST_REST: pa.binary(),
    LAST_SHARED: pa.uint16(),
    LAST_REST: pa.binary(),
    ROWS: pa.uint32(),
    LSN_MIN: pa.int64(),
    LSN_MAX: pa.int64(),
    KEY_BLOCK: pa.uint32(),
}


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One group, as its writer describes it."""

    first_key: bytes
    last_key: bytes
    rows: int
    lsn_min: int
    lsn_max: int
    key_block: int
    column_blocks: Mapping[int, int]
    bounds: Mapping[int, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """All groups of a segment, column by column."""

    first_keys: Sequence[bytes]
    last_keys: Sequence[bytes]
    rows: npt.NDArray[np.int64]
    lsn_min: npt.NDArray[np.int64]
    lsn_max: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    key_blocks: npt.NDArray[np.int64]
    column_blocks: Mapping[int, npt.NDArray[np.int64]]
    smallest: Mapping[int, pa.Array]
    largest: Mapping[int, pa.Array]
    _spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Where the blocks lie, by column; worked out once."""
    sizes: list[int] = field(init=False, default_factory=list)
    """How many bytes the blocks of each group have, all together."""

    def __post_init__(self) -> None:
        starts = self.starts[: len(self)]
        ends = starts + self.key_blocks
        self._spans[KEYS] = list(zip(starts.tolist(), ends.tolist(), strict=True))
        for number in sorted(self.column_blocks):
            starts, ends = ends, ends + self.column_blocks[number]
            self._spans[number] = list(zip(starts.tolist(), ends.tolist(), strict=True))
        self.sizes.extend((ends - self.starts[: len(self)]).tolist())

    def __len__(self) -> int:
        return len(self.first_keys)

    def key_range(self, group: int) -> tuple[int, int]:
        """Return where the key block of a group lies."""
        return self._spans[KEYS][group]

    def column_range(self, group: int, number: int) -> tuple[int, int] | None:
        """Return where a column's block of a group lies; None if it has none."""
        spans = self._spans.get(number)
        if spans is None or spans[group][0] == spans[group][1]:
            return None
        return spans[group]

    def entry(self, group: int) -> GroupEntry:
        """Return a group as its writer described it."""
        lengths = {n: int(blocks[group]) for n, blocks in self.column_blocks.items()}
        bounds = {
            number: (self.smallest[number][group], self.largest[number][group])
            for number, length in lengths.items()
            if length and number in self.smallest and number in self.largest
        }
        return GroupEntry(
            self.first_keys[group],
            self.last_keys[group],
            int(self.rows[group]),
            int(self.lsn_min[group]),
            int(self.lsn_max[group]),
            int(self.key_blocks[group]),
            lengths,
            bounds,
        )

    def span(self, group: int) -> tuple[int, int]:
        """Return where all blocks of a group lie, one behind the other."""
        last = max(spans[group][1] for spans in self._spans.values())
        return self._spans[KEYS][group][0], last

    def end(self) -> int:
        """Return where the last group ends."""
        return max((spans[-1][1] for spans in self._spans.values() if spans), default=0)


def encode_index(groups: Sequence[GroupEntry], schema: Schema) -> bytes:
    """Return the payload of the index block."""
    columns: dict[int, pa.Array] = dict(_encode_keys(groups))
    columns[ROWS] = pa.array([group.rows for group in groups], pa.uint32())
    columns[LSN_MIN] = pa.array([group.lsn_min for group in groups], pa.int64())
    columns[LSN_MAX] = pa.array([group.lsn_max for group in groups], pa.int64())
    columns[KEY_BLOCK] = pa.array([group.key_block for group in groups], pa.uint32())
    for number, data_type in schema.types().items():
        lengths = [group.column_blocks.get(number, 0) for group in groups]
        columns[LENGTHS + number] = pa.array(lengths, pa.uint32())
        for first, side in ((SMALLEST, 0), (LARGEST, 1)):
            values = [group.bounds.get(number, (None, None))[side] for group in groups]
            if any(value is not None for value in values):
                columns[first + number] = pa.array(values, data_type)
    return encode_columns(len(groups), columns)


def decode_index(
    data: Buffer, schema: Schema, first_group: int, name: str, offset: int
) -> SegmentIndex:
    """Return the index; `first_group` is where the first group begins."""
    types = dict(SYSTEM_TYPES)
    for number, data_type in schema.types().items():
        types[LENGTHS + number] = pa.uint32()
        types[SMALLEST + number] = types[LARGEST + number] = data_type
    _, columns = decode_columns(data, types, name, offset)
    if not SYSTEM_TYPES.keys() <= columns.keys():
        raise corrupt(name, offset, "a block index without its system columns")
    blocks = {n: _int64(columns[LENGTHS + n]) for n in schema.types() if LENGTHS + n in columns}
    key_blocks = _int64(columns[KEY_BLOCK])
    sizes = sum(blocks.values(), key_blocks)
    first_keys, last_keys = _decode_keys(columns, name, offset)
    return SegmentIndex(
        first_keys,
        last_keys,
        _int64(columns[ROWS]),
        _int64(columns[LSN_MIN]),
        _int64(columns[LSN_MAX]),
        first_group + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64),
        key_blocks,
        blocks,
        {n: columns[SMALLEST + n] for n in schema.types() if SMALLEST + n in columns},
        {n: columns[LARGEST + n] for n in schema.types() if LARGEST + n in columns},
    )


def _int64(array: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = array.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _may_grow(key_bytes: int, rest_bytes: int) -> bool:
    """Whether keys are in proportion to what is stored of them."""
    return key_bytes <= GROWTH_MAX * rest_bytes + GROWTH_SLACK_BYTES


def _encode_keys(groups: Sequence[GroupEntry]) -> dict[int, pa.Array]:
    deltas = _deltas(groups, shared_bytes)
    key_bytes = sum(len(group.first_key) + len(group.last_key) for group in groups)
    if not _may_grow(key_bytes, sum(map(len, deltas[FIRST_REST] + deltas[LAST_REST]))):
        deltas = _deltas(groups, lambda before, key: 0)
    return {number: pa.array(values, SYSTEM_TYPES[number]) for number, values in deltas.items()}


def _deltas(
    groups: Sequence[GroupEntry], shares: Callable[[bytes, bytes], int]
) -> dict[int, list[Any]]:
    deltas: dict[int, list[Any]] = {
        n: [] for n in (FIRST_SHARED, FIRST_REST, LAST_SHARED, LAST_REST)
    }
    before = b""
    for group in groups:
        for key, shared_at, rest_at in (
            (group.first_key, FIRST_SHARED, FIRST_REST),
            (group.last_key, LAST_SHARED, LAST_REST),
        ):
            shared = shares(before, key)
            deltas[shared_at].append(shared)
            deltas[rest_at].append(key[shared:])
            before = key
    return deltas


def _decode_keys(
    columns: Mapping[int, pa.Array], name: str, offset: int
) -> tuple[list[bytes], list[bytes]]:
    parts = [columns[n].to_pylist() for n in (FIRST_SHARED, FIRST_REST, LAST_SHARED, LAST_REST)]
    rest_bytes = sum(map(len, parts[1])) + sum(map(len, parts[3]))
    first_keys, last_keys, before, key_bytes = [], [], b"", 0
    for first_shared, first_rest, last_shared, last_rest in zip(*parts, strict=True):
        first = before[:first_shared] + first_rest
        last = first[:last_shared] + last_rest
        if first > last or first < before:
            raise corrupt(name, offset, "keys of the block index are out of order")
        key_bytes += len(first) + len(last)
        if not _may_grow(key_bytes, rest_bytes):
            raise corrupt(name, offset, f"keys of the block index grow out of {rest_bytes} bytes")
        first_keys.append(first)
        last_keys.append(last)
        before = last
    return first_keys, last_keys


def bounds_of(array: pa.Array) -> tuple[Any, Any]:
    """Return the smallest and largest value of a column, or None where they say nothing."""
    data_type = array.type
    if (
        array.null_count == len(array)
        or pa.types.is_nested(data_type)
        or pa.types.is_boolean(data_type)
    ):
        return None, None
    if pa.types.is_floating(data_type) and pc.any(pc.is_nan(array)).as_py():
        return None, None
    both = pc.min_max(array)  # kept as Arrow scalars: Python has no nanoseconds
    smallest, largest = both["min"], both["max"]
    if pa.types.is_binary(data_type):
        return smallest.as_py()[:BOUND_BYTES_MAX], _above(largest.as_py())
    if pa.types.is_string(data_type) and not _short(smallest, largest):
        return None, None
    return smallest, largest


def _short(*texts: pa.Scalar) -> bool:
    return all(len(text.as_py()) <= BOUND_BYTES_MAX for text in texts)


def _above(value: bytes) -> bytes | None:
    """Return a short value that is not below `value`; None if there is none."""
    if len(value) <= BOUND_BYTES_MAX:
        return value
    cut = value[:BOUND_BYTES_MAX].rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else None
