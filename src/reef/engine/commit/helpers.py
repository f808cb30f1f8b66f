"""Helpers: threads that send and give answers where nobody waits for them.

There are as many as PUTs may be in flight, made when there is work and gone when there is none.
One that runs a callback does not count: the callback may wait for what only another can send.
But callbacks that block must not cost a thread each. So once many helpers run callbacks, the
others leave theirs alone; they send, and give the answers that callbacks may be waiting for.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from reef.runtime import Condition, Runtime

__all__ = ["Helpers"]

CALLBACKS_MAX = 16
"""How many helpers may run callbacks at a time."""


@dataclass(eq=False)
class Helpers:
    """The helpers of one writer."""

    count_max: int
    runtime: Runtime
    changed: Condition
    answering: Set[object]
    """The threads that run callbacks at this moment, helpers or not."""
    next_work: Callable[[], Callable[[], None] | None]
    """Called under the lock: what there is to do, or None when a helper can go."""
    _count: int = 0
    _threads: set[object] = field(default_factory=set)

    def ensure(self) -> None:
        """Make sure that somebody works although nobody waits."""
        with self.changed:
            if self._count - self._busy() >= self.count_max:
                self.changed.notify_all()
                return
            self._count += 1
        try:
            self.runtime.spawn(self._run, name="sender")
        except BaseException:
            with self.changed:
                self._count -= 1
            raise

    def leaves_callbacks_alone(self) -> bool:
        """Whether this thread is a helper while enough others run callbacks; under the lock."""
        me = self.runtime.thread_id()
        if me not in self._threads or me in self.answering:
            return False
        return self._busy() >= CALLBACKS_MAX

    def _busy(self) -> int:
        return len(self._threads & self.answering)

    def _run(self) -> None:
        me = self.runtime.thread_id()
        try:
            while True:
                with self.changed:
                    self._threads.add(me)
                    work = self.next_work()
                    if work is None:
                        self._leave(me)
                        return
                work()
        except BaseException as error:
            with self.changed:
                self._leave(me)
                is_left = self.next_work() is not None
            if is_left:  # a callback has ended this thread, with sys.exit() for instance
                self.ensure()
            if not isinstance(error, Exception):  # otherwise the writer has ended, and told so
                raise

    def _leave(self, me: object) -> None:
        self._threads.discard(me)
        self._count -= 1
