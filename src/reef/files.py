"""File-system seam: every call whose order decides what survives a power failure.

The directory store, the disk cache and the local log reach the file system through
`FileSystem` and `File` only. A method is one system call, or a loop over one, so that a test
can record their order, let one of them fail, or replace them all: `reef.testing.disk` has a
disk that loses everything that was not synced.

    bytes    File.append, write, resize    durable after File.sync
    names    create, link, rename, unlink, make_directory
                                           durable after sync_directory of the parent

The two are independent: a synced file may lose its name, and a durable name may lead to a
file without bytes. `OSError` passes through unchanged; `error_kind` is the one place that
classifies it.
"""

import errno
import fcntl
import os
import stat
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

from reef import kernel
from reef.errors import ErrorKind

NO_WAIT = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags to open a path of any type: without O_NONBLOCK, opening a FIFO blocks until its other
end is opened. They change nothing for a regular file."""
CLOSED = (1 << 31) - 1
"""Descriptor of a closed file: every system call fails with EBADF. Python rejects -1 itself, with
ValueError or a call on a path."""
COPY_BYTES_MAX = 1 << 20
NO_COPY_RANGE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL}
"""Errors of file systems that cannot copy inside the kernel."""
IDENTITY = struct.Struct("<7Q")
"""Size, inode, device, and both times in seconds and nanoseconds, as the kernel packs them."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ACCESS_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class SyncFailed(OSError):
    """The disk failed to make names durable; any other error means that no sync was attempted."""


def error_kind(error: OSError) -> ErrorKind:
    """Return the kind of a file-system error: disk full, access denied or unavailable."""
    number = error_number(error)
    if number in DISK_FULL:
        return ErrorKind.DISK_FULL
    return ErrorKind.ACCESS_DENIED if number in ACCESS_DENIED else ErrorKind.UNAVAILABLE


def is_disk_full(error: OSError) -> bool:
    """Return whether a call failed for lack of space: on the disk, in a quota or a limit."""
    return error.errno in DISK_FULL


def error_number(error: OSError) -> int:
    """Return the errno, also of an error that was raised without one."""
    if error.errno is not None:
        return error.errno
    for kind, number in ((IsADirectoryError, errno.EISDIR), (NotADirectoryError, errno.ENOTDIR)):
        if isinstance(error, kind):
            return number
    return errno.EIO


class FileStat(NamedTuple):
    """Metadata of a file or directory."""

    size: int
    inode: int
    mtime_ns: int
    """Settable: the directory store writes a unique timestamp here, for tags that never repeat."""
    ctime_ns: int
    """Not settable: the file system's clock at the last link, rename or write."""
    is_directory: bool
    is_file: bool = True
    """Whether it is a regular file: not a directory, pipe, device or dangling link."""
    device: int = 0


class File(ABC):
    """An open file or directory.

    It is closed when it is garbage-collected, so a reader that holds one can finish although
    another thread removes the file's name.
    """

    __slots__ = ()

    @abstractmethod
    def read(self, length: int, offset: int) -> bytes:
        """Return `length` bytes at `offset`; fewer only at the end of the file."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each [start, end); fewer only at the end of the file."""
        return [self.read(end - start, start) for start, end in ranges]

    @abstractmethod
    def write(self, data: bytes, offset: int) -> None:
        """Write all bytes at `offset`; the file grows as needed."""

    @abstractmethod
    def append(self, data: bytes | memoryview) -> None:
        """Write all bytes at the position that the last append left, initially 0."""

    @abstractmethod
    def copy_from(self, source: Self, length: int, offset: int | None = None) -> int:
        """Append up to `length` bytes of another file; return how many were copied.

        They are read at `offset`, or where the last copy without one ended.
        """

    @abstractmethod
    def stat(self) -> FileStat: ...

    @abstractmethod
    def size(self) -> int: ...

    def data_end(self) -> int:
        """Return the end of the bytes that were ever written; zeros follow up to the file's size.

        It may be too high, where the file system cannot report it exactly. Not concurrently with
        `append` or `copy_from`, whose position it restores.
        """
        return self.size()

    @abstractmethod
    def set_mtime(self, mtime_ns: int) -> None: ...

    @abstractmethod
    def resize(self, size: int) -> None: ...

    @abstractmethod
    def preallocate(self, size: int) -> None:
        """Extend the file to `size` bytes of zeros, and reserve their space on the disk."""

    @abstractmethod
    def sync(self) -> None:
        """Make bytes, size and timestamps durable."""

    @abstractmethod
    def sync_data(self) -> None:
        """Make bytes and size durable, without the timestamps."""

    @abstractmethod
    def lock(self) -> None:
        """Acquire the exclusive lock, shared with no other open file of any process."""

    @abstractmethod
    def try_lock(self) -> bool:
        """Acquire the exclusive lock without waiting; return False if it is held."""

    @property
    def descriptor(self) -> int:
        """The file descriptor, for the compiled kernel."""
        raise NotImplementedError(f"a {type(self).__name__} has no descriptor")

    @abstractmethod
    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""


