"""The log: every slot that is needed, read whole and judged as everyone judges it.

A task reads some slots: framing, every record's checksum, the footer, and the batches' columns.
The driver then looks at the headers in order. Which slots must be filled is not always known: a
writer may have several PUTs in flight, and the newest ones may not be there yet. A slot counts as
missing only where something proves that it was filled once:

- it lies below the head's floor, or below the last LSN that a manifest has seen;
- a batch behind it names, in `after`, a slot from it on as seen durable;
- something stands so far behind it that no one could have had both in flight.

A slot that was emptied looks free to the next writer that opens, whose fence then stands in it. The
batch behind it tells: it names the object that its writer had seen there.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.engine.log_rules import IDS_KEPT, LogReader, Verdict
from reef.engine.tail import ingested_segments
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.batch import decode_records
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.executor import Executor
from reef.jobs.verify_chain import Chain
from reef.jobs.verify_problems import Problem, ProblemKind
from reef.paths import Namespace, number_of
from reef.stores import Store, fetch

__all__ = ["LogTask", "SlotRead", "SurveyedLog", "read_slots", "run_log_task", "survey_log"]

TASK_SLOTS = 128
WINDOW = IDS_KEPT + 1
"""So many slots may lie open between the last that is filled and one that was put ahead."""


@dataclass(frozen=True, slots=True)
class LogTask:
    """Some slots to read whole."""

    store: Store
    namespace: Namespace
    lsns: tuple[int, ...]
    schemas: tuple[Schema, ...]


@dataclass(frozen=True, slots=True)
class SlotRead:
    """What a slot holds: a header, or the reason why there is none."""

    lsn: int
    header: WalHeader | None = None
    size: int = 0
    kind: ProblemKind | None = None
    message: str = ""
    offset: int | None = None


def run_log_task(task: LogTask) -> list[SlotRead]:
    """Read and check the objects of a task's slots."""
    schemas = {schema.id: schema for schema in task.schemas}
    return task.store.runtime.gather(
        [lambda lsn=lsn: _read_slot(task, lsn, schemas) for lsn in task.lsns]  # type: ignore[misc]
    )


def read_slots(
    executor: Executor,
    store: Store,
    names: Namespace,
    lsns: Sequence[int],
    schemas: tuple[Schema, ...],
) -> dict[int, SlotRead]:
    """Return what stands in these slots, read side by side."""
    chunks = [tuple(lsns[at : at + TASK_SLOTS]) for at in range(0, len(lsns), TASK_SLOTS)]
    tasks = [LogTask(store, names, chunk, schemas) for chunk in chunks]
    return {read.lsn: read for part in executor.map(run_log_task, tasks) for read in part}


def _read_slot(task: LogTask, lsn: int, schemas: dict[int, Schema]) -> SlotRead:
    key = task.namespace.wal_object(lsn)
    size = 0

    def decode(body: bytes) -> WalObject:
        nonlocal size
        size = len(body)
        found = WalObject.decode(body, key)
        if found.header.lsn != lsn:
            said = f"object {key} says that it is LSN {found.header.lsn}"
            raise CorruptionError(said, object=key, offset=0)
        schema = schemas.get(found.header.schema_id)
        if schema is not None:
            deque(decode_records(found, schema, key), maxlen=0)
        return found

    try:
        return SlotRead(lsn, fetch(task.store, key, decode).header, size)
    except CorruptionError as error:
        offset = error.context.get("offset")
        return SlotRead(lsn, None, size, ProblemKind.WAL_DAMAGED, error.message, offset)
    except UnsupportedFormatError as error:
        return SlotRead(lsn, None, size, ProblemKind.UNSUPPORTED, error.message)
    except NotFoundError:
        return SlotRead(lsn, kind=ProblemKind.WAL_MISSING, message=f"there is no object {key}")


@dataclass(slots=True)
class SurveyedLog:
    """The log from the lowest floor that is needed, as far as it goes."""

    first: int
    slots: dict[int, SlotRead] = field(default_factory=dict)
    """What was listed, but for what an earlier repair gave up."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    ingested: list[SegmentEntry] = field(default_factory=list)
    """Of ingests that count."""
    open_jobs: tuple[OpenJob, ...] = ()
    waiting_jobs: frozenset[str] = frozenset()
    """Named by objects behind a gap: they may count yet."""
    end: int = 0
    """The first slot that is not filled, after which nothing counts."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def damaged(self) -> list[int]:
        """The slots that cannot be read, or that were filled once and are empty."""
        return sorted(p.lsn for p in self.problems if p.lsn is not None)

    def headers(self) -> list[WalHeader]:
        return [slot.header for slot in self.slots.values() if slot.header is not None]


