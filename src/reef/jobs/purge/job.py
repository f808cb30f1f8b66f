"""Purge: erase all rows of some keys from a namespace, and prove it.

    1  survey    scan every object for the keys; nothing found: nothing is changed
    2  release   the snapshots that pin such objects, if asked
    3  delete    commit a delete of every key that has a row, then an object without rows, so that
                 the deletes are neither the last object of the log nor at the mark of their stream
    4  fold      the log behind both
    5  rewrite   the segments that hold the keys, without tombstones   (`reef.jobs.purge.rewrite`)
    6  sweep     retaining nothing but the head and pins; earlier incarnations at once
    7  scan      again; explain every object that still holds a row      (`reef.jobs.purge.scan`)

Steps 3 to 6 are the commits and jobs of every day: a live writer, readers and other jobs are not
disturbed, a crash at any step leaves a namespace without the rows and with more garbage, and the
next run continues. Rows that are written while a purge runs, after its deletes, are kept.

Objects are deleted a grace period after they are condemned. A run that does not wait reports when
the next one makes progress. With `include_branches`, branches are purged first, and made
independent of their origin, since a branch pins a whole generation of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import CompactOptions, CompactSettings, SweepSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.read.view import newest_rows
from reef.engine.rows.batch import check_text, encode_keys
from reef.engine.stats import branch_heads
from reef.errors import ConflictError, CorruptionError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import OpKind, Ops
from reef.jobs.arguments import check_arguments
from reef.jobs.fold.job import fold
from reef.jobs.ingest.append import StreamAppender
from reef.jobs.purge.rewrite import DeadVersions, Rewriter, check_backfills, figures, rewrite
from reef.jobs.purge.scan import Pin, Pins, PurgedChain, ScannedObject, scan_objects, sorted_keys
from reef.jobs.sweep.job import sweep_with
from reef.manifest.edits import drop_snapshot
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace, number_of
from reef.runtime import Executor
from reef.stores import ObjectInfo
from reef.telemetry import operation

STREAM = "reef:purge"
"""The stream whose batches are the deletes of purges."""
KEYS_AT_ONCE = 10_000
"""Keys that are looked up together, and deleted by one commit."""
ATTEMPTS_MAX = 10
SURVEYS_MAX = 5
ROUNDS_MAX = 50
"""How often a purge that waits sweeps."""
WAKE_MARGIN_S = 1.0
SHORT_ROUNDS, SHORT_PAUSE_S = 4, 10.0
"""So often a run waits so long, unasked: generations of the last second cannot be swept yet."""


@dataclass(frozen=True, slots=True)
class RemainingObject:
    """An object that still holds rows of the keys."""

    object: str
    rows: int
    """Versions of the keys in it, tombstones included."""
    bytes: int
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """The erased rows, and the proof: every remaining object was read."""

    namespace: str
    applied: bool
    keys: int
    generation: int
    origin: str | None = None
    """Namespace that a branch was made from, which has rows of its own."""
    independent: tuple[str, ...] = ()
    """Branches that were not searched: they share no object any more, and have rows of their own.
    With `include_branches` they are purged too."""
    rows_deleted: int = 0
    """Keys that had a row, and were deleted by a commit."""
    segments_rewritten: int = 0
    versions_dropped: int = 0
    snapshots_released: tuple[str, ...] = ()
    objects_deleted: int = 0
    """By the sweeps of this run, whatever they held."""
    remaining: tuple[RemainingObject, ...] = ()
    """Objects that still hold rows, and who pins them."""
    unreadable: tuple[str, ...] = ()
    """Objects that cannot be decoded, so that nothing is proved about them."""
    bounds: tuple[str, ...] = ()
    """Objects that name one of the keys as the bound of a range, and hold no row of it."""
    objects_scanned: int = 0
    bytes_scanned: int = 0
    continue_at: str | None = None
    """When running it again makes progress, by the store's clock; None if no time brings any."""

    @property
    def erased(self) -> bool:
        """Whether no object holds a row of the keys."""
        return not self.remaining and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "erased": self.erased}


