"""What a crash has left of the tail, and how much of it counts.

A batch was acknowledged only after its sync, and the next one is written only then. So a
crash tears at most the last batch. The scan checks every commit's checksum; what counts is:

- All commits that are valid from the first on. With the next one, or without any more, begins
  the torn batch: it was never acknowledged, and is dropped.
- Unless valid commits follow whose entries have the indexes that belong there. No crash does
  that: an older batch was damaged later. Nothing is dropped then, and the damage is told.
- Unless whole batches lie where the scan did not get, since a length was damaged (`strays`).
  What is between cannot be read any more, so that is an error, and nothing is touched.

The look at the entries is for a batch whose frame header was torn, so that the scan has strayed
into a payload, and the payload is itself a log.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from reef.errors import CorruptionError
from reef.locallog.codec import BINARY, EntryCodec, decode_entry
from reef.locallog.frames import (
    ENTRY_BYTES_MAX,
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    FrameType,
    SegmentHeader,
    frames,
    read_header,
)
from reef.locallog.metastore import SegmentInfo
from reef.locallog.strays import stray_batch
from reef.locallog.vfs import File

__all__ = [
    "Commit",
    "Kept",
    "RecoveryReport",
    "Scan",
    "check_header",
    "check_no_strays",
    "erase",
    "leftover_end",
    "recover",
    "scan_segment",
]

ZERO_BYTES = 1 << 20
BINARY_ENTRY_BYTES = 32
"""The least that an entry of the format's own codec takes, with its frame."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit frame, and what it ends."""

    end: int
    valid: bool
    count: int
    """Entries in the file up to here."""
    index_start: int
    """Where the index before it begins; 0 if it does not seal the segment."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All that a pass over a segment found."""

    offsets: list[int]
    lengths: list[int]
    commits: list[Commit]
    end: int
    """Where it ended: behind the last frame."""


def scan_segment(file: File) -> Scan:
    """Pass over all frames of a file."""
    offsets: list[int] = []
    lengths: list[int] = []
    commits: list[Commit] = []
    index_start, index_length, end = 0, 0, HEADER_BYTES
    for frame in frames(file.read, file.size()):
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
    return Scan(offsets, lengths, commits, end)


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a tail counts."""

    offsets: list[int]
    end: int
    index_start: int
    """Not 0 if the segment was sealed, and only the meta store does not know it yet."""
    damaged: tuple[int, ...]
    """Ends of commits that are damaged, and not by a crash."""


@dataclass
class RecoveryReport:
    """What opening a log has found and done."""

    dropped_entries: int = 0
    """Entries of a batch that was never acknowledged, as far as they could be told."""
    dropped_bytes: int = 0
    """Bytes of it, which were overwritten with zeros."""
    sealed_at_open: bool = False
    """The tail was full, and the crash came before the next one."""
    created_tail: bool = False
    """There was no tail. A tail that somebody deleted looks the same."""
    deleted_files: list[str] = field(default_factory=list)
    """Segments that the log no longer has."""
    damaged: list[str] = field(default_factory=list)
    """Batches that were acknowledged, and whose checksum does not match; a tail that has lost
    entries. Run verify."""


def recover(file: File, info: SegmentInfo, codec: EntryCodec | None) -> tuple[Kept, Scan]:
    """Return what of a tail counts; CorruptionError if no crash explains what is there.

    Without the codec, entries behind an invalid commit are believed to be what they seem.
    """
    scan = scan_segment(file)
    kept = _choose(scan, lambda place: codec is None or _is_own(file, scan, place, info, codec))
    if kept.end:
        check_header(file, info)
    return kept, scan


def _choose(scan: Scan, is_own: Callable[[int], bool]) -> Kept:
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
        return Kept([], 0, 0, damaged)
    last = commits[good - 1]
    return Kept(scan.offsets[: last.count], last.end, last.index_start, damaged)


def _is_own(file: File, scan: Scan, place: int, info: SegmentInfo, codec: EntryCodec) -> bool:
    """Whether the entry at a place of a file has the index that belongs there."""
    found = _index_of(file, scan.offsets[place], scan.lengths[place], codec)
    return found == info.base_index + place


def _index_of(file: File, offset: int, length: int, codec: EntryCodec) -> int:
    """Return the index that an entry says it has; 0 if it is none."""
    if length > ENTRY_BYTES_MAX:
        return 0
    try:
        return decode_entry(codec, file.read(length, offset + FRAME_BYTES)).index
    except CorruptionError:
        return 0


def check_no_strays(
    file: File, info: SegmentInfo, codec: EntryCodec | None, kept: Kept, scan: Scan
) -> None:
    """Raise if whole batches lie behind what counts, where the scan did not get (H27)."""
    next_index = info.base_index + len(kept.offsets)
    entry_bytes = BINARY_ENTRY_BYTES if info.codec == BINARY.id else FRAME_BYTES

    def is_later(entry: Frame, gap: int) -> bool:
        if codec is None:
            return True
        index = _index_of(file, entry.offset, entry.length, codec)
        return next_index < index <= next_index + gap // entry_bytes

    found = stray_batch(file.read, file.size(), kept.end, scan.end, is_later)
    if found is not None:
        raise CorruptionError(
            f"{info.name}, offset {kept.end}: what should be entry {next_index} cannot be read, "
            f"and a whole batch follows at {found}",
            hint="No crash does that, so nothing was dropped: bring the file back from a copy",
            object=info.name,
            offset=kept.end,
        )


def check_header(file: File, info: SegmentInfo) -> None:
    """Raise unless a file is the segment that the meta store means."""
    found = read_header(file.read(HEADER_BYTES, 0), info.name)
    wanted = SegmentHeader(info.base_index, info.id, info.codec)
    if found != wanted:
        raise CorruptionError(
            f"{info.name}, offset 0: the header says {found}, the meta store {wanted}",
            object=info.name,
            offset=0,
        )


def leftover_end(file: File, start: int) -> int:
    """Return where what lies behind the last commit ends; `start` if it is all zeros."""
    size, end = file.size(), start
    for offset in range(start, size, ZERO_BYTES):
        used = len(file.read(min(ZERO_BYTES, size - offset), offset).rstrip(b"\0"))
        end = offset + used if used else end
    return end


def erase(file: File, start: int, end: int) -> None:
    """Overwrite with zeros what lies behind the last commit; it is durable after a sync.

    Frames that were left there could be taken for a part of whatever is torn next.
    """
    for offset in range(start, end, ZERO_BYTES):
        file.write(bytes(min(ZERO_BYTES, end - offset)), offset)
