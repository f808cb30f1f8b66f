"""`LocalLog`: a crash-safe log of numbered entries in a directory, and a few values beside it.

An append is one write and one sync, whatever its size. When the tail is full, the batch that
fills it carries its index; the log then turns to a new tail in the background, and only an
append that comes before that is done waits for it. Readers never wait: they look at a view
that is replaced as a whole.

    store_logs   encode → write + sync → show          (poisoned if it fails in the middle)
    rotation     meta commit → create the new file
    truncation   meta commit → create, if a tail is new → delete files

Where a write or a sync fails, nobody knows what the disk has. The handle then refuses to
change anything more, and keeps answering reads of what was acknowledged; opening the log
again finds out.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from reef.errors import ClosedError, InvalidInputError, Kind, OutcomeUnknownError, UnavailableError
from reef.locallog.arguments import directory, framed, stable_key, stable_value, whole_number
from reef.locallog.batching import Framed
from reef.locallog.codec import BINARY, EntryCodec, check_id
from reef.locallog.entry import LogEntry
from reef.locallog.frames import SEGMENT_BYTES_MAX
from reef.locallog.metastore import LogState, open_meta_store, rfc3339
from reef.locallog.opening import FULL, create_tail, open_segments
from reef.locallog.plans import NewTail, plan_rotation, plan_tail, plan_truncation, without_tail
from reef.locallog.recovery import RecoveryReport
from reef.locallog.segment import Batch, Sealed, Tail, missing
from reef.locallog.vfs import OS_FILES, FileSystem
from reef.runtime import REAL, ProcessBound, Runtime, Task

__all__ = ["LocalLog"]

T = TypeVar("T")
SEGMENT_BYTES = 64 << 20
SEGMENT_BYTES_MIN = 1
U64 = struct.Struct("<Q")


class View:
    """The log at one moment: what a reader needs, never changed but for the tail's growth."""

    __slots__ = ("bases", "sealed", "tail")

    def __init__(self, sealed: tuple[Sealed, ...], tail: Tail) -> None:
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

    def segment_of(self, index: int) -> Sealed | Tail:
        """Return the segment that has an entry, which is known to be in the log."""
        if index >= self.tail.info.base_index:
            return self.tail
        return self.sealed[bisect_right(self.bases, index) - 1]


