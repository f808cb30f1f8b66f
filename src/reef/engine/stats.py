"""Statistics and descriptions of a namespace.

`namespace_stats` costs four listings, the head, and a bounded number of WAL headers, whatever the
size of the data. It writes nothing, so read-only credentials suffice. Segments of bulk loads that
are not folded yet count as level 0, where the fold will put them. If the head is damaged, the
damage is reported and the newest intact manifest is used. Ages are by the store's clock, which
dates the objects (H30).

`NamespaceInfo` describes one generation. Handles show themselves as a line in a terminal and as a
table in a notebook: from memory, without a request or a lock.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pyarrow as pa

from reef.engine.context import NamespaceContext
from reef.engine.display import columns_line, html_table, human_bytes, human_count
from reef.engine.log.log import Slot, listed_slots
from reef.engine.log.tail import read_unfolded
from reef.errors import CorruptionError, InvalidInputError, NotFoundError
from reef.formats.manifest import (
    BranchPin,
    Manifest,
    NamespaceState,
    Origin,
    SegmentEntry,
    newest_indexes,
)
from reef.formats.wal_object import WalHeader, WalKind
from reef.manifest.head import HeadFinder, ManifestHead, locate, locate_folder
from reef.manifest.roots import (
    UNKNOWN_GENERATION,
    effective_grace_ms,
    expired_snapshots,
    log_generations,
    pinned_generations,
)
from reef.paths import Namespace, number_of
from reef.stores import ObjectInfo, Store
from reef.stores.base import current_time_s

OBJECTS_MAX = 100
"""Objects of one namespace that are listed before the listing skips to the next namespace."""
HEADERS_READ_MAX = 64
"""WAL objects that are read to find the last writer, or the oldest rows."""


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """One segment, as recorded in the manifest."""

    id: str
    min_key: bytes
    max_key: bytes
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LevelStats:
    """The segments of one level, and the key range that they span."""

    level: int
    segments: tuple[SegmentStats, ...]
    """Ordered by first key."""
    min_key: bytes
    max_key: bytes
    rows: int
    tombstones: int
    patches: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LogStats:
    """The unfolded part of the log."""

    floor: int
    """The first unfolded LSN."""
    last_lsn: int
    objects: int
    bytes: int
    oldest_unfolded_s: float | None
    """Age of the first unfolded object with rows; None if there is none."""


@dataclass(frozen=True, slots=True)
class WriterStats:
    """The writer of the newest writer's object in the log. It may be closed or dead by now."""

    id: str
    epoch: int
    lsn: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Statistics of a namespace at one point in time."""

    name: str
    generation: int
    published_s: float
    """Age of this generation, by the clock of its publisher."""
    oldest_retained: int
    generations: int
    """Number of manifests in the bucket."""
    oldest_superseded_s: float | None
    """Time since the oldest unpinned generation was superseded; None if there is none."""
    schema_id: int
    columns: dict[str, str]
    levels: tuple[LevelStats, ...]
    log: LogStats
    writer_epoch: int
    compactor_epoch: int
    writer: WriterStats | None
    snapshots: dict[str, int]
    """Pinned generation by snapshot name, or by id for unnamed snapshots."""
    cursors: dict[str, int]
    leases: int
    open_jobs: int
    condemned: int
    overdue_s: float
    """Time since the oldest condemned object became deletable."""
    grace_s: float
    damage: tuple[str, ...] = field(default=())
    """Damage found while collecting these statistics; `verify` checks everything."""

    @property
    def segments(self) -> int:
        return sum(len(level.segments) for level in self.levels)

    @property
    def bytes(self) -> int:
        return sum(level.bytes for level in self.levels)

    @property
    def rows(self) -> int:
        """Row versions in segments, unfolded loads included: an upper bound of the rows, without
        the batches in the log."""
        return sum(level.rows for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        totals = {"segments": self.segments, "bytes": self.bytes, "rows": self.rows}
        return {**asdict(self), **totals}

    def facts(self) -> dict[str, str]:
        """Return the overview as text by name."""
        log, manifests = self.log, human_count(self.generations, "manifest")
        return {
            "generation": f"{self.generation}, {manifests} retained",
            "segments": f"{self.segments:,}, {human_bytes(self.bytes)}, at most {self.rows:,} rows",
            "log": f"{human_count(log.objects, 'object')}, {human_bytes(log.bytes)} unfolded, "
            f"LSN {log.floor} to {log.last_lsn}"
            if log.objects
            else f"all folded, up to LSN {log.last_lsn}",
            "writer": "none yet"
            if self.writer is None
            else f"{self.writer.id}, epoch {self.writer.epoch}, wrote "
            f"{self.writer.silent_s:,.0f} s ago",
            "pins": f"{human_count(len(self.snapshots), 'snapshot')}, "
            f"{human_count(len(self.cursors), 'cursor')}, {human_count(self.leases, 'lease')}, "
            f"{human_count(self.open_jobs, 'open job')}",
            "condemned": human_count(self.condemned, "object"),
        }

    def __repr__(self) -> str:
        size = f"{self.segments} segments, {human_bytes(self.bytes)}"
        log = f"{self.log.objects} unfolded objects"
        return f"<NamespaceStats {self.name}, generation {self.generation}, {size}, {log}>"

    def _repr_html_(self) -> str:
        return html_table(f"Namespace {self.name}", self.facts())


def namespace_stats(store: Store, name: str) -> NamespaceStats:
    """Return the statistics of a namespace; NotFoundError if there is none."""
    heads = locate(store, name, fallback=True)
    return _StatsReader(store, heads.names).stats(heads.found)


def list_states(store: Store) -> dict[str, NamespaceState]:
    """Return the state of every namespace, dropped ones included: a listing, and each head."""
    names = list(_listed_names(store))
    states = store.runtime.map(partial(namespace_state, store), names)
    return {n: state for n, state in zip(names, states, strict=True) if state is not None}


def _listed_names(store: Store) -> Iterator[str]:
    """List the names of namespaces, skipping the rest of one that has many objects."""
    after: str | None = ""
    while after is not None:
        name, seen, listed, after = "", 0, store.list("namespaces/", after), None
        for info in listed:
            listed_name = info.key.split("/")[1]
            if listed_name != name:
                name, seen = listed_name, 0
                yield name
            seen += 1
            if seen == OBJECTS_MAX:
                after = f"namespaces/{name}0"  # '0' follows '/': after all of its objects
                break


def branch_pins_in(store: Store, root: str) -> dict[str, BranchPin]:
    """Return the pins that branches need in a folder, derived from the heads of all namespaces.

    For a rebuild: the manifests that had them are lost. Branches whose heads cannot be read are not
    found.
    """
    pins = {}
    for name in _listed_names(store):
        with suppress(NotFoundError, CorruptionError):
            heads = locate_folder(store, name)
            head = heads.found.manifest
            if head.origin is not None and root in head.pinned_homes:
                at_ms = head.origin.at_ms
                last_lsn = max((p.last_lsn for p in head.inherited if p.root == root), default=0)
                pin = BranchPin(heads.names.root, UNKNOWN_GENERATION, last_lsn, at_ms)
                pins[head.origin.id] = pin
    return pins


def pins_of_branch(store: Store, root: str) -> list[Origin]:
    """Return the points in time that the heads of other namespaces pin for a branch in a folder.

    For a rebuild of the branch: its manifests are lost. A namespace that its origin was made of
    pins an earlier point for it; the latest one is that of the origin itself.
    """
    found = []
    for name in _listed_names(store):
        with suppress(NotFoundError, CorruptionError):
            heads = locate_folder(store, name)
            for branch, pin in heads.found.manifest.branches.items():
                if pin.root == root:
                    at = (pin.generation, pin.last_lsn, pin.pinned_at_ms)
                    found.append(Origin(branch, heads.names.root, *at))
    return sorted(found, key=lambda origin: -origin.last_lsn)[:1]


def branch_heads(store: Store) -> list[HeadFinder]:
    """Return every namespace that was made as a branch, dropped and replaced incarnations too.

    A listing, and each head. Those whose heads cannot be read are not found.
    """
    found = store.runtime.map(partial(_branch_heads, store), list(_listed_names(store)))
    return [heads for of_name in found for heads in of_name]


def _branch_heads(store: Store, name: str) -> list[HeadFinder]:
    unreadable = (NotFoundError, CorruptionError, InvalidInputError)
    found = []
    with suppress(*unreadable):
        found.append(current := locate_folder(store, name))
        for number in current.found.manifest.predecessors:
            earlier = NamespaceContext(store, current.names.at(number)).heads
            with suppress(*unreadable):
                earlier.find(fallback=True, dropped=True)
                found.append(earlier)
    return [heads for heads in found if heads.found.manifest.origin is not None]


def namespace_state(store: Store, name: str) -> NamespaceState | None:
    """Return the state in the manifest, "live" if it is damaged; None if there is no manifest."""
    try:
        found = locate(store, name, fallback=True, dropped=True).found
    except (NotFoundError, InvalidInputError):  # the latter: objects that are not Reef's
        return None
    except CorruptionError:
        return NamespaceState.LIVE
    return found.manifest.state


class _StatsReader:
    """Collects the statistics of one namespace."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._names = namespace
        self._log = NamespaceContext(store, namespace).log
        self._damage: list[str] = []

    def stats(self, found: ManifestHead) -> NamespaceStats:
        head = found.manifest
        if found.damage is not None:
            self._damage.append(found.damage.message)
        listed = list(listed_slots(self._store, self._names, head.wal_floor))
        slots = [info for _, info in listed]
        dates = self._manifest_dates()
        leases = sum(1 for _ in self._store.list(self._names.leases))
        now_s = current_time_s(self._store)  # after the listings, so that no age is negative
        expired = expired_snapshots(head, int(now_s * 1000))
        filled = [Slot(lsn, info.size) for lsn, info in listed]
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
            condemned=len(head.condemned) + sum(map(len, head.condemned_ranges)),
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
        """Return the age of the first object with rows; fences hold nothing to fold."""
        for info in slots[:HEADERS_READ_MAX]:
            header = self._header(head, info.key)
            if header is None or header.kind.has_rows or header.kind is WalKind.INGEST:
                return max(0.0, now_s - info.last_modified_s)
        return max(0.0, now_s - slots[0].last_modified_s) if len(slots) > HEADERS_READ_MAX else None

    def _writer(self, head: Manifest, slots: list[ObjectInfo], now_s: float) -> WriterStats | None:
        """Search backwards for an object of a writer; the one below the floor is retained."""
        for info in (*reversed(slots[-HEADERS_READ_MAX:]), *self._below_floor(head)):
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
    """Return the time since the oldest unpinned generation was superseded."""
    pinned = pinned_generations(head, int(now_s * 1000)) | log_generations(head)
    condemned = {number_of(c.key) for c in head.condemned if c.key.startswith("manifest/")}
    for one in head.condemned_ranges:
        condemned.update(range(one.first, one.last + 1) if one.folder == "manifest" else ())
    listed = sorted(generation for generation in dates if generation <= head.generation)
    ends = [
        dates[following]
        for generation, following in pairwise(listed)
        if generation not in pinned and generation not in condemned
    ]
    return max(0.0, now_s - min(ends)) if ends else None


