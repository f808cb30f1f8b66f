"""Snapshots of earlier incarnations: the only roots that keep objects of a name's earlier lives.

After a drop and a re-creation nothing but snapshots, and branches, which check their own objects,
reads an earlier incarnation. So each snapshot is opened as a reader opens it: its manifest, the log
from its floor to its last LSN, and the segments that both name. A generation that several snapshots
pin is read once. Sweeps also load the manifests that the dropped head retains, and those that its
cursors name; without one of them they cannot tell what is needed, and collect nothing.

Only names that were created again pay: a listing and a manifest for each predecessor that is not
swept, and what its snapshots need.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from reef.engine.context import NamespaceContext
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime
from reef.errors import CorruptionError, NotFoundError, ReefError, UnsupportedFormatError
from reef.formats.manifest import Manifest, SnapshotEntry
from reef.jobs.verify.chain import Problem, ProblemKind, Roots, load
from reef.jobs.verify.objects import check_segments
from reef.manifest.head import HeadFinder
from reef.manifest.repairs import Repairs
from reef.manifest.roots import expired_snapshots
from reef.runtime import Executor
from reef.stores.base import current_time_s

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class EarlierDamage:
    """What can no longer be read of one earlier incarnation, and why."""

    incarnation: int
    snapshots: tuple[SnapshotEntry, ...]
    generations: frozenset[int]
    """Retained ones without an intact manifest."""
    cursors: tuple[str, ...]
    """Those that resume from such a generation: nothing reads them."""
    problems: tuple[Problem, ...]

    def without_nothing(self) -> "EarlierDamage | None":
        """Return the damage if anything needs what is damaged."""
        return self if self.snapshots or self.generations else None

    @property
    def repairs(self) -> Repairs:
        """Return the edit of the dropped head that releases all of it."""
        return Repairs(
            skipped_generations=self.generations,
            snapshots=frozenset(snapshot.id for snapshot in self.snapshots),
            cursors=dict.fromkeys(self.cursors),
        )


def check_earlier(
    context: NamespaceContext, executor: Executor, head: Manifest, *, deep: bool
) -> list[EarlierDamage]:
    """Check the snapshots of the incarnations before that of a head; changes nothing."""
    checks = [_Check(context.at(n), executor, deep) for n in head.predecessors]
    return [found for check in checks if (found := check.run()) is not None]


def problems_of(found: Iterable[EarlierDamage]) -> list[Problem]:
    """Return the reasons why they cannot be read."""
    return [problem for damage in found for problem in damage.problems]


@dataclass
class _Check:
    """The check of one earlier incarnation."""

    context: NamespaceContext
    executor: Executor
    deep: bool

    def run(self) -> EarlierDamage | None:
        """Return what cannot be read; None if all can."""
        try:
            head = self._head()
            found = self._damage(head)
            if found is not None:  # released meanwhile, and swept?
                found = self._still(found)
        except (CorruptionError, NotFoundError):
            return None  # its snapshots are lost with its manifests
        return found

    def _damage(self, head: Manifest) -> EarlierDamage | None:
        known = {g: [problem] for g, problem in self._lost(head).items()}
        lost, snapshots = frozenset(known), []
        for snapshot in self._alive(head):
            if snapshot.generation not in known:
                known[snapshot.generation] = list(self._problems(head, snapshot))
            if known[snapshot.generation]:
                snapshots.append(snapshot)
        problems = {problem: None for found in known.values() for problem in found}
        if not problems:
            return None
        cursors = tuple(n for n, cursor in head.cursors.items() if cursor.generation in lost)
        number = self.context.names.incarnation
        return EarlierDamage(number, tuple(snapshots), lost, cursors, tuple(problems))

    def _still(self, found: EarlierDamage) -> EarlierDamage | None:
        """Return the damage without snapshots and generations that need no more."""
        head = self._head()
        alive = {snapshot.id for snapshot in self._alive(head)}
        kept = Roots.of(head, self._now_ms())
        return replace(
            found,
            snapshots=tuple(s for s in found.snapshots if s.id in alive),
            generations=frozenset(g for g in found.generations if kept.keep_log(g)),
        ).without_nothing()

    def _lost(self, head: Manifest) -> dict[int, Problem]:
        """Return the problems of the manifests that a sweep loads."""
        heads = HeadFinder(self.context.store, self.context.names)
        generations = [g for g in Roots.of(head, self._now_ms()).all() if g != head.generation]
        found = self.context.runtime.map(partial(load, heads, self.context.names), generations)
        both = zip(generations, found, strict=True)
        return {g: problem for g, problem in both if isinstance(problem, Problem)}

    def _now_ms(self) -> int:
        return int(current_time_s(self.context.store) * 1000)

    def _head(self) -> Manifest:
        heads = HeadFinder(self.context.store, self.context.names)
        return heads.find(fallback=True, dropped=True).manifest

    def _alive(self, head: Manifest) -> list[SnapshotEntry]:
        if not head.snapshots:
            return []
        expired = expired_snapshots(head, self._now_ms())
        return [snapshot for snapshot in head.snapshots if snapshot.id not in expired]

    def _problems(self, head: Manifest, snapshot: SnapshotEntry) -> Iterator[Problem]:
        """Read everything that a snapshot needs, as a reader does."""
        names, generation = self.context.names, snapshot.generation
        kind, key = ProblemKind.MANIFEST_DAMAGED, names.manifest(generation)
        try:
            history = History(
                self.context.store, names, self.context.segments(CACHE_BYTES), dropped=True
            )
            manifest = history.load(generation)
            kind, key = ProblemKind.WAL_DAMAGED, names.wal
            last_lsn = max(manifest.wal_id_last_seen, manifest.wal_floor - 1)
            tail = history.replay(PointInTime(manifest, last_lsn), head)
        except UnsupportedFormatError as error:
            yield Problem(ProblemKind.UNSUPPORTED, _object(error, key), error.message)
            return
        except (CorruptionError, NotFoundError) as error:
            yield Problem(kind, _object(error, key), error.message, generation=generation)
            return
        except ConcurrentSweep as error:
            yield Problem(ProblemKind.MANIFEST_MISSING, key, str(error), generation=generation)
            return
        entries = {e.id: e for e in (*manifest.segments, *tail.view().memtable.cut().ingested)}
        ordered = [entries[i] for i in sorted(entries)]
        yield from check_segments(self.executor, self.context, ordered, deep=self.deep)


def _object(error: ReefError, key: str) -> str:
    return str(error.context.get("object") or key)
