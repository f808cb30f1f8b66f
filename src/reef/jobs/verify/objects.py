"""Check every object of the log and every segment that is needed.

**A segment**'s tail is compared with its entry in the manifest, and with `deep` every block is
read. The tail has all facts of the entry: counts, bounds, schema, set hash. Deep, the whole object
is read in pieces of a few megabytes: its checksum, every block, the order of the keys, the index
against each group, the filter against every key, and the set hash, computed again. A damaged group
does not end the check of the others.

**The log** is read whole, slot by slot, and classified by its rules. A task reads some slots:
framing, checksums of all records, footer, columns of the batches. The driver then replays the
headers in order. It is not always known which slots must be filled: a writer may have several PUTs
in flight, the newest of which may not have landed. A slot counts as missing only if something
proves that it was filled once:

- it is below the head's floor, or below the last LSN that a manifest has seen;
- a batch behind it lists a slot from it on in `after`, as seen durable;
- an object is so far behind it that no writer could have had both in flight;
- an object behind it cannot be read: it may have listed the slot in `after`;
- an object behind it is older than the grace period: every PUT of then has landed or failed.

An emptied slot is open for the next writer, which fills it with its fence. The batch behind it
shows the damage: it lists the write id of the object that its writer had seen there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.context import NamespaceContext
from reef.engine.log.log import IDS_KEPT, LogRules, Verdict, listed_slots, replay_headers
from reef.engine.log.tail import ingested_segments
from reef.errors import CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError
from reef.formats.coding import corrupt, crc32c_extend
from reef.formats.group import distinct_keys, same_as_next
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import (
    EMPTY,
    HEAD,
    MAGIC,
    PLAIN_VERSION,
    SegmentTail,
    SetHash,
    check_identity,
    decode_tail,
    set_hash,
)
from reef.formats.segment_index import hash_keys
from reef.formats.vector_index import CentroidSet, decode_centroids
from reef.formats.versions import KeysInOrder, Versions
from reef.formats.wal_object import OpKind, WalHeader, WalKind, WalObject, decode_records
from reef.jobs.verify.chain import ManifestChain, Problem, ProblemKind, problem_of
from reef.jobs.verify.indexes import Sample, check_directories, check_rows
from reef.paths import Namespace, centroids_name
from reef.runtime import Executor
from reef.stores import Store, fetch
from reef.stores.base import current_time_s, reread_if_damaged

TASK_SLOTS = 128
WINDOW = IDS_KEPT + 1
"""Up to so many slots may be open between the last filled one and one that was put ahead."""


@dataclass(frozen=True, slots=True)
class LogTask:
    """Some slots to read whole."""

    context: NamespaceContext
    lsns: tuple[int, ...]
    schemas: tuple[Schema, ...]


@dataclass(frozen=True, slots=True)
class SlotRead:
    """The header of the object in a slot, or the reason why there is none."""

    lsn: int
    header: WalHeader | None = None
    size: int = 0
    kind: ProblemKind | None = None
    message: str = ""
    offset: int | None = None


def run_log_task(task: LogTask) -> list[SlotRead]:
    """Read and check the objects of a task's slots."""
    schemas = {schema.id: schema for schema in task.schemas}
    return task.context.runtime.map(lambda lsn: _read_slot(task, lsn, schemas), task.lsns)


def read_slots(
    executor: Executor,
    context: NamespaceContext,
    lsns: Sequence[int],
    schemas: tuple[Schema, ...],
) -> dict[int, SlotRead]:
    """Return the headers of these slots, read in parallel."""
    chunks = [tuple(lsns[at : at + TASK_SLOTS]) for at in range(0, len(lsns), TASK_SLOTS)]
    tasks = [LogTask(context, chunk, schemas) for chunk in chunks]
    return {read.lsn: read for part in executor.map(run_log_task, tasks) for read in part}


