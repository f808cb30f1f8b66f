"""The tail: everything in the log from a manifest's floor on, taken in slot by slot.

Writers and readers build it in the same way, from one manifest: segments, window, open
jobs and floor all belong together (H61). What an object amounts to is decided by the rules
of the log, once, here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from reef.engine.log_rules import Judgement, LogReader, Verdict
from reef.engine.reading.memtable import Memtable
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import View
from reef.errors import InternalError, UnsupportedFormatError
from reef.formats.batch import AnyOps, decode_records
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow

__all__ = ["Tail", "ingested_segments"]


class Watcher(Protocol):
    """Whoever wants to know what is written: told before it can be read, and after."""

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None: ...

    def applied(self) -> None: ...

    def lost_track(self) -> None:
        """Something was applied that nobody can tell."""


class Tail:
    """What is known of a namespace from one manifest on."""

    def __init__(self, manifest: Manifest, segments: SegmentStore) -> None:
        self.manifest = manifest
        self.rules = LogReader(manifest)
        self.bytes = 0
        """How much of the log is not folded yet."""
        self._sizes: dict[int, int] = {}
        self.created_at_ms = manifest.published_at_ms
        self._segments = segments
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        memtable = Memtable(manifest.schema, manifest.wal_floor)
        memtable.marks.update(manifest.stream_marks)
        self._view = View(manifest, segments, memtable)
        self._early: set[int] = set()
        self._watchers: tuple[Watcher, ...] = ()

    @property
    def next_lsn(self) -> int:
        return self.rules.next_lsn

    @property
    def dedup(self) -> DedupWindow:
        return self.rules.dedup

    def view(self) -> View:
        """Return what is visible. Manifest and memory are replaced together, never one by one."""
        return self._view

    @property
    def ingested(self) -> tuple[SegmentEntry, ...]:
        """The segments of loads that no fold has passed yet, to be counted."""
        return self._memtable.chain(b"").ingested

    def watch(self, *watchers: Watcher) -> None:
        """Tell these of everything that is applied from now on."""
        self._watchers = (*self._watchers, *watchers)

    def restarted(self, manifest: Manifest) -> "Tail":
        """Return a tail from a newer manifest on, where this one cannot follow."""
        if manifest.wal_base == self.manifest.wal_base:
            self.rules.check_floor(manifest)
        tail = Tail(manifest, self._segments)
        tail.watch(*self._watchers)
        tail.lost_track()
        return tail

    def lost_track(self) -> None:
        """Tell the watchers to forget."""
        for watcher in self._watchers:
            watcher.lost_track()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Put another state in the place of the one that is read, within this block.

        The watchers forget before it can be read, and keep nothing until it is: neither can a
        row of the old state be served after one of the new state, nor be kept.
        """
        for watcher in self._watchers:
            watcher.applying()
        try:
            self.lost_track()
            yield
        finally:
            for watcher in self._watchers:
                watcher.applied()

    @property
    def _memtable(self) -> Memtable:
        return self._view.memtable

    def take(self, found: WalObject, size: int = 0) -> Judgement:
        """Take in the object of the next slot; if it cannot be read, nothing is changed.

        What was noted and then not read would be passed over by the next look (H27).
        """
        applies = self.rules.verdict(found.header) is Verdict.APPLIES
        is_early = found.header.lsn in self._early  # our own, and shown already
        apply = self._reading(found) if applies and not is_early else None
        judgement = self.rules.judge(found.header)
        if apply is not None:
            apply()
        self._early.discard(found.header.lsn)
        self._memtable.pass_over(found.header.lsn)
        self._settle()
        self._count(found.header.lsn, size or sum(map(len, found.records)))
        self.created_at_ms = max(self.created_at_ms, found.header.created_at_ms)
        return judgement

    def take_own(self, header: WalHeader, batches: Sequence[AnyOps], size: int) -> Judgement:
        """Take in an object that this process wrote, without decoding it again."""
        judgement = self.rules.judge(header)
        if judgement.verdict is Verdict.APPLIES and header.lsn not in self._early:
            self._apply_batches(header, batches)
        self._early.discard(header.lsn)
        self._memtable.pass_over(header.lsn)
        self._settle()
        self._count(header.lsn, size)
        return judgement

    def apply_early(self, header: WalHeader, batches: Sequence[AnyOps]) -> None:
        """Show an object that landed before those in front of it (independent order)."""
        if header.lsn not in self._early:
            self._early.add(header.lsn)
            self._apply_batches(header, batches, is_early=True)

    def skip(self) -> None:
        """Pass over a slot that a repair has given up."""
        self._memtable.pass_over(self.next_lsn)
        self.rules.skip()

    def knows(self, header: WalHeader) -> bool:
        """Whether an object can be read: a newer schema comes with a newer manifest."""
        return header.kind is not WalKind.BATCHES or header.schema_id in self._schemas

    def follows(self, manifest: Manifest) -> bool:
        """Whether a manifest is newer, and begins where this tail is already."""
        newer = manifest.generation > self.manifest.generation
        same = manifest.wal_base == self.manifest.wal_base  # not one made in its place (H48)
        return newer and same and manifest.wal_floor <= self.next_lsn

    def rebase(self, manifest: Manifest) -> None:
        """Go on from a newer manifest: drop from memory what its segments hold now."""
        if manifest.wal_floor > self.next_lsn:
            raise ValueError(f"floor {manifest.wal_floor} lies behind LSN {self.next_lsn}")
        self.rules.check_floor(manifest)
        memtable = self._memtable.drop_below(manifest.wal_floor, manifest.schema)
        view = View(manifest, self._segments, memtable)
        if manifest.schema.id == self.manifest.schema.id:
            self._view = view
        else:
            with self.replacing():  # rows that were kept lack the new columns
                self._view = view
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        self._sizes = {lsn: n for lsn, n in self._sizes.items() if lsn >= manifest.wal_floor}
        self.bytes = sum(self._sizes.values())
        self.manifest = manifest

    def _settle(self) -> None:
        if not self.rules.awaits_live_wins:
            self._memtable.settle(self.next_lsn - 1)

    def _count(self, lsn: int, size: int) -> None:
        self._sizes[lsn] = size
        self.bytes += size

    def _reading(self, found: WalObject) -> Callable[[], None]:
        """Decode an object that counts; return what applies it."""
        header = found.header
        if header.kind is WalKind.INGEST:
            segments = ingested_segments(header, self.manifest.schema)
            return lambda: self._apply_ingest(header, segments)
        schema = self._schemas.get(header.schema_id)
        if schema is None:
            raise InternalError(f"LSN {header.lsn} is of schema {header.schema_id}, not known here")
        name = self._segments.namespace.wal_object(header.lsn)
        batches = list(decode_records(found, schema, name))
        return lambda: self._apply_batches(header, batches)

    def _apply_ingest(self, header: WalHeader, segments: Sequence[SegmentEntry]) -> None:
        for watcher in self._watchers:
            watcher.applying(segments=segments)
        try:
            self._memtable.ingest(header.lsn, segments)
        finally:
            for watcher in self._watchers:
                watcher.applied()

    def _apply_batches(
        self, header: WalHeader, batches: Sequence[AnyOps], *, is_early: bool = False
    ) -> None:
        for watcher in self._watchers:
            watcher.applying(batches)
        try:
            memtable = self._view.memtable
            memtable.apply(header.lsn, batches, header.marks, is_early=is_early)
        finally:
            for watcher in self._watchers:
                watcher.applied()


def ingested_segments(header: WalHeader, schema: Schema) -> list[SegmentEntry]:
    """Return the entries of the segments that an ingest makes visible at its LSN."""
    if header.job is None:
        return []
    if header.job.live_wins:
        # To take it for a plain one would show wrong rows, and fold them for good.
        raise UnsupportedFormatError(
            f"LSN {header.lsn} is a load with live_wins, not known to this release",
            hint="Upgrade Reef",
            lsn=header.lsn,
        )
    return [
        SegmentEntry(
            id=segment.id,
            level=0,
            size=segment.size,
            checksum=segment.checksum,
            rows=segment.rows,
            tombstones=segment.tombstones,
            min_key=segment.min_key,
            max_key=segment.max_key,
            lsn_min=header.lsn,
            lsn_max=header.lsn,
            tail_bytes=segment.tail_bytes,
            schema_id=header.schema_id or schema.id,
            set_hash=segment.set_hash,
            patches=segment.patches,
            visible_lsn=header.lsn,
        )
        for segment in header.job.segments
    ]
