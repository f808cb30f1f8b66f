"""The meta store: the segments that make up the log, and the stable values of its user.

`wal-meta.db` is a bbolt file with two buckets. `wal-meta` has one key, `m`: the state as
JSON. `stable` has the user's keys. Each change is one commit, which makes a rotation or a
truncation take effect: before it the log is the old one, after it the new one.

The planning functions are pure: each returns the state that one commit makes true. Files
follow: a segment that is new in the state is created after the commit, one that is not in it any
more is deleted. The owner of the log is the process that holds the file's lock.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import msgspec

from reef.errors import (
    UNDECODABLE,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    UnavailableError,
)
from reef.files import File, FileSystem
from reef.locallog.bolt import BoltFile, read_meta, write_empty
from reef.locallog.encoding import SEGMENT_BYTES_MAX, EntryTime, segment_name
from reef.runtime import Runtime

T = TypeVar("T")
META_NAME = "wal-meta.db"
FILE_MODE = 0o644
STATE_BUCKET, STATE_KEY = b"wal-meta", b"m"
STABLE_BUCKET = b"stable"
UNSEALED = "0001-01-01T00:00:00Z"
KEY_BYTES_MAX = 32768
U64_MAX = (1 << 64) - 1
LOCK_POLL_S = 0.02
READS_MAX = 100
"""Attempts to read a meta store that its owner keeps changing."""


class SegmentInfo(msgspec.Struct, frozen=True, rename="pascal"):
    """Metadata of a segment."""

    id: int = msgspec.field(name="ID")
    base_index: int
    """Index of the first entry in the file."""
    min_index: int
    """Index of its first entry that is still in the log."""
    max_index: int
    """Index of its last entry that is in the log; 0 while it is open for appends."""
    codec: int
    index_start: int
    """Start of the offsets in the file; 0 while it is open for appends."""
    create_time: str
    seal_time: str
    size_limit: int
    """It is sealed when it exceeds this many bytes."""

    @property
    def sealed(self) -> bool:
        return self.seal_time != UNSEALED

    @property
    def name(self) -> str:
        return segment_name(self.base_index, self.id)


class PersistentState(msgspec.Struct, frozen=True, rename="pascal"):
    """All segments of a log, by base index; only the last one may be unsealed."""

    next_segment_id: int = msgspec.field(name="NextSegmentID", default=0)
    segments: tuple[SegmentInfo, ...] | None = ()

    def problem(self) -> str | None:
        """Return the first contradiction, if there is one."""
        infos = self.segments or ()
        for info in infos:
            if not _is_sane(info) or info.id >= self.next_segment_id:
                return f"segment {info.id} is inconsistent: {info}"
        for info, following in pairwise(infos):
            if not info.sealed:
                return f"segment {info.id} is unsealed, but not the last"
            if following.base_index != info.max_index + 1:
                return (
                    f"segment {following.id} does not continue after {info.max_index}: {following}"
                )
        return None


def _is_sane(info: SegmentInfo) -> bool:
    return (
        1 <= info.base_index <= info.min_index
        and (info.min_index <= info.max_index or not info.sealed)
        and min(info.id, info.max_index, info.codec) >= 0
        and max(info.id, info.min_index, info.max_index, info.codec) < U64_MAX
        and 0 <= info.index_start <= SEGMENT_BYTES_MAX
        and 0 <= info.size_limit <= SEGMENT_BYTES_MAX
    )


def rfc3339(unix_ns: int) -> str:
    """Format a time as the Go library does, without trailing zeros.

    >>> rfc3339(1_700_000_000_120_000_000)
    '2023-11-14T22:13:20.12Z'
    """
    return str(EntryTime.from_unix_ns(unix_ns))


@dataclass(frozen=True, slots=True)
class _MetaContent:
    state: PersistentState
    stable: Mapping[bytes, bytes]


class MetaStore:
    """The open, locked file. One thread at a time commits; any thread reads."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._bolt = BoltFile(file, META_NAME)
        self._now = _load(self._bolt)

    @property
    def state(self) -> PersistentState:
        return self._now.state

    @property
    def stable(self) -> Mapping[bytes, bytes]:
        return self._now.stable

    def set_state(self, state: PersistentState) -> None:
        """Commit a state of the log, durably."""
        encoded = msgspec.json.encode(state)
        self._bolt.commit({STATE_BUCKET: {STATE_KEY: encoded}})
        self._now = replace(self._now, state=state)

    def set_stable(self, key: bytes, value: bytes | None) -> None:
        """Store a value durably; None removes it."""
        if not key or len(key) > KEY_BYTES_MAX:
            raise InvalidInputError(f"a key of {len(key)} bytes: expected 1 to {KEY_BYTES_MAX}")
        stable = {name: kept for name, kept in self._now.stable.items() if name != key}
        if value is not None:
            stable[key] = value
        self._bolt.commit({STABLE_BUCKET: stable})
        self._now = replace(self._now, stable=stable)

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()


