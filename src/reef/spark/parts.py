"""One partition becomes staged segments: what every task of a write does, however it is run.

    batches ── rows ──▶ checked ── sorting ──▶ by key, each once ── staging ──▶ segments

Names are new at every attempt, so that a task that is run twice leaves segments that no commit
names (H39). Input that cannot be written is no failure of the task: Spark would only run it
again. It is told in the part that comes back, and the driver raises it as it is.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pyarrow as pa

from reef.errors import InvalidInputError, ReefError
from reef.formats.versions import Versions
from reef.formats.wal_object import JobSegment
from reef.jobs.staging import Staging
from reef.runtime import Runtime
from reef.spark.lease import SharedLease
from reef.spark.notes import OrderNotes
from reef.spark.rows import RowsPlan
from reef.spark.sorting import SORT_BYTES, RowSorter

__all__ = ["PartPlan", "StagedPart", "first_error", "stage_part"]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What a task needs. Picklable."""

    staging: Staging
    rows: RowsPlan
    sort_bytes: int = SORT_BYTES
    lease: SharedLease | None = None
    """The job's own, where no driver beats for it."""
    apart: bool = False
    """Whether rows of a key may be in other parts too."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What became of a partition. Only those that reach the driver's commit count."""

    partition: int
    attempt: int
    segments: tuple[JobSegment, ...] = ()
    notes: tuple[JobSegment, ...] = ()
    """How high each row stands in the order, where rows of other parts may stand higher."""
    undecided: int = 0
    """Keys of which two rows stand equally high."""
    rows: int = 0
    duplicates: int = 0
    spilled: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: waiting for rows, checking them, sorting and writing."""
    error: ReefError | None = None

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.segments)


def stage_part(
    plan: PartPlan, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> StagedPart:
    """Stage the rows of one partition."""
    clock = _Clock(plan.staging.store.runtime)
    apart = plan.apart and plan.rows.order is not None
    sorter = RowSorter(plan.rows, plan.sort_bytes, apart)
    part = StagedPart(partition, attempt)
    try:
        checked = _checked(plan, clock.timed("receive", batches), clock, partition)
        rows = _alive(plan, sorter.sorted(checked))
        if apart:
            part = _stage_with_notes(plan, rows, part)
        else:
            part = replace(part, segments=plan.staging.stage(rows))
    except InvalidInputError as error:
        return replace(part, error=error)
    return replace(
        part,
        rows=sorter.rows,
        duplicates=sorter.duplicates,
        spilled=sorter.spilled,
        seconds=clock.seconds(),
    )


def _stage_with_notes(plan: PartPlan, rows: Iterable[Versions], part: StagedPart) -> StagedPart:
    with OrderNotes(plan.rows) as notes:
        segments = plan.staging.stage(notes.taken(rows))
        noted = notes.stage(plan.staging) if segments else ()
        return replace(part, segments=segments, notes=noted, undecided=notes.undecided)


def first_error(parts: Iterable[StagedPart]) -> ReefError | None:
    """Return what was wrong with the input, as the first partition that found something tells."""
    return next((part.error for part in parts if part.error is not None), None)


def _checked(
    plan: PartPlan, batches: Iterable[pa.RecordBatch], clock: "_Clock", partition: int
) -> Iterator[Versions]:
    seen = 0
    for batch in batches:
        if plan.lease is not None:
            _beat(plan.lease)
        if not batch.num_rows:
            continue
        try:
            with clock.span("check"):
                found = plan.rows.versions(pa.Table.from_batches([batch]))
        except InvalidInputError as error:
            raise InvalidInputError(
                f"partition {partition}, behind {seen} rows: {error.message}",
                kind=error.kind,
                hint=error.hint,
                **error.context,
            ) from error
        seen += batch.num_rows
        yield found


def _alive(plan: PartPlan, pieces: Iterable[Versions]) -> Iterator[Versions]:
    for piece in pieces:
        if plan.lease is not None:
            _beat(plan.lease)
        yield piece


def _beat(lease: SharedLease) -> None:
    """Renew the job's lease if it is time; whether it was in time, the commit will see."""
    with suppress(ReefError):
        lease.check()


class _Clock:
    """Where a task's time goes: what is not receiving or checking is sorting and writing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._all = runtime.stopwatch()
        self._spent = {"receive": 0.0, "check": 0.0}

    def timed(self, name: str, items: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        iterator = iter(items)
        while True:
            with self.span(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = self._runtime.monotonic_s()
        yield
        self._spent[name] += self._runtime.monotonic_s() - started

    def seconds(self) -> dict[str, float]:
        rest = self._all.elapsed_s() - sum(self._spent.values())
        return {**self._spent, "sort and write": max(0.0, rest)}
