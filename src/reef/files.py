"""The one door to the file system, for everything that must survive a power failure.

Each method is one system call (or as near as Python gets), so that a test can record
their order, and `reef.testing.files` can replace them all by a disk that forgets what was
not synced. Nothing here decides anything; `OSError` passes through.
"""

import errno
import fcntl
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

__all__ = ["NO_WAIT", "OS", "FileStat", "Files", "SyncFailed"]

NO_WAIT = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags to open a path that may be anything: without O_NONBLOCK the open of a FIFO waits for its
other end. They change nothing for a regular file."""

COPY_BYTES_MAX = 1 << 20
NO_COPY_RANGE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL}
"""Answers of file systems that cannot copy by themselves."""


class SyncFailed(OSError):
    """The disk refused to make something durable, as opposed to: it was not asked."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """What the file system says of one path."""

    size: int
    inode: int
    mtime_ns: int
    """Settable: Reef stores a stamp of its own here, which makes a tag that never repeats."""
    ctime_ns: int
    """Not settable: the file system's own clock, at the last link, rename or write."""
    is_directory: bool
    is_file: bool = True
    """A regular one: neither a directory nor a pipe, a device or a dangling link."""


class Files(ABC):
    """System calls, one method each."""

    @abstractmethod
    def create(self, path: str) -> int:
        """Open a new file for writing; it must not exist."""

    @abstractmethod
    def open(self, path: str) -> int:
        """Open a file of any kind for reading, without waiting; `FileStat` tells its kind."""

    @abstractmethod
    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Append; may write less than asked, as write(2) may."""

    @abstractmethod
    def read_at(self, fd: int, start: int, length: int) -> bytes:
        """Read up to `length` bytes at `start`; may return fewer, as pread(2) may."""

    @abstractmethod
    def copy_range(
        self, source_fd: int, target_fd: int, length: int, start: int | None = None
    ) -> int:
        """Move bytes from one open file to another without passing through Python.

        From `start` on, or from where the last one ended.
        """

    @abstractmethod
    def set_mtime(self, fd: int, mtime_ns: int) -> None: ...

    @abstractmethod
    def stat_open(self, fd: int) -> FileStat: ...

    @abstractmethod
    def sync(self, fd: int) -> None:
        """Return when the file's bytes and stamps would survive a power failure."""

    @abstractmethod
    def close(self, fd: int) -> None: ...

    @abstractmethod
    def stat(self, path: str) -> FileStat: ...

    @abstractmethod
    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fails if the name is taken."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of whatever had it."""

    @abstractmethod
    def unlink(self, path: str) -> None: ...

    @abstractmethod
    def make_directory(self, path: str) -> None: ...

    @abstractmethod
    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory would survive a power failure.

        SyncFailed if the disk refused; any other OSError if it was not even asked.
        """

    @abstractmethod
    def scan(self, path: str) -> list[tuple[str, bool]]:
        """Names in a directory, unsorted, each with whether it is a directory (not a link)."""

    @abstractmethod
    def locked(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock on a path, between threads and processes, in a `with`."""


class _OsFiles(Files):
    def __reduce__(self) -> str:
        return "OS"

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | NO_WAIT)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def read_at(self, fd: int, start: int, length: int) -> bytes:
        return os.pread(fd, length, start)

    if hasattr(os, "copy_file_range"):

        def copy_range(
            self, source_fd: int, target_fd: int, length: int, start: int | None = None
        ) -> int:
            try:
                return os.copy_file_range(source_fd, target_fd, length, start)
            except OSError as error:
                if error.errno not in NO_COPY_RANGE:
                    raise
            return os.write(target_fd, _read(source_fd, length, start))

    else:  # macOS has no in-kernel copy between files that Python knows of

        def copy_range(
            self, source_fd: int, target_fd: int, length: int, start: int | None = None
        ) -> int:
            return os.write(target_fd, _read(source_fd, length, start))

    def set_mtime(self, fd: int, mtime_ns: int) -> None:
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def stat_open(self, fd: int) -> FileStat:
        return _to_stat(os.fstat(fd))

    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync(2) stops at the drive's cache

        def sync(self, fd: int) -> None:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined,unused-ignore]

    else:

        def sync(self, fd: int) -> None:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, path: str) -> FileStat:
        return _to_stat(os.stat(path))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)

    def scan(self, path: str) -> list[tuple[str, bool]]:
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        fd = self._lock(path)
        try:
            yield
        finally:
            _unlock(fd)

    def _lock(self, path: str) -> int:
        """Return a locked file that still has its name: on a removed one, nobody is excluded."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _held_locks.add(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if _has_name(fd, path):
                    return fd
            except BaseException:
                _unlock(fd)
                raise
            _unlock(fd)


def _has_name(fd: int, path: str) -> bool:
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _unlock(fd: int) -> None:
    """By word, not only by closing: a child that was forked between the opening and the noting
    of a file shares it, and would keep the lock for as long as it lives."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    _held_locks.discard(fd)
    os.close(fd)


_held_locks: set[int] = set()


def _close_locks_in_child() -> None:
    """A child shares the open files of its parent's locks, and would keep them for as long
    as it lives, although the threads that took them are not there."""
    for fd in list(_held_locks):
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def _read(fd: int, length: int, start: int | None) -> bytes:
    length = min(length, COPY_BYTES_MAX)
    return os.read(fd, length) if start is None else os.pread(fd, length, start)


def _to_stat(result: os.stat_result) -> FileStat:
    return FileStat(
        result.st_size,
        result.st_ino,
        result.st_mtime_ns,
        result.st_ctime_ns,
        stat.S_ISDIR(result.st_mode),
        stat.S_ISREG(result.st_mode),
    )


OS = _OsFiles()
