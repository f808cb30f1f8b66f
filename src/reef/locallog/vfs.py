"""The file system as the local log sees it: open files, names, and what makes each durable.

Each method is one system call, or as near as Python gets. A test puts another `FileSystem` in
its place: `reef.testing.log_disk` has one that remembers which writes were not synced, and
shows every disk that a power failure may leave of them. Nothing here decides anything;
`OSError` passes through.

A file closes itself when nobody holds it any more. A reader that has found its segment
therefore reads on from it, whatever a truncation in another thread does to its name.
"""

import fcntl
import os
import sys
import weakref
from contextlib import suppress
from typing import Protocol

__all__ = ["OS_FILES", "File", "FileSystem"]


class File(Protocol):
    """An open file."""

    def read(self, length: int, offset: int) -> bytes:
        """Return up to `length` bytes; fewer only where the file ends."""

    def write(self, data: bytes, offset: int) -> None:
        """Write all of it; the file grows where it must."""

    def size(self) -> int: ...

    def resize(self, size: int) -> None: ...

    def preallocate(self, size: int) -> None:
        """Make it `size` bytes of zeros, with room on the disk for them."""

    def sync(self) -> None:
        """Return when bytes and size would survive a power failure."""

    def sync_data(self) -> None:
        """The same, without the stamps that no reader needs."""

    def try_lock(self) -> bool:
        """Take the file for this owner alone; False if another one has it."""

    def close(self) -> None:
        """Let go, and of the lock too. May be called twice."""


class FileSystem(Protocol):
    """Names, and what they lead to."""

    def create(self, path: str) -> File:
        """Open a new file for reading and writing; FileExistsError if the name is taken."""

    def open(self, path: str, *, writable: bool) -> File: ...

    def open_directory(self, path: str) -> File:
        """Open a directory, to lock it."""

    def same_file(self, file: File, path: str) -> bool:
        """Whether the name still leads to this file."""

    def exists(self, path: str) -> bool: ...

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, unsorted."""

    def make_directory(self, path: str) -> None:
        """Make a directory, durably, and those above it; it may be there."""

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory would survive a power failure."""


class _OsFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        pieces = [data]
        while data and (found := sum(map(len, pieces))) < length:
            data = os.pread(self._fd, length - found, offset + found)
            pieces.append(data)
        return b"".join(pieces)

    def write(self, data: bytes, offset: int) -> None:
        written = os.pwrite(self._fd, data, offset)
        while written < len(data):
            written += os.pwrite(self._fd, memoryview(data)[written:], offset + written)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def resize(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    if hasattr(os, "posix_fallocate"):

        def preallocate(self, size: int) -> None:
            os.posix_fallocate(self._fd, 0, size)

    else:

        def preallocate(self, size: int) -> None:
            os.ftruncate(self._fd, size)

    if sys.platform == "darwin":  # macOS: fsync(2) stops at the drive's cache

        def sync(self) -> None:
            fcntl.fcntl(self._fd, fcntl.F_FULLFSYNC)

        def sync_data(self) -> None:
            fcntl.fcntl(self._fd, fcntl.F_FULLFSYNC)

    else:

        def sync(self) -> None:
            os.fsync(self._fd)

        def sync_data(self) -> None:
            os.fdatasync(self._fd)

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _locked.add(self)
        return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self in _locked:  # by word: a forked child would keep it for as long as it lives
            _locked.discard(self)
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def forget(self) -> None:
        """Close without unlocking: the lock is the parent's."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def is_at(self, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False

    def __del__(self) -> None:
        self.close()


_locked: "weakref.WeakSet[_OsFile]" = weakref.WeakSet()


def _forget_locks_in_child() -> None:
    """A forked child shares its parent's open files, and would hold their locks beyond its
    parent's death."""
    for file in list(_locked):
        file.forget()
    _locked.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


class _OsFileSystem:
    def create(self, path: str) -> File:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return _OsFile(os.open(path, flags, 0o644))

    def open(self, path: str, *, writable: bool) -> File:
        access = os.O_RDWR if writable else os.O_RDONLY
        return _OsFile(os.open(path, access | os.O_CLOEXEC))

    def open_directory(self, path: str) -> File:
        return _OsFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def same_file(self, file: File, path: str) -> bool:
        return isinstance(file, _OsFile) and file.is_at(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def make_directory(self, path: str) -> None:
        above = os.path.dirname(path)
        if not os.path.isdir(path):
            self.make_directory(above)
            with suppress(FileExistsError):
                os.mkdir(path)
        if not os.listdir(path):  # whoever made it may have died before this
            with suppress(PermissionError):
                self.sync_directory(above)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        self.open_directory(path).sync()


OS_FILES: FileSystem = _OsFileSystem()
