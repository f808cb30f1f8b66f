"""Segments: immutable sorted files.

    "RFSEG1\0\0" | u32 2 | u32 zero
    groups                 each the key blocks of its pages, then the blocks of each column
    index data blocks      of search indexes, uncompressed; absent if there are none
    range-tombstone block  absent if there are none
    filter block
    page block             absent in version 1, whose groups are one page each
    index block
    index directories      one for each search index
    footer                 MessagePack
    u32 footer length | u32 crc32c of the footer | "RFSEG1\0\0"

Everything needed to plan reads is at the end, from the range tombstones on: the tail, whose length
the manifest has, is one ranged GET. The version is that of the footer.

The set hash identifies a set of versions, whatever their order. Each version (key hash, sequence,
kind) is mixed to 128 bits; the hash of a set is the sum. So it does not depend on how rows are
spread over files, and can be subtracted: a job's outputs equal its inputs, less the versions that
it dropped, plus those that it made.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import lt
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef import kernel
from reef.formats.coding import (
    BlockKind,
    Buffer,
    corrupt,
    crc32c,
    decode_block,
    decode_msgpack,
    unsupported,
)
from reef.formats.columns import decode_columns, encode_columns
from reef.formats.covers import Cover
from reef.formats.group import decode_column_payload
from reef.formats.manifest import IndexSpec
from reef.formats.pages import (
    BlocksRead,
    KernelColumns,
    KeyPage,
    decode_column_pages,
    decode_key_pages,
    encode_value_columns,
    join_column,
    join_keys,
    search_keys,
    value_reader,
)
from reef.formats.schema import Field, Schema
from reef.formats.segment_index import (
    KEYS,
    Hashes,
    KeyFilter,
    Numbers,
    SegmentIndex,
    decode_index,
    of_pages,
)
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions

MAGIC = b"RFSEG1\0\0"
VERSION = 3
"""Version of segments with merges, which older releases must not read."""
PLAIN_VERSION = 2
"""Version of all others. Version 1 has no page block; it is still read, but no longer written."""
HEAD = struct.Struct("<8sII")
END = struct.Struct("<II8s")
GROUP_BYTES = 64 * 1024


class BlockRange(msgspec.Struct, frozen=True, array_like=True):
    """The range of a block."""

    offset: int
    length: int


class IndexPlace(msgspec.Struct, frozen=True):
    """A search index of a segment: how it was made, and where its two blocks are.

    Both are empty if the segment was too small or no centroids were trained: the footer then only
    says that the namespace has such an index, for a rebuild.
    """

    spec: IndexSpec
    directory: BlockRange
    """In the tail."""
    data: BlockRange
    """Between the groups and the tail; parts of it are read."""

    @property
    def is_built(self) -> bool:
        return self.directory.length > 0


class Footer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a segment: enough to rebuild a manifest from it."""

    version: int
    schema: Schema
    level: int
    rows: int
    tombstones: int
    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    set_hash: str
    write_id: str
    created_at_ms: int
    filter: BlockRange
    index: BlockRange
    pages: BlockRange | None = None
    range_tombstones: BlockRange | None = None
    patches: int = 0
    """Rows that change only some columns of the row below: patches and merges."""
    ancestors: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    job: str | None = None
    key_id: str | None = None
    """For encryption, which comes later."""
    covers: tuple[Cover, ...] = ()
    """The versions that it replaces; empty for those of a bulk job, which the log names."""
    generation: int = 0
    """Manifest on which its job was planned: of two with the same covers, the later wins."""
    merges: int = 0
    expiring: int | None = None
    """Rows that expire some day; None in segments of older releases, which did not count them."""
    indexes: tuple[IndexPlace, ...] = ()
    """Search indexes; releases that do not know them ignore them."""


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """The facts of a written segment that the manifest keeps."""

    footer: Footer
    size: int
    checksum: int
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of a segment."""

    write_id: str
    created_at_ms: int
    ancestors: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    job: str | None = None
    covers: tuple[Cover, ...] = ()
    generation: int = 0


def covers_of(footer: Footer, visible_lsn: int) -> tuple[Cover, ...]:
    """Return the versions that a segment replaces: those of its footer; of an ingest, its keys.

    Neighbours of one ingest may share an edge, where a range tombstone of one ends.
    """
    if not visible_lsn:
        return footer.covers
    stop = footer.max_key if footer.range_tombstones is not None else footer.max_key + b"\0"
    return (Cover(visible_lsn, visible_lsn + 1, footer.min_key, stop),)


def encode_range_tombstones(tombstones: Sequence[RangeTombstone]) -> bytes:
    """Return the payload of the range-tombstone block; empty if there is none."""
    if not tombstones:
        return b""
    ordered = sorted(tombstones)
    return encode_columns(
        len(ordered),
        {
            0: pa.array([t.start for t in ordered], pa.binary()),
            1: pa.array([t.end for t in ordered], pa.binary()),
            2: pa.array([t.lsn for t in ordered], pa.int64()),
            3: pa.array([t.seq for t in ordered], pa.uint32()),
        },
    )


def decode_range_tombstones(data: Buffer, name: str, offset: int) -> list[RangeTombstone]:
    """Return the range tombstones of a segment, in order."""
    types = {0: pa.binary(), 1: pa.binary(), 2: pa.int64(), 3: pa.uint32()}
    _, columns = decode_columns(data, types, name, offset)
    if columns.keys() != types.keys():
        raise corrupt(name, offset, "range tombstones without their columns")
    lists = [columns[number].to_pylist() for number in types]
    return [RangeTombstone(*values) for values in zip(*lists, strict=True)]


Picks = npt.NDArray[np.int32]
"""Rows of pages: pairs of the place of a page among some, and a row in it."""


@dataclass(slots=True)
class PageLayout:
    """Where the blocks of some columns are in all pages of a segment."""

    bounds: bytes
    """Of each page: its rows, then start and end of its block of keys and of each column."""
    columns: int
    is_bytes: bool
    """Whether there is one column, and its values are bytes."""
    read: KernelColumns | None
    """For reads of many rows; None if the kernel leaves them to Python."""
    values: bytes | None
    """For reads of one row; None if a page was of a shape that the kernel leaves to Python."""
    _places: tuple[Schema, tuple[int, ...] | None] | None = None

    def places_under(self, schema: Schema) -> tuple[int, ...] | None:
        """Return the place of each column of a schema among these, -1 of those that are not here;
        None if one has another type there.
        """
        known = self._places
        if known is None or known[0] is not schema:
            fields = self.read.fields if self.read is not None else ()
            at = {field.number: place for place, field in enumerate(fields)}
            types = schema.types()
            same = all(types.get(field.number) == field.arrow for field in fields)
            places = tuple(at.get(number, -1) for number in types)
            known = self._places = schema, places if same else None
        return known[1]


@dataclass(frozen=True)
class SegmentTail:
    """All that is needed to plan reads of a segment."""

    name: str
    footer: Footer
    index: SegmentIndex
    filter: KeyFilter
    range_tombstones: Sequence[RangeTombstone]
    directories: tuple[bytes, ...] = ()
    """The directory block of each search index, not verified yet: damage to one does not concern
    reads without it."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.name, self.footer, self.index, self.filter, self.range_tombstones)
        return SegmentTail, (*parts, self.directories)  # without the properties that were computed

    def directory(self, number: int) -> Buffer:
        """Return the checked directory of a search index, by its place in the footer."""
        place = self.footer.indexes[number].directory
        return decode_block(
            self.directories[number], BlockKind.INDEX_DIRECTORY, self.name, place.offset
        )

    @cached_property
    def fields(self) -> dict[int, Field]:
        """The columns of its schema, by number."""
        return {field.number: field for field in self.footer.schema.fields}

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The keys, and the columns that some page has."""
        return tuple(n for n in (KEYS, *sorted(self.fields)) if n in self.index.pages.lengths)

    @cached_property
    def _page_rows(self) -> memoryview:
        return _numbers(self.index.pages.rows)

    @cached_property
    def _readers(self) -> dict[int, Any]:
        return {number: value_reader(field) for number, field in self.fields.items()}

    # --- groups: the blocks of a column in all pages of a group are one range --------------
    def ranges(self, group: int, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of a group's keys and of these columns."""
        columns = (self.index.column_range(group, number) for number in numbers)
        return [self.index.key_range(group), *(span for span in columns if span)]

    def decode_group(
        self, group: int, numbers: Iterable[int], blocks: Sequence[Buffer]
    ) -> Versions:
        """Return a group's rows from the bytes of `ranges(group, numbers)`."""
        rows = self.decode_keys(group, blocks[0])
        present = [n for n in numbers if self.index.column_range(group, n) is not None]
        fields = {
            number: self.decode_column(group, number, block)
            for number, block in zip(present, blocks[1:], strict=True)
        }
        return rows.with_fields(fields)

    def decode_keys(self, group: int, blocks: Buffer) -> Versions:
        """Return a group's rows without their columns, from its key blocks."""
        return self.key_rows(self._pages_of(group), self._payloads(group, KEYS, blocks))

    def decode_column(self, group: int, number: int, blocks: Buffer) -> pa.Array:
        """Return one column of a group, from its blocks."""
        payloads = self._payloads(group, number, blocks)
        return self.column(self._pages_of(group), number, payloads)

    def _pages_of(self, group: int) -> range:
        firsts = self.index.pages.firsts
        return range(int(firsts[group]), int(firsts[group + 1]))

    def _payloads(self, group: int, number: int, blocks: Buffer) -> list[Buffer]:
        starts, ends = self.index.page_spans(number)
        pages, view = self._pages_of(group), memoryview(blocks)
        base = int(starts[pages[0]])
        if int(ends[pages[-1]]) - base != len(blocks):
            raise corrupt(self.name, base, f"{len(blocks)} bytes, the index says otherwise")
        return [
            self.payload(page, number, view[int(starts[page]) - base : int(ends[page]) - base])
            for page in pages
        ]

    # --- pages ------------------------------------------------------------------------
    def page_of(self, key: bytes) -> int:
        """Return the page that may have a key; -1 if none does."""
        return bisect_right(self.index.pages.keys, key) - 1

    def pages_of(self, keys: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """Return the pages that may have some sorted keys, and how many each; keys below the first
        page are left out."""
        starts = self.index.pages.keys
        places = np.array([bisect_right(starts, key) for key in keys], np.int64)
        pages, counts = np.unique(places, return_counts=True)
        first = int(len(pages) > 0 and pages[0] == 0)
        return pages[first:] - 1, counts[first:].astype(np.int64)

    def payload(self, page: int, number: int, block: Buffer) -> Buffer:
        """Return the checked and decompressed bytes of a page's block; `KEYS` are the keys."""
        kind = BlockKind.KEYS if number == KEYS else BlockKind.COLUMN
        return decode_block(block, kind, self.name, self.offset(page, number))

    def spans_of(self, page: int, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return where the blocks of a page are; empty ranges for those that it does not have."""
        spans, cached = [], self._span_views
        for number in numbers:
            views = cached.get(number)
            if views is None:
                starts, ends = self.index.page_spans(number)
                views = cached[number] = _numbers(starts), _numbers(ends)
            spans.append((views[0][page], views[1][page]))
        return spans

    @cached_property
    def _span_views(self) -> dict[int, tuple[memoryview, memoryview]]:
        return {}

    def layout(self, numbers: tuple[int, ...]) -> "PageLayout":
        """Return where the blocks of these columns are, the keys first, for the kernel."""
        known = self._layouts.get(numbers)
        if known is None:
            table = [self.index.pages.rows]
            for number in numbers:
                table += self.index.page_spans(number)
            bounds = np.ascontiguousarray(np.vstack(table).T).tobytes()
            fields = [self.fields[number] for number in numbers[1:]]
            is_bytes = len(fields) == 1 and fields[0].type == "binary"
            values = encode_value_columns(fields)
            known = PageLayout(bounds, len(fields), is_bytes, KernelColumns.of(fields), values)
            self._layouts[numbers] = known
        return known

    def leave_values_to_python(self, numbers: tuple[int, ...]) -> None:
        """Note that pages with these columns are of a shape whose rows the kernel does not read."""
        self.layout(numbers).values = None

    @cached_property
    def left_to_python(self) -> set[tuple[int, ...]]:
        """Columns of which a page was left to Python once: of other codecs, for instance."""
        return set()

    def is_distinct(self, pages: Sequence[int]) -> bool:
        """Whether the keys of pages are in order, and no key comes twice."""
        table = self.index.pages
        if not isinstance(pages, range) and not all(map(lt, pages, pages[1:])):
            return False
        if table.is_distinct:
            return True
        return bool((of_pages(table.distinct, pages) == of_pages(table.rows, pages)).all())

    @cached_property
    def _layouts(self) -> "dict[tuple[int, ...], PageLayout]":
        return {}

    def offset(self, page: int, number: int) -> int:
        """Return where a block begins."""
        return int(self.index.page_spans(number)[0][page])

    def key_rows(self, pages: Sequence[int], payloads: Sequence[Buffer]) -> Versions:
        """Return the rows of pages, without their columns."""
        rows = of_pages(self.index.pages.rows, pages)
        found = join_keys(list(payloads), rows)
        if found is not None:
            return found
        offsets = of_pages(self.index.page_spans(KEYS)[0], pages).tolist()
        return decode_key_pages(payloads, rows, self.footer.schema, self.name, offsets)

    def column(self, pages: Sequence[int], number: int, payloads: Sequence[Buffer]) -> pa.Array:
        """Return one column of pages."""
        rows = of_pages(self.index.pages.rows, pages)
        found = join_column(list(payloads), rows, self.fields[number])
        if found is not None:
            return found
        offsets = of_pages(self.index.page_spans(number)[0], pages).tolist()
        return decode_column_pages(payloads, rows, self.fields[number], self.name, offsets)

    def pick(
        self,
        pages: Sequence[int],
        keys: Sequence[list[bytes]],
        parts: Sequence[tuple[int, Sequence[int]]],
        payloads: list[Buffer],
    ) -> Versions | None:
        """Return the versions of sorted keys, given those that each page may have; None if the
        kernel leaves it to Python. `payloads` are those of the pages' keys, then of each column.
        """
        rows, count = of_pages(self.index.pages.rows, pages), len(pages)
        if any(len(present) != count for _, present in parts):
            return None
        places = np.repeat(np.arange(count), [len(some) for some in keys])
        sought = [key for some in keys for key in some]
        picks = search_keys(payloads[:count], rows, sought, places)
        return None if picks is None else self._picked(rows, parts, payloads, picks)

    def places(self, ordinals: npt.NDArray[np.uint32]) -> tuple[list[int], Picks]:
        """Return the pages that have the rows at sorted ordinals, and the rows: pairs of the
        place of a page among these and a row in it.
        """
        rows = self.index.pages.rows
        ends = self.row_ends
        of_row = np.searchsorted(ends, ordinals, side="right")
        fresh = np.ones(len(ordinals), bool)
        np.not_equal(of_row[1:], of_row[:-1], out=fresh[1:])
        picks = np.empty((len(ordinals), 2), "<i4")
        picks[:, 0] = np.cumsum(fresh) - 1
        picks[:, 1] = ordinals - (ends[of_row] - rows[of_row])
        return of_row[fresh].tolist(), picks

    @cached_property
    def row_ends(self) -> npt.NDArray[np.int64]:
        """By page, the rows up to its end."""
        return np.cumsum(self.index.pages.rows)

    def picked(
        self,
        pages: Sequence[int],
        parts: Sequence[tuple[int, Sequence[int]]],
        payloads: list[Buffer],
        picks: Picks,
    ) -> Versions | None:
        """Return rows of pages, as `places` has them; None if the kernel leaves it to Python."""
        count = len(pages)
        if any(len(present) != count for _, present in parts):
            return None
        return self._picked(
            of_pages(self.index.pages.rows, pages), parts, payloads, picks.tobytes()
        )

    def picked_column(
        self,
        pages: Sequence[int],
        part: tuple[int, Sequence[int]],
        payloads: Sequence[Buffer],
        picks: Picks,
    ) -> pa.Array:
        """Return a column of rows, as `places` has them, from the pages that have a block of it."""
        number, present = part
        rows = of_pages(self.index.pages.rows, pages)
        if len(present) == len(pages):
            pairs = picks.tobytes()
            found = join_column(list(payloads), rows, self.fields[number], pairs)
            if found is not None:
                return found
        array = self.column(present, number, payloads)
        inside = np.isin(pages, present)
        starts = np.cumsum(np.where(inside, rows, 0)) - rows
        places = starts[picks[:, 0]] + picks[:, 1]
        return array.take(pa.array(places, pa.int64(), mask=~inside[picks[:, 0]]))

    def _picked(
        self,
        rows: npt.NDArray[np.int64],
        parts: Sequence[tuple[int, Sequence[int]]],
        payloads: list[Buffer],
        picks: bytes,
    ) -> Versions | None:
        """Return rows of pages that all have a block of each part."""
        count = len(rows)
        if (found := join_keys(payloads[:count], rows, picks)) is None:
            return None
        fields = {}
        for start, (number, _) in enumerate(parts[1:], 1):
            of_column = payloads[start * count : (start + 1) * count]
            array = join_column(of_column, rows, self.fields[number], picks)
            if array is None:
                return None
            fields[number] = array
        return found.with_fields(fields)

    def join(
        self,
        pages: Sequence[int],
        parts: Sequence[tuple[int, Sequence[int]]],
        bodies: Sequence[Buffer],
        bases: Sequence[int],
    ) -> tuple[Versions, list[pa.Array]] | None:
        """Return the keys and columns of pages straight from the ranges of the segment that have
        their blocks, and begin at `bases`; None if the kernel leaves it to Python.
        """
        listed, begins = list(bodies), np.array(bases, np.int64)

        def blocks(number: int, some: Sequence[int]) -> BlocksRead:
            starts, ends = self.index.page_spans(number)
            return listed, begins, of_pages(starts, some), of_pages(ends, some)

        rows = of_pages(self.index.pages.rows, pages)
        keys = join_keys(blocks(KEYS, pages), rows)
        columns: list[pa.Array] = []
        for number, present in parts[1:]:
            if keys is None:
                return None
            rows = of_pages(self.index.pages.rows, present)
            columns.append(join_column(blocks(number, present), rows, self.fields[number]))
            if columns[-1] is None:
                return None
        return None if keys is None else (keys, columns)

    def stamp(
        self, page: int, key: bytes, payload: Buffer
    ) -> tuple[int, int, int, int, int] | None:
        """Return the rows [first, last) of a key in a page, given its key block, and LSN, sequence
        and kind of the first; None if the kernel leaves it to `find`.
        """
        if (native := kernel.native) is None:
            return None
        rows: int = self._page_rows[page]
        found: tuple[int, int, int, int, int] | None = native.find_key(payload, key, rows)
        return found

    def find(self, page: int, key: bytes, payload: Buffer) -> tuple[range, KeyPage | Versions]:
        """Return the rows of a key's versions in a page, given its key block, and their source."""
        try:
            plain = KeyPage.of(payload)
        except ValueError as error:
            raise corrupt(self.name, self.offset(page, KEYS), str(error)) from error
        if plain is not None and plain.rows == self._page_rows[page]:
            return plain.find(key), plain
        versions = self.key_rows([page], [payload])
        keys = KeysInOrder(versions.keys)
        first = bisect_left(keys, key)
        return range(first, bisect_right(keys, key, lo=first)), versions

    def value(self, page: int, number: int, payload: Buffer, row: int) -> Any:
        """Return one value of a column page as Python has it, or as an Arrow scalar."""
        read, rows = self._readers[number], self._page_rows[page]
        try:
            if read is not None:
                return read(payload, row, rows)
        except (struct.error, IndexError, ValueError) as error:
            raise corrupt(self.name, self.offset(page, number), str(error)) from error
        field, offset = self.fields[number], self.offset(page, number)
        return decode_column_payload(payload, field, rows, self.name, offset)[row]


def _numbers(array: npt.NDArray[np.int64]) -> memoryview:
    """Return a view whose items are Python numbers, which NumPy's are not."""
    return memoryview(cast(Any, np.ascontiguousarray(array)))


class _Version(msgspec.Struct):
    """The part that footers of all versions have: it is checked before anything else."""

    version: int = 0


def decode_tail(tail: bytes, size: int, name: str) -> SegmentTail:
    """Decode the last bytes of a segment of `size` bytes; they must hold the whole tail."""
    base = size - len(tail)
    footer, footer_start = _decode_footer(tail, base, name)

    def block(kind: BlockKind, place: BlockRange) -> Buffer:
        if not base <= place.offset <= place.offset + place.length <= footer_start:
            raise corrupt(
                name, footer_start, f"{kind.name} at {place.offset} is outside of the tail"
            )
        data = tail[place.offset - base : place.offset - base + place.length]
        return decode_block(data, kind, name, place.offset)

    pages = None if footer.pages is None else block(BlockKind.PAGES, footer.pages)
    index = decode_index(
        block(BlockKind.INDEX, footer.index),
        footer.schema,
        HEAD.size,
        name,
        footer.index.offset,
        pages=pages,
    )
    tombstones: Sequence[RangeTombstone] = ()
    if footer.range_tombstones is not None:
        payload = block(BlockKind.RANGE_TOMBSTONES, footer.range_tombstones)
        tombstones = decode_range_tombstones(payload, name, footer.range_tombstones.offset)
    try:
        key_filter = KeyFilter(bytes(block(BlockKind.FILTER, footer.filter)))
    except ValueError as error:
        raise corrupt(name, footer.filter.offset, str(error)) from error
    directories = tuple(
        bytes(tail[max(0, at - base) : max(0, at - base + length)])
        for at, length in ((i.directory.offset, i.directory.length) for i in footer.indexes)
    )
    return SegmentTail(name, footer, index, key_filter, tombstones, directories)


def decode_footer(tail: bytes, size: int, name: str) -> Footer | int:
    """Return the footer from the last bytes of a segment, or how many bytes are needed."""
    if len(tail) >= END.size:
        length, _, magic = END.unpack(tail[-END.size :])
        if magic == MAGIC and len(tail) < length + END.size <= size:
            return int(length) + END.size
    return _decode_footer(tail, size - len(tail), name)[0]


def _decode_footer(tail: bytes, base: int, name: str) -> tuple[Footer, int]:
    if len(tail) < END.size:
        raise corrupt(name, base, f"{len(tail)} bytes are too few for a segment's tail")
    length, expected, magic = END.unpack(tail[-END.size :])
    if magic != MAGIC:
        raise corrupt(name, base + len(tail) - 8, f"expected magic {MAGIC!r}, found {magic!r}")
    start = len(tail) - END.size - length
    if start < 0:
        raise corrupt(name, base, f"a footer of {length} bytes does not fit")
    encoded = tail[start : -END.size]
    if crc32c(encoded) != expected:
        raise corrupt(name, base + start, "checksum of the footer does not match")
    said = decode_msgpack(encoded, _Version, name, base + start)
    assert isinstance(said, _Version)
    if said.version > VERSION:
        raise unsupported(name, "segment", said.version, VERSION)
    footer = decode_msgpack(encoded, Footer, name, base + start)
    assert isinstance(footer, Footer)
    return footer, base + start


def check_identity(footer: Footer, segment_id: str, name: str) -> None:
    """Raise if an object holds another segment than the one it is named after.

    Neither checksums nor the set hash show it: two loads of the same keys have the same.
    """
    if footer.write_id != segment_id:
        raise corrupt(name, 0, f"holds segment {footer.write_id}")


MASK = (1 << 64) - 1
ROUNDS = ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9), (0xD1B54A32D192ED03, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class SetHash:
    """Two sums modulo 2⁶⁴."""

    high: int = 0
    low: int = 0

    def __add__(self, other: "SetHash") -> "SetHash":
        return SetHash(self.high + other.high & MASK, self.low + other.low & MASK)

    def __sub__(self, other: "SetHash") -> "SetHash":
        return SetHash(self.high - other.high & MASK, self.low - other.low & MASK)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> "SetHash":
        if len(text) != 32:
            raise ValueError(f"{text!r} is not a set hash")
        return cls(int(text[:16], 16), int(text[16:], 16))


EMPTY = SetHash()


def set_hash(
    key_hashes: Hashes, sequences: npt.NDArray[np.uint32], kinds: npt.NDArray[np.uint8]
) -> SetHash:
    """Return the hash of these versions."""
    version = key_hashes ^ (sequences.astype(np.uint64) << np.uint64(8) | kinds.astype(np.uint64))
    sums = [int(_mix(version, *numbers).sum(dtype=np.uint64)) for numbers in ROUNDS]
    return SetHash(*sums)


def _mix(values: Hashes, step: int, factor: int) -> Hashes:
    mixed = values + np.uint64(step)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(ROUNDS[1][1])
    return mixed ^ (mixed >> np.uint64(31))