class LocalLog(ProcessBound):
    """A log in a directory, with one owner. One thread appends, any number read."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        segment_bytes: int = SEGMENT_BYTES,
        *,
        codec: EntryCodec = BINARY,
        files: FileSystem = OS_FILES,
        runtime: Runtime = REAL,
        lock_timeout_s: float = 0.0,
    ) -> None:
        """Open the log, or make one. ConflictError if it is open elsewhere."""
        super().__init__(runtime)
        segment_bytes = whole_number("segment_bytes", segment_bytes)
        if not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"segment_bytes is {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}, not {segment_bytes}",
                kind=Kind.INVALID_OPTION,
            )
        check_id(codec)
        self.path = directory(path)
        self.codec = codec
        self._segment_bytes = segment_bytes
        self._files = files
        self._runtime = runtime
        self._lock = runtime.lock()
        """Held by whoever changes something, over all of its I/O."""
        self._rotation: Task | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._names_synced = False
        """Whether the tail's name is durable: it must be before the first answer."""
        with _told(self.path):
            files.make_directory(self.path)
            self._meta = open_meta_store(
                files, self.path, runtime=runtime, lock_timeout_s=lock_timeout_s
            )
            self._view: View | None
            self._view, self.recovery = self._open()

    def _open(self) -> tuple[View, RecoveryReport]:
        try:
            opened = open_segments(self._files, self.path, self._meta, self.codec, self._new_tail())
        except BaseException:
            self._meta.close()
            raise
        return View(opened.sealed, opened.tail), opened.report

    # --- reading: no lock ---------------------------------------------------------
    @property
    def first_index(self) -> int:
        """The first entry's index; 0 if the log is empty."""
        return self._looking().first_index

    @property
    def last_index(self) -> int:
        """The last entry's index; 0 if the log is empty."""
        return self._looking().last_index

    def get_log(self, index: int) -> LogEntry:
        """Return an entry; NotFoundError if the log does not have it."""
        view = self._looking()
        first, last = view.first_index, view.last_index
        if not first <= index <= last or not first:
            raise missing(index, first, last)
        with _told(self.path):
            return view.segment_of(index).get(index)

    def entries(self, first: int | None = None, last: int | None = None) -> Iterator[LogEntry]:
        """Yield entries from `first` to `last`, both included; by default all there are now.

        What was in the log at the call is yielded, whatever is removed meanwhile.
        """
        view = self._looking()
        have_first, have_last = view.first_index, view.last_index
        low = have_first if first is None else first
        high = have_last if last is None else last
        if low > high or not have_first:
            return iter(())
        for bound in (low, high):
            if not have_first <= bound <= have_last:
                raise missing(bound, have_first, have_last)
        return self._iterate(view, low, high)

    def _iterate(self, view: View, low: int, high: int) -> Iterator[LogEntry]:
        while low <= high:
            segment = view.segment_of(low)
            end = high if segment is view.tail else min(high, segment.last_index)
            with _told(self.path):
                yield from segment.entries(low, end)
            low = end + 1

    def get(self, key: bytes | str) -> bytes | None:
        """Return what `set` kept; None if there is nothing."""
        self._looking()
        return self._meta.stable.get(stable_key(key))

    def get_uint64(self, key: bytes | str) -> int:
        """Return what `set_uint64` kept; 0 if there is nothing."""
        value = self.get(key)
        if not value:
            return 0
        if len(value) != U64.size:
            raise InvalidInputError(f"{key!r} has {len(value)} bytes, a number has {U64.size}")
        return int(U64.unpack(value)[0])

    def _looking(self) -> View:
        view = self._view
        if self._closed or view is None:
            raise ClosedError(f"{self.path}: the log was closed")
        return view

    # --- changing: one at a time --------------------------------------------------
    def store_log(self, entry: LogEntry) -> None:
        """Append one entry, durably."""
        self.store_logs((entry,))

    def store_logs(self, entries: Sequence[LogEntry]) -> None:
        """Append entries, durably, all or none: one write, one sync.

        Their indexes go on from `last_index`; an empty log takes any first one.
        OutcomeUnknownError if the disk failed: the log must be opened again.
        """
        self._looking()
        if not entries:
            return
        frames = framed(self.codec, entries)
        with self._lock:
            self._ready()
            tail = self._tail_for(int(entries[0].index))
            batch = tail.encode(frames)
            self._changing(lambda: self._append(tail, batch))
            if batch.index_start:
                self._start_rotation(tail.last_index, batch.index_start)

    def delete_range(self, first: int, last: int) -> None:
        """Remove entries from the head or the tail of the log, both bounds included."""
        first, last = whole_number("a bound", first), whole_number("a bound", last)
        with self._lock:
            self._ready()
            view = self._looking()
            plan = plan_truncation(view.first_index, view.last_index, first, last)
            if plan is None:
                return

            def truncate() -> None:
                index_start = 0
                if plan.cuts_tail(self._meta.state):
                    seal = view.tail.encode(Framed([], []), seal=True)
                    self._append(view.tail, seal)
                    index_start = seal.index_start
                state = self._meta.state
                self._turn_to(plan.apply(state, view.last_index, index_start, self._new_tail()))

            self._changing(truncate)

    def frees_segment(self, last: int) -> bool:
        """Whether removing all entries up to `last` would delete a file."""
        sealed = self._looking().sealed
        return bool(sealed) and sealed[0].last_index <= last

    def set(self, key: bytes | str, value: bytes | None) -> None:
        """Keep a value durably, beside the log; None removes it. A text key is UTF-8."""
        name, kept = stable_key(key), stable_value(value)
        with self._lock:
            self._ready()
            self._changing(lambda: self._meta.set_stable(name, kept))

    def set_uint64(self, key: bytes | str, value: int) -> None:
        """Keep a number of 64 bits durably."""
        value = whole_number("what is kept here", value)
        if not 0 <= value < 1 << 64:
            raise InvalidInputError(f"{value} does not fit into 64 bits without a sign")
        self.set(key, U64.pack(value))

    def close(self) -> None:
        """Let go of the log. What was acknowledged is durable already."""
        with self._lock:
            if self._closed:
                return
            if self._rotation is not None:
                self._rotation.join()
            self._closed = True
            self._view = None  # a removed segment takes room for as long as its file is open
            self._meta.close()

    def __enter__(self) -> "LocalLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"LocalLog({self.path!r}, closed)"
        return f"LocalLog({self.path!r}, {self.first_index} to {self.last_index})"

    # --- inside: the lock is held -------------------------------------------------
    def _ready(self) -> None:
        """Wait for the rotation, and raise if nothing may be changed any more."""
        self.check_process()
        if self._closed:
            raise ClosedError(f"{self.path}: the log was closed")
        if self._rotation is not None:
            self._rotation.join()
            self._rotation = None
        if self._failure is not None:
            raise ClosedError(
                f"{self.path}: a change of the log failed before ({self._failure})",
                hint="Open it again: that finds out what the disk has",
            ) from self._failure

    def _changing(self, change: Callable[[], T]) -> T:
        """Run a change. If it fails in the middle, nothing may follow it."""
        try:
            return change()
        except InvalidInputError:
            raise
        except BaseException as error:
            self._failure = error
            if not isinstance(error, OSError):
                raise
            full = error.errno in FULL
            raise OutcomeUnknownError(
                f"{self.path}: the disk failed ({error}); what was being changed may be durable",
                kind=Kind.DISK_FULL if full else Kind.NOT_DURABLE,
                hint="Open the log again: last_index says what it has",
            ) from error

    def _append(self, tail: Tail, batch: Batch) -> None:
        tail.write(batch)
        if not self._names_synced:
            self._files.sync_directory(self.path)
            self._names_synced = True
        tail.show(batch)

    def _tail_for(self, index: int) -> Tail:
        """Return the tail, which goes on with `index`; of an empty log it is made to."""
        view = self._looking()
        if view.first_index:
            if index != view.last_index + 1:
                raise InvalidInputError(f"entry {index} cannot follow entry {view.last_index}")
        elif not index == view.tail.info.base_index == view.tail.info.min_index:
            state = plan_tail(without_tail(self._meta.state), index, self._new_tail())
            self._changing(lambda: self._turn_to(state))
        return self._looking().tail

    def _start_rotation(self, last_index: int, index_start: int) -> None:
        def rotate() -> None:
            try:
                state = self._meta.state
                self._turn_to(plan_rotation(state, last_index, index_start, self._new_tail()))
            except BaseException as error:
                self._failure = error

        try:
            self._rotation = self._runtime.spawn(rotate, name="reef-log-rotation")
        except RuntimeError:  # no thread is to be had: the append has succeeded all the same
            rotate()

    def _turn_to(self, state: LogState) -> None:
        """Make another state true: the commit first, then files, then what readers see."""
        before = self._looking()
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
        self._view = View(tuple(sealed), tail)
        self._delete(before, state)

    def _delete(self, before: View, state: LogState) -> None:
        kept = {info.id for info in state.segments or ()}
        gone = [s.info for s in (*before.sealed, before.tail) if s.info.id not in kept]
        for info in gone:
            self._files.unlink(f"{self.path}/{info.name}")
        if gone:
            self._files.sync_directory(self.path)

    def _new_tail(self) -> NewTail:
        return NewTail(self.codec.id, self._segment_bytes, rfc3339(self._runtime.wall_ns()))


class _told:  # noqa: N801 - reads as a word in `with`
    """Turns what the system says into what the caller can act on."""

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
            full = error.errno in FULL
            raise UnavailableError(
                f"{self._path}: the disk failed ({error})",
                kind=Kind.DISK_FULL if full else Kind.UNAVAILABLE,
            ) from error
