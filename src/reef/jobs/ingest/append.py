"""Append to the log without the writer role, for bulk jobs and the sweep (protocols §4).

    1  read: the head, a listing of the log behind its floor, and every header in it, replayed by
       the rules of the log
    2  PUT into the first open slot
    3  lost: read again, since another job may have committed the same key meanwhile (H57). Reading
       takes many requests while a busy writer advances, so the log is listed once more just before
       the PUT; after three losses the target is ahead, by as many slots as the writer may have in
       flight, and twice as many after each further loss (H59)
    4  if it landed ahead: fill the open slots below it with skips; only then does it count
    5  always read again after the response: at or above the floor the rules decide the outcome;
       below it the dedup window, or the records of jobs, which are never collected (H53)

A conditional ingest (`Unchanged`) commits only if nothing that its job has read was written since:
all objects behind the LSN that was read are checked, up to the last one, and the ingest goes into
exactly the next slot. After a lost slot the new objects are checked; it never aims ahead (H76).

Rows of a stream (`append_rows`) go into the log itself, with the stream's mark. Whether they count
is decided by the marks alone: a batch that was committed before does not count again (H40).

A writer is never fenced by this, and never waits for it: an object that takes its slot has epoch 0,
and the writer continues behind it. Batches that it sent behind such a slot are void, and resent.

Batches of streams are rows that count once, however often their batch is sent (H40).
A stream numbers its batches. A commit carries the number as the stream's mark, in the same WAL
object as the rows, and the rules of the log ignore every later object that does not move the mark.
So a batch that is replayed after a crash is skipped by its number, never by its content: a source
may return other rows at the second time.

Small batches go into the log as they are, one PUT each; large ones are staged by a bulk job, whose
ingest carries the mark. Neither needs the writer role, and neither disturbs a live writer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.history.as_of import with_skipped
from reef.engine.log.log import LogRules, SlotGone, Verdict, replay_headers
from reef.engine.log.tail import HeaderTask, Missing, Peeked, run_header_task
from reef.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.coding import Buffer
from reef.formats.manifest import DedupEntry, Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import (
    AnyOps,
    BatchHeader,
    Job,
    WalHeader,
    WalKind,
    WalObject,
    encode_ops,
)
from reef.jobs.ingest.condition import KeysWritten, Unchanged
from reef.manifest.dedup import DedupWindow
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store
from reef.telemetry import operation
from reef.types import Receipt

ENDS = (WalKind.INGEST, WalKind.ABORT)
LOSSES_BEFORE_AIMING = 3
AIM_SLOTS, AIM_FLIGHTS = 64, 8
"""How far ahead at most: so many slots, or so many times the writer's slots in flight."""
TRIES_MAX = 100
READS_MAX = 10
DEADLINE_S = 120.0
"""How long a PUT without a response is sent again."""
__all__ = ["StreamAppender"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the ingest that counts, or an abort."""

    lsn: int
    committed: bool
    write_id: str = ""


@dataclass(slots=True)
class UnfoldedLog:
    """The replayed log, from one manifest's floor to the first open slot."""

    manifest: Manifest
    open_slot: int
    dedup: DedupWindow
    open_jobs: dict[str, int]
    """The LSN of the begin of each job that is open at the end."""
    ended: dict[str, Ended] = field(default_factory=dict)
    """Jobs that ended behind the floor."""
    last_ids: tuple[str, ...] = ()
    """The write ids of the slots just below the open one, in order."""
    marks: dict[str, int] = field(default_factory=dict)
    """How far each stream was committed."""
    appended: dict[str, int] = field(default_factory=dict)
    """The LSNs of appends that count, behind the floor, by write id."""
    objects: int = 0
    bytes: int = 0
    """Of all objects behind the floor."""
    has_writer: bool = False
    """Whether a writer has put one of them."""

    def committed_as(self, key: str | None) -> DedupEntry | None:
        """Return the commit with a job's key, if it is still in the dedup window."""
        return None if key is None else self.dedup.get(key)

    def names_segment_of(self, job: Job) -> bool:
        staged = {segment.id for segment in job.segments}
        return any(segment.id in staged for segment in self.manifest.segments)


@dataclass(frozen=True, slots=True)
class JobState:
    """The outcome of an append."""

    lsn: int
    counts: bool
    """Begin: the job is open. Ingest: its rows are visible. Abort: they never will be."""
    known: DedupEntry | None = None
    """The commit of another job with the same key."""
    write_id: str = ""
    is_repeat: bool = False
    """Whether the batch of its stream was committed before."""


@dataclass(frozen=True, slots=True)
class AppendState:
    """The outcome of rows that were appended; `replayed`: they were committed before."""

    lsn: int
    write_id: str
    replayed: bool = False


@dataclass(slots=True)
class _Tries:
    """The objects sent for one append, over all its attempts."""

    watch: Stopwatch
    since: int = 0
    """The first open slot when it began: its own objects and the job's end are behind it."""
    sent: dict[str, int] = field(default_factory=dict)
    """Slots by write id."""


class Appender:
    """Appends for one job, or for the sweep. Not for several threads at once."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._names = namespace
        context = NamespaceContext(store, namespace)
        self._log, self._heads = context.log, context.heads
        self._headers: dict[int, WalHeader] = {}
        self._tries: dict[tuple[WalKind, str], _Tries] = {}
        self.seen: UnfoldedLog | None = None
        """The log as it was read last."""
        self._checked: LogRules | None = None
        """Rules of a conditional ingest, up to the last object that was checked."""

    def append_rows(
        self,
        marks: Mapping[str, int],
        batches: Sequence[AnyOps],
        schema: Schema,
        check: Callable[[Mapping[str, int]], None] = lambda marks: None,
    ) -> AppendState:
        """Put rows into the log as a batch that moves the marks of its stream, unless it was there.

        `check` gets the marks of all streams before anything is sent, and again after each lost
        slot; it may raise.
        """
        records = tuple(map(encode_ops, batches))
        facts = tuple(BatchHeader(len(ops), merges=ops.merged_at_ms is not None) for ops in batches)
        sent: dict[str, int] = {}
        for losses in range(TRIES_MAX + 1):
            try:
                seen = self.read_log()
            except ReefError as error:
                if not sent:
                    raise
                raise self._unknown(WalKind.APPEND, None, max(sent.values())) from error
            ours = {write_id: lsn for write_id, lsn in sent.items() if write_id in seen.appended}
            if ours:
                return AppendState(*next((lsn, write_id) for write_id, lsn in ours.items()))
            check(seen.marks)
            if _is_marked(marks, seen):
                return AppendState(0, "", replayed=True)
            if losses < TRIES_MAX:
                self._check_schema(schema, seen.manifest)
                header = msgspec.structs.replace(
                    self._header(self._aim(seen, losses), WalKind.APPEND, None, schema),
                    writer_id=next(iter(marks)),
                    batches=facts,
                    marks=dict(marks),
                )
                sent[header.write_id] = header.lsn
                self._send(header, seen, records)
                self._store.runtime.reach("append sent")
        raise self._no_slot(WalKind.APPEND)

    def append(
        self,
        kind: WalKind,
        job: Job,
        schema: Schema,
        unless: Unchanged | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> JobState:
        """Put a begin, an ingest or an abort into the log, and return the outcome.

        An ingest may be the batch of a stream, at the place in `marks`. ConflictError if a
        condition does not hold; then nothing of the job is visible.
        """
        fresh = _Tries(self._store.runtime.stopwatch())
        tries = self._tries.setdefault((kind, job.id), fresh)
        for losses in range(TRIES_MAX + 1):
            seen = self._read_log(kind, job, tries)
            state = _outcome(kind, job, seen, tries.sent)
            counts = state is not None and state.counts
            if not counts and _is_marked(marks or {}, seen):
                return JobState(0, counts=False, is_repeat=True)
            if state is not None:
                return state
            if losses < TRIES_MAX:
                self._check_schema(schema, seen.manifest)
                slot = self._aim(seen, losses)
                if unless is not None:
                    slot = seen.open_slot
                    self._check_unchanged(unless, seen)
                header = self._header(slot, kind, job, schema)
                if marks:
                    header = msgspec.structs.replace(header, marks=dict(marks))
                tries.sent[header.write_id] = header.lsn
                self._send(header, seen)
                self._store.runtime.reach(f"{kind} sent")
        raise self._no_slot(kind, UnavailableError if unless is None else ConflictError)

    def _no_slot(self, kind: WalKind, error: type[ReefError] = UnavailableError) -> ReefError:
        """Return the error of an append that the last read shows not to have counted."""
        return error(
            f"no slot for a {kind} in the log of {self._names.name} after {TRIES_MAX} tries",
            hint="Nothing was written. Run it again",
            namespace=self._names.name,
        )

    def _check_schema(self, schema: Schema, manifest: Manifest) -> None:
        """Refuse a job that began in a namespace that was dropped and re-created since."""
        if schema.id < manifest.schemas[0].id:
            raise ConflictError(
                f"{self._names.name} was dropped and re-created since this job began",
                hint="Run the job again, with the columns of the new namespace",
                namespace=self._names.name,
            )

    def _check_unchanged(self, condition: Unchanged, seen: UnfoldedLog) -> None:
        """Raise ConflictError if an object up to the open slot violates the condition.

        Objects below the floor of the head are read too, so none of these slots may have been
        collected and filled again (H67). While the generation that was read is retained, its log
        is; whether it still is, is checked after the slots were read.
        """
        try:
            written = KeysWritten(self._store, self._names, seen.manifest.schemas)
            if self._checked is None:
                read = self._heads.load(condition.generation)
                self._checked = LogRules(with_skipped(read, seen.manifest))
            for slot in self._log.replay(self._checked, seen.open_slot):
                if slot.lsn <= condition.lsn or slot.verdict is not Verdict.APPLIES:
                    continue
                if slot.object and written.touch(slot.object, condition.keys):
                    raise ConflictError(
                        f"{self._names.name} was changed at LSN {slot.lsn}, after the job has "
                        f"read it at LSN {condition.lsn}",
                        hint=condition.hint,
                        namespace=self._names.name,
                        lsn=slot.lsn,
                    )
            head = NamespaceContext(self._store, self._names).heads.find(renamed=True).manifest
            if head.oldest_retained > condition.generation:
                raise NotFoundError(f"generation {condition.generation} is not retained")
        except (NotFoundError, SlotGone) as error:
            raise ConflictError(
                f"the snapshot of {self._names.name} at generation {condition.generation}, which "
                f"the job has read, was garbage-collected",
                hint="Nothing was written. Run it again, with a longer lease",
                namespace=self._names.name,
            ) from error

    def read_log(self) -> UnfoldedLog:
        """Replay the unfolded log. A listing is valid only while the head is fresh (H10)."""
        for _ in range(READS_MAX):
            self._heads.forget()
            head = self._heads.find(renamed=True)  # a job that has begun ends under either name
            listed = self._log.filled(head.manifest.wal_floor)
            headers = self._peek({slot.lsn: slot.size for slot in listed}, head.manifest)
            if headers is not None and head.fresh():
                size = sum(slot.size for slot in listed)
                self.seen = self._replay(head.manifest, headers, size)
                return self.seen
        raise UnavailableError(
            f"the log of {self._names.name} cannot be read within half a grace period",
            hint="The store is too slow for this grace period",
            namespace=self._names.name,
        )

    # --- reading ------------------------------------------------------------------
    def _read_log(self, kind: WalKind, job: Job, tries: _Tries) -> UnfoldedLog:
        """Read the log, if necessary below the floor; an ingest may have counted (H31)."""
        try:
            seen = self.read_log()
            tries.since = tries.since or seen.open_slot
            gone = job.id not in seen.open_jobs and job.id not in seen.ended
            # Later a slot below the floor may have been collected and filled again: an abort in it
            # has no effect. A begin is abandoned all the same (H35).
            sure = tries.watch.elapsed_s() <= seen.manifest.grace_ms / 2000
            if tries.sent and gone and (sure or kind is WalKind.BEGIN):
                self._find_abort(job, seen, tries.since)
        except ReefError as error:
            if kind is not WalKind.INGEST or not tries.sent:
                raise
            raise self._unknown(kind, job, max(tries.sent.values())) from error
        return seen

    def _find_abort(self, job: Job, seen: UnfoldedLog, since: int) -> None:
        """Check whether a job was aborted below the floor: its records are never collected."""
        below = range(since, seen.manifest.wal_floor)
        slots = [(slot.lsn, slot.size) for slot in self._log.filled(since) if slot.lsn in below]
        for lsn, header in sorted(self._headers_of(slots).items()):
            if not isinstance(header, WalHeader) or lsn in seen.manifest.skipped_lsns:
                continue
            if header.kind in ENDS and header.job is not None and header.job.id == job.id:
                if header.kind is WalKind.ABORT:
                    seen.ended[job.id] = Ended(lsn, committed=False)
                return

    def _peek(self, sizes: dict[int, int], manifest: Manifest) -> dict[int, WalHeader] | None:
        """Return the headers of slots; None if one is gone, so that the head is not current."""
        kept = {lsn: h for lsn, h in self._headers.items() if lsn in sizes}
        new = [(lsn, size) for lsn, size in sizes.items() if lsn not in kept]
        present = [(lsn, size) for lsn, size in new if lsn not in manifest.skipped_lsns]
        for lsn, header in self._headers_of(present).items():
            if header is Missing.GONE:
                return None
            if not isinstance(header, WalHeader):
                raise CorruptionError(
                    f"LSN {lsn} of {self._names.name} cannot be read",
                    hint="Run verify, then repair",
                    object=self._names.wal_object(lsn),
                    offset=0,
                )
            kept[lsn] = header
        self._headers = kept
        return kept

    def _headers_of(self, slots: list[tuple[int, int]]) -> dict[int, Peeked]:
        """Read headers in parallel: a busy writer advances meanwhile."""
        headers = run_header_task(HeaderTask(self._store, self._names, tuple(slots)))
        return {lsn: header for (lsn, _), header in zip(slots, headers, strict=True)}

    def _replay(self, manifest: Manifest, headers: dict[int, WalHeader], size: int) -> UnfoldedLog:
        rules = LogRules(manifest)
        ended: dict[str, Ended] = {}
        appended: dict[str, int] = {}
        was_open: set[str] = _ids(rules)
        for header, verdict in replay_headers(rules, headers):
            job, is_open = header.job, _ids(rules)
            if header.kind is WalKind.APPEND and verdict is Verdict.APPLIES:
                appended[header.write_id] = header.lsn
            if job is not None and job.id in was_open - is_open:
                ended[job.id] = Ended(header.lsn, verdict is Verdict.APPLIES, header.write_id)
            was_open = is_open
        jobs = {job.id: job.begin_lsn for job in rules.open_jobs}
        return UnfoldedLog(
            manifest,
            rules.next_lsn,
            rules.dedup,
            jobs,
            ended,
            rules.last_ids(),
            rules.marks,
            appended,
            len(headers),
            size,
            any(header.kind.of_writer for header in headers.values()),
        )

    # --- filling ------------------------------------------------------------------
    def _aim(self, seen: UnfoldedLog, losses: int) -> int:
        """Return the slot to fill: the first open one, or after some losses one ahead (H59)."""
        if not losses:
            return seen.open_slot
        filled = self._filled_slots(seen)
        target = seen.open_slot
        while target in filled:
            target += 1
        if losses >= LOSSES_BEFORE_AIMING:
            flights = max(1, seen.manifest.max_parallel_writes)
            ahead = flights * 2 ** (losses - LOSSES_BEFORE_AIMING)
            target += min(ahead, max(AIM_SLOTS, AIM_FLIGHTS * flights))
        while target in filled:
            target += 1
        return target

    def _filled_slots(self, seen: UnfoldedLog) -> set[int]:
        """Return the slots that are filled by now, behind those that were read."""
        listed = {slot.lsn for slot in self._log.filled(seen.open_slot)}
        return listed | set(seen.manifest.skipped_lsns)

    def _send(self, header: WalHeader, seen: UnfoldedLog, records: tuple[Buffer, ...] = ()) -> None:
        """PUT, and fill the gap below: objects behind an open slot do not count."""
        may_hold = self._fill(header, records)
        if not may_hold or header.lsn == seen.open_slot:
            return
        try:
            filled = self._filled_slots(seen)
            gap = [lsn for lsn in range(seen.open_slot, header.lsn) if lsn not in filled]
            skips = [self._header(lsn, WalKind.SKIP, None, None) for lsn in gap]
            self._store.runtime.map(self._fill, skips)
        except ReefError as error:
            raise self._unknown(header.kind, header.job, header.lsn) from error

    def _header(self, lsn: int, kind: WalKind, job: Job | None, schema: Schema | None) -> WalHeader:
        return WalHeader(
            lsn=lsn,
            kind=kind,
            epoch=0,
            writer_id=job.id if job is not None else "",
            write_id=self._store.runtime.ulid(),
            created_at_ms=int(self._store.runtime.wall_s() * 1000),
            schema_id=schema.id if schema is not None else 0,
            schema=schema if kind in (WalKind.BEGIN, WalKind.APPEND) else None,
            job=job,
        )

    def _fill(self, header: WalHeader, records: tuple[Buffer, ...] = ()) -> bool:
        """PUT until the outcome is definite; return whether the object may be in its slot.

        The next read shows which object is in the slot, and whether it counts.
        """
        body = WalObject.encode(header, records)
        runtime = self._store.runtime
        deadline = runtime.deadline(DEADLINE_S)
        doubt = False
        while True:
            try:
                result = self._log.fill(header.lsn, body)
                doubt = doubt or result.doubt or result.outcome is Outcome.UNKNOWN
                if result.outcome is not Outcome.UNKNOWN:
                    return result.landed or doubt
                cause = result.cause
            except UnavailableError as error:  # this attempt has written nothing
                cause = error
                if not doubt and deadline.passed():
                    raise
            except ReefError as error:
                if not doubt:
                    raise
                raise self._unknown(header.kind, header.job, header.lsn) from error
            if deadline.passed():
                raise self._unknown(header.kind, header.job, header.lsn) from cause
            runtime.sleep(runtime.uniform(0.01, 0.2))

    def _unknown(self, kind: WalKind, job: Job | None, lsn: int) -> OutcomeUnknownError:
        key = job.key if job is not None else None
        again = "append the batch" if job is None else f"run the job with the key {key!r}"
        return OutcomeUnknownError(
            f"LSN {lsn} of {self._names.name} may hold a {kind} that counts",
            hint=f"To find out, {again} again: if it has counted, that changes nothing",
            namespace=self._names.name,
            lsn=lsn,
            idempotency_key=key,
        )


def _is_marked(marks: Mapping[str, int], seen: UnfoldedLog) -> bool:
    """Whether the batch with these marks was committed: it would move at least one no further."""
    return any(seen.marks.get(stream, 0) >= place for stream, place in marks.items())


def _ids(rules: LogRules) -> set[str]:
    return {job.id for job in rules.open_jobs}


# --- outcomes -------------------------------------------------------------------------


def _outcome(kind: WalKind, job: Job, seen: UnfoldedLog, sent: dict[str, int]) -> JobState | None:
    """Return the outcome of a job's append; None if no object counts yet."""
    if kind is WalKind.BEGIN:
        return _outcome_of_begin(job, seen, sent)
    if kind is WalKind.INGEST:
        return _outcome_of_ingest(job, seen, sent)
    return _outcome_of_abort(job, seen)


def _outcome_of_begin(job: Job, seen: UnfoldedLog, sent: dict[str, int]) -> JobState | None:
    known = seen.committed_as(job.key)
    if known is not None:
        return JobState(known.lsn, counts=False, known=known)
    begin = seen.open_jobs.get(job.id)
    if begin is not None:
        return JobState(begin, counts=True)
    if sent and job.id in seen.ended:  # a sweep ended it before its begin was acknowledged
        return JobState(seen.ended[job.id].lsn, counts=False)
    return None


def _outcome_of_ingest(job: Job, seen: UnfoldedLog, sent: dict[str, int]) -> JobState | None:
    known = seen.committed_as(job.key)
    if known is not None and known.write_id in sent:
        return JobState(known.lsn, counts=True, write_id=known.write_id)
    end = seen.ended.get(job.id)
    if end is not None and end.committed and end.write_id in sent:
        return JobState(end.lsn, counts=True, write_id=end.write_id)
    if known is not None:  # of another job: every replay ignores ours
        return JobState(known.lsn, counts=False, known=known)
    if job.id in seen.open_jobs:  # so none of ours has counted, wherever one has landed
        return None
    if end is None and sent:
        return _outcome_by_segments(job, seen, sent)
    return JobState(end.lsn if end is not None else 0, counts=False)


def _outcome_by_segments(job: Job, seen: UnfoldedLog, sent: dict[str, int]) -> JobState:
    """Decide by the head's segments: the key has left the dedup window since the fold."""
    if seen.names_segment_of(job):
        write_id, lsn = max(sent.items(), key=lambda item: item[1])
        return JobState(lsn, counts=True, write_id=write_id)
    raise OutcomeUnknownError(
        f"job {job.id} has ended, and its key has left the dedup window",
        hint="Check for its rows before running it again",
        job=job.id,
    )


def _outcome_of_abort(job: Job, seen: UnfoldedLog) -> JobState | None:
    if job.id in seen.open_jobs:
        return None
    end, known = seen.ended.get(job.id), seen.committed_as(job.key)
    committed = end.committed if end is not None else known is not None
    lsn = end.lsn if end is not None else known.lsn if known is not None else 0
    return JobState(lsn, counts=not committed, known=known)


class StreamAppender:
    """Appends batches of streams to the log of one namespace. Not for several threads at once."""

    def __init__(self, db: Database, namespace: str) -> None:
        db._prove_store()  # it writes into the log, as a writer does (H4)
        self._metrics = db.metrics
        heads = db._namespaces.use(namespace).heads
        self.schema: Schema = heads.found.manifest.schema
        self._name = namespace
        self._appender = Appender(db.store, heads.names)

    def marks(self) -> dict[str, int]:
        """Return how many batches of each stream were committed."""
        return self._appender.read_log().marks

    @property
    def log(self) -> UnfoldedLog | None:
        """The unfolded log, as the last call has read it."""
        return self._appender.seen

    def append(
        self,
        stream: str,
        number: int,
        batches: Sequence[AnyOps],
        *,
        schema: Schema | None = None,
        also: Collection[str] = (),
        check: Callable[[Mapping[str, int]], None] = lambda marks: None,
    ) -> Receipt:
        """Commit the rows as a stream's batch; the first one has number 1.

        The receipt is `replayed`, with LSN 0, if this batch or a later one was committed before.
        `schema` is that of the rows, if it may have grown since. `also` are further marks that the
        same commit moves to this number; `check` may refuse the batch by the marks of all streams.
        """
        marks = {name: number for name in (stream, *also)}
        with operation(self._metrics, "append"):
            state = self._appender.append_rows(marks, batches, schema or self.schema, check)
        ops = 0 if state.replayed else sum(map(len, batches))
        return Receipt(self._name, state.lsn, 0, 0, state.write_id, ops, state.replayed)