def _read_slot(task: LogTask, lsn: int, schemas: dict[int, Schema]) -> SlotRead:
    key = task.context.names.wal_object(lsn)
    size = 0

    def decode(body: bytes) -> WalObject:
        nonlocal size
        size = len(body)
        found = WalObject.decode(body, key)
        if found.header.lsn != lsn:
            message = f"object {key} has the header of LSN {found.header.lsn}"
            raise CorruptionError(message, object=key, offset=0)
        schema = schemas.get(found.header.schema_id)
        if schema is not None:
            deque(decode_records(found, schema, key), maxlen=0)
        return found

    try:
        return SlotRead(lsn, fetch(task.context.store, key, decode).header, size)
    except CorruptionError as error:
        offset = error.context.get("offset")
        return SlotRead(lsn, None, size, ProblemKind.WAL_DAMAGED, error.message, offset)
    except UnsupportedFormatError as error:
        return SlotRead(lsn, None, size, ProblemKind.UNSUPPORTED, error.message)
    except NotFoundError:
        return SlotRead(lsn, kind=ProblemKind.WAL_MISSING, message=f"object {key} is missing")


@dataclass(slots=True)
class LogSurvey:
    """The log from the lowest floor that is needed to its end."""

    first: int
    slots: dict[int, SlotRead] = field(default_factory=dict)
    """The listed slots without those that an earlier repair skipped."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    ingested: list[SegmentEntry] = field(default_factory=list)
    """Segments of ingests that count."""
    open_jobs: tuple[OpenJob, ...] = ()
    waiting_jobs: frozenset[str] = frozenset()
    """Named by objects behind a gap, which may still count."""
    end: int = 0
    """The first open slot; objects behind it do not count."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def damaged(self) -> list[int]:
        """The slots that cannot be read, or that were filled once and are empty."""
        return sorted(p.lsn for p in self.problems if p.lsn is not None)

    def headers(self) -> list[WalHeader]:
        return [slot.header for slot in self.slots.values() if slot.header is not None]


def survey_log(executor: Executor, context: NamespaceContext, chain: ManifestChain) -> LogSurvey:
    """Read and replay the log from the lowest floor that is needed."""
    head, start = chain.head, chain.start
    skipped = frozenset(head.skipped_lsns)
    first = max(start.wal_floor - 1, start.wal_base)
    if first < start.wal_floor and context.names.home_of_slot(first) is not None:
        first = start.wal_floor  # an inherited slot below the floor may have been released
    settled_s = current_time_s(context.store) - head.grace_ms / 1000
    infos = dict(listed_slots(context.store, context.names, first))
    listed = list(infos)
    settled = max((n for n, info in infos.items() if info.last_modified_s < settled_s), default=0)
    log = LogSurvey(start.wal_floor)
    present = [lsn for lsn in listed if lsn not in skipped]
    log.slots = read_slots(executor, context, present, head.schemas)
    log.problems = _damage(context.names, log.slots.values())
    log.problems += _unreadable_rows(context.names, log, head)
    log.problems += _missing(context.names, log, chain, {*listed, *skipped}, settled)
    disputes = _replay(log, chain, listed, context.names)
    log.problems += [
        Problem(ProblemKind.WAL_DAMAGED, context.names.wal_object(lsn), message, offset=0, lsn=lsn)
        for lsn, message in disputes.items()
    ]
    return log


def _damage(names: Namespace, slots: Iterable[SlotRead]) -> list[Problem]:
    return [
        Problem(
            slot.kind, names.wal_object(slot.lsn), slot.message, offset=slot.offset, lsn=slot.lsn
        )
        for slot in slots
        if slot.kind is not None
    ]


def _unreadable_rows(names: Namespace, log: LogSurvey, head: Manifest) -> Iterator[Problem]:
    """Yield the slots whose rows no schema describes: no process can read them.

    One that is newer than the head is described by the batches themselves, or by the fence of their
    writer, which is behind the floor of that head.
    """
    known = {0, *(schema.id for schema in head.schemas)}
    known |= {header.schema.id for header in log.headers() if header.schema is not None}
    for header in log.headers():
        if header.schema_id not in known:
            key = names.wal_object(header.lsn)
            message = f"object {key} has schema {header.schema_id}, which no object describes"
            yield Problem(ProblemKind.WAL_DAMAGED, key, message, offset=0, lsn=header.lsn)


