"""Create, drop, undrop and list namespaces (protocols §8).

Drop: take the writer role, so that the log ends with M fences and no older writer commits any
more; publish that the namespace is dropped, with the end of its log. Undrop: publish that it is
live. Create again: publish in the dropped chain which incarnation succeeds it, store that record,
and create the first manifest of the new chain from it; a process that finds a successor without
a manifest completes it. Each is decided by one CAS on a manifest; the registry, where there is
one, is updated before and after. Take back: a drop, for a namespace that was created for a load
which then failed, and that no other process has used.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from reef.config import WriterSettings
from reef.engine.commit.open_writer import WriterOpening
from reef.engine.context import NamespaceContext
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.engine.registry import Registry
from reef.engine.stats import list_states
from reef.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import (
    Alias,
    BranchPin,
    Dropped,
    IndexSpec,
    Manifest,
    NamespaceState,
    Origin,
    Rename,
    Successor,
    decode_manifest,
    encode_manifest,
    encode_successor,
)
from reef.formats.schema import Schema
from reef.manifest import branching, lifecycle
from reef.manifest.branching import restored_successor
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher, locate, locate_folder, refuse_dropped
from reef.manifest.lifecycle import LogEnd
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store, fetch
from reef.telemetry import Metrics


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A point in time to make a branch of."""

    manifest: Manifest
    generation: int
    """Generation of that manifest; 0 for the one that the pin publishes."""
    last_lsn: int


def _pinned(heads: HeadFinder, head: Manifest, branch_id: str) -> BranchPoint:
    """Return the point in time that a pin has published.

    After a slow publish the head is a later generation, with rows that the branch does not have and
    with objects that nothing pins (H42).
    """
    pin = head.branches[branch_id]
    manifest = head if pin.generation == head.generation else heads.load(pin.generation)
    return BranchPoint(manifest, pin.generation, pin.last_lsn)


FindPoint = Callable[[Manifest], BranchPoint]
"""Returns the point in time to branch from, given the head of the source."""

CREATES_MAX = 10
"""How often a namespace is created again because it was dropped at once."""
DROPS_MAX = 10
"""How often a drop fences again because a writer opened, or a fold passed its fences."""


