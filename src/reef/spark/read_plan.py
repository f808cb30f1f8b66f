"""Planning a read: the pinned snapshot, its lease, and the key range and groups of each task.

    block indexes        ├──┼──┼──┼──┼──┤   segment 1
                            ├────┼────┼────┼────┤   segment 2
    groups are dropped by key range, by conditions on the key, by column bounds
    cuts, by bytes       ├──────┼───────┼───────┤
    shares                  1       2       3       key ranges, in order, without overlap

A share carries the part of the block indexes that its task needs, so the task requests only the
blocks that it reads. If the indexes are too large to send, the task reads them itself.

A pin is taken while the DataFrame is created: find the generation, write the lease, read the head
again (protocols §6), then replay the log up to the last LSN. The rows of the log are sent with the
tasks, or replayed by each Python process up to the same LSN if they are too many.

A DataFrame has no end that Reef is notified of: the process that plans it is gone before the first
task runs. So its lease has a long time to live (`leaseSeconds`), and each task checks it and renews
it when a third has passed. It expires when no task has read for that long; a later read fails with
the kind `collected`. The store's clock decides whether it is valid (H30), it is renewed only in
place of the object that was read, and an expired one is released even if it still exists (H22). A
store without If-Match cannot renew: there a read must end within `leaseSeconds`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from pyspark.sql.datasource import InputPartition

from reef.engine.context import NamespaceContext
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime, ReadTarget
from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache
from reef.engine.read.memtable import Memtable, MemtableCut
from reef.engine.read.scan import Projection
from reef.engine.read.segments import SegmentStore
from reef.engine.where import Where
from reef.errors import ConflictError, UnavailableError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import SegmentTail
from reef.formats.segment_index import BLOCK_BYTES, KeyFilter
from reef.formats.versions import Versions
from reef.manifest.head import HeadFinder
from reef.manifest.roots import GenerationLease, narrowed, take_lease
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.leases import Lease, SharedLease
from reef.types import KeyRange

SHARES_MAX = 10_000
"""More tasks than this cost more than they give."""
GROUPS_SENT_MAX = 200_000
"""Most groups of all segments together: about 50 MB of index."""
ROWS_WEIGHED = 100
"""Rows in memory count together, so many at a time."""

Weight = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class SharePart:
    """The groups of one segment that a read needs, with their sizes."""

    entry: SegmentEntry
    tail: SegmentTail
    groups: npt.NDArray[np.int64]
    first_keys: Sequence[bytes]
    last_keys: Sequence[bytes]
    sizes: npt.NDArray[np.int64]

    def within(self, span: KeyRange) -> npt.NDArray[np.int64]:
        """Return the groups that may have keys of a range."""
        first = bisect_left(self.last_keys, span.start)
        end = span.end
        last = len(self.groups) if end is None else bisect_left(self.first_keys, end)
        return self.groups[first:last]


class Share(InputPartition):
    """One task's part of a read."""

    def __init__(
        self,
        span: KeyRange,
        manifest: Manifest,
        tails: dict[str, SegmentTail],
        memory: MemtableCut | None,
        planning: dict[str, int] | None = None,
    ) -> None:
        super().__init__(None)
        self.range = span
        self.manifest = manifest
        """Names only the segments that overlap the share."""
        self.tails = tails
        self.memory = memory
        self.planning = planning or {}
        """Request counts of planning; the first task reports them."""

    def __repr__(self) -> str:
        return f"Share({self.range}, {len(self.manifest.segments)} segments)"


