"""The writer: writes and reads by the one process that holds the writer role.

`put`, `upsert`, `patch`, `merge`, `delete` and `delete_range` are batches of one call; `write`
commits a `Batch`. Each returns a receipt when the write is durable. With `wait=False` it returns a
future of the receipt at once, and a background thread sends the batches in order.

Reads see every write that this handle has acknowledged. After another writer has taken over, reads
raise FencedError like writes: this handle no longer follows the log, and its rows become stale
(H77). `stale_reads=True` allows them.
"""

import atexit
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Self, TypedDict, Unpack, overload

from reef.config import BackgroundSettings, WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.completions import new_future
from reef.engine.commit.inflight import PatchedKeys, Pending, patched_keys
from reef.engine.commit.open_writer import ReplayReport, UnclosedRole, release_role
from reef.engine.commit.resync import Outcomes
from reef.engine.display import human_bytes
from reef.engine.handles.readable import Readable
from reef.engine.handles.transaction import Condition, Footprints, Transaction, checked
from reef.engine.read.caches import RowCache
from reef.engine.read.view import Scan, View, look_up
from reef.engine.rows.batch import (
    Batch,
    EncodedBatch,
    as_first_sent,
    check_idempotency_key,
    encode_batch,
)
from reef.engine.rows.merges import Operand
from reef.engine.stats import handle_html, namespace_info
from reef.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.formats.wal_object import BatchHeader
from reef.paths import Namespace
from reef.runtime import REAL, Future, ProcessBound, Runtime
from reef.types import Receipt

EXIT_FLUSH_S = 30.0
"""How long queued writes are flushed when the interpreter exits."""
EXIT_RELEASE_S = 5.0
"""How long roles of writers that were not closed are released after that."""
UNCLOSED_ROLES_MAX = 64
"""Roles of collected writers that are released when the interpreter exits; the last ones."""
CHANGE_ATTEMPTS = 10
"""Attempts of `delete_where` and `update_where` under concurrent writes."""


class WriteOptions(TypedDict, total=False):
    """Options of a write."""

    idempotency_key: str | None
    """A repeated key with the same batch returns the first receipt, and applies nothing."""
    when: Sequence[Condition]
    """Conditions that must hold for the commit; otherwise ConditionFailedError."""


@dataclass(frozen=True, slots=True)
class LogBacklog:
    """The unfolded part of the log: bytes, and objects."""

    bytes: int
    objects: int


class Worker(Protocol):
    """Folds, compacts and sweeps for a writer; jobs are a layer above, `reef.open` connects them.

    A writer owns its worker; a worker has only a weak reference to its writer, so that a writer
    without users is not kept alive by its background thread.
    """

    def step(self) -> Any:
        """Do one bounded piece of work, the most urgent one; None if nothing is due."""

    def pause(self) -> None:
        """Send no more requests until `resume`."""

    def resume(self) -> None:
        """Continue."""

    def stop(self) -> None:
        """End the thread; the piece of work that it is doing is aborted at its next request."""


def background_settings(given: bool | BackgroundSettings) -> BackgroundSettings:
    """Return the settings in `background=`; the defaults for a plain yes or no."""
    if isinstance(given, bool):
        return BackgroundSettings()
    if not isinstance(given, BackgroundSettings):
        raise InvalidInputError(
            f"background={given!r} is neither a bool nor BackgroundSettings",
            kind=ErrorKind.INVALID_OPTION,
        )
    given.check()
    return given


