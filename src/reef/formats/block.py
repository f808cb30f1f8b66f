"""Blocks: the unit that segments are built from, compressed and checked as a whole.

    0        4        8      9       10     12           16
    +--------+--------+------+-------+------+------------+----------+-------+
    | length | crc32c | kind | codec | zero | raw length | payload… | zeros |
    +--------+--------+------+-------+------+------------+----------+-------+

`length` is that of the stored payload; the checksum covers all that follows it, padding
included. A reader passes over kinds that it does not know. The raw length is bounded by
the stored one, so that a damaged or hostile block cannot ask for more memory than its
object's size allows.
"""

import struct
from enum import IntEnum

import pyarrow as pa

from reef.formats.coding import ALIGNMENT, Buffer, corrupt, crc32c, padding

__all__ = ["BLOCK_HEAD_BYTES", "BlockKind", "Codec", "Packer", "decode_block", "encode_block"]

HEAD = struct.Struct("<IIBBHI")
BLOCK_HEAD_BYTES = HEAD.size
CHECKED_FROM = 8
CODEC_AT = 9
RATIO_MAX = 1024
RATIO_SLACK_BYTES = 64 * 1024
ZSTD_LEVEL = 1
"""Higher levels cost far more time than they save bytes on keys and small values."""
SAVED_MIN = 8
"""Compression that saves less than an eighth costs every reader more than it is worth."""
UNTRIED_MAX = 15


class BlockKind(IntEnum):
    """What a block holds."""

    KEYS = 1
    COLUMN = 2
    RANGE_TOMBSTONES = 3
    FILTER = 4
    INDEX = 5
    MANIFEST = 6


class Codec(IntEnum):
    """How a payload is compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


CODECS = frozenset(codec.value for codec in Codec)

_compressors: dict[int, pa.Codec] = {
    Codec.LZ4: pa.Codec("lz4_raw"),
    Codec.ZSTD: pa.Codec("zstd", ZSTD_LEVEL),
}


def encode_block(kind: BlockKind, payload: bytes, codec: Codec = Codec.ZSTD) -> bytes:
    """Return a block; stored as it is where compression does not save an eighth."""
    codec, stored = _compress(payload, codec)
    checked = struct.pack("<BBHI", kind, codec, 0, len(payload)) + stored + padding(len(stored))
    return struct.pack("<II", len(stored), crc32c(checked)) + checked


class Packer:
    """Makes the blocks of one segment, and remembers which columns do not shrink.

    A column of noise, or of what was compressed before, would cost a pass of the compressor for
    every block. After a block that did not shrink, some of its column are stored as they are: one,
    then two, then four and so on, until one shrinks again.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._failures: dict[int, int] = {}
        self._untried: dict[int, int] = {}

    def block(self, kind: BlockKind, payload: bytes, column: int = -1) -> bytes:
        """Return a block; `column` is -1 for the keys."""
        if self._untried.get(column):
            self._untried[column] -= 1
            return encode_block(kind, payload, Codec.NONE)
        made = encode_block(kind, payload, self._codec)
        shrinks = made[CODEC_AT] != Codec.NONE
        failures = 0 if shrinks else self._failures.get(column, 0) + 1
        self._failures[column] = failures
        self._untried[column] = 0 if shrinks else min((1 << failures) // 2, UNTRIED_MAX)
        return made


def decode_block(data: Buffer, kind: BlockKind, name: str, offset: int) -> Buffer:
    """Return the payload of the block that `data` is, from its first to its last byte."""
    left = len(data) - HEAD.size
    if left < 0:
        raise corrupt(name, offset, f"{HEAD.size} bytes expected, {len(data)} are left")
    offset += HEAD.size
    length, expected, found_kind, codec, zero, raw_length = HEAD.unpack_from(data)
    if length + -length % ALIGNMENT != left:
        raise corrupt(name, offset, f"block of {length} bytes in a place of {left}")
    if crc32c(data[CHECKED_FROM:]) != expected:
        raise corrupt(name, offset, "checksum of the block does not match")
    if found_kind != kind or zero or codec not in CODECS:
        what = f"block of kind {found_kind}, codec {codec}; kind {kind.value} was expected"
        raise corrupt(name, offset, what)
    if raw_length > length * RATIO_MAX + RATIO_SLACK_BYTES:
        raise corrupt(name, offset, f"block of {length} bytes claims to hold {raw_length}")
    payload = memoryview(data)[HEAD.size : HEAD.size + length]
    if codec == Codec.NONE:
        return payload
    try:
        raw: bytes = _compressors[codec].decompress(payload, raw_length, asbytes=True)
    except (OSError, ValueError) as error:
        raise corrupt(name, offset, f"block does not decompress: {error}") from error
    return raw


def _compress(payload: bytes, codec: Codec) -> tuple[Codec, bytes]:
    if codec == Codec.NONE or not payload:
        return Codec.NONE, payload
    stored: bytes = _compressors[codec].compress(payload, asbytes=True)
    if len(payload) > len(stored) * RATIO_MAX + RATIO_SLACK_BYTES:
        return _compress(payload, Codec.LZ4)  # which never shrinks beyond 1 in 255
    saves = len(payload) - len(stored) >= max(1, len(payload) // SAVED_MIN)
    return (codec, stored) if saves else (Codec.NONE, payload)
