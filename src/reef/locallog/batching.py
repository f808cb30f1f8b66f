"""Entries of one append as frames: in pieces that are joined once.

Any codec gives bytes entry by entry, each of which gets a frame. Appends of many entries by the
format's own codec spend their time there, one Python call after the other; so entries that have
term, type and shape in common, as those of a batch mostly do, are put together by columns: all
heads, all indexes, all data. The bytes are the same.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

from reef.errors import InvalidInputError
from reef.locallog.codec import BinaryCodec, EntryCodec
from reef.locallog.entry import LogEntry
from reef.locallog.frames import ENTRY_BYTES_MAX, FRAME, FRAME_BYTES, PADS, FrameType
from reef.locallog.varint import uvarint, uvarints

__all__ = ["Framed", "frame_all", "frame_entries"]

LOW_BITS = [bytes([bits | 128]) for bits in range(128)]
"""The first byte of a number that has more."""
NO_EXTENSIONS = uvarint(0)
TIME_BYTES = 15
COLUMNS_MIN = 4
"""Entries from which on columns pay off."""
SHARING_MIN = 4
"""Each length must be there so many times on average: tables of all lengths are made first."""
SMALL_BYTES = ENTRY_BYTES_MAX - 64
"""Data that is an entry of legal size, whatever is around it."""


class Framed(NamedTuple):
    """Frames of entries, in pieces."""

    pieces: list[bytes]
    sizes: list[int]
    """Of each entry's frame, with its padding."""


def frame_entries(codec: EntryCodec, entries: Sequence[LogEntry]) -> Framed:
    """Return the frames of entries whose indexes go on one after the other."""
    if type(codec) is BinaryCodec and len(entries) >= COLUMNS_MIN:
        framed = _by_columns(entries)
        if framed is not None:
            return framed
    payloads = [codec.encode(entry) for entry in entries]
    if max(map(len, payloads)) > ENTRY_BYTES_MAX:
        raise InvalidInputError(f"an entry has at most {ENTRY_BYTES_MAX} bytes when encoded")
    return frame_all(payloads)


def frame_all(payloads: Sequence[bytes]) -> Framed:
    """Return the frames of entries that are encoded already."""
    framed = Framed([], [])
    for payload in payloads:
        length = len(payload)
        framed.pieces.extend((_head(length), payload, PADS[length & 7]))
        framed.sizes.append(_size(length))
    return framed


def _by_columns(entries: Sequence[LogEntry]) -> Framed | None:
    """Return the frames of entries that are alike; None if they are not."""
    first, last = entries[0].index, entries[-1].index
    term, kind = entries[0].term, entries[0].type
    if not all([e.term == term and e.type == kind and not e.extensions for e in entries]):
        return None
    data = [entry.data for entry in entries]
    if set(map(type, data)) != {bytes}:
        return None
    times = [entry.appended_at.raw for entry in entries]
    lengths = list(map(len, data))
    width = len(uvarint(first))
    if width == 1 or len(uvarint(last)) != width or set(map(len, times)) != {TIME_BYTES}:
        return None
    different = set(lengths)
    if max(lengths) > SMALL_BYTES or len(different) * SHARING_MIN > len(entries):
        return None
    numbers = {length: uvarints(term, kind, length) for length in different}
    payloads = {n: width + len(numbers[n]) + n + len(NO_EXTENSIONS) + TIME_BYTES for n in different}
    columns = (
        map({n: _head(payloads[n]) for n in different}.__getitem__, lengths),
        _indexes(first, last),
        map(numbers.__getitem__, lengths),
        data,
        repeat(NO_EXTENSIONS, len(entries)),
        times,
        map({n: PADS[payloads[n] & 7] for n in different}.__getitem__, lengths),
    )
    sizes = list(map({n: _size(payloads[n]) for n in different}.__getitem__, lengths))
    return Framed(list(chain.from_iterable(zip(*columns, strict=True))), sizes)


def _indexes(first: int, last: int) -> list[bytes]:
    """Return indexes from 128 on as bytes; those in a row differ in their first byte only."""
    coded: list[bytes] = []
    for above in range(first >> 7, (last >> 7) + 1):
        low, high = max(first, above << 7) & 127, min(last, above << 7 | 127) & 127
        end = uvarint(above << 7)[1:]
        coded += [bits + end for bits in LOW_BITS[low : high + 1]]
    return coded


def _head(length: int) -> bytes:
    return FRAME.pack(FrameType.ENTRY, length)


def _size(length: int) -> int:
    return FRAME_BYTES + length + (-length & 7)