def survey_log(executor: Executor, store: Store, names: Namespace, chain: Chain) -> SurveyedLog:
    """Read and judge the log from the lowest floor that is needed."""
    head, start = chain.head, chain.start
    skipped = frozenset(head.skipped_lsns)
    first = max(start.wal_floor - 1, start.wal_base)
    listed = [
        lsn
        for info in store.list(names.wal, names.wal_object(first - 1))
        if (lsn := number_of(info.key)) is not None
    ]
    log = SurveyedLog(start.wal_floor)
    sound = [lsn for lsn in listed if lsn not in skipped]
    log.slots = read_slots(executor, store, names, sound, head.schemas)
    log.problems = _damage(names, log.slots.values())
    log.problems += _missing(names, log, chain, {*listed, *skipped})
    disputes = _judge(log, chain, listed)
    log.problems += [
        Problem(ProblemKind.WAL_DAMAGED, names.wal_object(lsn), message, offset=0, lsn=lsn)
        for lsn, message in disputes.items()
    ]
    return log


def _damage(names: Namespace, slots: Iterable[SlotRead]) -> list[Problem]:
    return [
        Problem(
            slot.kind, names.wal_object(slot.lsn), slot.message, offset=slot.offset, lsn=slot.lsn
        )
        for slot in slots
        if slot.kind is not None
    ]


def _missing(names: Namespace, log: SurveyedLog, chain: Chain, present: set[int]) -> list[Problem]:
    last = _proved_end(log, chain.head, present)
    lost = [lsn for lsn in range(log.first, last + 1) if lsn not in present]
    return [
        Problem(
            ProblemKind.WAL_MISSING,
            names.wal_object(lsn),
            f"there is no object {names.wal_object(lsn)}, though the log went on behind it",
            lsn=lsn,
        )
        for lsn in lost
    ]


def _proved_end(log: SurveyedLog, head: Manifest, present: set[int]) -> int:
    """Return the last LSN up to which every slot was filled once, for certain."""
    proofs = [head.wal_floor - 1, head.wal_id_last_seen, max(present, default=0) - WINDOW]
    proofs += [h.lsn - len(h.after) for h in log.headers() if h.after]
    return max(proofs)


def _judge(log: SurveyedLog, chain: Chain, listed: Sequence[int]) -> dict[int, str]:
    """Pass the headers through the rules; damaged ones are skipped. Return disputed slots.

    A disputed slot was overwritten, or emptied and filled again before any process noticed (H73).
    """
    disputes: dict[int, str] = {}
    given_up = {*chain.head.skipped_lsns, *log.damaged}
    start = msgspec.structs.replace(chain.start, skipped_lsns=tuple(sorted(given_up)))
    rules = LogReader(start, disputes)
    while True:
        slot = log.slots.get(rules.next_lsn)
        if rules.next_lsn in given_up:
            rules.skip()
        elif slot is None or slot.header is None:
            break
        else:
            verdict = rules.judge(slot.header).verdict
            log.verdicts[slot.lsn] = verdict
            if verdict is Verdict.APPLIES and slot.header.kind is WalKind.INGEST:
                _take_ingest(log, slot, chain.head)
    log.end, log.open_jobs = rules.next_lsn, rules.open_jobs
    behind = [log.slots[lsn].header for lsn in listed if lsn >= log.end and lsn in log.slots]
    log.waiting_jobs = frozenset(h.job.id for h in behind if h is not None and h.job is not None)
    return disputes


def _take_ingest(log: SurveyedLog, slot: SlotRead, head: Manifest) -> None:
    assert slot.header is not None  # it was judged
    try:
        log.ingested += ingested_segments(slot.header, head.schema)
    except UnsupportedFormatError as error:
        log.problems.append(
            Problem(ProblemKind.UNSUPPORTED, f"LSN {slot.lsn}", error.message, lsn=slot.lsn)
        )
