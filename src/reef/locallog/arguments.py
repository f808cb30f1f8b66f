"""What callers hand in, checked before anything is locked or written.

A mistake of the caller's must neither reach the disk nor look like a failure of it: after one of
those a log refuses everything (see `log`).
"""

from collections.abc import Sequence

from reef.errors import InvalidInputError
from reef.locallog.batching import Framed, frame_entries
from reef.locallog.codec import EntryCodec
from reef.locallog.entry import LogEntry
from reef.locallog.varint import U64_MAX

__all__ = ["framed", "stable_key", "stable_value"]

INDEX_MAX = U64_MAX - 2
"""Behind the last entry there is a tail with an index of its own."""


def framed(codec: EntryCodec, entries: Sequence[LogEntry]) -> Framed:
    """Return entries as frames; InvalidInputError if one of them cannot be stored."""
    try:
        _check_indexes(entries)
        return frame_entries(codec, entries)
    except (TypeError, AttributeError) as error:
        raise InvalidInputError(f"this is not what entries are made of: {error}") from error


def _check_indexes(entries: Sequence[LogEntry]) -> None:
    first = entries[0].index
    if first + len(entries) - 1 > INDEX_MAX:
        raise InvalidInputError(f"an entry's index is at most {INDEX_MAX}, this begins at {first}")
    for place, entry in enumerate(entries):
        if entry.index != first + place or first < 1:
            raise InvalidInputError(
                f"entry {entry.index} stands where {max(first, 1) + place} is expected",
                hint="Indexes begin at 1 or above, and leave none out",
            )


def stable_key(key: bytes | str) -> bytes:
    """Return a key's bytes; text is UTF-8."""
    return key.encode() if isinstance(key, str) else _bytes("key", key)


def stable_value(value: bytes | None) -> bytes | None:
    """Return a value's bytes, or None."""
    return None if value is None else _bytes("value", value)


def _bytes(what: str, given: object) -> bytes:
    if not isinstance(given, bytes | bytearray | memoryview):
        raise InvalidInputError(f"a {what} is bytes, not {type(given).__name__}")
    return bytes(given)
