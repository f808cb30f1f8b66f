"""The index of a segment: where its groups and pages are, and the bounds of their contents.

The index block has one row per group, as a column set: key bounds, row count, LSN bounds, lengths,
and for each column the smallest and the largest value. Keys are delta-encoded: each says how many
bytes it shares with the one before it, and its rest; if that would make long keys out of next
to nothing (`_may_grow`), none shares any. Offsets are not stored, they are sums of lengths.

    0 / 1   first key: shared bytes, rest      2 / 3   last key: shared bytes, rest
    4       rows                               5 / 6   lowest and highest LSN
    7       length of all key blocks           8       pages
    9       xxh3 of all its bytes; absent in segments of older releases
    16 + n      length of all blocks of column n; 0 if the group has no value of it
    0x4010 + n  smallest value of column n     0x8010 + n  largest; null if not known

The page block has one row per page, in the order of the groups:

    0       rows                               1       a key: above all keys of the page before,
    2       distinct keys                              and not above any of its own
    7       length of the key block            16 + n  length of the block of column n

Segments of version 1 have no page block: each of their groups is one page.

**The key filter** proves that a segment does not have a key. It is a split-block bloom filter over
64-bit xxh3: the upper half of the hash picks a block of eight 32-bit words, the lower half sets one
bit in each, after multiplication with the word's own odd number. One cache line per lookup, and
building it is a few vector operations.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import le, lt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from reef import kernel
from reef.formats.coding import Buffer, corrupt, shared_bytes
from reef.formats.columns import decode_columns, encode_columns
from reef.formats.schema import Schema

Numbers = npt.NDArray[np.int64]
FIRST_SHARED, FIRST_REST, LAST_SHARED, LAST_REST, ROWS, LSN_MIN, LSN_MAX, KEY_BLOCK = range(8)
PAGES = 8
CONTENT = 9
PAGE_ROWS, PAGE_KEY, PAGE_DISTINCT = 0, 1, 2
KEYS = -1
"""The number of the key blocks among those of columns."""
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
    """One group, as its writer describes it; lengths and rows are by page."""

    first_key: bytes
    last_key: bytes
    rows: Sequence[int]
    distinct: Sequence[int]
    page_keys: Sequence[bytes]
    lsn_min: int
    lsn_max: int
    key_blocks: Sequence[int]
    column_blocks: Mapping[int, Sequence[int]]
    bounds: Mapping[int, tuple[Any, Any]]
    content: int | None = None
    """`hash_content` of its bytes; None if they were written by an older release."""


def hash_content(blocks: Buffer) -> int:
    """Return the hash by which two segments are known to have a group in common."""
    return xxhash.xxh3_64_intdigest(blocks)


@dataclass(frozen=True)
class PageTable:
    """All pages of a segment, in order."""

    firsts: Numbers
    """The first page of each group, and the number of pages."""
    rows: Numbers
    distinct: Numbers
    """The number of different keys of each page; 0 if not known."""
    keys: Sequence[bytes]
    """One key per page: above all keys of the page before, and not above any of its own."""
    lengths: Mapping[int, Numbers]
    """Lengths of the blocks by column; the keys are `KEYS`."""

    def group_of(self, page: int) -> int:
        """Return the group of a page."""
        return int(np.searchsorted(self.firsts, page, side="right")) - 1

    @cached_property
    def is_distinct(self) -> bool:
        """Whether no key has more than one version."""
        return bool((self.distinct == self.rows).all())

    @cached_property
    def complete(self) -> frozenset[int]:
        """The columns that have a block in each page."""
        return frozenset(number for number, lengths in self.lengths.items() if lengths.all())

    @cached_property
    def totals(self) -> dict[int, int]:
        """The bytes of all blocks by column."""
        return {number: int(lengths.sum()) for number, lengths in self.lengths.items()}

    @cached_property
    def average_bytes(self) -> int:
        """The bytes of a page, all its blocks together; at least 1."""
        return max(1, sum(self.totals.values()) // max(1, len(self.keys)))


@dataclass(frozen=True)
class SegmentIndex:
    """All groups of a segment, column by column."""

    first_keys: Sequence[bytes]
    last_keys: Sequence[bytes]
    rows: Numbers
    lsn_min: Numbers
    lsn_max: Numbers
    starts: Numbers
    key_blocks: Numbers
    column_blocks: Mapping[int, Numbers]
    smallest: Mapping[int, pa.Array]
    largest: Mapping[int, pa.Array]
    pages: PageTable
    contents: npt.NDArray[np.uint64] | None = None
    """`hash_content` of each group."""

    def __len__(self) -> int:
        return len(self.first_keys)

    @cached_property
    def sizes(self) -> list[int]:
        """The bytes of each group, all its blocks together."""
        sizes: list[int] = (self._run_ends[-1] - self.starts).tolist()
        return sizes

    @cached_property
    def _order(self) -> dict[int, int]:
        """The place of each column's blocks within a group."""
        return {number: place for place, number in enumerate((KEYS, *sorted(self.column_blocks)))}

    @cached_property
    def _run_ends(self) -> Numbers:
        """Where the blocks of each column end, for each group: a row for each column."""
        lengths = [self.key_blocks, *(self.column_blocks[n] for n in sorted(self.column_blocks))]
        ends: Numbers = np.cumsum(np.vstack([self.starts, *lengths]), axis=0)[1:]
        return ends

    def key_range(self, group: int) -> tuple[int, int]:
        """Return where the key blocks of a group are."""
        return int(self.starts[group]), int(self._run_ends[0, group])

    def column_range(self, group: int, number: int) -> tuple[int, int] | None:
        """Return where a column's blocks of a group are; None if it has none."""
        lengths = self.column_blocks.get(number)
        if lengths is None or not lengths[group]:
            return None
        end = int(self._run_ends[self._order[number], group])
        return end - int(lengths[group]), end

    @cached_property
    def _page_spans(self) -> dict[int, tuple[Numbers, Numbers]]:
        return {}

    def page_spans(self, number: int) -> tuple[Numbers, Numbers]:
        """Return where the blocks of a column begin and end, for each page; `KEYS` are the keys."""
        spans = self._page_spans.get(number)
        if spans is None:
            pages, place = self.pages, self._order.get(number)
            lengths = pages.lengths.get(number)
            if lengths is None or place is None:
                lengths, place = np.zeros(len(pages.rows), np.int64), 0
            ends = np.cumsum(lengths)
            # The sum over earlier pages is right within a group; each has a start of its own.
            group_ends = ends[pages.firsts[1:] - 1] if len(self) else ends
            shift = self._run_ends[place] - group_ends
            ends = ends + np.repeat(shift, np.diff(pages.firsts))
            spans = self._page_spans[number] = (ends - lengths, ends)
        return spans

    def entry(self, group: int) -> GroupEntry:
        """Return a group as its writer described it."""
        pages = self.pages
        part = slice(int(pages.firsts[group]), int(pages.firsts[group + 1]))
        lengths = {
            number: pages.lengths[number][part].tolist()
            for number, runs in self.column_blocks.items()
            if runs[group]
        }
        bounds = {
            number: (self.smallest[number][group], self.largest[number][group])
            for number in lengths
            if number in self.smallest and number in self.largest
        }
        return GroupEntry(
            self.first_keys[group],
            self.last_keys[group],
            pages.rows[part].tolist(),
            pages.distinct[part].tolist(),
            pages.keys[part],
            int(self.lsn_min[group]),
            int(self.lsn_max[group]),
            pages.lengths[KEYS][part].tolist(),
            lengths,
            bounds,
            None if self.contents is None else int(self.contents[group]),
        )

    def shared_groups(self, other: "SegmentIndex") -> frozenset[int]:
        """Return the groups that another segment has, too, byte for byte."""
        if self.contents is None or other.contents is None:
            return frozenset()
        _, ours, theirs = np.intersect1d(self.contents, other.contents, return_indices=True)
        pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
        return frozenset(one for one, two in pairs if self._summary(one) == other._summary(two))

    def _summary(self, group: int) -> tuple[Any, ...]:
        """Return the facts that two groups with equal hashes must share."""
        lengths = {n: int(runs[group]) for n, runs in self.column_blocks.items() if runs[group]}
        numbers = (self.rows, self.lsn_min, self.lsn_max, self.key_blocks)
        counts = [int(of_groups[group]) for of_groups in numbers]
        return self.first_keys[group], self.last_keys[group], counts, lengths

    def span(self, group: int) -> tuple[int, int]:
        """Return where all blocks of a group are, one behind the other."""
        return int(self.starts[group]), int(self._run_ends[-1, group])

    def end(self) -> int:
        """Return where the last group ends."""
        return int(self._run_ends[-1, -1]) if len(self) else 0

    def only(self, groups: npt.NDArray[np.int64]) -> "SegmentIndex":
        """Return an index of some groups alone, without the bounds of their columns."""
        numbers, pages = groups.tolist(), self.pages
        parts = [np.arange(pages.firsts[g], pages.firsts[g + 1]) for g in numbers]
        kept = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        table = PageTable(
            np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64),
            pages.rows[kept],
            pages.distinct[kept],
            [pages.keys[page] for page in kept.tolist()],
            {number: lengths[kept] for number, lengths in pages.lengths.items()},
        )
        return replace(
            self,
            first_keys=[self.first_keys[number] for number in numbers],
            last_keys=[self.last_keys[number] for number in numbers],
            rows=self.rows[groups],
            lsn_min=self.lsn_min[groups],
            lsn_max=self.lsn_max[groups],
            starts=self.starts[groups],
            key_blocks=self.key_blocks[groups],
            column_blocks={n: lengths[groups] for n, lengths in self.column_blocks.items()},
            smallest={},
            largest={},
            pages=table,
            contents=None if self.contents is None else self.contents[groups],
        )


