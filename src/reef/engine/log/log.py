"""The log: objects in a bucket, one slot per LSN, each filled once; and which of them count.

    filled   one listing: the slots that hold an object, gaps included
    scan     the objects without a gap, in LSN order, read READ_AT_ONCE at a time
    replay   the same, each with the verdict of the rules

Every consumer of the log goes through `scan` or `replay`; consumers of headers pass them through
`replay_headers`. A damaged object raises CorruptionError when the scan reaches it, after everything
before it was yielded.

**The rules** decide which objects count (protocols §1). Replay, readers, fold, dedup and change
streams all pass the log through one `LogRules`, in LSN order, and therefore agree:

- A `batches` object is void if one of the slots before it holds another write id than its
  `after` lists. Other kinds are never void.
- An `ingest` counts only if its job is open at its LSN (a begin below it, no abort and no
  other ingest of that job in between) and its key is not in the dedup window at that LSN.
- The rows of an `ingest` with `live_wins` sort at the begin of its job, which it names: it counts
  only if the job has been open since that begin (H60).
- An `append`, and an `ingest` with marks, counts only if it moves all of its marks: a batch of a
  stream that was committed before does not count again, whichever process sends it (H40).
- LSNs that a repair has skipped do not count.
- A `begin` with a schema older than the first one of the namespace opens nothing: releases
  before incarnations re-created a dropped namespace in the same chain (H48).
- Below the floor nothing counts: a slot there may have been collected, and filled again by a
  stalled process (H67). So the rules start at their manifest's floor, and a reader of slots
  below the current floor checks that they were retained since (`History.kept_slots`). The
  outcome of a write in doubt is proved by the floor, never by the current object in its slot
  (`prove`).

The verdicts follow from the log alone, whichever manifest the replay starts from and however old
it is.

A slot's write id is that of the object in it, void or not. The write id of a skipped slot is
unknown and makes nothing void: otherwise acknowledged writes behind it would be lost too.

A slot is filled once, so its winner never changes. If it has changed (a store that honours
conditions only sometimes, an object deleted and its slot filled again), acknowledged writes are
lost and no verdict is right: `check_winner` raises CorruptionError with the kind CHANGED_WINNER
(H73). Winners are known from three sources, without extra requests:

- the first id in `after`, of an object that the writer had seen durable before it sent this one;
- the ids of the slots that this replay has passed, compared with the ids that a newer manifest
  keeps of the slots below its floor;
- the ids of the fences whose creation was acknowledged to an opening writer.

Verify, repair and rebuild collect such slots as disputes instead. The id of a disputed slot is
unknown from then on, so that the writes behind it count.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from reef.errors import (
    CorruptionError,
    ErrorKind,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import DedupEntry, Lineage, Manifest, OpenJob
from reef.formats.wal_object import Job, WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow, StreamHistory, extend_lineage
from reef.paths import Namespace, number_of
from reef.runtime import Runtime
from reef.stores import ObjectInfo, Store, WriteResult, fetch

IDS_KEPT = 64
"""Write ids remembered below the floor; `max_parallel_writes` may not exceed it."""


UNKNOWN_ID = ""
"""In place of the write id of a slot that a repair has skipped."""


class Verdict(StrEnum):
    """Whether and how an object in the log counts."""

    APPLIES = "applies"
    VOID = "void"
    EMPTY = "empty"
    """A fence, begin, abort or skip: it changes no row."""
    IGNORED = "ignored"
    """An ingest whose job was not open, rows of a stream that were committed before, or an LSN that
    a repair has skipped."""


class Proof(StrEnum):
    """The outcome that a manifest proves for a write that was slow or got no response."""

    COUNTS = "counts"
    LOST = "lost"
    UNKNOWN = "unknown"


def prove(manifest: Manifest, header: WalHeader, *, in_slot: bool) -> Proof:
    """Return the outcome of a WAL object; `in_slot`: its slot was read and holds it.

    The manifest must have been read after the slot. At or above its floor the slot was never
    collected, so the object in it is the only one there ever was. Below the floor the slot may
    have been folded, collected and filled again: only the dedup window and the stream marks
    prove a commit. The writer's epoch alone proves nothing (H13, H66).
    """
    if header.lsn >= manifest.wal_floor:
        return Proof.COUNTS if in_slot else Proof.LOST
    committed = any(entry.write_id == header.write_id for entry in manifest.dedup)
    return Proof.COUNTS if committed or _is_marked(manifest, header) else Proof.UNKNOWN


def _is_marked(manifest: Manifest, header: WalHeader) -> bool:
    """Whether a stream's mark proves that an object was folded.

    A mark names entries, not the object that committed them. A copy of the local log has other
    entries with the same numbers, and also the same entries: a later writer may have committed
    them from the copy, while this object lost its slot to that writer's fence (H71). Only while
    no later writer has had the role is the writer of this object the one that moved the mark.
    """
    if manifest.writer_epoch != header.epoch:
        return False
    ends = {stream: points[-1] for stream, points in header.lineages.items()}
    return any(StreamHistory.of(manifest, s).has_point(point) for s, point in ends.items())


@dataclass(frozen=True, slots=True)
class RulesState:
    """The state of the rules at an LSN, as a fold records it in the manifest."""

    next_lsn: int
    dedup: tuple[DedupEntry, ...]
    open_jobs: tuple[OpenJob, ...]
    last_ids: tuple[str, ...]
    """The write ids of the slots just below `next_lsn`, the last one last."""
    marks: dict[str, int]
    lineages: dict[str, Lineage]


class LogRules:
    """Decides which objects of a log count, from a manifest's floor on."""

    def __init__(self, manifest: Manifest, disputes: dict[int, str] | None = None) -> None:
        """Start at a manifest's floor; a slot whose winner changed raises, or joins `disputes`."""
        self._disputes = disputes
        self.next_lsn = manifest.wal_floor
        self._ids: OrderedDict[int, str] = OrderedDict(_ids_below_floor(manifest))
        self._jobs = {job.id: job for job in manifest.open_jobs}
        self.dedup = DedupWindow.of(manifest)
        """The keys that were committed below `next_lsn`, as far back as they are remembered."""
        self.marks = dict(manifest.stream_marks)
        """How far each stream was committed below `next_lsn`."""
        self.lineages = dict(manifest.stream_lineages)
        """The entries of each stream that were committed."""
        self.skipped = frozenset(manifest.skipped_lsns)
        self._without_begin = frozenset(manifest.ingests_without_begin)
        self._first_schema_id = manifest.schemas[0].id

    def advance(self, header: WalHeader) -> Verdict:
        """Advance past the object at the next LSN; return its verdict."""
        if header.lsn != self.next_lsn:
            raise ValueError(f"expected LSN {self.next_lsn}, found {header.lsn}")
        verdict = self.classify(header)
        if header.job is not None:
            self._follow_job(header, header.job)
        self._ids[header.lsn] = header.write_id
        while len(self._ids) > IDS_KEPT:
            self._ids.popitem(last=False)
        self.next_lsn = header.lsn + 1
        if verdict is Verdict.APPLIES:
            if header.job is not None or any([b.key for b in header.batches]):
                self.dedup.add(header)
            if header.marks:
                self._move_marks(header)
        return verdict

    def classify(self, header: WalHeader) -> Verdict:
        """Return the verdict of the object at the next LSN without advancing."""
        if header.lsn in self.skipped:
            return Verdict.IGNORED
        if header.kind is WalKind.BATCHES:
            is_void = header.after and self._is_void(header, header.after)
            return Verdict.VOID if is_void else Verdict.APPLIES
        if header.kind is WalKind.APPEND:
            return Verdict.APPLIES if self._moves_marks(header) else Verdict.IGNORED
        if header.kind is WalKind.INGEST:
            commits = self._commits_job(header) and self._moves_marks(header)
            return Verdict.APPLIES if commits else Verdict.IGNORED
        return Verdict.EMPTY

    def skip(self) -> None:
        """Pass the next LSN, which a repair has skipped."""
        if self.next_lsn not in self.skipped:
            raise ValueError(f"LSN {self.next_lsn} was not skipped by a repair")
        self._ids[self.next_lsn] = UNKNOWN_ID
        self.next_lsn += 1

    def pass_slot(self, header: WalHeader | None) -> Verdict:
        """Advance past an object, or past a slot that a repair has skipped: those are ignored."""
        if header is not None:
            return self.advance(header)
        self.skip()
        return Verdict.IGNORED

    def jump(self, lsn: int) -> None:
        """Continue at a later LSN: the slots in between were collected, and make nothing void."""
        for gone in range(max(self.next_lsn, lsn - IDS_KEPT), lsn):
            self._ids[gone] = UNKNOWN_ID
        self.next_lsn = lsn
        while len(self._ids) > IDS_KEPT:
            self._ids.popitem(last=False)

    def add_ids(self, ids: Mapping[int, str]) -> None:
        """Add the write ids of slots below `next_lsn` that a jump has passed."""
        self._ids = OrderedDict(sorted({**self._ids, **ids}.items()))

    @property
    def open_jobs(self) -> tuple[OpenJob, ...]:
        return tuple(self._jobs.values())

    @property
    def awaits_live_wins(self) -> bool:
        """Whether a load may still add rows that sort below rows already replayed."""
        return any([job.live_wins for job in self._jobs.values()]) if self._jobs else False

    def last_ids(self) -> tuple[str, ...]:
        """Return the write ids of the slots just below `next_lsn`, the last one last."""
        return tuple(self._ids.values())

    def state(self) -> RulesState:
        """Return a copy of the state at `next_lsn`."""
        return RulesState(
            self.next_lsn,
            self.dedup.entries(),
            self.open_jobs,
            self.last_ids(),
            dict(self.marks),
            dict(self.lineages),
        )

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
        """Raise if another write is known as the slot's winner."""
        known = self._ids.get(lsn, UNKNOWN_ID)
        if known == write_id or UNKNOWN_ID in (known, write_id):
            return
        message = f"LSN {lsn} was filled twice: by write {write_id} and by write {known}"
        if self._disputes is None:
            raise CorruptionError(
                message,
                kind=ErrorKind.CHANGED_WINNER,
                hint="Acknowledged writes may be lost: run `reef store probe`, then `reef verify`",
                lsn=lsn,
                write_ids=(write_id, known),
            )
        self._disputes[lsn] = message
        self._ids[lsn] = UNKNOWN_ID

    def check_floor(self, manifest: Manifest) -> None:
        """Raise if the winners below a manifest's floor differ from those replayed."""
        for lsn, write_id in _ids_below_floor(manifest):
            self.check_winner(lsn, write_id)

    def _is_void(self, header: WalHeader, after: tuple[str, ...]) -> bool:
        """Whether one of the slots before an object holds another write than `after` lists."""
        lsn = header.lsn - len(after)
        if self._ids.get(lsn) != after[0]:
            self.check_winner(lsn, after[0])
        for write_id in after:
            if self._ids.get(lsn) not in (write_id, UNKNOWN_ID):
                return True
            lsn += 1
        return False

    def _commits_job(self, header: WalHeader) -> bool:
        """Whether an ingest's job is open, and its key is new."""
        job = header.job
        if job is None or not (self._is_open(job) or header.lsn in self._without_begin):
            return False
        return job.key is None or job.key not in self.dedup

    def _is_open(self, job: Job) -> bool:
        """Whether an ingest's job is open, since the begin at which its rows would sort.

        Only from that begin on have folds and compactions kept all that must hide them (H60).
        """
        begun = self._jobs.get(job.id)
        if begun is None or begun.live_wins != job.live_wins:
            return False
        return not job.live_wins or begun.begin_lsn == job.begin_lsn

    def _moves_marks(self, header: WalHeader) -> bool:
        return all(place > self.marks.get(stream, 0) for stream, place in header.marks.items())

    def _follow_job(self, header: WalHeader, job: Job) -> None:
        """Open a job at its begin; close it at an abort or an ingest."""
        if header.lsn in self.skipped:
            return
        if header.kind in (WalKind.INGEST, WalKind.ABORT):
            self._jobs.pop(job.id, None)
        elif header.kind is WalKind.BEGIN and not 0 < header.schema_id < self._first_schema_id:
            self._jobs.setdefault(job.id, OpenJob(job.id, header.lsn, job.key, job.live_wins))


