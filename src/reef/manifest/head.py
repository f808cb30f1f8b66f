"""Finding the newest manifest.

Cold: LIST, then GET the last. Warm: probe the next number. A probe that finds nothing
means "no news" only while the cached head is fresh: after half a grace period the numbers
behind it may have been published and swept, and a probe would say "no news" for ever (H47).

A damaged manifest that has a sound one after it is passed over: a repair publishes such a
one. A damaged *newest* one is an error, for whoever would act on what is there: the one
before it may name objects that are gone, and its epoch and window lie in the past (H18). So
there is no fallback for a writer, not even a checked one: `repair` decides. Only a reader may
ask for the newest sound one, and is told what it stands in for.
"""

from contextlib import suppress
from dataclasses import dataclass

from reef.errors import CorruptionError, Kind, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest, Successor, decode_manifest
from reef.manifest.invariants import check_loaded
from reef.paths import Namespace, number_of
from reef.runtime import Runtime, Stopwatch
from reef.stores import Store, fetch
from reef.stores.dates import StoreDates

__all__ = ["Head", "HeadFinder", "locate", "newest_incarnation", "refuse_dropped"]

LISTINGS_MAX = 5
FALLBACKS_MAX = 10
"""How far a reader looks back for a sound manifest."""


@dataclass(frozen=True, slots=True)
class Head:
    """A manifest, and when it was last known to be the newest."""

    manifest: Manifest
    seen: Stopwatch
    """Started before the request that showed it was sent."""
    damage: CorruptionError | None = None
    """What is wrong with the newest manifest, if this one stands in for it."""

    def fresh(self, by_store_s: float = 0.0) -> bool:
        """Whether half a grace period has not passed since: the bound for trusting it."""
        return max(self.seen.elapsed_s(), by_store_s) <= self.manifest.grace_ms / 2000

    def trusts_put(self, sent: Stopwatch, by_store_s: float = 0.0) -> bool:
        """Whether a PUT was quick enough to need no proof that its slot was not collected.

        Half a grace is the bound, as far as the grace is known. A lower one takes effect one
        old grace after it was published, so what was seen longer ago proves nothing (H62).
        `by_store_s` is how long the PUT took by the store's own dates, where it gives them.
        """
        grace_s = self.manifest.grace_ms / 1000
        quick = max(sent.elapsed_s(), by_store_s) <= grace_s / 2
        return quick and self.seen.elapsed_s() <= grace_s

    def is_quick(self, sent: Stopwatch, by_store_s: float = 0.0) -> bool:
        """Whether a request took less than half the grace period, as far as that is known."""
        return max(sent.elapsed_s(), by_store_s) <= self.manifest.grace_ms / 2000


