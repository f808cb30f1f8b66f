"""The pin of a read: which moment every task sees, whenever and wherever it runs.

Taken while the DataFrame is made: find the generation, write the lease, read the head again
(protocol section 6), then take in the log up to the moment's last LSN. What stood in the log
goes along with the tasks, so that none of them has to read it again, and all of them see the
same, to the LSN. If that is too much to send about, each task takes it in by itself, up to the
same LSN, once per Python process.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from reef.engine.history.moments import History, Moved, Wanted
from reef.engine.history.moments import Moment as MomentInTime
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.memtable import Memtable, Moment
from reef.engine.reading.segments import SegmentStore
from reef.engine.tail import Tail
from reef.errors import UnavailableError
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.spark.lease import BEATS, SharedLease
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["Pin", "memory_of", "replayed", "take_pin"]

RESTARTS_MAX = 10
SENT_BYTES_MAX = 16 << 20
"""A longer part of the log is read by the tasks themselves."""

_memtables: dict[str, Memtable] = {}
"""By lease: what the last read of this Python process took in from the log."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One moment, leased. Picklable."""

    store: Store
    namespace: Namespace
    manifest: Manifest
    """Without what only publishing needs."""
    last_lsn: int
    memory: Moment | None
    """What stands in the log; None where it is too much to send."""
    lease: SharedLease


def take_pin(
    store: Store,
    heads: HeadFinder,
    wanted: Wanted,
    lease_s: float,
    *,
    sent_bytes_max: int = SENT_BYTES_MAX,
) -> Pin:
    """Pin what is wanted; NotFoundError(kind=collected) if it is gone already."""
    namespace, dropped = heads.names, heads.found.manifest.successor is not None
    segments = SegmentStore(store, namespace, ByteCache(0))
    for _ in range(RESTARTS_MAX):
        history = History(store, namespace, segments, heads, dropped=dropped)
        try:
            lease, tail = _pin_once(history, store, namespace, wanted, lease_s)
        except Moved:
            continue
        view = tail.view()
        memory = view.memtable.moment(KeyRange()) if tail.bytes <= sent_bytes_max else None
        return Pin(store, namespace, _slim(tail.manifest), view.last_lsn, memory, lease)
    raise UnavailableError(f"{namespace.name} is swept faster than it can be pinned")


def _pin_once(
    history: History, store: Store, namespace: Namespace, wanted: Wanted, lease_s: float
) -> tuple[SharedLease, Tail]:
    moment = history.find(history.head(), wanted)
    leased = store.runtime.stopwatch()
    lease = SharedLease.take(store, namespace, moment.manifest, lease_s)
    try:
        head = history.head()  # again, now that the lease is there (H22)
        if wanted == Wanted():
            moment = MomentInTime(head)
        history.check(head, moment)
        tail = history.replay(moment, head)
        if leased.elapsed_s() >= lease_s / BEATS:  # else it cannot have lapsed meanwhile (H67)
            lease.look()
        return lease, tail
    except BaseException:
        lease.release()
        raise


def _slim(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(
        manifest,
        snapshots=(),
        dedup=(),
        stream_marks={},
        stream_lineages={},
        condemned=(),
        recent=(),
        branch_pins={},
        cursors={},
    )


def memory_of(pin: Pin, wanted: KeyRange) -> Moment:
    """Return what stood in the log of a range, and nothing else: slices would send it all."""
    if pin.memory is None:
        raise ValueError("the log of this pin is read by the tasks")
    memory = pin.memory
    return replace(
        memory,
        rows=_compact(memory.rows.within(wanted)),
        range_tombstones=[
            t for t in memory.range_tombstones if wanted.overlaps(KeyRange(t.start, t.end))
        ],
        ingested=tuple(e for e in memory.ingested if wanted.touches(e.min_key, e.max_key)),
    )


def _compact(rows: Versions) -> Versions:
    return rows.take(np.arange(len(rows), dtype=np.int64))


def replayed(pin: Pin, wanted: KeyRange) -> Moment:
    """Read the log of a pin here; return what it has of a range."""
    memtable = _memtables.get(pin.lease.id)
    if memtable is None:
        memtable = _replay(pin)
        _memtables.clear()
        _memtables[pin.lease.id] = memtable
    return memtable.moment(wanted)


def _replay(pin: Pin) -> Memtable:
    """Every object must be the one that was there: the lease is looked at afterwards too."""
    manifest = HeadFinder(pin.store, pin.namespace).load(pin.manifest.generation)
    history = History(
        pin.store, pin.namespace, SegmentStore(pin.store, pin.namespace, ByteCache(0))
    )
    tail = history.replay(MomentInTime(manifest, pin.last_lsn), pin.manifest)
    pin.lease.look()
    return tail.view().memtable
