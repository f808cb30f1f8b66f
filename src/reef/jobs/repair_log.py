"""What is left of a damaged log: batches whose own checksums hold, and headers.

An object of the log holds the batches of several clients, each in a frame with its own checksum,
behind a header in another. Where one is damaged the others are not. To bring them back the log is
folded up to past the damage: the sound batches of a damaged object go into a segment, at their own
LSN and sequence, and the LSN itself is given up in the same publish. Patches stay patches, so that
no row has to be looked up in segments that may be damaged too.

A begin that cannot be read would make its job's ingest count for nothing, though it was
acknowledged. So an ingest of a job that nobody has seen begin or end counts here, if some slot
below it cannot be read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.engine.log import Log
from reef.engine.log_rules import LogReader, Verdict
from reef.engine.reading.merge import sorted_places
from reef.engine.tail import ingested_segments
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.batch import decode_ops
from reef.formats.coding import U32, Buffer, crc32c, decode_msgpack
from reef.formats.covers import Cover
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.streams import Lineage
from reef.formats.versions import RangeTombstone, Versions, concat_versions, split_ops
from reef.formats.wal_object import HEAD, BatchHeader, WalHeader, WalKind
from reef.jobs.repair_report import LostLsn
from reef.jobs.verify_survey import Survey
from reef.manifest.dedup import DedupWindow
from reef.manifest.edits import FoldResult
from reef.paths import Namespace
from reef.stores import Store

__all__ = [
    "Remains",
    "RescuedLog",
    "judge_log",
    "log_versions",
    "read_remains",
    "remains_of",
    "unseen_ingests",
]

READ_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Remains:
    """What can be read of a damaged object."""

    lsn: int
    header: WalHeader | None = None
    records: tuple[bytes | None, ...] = ()
    """None where a record is lost."""

    @property
    def sound(self) -> bool:
        """Whether anything in it would be missed."""
        if self.header is None:
            return False
        jobs = self.header.kind in (WalKind.BEGIN, WalKind.INGEST, WalKind.ABORT)
        return jobs or any(record is not None for record in self.records)


def read_remains(
    store: Store, names: Namespace, lsns: Sequence[int], schemas: Sequence[Schema]
) -> dict[int, Remains]:
    """Return what is left in slots that are damaged or empty."""
    by_id = {schema.id: schema for schema in schemas}

    def read(lsn: int) -> Remains:
        try:
            return remains_of(store.get(names.wal_object(lsn)), lsn, by_id)
        except NotFoundError:
            return Remains(lsn)

    found = store.runtime.gather([lambda n=lsn: read(n) for lsn in lsns])  # type: ignore[misc]
    return dict(zip(lsns, found, strict=True))


def remains_of(data: bytes, lsn: int, schemas: dict[int, Schema]) -> Remains:
    """Return the header and the records whose own checksums hold."""
    frames = _frames(data, HEAD.size)
    name = f"LSN {lsn}"
    try:
        header = decode_msgpack(next(frames, None) or b"", WalHeader, name, HEAD.size)
    except CorruptionError:
        return Remains(lsn)
    if not isinstance(header, WalHeader) or header.lsn != lsn:
        return Remains(lsn)
    schema = schemas.get(header.schema_id)
    found = [next(frames, None) for _ in header.batches]
    records = tuple(
        _sound(record, batch, schema, name)
        for record, batch in zip(found, header.batches, strict=True)
    )
    return Remains(lsn, header, records)


def _frames(data: bytes, start: int) -> Iterator[bytes | None]:
    """Yield the payloads of frames, None for one that is damaged."""
    while start + 8 <= len(data):
        length, expected = U32.unpack_from(data, start)[0], U32.unpack_from(data, start + 4)[0]
        end = start + 8 + length
        payload = data[start + 8 : end]
        yield payload if len(payload) == length and crc32c(payload) == expected else None
        start = end + -end % 8


def _sound(
    record: bytes | None, batch: BatchHeader, schema: Schema | None, name: str
) -> bytes | None:
    if record is None or schema is None:
        return None
    try:
        return record if len(decode_ops(record, schema, name)) == batch.ops else None
    except CorruptionError:
        return None


@dataclass(slots=True)
class RescuedLog:
    """What counts in the log from the head's floor on, as far as it can be told."""

    manifest: Manifest
    remains: dict[int, Remains]
    dedup: DedupWindow
    counting: list[int] = field(default_factory=list)
    ingested: list[SegmentEntry] = field(default_factory=list)
    lost: list[LostLsn] = field(default_factory=list)
    needs_fold: bool = False
    """Whether something in it is saved only by folding past it."""
    end: int = 0
    open_jobs: tuple[OpenJob, ...] = ()
    last_ids: tuple[str, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)
    lineages: dict[str, Lineage] = field(default_factory=dict)

    def covers(self) -> tuple[Cover, ...]:
        """Return what the rows of the log stand for: all of it, less the ingests."""
        firsts = [self.manifest.wal_floor, *sorted({e.visible_lsn + 1 for e in self.ingested})]
        ends = [*(first - 1 for first in firsts[1:]), self.end]
        spans = zip(firsts, ends, strict=True)
        return tuple(Cover(first, end) for first, end in spans if first < end)

    def fold_result(self, segments: Sequence[SegmentEntry]) -> FoldResult:
        return FoldResult(
            floor=self.manifest.wal_floor,
            end=self.end,
            segments=tuple(segments),
            dedup=self.dedup.entries(),
            open_jobs=self.open_jobs,
            below_floor=self.last_ids,
            marks=self.marks,
            lineages=self.lineages,
        )


