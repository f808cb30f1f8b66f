"""`LocalLog`: a crash-safe log of numbered entries in a directory, with a few stable values.

An append is one write and one sync, whatever its size. When the tail is full, the batch that
fills it carries its index; the log then switches to a new tail in the background, and only an
append that comes before that is done waits for it. Readers never wait: they use a view that is
replaced as a whole.

    store_logs   encode → write + sync → publish        (poisoned if it fails halfway)
    rotation     meta commit → create the new file
    truncation   meta commit → create, if a tail is new → delete files

After a failed write or sync the state of the disk is unknown. The handle then rejects all
changes, and still serves reads of acknowledged entries; reopening the log recovers it. Arguments
are checked before anything is locked or written: a mistake of the caller must neither reach the
disk nor poison the log.
"""

import operator
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from reef.errors import (
    ClosedError,
    ErrorKind,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.files import OS, FileSystem, is_disk_full
from reef.locallog.encoding import (
    BINARY,
    SEGMENT_BYTES_MAX,
    TYPE_MAX,
    U64_MAX,
    EntryCodec,
    Framed,
    LogEntry,
    bad_type,
    check_id,
    frame_entries,
)
from reef.locallog.metastore import (
    NewTail,
    PersistentState,
    open_meta_store,
    plan_rotation,
    plan_tail,
    plan_truncation,
    rfc3339,
    without_tail,
)
from reef.locallog.recovery import LogRecoveryReport, create_tail, open_segments
from reef.locallog.segment import AppendBatch, SealedSegment, TailSegment, not_in_log
from reef.runtime import REAL, ProcessBound, Runtime, Task

T = TypeVar("T")
SEGMENT_BYTES = 64 << 20
U64 = struct.Struct("<Q")


class LogView:
    """A snapshot of the log for readers; immutable, except that its tail grows."""

    __slots__ = ("bases", "sealed", "tail")

    def __init__(self, sealed: tuple[SealedSegment, ...], tail: TailSegment) -> None:
        self.sealed = sealed
        self.tail = tail
        self.bases = [segment.info.base_index for segment in sealed]

    @property
    def first_index(self) -> int:
        if self.sealed:
            return self.sealed[0].info.min_index
        first = self.tail.info.min_index
        return first if first <= self.tail.last_index else 0

    @property
    def last_index(self) -> int:
        return self.tail.last_index if self.first_index else 0

    def segment_of(self, index: int) -> SealedSegment | TailSegment:
        """Return the segment of an entry, which must be in the log."""
        if index >= self.tail.info.base_index:
            return self.tail
        return self.sealed[bisect_right(self.bases, index) - 1]


class LocalLog(ProcessBound):
    """A log in a directory, with one owner. Changes are serialized; reads are not."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        segment_bytes: int = SEGMENT_BYTES,
        *,
        codec: EntryCodec = BINARY,
        files: FileSystem = OS,
        runtime: Runtime = REAL,
        lock_timeout_s: float = 0.0,
    ) -> None:
        """Open the log, or create it. ConflictError if it is already open."""
        super().__init__(runtime)
        segment_bytes = _to_int("segment_bytes", segment_bytes)
        if not 1 <= segment_bytes <= SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"segment_bytes is {segment_bytes}, expected 1 to {SEGMENT_BYTES_MAX}",
                kind=ErrorKind.INVALID_OPTION,
            )
        check_id(codec)
        self.path = _absolute(path)
        self.codec = codec
        self._segment_bytes = segment_bytes
        self._files = files
        self._runtime = runtime
        self._lock = runtime.lock()
        """Held during a change, including its I/O."""
        self._rotation: Task | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._names_synced = False
        """Whether the tail's name is durable: required before its first acknowledgement."""
        with _disk_errors(self.path):
            files.make_directories(self.path)
            self._meta = open_meta_store(
                files, self.path, runtime=runtime, lock_timeout_s=lock_timeout_s
            )
            self._view: LogView | None
            self._view, self.recovery = self._open()

    def _open(self) -> tuple[LogView, LogRecoveryReport]:
        try:
            opened = open_segments(self._files, self.path, self._meta, self.codec, self._new_tail())
        except BaseException:
            self._meta.close()
            raise
        return LogView(opened.sealed, opened.tail), opened.report

    # --- reading: no lock ---------------------------------------------------------
    @property
    def first_index(self) -> int:
        """The first entry's index; 0 if the log is empty."""
        return self._current_view().first_index

    @property
    def last_index(self) -> int:
        """The last entry's index; 0 if the log is empty."""
        return self._current_view().last_index

    def get_log(self, index: int) -> LogEntry:
        """Return an entry; NotFoundError if it is not in the log."""
        view = self._current_view()
        first, last = view.first_index, view.last_index
        if not first <= index <= last or not first:
            raise not_in_log(index, first, last)
        with _disk_errors(self.path):
            return view.segment_of(index).get(index)

    def entries(self, first: int | None = None, last: int | None = None) -> Iterator[LogEntry]:
        """Yield entries from `first` to `last`, both included; by default all of them.

        The entries of the log at the call are yielded, even if they are removed meanwhile.
        """
        view = self._current_view()
        have_first, have_last = view.first_index, view.last_index
        low = have_first if first is None else first
        high = have_last if last is None else last
        if low > high or not have_first:
            return iter(())
        for bound in (low, high):
            if not have_first <= bound <= have_last:
                raise not_in_log(bound, have_first, have_last)
        return self._iterate(view, low, high)

    def _iterate(self, view: LogView, low: int, high: int) -> Iterator[LogEntry]:
        while low <= high:
            segment = view.segment_of(low)
            end = high if segment is view.tail else min(high, segment.last_index)
            with _disk_errors(self.path):
                yield from segment.entries(low, end)
            low = end + 1

    def get(self, key: bytes | str) -> bytes | None:
        """Return a stable value; None if it is not set."""
        self._current_view()
        return self._meta.stable.get(_to_key(key))

    def get_uint64(self, key: bytes | str) -> int:
        """Return a stable number; 0 if it is not set."""
        value = self.get(key)
        if not value:
            return 0
        if len(value) != U64.size:
            raise InvalidInputError(
                f"the value of {key!r} has {len(value)} bytes, expected {U64.size}"
            )
        return int(U64.unpack(value)[0])

    def _current_view(self) -> LogView:
        view = self._view
        if self._closed or view is None:
            raise ClosedError(f"{self.path}: the log is closed")
        return view

    # --- changing: one at a time --------------------------------------------------
    def store_log(self, entry: LogEntry) -> None:
        """Append one entry, durably."""
        self.store_logs((entry,))

    def store_logs(self, entries: Sequence[LogEntry]) -> None:
        """Append entries durably and atomically, with one write and one sync.

        Their indexes continue from `last_index`; an empty log accepts any first index.
        OutcomeUnknownError if the disk failed: the log must be reopened.
        """
        self._current_view()
        if not entries:
            return
        frames = _to_frames(self.codec, entries)
        with self._lock:
            self._ready()
            batch = self._tail_for(int(entries[0].index)).encode(frames)
            self._run_change(lambda: self._append(batch))
            if batch.index_start:
                self._start_rotation(self.last_index, batch.index_start)

    def delete_range(self, first: int, last: int) -> None:
        """Remove entries from the head or the tail of the log, both bounds included."""
        first, last = _to_int("a bound", first), _to_int("a bound", last)
        with self._lock:
            self._ready()
            plan = plan_truncation(self.first_index, self.last_index, first, last)
            if plan is None:
                return

            def truncate() -> None:
                index_start = 0
                if plan.cuts_tail(self._meta.state):
                    seal = self._current_view().tail.encode(Framed([], []), seal=True)
                    self._append(seal)
                    index_start = seal.index_start
                state = self._meta.state
                self._switch_to(plan.apply(state, self.last_index, index_start, self._new_tail()))

            self._run_change(truncate)

    def frees_segment(self, last: int) -> bool:
        """Return whether removing all entries up to `last` would delete a file."""
        sealed = self._current_view().sealed
        return bool(sealed) and sealed[0].last_index <= last

    def set(self, key: bytes | str, value: bytes | None) -> None:
        """Store a stable value durably; None removes it. A text key is UTF-8."""
        name, kept = _to_key(key), _to_value(value)
        with self._lock:
            self._ready()
            self._run_change(lambda: self._meta.set_stable(name, kept))

    def set_uint64(self, key: bytes | str, value: int) -> None:
        """Store an unsigned 64-bit number durably."""
        value = _to_int("a stable number", value)
        if not 0 <= value < 1 << 64:
            raise InvalidInputError(f"{value} is out of range for an unsigned 64-bit integer")
        self.set(key, U64.pack(value))

    def close(self) -> None:
        """Close the log and release its lock. Acknowledged entries are durable already."""
        with self._lock:
            if self._closed:
                return
            if self._rotation is not None:
                self._rotation.join()
            self._closed = True
            self._view = None  # a removed segment uses space while its file is open
            self._failure = None
            self._meta.close()

    def __enter__(self) -> "LocalLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"LocalLog({self.path!r}, closed)"
        return f"LocalLog({self.path!r}, {self.first_index} to {self.last_index})"

    # --- inside: the lock is held -------------------------------------------------
    def _ready(self) -> None:
        """Wait for the rotation; raise if the log is closed or failed."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"{self.path}: the log is closed")
        if self._rotation is not None:
            self._rotation.join()
            self._rotation = None
        if self._failure is not None:
            raise ClosedError(
                f"{self.path}: an earlier change of the log failed ({self._failure})",
                hint="Reopen the log: recovery finds the durable entries",
            ) from self._failure

    def _run_change(self, change: Callable[[], T]) -> T:
        """Run a change. If it fails halfway, the log accepts no other.

        The error may live longer than the log. Its frames must not hold segments, whose files
        would stay open: callers have no segment in a variable, and frames below are dropped.
        """
        try:
            return change()
        except InvalidInputError:
            raise
        except BaseException as error:
            self._failure = error
            if not isinstance(error, OSError):
                raise
            raise OutcomeUnknownError(
                f"{self.path}: the disk failed ({error}); the change may be durable",
                kind=ErrorKind.DISK_FULL if is_disk_full(error) else ErrorKind.NOT_DURABLE,
                hint="Reopen the log and check last_index",
            ) from _without_frames(error)

    def _append(self, batch: AppendBatch) -> None:
        tail = self._current_view().tail
        tail.write(batch)
        if not self._names_synced:
            self._files.sync_directory(self.path)
            self._names_synced = True
        tail.publish(batch)

    def _tail_for(self, index: int) -> TailSegment:
        """Return the tail for an append at `index`; an empty log gets a new one if needed."""
        info = self._current_view().tail.info
        if self.first_index:
            if index != self.last_index + 1:
                raise InvalidInputError(f"entry {index} cannot follow entry {self.last_index}")
        elif not index == info.base_index == info.min_index:
            state = plan_tail(without_tail(self._meta.state), index, self._new_tail())
            self._run_change(lambda: self._switch_to(state))
        return self._current_view().tail

    def _start_rotation(self, last_index: int, index_start: int) -> None:
        def rotate() -> None:
            try:
                state = self._meta.state
                self._switch_to(plan_rotation(state, last_index, index_start, self._new_tail()))
            except BaseException as error:
                self._failure = _without_frames(error)

        try:
            self._rotation = self._runtime.spawn(rotate, name="reef-log-rotation")
        except RuntimeError:  # no thread is available: the append has succeeded anyway
            rotate()

    def _switch_to(self, state: PersistentState) -> None:
        """Change to another state: commit it, then create files, then publish the view."""
        before = self._current_view()
        self._meta.set_state(state)
        *infos, tail_info = state.segments or ()
        if tail_info.id == before.tail.info.id:
            tail = before.tail.with_info(tail_info)
        else:
            tail = create_tail(self._files, self.path, tail_info, self.codec)
            self._names_synced = False
        known = {segment.info.id: segment for segment in before.sealed}
        sealed = (
            known[info.id].with_info(info) if info.id in known else before.tail.sealed(info)
            for info in infos
        )
        self._view = LogView(tuple(sealed), tail)
        self._delete(before, state)

    def _delete(self, before: LogView, state: PersistentState) -> None:
        kept = {info.id for info in state.segments or ()}
        gone = [s.info for s in (*before.sealed, before.tail) if s.info.id not in kept]
        for info in gone:
            self._files.unlink(f"{self.path}/{info.name}")
        if gone:
            self._files.sync_directory(self.path)

    def _new_tail(self) -> NewTail:
        return NewTail(self.codec.id, self._segment_bytes, rfc3339(self._runtime.wall_ns()))


class _disk_errors:  # noqa: N801 - used like a function; a generator would cost each read more
    """Translate errors of the file system."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            raise UnavailableError(
                f"{self._path}: the disk failed ({error})",
                kind=ErrorKind.DISK_FULL if is_disk_full(error) else ErrorKind.UNAVAILABLE,
            ) from error


