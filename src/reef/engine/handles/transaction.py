"""Serializable transactions by optimistic concurrency control.

Reads go to the committed state and are recorded: keys, and requested ranges. Writes are staged in a
memtable of the transaction, which its reads see on top. At the end all writes go out as one batch,
which commits only if nothing that was read has been written since (H41); otherwise the transaction
raises ConflictError. A read that meets a version newer than the transaction's start raises at once,
so that no transaction computes on a mix of two states.

Conflicts are found with footprints. While a transaction is open, every applied object leaves a
write set: its keys, its deleted ranges, and for an ingest the key ranges of its segments. A
transaction conflicts if a write set that was applied since its start overlaps its reads; ranges
include keys that had no row, so phantoms conflict too (H41).

Write sets are ordered by application, not by LSN, since independent objects may be applied early.
They are kept while an open transaction needs them, up to a bound in bytes; a transaction older
than that must be restarted.

**Conditions** are predicates on single keys that must hold for a batch to commit:

    writer.write(batch, when=[reef.absent("a"), reef.equals("c", "state", "open")])

They are evaluated once, when everything before the batch is durable, and again only if another
object won the batch's slot (H20, H46). The log keeps a record of them for audits; replay never
evaluates them again.

A new kind is a function that makes it and a case in `Condition._holds`.
"""

import hashlib
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, NoReturn, Self

import pyarrow as pa

from reef.engine.handles.readable import Readable
from reef.engine.read.caches import RowCache
from reef.engine.read.memtable import Entry, Memtable
from reef.engine.read.view import Scan, View
from reef.engine.rows.batch import (
    Batch,
    EncodedBatch,
    encode_batch,
    encode_key,
    encode_keys,
    encode_parts,
)
from reef.engine.rows.convert import to_python
from reef.engine.rows.input import fit_column
from reef.engine.rows.merges import Operand
from reef.errors import (
    ClosedError,
    ConditionFailedError,
    ConflictError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
)
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import AnyOps, OneOp, OpKind
from reef.runtime import leaf_lock
from reef.types import KeyRange, Receipt

KINDS = ("absent", "present", "equals")


@dataclass(frozen=True, slots=True)
class Condition:
    """A predicate on one key, made by a function of `KINDS`."""

    key: bytes
    kind: str
    """The name of the function that made it."""
    column: str | None = None
    """The column that is compared with `value`; None if the kind compares none."""
    value: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInputError(
                f"expected a kind of condition ({', '.join(KINDS)}), found {self.kind!r}"
            )

    def _typed(self, schema: Schema) -> "Condition":
        """Return the condition with its value in the column's type; reject one that cannot hold."""
        if self.column is None:
            return self
        field = next((f for f in schema.fields if f.name == self.column), None)
        if field is None:
            known = ", ".join(f.name for f in schema.fields)
            raise InvalidInputError(
                f"a condition names the unknown column {self.column!r}; the columns are {known}"
            )
        # As strict as a write: a value that the column cannot hold equals none of its values.
        try:
            value = to_python(fit_column([self.value], field)[0])
        except InvalidInputError as error:
            raise InvalidInputError(
                f"a condition on column {self.column}: {self.value!r} is not of type {field.type}",
                column=self.column,
            ) from error
        return Condition(self.key, self.kind, self.column, value)

    def _holds(self, row: Entry | None, schema: Schema) -> bool:
        """Return whether the condition holds for the key's row; None means no row."""
        if self.kind == "absent":
            return row is None
        if row is None:
            return False
        if self.kind == "present":
            return True
        number = next(f.number for f in schema.fields if f.name == self.column)
        return _same(row.values.get(number), self.value)  # equals

    def _error(self) -> ConditionFailedError:
        return ConditionFailedError(
            f"the condition {self} does not hold", hint="Read the row again before you retry"
        )

    def _record(self) -> list[Any]:
        """Return the condition as the log stores it."""
        return [self.kind, self.key, self.column, _plain(self.value)]

    def __str__(self) -> str:
        rest = "" if self.column is None else f", {self.column!r}, {self.value!r}"
        return f"{self.kind}({self.key!r}{rest})"


def absent(key: bytes | str) -> Condition:
    """Require that the key has no row."""
    return Condition(encode_key(key), "absent")


def present(key: bytes | str) -> Condition:
    """Require that the key has a row."""
    return Condition(encode_key(key), "present")


