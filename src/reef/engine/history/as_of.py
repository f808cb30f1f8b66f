"""Time travel: find past states of a namespace and replay them.

A point in time is a generation and the log from its floor up to some LSN:

    generation=g   that generation, up to its `wal_id_last_seen`
    lsn=n          the newest retained generation with a floor of at most n + 1, up to n
    time=t         the newest retained generation that folded nothing created after t, and the log
                   up to the first object that was created after t

Floors rise with generations, so a binary search finds the right one. Times are the `created_at`
of WAL objects, by the clocks of their writers; clock skew between writers shifts the result. State
that was collected raises NotFoundError(kind="collected"); it is never silently skipped (H44).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Protocol, TypeVar

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.log.log import Scanned, SlotGone, contiguous
from reef.engine.log.tail import Tail
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.manifest import Manifest
from reef.manifest.edits import check_active, is_active
from reef.manifest.head import HeadFinder
from reef.manifest.roots import log_generations
from reef.paths import Namespace, number_of
from reef.stores import Store
from reef.stores.base import current_time_s


class Releasable(Protocol):
    """A lease."""

    def release(self) -> None: ...


AnyLease = TypeVar("AnyLease", bound=Releasable | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsOf:
    """A point in time: exactly one of a generation, an LSN and a time.

    A time is a datetime with a time zone, or ISO 8601 text, which is UTC without an offset.
    """

    generation: int | None = None
    lsn: int | None = None
    time: date | str | None = None

    def __post_init__(self) -> None:
        given = [w for w in (self.generation, self.lsn, self.time) if w is not None]
        if len(given) != 1:
            raise InvalidInputError(
                "a point in time is exactly one of generation=, lsn= and time=",
                kind=ErrorKind.INVALID_OPTION,
            )
        for name, lowest in (("generation", 1), ("lsn", 0)):
            number = getattr(self, name)
            if number is not None and not _is_number(number, lowest):
                raise InvalidInputError(
                    f"{name}={number!r} is not an integer of at least {lowest}",
                    kind=ErrorKind.INVALID_OPTION,
                )
        if self.time is not None:
            object.__setattr__(self, "time", _parsed_time(self.time))


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A requested point in time, as numbers. No number at all means the newest state."""

    generation: int | None = None
    lsn: int | None = None
    until_ms: int | None = None


def read_target(as_of: Any) -> ReadTarget:
    """Resolve `as_of=`: a generation, a datetime or date, ISO 8601 text, a dict, or an AsOf."""
    if isinstance(as_of, dict):
        unknown = as_of.keys() - {"generation", "lsn", "time"}
        as_of = AsOf() if unknown else AsOf(**as_of)
    elif isinstance(as_of, date | str):
        as_of = AsOf(time=as_of)
    elif not isinstance(as_of, AsOf):
        as_of = AsOf(generation=as_of)
    time = as_of.time
    until_ms = int(time.timestamp() * 1000) if isinstance(time, datetime) else None
    return ReadTarget(as_of.generation, as_of.lsn, until_ms)


@dataclass(frozen=True, slots=True)
class PointInTime:
    """A generation, and the part of the log from its floor that belongs to the state."""

    manifest: Manifest
    last_lsn: int | None = None
    """None: up to the end of the log, or up to `until_ms`."""
    until_ms: int | None = None

    def includes(self, slot: Scanned) -> bool:
        """Return whether an object was created at or before `until_ms`, if that is set."""
        if self.until_ms is None or slot.object is None:
            return True
        return slot.object.header.created_at_ms <= self.until_ms


class ConcurrentSweep(Exception):
    """A sweep deleted an object between its discovery and its use: start over."""


