"""Telling: answers are given outside of the lock, each by whoever waits for it, or by a helper.

A future runs its callbacks where it is set, and nobody waits until they have ended: whoever
waits for an answer takes it, and if another has claimed it, waits for that future alone, which
is set before its callbacks run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from reef.engine.commit.admission import Admission
from reef.engine.commit.answers import Answer, Answers, give
from reef.engine.commit.helpers import Helpers
from reef.runtime import Condition, Future
from reef.types import Receipt

__all__ = ["Telling"]


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

    def tell(self, future: "Future[Receipt]") -> None:
        """Return when one that is decided is set, by this thread or by another."""
        me = object()
        with self._giving(me):
            answer = self._claim(me, future)
            if answer is not None:
                give(answer)
        if answer is None:
            self._await_giver(future)

    def tell_all(self) -> None:
        """Set all that are decided by now."""
        me = object()
        with self.changed:
            count = self.count()
        with self._giving(me):
            for _ in range(count):  # not for as long as others come in
                answer = self._claim(me)
                if answer is None:
                    break
                give(answer)

    def leave_none(self) -> None:
        """Let somebody give what is decided; where a callback is running, its caller will."""
        if self.answers and not self.door.is_answering:
            self.helpers.ensure()

    @contextmanager
    def _giving(self, me: object) -> Iterator[None]:
        try:
            with self.door.answering():
                yield
        finally:
            with self.changed:
                self.answers.release(me)
                self.changed.notify_all()

    def _claim(self, me: object, only: "Future[Receipt] | None" = None) -> Answer | None:
        with self.changed:
            urgent_only = self.helpers.leaves_callbacks_alone()
            return self.answers.claim(me, only, urgent_only=urgent_only)

    def _await_giver(self, future: "Future[Receipt]") -> None:
        """Wait if another thread is just setting this one."""
        with self.changed:
            is_claimed = self.answers.is_claimed(future)
        if is_claimed:
            future.exception()
