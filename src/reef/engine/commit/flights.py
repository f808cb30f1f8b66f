"""A batch on its way: queued, in flight with others, answered."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from reef.errors import InternalError, OutcomeUnknownError, UnavailableError
from reef.formats.batch import AnyOps
from reef.formats.manifest import DedupEntry
from reef.formats.schema import Schema
from reef.formats.streams import Lineage
from reef.formats.wal_object import BatchHeader, WalHeader, WalKind, WalObject
from reef.manifest.streams import extend_lineage
from reef.paths import Namespace
from reef.runtime import Deadline, Future, Runtime, Stopwatch
from reef.stores import WriteResult
from reef.telemetry import Metrics
from reef.types import Receipt

__all__ = [
    "Flight",
    "FlightMetrics",
    "Pending",
    "Role",
    "State",
    "StreamMark",
    "broken",
    "left_over",
    "no_room",
    "receipt_of",
    "replayed_receipt",
    "stopped",
    "unknown_outcome",
]

HEADER_BYTES = 64
"""About what the header says of a batch."""


class State(StrEnum):
    """Where a writer's life stands. Only OPEN sends."""

    OPEN = "open"
    LOST = "lost"
    """A slot was lost; a resync follows when all in flight are answered."""
    ENDED = "ended"


class StreamMark(NamedTuple):
    """The place of a batch in its stream."""

    stream: str
    points: Lineage
    """The batch's own entry, then any behind it that were committed already: the last is the
    mark."""


@dataclass(eq=False, slots=True)
class Pending:
    """A client's batch that is not answered yet."""

    ops: AnyOps
    record: bytes
    header: BatchHeader
    future: "Future[Receipt]"
    queued: Stopwatch
    decide: Callable[[], None] | None = None
    """Raises if a conditional batch is refused, judged on what is durable at this moment."""
    schema_id: int = 1
    """The schema by which the record is read; an object has records of one schema only."""
    unattended: bool = False
    """Whether nobody waits for it: if it is refused, the next flush tells so."""
    in_callback: bool = False
    """Whether it was written from a callback, which may be waiting for it."""
    mark: StreamMark | None = None
    """Its stream and its place there, by which it counts once: its key was looked up before."""
    deadline: Deadline | None = None
    """How long it is sent; None: as long as the writer's settings say."""

    def __post_init__(self) -> None:
        # What was handed over cannot be cancelled: it may be on its way already (H26).
        self.future.set_running_or_notify_cancel()

    @property
    def size(self) -> int:
        return len(self.record) + HEADER_BYTES


class Role(NamedTuple):
    """Whose objects these are, and what they expect before them."""

    epoch: int
    writer_id: str
    after: tuple[str, ...] | None
    schema: Schema | None = None
    """Where it has grown since the fences: so that the log can be read without any manifest."""


@dataclass(eq=False, slots=True)
class Flight:
    """A WAL object that was sent."""

    header: WalHeader
    body: bytes
    batches: list[Pending]
    sent: Stopwatch
    sender: object | None
    """Who sends it; None if that one was interrupted, and another has to go on."""
    answer: WriteResult | None = None
    doubt: bool = False
    """Whether some try may have landed although nobody was told so."""
    acknowledged: bool = False

    @property
    def lsn(self) -> int:
        return self.header.lsn

    @classmethod
    def of(
        cls, batches: list[Pending], lsn: int, role: Role, runtime: Runtime, sender: object
    ) -> "Flight":
        """Return the object that holds these batches, ready to be sent."""
        # Only a local log has marks, and then every batch of the object has one.
        lineages = _lineages(batches) if batches[0].mark is not None else NO_LINEAGES
        marks = {s: points[-1].index for s, points in lineages.items()} if lineages else NO_MARKS
        header = WalHeader(
            lsn=lsn,
            kind=WalKind.BATCHES,
            epoch=role.epoch,
            writer_id=role.writer_id,
            write_id=runtime.ulid(),
            created_at_ms=int(runtime.wall_s() * 1000),
            after=role.after,
            schema_id=batches[0].schema_id,
            batches=tuple([pending.header for pending in batches]),
            schema=role.schema,
            marks=marks,
            lineages=lineages,
        )
        body = WalObject.encode(header, tuple([pending.record for pending in batches]))
        return cls(header, body, batches, runtime.stopwatch(), sender)