def judge_log(names: Namespace, survey: Survey, remains: dict[int, Remains]) -> RescuedLog:
    """Judge the log from the head's floor on, with what is left of its damaged objects."""
    head = survey.head
    unreadable = {lsn for lsn, left in remains.items() if left.header is None}
    given_up = tuple(sorted({*head.skipped_lsns, *unreadable}))
    disputes: dict[int, str] = {}
    rules = LogReader(msgspec.structs.replace(head, skipped_lsns=given_up), disputes)
    log = RescuedLog(head, remains, DedupWindow.of(head))
    ended: set[str] = set()
    while rules.next_lsn < survey.log.end:
        lsn = rules.next_lsn
        header = _header(survey, remains, lsn)
        if header is None:
            rules.skip()
            continue
        verdict = rules.judge(header).verdict
        blind = any(head.wal_floor <= n < lsn for n in unreadable)
        if verdict is Verdict.IGNORED and blind and _may_count(log, header, ended):
            verdict, log.needs_fold = Verdict.APPLIES, True
            log.lost.append(_unseen(names, header))
        if header.job is not None and header.kind is not WalKind.BEGIN:
            ended.add(header.job.id)
        _take(names, log, header, verdict)
    log.needs_fold |= bool(disputes)  # the ids in a log that readers judge would stay in dispute
    log.end, log.open_jobs, log.last_ids = rules.next_lsn, rules.open_jobs, rules.last_ids()
    log.marks, log.lineages = rules.marks, rules.lineages
    judged = {lost.lsn for lost in log.lost}
    log.lost += [_lost(names, left, head) for left in remains.values() if left.lsn not in judged]
    log.lost.sort(key=lambda lost: lost.lsn)
    return log


def _unseen(names: Namespace, ingest: WalHeader) -> LostLsn:
    """An ingest whose begin cannot be read: views of the past pass over it."""
    key = names.wal_object(ingest.lsn)
    return LostLsn(ingest.lsn, key, WalKind.INGEST.value, 0, 0, history_only=True)


def unseen_ingests(names: Namespace, survey: Survey) -> list[LostLsn]:
    """Return the ingests below the head's floor whose begin may be what cannot be read.

    The newest state has their rows. In views of older generations they do not count any more.
    """
    found, log = [], survey.log
    known = {job.id for job in survey.chain.start.open_jobs}
    unreadable = [lsn for lsn in log.damaged if lsn < survey.head.wal_floor]
    for lsn in sorted(log.verdicts):
        header = log.slots[lsn].header
        if header is None or header.job is None or lsn >= survey.head.wal_floor:
            continue
        unseen = header.kind is WalKind.INGEST and header.job.id not in known
        if unseen and any(damaged < lsn for damaged in unreadable):
            found.append(_unseen(names, header))
        known.add(header.job.id)
    return found


def _header(survey: Survey, remains: dict[int, Remains], lsn: int) -> WalHeader | None:
    if lsn in survey.head.skipped_lsns:
        return None
    if lsn in remains:
        return remains[lsn].header
    slot = survey.log.slots.get(lsn)
    return None if slot is None else slot.header


