"""The backlog: batches that are not in the bucket yet, first in, first out.

    arriving   handed over, not on the local disk yet: nobody may see them
    waiting    on the local disk, acknowledged, not in the bucket yet

Both together are bounded, by what they take in memory. Keys of both are looked up before a batch is
let in, so that an idempotency key counts once from the moment it was handed over (H19).
"""

from collections import deque
from dataclasses import dataclass, field

from reef.engine.local.entries import LocalBatch
from reef.engine.local.receipts import LocalReceipt
from reef.errors import InvalidInputError, ReefError
from reef.formats.batch import AnyOps
from reef.formats.streams import Lineage, StreamPoint
from reef.runtime import Future, Stopwatch
from reef.types import Receipt

__all__ = ["Backlog", "Item", "Left"]

ITEM_BYTES = 1536
"""About what a batch takes in memory beside its bytes: its row, its receipts, its place here."""


@dataclass(eq=False, slots=True)
class Item:
    """A batch on its way: to the local disk, then to the bucket."""

    batch: LocalBatch
    ops: AnyOps
    queued: Stopwatch
    future: "Future[Receipt] | None" = None
    """Where nobody waits for it."""
    in_callback: bool = False
    """Whether it was written in the callback of another one."""
    index: int = 0
    """Its place in the local log, from the moment it is being written there."""
    points: Lineage = ()
    """Its entry in the local log; then those right behind it that are in the bucket already."""
    answer: LocalReceipt | ReefError | None = None
    receipts: list[LocalReceipt] = field(default_factory=list)
    """All that were given for it: one more for each repeat of its key."""

    @property
    def mark(self) -> int:
        """Up to which index all is in the bucket when this one is."""
        return self.points[-1].index

    def set_point(self, point: StreamPoint) -> None:
        """Note which entry it is."""
        self.index, self.points = point.index, (point,)

    def tell(self) -> None:
        """Set the future, if nobody waits, and forget it: a backlog may be long."""
        future, answer = self.future, self.answer
        if future is None or future.done() or answer is None:
            return
        self.future = None
        if isinstance(answer, ReefError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


@dataclass(frozen=True, slots=True)
class Left:
    """What is on this disk and not known to be in the bucket."""

    batches: int
    bytes: int
    first_index: int
    last_index: int


class Backlog:
    """Guarded by the front's lock."""

    def __init__(self, bytes_max: int) -> None:
        self.arriving: deque[Item] = deque()
        self.waiting: deque[Item] = deque()
        self.bytes = 0
        self._bytes_max = bytes_max
        self._keys: dict[str, Item] = {}

    @property
    def _held(self) -> int:
        """About what it takes in memory."""
        return self.bytes + ITEM_BYTES * (len(self.arriving) + len(self.waiting))

    def has_room(self, size: int) -> bool:
        """Whether one more fits in; an empty backlog takes any batch."""
        return not self.bytes or self._held + ITEM_BYTES + size <= self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to make room, however little was gathered."""
        return self._held > self._bytes_max // 2

    def find(self, item: Item) -> Item | None:
        """Return the batch with the same key, if there is one; refuses another body (H19)."""
        header = item.batch.header
        other = self._keys.get(header.key) if header.key is not None else None
        if other is not None and other.batch.header.digest != header.digest:
            raise InvalidInputError(
                f"idempotency key {header.key!r} is on its way with another batch",
                hint="A key stands for one batch; use a new one for a new batch",
                idempotency_key=header.key,
            )
        return other

    def add(self, item: Item) -> None:
        self.arriving.append(item)
        self._count(item)

    def restore(self, item: Item) -> None:
        """Take in a batch that an earlier life has left on the disk."""
        self.waiting.append(item)
        self._count(item)

    def _count(self, item: Item) -> None:
        self.bytes += item.batch.size
        if item.batch.header.key is not None:
            self._keys[item.batch.header.key] = item

    def next_sync(self, bytes_max: int) -> list[Item]:
        """Return what is written with the next sync; it stays here until it is."""
        return _first(self.arriving, bytes_max)

    def synced(self, group: list[Item]) -> None:
        for item in group:
            self.arriving.popleft()
            self.waiting.append(item)

    def next_upload(self, bytes_max: int) -> list[Item]:
        """Return what goes out next; it stays here until it is in the bucket."""
        return _first(self.waiting, bytes_max)

    def uploaded(self, item: Item) -> None:
        """Forget the first of those that wait: it is in the bucket."""
        if self.waiting.popleft() is not item:
            raise ValueError(f"batch {item.index} was uploaded out of order")
        self.bytes -= item.batch.size
        key = item.batch.header.key
        if key is not None and self._keys.get(key) is item:
            del self._keys[key]

    def refuse_arriving(self) -> list[Item]:
        """Give up what is not on the disk."""
        refused = list(self.arriving)
        self.arriving.clear()
        self.bytes -= sum(item.batch.size for item in refused)
        self._keys = {key: item for key, item in self._keys.items() if item not in refused}
        return refused

    def left(self) -> Left:
        """Return what waits for the bucket."""
        if not self.waiting:
            return Left(0, 0, 0, 0)
        size = sum(item.batch.size for item in self.waiting)
        return Left(len(self.waiting), size, self.waiting[0].index, self.waiting[-1].index)


def _first(items: "deque[Item]", bytes_max: int) -> list[Item]:
    taken: list[Item] = []
    size = 0
    for item in items:
        size += item.batch.size
        if taken and size > bytes_max:
            break
        taken.append(item)
    return taken
