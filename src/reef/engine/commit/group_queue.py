"""Batches that wait to be sent, and which of them go together.

A lone batch goes out at once. While others are in flight, batches gather until the group
window closes or the group is large enough. A conditional batch is a barrier: it waits until
nothing is in flight and goes alone. A large batch goes alone too, so that it does not hold up
small ones.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from reef.config import WriterSettings
from reef.engine.commit.flights import Pending

__all__ = ["GroupQueue"]


class GroupQueue:
    """First in, first out. Guarded by the committer's lock."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._waiting: deque[Pending] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._waiting)

    def add(self, pending: Pending) -> None:
        self._waiting.append(pending)
        self.bytes += pending.size

    def has_room(self, unfolded_bytes: int) -> bool:
        """Whether one more may wait, by what waits already and by what is not folded yet."""
        fits = self.bytes <= self._settings.queue_bytes_max
        return fits and unfolded_bytes <= self._settings.unfolded_bytes_max

    def put_back(self, lost: Iterable[Pending]) -> None:
        """Queue again, in front and in order, what was sent and did not count."""
        again = list(lost)
        self._waiting.extendleft(reversed(again))
        self.bytes += sum(pending.size for pending in again)

    def clear(self) -> list[Pending]:
        waiting = list(self._waiting)
        self._waiting.clear()
        self.bytes = 0
        return waiting

    def next_group(self, in_flight: int, *, flushing: bool) -> list[Pending]:
        """Take the batches that may go out now; none if it is too early."""
        if not self._waiting or in_flight >= self._settings.max_parallel_writes:
            return []
        if self._waiting[0].decide is not None:
            return [] if in_flight else [self._pop()]
        if in_flight and not flushing and not self._is_due():
            return []
        group = [self._pop()]
        if not self._waiting:
            return group
        size = group[0].size
        while self._waiting and self._joins(self._waiting[0], group[0], size):
            size += self._waiting[0].size
            group.append(self._pop())
        return group

    def patience_s(self, in_flight: int) -> float | None:
        """How long the next group may still gather; None if time alone changes nothing."""
        if not self._waiting or not 0 < in_flight < self._settings.max_parallel_writes:
            return None
        if self._waiting[0].decide is not None:
            return None  # a barrier waits for answers
        return max(0.0005, self._window_left_s())

    def _is_due(self) -> bool:
        return self.bytes >= self._settings.group_bytes_max or self._window_left_s() <= 0

    def _window_left_s(self) -> float:
        return self._settings.group_window_ms / 1000 - self._waiting[0].queued.elapsed_s()

    def _joins(self, pending: Pending, first: Pending, size: int) -> bool:
        if pending.schema_id != first.schema_id:
            return False
        if pending.decide is not None:
            return False
        if max(first.size, pending.size) > self._settings.skip_memtable_bytes:
            return False
        return size + pending.size <= self._settings.group_bytes_max

    def _pop(self) -> Pending:
        pending = self._waiting.popleft()
        self.bytes -= pending.size
        return pending
