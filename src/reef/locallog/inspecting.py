"""Looking at a log without owning it: what is there, what is damaged, what it holds.

Nothing is locked and nothing is changed, so a log that is in use can be looked at; a batch
that is being written then looks like one that a crash has torn, which is no damage. Every
checksum of every segment is checked, every entry decoded, every index compared with what it
points to, and the meta store's pages with its freelist.
"""

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from reef.errors import CorruptionError, NotFoundError, ReefError
from reef.locallog.bolt import BoltReader, read_meta
from reef.locallog.codec import BINARY, EntryCodec
from reef.locallog.entry import LogEntry
from reef.locallog.frames import Frame, FrameType, frames
from reef.locallog.metastore import META_NAME, LogState, SegmentInfo, read_meta_store
from reef.locallog.opening import check_codec, index_count, list_segments
from reef.locallog.recovery import Kept, Scan, check_header, recover, scan_segment
from reef.locallog.segment import Sealed, Segment, Tail
from reef.locallog.vfs import OS_FILES, File, FileSystem

__all__ = ["LogReport", "Problem", "SegmentReport", "dump_entries", "dump_frames", "verify_log"]


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
    report = LogReport(path)
    state = _state(files, path, report)
    if state is None:
        return report
    report.next_segment_id = state.next_segment_id
    for info in state.segments or ():
        try:
            _check_segment(files, path, info, codec, report, deep=deep)
        except ReefError as error:
            report.blame(info.name, error)
    if report.segments:
        report.first_index = report.segments[0].first_index
        report.last_index = report.segments[-1].last_index
        if report.last_index < report.first_index:
            report.first_index = report.last_index = 0
    return report


def _state(files: FileSystem, path: str, report: LogReport) -> LogState | None:
    if not files.exists(f"{path}/{META_NAME}"):
        raise NotFoundError(f"{path} is not a log: it has no {META_NAME}")
    try:
        list_segments(files, path)
        _check_freelist(files.open(f"{path}/{META_NAME}", writable=False), report)
        state, stable = read_meta_store(files, path)
    except ReefError as error:
        report.blame(META_NAME, error)
        return None
    report.stable_keys = len(stable)
    return state


def _check_freelist(file: File, report: LogReport) -> None:
    """A page that is used and yet free would be overwritten by the Go library."""
    reader = BoltReader(file, read_meta(file, META_NAME), META_NAME)
    for element in reader.elements(reader.meta.root):
        reader.note_pages(element.value)
    wrong = reader.free_pages() & (reader.pages | reader.freelist_pages() | {0, 1})
    if wrong:
        report.problems.append(
            Problem(META_NAME, f"pages {sorted(wrong)} are used, and on the freelist")
        )


def _check_segment(
    files: FileSystem,
    path: str,
    info: SegmentInfo,
    codec: EntryCodec,
    report: LogReport,
    *,
    deep: bool,
) -> None:
    found = SegmentReport(info.name, info.sealed, info.min_index, info.max_index)
    try:
        file = files.open(f"{path}/{info.name}", writable=False)
    except FileNotFoundError as error:
        if info.sealed:
            raise CorruptionError("is missing") from error
        found.last_index = info.base_index - 1  # opening the log makes it
        report.segments.append(found)
        return
    report.segments.append(found)
    found.file_bytes = file.size()
    if info.sealed:
        _check_sealed(file, info, found, report)
    else:
        _check_tail(file, info, codec if info.codec == codec.id else None, found, report)
    if deep and info.codec == codec.id:
        _check_entries(_segment(file, info, codec), found, report)


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
    file: File, info: SegmentInfo, codec: EntryCodec | None, found: SegmentReport, report: LogReport
) -> None:
    kept, scan = recover(file, info, codec)
    found.last_index = info.base_index + len(kept.offsets) - 1
    found.data_bytes = kept.end
    found.commits = sum(commit.end <= kept.end for commit in scan.commits)
    found.torn_bytes = len(file.read(file.size(), kept.end).rstrip(b"\0"))
    _blame_commits(info, scan, found.commits, report)


def _blame_commits(info: SegmentInfo, scan: Scan, count: int, report: LogReport) -> None:
    for commit in scan.commits[:count]:
        if not commit.valid:
            start = max((c.end for c in scan.commits if c.end < commit.end), default=0)
            message = f"the checksum of bytes {start} to {commit.end - 8} does not match"
            report.problems.append(Problem(info.name, message, start))


def _segment(file: File, info: SegmentInfo, codec: EntryCodec) -> Segment:
    if info.sealed:
        return Sealed(info, file, codec, index_count(file, info))
    kept: Kept = recover(file, info, codec)[0]
    return Tail(info, file, codec, kept.offsets, kept.end)


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
    infos = _segments(files, path)
    check_codec(path, infos, codec)
    for info in infos:
        try:
            file = files.open(f"{path}/{info.name}", writable=False)
        except FileNotFoundError as error:
            if info.sealed:
                raise CorruptionError(f"{path}: {info.name} is missing") from error
            return
        segment = _segment(file, info, codec)
        yield from segment.entries(info.min_index, segment.last_index)


def dump_frames(path: str, *, files: FileSystem = OS_FILES) -> Iterator[tuple[str, Frame]]:
    """Yield all frames that are in the files, whatever the log makes of them."""
    for info in _segments(files, path):
        if files.exists(f"{path}/{info.name}"):
            file = files.open(f"{path}/{info.name}", writable=False)
            for frame in frames(file.read, file.size()):
                yield info.name, frame


def frame_name(frame: Frame) -> str:
    """Return what a frame is, in a word."""
    return FrameType(frame.type).name.lower()


def _segments(files: FileSystem, path: str) -> tuple[SegmentInfo, ...]:
    if not files.exists(f"{path}/{META_NAME}"):
        raise NotFoundError(f"{path} is not a log: it has no {META_NAME}")
    return read_meta_store(files, path)[0].segments or ()