def equals(key: bytes | str, column: str, value: Any) -> Condition:
    """Require that the key has a row whose column equals `value`; None means null."""
    return Condition(encode_key(key), "equals", column, value)


def _same(one: Any, other: Any) -> bool:
    """Compare two values; NaN equals NaN, so that a row that was just read equals itself."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    is_nan = isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other)
    return bool(one == other) or is_nan


def checked(when: Any, schema: Schema) -> list[Condition]:
    """Check `when=` against a schema; InvalidInputError if it is not a list of conditions."""
    given = [when] if isinstance(when, Condition) else when
    if given is not None and not isinstance(given, list | tuple):
        raise InvalidInputError(f"when must be a list of conditions, got {type(when).__name__}")
    for condition in given or ():
        if not isinstance(condition, Condition):
            raise InvalidInputError(
                f"when must hold conditions, such as reef.absent(key), got {condition!r}"
            )
    return [condition._typed(schema) for condition in given or ()]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)


KEY_BYTES = 60
"""Estimated overhead of a key in a write set, without its own bytes."""


@dataclass(slots=True)
class Reads:
    """The keys and ranges that a transaction has read."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[KeyRange] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys) + len(self.ranges)


@dataclass(frozen=True, slots=True)
class WriteSet:
    """The keys and ranges that one commit has written."""

    keys: frozenset[bytes]
    ordered: Sequence[bytes]
    ranges: tuple[KeyRange, ...]
    bytes: int

    def touches(self, reads: Reads) -> bool:
        """Return whether a key that was read has been written."""
        return (
            not reads.keys.isdisjoint(self.keys)
            or any(self._has_key_in(read) for read in reads.ranges)
            or any(_overlaps_reads(written, reads) for written in self.ranges)
        )

    def _has_key_in(self, read: KeyRange) -> bool:
        position = bisect_left(self.ordered, read.start)
        if position == len(self.ordered):
            return False
        return read.end is None or self.ordered[position] < read.end


