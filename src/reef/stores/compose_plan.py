"""Which parts of an object a service copies by itself, and which are sent.

    asked     | new | range of a, large        | range of b, small | range of c, large  | new |
    planned   | sent: new + head of a | copied | sent: b + head of c | copied           | sent |

A service puts an object together out of parts that must not be small, but for the last one. A
range that is too small to be a part is read and sent; what is sent and too small itself is
filled up with the first bytes of the range that follows. So every byte that does not lie within
a part's minimum of a border is copied without passing through here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reef.stores.base import PIECE_BYTES, Part, Store, check_range

__all__ = ["Copied", "Sent", "Step", "plan", "read_requests", "reading"]


@dataclass(frozen=True, slots=True)
class Copied:
    """A part that the service takes from another object."""

    source: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Sent:
    """A part that is made here, of new bytes and of ranges that are read."""

    pieces: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(map(_size, self.pieces))


Step = Copied | Sent


def plan(
    parts: Sequence[Part], *, part_bytes_min: int, part_bytes: int, copy_bytes_max: int
) -> list[Step]:
    """Return the parts of the object; all but the last have `part_bytes_min` bytes or more."""
    planner = _Planner(part_bytes_min, part_bytes, copy_bytes_max)
    for part in parts:
        planner.add(part)
    return planner.finish()


class _Planner:
    def __init__(self, part_bytes_min: int, part_bytes: int, copy_bytes_max: int) -> None:
        self._min, self._part_bytes, self._copy_max = part_bytes_min, part_bytes, copy_bytes_max
        self._steps: list[Step] = []
        self._pending: list[Part] = []
        self._pending_bytes = 0

    def add(self, part: Part) -> None:
        if isinstance(part, bytes):
            self._send(part)
            return
        source, start, end = part
        check_range(source, start, end)
        if self._pending_bytes:
            missing = max(0, self._min - self._pending_bytes)
            if end - start < missing + self._min:
                self._send(part)
                return
            if missing:
                self._send((source, start, start + missing))
                start += missing
            self._flush()
        if end - start < self._min:
            self._send((source, start, end))
        else:
            self._copy(source, start, end)

    def finish(self) -> list[Step]:
        self._flush()
        return self._steps

    def _copy(self, source: str, start: int, end: int) -> None:
        """Cut evenly: none of the cuts is small."""
        count = -(-(end - start) // self._copy_max)
        cuts = [start + (end - start) * number // count for number in range(count + 1)]
        self._steps += [Copied(source, *span) for span in pairwise(cuts)]

    def _send(self, part: Part) -> None:
        """Gather what is sent, and cut it into parts of `part_bytes`."""
        while part and (room := self._part_bytes - self._pending_bytes) <= _size(part):
            taken, part = _split(part, room)
            self._keep(taken)
            self._flush()
        if part:
            self._keep(part)

    def _keep(self, part: Part) -> None:
        self._pending.append(part)
        self._pending_bytes += _size(part)

    def _flush(self) -> None:
        if self._pending_bytes:
            self._steps.append(Sent(tuple(self._pending)))
        self._pending, self._pending_bytes = [], 0


def reading(store: Store, pieces: Sequence[Part]) -> Iterator[bytes]:
    """Yield the bytes of what is sent, a bounded piece at a time."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        source, start, end = piece
        for at in range(start, end, PIECE_BYTES):
            yield store.get_range(source, at, min(at + PIECE_BYTES, end))


def read_requests(pieces: Sequence[Part]) -> tuple[int, int]:
    """Return how many requests `reading` sends, and for how many bytes."""
    sizes = [_size(piece) for piece in pieces if not isinstance(piece, bytes)]
    return sum(-(-size // PIECE_BYTES) for size in sizes), sum(sizes)


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[2] - part[1]


def _split(part: Part, at: int) -> tuple[Part, Part]:
    """Return the first `at` bytes, and the rest; an empty rest is b""."""
    if isinstance(part, bytes):
        return part[:at], part[at:]
    source, start, end = part
    rest: Part = (source, start + at, end) if start + at < end else b""
    return (source, start, start + at), rest
