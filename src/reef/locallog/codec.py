"""Codecs: what stands between an entry and its bytes, of which the format has one.

A log says in every segment which codec wrote it. Whoever brings another one (encryption,
compression) gives it a number of its own, at or above `CUSTOM_CODEC_MIN`.
"""

from typing import Protocol

from reef.errors import CorruptionError, InvalidInputError, Kind
from reef.locallog.entry import LogEntry
from reef.locallog.varint import U64_MAX

__all__ = ["BINARY", "CUSTOM_CODEC_MIN", "BinaryCodec", "EntryCodec", "check_id", "decode_entry"]

CUSTOM_CODEC_MIN = 1 << 16
"""Numbers below are reserved, as they are in the Go library."""


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
        return entry.encode()

    def decode(self, data: bytes) -> LogEntry:
        return LogEntry.decode(data)


BINARY = BinaryCodec()


def check_id(codec: EntryCodec) -> None:
    """Raise if a codec's number does not fit where it is written."""
    if not isinstance(codec.id, int) or not 0 <= codec.id < U64_MAX:
        raise InvalidInputError(
            f"a codec's id is 0 to {U64_MAX - 1}, not {codec.id}", kind=Kind.INVALID_OPTION
        )


def decode_entry(codec: EntryCodec, data: bytes) -> LogEntry:
    """Return an entry, whatever the codec; CorruptionError if it is none."""
    try:
        return codec.decode(data)
    except CorruptionError:
        raise
    except Exception as error:
        raise CorruptionError(f"{len(data)} bytes are not an entry: {error!r}") from error