class Footprints:
    """The write sets of one writer since the start of its oldest open transaction."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = leaf_lock()
        self._kept: deque[WriteSet] = deque()
        self._first = 0
        """The number of the oldest write set that is kept."""
        self._bytes = 0
        self._open: dict[int, int] = {}
        """For each open transaction, the number of the first write set after its start."""
        self._next_transaction = 0
        self._dropped: deque[int] = deque()

    def begin(self) -> int:
        """Register an open transaction; return its number."""
        with self._lock:
            self._next_transaction += 1
            self._open[self._next_transaction] = self._first + len(self._kept)
            return self._next_transaction

    def end(self, transaction: int) -> None:
        with self._lock:
            self._open.pop(transaction, None)
            self._forget()

    def drop(self, transaction: int) -> None:
        """Note that a transaction was garbage-collected.

        Called by a finalizer, possibly while this thread holds the lock, so it takes none.
        """
        self._dropped.append(transaction)

    def conflict(self, transaction: int, reads: Reads) -> str | None:
        """Return why a transaction cannot commit; None if it can."""
        with self._lock:
            since = self._open.get(transaction, -1)  # nothing is kept for one that has ended
            if since < self._first:
                return "it was open for too long: its start is older than the footprints in memory"
            new = list(self._kept)[since - self._first :]
        if any(footprint.touches(reads) for footprint in new):
            return "a row that it read was written meanwhile"
        return None

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None:
        """Record a write set before it is applied; for an ingest, the key ranges of segments."""
        if self._dropped:
            self._end_dropped()
        if self._open and batches:
            self._keep(write_set_of(batches))
        if self._open and segments:
            ranges = tuple(KeyRange(s.min_key, s.max_key + b"\0") for s in segments)
            self._keep(WriteSet(frozenset(), (), ranges, KEY_BYTES * len(ranges)))

    def applied(self) -> None:
        """Do nothing: `applying` has recorded the write set before it was visible."""

    def lost_track(self) -> None:
        """Invalidate all open transactions: objects were applied whose keys are unknown."""
        with self._lock:
            self._first += len(self._kept) + 1
            self._kept.clear()
            self._bytes = 0

    def _keep(self, footprint: WriteSet) -> None:
        with self._lock:
            self._kept.append(footprint)
            self._bytes += footprint.bytes
            while self._bytes > self._bytes_max:
                self._drop_oldest()

    def _end_dropped(self) -> None:
        with self._lock:
            while self._dropped:
                self._open.pop(self._dropped.popleft(), None)
            self._forget()

    def _forget(self) -> None:
        needed = min(self._open.values(), default=self._first + len(self._kept))
        while self._kept and self._first < needed:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= self._kept.popleft().bytes
        self._first += 1


def write_set_of(batches: Sequence[AnyOps]) -> WriteSet:
    """Return the keys and ranges that some batches write."""
    keys: set[bytes] = set()
    ranges: list[KeyRange] = []
    for ops in batches:
        listed = ops.key_list()
        if isinstance(ops, OneOp) or ops.end_keys is None:
            keys.update(listed)
            continue
        for kind, key, end in zip(
            ops.kinds.to_pylist(), listed, ops.end_keys.to_pylist(), strict=True
        ):
            if kind == OpKind.DELETE_RANGE:
                ranges.append(KeyRange(key, end))
            else:
                keys.add(key)
    size = sum(map(len, keys)) + KEY_BYTES * (len(keys) + len(ranges))
    return WriteSet(frozenset(keys), sorted(keys), tuple(ranges), size)


def _overlaps_reads(written: KeyRange, reads: Reads) -> bool:
    return any(written.has(key) for key in reads.keys) or any(
        written.overlaps(read) for read in reads.ranges
    )


STAGED_LSN = 1 << 62
"""Above every LSN of a log: staged operations are newer than all committed ones."""


class Transaction(Readable):
    """Commits when its block ends without an exception. For one thread at a time."""

    receipt: Receipt | None = None
    """The receipt of the commit; None before it, and for a transaction without writes.

    With an idempotency key that was committed before, it is set from the start, and `replayed`: the
    block has nothing left to do."""

    def __init__(
        self,
        base: Readable,
        footprints: Footprints,
        number: int,
        commit: "Callable[[EncodedBatch, Transaction], Receipt]",
        *,
        reads_max: int,
        bytes_max: int,
        idempotency_key: str | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        self.namespace = base.namespace
        self.idempotency_key = idempotency_key
        self.receipt = receipt
        self._runtime, self._metrics = base._runtime, base._metrics
        self._row_cache = RowCache(0)  # rows with staged writes on top are not cached
        self._base = base
        self._footprints = footprints
        self._number = number
        self._commit = commit
        self._reads_max, self._bytes_max = reads_max, bytes_max
        self._reads = Reads()
        self._ops: list[AnyOps] = []
        """The staged operations, encoded when they were staged: these are committed."""
        self._digest = hashlib.blake2b(digest_size=12)
        """Digest of the staged records, with relative expiry times: the same for every retry."""
        self._staged = Memtable(base._view().manifest.schema, STAGED_LSN)
        self._next_lsn = STAGED_LSN
        self._done = False
        self._has_patches = False
        """Whether it has patches of rows that may be missing."""
        # A transaction that is neither committed nor rolled back must not hold write sets.
        weakref.finalize(self, footprints.drop, number).atexit = False

    # --- reads --------------------------------------------------------------------
    def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return the value or row of a key, including this transaction's own writes."""
        encoded = encode_key(key)
        if not self._is_staged_whole(encoded):
            self._reads.keys.add(encoded)
        row = super().get(encoded, columns)
        self._check_reads()
        return row

    def get_many(
        self, keys: Iterable[bytes | str], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return one row per key, in the given order; `_found` is false for keys without a row."""
        encoded = encode_keys(keys)
        self._reads.keys.update(encoded)
        table = super().get_many(encoded, columns)
        self._check_reads()
        return table

    _counts_by_index = False

    def _pieces(self, scan: Scan) -> Iterator[Versions]:
        """Yield the pieces of a scan. The whole range counts as read, including absent keys."""
        self._reads.ranges.append(scan.key_range)
        for rows in super()._pieces(scan):
            self._check_open()
            self._check_reads()
            yield rows
            self._base._view()  # a writer that was fenced meanwhile cannot be read (H77)
        self._check_open()
        self._check_reads()

    # --- writes -------------------------------------------------------------------
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
    ) -> None:
        """Set a key to bytes, or in a namespace with columns to a row."""
        self._stage(lambda batch: batch.put(key, value, ttl_s=ttl_s))

    def upsert(self, rows: Any, *, ttl_s: float | None = None) -> None:
        """Set whole rows, in any form that `Writer.upsert` accepts."""
        self._stage(lambda batch: batch.upsert(rows, ttl_s=ttl_s))

    def patch(self, rows: Any) -> None:
        """Set only the named columns of rows that exist."""
        self._has_patches = True
        self._stage(lambda batch: batch.patch(rows))

    def merge(
        self, key: bytes | str, columns: Mapping[str, Operand], *, ttl_s: float | None = None
    ) -> None:
        """Apply operators to columns. Reads nothing, so it conflicts with no other merge."""
        self._stage(lambda batch: batch.merge(key, columns, ttl_s=ttl_s))

    def merge_rows(
        self, rows: Any, operators: Mapping[str, str], *, ttl_s: float | None = None
    ) -> None:
        """Merge rows in any form, with one operator for each column."""
        self._stage(lambda batch: batch.merge_rows(rows, operators, ttl_s=ttl_s))

    def delete(self, key: bytes | str) -> None:
        """Delete the row of a key, if it has one."""
        self._stage(lambda batch: batch.delete(key))

    def delete_range(self, start: bytes | str, end: bytes | str) -> None:
        """Delete all keys of [start, end)."""
        self._stage(lambda batch: batch.delete_range(start, end))

    # --- the end ------------------------------------------------------------------
    def commit(self) -> Receipt | None:
        """Commit now instead of at the end of the block."""
        self._check_open()
        self._done = True
        try:
            if self._ops:
                schema = self._staged.schema
                batch = encode_parts(self._ops, schema, self._bytes_max)
                batch = replace(batch, relative_record=self._digest.digest)
                self.receipt = self._commit(batch, self)
            return self.receipt
        finally:
            self._footprints.end(self._number)

    def rollback(self) -> None:
        """Discard all staged writes."""
        if not self._done:
            self._done = True
            self._footprints.end(self._number)

    def _check_conflicts(self) -> None:
        """Raise ConflictError if something that was read has been written since."""
        why = self._footprints.conflict(self._number, self._reads)
        if why is not None:
            raise ConflictError(
                f"a transaction on {self.namespace} has a conflict: {why}",
                hint="Run it again from its start",
                namespace=self.namespace,
            )

    @property
    def _has_read(self) -> bool:
        return len(self._reads) > 0

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and not self._done:
            self.commit()
        else:
            self.rollback()

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a Transaction cannot be pickled",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="It belongs to its writer: commit it here",
        )

    def __repr__(self) -> str:
        ended = f"committed at LSN {self.receipt.lsn}" if self.receipt else "ended"
        state = ended if self._done else "open"
        return f"<Transaction on {self.namespace}, {state}, {sum(map(len, self._ops))} operations>"

    # --- inside -------------------------------------------------------------------
    def _view(self) -> View:
        self._check_open()
        base = self._base._view()
        if base.manifest.schema.id != self._staged.schema.id:
            raise ConflictError(
                f"a transaction on {self.namespace} has a conflict: the schema has changed",
                hint="Run it again from its start",
                namespace=self.namespace,
            )
        return View(base.manifest, base.segments, base.memtable, self._staged)

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        base = self._base._replan(generation, missing)
        return View(base.manifest, base.segments, base.memtable, self._staged)

    def _is_staged_whole(self, key: bytes) -> bool:
        """Return whether the staged writes alone determine the row of a key."""
        return any(entry.is_whole for entry in self._staged.cut().versions(key))

    def _stage(self, add: Callable[[Batch], Batch]) -> None:
        """Encode an operation, and stage it for the commit and for this transaction's reads."""
        self._check_open()
        batch = add(Batch())
        one = encode_batch(batch, self._staged.schema, self._bytes_max, self._now_ms())
        self._ops.append(one.ops)
        self._digest.update(one.digest().encode())
        self._staged.apply(self._next_lsn, [one.ops])
        self._next_lsn += 1
        if self._staged.size > 2 * self._bytes_max:
            raise InvalidInputError(
                f"a transaction of more than batch_bytes_max={self._bytes_max} bytes",
                hint="Split it, raise batch_bytes_max, or use a bulk load",
            )

    def _check_reads(self) -> None:
        if len(self._reads) > self._reads_max:
            raise InvalidInputError(
                f"a transaction with more than transaction_reads_max={self._reads_max} reads",
                hint="Read ranges instead of keys, or raise transaction_reads_max",
            )
        self._check_conflicts()

    def _check_open(self) -> None:
        if self._done:
            raise ClosedError(
                f"the transaction on {self.namespace} has ended", hint="Begin another one"
            )
