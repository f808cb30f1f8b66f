"""The head of a namespace: find its newest manifest, publish the next one (protocols §5).

**Find**, and with it the current incarnation of a name. Cold: LIST, then GET the last. Warm: probe
the next generation. A probe that misses means "no change" only while the cached head is fresh:
after half a grace the generations behind it may have been published and swept, and every later
probe would miss as well (H47).

A damaged manifest with an intact one after it, which a repair has published, is skipped. A damaged
*newest* manifest is an error, because the one before it may name deleted objects, and its epoch
and dedup window are out of date (H18). So a writer has no fallback: `repair` decides. Only a
reader may use the newest intact one; `ManifestHead.damage` then has the error.

**Publish** a manifest:

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
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    InternalError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import (
    Alias,
    Manifest,
    ManifestDecoder,
    ManifestOutline,
    Recent,
    SegmentEntry,
    Successor,
    decode_outline,
    encode_manifest,
)
from reef.manifest.invariants import check_loaded, check_next
from reef.manifest.lifecycle import is_in_force
from reef.paths import Namespace, number_of
from reef.runtime import Runtime, Stopwatch
from reef.stores import Outcome, Store, fetch
from reef.stores.base import StoreDates
from reef.telemetry import Metrics

LISTINGS_MAX = 5
FALLBACKS_MAX = 10
"""How many older manifests a reader tries."""


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """A manifest, and when it was last known to be the newest."""

    manifest: Manifest
    seen: Stopwatch
    """Started before the request that showed it was sent."""
    damage: CorruptionError | None = None
    """The error of the newest manifest, if this one replaces it."""

    def fresh(self) -> bool:
        """Whether it was the newest less than half a grace ago: the bound for trusting it."""
        return self.is_quick(self.seen.elapsed_s())

    def is_quick(self, took_s: float) -> bool:
        """Whether a request took less than half the grace period, as far as that is known."""
        return took_s <= self.manifest.grace_ms / 2000

    def shows_open(self, lsn: int) -> bool:
        """Whether a slot is not collected for at least half a grace from now.

        It was not folded when this was the newest manifest, less than half a grace ago: a sweep
        condemns it later than that, and deletes it a grace later. A lower grace takes effect
        one old grace after it was published (H62).
        """
        return self.manifest.wal_floor <= lsn and self.is_quick(self.seen.elapsed_s())


class HeadFinder:
    """Finds the head of one namespace, and remembers it."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace
        self._runtime: Runtime = store.runtime
        self.dates = StoreDates(store.runtime)
        """Shared by the committer and the publisher: each date that one sees serves both."""
        self._decoder = ManifestDecoder()
        self._known: ManifestHead | None = None
        self.last: ManifestHead | None = None
        """The head that was found last, however long ago; later damage does not remove it."""

    @property
    def names(self) -> Namespace:
        """The incarnation whose chain this is."""
        return self._namespace

    @property
    def found(self) -> ManifestHead:
        """The head that was found last; UnavailableError before the first `find`."""
        if self.last is None:
            raise UnavailableError(f"the head of {self._namespace.name} was not read yet")
        return self.last

    def find(
        self,
        *,
        fallback: bool = False,
        dropped: bool = False,
        renamed: bool = False,
        probe: bool = True,
    ) -> ManifestHead:
        """Return the newest manifest; NotFoundError if there is none, or the namespace is dropped.

        NotFoundError also if it was renamed, unless `renamed` or `dropped`: jobs that have begun
        continue under the former name.

        If it is damaged: CorruptionError, or with `fallback` the newest intact one. Only drop,
        undrop, create and sweep ask for a `dropped` one too. Without `probe`, the newest one that
        a listing shows, for reports: one request less.
        """
        head = self._find(fallback) if probe else self._newest_listed(fallback)
        if not dropped:
            refuse_dropped(self._namespace, head.manifest)
            if not renamed:
                refuse_renamed(self._namespace, head.manifest)
        return head

    def _find(self, fallback: bool) -> ManifestHead:
        known, head = self._known, None
        if known is not None and known.damage is None and known.fresh():
            head = self._probe(known, fallback)
        for _ in range(LISTINGS_MAX):
            head = head or self._list(fallback)
            if head is not None:
                self._check_winner(head.manifest)
                self._known = self.last = head
                self._follow_branch(head.manifest)
                return head
        raise self._swept_too_fast()

    def _swept_too_fast(self) -> UnavailableError:
        return UnavailableError(
            f"manifests of {self._namespace.name} are swept faster than they can be read",
            hint="The store is too slow for this grace period",
            namespace=self._namespace.name,
        )

    def _newest_listed(self, fallback: bool) -> ManifestHead:
        for _ in range(LISTINGS_MAX):
            head = self._list(fallback, probe=False)
            if head is not None:
                self.last = head  # not as known: nothing may be derived from its freshness
                self._follow_branch(head.manifest)
                return head
        raise self._swept_too_fast()

    def _check_winner(self, newer: Manifest) -> None:
        """Raise if a newer head names another manifest at the generation that is known (H73).

        A head that was seen longer ago than half a grace proves nothing, nor does a generation
        that is not retained: its PUT may have landed in a slot that was collected (H14).
        """
        last = self.last
        if last is None or newer.write_id == last.manifest.write_id or not last.fresh():
            return
        known = last.manifest
        if known.generation < newer.oldest_retained:
            return
        ids = {entry.generation: entry.write_id for entry in newer.recent}
        if ids.get(known.generation, known.write_id) != known.write_id:
            key = self._namespace.manifest(known.generation)
            raise CorruptionError(
                f"object {key} was written twice: by write {known.write_id}, "
                f"and by write {ids[known.generation]}",
                kind=ErrorKind.CHANGED_WINNER,
                hint="Published changes may be lost: run `reef store probe`, then `reef verify`",
                object=key,
                generation=known.generation,
            )

    def published(self, head: ManifestHead) -> None:
        """Remember a manifest that was just published."""
        self._known = self.last = head
        self._follow_branch(head.manifest)

    def _follow_branch(self, manifest: Manifest) -> None:
        """Name the slots of a branch's inherited log where they are stored."""
        inherited = tuple((part.last_lsn, part.root) for part in manifest.inherited)
        if inherited != self._namespace.inherited:
            self._namespace = replace(self._namespace, inherited=inherited)

    def forget(self) -> None:
        """Start the next `find` with a listing."""
        self._known = None

    def load(self, generation: int) -> Manifest:
        """Return the manifest of a generation; NotFoundError if it is not there."""
        key = self._namespace.manifest(generation)
        manifest = fetch(self._store, key, lambda body: self._decoder.decode(body, key))
        self._check_generation(manifest.generation, generation, key)
        return check_loaded(manifest, key)

    def load_outline(self, generation: int) -> ManifestOutline:
        """Return a few fields of the manifest of a generation, for sweeps over many of them."""
        key = self._namespace.manifest(generation)
        outline = fetch(self._store, key, lambda body: decode_outline(body, key))
        self._check_generation(outline.generation, generation, key)
        return outline

    def _check_generation(self, found: int, expected: int, key: str) -> None:
        if found != expected:
            raise CorruptionError(f"object {key} holds generation {found}", object=key, offset=0)

    def _list(self, fallback: bool, *, probe: bool = True) -> ManifestHead | None:
        """Start with the newest one that a listing shows; None if that took too long."""
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
            return self._newest_intact(generations, _damaged_head_error(error), fallback, seen)
        except NotFoundError:  # it was listed, superseded and swept: there are newer ones
            return None
        head = ManifestHead(manifest, seen)
        return self._probe(head, fallback) if probe else head

    def _probe(self, head: ManifestHead, fallback: bool) -> ManifestHead | None:
        """Step forward while there is a next generation; only a miss proves that this is the head.

        The miss must be quick, counted from when the first one was known to be the head: after a
        slow response the generations behind it may be swept. None then: list instead.
        """
        while True:
            seen = self._runtime.stopwatch()
            try:
                head = ManifestHead(self.load(head.manifest.generation + 1), head.seen)
            except NotFoundError:
                return ManifestHead(head.manifest, seen) if head.fresh() else None
            except CorruptionError:  # a listing shows whether an intact one comes after it
                return self._list(fallback)

    def _newest_intact(
        self, generations: list[int], damage: CorruptionError, fallback: bool, seen: Stopwatch
    ) -> ManifestHead:
        """Return the newest intact one if `fallback` allows it; never an older one than before."""
        if not fallback:
            raise damage
        known = self.last.manifest if self.last is not None else None
        for generation in reversed(generations[-1 - FALLBACKS_MAX : -1]):
            if known is not None and generation <= known.generation:
                break
            try:
                return ManifestHead(self.load(generation), seen, damage)
            except (CorruptionError, NotFoundError):
                continue
        if known is None:
            raise damage
        return ManifestHead(known, seen, damage)


