"""Opening a log: from what lies in a directory to segments that can be used.

    1. names      every `.wal` file has a name that says its base index and id
    2. sealed     each one's header and index frame are what the meta store says
    3. tail       recovered (see `recovery`), or made where it is missing
    4. rotation   a tail that was sealed is closed, and a new one begun
    5. orphans    files of segments that the log no longer has are deleted

Damage that no crash explains stops it. What a crash has left is mended, and told in the
report.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC

from reef.errors import CorruptionError, InvalidInputError, Kind
from reef.locallog.codec import EntryCodec
from reef.locallog.frames import FRAME, FRAME_BYTES, FrameType
from reef.locallog.metastore import LogState, MetaStore, SegmentInfo
from reef.locallog.plans import NewTail, plan_rotation, plan_tail
from reef.locallog.recovery import (
    RecoveryReport,
    check_header,
    check_no_strays,
    erase,
    leftover_end,
    recover,
)
from reef.locallog.segment import Sealed, Tail
from reef.locallog.vfs import File, FileSystem

__all__ = [
    "FULL",
    "Opened",
    "check_codec",
    "create_tail",
    "list_segments",
    "open_sealed",
    "open_segments",
]

FULL = (ENOSPC, EDQUOT)
NAME = re.compile(r"(\d{20})-([0-9a-f]{16})\.wal")


@dataclass(frozen=True, slots=True)
class Opened:
    """A log's segments, ready for use."""

    sealed: tuple[Sealed, ...]
    tail: Tail
    report: RecoveryReport


def open_segments(
    files: FileSystem, path: str, meta: MetaStore, codec: EntryCodec, new: NewTail
) -> Opened:
    """Open every segment of a log, and mend what a crash has left."""
    report = RecoveryReport()
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
    return Opened(tuple(sealed), tail, report)


def list_segments(files: FileSystem, path: str) -> dict[str, int]:
    """Return the id of each segment's file, by name; other files are none of ours."""
    found: dict[str, int] = {}
    for name in files.names(path):
        match = NAME.fullmatch(name)
        if match:
            found[name] = int(match[2], 16)
        elif name.endswith(".wal"):
            raise CorruptionError(f"{path}: {name} is not the name of a segment", object=name)
    return found


def check_codec(path: str, infos: Iterable[SegmentInfo], codec: EntryCodec) -> None:
    """Raise if a segment was written with another codec."""
    for info in infos:
        if info.codec != codec.id:
            raise InvalidInputError(
                f"{path}: {info.name} was written with codec {info.codec}, this is {codec.id}",
                kind=Kind.INVALID_OPTION,
                hint="Open it with the codec that wrote it",
            )


def _check_names(names: dict[str, int], state: LogState) -> None:
    by_id = {number: name for name, number in names.items()}
    for info in state.segments or ():
        if info.name not in names and info.id in by_id:
            raise CorruptionError(
                f"segment {info.id} is named {by_id[info.id]}, expected {info.name}",
                object=info.name,
            )


def open_sealed(files: FileSystem, path: str, info: SegmentInfo, codec: EntryCodec) -> Sealed:
    """Open a sealed segment, whose header and index frame are checked."""
    try:
        file = files.open(f"{path}/{info.name}", writable=False)
    except FileNotFoundError as error:
        raise CorruptionError(f"{path}: {info.name} is missing", object=info.name) from error
    check_header(file, info)
    return Sealed(info, file, codec, index_count(file, info))


def index_count(file: File, info: SegmentInfo) -> int:
    """Return how many entries a sealed segment's index has, which lies within the file."""
    offset = info.index_start - FRAME_BYTES
    head = file.read(FRAME_BYTES, offset) if offset >= 0 else b""
    kind, length = FRAME.unpack(head) if len(head) == FRAME_BYTES else (0, 0)
    needed = 4 * (info.max_index - info.base_index + 1)
    end = info.index_start + length
    if kind != FrameType.INDEX or length % 4 or length < needed or end > file.size():
        raise CorruptionError(
            f"{info.name}, offset {offset}: a frame of type {kind} with {length} bytes, "
            f"expected an index of at least {needed}",
            object=info.name,
            offset=offset,
        )
    return int(length) // 4


def _open_tail(
    files: FileSystem, path: str, info: SegmentInfo, codec: EntryCodec, report: RecoveryReport
) -> tuple[Tail, int]:
    """Return the tail, and where its index begins if it turns out to be sealed."""
    try:
        file = files.open(f"{path}/{info.name}", writable=True)
    except FileNotFoundError:
        report.created_tail = True
        report.damaged += lost_entries(info, 0)
        return create_tail(files, path, info, codec, must_allocate=False), 0
    kept, scan = recover(file, info, codec)
    end = leftover_end(file, kept.end)
    if end > kept.end:
        check_no_strays(file, info, codec, kept, scan)
        erase(file, kept.end, end)
    if end:  # also what was there: whoever wrote it may have died before the sync
        file.sync()
    report.damaged += [f"{info.name}, the batch that ends at {place}" for place in kept.damaged]
    report.damaged += lost_entries(info, len(kept.offsets))
    report.dropped_entries = len(scan.offsets) - len(kept.offsets)
    report.dropped_bytes = end - kept.end
    return Tail(info, file, codec, kept.offsets, kept.end), kept.index_start


def lost_entries(info: SegmentInfo, count: int) -> list[str]:
    """Return what a tail of `count` entries has lost, as far as the meta store knows.

    A truncation of the head within the tail says that there was an entry behind it.
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
) -> Tail:
    """Make the file of a new tail: zeros, until the first batch brings the header.

    A log opens on a full disk too: its owner may know entries that can be removed.
    """
    file = files.create(f"{path}/{info.name}")
    if info.size_limit:  # the system refuses to make room for nothing
        try:
            file.preallocate(info.size_limit)
        except OSError as error:
            if must_allocate or error.errno not in FULL:
                raise
    return Tail(info, file, codec, [], 0)


def _delete_orphans(
    files: FileSystem, path: str, names: dict[str, int], state: LogState, report: RecoveryReport
) -> None:
    known = {info.id for info in state.segments or ()}
    for name, number in sorted(names.items()):
        if number not in known:
            files.unlink(f"{path}/{name}")
            report.deleted_files.append(name)
    if report.deleted_files:
        files.sync_directory(path)
