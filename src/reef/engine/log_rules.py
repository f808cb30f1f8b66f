"""What counts in the log: the rules by which everyone reads it.

Replay, readers, fold, dedup and change streams all pass objects through one `LogReader`, in
LSN order, and so agree:

- A `batches` object is void if one of the slots before it holds another write id than its
  `after` says. Other kinds are never void.
- An `ingest` counts only if its job is open at its LSN (a begin below it, no abort and no
  other ingest of that job in between) and its key is not in the dedup window as it is there.
- LSNs that a repair has skipped do not count.
- A `begin` with a schema from before the first that the namespace has opens nothing: releases
  before incarnations re-created a dropped namespace in the same chain (H48).
- Below the floor nothing counts: a slot there may have been collected, and filled again by a
  process that stalled (H67). So a `LogReader` starts at its manifest's floor, and a reader of
  slots below the current floor checks that they were kept since (`History.kept_slots`). The
  outcome of a write that was in doubt is proved by the floor, never by what is in its slot now
  (`prove`).

All of it follows from the log alone, whichever manifest one starts from and however old it is.

A slot's write id is that of whatever object holds it, void or not. Of a skipped slot it is
not known, and so it makes nothing void: what was acknowledged behind it would be lost too.

A slot is filled once, so its winner never changes. Where it has (a store that honours its
conditions only sometimes, an object that was deleted and its slot filled again), acknowledged
writes are gone, and no verdict is right: `check_winner` raises CorruptionError with the kind
CHANGED_WINNER (H73). Winners are known from three sources, at no request of their own:

- the first id in `after`, of an object that the writer had seen durable before it sent this one;
- the ids of the slots that this reader has judged itself, against those that a newer manifest
  keeps of the slots below its floor;
- the ids of the fences that an opening writer was told are in their slots.

Verify, repair and rebuild collect such slots as disputes instead. The id of a disputed slot is
not known from there on, so that the writes behind it count.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from reef.errors import CorruptionError, Kind
from reef.formats.manifest import Manifest, OpenJob
from reef.formats.wal_object import WalHeader, WalKind
from reef.manifest.dedup import DedupWindow
from reef.manifest.streams import StreamHistory, extend_lineage

__all__ = ["IDS_KEPT", "Judgement", "LogReader", "Proof", "Verdict", "prove"]

IDS_KEPT = 64
"""Write ids remembered below the floor; `max_parallel_writes` may not exceed it."""


UNKNOWN_ID = ""
"""Stands for the write id of a slot that a repair has skipped."""


class Verdict(StrEnum):
    """What an object in the log amounts to."""

    APPLIES = "applies"
    VOID = "void"
    EMPTY = "empty"
    """A fence, begin, abort or skip: it changes no row."""
    IGNORED = "ignored"
    """An ingest whose job was not open, or an LSN that a repair has skipped."""


class Proof(StrEnum):
    """What a manifest proves of a write that was slow, or whose response was lost."""

    COUNTS = "counts"
    LOST = "lost"
    UNKNOWN = "unknown"


def prove(manifest: Manifest, header: WalHeader, *, in_slot: bool) -> Proof:
    """Return what became of a WAL object; `in_slot` says whether its slot was seen to hold it.

    The manifest must have been read after that. At or above its floor the slot was never
    collected, so the object in it is the only one there ever was. Below the floor the slot may
    have been folded, collected and filled again: only the dedup window and the stream marks
    tell. The writer's epoch proves nothing (H13, H66).
    """
    if header.lsn >= manifest.wal_floor:
        return Proof.COUNTS if in_slot else Proof.LOST
    committed = any(entry.write_id == header.write_id for entry in manifest.dedup)
    return Proof.COUNTS if committed or _is_marked(manifest, header) else Proof.UNKNOWN


def _is_marked(manifest: Manifest, header: WalHeader) -> bool:
    """Whether a stream's mark proves that an object was folded: with its entries, and not with
    those of a copy of the same local log, which has the same numbers (H71)."""
    ends = {stream: points[-1] for stream, points in header.lineages.items()}
    return any(StreamHistory.of(manifest, s).has_point(point) for s, point in ends.items())


@dataclass(frozen=True, slots=True)
class Judgement:
    """An object, and what it amounts to."""

    header: WalHeader
    verdict: Verdict


class LogReader:
    """Judges the objects of a log, from a manifest's floor on."""

    def __init__(self, manifest: Manifest, disputes: dict[int, str] | None = None) -> None:
        """Start at a manifest's floor; slots whose winner has changed are errors, or `disputes`."""
        self._disputes = disputes
        self.next_lsn = manifest.wal_floor
        self._ids: OrderedDict[int, str] = OrderedDict(_ids_below_floor(manifest))
        self._jobs = {job.id: job for job in manifest.open_jobs}
        self.dedup = DedupWindow.of(manifest)
        """The keys that were committed below `next_lsn`, as far back as they are remembered."""
        self.marks = dict(manifest.stream_marks)
        """How far each stream was committed below `next_lsn`."""
        self.lineages = dict(manifest.stream_lineages)
        """Which entries that were, by stream."""
        self._skipped = frozenset(manifest.skipped_lsns)
        self._first_schema_id = manifest.schemas[0].id

    def judge(self, header: WalHeader) -> Judgement:
        """Return what the object at the next LSN amounts to. Objects come without gaps."""
        if header.lsn != self.next_lsn:
            raise ValueError(f"LSN {header.lsn} where {self.next_lsn} was due")
        verdict = self.verdict(header)
        self._follow_job(header)
        self._remember(header)
        if verdict is Verdict.APPLIES:
            self.dedup.add(header)
            self._move_marks(header)
        return Judgement(header, verdict)

    def verdict(self, header: WalHeader) -> Verdict:
        """Return what `judge` would say, and take note of nothing."""
        if header.lsn in self._skipped:
            return Verdict.IGNORED
        match header.kind:
            case WalKind.BATCHES:
                return Verdict.VOID if self._is_void(header) else Verdict.APPLIES
            case WalKind.INGEST:
                return Verdict.APPLIES if self._commits_job(header) else Verdict.IGNORED
        return Verdict.EMPTY

    def skip(self) -> None:
        """Pass over the next LSN, whose object a repair has given up."""
        if self.next_lsn not in self._skipped:
            raise ValueError(f"LSN {self.next_lsn} was not skipped by a repair")
        self._ids[self.next_lsn] = UNKNOWN_ID
        self.next_lsn += 1

    def jump(self, lsn: int) -> None:
        """Go on at a later LSN: what stood in between was collected, and makes nothing void."""
        for gone in range(max(self.next_lsn, lsn - IDS_KEPT), lsn):
            self._ids[gone] = UNKNOWN_ID
        self.next_lsn = lsn
        while len(self._ids) > IDS_KEPT:
            self._ids.popitem(last=False)

    @property
    def open_jobs(self) -> tuple[OpenJob, ...]:
        return tuple(self._jobs.values())

    @property
    def awaits_live_wins(self) -> bool:
        """Whether rows may still come in that sort below what is here already."""
        return bool(self._jobs) and any(job.live_wins for job in self._jobs.values())

    def last_ids(self) -> tuple[str, ...]:
        """Return the write ids of the slots just below `next_lsn`, the last one last."""
        return tuple(self._ids.values())

    def history(self, stream: str) -> StreamHistory:
        """Return the committed part of a stream below `next_lsn`."""
        return StreamHistory(self.marks.get(stream, 0), self.lineages.get(stream, ()))

    def _move_marks(self, header: WalHeader) -> None:
        for stream, place in header.marks.items():
            if place > self.marks.get(stream, 0):
                self.marks[stream] = place
                points = header.lineages.get(stream, ())
                self.lineages[stream] = extend_lineage(self.lineages.get(stream, ()), points)

    def check_winner(self, lsn: int, write_id: str) -> None:
        """Raise if another write than this one was judged, or is kept, as the slot's winner."""
        known = self._ids.get(lsn, UNKNOWN_ID)
        if known == write_id or UNKNOWN_ID in (known, write_id):
            return
        message = f"LSN {lsn} was filled twice: by write {write_id}, and by write {known}"
        if self._disputes is None:
            raise CorruptionError(
                message,
                kind=Kind.CHANGED_WINNER,
                hint="Acknowledged writes may be lost: run `reef store probe`, then `reef verify`",
                lsn=lsn,
                write_ids=(write_id, known),
            )
        self._disputes[lsn] = message
        self._ids[lsn] = UNKNOWN_ID

    def check_floor(self, manifest: Manifest) -> None:
        """Raise if a manifest keeps other winners below its floor than those that are known."""
        for lsn, write_id in _ids_below_floor(manifest):
            self.check_winner(lsn, write_id)

    def _is_void(self, header: WalHeader) -> bool:
        if not header.after:
            return False
        first = header.lsn - len(header.after)
        self.check_winner(first, header.after[0])
        expected = enumerate(header.after, start=first)
        return any(self._ids.get(lsn) not in (write_id, UNKNOWN_ID) for lsn, write_id in expected)

    def _commits_job(self, header: WalHeader) -> bool:
        """Whether an ingest's job is open, and its key is new."""
        job = header.job
        if job is None or job.id not in self._jobs:
            return False
        return job.key is None or job.key not in self.dedup

    def _follow_job(self, header: WalHeader) -> None:
        """Open a job with its begin; an abort closes it, and so does any ingest."""
        job = header.job
        if job is None or header.lsn in self._skipped:
            return
        if header.kind in (WalKind.INGEST, WalKind.ABORT):
            self._jobs.pop(job.id, None)
        elif header.kind is WalKind.BEGIN and not 0 < header.schema_id < self._first_schema_id:
            self._jobs.setdefault(job.id, OpenJob(job.id, header.lsn, job.key, job.live_wins))

    def _remember(self, header: WalHeader) -> None:
        self._ids[header.lsn] = header.write_id
        while len(self._ids) > IDS_KEPT:
            self._ids.popitem(last=False)
        self.next_lsn = header.lsn + 1


def _ids_below_floor(manifest: Manifest) -> Iterator[tuple[int, str]]:
    return enumerate(manifest.below_floor, manifest.wal_floor - len(manifest.below_floor))


def contiguous(lsns: Iterable[int], first: int) -> list[int]:
    """Return the LSNs from `first` on without a gap: what lies behind a gap does not count.

    >>> contiguous([3, 4, 6, 7], 3)
    [3, 4]
    """
    present = set(lsns)
    found = []
    while first in present:
        found.append(first)
        first += 1
    return found
