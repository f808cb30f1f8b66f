"""Write a segment from sorted rows, piece by piece, in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.formats.coding import (
    BlockKind,
    Buffer,
    Codec,
    Packer,
    crc32c,
    crc32c_extend,
    encode_block,
)
from reef.formats.group import (
    PAGE_BYTES,
    distinct_keys,
    encode_group,
    group_ends,
    page_ends,
    row_bytes,
    same_as_next,
)
from reef.formats.manifest import IndexSpec
from reef.formats.schema import Schema
from reef.formats.segment import (
    EMPTY,
    END,
    GROUP_BYTES,
    HEAD,
    MAGIC,
    PLAIN_VERSION,
    VERSION,
    BlockRange,
    Footer,
    IndexPlace,
    Lineage,
    SegmentSummary,
    SetHash,
    encode_range_tombstones,
    set_hash,
)
from reef.formats.segment_index import (
    FilterBuilder,
    GroupEntry,
    Hashes,
    bounds_of,
    encode_index,
    encode_pages,
    hash_content,
    hash_keys,
    separator,
)
from reef.formats.versions import RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import FIRST_PARTIAL, OpKind

SUMMED_AT_ONCE = 64
_Unsummed = tuple[Hashes, npt.NDArray[np.uint32], npt.NDArray[np.uint8]]


_Blocks = tuple[IndexSpec, bytes, bytes]
"""An index with its data block and its directory block, empty if it was not built."""


@dataclass(frozen=True, slots=True)
class IndexParts:
    """An index of one segment."""

    directory: bytes
    """Small: stored in the segment's tail, so that one tail GET plans the search."""
    data: bytes | Sequence[bytes]
    """Stored between the groups and the tail. Each independently readable range of it carries its
    own crc32c."""


class IndexBuilder(Protocol):
    """Builds one index of one segment from rows in segment order."""

    def add(self, first_ordinal: int, column: pa.Array, valid: npt.NDArray[np.bool_]) -> None:
        """Add the rows from an ordinal on; those that are not valid are not indexed."""

    def finish(self) -> IndexParts:
        """Return the index of all rows that were added."""


class BuildableIndex(Protocol):
    """A spec with everything that builders of it need."""

    @property
    def spec(self) -> IndexSpec: ...

    def builder(self, data_type: pa.DataType) -> IndexBuilder | None:
        """Return a builder for the index of one segment; None if it cannot be built yet."""


class SegmentIndexes:
    """Builds the search indexes of one segment.

    Tombstones are not indexed. A segment with patches or merges gets no index at all: the rows that
    they change are in other segments, so it is searched row by row until they are merged.
    """

    def __init__(self, indexes: Sequence[BuildableIndex], schema: Schema) -> None:
        self._types = schema.types()
        self._builders: list[tuple[IndexSpec, IndexBuilder | None]] = [
            (index.spec, index.builder(self._types[index.spec.column]))
            for index in indexes
            if index.spec.column in self._types
        ]
        self._rows = 0

    def add(self, rows: Versions) -> None:
        """Add the next rows of the segment."""
        first, self._rows = self._rows, self._rows + len(rows)
        valid = rows.kinds == OpKind.PUT
        for spec, builder in self._builders:
            if builder is None:
                continue
            column = rows.fields.get(spec.column)
            if column is None:
                column = pa.nulls(len(rows), self._types[spec.column])
            builder.add(first, column, valid)

    def finish(self, *, builds: bool) -> list[_Blocks]:
        """Return the indexes as blocks; without `builds`, only how they would be made."""
        made: list[_Blocks] = []
        for spec, builder in self._builders:
            if builder is None or not builds or self._rows < spec.rows_min:
                made.append((spec, b"", b""))
                continue
            parts = builder.finish()
            data = parts.data if isinstance(parts.data, bytes) else b"".join(parts.data)
            block = encode_block(BlockKind.INDEX_DATA, data, Codec.NONE)
            made.append((spec, block, encode_block(BlockKind.INDEX_DIRECTORY, parts.directory)))
        return made


