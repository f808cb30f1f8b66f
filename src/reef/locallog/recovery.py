"""Opening a log: recovery of the tail, and segments that are ready for use.

    1. names      every `.wal` file has a name with its base index and id
    2. sealed     each one's header and index frame match the meta store
    3. tail       recovered, or created if it is missing
    4. rotation   a tail that was sealed is closed, and a new one created
    5. orphans    files of segments that are not in the log any more are deleted

A batch is acknowledged only after its sync, and the next one is written only then. So a crash
tears at most the last batch. The scan verifies every commit's checksum; valid are:

- All commits up to the first invalid one. The batch there was torn: it was never acknowledged,
  and is dropped.
- Unless valid commits follow whose entries have the expected indexes. No crash does that: an
  older batch was damaged later. Nothing is dropped then, and the damage is reported.
- Unless whole batches follow that the scan did not reach, because a length was damaged (orphan
  batches). The entries in between cannot be read, so that is an error, and nothing is changed.

The indexes are compared because a batch whose frame header was torn can lead the scan into a
payload, and the payload can be a log itself. Damage that no crash explains raises
CorruptionError; the rest is repaired, and listed in the report.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from reef.errors import CorruptionError, ErrorKind, InvalidInputError
from reef.files import File, FileSystem, is_disk_full
from reef.locallog.encoding import (
    BINARY,
    ENTRY_BYTES_MAX,
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    EntryCodec,
    Frame,
    FrameType,
    Read,
    SegmentHeader,
    decode_entry,
    frames,
    read_header,
    torn_index,
)
from reef.locallog.metastore import (
    FILE_MODE,
    MetaStore,
    NewTail,
    PersistentState,
    SegmentInfo,
    plan_rotation,
    plan_tail,
)
from reef.locallog.segment import SealedSegment, TailSegment

ZERO_BYTES = 1 << 20
CHECK_BYTES = 64 << 10
"""Bytes after the end of the data that must be zero, or it is not trusted."""
BINARY_ENTRY_BYTES = 32
"""Minimum size of an entry of the format's own codec, with its frame."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit frame, and its batch."""

    end: int
    valid: bool
    count: int
    """Entries in the file up to this commit."""
    index_start: int
    """Start of the index before it; 0 if it does not seal the segment."""


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """Frames of a segment, from one pass over it."""

    offsets: list[int]
    lengths: list[int]
    commits: list[Commit]
    end: int
    """End of the last frame."""
    data_end: int
    """Every byte from here on is zero: preallocated, and never written."""


def scan_segment(file: File) -> SegmentScan:
    """Scan all frames of a file. Preallocated space is not read."""
    offsets: list[int] = []
    lengths: list[int] = []
    commits: list[Commit] = []
    index_start, index_length, end = 0, 0, HEADER_BYTES
    size, data_end = file.size(), file.data_end()
    if any(file.read(CHECK_BYTES, data_end)):  # appends are contiguous: the file system is wrong
        data_end = size

    def read(length: int, offset: int) -> bytes:
        data = file.read(min(length, data_end - offset), offset) if offset < data_end else b""
        return data.ljust(min(length, size - offset), b"\0")

    for frame in frames(read, size):
        end = frame.end
        if frame.type == FrameType.ENTRY:
            offsets.append(frame.offset)
            lengths.append(frame.length)
            index_start = 0
        elif frame.type == FrameType.INDEX:
            index_start, index_length = frame.offset + FRAME_BYTES, frame.length
        else:
            count = len(offsets)
            sealed = index_start if index_length == 4 * count else 0
            commits.append(Commit(frame.end, frame.valid, count, sealed))
            index_start = 0
    return SegmentScan(offsets, lengths, commits, end, data_end)


@dataclass(frozen=True, slots=True)
class RecoveredTail:
    """The part of a tail that is valid."""

    offsets: list[int]
    end: int
    index_start: int
    """Not 0 if the segment was sealed, but not yet in the meta store."""
    damaged: tuple[int, ...]
    """Ends of commits with damage that no crash explains."""


