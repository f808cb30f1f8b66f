"""History: which past moments of a namespace can be read, and how they are put together.

A moment is a generation and the log from its floor up to some LSN. What is asked for names it:

    generation=g   that generation, up to the LSN that it says was last seen
    lsn=n          the newest kept generation with a floor of at most n + 1, up to n
    time=t         the newest kept generation that folded nothing created after t, and the log
                   up to the first object that was created after t

Floors rise with generations, so the right one is found by halving. Times are those at which
the log's objects say that they were made, by the clocks of those who made them: where clocks
disagree, so do the moments. What is gone is told as such, never passed over (H44).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from reef.engine.log import Log
from reef.engine.log_rules import contiguous
from reef.engine.reading.segments import SegmentStore
from reef.engine.tail import Tail
from reef.errors import CorruptionError, InvalidInputError, Kind, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalObject
from reef.manifest.head import HeadFinder
from reef.manifest.roots import log_generations
from reef.manifest.snapshots import check_active, is_active
from reef.paths import Namespace, number_of
from reef.stores import Store
from reef.stores.dates import now_to_look

__all__ = ["AsOf", "History", "Moment", "Moved", "Wanted", "collected", "with_skipped"]

READ_AT_ONCE = 128
"""WAL objects in memory at a time while they are taken in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsOf:
    """A past moment: one of a generation, an LSN or a time."""

    generation: int | None = None
    lsn: int | None = None
    time: datetime | None = None

    def __post_init__(self) -> None:
        given = [w for w in (self.generation, self.lsn, self.time) if w is not None]
        if len(given) != 1:
            raise InvalidInputError(
                "a past moment is one of generation=, lsn= and time=", kind=Kind.INVALID_OPTION
            )
        for name, lowest in (("generation", 1), ("lsn", 0)):
            number = getattr(self, name)
            if number is not None and not _is_number(number, lowest):
                raise InvalidInputError(
                    f"{name}={number!r} is not a number from {lowest} on", kind=Kind.INVALID_OPTION
                )
        if self.time is not None:
            _check_time(self.time)

    @classmethod
    def of(cls, given: Any) -> "AsOf":
        """Return what `as_of=` was given as: a generation, a datetime, a dict, or this."""
        if isinstance(given, AsOf):
            return given
        if isinstance(given, datetime):
            return cls(time=given)
        if isinstance(given, dict):
            unknown = given.keys() - {"generation", "lsn", "time"}
            return cls(**given) if not unknown else cls()
        return cls(generation=given)

    def wanted(self) -> "Wanted":
        until_ms = None if self.time is None else int(self.time.timestamp() * 1000)
        return Wanted(self.generation, self.lsn, until_ms)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for, in numbers. Nothing at all is the newest there is."""

    generation: int | None = None
    lsn: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A generation, and up to where the log from its floor belongs to it."""

    manifest: Manifest
    last_lsn: int | None = None
    """None: as far as it goes, or as time allows."""
    until_ms: int | None = None


class Moved(Exception):
    """What was found was swept before it was pinned: look again."""