def _ids_below_floor(manifest: Manifest) -> Iterator[tuple[int, str]]:
    return enumerate(manifest.below_floor, manifest.wal_floor - len(manifest.below_floor))


def replay_headers(
    rules: LogRules, headers: Mapping[int, WalHeader], *, end: int | None = None, gaps: bool = False
) -> Iterator[tuple[WalHeader, Verdict]]:
    """Yield headers with their verdicts, in LSN order, up to the first gap or `end`.

    Skipped slots are passed silently. With `gaps` the replay continues behind a gap, as a rebuild
    does: the objects there were collected.
    """
    later = iter(sorted(headers)) if gaps else iter(())
    while end is None or rules.next_lsn < end:
        lsn = rules.next_lsn
        if lsn in rules.skipped:
            rules.skip()
        elif lsn in headers:
            yield headers[lsn], rules.advance(headers[lsn])
        else:
            following = next((n for n in later if n > lsn), None)
            if following is None or (end is not None and following >= end):
                return
            rules.jump(following)


READ_AT_ONCE = 128
"""Objects fetched in parallel, and held in memory, by a scan."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A filled slot, as a listing shows it."""

    lsn: int
    size: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """A slot and its object; None if a repair skipped the slot."""

    lsn: int
    object: WalObject | None
    size: int = 0
    """As listed; 0 if the slots were not listed."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A slot, its object, and the verdict of the rules; no object if a repair skipped the slot."""

    lsn: int
    object: WalObject | None
    verdict: Verdict


