"""Copy segments between two stores. The same task runs in threads and on Spark.

A segment is read in pieces of some megabytes and sent as it is read. Its checksum is compared
before the last piece is sent, so that nothing arrives of a segment that is damaged. An object that
a listing shows with the right size, under the name of its segment, is not sent or read again.

A task may run twice, at the same time, after the loss of an executor or by speculation: both write
the same bytes under the same name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from reef.errors import CorruptionError, InvalidInputError, NotFoundError
from reef.formats.coding import corrupt, crc32c_extend
from reef.formats.manifest import SegmentEntry
from reef.runtime import Executor
from reef.stores import Meter, Store
from reef.stores.base import reread_if_damaged
from reef.telemetry import RequestMeter

PIECE_BYTES = 8 << 20
TASK_BYTES = 32 << 20
"""Small segments share a task."""
TASKS_AT_ONCE = 8
"""Each holds a piece, and the bytes of an upload that are not sent yet."""

Counts = dict[str, dict[str, int]]
"""Requests and bytes by kind."""


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One object to copy."""

    source: str
    target: str
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Some objects to copy, one after the other."""

    source: Store
    target: Store
    items: tuple[CopyItem, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """The requests of a task, wherever it ran."""

    source: Counts
    target: Counts


def run_copy_task(task: CopyTask) -> Copied:
    """Copy the objects of a task; CorruptionError if one of them is damaged or missing."""
    source, target = Meter(task.source), Meter(task.target)
    for item in task.items:
        reread_if_damaged(lambda item=item: _copy(source, target, item))  # type: ignore[misc]
    return Copied(source.meter.to_dict(), target.meter.to_dict())


def _copy(source: Store, target: Store, item: CopyItem) -> None:
    try:
        target.upload(item.target, _checked_pieces(source, item))
    except NotFoundError as error:
        if error.context.get("object", item.source) != item.source:
            raise
        raise CorruptionError(
            f"object {item.source} is missing", object=item.source, offset=0
        ) from error


def _checked_pieces(source: Store, item: CopyItem) -> Iterator[bytes]:
    """Yield an object; raise before its last piece if the checksum does not match."""
    checksum = 0
    for start in range(0, item.size, PIECE_BYTES):
        end = min(start + PIECE_BYTES, item.size)
        try:
            data = source.get_range(item.source, start, end)
        except InvalidInputError as error:
            raise corrupt(item.source, start, f"shorter than {item.size} bytes") from error
        checksum = crc32c_extend(checksum, data)
        if end == item.size and checksum != item.checksum:
            found, expected = f"{checksum:08x}", f"{item.checksum:08x}"
            raise corrupt(item.source, 0, f"the checksum is {found}, expected {expected}")
        yield data


@dataclass(slots=True)
class Tally:
    """Objects that a job has copied, and its requests at both stores."""

    segments_sent: int = 0
    segments_reused: int = 0
    bytes_sent: int = 0
    log_objects: int = 0
    pieces: int = 0
    source: RequestMeter = field(default_factory=RequestMeter)
    target: RequestMeter = field(default_factory=RequestMeter)

    def add(self, done: Copied) -> None:
        """Add the requests of a task."""
        for meter, counts in ((self.source, done.source), (self.target, done.target)):
            for kind in meter.counts():
                count = counts.get(kind.value, {})
                if count:
                    meter.count(kind, requests=count["requests"], bytes=count["bytes"])

    def requests(self) -> dict[str, Counts]:
        """Return requests and bytes by store and kind, without kinds that were not used."""
        return {"source": _used(self.source), "target": _used(self.target)}


def _used(meter: RequestMeter) -> Counts:
    return {kind: count for kind, count in meter.to_dict().items() if count["requests"]}


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies segments from one store to another, unless they are there."""

    source: Store
    target: Store
    executor: Executor
    at_once: int
    """Tasks that run at the same time; 0 for all of them."""
    tally: Tally
    check: Callable[[], None] = lambda: None
    """Raises if the objects are not pinned any more."""

    def copy(
        self,
        entries: Iterable[SegmentEntry],
        there: dict[str, int],
        keys: Callable[[SegmentEntry], tuple[str, str]],
    ) -> None:
        """Copy segments, except those that are there already; `keys` returns source and target."""
        needed = {entry.id: entry for entry in entries}
        wanted = [entry for entry in needed.values() if there.get(entry.id) != entry.size]
        items = [CopyItem(*keys(entry), entry.size, entry.checksum) for entry in wanted]
        self.tally.segments_reused += len(needed) - len(wanted)
        tasks = [CopyTask(self.source, self.target, group) for group in _groups(items)]
        step = self.at_once or max(1, len(tasks))
        for at in range(0, len(tasks), step):
            self.check()
            for done in self.executor.map(run_copy_task, tasks[at : at + step]):
                self.tally.add(done)
        self.tally.segments_sent += len(wanted)
        self.tally.bytes_sent += sum(item.size for item in items)
        there |= {entry.id: entry.size for entry in wanted}


def _groups(items: Sequence[CopyItem]) -> Iterator[tuple[CopyItem, ...]]:
    """Cut objects into tasks of about TASK_BYTES."""
    group: list[CopyItem] = []
    size = 0
    for item in items:
        if group and size + item.size > TASK_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(item)
        size += item.size
    if group:
        yield tuple(group)