def of_pages(numbers: Numbers, pages: Sequence[int]) -> Numbers:
    """Return the numbers of some pages."""
    if isinstance(pages, range):
        return numbers[pages.start : pages.stop]
    return numbers[pages]


def separator(before: bytes, key: bytes) -> bytes:
    """Return a short key that is above `before` and not above `key`.

    >>> separator(b"reed", b"reefs")
    b'reef'
    """
    return key[: shared_bytes(before, key) + 1]


def encode_index(groups: Sequence[GroupEntry], schema: Schema) -> bytes:
    """Return the payload of the index block."""
    columns: dict[int, pa.Array] = dict(_encode_keys(groups))
    columns[ROWS] = pa.array([sum(group.rows) for group in groups], pa.uint32())
    columns[LSN_MIN] = pa.array([group.lsn_min for group in groups], pa.int64())
    columns[LSN_MAX] = pa.array([group.lsn_max for group in groups], pa.int64())
    columns[KEY_BLOCK] = pa.array([sum(group.key_blocks) for group in groups], pa.uint32())
    columns[PAGES] = pa.array([len(group.rows) for group in groups], pa.uint32())
    contents = [group.content for group in groups]
    if None not in contents:
        columns[CONTENT] = pa.array(contents, pa.uint64())
    for number, data_type in schema.types().items():
        lengths = [sum(group.column_blocks.get(number, ())) for group in groups]
        columns[LENGTHS + number] = pa.array(lengths, pa.uint32())
        for first, side in ((SMALLEST, 0), (LARGEST, 1)):
            values = [group.bounds.get(number, (None, None))[side] for group in groups]
            if any(value is not None for value in values):
                columns[first + number] = pa.array(values, data_type)
    return encode_columns(len(groups), columns)


