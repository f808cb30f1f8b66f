"""From evidence to the state of a namespace. Pure.

    1  leave out late begins, ingests and aborts: objects that landed in slots already folded (H67)
    2  find the end of the log
    3  replay the headers: which ingests count
    4  choose the live segments (`reef.jobs.evidence.gather`); the floor follows from their covers
    5  replay up to the floor: dedup window, open jobs, stream marks
    6  report LSNs that no segment covers and no slot has

**Segments.** Candidates are the outputs of folds and merges, and the segments of bulk jobs that a
counting ingest names. Segments of jobs that never committed are no candidates (H49).

**The floor** is the first LSN that the chosen folds and merges do not cover. Below it they cover
every LSN of a batch, for every key, since a fold without rows writes an empty segment: an LSN that
is not covered is lost, and reported. From it on every slot is in the log up to its end, or lost.

**The end of the log** is its first gap, if a PUT may be in flight there; gaps that a sweep has left
are passed. Folded slots were filled once. Behind a PUT in flight there can only be objects of the
same writer whose `after` lists nothing durable since. Any other gap was swept or lost, and the
objects behind it count.

**Loads.** There is no floor below which nothing counts, so two rules replace it (H67). Of several
begins or ingests of one job only the last counts: its driver sends another only after it has proved
that the earlier one does not count. And no ingest counts in a slot that some segment covers for
keys outside of that ingest: a fold has passed that slot when it held a batch. So an ingest that a
fold has left out has counted, and an abort of its job below it came later. An ingest without a
begin counts only if some slot below it is empty or unreadable: that was its begin, since no driver
omits it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import msgspec

from reef.engine.log.log import LogRules, Verdict, replay_headers, run_replay
from reef.engine.log.tail import ingested_segments
from reef.errors import NotFoundError
from reef.formats.covers import Cover, overlap, tidied, without
from reef.formats.manifest import DedupEntry, Lineage, Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import Footer, covers_of
from reef.formats.wal_object import JobSegment, WalHeader, WalKind
from reef.jobs.evidence.gather import Choice, Evidence, FoundSegment, SegmentCandidate, choose
from reef.paths import Namespace


@dataclass(frozen=True, slots=True)
class Derived:
    """The fields of a manifest, as far as the bucket shows them."""

    schemas: tuple[Schema, ...]
    writer_epoch: int
    max_parallel_writes: int
    wal_floor: int
    log_end: int
    """The first LSN behind the log."""
    ingested: tuple[SegmentEntry, ...]
    written: tuple[FoundSegment, ...]
    inherited: tuple[SegmentEntry, ...]
    """Live segments of a branch's first manifest."""
    left_out: tuple[str, ...]
    """Superseded or never published segments; which of the two is not always known."""
    staged: tuple[str, ...]
    """Segments of bulk jobs that have not committed."""
    open_jobs: tuple[OpenJob, ...]
    dedup: tuple[DedupEntry, ...]
    stream_marks: dict[str, int]
    stream_lineages: dict[str, Lineage]
    below_floor: tuple[str, ...]
    skipped_lsns: tuple[int, ...]
    holes: tuple[Cover, ...]
    """LSNs and keys below the floor that no object has."""
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
        found = _without_late_begins(_without_late_ingests(self.evidence))
        found = self.evidence = _without_late_aborts(found)
        found = self.evidence = self._without_late_appends()
        schemas = self._schemas()
        end = _end_of_log(found)
        ingests = self._ingests(end)
        candidates = [*_written(found), *_ingested_candidates(found, ingests)]
        choice = choose(candidates, Cover(_start_of_tail(found, end), end))
        floor = max(choice.end, found.wal_base)
        rules = _rules_at(found, floor)
        below = [ingest for ingest in ingests if ingest.lsn < floor]
        filled = found.headers.keys() | found.damaged
        gone = [lsn for lsn in range(floor, end) if lsn not in filled]
        self._note_beginning()
        self._note_holes(choice, below, gone)
        skipped = [lsn for lsn in sorted(found.damaged) if floor <= lsn < end]
        self._note_damage(skipped)
        # Below the floor segments have the rows, and a stalled process may have put another object
        # into the slot after it was collected (H67).
        self.problems += [message for lsn, message in self.disputes.items() if lsn >= floor]
        # The slot below the floor is read too, for its time, by `as_of` and by verify.
        skipped = sorted({*skipped, *gone, *(found.damaged & {floor - 1})})
        self._note_aborts(floor)
        unknown = self._unknown_schemas(schemas, floor, end)
        skipped = sorted({*skipped, *unknown})
        chosen = {candidate.id for candidate in choice.chosen}
        own = {s.id for s in found.segments if s.entry is None}
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
            ingested=tuple(_entries(found.names, below, schemas, chosen)),
            written=tuple(s for s in found.segments if s.id in chosen & own and not s.is_staged),
            inherited=tuple(s.entry for s in found.segments if s.entry and s.id in chosen),
            left_out=tuple(sorted(own - chosen - staged)),
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
        """Return the schemas of fences, begins and footers."""
        known = [h.schema for h in self.evidence.headers.values()]
        known += [segment.footer.schema for segment in self.evidence.segments]
        if self.evidence.successor is not None:
            known.append(self.evidence.successor.schema)
        known += self.evidence.first.schemas if self.evidence.first is not None else ()
        by_id = {schema.id: schema for schema in known if schema is not None}
        if not by_id:
            raise NotFoundError(
                "no object of the log and no segment names a schema",
                hint="Restore a fence or a segment of this namespace from a backup",
            )
        return tuple(by_id[number] for number in sorted(by_id))

    def _ingests(self, end: int) -> list[WalHeader]:
        """Return the ingests that count, by the rules of the log."""
        rules = LogRules(_blank(self.evidence), self.disputes)
        replayed = replay_headers(rules, self.evidence.headers, end=end, gaps=True)
        return [h for h, verdict in replayed if verdict is Verdict.APPLIES and _is_ingest(h)]

    def _without_late_appends(self) -> Evidence:
        """Leave out appends that may have landed in slots that had been collected (H67).

        An append behind all folds has counted, unless its batch was committed before. The object
        of an earlier commit may as well be a late one of the same batch: nothing else in the bucket
        distinguishes the two. The append behind the folds counts then, since it may be the only
        commit of its rows.
        """
        folded = [cover for segment in self.evidence.segments for cover in _covers(segment)]
        appends = {n: h for n, h in self.evidence.headers.items() if h.kind is WalKind.APPEND}
        is_folded = {n: overlap([Cover(n, n + 1)], folded) for n in appends}
        new = {n: h for n, h in appends.items() if not is_folded[n]}
        late = set()
        for lsn, header in appends.items():
            again = [n for n, h in new.items() if n > lsn and _repeats(h, header)]
            if is_folded[lsn] and again:
                late.add(lsn)
                self.problems.append(
                    f"LSN {lsn} and LSN {again[0]} hold the same batch of a stream: its rows may "
                    f"have been written twice"
                )
        return self.evidence.without(late)

    def _note_beginning(self) -> None:
        """Report that the start of this incarnation's log is unknown."""
        if self.evidence.lost_record is not None:
            self.problems.append(
                f"{self.evidence.lost_record} is lost or damaged: objects below "
                f"LSN {self.evidence.wal_base} may be lost too"
            )

    def _note_holes(
        self, choice: Choice, ingests: Sequence[WalHeader], gone: Sequence[int]
    ) -> None:
        """Report holes: below the floor between the chosen segments, above it in the log."""
        covers = [cover for candidate in choice.chosen for cover in candidate.covers]
        kept = [h.lsn for h in self.evidence.headers.values() if not h.kind.has_rows]
        empty = [Cover(lsn, lsn + 1) for lsn in kept]
        base = self.evidence.wal_base
        folded = [Cover(base, choice.end)] if choice.end > base else []
        below = without(folded, [*covers, *empty])
        # A part of a load whose rest was merged. Slots without rows are none: a fold of them alone
        # writes no segment, though another one, which was overtaken, may have covered them.
        records = [h.lsn for h in self.evidence.headers.values() if _is_record(h)]
        covered = [Cover(lsn, lsn + 1) for lsn in records]
        for hole in choice.uncovered:
            below += without([hole], [*below, *covered])
        holes = tidied([*below, *without([Cover(lsn, lsn + 1) for lsn in gone], below)])
        self.holes = below
        self.problems += [f"no object has {hole}" for hole in holes]
        for entry in self.evidence.lost_inherited:
            bounds = Cover(entry.lsn_min, entry.lsn_max + 1, entry.min_key, entry.max_key + b"\0")
            for hole in without([bounds], covers):
                self.problems.append(f"no object has {hole}, which was in segment {entry.id}")
        there = {segment.id for segment in self.evidence.segments}
        for ingest in ingests:
            for segment in _job_segments(ingest):
                stop = segment.max_key if segment.replaces else segment.max_key + b"\0"
                lost = [Cover(ingest.lsn, ingest.lsn + 1, segment.min_key, stop)]
                lost = without(lost, covers)
                if segment.id not in there and lost:
                    self.holes += without(lost, self.holes)
                    self.problems.append(
                        f"segment {segment.id} of the ingest at LSN {ingest.lsn} is missing"
                    )

    def _note_damage(self, skipped: Sequence[int]) -> None:
        self.problems += [
            f"LSN {lsn} cannot be read, and no segment covers it"
            for lsn in skipped
            if lsn not in self.evidence.skipped
        ]
        self.problems += [
            f"segment {i} cannot be read"
            for i in self.evidence.unreadable
            if i not in self.evidence.replaced
        ]

    def _note_aborts(self, floor: int) -> None:
        """Report jobs with an abort below their ingest, if it is unknown which came first.

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
                    f"LSN {lsn} commits a job that LSN {abort} aborts: it is unknown which came "
                    f"first, and the ingest is left out"
                )

    def _unknown_schemas(self, schemas: Sequence[Schema], floor: int, end: int) -> list[int]:
        """Report the LSNs from the floor on whose rows no schema describes, and return them.

        No process can read them, whether the schema is older or newer than the known ones.
        """
        known, found = {0, *(schema.id for schema in schemas)}, []
        for header in _in_order(self.evidence, end):
            if header.lsn >= floor and header.schema_id not in known:
                found.append(header.lsn)
                self.problems.append(
                    f"LSN {header.lsn} was written with schema {header.schema_id}, "
                    f"which no object describes: it cannot be read"
                )
        return found


# --- the log ----------------------------------------------------------------------------


def _in_order(evidence: Evidence, end: int) -> Iterator[WalHeader]:
    for lsn in sorted(evidence.headers):
        if lsn < end:
            yield evidence.headers[lsn]


def _rules_at(evidence: Evidence, floor: int) -> LogRules:
    """Return the rules after a replay up to the floor."""
    rules = LogRules(_blank(evidence), disputes={})  # which `_ingests` collects
    run_replay(replay_headers(rules, evidence.headers, end=floor, gaps=True))
    if rules.next_lsn < floor:
        rules.jump(floor)
    return rules


def _runs(evidence: Evidence) -> list[range]:
    """Return the ranges of the log without a gap; a damaged object is not a gap."""
    slots = sorted({*evidence.headers, *evidence.damaged})
    if not slots:
        return []
    breaks = [(a, b) for a, b in pairwise(slots) if b > a + 1]
    firsts = [slots[0], *(after for _, after in breaks)]
    lasts = [*(before for before, _ in breaks), slots[-1]]
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _end_of_log(evidence: Evidence) -> int:
    """Return the first LSN behind the objects that count."""
    covered = (cover.end for segment in evidence.segments for cover in _covers(segment))
    folded = max([evidence.wal_base, *covered])
    end = folded
    for run in _runs(evidence):
        if run.start > end and _is_in_flight(evidence, end, run):
            break
        end = max(end, run.stop)
    return end


def _is_in_flight(evidence: Evidence, gap: int, run: range) -> bool:
    """Whether the objects behind a gap may have been sent before the gap was filled."""
    headers = [evidence.headers.get(lsn) for lsn in run]
    return all(
        h is not None
        and h.kind is WalKind.BATCHES
        and h.after is not None
        and h.lsn - len(h.after) < gap
        for h in headers
    )


def _start_of_tail(evidence: Evidence, end: int) -> int:
    """Return the start of the last range of the log that counts."""
    return max((run.start for run in _runs(evidence) if run.start < end), default=end)


def _blank(evidence: Evidence) -> Manifest:
    """Return a manifest from before the log, in which jobs are open whose begin may be lost.

    A begin is never collected. So a slot with a late object had none, and is no gap.
    """
    filled = evidence.headers.keys() | evidence.late
    first = next(lsn for lsn in count(evidence.wal_base) if lsn not in filled)
    behind = [h for h in evidence.headers.values() if h.lsn > first]
    jobs = {h.job.id: h.job for h in behind if _is_ingest(h) and h.job}
    for header in evidence.headers.values():
        if header.kind is WalKind.BEGIN and header.job is not None:
            jobs.pop(header.job.id, None)
    begun = tuple(OpenJob(job.id, job.begin_lsn, job.key, job.live_wins) for job in jobs.values())
    base = evidence.wal_base
    if evidence.first is not None:
        known = {job.id for job in evidence.first.open_jobs}
        lost = tuple(job for job in begun if job.id not in known)
        return msgspec.structs.replace(evidence.first, open_jobs=(*evidence.first.open_jobs, *lost))
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        wal_floor=base,
        wal_base=base,
        open_jobs=begun,
    )


def _first_epoch(evidence: Evidence) -> int:
    origin = 0 if evidence.first is None else evidence.first.writer_epoch
    return origin if evidence.successor is None else max(origin, evidence.successor.writer_epoch)


def _is_ingest(header: WalHeader) -> bool:
    return header.kind is WalKind.INGEST


def _is_record(header: WalHeader) -> bool:
    """Whether an object has no rows, neither in itself nor in segments."""
    return not header.kind.has_rows and not _is_ingest(header)


def _repeats(header: WalHeader, earlier: WalHeader) -> bool:
    """Whether an append is of a batch that an earlier one, or one behind that, has committed."""
    return any(place <= earlier.marks.get(stream, 0) for stream, place in header.marks.items())


def _without_late_ingests(evidence: Evidence) -> Evidence:
    """Leave out ingests that landed in slots that had been folded and collected (H67).

    Those of a job that has no begin stay, if none can be lost: the rules ignore them.
    """
    begun = {h.job.id for h in evidence.headers.values() if h.kind is WalKind.BEGIN and h.job}
    gap = next(lsn for lsn in count(evidence.wal_base) if lsn not in evidence.headers)
    last: dict[str, int] = {}
    for lsn in sorted(evidence.headers):
        job = evidence.headers[lsn].job
        if _is_ingest(evidence.headers[lsn]) and job is not None:
            last[job.id] = lsn
    folded = [cover for segment in evidence.segments for cover in _covers(segment)]
    return evidence.without(
        lsn
        for lsn, header in evidence.headers.items()
        if _is_ingest(header)
        and (header.job is None or header.job.id in begun or lsn > gap)
        and (header.job is None or last[header.job.id] != lsn or _is_late(header, folded))
    )


def _without_late_begins(evidence: Evidence) -> Evidence:
    """Leave out begins that landed in slots that had been folded and collected (H67).

    Their drivers have sent another one. A load with `live_wins` sorts at the begin that counts, so
    with an earlier one its ingest would not count (H60). Above the folds no begin is late.
    """
    folded = [cover for segment in evidence.segments for cover in _covers(segment)]
    last = {
        header.job.id: lsn
        for lsn, header in sorted(evidence.headers.items())
        if header.kind is WalKind.BEGIN and header.job is not None
    }
    return evidence.without(
        lsn
        for lsn, header in evidence.headers.items()
        if header.kind is WalKind.BEGIN
        and header.job is not None
        and lsn < last[header.job.id]
        and overlap([Cover(lsn, lsn + 1)], folded)
    )


def _without_late_aborts(evidence: Evidence) -> Evidence:
    """Leave out aborts that landed in slots that had been folded and collected (H67).

    A fold covers every slot but those of ingests that count. So an ingest that it has left out
    has counted, and an abort of that job between its last begin and the ingest came later. An
    abort below that begin has ended an earlier attempt of the job.

    A fold may also begin just behind an ingest that does not count. Then no segment of that ingest
    is left, in the bucket or merged into another one, and the abort stays.
    """
    starts = {c.first for s in evidence.segments if not s.footer.ancestors for c in _covers(s)}
    counted = {
        header.job.id: lsn
        for lsn, header in evidence.headers.items()
        if _is_ingest(header)
        and header.job is not None
        and lsn + 1 in starts
        and _has_segments_left(header, evidence)
    }
    begun = {
        header.job.id: lsn
        for lsn, header in sorted(evidence.headers.items())
        if header.kind is WalKind.BEGIN and header.job and lsn < counted.get(header.job.id, 0)
    }
    late = {
        lsn
        for lsn, header in evidence.headers.items()
        if header.kind is WalKind.ABORT
        and header.job
        and begun.get(header.job.id, 0) < lsn < counted.get(header.job.id, 0)
    }
    return evidence.without(late)


def _has_segments_left(ingest: WalHeader, evidence: Evidence) -> bool:
    """Whether a segment of an ingest is in the bucket, or was merged into one that is."""
    ids = {segment.id for segment in _job_segments(ingest)}
    return any(s.id in ids or not ids.isdisjoint(s.footer.ancestors) for s in evidence.segments)


def _is_late(ingest: WalHeader, folded: Sequence[Cover]) -> bool:
    """Whether its slot held another object when it was folded: a fold leaves ingests out."""
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
    """Return the covers of a fold or merge; its bounds if an older writer stated none."""
    footer = segment.footer
    if segment.entry is not None and segment.entry.visible_lsn:
        return covers_of(footer, segment.entry.visible_lsn)
    if segment.is_staged:
        return ()
    if footer.covers or footer.ancestors:
        return footer.covers
    return (Cover(footer.lsn_min, footer.lsn_max + 1, footer.min_key, footer.max_key + b"\0"),)


def _written(evidence: Evidence) -> Iterator[SegmentCandidate]:
    there = {segment.id for segment in evidence.segments}
    for segment in evidence.segments:
        footer = segment.footer
        if not segment.is_staged:
            yield SegmentCandidate(
                segment.id,
                # Generations of an origin are others: its segments are older than the branch's own.
                1 if segment.entry is not None else 1 + max(1, footer.generation),
                _covers(segment),
                frozenset(footer.ancestors),
                _unit(segment),
                whole_keys=segment.entry is None and _is_piece_of_fold(footer),
                lacks_siblings=segment.entry is None
                and bool(footer.ancestors)
                and not there.issuperset(footer.siblings),
            )


def _is_piece_of_fold(footer: Footer) -> bool:
    """Whether the segment is one of several that its fold wrote, by key range.

    A fold without rows writes one segment, which covers all keys. Another segment without rows was
    written by a rebuild, for the keys of a hole.
    """
    has_rows = footer.rows > 0 or footer.tombstones > 0
    return has_rows and bool(footer.covers) and not footer.ancestors


def _unit(segment: FoundSegment) -> str:
    """Return the name that segments written together have in common."""
    footer = segment.footer
    if footer.ancestors and footer.job:
        return f"{footer.job} on {footer.generation}"
    return min((segment.id, *footer.siblings))


def _ingested_candidates(
    evidence: Evidence, ingests: Sequence[WalHeader]
) -> Iterator[SegmentCandidate]:
    visible = {s.id: ingest.lsn for ingest in ingests for s in _job_segments(ingest)}
    for segment in evidence.segments:
        lsn = visible.get(segment.id, 0)
        if lsn:
            yield SegmentCandidate(segment.id, 0, covers_of(segment.footer, lsn), unit=segment.id)


def _job_segments(ingest: WalHeader) -> Sequence[JobSegment]:
    return ingest.job.segments if ingest.job is not None else ()


def _entries(
    names: Namespace, ingests: Sequence[WalHeader], schemas: Sequence[Schema], chosen: set[str]
) -> Iterator[SegmentEntry]:
    for ingest in ingests:
        for entry in ingested_segments(ingest, schemas[-1], names):
            if entry.id in chosen:
                yield entry