@dataclass
class SegmentWriter:
    """Encodes sorted rows, given in pieces, as the bytes of a segment."""

    schema: Schema
    level: int
    lineage: Lineage
    codec: Codec = Codec.ZSTD
    group_bytes: int = GROUP_BYTES
    range_tombstones: Sequence[RangeTombstone] = ()
    indexes: Sequence[BuildableIndex] = ()
    """Search indexes to build next to the rows."""
    _groups: list[GroupEntry] = field(default_factory=list)
    _filter: FilterBuilder = field(default_factory=FilterBuilder)
    _unsummed: list[_Unsummed] = field(default_factory=list)
    _pending: Versions | None = None
    _set_hash: SetHash = EMPTY
    _grouped: int = 0
    _offset: int = 0
    _checksum: int = 0
    _tombstones: int = 0
    _patches: int = 0
    _merges: int = 0
    _expiring: int = 0

    def __post_init__(self) -> None:
        self._packer = Packer(self.codec)
        columns = len(self.schema.fields)
        self._indexing = SegmentIndexes(self.indexes, self.schema)
        self._page_bytes = (1 + columns) * min(PAGE_BYTES, max(1, self.group_bytes // 2))

    @property
    def bytes_written(self) -> int:
        """The size of the segment so far, as stored."""
        return self._offset

    def write(self, pieces: Iterable[Versions]) -> Iterator[bytes]:
        """Yield the segment's bytes; `summary` is set after the last of them."""
        yield self.beginning()
        for piece in pieces:
            if len(piece):
                yield from self._groups_of(piece, last=False)
        if self._pending is not None:
            yield from self._groups_of(None, last=True)
        yield from self._tail()

    def copied(self, group: GroupEntry, keys: Versions, blocks: Buffer) -> None:
        """Add a group of another segment, whose bytes are copied.

        They come after `beginning`, and before `ending`.
        """
        if group.content is None:
            group = replace(group, content=hash_content(blocks))
        self._add(group, keys.keys.to_pylist(), keys)
        self._offset += len(blocks)
        self._checksum = crc32c_extend(self._checksum, blocks)

    def beginning(self) -> bytes:
        """Return the first bytes of a segment."""
        return self._out(HEAD.pack(MAGIC, PLAIN_VERSION, 0))

    def ending(self) -> bytes:
        """Return the bytes after the groups; `summary` is set then."""
        return b"".join(self._tail())

    def _groups_of(self, piece: Versions | None, *, last: bool) -> Iterator[bytes]:
        """Cut off whole groups; the rest waits for the next piece."""
        parts = [part for part in (self._pending, piece) if part is not None]
        rows = concat_versions(parts, self.schema)
        sizes = np.cumsum(row_bytes(rows))
        columns = len(self.schema.fields)
        same = same_as_next(rows.keys)
        ends = group_ends(same, sizes, self.group_bytes, self._grouped, columns)
        start = before = 0
        for end in ends if last else ends[:-1]:
            within = same[start : end - 1]
            pages = page_ends(within, sizes[start:end], before, self._page_bytes)
            yield self._group(rows.slice(start, end), pages, distinct_keys(within, pages))
            start, before = end, int(sizes[end - 1])
        self._grouped += before
        self._pending = None if last else rows.slice(start, len(rows))

    def _group(self, rows: Versions, ends: Sequence[int], distinct: Sequence[int]) -> bytes:
        keys = rows.keys.to_pylist()
        key_blocks, columns = encode_group(rows, ends, self._packer)
        runs = [block for number in sorted(columns) for block in columns[number]]
        data = b"".join([*key_blocks, *runs])
        cuts = [separator(keys[end - 1], keys[end]) for end in ends[:-1]]
        group = GroupEntry(
            keys[0],
            keys[-1],
            [end - start for start, end in pairwise((0, *ends))],
            distinct,
            [keys[0], *cuts],
            int(rows.lsns.min()),
            int(rows.lsns.max()),
            list(map(len, key_blocks)),
            {number: list(map(len, blocks)) for number, blocks in columns.items()},
            {number: bounds_of(rows.fields[number]) for number in columns},
            hash_content(data),
        )
        self._add(group, keys, rows)
        return self._out(data)

    def _add(self, group: GroupEntry, keys: Sequence[bytes], rows: Versions) -> None:
        self._indexing.add(rows)
        self._groups.append(group)
        if rows.expires_at_ms is not None:
            self._expiring += len(rows) - rows.expires_at_ms.null_count
        self._unsummed.append((hash_keys(keys), rows.seqs, rows.kinds))
        if len(self._unsummed) >= SUMMED_AT_ONCE:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add many groups to the set hash and the counts: a few vector operations for all."""
        if not self._unsummed:
            return
        hashes = np.concatenate([hashes for hashes, _, _ in self._unsummed])
        seqs = np.concatenate([seqs for _, seqs, _ in self._unsummed])
        kinds = np.concatenate([kinds for _, _, kinds in self._unsummed])
        self._filter.add(hashes)
        self._set_hash += set_hash(hashes, seqs, kinds)
        self._tombstones += int((kinds == OpKind.DELETE).sum())
        self._patches += int((kinds >= FIRST_PARTIAL).sum())
        self._merges += int((kinds == OpKind.MERGE).sum())
        self._unsummed.clear()

    def _tail(self) -> Iterator[bytes]:
        self._sum_up()
        made = self._indexing.finish(builds=not self._patches)
        data_places: list[BlockRange] = []
        for _, data, _ in made:
            data_places.append(BlockRange(self._offset, len(data)))
            yield self._out(data)
        tail_start = self._offset
        tombstones = encode_range_tombstones(self.range_tombstones)
        places: list[BlockRange | None] = []
        for kind, payload in (
            (BlockKind.RANGE_TOMBSTONES, tombstones),
            (BlockKind.FILTER, self._filter.build()),
            (BlockKind.PAGES, encode_pages(self._groups, self.schema)),
            (BlockKind.INDEX, encode_index(self._groups, self.schema)),
        ):
            codec = Codec.NONE if kind is BlockKind.FILTER else self.codec
            block = encode_block(kind, payload, codec) if payload else b""
            places.append(BlockRange(self._offset, len(block)) if block else None)
            yield self._out(block)
        indexes: list[IndexPlace] = []
        for (spec, _, directory), data_place in zip(made, data_places, strict=True):
            indexes.append(IndexPlace(spec, BlockRange(self._offset, len(directory)), data_place))
            yield self._out(directory)
        footer = msgspec.structs.replace(self._footer(*places), indexes=tuple(indexes))
        encoded = msgspec.msgpack.encode(footer)
        yield self._out(encoded)
        yield self._out(END.pack(len(encoded), crc32c(encoded), MAGIC))
        self.summary = SegmentSummary(
            footer, self._offset, self._checksum, self._offset - tail_start
        )

    def _footer(
        self,
        tombstones: BlockRange | None,
        key_filter: BlockRange | None,
        pages: BlockRange | None,
        index: BlockRange | None,
    ) -> Footer:
        assert key_filter is not None
        assert index is not None
        low, high = self._key_bounds()
        lsns = [lsn for group in self._groups for lsn in (group.lsn_min, group.lsn_max)]
        lsns += [tombstone.lsn for tombstone in self.range_tombstones]
        return Footer(
            version=VERSION if self._merges else PLAIN_VERSION,
            schema=self.schema,
            level=self.level,
            rows=sum(sum(group.rows) for group in self._groups),
            tombstones=self._tombstones + len(self.range_tombstones),
            min_key=low,
            max_key=high,
            lsn_min=min(lsns, default=0),
            lsn_max=max(lsns, default=0),
            set_hash=str(self._set_hash),
            write_id=self.lineage.write_id,
            created_at_ms=self.lineage.created_at_ms,
            filter=key_filter,
            index=index,
            pages=pages,
            range_tombstones=tombstones,
            patches=self._patches,
            ancestors=self.lineage.ancestors,
            siblings=self.lineage.siblings,
            job=self.lineage.job,
            covers=self.lineage.covers,
            generation=self.lineage.generation,
            merges=self._merges,
            expiring=self._expiring,
        )

    def _key_bounds(self) -> tuple[bytes, bytes]:
        """Bounds include range tombstones, or a read would miss them (H36)."""
        keys = [
            key
            for group in self._groups[:1] + self._groups[-1:]
            for key in (group.first_key, group.last_key)
        ]
        keys += [
            key for tombstone in self.range_tombstones for key in (tombstone.start, tombstone.end)
        ]
        if not keys and not self.lineage.covers:
            raise ValueError("a segment without rows and range tombstones")
        return min(keys, default=b""), max(keys, default=b"")

    def _out(self, data: bytes) -> bytes:
        self._offset += len(data)
        self._checksum = crc32c_extend(self._checksum, data)
        return data