def purge(
    db: Database,
    namespace: str,
    keys: Iterable[bytes | str],
    *,
    apply: bool = True,
    release_snapshots: bool = False,
    include_branches: bool = False,
    wait_s: float = 0.0,
    executor: Executor | None = None,
    **settings: Unpack[CompactOptions],
) -> PurgeReport:
    """Erase the rows of some keys from every object of a namespace; `apply=False` is a dry run.

    The report lists every object that still holds a version of a key, and what pins it. Time travel
    to states before the purge ends with it. `release_snapshots` releases the snapshots that pin
    such objects; `include_branches` erases the rows from branches too, and copies the shared rows
    that they keep. Objects are deleted after a grace period: `wait_s` is how long to wait for it at
    most; otherwise run the purge again at `continue_at`.
    """
    check_arguments(db, executor)
    purged = _check_arguments(keys, wait_s)
    CompactSettings().changed(settings)
    job = _Purge(db, namespace, purged, executor, settings, include_branches)
    job.check_text()
    if not apply:
        return job.survey()
    db._prove_store()
    with operation(db.metrics, "purge"), db._working("purge", namespace):
        report = job.run(release_snapshots=release_snapshots, wait_s=wait_s)
    db.events.emit("purged", namespace=namespace, keys=report.keys, erased=report.erased)
    return report


def _check_arguments(keys: Iterable[bytes | str], wait_s: float) -> pa.Array:
    purged = sorted_keys(encode_keys(keys))
    if not len(purged):
        raise InvalidInputError("keys is empty: name the keys to erase", kind=ErrorKind.INVALID_KEY)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < 1e9:
        raise InvalidInputError(
            f"wait_s={wait_s!r} is not a number of seconds", kind=ErrorKind.INVALID_OPTION
        )
    return purged


