"""What rotations and truncations make of a log's state: pure functions.

Each returns the state that one commit of the meta store makes true. Files follow: a segment
that is new in the state is created after the commit, one that is gone from it is deleted.
"""

from dataclasses import dataclass

import msgspec

from reef.errors import InvalidInputError
from reef.locallog.metastore import UNSEALED, LogState, SegmentInfo

__all__ = ["NewTail", "plan_rotation", "plan_tail", "plan_truncation", "without_tail"]


@dataclass(frozen=True, slots=True)
class NewTail:
    """What every new segment is given."""

    codec: int
    size_limit: int
    now: str

    def append_to(self, state: LogState, segments: list[SegmentInfo], base_index: int) -> LogState:
        """Return a state of these segments and a new tail."""
        number = state.next_segment_id
        tail = SegmentInfo(
            *(number, base_index, base_index, 0, self.codec, 0, self.now, UNSEALED),
            self.size_limit,
        )
        return LogState(number + 1, (*segments, tail))


def plan_tail(state: LogState, base_index: int, new: NewTail) -> LogState:
    """Return the state with a tail, which it lacks."""
    return new.append_to(state, list(state.segments or ()), base_index)


def without_tail(state: LogState) -> LogState:
    """Return the state before its empty tail, which is about to be replaced."""
    return msgspec.structs.replace(state, segments=(state.segments or ())[:-1])


def plan_rotation(state: LogState, last_index: int, index_start: int, new: NewTail) -> LogState:
    """Return the state after the tail was sealed: it is closed, and a new one follows."""
    *older, tail = state.segments or ()
    return new.append_to(state, [*older, _seal(tail, last_index, index_start, new)], last_index + 1)


def _seal(tail: SegmentInfo, last_index: int, index_start: int, new: NewTail) -> SegmentInfo:
    return msgspec.structs.replace(
        tail, max_index=last_index, index_start=index_start, seal_time=new.now
    )


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is to be done to remove a range."""

    head: bool
    bound: int
    """From the head: the first index that stays. From the tail: the last one."""

    def apply(self, state: LogState, last_index: int, index_start: int, new: NewTail) -> LogState:
        """Return the state after it; `index_start` is where the tail was just sealed, or 0."""
        if self.head:
            return _without_head(state, last_index, self.bound, new)
        return _without_end(state, self.bound, index_start, new)

    def cuts_tail(self, state: LogState) -> bool:
        """Whether the tail stays in part, and must be sealed to say how far."""
        return not self.head and (state.segments or ())[-1].base_index <= self.bound


def plan_truncation(first: int, last: int, low: int, high: int) -> Truncation | None:
    """Return how to remove `low` to `high` from a log of `first` to `last`; None if nothing is.

    >>> plan_truncation(1, 10, 1, 4)
    Truncation(head=True, bound=5)
    >>> plan_truncation(1, 10, 8, 10)
    Truncation(head=False, bound=7)
    """
    if low > high or first == 0 or high < first or low > last:
        return None
    if low <= first:
        return Truncation(head=True, bound=high + 1)
    if high >= last:
        return Truncation(head=False, bound=low - 1)
    raise InvalidInputError(
        f"{low} to {high} lies within the log, which has {first} to {last}",
        hint="Only a log's first or last entries can be removed",
    )


def _without_head(state: LogState, last_index: int, bound: int, new: NewTail) -> LogState:
    ends = ((info, info.max_index if info.sealed else last_index) for info in state.segments or ())
    kept = [info for info, end in ends if end >= bound]
    if not kept:
        return new.append_to(state, [], last_index + 1)
    if bound > kept[0].min_index:
        kept[0] = msgspec.structs.replace(kept[0], min_index=bound)
    return msgspec.structs.replace(state, segments=tuple(kept))


def _without_end(state: LogState, bound: int, index_start: int, new: NewTail) -> LogState:
    kept = [info for info in state.segments or () if info.base_index <= bound]
    last = kept[-1]
    kept[-1] = (
        msgspec.structs.replace(last, max_index=bound)
        if last.sealed
        else _seal(last, bound, index_start, new)
    )
    return new.append_to(state, kept, bound + 1)