@dataclass
class LogRecoveryReport:
    """Findings and repairs of opening a log."""

    dropped_entries: int = 0
    """Entries of a batch that was never acknowledged, as far as they could be read."""
    dropped_bytes: int = 0
    """Its bytes, which were overwritten with zeros."""
    sealed_at_open: bool = False
    """The tail was full, and the crash came before the rotation."""
    created_tail: bool = False
    """The tail was missing and was created. A deleted tail cannot be distinguished."""
    deleted_files: list[str] = field(default_factory=list)
    """Files of segments that are not in the log any more."""
    damaged: list[str] = field(default_factory=list)
    """Acknowledged batches with a wrong checksum; a tail that has lost entries. Run verify."""


def recover(
    file: File, info: SegmentInfo, codec: EntryCodec | None
) -> tuple[RecoveredTail, SegmentScan]:
    """Return the valid part of a tail; CorruptionError if no crash explains its content.

    Without the codec, the indexes of entries after an invalid commit are not compared.
    """
    scan = scan_segment(file)
    kept = _choose(scan, lambda place: codec is None or _is_own(file, scan, place, info, codec))
    if kept.end:
        check_header(file, info)
    return kept, scan


def _choose(scan: SegmentScan, is_own: Callable[[int], bool]) -> RecoveredTail:
    commits = scan.commits
    good = next((n for n, commit in enumerate(commits) if not commit.valid), len(commits))
    later = [n for n, commit in enumerate(commits) if commit.valid and n > good]
    damaged: tuple[int, ...] = ()
    if later:
        places = range(commits[good].count, commits[later[-1]].count)
        if places and all(map(is_own, places)):
            good, bad = later[-1] + 1, commits[good : later[-1]]
            damaged = tuple(commit.end for commit in bad if not commit.valid)
    if not good:
        return RecoveredTail([], 0, 0, damaged)
    last = commits[good - 1]
    return RecoveredTail(scan.offsets[: last.count], last.end, last.index_start, damaged)


def _is_own(
    file: File, scan: SegmentScan, place: int, info: SegmentInfo, codec: EntryCodec
) -> bool:
    """Return whether the entry at a position has the expected index."""
    index = _index_of(file, scan.offsets[place], scan.lengths[place], codec)
    return index == info.base_index + place


def _index_of(file: File, offset: int, length: int, codec: EntryCodec) -> int:
    """Return the index that is stored in an entry; 0 if it cannot be decoded."""
    if length > ENTRY_BYTES_MAX:
        return 0
    try:
        return decode_entry(codec, file.read(length, offset + FRAME_BYTES)).index
    except CorruptionError:
        return 0


def check_no_orphans(
    file: File, info: SegmentInfo, codec: EntryCodec | None, kept: RecoveredTail, scan: SegmentScan
) -> None:
    """Raise if whole batches follow the valid part where the scan did not reach (H27)."""
    next_index = info.base_index + len(kept.offsets)
    entry_bytes = BINARY_ENTRY_BYTES if info.codec == BINARY.id else FRAME_BYTES

    def is_later(entry: Frame) -> bool:
        if codec is None:
            return True
        index = _index_of(file, entry.offset, entry.length, codec)
        return next_index < index <= next_index + (entry.offset - kept.end) // entry_bytes

    start = kept.end if codec is None else _torn_end(file, kept.end, codec, next_index)
    size = min(file.size(), scan.data_end + FRAME_BYTES)  # a checksum may end in zeros
    place = find_orphan_batch(file.read, size, start, scan.end, is_later)
    if place is not None:
        raise CorruptionError(
            f"{info.name}, offset {kept.end}: entry {next_index} cannot be read, "
            f"and a whole batch follows at {place}",
            hint="No crash causes this, so nothing was dropped: restore the file from a copy",
            object=info.name,
            offset=kept.end,
        )


