"""Answers: decided under the writer's lock, given outside of it.

A future runs its owner's callbacks where it is set, and those may well call the writer again, or
wait. So answers are given one at a time: a thread claims one under the lock and sets it at once.
What is still to be told stays here meanwhile, for whoever needs it or has time.

A callback may wait for what it has just written, and holds up a thread meanwhile. Answers to
such batches come first. To give them is always allowed, however many callbacks are running.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from reef.engine.commit.flights import (
    Flight,
    Pending,
    receipt_of,
    replayed_receipt,
    unknown_outcome,
)
from reef.errors import ReefError
from reef.manifest.dedup import DedupWindow
from reef.paths import Namespace
from reef.runtime import Future
from reef.types import Receipt

__all__ = ["Answer", "Answers", "give"]

Answer = tuple[Pending, Receipt | ReefError]
Waiting = OrderedDict["Future[Receipt]", Answer]


@dataclass(slots=True)
class Answers:
    """What one writer has decided and not yet told. All of it runs under the writer's lock."""

    _urgent: Waiting = field(default_factory=OrderedDict)
    """To batches that were written in callbacks."""
    _ready: Waiting = field(default_factory=OrderedDict)
    _claimed: dict[object, Answer] = field(default_factory=dict)
    """By giver; at most one each, which is set the next moment, before any callback runs."""
    _refusal: ReefError | None = None
    """The first one since the last flush that went to a batch that nobody waits for."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ready)

    def count(self, *, urgent_only: bool) -> int:
        return len(self._urgent) if urgent_only else len(self)

    def __contains__(self, future: "Future[Receipt]") -> bool:
        """Whether this one is decided, and waits to be given."""
        return future in self._ready or future in self._urgent

    def settles(self, future: "Future[Receipt]") -> bool:
        """Whether this one is decided, told or not."""
        return future in self or future.done() or self.is_claimed(future)

    def is_claimed(self, future: "Future[Receipt]") -> bool:
        """Whether somebody sets this one at this moment: it can be waited for."""
        if not self._claimed:
            return False
        return any(pending.future is future for pending, _ in self._claimed.values())

    def not_given(self) -> list[Pending]:
        """Return what is decided and not yet told."""
        told = (*self._claimed.values(), *self._urgent.values(), *self._ready.values())
        return [pending for pending, _ in told]

    def take_refusal(self) -> ReefError | None:
        """Return what a flush has to tell, once."""
        refusal, self._refusal = self._refusal, None
        return refusal

    # --- deciding -----------------------------------------------------------------
    def add(self, pending: Pending, answer: Receipt | ReefError) -> None:
        waiting = self._urgent if pending.in_callback else self._ready
        waiting[pending.future] = (pending, answer)
        if pending.unattended and isinstance(answer, ReefError):
            self._refusal = self._refusal or answer

    def add_receipts(self, namespace: Namespace, flight: Flight) -> None:
        for index, pending in enumerate(flight.batches):
            self.add(pending, receipt_of(namespace, flight.header, index))

    def add_unknown(self, namespace: Namespace, flight: Flight, cause: object) -> None:
        for index, pending in enumerate(flight.batches):
            self.add(pending, unknown_outcome(namespace, flight.header, index, cause))

    def replay(
        self, lost: Iterable[Pending], window: DedupWindow, namespace: Namespace
    ) -> list[Pending]:
        """Answer what another object with the same key has committed; return the others."""
        return [pending for pending in lost if not self._replays(pending, window, namespace)]

    def _replays(self, pending: Pending, window: DedupWindow, namespace: Namespace) -> bool:
        if pending.mark is not None:
            return False  # it was acknowledged already, on a local disk
        key, digest = pending.header.key, pending.header.digest
        try:
            known = window.find(key, digest) if key and digest else None
        except ReefError as error:
            self.add(pending, error)
            return True
        if known is not None:
            self.add(pending, replayed_receipt(namespace.name, known))
        return known is not None

    # --- giving -------------------------------------------------------------------
    def claim(
        self, giver: object, only: "Future[Receipt] | None", *, urgent_only: bool
    ) -> Answer | None:
        """Return the next answer for `giver` to give, or that of one future, if there is one."""
        self.release(giver)
        alone = urgent_only and only is None
        for waiting in (self._urgent,) if alone else (self._urgent, self._ready):
            future = next(iter(waiting), None) if only is None else only
            if future is not None and future in waiting:
                self._claimed[giver] = waiting[future]  # first: an interrupt must not lose it
                return waiting.pop(future)
        return None

    def release(self, giver: object) -> None:
        """Note that `giver` has set what it claimed; if it was interrupted, another will."""
        claimed = self._claimed.get(giver)
        if claimed is not None and not claimed[0].future.done():
            pending, _ = claimed
            self._urgent[pending.future] = claimed
            self._urgent.move_to_end(pending.future, last=False)
        self._claimed.pop(giver, None)


def give(answer: Answer) -> None:
    """Set a future, and so run its callbacks."""
    pending, told = answer
    if isinstance(told, ReefError):
        pending.future.set_exception(told)
    else:
        pending.future.set_result(told)