def _overdue_s(head: Manifest, now_s: float) -> float:
    dates_ms = [one.since_ms for one in head.condemned]
    dates_ms += [one.since_ms for one in head.condemned_ranges]
    if not dates_ms:
        return 0.0
    oldest_s = min(dates_ms) / 1000
    return max(0.0, now_s - oldest_s - effective_grace_ms(head, int(now_s * 1000)) / 1000)


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Description of a namespace at one generation."""

    name: str
    generation: int
    schema: pa.Schema
    key: str
    schema_id: int
    fingerprint: str
    rows: int
    """Row versions in segments, unfolded loads included: an upper bound of the rows, without the
    batches in the log."""
    segments: int
    bytes: int
    wal_floor: int
    writer_epoch: int
    indexes: tuple[str, ...] = ()
    """Search indexes, such as `vector(embedding)`."""

    def facts(self) -> dict[str, str]:
        """Return the overview as text by name, without the columns."""
        return {
            "generation": str(self.generation),
            "rows in segments": f"at most {self.rows:,}" if self.rows else "none",
            "segments": f"{self.segments}, {human_bytes(self.bytes)}" if self.segments else "none",
            "folded up to LSN": str(self.wal_floor - 1),
            **({"indexes": ", ".join(self.indexes)} if self.indexes else {}),
        }

    def __repr__(self) -> str:
        size = f"{human_count(self.rows, 'row')} and {human_bytes(self.bytes)} in segments"
        where = f"generation {self.generation}, folded up to LSN {self.wal_floor - 1}"
        return f"<NamespaceInfo {self.name}, {where}, {size}, {columns_line(self.schema)}>"

    def _repr_html_(self) -> str:
        return html_table(f"Namespace {self.name}", self.facts(), self.schema, self.key)


def namespace_info(
    name: str, manifest: Manifest, ingested: tuple[SegmentEntry, ...] = ()
) -> NamespaceInfo:
    """Describe a generation, including segments of loads that it does not name yet."""
    segments = (*manifest.segments, *ingested)
    indexes = newest_indexes(manifest.indexes)
    return NamespaceInfo(
        name,
        manifest.generation,
        manifest.schema.arrow(),
        manifest.schema.key.name,
        manifest.schema.id,
        manifest.schema.fingerprint,
        sum(segment.rows for segment in segments),
        len(segments),
        sum(segment.size for segment in segments),
        manifest.wal_floor,
        manifest.writer_epoch,
        tuple(f"{s.kind}({_column_name(manifest, s.column)})" for s in indexes),
    )


def _column_name(manifest: Manifest, number: int) -> str:
    return next((c.name for c in manifest.schema.fields if c.number == number), f"#{number}")


def handle_html(title: str, info: NamespaceInfo, facts: dict[str, str]) -> str:
    """Format a handle on a namespace as an HTML table."""
    return html_table(f"{title} {info.name}", {**facts, **info.facts()}, info.schema, info.key)
