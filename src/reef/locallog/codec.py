"""Entries as bytes: the binary codec of the format, and the place for others.

    uvarint index, uvarint term, uvarint type,
    uvarint length + data, uvarint length + extensions, time (15 or 16 bytes)

A log says in every segment which codec wrote it. Whoever brings another one (encryption,
compression) gives it a number of its own, at or above `CUSTOM_CODEC_MIN`.
"""

from functools import lru_cache
from typing import Protocol

from reef.errors import CorruptionError, InvalidInputError
from reef.locallog.entry import EntryTime, LogEntry

__all__ = [
    "BINARY",
    "CUSTOM_CODEC_MIN",
    "BinaryCodec",
    "EntryCodec",
    "decode_entry",
    "uvarint",
    "uvarints",
]

CUSTOM_CODEC_MIN = 1 << 16
"""Numbers below are reserved, as they are in the Go library."""
U64_MAX = (1 << 64) - 1
UVARINT_BYTES_MAX = 10


class EntryCodec(Protocol):
    """Turns an entry into bytes and back."""

    @property
    def id(self) -> int:
        """What stands in segments and meta store; another id is another format."""

    def encode(self, entry: LogEntry) -> bytes: ...

    def decode(self, data: bytes) -> LogEntry:
        """Return the entry; any error says that `encode` never makes such bytes."""


class BinaryCodec:
    """The codec of the format: what the Go library writes."""

    id = 1

    def encode(self, entry: LogEntry) -> bytes:
        data, extensions = entry.data, entry.extensions
        return b"".join(
            (
                uvarint(entry.index),
                uvarints(entry.term, entry.type, len(data)),
                data,
                uvarints(len(extensions)),
                extensions,
                entry.appended_at.raw,
            )
        )

    def decode(self, data: bytes) -> LogEntry:
        try:
            index, at = _read_uvarint(data, 0)
            term, at = _read_uvarint(data, at)
            kind, at = _read_uvarint(data, at)
            length, at = _read_uvarint(data, at)
            body = data[at : at + length]
            length_found = len(body)
            at += length
            extension_length, at = _read_uvarint(data, at)
            extensions = data[at : at + extension_length]
            appended_at = EntryTime(data[at + extension_length :])
        except (IndexError, InvalidInputError) as error:
            raise CorruptionError(f"{len(data)} bytes are not an entry: {error}") from error
        if length_found != length or len(extensions) != extension_length:
            raise CorruptionError(f"{len(data)} bytes are not an entry: lengths go beyond them")
        return LogEntry(index, term, kind, body, extensions, appended_at)


BINARY = BinaryCodec()


def decode_entry(codec: EntryCodec, data: bytes) -> LogEntry:
    """Return an entry, whatever the codec; CorruptionError if it is none."""
    try:
        return codec.decode(data)
    except CorruptionError:
        raise
    except Exception as error:
        raise CorruptionError(f"{len(data)} bytes are not an entry: {error!r}") from error


@lru_cache(maxsize=1024)
def uvarints(*numbers: int) -> bytes:
    """Return numbers in a row; of those that entries have, few are different."""
    return b"".join(map(uvarint, numbers))


def uvarint(number: int) -> bytes:
    """Return seven bits a byte, the lowest first.

    >>> uvarint(300).hex()
    'ac02'
    """
    if not 0 <= number <= U64_MAX:
        raise InvalidInputError(f"{number} does not fit into 64 bits without a sign")
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _read_uvarint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where the next one begins."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    number, shift, start = byte & 127, 7, at
    while True:
        at += 1
        byte = data[at]
        number |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if at - start >= UVARINT_BYTES_MAX - 1:
            raise InvalidInputError(f"the number at {start} does not end")
    if number > U64_MAX:
        raise InvalidInputError(f"the number at {start} does not fit into 64 bits")
    return number, at + 1
