"""Publish a manifest (protocols §5).

1. Load the head.
2. Apply the pure edit. Reject it if it names a condemned key; check that every new object exists
   with its size; check the invariants.
3. PUT create-only at the head's generation + 1.
4. Lost: load and apply again, with jitter, a bounded number of times. Slow or without a response:
   proved only by the entry of that generation in the current head's `recent`; otherwise unknown. A
   listing proves nothing, and neither does "exists" after doubt: a stalled PUT may land under a
   name that was collected (H14, H66).
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from reef.errors import (
    ConflictError,
    InternalError,
    OutcomeUnknownError,
    ReefError,
)
from reef.formats.manifest import Manifest, Recent, SegmentEntry, encode_manifest
from reef.manifest.head import HeadFinder, ManifestHead
from reef.manifest.invariants import check_next
from reef.paths import Namespace
from reef.runtime import Runtime, Stopwatch
from reef.stores import Outcome, Store
from reef.telemetry import Metrics

Edit = Callable[[Manifest], Manifest | None]
"""Returns the next manifest's content, or None if there is nothing to do.

The publisher sets generation, write id, time and `recent`; the edit sets the rest. It may be
applied several times, to different heads, so it must be pure.
"""

CREATED_QUICKLY_S = 1.0
RECENT_MS = 24 * 3600 * 1000
RECENT_MIN = 64
RECENT_MAX = 1024
"""A default grace at one publish a second; a longer list would make every publish expensive."""


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """How often a publisher may lose (H25)."""

    losses_max: int = 50
    first_delay_s: float = 0.01
    delay_max_s: float = 1.0


class Publisher:
    """Publishes for one namespace, one edit at a time."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        *,
        policy: PublishPolicy | None = None,
        metrics: Metrics | None = None,
        heads: HeadFinder | None = None,
    ) -> None:
        self.heads = heads or HeadFinder(store, namespace)
        self._store = store
        self._namespace = namespace
        self._runtime: Runtime = store.runtime
        self._policy = policy or PublishPolicy()
        self._metrics = metrics or Metrics()
        self._losses = self._metrics.counter("manifest.losses")
        self._turn = self._runtime.lock()

    def publish(self, edit: Edit, *, dropped: bool = False) -> Manifest:
        """Apply `edit` to the head and publish the result; return the head after that.

        NotFoundError for a dropped namespace, unless `dropped` allows it.
        """
        with self._turn:
            start_s = self._runtime.monotonic_s()
            for loss in range(self._policy.losses_max):
                published = self._attempt(self.heads.find(dropped=dropped), edit)
                if published is not None:
                    took_s = self._runtime.monotonic_s() - start_s
                    self._metrics.histogram("manifest.publish_seconds").record(took_s)
                    return published
                self._losses.add()
                self._back_off(loss)
        raise ConflictError(
            f"{self._policy.losses_max} publishes of {self._namespace.name} were overtaken",
            hint="Too many processes change this namespace at once; try again later",
        )

    def publish_once(self, edit: Edit, *, dropped: bool = False) -> tuple[Manifest, bool]:
        """Publish an edit that may come too late: return the head, and whether it applied."""
        applied = False

        def tracked(head: Manifest) -> Manifest | None:
            nonlocal applied
            edited = edit(head)
            applied = edited is not None
            return edited

        return self.publish(tracked, dropped=dropped), applied

    def create(self, first: Manifest, absent: Stopwatch | None = None) -> Manifest | None:
        """Publish the first generation of a chain; None if another process was first.

        `absent` was started before the request that showed that there is no namespace. Another
        process may have created one since, and swept its first generation: only a quick PUT needs
        no proof.
        """
        absent = absent or self._runtime.stopwatch()
        with self._turn:
            following = self._stamp(None, first)
            created = self._put(None, following, self._runtime.stopwatch())
            if created is not None and absent.elapsed_s() > CREATED_QUICKLY_S:
                return self._prove(following)
            return created

    def _attempt(self, head: ManifestHead, edit: Edit) -> Manifest | None:
        edited = edit(head.manifest)
        if edited is None:
            return head.manifest
        self._check_objects(head.manifest, edited)
        following = check_next(head.manifest, self._stamp(head.manifest, edited))
        return self._put(head.manifest, following, head.seen)

    def _put(
        self, before: Manifest | None, following: Manifest, since: Stopwatch
    ) -> Manifest | None:
        """Return the manifest if it is published, None if another one was first."""
        check_next(before, following)
        key = self._namespace.manifest(following.generation)
        result = self._store.create(key, encode_manifest(following))
        head = ManifestHead(following, since)
        quick = head.is_quick(self.heads.dates.took_s(since, result.date_s))
        if result.outcome is Outcome.EXISTS and quick and not result.doubt:
            return None
        if result.outcome is Outcome.CREATED and quick:
            self.heads.published(head)
            return following
        return self._prove(following)

    def _prove(self, following: Manifest) -> Manifest | None:
        """Return the head if this publish is in its chain; None if another took its place.

        Only `recent` of the current head decides: the object under the generation's name may
        have been collected meanwhile, and the name used again.
        """
        self.heads.forget()
        cause: ReefError | None = None
        try:
            current = self.heads.find(dropped=True).manifest
            is_published = chain_has(current, following)
            if is_published is not None:
                return current if is_published else None
        except ReefError as error:  # of any kind: it says nothing about the publish
            cause = error
        raise OutcomeUnknownError(
            f"generation {following.generation} of {self._namespace.name} may have been published",
            hint="Check whether the head has the change before trying again",
            write_id=following.write_id,
            generation=following.generation,
        ) from cause

    def _stamp(self, before: Manifest | None, edited: Manifest) -> Manifest:
        generation = edited.generation if before is None else before.generation + 1
        now_ms = int(self._runtime.wall_s() * 1000)
        write_id = self._runtime.ulid()
        recent = (*edited.recent, Recent(generation, write_id, now_ms))
        # A publish is a use of the namespace: from then on no failed load drops it.
        is_kept = before is None or edited.made_for != before.made_for
        return msgspec.structs.replace(
            edited,
            generation=generation,
            write_id=write_id,
            published_at_ms=now_ms,
            recent=_trim(recent, now_ms),
            made_for=edited.made_for if is_kept else "",
        )

    def _check_objects(self, before: Manifest, after: Manifest) -> None:
        """Check that every new segment exists with its size (H29)."""
        known = {segment.id for segment in before.segments}
        new = [segment for segment in after.segments if segment.id not in known]
        self._runtime.map(self._check_object, new)

    def _check_object(self, segment: SegmentEntry) -> None:
        key = self._namespace.segment(segment.id, segment.home)
        found = self._store.head(key).size
        if found != segment.size:
            raise InternalError(f"object {key}: expected {segment.size} bytes, found {found}")

    def _back_off(self, loss: int) -> None:
        ceiling_s = min(self._policy.first_delay_s * 2**loss, self._policy.delay_max_s)
        self._runtime.sleep(self._runtime.uniform(0.0, ceiling_s))


def chain_has(head: Manifest, published: Manifest) -> bool | None:
    """Whether a publish is part of a head's chain; None if `recent` does not cover it.

    Generations that left `recent`, or that a repair has skipped, prove nothing either way.
    """
    ids = {entry.generation: entry.write_id for entry in head.recent}
    write_id = ids.get(published.generation)
    return None if write_id is None else write_id == published.write_id


def _trim(recent: tuple[Recent, ...], now_ms: int) -> tuple[Recent, ...]:
    """Keep the entries of the last day: at least RECENT_MIN, at most RECENT_MAX."""
    young = [r for r in recent if r.published_at_ms >= now_ms - RECENT_MS]
    count = min(max(RECENT_MIN, len(young)), RECENT_MAX)
    return tuple(recent[-count:])