class History:
    """Finds points in time of one namespace and replays them. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        segments: SegmentStore,
        heads: HeadFinder | None = None,
        *,
        dropped: bool = False,
    ) -> None:
        context = NamespaceContext(store, namespace, heads=heads)
        self.heads, self.log = context.heads, context.log
        self._dropped = dropped
        """Whether a dropped namespace may be read, as snapshots of earlier incarnations are."""
        self._store = store
        self._namespace = namespace
        self._segments = segments

    def head(self) -> Manifest:
        """Return the newest manifest."""
        return self.heads.find(dropped=self._dropped).manifest

    # --- finding ------------------------------------------------------------------
    def find(self, head: Manifest, target: ReadTarget) -> PointInTime:
        """Return the point in time of a target; NotFoundError(kind=collected) if it is gone."""
        if target.generation is not None:
            manifest = self._generation(head, target.generation)
            seen = max(manifest.wal_id_last_seen, manifest.wal_floor - 1)
            return PointInTime(manifest, seen if target.lsn is None else target.lsn)
        if target.lsn is not None:
            return PointInTime(self.start_of_log(head, target.lsn), target.lsn)
        if target.until_ms is not None:
            return PointInTime(self._before(head, target.until_ms), until_ms=target.until_ms)
        return PointInTime(head)

    def resolve(self, head: Manifest, target: ReadTarget) -> tuple[Manifest, int]:
        """Return the generation and the last LSN of a target; NotFoundError if it is gone.

        For pins: the edit that pins the generation checks that it is still active.
        """
        point = self.find(head, target)
        if point.until_ms is not None:
            return point.manifest, self._last_before(with_skipped(point.manifest, head), point)
        end = self.end_of_log(head)
        last_lsn = end if point.last_lsn is None else point.last_lsn
        if last_lsn > end:
            raise self.missing(last_lsn, point)
        return point.manifest, last_lsn

    def _last_before(self, manifest: Manifest, point: PointInTime) -> int:
        """Return the last LSN of the log that was created at or before a time."""
        last_lsn = manifest.wal_floor - 1
        for slot in self.log.scan(manifest.wal_floor, frozenset(manifest.skipped_lsns)):
            if not point.includes(slot):
                break
            last_lsn = slot.lsn
        return last_lsn

    def start_of_log(self, head: Manifest, lsn: int) -> Manifest:
        """Return the newest retained generation whose segments hold nothing above an LSN."""
        if lsn + 1 < head.wal_base:
            raise earlier_incarnation(self._namespace, head)
        found = self._newest(head, lambda manifest: manifest.wal_floor <= lsn + 1)
        if found is None:
            raise collected(self._namespace, lsn + 1)
        return found

    def start_of_changes(self, head: Manifest, after_lsn: int) -> Manifest:
        """Return the generation from which to follow the log after an LSN; 0 means all of it.

        LSNs continue from one incarnation to the next, but each incarnation has its own log.
        """
        found = self.start_of_log(head, after_lsn or head.wal_base - 1)
        if found.wal_base != head.wal_base:
            raise earlier_incarnation(self._namespace, head)
        return found

    def oldest(self, head: Manifest) -> Manifest:
        """Return the oldest retained generation of this incarnation."""
        for generation in sorted(self.retained(head)):
            manifest = self.load(generation)
            if manifest.wal_base == head.wal_base:
                return manifest
        return head

    def end_of_log(self, head: Manifest) -> int:
        """Return the last LSN of the contiguous log."""
        first = max(head.wal_floor, head.wal_id_last_seen + 1)
        filled = [slot.lsn for slot in self.log.filled(first)]
        return first - 1 + len(contiguous([*filled, *head.skipped_lsns], first))

    def check(self, head: Manifest, point: PointInTime) -> None:
        """Raise ConcurrentSweep if a point in time, already leased, is no longer retained."""
        try:
            check_active(head, point.manifest, self._now_ms(head))
        except NotFoundError as error:
            raise ConcurrentSweep(str(error)) from error

    def is_kept(self, head: Manifest, manifest: Manifest) -> bool:
        return is_active(head, manifest.generation, self._now_ms(head))

    def kept_slots(self, start: Manifest, lsn: int) -> bool:
        """Return whether the slots from `lsn` on, just read, hold their original objects.

        At or above the floor of a fresh head no slot was collected. Below it, slots are intact
        only if the generation from which the log is read was retained or pinned until now;
        otherwise one may have been collected and then filled again by a stalled process (H67).
        """
        last = self.heads.last
        if last is not None and last.fresh() and lsn >= last.manifest.wal_floor:
            return True
        head = self.head()
        pinned = start.generation in log_generations(head)
        return lsn >= head.wal_floor or pinned or self.is_kept(head, start)

    def _generation(self, head: Manifest, generation: int) -> Manifest:
        if generation == head.generation:
            return head
        if generation > head.generation:
            raise NotFoundError(
                f"{self._namespace.name} has no generation {generation} yet; "
                f"the newest is {head.generation}",
                generation=generation,
            )
        if not is_active(head, generation, self._now_ms(head)):
            raise NotFoundError(
                f"generation {generation} of {self._namespace.name} was garbage-collected; "
                f"the oldest retained generation is {head.oldest_retained}",
                kind=ErrorKind.COLLECTED,
                hint="Use a newer generation; a snapshot retains one for longer",
                generation=generation,
            )
        return self.load(generation)

    def _before(self, head: Manifest, until_ms: int) -> Manifest:
        if head.created_at_ms and until_ms < head.created_at_ms:
            raise earlier_incarnation(self._namespace, head)
        found = self._newest(
            head, lambda manifest: self.folded_at_ms(with_skipped(manifest, head)) <= until_ms
        )
        if found is None:
            raise NotFoundError(
                f"the state of {self._namespace.name} at {_time_text(until_ms)} was "
                f"garbage-collected",
                kind=ErrorKind.COLLECTED,
                hint="Use a later time; a snapshot retains a state for longer",
            )
        return found

    def folded_at_ms(self, manifest: Manifest) -> float:
        """Return when the last object below a floor was created; it is retained with the floor.

        For a namespace that was dropped and created again that is the last fence of the drop, just
        below `wal_base`: earlier objects belong to another incarnation (H48).
        """
        for lsn in range(manifest.wal_floor - 1, manifest.wal_base - 2, -1):
            if lsn < 1 or lsn in manifest.skipped_lsns:
                continue
            found = self.log.read(lsn)
            if found is None and manifest.origin is not None and lsn <= manifest.origin.last_lsn:
                return manifest.origin.at_ms  # released since
            if found is None:
                return float("inf") if lsn >= manifest.wal_base else 0.0
            return found.header.created_at_ms
        return 0.0

    def _newest(self, head: Manifest, fits: Callable[[Manifest], bool]) -> Manifest | None:
        """Return the newest retained generation that fits, by binary search.

        All generations that fit come before all that do not.
        """
        if fits(head):
            return head
        generations = list(self.retained(head))
        found: Manifest | None = None
        while generations:
            middle = len(generations) // 2
            try:
                manifest = self.load(generations[middle])
            except CorruptionError:  # continue with a neighbour
                del generations[middle]
                continue
            if fits(manifest):
                found, generations = manifest, generations[middle + 1 :]
            else:
                generations = generations[:middle]
        # Early releases kept two incarnations of a name in one chain (H65).
        return found if found is not None and found.wal_base == head.wal_base else None

    def retained(self, head: Manifest) -> Iterator[int]:
        """Yield the generations before the head that can be read."""
        now_ms = self._now_ms(head)
        for info in self._store.list(self._namespace.manifests):
            generation = number_of(info.key)
            if generation and generation < head.generation and is_active(head, generation, now_ms):
                yield generation

    def load(self, generation: int) -> Manifest:
        """Return a retained manifest; ConcurrentSweep if it was swept meanwhile."""
        try:
            return self.heads.load(generation)
        except NotFoundError as error:
            raise ConcurrentSweep(str(error)) from error

    def _now_ms(self, head: Manifest) -> int:
        """Return the store's time if retention depends on the expiry of a snapshot, else 0 (H30).

        Reading the store's clock costs a write, so it is skipped where it makes no difference.
        """
        old = [s for s in head.snapshots if s.generation < head.oldest_retained]
        if all(snapshot.expires_at_ms is None for snapshot in old):
            return 0
        return int(current_time_s(self._store) * 1000)

    # --- replaying ----------------------------------------------------------------
    def open_leased(
        self,
        target: ReadTarget,
        take: Callable[[Manifest], AnyLease],
        check: Callable[[PointInTime, Tail, AnyLease], None],
    ) -> tuple[AnyLease, Tail]:
        """Replay a point in time under a lease (protocols §6); released again if that fails.

        `take` leases a generation, `check` raises if the lease was lost during the replay.
        """
        point = self.find(self.head(), target)
        # On the target's generation, not on the head: it protects that generation and newer ones.
        lease = take(point.manifest)
        try:
            head = self.head()  # again, now that the lease is there (H22)
            if target == ReadTarget():
                point = PointInTime(head)
            self.check(head, point)
            tail = self.replay(point, head)
            check(point, tail, lease)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return lease, tail

    def replay(self, point: PointInTime, head: Manifest) -> Tail:
        """Replay the log of a point in time; slots that a later repair skipped are skipped.

        The log may have been written with newer schemas than the generation has: the state has the
        columns of the newest one that its log names.
        """
        tail = Tail(with_skipped(point.manifest, head), self._segments)
        end = None if point.last_lsn is None else point.last_lsn + 1
        slots = self.log.scan(tail.next_lsn, tail.rules.skipped, end)
        try:
            for slot in slots:
                if not point.includes(slot):
                    return tail
                if slot.object is not None:
                    self._learn_schema(tail, slot.object.header.schema_id, head)
                tail.apply(slot)
        except SlotGone as gone:
            raise self.missing(gone.lsn, point) from gone
        if point.last_lsn is None:
            self._check_end(tail.next_lsn)
        return tail

    def _learn_schema(self, tail: Tail, schema_id: int, head: Manifest) -> None:
        """Add the schemas of a later head, up to the one of an object, to those of a tail."""
        if schema_id <= tail.schema.id:
            return
        if schema_id > head.schema.id:  # altered since that head was read
            self.heads.forget()
            head = self.head()
        known = tuple(schema for schema in head.schemas if schema.id <= schema_id)
        if known[: len(tail.manifest.schemas)] == tail.manifest.schemas:
            tail.rebase(msgspec.structs.replace(tail.manifest, schemas=known))

    def _check_end(self, lsn: int) -> None:
        """Raise if the listing ended at a gap that a sweep made, not at the log's end (H10)."""
        if self.head().wal_floor > lsn and self.log.read(lsn) is None:
            raise ConcurrentSweep(f"LSN {lsn} was swept")

    def missing(self, lsn: int, point: PointInTime) -> Exception:
        """Classify a missing slot: collected, not written yet, or damage (H16)."""
        self.heads.forget()
        head = self.head()
        if not self.is_kept(head, point.manifest):
            return collected(self._namespace, lsn)
        if lsn > max(head.wal_floor - 1, head.wal_id_last_seen):
            requested = point.last_lsn
            more = "" if requested in (None, lsn) else f" (requested: LSN {requested})"
            return NotFoundError(
                f"LSN {lsn} is not in the log of {self._namespace.name} yet{more}",
                hint="Wait for it with wait_for",
                lsn=lsn,
            )
        if self.log.read(lsn) is not None:  # written and folded since the first read of the slot
            return ConcurrentSweep(f"LSN {lsn} was written during the replay")
        key = self._namespace.wal_object(lsn)
        return CorruptionError(
            f"object {key} is missing, though generation {point.manifest.generation} needs it",
            hint="Run verify, then repair",
            object=key,
            offset=0,
        )


