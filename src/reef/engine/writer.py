"""The writer: puts, deletes and reads by the one process that has the writer role.

A write returns when it is durable. With `wait=False` it returns a future at once, and the
batches are sent in order by a helper. Reads see everything that was acknowledged here. When
another writer has taken over, reads raise FencedError like writes: this handle does not follow
the log any more, and would serve older and older rows (H77). `stale_reads=True` allows that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from reef.config import WriterSettings
from reef.engine.batch import Batch, EncodedBatch, check_idempotency_key
from reef.engine.commit.committer import Committer
from reef.engine.commit.flights import Pending
from reef.engine.commit.opening import ReplayReport
from reef.engine.commit.outcomes import Outcomes
from reef.engine.conditions import Condition, checked
from reef.engine.display import human_bytes
from reef.engine.footprints import Footprints
from reef.engine.info import Info
from reef.engine.readable import Readable
from reef.engine.reading.projection import Projection
from reef.engine.reading.row_cache import RowCache
from reef.engine.reading.view import View
from reef.engine.transactions import Transaction
from reef.engine.worker import Worker
from reef.engine.writable import Writable
from reef.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.formats.wal_object import BatchHeader
from reef.paths import Namespace
from reef.runtime import ProcessBound, Runtime
from reef.types import KeyRange, Receipt

__all__ = ["Writer"]


@dataclass(frozen=True, slots=True)
class Unfolded:
    """What stands in the log from the floor on."""

    bytes: int
    objects: int


class Writer(ProcessBound, Readable, Writable):
    """A handle on the writer role of one namespace. Safe for threads, bound to its process."""

    def __init__(
        self,
        namespace: Namespace,
        committer: Committer,
        outcomes: Outcomes,
        settings: WriterSettings,
        runtime: Runtime,
    ) -> None:
        super().__init__(runtime)
        self.namespace = namespace.name
        self._committer = committer
        self._outcomes = outcomes
        self._settings = settings
        self._runtime = runtime
        self._metrics = committer.metrics
        self._row_cache = RowCache(settings.row_cache_bytes)
        self._footprints = Footprints(settings.footprint_bytes_max)
        committer.tail.watch(self._row_cache, self._footprints)
        self._closed = False
        self.background: Worker | None = None
        """What folds, compacts and sweeps behind this writer; ends with it."""

    # --- writes -------------------------------------------------------------------
    def _write(
        self,
        batch: Batch,
        *,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
        wait: bool = True,
    ) -> Any:
        encoded = self._encode(batch)
        if when == ():
            return self._commit(encoded, idempotency_key, None, None, wait=wait)
        conditions = checked(when, self._schema_now())
        for condition in conditions:  # warm up, so that deciding needs no request
            self._read(lambda view, key=condition.key: view.newest(key))  # type: ignore[misc]
        decide = (lambda: self._decide(conditions)) if conditions else None
        record = [condition.record() for condition in conditions] or None
        return self._commit(encoded, idempotency_key, decide, record, wait=wait)

    def transaction(self) -> Transaction:
        """Begin a transaction: `with writer.transaction() as tx:`."""
        self._check_reads()
        return Transaction(
            self,
            self._footprints,
            self._committer.begin(self._footprints),
            self._commit_transaction,
            reads_max=self._settings.transaction_reads_max,
            bytes_max=self._settings.batch_bytes_max,
        )

    def flush(self) -> None:
        """Return when everything that was written before is durable.

        If something that nobody waited for was refused, its error is raised here, once.
        """
        self._check()
        refused = self._committer.flush()
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Finish what is on its way, and give the handle up. The role stays free for others.

        A write that nobody waited for tells its end by its future alone: `flush` first to be told.
        """
        if not self._closed:
            self.check_process()
            self._closed = True
            try:
                if self.background is not None:
                    self.background.stop()
                self._committer.flush()
            finally:
                self._committer.end(ClosedError(f"the writer of {self.namespace} is closed"))

    def resolve(
        self, what: OutcomeUnknownError | Receipt | str
    ) -> Literal["committed", "rejected", "unknown"]:
        """Tell what became of a write whose outcome was unknown."""
        self.check_process()
        return self._outcomes.resolve(what)

    # --- what it knows ------------------------------------------------------------
    @property
    def recovery(self) -> ReplayReport:
        """What opening this writer read back from the log (H27)."""
        return self._committer.opened.report

    @property
    def is_open(self) -> bool:
        """Whether it can still commit: neither closed nor fenced, as far as it knows."""
        return not self._closed and self._committer.is_open

    @property
    def manifest(self) -> Manifest:
        """The manifest that it goes by."""
        return self._committer.tail.manifest

    @property
    def unfolded(self) -> Unfolded:
        """How much of the log no fold has taken over yet, as far as it knows."""
        tail = self._committer.tail
        return Unfolded(tail.bytes, tail.next_lsn - tail.manifest.wal_floor)

    def refresh(self) -> None:
        """Take up what others did: what a fold has taken over leaves memory, loads come in."""
        self._check()
        self._committer.rebase()
        self._check_reads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch {self._committer.opened.epoch}"
        last_lsn = self._committer.tail.view().last_lsn
        return f"<{type(self).__name__} {self.namespace}, {state}, LSN {last_lsn}>"

    def _repr_html_(self) -> str:
        tail, epoch = self._committer.tail, self._committer.opened.epoch
        facts = {
            "state": "closed" if self._closed else f"open, epoch {epoch}",
            "LSN": str(tail.view().last_lsn),
            "not folded": human_bytes(tail.bytes),
        }
        return Info.of(self.namespace, tail.manifest, tail.ingested).html_of_handle(
            "Writer of", facts
        )

    # --- inside -------------------------------------------------------------------
    def _encode(self, batch: Batch) -> EncodedBatch:
        self._check()
        if not isinstance(batch, Batch):
            raise InvalidInputError(
                f"write() takes a Batch, got {type(batch).__name__}",
                hint='For instance reef.Batch().put("a", b"1").delete("b")',
            )
        schema, bytes_max = self._schema_now(), self._settings.batch_bytes_max
        try:
            return batch.encode(schema, bytes_max, self._now_ms())
        except InvalidInputError as error:
            # Perhaps the schema has grown since this writer looked; a mistake stays one.
            if "column" in error.context:
                with suppress(UnavailableError):
                    self._committer.rebase()
            if self._schema_now().id == schema.id:
                raise
            return batch.encode(self._schema_now(), bytes_max, self._now_ms())

    def _commit(
        self,
        encoded: EncodedBatch,
        key: str | None,
        decide: Callable[[], None] | None,
        record: list[Any] | None,
        *,
        wait: bool,
    ) -> Any:
        check_idempotency_key(key)
        pending = Pending(
            encoded.ops,
            encoded.record,
            BatchHeader(len(encoded.ops), key, encoded.digest() if key else None, record),
            self._runtime.future(),
            self._runtime.stopwatch(),
            decide,
            encoded.schema_id,
            unattended=not wait,
        )
        future = self._committer.submit(pending)
        if not wait:
            self._committer.drive_in_background()
            return future
        self._committer.drive(future)
        return future.result()

    def _commit_transaction(self, batch: EncodedBatch, transaction: Transaction) -> Receipt:
        self._check()
        decide = transaction.check if transaction.has_read else None
        receipt: Receipt = self._commit(batch, None, decide, None, wait=True)
        return receipt

    def _decide(self, conditions: Sequence[Condition]) -> None:
        """Judge on what is durable at this moment; called when nothing is in flight (H20)."""
        try:
            self._judge(conditions)
        except NotFoundError:  # swept underneath: look again, from the newest manifest
            self._committer.look_again()
            self._judge(conditions)

    def _judge(self, conditions: Sequence[Condition]) -> None:
        view = self._committer.tail.view()
        rows = view.get_each([condition.key for condition in conditions], self._now_ms())
        for condition, row in zip(conditions, rows, strict=True):
            if not condition.holds(row, view.manifest.schema):
                raise condition.failed()

    def _schema_now(self) -> Any:
        return self._committer.tail.manifest.schema

    def _view(self) -> View:
        self._check()
        if self._committer._end is not None:
            self._check_fenced()
        return self._committer.tail.view()

    def _is_ready(self) -> bool:
        at_home = not self._closed and self._runtime.process_id() == self._home_process
        return at_home and (self._committer._end is None or self._settings.stale_reads)

    def _pieces(
        self, view: View, wanted: KeyRange, projection: Projection, reverse: bool
    ) -> Iterator[Versions]:
        return self._served(super()._pieces(view, wanted, projection, reverse))

    def _served(self, pieces: Iterator[Versions]) -> Iterator[Versions]:
        """Yield the pieces of a scan for as long as this writer may be read (H77)."""
        for rows in pieces:
            yield rows
            if self._committer._end is not None:
                self._check_fenced()

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation; what the head itself names is lost, not swept."""
        self._committer.rebase()
        view = self._view()
        if view.manifest.generation > generation:
            return view
        if self._committer._end is not None:  # a writer that has ended does not move on
            raise self._committer._end from missing
        raise CorruptionError(
            f"{missing.message}, though generation {generation} needs it",
            hint="Run verify, then repair",
            **missing.context,
        ) from missing

    def _check_reads(self) -> None:
        """Raise if this handle may not be read."""
        self._check()
        if self._committer._end is not None:
            self._check_fenced()

    def _check_fenced(self) -> None:
        fencing = self._fencing()
        if fencing is not None and not self._settings.stale_reads:
            raise fencing.with_traceback(None)

    def _fencing(self) -> FencedError | None:
        """Return the error of the writer that took over, if one did."""
        end = self._committer._end
        return end if isinstance(end, FencedError) else None

    def _check(self) -> None:
        self.check_process()
        if self._closed:
            raise ClosedError(f"the writer of {self.namespace} is closed", hint="Open another one")
