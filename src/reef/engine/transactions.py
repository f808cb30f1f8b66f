"""Transactions: reads and writes that take effect as if nothing else had happened meanwhile.

Optimistic: reads go to what is committed now and are remembered, keys and asked ranges alike;
writes are staged in a memtable of the transaction's own, which its reads see on top of the rest.
At the end everything goes out as one batch, which commits only if nothing that was read has been
written since (H41). The loser gets ConflictError. A read that meets something newer than the
transaction's beginning gives it at once, so that no transaction works on two moments mixed.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import pyarrow as pa

from reef.engine.batch import Batch, EncodedBatch, encode_key, encode_keys, encoded
from reef.engine.footprints import Footprints, Reads
from reef.engine.readable import Readable
from reef.engine.reading.memtable import Memtable
from reef.engine.reading.projection import Projection
from reef.engine.reading.row_cache import RowCache
from reef.engine.reading.view import View
from reef.errors import ClosedError, ConflictError, InvalidInputError, Kind, NotFoundError
from reef.formats.batch import AnyOps, OpKind
from reef.formats.versions import Versions
from reef.types import KeyRange, Receipt

__all__ = ["Transaction"]

STAGED_LSN = 1 << 62
"""Above every LSN of a log: what is staged is newer than all that is committed."""


class Transaction(Readable):
    """Commits when its block ends without an exception. For one thread at a time."""

    receipt: Receipt | None = None
    """Where it was committed; None before, and for one that has written nothing."""

    def __init__(
        self,
        base: Readable,
        footprints: Footprints,
        number: int,
        commit: "Callable[[EncodedBatch, Transaction], Receipt]",
        *,
        reads_max: int,
        bytes_max: int,
    ) -> None:
        self.namespace = base.namespace
        self._runtime, self._metrics = base._runtime, base._metrics
        self._row_cache = RowCache(0)  # its own writes are on top: nothing can be kept
        self._base = base
        self._footprints = footprints
        self._number = number
        self._commit = commit
        self._reads_max, self._bytes_max = reads_max, bytes_max
        self._reads = Reads()
        self._ops: list[AnyOps] = []
        """What was staged, as it was at that moment: this is what commits."""
        self._staged = Memtable(base._view().manifest.schema, STAGED_LSN)
        self._next_lsn = STAGED_LSN
        self._done = False
        # One that is just dropped must not hold footprints for the writer's whole life.
        weakref.finalize(self, footprints.drop, number).atexit = False

    # --- reads --------------------------------------------------------------------
    def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return a key's value or row, with what this transaction has written."""
        encoded = encode_key(key)
        if not self._settles(encoded):
            self._reads.keys.add(encoded)
        row = super().get(encoded, columns)
        self._check_reads()
        return row

    def get_many(
        self, keys: Iterable[bytes | str], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return one row per key, in the order asked; `_found` tells which keys have one."""
        asked = encode_keys(keys)
        self._reads.keys.update(asked)
        table = super().get_many(asked, columns)
        self._check_reads()
        return table

    def _pieces(
        self, view: View, wanted: KeyRange, projection: Projection, reverse: bool
    ) -> Iterator[Versions]:
        """Yield what a scan yields. The whole range counts as read, with what is not there."""
        self._reads.ranges.append(wanted)
        for rows in super()._pieces(view, wanted, projection, reverse):
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
        """Set whole rows, in any form that a writer takes."""
        self._stage(lambda batch: batch.upsert(rows, ttl_s=ttl_s))

    def patch(self, rows: Any) -> None:
        """Set only the named columns, of rows that are there."""
        self._stage(lambda batch: batch.patch(rows))

    def delete(self, key: bytes | str) -> None:
        self._stage(lambda batch: batch.delete(key))

    def delete_range(self, start: bytes | str, end: bytes | str) -> None:
        """Delete all keys of [start, end)."""
        self._stage(lambda batch: batch.delete_range(start, end))

    # --- the end ------------------------------------------------------------------
    def commit(self) -> Receipt | None:
        """Commit now, instead of at the end of the block."""
        self._check_open()
        self._done = True
        try:
            if self._ops:
                schema = self._staged.schema
                self.receipt = self._commit(encoded(self._ops, schema, self._bytes_max), self)
            return self.receipt
        finally:
            self._footprints.end(self._number)

    def rollback(self) -> None:
        """Forget everything that was staged."""
        if not self._done:
            self._done = True
            self._footprints.end(self._number)

    def check(self) -> None:
        """Raise ConflictError if something that was read has been written since."""
        why = self._footprints.conflict(self._number, self._reads)
        if why is not None:
            raise ConflictError(
                f"a transaction on {self.namespace} has lost: {why}",
                hint="Run it again from its beginning",
                namespace=self.namespace,
            )

    @property
    def has_read(self) -> bool:
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
            kind=Kind.NOT_PICKLABLE,
            hint="It belongs to its writer: commit it here",
        )

    def __repr__(self) -> str:
        over = f"committed at LSN {self.receipt.lsn}" if self.receipt else "over"
        state = over if self._done else "open"
        return f"<Transaction on {self.namespace}, {state}, {sum(map(len, self._ops))} operations>"

    # --- inside -------------------------------------------------------------------
    def _view(self) -> View:
        self._check_open()
        base = self._base._view()
        if base.manifest.schema.id != self._staged.schema.id:
            raise ConflictError(
                f"a transaction on {self.namespace} has lost: the columns were changed since",
                hint="Run it again from its beginning",
                namespace=self.namespace,
            )
        return View(base.manifest, base.segments, base.memtable, self._staged)

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        base = self._base._replan(generation, missing)
        return View(base.manifest, base.segments, base.memtable, self._staged)

    def _settles(self, key: bytes) -> bool:
        """Whether what is staged alone tells what a key is."""
        return any(entry.kind != OpKind.PATCH for entry in self._staged.chain(key).entries)

    def _stage(self, add: Callable[[Batch], Batch]) -> None:
        """Check an operation against the schema, and keep it for the end and for own reads."""
        self._check_open()
        one = add(Batch()).encode(self._staged.schema, self._bytes_max, self._now_ms())
        self._ops.append(one.ops)
        self._staged.apply(self._next_lsn, [one.ops])
        self._next_lsn += 1
        if self._staged.size > 2 * self._bytes_max:
            raise InvalidInputError(
                f"a transaction of more than {self._bytes_max} bytes",
                hint="Split it, raise batch_bytes_max, or load it with a bulk job",
            )

    def _check_reads(self) -> None:
        if len(self._reads) > self._reads_max:
            raise InvalidInputError(
                f"a transaction that reads more than {self._reads_max} keys and ranges",
                hint="Read ranges instead of keys, or raise transaction_reads_max",
            )
        self.check()

    def _check_open(self) -> None:
        if self._done:
            raise ClosedError(
                f"the transaction on {self.namespace} is over", hint="Begin another one"
            )
