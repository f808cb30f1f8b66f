"""Primitives of all formats: checked reads of bytes, frames, blocks.

All numbers are little-endian. A `ByteReader` never reads past its end: missing bytes are
damage, reported with the object and the offset.

**Frames** are the unit that WAL objects are built from:

    0        4        8                  8 + length, padded to 8
    +--------+--------+----------+-------+
    | length | crc32c | payload… | zeros |
    +--------+--------+----------+-------+

The checksum covers the payload. A frame that ends past the object is damage: objects are
written whole, so a short one was never a crash.

**Blocks** are the unit that segments are built from, compressed and checked as a whole:

    0        4        8      9       10     12           16
    +--------+--------+------+-------+------+------------+----------+-------+
    | length | crc32c | kind | codec | zero | raw length | payload… | zeros |
    +--------+--------+------+-------+------+------------+----------+-------+

`length` is that of the stored payload; the checksum covers all bytes after it, padding
included. Readers skip kinds that they do not know. The raw length is bounded by the stored
one, so that a damaged or hostile block cannot request more memory than its object's size
allows.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NoReturn

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef import kernel
from reef.errors import UNDECODABLE, CorruptionError, UnsupportedFormatError

Buffer = bytes | memoryview
ALIGNMENT = 8
U32 = struct.Struct("<I")
ZEROS = [bytes(count) for count in range(ALIGNMENT)]


def crc32c(data: Buffer) -> int:
    """Return the Castagnoli checksum."""
    # The extension takes no memoryview; an array of its bytes is no copy.
    checksum: int = google_crc32c.value(data if type(data) is bytes else _bytes_of(data))
    return checksum


def _bytes_of(data: Buffer) -> "npt.NDArray[np.uint8] | bytes":
    return np.frombuffer(data, np.uint8) if len(data) else b""


def crc32c_extend(checksum: int, data: Buffer) -> int:
    """Return the checksum of the bytes so far, followed by `data`."""
    extended: int = google_crc32c.extend(checksum, data if type(data) is bytes else _bytes_of(data))
    return extended


def padding(length: int) -> bytes:
    """Return the zeros after `length` bytes that align the next ones."""
    return ZEROS[-length % ALIGNMENT]


def corrupt(name: str, offset: int, problem: str) -> CorruptionError:
    """Return the error for bytes that contradict themselves."""
    return CorruptionError(f"object {name}, offset {offset}: {problem}", object=name, offset=offset)


def unsupported(name: str, kind: str, version: int, newest: int) -> UnsupportedFormatError:
    """Return the error for intact bytes of a newer release."""
    return UnsupportedFormatError(
        f"object {name} is a {kind} of format {version}, this release reads up to {newest}",
        hint="Upgrade Reef",
        object=name,
        version=version,
    )


class ByteReader:
    """Walks over an object's bytes; `base` is where they begin in the object."""

    def __init__(self, data: Buffer, name: str, base: int = 0) -> None:
        self.data = memoryview(data)
        self.name = name
        self.base = base
        self.position = 0

    @property
    def offset(self) -> int:
        """Its position, counted from the object's beginning."""
        return self.base + self.position

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, length: int) -> memoryview:
        if length > self.left:
            self.fail(f"expected {length} bytes, found {self.left}")
        taken = self.data[self.position : self.position + length]
        self.position += length
        return taken

    def u32(self) -> int:
        value: int = U32.unpack(self.take(4))[0]
        return value

    def expect(self, expected: bytes, part: str) -> None:
        found = bytes(self.take(len(expected)))
        if found != expected:
            self.position -= len(expected)
            self.fail(f"{part}: expected {expected!r}, found {found!r}")

    def align(self) -> None:
        """Step over padding, which must be zero: every bit of an object is accounted for."""
        zeros = self.take(-self.offset % ALIGNMENT)
        if any(zeros):
            self.fail("padding is not zero")

    def end(self) -> None:
        if self.left:
            self.fail(f"{self.left} bytes too many")

    def fail(self, problem: str) -> NoReturn:
        raise corrupt(self.name, self.offset, problem)