def read_meta_store(files: FileSystem, path: str) -> tuple[PersistentState, Mapping[bytes, bytes]]:
    """Read state and stable values without owning the log."""
    file = files.open_regular(f"{path}/{META_NAME}", writable=False)
    loaded = read_consistently(file, lambda: _load(BoltFile(file, META_NAME)))
    return loaded.state, loaded.stable


def read_consistently(file: File, read: Callable[[], T]) -> T:
    """Read a meta store to which its owner may commit concurrently.

    A commit may reuse the pages that are being read. A result, or damage, is valid only if the
    meta page is the same before and after the read.
    """
    for _ in range(READS_MAX):
        before = read_meta(file, META_NAME)
        try:
            result = read()
        except CorruptionError:
            if read_meta(file, META_NAME) == before:
                raise
            continue
        if read_meta(file, META_NAME) == before:
            return result
    raise UnavailableError(f"{META_NAME} changes faster than it can be read", hint="Try again")


def _load(bolt: BoltFile) -> _MetaContent:
    items, stable = bolt.items(STATE_BUCKET), bolt.items(STABLE_BUCKET)
    encoded = (items or {}).get(STATE_KEY)
    try:
        state = msgspec.json.decode(encoded, type=PersistentState) if encoded else PersistentState()
    except UNDECODABLE as error:
        raise CorruptionError(f"{META_NAME}: the state cannot be decoded: {error}") from error
    if problem := state.problem():
        raise CorruptionError(f"{META_NAME}: {problem}", object=META_NAME)
    if state.segments is None:
        state = msgspec.structs.replace(state, segments=())
    return _MetaContent(state, dict(stable or {}))


def open_meta_store(
    files: FileSystem, path: str, *, runtime: Runtime, lock_timeout_s: float
) -> MetaStore:
    """Lock and read the meta store of a directory; create it if there is none."""
    deadline = runtime.deadline(lock_timeout_s)
    while True:
        file = _try_open(files, path)
        if file is not None:
            with _closed_on_error(file):
                return MetaStore(file)
        if deadline.passed():
            raise ConflictError(
                f"{path}: the log is already open",
                hint="A log has one owner: close the other handle, or use another directory",
            )
        runtime.sleep(LOCK_POLL_S)


@contextmanager
def _closed_on_error(file: File) -> Iterator[None]:
    """Close a file and release its lock at once: a stored traceback would keep it open."""
    try:
        yield
    except BaseException:
        file.close()
        raise


def _try_open(files: FileSystem, path: str) -> File | None:
    """Return the locked file; None if another owner holds the lock."""
    target = f"{path}/{META_NAME}"
    try:
        file = files.open_regular(target, writable=True)
    except FileNotFoundError:
        return _try_create(files, path)
    with _closed_on_error(file):
        if file.try_lock() and files.same_file(file, target):
            file.sync()  # the process that wrote it may have died before its syncs
            files.sync_directory(path)
            return file
    file.close()
    return None


def _try_create(files: FileSystem, path: str) -> File | None:
    """Write the file under a temporary name, sync it, and rename it.

    The lock of the directory excludes another owner that creates it.
    """
    target, temporary = f"{path}/{META_NAME}", f"{path}/{META_NAME}.tmp"
    folder = files.open(path)
    try:
        if not folder.try_lock() or files.exists(target):
            return None
        reject_lost_meta(files, path)
        if files.exists(temporary):
            files.unlink(temporary)
        file = files.create(temporary, mode=FILE_MODE)
        with _closed_on_error(file):
            file.try_lock()
            write_empty(file, mmap.PAGESIZE)
            BoltFile(file, META_NAME).commit({STATE_BUCKET: {}, STABLE_BUCKET: {}})  # and synced
            files.rename(temporary, target)
            files.sync_directory(path)
        return file
    finally:
        folder.close()


