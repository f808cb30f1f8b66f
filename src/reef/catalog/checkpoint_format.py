"""Checkpoints: the whole state at one transaction, sorted by key, readable key by key.

    magic        8 bytes, "RFCKPT1" and a zero
    blocks       about 32 KiB of sorted pairs each: msgpack [keys, values], compressed, checked
    index        a block: msgpack of first keys, offsets and lengths
    meta         a frame: msgpack of `CheckpointMeta`
    trailer      lengths of index and meta, crc32c of both, magic again: 20 bytes

Index, meta and trailer are the tail. The head says how long it is, so that one ranged GET brings
the tail and another one the block that a key lies in. The meta has a set hash of all pairs:
it does not depend on their order, and a compaction carries it on from the checkpoint before by
adding what came and subtracting what went, then compares it with what it writes.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import xxhash

from reef.errors import UNDECODABLE
from reef.formats.block import BlockKind, Codec, decode_block, encode_block
from reef.formats.coding import Cursor, crc32c, unsupported
from reef.formats.frame import encode_frame, read_frame
from reef.formats.set_hash import MASK, SetHash
from reef.types import KeyRange

__all__ = [
    "CheckpointMeta",
    "Index",
    "Tail",
    "decode_checkpoint",
    "decode_pairs",
    "decode_tail",
    "encode_checkpoint",
    "pair_hash",
]

MAGIC = b"RFCKPT1\0"
FORMAT = 1
BLOCK_BYTES = 32 << 10
TRAILER = struct.Struct("<III8s")
Pair = tuple[bytes, bytes]
T = TypeVar("T")


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself."""

    id: str
    txn_id: int
    last_segment_seq_at_ckpt: int
    write_id: str
    """Of the last segment in it: the next one stands on it."""
    created_at_ms: int
    format: int = FORMAT
    key_count: int = 0
    byte_size: int = 0
    """Of all keys and values, before compression."""
    set_hash: str = ""
    previous_id: str | None = None
    previous_set_hash: str | None = None


class Index(msgspec.Struct, frozen=True):
    """Where the blocks are."""

    first_keys: list[bytes]
    offsets: list[int]
    lengths: list[int]

    def block_of(self, key: bytes) -> int | None:
        """Return the number of the block that holds a key, if one does."""
        place = bisect_right(self.first_keys, key) - 1
        return place if place >= 0 else None

    def blocks_in(self, wanted: KeyRange) -> range:
        """Return the numbers of the blocks that may hold keys of a range."""
        first = max(bisect_right(self.first_keys, wanted.start) - 1, 0)
        last = len(self.first_keys)
        if wanted.end is not None:
            last = bisect_right(self.first_keys, wanted.end)
        return range(first, last)

    def span(self, block: int) -> tuple[int, int]:
        """Return where a block begins and ends."""
        return self.offsets[block], self.offsets[block] + self.lengths[block]


class Tail(msgspec.Struct, frozen=True):
    """What plans every read."""

    meta: CheckpointMeta
    index: Index


def pair_hash(pairs: Iterable[tuple[bytes, bytes]]) -> SetHash:
    """Return the set hash of pairs, whatever their order."""
    high = low = 0
    for key, value in pairs:
        both = xxhash.xxh3_128_intdigest(struct.pack("<I", len(key)) + key + value)
        high += both >> 64
        low += both & MASK
    return SetHash(high & MASK, low & MASK)


def encode_checkpoint(meta: CheckpointMeta, pairs: Sequence[Pair]) -> tuple[bytes, int]:
    """Return the object's bytes, and how many of them are the tail."""
    blocks = [
        encode_block(BlockKind.KEYS, msgspec.msgpack.encode([[k for k, _ in b], [v for _, v in b]]))
        for b in _cut(pairs)
    ]
    offsets, at = [], len(MAGIC)
    for block in blocks:
        offsets.append(at)
        at += len(block)
    index = Index([b[0][0] for b in _cut(pairs)], offsets, [len(block) for block in blocks])
    indexed = encode_block(BlockKind.INDEX, msgspec.msgpack.encode(index), Codec.ZSTD)
    told = encode_frame(msgspec.msgpack.encode(meta))
    lengths = struct.pack("<II", len(indexed), len(told))
    trailer = TRAILER.pack(len(indexed), len(told), crc32c(lengths), MAGIC)
    tail = indexed + told + trailer
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