@dataclass
class _Purge:
    """One run. Figures are collected as it proceeds."""

    db: Database
    namespace: str
    keys: pa.Array
    executor: Executor | None
    settings: CompactOptions
    include_branches: bool
    made_of: "_MadeOf" = field(init=False)
    is_continued: bool = False
    """Whether the deletes of a purge that died are the last batch of the stream of all purges."""
    rows_deleted: int = 0
    segments_rewritten: int = 0
    versions_dropped: int = 0
    objects_deleted: int = 0
    snapshots_released: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.made_of = _MadeOf(self.db)

    def check_text(self) -> None:
        head = locate(self.db.store, self.namespace).found.manifest
        check_text(self.keys.to_pylist(), head.schema)

    def run(self, *, release_snapshots: bool, wait_s: float) -> PurgeReport:
        report = self.survey(applied=True)
        if report.erased:
            return report
        pins = [pin for one in report.remaining for pin in one.pins]
        self.is_continued = any((pin.kind, pin.name) == ("stream", STREAM) for pin in pins)
        names = [*self._branches(), self.namespace]
        for name in names:
            self._erase(name, is_branch=name != self.namespace)
            self.db.store.runtime.reach("purge rewritten")
        if release_snapshots:  # not before: a purge that is refused changes nothing
            self._release(report)
        return self._sweep_until(names, wait_s)

    # --- survey -----------------------------------------------------------------------
    def survey(self, *, applied: bool = False) -> PurgeReport:
        """Scan every object and explain those that hold rows.

        A fold or merge may move rows into an object that was not listed yet while a sweep deletes
        the one that was about to be read. A survey that missed an object of its heads is repeated;
        of objects missed by the last one nothing is proved.
        """
        report, missed = self._survey(applied)
        for _ in range(SURVEYS_MAX - 1):
            if not missed:
                break
            report, missed = self._survey(applied)
        return replace(report, unreadable=(*report.unreadable, *missed))

    def _survey(self, applied: bool) -> tuple[PurgeReport, list[str]]:
        """Return the report of one scan, and the objects of the heads that it has missed."""
        store = self.db.store
        places = self._places()
        pins = {
            place.root: Pins(store, place, places, is_swept=self._sweeps(place)) for place in places
        }
        objects = {info.key: info for info in self._objects(places, pins)}
        scanned = scan_objects(self.executor or store.runtime, store, objects.values(), self.keys)
        for one in pins.values():
            one.learn(scanned.found)
        remaining = tuple(_remaining(places, pins, scanned.found))
        times = [at for one in remaining if (at := _free_at(one)) is not None]
        read = objects.keys() - set(scanned.gone)
        missed = [
            key for place in places for key in self._missed_objects(place, read, scanned.found)
        ]
        report = PurgeReport(
            self.namespace,
            applied,
            len(self.keys),
            places[0].head.generation,
            _origin_of(places[0].head),
            () if self.include_branches else self._independent(places),
            rows_deleted=self.rows_deleted,
            segments_rewritten=self.segments_rewritten,
            versions_dropped=self.versions_dropped,
            snapshots_released=self.snapshots_released,
            objects_deleted=self.objects_deleted,
            remaining=remaining,
            unreadable=tuple(one.key for one in scanned.found if one.problem),
            bounds=tuple(one.key for one in scanned.found if one.bounds),
            objects_scanned=scanned.objects,
            bytes_scanned=scanned.bytes,
            continue_at=min(times, key=datetime.fromisoformat, default=None) if applied else None,
        )
        return report, missed

    def _missed_objects(
        self, place: PurgedChain, read: Set[str], found: Iterable[ScannedObject]
    ) -> Iterator[str]:
        """Yield objects that a head needed and that were not read: their rows are elsewhere now.

        While the head is the same, nothing was moved. A slot at or above the newest floor was
        never collected.
        """
        head, names = place.head, place.names
        now = _find_head(self.db, names) if head.dropped is None else None
        if now is None or now.found.manifest.generation == head.generation:
            return
        floor, moved_to = head.wal_floor, now.found.manifest.wal_floor
        lsns = set(range(floor, moved_to)).difference(head.skipped_lsns)
        needed = {names.segment(entry.id, entry.home) for entry in head.segments}
        needed |= {names.wal_object(lsn) for lsn in lsns}
        for one in found:
            lsn = number_of(one.key) or 0
            if one.ingested and lsn >= floor and names.wal_object(lsn) == one.key:
                home = names.home_of_slot(lsn)
                needed |= {names.segment(segment_id, home) for segment_id in one.ingested}
        yield from sorted(needed - read)

    def _sweeps(self, place: PurgedChain) -> bool:
        """Whether this purge sweeps a place: not a branch, unless asked, and no dropped one."""
        return not place.is_branch or (self.include_branches and place.head.dropped is None)

    def _objects(
        self, places: Sequence[PurgedChain], pins: Mapping[str, Pins]
    ) -> Iterator[ObjectInfo]:
        """List the folder of the name with all incarnations, those of its branches, and objects of
        other namespaces that one of them reads.
        """
        store = self.db.store
        yield from store.list(places[0].names.base + "/")
        for place in places:
            if place.is_branch:
                listed = store.list(place.root + "/")
                yield from (info for info in listed if _place_of(info.key, places) is place)
            if place.head.origin is not None:
                yield from pins[place.root].foreign_objects()

    # --- release ----------------------------------------------------------------------
    def _release(self, report: PurgeReport) -> None:
        """Release the snapshots that pin objects with rows."""
        pinning = {pin.id for one in report.remaining for pin in one.pins if pin.kind == "snapshot"}
        released: dict[str, str] = {}
        for place in self._places():
            if place.is_branch and not self.include_branches:
                continue
            for snapshot in place.head.snapshots:
                if snapshot.id in pinning:
                    _release(self.db, place, snapshot.id)
                    released[snapshot.id] = snapshot.name or snapshot.id
        self.snapshots_released = tuple(released.values())

    def _branches(self) -> list[str]:
        """Return the names of live branches to purge, branches of branches first."""
        places = self._places() if self.include_branches else []
        live = [one for one in places if one.is_branch and one.head.dropped is None]
        return [one.head.name_in(one.names.folder) for one in reversed(live)]

    def _places(self) -> list[PurgedChain]:
        """Return the places to search; independent branches are places if branches are purged."""
        made_of = self.made_of.roots() if self.include_branches else {}
        return list(_places(self.db, self.namespace, made_of))

    def _independent(self, places: Sequence[PurgedChain]) -> tuple[str, ...]:
        """Return the names of branches that no pin leads to, and of their own branches."""
        roots = {place.root for place in places}
        every = _places(self.db, self.namespace, self.made_of.roots())
        left = [one for one in every if one.root not in roots and not _is_cleared(one.head)]
        return tuple(sorted(one.head.name_in(one.names.folder) for one in left))

    # --- erase ------------------------------------------------------------------------
    def _erase(self, name: str, *, is_branch: bool) -> None:
        """Delete, fold and rewrite: afterwards no live segment and no open slot has the keys."""
        deletes = _Deletes(self.db, name, self.keys)
        must_fold = self.is_continued or self._in_log(name) or self._marks_moved(name)
        dead, last_lsn = deletes.commit(must_fold=must_fold)
        self.rows_deleted += deletes.rows
        if last_lsn:
            self._fold_past(name, last_lsn)
        rewriter = Rewriter(
            self.db,
            name,
            dead,
            everything_shared=is_branch,
            executor=self.executor,
            **self.settings,
        )
        sums = figures(rewrite(rewriter, ATTEMPTS_MAX))
        self.segments_rewritten += sums["segments_rewritten"]
        self.versions_dropped += sums["versions_dropped"]

    def _in_log(self, name: str) -> bool:
        """Whether an unfolded object, or the one just below the floor, has rows of the keys."""
        heads = locate(self.db.store, name)
        floor = heads.found.manifest.wal_floor
        if any(last >= floor for last, _ in heads.names.inherited):
            return True  # a branch with an inherited log is folded to have none
        infos = self.db.store.list(heads.names.wal)
        tail = [info for info in infos if (number_of(info.key) or 0) >= floor - 1]
        executor = self.executor or self.db.store.runtime
        scanned = scan_objects(executor, self.db.store, tail, self.keys)
        return any(one.rows or one.ingested for one in scanned.found)

    def _marks_moved(self, name: str) -> bool:
        """Whether a stream has committed since the fold: its former last batch is garbage then."""
        marks = StreamAppender(self.db, name).marks()
        folded = locate(self.db.store, name).found.manifest.stream_marks
        return any(place > folded.get(stream, 0) for stream, place in marks.items())

    def _fold_past(self, name: str, lsn: int) -> None:
        """Fold until the floor is behind an LSN, however often other folds are first."""
        codec: Any = {k: v for k, v in self.settings.items() if k == "codec"}
        for attempt in range(ATTEMPTS_MAX):
            if locate(self.db.store, name).found.manifest.wal_floor > lsn:
                return
            try:
                fold(self.db, name, executor=self.executor, **codec)
            except ConflictError:
                if attempt == ATTEMPTS_MAX - 1:
                    raise

    # --- sweep ------------------------------------------------------------------------
    def _sweep_until(self, names: Sequence[str], wait_s: float) -> PurgeReport:
        """Sweep, and sweep again when grace periods end, as long as waiting is allowed."""
        store = self.db.store
        deadline = store.runtime.deadline(wait_s)
        for round_ in range(ROUNDS_MAX):
            for name in names:
                self._sweep(name)
            report = self.survey(applied=True)
            pause_s = self._pause_s(report)
            if report.erased or pause_s is None:
                break
            is_short = round_ < SHORT_ROUNDS and pause_s <= SHORT_PAUSE_S
            if not is_short and pause_s > deadline.remaining_s():
                break
            # Later rounds are spread over the time that is left, should one bring no progress.
            spread_s = 0.0 if is_short else deadline.remaining_s() / (ROUNDS_MAX - round_)
            store.runtime.sleep(max(pause_s, spread_s))
        return report

    def _sweep(self, name: str) -> None:
        """Retain nothing but the head and pins. What was rewritten may be most of the bytes."""
        options = SweepSettings().changed({"retain_generations_s": 0.0})
        at_once = replace(options, dropped_s=0.0)
        swept = sweep_with(
            self.db, name, options, at_once, apply=True, force=True, executor=self.executor
        )
        self.objects_deleted += len(swept.deleted)

    def _pause_s(self, report: PurgeReport) -> float | None:
        if report.continue_at is None:
            return None
        until_s = datetime.fromisoformat(report.continue_at).timestamp()
        return max(0.0, until_s - self.db.store.now()) + WAKE_MARGIN_S


