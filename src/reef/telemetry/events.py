"""Events: the few things worth telling, as names and values.

An event goes to every subscriber and to the standard library's logger `reef`, which has
no handler of its own: silent until the application wants it.

Subscribers are called in the middle of what is told, sometimes under a lock. One that raises is
told to the logger, and to nobody else: what listens badly must not end what it listens to.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Events"]

logging.getLogger("reef").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value!r}" for name, value in self.fields.items())])


class Events:
    """Where events are sent to, and who hears of them."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[Event], None], ...] = ()
        self._log = logging.getLogger("reef")

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Hear of every event from now on; the returned call ends it."""
        self._subscribers = (*self._subscribers, subscriber)
        return lambda: self._unsubscribe(subscriber)

    def emit(self, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
        if not self._subscribers and not self._log.isEnabledFor(level):
            return
        event = Event(name, fields)
        self._log.log(level, "%s", event)
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                self._log.exception("a subscriber failed to hear %s", name)

    def _unsubscribe(self, subscriber: Callable[[Event], None]) -> None:
        self._subscribers = tuple(known for known in self._subscribers if known is not subscriber)
