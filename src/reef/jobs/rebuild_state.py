"""From evidence to the state of a namespace. Pure.

**Which segments.** `rebuild_choice` decides among all that folds and merges have written, and
those of bulk jobs that a counting ingest in the log names. Staged segments of jobs that never
committed, or were aborted, are never asked (H49).

**The floor** is the first LSN that the chosen folds and merges do not cover. Below it they cover
every LSN that held a batch, for every key, since a fold of which nothing is left writes an empty
segment: what is not covered is lost, and reported. From it on every slot is in the log up to the
log's end, or is lost.

**The end of the log** is its first gap, if that gap is where a PUT is still in flight, and not
where the sweep has been. What was folded was there once. Behind a PUT in flight there can only be
objects of the same writer that say, in `after`, that they have seen nothing durable since.
In all other cases the gap was swept or lost, and what is behind it counts.

**Which ingests count.** There is no floor below which nothing counts, so two rules stand in for it
(H67). Of several ingests of one job only the last counts: its driver sends another one only after
it has proved that the earlier one does not count. And no ingest counts in a slot that some segment
covers for keys outside of that ingest: a fold has passed over that slot when it held a batch.
So an ingest that a fold has left out has counted, and an abort of its job below it was not there.
An ingest without a begin counts only if some slot below it is empty or cannot be read: that was
its begin, since no driver sends one without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from reef.engine.log_rules import LogReader, Verdict
from reef.engine.tail import ingested_segments
from reef.errors import NotFoundError
from reef.formats.covers import Cover, tidied, without
from reef.formats.manifest import DedupEntry, Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import covers_of
from reef.formats.streams import Lineage
from reef.formats.wal_object import JobSegment, WalHeader, WalKind
from reef.jobs.rebuild_choice import Candidate, Choice, choose
from reef.jobs.rebuild_evidence import Evidence, FoundSegment

__all__ = ["Derived", "derive"]


@dataclass(frozen=True, slots=True)
class Derived:
    """What a manifest would say, as far as the bucket tells."""

    schemas: tuple[Schema, ...]
    writer_epoch: int
    max_parallel_writes: int
    wal_floor: int
    log_end: int
    """The first LSN that is not in the log."""
    ingested: tuple[SegmentEntry, ...]
    written: tuple[FoundSegment, ...]
    left_out: tuple[str, ...]
    """Superseded, or never published; which of the two cannot always be told."""
    staged: tuple[str, ...]
    """Of bulk jobs that have not committed."""
    open_jobs: tuple[OpenJob, ...]
    dedup: tuple[DedupEntry, ...]
    stream_marks: dict[str, int]
    stream_lineages: dict[str, Lineage]
    below_floor: tuple[str, ...]
    skipped_lsns: tuple[int, ...]
    holes: tuple[Cover, ...]
    """LSNs and keys below the floor of which nothing is left."""
    problems: tuple[str, ...]


def derive(evidence: Evidence) -> Derived:
    """Return the state; NotFoundError if there is nothing to derive one from."""
    if not evidence.headers and not evidence.segments and evidence.successor is None:
        raise NotFoundError(
            "there is neither a log nor a segment to rebuild a namespace from",
            hint="Create it, if it has never held anything",
        )
    return _Deriving(evidence).result()


@dataclass
class _Deriving:
    evidence: Evidence
    problems: list[str] = field(default_factory=list)
    disputes: dict[int, str] = field(default_factory=dict)
    """Slots that hold another write than the one that a later object has seen there."""
    holes: list[Cover] = field(default_factory=list)

    def result(self) -> Derived:
        found = self.evidence = _without_late_aborts(_without_late_ingests(self.evidence))
        schemas = self._schemas()
        end = _end_of_log(found)
        ingests = self._ingests(end)
        candidates = [*_written(found), *_ingested(found, ingests)]
        choice = choose(candidates, Cover(_start_of_tail(found, end), end))
        floor = max(choice.end, found.wal_base)
        rules = _judged(found, floor)
        below = [ingest for ingest in ingests if ingest.lsn < floor]
        filled = found.headers.keys() | found.damaged
        gone = [lsn for lsn in range(floor, end) if lsn not in filled]
        self._note_holes(choice, below, gone)
        skipped = [lsn for lsn in sorted(found.damaged) if floor <= lsn < end]
        self._note_damage(skipped)
        # Below the floor a segment has what was there, and a stalled process may have put another
        # object into the slot after it was collected (H67).
        self.problems += [message for lsn, message in self.disputes.items() if lsn >= floor]
        skipped = sorted({*skipped, *gone})
        self._note_aborts(floor)
        self._note_schemas(schemas, floor, end)
        chosen = {candidate.id for candidate in choice.chosen}
        staged = {s.id for s in found.segments if s.is_staged}
        staged -= {segment.id for ingest in ingests for segment in _job_segments(ingest)}
        return Derived(
            schemas=schemas,
            writer_epoch=max([_first_epoch(found), *(h.epoch for h in found.headers.values())]),
            max_parallel_writes=max(
                (h.max_parallel_writes for h in found.headers.values()), default=0
            )
            or 1,
            wal_floor=floor,
            log_end=max(end, floor),
            ingested=tuple(_entries(below, schemas, chosen)),
            written=tuple(s for s in found.segments if s.id in chosen and not s.is_staged),
            left_out=tuple(sorted({s.id for s in found.segments} - chosen - staged)),
            staged=tuple(sorted(staged)),
            open_jobs=rules.open_jobs,
            dedup=rules.dedup.entries(),
            stream_marks=rules.marks,
            stream_lineages=rules.lineages,
            below_floor=rules.last_ids(),
            skipped_lsns=tuple(skipped),
            holes=tidied(self.holes),
            problems=tuple(self.problems),
        )

    def _schemas(self) -> tuple[Schema, ...]:
        """Fences, begins and footers have them whole."""
        said = [h.schema for h in self.evidence.headers.values()]
        said += [segment.footer.schema for segment in self.evidence.segments]
        if self.evidence.successor is not None:
            said.append(self.evidence.successor.schema)
        by_id = {schema.id: schema for schema in said if schema is not None}
        if not by_id:
            raise NotFoundError(
                "nothing that is left of the log names a schema",
                hint="Restore a fence or a segment of this namespace from a backup",
            )
        return tuple(by_id[number] for number in sorted(by_id))

    def _ingests(self, end: int) -> list[WalHeader]:
        """Return the ingests that count, by the rules of the log."""
        rules = LogReader(_blank(self.evidence), self.disputes)
        counting = []
        for header in _in_order(self.evidence, end):
            rules.jump(header.lsn) if header.lsn > rules.next_lsn else None
            applies = rules.judge(header).verdict is Verdict.APPLIES
            if applies and header.kind is WalKind.INGEST:
                counting.append(header)
        return counting

    def _note_holes(
        self, choice: Choice, ingests: Sequence[WalHeader], gone: Sequence[int]
    ) -> None:
        """Note what is left of nothing: below the floor by what is chosen, above it by the log."""
        covers = [cover for candidate in choice.chosen for cover in candidate.covers]
        kept = [h.lsn for h in self.evidence.headers.values() if h.kind is not WalKind.BATCHES]
        empty = [Cover(lsn, lsn + 1) for lsn in kept]
        base = self.evidence.wal_base
        folded = [Cover(base, choice.end)] if choice.end > base else []
        below = without(folded, [*covers, *empty])
        for hole in choice.uncovered:  # a part of a load, the rest of which was merged
            below += without([hole], below)
        holes = tidied([*below, *without([Cover(lsn, lsn + 1) for lsn in gone], below)])
        self.holes = below
        self.problems += [f"nothing is left of {hole}" for hole in holes]
        there = {segment.id for segment in self.evidence.segments}
        for ingest in ingests:
            for segment in _job_segments(ingest):
                stop = segment.max_key if segment.replaces else segment.max_key + b"\0"
                lost = [Cover(ingest.lsn, ingest.lsn + 1, segment.min_key, stop)]
                lost = without(lost, covers)
                if segment.id not in there and lost:
                    self.holes += without(lost, self.holes)
                    self.problems.append(
                        f"segment {segment.id} is gone, which LSN {ingest.lsn} made visible"
                    )

    def _note_damage(self, skipped: Sequence[int]) -> None:
        self.problems += [
            f"LSN {lsn} cannot be read, and no segment stands for it"
            for lsn in skipped
            if lsn not in self.evidence.given_up
        ]
        self.problems += [
            f"segment {i} cannot be read"
            for i in self.evidence.unreadable
            if i not in self.evidence.replaced
        ]

    def _note_aborts(self, floor: int) -> None:
        """Note jobs of which it cannot be told whether an abort or the ingest behind it was first.

        In a slot below the floor an abort may be late, and no fold has passed the ingest yet.
        """
        headers = sorted(self.evidence.headers.items())
        aborts = {
            header.job.id: lsn
            for lsn, header in headers
            if header.kind is WalKind.ABORT and header.job is not None and lsn < floor
        }
        for lsn, header in headers:
            abort = aborts.get(header.job.id, lsn) if header.job is not None else lsn
            if _is_ingest(header) and abort < lsn:
                self.problems.append(
                    f"LSN {lsn} commits a job that LSN {abort} aborts: which of the two was there "
                    f"first cannot be told, and it is left out"
                )

    def _note_schemas(self, schemas: Sequence[Schema], floor: int, end: int) -> None:
        known = {0, *(schema.id for schema in schemas)}
        for header in _in_order(self.evidence, end):
            if header.lsn >= floor and header.schema_id not in known:
                self.problems.append(
                    f"LSN {header.lsn} was written with schema {header.schema_id}, "
                    f"which nothing that is left describes"
                )


# --- the log ----------------------------------------------------------------------------


def _in_order(evidence: Evidence, end: int) -> Iterator[WalHeader]:
    for lsn in sorted(evidence.headers):
        if lsn < end:
            yield evidence.headers[lsn]


def _judged(evidence: Evidence, floor: int) -> LogReader:
    """Return the rules as they are at the floor."""
    rules = LogReader(_blank(evidence), disputes={})  # which `_ingests` collects
    for header in _in_order(evidence, floor):
        if header.lsn > rules.next_lsn:
            rules.jump(header.lsn)
        rules.judge(header)
    if rules.next_lsn < floor:
        rules.jump(floor)
    return rules


def _runs(evidence: Evidence) -> list[range]:
    """Return the stretches of the log without a gap; an object that is damaged is none."""
    slots = sorted({*evidence.headers, *evidence.damaged})
    if not slots:
        return []
    breaks = [(a, b) for a, b in pairwise(slots) if b > a + 1]
    firsts = [slots[0], *(after for _, after in breaks)]
    lasts = [*(before for before, _ in breaks), slots[-1]]
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _end_of_log(evidence: Evidence) -> int:
    """Return the first LSN behind what counts."""
    covered = (cover.end for segment in evidence.segments for cover in _covers(segment))
    folded = max([evidence.wal_base, *covered])
    end = folded
    for run in _runs(evidence):
        if run.start > end and _is_in_flight(evidence, end, run):
            break
        end = max(end, run.stop)
    return end


def _is_in_flight(evidence: Evidence, gap: int, run: range) -> bool:
    """Whether what is behind a gap may have been sent before the gap was filled."""
    headers = [evidence.headers.get(lsn) for lsn in run]
    return all(
        h is not None
        and h.kind is WalKind.BATCHES
        and h.after is not None
        and h.lsn - len(h.after) < gap
        for h in headers
    )


def _start_of_tail(evidence: Evidence, end: int) -> int:
    """Return where the last stretch of the log that counts begins."""
    return max((run.start for run in _runs(evidence) if run.start < end), default=end)


def _blank(evidence: Evidence) -> Manifest:
    """Return a manifest from before the log; jobs whose begin is missing are open in it."""
    first = next(lsn for lsn in count(evidence.wal_base) if lsn not in evidence.headers)
    behind = [h for h in evidence.headers.values() if h.lsn > first]
    jobs = {h.job.id: h.job for h in behind if _is_ingest(h) and h.job}
    for header in evidence.headers.values():
        if header.kind is WalKind.BEGIN and header.job is not None:
            jobs.pop(header.job.id, None)
    begun = tuple(OpenJob(job.id, 0, job.key, job.live_wins) for job in jobs.values())
    base = evidence.wal_base
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        wal_floor=base,
        wal_base=base,
        open_jobs=begun,
    )


def _first_epoch(evidence: Evidence) -> int:
    return 0 if evidence.successor is None else evidence.successor.writer_epoch


def _is_ingest(header: WalHeader) -> bool:
    return header.kind is WalKind.INGEST


def _without_late_ingests(evidence: Evidence) -> Evidence:
    """Leave out ingests that landed in slots that had been folded and collected (H67)."""
    last: dict[str, int] = {}
    for lsn in sorted(evidence.headers):
        job = evidence.headers[lsn].job
        if _is_ingest(evidence.headers[lsn]) and job is not None:
            last[job.id] = lsn
    folded = [cover for segment in evidence.segments for cover in _covers(segment)]
    headers = {
        lsn: header
        for lsn, header in evidence.headers.items()
        if not _is_ingest(header)
        or (header.job is not None and last[header.job.id] == lsn and not _is_late(header, folded))
    }
    return replace(evidence, headers=headers)


def _without_late_aborts(evidence: Evidence) -> Evidence:
    """Leave out aborts that landed in slots that had been folded and collected (H67).

    A fold stands for every slot but those of ingests that count. So an ingest that it has left
    out has counted, and an abort of that job below it was not there then.
    """
    starts = {c.first for s in evidence.segments if not s.footer.ancestors for c in _covers(s)}
    counted = {
        header.job.id: lsn
        for lsn, header in evidence.headers.items()
        if _is_ingest(header) and header.job is not None and lsn + 1 in starts
    }
    late = {
        lsn
        for lsn, header in evidence.headers.items()
        if header.kind is WalKind.ABORT and header.job and lsn < counted.get(header.job.id, 0)
    }
    return replace(evidence, headers={n: h for n, h in evidence.headers.items() if n not in late})


def _is_late(ingest: WalHeader, folded: Sequence[Cover]) -> bool:
    """Whether its slot held something else when it was folded: a fold leaves ingests out."""
    slot = Cover(ingest.lsn, ingest.lsn + 1)
    own = [
        Cover(
            ingest.lsn,
            ingest.lsn + 1,
            segment.min_key,
            segment.max_key if segment.replaces else segment.max_key + b"\0",
        )
        for segment in _job_segments(ingest)
    ]
    here = [shared for cover in folded if (shared := cover.both(slot)) is not None]
    return bool(without(here, own))


# --- segments ---------------------------------------------------------------------------


def _covers(segment: FoundSegment) -> tuple[Cover, ...]:
    """Return what a segment of a fold or a merge stands for; guessed where it does not say."""
    footer = segment.footer
    if segment.is_staged:
        return ()
    if footer.covers or footer.ancestors:
        return footer.covers
    return (Cover(footer.lsn_min, footer.lsn_max + 1, footer.min_key, footer.max_key + b"\0"),)


def _written(evidence: Evidence) -> Iterator[Candidate]:
    there = {segment.id for segment in evidence.segments}
    for segment in evidence.segments:
        footer = segment.footer
        if not segment.is_staged:
            yield Candidate(
                segment.id,
                max(1, footer.generation),
                _covers(segment),
                frozenset(footer.ancestors),
                _unit(segment),
                whole_keys=bool(footer.covers) and not footer.ancestors,
                lacks_siblings=bool(footer.ancestors) and not there.issuperset(footer.siblings),
            )


def _unit(segment: FoundSegment) -> str:
    """Return what those that were written together have in common."""
    footer = segment.footer
    if footer.ancestors and footer.job:
        return f"{footer.job} on {footer.generation}"
    return min((segment.id, *footer.siblings))


def _ingested(evidence: Evidence, ingests: Sequence[WalHeader]) -> Iterator[Candidate]:
    visible = {s.id: ingest.lsn for ingest in ingests for s in _job_segments(ingest)}
    for segment in evidence.segments:
        lsn = visible.get(segment.id, 0)
        if lsn:
            yield Candidate(segment.id, 0, covers_of(segment.footer, lsn), unit=segment.id)


def _job_segments(ingest: WalHeader) -> Sequence[JobSegment]:
    return ingest.job.segments if ingest.job is not None else ()


def _entries(
    ingests: Sequence[WalHeader], schemas: Sequence[Schema], chosen: set[str]
) -> Iterator[SegmentEntry]:
    for ingest in ingests:
        for entry in ingested_segments(ingest, schemas[-1]):
            if entry.id in chosen:
                yield entry