def _torn_end(file: File, start: int, codec: EntryCodec, next_index: int) -> int:
    """Return the end of the entries of a torn batch that have the next indexes.

    Their payloads belong to the user, and may contain the batches of another log. Their lengths are
    not damaged, so no batch of this log is inside.
    """
    offset = start or HEADER_BYTES
    for frame in frames(file.read, file.size(), offset):
        if frame.type != FrameType.ENTRY or frame.length > ENTRY_BYTES_MAX:
            break
        if torn_index(codec, file.read(frame.length, frame.offset + FRAME_BYTES)) != next_index:
            break
        offset, next_index = frame.end, next_index + 1
    return offset


def check_header(file: File, info: SegmentInfo) -> None:
    """Raise unless the header matches the meta store."""
    stored = read_header(file.read(HEADER_BYTES, 0), info.name)
    expected = SegmentHeader(info.base_index, info.id, info.codec)
    if stored != expected:
        raise CorruptionError(
            f"{info.name}, offset 0: expected {expected}, found {stored}",
            object=info.name,
            offset=0,
        )


def used_end(file: File, start: int, scan: SegmentScan) -> int:
    """Return the end of the bytes from `start` on that are not zero; `start` if all are."""
    end = start
    for offset in range(start, scan.data_end, ZERO_BYTES):
        used = len(file.read(min(ZERO_BYTES, scan.data_end - offset), offset).rstrip(b"\0"))
        end = offset + used if used else end
    return end


def erase(file: File, start: int, end: int) -> None:
    """Overwrite the bytes after the last commit with zeros; durable after a sync.

    Old frames could otherwise be read as part of the next torn batch.
    """
    for offset in range(start, end, ZERO_BYTES):
        file.write(bytes(min(ZERO_BYTES, end - offset)), offset)


# --- orphan batches -----------------------------------------------------------------


COMMIT = re.compile(rb"\x03\0\0\0")
MAYBE = (bytes([FrameType.ENTRY]), b"")
"""First byte of an entry; or none, if it is in the next window."""
WINDOW_BYTES = 1 << 20
TRIES_MAX = 10_000
"""Offsets to try: a payload may be full of bytes that resemble commits."""


def find_orphan_batch(
    read: Read, size: int, start: int, end: int, is_later: Callable[[Frame], bool]
) -> int | None:
    """Return the offset of a whole batch after `start`, if there is one.

    A scan follows the lengths of frames. After a damaged length, all batches after it resemble
    the rest of a torn one, but a crash tears the last batch only: a whole batch was written after
    the one before it was acknowledged, and dropping it would lose acknowledged entries (H27).
    Commits are at multiples of eight, and a batch is whole if its commit's checksum matches.

    A torn batch may contain a log in its payload, whose batches are whole too. Entries of the torn
    batch that are readable are before `start`. In the rest, the first batch of such a log has the
    wrong index: a batch of this log has an index above the last valid one, and not by more than
    fit in between, which `is_later` checks; a log in a payload is skipped as a whole. `end` is
    where the scan ended, which may be a commit whose header is damaged.
    """
    passed = start
    for place in islice(_places(read, size, start, end), TRIES_MAX):
        first = _first_entry(read, size, place) if place >= passed else None
        if first is None:
            continue
        if is_later(first):
            return place
        passed = _log_end(read, size, place)
    return None


def _places(read: Read, size: int, start: int, end: int) -> Iterator[int]:
    """Yield possible starts of batches: after a possible commit, and before an entry."""
    if _is_entry(read, size, end + FRAME_BYTES):
        yield end + FRAME_BYTES
    for offset in range(start, size, WINDOW_BYTES):
        data = read(min(WINDOW_BYTES, size - offset), offset)
        for match in COMMIT.finditer(data):
            place = offset + match.start() + FRAME_BYTES
            behind = data[place - offset : place - offset + 1]
            if place % FRAME_BYTES == 0 and behind in MAYBE and _is_entry(read, size, place):
                yield place