class SlotGone(Exception):
    """A slot that was listed, or must be filled, holds no object: swept, or lost."""

    def __init__(self, lsn: int) -> None:
        super().__init__(f"LSN {lsn} holds no object")
        self.lsn = lsn


def listed_slots(
    store: Store, names: Namespace, first: int, end: int | None = None
) -> Iterator[tuple[int, ObjectInfo]]:
    """List the filled slots in [first, end), in LSN order; of a branch, the inherited ones too."""
    for folder, after, last in names.log_parts(first):
        for info in store.list(folder, after):
            lsn = number_of(info.key)
            if lsn is None:
                continue
            if end is not None and lsn >= end:
                return
            if last is not None and lsn > last:
                break
            yield lsn, info


class Log:
    """Reads and fills the slots of one namespace."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.runtime: Runtime = store.runtime
        self._namespace = namespace
        self._slot_pattern = namespace.slot_pattern
        self._first_own_lsn = namespace.first_own_lsn

    def filled(self, first: int) -> list[Slot]:
        """List the filled slots from `first` on, in LSN order, gaps included."""
        listed = listed_slots(self._store, self._namespace, first)
        return [Slot(lsn, info.size) for lsn, info in listed]

    def read(self, lsn: int) -> WalObject | None:
        """Return the object in a slot; None if the slot is open."""
        key = self._namespace.wal_object(lsn)
        try:
            wal_object = fetch(self._store, key, lambda body: WalObject.decode(body, key))
        except NotFoundError:
            return None
        return self._check_lsn(wal_object, lsn, key)

    def read_many(self, lsns: list[int]) -> list[WalObject | None]:
        """Return the objects of several slots, fetched in parallel."""
        return self.runtime.map(self.read, lsns)

    def scan(
        self, first: int, skipped: Collection[int] = (), end: int | None = None
    ) -> Iterator[Scanned]:
        """Yield the slots from `first` on without a gap, up to `end` or as far as they are listed.

        Raises SlotGone at a slot that holds no object although it was listed, or `end` was given.
        """
        if end is None:
            sizes = {slot.lsn: slot.size for slot in self.filled(first)}
            end = first + len(contiguous([*sizes, *skipped], first))
        else:
            sizes = {}
        for start in range(first, end, READ_AT_ONCE):
            window = range(start, min(start + READ_AT_ONCE, end))
            present = [lsn for lsn in window if lsn not in skipped]
            objects = dict(zip(present, self._try_many(present), strict=True))
            for lsn in window:
                yield Scanned(lsn, self._object_at(objects, lsn), sizes.get(lsn, 0))

    def replay(self, rules: LogRules, end: int | None = None) -> Iterator[Replayed]:
        """Scan from where the rules are, and yield each slot with its verdict."""
        return replay(rules, self.scan(rules.next_lsn, rules.skipped, end))

    def fill(self, lsn: int, body: bytes) -> WriteResult:
        """Put an object into a slot, if it is open. An inherited slot is never filled."""
        if lsn < self._first_own_lsn:
            raise InternalError(f"LSN {lsn} of {self._namespace.name} is in an inherited log")
        return self._store.create(self._slot_pattern % lsn, body)

    def winner(self, lsn: int, lost: WriteResult) -> WalObject:
        """Return the object that a lost `fill` found in its slot."""
        key = self._namespace.wal_object(lsn)
        if lost.winner is not None:
            with suppress(CorruptionError):  # perhaps damaged in transit only: read it again (H8)
                return self._check_lsn(WalObject.decode(lost.winner, key), lsn, key)
        wal_object = self.read(lsn)
        if wal_object is None:
            raise UnavailableError(f"LSN {lsn} was taken and is open again", object=key)
        return wal_object

    def _try_many(self, lsns: list[int]) -> list[WalObject | CorruptionError | None]:
        return self.runtime.map(self._try_read, lsns)

    def _try_read(self, lsn: int) -> WalObject | CorruptionError | None:
        try:
            return self.read(lsn)
        except CorruptionError as error:
            return error

    def _object_at(
        self, window: dict[int, WalObject | CorruptionError | None], lsn: int
    ) -> WalObject | None:
        """Return a slot's object, None if it is skipped; raise if it is gone or damaged."""
        if lsn not in window:
            return None
        wal_object = window[lsn]
        if wal_object is None:
            raise SlotGone(lsn)
        if isinstance(wal_object, CorruptionError):
            raise wal_object
        return wal_object

    def _check_lsn(self, wal_object: WalObject, lsn: int, key: str) -> WalObject:
        if wal_object.header.lsn != lsn:
            raise CorruptionError(
                f"object {key} has the header of LSN {wal_object.header.lsn}", object=key, offset=0
            )
        return wal_object


def replay(rules: LogRules, slots: Iterable[Scanned]) -> Iterator[Replayed]:
    """Pass scanned slots through the rules."""
    for slot in slots:
        header = None if slot.object is None else slot.object.header
        yield Replayed(slot.lsn, slot.object, rules.pass_slot(header))


def run_replay(replayed: Iterable[object]) -> None:
    """Run a replay to its end, for its effect on the rules only."""
    for _ in replayed:
        pass


def contiguous(lsns: Iterable[int], first: int) -> list[int]:
    """Return the LSNs from `first` on up to the first gap: nothing behind a gap counts.

    >>> contiguous([3, 4, 6, 7], 3)
    [3, 4]
    """
    present = set(lsns)
    run = []
    while first in present:
        run.append(first)
        first += 1
    return run