def similar_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that `name` is likely a typo of, or None.

    One edit is a typo: a letter too many, too few, another one, or two swapped; two edits in names
    of 8 characters or more. Digits do not count: `events2` and `events-3` are names of their own.
    """
    for other in sorted(names):
        longest = max(len(name), len(other))
        if min(len(name), len(other)) >= 3 and other != name:
            limit = 1 if longest < 8 else 2
            if _typos(name.lower(), other.lower(), limit) <= limit:
                return other
    return None


def _typos(name: str, other: str, limit: int) -> int:
    """Return the edits between two names (Damerau-Levenshtein); past the limit if not letters."""
    if abs(len(name) - len(other)) > limit:
        return limit + 1
    before, above = list(range(len(other) + 1)), list[int]()
    for row, letter in enumerate(name, 1):
        current = [row]
        for column, against in enumerate(other, 1):
            cost = 0 if letter == against else 1 if (letter + against).isalpha() else limit + 1
            skip = 1 if letter.isalpha() else limit + 1
            add = 1 if against.isalpha() else limit + 1
            edits = min(before[column - 1] + cost, before[column] + skip, current[-1] + add)
            swapped = (
                row > 1 and column > 1 and name[row - 2 : row] == other[column - 2 : column][::-1]
            )
            current.append(min(edits, above[column - 2] + 1) if swapped else edits)
        before, above = current, before
    return before[-1]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces of one bucket, as things that come and go."""

    store: Store
    metrics: Metrics
    registry: Registry | None = None

    def names(self, state: NamespaceState) -> list[str]:
        """Return the names of those in a state, from the registry or by listing."""
        registered = None if self.registry is None else self.registry.names(state)
        if registered is not None:
            return registered
        return sorted(name for name, one in list_states(self.store).items() if one is state)

    def ensure(
        self,
        name: str,
        schema: Schema,
        made_for: str = "",
        *,
        indexes: tuple[IndexSpec, ...] = (),
        before_create: Callable[[], None] = lambda: None,
    ) -> Publisher:
        """Return the publisher of a namespace, which is created if it is absent or dropped.

        With `made_for`, the id of a job, one that is created now is dropped if that job fails.
        `before_create` is called before that, and may raise.
        """
        for _ in range(CREATES_MAX):
            absent = self.store.runtime.stopwatch()
            try:
                heads = locate(self.store, name, dropped=True)
            except NotFoundError as error:
                if error.context.get("folder") == name:  # of another namespace, by a rename
                    raise
                before_create()
                first = new_namespace(schema, made_for=made_for, indexes=indexes)
                with self._changing(name):
                    created = self._create(Namespace(name), first, absent)
                if created is not None:
                    return created
                continue
            publisher = self._publisher(heads)
            try:
                self._use(publisher, made_for)
            except NotFoundError:
                before_create()
                with self._changing(name):
                    self._create_again(publisher, schema, made_for, indexes=indexes)
            else:
                return publisher
        raise ConflictError(
            f"{name} was dropped again and again while it was being created", namespace=name
        )

    def use(self, name: str) -> Publisher:
        """Return the publisher of a namespace that no failed load takes back any more."""
        publisher = self.publisher(name)
        self._use(publisher)
        return publisher

    def _use(self, publisher: Publisher, made_for: str = "") -> None:
        head = publisher.heads.last or publisher.heads.find(dropped=True)
        refuse_dropped(publisher.heads.names, head.manifest)
        if head.manifest.made_for not in ("", made_for):
            publisher.publish(lifecycle.use)

    # --- creating -----------------------------------------------------------------
    def _create(self, names: Namespace, first: Manifest, absent: Stopwatch) -> Publisher | None:
        """Create the first incarnation; None if another process was first."""
        publisher = self._context(names).publisher
        if self.registry is not None:  # updating it took time: another process may have been first
            absent = self.store.runtime.stopwatch()
            with suppress(NotFoundError):
                publisher.heads.find(dropped=True)
                return self._create_over_alias(publisher, first)
        self._check_nothing_is_left(names)
        created = publisher.create(first, absent)
        return self._create_over_alias(publisher, first) if created is None else publisher

    def _create_over_alias(self, publisher: Publisher, first: Manifest) -> Publisher | None:
        """Create a namespace whose name was reserved by a rename that did not finish.

        None if there is no such alias: another process has created it, or a rename has.
        """
        alias = publisher.heads.find(dropped=True).manifest.alias
        if alias is None or self._withdraw(publisher.heads.names.name, alias):
            return None
        created = publisher.publish(
            lambda head: lifecycle.create_over(head, alias, first), dropped=True
        )
        return publisher if created.alias is None else None

    def _create_again(
        self,
        publisher: Publisher,
        schema: Schema,
        made_for: str,
        *,
        origin: Origin | None = None,
        indexes: tuple[IndexSpec, ...] = (),
        prepared: str = "",
    ) -> None:
        """Announce a successor in the dropped chain, or find one, and complete it."""
        now_ms = int(self.store.runtime.wall_s() * 1000)
        names, dropped = publisher.heads.names, publisher.heads.found.manifest.dropped
        if dropped is None:  # it was undropped meanwhile
            return
        # A load may have committed behind the fences, before the drop was published: its LSN is
        # not used again.
        used = [slot.lsn for slot in self._context(names).log.filled(dropped.end_lsn)]
        end = LogEnd(dropped.end_lsn, max(used, default=0) + 1)
        succeed = partial(
            lifecycle.succeed,
            schema=schema,
            now_ms=now_ms,
            end=end,
            made_for=made_for,
            origin=origin,
            indexes=indexes,
            prepared=prepared,
        )
        head = publisher.publish(succeed, dropped=True)
        self.store.runtime.reach("successor announced")
        if head.successor is not None:  # otherwise it was undropped meanwhile
            self._complete(names, head.successor)

    def _complete(self, dropped: Namespace, successor: Successor) -> None:
        """Store the record and the first manifest of an incarnation; both may be there already."""
        absent = self.store.runtime.stopwatch()
        names = dropped.at(successor.incarnation)
        publisher = self._context(names).publisher
        with suppress(NotFoundError):
            publisher.heads.find(dropped=True)
            return
        self._check_nothing_is_left(names)
        record = names.successor(successor.incarnation)
        if self.store.create(record, encode_successor(successor)).outcome is Outcome.UNKNOWN:
            raise UnavailableError(
                f"{record} may not have been written",
                hint="Create the namespace again: that completes it",
                namespace=names.name,
            )
        self.store.runtime.reach("successor recorded")
        try:
            first = self._first_manifest(successor)
        except NotFoundError:
            if not successor.prepared:
                raise
            # The process that prepared it has completed it, and deleted the prepared object.
            publisher.heads.find(dropped=True)
            return
        publisher.create(first, absent)

    def _first_manifest(self, successor: Successor) -> Manifest:
        if successor.prepared:
            key = successor.prepared
            first = fetch(self.store, key, lambda body: decode_manifest(body, key))
            return restored_successor(first, successor)
        if successor.origin is None:
            return lifecycle.first_manifest(successor)
        heads = self._context(Namespace.of_root(successor.origin.root)).heads
        head = heads.find(dropped=True).manifest
        source = heads.load(successor.origin.generation)
        first = branching.first_manifest(source, head, successor.origin)
        return branching.as_successor(first, successor)

    # --- branching ----------------------------------------------------------------
    def branch(self, source: HeadFinder, name: str, find: FindPoint) -> Manifest:
        """Create a namespace that shares the objects of another one at a point in time.

        `find` returns the generation and the last LSN to branch from. ConflictError if the name is
        in use.
        """
        origin = self._publisher(source)
        absent = self.store.runtime.stopwatch()
        root = self._free_root(name)
        branch_id = self.store.runtime.ulid()
        point, head = self._pin_branch(origin, branch_id, root, find)
        made = Origin(
            branch_id,
            origin.heads.names.root,
            point.generation,
            point.last_lsn,
            head.branches[branch_id].pinned_at_ms,
        )
        for home in branching.pinned_homes(point.manifest, made)[1:]:
            self._pin_again(home, branch_id, point.manifest, root)
        self.store.runtime.reach("branch pinned")
        first = branching.first_manifest(point.manifest, head, made)
        with self._changing(name):
            created = self._create_branch(name, Namespace.of_root(root), first, absent)
        if created is None:
            self._unpin(first, branch_id)
            raise ConflictError(f"namespace {name} exists", namespace=name)
        return created

    def _free_root(self, name: str) -> str:
        """Return the folder that a namespace of this name will have; ConflictError if in use."""
        try:
            heads = locate(self.store, name, dropped=True)
        except NotFoundError as error:
            if error.context.get("folder") == name:  # of another namespace, by a rename
                raise
            return Namespace(name).root
        found = heads.found.manifest
        if found.dropped is None:
            raise ConflictError(f"namespace {name} exists", namespace=name)
        return heads.names.at(found.incarnation + 1).root

    def _pin_branch(
        self, origin: Publisher, branch_id: str, root: str, find: FindPoint
    ) -> tuple[BranchPoint, Manifest]:
        """Pin a point in time for a branch; return it, and the head that has the pin."""
        now_ms = int(self.store.now() * 1000)
        for _ in range(CREATES_MAX):
            point = find(origin.heads.find(dropped=True).manifest)
            pin = BranchPin(root, point.generation, point.last_lsn, now_ms)
            head = origin.publish(
                partial(
                    branching.pin_branch,
                    branch_id=branch_id,
                    pin=pin,
                    pinned=point.manifest if point.generation else None,
                    now_ms=now_ms,
                ),
                dropped=True,
            )
            if branch_id in head.branches:
                return point if point.generation else _pinned(origin.heads, head, branch_id), head
        raise UnavailableError(
            f"{origin.heads.names.name} is folded faster than a branch can be made"
        )

    def _pin_again(self, home: str, branch_id: str, source: Manifest, root: str) -> None:
        """Pin in a namespace whose objects the source shares what the source has pinned there."""
        parent = branching.check_is_branch(source, home).id
        self._context(Namespace.of_root(home)).publisher.publish(
            lambda head: branching.pin_again(head, branch_id, parent, root), dropped=True
        )

    def _unpin(self, first: Manifest, branch_id: str) -> None:
        """Remove the pins of a branch that another process has created first."""
        for home in first.pinned_homes:
            self._context(Namespace.of_root(home)).publisher.publish(
                lambda head: branching.unpin_branch(head, branch_id), dropped=True
            )

    def _create_branch(
        self, name: str, names: Namespace, first: Manifest, absent: Stopwatch
    ) -> Manifest | None:
        """Create the first manifest of a branch; None if the name was created by another.

        `absent` was started before the name was found to be free: pinning may have taken long.
        """
        if names.incarnation == 1:
            publisher = self._create(names, first, absent)
            return None if publisher is None else publisher.heads.find(dropped=True).manifest
        dropped = self._publisher(locate(self.store, name, dropped=True))
        if dropped.heads.names.incarnation + 1 == names.incarnation:
            self._create_again(dropped, first.schema, "", origin=first.origin)
        found = locate(self.store, name, dropped=True).found.manifest
        return found if found.origin == first.origin else None

    # --- restoring ----------------------------------------------------------------
    def free_names(self, name: str) -> Namespace:
        """Return the names that a new namespace will have; ConflictError if the name is in use."""
        return Namespace.of_root(self._free_root(name))

    def create_restored(self, name: str, names: Namespace, first: Manifest) -> Manifest:
        """Create a namespace whose segments are stored already; ConflictError if it exists."""
        with self._changing(name):
            absent = self.store.runtime.stopwatch()
            created = None
            if self._free_root(name) == names.root:
                if names.incarnation == 1:
                    made = self._create(names, first, absent)
                    created = None if made is None else made.heads.find(dropped=True).manifest
                else:
                    created = self._create_prepared(name, names, first)
        if created is None:
            raise ConflictError(f"namespace {name} was created meanwhile", namespace=name)
        return created

    def _create_prepared(self, name: str, names: Namespace, first: Manifest) -> Manifest | None:
        """Replace a dropped namespace; None if another process was first.

        Any process can complete it from the object that has the first manifest.
        """
        key = names.prepared(self.store.runtime.ulid())
        if self.store.create(key, encode_manifest(first)).outcome is not Outcome.CREATED:
            raise UnavailableError(f"object {key} may not have been written", hint="Restore again")
        self.store.runtime.reach("restore prepared")
        dropped = self._publisher(locate(self.store, name, dropped=True))
        if dropped.heads.names.incarnation + 1 != names.incarnation:
            return None
        self._create_again(dropped, first.schema, "", prepared=key)
        successor = dropped.heads.find(dropped=True).manifest.successor
        if successor is None or successor.prepared != key:
            return None
        created = self._context(names).heads.find(dropped=True).manifest
        self.store.delete(key)  # a purge does not search it for keys
        return created

    # --- dropping -----------------------------------------------------------------
    def drop(self, name: str) -> Manifest:
        """Drop a namespace; NotFoundError if there is none. Fences its writer."""
        names = self.publisher(name).heads.names
        with self._changing(name):
            for _ in range(DROPS_MAX):
                publisher = self._context(names).publisher
                with suppress(FencedError):
                    manifest = self._try_to_drop(names, publisher)
                    if manifest.dropped is not None:
                        return manifest
        raise ConflictError(
            f"{name} was taken over by other writers while it was being dropped",
            hint="Stop its writers, and drop it again",
            namespace=name,
        )

    def _try_to_drop(self, names: Namespace, publisher: Publisher) -> Manifest:
        epoch, fences = self._opening(names, publisher).fence_off()
        self.store.runtime.reach("drop fenced")
        objects = self._context(names).log.read_many(fences)
        below = tuple(fence.header.write_id for fence in objects if fence is not None)
        if len(below) < len(fences):  # folded, and skipped by a repair: fence again
            return publisher.heads.find().manifest
        dropped = Dropped(int(self.store.now() * 1000), max(fences) + 1, below)
        return publisher.publish(lambda head: lifecycle.drop(head, epoch, dropped))

    def drop_if_unused(
        self, names: Namespace, job: str, end_lsn: int, below: tuple[str, ...]
    ) -> None:
        """Drop a namespace that was created for a job which was aborted, unless it is in use.

        The abort is in the slot below `end_lsn`; the write ids up to it are `below`.
        """
        dropped = Dropped(int(self.store.now() * 1000), end_lsn, below)
        with self._changing(names.name):
            self._context(names).publisher.publish(
                lambda head: lifecycle.drop_if_unused(head, job, dropped), dropped=True
            )

    def undrop(self, name: str) -> Manifest:
        """Restore a dropped namespace; NotFoundError if no namespace of that name is dropped."""
        publisher = self.publisher(name, dropped=True)
        found = publisher.heads.find(dropped=True).manifest
        lifecycle.undrop(found)  # raises if it cannot be restored, before the registry is changed
        if found.dropped is None:
            raise NotFoundError(
                f"there is no dropped namespace {name}: it is live",
                hint="reef namespaces --dropped lists them, in Python namespaces(dropped=True)",
                namespace=name,
            )
        with self._changing(name):
            return publisher.publish(lifecycle.undrop, dropped=True)

    # --- renaming -----------------------------------------------------------------
    def rename(self, name: str, to: str) -> Manifest:
        """Give a namespace another name; fences its writer (ADR 0036).

        A rename that was interrupted can be repeated; so can one that was finished.
        """
        target = Namespace(to)
        if name == to:
            raise InvalidInputError(f"{name} already has that name", namespace=name)
        try:
            publisher = self.publisher(name)
        except NotFoundError as error:
            if error.context.get("renamed_to") == to:
                return self.publisher(to).heads.found.manifest
            raise
        names = publisher.heads.names
        with self._changing(name), self._changing(to):
            rename = Rename(to, self.store.runtime.ulid())
            if to != names.folder:
                self._check_name_is_free(target)
            publisher.publish(lambda head: lifecycle.announce(head, rename))
            self.store.runtime.reach("rename announced")
            if to != names.folder:
                self._reserve(target, Alias(names.folder, rename.id))
            self.store.runtime.reach("rename reserved")
            return self._rename_fenced(names, rename)

    def _check_name_is_free(self, target: Namespace) -> None:
        """Raise before anything is written, in the usual case; `_reserve` decides."""
        with suppress(NotFoundError):
            found = self._context(target).heads.find(dropped=True).manifest
            if found.alias is None:
                raise self._name_used_error(target, found)

    def _reserve(self, target: Namespace, alias: Alias) -> None:
        """Store an alias in the chain of a name; ConflictError if the name is used."""
        for _ in range(CREATES_MAX):
            absent = self.store.runtime.stopwatch()
            publisher = self._context(target).publisher
            try:
                found = publisher.heads.find(dropped=True).manifest
            except NotFoundError:
                self._check_nothing_is_left(target)
                publisher.create(lifecycle.alias_manifest(alias), absent)
                continue
            if found.alias == alias:
                return
            if found.alias is None or self._withdraw(target.name, found.alias):
                raise self._name_used_error(target, found)
            edit = partial(lifecycle.replace_alias, old=found.alias, new=alias)
            publisher.publish(edit, dropped=True)
        raise ConflictError(
            f"{target.name} was used again and again while it was being reserved",
            namespace=target.name,
        )

    def _withdraw(self, name: str, alias: Alias) -> bool:
        """Make sure that an alias never comes into force; return whether it is in force."""
        try:
            heads = locate_folder(self.store, alias.folder)
        except NotFoundError:
            return False
        head = self._publisher(heads).publish(
            lambda head: lifecycle.withdraw(head, alias.id), dropped=True
        )
        return lifecycle.is_in_force(head, alias, name)

    def _name_used_error(self, target: Namespace, found: Manifest) -> ConflictError:
        name, current = target.name, found.name_in(target.folder)
        reason, hint = f"namespace {name} exists", "Choose another name, or rename that one first"
        if found.alias is None and current != name:
            reason = f"the objects of namespace {current} are stored under the name {name}"
            hint = f"Choose another name, or rename {current} back to {name}"
        elif found.dropped is not None:
            reason, hint = f"namespace {name} was dropped, and can be undropped", "Choose another"
        return ConflictError(reason, hint=hint, namespace=name)

    def _rename_fenced(self, names: Namespace, rename: Rename) -> Manifest:
        """Take the writer role, and publish the name while it is ours."""
        for _ in range(DROPS_MAX):
            publisher = self._context(names).publisher
            with suppress(FencedError):
                epoch, _ = self._opening(names, publisher).fence_off()
                self.store.runtime.reach("rename fenced")
                edit = partial(lifecycle.rename, rename=rename, epoch=epoch, folder=names.folder)
                head = publisher.publish(edit)
                if head.rename_id == rename.id:
                    return head
                if head.renaming != rename:
                    raise ConflictError(
                        f"the rename of {names.name} to {rename.to} was withdrawn: another process "
                        f"has created {rename.to}, or renamed {names.name}",
                        namespace=names.name,
                    )
        raise ConflictError(
            f"{names.name} was taken over by other writers while it was being renamed",
            hint="Stop its writers, and rename it again",
            namespace=names.name,
        )

    # --- parts --------------------------------------------------------------------
    def publisher(self, name: str, *, dropped: bool = False) -> Publisher:
        """Return the publisher of the current incarnation of a name; NotFoundError if none."""
        return self._publisher(locate(self.store, name, dropped=dropped))

    def _context(self, names: Namespace) -> NamespaceContext:
        return NamespaceContext(self.store, names, metrics=self.metrics)

    def _publisher(self, heads: HeadFinder) -> Publisher:
        return NamespaceContext(
            self.store, heads.names, metrics=self.metrics, heads=heads
        ).publisher

    def _changing(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.registry is None else self.registry.changing(name)

    def _opening(self, names: Namespace, publisher: Publisher) -> WriterOpening:
        cache = ByteCache(0, self.metrics)
        return WriterOpening(
            self.store,
            names,
            publisher,
            SegmentStore(self.store, names, cache),
            writer_id=self.store.runtime.ulid(),
            max_parallel_writes=1,
            lease_ttl_s=WriterSettings().lease_ttl_s,
        )

    def _check_nothing_is_left(self, names: Namespace) -> None:
        """A log without any manifest is damage: a fresh namespace would hide its rows.

        Unless another process has just created the namespace, and begun to write.
        """
        if next(iter(self.store.list(names.wal)), None) is None:
            return
        with suppress(NotFoundError):
            self._context(names).heads.find(dropped=True)
            return
        raise CorruptionError(
            f"namespace {names.name} has a log and no manifest",
            hint=f"Run rebuild: reef rebuild URL {names.name} --apply",
            object=names.manifests,
            offset=0,
        )
