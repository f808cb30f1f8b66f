"""Snapshots of earlier incarnations: the only roots that keep objects of a name's earlier lives.

After a drop and a re-creation nothing but snapshots, and branches, which check their own objects,
reads an earlier incarnation. So each snapshot is opened as a reader opens it: its manifest, the log
from its floor to its last LSN, and the segments that both name. A generation that several snapshots
pin is read once.

Only names that were created again pay: a listing and a manifest for each predecessor that is not
swept, and what its snapshots need.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reef.engine.context import NamespaceContext
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime
from reef.errors import CorruptionError, NotFoundError, ReefError, UnsupportedFormatError
from reef.formats.manifest import Manifest, SnapshotEntry
from reef.jobs.verify.chain import Problem, ProblemKind
from reef.jobs.verify.objects import check_segments
from reef.manifest.head import HeadFinder
from reef.manifest.roots import expired_snapshots
from reef.runtime import Executor
from reef.stores.base import current_time_s

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class UnreadableSnapshots:
    """Snapshots of one earlier incarnation that can no longer be read, and why."""

    incarnation: int
    snapshots: tuple[SnapshotEntry, ...]
    problems: tuple[Problem, ...]


def check_earlier(
    context: NamespaceContext, executor: Executor, head: Manifest, *, deep: bool
) -> list[UnreadableSnapshots]:
    """Check the snapshots of the incarnations before that of a head; changes nothing."""
    checks = [_Check(context.at(n), executor, deep) for n in head.predecessors]
    return [found for check in checks if (found := check.run()) is not None]


def problems_of(found: Iterable[UnreadableSnapshots]) -> list[Problem]:
    """Return the reasons why they cannot be read."""
    return [problem for unreadable in found for problem in unreadable.problems]


@dataclass
class _Check:
    """The check of one earlier incarnation."""

    context: NamespaceContext
    executor: Executor
    deep: bool

    def run(self) -> UnreadableSnapshots | None:
        """Return the snapshots that cannot be read; None if there are none."""
        wrong: dict[str, tuple[SnapshotEntry, list[Problem]]] = {}
        try:
            head = self._head()
            known: dict[int, list[Problem]] = {}
            for snapshot in self._alive(head):
                if snapshot.generation not in known:
                    known[snapshot.generation] = list(self._problems(head, snapshot))
                if known[snapshot.generation]:
                    wrong[snapshot.id] = snapshot, known[snapshot.generation]
            if wrong:  # released meanwhile, and swept?
                still = {snapshot.id for snapshot in self._alive(self._head())}
                wrong = {i: found for i, found in wrong.items() if i in still}
        except (CorruptionError, NotFoundError):
            return None  # its snapshots are lost with its manifests
        if not wrong:
            return None
        problems = {p: None for _, found in wrong.values() for p in found}
        snapshots = tuple(snapshot for snapshot, _ in wrong.values())
        return UnreadableSnapshots(self.context.names.incarnation, snapshots, tuple(problems))

    def _head(self) -> Manifest:
        heads = HeadFinder(self.context.store, self.context.names)
        return heads.find(fallback=True, dropped=True).manifest

    def _alive(self, head: Manifest) -> list[SnapshotEntry]:
        if not head.snapshots:
            return []
        now_ms = int(current_time_s(self.context.store) * 1000)
        expired = expired_snapshots(head, now_ms)
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