def _missing(
    names: Namespace, log: LogSurvey, chain: ManifestChain, present: set[int], settled: int
) -> list[Problem]:
    last = max(_proved_end(log, chain.head, present), settled - 1)
    lost = [lsn for lsn in range(log.first, last + 1) if lsn not in present]
    return [
        Problem(
            ProblemKind.WAL_MISSING,
            names.wal_object(lsn),
            f"object {names.wal_object(lsn)} is missing, though later slots were filled",
            lsn=lsn,
        )
        for lsn in lost
    ]


def _proved_end(log: LogSurvey, head: Manifest, present: set[int]) -> int:
    """Return the last LSN up to which every slot is known to have been filled."""
    proofs = [head.wal_floor - 1, head.wal_id_last_seen, max(present, default=0) - WINDOW]
    proofs += [h.lsn - len(h.after) for h in log.headers() if h.after]
    # An unreadable object may have listed any slot before it in `after`.
    proofs += [slot.lsn - 1 for slot in log.slots.values() if slot.header is None]
    return max(proofs)


def _replay(
    log: LogSurvey, chain: ManifestChain, listed: Sequence[int], names: Namespace
) -> dict[int, str]:
    """Pass the headers through the rules; damaged ones are skipped. Return disputed slots.

    A disputed slot was overwritten, or emptied and filled again before any process noticed (H73).
    """
    disputes: dict[int, str] = {}
    skipped_lsns = {*chain.head.skipped_lsns, *log.damaged}
    start = msgspec.structs.replace(
        chain.start,
        skipped_lsns=tuple(sorted(skipped_lsns)),
        ingests_without_begin=chain.head.ingests_without_begin,
    )
    rules = LogRules(start, disputes)
    headers = {lsn: slot.header for lsn, slot in log.slots.items() if slot.header is not None}
    for header, verdict in replay_headers(rules, headers):
        log.verdicts[header.lsn] = verdict
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            _add_ingest(log, header, chain.head, names)
    log.end, log.open_jobs = rules.next_lsn, rules.open_jobs
    behind = [log.slots[lsn].header for lsn in listed if lsn >= log.end and lsn in log.slots]
    log.waiting_jobs = frozenset(h.job.id for h in behind if h is not None and h.job is not None)
    return disputes


def _add_ingest(log: LogSurvey, header: WalHeader, head: Manifest, names: Namespace) -> None:
    try:
        log.ingested += ingested_segments(header, head.schema, names)
    except UnsupportedFormatError as error:
        log.problems.append(
            Problem(ProblemKind.UNSUPPORTED, f"LSN {header.lsn}", error.message, lsn=header.lsn)
        )


PIECE_BYTES = 4 << 20
SHALLOW_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SegmentCheckTask:
    """Some segments, as the manifest has them."""

    context: NamespaceContext
    entries: tuple[SegmentEntry, ...]
    deep: bool
    every_row: bool = False
    """Whether all rows are compared with their indexes."""


def check_segments(
    executor: Executor,
    context: NamespaceContext,
    entries: Sequence[SegmentEntry],
    *,
    deep: bool,
    every_row: bool = False,
) -> list[Problem]:
    """Check segments in parallel; return their problems."""
    step = 1 if deep else SHALLOW_AT_ONCE
    tasks = [
        SegmentCheckTask(context, tuple(entries[at : at + step]), deep, every_row)
        for at in range(0, len(entries), step)
    ]
    return [p for found in executor.map(run_segment_task, tasks) for p in found]


def run_segment_task(task: SegmentCheckTask) -> list[Problem]:
    """Check the segments of a task, one after the other."""
    return [problem for entry in task.entries for problem in _check(task, entry)]


