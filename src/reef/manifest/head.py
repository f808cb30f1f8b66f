"""Finding the newest manifest.

Cold: LIST, then GET the last. Warm: probe the next number. A probe that finds nothing
means "no news" only while the cached head is fresh: after half a grace period the numbers
behind it may have been published and swept, and a probe would say "no news" for ever (H47).
"""

from dataclasses import dataclass

from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import Manifest, decode_manifest
from reef.manifest.invariants import check_loaded
from reef.paths import Namespace, number_of
from reef.runtime import Runtime, Stopwatch
from reef.stores import Store, fetch

__all__ = ["Head", "HeadFinder"]


@dataclass(frozen=True, slots=True)
class Head:
    """A manifest, and when it was last known to be the newest."""

    manifest: Manifest
    seen: Stopwatch
    """Started before the request that showed it was sent."""

    def fresh(self) -> bool:
        """Whether half a grace period has not passed since: the bound for trusting it."""
        return self.seen.elapsed_s() <= self.manifest.grace_ms / 2000


class HeadFinder:
    """Finds the head of one namespace, and remembers it."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace
        self._runtime: Runtime = store.runtime
        self._known: Head | None = None

    def find(self) -> Head:
        """Return the newest manifest; NotFoundError if the namespace has none."""
        known = self._known
        if known is None or not known.fresh():
            self._known = self._list()
        else:
            self._known = self._probe(known)
        return self._known

    def published(self, head: Head) -> None:
        """Remember a manifest that was just published."""
        self._known = head

    def forget(self) -> None:
        """Look again from scratch the next time."""
        self._known = None

    def load(self, generation: int) -> Manifest:
        """Return the manifest of a generation; NotFoundError if it is not there."""
        key = self._namespace.manifest(generation)
        manifest = fetch(self._store, key, lambda body: decode_manifest(body, key))
        if manifest.generation != generation:
            raise CorruptionError(
                f"object {key} holds generation {manifest.generation}", object=key, offset=0
            )
        return check_loaded(manifest, key)

    def _list(self) -> Head:
        seen = self._runtime.stopwatch()
        generations = [number_of(info.key) for info in self._store.list(self._namespace.manifests)]
        newest = max((number for number in generations if number), default=None)
        if newest is None:
            raise NotFoundError(
                f"there is no namespace {self._namespace.name} in {self._store.url}",
                namespace=self._namespace.name,
            )
        return self._probe(Head(self.load(newest), seen))

    def _probe(self, head: Head) -> Head:
        """Step forward while there is a next one. Only a miss proves that this is the head."""
        while True:
            seen = self._runtime.stopwatch()
            try:
                head = Head(self.load(head.manifest.generation + 1), seen)
            except NotFoundError:
                return Head(head.manifest, seen)
