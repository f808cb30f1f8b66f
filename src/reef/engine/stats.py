"""What a namespace holds, and how it is doing: levels, log, generations, pins, its writer.

Four listings, the head, and the headers of the log, up to a bound: constant work whatever the
data's size, nothing is written, and read-only credentials are enough. Segments of loads that no
fold has passed count as level 0, where the fold puts them. A damaged head is told, and the newest
sound manifest stands in for it, so that there is something to look at. Ages are by the store's
clock, which dates the objects (H30).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from reef.engine.display import html_table, human_bytes, human_count
from reef.engine.log import Log, Slot
from reef.engine.unfolded import read_unfolded
from reef.errors import CorruptionError, InvalidInputError, NotFoundError
from reef.formats.manifest import Manifest, NamespaceState, SegmentEntry
from reef.formats.wal_object import WalHeader, WalKind
from reef.manifest.head import Head, locate
from reef.manifest.roots import (
    effective_grace_ms,
    expired_snapshots,
    log_generations,
    pinned_generations,
)
from reef.paths import Namespace, number_of
from reef.stores import ObjectInfo, Store
from reef.stores.dates import now_to_look

__all__ = [
    "LevelStats",
    "LogStats",
    "NamespaceStats",
    "SegmentStats",
    "WriterStats",
    "list_states",
    "namespace_state",
    "namespace_stats",
]

OBJECTS_MAX = 100
"""Of one namespace, listed on the way to the next: a page holds those of several."""
LOOKED_AT_MAX = 64
"""Objects of the log that are opened in search of a writer's, or of rows."""


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """One segment, as the manifest knows it."""

    id: str
    min_key: bytes
    max_key: bytes
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LevelStats:
    """The segments of one level, and the keys that they span."""

    level: int
    segments: tuple[SegmentStats, ...]
    """By their first key."""
    min_key: bytes
    max_key: bytes
    rows: int
    tombstones: int
    patches: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LogStats:
    """What stands in the log and is not folded."""

    floor: int
    """The first LSN that is not folded."""
    last_lsn: int
    objects: int
    bytes: int
    oldest_unfolded_s: float | None
    """How long ago the first object with rows was put there; None if there is none."""


