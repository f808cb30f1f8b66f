"""Reading bytes without trusting them, and small things that all formats share.

All numbers are little-endian. A `ByteReader` never reads past its end: missing bytes are
damage, reported with the object and the offset.

Frames: the unit that WAL objects are built from.

    0        4        8                  8 + length, padded to 8
    +--------+--------+----------+-------+
    | length | crc32c | payload… | zeros |
    +--------+--------+----------+-------+

The checksum covers the payload. A frame that ends past the object is damage: objects are
written whole, so a short one was never a crash.
"""

import struct
from struct import Struct
from typing import NoReturn

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

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