def encode_pages(groups: Sequence[GroupEntry], schema: Schema) -> bytes:
    """Return the payload of the page block."""
    keys = [key for group in groups for key in group.page_keys]
    columns: dict[int, pa.Array] = {
        PAGE_ROWS: _flatten_numbers(group.rows for group in groups),
        PAGE_KEY: pa.array(keys, pa.binary()),
        PAGE_DISTINCT: _flatten_numbers(group.distinct for group in groups),
        KEY_BLOCK: _flatten_numbers(group.key_blocks for group in groups),
    }
    for number in schema.types():
        if any(number in group.column_blocks for group in groups):
            columns[LENGTHS + number] = _flatten_numbers(
                group.column_blocks.get(number) or [0] * len(group.rows) for group in groups
            )
    return encode_columns(len(keys), columns)


def _flatten_numbers(parts: Iterable[Sequence[int]]) -> pa.Array:
    return pa.array([number for part in parts for number in part], pa.uint32())


def decode_index(
    data: Buffer,
    schema: Schema,
    first_group: int,
    name: str,
    offset: int,
    *,
    pages: Buffer | None = None,
) -> SegmentIndex:
    """Return the index; `first_group` is where the first group begins, `pages` the page block."""
    types = {**SYSTEM_TYPES, PAGES: pa.uint32(), CONTENT: pa.uint64()}
    for number, data_type in schema.types().items():
        types[LENGTHS + number] = pa.uint32()
        types[SMALLEST + number] = types[LARGEST + number] = data_type
    _, columns = decode_columns(data, types, name, offset)
    if not SYSTEM_TYPES.keys() <= columns.keys():
        raise corrupt(name, offset, "an index without its system columns")
    blocks = {n: _int64(columns[LENGTHS + n]) for n in schema.types() if LENGTHS + n in columns}
    key_blocks, rows = _int64(columns[KEY_BLOCK]), _int64(columns[ROWS])
    sizes = sum(blocks.values(), key_blocks)
    first_keys, last_keys = _decode_keys(columns, name, offset)
    if pages is None and PAGES in columns:
        raise corrupt(name, offset, "an index without its page block")
    if pages is None:
        firsts = np.arange(len(rows) + 1)
        unknown = np.zeros(len(rows), np.int64)
        table = PageTable(firsts, rows, unknown, first_keys, {KEYS: key_blocks, **blocks})
    else:
        counts = _int64(columns[PAGES]) if PAGES in columns else np.zeros(0, np.int64)
        table = _decode_pages(pages, schema, counts, name, offset)
    index = SegmentIndex(
        first_keys,
        last_keys,
        rows,
        _int64(columns[LSN_MIN]),
        _int64(columns[LSN_MAX]),
        first_group + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)[: len(rows)],
        key_blocks,
        blocks,
        {n: columns[SMALLEST + n] for n in schema.types() if SMALLEST + n in columns},
        {n: columns[LARGEST + n] for n in schema.types() if LARGEST + n in columns},
        table,
        _hashes(columns.get(CONTENT)),
    )
    _check_pages(index, name, offset)
    return index