def with_skipped(manifest: Manifest, head: Manifest) -> Manifest:
    """Return an old manifest with the decisions that later repairs made about its log."""
    skipped = {*manifest.skipped_lsns, *head.skipped_lsns}
    counted = {*manifest.ingests_without_begin, *head.ingests_without_begin}
    return msgspec.structs.replace(
        manifest,
        skipped_lsns=tuple(sorted(skipped)),
        ingests_without_begin=tuple(sorted(counted)),
    )


def collected(namespace: Namespace, lsn: int) -> NotFoundError:
    """Return the error for a part of the log that was swept."""
    return NotFoundError(
        f"LSN {lsn} of {namespace.name} was garbage-collected",
        kind=ErrorKind.COLLECTED,
        hint="Start again from a snapshot or a scan; a registered cursor retains the log",
        lsn=lsn,
    )


def earlier_incarnation(namespace: Namespace, head: Manifest) -> NotFoundError:
    """Return the error for a position from before the name was dropped and created again (H48).

    Or from before it was restored from a backup: the numbers of its log begin behind the lost ones.
    """
    return NotFoundError(
        f"{namespace.name} was dropped and created again, or restored from a backup: its log "
        f"begins at LSN {head.wal_base}",
        kind=ErrorKind.COLLECTED,
        hint="Discard the old rows and start again from a scan; snapshots taken before the drop "
        "can still be read",
        lsn=head.wal_base,
    )


def _is_number(number: object, lowest: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= lowest


def _parsed_time(time: object) -> datetime:
    if isinstance(time, str):
        return _from_iso(time)
    if isinstance(time, date) and not isinstance(time, datetime):
        return datetime(time.year, time.month, time.day, tzinfo=UTC)
    if not isinstance(time, datetime):
        raise InvalidInputError(
            f"time={time!r} is neither a datetime nor ISO 8601 text", kind=ErrorKind.INVALID_OPTION
        )
    if time.tzinfo is None:
        raise InvalidInputError(
            f"time={time!r} has no time zone",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass one with a time zone, for instance datetime.now(UTC)",
        )
    return time


def _from_iso(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{text!r} is not a time: {error}",
            kind=ErrorKind.INVALID_OPTION,
            hint='Write it as "2026-01-31T12:00:00Z"; without an offset it is UTC. A snapshot is '
            f"opened with snapshot={text!r}",
        ) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _time_text(until_ms: int) -> str:
    """Return a time as ISO 8601, or as a number where no calendar has it."""
    try:
        return datetime.fromtimestamp(until_ms / 1000).astimezone().isoformat()
    except (ValueError, OverflowError, OSError):
        return f"{until_ms} ms after 1970"
