"""Batches that lie behind damage, where a scan does not get: proof that it was no crash.

A scan goes from frame to frame by their lengths. One length that is wrong leads it astray, and
everything behind looks like what a torn batch has left. But a crash tears the last batch only.
So before anything is dropped, whole batches are looked for there: commits stand at multiples of
eight, and what lies between two of them has the checksum that the second one says. Such a batch
was written after the one before it was acknowledged. To drop it would lose what was promised (H27).

A torn batch may hold a log in its payload, whose batches look the same. But the first of those
has the wrong index: that of a batch which belongs here is above the last one that counts, and not
by more than there is room for in between. Such a log is passed over as a whole.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice

from reef.locallog.frames import FRAME, FRAME_BYTES, Frame, FrameType, Read, frames

__all__ = ["stray_batch"]

COMMIT = re.compile(rb"\x03\0\0\0")
MAYBE = (bytes([FrameType.ENTRY]), b"")
"""What an entry begins with; or it lies in the next window."""
WINDOW_BYTES = 1 << 20
TRIES_MAX = 10_000
"""Places at which a batch is looked for: a payload may be full of what looks like commits."""


def stray_batch(
    read: Read, size: int, start: int, end: int, is_later: Callable[[Frame, int], bool]
) -> int | None:
    """Return where a whole batch begins behind `start`, if there is one.

    `end` is where the scan ended: perhaps a commit whose header is damaged. `is_later` says
    whether an entry may be one of this log that comes so many bytes behind `start`.
    """
    passed = start
    for place in islice(_places(read, size, start, end), TRIES_MAX):
        first = _first_entry(read, size, place) if place >= passed else None
        if first is None:
            continue
        if is_later(first, place - start):
            return place
        passed = _log_end(read, size, place)
    return None


def _places(read: Read, size: int, start: int, end: int) -> Iterator[int]:
    """Yield where batches may begin: behind what looks like a commit, and before an entry."""
    if _is_entry(read, size, end + FRAME_BYTES):
        yield end + FRAME_BYTES
    for offset in range(start, size, WINDOW_BYTES):
        data = read(min(WINDOW_BYTES, size - offset), offset)
        for match in COMMIT.finditer(data):
            place = offset + match.start() + FRAME_BYTES
            behind = data[place - offset : place - offset + 1]
            if place % FRAME_BYTES == 0 and behind in MAYBE and _is_entry(read, size, place):
                yield place


def _is_entry(read: Read, size: int, place: int) -> bool:
    head = read(FRAME_BYTES, place) if place + FRAME_BYTES <= size else b""
    if len(head) < FRAME_BYTES:
        return False
    kind, length = FRAME.unpack(head)
    return bool(kind == FrameType.ENTRY and place + FRAME_BYTES + length <= size)


def _first_entry(read: Read, size: int, start: int) -> Frame | None:
    """Return the first entry of a batch that begins there, if the batch is whole."""
    first: Frame | None = None
    for frame in frames(read, size, start):
        if frame.type == FrameType.COMMIT:
            return first if frame.valid else None
        if frame.type == FrameType.ENTRY:
            first = first or frame
    return None


def _log_end(read: Read, size: int, start: int) -> int:
    """Return where the last whole batch ends of those that follow one another from there."""
    end = start
    for frame in frames(read, size, start):
        if frame.type == FrameType.COMMIT:
            if not frame.valid:
                break
            end = frame.end
    return end