# --- places -----------------------------------------------------------------------------


@dataclass
class _MadeOf:
    """The branches of each folder by their heads, whatever they have released; read once."""

    db: Database
    _roots: dict[str, list[Namespace]] | None = None

    def roots(self) -> Mapping[str, list[Namespace]]:
        if self._roots is None:
            self._roots = {}
            for heads in branch_heads(self.db.store):
                origin = heads.found.manifest.origin
                if origin is not None:
                    self._roots.setdefault(origin.root, []).append(heads.names)
        return self._roots


def _places(
    db: Database, namespace: str, made_of: Mapping[str, list[Namespace]]
) -> Iterator[PurgedChain]:
    """Yield the current incarnation, earlier ones, and all branches; origins before branches.

    Branches are found by their pins, and by `made_of` if they have released their origin.
    """
    current = locate(db.store, namespace)
    waiting = [PurgedChain(current)]
    for number in current.found.manifest.predecessors:
        heads = _find_head(db, current.names.at(number))
        waiting += [PurgedChain(heads)] if heads is not None else []
    seen = {place.root for place in waiting}
    while waiting:
        place = waiting.pop(0)
        yield place
        for branch_id, pin in place.head.branches.items():
            heads = _find_head(db, Namespace.of_root(pin.root)) if pin.root not in seen else None
            if heads is not None and _is_branch(heads.found.manifest, branch_id):
                seen.add(pin.root)
                waiting.append(PurgedChain(heads, is_branch=True))
        for names in made_of.get(place.root, ()):
            heads = _find_head(db, names) if names.root not in seen else None
            if heads is not None:
                seen.add(names.root)
                waiting.append(PurgedChain(heads, is_branch=True))