def decode_msgpack(data: Buffer, kind: type, name: str, offset: int) -> msgspec.Struct:
    """Decode a checked payload; a mismatch is a writer's bug or damage."""
    try:
        value: msgspec.Struct = msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise corrupt(name, offset, f"not a {kind.__name__}: {error}") from error
    return value


def shared_bytes(left: bytes, right: bytes) -> int:
    """Return the length of the common beginning.

    >>> shared_bytes(b"reef", b"reed")
    3
    """
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


HEAD = Struct("<II")
FRAME_HEAD_BYTES = HEAD.size


def encode_frame(payload: Buffer) -> bytes:
    """Return a frame around `payload`."""
    length = len(payload)
    checksum = crc32c(payload)
    return b"".join((HEAD.pack(length, checksum), payload, ZEROS[-length % ALIGNMENT]))


def read_frame(cursor: ByteReader, part: str) -> memoryview:
    """Return the next frame's payload, checked."""
    length, expected = cursor.u32(), cursor.u32()
    if length > cursor.left:
        cursor.fail(f"{part} has {length} bytes, only {cursor.left} are left")
    start = cursor.offset
    payload = cursor.take(length)
    if crc32c(payload) != expected:
        cursor.position -= length
        cursor.fail(f"checksum of {part} does not match (at {start})")
    cursor.align()
    return payload


BLOCK_HEAD = struct.Struct("<IIBBHI")
START, CHECKED = struct.Struct("<II"), struct.Struct("<BBHI")
BLOCK_HEAD_BYTES = BLOCK_HEAD.size
CHECKED_FROM = 8
RATIO_MAX = 1024
RATIO_SLACK_BYTES = 64 * 1024
ZSTD_LEVEL = 1
"""Higher levels cost far more time than they save bytes on keys and small values."""
SAVED_MIN = 8
"""Compression that saves less than an eighth costs every reader more than it is worth."""
ZSTD_SHARE_MAX = 0.75
"""Zstandard takes ten times as long to decompress a page: only if it is this much smaller."""
ZSTD_SAVED_MIN_BYTES = 1024
"""Each block of Zstandard costs a scan some 15 µs, in which a bucket delivers about 1 KiB."""
UNTRIED_MAX = 15


class BlockKind(IntEnum):
    """The contents of a block."""

    KEYS = 1
    COLUMN = 2
    RANGE_TOMBSTONES = 3
    FILTER = 4
    INDEX = 5
    MANIFEST = 6
    PAGES = 7
    INDEX_DATA = 8
    INDEX_DIRECTORY = 9
    TERMS = 10


class Codec(IntEnum):
    """The compression of a payload."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


CODECS = frozenset(codec.value for codec in Codec)

_compressors: dict[int, pa.Codec] = {
    Codec.LZ4: pa.Codec("lz4_raw"),
    Codec.ZSTD: pa.Codec("zstd", ZSTD_LEVEL),
}


def encode_block(kind: BlockKind, payload: bytes, codec: Codec = Codec.ZSTD) -> bytes:
    """Return a block; stored uncompressed if compression does not save an eighth."""
    return _seal(kind, len(payload), *_compress(payload, codec))


def _seal(kind: BlockKind, raw_length: int, codec: Codec, stored: bytes) -> bytes:
    length = len(stored)
    checked = b"".join((CHECKED.pack(kind, codec, 0, raw_length), stored, padding(length)))
    return START.pack(length, crc32c(checked)) + checked


class Packer:
    """Encodes the blocks of one segment with the cheapest codec for each of its columns.

    A segment with codec zstd uses lz4 for keys, which every read decompresses, and for columns
    whose blocks zstd makes little smaller, by share or in bytes. The choice holds for the next
    blocks of the column. A column that does not shrink (noise, compressed data) is stored
    uncompressed and tried again after one block, then two, then four and so on, until one shrinks.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._chosen: dict[int, Codec] = {}
        self._blocks_left: dict[int, int] = {}
        """Until the codec of a column is chosen again."""
        self._failures: dict[int, int] = {}

    def block(self, kind: BlockKind, payload: bytes, column: int = -1) -> bytes:
        """Return a block; `column` is -1 for the keys."""
        left = self._blocks_left.get(column, 0)
        if left:
            self._blocks_left[column] = left - 1
            codec, stored = _compress(payload, self._chosen[column])
        else:
            codec, stored = self._choose(payload, column)
        return _seal(kind, len(payload), codec, stored)

    def _choose(self, payload: bytes, column: int) -> tuple[Codec, bytes]:
        codec, stored = _compress(payload, self._codec if column >= 0 else self._key_codec())
        if codec is Codec.ZSTD:
            quick, larger = _compress(payload, Codec.LZ4)
            if not _is_worth_zstd(len(stored), len(larger)):
                codec, stored = quick, larger
        failures = 0 if codec is not Codec.NONE else self._failures.get(column, 0) + 1
        self._failures[column], self._chosen[column] = failures, codec
        untried = (1 << failures) // 2 if failures else UNTRIED_MAX
        self._blocks_left[column] = min(untried, UNTRIED_MAX)
        return codec, stored

    def _key_codec(self) -> Codec:
        return Codec.LZ4 if self._codec is Codec.ZSTD else self._codec


