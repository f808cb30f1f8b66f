"""Writing: the small calls, each of them a batch of its own.

Every one returns a receipt when the write is durable, or with `wait=False` a future of one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from reef.engine.batch import Batch
from reef.engine.conditions import Condition
from reef.runtime import Future
from reef.types import Receipt

__all__ = ["Options", "Writable"]


class Options(TypedDict, total=False):
    """How a batch is to be committed."""

    idempotency_key: str | None
    """The same key with the same batch is answered, and not applied again."""
    when: Sequence[Condition]
    """What must be true for it to commit; otherwise ConditionFailedError."""


class Writable(ABC):
    """What takes batches."""

    @overload
    def write(
        self, batch: Batch, *, wait: Literal[True] = True, **options: Unpack[Options]
    ) -> Receipt: ...
    @overload
    def write(
        self, batch: Batch, *, wait: Literal[False], **options: Unpack[Options]
    ) -> "Future[Receipt]": ...
    def write(self, batch: Batch, *, wait: bool = True, **options: Unpack[Options]) -> Any:
        """Commit a batch, all of it or nothing."""
        return self._write(batch, wait=wait, **options)

    @abstractmethod
    def _write(
        self,
        batch: Batch,
        *,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
        wait: bool = True,
    ) -> Any:
        """Return a receipt, or where nobody waits a future of one."""

    @overload
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[Options],
    ) -> Receipt: ...
    @overload
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[Options],
    ) -> "Future[Receipt]": ...
    def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        wait: Any = True,
        **options: Unpack[Options],
    ) -> Any:
        """Set a key to bytes, or in a namespace with columns to a row."""
        return self.write(Batch().put(key, value, ttl_s=ttl_s), wait=wait, **options)

    @overload
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: Literal[True] = True,
        **options: Unpack[Options],
    ) -> Receipt: ...
    @overload
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: Literal[False],
        **options: Unpack[Options],
    ) -> "Future[Receipt]": ...
    def upsert(
        self,
        rows: Any,
        *,
        ttl_s: float | None = None,
        wait: Any = True,
        **options: Unpack[Options],
    ) -> Any:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars.

        A key that comes twice has its last row; columns that are not named are null.
        """
        return self.write(Batch().upsert(rows, ttl_s=ttl_s), wait=wait, **options)

    @overload
    def patch(
        self, rows: Any, *, wait: Literal[True] = True, **options: Unpack[Options]
    ) -> Receipt: ...
    @overload
    def patch(
        self, rows: Any, *, wait: Literal[False], **options: Unpack[Options]
    ) -> "Future[Receipt]": ...
    def patch(self, rows: Any, *, wait: Any = True, **options: Unpack[Options]) -> Any:
        """Set only the named columns; a key that has no row stays without one."""
        return self.write(Batch().patch(rows), wait=wait, **options)

    @overload
    def delete(
        self, key: bytes | str, *, wait: Literal[True] = True, **options: Unpack[Options]
    ) -> Receipt: ...
    @overload
    def delete(
        self, key: bytes | str, *, wait: Literal[False], **options: Unpack[Options]
    ) -> "Future[Receipt]": ...
    def delete(self, key: bytes | str, *, wait: Any = True, **options: Unpack[Options]) -> Any:
        """Remove a key's row, if it has one."""
        return self.write(Batch().delete(key), wait=wait, **options)

    @overload
    def delete_range(
        self,
        start: bytes | str,
        end: bytes | str,
        *,
        wait: Literal[True] = True,
        **options: Unpack[Options],
    ) -> Receipt: ...
    @overload
    def delete_range(
        self,
        start: bytes | str,
        end: bytes | str,
        *,
        wait: Literal[False],
        **options: Unpack[Options],
    ) -> "Future[Receipt]": ...
    def delete_range(
        self, start: bytes | str, end: bytes | str, *, wait: Any = True, **options: Unpack[Options]
    ) -> Any:
        """Remove all rows of [start, end)."""
        return self.write(Batch().delete_range(start, end), wait=wait, **options)
