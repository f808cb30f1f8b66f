"""Receipts of batches that are on a local disk first.

Such a receipt is given after the local sync. It has no LSN until the batch was uploaded; then it
is filled in, and `wait` returns. By then it is a receipt like any other.
"""

from collections.abc import Callable
from typing import Any

from reef.formats.streams import StreamPoint
from reef.types import Receipt

__all__ = ["LocalReceipt"]


class LocalReceipt(Receipt):
    """Where a batch stands: in the local log at once, in the bucket's log after its upload."""

    __slots__ = ("_wait", "local_index", "point", "stream")

    local_index: int
    """The batch's place in the local log."""
    point: StreamPoint
    """Which entry that is: copies of the log may have others at the same place."""
    stream: str
    """Which local log that is."""
    _wait: Callable[[int, float | None], None]

    def __init__(
        self,
        receipt: Receipt,
        stream: str,
        point: StreamPoint,
        wait: Callable[[int, float | None], None],
    ) -> None:
        super().__init__(*_fields(receipt))
        object.__setattr__(self, "stream", stream)
        object.__setattr__(self, "local_index", point.index)
        object.__setattr__(self, "point", point)
        object.__setattr__(self, "_wait", wait)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the LSN when the batch is in the bucket.

        UnavailableError if that takes longer; FencedError if another writer was first.
        """
        if self.lsn is None:
            self._wait(self.local_index, timeout_s)
        lsn = self.lsn
        return lsn if lsn is not None else 0

    def fill(self, uploaded: Receipt) -> None:
        """Take over where in the bucket's log the batch stands now; once, by the uploader."""
        for name in ("index", "epoch", "write_id", "lsn"):  # the LSN last: it says that all is here
            object.__setattr__(self, name, getattr(uploaded, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LocalReceipt):
            return NotImplemented
        return (self.stream, self.local_index) == (other.stream, other.local_index)

    def __hash__(self) -> int:
        return hash((self.stream, self.local_index))

    def __reduce__(self) -> tuple[Any, ...]:
        return Receipt, _fields(self)  # elsewhere there is nobody to fill it


def _fields(receipt: Receipt) -> tuple[Any, ...]:
    return (
        receipt.namespace,
        receipt.lsn,
        receipt.index,
        receipt.epoch,
        receipt.write_id,
        receipt.ops,
        receipt.replayed,
        receipt.idempotency_key,
    )
