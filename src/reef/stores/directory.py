"""Durable names in a directory: what the directory store is built on.

A file gets its bytes in `.tmp/`, is synced, and only then a name. Four things that are easy
to miss:

- A directory that another process has just made may not be durable yet. Before the first
  write into one, the whole chain of names above it is synced.
- A directory sync that the disk refuses leaves names that may or may not last. A later sync
  that succeeds proves nothing (the kernel may have dropped the dirty page), so such a
  directory is never vouched for again by this process.
- `link()` and `rename()` that fail in an unusual way may have taken effect, on a network
  file system for one. Only some errors prove that nothing happened.
- Locks lie in `.locks/` and are never removed: a lock on a removed file excludes nobody.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from reef.files import Files, FileStat, SyncFailed
from reef.runtime import Runtime
from reef.stores.os_errors import Doubt

__all__ = ["LOCKS", "TEMPORARY", "Directory", "SourceFailed", "Temporary"]

TEMPORARY = ".tmp"
LOCKS = ".locks"
LOCK_FILES = 256
COPY_BYTES_MAX = 1 << 30
PROOF_OF_NOTHING = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.ENOSPC, errno.EDQUOT, errno.EMLINK, errno.ENAMETOOLONG, errno.EROFS, errno.EXDEV),
    errno.ELOOP,
}
"""Errors of link() and rename() after which the name is certainly as it was."""


_suspects: set[tuple[str, int]] = set()
"""Directories, by path and inode, whose names this process cannot vouch for any more."""


class SourceFailed(Exception):
    """The caller's own iterator raised; its error is passed on as it is."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Temporary:
    """A synced file that has no name in the bucket yet."""

    path: str
    stat: FileStat


