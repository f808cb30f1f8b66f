"""Helpers of a front: they sync for those who do not wait, and set their futures.

Callbacks may wait for what they have just written, or end their thread. So a helper that runs one
does not count, and another takes its place if there is something to do. But callbacks that block
must not cost a thread each: only so many run at a time, and the rest waits. What was written in a
callback is told in any case, since it may be waited for there.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from reef.engine.commit.helpers import CALLBACKS_MAX
from reef.engine.local.backlog import Backlog, Item
from reef.runtime import Condition, Runtime

__all__ = ["LocalHelpers"]

LINGER_S = 1.0
"""How long a helper that has nothing to do waits for more."""


@dataclass(eq=False)
class LocalHelpers:
    """The helpers of one front, and what they have to tell."""

    runtime: Runtime
    changed: Condition
    backlog: Backlog
    next_sync: Callable[[], Callable[[], None] | None]
    """Called under the lock: the next group to be synced, or None while there is none."""
    _untold: deque[Item] = field(default_factory=deque)
    """Answered, with a future that is not set yet."""
    _urgent: deque[Item] = field(default_factory=deque)
    """The same of what was written in callbacks."""
    _count: int = 0
    _telling: set[object] = field(default_factory=set)
    """Those of them that run callbacks at this moment, by thread."""

    @property
    def in_callback(self) -> bool:
        """Whether this thread runs a callback."""
        return self.runtime.thread_id() in self._telling

    def add(self, answered: Iterable[Item]) -> None:
        """Take in what is to be told; under the lock."""
        for item in answered:
            if item.future is not None:
                (self._urgent if item.in_callback else self._untold).append(item)

    def ensure(self) -> None:
        """Make sure that somebody syncs and tells although nobody waits."""
        with self.changed:
            if self._count > len(self._telling) or not self._has_work():
                self.changed.notify_all()
                return
            self._count += 1
        try:
            self.runtime.spawn(self._run, name="local-sync")
        except BaseException:
            with self.changed:
                self._count -= 1
            raise

    def tell_all(self) -> None:
        """Set what is answered by now: whoever waits for all need not wait for a helper."""
        try:
            while self._urgent or self._untold:
                with self.changed:
                    items = self._urgent or self._untold
                    item = items.popleft() if items else None
                if item is not None:
                    item.tell()
        finally:
            self.leave_none()

    def leave_none(self) -> None:
        """Let somebody tell what is answered: callbacks are not the business of who waits."""
        if self._urgent or self._untold:
            self.ensure()

    def _has_work(self) -> bool:
        return bool(self.backlog.arriving or self._to_tell())

    def _to_tell(self) -> deque[Item]:
        """Return what may be told at this moment."""
        is_full = len(self._telling) >= CALLBACKS_MAX
        return self._urgent if self._urgent or is_full else self._untold

    def _run(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                work()
        finally:
            with self.changed:
                self._count -= 1
            self.ensure()  # a callback has ended this thread, with sys.exit() for instance

    def _next_work(self) -> Callable[[], None] | None:
        """Wait for something to do; None if there was nothing for a while."""
        with self.changed:
            while True:
                if items := self._to_tell():
                    self._telling.add(self.runtime.thread_id())
                    return partial(self._tell, items.popleft())
                sync = self.next_sync()
                if sync is not None:
                    return sync
                if not self.changed.wait(LINGER_S) and not self._has_work():
                    return None

    def _tell(self, item: Item) -> None:
        try:
            item.tell()
        finally:
            with self.changed:
                self._telling.discard(self.runtime.thread_id())
