"""The meta store: which segments make up the log, and the few values Raft keeps beside it.

`wal-meta.db` is a bbolt file with two buckets. `wal-meta` has one key, `m`: the state as
JSON. `stable` has the user's keys. Each change is one commit, which is where a rotation or a
truncation happens: before it the log is the old one, after it the new one.

Whoever has the file locked owns the log.
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
from reef.locallog.bolt import read_meta
from reef.locallog.bolt_writer import BoltFile, write_empty
from reef.locallog.entry import EntryTime
from reef.locallog.frames import SEGMENT_BYTES_MAX, segment_name
from reef.locallog.vfs import File, FileSystem
from reef.runtime import Runtime

__all__ = [
    "META_NAME",
    "LogState",
    "MetaStore",
    "SegmentInfo",
    "look_at",
    "open_meta_store",
    "read_meta_store",
    "refuse_lost_meta",
]

T = TypeVar("T")
META_NAME = "wal-meta.db"
STATE_BUCKET, STATE_KEY = b"wal-meta", b"m"
STABLE_BUCKET = b"stable"
UNSEALED = "0001-01-01T00:00:00Z"
KEY_BYTES_MAX = 32768
U64_MAX = (1 << 64) - 1
LOCK_POLL_S = 0.02
LOOKS_MAX = 100
"""How often a meta store that changes is read again."""


class SegmentInfo(msgspec.Struct, frozen=True, rename="pascal"):
    """What the meta store knows of a segment."""

    id: int = msgspec.field(name="ID")
    base_index: int
    """The first index that the file holds or will hold."""
    min_index: int
    """The first one that is still in the log."""
    max_index: int
    """The last one that is in the log; 0 while it is open for appends."""
    codec: int
    index_start: int
    """Where in the file the offsets begin; 0 while it is open for appends."""
    create_time: str
    seal_time: str
    size_limit: int
    """Past this many bytes it is sealed."""

    @property
    def sealed(self) -> bool:
        return self.seal_time != UNSEALED

    @property
    def name(self) -> str:
        return segment_name(self.base_index, self.id)


class LogState(msgspec.Struct, frozen=True, rename="pascal"):
    """All segments of a log, by base index; only the last one may be unsealed."""

    next_segment_id: int = msgspec.field(name="NextSegmentID", default=0)
    segments: tuple[SegmentInfo, ...] | None = ()

    def problem(self) -> str | None:
        """Return what contradicts itself, if anything does."""
        infos = self.segments or ()
        for info in infos:
            if not _is_sane(info) or info.id >= self.next_segment_id:
                return f"segment {info.id} does not agree with itself: {info}"
        for info, following in pairwise(infos):
            if not info.sealed:
                return f"segment {info.id} is unsealed, and not the last"
            if following.base_index != info.max_index + 1:
                return f"segment {following.id} does not go on after {info.max_index}: {following}"
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
    """Return a time as the Go library writes it: as many digits as it takes.

    >>> rfc3339(1_700_000_000_120_000_000)
    '2023-11-14T22:13:20.12Z'
    """
    return str(EntryTime.from_unix_ns(unix_ns))


@dataclass(frozen=True, slots=True)
class _Loaded:
    state: LogState
    stable: Mapping[bytes, bytes]


class MetaStore:
    """The open, locked file. One thread at a time may commit; anyone may look."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._bolt = BoltFile(file, META_NAME)
        self._now = _load(self._bolt)

    @property
    def state(self) -> LogState:
        return self._now.state

    @property
    def stable(self) -> Mapping[bytes, bytes]:
        return self._now.stable

    def set_state(self, state: LogState) -> None:
        """Make this the log, durably."""
        encoded = msgspec.json.encode(state)
        self._bolt.commit({STATE_BUCKET: {STATE_KEY: encoded}})
        self._now = replace(self._now, state=state)

    def set_stable(self, key: bytes, value: bytes | None) -> None:
        """Keep a value durably; None removes it."""
        if not key or len(key) > KEY_BYTES_MAX:
            raise InvalidInputError(f"a key has 1 to {KEY_BYTES_MAX} bytes, this one {len(key)}")
        stable = {name: kept for name, kept in self._now.stable.items() if name != key}
        if value is not None:
            stable[key] = value
        self._bolt.commit({STABLE_BUCKET: stable})
        self._now = replace(self._now, stable=stable)

    def close(self) -> None:
        """Let another owner have it."""
        self._file.close()