@dataclass(frozen=True, slots=True)
class WriterStats:
    """Who wrote last. Nobody registers: the log alone tells, and not whether it is still there."""

    id: str
    epoch: int
    lsn: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """A namespace, as of one look at it."""

    name: str
    generation: int
    published_s: float
    """How long ago this generation was published, by the clock of who did."""
    oldest_retained: int
    generations: int
    """Manifests in the bucket."""
    oldest_superseded_s: float | None
    """How long ago the oldest generation that nobody pins had its successor; None without one."""
    schema_id: int
    columns: dict[str, str]
    levels: tuple[LevelStats, ...]
    log: LogStats
    writer_epoch: int
    compactor_epoch: int
    writer: WriterStats | None
    snapshots: dict[str, int]
    """By name, or id where it has none: the generation that is pinned."""
    cursors: dict[str, int]
    leases: int
    open_jobs: int
    condemned: int
    overdue_s: float
    """For how long the oldest condemned object could have been deleted."""
    grace_s: float
    damage: tuple[str, ...] = field(default=())
    """What was found to be damaged on the way; `verify` looks at everything."""

    @property
    def segments(self) -> int:
        return sum(len(level.segments) for level in self.levels)

    @property
    def bytes(self) -> int:
        return sum(level.bytes for level in self.levels)

    @property
    def rows(self) -> int:
        """Versions in segments, loads that are not folded included: an upper bound of the rows,
        without the batches in the log."""
        return sum(level.rows for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        totals = {"segments": self.segments, "bytes": self.bytes, "rows": self.rows}
        return {**asdict(self), **totals}

    def facts(self) -> dict[str, str]:
        """Return the overview, as people read it."""
        log = self.log
        return {
            "generation": f"{self.generation}, {human_count(self.generations, 'manifest')} kept",
            "segments": f"{self.segments:,}, {human_bytes(self.bytes)}, at most {self.rows:,} rows",
            "log": f"{human_count(log.objects, 'object')}, {human_bytes(log.bytes)} not folded, "
            f"LSN {log.floor} to {log.last_lsn}"
            if log.objects
            else f"all folded, up to LSN {log.last_lsn}",
            "writer": "nobody has written yet"
            if self.writer is None
            else f"{self.writer.id}, epoch {self.writer.epoch}, silent for "
            f"{self.writer.silent_s:,.0f} s",
            "pins": f"{human_count(len(self.snapshots), 'snapshot')}, "
            f"{human_count(len(self.cursors), 'cursor')}, {human_count(self.leases, 'lease')}, "
            f"{human_count(self.open_jobs, 'open job')}",
            "condemned": human_count(self.condemned, "object"),
        }

    def __repr__(self) -> str:
        size = f"{self.segments} segments, {human_bytes(self.bytes)}"
        log = f"{self.log.objects} objects not folded"
        return f"<NamespaceStats {self.name}, generation {self.generation}, {size}, {log}>"

    def _repr_html_(self) -> str:
        return html_table(f"Namespace {self.name}", self.facts())


def namespace_stats(store: Store, name: str) -> NamespaceStats:
    """Return the statistics of a namespace; NotFoundError if there is none."""
    heads = locate(store, name, fallback=True)
    return _Look(store, heads.names).stats(heads.found)


def list_states(store: Store) -> dict[str, NamespaceState]:
    """Return the namespaces there are, dropped ones too: a listing, and the head of each."""
    names = list(_listed_names(store))
    states = store.runtime.gather([partial(namespace_state, store, name) for name in names])
    return {n: state for n, state in zip(names, states, strict=True) if state is not None}


def _listed_names(store: Store) -> Iterator[str]:
    """List, but skip what is left of a namespace that turns out to have many objects."""
    after: str | None = ""
    while after is not None:
        name, seen, listed, after = "", 0, store.list("namespaces/", after), None
        for info in listed:
            found = info.key.split("/")[1]
            if found != name:
                name, seen = found, 0
                yield name
            seen += 1
            if seen == OBJECTS_MAX:
                after = f"namespaces/{name}0"  # the character after '/', so behind all it has
                break


def namespace_state(store: Store, name: str) -> NamespaceState | None:
    """Return what the manifest says, or "live" if damage keeps it from saying; None without any."""
    try:
        found = locate(store, name, fallback=True, dropped=True).found
    except (NotFoundError, InvalidInputError):  # the latter: somebody else's objects
        return None
    except CorruptionError:
        return NamespaceState.LIVE
    return found.manifest.state


class _Look:
    """One look at a namespace."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._names = namespace
        self._log = Log(store, namespace)
        self._damage: list[str] = []

    def stats(self, found: Head) -> NamespaceStats:
        head = found.manifest
        if found.damage is not None:
            self._damage.append(found.damage.message)
        slots = list(self._store.list(self._names.wal, self._names.wal_object(head.wal_floor - 1)))
        dates = self._manifest_dates()
        leases = sum(1 for _ in self._store.list(self._names.leases))
        now_s = now_to_look(self._store)  # after the listings: nothing is younger than it seems
        expired = expired_snapshots(head, int(now_s * 1000))
        filled = [Slot(number_of(info.key) or 0, info.size) for info in slots]
        unfolded = read_unfolded(self._store, self._names, head, filled)
        return NamespaceStats(
            name=self._names.name,
            generation=head.generation,
            published_s=max(0.0, now_s - head.published_at_ms / 1000),
            oldest_retained=head.oldest_retained,
            generations=len(dates),
            oldest_superseded_s=_superseded_s(head, dates, now_s),
            schema_id=head.schema.id,
            columns={f.name: f.type for f in (head.schema.key, *head.schema.fields)},
            levels=tuple(_levels((*unfolded.ingested, *head.segments))),
            log=self._log_stats(head, slots, now_s),
            writer_epoch=head.writer_epoch,
            compactor_epoch=head.compactor_epoch,
            writer=self._writer(head, slots, now_s),
            snapshots={s.name or s.id: s.generation for s in head.snapshots if s.id not in expired},
            cursors={name: entry.lsn for name, entry in sorted(head.cursors.items())},
            leases=leases,
            open_jobs=len(unfolded.open_jobs),
            condemned=len(head.condemned),
            overdue_s=_overdue_s(head, now_s),
            grace_s=effective_grace_ms(head, int(now_s * 1000)) / 1000,
            damage=tuple(dict.fromkeys(self._damage)),
        )

    def _manifest_dates(self) -> dict[int, float]:
        infos = self._store.list(self._names.manifests)
        numbered = ((number_of(info.key), info.last_modified_s) for info in infos)
        return {number: date_s for number, date_s in numbered if number is not None}

    # --- the log ------------------------------------------------------------------
    def _log_stats(self, head: Manifest, slots: list[ObjectInfo], now_s: float) -> LogStats:
        lsns = [number_of(info.key) or 0 for info in slots]
        return LogStats(
            floor=head.wal_floor,
            last_lsn=max(lsns, default=head.wal_floor - 1),
            objects=len(slots),
            bytes=sum(info.size for info in slots),
            oldest_unfolded_s=self._oldest_unfolded_s(head, slots, now_s),
        )

    def _oldest_unfolded_s(
        self, head: Manifest, slots: list[ObjectInfo], now_s: float
    ) -> float | None:
        """Pass over fences: a namespace that was only opened has nothing to fold."""
        for info in slots[:LOOKED_AT_MAX]:
            header = self._header(head, info.key)
            if header is None or header.kind in (WalKind.BATCHES, WalKind.INGEST):
                return max(0.0, now_s - info.last_modified_s)
        return max(0.0, now_s - slots[0].last_modified_s) if len(slots) > LOOKED_AT_MAX else None

    def _writer(self, head: Manifest, slots: list[ObjectInfo], now_s: float) -> WriterStats | None:
        """Look from the end of the log for an object of a writer; the floor's last one is kept."""
        for info in (*reversed(slots[-LOOKED_AT_MAX:]), *self._below_floor(head)):
            header = self._header(head, info.key)
            if header is not None and header.kind.of_writer:
                silent_s = max(0.0, now_s - info.last_modified_s)
                return WriterStats(header.writer_id, header.epoch, header.lsn, silent_s)
        return None

    def _below_floor(self, head: Manifest) -> Iterator[ObjectInfo]:
        try:
            yield self._store.head(self._names.wal_object(max(1, head.wal_floor - 1)))
        except NotFoundError:
            return

    def _header(self, head: Manifest, key: str) -> WalHeader | None:
        lsn = number_of(key)
        if lsn is None or lsn in head.skipped_lsns:
            return None
        try:
            found = self._log.read(lsn)
        except CorruptionError as error:
            self._damage.append(error.message)
            return None
        return None if found is None else found.header


def _levels(segments: tuple[SegmentEntry, ...]) -> Iterator[LevelStats]:
    for level in sorted({segment.level for segment in segments}):
        mine = sorted((s for s in segments if s.level == level), key=lambda s: (s.min_key, s.id))
        yield LevelStats(
            level,
            tuple(SegmentStats(s.id, s.min_key, s.max_key, s.rows, s.size) for s in mine),
            min(s.min_key for s in mine),
            max(s.max_key for s in mine),
            sum(s.rows for s in mine),
            sum(s.tombstones for s in mine),
            sum(s.patches for s in mine),
            sum(s.size for s in mine),
        )


def _superseded_s(head: Manifest, dates: dict[int, float], now_s: float) -> float | None:
    """A generation's time ends with the date of the one that followed it; pins prolong it."""
    pinned = pinned_generations(head, int(now_s * 1000)) | log_generations(head)
    condemned = {number_of(c.key) for c in head.condemned if c.key.startswith("manifest/")}
    listed = sorted(generation for generation in dates if generation <= head.generation)
    ends = [
        dates[following]
        for generation, following in pairwise(listed)
        if generation not in pinned and generation not in condemned
    ]
    return max(0.0, now_s - min(ends)) if ends else None


def _overdue_s(head: Manifest, now_s: float) -> float:
    if not head.condemned:
        return 0.0
    oldest_s = min(condemned.since_ms for condemned in head.condemned) / 1000
    return max(0.0, now_s - oldest_s - effective_grace_ms(head, int(now_s * 1000)) / 1000)