def _is_entry(read: Read, size: int, place: int) -> bool:
    head = read(FRAME_BYTES, place) if place + FRAME_BYTES <= size else b""
    if len(head) < FRAME_BYTES:
        return False
    kind, length = FRAME.unpack(head)
    return bool(kind == FrameType.ENTRY and place + FRAME_BYTES + length <= size)


def _first_entry(read: Read, size: int, start: int) -> Frame | None:
    """Return the first entry of the batch at `start`, if the batch is whole."""
    first: Frame | None = None
    for frame in frames(read, size, start):
        if frame.type == FrameType.COMMIT:
            return first if frame.valid else None
        if frame.type == FrameType.ENTRY:
            first = first or frame
    return None


def _log_end(read: Read, size: int, start: int) -> int:
    """Return the end of the last of the consecutive whole batches from `start` on."""
    end = start
    for frame in frames(read, size, start):
        if frame.type == FrameType.COMMIT:
            if not frame.valid:
                break
            end = frame.end
    return end


# --- opening ------------------------------------------------------------------------


NAME = re.compile(r"(\d{20})-([0-9a-f]{16})\.wal")


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log's segments, ready for use."""

    sealed: tuple[SealedSegment, ...]
    tail: TailSegment
    report: LogRecoveryReport


def open_segments(
    files: FileSystem, path: str, meta: MetaStore, codec: EntryCodec, new: NewTail
) -> OpenedLog:
    """Open every segment of a log, and repair the traces of a crash."""
    report = LogRecoveryReport()
    names = list_segments(files, path)
    infos = list(meta.state.segments or ())
    check_codec(path, infos, codec)
    _check_names(names, meta.state)
    tail_info = infos.pop() if infos and not infos[-1].sealed else None
    sealed = [open_sealed(files, path, info, codec) for info in infos]
    tail, index_start = None, 0
    if tail_info is not None:
        tail, index_start = _open_tail(files, path, tail_info, codec, report)
    _delete_orphans(files, path, names, meta.state, report)
    if tail is not None:
        if index_start:
            meta.set_state(plan_rotation(meta.state, tail.last_index, index_start, new))
            sealed.append(tail.sealed((meta.state.segments or ())[-2]))
            report.sealed_at_open, tail = True, None
    else:
        base_index = sealed[-1].last_index + 1 if sealed else 1
        meta.set_state(plan_tail(meta.state, base_index, new))
    if tail is None:
        info = (meta.state.segments or ())[-1]
        tail = create_tail(files, path, info, codec, must_allocate=False)
    return OpenedLog(tuple(sealed), tail, report)


def list_segments(files: FileSystem, path: str) -> dict[str, int]:
    """Return the id of each segment file, by name; other files are ignored."""
    ids: dict[str, int] = {}
    for name, _ in files.scan(path):
        match = NAME.fullmatch(name)
        if match:
            ids[name] = int(match[2], 16)
        elif name.endswith(".wal"):
            raise CorruptionError(f"{path}: {name} is not the name of a segment", object=name)
    return ids


def check_codec(path: str, infos: Iterable[SegmentInfo], codec: EntryCodec) -> None:
    """Raise if a segment was written with another codec."""
    for info in infos:
        if info.codec != codec.id:
            raise InvalidInputError(
                f"{path}: {info.name} was written with codec {info.codec}, not {codec.id}",
                kind=ErrorKind.INVALID_OPTION,
                hint="Open the log with the codec that wrote it",
            )


def _check_names(names: dict[str, int], state: PersistentState) -> None:
    by_id = {number: name for name, number in names.items()}
    for info in state.segments or ():
        if info.name not in names and info.id in by_id:
            raise CorruptionError(
                f"segment {info.id} is named {by_id[info.id]}, expected {info.name}",
                object=info.name,
            )