class History:
    """Finds moments of one namespace and replays them. Not for several threads at once."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        segments: SegmentStore,
        heads: HeadFinder | None = None,
        *,
        dropped: bool = False,
    ) -> None:
        self.heads = heads or HeadFinder(store, namespace)
        self._dropped = dropped
        """Whether a dropped namespace may be read: snapshots of earlier incarnations are."""
        self.log = Log(store, namespace)
        self._store = store
        self._namespace = namespace
        self._segments = segments

    def head(self) -> Manifest:
        """Return the newest manifest, as of now."""
        return self.heads.find(dropped=self._dropped).manifest

    # --- finding ------------------------------------------------------------------
    def find(self, head: Manifest, wanted: Wanted) -> Moment:
        """Return the moment that is wanted; NotFoundError(kind=collected) if it is gone."""
        if wanted.generation is not None:
            manifest = self._generation(head, wanted.generation)
            seen = max(manifest.wal_id_last_seen, manifest.wal_floor - 1)
            return Moment(manifest, seen if wanted.lsn is None else wanted.lsn)
        if wanted.lsn is not None:
            return Moment(self.start_of_log(head, wanted.lsn), wanted.lsn)
        if wanted.until_ms is not None:
            return Moment(self._before(head, wanted.until_ms), until_ms=wanted.until_ms)
        return Moment(head)

    def start_of_log(self, head: Manifest, lsn: int) -> Manifest:
        """Return the newest kept generation that has nothing above an LSN in its segments."""
        if lsn + 1 < head.wal_base:
            raise earlier_incarnation(self._namespace, head)
        found = self._newest(head, lambda manifest: manifest.wal_floor <= lsn + 1)
        if found is None:
            raise collected(self._namespace, lsn + 1)
        return found

    def start_of_changes(self, head: Manifest, after_lsn: int) -> Manifest:
        """Return the generation from which to follow the log behind an LSN; 0: all of it.

        LSNs continue from one incarnation to the next, but the log begins with each.
        """
        found = self.start_of_log(head, after_lsn or head.wal_base - 1)
        if found.wal_base != head.wal_base:
            raise earlier_incarnation(self._namespace, head)
        return found

    def end_of_log(self, head: Manifest) -> int:
        """Return the last LSN without a gap before it."""
        first = max(head.wal_floor, head.wal_id_last_seen + 1)
        filled = [slot.lsn for slot in self.log.filled(first)]
        return first - 1 + len(contiguous([*filled, *head.skipped_lsns], first))

    def check(self, head: Manifest, moment: Moment) -> None:
        """Raise Moved unless a moment can still be read; asked after it was leased."""
        try:
            check_active(head, moment.manifest, self._now_ms(head))
        except NotFoundError as error:
            raise Moved(str(error)) from error

    def is_kept(self, head: Manifest, manifest: Manifest) -> bool:
        return is_active(head, manifest.generation, self._now_ms(head))

    def kept_slots(self, start: Manifest, lsn: int) -> bool:
        """Whether slots from `lsn` on, which were just read, hold what was committed there.

        At or above the floor of a head that is fresh, or read now, no slot was collected. Below
        it, only if the generation from which the log is read was retained or pinned until now;
        otherwise a slot may have been collected, and filled again by a stalled process (H67).
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
                f"{self._namespace.name} has no generation {generation} yet, "
                f"the newest is {head.generation}",
                generation=generation,
            )
        if not is_active(head, generation, self._now_ms(head)):
            raise NotFoundError(
                f"generation {generation} of {self._namespace.name} is not kept any more; "
                f"the oldest that is, is {head.oldest_retained}",
                kind=Kind.COLLECTED,
                hint="Name a newer one; a snapshot keeps one for longer",
                generation=generation,
            )
        return self._load(generation)

    def _before(self, head: Manifest, until_ms: int) -> Manifest:
        if head.created_at_ms and until_ms < head.created_at_ms:
            raise earlier_incarnation(self._namespace, head)
        found = self._newest(
            head, lambda manifest: self._folded_at_ms(with_skipped(manifest, head)) <= until_ms
        )
        if found is None:
            raise NotFoundError(
                f"{self._namespace.name} is not kept as far back as {_moment(until_ms)}",
                kind=Kind.COLLECTED,
                hint="Name a later time; a snapshot keeps one for longer",
            )
        return found

    def _folded_at_ms(self, manifest: Manifest) -> float:
        """Return when the last object below a floor was made: kept for as long as the floor is.

        Of a namespace that was made in a dropped one's place that is the last fence of the drop,
        just below its base: what was there before is not its past (H48).
        """
        for lsn in range(manifest.wal_floor - 1, manifest.wal_base - 2, -1):
            if lsn < 1 or lsn in manifest.skipped_lsns:
                continue
            found = self.log.read(lsn)
            if found is None:
                return float("inf") if lsn >= manifest.wal_base else 0.0
            return found.header.created_at_ms
        return 0.0

    def _newest(self, head: Manifest, fits: Callable[[Manifest], bool]) -> Manifest | None:
        """Return the newest kept generation that fits; all that fit come before all that do not."""
        if fits(head):
            return head
        generations = list(self._kept(head))
        found: Manifest | None = None
        while generations:
            middle = len(generations) // 2
            try:
                manifest = self._load(generations[middle])
            except CorruptionError:  # a neighbour will do
                del generations[middle]
                continue
            if fits(manifest):
                found, generations = manifest, generations[middle + 1 :]
            else:
                generations = generations[:middle]
        # Releases before incarnations kept two lives of a name in one chain (H65).
        return found if found is not None and found.wal_base == head.wal_base else None

    def _kept(self, head: Manifest) -> Iterator[int]:
        now_ms = self._now_ms(head)
        for info in self._store.list(self._namespace.manifests):
            generation = number_of(info.key)
            if generation and generation < head.generation and is_active(head, generation, now_ms):
                yield generation

    def _load(self, generation: int) -> Manifest:
        try:
            return self.heads.load(generation)
        except NotFoundError as error:
            raise Moved(str(error)) from error

    def _now_ms(self, head: Manifest) -> int:
        """Return the store's time, where what is kept depends on some snapshot's end (H30).

        To ask for it is a write: readers of what is retained anyway are spared it.
        """
        old = [s for s in head.snapshots if s.generation < head.oldest_retained]
        if all(snapshot.expires_at_ms is None for snapshot in old):
            return 0
        return int(now_to_look(self._store) * 1000)

    # --- replaying ----------------------------------------------------------------
    def replay(self, moment: Moment, head: Manifest) -> Tail:
        """Put a moment together. What a later repair has given up is passed over here too."""
        tail = Tail(with_skipped(moment.manifest, head), self._segments)
        for found in self._objects(tail, moment):
            if found is None:
                tail.skip()
            elif moment.until_ms is not None and found.header.created_at_ms > moment.until_ms:
                break
            else:
                tail.take(found)
        return tail

    def _objects(self, tail: Tail, moment: Moment) -> Iterator[WalObject | None]:
        """Yield the objects of the log from the floor on; None for one that is given up."""
        skipped, lsns = tail.manifest.skipped_lsns, self._lsns(tail, moment)
        for at in range(0, len(lsns), READ_AT_ONCE):
            chunk = lsns[at : at + READ_AT_ONCE]
            sound = [lsn for lsn in chunk if lsn not in skipped]
            found = dict(zip(sound, self.log.read_many(sound), strict=True))
            for lsn in chunk:
                if found.get(lsn) is None and lsn not in skipped:
                    raise self._missing(lsn, moment)
                yield found.get(lsn)
        if moment.last_lsn is None:
            self._check_end(lsns.stop)

    def _lsns(self, tail: Tail, moment: Moment) -> range:
        """Return which LSNs belong to a moment; without an end, those that are listed."""
        first = tail.next_lsn
        if moment.last_lsn is not None:
            return range(first, moment.last_lsn + 1)
        filled = [slot.lsn for slot in self.log.filled(first)]
        return range(first, first + len(contiguous([*filled, *tail.manifest.skipped_lsns], first)))

    def _check_end(self, lsn: int) -> None:
        """Tell the end of what was listed from a gap: swept before it was listed (H10)."""
        if self.head().wal_floor > lsn and self.log.read(lsn) is None:
            raise Moved(f"LSN {lsn} was swept")

    def _missing(self, lsn: int, moment: Moment) -> Exception:
        """Tell what is collected from what is not there yet, and both from damage (H16)."""
        self.heads.forget()
        head = self.head()
        if not self.is_kept(head, moment.manifest):
            return collected(self._namespace, lsn)
        if lsn > max(head.wal_floor - 1, head.wal_id_last_seen):
            asked = moment.last_lsn
            more = "" if asked in (None, lsn) else f", and LSN {asked} was asked for"
            return NotFoundError(
                f"LSN {lsn} is not in the log of {self._namespace.name} yet{more}",
                hint="Wait for it with wait_for",
                lsn=lsn,
            )
        if self.log.read(lsn) is not None:  # written, and folded, since the first read of the slot
            return Moved(f"LSN {lsn} was written while it was read")
        key = self._namespace.wal_object(lsn)
        return CorruptionError(
            f"there is no object {key}, though generation {moment.manifest.generation} needs it",
            hint="Run verify, then repair",
            object=key,
            offset=0,
        )