def locate(
    store: Store, name: str, *, fallback: bool = False, dropped: bool = False, probe: bool = True
) -> HeadFinder:
    """Find the current incarnation of a name; return its finder, with the head just found.

    The chain of a name that was dropped and created again ends in a manifest that names its
    successor. Only names that were dropped cost more: a LIST of the successors and the newest
    one's head. A successor without a manifest was announced by a process that died; `create`
    completes it. Damage in the chain of an earlier incarnation, or the loss of its last manifest
    or of a record, does not concern the current one.
    """
    heads = _locate_in(store, Namespace(name), fallback, probe)
    alias = heads.found.manifest.alias
    if alias is not None:
        heads = _follow(store, name, alias, fallback, probe)
    refuse_renamed(heads.names, heads.found.manifest)
    if not dropped:
        if heads.found.manifest.successor is not None:
            raise _incomplete_creation_error(heads.names)
        refuse_dropped(heads.names, heads.found.manifest)
    return heads


def locate_folder(store: Store, folder: str) -> HeadFinder:
    """Find the current incarnation of the namespace in a folder, whatever its name and state."""
    heads = _locate_in(store, Namespace(folder), fallback=False, probe=True)
    current = heads.found.manifest.name_in(folder)
    names = Namespace(current, heads.names.incarnation, "" if current == folder else folder)
    located = HeadFinder(store, names)
    located.published(heads.found)
    return located


