"""The tail: everything in the log from a manifest's floor on, taken in slot by slot.

Writers and readers build it in the same way, from one manifest: segments, window, open
jobs and floor all belong together (H61). What an object amounts to is decided by the rules
of the log, once, here.
"""

from reef.engine.log_rules import Judgement, LogReader, Verdict
from reef.engine.memtable import Memtable
from reef.engine.segments import SegmentStore
from reef.engine.view import View
from reef.formats.batch import Ops, decode_ops
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow

__all__ = ["Tail", "ingested_segments"]


class Tail:
    """What is known of a namespace from one manifest on."""

    def __init__(self, manifest: Manifest, segments: SegmentStore) -> None:
        self.manifest = manifest
        self.rules = LogReader(manifest)
        self.dedup = DedupWindow.of(manifest)
        self.bytes = 0
        """How much of the log is not folded yet."""
        self._sizes: dict[int, int] = {}
        self.created_at_ms = manifest.published_at_ms
        self._segments = segments
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        self._memtable = Memtable(manifest.schema, manifest.wal_floor)
        self._ingested: tuple[SegmentEntry, ...] = ()
        self._early: set[int] = set()

    @property
    def next_lsn(self) -> int:
        return self.rules.next_lsn

    def view(self) -> View:
        return View(self.manifest, self._segments, self._memtable, self._ingested)

    def take(self, found: WalObject, size: int = 0) -> Judgement:
        """Take in the object of the next slot."""
        judgement = self.rules.judge(found.header)
        if judgement.verdict is Verdict.APPLIES:
            self._apply(found)
        self._memtable.pass_over(found.header.lsn)
        self._count(found.header.lsn, size)
        self.created_at_ms = max(self.created_at_ms, found.header.created_at_ms)
        return judgement

    def take_own(self, header: WalHeader, batches: list[Ops], size: int) -> Judgement:
        """Take in an object that this process wrote, without decoding it again."""
        judgement = self.rules.judge(header)
        if judgement.verdict is Verdict.APPLIES and header.lsn not in self._early:
            self._memtable.apply(header.lsn, batches)
            self.dedup.add(header)
        self._early.discard(header.lsn)
        self._count(header.lsn, size)
        return judgement

    def apply_early(self, header: WalHeader, batches: list[Ops]) -> None:
        """Show an object that landed before those in front of it (independent order)."""
        if header.lsn not in self._early:
            self._early.add(header.lsn)
            self._memtable.apply(header.lsn, batches)
            self.dedup.add(header)

    def skip(self) -> None:
        """Pass over a slot that a repair has given up."""
        self._memtable.pass_over(self.next_lsn)
        self.rules.skip()

    def rebase(self, manifest: Manifest) -> None:
        """Go on from a newer manifest: drop from memory what its segments hold now."""
        if manifest.wal_floor > self.next_lsn:
            raise ValueError(f"floor {manifest.wal_floor} lies behind LSN {self.next_lsn}")
        self._memtable = self._memtable.drop_below(manifest.wal_floor)
        self._ingested = tuple(e for e in self._ingested if e.lsn_max >= manifest.wal_floor)
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        self._sizes = {lsn: n for lsn, n in self._sizes.items() if lsn >= manifest.wal_floor}
        self.bytes = sum(self._sizes.values())
        self.manifest = manifest

    def _count(self, lsn: int, size: int) -> None:
        self._sizes[lsn] = size
        self.bytes += size

    def _apply(self, found: WalObject) -> None:
        header = found.header
        if header.kind is WalKind.INGEST:
            self._ingested = (*self._ingested, *ingested_segments(header, self.manifest.schema))
            return
        schema = self._schemas.get(header.schema_id, self.manifest.schema)
        name = f"LSN {header.lsn}"
        batches = [decode_ops(record, schema, name) for record in found.records]
        self._memtable.apply(header.lsn, batches)
        self.dedup.add(header)


def ingested_segments(header: WalHeader, schema: Schema) -> list[SegmentEntry]:
    """Return the entries of the segments that an ingest makes visible at its LSN."""
    if header.job is None:
        return []
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
            visible_lsn=header.lsn,
        )
        for segment in header.job.segments
    ]
