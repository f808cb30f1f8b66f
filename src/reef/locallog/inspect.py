"""Inspection of a log without owning it: verify and dump.

Nothing is locked and nothing is changed, so a log that is in use can be inspected; a batch that
is being written is then reported as torn, which is not damage. A concurrent
change by the owner may be mistaken for damage, so problems are confirmed by a second read. Every
checksum of every segment is verified, every entry decoded, every index compared with its
entries, and the meta store's pages with its freelist.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reef.errors import CorruptionError, NotFoundError, ReefError
from reef.files import OS, File, FileSystem
from reef.locallog.bolt import BoltReader, read_meta
from reef.locallog.encoding import BINARY, EntryCodec, Frame, FrameType, LogEntry, frames
from reef.locallog.metastore import (
    META_NAME,
    PersistentState,
    SegmentInfo,
    read_consistently,
    read_meta_store,
    reject_lost_meta,
)
from reef.locallog.recovery import (
    RecoveredTail,
    SegmentScan,
    check_codec,
    check_header,
    check_no_orphans,
    index_count,
    list_segments,
    lost_entries,
    recover,
    scan_segment,
    used_end,
)
from reef.locallog.segment import LogSegment, SealedSegment, TailSegment

READS_MAX = 50
"""Attempts to read a log that its owner keeps changing."""


@dataclass(frozen=True, slots=True)
class LogProblem:
    """Damage that no crash explains."""

    object: str
    message: str
    offset: int | None = None


@dataclass(slots=True)
class SegmentReport:
    """Content of one segment file."""

    name: str
    sealed: bool
    first_index: int
    last_index: int
    """The last index in the log; of an empty tail, the one before its first."""
    commits: int = 0
    data_bytes: int = 0
    """Bytes up to the end of the last valid commit."""
    file_bytes: int = 0
    torn_bytes: int = 0
    """Bytes after it: torn by a crash, or being written right now."""


@dataclass(slots=True)
class LogReport:
    """Content of a log, and all its problems."""

    path: str
    first_index: int = 0
    last_index: int = 0
    next_segment_id: int = 0
    stable_keys: int = 0
    segments: list[SegmentReport] = field(default_factory=list)
    problems: list[LogProblem] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, name: str, error: ReefError) -> None:
        """Record a problem that was raised."""
        self.problems.append(LogProblem(name, error.message, error.context.get("offset")))


def verify_log(
    path: str, *, codec: EntryCodec = BINARY, files: FileSystem = OS, deep: bool = True
) -> LogReport:
    """Verify a whole log; without `deep`, entries are not decoded."""
    check_is_log(files, path)
    report = _verify_once(path, codec, files, deep=deep)
    for _ in range(READS_MAX):
        before = report
        if not before.problems:
            break
        report = _verify_once(path, codec, files, deep=deep)
        if report.problems == before.problems:
            break
    return report


def check_is_log(files: FileSystem, path: str) -> None:
    """Raise if a directory is not a log: NotFoundError, or CorruptionError if it was one."""
    if not files.exists(f"{path}/{META_NAME}"):
        if files.exists(path):
            reject_lost_meta(files, path)
        raise NotFoundError(f"{path} is not a log: it has no {META_NAME}")


def _verify_once(path: str, codec: EntryCodec, files: FileSystem, *, deep: bool) -> LogReport:
    report = LogReport(path)
    try:
        list_segments(files, path)
        _check_freelist(files.open_regular(f"{path}/{META_NAME}", writable=False), report)
        state, stable, segments = _open_all(files, path)
    except ReefError as error:
        report.add(META_NAME, error)
        return report
    report.next_segment_id, report.stable_keys = state.next_segment_id, len(stable)
    for info, file in segments:
        try:
            _check_segment(file, info, codec, report, deep=deep)
        except ReefError as error:
            report.add(info.name, error)
    if report.segments:
        report.first_index = report.segments[0].first_index
        report.last_index = report.segments[-1].last_index
        if report.last_index < report.first_index:
            report.first_index = report.last_index = 0
    return report


def _open_all(
    files: FileSystem, path: str
) -> tuple[PersistentState, Mapping[bytes, bytes], list[tuple[SegmentInfo, File | None]]]:
    """Return a consistent state, its values and open files; a missing file is None.

    A truncation may delete a file after the meta store was read: then the state has changed.
    """
    for _ in range(READS_MAX):
        state, stable = read_meta_store(files, path)
        segments = [(info, _open_file(files, path, info)) for info in state.segments or ()]
        is_whole = all(file is not None for info, file in segments if info.sealed)
        if is_whole or read_meta_store(files, path)[0] == state:
            break
    return state, stable, segments


def _open_file(files: FileSystem, path: str, info: SegmentInfo) -> File | None:
    try:
        return files.open_regular(f"{path}/{info.name}", writable=False)
    except FileNotFoundError:
        return None


def _check_freelist(file: File, report: LogReport) -> None:
    """Check that no used page is on the freelist: the Go library would overwrite it."""

    def used_and_free() -> set[int]:
        reader = BoltReader(file, read_meta(file, META_NAME), META_NAME)
        for element in reader.elements(reader.meta.root):
            reader.collect_pages(element.value)
        return reader.free_pages() & (reader.pages | reader.freelist_pages() | {0, 1})

    wrong = read_consistently(file, used_and_free)
    if wrong:
        report.problems.append(
            LogProblem(META_NAME, f"pages {sorted(wrong)} are both used and on the freelist")
        )


def _check_segment(
    file: File | None, info: SegmentInfo, codec: EntryCodec, report: LogReport, *, deep: bool
) -> None:
    checked = SegmentReport(info.name, info.sealed, info.min_index, info.max_index)
    if file is None and info.sealed:
        raise CorruptionError("the file is missing")
    report.segments.append(checked)
    if file is None:
        checked.last_index = info.base_index - 1  # opening the log creates it
        _report_lost(info, 0, report)
        return
    checked.file_bytes = file.size()
    known = codec if info.codec == codec.id else None
    if info.sealed:
        _check_sealed(file, info, checked, report)
        segment: LogSegment = _sealed_segment(file, info, codec)
    else:
        offsets = _check_tail(file, info, known, checked, report)
        segment = TailSegment(info, file, codec, offsets, checked.data_bytes)
    if deep and known:
        _check_entries(segment, checked, report)


def _check_sealed(file: File, info: SegmentInfo, checked: SegmentReport, report: LogReport) -> None:
    check_header(file, info)
    count = index_count(file, info)
    scan = scan_segment(file)
    ends = [n for n, commit in enumerate(scan.commits) if commit.index_start == info.index_start]
    if not ends:
        raise CorruptionError(
            f"no commit follows the index at {info.index_start}", offset=info.index_start
        )
    commits = scan.commits[: ends[0] + 1]
    _report_commits(info, scan, len(commits), report)
    index = struct.unpack(f"<{count}I", file.read(4 * count, info.index_start))
    if list(index) != scan.offsets[: commits[-1].count]:
        raise CorruptionError("the index does not match the entries", offset=info.index_start)
    checked.commits, checked.data_bytes = len(commits), commits[-1].end


def _check_tail(
    file: File,
    info: SegmentInfo,
    codec: EntryCodec | None,
    checked: SegmentReport,
    report: LogReport,
) -> list[int]:
    kept, scan = recover(file, info, codec)
    checked.last_index = info.base_index + len(kept.offsets) - 1
    checked.data_bytes = kept.end
    checked.commits = sum(commit.end <= kept.end for commit in scan.commits)
    checked.torn_bytes = used_end(file, kept.end, scan) - kept.end
    _report_commits(info, scan, checked.commits, report)
    _report_lost(info, len(kept.offsets), report)
    try:
        _check_behind(file, info, codec, kept, scan)
    except CorruptionError as error:
        report.add(info.name, error)
    return kept.offsets


def _check_behind(
    file: File, info: SegmentInfo, codec: EntryCodec | None, kept: RecoveredTail, scan: SegmentScan
) -> None:
    """Raise if whole batches follow damage, unless they were appended just now."""
    if used_end(file, kept.end, scan) == kept.end:
        return
    try:
        check_no_orphans(file, info, codec, kept, scan)
    except CorruptionError:
        if recover(file, info, codec)[0].end == kept.end:
            raise


def _report_commits(info: SegmentInfo, scan: SegmentScan, count: int, report: LogReport) -> None:
    start = 0
    for commit in scan.commits[:count]:
        if not commit.valid:
            message = f"the checksum of bytes {start} to {commit.end - 8} does not match"
            report.problems.append(LogProblem(info.name, message, start))
        start = commit.end


def _report_lost(info: SegmentInfo, count: int, report: LogReport) -> None:
    report.problems += [LogProblem(info.name, message) for message in lost_entries(info, count)]


def _sealed_segment(file: File, info: SegmentInfo, codec: EntryCodec) -> SealedSegment:
    return SealedSegment(info, file, codec, index_count(file, info))


def _check_entries(segment: LogSegment, checked: SegmentReport, report: LogReport) -> None:
    for index in range(checked.first_index, checked.last_index + 1):
        try:
            segment.get(index)
        except CorruptionError as error:
            report.add(segment.info.name, error)


# --- dumps --------------------------------------------------------------------------


def dump_entries(
    path: str, *, codec: EntryCodec = BINARY, files: FileSystem = OS
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
        yield from _sealed_segment(file, info, codec).entries(info.min_index, info.max_index)
        return
    kept, scan = recover(file, info, codec)
    tail = TailSegment(info, file, codec, kept.offsets, kept.end)
    yield from tail.entries(info.min_index, tail.last_index)
    _check_behind(file, info, codec, kept, scan)


def dump_frames(path: str, *, files: FileSystem = OS) -> Iterator[tuple[str, Frame]]:
    """Yield all frames of the files, whether or not they are part of the log."""
    check_is_log(files, path)
    for info, file in _open_all(files, path)[2]:
        if file is not None:
            for frame in frames(file.read, file.size()):
                yield info.name, frame


def frame_name(frame: Frame) -> str:
    """Return the name of a frame's type."""
    return FrameType(frame.type).name.lower()