def read_meta_store(files: FileSystem, path: str) -> tuple[LogState, Mapping[bytes, bytes]]:
    """Return state and stable values as they are, without owning the log."""
    file = files.open(f"{path}/{META_NAME}", writable=False)
    loaded = look_at(file, lambda: _load(BoltFile(file, META_NAME)))
    return loaded.state, loaded.stable


def look_at(file: File, look: Callable[[], T]) -> T:
    """Look at a meta store that its owner may commit to meanwhile.

    A commit may use the pages again that are just being read. What was seen counts if the meta is
    the same before and behind it, and damage is damage only then.
    """
    for _ in range(LOOKS_MAX):
        before = read_meta(file, META_NAME)
        try:
            seen = look()
        except CorruptionError:
            if read_meta(file, META_NAME) == before:
                raise
            continue
        if read_meta(file, META_NAME) == before:
            return seen
    raise UnavailableError(f"{META_NAME} changes faster than it can be read", hint="Try again")


def _load(bolt: BoltFile) -> _Loaded:
    items, stable = bolt.items(STATE_BUCKET), bolt.items(STABLE_BUCKET)
    encoded = (items or {}).get(STATE_KEY)
    try:
        state = msgspec.json.decode(encoded, type=LogState) if encoded else LogState()
    except UNDECODABLE as error:
        raise CorruptionError(
            f"{META_NAME}: the state is not what it should be: {error}"
        ) from error
    if problem := state.problem():
        raise CorruptionError(f"{META_NAME}: {problem}", object=META_NAME)
    if state.segments is None:
        state = msgspec.structs.replace(state, segments=())
    return _Loaded(state, dict(stable or {}))


def open_meta_store(
    files: FileSystem, path: str, *, runtime: Runtime, lock_timeout_s: float
) -> MetaStore:
    """Lock the meta store of a directory, and read it; make one if there is none."""
    deadline = runtime.deadline(lock_timeout_s)
    while True:
        file = _try_open(files, path)
        if file is not None:
            with _closed_on_error(file):
                return MetaStore(file)
        if deadline.passed():
            raise ConflictError(
                f"{path}: the log is open elsewhere",
                hint="A log has one owner: close it there, or give this one another directory",
            )
        runtime.sleep(LOCK_POLL_S)


@contextmanager
def _closed_on_error(file: File) -> Iterator[None]:
    """Let go of a file, and of its lock, at once: whoever keeps the error would keep both."""
    try:
        yield
    except BaseException:
        file.close()
        raise


def _try_open(files: FileSystem, path: str) -> File | None:
    """Return the locked file, or None if somebody else has it."""
    target = f"{path}/{META_NAME}"
    try:
        file = files.open(target, writable=True)
    except FileNotFoundError:
        return _try_create(files, path)
    with _closed_on_error(file):
        if file.try_lock() and files.same_file(file, target):
            file.sync()  # whoever wrote what is read now may have died before its syncs
            files.sync_directory(path)
            return file
    file.close()
    return None


def _try_create(files: FileSystem, path: str) -> File | None:
    """Write the file beside its place, whole and durable, then rename it.

    The lock on the directory keeps two owners from making it at once.
    """
    target, temporary = f"{path}/{META_NAME}", f"{path}/{META_NAME}.tmp"
    folder = files.open_directory(path)
    try:
        if not folder.try_lock() or files.exists(target):
            return None
        refuse_lost_meta(files, path)
        if files.exists(temporary):
            files.unlink(temporary)
        file = files.create(temporary)
        with _closed_on_error(file):
            file.try_lock()
            write_empty(file, mmap.PAGESIZE)
            BoltFile(file, META_NAME).commit({STATE_BUCKET: {}, STABLE_BUCKET: {}})  # and synced
            files.rename(temporary, target)
            files.sync_directory(path)
        return file
    finally:
        folder.close()


def refuse_lost_meta(files: FileSystem, path: str) -> None:
    """Raise if segments have no meta store: it is made first, so they are no new log."""
    left = sorted(name for name in files.names(path) if name.endswith(".wal"))
    if left:
        raise CorruptionError(
            f"{path}: {META_NAME} is missing beside {len(left)} segments, such as {left[0]}",
            hint="Bring it back from where it went; opening without it would delete them",
            object=META_NAME,
        )