def home_of(store: Store, name: str) -> Namespace:
    """Return where the objects of a name are stored, for jobs that search for damage."""
    with suppress(CorruptionError, NotFoundError):
        head = HeadFinder(store, Namespace(name)).find(fallback=True, dropped=True)
        if head.manifest.alias is not None:
            return Namespace(name, home=head.manifest.alias.folder)
    return Namespace(name)


def _follow(store: Store, name: str, alias: Alias, fallback: bool, probe: bool) -> HeadFinder:
    """Return the namespace that a name leads to; NotFoundError if the alias is not in force."""
    missing = NotFoundError(f"there is no namespace {name} in {store.url}", namespace=name)
    try:
        heads = _locate_in(store, Namespace(name, home=alias.folder), fallback, probe)
    except NotFoundError as error:
        raise missing from error
    manifest = heads.found.manifest
    if is_in_force(manifest, alias, name) or name in manifest.names:
        return heads
    raise missing  # the rename was announced, and not finished


def _locate_in(store: Store, names: Namespace, fallback: bool, probe: bool) -> HeadFinder:
    """Find the current incarnation in a folder."""
    heads = HeadFinder(store, names)
    try:
        heads.find(fallback=fallback, dropped=True, probe=probe)
    except (CorruptionError, NotFoundError):
        following = _find_newest_incarnation(store, heads.names, None, fallback)
        if following is None:
            raise
        heads = following
    while (following := _find_later_incarnation(store, heads, fallback)) is not None:
        heads = following
    return heads


def newest_incarnation(store: Store, name: str) -> Namespace:
    """Return the newest incarnation that still has objects, whatever the state of its manifests.

    For jobs that search for damage: its record, its manifests or both may be lost. One LIST for
    each incarnation that still has objects.
    """
    names = home_of(store, name)
    numbers = [1, *_recorded_incarnations(store, names), *_stored_incarnations(store, names)]
    located: Namespace | None = None
    with suppress(CorruptionError, NotFoundError):
        located = locate(store, name, dropped=True).names
        numbers.append(located.incarnation)
    if located is not None and located.incarnation == max(numbers):
        return located
    return with_inherited_log(store, names.at(max(numbers)))


def with_inherited_log(store: Store, names: Namespace) -> Namespace:
    """Return names that lead to the inherited log, as the newest readable manifest states it.

    Otherwise the inherited slots of a branch with a damaged head would be taken for lost ones.
    """
    heads = HeadFinder(store, names)
    listed = [number_of(info.key) for info in store.list(names.manifests)]
    for generation in sorted((number for number in listed if number), reverse=True):
        with suppress(CorruptionError, NotFoundError):
            heads._follow_branch(heads.load(generation))
            break
    return heads.names


