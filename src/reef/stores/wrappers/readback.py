"""Settles conditional writes by looking at what is there.

A store may answer "exists" when the object is our own, sent before and its answer lost
(H1); it may answer "conflict" when nothing landed at all (H2, H6); or not answer. The
body tells: commit objects carry a write id, so equal bytes mean that it is ours.

    create    created                      done
              exists    equal bytes        created: an earlier try landed
                        other bytes        exists, and the winner is handed on
                        nothing there      send again
              unknown                      send again, the same bytes

              Bytes that differ, and might yet be ours damaged on their way here, are looked at
              once more: whoever took them for another's would write a second time, or tell that
              nothing was written.

    replace   likewise; but once an answer was lost, other bytes prove nothing: ours may
              have landed and been replaced since. Then the outcome stays unknown.

Sending again after an unknown answer, rather than looking, is on purpose: the first try
may still be on its way, and a directory says "exists" only of what is durable.

All of this assumes that nobody deletes or overwrites the name meanwhile. Reef collects slots
only long after their time; a result with `doubt` set is one whose writer must prove that (H13).
It assumes, too, that "changed" is never the answer to a request that took effect: a proxy that
sends a conditional write twice would break that, and must not stand in front of a bucket.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from reef.errors import Kind, NotFoundError, ReefError, UnavailableError
from reef.stores.base import Outcome, Store, Tagged, WriteResult
from reef.stores.wrappers.base import CountedParts, Wrapper
from reef.stores.wrappers.retry import Backoff, RetryPolicy

__all__ = ["ReadBack"]


class ReadBack(Wrapper):
    """Turns almost every unknown into an answer, within the policy's bounds."""

    def __init__(self, inner: Store, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._settle(
            lambda: self.inner.create(key, body), lambda _: self._look_create(key, body)
        )

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self._settle(
            lambda: self.inner.replace(key, body, tag),
            lambda doubt: self._look_replace(key, body, tag, doubt),
        )

    def _settle(
        self,
        send: Callable[[], WriteResult],
        look: Callable[[bool], WriteResult | None],
    ) -> WriteResult:
        """Send until the answer is definite. `doubt`: an earlier try may have landed.

        Nothing is raised once there is doubt, not even a refusal: the credentials may have
        lapsed between a try that landed and the one that asks.
        """
        backoff = Backoff(self.runtime, self.policy)
        doubt = False
        while True:
            try:
                result = send()
            except ReefError as error:
                cause: Exception | None = error  # this try wrote nothing, for certain
                if not isinstance(error, UnavailableError):
                    break
            else:
                if result.landed:
                    return result
                try:
                    seen = None if result.outcome is Outcome.UNKNOWN else look(doubt)
                    cause = result.cause
                    doubt = doubt or result.outcome is Outcome.UNKNOWN
                except ReefError as error:  # it may be our own that stands in the way
                    seen, cause, doubt = None, error, True
                if seen is not None:
                    return replace(seen, doubt=doubt)
            if not backoff.wait():
                break
        if not doubt and isinstance(cause, ReefError):
            raise cause
        return WriteResult(Outcome.UNKNOWN, cause=cause, doubt=doubt)

    def _look_create(self, key: str, body: bytes) -> WriteResult | None:
        try:
            found = self._seen(key, body)
        except NotFoundError:
            return None
        if found.body == body:
            return WriteResult(Outcome.CREATED, found.tag)
        return WriteResult(Outcome.EXISTS, winner=found.body)

    def _look_replace(self, key: str, body: bytes, tag: str, doubt: bool) -> WriteResult | None:
        found: Tagged | None = None
        with suppress(NotFoundError):
            found = self.inner.get_tagged(key)
        if found is not None and found.body == body:
            return WriteResult(Outcome.REPLACED, found.tag)
        if found is not None and found.tag == tag:
            return None  # the store said no, yet nothing has changed
        outcome = Outcome.UNKNOWN if doubt else Outcome.CHANGED
        return WriteResult(outcome, winner=found.body if found else None)

    def _seen(self, key: str, body: bytes) -> Tagged:
        """Return what is there; looked at twice where it may be ours, cut short or garbled (H8)."""
        found = self.inner.get_tagged(key)
        is_ours = found.body == body
        may_be = len(found.body) == len(body) or body.startswith(found.body)
        return self.inner.get_tagged(key) if may_be and not is_ours else found

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """A lost answer to the last request hides a finished upload (H3): look for it."""
        counted = CountedParts(parts)
        try:
            return self.inner.upload(key, counted)
        except UnavailableError as error:
            # Only an answer that was lost is made up for: what is visible but may not last
            # is not.
            if error.kind is Kind.NOT_DURABLE or not counted.ended:
                raise
            if self._size(key) != counted.bytes:
                raise
            return counted.bytes

    def _size(self, key: str) -> int | None:
        try:
            return self.inner.head(key).size
        except NotFoundError:
            return None
