"""Segments: the tail against the manifest's entry, and if asked, every block.

The tail says all that a manifest says: counts, bounds, schema, set hash. Deep, the whole object is
read in pieces of a few megabytes: its checksum, every block, the order of the keys, whether the
index tells the truth about each group, whether the filter has every key, and the set hash, summed
up again. One group that is damaged does not end the look at the others.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.errors import CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError
from reef.formats.batch import OpKind
from reef.formats.coding import corrupt, crc32c_extend
from reef.formats.filter import hash_keys
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import HEAD, MAGIC, VERSION
from reef.formats.segment_tail import SegmentTail, decode_tail
from reef.formats.set_hash import EMPTY, SetHash, set_hash
from reef.formats.versions import Versions
from reef.jobs.executor import Executor
from reef.jobs.verify_problems import Problem, ProblemKind, problem_of
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.fetch import read_again

__all__ = ["SegmentTask", "check_segments", "run_segment_task"]

PIECE_BYTES = 4 << 20
SHALLOW_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """Some segments, as the manifest has them."""

    store: Store
    namespace: Namespace
    entries: tuple[SegmentEntry, ...]
    deep: bool


def check_segments(
    executor: Executor,
    store: Store,
    names: Namespace,
    entries: Sequence[SegmentEntry],
    *,
    deep: bool,
) -> list[Problem]:
    """Look at segments side by side; return all that is wrong with them."""
    step = 1 if deep else SHALLOW_AT_ONCE
    tasks = [
        SegmentTask(store, names, tuple(entries[at : at + step]), deep)
        for at in range(0, len(entries), step)
    ]
    return [p for found in executor.map(run_segment_task, tasks) for p in found]


def run_segment_task(task: SegmentTask) -> list[Problem]:
    """Look at the segments of a task, one after the other."""
    return [problem for entry in task.entries for problem in _check(task, entry)]


def _check(task: SegmentTask, entry: SegmentEntry) -> Iterator[Problem]:
    key = task.namespace.segment(entry.id)
    try:
        size = task.store.head(key).size
        if size != entry.size:
            yield _problem(key, entry, 0, f"{size} bytes, {entry.size} in the manifest")
            return
        tail, tail_bytes = _tail(task.store, key, entry)
        yield from _compare(key, entry, tail)
        if task.deep:
            yield from _DeepCheck(task.store, key, entry, tail, tail_bytes).run()
    except NotFoundError:
        yield Problem(
            ProblemKind.SEGMENT_MISSING,
            key,
            f"there is no object {key}, though a generation or the log needs it",
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
        return decode_tail(data, entry.size, key), data

    return read_again(read)


def _compare(key: str, entry: SegmentEntry, tail: SegmentTail) -> Iterator[Problem]:
    """What the footer says must be what the manifest says. An ingest's rows store LSN 0."""
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
    for what, (found, expected) in facts.items():
        if found != expected:
            message = f"object {key}: {what} {found!r}, {expected!r} in the manifest"
            yield Problem(ProblemKind.SEGMENT_DISAGREES, key, message, segment=entry.id)


def _problem(key: str, entry: SegmentEntry, offset: int, what: str) -> Problem:
    message = f"object {key}, offset {offset}: {what}"
    return Problem(ProblemKind.SEGMENT_DAMAGED, key, message, offset=offset, segment=entry.id)


