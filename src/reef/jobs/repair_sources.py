"""Where else the rows of damaged segments are: the LSNs and keys each covers, and who has them.

A footer says what its segment covers. Where it is lost, the others tell: the segments of a manifest
cover everything below the floor exactly once, so a segment covers what all others leave. Several
without footers are each saved from all of that, since nothing says which of them a version was in;
their bounds do in the end. What takes their place shares it: to each its own bounds, to one the
rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reef.engine.log_rules import Verdict
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.errors import CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError
from reef.formats.covers import Cover, clipped, tidied, without
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import Footer, covers_of
from reef.formats.segment_tail import decode_footer
from reef.formats.wal_object import WalKind
from reef.jobs.compact_merge import NEVER
from reef.jobs.repair_segments import SalvageTask
from reef.jobs.verify_survey import Survey
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["SalvagePlanner"]


@dataclass(frozen=True, slots=True)
class _Deduced:
    """What segments without footers covered, taken together, and what each of them claims."""

    left: tuple[Cover, ...]
    shares: dict[str, tuple[Cover, ...]]


@dataclass
class SalvagePlanner:
    """Makes the tasks that save damaged segments, as of one survey."""

    store: Store
    names: Namespace
    survey: Survey
    write: bool
    _deduced: "_Deduced | None" = field(default=None, init=False)

    def tasks(self, ingested: Sequence[SegmentEntry]) -> list[SalvageTask]:
        """Return one task for each damaged segment; `ingested` are those that the log names."""
        live = {s.id: s for s in (*self.survey.head.segments, *ingested)}
        tasks = []
        for segment_id in sorted(self.survey.damaged_segments()):
            task = SalvageTask(
                self.store,
                self.names,
                self.survey.head.generation,
                self.survey.segments[segment_id],
                others=tuple(other for other in live.values() if other.id != segment_id),
                in_head=segment_id in live,
                write=self.write,
            )
            tasks.append(self._with_sources(task) if task.in_head else task)
        return tasks

    def _with_sources(self, task: SalvageTask) -> SalvageTask:
        covers, claimed = self._covers(task.entry)
        if task.entry.visible_lsn:
            return replace(task, covers=covers, claimed=claimed)  # rows of a load are nowhere else
        log_from, lsns, ingested = self._log(covers)
        return replace(
            task,
            covers=covers,
            claimed=claimed,
            lsns=lsns,
            ingested=ingested,
            log_from=log_from,
            ancestors=self._ancestors(task.entry),
        )

    # --- the log ------------------------------------------------------------------
    def _log(
        self, covers: Sequence[Cover]
    ) -> tuple[int, tuple[int, ...], tuple[SegmentEntry, ...]]:
        """Return from which LSN on the log has all that some covers include, and what it has."""
        log, damaged = self.survey.log, self.survey.damaged_segments()
        loads = {lsn: [e for e in log.ingested if e.visible_lsn == lsn] for lsn in log.verdicts}
        lsns: list[int] = []
        ingested: list[SegmentEntry] = []
        first = min((cover.first for cover in covers), default=NEVER)
        complete_from = first
        for lsn in _lsns(covers):
            slot, verdict = log.slots.get(lsn), log.verdicts.get(lsn)
            if verdict is None or slot is None or slot.header is None:
                complete_from = lsn + 1
            elif verdict is Verdict.APPLIES and slot.header.kind is WalKind.BATCHES:
                lsns.append(lsn)
            elif verdict is Verdict.APPLIES:
                ingested += [entry for entry in loads[lsn] if entry.id not in damaged]
                if any(entry.id in damaged for entry in loads[lsn]):
                    complete_from = lsn + 1
            elif slot.header.kind is WalKind.INGEST and log.damaged:
                complete_from = lsn + 1  # its begin may be what cannot be read
        return complete_from, tuple(lsns), tuple(ingested)

    # --- ancestors ----------------------------------------------------------------
    def _ancestors(self, entry: SegmentEntry) -> tuple[SegmentEntry, ...]:
        """Return what a merge put a segment in the place of, if all of that is there."""
        chain = self.survey.chain
        named = chain.named.get(entry.id)
        before = [g for g in chain.floors if chain.roots.keep(g) and named and g < named.first]
        if named is None or not before:
            return ()
        heads = HeadFinder(self.store, self.names)
        older, newer = heads.load(max(before)), heads.load(named.first)
        left = {segment.id for segment in newer.segments}
        inputs = tuple(s for s in older.segments if s.id not in left)
        damaged = self.survey.damaged_segments()
        if older.wal_floor != newer.wal_floor or any(s.id in damaged for s in inputs):
            return ()
        skipped = set(newer.skipped_lsns) - set(older.skipped_lsns)
        repaired = skipped or set(newer.skipped_generations) - set(older.skipped_generations)
        return () if repaired else inputs

    # --- covers -------------------------------------------------------------------
    def _covers(self, entry: SegmentEntry) -> tuple[tuple[Cover, ...], tuple[Cover, ...]]:
        """Return what a segment may have covered, and what is to take its place."""
        footer = self._footer(entry)
        if footer is not None:
            covers = covers_of(footer, entry.visible_lsn)
            return covers, covers
        if self._deduced is None:
            self._deduced = self._deduce()
        bounds = (_bounds(entry),)
        if entry.id not in self._deduced.shares:
            return bounds, bounds
        wide = clipped(self._deduced.left, entry.min_key, entry.max_key + b"\0")
        return (bounds if entry.visible_lsn else wide), self._deduced.shares[entry.id]

    def _deduce(self) -> "_Deduced":
        """Return what all readable footers of the head leave, and how it is shared."""
        head = self.survey.head
        left, lost = [Cover(head.wal_base, head.wal_floor)], []
        for entry in head.segments:
            footer = self._footer(entry)
            if footer is None:
                lost.append(entry)
            else:
                left = without(left, covers_of(footer, entry.visible_lsn))
        shares: dict[str, list[Cover]] = {}
        rest = left
        for entry in sorted(lost, key=lambda entry: not entry.visible_lsn):
            shares[entry.id] = _both(_bounds(entry), rest)
            rest = without(rest, shares[entry.id])
        written = [entry.id for entry in lost if not entry.visible_lsn]
        if written:
            shares[written[0]] += rest
        return _Deduced(tuple(left), {i: tidied(covers) for i, covers in shares.items()})

    def _footer(self, entry: SegmentEntry) -> Footer | None:
        """Return a segment's footer; None if it cannot be read, or says another thing."""
        key = self.names.segment(entry.id)
        try:
            if entry.id not in self.survey.damaged_segments():
                segments = SegmentStore(self.store, self.names, ByteCache(0))
                return segments.tail(entry).footer
            body = self.store.get(key)
            footer = decode_footer(body, len(body), key)
        except (CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError):
            return None
        is_its = isinstance(footer, Footer) and footer.set_hash == entry.set_hash
        return footer if is_its and isinstance(footer, Footer) else None


def _lsns(covers: Sequence[Cover]) -> list[int]:
    return sorted({lsn for cover in covers for lsn in range(cover.first, cover.end)})


def _bounds(entry: SegmentEntry) -> Cover:
    return Cover(entry.lsn_min, entry.lsn_max + 1, entry.min_key, entry.max_key + b"\0")


def _both(cover: Cover, others: Sequence[Cover]) -> list[Cover]:
    shared = [cover.both(other) for other in others]
    return [piece for piece in shared if piece is not None]
