"""Looking at a log without owning it: what is there, what is damaged, what it holds.

Nothing is locked and nothing is changed, so a log that is in use can be looked at; a batch
that is being written then looks like one that a crash has torn, which is no damage. What its
owner changes while one looks may seem to be damage: so that is looked at twice. Every checksum of
every segment is checked, every entry decoded, every index compared with what it points to, and
the meta store's pages with its freelist.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reef.errors import CorruptionError, NotFoundError, ReefError
from reef.locallog.bolt import BoltReader, read_meta
from reef.locallog.codec import BINARY, EntryCodec
from reef.locallog.entry import LogEntry
from reef.locallog.frames import Frame, FrameType, frames
from reef.locallog.metastore import (
    META_NAME,
    LogState,
    SegmentInfo,
    look_at,
    read_meta_store,
    refuse_lost_meta,
)
from reef.locallog.opening import check_codec, index_count, list_segments, lost_entries
from reef.locallog.recovery import (
    Kept,
    Scan,
    check_header,
    check_no_strays,
    leftover_end,
    recover,
    scan_segment,
)
from reef.locallog.segment import Sealed, Segment, Tail
from reef.locallog.vfs import OS_FILES, File, FileSystem

__all__ = [
    "LogReport",
    "Problem",
    "SegmentReport",
    "check_is_log",
    "dump_entries",
    "dump_frames",
    "verify_log",
]

LOOKS_MAX = 50
"""How often something is looked at again that has changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that no crash explains."""

    object: str
    message: str
    offset: int | None = None


@dataclass(slots=True)
class SegmentReport:
    """What is in one segment's file."""

    name: str
    sealed: bool
    first_index: int
    last_index: int
    """The last one in the log; of an empty tail, the one before its first."""
    commits: int = 0
    data_bytes: int = 0
    """Up to the end of the last commit that counts."""
    file_bytes: int = 0
    torn_bytes: int = 0
    """Behind it: what a crash has left, or is being written at this moment."""


