"""What callers hand in, checked before anything is locked or written.

A mistake of the caller's must neither reach the disk nor look like a failure of it: after one of
those a log refuses everything (see `log`).
"""

import operator
import os
from collections.abc import Sequence

from reef.errors import InvalidInputError, Kind
from reef.locallog.batching import Framed, frame_entries
from reef.locallog.codec import EntryCodec
from reef.locallog.entry import LogEntry
from reef.locallog.varint import U64_MAX

__all__ = ["directory", "framed", "stable_key", "stable_value", "whole_number"]

INDEX_MAX = U64_MAX - 2
"""Behind the last entry there is a tail with an index of its own."""


def directory(path: str | bytes | os.PathLike[str]) -> str:
    """Return the path of a directory from the root on; without a name it would be the current."""
    if not os.fspath(path):
        raise InvalidInputError("a log needs the path of a directory", kind=Kind.INVALID_OPTION)
    return os.path.abspath(os.fsdecode(path))


def whole_number(what: str, given: object) -> int:
    """Return an integer, whatever its type: 5.0 in the state would keep it from being read."""
    try:
        return int(operator.index(given))  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInputError(f"{what} is a whole number, not {given!r}") from error


def framed(codec: EntryCodec, entries: Sequence[LogEntry]) -> Framed:
    """Return entries as frames; InvalidInputError if one of them cannot be stored."""
    try:
        _check_indexes(entries)
        return frame_entries(codec, entries)
    except (TypeError, AttributeError) as error:
        raise InvalidInputError(f"this is not what entries are made of: {error}") from error


def _check_indexes(entries: Sequence[LogEntry]) -> None:
    first = whole_number("an index", entries[0].index)
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
