"""Appending to the log without the writer role: bulk jobs and the sweep (protocol section 4).

    1  look: the head, a listing of the log behind its floor, and every header in it, judged by
       the rules that everyone goes by
    2  take the first open slot
    3  lost: look again, since another job may have committed the same key meanwhile (H57). A look
       takes many requests, and a busy writer passes by meanwhile: so list the log once more
       just before the PUT, and after three losses aim ahead, as many slots as the writer may
       have in flight, twice as many after each further loss (H59)
    4  it stands ahead: fill what is still open below it with skips; only then does it count
    5  after the answer always look again: at or above the floor the rules say what it amounts
       to; below it what the fold carried on, or the records of jobs, which are never
       collected (H53)

A writer is never fenced by this, and never waits for it: an object that takes its slot carries
epoch 0, and the writer steps over it. What it sent behind such a slot is void, and sent again.
"""

from dataclasses import dataclass, field

from reef.engine.log import Log
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.wal_headers import HeaderTask, Missing, Peeked, run_header_task
from reef.errors import (
    ConflictError,
    CorruptionError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import DedupEntry, Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import Job, WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store

__all__ = ["Appender", "Ended", "JobState", "LogState"]

ENDS = (WalKind.INGEST, WalKind.ABORT)
LOSSES_BEFORE_AIMING = 3
AIM_SLOTS, AIM_FLIGHTS = 64, 8
"""How far ahead at most: so many slots, or so many times what the writer has in flight."""
TRIES_MAX = 100
LOOKS_MAX = 10
DEADLINE_S = 120.0
"""How long a PUT without an answer is sent again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the ingest that counts, or an abort."""

    lsn: int
    committed: bool
    write_id: str = ""


@dataclass(slots=True)
class LogState:
    """What stands in a log, from one manifest's floor to its first open slot."""

    manifest: Manifest
    open_slot: int
    dedup: DedupWindow
    open_jobs: dict[str, int]
    """Jobs that are open at the end, and the LSN of their begin."""
    ended: dict[str, Ended] = field(default_factory=dict)
    """Jobs that ended behind the floor."""
    last_ids: tuple[str, ...] = ()
    """The write ids of the slots just below the open one, the last one last."""

    def committed_as(self, key: str | None) -> DedupEntry | None:
        """Return how a job's key was committed, as far as the window goes."""
        return None if key is None else self.dedup.get(key)

    def names_segment_of(self, job: Job) -> bool:
        staged = {segment.id for segment in job.segments}
        return any(segment.id in staged for segment in self.manifest.segments)


@dataclass(frozen=True, slots=True)
class JobState:
    """What became of an append."""

    lsn: int
    counts: bool
    """A begin: the job is open. An ingest: its rows are visible. An abort: they never will be."""
    known: DedupEntry | None = None
    """The commit that has the job's key, if it is another one's."""
    write_id: str = ""


@dataclass(slots=True)
class _Tries:
    """What was sent of one append, however often it was called for."""

    watch: Stopwatch
    since: int = 0
    """The first slot that was open when it began: its own objects and the job's end lie behind."""
    sent: dict[str, int] = field(default_factory=dict)
    """Write ids, and their slots."""


class Appender:
    """Appends for one job, or for the sweep. Not for several threads at once."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._names = namespace
        self._log = Log(store, namespace)
        self._heads = HeadFinder(store, namespace)
        self._headers: dict[int, WalHeader] = {}
        self._tries: dict[tuple[WalKind, str], _Tries] = {}

    def append(self, kind: WalKind, job: Job, schema: Schema) -> JobState:
        """Put a begin, an ingest or an abort into the log, and return what it amounts to."""
        fresh = _Tries(self._store.runtime.stopwatch())
        tries = self._tries.setdefault((kind, job.id), fresh)
        for losses in range(TRIES_MAX + 1):
            seen = self._look_after(kind, job, tries)
            state = _settled(kind, job, seen, tries.sent)
            if state is not None:
                return state
            if losses < TRIES_MAX:
                self._check_schema(schema, seen.manifest)
                header = self._header(self._aim(seen, losses), kind, job, schema)
                tries.sent[header.write_id] = header.lsn
                self._send(header, seen)
                self._store.runtime.reach(f"{kind} sent")
        raise UnavailableError(
            f"no slot for a {kind} in the log of {self._names.name} after {TRIES_MAX} tries",
            namespace=self._names.name,
        )

    def _check_schema(self, schema: Schema, manifest: Manifest) -> None:
        """What was begun in a namespace that is dropped since opens nothing in the new one."""
        if schema.id < manifest.schemas[0].id:
            raise ConflictError(
                f"{self._names.name} was dropped and made anew since this job looked at it",
                hint="Start the job again, with the columns that the new one has",
                namespace=self._names.name,
            )

    def look(self) -> LogState:
        """Return what stands in the log. The listing counts only while the head is fresh (H10)."""
        for _ in range(LOOKS_MAX):
            self._heads.forget()
            head = self._heads.find()
            listed = self._log.filled(head.manifest.wal_floor)
            headers = self._peek({slot.lsn: slot.size for slot in listed}, head.manifest)
            if headers is not None and head.fresh():
                return self._judge(head.manifest, headers)
        raise UnavailableError(
            f"{self._names.name} cannot be looked at within half a grace period",
            hint="The store is too slow for this grace period",
            namespace=self._names.name,
        )

    # --- looking ------------------------------------------------------------------
    def _look_after(self, kind: WalKind, job: Job, tries: _Tries) -> LogState:
        """Look, and if need be below the floor; an ingest that was sent may have counted (H31)."""
        try:
            seen = self.look()
            tries.since = tries.since or seen.open_slot
            gone = job.id not in seen.open_jobs and job.id not in seen.ended
            # Later than that a slot below the floor may have been collected and filled anew: an
            # abort in it ended nothing. A begin is given up all the same (H35).
            sure = tries.watch.elapsed_s() <= seen.manifest.grace_ms / 2000
            if tries.sent and gone and (sure or kind is WalKind.BEGIN):
                self._find_abort(job, seen, tries.since)
        except ReefError as error:
            if kind is not WalKind.INGEST or not tries.sent:
                raise
            raise self._unknown(kind, job, max(tries.sent.values())) from error
        return seen

    def _find_abort(self, job: Job, seen: LogState, since: int) -> None:
        """See whether a job was aborted below the floor: records of jobs are never collected."""
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
        """Return the headers of slots; None if one is gone, and so the head is not the head."""
        kept = {lsn: h for lsn, h in self._headers.items() if lsn in sizes}
        new = [(lsn, size) for lsn, size in sizes.items() if lsn not in kept]
        sound = [(lsn, size) for lsn, size in new if lsn not in manifest.skipped_lsns]
        for lsn, header in self._headers_of(sound).items():
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
        """Read headers as one task: all side by side, since a busy writer does not wait."""
        headers = run_header_task(HeaderTask(self._store, self._names, tuple(slots)))
        return {lsn: header for (lsn, _), header in zip(slots, headers, strict=True)}

    def _judge(self, manifest: Manifest, headers: dict[int, WalHeader]) -> LogState:
        rules = LogReader(manifest)
        ended: dict[str, Ended] = {}
        for lsn in contiguous([*headers, *manifest.skipped_lsns], manifest.wal_floor):
            if lsn in manifest.skipped_lsns:
                rules.skip()
                continue
            header = headers[lsn]
            was_open = {job.id for job in rules.open_jobs}
            applies = rules.judge(header).verdict is Verdict.APPLIES
            if header.job is not None and header.job.id in was_open - _ids(rules):
                ended[header.job.id] = Ended(lsn, applies, header.write_id)
        jobs = {job.id: job.begin_lsn for job in rules.open_jobs}
        return LogState(
            manifest, rules.next_lsn, rules.dedup, jobs, ended, last_ids=rules.last_ids()
        )

    # --- filling ------------------------------------------------------------------
    def _aim(self, seen: LogState, losses: int) -> int:
        """Return the slot to try: the first open one, or after some losses one ahead (H59)."""
        if not losses:
            return seen.open_slot
        filled = self._filled(seen)
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

    def _filled(self, seen: LogState) -> set[int]:
        """Return which slots are filled by now, behind those that were looked at."""
        listed = {slot.lsn for slot in self._log.filled(seen.open_slot)}
        return listed | set(seen.manifest.skipped_lsns)

    def _send(self, header: WalHeader, seen: LogState) -> None:
        """PUT, and close the gap below: nothing counts behind an open slot."""
        may_stand = self._fill(header)
        if not may_stand or header.lsn == seen.open_slot:
            return
        try:
            filled = self._filled(seen)
            gap = [lsn for lsn in range(seen.open_slot, header.lsn) if lsn not in filled]
            skips = [self._header(lsn, WalKind.SKIP, None, None) for lsn in gap]
            self._store.runtime.gather([lambda skip=skip: self._fill(skip) for skip in skips])  # type: ignore[misc]
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
            schema=schema if kind is WalKind.BEGIN else None,
            job=job,
        )

    def _fill(self, header: WalHeader) -> bool:
        """PUT until the answer is definite; return whether the object may stand in its slot.

        Who holds the slot then, and what that amounts to, the next look shows.
        """
        body = WalObject.encode(header)
        runtime = self._store.runtime
        deadline = runtime.deadline(DEADLINE_S)
        doubt = False
        while True:
            try:
                answer = self._log.fill(header.lsn, body)
                doubt = doubt or answer.doubt or answer.outcome is Outcome.UNKNOWN
                if answer.outcome is not Outcome.UNKNOWN:
                    return answer.landed or doubt
                cause = answer.cause
            except UnavailableError as error:  # this try has written nothing
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
        return OutcomeUnknownError(
            f"LSN {lsn} of {self._names.name} may hold a {kind} that counts",
            hint=f"Run the job again with the idempotency key {key!r}: if it has counted, that "
            f"changes nothing and returns its receipt",
            namespace=self._names.name,
            lsn=lsn,
            idempotency_key=key,
        )


def _ids(rules: LogReader) -> set[str]:
    return {job.id for job in rules.open_jobs}


# --- what an append amounts to --------------------------------------------------------


def _settled(kind: WalKind, job: Job, seen: LogState, sent: dict[str, int]) -> JobState | None:
    """Return what became of a job's append; None if there is none that counts yet."""
    if kind is WalKind.BEGIN:
        return _settled_begin(job, seen, sent)
    if kind is WalKind.INGEST:
        return _settled_ingest(job, seen, sent)
    return _settled_abort(job, seen)


def _settled_begin(job: Job, seen: LogState, sent: dict[str, int]) -> JobState | None:
    known = seen.committed_as(job.key)
    if known is not None:
        return JobState(known.lsn, counts=False, known=known)
    begin = seen.open_jobs.get(job.id)
    if begin is not None:
        return JobState(begin, counts=True)
    if sent and job.id in seen.ended:  # somebody has ended it before it was told that it began
        return JobState(seen.ended[job.id].lsn, counts=False)
    return None


def _settled_ingest(job: Job, seen: LogState, sent: dict[str, int]) -> JobState | None:
    known = seen.committed_as(job.key)
    if known is not None and known.write_id in sent:
        return JobState(known.lsn, counts=True, write_id=known.write_id)
    end = seen.ended.get(job.id)
    if end is not None and end.committed and end.write_id in sent:
        return JobState(end.lsn, counts=True, write_id=end.write_id)
    if known is not None:  # another one's: whatever of ours has landed is skipped by everyone
        return JobState(known.lsn, counts=False, known=known)
    if job.id in seen.open_jobs:  # so none of ours has counted, whatever has landed where
        return None
    if end is None and sent:
        return _settled_by_segments(job, seen, sent)
    return JobState(end.lsn if end is not None else 0, counts=False)


def _settled_by_segments(job: Job, seen: LogState, sent: dict[str, int]) -> JobState:
    """The fold has passed the job's end, and so many keys since that its own is forgotten."""
    if seen.names_segment_of(job):
        write_id, lsn = max(sent.items(), key=lambda item: item[1])
        return JobState(lsn, counts=True, write_id=write_id)
    raise OutcomeUnknownError(
        f"job {job.id} has ended, and its key is not in the window any more",
        hint="Look for its rows before running it again",
        job=job.id,
    )


def _settled_abort(job: Job, seen: LogState) -> JobState | None:
    if job.id in seen.open_jobs:
        return None
    end, known = seen.ended.get(job.id), seen.committed_as(job.key)
    committed = end.committed if end is not None else known is not None
    lsn = end.lsn if end is not None else known.lsn if known is not None else 0
    return JobState(lsn, counts=not committed, known=known)