def _check(task: SegmentCheckTask, entry: SegmentEntry) -> Iterator[Problem]:
    key = task.context.names.segment(entry.id, entry.home)
    try:
        size = task.context.store.head(key).size
        if size != entry.size:
            yield _problem(key, entry, 0, f"{size} bytes, {entry.size} in the manifest")
            return
        tail, tail_bytes = _tail(task.context.store, key, entry)
        yield from _compare(key, entry, tail)
        damaged = list(check_directories(key, tail))
        yield from damaged
        if task.deep:
            checks = _DeepCheck(task.context.store, key, entry, tail, tail_bytes)
            checks.compares_checksum = not damaged
            checks.every_row = task.every_row
            yield from checks.run()
    except NotFoundError:
        yield Problem(
            ProblemKind.SEGMENT_MISSING,
            key,
            f"object {key} is missing, though a generation or the log names it",
            segment=entry.id,
        )
    except CorruptionError as error:
        yield problem_of(ProblemKind.SEGMENT_DAMAGED, error, key, segment=entry.id)
    except UnsupportedFormatError as error:
        yield problem_of(ProblemKind.UNSUPPORTED, error, key, segment=entry.id)


def _read(store: Store, key: str, start: int, end: int) -> bytes:
    """Return a range; an object that ends before it is damaged."""
    try:
        return store.get_range(key, start, end)
    except InvalidInputError as error:
        raise corrupt(key, start, "the object ends too early") from error


def _tail(store: Store, key: str, entry: SegmentEntry) -> tuple[SegmentTail, bytes]:
    start = entry.size - entry.tail_bytes
    if not 0 <= start < entry.size:
        raise corrupt(key, 0, f"a tail of {entry.tail_bytes} bytes in an object of {entry.size}")

    def read() -> tuple[SegmentTail, bytes]:
        data = _read(store, key, start, entry.size)
        tail = decode_tail(data, entry.size, key)
        check_identity(tail.footer, entry.id, key)
        return tail, data

    return reread_if_damaged(read)


def _compare(key: str, entry: SegmentEntry, tail: SegmentTail) -> Iterator[Problem]:
    """Compare the footer with the entry in the manifest. Rows of an ingest store LSN 0."""
    footer = tail.footer
    facts = {
        "rows": (footer.rows, entry.rows),
        "tombstones": (footer.tombstones, entry.tombstones),
        "patches": (footer.patches, entry.patches),
        "first key": (footer.min_key, entry.min_key),
        "last key": (footer.max_key, entry.max_key),
        "schema": (footer.schema.id, entry.schema_id),
        "set hash": (footer.set_hash, entry.set_hash),
        "rows in the index": (int(tail.index.rows.sum()), entry.rows),
    }
    if not entry.visible_lsn:
        facts["lowest LSN"] = (footer.lsn_min, entry.lsn_min)
        facts["highest LSN"] = (footer.lsn_max, entry.lsn_max)
    for name, (found, expected) in facts.items():
        if found != expected:
            message = f"object {key}: {name} {found!r}, {expected!r} in the manifest"
            yield Problem(ProblemKind.SEGMENT_DISAGREES, key, message, segment=entry.id)


def _problem(key: str, entry: SegmentEntry, offset: int, reason: str) -> Problem:
    message = f"object {key}, offset {offset}: {reason}"
    return Problem(ProblemKind.SEGMENT_DAMAGED, key, message, offset=offset, segment=entry.id)