class HeadFinder:
    """Finds the head of one namespace, and remembers it."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace
        self._runtime: Runtime = store.runtime
        self.dates = StoreDates(store.runtime)
        """For all who write to this namespace with this head: what one has seen serves the rest."""
        self._known: Head | None = None
        self._last: Head | None = None
        """The newest one ever found here: damage at rest does not take it from memory."""

    @property
    def names(self) -> Namespace:
        """The incarnation whose chain this is."""
        return self._namespace

    @property
    def found(self) -> Head:
        """The head that was found last; UnavailableError before the first `find`."""
        if self._last is None:
            raise UnavailableError(f"the head of {self._namespace.name} was not read yet")
        return self._last

    @property
    def last(self) -> Head | None:
        """The head that was found last, however long ago, without looking again."""
        return self._last

    def find(self, *, fallback: bool = False, dropped: bool = False) -> Head:
        """Return the newest manifest; NotFoundError if there is none, or the namespace is dropped.

        Where it is damaged: CorruptionError, or with `fallback` the newest sound one. Only who
        drops, brings back, makes anew or sweeps asks for a `dropped` one too.
        """
        found = self._find(fallback)
        if not dropped:
            refuse_dropped(self._namespace, found.manifest)
        return found

    def _find(self, fallback: bool) -> Head:
        known, found = self._known, None
        if known is not None and known.damage is None and known.fresh():
            found = self._probe(known, fallback)
        for _ in range(LISTINGS_MAX):
            found = found or self._list(fallback)
            if found is not None:
                self._check_winner(found.manifest)
                self._known = self._last = found
                return found
        raise UnavailableError(
            f"manifests of {self._namespace.name} are swept faster than they can be read",
            hint="The store is too slow for this grace period",
            namespace=self._namespace.name,
        )

    def _check_winner(self, found: Manifest) -> None:
        """Raise if a newer head names another manifest at the generation that is known (H73).

        A head that was seen longer ago than half a grace proves nothing, nor does a generation
        that is not retained: its PUT may have landed in a slot that was collected (H14).
        """
        last = self._last
        if last is None or found.write_id == last.manifest.write_id or not last.fresh():
            return
        known = last.manifest
        if known.generation < found.oldest_retained:
            return
        ids = {entry.generation: entry.write_id for entry in found.recent}
        if ids.get(known.generation, known.write_id) != known.write_id:
            key = self._namespace.manifest(known.generation)
            raise CorruptionError(
                f"object {key} was written twice: by write {known.write_id}, "
                f"and by write {ids[known.generation]}",
                kind=Kind.CHANGED_WINNER,
                hint="Published changes may be lost: run `reef store probe`, then `reef verify`",
                object=key,
                generation=known.generation,
            )

    def published(self, head: Head) -> None:
        """Remember a manifest that was just published."""
        self._known = self._last = head

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

    def _list(self, fallback: bool) -> Head | None:
        """Begin with the newest that a listing shows; None if that took too long."""
        seen = self._runtime.stopwatch()
        numbers = [number_of(info.key) for info in self._store.list(self._namespace.manifests)]
        generations = sorted(number for number in numbers if number)
        if not generations:
            raise NotFoundError(
                f"there is no namespace {self._namespace.name} in {self._store.url}",
                namespace=self._namespace.name,
            )
        try:
            manifest = self.load(generations[-1])
        except CorruptionError as error:
            return self._stand_in(generations, _explained(error), fallback, seen)
        except NotFoundError:  # it was listed, superseded and swept: there are newer ones
            return None
        return self._probe(Head(manifest, seen), fallback)

    def _probe(self, head: Head, fallback: bool) -> Head | None:
        """Step forward while there is a next one. Only a miss proves that this is the head.

        And only a quick one, counted from when the first was known to be the head: after a slow
        answer the numbers behind it may be swept. None then, which means: list.
        """
        while True:
            seen = self._runtime.stopwatch()
            try:
                head = Head(self.load(head.manifest.generation + 1), head.seen)
            except NotFoundError:
                return Head(head.manifest, seen) if head.fresh() else None
            except CorruptionError:  # a listing shows whether a sound one comes after it
                return self._list(fallback)

    def _stand_in(
        self, generations: list[int], damage: CorruptionError, fallback: bool, seen: Stopwatch
    ) -> Head:
        """Return the newest sound one for those who may have it; never go back in time."""
        if not fallback:
            raise damage
        known = self._last.manifest if self._last is not None else None
        for generation in reversed(generations[-1 - FALLBACKS_MAX : -1]):
            if known is not None and generation <= known.generation:
                break
            try:
                return Head(self.load(generation), seen, damage)
            except (CorruptionError, NotFoundError):
                continue
        if known is None:
            raise damage
        return Head(known, seen, damage)


def locate(store: Store, name: str, *, fallback: bool = False, dropped: bool = False) -> HeadFinder:
    """Find the current incarnation of a name; return its finder, with the head just found.

    The chain of a name that was dropped and created again ends in a manifest that names its
    successor. Only names that were dropped cost more: a LIST of the successors and the newest
    one's head. A successor without a manifest was announced by a process that died; `create`
    completes it. Damage in the chain of an earlier incarnation, or the loss of its last manifest
    or of a record, does not concern the current one.
    """
    heads = HeadFinder(store, Namespace(name))
    try:
        heads.find(fallback=fallback, dropped=True)
    except (CorruptionError, NotFoundError):
        following = _newest(store, heads.names, None, fallback)
        if following is None:
            raise
        heads = following
    while (following := _following(store, heads, fallback)) is not None:
        heads = following
    if not dropped:
        refuse_dropped(heads.names, heads.found.manifest)
    return heads


def newest_incarnation(store: Store, name: str) -> Namespace:
    """Return the newest incarnation that was announced, whatever the state of its manifests."""
    names = Namespace(name)
    numbers = [1, *_recorded(store, names)]
    with suppress(CorruptionError, NotFoundError):
        numbers.append(locate(store, name, dropped=True).names.incarnation)
    return names.at(max(numbers))


def _recorded(store: Store, names: Namespace) -> list[int]:
    return [number for info in store.list(names.successors) if (number := number_of(info.key))]


def _following(store: Store, heads: HeadFinder, fallback: bool) -> HeadFinder | None:
    """Return the newest incarnation after one that was dropped, if any has a manifest.

    A manifest that stands in for a damaged one may be from before the drop, and so may the last
    one that is left: the records tell.
    """
    head = heads.found
    if head.manifest.dropped is None and head.damage is None:
        return None
    return _newest(store, heads.names, head.manifest.successor, fallback)


def _newest(
    store: Store, names: Namespace, successor: Successor | None, fallback: bool
) -> HeadFinder | None:
    """Return the newest incarnation that has a manifest, of those that were announced later."""
    numbers = {number for number in _recorded(store, names) if number > names.incarnation}
    if successor is not None:
        numbers.add(successor.incarnation)
    for number in sorted(numbers, reverse=True):
        heads = HeadFinder(store, names.at(number))
        with suppress(NotFoundError):
            heads.find(fallback=fallback, dropped=True)
            return heads
    return None


def refuse_dropped(namespace: Namespace, manifest: Manifest) -> None:
    """Raise NotFoundError for a manifest of a dropped namespace; say how to bring it back."""
    name, dropped = namespace.name, manifest.dropped
    if dropped is None:
        return
    hint = f"Bring it back with db.undrop({name!r}) or: reef undrop URL {name}"
    if manifest.successor is not None:
        hint = "It was created again since: open it again"
    elif dropped.is_cleared:
        hint = "A sweep has taken its rows; create() makes a new one of that name"
    raise NotFoundError(
        f"namespace {name} was dropped", kind=Kind.DROPPED, hint=hint, namespace=name
    )


def _explained(error: CorruptionError) -> CorruptionError:
    return CorruptionError(
        f"the newest manifest is damaged: {error.message}",
        hint="Run `reef repair`: it publishes a sound one after it",
        **error.context,
    )