def _decode_pages(
    data: Buffer, schema: Schema, counts: Numbers, name: str, offset: int
) -> PageTable:
    """Return the pages of groups that have so many each."""
    required = {PAGE_ROWS, PAGE_KEY, PAGE_DISTINCT, KEY_BLOCK}
    types = {**dict.fromkeys(required, pa.uint32()), PAGE_KEY: pa.binary()}
    types |= {LENGTHS + number: pa.uint32() for number in schema.types()}
    count, columns = decode_columns(data, types, name, offset)
    if not required <= columns.keys() or int(counts.sum()) != count:
        raise corrupt(name, offset, f"a page block of {count} pages, {counts.sum()} in the index")
    lengths = {n: _int64(columns[LENGTHS + n]) for n in schema.types() if LENGTHS + n in columns}
    return PageTable(
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        _int64(columns[PAGE_ROWS]),
        _int64(columns[PAGE_DISTINCT]),
        columns[PAGE_KEY].to_pylist(),
        {KEYS: _int64(columns[KEY_BLOCK]), **lengths},
    )


def _check_pages(index: SegmentIndex, name: str, offset: int) -> None:
    """Raise unless the pages add up to their groups, and their keys are in order."""
    pages, firsts = index.pages, index.pages.firsts
    if len(firsts) != len(index) + 1 or (np.diff(firsts) < 1).any():
        raise corrupt(name, offset, "a group without pages")
    sums = [(pages.rows, index.rows), (pages.lengths[KEYS], index.key_blocks)]
    for number, runs in index.column_blocks.items():
        sums.append((pages.lengths.get(number, np.zeros(len(pages.rows), np.int64)), runs))
    for parts, totals in sums:
        if len(totals) and (np.add.reduceat(parts, firsts[:-1]) != totals).any():
            raise corrupt(name, offset, "pages do not add up to their groups")
    starts = [pages.keys[page] for page in firsts[:-1].tolist()]
    in_order = all(map(lt, pages.keys, islice(pages.keys, 1, None)))
    inside = all(map(le, starts, index.first_keys)) and all(map(lt, index.last_keys, starts[1:]))
    if not in_order or not inside:
        raise corrupt(name, offset, "keys of the pages are out of order")