class Writer(ProcessBound, Readable):
    """The writer of one namespace. Thread-safe; bound to its process."""

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
        committer.tail.watch(self._row_cache)
        self._closed = False
        end_at_exit(self)
        self.background: Worker | None = None
        """The worker that folds, compacts and sweeps until this writer is closed."""

    # --- writes -------------------------------------------------------------------
    @overload
    def write(
        self, batch: Batch, *, wait: Literal[True] = True, **options: Unpack[WriteOptions]
    ) -> Receipt: ...
    @overload
    def write(
        self, batch: Batch, *, wait: Literal[False], **options: Unpack[WriteOptions]
    ) -> "Future[Receipt]": ...
    def write(
        self,
        batch: Batch,
        *,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Commit a batch atomically."""
        return self._write(batch, idempotency_key, when, wait=wait)

    @overload
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[WriteOptions],
    ) -> Receipt: ...
    @overload
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[WriteOptions],
    ) -> "Future[Receipt]": ...
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Set a key to bytes, or in a namespace with columns to a row."""
        return self._write(Batch().put(key, value, ttl_s=ttl_s), idempotency_key, when, wait=wait)

    @overload
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[WriteOptions],
    ) -> Receipt: ...
    @overload
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[WriteOptions],
    ) -> "Future[Receipt]": ...
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars.

        The last row of a repeated key wins; columns that are not named become null.
        """
        return self._write(Batch().upsert(rows, ttl_s=ttl_s), idempotency_key, when, wait=wait)

    @overload
    def patch(
        self, rows: Any, *, wait: Literal[True] = True, **options: Unpack[WriteOptions]
    ) -> Receipt: ...
    @overload
    def patch(
        self, rows: Any, *, wait: Literal[False], **options: Unpack[WriteOptions]
    ) -> "Future[Receipt]": ...
    def patch(
        self,
        rows: Any,
        *,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Set only the named columns; keys without a row are ignored.

        `ops` of the receipt counts the rows that existed when the patch was applied, for up to 100
        rows; the keys are looked up for that. In larger batches it counts all of them, and nothing
        is read. `write` and transactions count the same.
        """
        return self._write(Batch().patch(rows), idempotency_key, when, wait=wait)

    @overload
    def merge(
        self,
        key: bytes | str,
        columns: Mapping[str, Operand],
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[WriteOptions],
    ) -> Receipt: ...
    @overload
    def merge(
        self,
        key: bytes | str,
        columns: Mapping[str, Operand],
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[WriteOptions],
    ) -> "Future[Receipt]": ...
    def merge(
        self,
        key: bytes | str,
        columns: Mapping[str, Operand],
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Apply operators to columns without reading: `merge("k", {"count": reef.add(1)})`.

        A key without a row gets one, with the operands as values. The row expires after `ttl_s`,
        or never.
        """
        batch = Batch().merge(key, columns, ttl_s=ttl_s)
        return self._write(batch, idempotency_key, when, wait=wait)

    @overload
    def merge_rows(
        self,
        rows: Any,
        operators: Mapping[str, str],
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[WriteOptions],
    ) -> Receipt: ...
    @overload
    def merge_rows(
        self,
        rows: Any,
        operators: Mapping[str, str],
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[WriteOptions],
    ) -> "Future[Receipt]": ...
    def merge_rows(
        self,
        rows: Any,
        operators: Mapping[str, str],
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Merge rows in any form, with one operator for each column: `{"count": "add"}`.

        A null leaves the column of its row alone.
        """
        batch = Batch().merge_rows(rows, operators, ttl_s=ttl_s)
        return self._write(batch, idempotency_key, when, wait=wait)

    @overload
    def delete(
        self, key: bytes | str, *, wait: Literal[True] = True, **options: Unpack[WriteOptions]
    ) -> Receipt: ...
    @overload
    def delete(
        self, key: bytes | str, *, wait: Literal[False], **options: Unpack[WriteOptions]
    ) -> "Future[Receipt]": ...
    def delete(
        self,
        key: bytes | str,
        *,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Delete the row of a key, if it has one."""
        return self._write(Batch().delete(key), idempotency_key, when, wait=wait)

    @overload
    def delete_range(
        self,
        start: bytes | str,
        end: bytes | str,
        *,
        wait: Literal[True] = True,
        **options: Unpack[WriteOptions],
    ) -> Receipt: ...
    @overload
    def delete_range(
        self,
        start: bytes | str,
        end: bytes | str,
        *,
        wait: Literal[False],
        **options: Unpack[WriteOptions],
    ) -> "Future[Receipt]": ...
    def delete_range(
        self,
        start: bytes | str,
        end: bytes | str,
        *,
        wait: bool = True,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
    ) -> Any:
        """Delete all rows of [start, end)."""
        return self._write(Batch().delete_range(start, end), idempotency_key, when, wait=wait)

    def delete_where(self, where: Any) -> Receipt:
        """Delete the rows that match a filter, as one transaction; `ops` is their number.

        `where` is that of `scan`. A concurrent write makes it start over; ConflictError if that
        happens again and again.
        """
        return self._change_where(where, _deletes)

    def update_where(self, set: Mapping[str, Any], where: Any) -> Receipt:
        """Set columns of the rows that match a filter, as one transaction; `ops` is their number.

        A concurrent write makes it start over; ConflictError if that happens again and again.
        """
        key = self._view().manifest.schema.key.name
        if not isinstance(set, Mapping) or not set or key in set:
            raise InvalidInputError(
                f"update_where() takes a dict of columns to set, other than {key}, got {set!r:.80}",
                hint='For instance update_where({"state": "closed"}, "amount > 5")',
            )
        values = dict(set)
        return self._change_where(
            where, lambda keys, batch: batch.patch([{key: k, **values} for k in keys])
        )

    def _change_where(self, where: Any, change: Callable[[list[Any], Batch], Batch]) -> Receipt:
        """Write a change to the matching rows in a transaction; retry it on conflicts."""
        for attempts_left in reversed(range(CHANGE_ATTEMPTS)):
            try:
                with self.transaction() as tx:
                    key = tx._view().manifest.schema.key.name
                    found = tx.scan_arrow(columns=[key], where=where)
                    keys = [key for batch in found for key in batch.column(0).to_pylist()]
                    if keys:
                        tx._stage(partial(change, keys))
                if tx.receipt is not None:
                    return tx.receipt
                lsn, epoch = self._view().last_lsn, self._committer.opened.epoch
                return Receipt(self.namespace, lsn, 0, epoch, write_id="", ops=0)
            except ConflictError:
                if not attempts_left:
                    raise
        raise AssertionError("unreachable")

    def transaction(self, *, idempotency_key: str | None = None) -> Transaction:
        """Begin a transaction: `with writer.transaction() as tx:`.

        With an idempotency key it commits once. If the key was committed before, `tx.receipt` is
        set from the start; committing other operations with it is an InvalidInputError.
        """
        self._check_reads()
        check_idempotency_key(idempotency_key)
        return Transaction(
            self,
            self._footprints,
            self._committer.run_locked(self._begin_transaction),
            self._commit_transaction,
            reads_max=self._settings.transaction_reads_max,
            bytes_max=self._settings.batch_bytes_max,
            idempotency_key=idempotency_key,
            receipt=self._committer.find_committed(idempotency_key),
        )

    def flush(self) -> None:
        """Wait until every earlier write is durable.

        If a write with `wait=False` was rejected, its error is raised here, once.
        """
        self._check()
        self._committer.flush()
        rejection = self._committer.take_rejection()
        if rejection is not None:
            raise rejection

    def close(self) -> None:
        """Wait for writes in progress, release the writer role, and close the handle.

        The outcome of a write with `wait=False` is reported by its future only; call `flush`
        first to raise its error.
        """
        if not self._closed:
            self._check_process()
            self._closed = True
            try:
                if self.background is not None:
                    self.background.stop()
                self._committer.flush()
                self._release_role()
            finally:
                self._committer.end(ClosedError(f"the writer of {self.namespace} is closed"))

    def _has_queued(self) -> bool:
        """Return whether writes with `wait=False` are not durable yet."""
        return self._committer.is_open and self._committer.has_pending()

    def _flush_queued(self, timeout_s: float) -> str | None:
        """Flush queued writes at interpreter exit; return why some are lost, if any are."""
        errors: list[ReefError] = []

        def flush() -> None:
            try:
                self.flush()
            except ReefError as error:
                errors.append(error)

        if not self._runtime.spawn(flush, name="exit-flush").join(timeout_s):
            return f"the store has not responded for {EXIT_FLUSH_S:.0f} s"
        return str(errors[0]) if errors else None

    def _is_idle(self) -> Callable[[], bool]:
        """Return a check whether nothing waits to be committed; it takes no lock."""
        committer = self._committer
        return lambda: committer.is_open and committer.is_idle

    def _unclosed_role(self) -> UnclosedRole:
        committer, opened = self._committer, self._committer.opened
        return UnclosedRole(committer.store, committer.namespace, opened.epoch, opened.writer_id)

    def _release_role(self) -> None:
        """Record the clean close, so that the next writer need not take over."""
        if self._committer.is_open:
            committer = self._committer
            release_role(committer.store, committer.namespace, committer.opened)

    def resolve(
        self, write: OutcomeUnknownError | Receipt | str
    ) -> Literal["committed", "rejected", "unknown"]:
        """Return the outcome of a write, after OutcomeUnknownError.

        Takes the error, a receipt, or an idempotency key.
        """
        self._check_process()
        return self._outcomes.resolve(write)

    # --- state --------------------------------------------------------------------
    @property
    def recovery(self) -> ReplayReport:
        """The part of the log that was replayed when this writer was opened (H27)."""
        return self._committer.opened.report

    @property
    def is_open(self) -> bool:
        """Whether this writer can commit: not closed, and not known to be fenced."""
        return not self._closed and self._committer.is_open

    @property
    def _manifest(self) -> Manifest:
        """The newest manifest that this writer has loaded."""
        return self._committer.tail.manifest

    @property
    def unfolded(self) -> LogBacklog:
        """The unfolded part of the log, as of the newest manifest that this writer has loaded."""
        tail = self._committer.tail
        return LogBacklog(tail.bytes, tail.next_lsn - tail.manifest.wal_floor)

    def refresh(self) -> None:
        """Load the newest manifest: folded rows leave memory, bulk loads become visible."""
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
        info = namespace_info(self.namespace, tail.manifest, tail.ingested)
        return handle_html("Writer of", info, facts)

    # --- inside -------------------------------------------------------------------
    def _write(
        self,
        batch: Batch,
        idempotency_key: str | None,
        when: Sequence[Condition],
        *,
        wait: bool,
    ) -> Any:
        encoded = self._encode(batch)
        if idempotency_key is not None:
            encoded = self._as_first_sent(batch, encoded, idempotency_key)
        patched = self._find_patched(encoded, idempotency_key) if batch._has_patches else None
        if when == ():
            return self._commit(encoded, idempotency_key, None, None, patched, wait=wait)
        conditions = checked(when, self._committer.tail.schema)
        keys = [condition.key for condition in conditions]
        if keys:  # warm up, so that deciding needs no request
            self._read(lambda view: view.get_each(keys, self._now_ms()))
        decide = (lambda: self._decide(conditions)) if conditions else None
        record = [condition._record() for condition in conditions] or None
        return self._commit(encoded, idempotency_key, decide, record, patched, wait=wait)

    def _as_first_sent(self, batch: Batch, encoded: EncodedBatch, key: str) -> EncodedBatch:
        """Return a retry as its first commit is known, though the schema has grown since."""
        check_idempotency_key(key)
        tail = self._committer.tail
        known, earlier = tail.dedup.get(key), tail.manifest.schemas[:-1]
        if known is None or not earlier:
            return encoded
        bytes_max = self._settings.batch_bytes_max
        return as_first_sent(batch, encoded, known.digest, earlier, bytes_max)

    def _encode(self, batch: Batch) -> EncodedBatch:
        if self._closed or self._runtime.process_id() != self._home_process:
            self._check()
        if not isinstance(batch, Batch):
            raise InvalidInputError(
                f"write() takes a Batch, got {type(batch).__name__}",
                hint='For instance reef.Batch().put("a", b"1").delete("b")',
            )
        schema, bytes_max = self._committer.tail.schema, self._settings.batch_bytes_max
        now_ms = int(self._runtime.wall_s() * 1000)
        try:
            return encode_batch(batch, schema, bytes_max, now_ms)
        except InvalidInputError as error:
            # The schema may have grown since; if not, the error is raised.
            if "column" in error.context:
                with suppress(UnavailableError):
                    self._committer.rebase()
            if self._committer.tail.schema.id == schema.id:
                raise
            return encode_batch(batch, self._committer.tail.schema, bytes_max, now_ms)

    def _commit(
        self,
        encoded: EncodedBatch,
        key: str | None,
        decide: Callable[[], None] | None,
        record: list[Any] | None,
        patched: PatchedKeys | None,
        *,
        wait: bool,
    ) -> Any:
        digest = None
        if key is not None:
            check_idempotency_key(key)
            digest = encoded.digest()
        future = None if wait else new_future(self._runtime)
        pending = Pending(
            encoded.ops,
            encoded.record,
            BatchHeader(len(encoded.ops), key, digest, record, encoded.merges),
            self._runtime.monotonic_s(),
            decide,
            encoded.schema_id,
            patched=patched,
            future=future,
        )
        self._committer.submit(pending)
        if future is not None:
            self._committer.drive_in_background(self)
            return future
        self._committer.drive(pending)
        result = pending.result
        return result if isinstance(result, Receipt) else pending.outcome()

    def _commit_transaction(self, batch: EncodedBatch, transaction: Transaction) -> Receipt:
        self._check()
        decide = transaction._check_conflicts if transaction._has_read else None
        key = transaction.idempotency_key
        patched = self._find_patched(batch, key) if transaction._has_patches else None
        receipt: Receipt = self._commit(batch, key, decide, None, patched, wait=True)
        return receipt

    def _begin_transaction(self) -> int:
        self._committer.tail.watch(self._footprints)
        return self._footprints.begin()

    def _find_patched(self, batch: EncodedBatch, idempotency_key: str | None) -> PatchedKeys | None:
        """Look up the rows that a batch patches; None if they are too many, or cannot be read."""
        keys, tail = patched_keys(batch.ops), self._committer.tail
        is_repeat = idempotency_key is not None and tail.dedup.get(idempotency_key) is not None
        if keys is None or is_repeat:
            return None
        lsn = tail.view().last_lsn
        with suppress(UnavailableError):
            rows = self._read(lambda view: look_up(view, keys, self._now_ms(), self._runtime, ()))
            return PatchedKeys(frozenset(keys), frozenset(rows.keys.to_pylist()), lsn)
        return None

    def _decide(self, conditions: Sequence[Condition]) -> None:
        """Evaluate conditions on the durable state; called when nothing is in flight (H20)."""
        try:
            self._evaluate(conditions)
        except NotFoundError:  # swept meanwhile: read again from the newest manifest
            self._committer.refresh()
            self._evaluate(conditions)

    def _evaluate(self, conditions: Sequence[Condition]) -> None:
        view = self._committer.tail.view()
        rows = view.get_each([condition.key for condition in conditions], self._now_ms())
        for condition, row in zip(conditions, rows, strict=True):
            if not condition._holds(row, view.manifest.schema):
                raise condition._error()

    def _view(self) -> View:
        self._check()
        if self._committer._end is not None:
            self._check_fenced()
        return self._committer.tail.view()

    def _is_ready(self) -> bool:
        at_home = not self._closed and self._runtime.process_id() == self._home_process
        return at_home and (self._committer._end is None or self._settings.stale_reads)

    def _pieces(self, scan: Scan) -> Iterator[Versions]:
        return self._serve_pieces(super()._pieces(scan))

    def _serve_pieces(self, pieces: Iterator[Versions]) -> Iterator[Versions]:
        """Yield the pieces of a scan until this writer is fenced (H77)."""
        for rows in pieces:
            yield rows
            if self._committer._end is not None:
                self._check_fenced()

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation; an object that the head names is damage."""
        self._committer.rebase()
        view = self._view()
        if view.manifest.generation > generation:
            return view
        if self._committer._end is not None:  # an ended writer loads no newer manifest
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
        """Return the FencedError that ended this writer, if one did."""
        end = self._committer._end
        return end if isinstance(end, FencedError) else None

    def _check(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"the writer of {self.namespace} is closed", hint="Open a new one")


_OPEN_WRITERS: "weakref.WeakSet[Writer]" = weakref.WeakSet()
_UNCLOSED_ROLES: deque[UnclosedRole] = deque(maxlen=UNCLOSED_ROLES_MAX)


def end_at_exit(writer: Writer) -> None:
    """Flush a writer that is not closed when the interpreter exits, and release its role (H78)."""
    if writer._runtime is not REAL:
        return
    if not _OPEN_WRITERS:
        atexit.unregister(_end_open_writers)
        atexit.register(_end_open_writers)
    _OPEN_WRITERS.add(writer)
    if not writer._committer.store.url.startswith("memory:"):  # that bucket ends with the process
        note_unclosed(writer, _UNCLOSED_ROLES)


def note_unclosed(writer: Writer, roles: deque[UnclosedRole]) -> None:
    """Append the role of a writer when it is garbage-collected, unless it was closed or fenced.

    Nothing is queued then: a queue keeps its writer alive. The garbage collector calls the
    finalizer in whatever thread, so it takes no lock.
    """
    if writer._runtime is REAL:
        role, is_idle = writer._unclosed_role(), writer._is_idle()
        home = writer._home_process
        weakref.finalize(writer, _note_collected, role, is_idle, home, roles).atexit = False


def _note_collected(
    role: UnclosedRole, is_idle: Callable[[], bool], home: int, roles: deque[UnclosedRole]
) -> None:
    if REAL.process_id() == home and is_idle():
        roles.append(role)


def release_unclosed(roles: deque[UnclosedRole]) -> None:
    """Release the roles of writers that were collected without a close."""
    latest: dict[tuple[str, str], UnclosedRole] = {}
    while roles:
        role = roles.popleft()
        latest[role.store.url, role.namespace.base] = role
    for role in latest.values():
        role.release()


def _end_open_writers() -> None:
    """Flush queued batches, within EXIT_FLUSH_S, and release roles, within EXIT_RELEASE_S."""
    deadline = REAL.deadline(EXIT_FLUSH_S)
    for writer in list(_OPEN_WRITERS):
        if REAL.process_id() != writer._home_process or writer._closed:
            continue
        if writer._has_queued():
            _flush_with_warning(writer, deadline.remaining_s())
        store = writer._committer.store
        if writer._is_idle()() and not store.url.startswith("memory:"):
            _UNCLOSED_ROLES.append(writer._unclosed_role())
    if _UNCLOSED_ROLES:
        release = partial(release_unclosed, _UNCLOSED_ROLES)
        REAL.spawn(release, name="exit-release").join(EXIT_RELEASE_S)


def _flush_with_warning(writer: Writer, timeout_s: float) -> None:
    """Flush queued batches, and warn: the program should have closed the writer."""
    warnings.warn(
        f"{writer!r} has queued writes at interpreter exit; call close() or flush()",
        ResourceWarning,
        stacklevel=1,
    )
    why = writer._flush_queued(timeout_s)
    if why is not None:
        sys.stderr.write(f"reef: queued writes to {writer.namespace} were lost at exit: {why}\n")


def _deletes(keys: list[Any], batch: Batch) -> Batch:
    for key in keys:
        batch.delete(key)
    return batch