def decode_tail(data: bytes, name: str, offset: int) -> Tail:
    """Return index and meta; `data` is the object from `offset` to its end."""
    cursor = Cursor(data, name, offset)
    if len(data) < TRAILER.size:
        cursor.fail(f"a tail of {len(data)} bytes, at least {TRAILER.size} were expected")
    cursor.position = len(data) - TRAILER.size
    index_bytes, meta_bytes, checksum, magic = TRAILER.unpack(cursor.take(TRAILER.size))
    cursor.position -= TRAILER.size
    lengths = struct.pack("<II", index_bytes, meta_bytes)
    if magic != MAGIC or crc32c(lengths) != checksum:
        cursor.fail("the trailer of the checkpoint is damaged")
    if index_bytes + meta_bytes != cursor.position:
        cursor.fail(f"index and meta have {index_bytes + meta_bytes}, not {cursor.position} bytes")
    index = _decoded(cursor, decode_block(data[:index_bytes], BlockKind.INDEX, name, offset), Index)
    meta_cursor = Cursor(data[index_bytes : index_bytes + meta_bytes], name, offset + index_bytes)
    meta = _decoded(meta_cursor, read_frame(meta_cursor, "the meta"), CheckpointMeta)
    meta_cursor.end()
    if meta.format > FORMAT:
        raise unsupported(name, "checkpoint of a catalog", meta.format, FORMAT)
    if not len(index.first_keys) == len(index.offsets) == len(index.lengths):
        cursor.fail("the columns of the index differ in length")
    return Tail(meta, index)


def decode_pairs(data: bytes, name: str, offset: int) -> tuple[list[bytes], list[bytes]]:
    """Return the sorted keys of a block, and their values."""
    cursor = Cursor(data, name, offset)
    payload = decode_block(data, BlockKind.KEYS, name, offset)
    keys, values = _decoded(cursor, payload, tuple[list[bytes], list[bytes]])
    if len(keys) != len(values) or any(a >= b for a, b in pairwise(keys)):
        cursor.fail("keys are out of order, or without values")
    return keys, values


def decode_checkpoint(data: bytes, name: str, tail_bytes: int) -> tuple[Tail, list[Pair]]:
    """Return everything, every byte of it checked."""
    Cursor(data, name).expect(MAGIC, "magic of a checkpoint")
    start = len(data) - tail_bytes
    tail = decode_tail(data[max(start, 0) :], name, max(start, 0))
    pairs: list[Pair] = []
    at = len(MAGIC)
    for block in range(len(tail.index.offsets)):
        begin, end = tail.index.span(block)
        if begin != at or end > start:
            Cursor(data, name, start).fail(f"block {block} at {begin}, expected at {at}")
        keys, values = decode_pairs(data[begin:end], name, begin)
        out_of_order = pairs and keys and pairs[-1][0] >= keys[0]
        if not keys or keys[0] != tail.index.first_keys[block] or out_of_order:
            Cursor(data, name, begin).fail("the block's keys are not those of the index")
        pairs += zip(keys, values, strict=True)
        at = end
    if at != start:
        Cursor(data, name, at).fail(f"{start - at} bytes between the blocks and the tail")
    return tail, pairs


def tail_bytes_of(data: bytes, name: str) -> int:
    """Return the length of the tail, for who has the object but not the head that names it."""
    cursor = Cursor(data[-TRAILER.size :], name, max(len(data) - TRAILER.size, 0))
    index_bytes, meta_bytes, _, _ = TRAILER.unpack(cursor.take(TRAILER.size))
    return int(index_bytes) + int(meta_bytes) + TRAILER.size


def _decoded(cursor: Cursor, payload: bytes | memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except UNDECODABLE as error:
        cursor.fail(f"not what was expected here: {error}")