def open_sealed(
    files: FileSystem, path: str, info: SegmentInfo, codec: EntryCodec
) -> SealedSegment:
    """Open a sealed segment; check its header and its index frame."""
    try:
        file = files.open_regular(f"{path}/{info.name}", writable=False)
    except FileNotFoundError as error:
        raise CorruptionError(f"{path}: {info.name} is missing", object=info.name) from error
    check_header(file, info)
    return SealedSegment(info, file, codec, index_count(file, info))


def index_count(file: File, info: SegmentInfo) -> int:
    """Return the number of entries in a sealed segment's index."""
    offset = info.index_start - FRAME_BYTES
    head = file.read(FRAME_BYTES, offset) if offset >= 0 else b""
    kind, length = FRAME.unpack(head) if len(head) == FRAME_BYTES else (0, 0)
    needed = 4 * (info.max_index - info.base_index + 1)
    end = info.index_start + length
    if kind != FrameType.INDEX or length % 4 or length < needed or end > file.size():
        raise CorruptionError(
            f"{info.name}, offset {offset}: expected an index of at least {needed} bytes, "
            f"found a frame of type {kind} with {length} bytes",
            object=info.name,
            offset=offset,
        )
    return int(length) // 4


def _open_tail(
    files: FileSystem, path: str, info: SegmentInfo, codec: EntryCodec, report: LogRecoveryReport
) -> tuple[TailSegment, int]:
    """Return the tail, and the start of its index if it was sealed."""
    try:
        file = files.open_regular(f"{path}/{info.name}", writable=True)
    except FileNotFoundError:
        report.created_tail = True
        report.damaged += lost_entries(info, 0)
        return create_tail(files, path, info, codec, must_allocate=False), 0
    kept, scan = recover(file, info, codec)
    end = used_end(file, kept.end, scan)
    if end > kept.end:
        check_no_orphans(file, info, codec, kept, scan)
        erase(file, kept.end, end)
    if end:  # also older bytes: the process that wrote them may have died before its sync
        file.sync()
    report.damaged += [f"{info.name}, the batch that ends at {place}" for place in kept.damaged]
    report.damaged += lost_entries(info, len(kept.offsets))
    report.dropped_entries = len(scan.offsets) - len(kept.offsets)
    report.dropped_bytes = end - kept.end
    return TailSegment(info, file, codec, kept.offsets, kept.end), kept.index_start


def lost_entries(info: SegmentInfo, count: int) -> list[str]:
    """Return the entries that a tail of `count` entries has lost, by the meta store.

    A truncation of the head within the tail proves that it had an entry after that.
    """
    if info.base_index + count > info.min_index or info.min_index == info.base_index:
        return []
    return [f"{info.name}, which had entry {info.min_index}"]


def create_tail(
    files: FileSystem,
    path: str,
    info: SegmentInfo,
    codec: EntryCodec,
    *,
    must_allocate: bool = True,
) -> TailSegment:
    """Create the file of a new tail: zeros, until the first batch writes the header.

    A log also opens on a full disk, so that its owner can remove entries.
    """
    file = files.create(f"{path}/{info.name}", mode=FILE_MODE)
    if info.size_limit:  # posix_fallocate() rejects a length of 0
        try:
            file.preallocate(info.size_limit)
        except OSError as error:
            if must_allocate or not is_disk_full(error):
                raise
    return TailSegment(info, file, codec, [], 0)


def _delete_orphans(
    files: FileSystem,
    path: str,
    names: dict[str, int],
    state: PersistentState,
    report: LogRecoveryReport,
) -> None:
    known = {info.id for info in state.segments or ()}
    for name, number in sorted(names.items()):
        if number not in known:
            files.unlink(f"{path}/{name}")
            report.deleted_files.append(name)
    if report.deleted_files:
        files.sync_directory(path)
