"""Reading: the plan on the driver, and what a task does.

A task merges its key range out of all segments and what stood in the log, as any scan of Reef
does, and hands over Arrow batches of a good size; meanwhile the next groups are on their way. It
asks the bucket for blocks of its own range, and for nothing else. It may run more than once, and
beside itself: it changes nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.memtable import Moment
from reef.engine.reading.projection import Projection
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import Scan
from reef.errors import CorruptionError, NotFoundError
from reef.formats.versions import Versions
from reef.spark.ahead import KnownTails, ReadAhead
from reef.spark.counts import Counts, CountsSum, counts_of, send_home
from reef.spark.pin import Pin, memory_of, replayed
from reef.spark.plainly import each_plainly, plainly
from reef.spark.plan import (
    GROUPS_SENT_MAX,
    Piece,
    Share,
    cut,
    piece_of,
    ranges_between,
    share_of,
    weights_of,
)
from reef.spark.schema import to_spark
from reef.types import KeyRange

__all__ = ["Reading", "ReefReader"]

BATCH_ROWS = 65_536
BATCH_BYTES_MAX = 16 << 20
"""A batch of long rows ends here: it goes through memory three times."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A read, as far as it is the same for all tasks. Picklable."""

    pin: Pin
    projection: Projection
    wanted: KeyRange
    target: pa.Schema
    now_ms: int
    """When rows expire is judged once, for all tasks."""
    split_bytes: int
    meter: int | None = None
    planning: Counts = field(default_factory=dict)
    """What was asked of the bucket to pin it."""

    def scan(self, memory: Moment, segments: SegmentStore, share: Share | None = None) -> Scan:
        manifest = self.pin.manifest if share is None else share.manifest
        wanted = self.wanted if share is None else share.wanted
        moments = (memory,)
        return Scan(manifest, segments, moments, wanted, self.now_ms, False, self.projection)


class ReefReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __reduce__(self) -> tuple[Any, ...]:
        """Every task gets a copy: without the log, of which each share has its own part.

        A copy that has to plan reads the log again.
        """
        pin = replace(self._reading.pin, memory=None)
        return ReefReader, (replace(self._reading, pin=pin),)

    @plainly
    def partitions(self) -> list[Share]:
        """Return the shares, in the order of their keys."""
        reading = self._reading
        memory = reading.pin.memory
        if memory is None:
            memory = replayed(reading.pin, reading.wanted)
        shares = list(_shares(reading, memory))
        planning = counts_of(reading.pin.store, "planning.")
        shares[0].planning = CountsSum().addInPlace(planning, reading.planning)
        return shares

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a share, by key."""
        if not isinstance(partition, Share):
            raise TypeError(f"{partition!r} is not a share of a read of Reef")
        return each_plainly(_read(self._reading, partition))


# --- on the driver --------------------------------------------------------------------


def _shares(reading: Reading, memory: Moment) -> Iterator[Share]:
    pin = reading.pin
    pieces = _pieces(reading, memory)
    groups = sum(len(piece.groups) for piece in pieces)
    keys = cut(weights_of(pieces, memory.rows.within(reading.wanted)), reading.split_bytes)
    for wanted in ranges_between(reading.wanted, keys):
        sent = None if pin.memory is None else memory_of(pin, wanted)
        yield share_of(
            wanted,
            pin.manifest,
            pieces,
            sent,
            ingested=memory.ingested,
            with_tails=groups <= GROUPS_SENT_MAX,
        )


def _pieces(reading: Reading, memory: Moment) -> list[Piece]:
    """Read the block indexes, side by side, and take what is needed of each."""
    store = reading.pin.store
    segments = SegmentStore(store, reading.pin.namespace, ByteCache(0))
    within = replace(memory, rows=memory.rows.within(reading.wanted))
    scan = reading.scan(within, segments)
    overlapping = scan.overlapping()
    tails = store.runtime.gather([lambda e=e: segments.tail(e) for e in overlapping])  # type: ignore[misc]
    ids = (entry.id for entry in overlapping)
    known = KnownTails(store, reading.pin.namespace, dict(zip(ids, tails, strict=True)))
    skipping = replace(scan, segments=known).skipping(overlapping)
    return [
        piece_of(entry, tail, reading.wanted, reading.projection, skipping.needless(entry))
        for entry, tail in zip(overlapping, tails, strict=True)
    ]


# --- in a task ------------------------------------------------------------------------


def _read(reading: Reading, share: Share) -> Iterator[pa.RecordBatch]:
    pin = reading.pin
    counts: Counts = {"tasks": 1, **share.planning}
    before = counts_of(pin.store)
    pin.lease.check()
    memory = share.memory if share.memory is not None else replayed(pin, share.wanted)
    with ReadAhead(pin.store, pin.namespace, dict(share.tails)) as segments:
        for batch in _of_good_size(_batches(reading, reading.scan(memory, segments, share))):
            counts["batches"] = counts.get("batches", 0) + 1
            counts["rows"] = counts.get("rows", 0) + len(batch)
            yield to_spark(batch, reading.target)
    if reading.meter is not None:
        for name, count in counts_of(pin.store).items():
            counts[name] = count - before.get(name, 0)
        send_home(reading.meter, counts)


def _batches(reading: Reading, scan: Scan) -> Iterator[pa.RecordBatch]:
    schema = reading.pin.manifest.schema
    for rows in _protected(reading.pin, scan):
        batch = reading.projection.batch(rows, schema)
        if len(batch):
            yield batch


def _protected(pin: Pin, scan: Scan) -> Iterator[Versions]:
    """Yield what a scan yields, for as long as the lease holds; then say so."""
    try:
        for rows in scan:
            yield rows
            pin.lease.check()
    except NotFoundError as error:
        pin.lease.look()  # whether it was swept, since the lease has lapsed
        raise CorruptionError(
            f"{error.message}, though generation {pin.manifest.generation} needs it",
            hint="Run verify, then repair",
            **error.context,
        ) from error


def _of_good_size(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join batches until they are worth sending."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows >= BATCH_ROWS or size >= BATCH_BYTES_MAX:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
