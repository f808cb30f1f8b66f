"""Checkpoints: the whole state after one transaction, sorted by key and readable key by key.

    magic        8 bytes, "RFCKPT1" and a zero
    blocks       about 32 KiB of sorted pairs each: msgpack [keys, values], compressed, checked
    index        a block: msgpack of first keys, offsets and lengths
    meta         a frame: msgpack of `CheckpointMeta`
    trailer      lengths of index and meta, crc32c of both, magic again: 20 bytes

Index, meta and trailer are the tail. The head has its length, so one ranged GET reads the tail and
another one the block of a key; both are cached. A scan reads the tail, and the blocks of its range
in parallel. Reads of a checkpoint that was garbage-collected raise NotFoundError: readers without
a lease then load the head again.

The meta has a set hash of all pairs, which does not depend on their order. A compaction updates it
from the previous checkpoint, by adding new pairs and subtracting removed ones, and compares it
with the pairs that it writes.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import msgspec
import xxhash

from reef.catalog.head import CheckpointRef
from reef.catalog.segments import BlobCache
from reef.errors import UNDECODABLE, ErrorKind, InvalidInputError
from reef.formats.coding import (
    BlockKind,
    ByteReader,
    Codec,
    corrupt,
    crc32c,
    decode_block,
    encode_block,
    encode_frame,
    read_frame,
    unsupported,
)
from reef.formats.segment import MASK, SetHash
from reef.paths import CatalogNames, catalog_object
from reef.stores import Store
from reef.stores.base import fetch, reread_if_damaged
from reef.types import KeyRange

MAGIC = b"RFCKPT1\0"
FORMAT = 1
BLOCK_BYTES = 32 << 10
TRAILER = struct.Struct("<III8s")
Pair = tuple[bytes, bytes]
T = TypeVar("T")


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint."""

    id: str
    txn_id: int
    last_segment_seq_at_ckpt: int
    write_id: str
    """Write id of its last segment, the base of the next one."""
    created_at_ms: int
    format: int = FORMAT
    key_count: int = 0
    byte_size: int = 0
    """Bytes of all keys and values, before compression."""
    set_hash: str = ""
    previous_id: str | None = None
    previous_set_hash: str | None = None


class CheckpointIndex(msgspec.Struct, frozen=True):
    """Offsets of the blocks, by first key."""

    first_keys: list[bytes]
    offsets: list[int]
    lengths: list[int]

    def block_of(self, key: bytes) -> int | None:
        """Return the number of the block that may hold a key; None if it is before the first."""
        place = bisect_right(self.first_keys, key) - 1
        return place if place >= 0 else None

    def blocks_in(self, key_range: KeyRange) -> range:
        """Return the numbers of the blocks that may hold keys of a range."""
        first = max(bisect_right(self.first_keys, key_range.start) - 1, 0)
        last = len(self.first_keys)
        if key_range.end is not None:
            last = bisect_right(self.first_keys, key_range.end)
        return range(first, last)

    def span(self, block: int) -> tuple[int, int]:
        """Return the start and end offset of a block."""
        return self.offsets[block], self.offsets[block] + self.lengths[block]


class CheckpointTail(msgspec.Struct, frozen=True):
    """The end of the object, from which every read is planned."""

    meta: CheckpointMeta
    index: CheckpointIndex


def pair_hash(pairs: Iterable[tuple[bytes, bytes]]) -> SetHash:
    """Return the set hash of pairs, which does not depend on their order."""
    high = low = 0
    for key, value in pairs:
        both = xxhash.xxh3_128_intdigest(struct.pack("<I", len(key)) + key + value)
        high += both >> 64
        low += both & MASK
    return SetHash(high & MASK, low & MASK)


def encode_checkpoint(meta: CheckpointMeta, pairs: Sequence[Pair]) -> tuple[bytes, int]:
    """Encode a checkpoint; return its bytes and the length of its tail."""
    blocks = [
        encode_block(BlockKind.KEYS, msgspec.msgpack.encode([[k for k, _ in b], [v for _, v in b]]))
        for b in _cut(pairs)
    ]
    offsets, at = [], len(MAGIC)
    for block in blocks:
        offsets.append(at)
        at += len(block)
    index = CheckpointIndex(
        [b[0][0] for b in _cut(pairs)], offsets, [len(block) for block in blocks]
    )
    indexed = encode_block(BlockKind.INDEX, msgspec.msgpack.encode(index), Codec.ZSTD)
    framed = encode_frame(msgspec.msgpack.encode(meta))
    lengths = struct.pack("<II", len(indexed), len(framed))
    trailer = TRAILER.pack(len(indexed), len(framed), crc32c(lengths), MAGIC)
    tail = indexed + framed + trailer
    return b"".join((MAGIC, *blocks, tail)), len(tail)