def piece_of(
    entry: SegmentEntry,
    tail: SegmentTail,
    span: KeyRange,
    projection: Projection,
    needless: Iterable[int],
) -> SharePart:
    """Return the groups of a segment to read; `needless` ones are left out."""
    index = tail.index
    kept = np.zeros(len(index), bool)
    first = bisect_left(index.last_keys, span.start)
    last = len(index) if span.end is None else bisect_left(index.first_keys, span.end)
    kept[first:last] = True
    kept[list(needless)] = False
    if projection.where is not None:
        # No other version of a key matches a condition on the key that this one does not.
        on_key = Where(tuple(c for c in projection.where.conditions if c.is_key))
        kept &= on_key.groups(index, tail.footer.schema)
    groups = np.flatnonzero(kept).astype(np.int64)
    sizes = index.key_blocks.copy()
    for number, lengths in index.column_blocks.items():
        if projection.numbers is None or number in projection.numbers:
            sizes += lengths
    return SharePart(
        entry,
        tail,
        groups,
        [index.first_keys[group] for group in groups.tolist()],
        [index.last_keys[group] for group in groups.tolist()],
        sizes[groups],
    )


def weights_of(pieces: Iterable[SharePart], memory: Versions | None) -> list[Weight]:
    """Return the first keys of groups, and of rows in memory, with their sizes."""
    weights = [
        weight
        for piece in pieces
        for weight in zip(piece.first_keys, piece.sizes.tolist(), strict=True)
    ]
    if memory is not None and len(memory):
        total = memory.keys.nbytes + sum(array.nbytes for array in memory.fields.values())
        places = range(0, len(memory), ROWS_WEIGHED)
        keys = (memory.keys[place].as_py() for place in places)
        weights += [(key, total // len(places)) for key in keys]
    return sorted(weights)


def cut(weights: Sequence[Weight], split_bytes: int) -> list[bytes]:
    """Return keys that divide the weights into parts of about `split_bytes`."""
    total = sum(size for _, size in weights)
    parts = min(-(-total // split_bytes), SHARES_MAX, max(1, len(weights)))
    if parts <= 1:
        return []
    ends = np.cumsum([size for _, size in weights])
    goals = total * np.arange(1, parts) / parts
    places = np.searchsorted(ends, goals, side="left") + 1
    keys = {weights[place][0] for place in places.tolist() if place < len(weights)}
    return sorted(keys - {weights[0][0]})


def ranges_between(span: KeyRange, keys: Sequence[bytes]) -> list[KeyRange]:
    """Return a range cut at some keys: in order, without overlap, nothing left out."""
    first, last = bisect_right(keys, span.start), len(keys)
    if span.end is not None:
        last = bisect_left(keys, span.end)
    inner = list(keys[first:last])
    starts: list[bytes] = [span.start, *inner]
    ends: list[bytes | None] = [*inner, span.end]
    return [KeyRange(start, end) for start, end in zip(starts, ends, strict=True)]


def share_of(
    span: KeyRange,
    manifest: Manifest,
    pieces: Sequence[SharePart],
    memory: MemtableCut | None,
    *,
    ingested: Iterable[SegmentEntry],
    with_tails: bool,
) -> Share:
    """Return the share of one key range; `ingested` are the segments of the log."""
    tails: dict[str, SegmentTail] = {}
    entries: list[SegmentEntry] = []
    for piece in pieces:
        groups = piece.within(span)
        tombstones = [
            t for t in piece.tail.range_tombstones if span.overlaps(KeyRange(t.start, t.end))
        ]
        if len(groups) or tombstones:
            entries.append(piece.entry)
            if with_tails:
                tails[piece.entry.id] = _trim_tail(piece.tail, groups, tombstones)
    loaded = {entry.id for entry in ingested}
    if memory is not None:
        memory = memory._replace(ingested=tuple(e for e in entries if e.id in loaded))
    named = tuple(entry for entry in entries if entry.id not in loaded)
    return Share(span, msgspec.structs.replace(manifest, segments=named), tails, memory)


EVERY_KEY = KeyFilter(b"\xff" * BLOCK_BYTES)
"""Matches every key: scans do not use the filter."""


def _trim_tail(tail: SegmentTail, groups: Any, tombstones: Sequence[Any]) -> SegmentTail:
    """Return a tail with some of its groups."""
    footer = msgspec.structs.replace(tail.footer, ancestors=(), siblings=())
    return SegmentTail(tail.name, footer, tail.index.only(groups), EVERY_KEY, tombstones)


RESTARTS_MAX = 10
EXPIRED_HINT = "Load the DataFrame again, or raise leaseSeconds"
SENT_BYTES_MAX = 16 << 20
"""A longer part of the log is read by the tasks themselves."""

_memtables: dict[str, Memtable] = {}
"""By lease: the replayed log of the last read of this Python process."""


@dataclass(frozen=True, slots=True)
class ReadPin:
    """A leased snapshot of a namespace. Picklable."""

    store: Store
    namespace: Namespace
    manifest: Manifest
    """Without the fields that only publishing needs."""
    last_lsn: int
    memory: MemtableCut | None
    """Rows of the unfolded log; None if they are too many to send."""
    lease: SharedLease


def take_pin(
    store: Store,
    heads: HeadFinder,
    target: ReadTarget,
    lease_s: float,
    *,
    sent_bytes_max: int = SENT_BYTES_MAX,
) -> ReadPin:
    """Pin the state to read; NotFoundError(kind=collected) if it is gone already."""
    namespace, dropped = heads.names, heads.found.manifest.dropped is not None
    segments = SegmentStore(store, namespace, ByteCache(0))
    for _ in range(RESTARTS_MAX):
        history = History(store, namespace, segments, heads, dropped=dropped)
        try:
            lease, tail = _pin_once(history, store, namespace, target, lease_s)
        except ConcurrentSweep:
            continue
        view = tail.view()
        memory = view.memtable.cut() if tail.bytes <= sent_bytes_max else None
        return ReadPin(store, namespace, slim(tail.manifest), view.last_lsn, memory, lease)
    raise UnavailableError(f"{namespace.name} is swept faster than it can be pinned")


def _pin_once(
    history: History, store: Store, namespace: Namespace, target: ReadTarget, lease_s: float
) -> tuple[SharedLease, Tail]:
    owner = f"spark-{store.runtime.process_id()}"

    def take(manifest: Manifest) -> Lease[GenerationLease]:
        return take_lease(store, namespace, manifest, owner=owner, ttl_s=lease_s)

    def narrow(point: PointInTime, tail: Tail, lease: Lease[GenerationLease]) -> None:
        lease.narrow(**narrowed(tail.manifest, tail.view().last_lsn))  # H74; held until here: H67

    try:
        lease, tail = history.open_leased(target, take, narrow)
    except ConflictError as error:
        raise ConcurrentSweep(error.message) from error
    return SharedLease(store, namespace, lease.record.id, lease_s, hint=EXPIRED_HINT), tail


def slim(manifest: Manifest) -> Manifest:
    """Return a manifest without the fields that only publishing needs."""
    return msgspec.structs.replace(
        manifest,
        snapshots=(),
        dedup=(),
        stream_marks={},
        stream_lineages={},
        condemned=(),
        condemned_ranges=(),
        recent=(),
        branches={},
        cursors={},
    )


def memory_of(pin: ReadPin, span: KeyRange) -> MemtableCut:
    """Return the rows of the log in a range."""
    if pin.memory is None:
        raise ValueError("the log of this pin is replayed by the tasks")
    return pin.memory.within(span)


def replayed(pin: ReadPin) -> MemtableCut:
    """Read the log of a pin here, once; return its rows."""
    memtable = _memtables.get(pin.lease.id)
    if memtable is None:
        memtable = _replay(pin)
        _memtables.clear()
        _memtables[pin.lease.id] = memtable
    return memtable.cut()


def _replay(pin: ReadPin) -> Memtable:
    """Replay the log; the lease is verified afterwards, so no object was replaced meanwhile."""
    manifest = NamespaceContext(pin.store, pin.namespace).heads.load(pin.manifest.generation)
    history = History(
        pin.store, pin.namespace, SegmentStore(pin.store, pin.namespace, ByteCache(0))
    )
    tail = history.replay(PointInTime(manifest, pin.last_lsn), pin.manifest)
    pin.lease.verify()
    return tail.view().memtable