def _find_head(db: Database, names: Namespace) -> HeadFinder | None:
    heads = NamespaceContext(db.store, names).heads
    try:
        heads.find(fallback=True, dropped=True)
    except (CorruptionError, NotFoundError):
        return None
    return heads


def _is_branch(head: Manifest, branch_id: str) -> bool:
    return head.origin is not None and head.origin.id == branch_id


def _is_cleared(head: Manifest) -> bool:
    return head.dropped is not None and head.dropped.is_cleared


def _origin_of(head: Manifest) -> str | None:
    return None if head.origin is None else Namespace.of_root(head.origin.root).name


def _remaining(
    places: Sequence[PurgedChain], pins: Mapping[str, Pins], found: Iterable[ScannedObject]
) -> Iterator[RemainingObject]:
    """Yield the objects with rows, each with its pins; the bytes of another namespace only count
    as long as a generation here needs them.
    """
    for one in found:
        if not one.rows:
            continue
        place = _place_of(one.key, places)
        if place is not None:
            kept = pins[place.root].of(one)
        elif one.key.startswith(places[0].names.base + "/"):
            kept = (Pin("incarnation", "its manifests cannot be read"),)
        else:
            kept = tuple(pin for each in pins.values() for pin in each.roots_of(one))
        if kept:
            yield RemainingObject(one.key, one.rows, one.size, kept)