class FileSystem(ABC):
    """Operations on names."""

    @abstractmethod
    def create(self, path: str, *, mode: int = 0o666) -> File:
        """Create a file for reading and writing; FileExistsError if the name is taken."""

    @abstractmethod
    def open(self, path: str, *, writable: bool = False) -> File:
        """Open a file of any type, or a directory, without blocking."""

    def open_regular(self, path: str, *, writable: bool = False) -> File:
        """Open a regular file; OSError for a FIFO, a device or a directory."""
        file = self.open(path, writable=writable)
        if not file.stat().is_file:
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file

    @abstractmethod
    def open_or_create(self, path: str) -> File:
        """Open a file for reading and writing; create it if it does not exist."""

    @abstractmethod
    def stat(self, path: str) -> FileStat: ...

    def identity(self, path: str) -> object:
        """Return a value that equals `identity_of` the metadata of a file while the path names it,
        and it was not changed."""
        return self.stat(path)

    def identity_of(self, stat: FileStat) -> object:
        """Return the identity of the file with this metadata."""
        return stat

    @abstractmethod
    def scan(self, path: str) -> list[tuple[str, bool]]:
        """List a directory, unsorted: each name, and whether it is a directory (not a link)."""

    @abstractmethod
    def link(self, source: str, target: str) -> None:
        """Add a second name to a file; FileExistsError if the name is taken."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Rename a file; a file of the target name is replaced atomically."""

    @abstractmethod
    def unlink(self, path: str) -> None: ...

    @abstractmethod
    def make_directory(self, path: str, *, mode: int = 0o777) -> None: ...

    @abstractmethod
    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable.

        SyncFailed if the disk failed; any other OSError if no sync was attempted.
        """

    def exists(self, path: str) -> bool:
        """Return whether a name leads to a file or directory."""
        try:
            self.stat(path)
        except OSError:
            return False
        return True

    def same_file(self, file: File, path: str) -> bool:
        """Return whether a name leads to this open file."""
        try:
            named, opened = self.stat(path), file.stat()
        except FileNotFoundError:
            return False
        return (named.inode, named.device) == (opened.inode, opened.device)

    def make_directories(self, path: str) -> None:
        """Create a directory and its missing parents, durably; it may exist.

        The name of an empty directory is synced even if it existed: the process that created
        it may have died before its own sync.
        """
        parent = os.path.dirname(path)
        if not self._is_directory(path):
            self.make_directories(parent)
            with suppress(FileExistsError):
                self.make_directory(path)
        if not self.scan(path):
            with suppress(PermissionError):
                self.sync_directory(parent)

    def _is_directory(self, path: str) -> bool:
        try:
            return self.stat(path).is_directory
        except OSError:
            return False

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold an exclusive lock on a path, between threads and processes."""
        file = self._lock(path)
        try:
            yield
        finally:
            file.close()

    def _lock(self, path: str) -> File:
        """Return a locked file that still has its name: the lock of a removed one is void."""
        while True:
            file = self.open_or_create(path)
            try:
                file.lock()
                if self.same_file(file, path):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()