@dataclass
class _DeepCheck:
    """Checks every block of one segment, in pieces."""

    store: Store
    key: str
    entry: SegmentEntry
    tail: SegmentTail
    tail_bytes: bytes
    checksum: int = 0
    set_hash: SetHash = EMPTY
    deleted: int = 0
    patches: int = 0
    merges: int = 0
    last_key: bytes | None = None
    intact: bool = True
    compares_checksum: bool = True
    """Whether that of the whole object has to be right: damage that it would show is reported."""
    every_row: bool = False
    """Whether all rows are compared with the indexes, or those of three groups."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """Rows by column, to be compared with the indexes."""
    found: list[Problem] = field(default_factory=list)

    def run(self) -> list[Problem]:
        tail_start = self.entry.size - self.entry.tail_bytes
        self._check_front()
        end = self.tail.index.end() if len(self.tail.index) else HEAD.size
        for groups in self._pieces():
            self._check_piece(groups)
        end = self._check_indexes(end)
        if end != tail_start:
            self._note(end, f"the groups and indexes end here, the tail begins at {tail_start}")
        else:
            self.checksum = crc32c_extend(self.checksum, self.tail_bytes)
            self._check_sums()
        return self.found

    def _check_indexes(self, end: int) -> int:
        """Check the index data behind the groups, which end here; return where it ends."""
        data: dict[int, bytes] = {}
        for number, place in enumerate(self.tail.footer.indexes):
            if place.is_built:
                start, end = end, place.data.offset + place.data.length
                data[number] = _read(self.store, self.key, start, end)
                self.checksum = crc32c_extend(self.checksum, data[number])
        self.found += check_rows(self.key, self.tail, data, self.samples, self._centroids())
        return end

    def _centroids(self) -> dict[str, CentroidSet]:
        """Return the centroid sets of its indexes that can be read; others are checked apart."""
        found: dict[str, CentroidSet] = {}
        for place in self.tail.footer.indexes:
            folder = self.key.rpartition("/")[0]
            key = f"{folder}/{centroids_name(place.spec.centroids)}"
            if place.spec.centroids:
                with suppress(CorruptionError, NotFoundError):
                    found[place.spec.centroids] = decode_centroids(self.store.get(key), key)
        return found

    def _sample(self, group: int, rows: Versions) -> None:
        """Keep the whole rows of the first, the middle and the last group for their indexes."""
        count = len(self.tail.index)
        if not self.every_row and group not in (0, count // 2, count - 1):
            return
        whole = np.flatnonzero(rows.kinds == OpKind.PUT)
        first = int(self.tail.index.rows[:group].sum())
        for number in {place.spec.column for place in self.tail.footer.indexes}:
            column = rows.fields.get(number)
            if column is not None:
                sample = ((whole + first).astype(np.uint32), column.take(pa.array(whole)))
                self.samples.setdefault(number, []).append(sample)

    def _note(self, offset: int, reason: str) -> None:
        self.found.append(_problem(self.key, self.entry, offset, reason))

    def _check_front(self) -> None:
        front = b""

        def read() -> None:
            nonlocal front
            front = _read(self.store, self.key, 0, HEAD.size)
            version = self.tail.footer.version
            if HEAD.unpack(front) != (MAGIC, min(version, PLAIN_VERSION), 0):
                problem = f"begins with {front!r}, which no segment of version {version} does"
                raise corrupt(self.key, 0, problem)

        try:
            reread_if_damaged(read)
        except CorruptionError as error:
            self.found.append(self._damage(error))
        self.checksum = crc32c_extend(0, front)

    def _damage(self, error: CorruptionError) -> Problem:
        return problem_of(ProblemKind.SEGMENT_DAMAGED, error, self.key, segment=self.entry.id)

    def _pieces(self) -> Iterator[list[int]]:
        """Yield groups that are read together."""
        starts = [*self.tail.index.starts.tolist(), self.tail.index.end()]
        piece: list[int] = []
        for group in range(len(self.tail.index)):
            piece.append(group)
            if starts[group + 1] - starts[piece[0]] >= PIECE_BYTES:
                yield piece
                piece = []
        if piece:
            yield piece

    def _check_piece(self, groups: list[int]) -> None:
        starts = [*self.tail.index.starts.tolist(), self.tail.index.end()]
        base, end = starts[groups[0]], starts[groups[-1] + 1]
        data = self._fetch(groups, base, end)
        self.checksum = crc32c_extend(self.checksum, data)
        for group in groups:
            try:
                self._check_group(group, self._decode(group, data, base))
            except CorruptionError as error:
                self.intact = False
                self.found.append(self._damage(error))

    def _fetch(self, groups: list[int], base: int, end: int) -> bytes:
        """Read a piece; again if a checksum is wrong, which the network may have caused."""
        data = b""

        def read() -> None:
            nonlocal data
            data = _read(self.store, self.key, base, end)
            for group in groups:
                self._decode(group, data, base)

        with suppress(CorruptionError):  # reported group by group
            reread_if_damaged(read)
        return data

    def _decode(self, group: int, data: bytes, base: int) -> Versions:
        numbers = sorted(self.tail.footer.schema.types())
        view = memoryview(data)
        blocks = [view[a - base : b - base] for a, b in self.tail.ranges(group, numbers)]
        return self.tail.decode_group(group, numbers, blocks)

    def _check_group(self, group: int, rows: Versions) -> None:
        index = self.tail.index
        self._sample(group, rows)
        offset = int(index.starts[group])
        hashes = hash_keys(rows.keys)
        self.set_hash += set_hash(hashes, rows.seqs, rows.kinds)
        self.deleted += int((rows.kinds == OpKind.DELETE).sum())
        self.patches += int(rows.are_partial().sum())
        self.merges += int((rows.kinds == OpKind.MERGE).sum())
        first, last = rows.keys[0].as_py(), rows.keys[len(rows) - 1].as_py()
        if (first, last) != (index.first_keys[group], index.last_keys[group]):
            self._note(offset, f"keys from {first!r} to {last!r}, the index says otherwise")
        if self.last_key is not None and self.last_key >= first:
            self._note(offset, f"key {first!r} comes after {self.last_key!r}")
        self.last_key = last
        if not _in_order(rows):
            self._note(offset, "keys are out of order")
        if not self._pages_hold(group, rows):
            self._note(offset, "the keys of its pages are not between those of their rows")
        lsns = (int(rows.lsns.min()), int(rows.lsns.max()))
        if lsns != (int(index.lsn_min[group]), int(index.lsn_max[group])):
            self._note(offset, f"LSNs {lsns}, the index says otherwise")
        if not self.tail.filter.may_have_many(hashes).all():
            self._note(offset, "the filter lacks a key")
        for number, array in rows.fields.items():
            if not self._bounds_hold(group, number, array):
                self._note(offset, f"column {number} has values outside of the index's bounds")

    def _pages_hold(self, group: int, rows: Versions) -> bool:
        """Whether the key of each page is between the keys before it and its own."""
        pages, keys = self.tail.index.pages, KeysInOrder(rows.keys)
        first, end = pages.firsts[group : group + 2].tolist()
        starts = np.cumsum(pages.rows[first:end]).tolist()[:-1]
        cuts = zip(starts, pages.keys[first + 1 : end], strict=True)
        counts = pages.distinct[first:end].tolist()
        ends = np.cumsum(pages.rows[first:end]).tolist()
        return (
            pages.keys[first] <= keys[0]
            and all(keys[start - 1] < key <= keys[start] for start, key in cuts)
            and (not any(counts) or distinct_keys(same_as_next(rows.keys), ends) == counts)
        )

    def _bounds_hold(self, group: int, number: int, array: pa.Array) -> bool:
        """Whether all values are within the bounds of the index; a null bound is none."""
        low, high = (
            bounds[number][group] if number in bounds else None
            for bounds in (self.tail.index.smallest, self.tail.index.largest)
        )
        for bound, outside in ((low, pc.less), (high, pc.greater)):
            if bound is not None and bound.is_valid and pc.any(outside(array, bound)).as_py():
                return False
        return True

    def _check_sums(self) -> None:
        if self.checksum != self.entry.checksum:
            found, expected = f"{self.checksum:08x}", f"{self.entry.checksum:08x}"
            if self.intact and not self.found and self.compares_checksum:
                self._note(0, f"checksum {found}, {expected} in the manifest")
        if not self.intact:
            return
        tombstones = self.deleted + len(self.tail.range_tombstones)
        if str(self.set_hash) != self.entry.set_hash:
            self._note(0, f"the rows' set hash is {self.set_hash}, not {self.entry.set_hash}")
        counts = tombstones, self.patches, self.merges
        footer = self.tail.footer
        if counts != (self.entry.tombstones, self.entry.patches, footer.merges):
            self._note(0, f"{tombstones} tombstones, {self.patches} patches, {self.merges} merges")


def _in_order(rows: Versions) -> bool:
    """Whether rows are sorted by key, and for one key the newest first."""
    if len(rows) < 2:
        return True
    same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    rises = pc.greater(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    lsns, seqs = rows.lsns, rows.seqs.astype(np.int64)
    older = (lsns[1:] < lsns[:-1]) | ((lsns[1:] == lsns[:-1]) & (seqs[1:] < seqs[:-1]))
    return bool((rises | (same & older)).all())