def _is_worth_zstd(size: int, otherwise: int) -> bool:
    """Whether a block is so much smaller than with LZ4, or uncompressed, that scans are faster."""
    return size <= ZSTD_SHARE_MAX * otherwise and otherwise - size >= ZSTD_SAVED_MIN_BYTES


def decode_block(data: Buffer, kind: BlockKind, name: str, offset: int) -> Buffer:
    """Return the payload of the block that `data` consists of."""
    if (native := kernel.native) is not None:
        decoded: bytes | None = native.decode_block(data, kind)
        if decoded is not None:
            return decoded
    return _decode_block(data, kind, name, offset)


def decode_block_bytes(data: Buffer, kind: BlockKind, name: str, offset: int) -> bytes:
    """Return the same as bytes of their own: a view would keep all bytes that were read with it."""
    if (native := kernel.native) is not None:
        decoded: bytes | None = native.decode_block(data, kind)
        if decoded is not None:
            return decoded
    return bytes(_decode_block(data, kind, name, offset))


def decode_blocks(
    bodies: list[Buffer],
    ranges: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
    kinds: bytes,
) -> list[bytes | None]:
    """Return the payloads of blocks at these spans, from ranges of the object that were read.

    None for each block that `decode_block` has to decode.
    """
    if (native := kernel.native) is None:
        return [None] * len(spans)
    places = np.array(spans, np.int64).reshape(-1, 2)
    bases = np.array([start for start, _ in ranges], np.int64)
    payloads: list[bytes | None] = native.decode_blocks(
        bodies, bases, places[:, 0].copy(), places[:, 1].copy(), kinds
    )
    return payloads


def _decode_block(data: Buffer, kind: BlockKind, name: str, offset: int) -> Buffer:
    left = len(data) - BLOCK_HEAD.size
    if left < 0:
        raise corrupt(name, offset, f"expected {BLOCK_HEAD.size} bytes, found {len(data)}")
    offset += BLOCK_HEAD.size
    length, expected, found_kind, codec, zero, raw_length = BLOCK_HEAD.unpack_from(data)
    if length + -length % ALIGNMENT != left:
        raise corrupt(name, offset, f"block of {length} bytes in a place of {left}")
    payload = memoryview(data)[CHECKED_FROM:]
    if google_crc32c.value(np.frombuffer(payload, np.uint8)) != expected:
        raise corrupt(name, offset, "checksum of the block does not match")
    if found_kind != kind or zero or codec not in CODECS:
        problem = f"expected a block of kind {int(kind)}, found kind {found_kind}, codec {codec}"
        raise corrupt(name, offset, problem)
    if raw_length > length * RATIO_MAX + RATIO_SLACK_BYTES:
        raise corrupt(name, offset, f"block of {length} bytes claims to hold {raw_length}")
    payload = payload[BLOCK_HEAD.size - CHECKED_FROM :][:length]
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