class _OsFile(File):
    __slots__ = ("__weakref__", "_fd", "_has_lock")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._has_lock = False

    def read(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        pieces = [data]
        while data and (found := sum(map(len, pieces))) < length:
            data = os.pread(self._fd, length - found, offset + found)
            pieces.append(data)
        return b"".join(pieces)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if (native := kernel.native) is not None:
            bodies: list[bytes] | None = native.read_ranges(self._fd, ranges)
            if bodies is not None:
                return bodies
        return super().read_ranges(ranges)

    def write(self, data: bytes, offset: int) -> None:
        written = os.pwrite(self._fd, data, offset)
        while written < len(data):
            written += os.pwrite(self._fd, memoryview(data)[written:], offset + written)

    def append(self, data: bytes | memoryview) -> None:
        written = os.write(self._fd, data)
        if written < len(data):
            rest = memoryview(data).cast("B")[written:]
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def copy_from(self, source: Self, length: int, offset: int | None = None) -> int:
        if hasattr(os, "copy_file_range"):  # not on macOS
            try:
                return os.copy_file_range(source._fd, self._fd, length, offset)
            except OSError as error:
                if error.errno not in NO_COPY_RANGE:
                    raise
        length = min(length, COPY_BYTES_MAX)
        piece = os.read(source._fd, length) if offset is None else source.read(length, offset)
        self.append(piece)
        return len(piece)

    def stat(self) -> FileStat:
        return _to_stat(os.fstat(self._fd))

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def data_end(self) -> int:
        position, end = os.lseek(self._fd, 0, os.SEEK_CUR), 0
        try:
            while True:
                end = os.lseek(self._fd, os.lseek(self._fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:  # ENXIO: no data follows; EINVAL: not supported
            return end if error.errno == errno.ENXIO else self.size()
        finally:
            os.lseek(self._fd, position, os.SEEK_SET)

    def set_mtime(self, mtime_ns: int) -> None:
        os.utime(self._fd, ns=(mtime_ns, mtime_ns))

    def resize(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def preallocate(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, size)
        else:  # macOS
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        _sync(self._fd)

    def sync_data(self) -> None:
        _sync_data(self._fd)

    def lock(self) -> None:
        self._flock(fcntl.LOCK_EX)

    def try_lock(self) -> bool:
        try:
            self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _flock(self, how: int) -> None:
        _locked_files.add(self)  # before the lock, so that a fork in between finds it
        fcntl.flock(self._fd, how)
        self._has_lock = True

    @property
    def descriptor(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, CLOSED
        if fd == CLOSED:
            return
        if self._has_lock:
            # A child that was forked before the file was registered shares the lock with this
            # process: closing does not release it, LOCK_UN does.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def abandon(self) -> None:
        """Close without unlocking: the lock belongs to the parent process."""
        fd, self._fd = self._fd, CLOSED
        if fd != CLOSED:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync(2) stops at the drive's cache

    def _sync(fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined,unused-ignore]

    _sync_data = _sync
else:
    _sync, _sync_data = os.fsync, os.fdatasync


_locked_files: "weakref.WeakSet[_OsFile]" = weakref.WeakSet()


def _abandon_locks_in_child() -> None:
    """Close the parent's locked files: a forked child would hold their locks as long as it
    lives, although the threads that acquired them do not exist in it (H51)."""
    for file in list(_locked_files):
        file.abandon()
    _locked_files.clear()


os.register_at_fork(after_in_child=_abandon_locks_in_child)


class _OsFileSystem(FileSystem):
    def __reduce__(self) -> str:
        return "OS"

    def create(self, path: str, *, mode: int = 0o666) -> File:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return _OsFile(os.open(path, flags, mode))

    def open(self, path: str, *, writable: bool = False) -> File:
        access = os.O_RDWR if writable else os.O_RDONLY
        return _OsFile(os.open(path, access | NO_WAIT))

    def open_or_create(self, path: str) -> File:
        return _OsFile(os.open(path, os.O_RDWR | os.O_CREAT | NO_WAIT, 0o666))

    def stat(self, path: str) -> FileStat:
        return _to_stat(os.stat(path))

    def identity(self, path: str) -> object:
        if (native := kernel.native) is not None:
            identity: bytes | None = native.file_identity(path)
            if identity is not None:
                return identity
        return self.identity_of(self.stat(path))

    def identity_of(self, stat: FileStat) -> object:
        times = (*divmod(stat.mtime_ns, 10**9), *divmod(stat.ctime_ns, 10**9))
        numbers = (stat.size, stat.inode, stat.device, *times)
        return IDENTITY.pack(*(number & (1 << 64) - 1 for number in numbers))

    def scan(self, path: str) -> list[tuple[str, bool]]:
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str, *, mode: int = 0o777) -> None:
        os.mkdir(path, mode)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)


def _to_stat(result: os.stat_result) -> FileStat:
    return FileStat(
        result.st_size,
        result.st_ino,
        result.st_mtime_ns,
        result.st_ctime_ns,
        stat.S_ISDIR(result.st_mode),
        stat.S_ISREG(result.st_mode),
        result.st_dev,
    )


OS = _OsFileSystem()