def _int64(array: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = array.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _hashes(array: pa.Array | None) -> npt.NDArray[np.uint64] | None:
    return None if array is None else array.to_numpy(zero_copy_only=False).astype(np.uint64)


def _may_grow(key_bytes: int, rest_bytes: int) -> bool:
    """Whether keys are in proportion to their stored bytes."""
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
            raise corrupt(name, offset, "keys of the index are out of order")
        key_bytes += len(first) + len(last)
        if not _may_grow(key_bytes, rest_bytes):
            raise corrupt(name, offset, f"keys of the index grow out of {rest_bytes} bytes")
        first_keys.append(first)
        last_keys.append(last)
        before = last
    return first_keys, last_keys


def bounds_of(array: pa.Array) -> tuple[Any, Any]:
    """Return the smallest and largest value of a column, or None if they are no help."""
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


Hashes = npt.NDArray[np.uint64]
BITS_PER_KEY = 12
"""About 4 in 1,000 absent keys are false positives."""
WORDS = 8
BLOCKS_AT_ONCE = 1 << 14
ROOM_MIN = 1024
BLOCK_BYTES = 4 * WORDS
ODD = np.array(
    [
        0x9E3779B1,
        0x85EBCA77,
        0xC2B2AE3D,
        0x27D4EB2F,
        0x165667B1,
        0xD6E8FEB9,
        0xA5CB9243,
        0x5851F42D,
    ],
    dtype=np.uint32,
)
ODD_NUMBERS = [int(odd) for odd in ODD]
EIGHT = struct.Struct("<8I")

hash_key = xxhash.xxh3_64_intdigest


def hash_keys(keys: pa.Array | Iterable[bytes]) -> Hashes:
    """Return the hashes of many keys; the loop over them runs in C."""
    listed = keys.to_pylist() if isinstance(keys, pa.Array) else list(keys)
    return np.fromiter(map(hash_key, listed), dtype=np.uint64, count=len(listed))


class FilterBuilder:
    """Takes hashes as they come, eight bytes for each, and makes a filter of them at the end.

    In the order of their hashes keys come block by block, so that a stretch of blocks is made at
    a time, with a byte for each bit, which is then packed: fast, and in little memory.
    """

    def __init__(self) -> None:
        self._hashes: Hashes = np.empty(ROOM_MIN, dtype=np.uint64)
        self._count = 0

    def add(self, hashes: Hashes) -> None:
        """Remember the hashes of some keys."""
        end = self._count + len(hashes)
        if end > len(self._hashes):
            # Grows in place: large arrays are moved by the kernel, page by page.
            self._hashes.resize(max(end, 2 * len(self._hashes)), refcheck=False)
        self._hashes[self._count : end] = hashes
        self._count = end

    def build(self) -> bytes:
        """Return the filter's bytes."""
        blocks = max(1, -(-self._count * BITS_PER_KEY // (BLOCK_BYTES * 8)))
        ordered = self._hashes[: self._count]
        ordered.sort()
        return b"".join(
            _stretch(ordered, blocks, first, min(first + BLOCKS_AT_ONCE, blocks))
            for first in range(0, blocks, BLOCKS_AT_ONCE)
        )


def _stretch(ordered: Hashes, blocks: int, first: int, end: int) -> bytes:
    """Return the blocks [first, end) of a filter."""
    bounds = [_first_hash(block, blocks) for block in (first, end) if block < blocks]
    low, high = [*np.searchsorted(ordered, bounds), len(ordered)][:2]
    inside = ordered[low:high]
    starts = (_block_of(inside, blocks) - np.uint64(first)).astype(np.intp) * (BLOCK_BYTES * 8)
    return _pack_bits(inside.astype(np.uint32), starts, end - first)


def _first_hash(block: int, blocks: int) -> np.uint64:
    """Return the smallest hash that belongs to a block."""
    return np.uint64(-(-(block << 32) // blocks) << 32)


def _pack_bits(low: npt.NDArray[np.uint32], starts: npt.NDArray[np.intp], blocks: int) -> bytes:
    bits = np.zeros(blocks * BLOCK_BYTES * 8, dtype=np.uint8)
    for word in range(WORDS):
        bits[starts + 32 * word + (low * ODD[word] >> np.uint32(27))] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _block_of(hashes: Hashes, blocks: int) -> Hashes:
    return (hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)


FEW = 64
"""So many keys are looked up one by one: a step over an array costs more."""


class KeyFilter:
    """A filter as it was read from a segment."""

    def __init__(self, data: bytes) -> None:
        if not data or len(data) % BLOCK_BYTES:
            raise ValueError(f"{len(data)} bytes are not a filter")
        self.data = bytes(data)
        self._words = np.frombuffer(self.data, dtype="<u4")
        self._blocks = len(data) // BLOCK_BYTES

    def may_have(self, key_hash: int) -> bool:
        """Whether the segment may have a key with this hash; False is certain."""
        if (native := kernel.native) is not None:
            may_have: bool = native.may_have(self.data, key_hash)
            return may_have
        start = ((key_hash >> 32) * self._blocks >> 32) * BLOCK_BYTES
        low = key_hash & 0xFFFFFFFF
        for word, odd in zip(EIGHT.unpack_from(self.data, start), ODD_NUMBERS, strict=True):
            if not word >> ((low * odd & 0xFFFFFFFF) >> 27) & 1:
                return False
        return True

    def may_have_many(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """The same for many at once."""
        if len(hashes) <= FEW and kernel.native is not None:
            return np.array([self.may_have(one) for one in hashes.tolist()], bool)
        places = (_block_of(hashes, self._blocks) * np.uint64(WORDS)).astype(np.intp)
        low = hashes.astype(np.uint32)
        present = np.ones(len(hashes), dtype=bool)
        for word in range(WORDS):
            bits = self._words[places + word] >> (low * ODD[word] >> np.uint32(27))
            present &= (bits & np.uint32(1)).astype(bool)
        return present


def may_have_each(filters: Sequence[KeyFilter], hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Return by filter which hashes it may have."""
    each = getattr(kernel.native, "may_have_each", None)  # earlier builds do not have it
    if each is not None:
        data = each([one.data for one in filters], hashes)
        return np.frombuffer(data, bool).reshape(len(filters), len(hashes))
    found = [one.may_have_many(hashes) for one in filters]
    return np.array(found, bool).reshape(len(filters), len(hashes))