def _recorded_incarnations(store: Store, names: Namespace) -> list[int]:
    return [number for info in store.list(names.successors) if (number := number_of(info.key))]


def _stored_incarnations(store: Store, names: Namespace) -> list[int]:
    """Return the incarnations that still have objects, except the first."""
    numbers: list[int] = []
    after = ""
    while (info := next(iter(store.list(names.incarnations, after)), None)) is not None:
        number = info.key.removeprefix(names.incarnations).partition("/")[0]
        if number.isdecimal():
            numbers.append(int(number))
        after = f"{names.incarnations}{number}0"  # behind all keys with a slash after the number
    return numbers


def _find_later_incarnation(store: Store, heads: HeadFinder, fallback: bool) -> HeadFinder | None:
    """Return the newest incarnation after one that was dropped, if any has a manifest.

    A manifest that replaces a damaged one may be from before the drop, and so may the last one
    that is left: the records of successors decide.
    """
    head = heads.found
    if head.manifest.dropped is None and head.damage is None:
        return None
    return _find_newest_incarnation(store, heads.names, head.manifest.successor, fallback)


def _find_newest_incarnation(
    store: Store, names: Namespace, successor: Successor | None, fallback: bool
) -> HeadFinder | None:
    """Return the newest incarnation that has a manifest, of those that were announced later."""
    numbers = {
        number for number in _recorded_incarnations(store, names) if number > names.incarnation
    }
    if successor is not None:
        numbers.add(successor.incarnation)
    for number in sorted(numbers, reverse=True):
        heads = HeadFinder(store, names.at(number))
        with suppress(NotFoundError):
            heads.find(fallback=fallback, dropped=True)
            return heads
    return None


def refuse_dropped(namespace: Namespace, manifest: Manifest) -> None:
    """Raise NotFoundError if a namespace is dropped, with a hint how to undrop it."""
    name, dropped = namespace.name, manifest.dropped
    if dropped is None:
        return
    hint = f"Undrop it with db.undrop({name!r}) or: reef undrop URL {name}"
    if manifest.successor is not None:
        hint = "It was created again since; open it again"
    elif dropped.is_cleared:
        hint = "A sweep has deleted its rows; create() makes a new one of that name"
    raise NotFoundError(
        f"namespace {name} was dropped", kind=ErrorKind.DROPPED, hint=hint, namespace=name
    )


def refuse_renamed(namespace: Namespace, manifest: Manifest) -> None:
    """Raise NotFoundError if a namespace has another name by now."""
    current = manifest.name_in(namespace.folder)
    if current != namespace.name:
        raise NotFoundError(
            f"namespace {namespace.name} was renamed to {current}",
            kind=ErrorKind.RENAMED,
            hint=f"Open {current} instead",
            namespace=namespace.name,
            renamed_to=current,
            folder=namespace.folder,
        )


def without_manifest(store: Store, namespace: Namespace) -> ReefError:
    """Return the error for a name whose newest incarnation has lost all manifests."""
    name = namespace.name
    for folder in (namespace.wal, namespace.segments):
        if next(iter(store.list(folder)), None) is not None:
            return CorruptionError(
                f"namespace {name} has no manifest, but objects in {folder}",
                hint=f"Run rebuild: reef rebuild URL {name} --apply",
                object=namespace.manifests,
                offset=0,
            )
    if namespace.incarnation > 1:
        return _incomplete_creation_error(namespace)
    return NotFoundError(f"there is no namespace {name} in {store.url}", namespace=name)


def _incomplete_creation_error(namespace: Namespace) -> NotFoundError:
    """Return the error for a name whose re-creation was announced, and has no manifest yet."""
    name = namespace.name
    return NotFoundError(
        f"namespace {name} was dropped, and the process that was creating it again did not finish",
        kind=ErrorKind.DROPPED,
        hint=f"db.create({name!r}) completes it",
        namespace=name,
    )


def _damaged_head_error(error: CorruptionError) -> CorruptionError:
    return CorruptionError(
        f"the newest manifest is damaged: {error.message}",
        hint="Run `reef repair`: it publishes an intact one after it",
        **error.context,
    )


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
