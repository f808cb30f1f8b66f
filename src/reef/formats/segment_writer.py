"""Writes segments: sorted rows in, bytes out, both in pieces, in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from reef.formats.batch import OpKind
from reef.formats.block import BlockKind, Codec, Packer, encode_block
from reef.formats.coding import Buffer, crc32c, crc32c_extend
from reef.formats.filter import FilterBuilder, Hashes, hash_keys
from reef.formats.group import encode_group, group_ends, row_bytes
from reef.formats.schema import Schema
from reef.formats.segment import (
    END,
    GROUP_BYTES,
    HEAD,
    MAGIC,
    VERSION,
    Footer,
    Lineage,
    Place,
    SegmentSummary,
    encode_range_tombstones,
)
from reef.formats.segment_index import GroupEntry, bounds_of, encode_index
from reef.formats.set_hash import EMPTY, SetHash, set_hash
from reef.formats.versions import RangeTombstone, Versions, concat_versions

__all__ = ["SegmentWriter"]


SUMMED_AT_ONCE = 64
_Unsummed = tuple[Hashes, npt.NDArray[np.uint32], npt.NDArray[np.uint8]]


@dataclass
class SegmentWriter:
    """Takes sorted rows in pieces, gives out a segment's bytes in pieces."""

    schema: Schema
    level: int
    lineage: Lineage
    codec: Codec = Codec.ZSTD
    group_bytes: int = GROUP_BYTES
    range_tombstones: Sequence[RangeTombstone] = ()
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

    def __post_init__(self) -> None:
        self._packer = Packer(self.codec)

    @property
    def bytes_written(self) -> int:
        """How large the segment is so far, as stored."""
        return self._offset

    def write(self, pieces: Iterable[Versions]) -> Iterator[bytes]:
        """Yield the segment's bytes; `summary` is set when the last one was taken."""
        yield self.beginning()
        for piece in pieces:
            if len(piece):
                yield from self._groups_of(piece, last=False)
        if self._pending is not None:
            yield from self._groups_of(None, last=True)
        yield from self._tail()

    def copied(self, group: GroupEntry, keys: Versions, blocks: Buffer) -> None:
        """Take in a group as another segment has it: its bytes are copied, not made again.

        They come after `beginning`, and before `ending`.
        """
        self._note(group, keys)
        self._offset += len(blocks)
        self._checksum = crc32c_extend(self._checksum, blocks)

    def beginning(self) -> bytes:
        """Return the first bytes of a segment."""
        return self._out(HEAD.pack(MAGIC, VERSION, 0))

    def ending(self) -> bytes:
        """Return what comes after the groups; `summary` is set then."""
        return b"".join(self._tail())

    def _groups_of(self, piece: Versions | None, *, last: bool) -> Iterator[bytes]:
        """Cut off whole groups; what is left over waits for the next piece."""
        parts = [part for part in (self._pending, piece) if part is not None]
        rows = concat_versions(parts, self.schema)
        sizes = np.cumsum(row_bytes(rows))
        ends = group_ends(rows.keys, sizes, self.group_bytes, self._grouped)
        start = 0
        for end in ends if last else ends[:-1]:
            yield from self._group(rows.slice(start, end))
            start = end
        self._grouped += int(sizes[start - 1]) if start else 0
        self._pending = None if last else rows.slice(start, len(rows))

    def _group(self, rows: Versions) -> Iterator[bytes]:
        keys, columns = encode_group(rows, self._packer)
        group = GroupEntry(
            rows.keys[0].as_py(),
            rows.keys[len(rows) - 1].as_py(),
            len(rows),
            int(rows.lsns.min()),
            int(rows.lsns.max()),
            len(keys),
            {number: len(block) for number, block in columns.items()},
            {number: bounds_of(rows.fields[number]) for number in columns},
        )
        self._note(group, rows)
        yield self._out(keys)
        for number in sorted(columns):
            yield self._out(columns[number])

    def _note(self, group: GroupEntry, rows: Versions) -> None:
        self._groups.append(group)
        self._unsummed.append((hash_keys(rows.keys), rows.seqs, rows.kinds))
        if len(self._unsummed) >= SUMMED_AT_ONCE:
            self._sum_up()

    def _sum_up(self) -> None:
        """Take many groups into the set hash and the counts: a few vector operations for all."""
        if not self._unsummed:
            return
        hashes = np.concatenate([hashes for hashes, _, _ in self._unsummed])
        seqs = np.concatenate([seqs for _, seqs, _ in self._unsummed])
        kinds = np.concatenate([kinds for _, _, kinds in self._unsummed])
        self._filter.add(hashes)
        self._set_hash += set_hash(hashes, seqs, kinds)
        self._tombstones += int((kinds == OpKind.DELETE).sum())
        self._patches += int((kinds == OpKind.PATCH).sum())
        self._unsummed.clear()

    def _tail(self) -> Iterator[bytes]:
        self._sum_up()
        tail_start = self._offset
        tombstones = encode_range_tombstones(self.range_tombstones)
        places: list[Place | None] = []
        for kind, payload in (
            (BlockKind.RANGE_TOMBSTONES, tombstones),
            (BlockKind.FILTER, self._filter.build()),
            (BlockKind.INDEX, encode_index(self._groups, self.schema)),
        ):
            codec = Codec.NONE if kind is BlockKind.FILTER else self.codec
            block = encode_block(kind, payload, codec) if payload else b""
            places.append(Place(self._offset, len(block)) if block else None)
            yield self._out(block)
        footer = self._footer(*places)
        encoded = msgspec.msgpack.encode(footer)
        yield self._out(encoded)
        yield self._out(END.pack(len(encoded), crc32c(encoded), MAGIC))
        self.summary = SegmentSummary(
            footer, self._offset, self._checksum, self._offset - tail_start
        )

    def _footer(
        self, tombstones: Place | None, key_filter: Place | None, index: Place | None
    ) -> Footer:
        assert key_filter is not None
        assert index is not None
        low, high = self._key_bounds()
        lsns = [lsn for group in self._groups for lsn in (group.lsn_min, group.lsn_max)]
        lsns += [tombstone.lsn for tombstone in self.range_tombstones]
        return Footer(
            version=VERSION,
            schema=self.schema,
            level=self.level,
            rows=sum(group.rows for group in self._groups),
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
            range_tombstones=tombstones,
            patches=self._patches,
            ancestors=self.lineage.ancestors,
            siblings=self.lineage.siblings,
            job=self.lineage.job,
            covers=self.lineage.covers,
            generation=self.lineage.generation,
        )

    def _key_bounds(self) -> tuple[bytes, bytes]:
        """Bounds include range tombstones, or a read would pass them by (H36)."""
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