@dataclass(slots=True)
class LogReport:
    """What a log holds, and every problem of it."""

    path: str
    first_index: int = 0
    last_index: int = 0
    next_segment_id: int = 0
    stable_keys: int = 0
    segments: list[SegmentReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def blame(self, name: str, error: ReefError) -> None:
        """Note a problem that was raised."""
        self.problems.append(Problem(name, error.message, error.context.get("offset")))


def verify_log(
    path: str, *, codec: EntryCodec = BINARY, files: FileSystem = OS_FILES, deep: bool = True
) -> LogReport:
    """Look at all of a log; without `deep`, entries are not decoded."""
    check_is_log(files, path)
    report = _look(path, codec, files, deep=deep)
    for _ in range(LOOKS_MAX):
        before = report
        if not before.problems:
            break
        report = _look(path, codec, files, deep=deep)
        if report.problems == before.problems:
            break
    return report


def check_is_log(files: FileSystem, path: str) -> None:
    """Raise if a directory is no log: NotFoundError, or CorruptionError if it was one."""
    if not files.exists(f"{path}/{META_NAME}"):
        if files.exists(path):
            refuse_lost_meta(files, path)
        raise NotFoundError(f"{path} is not a log: it has no {META_NAME}")


def _look(path: str, codec: EntryCodec, files: FileSystem, *, deep: bool) -> LogReport:
    report = LogReport(path)
    try:
        list_segments(files, path)
        _check_freelist(files.open(f"{path}/{META_NAME}", writable=False), report)
        state, stable, segments = _open_all(files, path)
    except ReefError as error:
        report.blame(META_NAME, error)
        return report
    report.next_segment_id, report.stable_keys = state.next_segment_id, len(stable)
    for info, file in segments:
        try:
            _check_segment(file, info, codec, report, deep=deep)
        except ReefError as error:
            report.blame(info.name, error)
    if report.segments:
        report.first_index = report.segments[0].first_index
        report.last_index = report.segments[-1].last_index
        if report.last_index < report.first_index:
            report.first_index = report.last_index = 0
    return report


def _open_all(
    files: FileSystem, path: str
) -> tuple[LogState, Mapping[bytes, bytes], list[tuple[SegmentInfo, File | None]]]:
    """Return state, values and open files of one moment; a file that is missing is None.

    A truncation may delete a file between the look at the meta store and the look at the file:
    then the meta store says so.
    """
    for _ in range(LOOKS_MAX):
        state, stable = read_meta_store(files, path)
        segments = [(info, _open_file(files, path, info)) for info in state.segments or ()]
        is_whole = all(file is not None for info, file in segments if info.sealed)
        if is_whole or read_meta_store(files, path)[0] == state:
            break
    return state, stable, segments


def _open_file(files: FileSystem, path: str, info: SegmentInfo) -> File | None:
    try:
        return files.open(f"{path}/{info.name}", writable=False)
    except FileNotFoundError:
        return None


def _check_freelist(file: File, report: LogReport) -> None:
    """A page that is used and yet free would be overwritten by the Go library."""

    def look() -> set[int]:
        reader = BoltReader(file, read_meta(file, META_NAME), META_NAME)
        for element in reader.elements(reader.meta.root):
            reader.note_pages(element.value)
        return reader.free_pages() & (reader.pages | reader.freelist_pages() | {0, 1})

    wrong = look_at(file, look)
    if wrong:
        report.problems.append(
            Problem(META_NAME, f"pages {sorted(wrong)} are used, and on the freelist")
        )


def _check_segment(
    file: File | None, info: SegmentInfo, codec: EntryCodec, report: LogReport, *, deep: bool
) -> None:
    found = SegmentReport(info.name, info.sealed, info.min_index, info.max_index)
    if file is None and info.sealed:
        raise CorruptionError("is missing")
    report.segments.append(found)
    if file is None:
        found.last_index = info.base_index - 1  # opening the log makes it
        _blame_lost(info, 0, report)
        return
    found.file_bytes = file.size()
    known = codec if info.codec == codec.id else None
    if info.sealed:
        _check_sealed(file, info, found, report)
        segment: Segment = _sealed(file, info, codec)
    else:
        offsets = _check_tail(file, info, known, found, report)
        segment = Tail(info, file, codec, offsets, found.data_bytes)
    if deep and known:
        _check_entries(segment, found, report)


def _check_sealed(file: File, info: SegmentInfo, found: SegmentReport, report: LogReport) -> None:
    check_header(file, info)
    count = index_count(file, info)
    scan = scan_segment(file)
    ends = [n for n, commit in enumerate(scan.commits) if commit.index_start == info.index_start]
    if not ends:
        raise CorruptionError(
            f"no commit follows the index at {info.index_start}", offset=info.index_start
        )
    commits = scan.commits[: ends[0] + 1]
    _blame_commits(info, scan, len(commits), report)
    index = struct.unpack(f"<{count}I", file.read(4 * count, info.index_start))
    if list(index) != scan.offsets[: commits[-1].count]:
        raise CorruptionError("the index is not where the entries are", offset=info.index_start)
    found.commits, found.data_bytes = len(commits), commits[-1].end


def _check_tail(
    file: File,
    info: SegmentInfo,
    codec: EntryCodec | None,
    found: SegmentReport,
    report: LogReport,
) -> list[int]:
    kept, scan = recover(file, info, codec)
    found.last_index = info.base_index + len(kept.offsets) - 1
    found.data_bytes = kept.end
    found.commits = sum(commit.end <= kept.end for commit in scan.commits)
    found.torn_bytes = leftover_end(file, kept.end) - kept.end
    _blame_commits(info, scan, found.commits, report)
    _blame_lost(info, len(kept.offsets), report)
    try:
        _check_behind(file, info, codec, kept, scan)
    except CorruptionError as error:
        report.blame(info.name, error)
    return kept.offsets


def _check_behind(
    file: File, info: SegmentInfo, codec: EntryCodec | None, kept: Kept, scan: Scan
) -> None:
    """Raise if whole batches lie behind damage, and were not appended only now."""
    if leftover_end(file, kept.end) == kept.end:
        return
    try:
        check_no_strays(file, info, codec, kept, scan)
    except CorruptionError:
        if recover(file, info, codec)[0].end == kept.end:
            raise


def _blame_commits(info: SegmentInfo, scan: Scan, count: int, report: LogReport) -> None:
    start = 0
    for commit in scan.commits[:count]:
        if not commit.valid:
            message = f"the checksum of bytes {start} to {commit.end - 8} does not match"
            report.problems.append(Problem(info.name, message, start))
        start = commit.end


def _blame_lost(info: SegmentInfo, count: int, report: LogReport) -> None:
    report.problems += [Problem(info.name, what) for what in lost_entries(info, count)]


def _sealed(file: File, info: SegmentInfo, codec: EntryCodec) -> Sealed:
    return Sealed(info, file, codec, index_count(file, info))


def _check_entries(segment: Segment, found: SegmentReport, report: LogReport) -> None:
    for index in range(found.first_index, found.last_index + 1):
        try:
            segment.get(index)
        except CorruptionError as error:
            report.blame(segment.info.name, error)


# --- dumps --------------------------------------------------------------------------


def dump_entries(
    path: str, *, codec: EntryCodec = BINARY, files: FileSystem = OS_FILES
) -> Iterator[LogEntry]:
    """Yield all entries in order; CorruptionError at the first that cannot be read."""
    check_is_log(files, path)
    state, _, segments = _open_all(files, path)
    check_codec(path, state.segments or (), codec)
    for info, file in segments:
        if file is not None:
            yield from _dump_segment(file, info, codec)
        elif info.sealed:
            raise CorruptionError(f"{path}: {info.name} is missing", object=info.name)


def _dump_segment(file: File, info: SegmentInfo, codec: EntryCodec) -> Iterator[LogEntry]:
    if info.sealed:
        yield from _sealed(file, info, codec).entries(info.min_index, info.max_index)
        return
    kept, scan = recover(file, info, codec)
    tail = Tail(info, file, codec, kept.offsets, kept.end)
    yield from tail.entries(info.min_index, tail.last_index)
    _check_behind(file, info, codec, kept, scan)


def dump_frames(path: str, *, files: FileSystem = OS_FILES) -> Iterator[tuple[str, Frame]]:
    """Yield all frames that are in the files, whatever the log makes of them."""
    check_is_log(files, path)
    for info, file in _open_all(files, path)[2]:
        if file is not None:
            for frame in frames(file.read, file.size()):
                yield info.name, frame


def frame_name(frame: Frame) -> str:
    """Return what a frame is, in a word."""
    return FrameType(frame.type).name.lower()