def reject_lost_meta(files: FileSystem, path: str) -> None:
    """Raise if there are segments without a meta store: a new log creates that first."""
    left = sorted(name for name, _ in files.scan(path) if name.endswith(".wal"))
    if left:
        raise CorruptionError(
            f"{path}: {META_NAME} is missing, but there are segments, such as {left[0]}",
            hint="Restore the file; opening the log without it would delete the segments",
            object=META_NAME,
        )


# --- rotations and truncations ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTail:
    """Settings of a new segment."""

    codec: int
    size_limit: int
    now: str

    def append_to(
        self, state: PersistentState, segments: list[SegmentInfo], base_index: int
    ) -> PersistentState:
        """Return a state with these segments and a new tail."""
        number = state.next_segment_id
        tail = SegmentInfo(
            *(number, base_index, base_index, 0, self.codec, 0, self.now, UNSEALED),
            self.size_limit,
        )
        return PersistentState(number + 1, (*segments, tail))


def plan_tail(state: PersistentState, base_index: int, new: NewTail) -> PersistentState:
    """Add a tail to a state that has none."""
    return new.append_to(state, list(state.segments or ()), base_index)


def without_tail(state: PersistentState) -> PersistentState:
    """Remove the empty tail of a state, before it is replaced."""
    return msgspec.structs.replace(state, segments=(state.segments or ())[:-1])


def plan_rotation(
    state: PersistentState, last_index: int, index_start: int, new: NewTail
) -> PersistentState:
    """Seal the tail, and add a new one."""
    *older, tail = state.segments or ()
    return new.append_to(state, [*older, _seal(tail, last_index, index_start, new)], last_index + 1)


def _seal(tail: SegmentInfo, last_index: int, index_start: int, new: NewTail) -> SegmentInfo:
    return msgspec.structs.replace(
        tail, max_index=last_index, index_start=index_start, seal_time=new.now
    )


@dataclass(frozen=True, slots=True)
class Truncation:
    """Removal of the first or the last entries of a log."""

    head: bool
    bound: int
    """First index that is kept, when the head is truncated; the last one, when the tail is."""

    def apply(
        self, state: PersistentState, last_index: int, index_start: int, new: NewTail
    ) -> PersistentState:
        """Return the state after it; `index_start` is that of the tail if it was sealed, or 0."""
        if self.head:
            return _without_head(state, last_index, self.bound, new)
        return _without_end(state, self.bound, index_start, new)

    def cuts_tail(self, state: PersistentState) -> bool:
        """Return whether a part of the tail is kept, so that it must be sealed."""
        return not self.head and (state.segments or ())[-1].base_index <= self.bound


def plan_truncation(first: int, last: int, low: int, high: int) -> Truncation | None:
    """Plan the removal of `low` to `high` from a log of `first` to `last`; None if it is empty.

    >>> plan_truncation(1, 10, 1, 4)
    Truncation(head=True, bound=5)
    >>> plan_truncation(1, 10, 8, 10)
    Truncation(head=False, bound=7)
    """
    if low > high or first == 0 or high < first or low > last:
        return None
    if low <= first:
        return Truncation(head=True, bound=high + 1)
    if high >= last:
        return Truncation(head=False, bound=low - 1)
    raise InvalidInputError(
        f"cannot remove {low} to {high} from the middle of a log of {first} to {last}",
        hint="Only the first or the last entries of a log can be removed",
    )


def _without_head(
    state: PersistentState, last_index: int, bound: int, new: NewTail
) -> PersistentState:
    ends = ((info, info.max_index if info.sealed else last_index) for info in state.segments or ())
    kept = [info for info, end in ends if end >= bound]
    if not kept:
        return new.append_to(state, [], last_index + 1)
    if bound > kept[0].min_index:
        kept[0] = msgspec.structs.replace(kept[0], min_index=bound)
    return msgspec.structs.replace(state, segments=tuple(kept))


def _without_end(
    state: PersistentState, bound: int, index_start: int, new: NewTail
) -> PersistentState:
    kept = [info for info in state.segments or () if info.base_index <= bound]
    last = kept[-1]
    kept[-1] = (
        msgspec.structs.replace(last, max_index=bound)
        if last.sealed
        else _seal(last, bound, index_start, new)
    )
    return new.append_to(state, kept, bound + 1)
