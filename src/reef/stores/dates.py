"""How long something took by a store's own dates: a clock that does not stand still with ours.

A virtual machine that is paused, and goes on an hour later, may have no clock of its own that
knows. The store knows, and where it tells the date of what it has just written at no cost
(`WriteResult.date_s`), two dates and the stopwatch between them show what is missing:

    our clocks    |--- 3 s ---|-- 1 s --|
                answer      send      answer
    its dates     |----- 3,604 s -------|      so between them an hour is not accounted for

Whether that hour lies before or after the send cannot be told, and so counts as after: what is
suspected without need costs a look at the head, once. Nothing is known before the second date.
"""

from reef.errors import InvalidInputError, Kind
from reef.runtime import Runtime, Stopwatch
from reef.stores.base import Store

__all__ = ["StoreDates", "now_to_look"]


def now_to_look(store: Store) -> float:
    """Return a store's time for who only looks; ours, where nothing may be written.

    A store tells its time by the date of something new. With read-only credentials there is none,
    and what ends by it is nevertheless told. Whoever deletes by it asks the store itself (H30).
    """
    try:
        return store.now()
    except InvalidInputError as error:
        if error.kind is not Kind.ACCESS_DENIED:
            raise
        return store.runtime.wall_s()


class StoreDates:
    """Remembers the last date that a store gave. Safe for threads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: tuple[float, Stopwatch] | None = None

    def took_s(self, sent: Stopwatch, date_s: float | None) -> float:
        """Return the time from `sent` to an object's date; 0 where the dates do not tell."""
        last, self._last = self._last, self._next(date_s)
        if last is None or date_s is None:
            return 0.0
        last_s, since = last
        between_s = since.elapsed_s() - sent.elapsed_s()
        return max(0.0, date_s - last_s - between_s)

    def _next(self, date_s: float | None) -> tuple[float, Stopwatch] | None:
        return self._last if date_s is None else (date_s, self._runtime.stopwatch())