def _free_at(one: RemainingObject) -> str | None:
    """Return when all pins of an object have ended; None if one of them has no end."""
    ends = [pin.until for pin in one.pins]
    if any(end is None for end in ends):
        return None
    return max((end for end in ends if end is not None), key=datetime.fromisoformat, default=None)


def _place_of(key: str, places: Sequence[PurgedChain]) -> PurgedChain | None:
    """Return the place whose folder has an object; None if no chain there can be read."""
    folder, _, rest = key.partition("/incarnations/")
    root = f"{folder}/incarnations/{rest.partition('/')[0]}" if rest else None
    for place in places:
        if place.root == root or (root is None and key.startswith(place.root + "/")):
            return place
    return None


def _release(db: Database, place: PurgedChain, snapshot_id: str) -> None:
    NamespaceContext(db.store, place.names).publisher.publish(
        lambda head: drop_snapshot(head, snapshot_id), dropped=True
    )


# --- deletes ----------------------------------------------------------------------------


class _Deletes:
    """Deletes the keys that have a row, by commits that need no writer role."""

    def __init__(self, db: Database, name: str, keys: pa.Array) -> None:
        self._db, self._name, self._keys = db, name, keys
        self._limits: npt.NDArray[np.int64] = np.zeros(len(keys), np.int64)
        self.rows = 0

    def commit(self, *, must_fold: bool) -> tuple[DeadVersions, int]:
        """Return which versions are dead now, and the LSN that a fold has to pass; 0 for none.

        A key without a row is dead up to the LSN that was read, one with a row up to its delete.
        """
        present = self._present()
        if present or must_fold:
            appender = StreamAppender(self._db, self._name)
            for first in present:
                keys = self._keys.take(pa.array(first))
                self._limits[first] = self._append(appender, [_deletes(keys)])
                self.rows += len(first)
            last_lsn = self._append(appender, [])
        else:
            last_lsn = 0
        return DeadVersions(self._keys, self._limits), last_lsn

    def _present(self) -> list[npt.NDArray[np.int64]]:
        """Return the places of keys with a row, in chunks; expired rows are rows too."""
        found = []
        with self._db.reader(self._name, pin=True) as reader:
            view, runtime = reader._view(), self._db.store.runtime
            names, jobs = view.segments.namespace, reader._tail.rules.open_jobs
            check_backfills(names, jobs, reader.last_lsn + 1)
            self._limits[:] = reader.last_lsn
            for at in range(0, len(self._keys), KEYS_AT_ONCE):
                chunk = self._keys.slice(at, KEYS_AT_ONCE)
                rows = newest_rows(view, chunk.to_pylist(), runtime, ())
                kept = rows.keys.filter(pa.array(rows.kinds != OpKind.DELETE))
                places = pc.index_in(kept, value_set=self._keys).to_numpy().astype(np.int64)
                found += [places] if len(places) else []
        return found

    def _append(self, appender: StreamAppender, batches: Sequence[Ops]) -> int:
        """Commit as the next batch of the stream of all purges; another purge may be first."""
        for _ in range(ATTEMPTS_MAX):
            number = appender.marks().get(STREAM, 0) + 1
            receipt = appender.append(STREAM, number, batches)
            if not receipt.replayed and receipt.lsn is not None:
                return receipt.lsn
        raise ConflictError(
            f"other purges of {self._name} were first {ATTEMPTS_MAX} times",
            hint="Run it again when fewer purges run",
            namespace=self._name,
        )


def _deletes(keys: pa.Array) -> Ops:
    kinds = pa.array(np.full(len(keys), OpKind.DELETE, np.uint8))
    return Ops(keys, kinds, fields={})