def with_skipped(manifest: Manifest, head: Manifest) -> Manifest:
    """Return an old manifest with what a repair has given up since."""
    skipped = {*manifest.skipped_lsns, *head.skipped_lsns}
    return msgspec.structs.replace(manifest, skipped_lsns=tuple(sorted(skipped)))


def collected(namespace: Namespace, lsn: int) -> NotFoundError:
    """Return the error for a part of the log that a sweep has taken."""
    return NotFoundError(
        f"LSN {lsn} of {namespace.name} was collected: its log is not kept that far back",
        kind=Kind.COLLECTED,
        hint="Start again from a snapshot or a scan; a cursor holds the log for its reader",
        lsn=lsn,
    )


def earlier_incarnation(namespace: Namespace, head: Manifest) -> NotFoundError:
    """Return the error for a position from before the name was dropped and created again (H48)."""
    return NotFoundError(
        f"{namespace.name} was dropped and created again: the log of this incarnation begins at "
        f"LSN {head.wal_base}",
        kind=Kind.COLLECTED,
        hint="Discard the old rows, and start again from a scan; snapshots from before the drop "
        "can still be read",
        lsn=head.wal_base,
    )


def _is_number(number: object, lowest: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= lowest


def _check_time(time: object) -> None:
    if not isinstance(time, datetime):
        raise InvalidInputError(f"time={time!r} is not a datetime", kind=Kind.INVALID_OPTION)
    if time.tzinfo is None:
        raise InvalidInputError(
            f"time={time!r} has no time zone",
            kind=Kind.INVALID_OPTION,
            hint="Say which it is, for instance datetime.now(UTC)",
        )


def _moment(until_ms: int) -> str:
    """Return a time as people write it, even one that no calendar of ours has."""
    try:
        return datetime.fromtimestamp(until_ms / 1000).astimezone().isoformat()
    except (ValueError, OverflowError, OSError):
        return f"{until_ms} ms after 1970"
