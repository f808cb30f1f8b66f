"""A damaged log: which of its batches and headers are intact, and which of them count.

A WAL object holds the batches of several clients, each in a frame with its own checksum, behind a
header in another. Damage to one leaves the others intact. To recover them the log is folded past
the damage: the intact batches of a damaged object go into a segment, at their own LSN and sequence,
and the same publish skips the LSN. Patches stay patches, so that no row has to be read from
segments that may be damaged too.

If a begin cannot be read, its job's ingest would not count, though it was acknowledged. So an
ingest of a job without a visible begin or end counts here, if a slot below it cannot be read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.log.log import LogRules, Verdict, replay_headers
from reef.engine.log.tail import ingested_segments
from reef.engine.read.merge import sorted_places
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.coding import U32, Buffer, crc32c, decode_msgpack
from reef.formats.covers import Cover
from reef.formats.manifest import Lineage, Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions, concat_versions, split_ops
from reef.formats.wal_object import HEAD, BatchHeader, WalHeader, WalKind, decode_ops
from reef.jobs.repair.report import LostLsn
from reef.jobs.verify.job import NamespaceSurvey
from reef.manifest.dedup import DedupWindow
from reef.manifest.edits import FoldResult
from reef.paths import Namespace

READ_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Remains:
    """The readable parts of a damaged object."""

    lsn: int
    header: WalHeader | None = None
    records: tuple[bytes | None, ...] = ()
    """None in place of a lost record."""

    @property
    def has_contents(self) -> bool:
        """Whether it has records or job facts that a skip would lose."""
        if self.header is None:
            return False
        jobs = self.header.kind in (WalKind.BEGIN, WalKind.INGEST, WalKind.ABORT)
        return jobs or any(record is not None for record in self.records)


def read_remains(
    context: NamespaceContext, lsns: Sequence[int], schemas: Sequence[Schema]
) -> dict[int, Remains]:
    """Return the readable parts of damaged or empty slots."""
    by_id = {schema.id: schema for schema in schemas}

    def read(lsn: int) -> Remains:
        try:
            return remains_of(context.store.get(context.names.wal_object(lsn)), lsn, by_id)
        except NotFoundError:
            return Remains(lsn)

    found = context.runtime.map(read, lsns)
    return dict(zip(lsns, found, strict=True))


def remains_of(data: bytes, lsn: int, schemas: dict[int, Schema]) -> Remains:
    """Return the header and the records whose checksums match."""
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
        _intact(record, batch, schema, name)
        for record, batch in zip(found, header.batches, strict=True)
    )
    return Remains(lsn, header, records)


def _frames(data: bytes, start: int) -> Iterator[bytes | None]:
    """Yield the payloads of frames; None for a damaged one."""
    while start + 8 <= len(data):
        length, expected = U32.unpack_from(data, start)[0], U32.unpack_from(data, start + 4)[0]
        end = start + 8 + length
        payload = data[start + 8 : end]
        yield payload if len(payload) == length and crc32c(payload) == expected else None
        start = end + -end % 8


def _intact(
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
    """The log from the head's floor on, replayed as far as it can be read."""

    manifest: Manifest
    remains: dict[int, Remains]
    dedup: DedupWindow
    counting: list[int] = field(default_factory=list)
    ingested: list[SegmentEntry] = field(default_factory=list)
    lost: list[LostLsn] = field(default_factory=list)
    without_begin: list[int] = field(default_factory=list)
    """Ingests that count although their begin cannot be read."""
    needs_fold: bool = False
    """Whether rows or jobs can be saved only by folding past the damage."""
    end: int = 0
    open_jobs: tuple[OpenJob, ...] = ()
    last_ids: tuple[str, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)
    lineages: dict[str, Lineage] = field(default_factory=dict)

    def covers(self) -> tuple[Cover, ...]:
        """Return the LSNs of the rows of the log: all but those of ingests."""
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


def replay_damaged_log(
    names: Namespace, survey: NamespaceSurvey, remains: dict[int, Remains]
) -> RescuedLog:
    """Replay the log from the head's floor on, with the intact parts of damaged objects."""
    head = survey.head
    unreadable = {lsn for lsn, left in remains.items() if left.header is None}
    skipped = tuple(sorted({*head.skipped_lsns, *unreadable}))
    disputes: dict[int, str] = {}
    rules = LogRules(msgspec.structs.replace(head, skipped_lsns=skipped), disputes)
    log = RescuedLog(head, remains, DedupWindow.of(head))
    ended: set[str] = set()
    left = [remain.header for remain in remains.values() if remain.header is not None]
    skipped_begins = {h.job.id for h in left if h.kind is WalKind.BEGIN and h.job is not None}
    headers = _headers(survey, remains)
    for header, ruled in replay_headers(rules, headers, end=survey.log.end):
        verdict = ruled
        blind = any(head.wal_floor <= n < header.lsn for n in unreadable)
        if verdict is Verdict.IGNORED and blind and _may_count(log, header, ended):
            verdict, log.needs_fold = Verdict.APPLIES, True
            log.without_begin.append(header.lsn)
        elif _is_ingest_of(header, skipped_begins) and verdict is Verdict.APPLIES:
            log.without_begin.append(header.lsn)  # its begin can be read here, and is skipped
        if header.job is not None and header.kind is not WalKind.BEGIN:
            ended.add(header.job.id)
        _add(names, log, header, verdict)
    log.needs_fold |= bool(disputes)  # otherwise readers would replay the disputed ids for ever
    log.end, log.open_jobs, log.last_ids = rules.next_lsn, rules.open_jobs, rules.last_ids()
    log.marks, log.lineages = rules.marks, rules.lineages
    replayed = {lost.lsn for lost in log.lost}
    log.lost += [_lost_lsn(names, one, head) for one in remains.values() if one.lsn not in replayed]
    log.lost.sort(key=lambda lost: lost.lsn)
    return log