# --- arguments ----------------------------------------------------------------------


INDEX_MAX = U64_MAX - 2
"""The tail after the last entry has an index of its own."""


def _without_frames(error: BaseException) -> BaseException:
    """Drop the tracebacks of an error and its causes; return the error."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__
    return error


def _absolute(path: str | bytes | os.PathLike[str]) -> str:
    """Return the absolute path; an empty path is rejected, not the current directory."""
    if not os.fspath(path):
        raise InvalidInputError("the path of the log is empty", kind=ErrorKind.INVALID_OPTION)
    return os.path.abspath(os.fsdecode(path))


def _to_int(label: str, given: object) -> int:
    """Convert an integer of any type; 5.0 is rejected, since the state could not be decoded."""
    try:
        return int(operator.index(given))  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInputError(f"{label} must be an integer, not {given!r}") from error


def _to_frames(codec: EntryCodec, entries: Sequence[LogEntry]) -> Framed:
    """Encode entries as frames; InvalidInputError if one of them cannot be stored."""
    try:
        _check_entries(entries)
        return frame_entries(codec, entries)
    except (TypeError, AttributeError) as error:
        raise InvalidInputError(f"an entry has a field of the wrong type: {error}") from error


def _check_entries(entries: Sequence[LogEntry]) -> None:
    first = _to_int("an index", entries[0].index)
    if first + len(entries) - 1 > INDEX_MAX:
        raise InvalidInputError(
            f"the batch starts at {first} and exceeds the maximum index {INDEX_MAX}"
        )
    for place, entry in enumerate(entries):
        if entry.index != first + place or first < 1:
            raise InvalidInputError(
                f"expected index {max(first, 1) + place}, found {entry.index}",
                hint="Indexes start at 1 or above, and are consecutive",
            )
        if not 0 <= entry.type <= TYPE_MAX:
            raise bad_type(entry)


def _to_key(key: bytes | str) -> bytes:
    """Convert a key to bytes; text is encoded as UTF-8."""
    return key.encode() if isinstance(key, str) else _bytes("key", key)


def _to_value(value: bytes | None) -> bytes | None:
    """Convert a value to bytes; None is kept."""
    return None if value is None else _bytes("value", value)


def _bytes(label: str, given: object) -> bytes:
    if not isinstance(given, bytes | bytearray | memoryview):
        raise InvalidInputError(f"a {label} must be bytes, not {type(given).__name__}")
    return bytes(given)