NO_LINEAGES: dict[str, Lineage] = {}
NO_MARKS: dict[str, int] = {}


def _lineages(batches: Iterable[Pending]) -> dict[str, Lineage]:
    """Return by stream the last entry of each epoch in an object."""
    lineages: dict[str, Lineage] = {}
    for pending in batches:
        if pending.mark is not None:
            stream, points = pending.mark
            lineages[stream] = extend_lineage(lineages.get(stream, ()), points)
    return lineages


def left_over(flights: Iterable[Flight], taker: object) -> Flight | None:
    """Return a flight whose sender was interrupted, now to be sent by `taker`."""
    for flight in flights:
        if flight.sender is None and flight.answer is None:
            flight.sender = taker
            return flight
    return None


class FlightMetrics:
    """What goes into objects and is on its way. Looked up once: every commit notes all of it."""

    def __init__(self, metrics: Metrics) -> None:
        self.seconds = metrics.histogram("commit.seconds")
        self._group_batches = metrics.histogram("commit.group_batches", unit=1.0)
        self._object_bytes = metrics.histogram("commit.object_bytes", unit=1.0)
        self._object_rows = metrics.histogram("commit.object_rows", unit=1.0)
        self._in_flight = metrics.gauge("commit.in_flight")
        self._in_flight_bytes = metrics.gauge("commit.in_flight_bytes")
        self.unfolded_bytes = metrics.gauge("commit.unfolded_bytes")

    def note_launch(self, flight: Flight) -> None:
        self._group_batches.record(len(flight.batches))
        self._object_bytes.record(len(flight.body))
        self._object_rows.record(sum([batch.ops for batch in flight.header.batches]))

    def note_in_flight(self, flights: Collection[Flight]) -> None:
        self._in_flight.set(len(flights))
        self._in_flight_bytes.set(sum([len(flight.body) for flight in flights]))


def receipt_of(namespace: Namespace, header: WalHeader, index: int) -> Receipt:
    """Return the receipt of one batch of an object."""
    batch = header.batches[index]
    return Receipt(
        namespace.name,
        header.lsn,
        index,
        header.epoch,
        header.write_id,
        batch.ops,
        idempotency_key=batch.key,
    )


def replayed_receipt(namespace: str, entry: DedupEntry) -> Receipt:
    """Return the answer to a batch whose key was committed before."""
    return Receipt(
        namespace,
        entry.lsn,
        entry.index,
        entry.epoch,
        entry.write_id,
        entry.ops,
        replayed=True,
        idempotency_key=entry.key,
    )


def unknown_outcome(
    namespace: Namespace, header: WalHeader, index: int, cause: object
) -> OutcomeUnknownError:
    """Return the error for a batch that may have been committed."""
    return OutcomeUnknownError(
        f"LSN {header.lsn} of {namespace.name} may have been committed: {cause}",
        hint="resolve() this error before trying again",
        namespace=namespace.name,
        receipt=receipt_of(namespace, header, index),
    )


# --- the ends of a writer ---------------------------------------------------------------
def stopped(namespace: Namespace, lsn: int, cause: object) -> UnavailableError:
    """Return the error for what was not sent because something before it has no answer."""
    return UnavailableError(
        f"the writer of {namespace.name} has stopped: LSN {lsn} has no answer: {cause}",
        hint="Open the writer again",
        namespace=namespace.name,
    )


def broken(namespace: Namespace, cause: BaseException) -> InternalError:
    """Return the error for a writer whose books cannot be trusted any more."""
    return InternalError(
        f"the writer of {namespace.name} broke off in the middle of a step: {cause!r}",
        hint="Open the writer again",
        namespace=namespace.name,
    )


def no_room(namespace: Namespace, queued: int, unfolded: int) -> UnavailableError:
    """Return the error for a batch that found no room within its deadline."""
    return UnavailableError(
        f"{namespace.name} has no room: {queued} bytes wait to be sent, {unfolded} to be folded",
        hint="Fold the log, write more slowly, or raise the bounds",
    )