def _is_ingest_of(header: WalHeader, jobs: set[str]) -> bool:
    return header.kind is WalKind.INGEST and header.job is not None and header.job.id in jobs


def _unseen(names: Namespace, ingest: WalHeader) -> LostLsn:
    """Return an ingest whose begin cannot be read: views of older generations skip it."""
    key = names.wal_object(ingest.lsn)
    return LostLsn(ingest.lsn, key, WalKind.INGEST.value, 0, 0, history_only=True)


def counted_ingests(survey: NamespaceSurvey) -> set[int]:
    """Return the LSNs of ingests that have counted: in a generation or in the dedup window.

    One that did not count is in neither: it landed in a slot that had been collected (H67).
    """
    named = {(i, segment.entry.visible_lsn) for i, segment in survey.chain.named.items()}
    keys = {(entry.key, entry.lsn) for entry in survey.head.dedup}
    found = set()
    for header in survey.log.headers():
        job = header.job
        if header.kind is WalKind.INGEST and job is not None:
            ids = {(segment.id, header.lsn) for segment in job.segments}
            if (job.key, header.lsn) in keys or ids & named:
                found.add(header.lsn)
    return found


def unseen_ingests(names: Namespace, survey: NamespaceSurvey) -> list[LostLsn]:
    """Return the ingests below the head's floor whose begin may be among the unreadable objects.

    The newest state has their rows. Unless `counted_ingests` has one, it no longer counts in views
    of older generations.
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


def _headers(survey: NamespaceSurvey, remains: dict[int, Remains]) -> dict[int, WalHeader]:
    """Return the readable headers by LSN, those of damaged objects included."""
    read = {lsn: slot.header for lsn, slot in survey.log.slots.items()}
    read |= {lsn: left.header for lsn, left in remains.items()}
    return {lsn: header for lsn, header in read.items() if header is not None}


def _may_count(log: RescuedLog, header: WalHeader, ended: set[str]) -> bool:
    """Whether an ingest's begin may be among the unreadable objects."""
    job = header.job
    if header.kind is not WalKind.INGEST or job is None or job.id in ended:
        return False
    return job.key is None or log.dedup.get(job.key) is None


def _add(names: Namespace, log: RescuedLog, header: WalHeader, verdict: Verdict) -> None:
    left = log.remains.get(header.lsn)
    if left is not None:
        log.needs_fold |= left.has_contents
        log.lost.append(_lost_of(names, header, left, verdict))
    if verdict is not Verdict.APPLIES:
        return
    if header.kind is WalKind.INGEST:
        log.ingested += ingested_segments(header, log.manifest.schema, names)
    else:
        log.counting.append(header.lsn)
    log.dedup.add(_without_lost_keys(header, left))


def _without_lost_keys(header: WalHeader, left: Remains | None) -> WalHeader:
    """Remove the keys of lost batches from the window: they may be sent again."""
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


def _lost_lsn(names: Namespace, left: Remains, head: Manifest) -> LostLsn:
    kind = left.header.kind.value if left.header is not None else None
    folded = left.lsn < head.wal_floor
    return LostLsn(left.lsn, names.wal_object(left.lsn), kind, None, None, history_only=folded)


def log_versions(
    context: NamespaceContext,
    manifest: Manifest,
    lsns: Sequence[int],
    remains: Mapping[int, Remains],
) -> tuple[Versions, list[RangeTombstone]]:
    """Return the sorted versions of some WAL objects, and their range deletes."""
    parts: list[Versions] = [Versions.empty(manifest.schema)]
    tombstones: list[RangeTombstone] = []
    for header, records in _objects(context, lsns, remains):
        schema = _schema_of(header, manifest)
        seq = 0
        for batch, record in zip(header.batches, records, strict=True):
            if record is not None:
                ops = decode_ops(record, schema, context.names.wal_object(header.lsn))
                rows, ranges = split_ops(ops, header.lsn, seq)
                parts.append(rows.under(manifest.schema))
                tombstones += ranges
            seq += batch.ops
    rows = concat_versions(parts, manifest.schema)
    return rows.take(sorted_places(rows)), tombstones


def _objects(
    context: NamespaceContext, lsns: Sequence[int], remains: Mapping[int, Remains]
) -> Iterator[tuple[WalHeader, Sequence[Buffer | None]]]:
    log = context.log
    for at in range(0, len(lsns), READ_AT_ONCE):
        chunk = list(lsns[at : at + READ_AT_ONCE])
        intact = [lsn for lsn in chunk if lsn not in remains]
        found = dict(zip(intact, log.read_many(intact), strict=True))
        for lsn in chunk:
            left, read = remains.get(lsn), found.get(lsn)
            if left is not None and left.header is not None:
                yield left.header, left.records
            elif read is not None:
                yield read.header, read.records
            else:
                key = context.names.wal_object(lsn)
                raise NotFoundError(f"object {key} was read before and is gone now", object=key)


def _schema_of(header: WalHeader, manifest: Manifest) -> Schema:
    for schema in manifest.schemas:
        if schema.id == header.schema_id:
            return schema
    raise UnsupportedFormatError(
        f"LSN {header.lsn} has schema {header.schema_id}, which is in no readable manifest",
        hint="Rebuild the namespace: segments contain their schemas",
        lsn=header.lsn,
    )
