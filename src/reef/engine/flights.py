"""A batch on its way: queued, in flight with others, answered."""

from collections.abc import Callable
from dataclasses import dataclass, field

from reef.errors import OutcomeUnknownError, ReefError
from reef.formats.batch import Ops
from reef.formats.wal_object import BatchHeader, WalHeader
from reef.paths import Namespace
from reef.runtime import Future, Stopwatch
from reef.stores import WriteResult
from reef.types import Receipt

__all__ = ["Answers", "Flight", "Pending", "give", "receipt_of", "unknown_outcome"]

HEADER_BYTES = 64
"""About what the header says of a batch."""


@dataclass(eq=False, slots=True)
class Pending:
    """A client's batch that is not answered yet."""

    ops: Ops
    record: bytes
    header: BatchHeader
    future: "Future[Receipt]"
    queued: Stopwatch
    decide: Callable[[], None] | None = None
    """Raises if a conditional batch is refused, judged on what is durable at this moment."""

    @property
    def size(self) -> int:
        return len(self.record) + HEADER_BYTES


@dataclass(eq=False, slots=True)
class Flight:
    """A WAL object that was sent."""

    header: WalHeader
    body: bytes
    batches: list[Pending]
    sent: Stopwatch
    answer: WriteResult | None = None
    acknowledged: bool = False

    @property
    def lsn(self) -> int:
        return self.header.lsn


@dataclass(slots=True)
class Answers:
    """Answers that were decided under the writer's lock, to be given outside of it.

    A future runs its owner's callbacks where it is set; those may well call the writer again.
    """

    _ready: list[tuple[Pending, Receipt | ReefError]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, pending: Pending, answer: Receipt | ReefError) -> None:
        self._ready.append((pending, answer))

    def take(self) -> list[tuple[Pending, Receipt | ReefError]]:
        ready, self._ready = self._ready, []
        return ready


def give(answers: list[tuple[Pending, Receipt | ReefError]]) -> None:
    """Set the futures."""
    for pending, answer in answers:
        if isinstance(answer, ReefError):
            pending.future.set_exception(answer)
        else:
            pending.future.set_result(answer)


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