def _may_count(log: RescuedLog, header: WalHeader, ended: set[str]) -> bool:
    """Whether an ingest's begin may be what cannot be read."""
    job = header.job
    if header.kind is not WalKind.INGEST or job is None or job.id in ended:
        return False
    return job.key is None or log.dedup.get(job.key) is None


def _take(names: Namespace, log: RescuedLog, header: WalHeader, verdict: Verdict) -> None:
    left = log.remains.get(header.lsn)
    if left is not None:
        log.needs_fold |= left.sound
        log.lost.append(_lost_of(names, header, left, verdict))
    if verdict is not Verdict.APPLIES:
        return
    if header.kind is WalKind.INGEST:
        log.ingested += ingested_segments(header, log.manifest.schema)
    else:
        log.counting.append(header.lsn)
    log.dedup.add(_without_lost_keys(header, left))


def _without_lost_keys(header: WalHeader, left: Remains | None) -> WalHeader:
    """A batch that is lost may be sent again: its key is not in the window."""
    if left is None or not header.batches:
        return header
    kept = tuple(
        batch if record is not None else msgspec.structs.replace(batch, key=None)
        for batch, record in zip(header.batches, left.records, strict=True)
    )
    return msgspec.structs.replace(header, batches=kept)


def _lost_of(names: Namespace, header: WalHeader, left: Remains, verdict: Verdict) -> LostLsn:
    pairs = list(zip(header.batches, left.records, strict=True))
    counted = pairs if verdict is Verdict.APPLIES else []
    gone = [batch for batch, record in counted if record is None]
    return LostLsn(
        header.lsn,
        names.wal_object(header.lsn),
        header.kind.value,
        len(gone),
        sum(batch.ops for batch in gone),
        tuple(batch.key for batch in gone if batch.key is not None),
        sum(batch.ops for batch, record in counted if record is not None),
    )


def _lost(names: Namespace, left: Remains, head: Manifest) -> LostLsn:
    kind = left.header.kind.value if left.header is not None else None
    folded = left.lsn < head.wal_floor
    return LostLsn(left.lsn, names.wal_object(left.lsn), kind, None, None, history_only=folded)


def log_versions(
    store: Store,
    names: Namespace,
    manifest: Manifest,
    lsns: Sequence[int],
    remains: Mapping[int, Remains],
) -> tuple[Versions, list[RangeTombstone]]:
    """Return all versions that some objects of the log hold, in order, and their range deletes."""
    parts: list[Versions] = [Versions.empty(manifest.schema)]
    tombstones: list[RangeTombstone] = []
    for header, records in _objects(store, names, lsns, remains):
        schema = _schema_of(header, manifest)
        seq = 0
        for batch, record in zip(header.batches, records, strict=True):
            if record is not None:
                ops = decode_ops(record, schema, names.wal_object(header.lsn))
                rows, ranges = split_ops(ops, header.lsn, seq)
                parts.append(rows.under(manifest.schema))
                tombstones += ranges
            seq += batch.ops
    rows = concat_versions(parts, manifest.schema)
    return rows.take(sorted_places(rows)), tombstones


def _objects(
    store: Store, names: Namespace, lsns: Sequence[int], remains: Mapping[int, Remains]
) -> Iterator[tuple[WalHeader, Sequence[Buffer | None]]]:
    log = Log(store, names)
    for at in range(0, len(lsns), READ_AT_ONCE):
        chunk = list(lsns[at : at + READ_AT_ONCE])
        sound = [lsn for lsn in chunk if lsn not in remains]
        found = dict(zip(sound, log.read_many(sound), strict=True))
        for lsn in chunk:
            left, read = remains.get(lsn), found.get(lsn)
            if left is not None and left.header is not None:
                yield left.header, left.records
            elif read is not None:
                yield read.header, read.records
            else:
                key = names.wal_object(lsn)
                raise NotFoundError(f"object {key} is gone since it was read", object=key)


def _schema_of(header: WalHeader, manifest: Manifest) -> Schema:
    for schema in manifest.schemas:
        if schema.id == header.schema_id:
            return schema
    raise UnsupportedFormatError(
        f"LSN {header.lsn} is of schema {header.schema_id}, which no manifest has that can be read",
        hint="Rebuild the namespace: segments know their schemas",
        lsn=header.lsn,
    )
