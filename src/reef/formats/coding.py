"""Reading bytes without trusting them, and small things that all formats share.

All numbers are little-endian. A `Cursor` never reads past its end: what is missing is
damage, told with the object and the offset.
"""

import struct
from typing import NoReturn

import google_crc32c
import msgspec

from reef.errors import UNDECODABLE, CorruptionError, UnsupportedFormatError

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "Cursor",
    "corrupt",
    "crc32c",
    "crc32c_extend",
    "padding",
    "shared_bytes",
    "unsupported",
]

Buffer = bytes | memoryview
ALIGNMENT = 8
U32 = struct.Struct("<I")


def crc32c(data: Buffer) -> int:
    """Return the Castagnoli checksum."""
    checksum: int = google_crc32c.value(data if type(data) is bytes else bytes(data))
    return checksum


def crc32c_extend(checksum: int, data: Buffer) -> int:
    """Return the checksum of what was covered so far, followed by `data`."""
    extended: int = google_crc32c.extend(checksum, bytes(data))
    return extended


def padding(length: int) -> bytes:
    """Return the zeros that align what follows `length` bytes."""
    return bytes(-length % ALIGNMENT)


def corrupt(name: str, offset: int, what: str) -> CorruptionError:
    """Return the error for bytes that contradict themselves."""
    return CorruptionError(f"object {name}, offset {offset}: {what}", object=name, offset=offset)


def unsupported(name: str, what: str, version: int, newest: int) -> UnsupportedFormatError:
    """Return the error for sound bytes of a newer release."""
    return UnsupportedFormatError(
        f"object {name} is a {what} of format {version}, this release reads up to {newest}",
        hint="Upgrade Reef",
        object=name,
        version=version,
    )


class Cursor:
    """Walks over an object's bytes; `base` is where they begin in the object."""

    def __init__(self, data: Buffer, name: str, base: int = 0) -> None:
        self.data = memoryview(data)
        self.name = name
        self.base = base
        self.position = 0

    @property
    def offset(self) -> int:
        """Where it stands, counted from the object's beginning."""
        return self.base + self.position

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, length: int) -> memoryview:
        if length > self.left:
            self.fail(f"{length} bytes expected, {self.left} are left")
        taken = self.data[self.position : self.position + length]
        self.position += length
        return taken

    def u32(self) -> int:
        value: int = U32.unpack(self.take(4))[0]
        return value

    def expect(self, expected: bytes, what: str) -> None:
        found = bytes(self.take(len(expected)))
        if found != expected:
            self.position -= len(expected)
            self.fail(f"{what} is {found!r}, expected {expected!r}")

    def align(self) -> None:
        """Step over padding, which must be zero: every bit of an object is accounted for."""
        zeros = self.take(-self.offset % ALIGNMENT)
        if any(zeros):
            self.fail("padding is not zero")

    def end(self) -> None:
        if self.left:
            self.fail(f"{self.left} bytes too many")

    def fail(self, what: str) -> NoReturn:
        raise corrupt(self.name, self.offset, what)


def decode_msgpack(data: Buffer, kind: type, name: str, offset: int) -> msgspec.Struct:
    """Decode a checked payload; a mismatch is a writer's bug or damage, told alike."""
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