def _cut(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    start = weight = 0
    for place, (key, value) in enumerate(pairs):
        weight += len(key) + len(value)
        if weight >= BLOCK_BYTES:
            yield pairs[start : place + 1]
            start, weight = place + 1, 0
    if start < len(pairs):
        yield pairs[start:]


def decode_tail(data: bytes, name: str, offset: int) -> CheckpointTail:
    """Decode index and meta; `data` is the object from `offset` to its end."""
    cursor = ByteReader(data, name, offset)
    if len(data) < TRAILER.size:
        cursor.fail(f"expected a tail of at least {TRAILER.size} bytes, found {len(data)}")
    cursor.position = len(data) - TRAILER.size
    index_bytes, meta_bytes, checksum, magic = TRAILER.unpack(cursor.take(TRAILER.size))
    cursor.position -= TRAILER.size
    lengths = struct.pack("<II", index_bytes, meta_bytes)
    if magic != MAGIC or crc32c(lengths) != checksum:
        cursor.fail("the trailer of the checkpoint is damaged")
    if index_bytes + meta_bytes != cursor.position:
        cursor.fail(
            f"expected {cursor.position} bytes of index and meta, found {index_bytes + meta_bytes}"
        )
    block = decode_block(data[:index_bytes], BlockKind.INDEX, name, offset)
    index = _unpack(cursor, block, CheckpointIndex)
    meta_cursor = ByteReader(
        data[index_bytes : index_bytes + meta_bytes], name, offset + index_bytes
    )
    meta = _unpack(meta_cursor, read_frame(meta_cursor, "the meta"), CheckpointMeta)
    meta_cursor.end()
    if meta.format > FORMAT:
        raise unsupported(name, "checkpoint of a catalog", meta.format, FORMAT)
    if not len(index.first_keys) == len(index.offsets) == len(index.lengths):
        cursor.fail("the columns of the index differ in length")
    return CheckpointTail(meta, index)


def decode_pairs(data: bytes, name: str, offset: int) -> tuple[list[bytes], list[bytes]]:
    """Decode a block to its sorted keys and their values."""
    cursor = ByteReader(data, name, offset)
    payload = decode_block(data, BlockKind.KEYS, name, offset)
    keys, values = _unpack(cursor, payload, tuple[list[bytes], list[bytes]])
    if len(keys) != len(values) or any(a >= b for a, b in pairwise(keys)):
        cursor.fail("its keys are not sorted, or do not match its values in number")
    return keys, values


def decode_checkpoint(data: bytes, name: str, tail_bytes: int) -> tuple[CheckpointTail, list[Pair]]:
    """Decode a whole checkpoint and check every byte."""
    ByteReader(data, name).expect(MAGIC, "magic of a checkpoint")
    start = len(data) - tail_bytes
    tail = decode_tail(data[max(start, 0) :], name, max(start, 0))
    pairs: list[Pair] = []
    at = len(MAGIC)
    for block in range(len(tail.index.offsets)):
        begin, end = tail.index.span(block)
        if begin != at or end > start:
            ByteReader(data, name, start).fail(f"block {block}: expected at {at}, found at {begin}")
        keys, values = decode_pairs(data[begin:end], name, begin)
        out_of_order = pairs and keys and pairs[-1][0] >= keys[0]
        if not keys or keys[0] != tail.index.first_keys[block] or out_of_order:
            ByteReader(data, name, begin).fail("the keys of the block do not match the index")
        pairs += zip(keys, values, strict=True)
        at = end
    if at != start:
        ByteReader(data, name, at).fail(f"{start - at} bytes between the blocks and the tail")
    return tail, pairs


def tail_bytes_of(data: bytes, name: str) -> int:
    """Return the length of the tail from the object itself, without the head."""
    cursor = ByteReader(data[-TRAILER.size :], name, max(len(data) - TRAILER.size, 0))
    index_bytes, meta_bytes, _, _ = TRAILER.unpack(cursor.take(TRAILER.size))
    return int(index_bytes) + int(meta_bytes) + TRAILER.size


def _unpack(cursor: ByteReader, payload: bytes | memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except UNDECODABLE as error:
        cursor.fail(f"expected {kind}: {error}")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint in a listing."""

    key: str
    id: str
    seq: int
    bytes: int
    last_modified_s: float


class CheckpointStore:
    """Writes, reads and lists checkpoints. Thread-safe."""

    def __init__(self, store: Store, names: CatalogNames, cache: BlobCache | None) -> None:
        self._store = store
        self._names = names
        self._cache = cache
        self._last_tail: CheckpointTail | None = None
        """Tail of the last checkpoint read: its index has an entry per block."""

    def write(self, meta: CheckpointMeta, pairs: Sequence[Pair]) -> CheckpointRef:
        """Write sorted pairs under a unique name."""
        body, tail_bytes = encode_checkpoint(meta, pairs)
        self._store.upload(self._names.checkpoint(meta.id), [body])
        return CheckpointRef(
            meta.id, meta.last_segment_seq_at_ckpt, meta.txn_id, len(body), tail_bytes
        )

    def meta(self, ref: CheckpointRef) -> CheckpointMeta:
        """Return the metadata of a checkpoint, without reading its pairs."""
        return self._tail(ref).meta

    def get(self, ref: CheckpointRef, key: bytes) -> bytes | None:
        """Return a value, from the tail and at most one block."""
        index = self._tail(ref).index
        block = index.block_of(key)
        if block is None:
            return None
        keys, values = self._blocks(ref, [index.span(block)])[0]
        place = bisect_left(keys, key)
        return values[place] if place < len(keys) and keys[place] == key else None

    def scan(self, ref: CheckpointRef, key_range: KeyRange) -> list[Pair]:
        """Return the pairs of a range, sorted by key."""
        index = self._tail(ref).index
        spans = [index.span(block) for block in index.blocks_in(key_range)]
        return [
            pair
            for keys, values in self._blocks(ref, spans)
            for pair in zip(keys, values, strict=True)
            if key_range.has(pair[0])
        ]

    def read_whole(self, checkpoint_id: str) -> tuple[CheckpointMeta, list[Pair]]:
        """Read and check every byte of a checkpoint, without a cache."""
        name = self._names.checkpoint(checkpoint_id)
        tail, pairs = fetch(
            self._store, name, lambda body: decode_checkpoint(body, name, tail_bytes_of(body, name))
        )
        if tail.meta.id != checkpoint_id:
            raise corrupt(name, 0, f"holds checkpoint {tail.meta.id}")
        return tail.meta, pairs

    def list_checkpoints(self) -> list[ListedCheckpoint]:
        """List checkpoints, oldest first."""
        infos = (
            (info, catalog_object(info.key)) for info in self._store.list(self._names.checkpoints)
        )
        return [
            ListedCheckpoint(
                info.key, f"{named[0]:020}-{named[1]}", named[0], info.size, info.last_modified_s
            )
            for info, named in infos
            if named is not None
        ]

    # --- ranges -------------------------------------------------------------------
    def _tail(self, ref: CheckpointRef) -> CheckpointTail:
        last = self._last_tail
        if last is not None and last.meta.id == ref.id:
            return last
        name = self._names.checkpoint(ref.id)
        start = ref.bytes - ref.tail_bytes
        tail = reread_if_damaged(
            lambda: decode_tail(self._ranges(ref, [(start, ref.bytes)])[0], name, start),
            lambda: self._forget(ref, [(start, ref.bytes)]),
        )
        if tail.meta.id != ref.id:
            raise corrupt(name, start, f"holds checkpoint {tail.meta.id}")
        if self._cache is not None:
            self._last_tail = tail
        return tail

    def _blocks(
        self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[list[bytes], list[bytes]]]:
        name = self._names.checkpoint(ref.id)

        def read() -> list[tuple[list[bytes], list[bytes]]]:
            bodies = self._ranges(ref, spans)
            return [
                decode_pairs(body, name, start)
                for body, (start, _) in zip(bodies, spans, strict=True)
            ]

        return reread_if_damaged(read, lambda: self._forget(ref, spans))

    def _ranges(self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges from the cache; missing ones are fetched together."""
        bodies = {span: self._cached(ref, span) for span in spans}
        missing = [span for span, body in bodies.items() if body is None]
        if missing:
            name = self._names.checkpoint(ref.id)
            try:
                fetched = self._store.get_ranges(name, missing)
            except InvalidInputError as error:
                if error.kind is not ErrorKind.INVALID_RANGE:
                    raise
                raise corrupt(name, missing[0][0], f"cut short: {error.message}") from error
            for span, blob in zip(missing, fetched, strict=True):
                bodies[span] = blob
                if self._cache is not None:
                    self._cache.put(self._label(ref, span), ref.id, blob)
        return [body for span in spans if (body := bodies[span]) is not None]

    def _cached(self, ref: CheckpointRef, span: tuple[int, int]) -> bytes | None:
        return self._cache.get(self._label(ref, span), ref.id) if self._cache is not None else None

    def _forget(self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]) -> None:
        self._store.forget(self._names.checkpoint(ref.id), spans)
        for span in spans:
            if self._cache is not None:
                self._cache.forget(self._label(ref, span), ref.id)

    def _label(self, ref: CheckpointRef, span: tuple[int, int]) -> str:
        return f"{self._store.url}/{self._names.checkpoint(ref.id)}[{span[0]}:{span[1]}]"