class Directory:
    """The files below one root."""

    def __init__(self, root: str, runtime: Runtime, files: Files) -> None:
        self.root = root
        self.files = files
        self.scratch = os.path.join(root, TEMPORARY)
        self._runtime = runtime
        self._durable: set[str] = set()
        self._token = runtime.ulid()  # with the process id and a serial number, a name of its own
        self._serial = count()

    # --- bytes --------------------------------------------------------------------
    def temporary(self, parts: Iterable[bytes]) -> "_Written":
        """Write and sync a file, in a `with`; it is gone afterwards, unless it was renamed."""
        return _Written(self, parts)

    @contextmanager
    def copied(self, source_fd: int, size: int) -> Iterator[Temporary]:
        """The same, with the bytes of an open file, without passing them through Python."""
        with self.scratch_file() as (path, fd):
            while size:
                copied = self.files.copy_range(source_fd, fd, min(size, COPY_BYTES_MAX))
                if not copied:
                    raise OSError(f"the source ended {size} bytes early while it was copied")
                size -= copied
            yield Temporary(path, self.finish(fd))

    @contextmanager
    def composed(self, pieces: Iterable[bytes | tuple[int, int, int]]) -> Iterator[Temporary]:
        """The same, with new bytes and with ranges of open files: descriptor, start, end."""
        with self.scratch_file() as (path, fd):
            for piece in pieces:
                if isinstance(piece, tuple):
                    self._copy_range(fd, *piece)
                else:
                    self.write(fd, piece)
            yield Temporary(path, self.finish(fd))

    def _copy_range(self, fd: int, source_fd: int, start: int, end: int) -> None:
        while start < end:
            length = min(end - start, COPY_BYTES_MAX)
            copied = self.files.copy_range(source_fd, fd, length, start)
            if not copied:
                raise OSError(f"the source ended {end - start} bytes early while it was copied")
            start += copied

    @contextmanager
    def scratch_file(self) -> Iterator[tuple[str, int]]:
        """Yield a new file that no listing shows."""
        path, fd = self.new_scratch()
        try:
            yield path, fd
        finally:
            self.drop_scratch(path, fd)

    def new_scratch(self) -> tuple[str, int]:
        path = f"{self.scratch}/{self._token}.{self._runtime.process_id()}.{next(self._serial)}"
        try:
            return path, self.files.create(path)
        except FileNotFoundError:  # the first write, or someone removed the directory
            self._durable.clear()
            self.ensure(self.scratch)
            return path, self.files.create(path)

    def drop_scratch(self, path: str, fd: int) -> None:
        """A leftover is harmless, and must not turn a write that landed into an error."""
        try:  # noqa: SIM105 - every small write comes here, and suppress() is three calls
            self.files.close(fd)
        except OSError:
            pass
        try:  # noqa: SIM105 - as above
            self.files.unlink(path)
        except OSError:
            pass

    def write(self, fd: int, data: bytes) -> None:
        written = self.files.write(fd, data)
        if written < len(data):  # as write(2) may
            rest = memoryview(data).cast("B")[written:]
            while rest:
                rest = rest[self.files.write(fd, rest) :]

    def finish(self, fd: int) -> FileStat:
        self.files.set_mtime(fd, self._runtime.wall_ns())
        self.files.sync(fd)
        return self.files.stat_open(fd)

    # --- names --------------------------------------------------------------------
    def link(self, temporary: Temporary, path: str) -> bool:
        """Name a file where there is none; False if the name is taken.

        Raises Doubt where nobody can say whether the name is there, or whether it will last.
        """
        folder = os.path.dirname(path)
        try:
            self._name(self.files.link, temporary, path, folder)
            won = True
        except FileExistsError:
            won = self._is_named(temporary, path)  # a network may ask twice and answer once
        self.sync_names(folder)  # the loser too: its caller acts on it
        return won

    def rename(self, temporary: Temporary, path: str) -> None:
        """Name a file in place of whatever had the name. Raises Doubt as `link` does."""
        folder = os.path.dirname(path)
        self._name(self.files.rename, temporary, path, folder)
        self.sync_names(folder)

    def _name(
        self, call: Callable[[str, str], None], temporary: Temporary, path: str, folder: str
    ) -> None:
        if folder not in self._durable:
            self.ensure(folder)
        try:
            _certain(call, temporary.path, path)
        except FileNotFoundError:
            if self._is_named(temporary, path):
                return
            # The directory was removed since it was made: once more.
            self._durable.clear()
            self.ensure(folder)
            _certain(call, temporary.path, path)

    def _is_named(self, temporary: Temporary, path: str) -> bool:
        with suppress(OSError):
            return self.files.stat(path).inode == temporary.stat.inode
        return False

    def sync_names(self, folder: str) -> None:
        """Make the names in a directory durable, or raise Doubt."""
        try:
            self._sync(folder)
        except OSError as error:
            raise Doubt(error) from error

    def _sync(self, folder: str) -> None:
        if _suspects and (folder, self.files.stat(folder).inode) in _suspects:
            raise SyncFailed(errno.EIO, "an earlier sync failed", folder)
        try:
            self.files.sync_directory(folder)
        except SyncFailed:
            with suppress(OSError):
                _suspects.add((folder, self.files.stat(folder).inode))
            raise

    @contextmanager
    def locked(self, *keys: str) -> Iterator[None]:
        """Exclude every other overwrite and delete of these keys, in any process."""
        locks = self.ensure(os.path.join(self.root, LOCKS))
        shards = {zlib.crc32(key.encode()) % LOCK_FILES for key in keys}
        with ExitStack() as held:
            for shard in sorted(shards):  # in one order, so that nobody waits in a circle
                path = os.path.join(locks, f"{shard:02x}")
                try:
                    held.enter_context(self.files.locked(path))
                except FileNotFoundError:  # someone removed the directory: make it again
                    self._durable.clear()
                    self.ensure(locks)
                    held.enter_context(self.files.locked(path))
            yield

    # --- directories --------------------------------------------------------------
    def ensure(self, folder: str) -> str:
        """Make a directory whose whole chain of names is durable, from `/` down."""
        parent = os.path.dirname(folder)
        if folder not in self._durable and parent != folder:
            self.ensure(parent)
            try:
                self.files.make_directory(folder)
            except FileExistsError:
                if not self.files.stat(folder).is_directory:
                    raise NotADirectoryError(
                        errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder
                    ) from None
            self._sync_above(parent)
            self._durable.add(folder)
        return folder

    def _sync_above(self, parent: str) -> None:
        try:
            self._sync(parent)
        except PermissionError:
            if len(parent) >= len(self.root):
                raise
            # Above the root the directories are the administrator's, made long ago.


class _Written:
    """A file in the making. A class and no generator: every small write goes through here."""

    __slots__ = ("_directory", "_fd", "_parts", "_path")

    def __init__(self, directory: Directory, parts: Iterable[bytes]) -> None:
        self._directory, self._parts = directory, parts
        self._path, self._fd = "", -1

    def __enter__(self) -> Temporary:
        directory, parts = self._directory, self._parts
        self._path, self._fd = directory.new_scratch()
        try:
            for part in parts if isinstance(parts, list) else _guarded(parts):
                directory.write(self._fd, part)
            return Temporary(self._path, directory.finish(self._fd))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._directory.drop_scratch(self._path, self._fd)


def _certain(call: Callable[[str, str], None], source: str, target: str) -> None:
    """Let an error pass only if it proves that nothing happened."""
    try:
        call(source, target)
    except OSError as error:
        if error.errno not in PROOF_OF_NOTHING:
            raise Doubt(error) from error
        raise


def _guarded(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Keep the caller's errors apart from those of the disk."""
    iterator = iter(parts)
    while True:
        try:
            part = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise SourceFailed(error) from error
        yield part