@dataclass
class _DeepCheck:
    """Every block of one segment, in pieces."""

    store: Store
    key: str
    entry: SegmentEntry
    tail: SegmentTail
    tail_bytes: bytes
    checksum: int = 0
    set_hash: SetHash = EMPTY
    deleted: int = 0
    patches: int = 0
    last_key: bytes | None = None
    sound: bool = True
    found: list[Problem] = field(default_factory=list)

    def run(self) -> list[Problem]:
        tail_start = self.entry.size - self.entry.tail_bytes
        self._check_front()
        end = self.tail.index.end() if len(self.tail.index) else HEAD.size
        if end != tail_start:
            self._note(end, f"groups end here, the tail begins at {tail_start}")
        for groups in self._pieces():
            self._check_piece(groups)
        if end == tail_start:
            self.checksum = crc32c_extend(self.checksum, self.tail_bytes)
            self._check_sums()
        return self.found

    def _note(self, offset: int, what: str) -> None:
        self.found.append(_problem(self.key, self.entry, offset, what))

    def _check_front(self) -> None:
        front = b""

        def read() -> None:
            nonlocal front
            front = _read(self.store, self.key, 0, HEAD.size)
            if HEAD.unpack(front) != (MAGIC, VERSION, 0):
                what = f"begins with {front!r}, which no segment of version {VERSION} does"
                raise corrupt(self.key, 0, what)

        try:
            read_again(read)
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
                self.sound = False
                self.found.append(self._damage(error))

    def _fetch(self, groups: list[int], base: int, end: int) -> bytes:
        """Read a piece; again where a checksum is wrong, as it may be the network's fault."""
        data = b""

        def read() -> None:
            nonlocal data
            data = _read(self.store, self.key, base, end)
            for group in groups:
                self._decode(group, data, base)

        with suppress(CorruptionError):  # it is told group by group
            read_again(read)
        return data

    def _decode(self, group: int, data: bytes, base: int) -> Versions:
        numbers = sorted(self.tail.footer.schema.types())
        view = memoryview(data)
        blocks = [view[a - base : b - base] for a, b in self.tail.ranges(group, numbers)]
        return self.tail.decode_group(group, numbers, blocks)

    def _check_group(self, group: int, rows: Versions) -> None:
        index = self.tail.index
        offset = int(index.starts[group])
        hashes = hash_keys(rows.keys)
        self.set_hash += set_hash(hashes, rows.seqs, rows.kinds)
        self.deleted += int((rows.kinds == OpKind.DELETE).sum())
        self.patches += int((rows.kinds == OpKind.PATCH).sum())
        first, last = rows.keys[0].as_py(), rows.keys[len(rows) - 1].as_py()
        if (first, last) != (index.first_keys[group], index.last_keys[group]):
            self._note(offset, f"keys from {first!r} to {last!r}, the index says otherwise")
        if self.last_key is not None and self.last_key >= first:
            self._note(offset, f"key {first!r} comes after {self.last_key!r}")
        self.last_key = last
        if not _in_order(rows):
            self._note(offset, "keys are out of order")
        lsns = (int(rows.lsns.min()), int(rows.lsns.max()))
        if lsns != (int(index.lsn_min[group]), int(index.lsn_max[group])):
            self._note(offset, f"LSNs {lsns}, the index says otherwise")
        if not self.tail.filter.may_have_many(hashes).all():
            self._note(offset, "the filter lacks a key")
        for number, array in rows.fields.items():
            if not self._bounds_hold(group, number, array):
                self._note(offset, f"column {number} has values outside of the index's bounds")

    def _bounds_hold(self, group: int, number: int, array: pa.Array) -> bool:
        """Whether no value lies outside of what the index says; null says nothing."""
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
            if self.sound and not self.found:
                self._note(0, f"checksum {found}, {expected} in the manifest")
        if not self.sound:
            return
        tombstones = self.deleted + len(self.tail.range_tombstones)
        if str(self.set_hash) != self.entry.set_hash:
            self._note(0, f"the rows' set hash is {self.set_hash}, not {self.entry.set_hash}")
        if (tombstones, self.patches) != (self.entry.tombstones, self.entry.patches):
            self._note(0, f"{tombstones} tombstones and {self.patches} patches")


def _in_order(rows: Versions) -> bool:
    """Whether rows are sorted by key, and for one key the newest first."""
    if len(rows) < 2:
        return True
    same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    rises = pc.greater(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    lsns, seqs = rows.lsns, rows.seqs.astype(np.int64)
    older = (lsns[1:] < lsns[:-1]) | ((lsns[1:] == lsns[:-1]) & (seqs[1:] < seqs[:-1]))
    return bool((rises | (same & older)).all())
