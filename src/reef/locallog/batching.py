"""Entries of one append as frames: in pieces that are joined once.

Any codec gives bytes entry by entry, each of which gets a frame. Appends of many entries by the
format's own codec spend their time there, one Python call after the other; so entries that have
term, type and shape in common, as those of a batch mostly do, are put together by columns: all
heads, all indexes, all data. The bytes are the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import astuple

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
    count = len(entries)
    columns = zip(*map(astuple, entries), strict=False)  # a subclass may have more
    indexes, terms, kinds, data, extensions, times, *_ = columns
    width = len(uvarint(indexes[0]))
    alike = (
        terms.count(terms[0]) == count
        and kinds.count(kinds[0]) == count
        and extensions.count(b"") == count
        and set(map(type, data)) == {bytes}
        and width == len(uvarint(indexes[-1])) > 1
    )
    if not alike:
        return None
    raws = [time.raw for time in times]
    lengths = list(map(len, data))
    one_time, one_length = raws.count(raws[0]) == count, lengths.count(lengths[0]) == count
    different = {lengths[0]} if one_length else set(lengths)
    if max(different) > SMALL_BYTES or len(different) * SHARING_MIN > count:
        return None
    if not one_time and set(map(len, raws)) != {TIME_BYTES}:
        return None
    around = width + len(NO_EXTENSIONS) + len(raws[0])
    shapes = {n: _Shape.of(n, around, terms[0], kinds[0]) for n in different}
    coded = _indexes(indexes[0], indexes[-1])
    if one_time and one_length:
        return _of_one_shape(shapes[lengths[0]], raws[0], coded, data)
    return _of_several([shapes[length] for length in lengths], raws, coded, data)


def _of_one_shape(
    shape: "_Shape", time: bytes, indexes: list[bytes], data: Sequence[bytes]
) -> Framed:
    count = len(data)
    pieces = [shape.head, b"", shape.numbers, b"", NO_EXTENSIONS + time + shape.pad] * count
    pieces[1::5], pieces[3::5] = indexes, data
    return Framed(pieces, [shape.size] * count)


def _of_several(
    shapes: "list[_Shape]", times: list[bytes], indexes: list[bytes], data: Sequence[bytes]
) -> Framed:
    pieces = [NO_EXTENSIONS] * (7 * len(data))
    pieces[0::7] = [shape.head for shape in shapes]
    pieces[1::7] = indexes
    pieces[2::7] = [shape.numbers for shape in shapes]
    pieces[3::7] = data
    pieces[5::7] = times
    pieces[6::7] = [shape.pad for shape in shapes]
    return Framed(pieces, [shape.size for shape in shapes])


class _Shape(NamedTuple):
    """What entries with data of one length have in common."""

    head: bytes
    numbers: bytes
    pad: bytes
    size: int

    @classmethod
    def of(cls, length: int, around: int, term: int, kind: int) -> "_Shape":
        numbers = uvarints(term, kind, length)
        payload = around + len(numbers) + length
        return cls(_head(payload), numbers, PADS[payload & 7], _size(payload))


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
