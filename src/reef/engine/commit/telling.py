"""Telling: answers are given outside of the lock, each by whoever waits for it, or by a helper.

A future runs its callbacks where it is set, and nobody waits until they have ended: whoever
waits for an answer takes it, and if another has claimed it, waits for that future alone, which
is set before its callbacks run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from reef.engine.commit.admission import Admission
from reef.engine.commit.answers import Answers, give
from reef.engine.commit.helpers import Helpers
from reef.runtime import Condition, Future
from reef.types import Receipt

__all__ = ["Telling"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Telling:
    """Gives one writer's answers. Takes the writer's lock itself, but for `count`."""

    answers: Answers
    changed: Condition
    door: Admission
    helpers: Helpers

    def count(self) -> int:
        """How many answers this thread may give at this moment; under the lock."""
        return self.answers.count(urgent_only=self.helpers.leaves_callbacks_alone())

    def tell(self, future: "Future[Receipt]") -> bool:
        """Return when one that is decided is set; whether it was this thread that did so."""
        me = object()
        is_mine = self._giving(me, lambda: self._give(me, future))
        if not is_mine:
            self._await_giver(future)
        return is_mine

    def tell_all(self) -> None:
        """Set all that are decided by now."""
        me = object()
        with self.changed:
            count = self.count()

        def give_all() -> None:
            for _ in range(count):  # not for as long as others come in
                if not self._give(me):
                    break

        self._giving(me, give_all)

    def leave_none(self) -> None:
        """Let somebody give what is decided; where a callback is running, its caller will."""
        if self.answers and not self.door.is_answering:
            self.helpers.ensure()

    def _giving(self, me: object, call: Callable[[], T]) -> T:
        """Run what gives answers; if it is interrupted, what it has claimed is free again."""
        try:
            return self.door.answering(call)
        finally:
            with self.changed:
                self.answers.release(me)
                self.changed.notify_all()

    def _give(self, me: object, only: "Future[Receipt] | None" = None) -> bool:
        """Set one that is decided; False if there is none, or not this one."""
        with self.changed:
            urgent_only = self.helpers.leaves_callbacks_alone()
            answer = self.answers.claim(me, only, urgent_only=urgent_only)
        if answer is not None:
            give(answer)
        return answer is not None

    def _await_giver(self, future: "Future[Receipt]") -> None:
        """Wait if another thread is just setting this one."""
        with self.changed:
            is_claimed = self.answers.is_claimed(future)
        if is_claimed:
            future.exception()
