"""A directory as an object store, durable when a call returns.

A write goes to a temporary file below `.tmp/`, is synced, and gets its name by `link()`
(create-only: the kernel picks one winner) or `rename()`; then the directory that holds
the name is synced. So a reader sees a whole object or none, and what was answered
survives a power failure.

    create   temp: open, write, stamp, sync    link    sync directory    unlink temp
    put      temp: open, write, stamp, sync    rename  sync directory    (under the key's lock)

Four things that are easy to miss:
- A directory that another process has just made may not be durable yet. Each store
  syncs the whole chain above a directory before its first write there.
- The loser of a `create` syncs too, before it says "exists": its caller will act on it.
- A directory sync that fails after the link leaves a name that may or may not last: that
  is an unknown outcome, not an error.
- Tags made of inode, size and the kernel's coarse mtime repeat (H5). The temp file gets a
  nanosecond stamp as its mtime; ages come from ctime, which is the file system's clock.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from reef.errors import InvalidInputError, Kind, NotFoundError, UnavailableError
from reef.files import OS, Files, FileStat
from reef.runtime import REAL, Runtime
from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Store,
    Tagged,
    WriteResult,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
)
from reef.stores.os_errors import read_errors, write_errors

__all__ = ["LocalStore"]

TEMPORARY = ".tmp"
LOCKS = 256
COPY_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class _Temporary:
    """A synced file that has no name in the bucket yet."""

    path: str
    stat: FileStat


class LocalStore(Store):
    """Objects are files; keys are their paths below the root."""

    capabilities = Capabilities(clock_resolution_s=0.02)  # ctime moves in ticks of 4 to 10 ms

    def __init__(self, root: str, *, runtime: Runtime = REAL, files: Files = OS) -> None:
        self._root = os.path.abspath(root)
        self._scratch = os.path.join(self._root, TEMPORARY)
        self.url = f"file://{self._root}"
        self.runtime = runtime
        self._files = files
        self._durable: set[str] = set()
        self._token = runtime.ulid()  # with the process id and a serial number, a name of its own
        self._serial = count()
        self._check_root()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._root, self.runtime, self._files)

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with self._opened(key) as (fd, stat):
            return Tagged(self._read(key, fd, 0, stat.size), _tag(stat))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        with self._opened(key) as (fd, stat):
            if end > stat.size:
                raise past_the_end(key, end, stat.size)
            return self._read(key, fd, start, end)

    def head(self, key: str) -> ObjectInfo:
        with self._opened(key) as (_, stat):
            return _info(key, stat)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk(prefix[: prefix.rfind("/") + 1], prefix, start_after)

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield a folder's objects in key order: a directory sorts as its name plus '/'."""
        for key in self._names(folder):
            if not key.startswith(prefix[: len(key)]):
                continue
            if not key.endswith("/"):
                if key > start_after and len(key) >= len(prefix):
                    yield from self._present(key)
            elif key > start_after or start_after.startswith(key):
                yield from self._walk(key, prefix, start_after)

    def _names(self, folder: str) -> Sequence[str]:
        with read_errors(self.url, folder), suppress(FileNotFoundError, NotADirectoryError):
            entries = self._files.scan(os.path.join(self._root, folder))
            names = (folder + name + "/" * is_directory for name, is_directory in entries)
            return sorted(name for name in names if name != f"{TEMPORARY}/")
        return []

    def _present(self, key: str) -> Iterator[ObjectInfo]:
        with suppress(NotFoundError):  # deleted since the scan
            yield self.head(key)

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str:
        return _tag(self._put(key, [body]))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._put(key, parts).size

    def _put(self, key: str, parts: Iterable[bytes]) -> FileStat:
        with write_errors(self.url, key), self._temporary(parts) as temporary:
            self._rename(temporary.path, key)
            return temporary.stat

    def create(self, key: str, body: bytes) -> WriteResult:
        path = self._path(key)
        with write_errors(self.url, key), self._temporary([body]) as temporary:
            folder = self._ensure_directory(os.path.dirname(path))
            try:
                self._files.link(temporary.path, path)
                result = WriteResult(Outcome.CREATED, _tag(temporary.stat))
            except FileExistsError:
                self._refuse_directory(key, path)
                result = WriteResult(Outcome.EXISTS)
            return self._settle(folder, result)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        with (
            write_errors(self.url, key),
            self._temporary([body]) as temporary,
            self._locked(key) as path,
        ):
            if self._tag_at(path) != tag:
                return WriteResult(Outcome.CHANGED)
            self._files.rename(temporary.path, path)
            replaced = WriteResult(Outcome.REPLACED, _tag(temporary.stat))
            return self._settle(os.path.dirname(path), replaced)

    def copy(self, source: str, target: str) -> None:
        with (
            self._opened(source) as (source_fd, stat),
            write_errors(self.url, target),
            self._scratch_file() as (temporary, fd),
        ):
            self._copy_bytes(source_fd, fd, stat.size)
            self._finish(fd)
            self._rename(temporary, target)

    def delete_many(self, keys: Sequence[str]) -> None:
        folders = set()
        for key in keys:
            with (
                write_errors(self.url, key),
                self._locked(key) as path,
                suppress(FileNotFoundError, NotADirectoryError),
            ):
                self._files.unlink(path)
                folders.add(os.path.dirname(path))
        for folder in sorted(folders):
            with write_errors(self.url, folder):
                self._files.sync_directory(folder)

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        with write_errors(self.url, TEMPORARY), self._scratch_file() as (_, fd):
            return self._files.stat_open(fd).ctime_ns / 1e9

    def abort_stale(self, older_than_s: float) -> int:
        oldest_ns = int((self.now() - older_than_s) * 1e9)
        removed = 0
        for name, is_directory in self._files.scan(self._scratch):
            path = os.path.join(self._scratch, name)
            with suppress(FileNotFoundError):  # finished, or removed by another
                if not is_directory and self._files.stat(path).ctime_ns <= oldest_ns:
                    self._files.unlink(path)
                    removed += 1
        return removed

    # --- files --------------------------------------------------------------------
    def _path(self, key: str) -> str:
        if check_key(key).split("/", 1)[0] == TEMPORARY:
            raise InvalidInputError(
                f"key {key!r} begins with {TEMPORARY}/, which holds unfinished writes",
                kind=Kind.INVALID_KEY,
                object=key,
            )
        return f"{self._root}/{key}"

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, FileStat]]:
        with read_errors(self.url, key):
            fd = self._files.open(self._path(key))
            try:
                stat = self._files.stat_open(fd)
                if stat.is_directory:
                    raise IsADirectoryError(key)
                yield fd, stat
            finally:
                self._files.close(fd)

    def _read(self, key: str, fd: int, start: int, end: int) -> bytes:
        pieces = []
        while start < end:
            piece = self._files.read_at(fd, start, end - start)
            if not piece:
                raise UnavailableError(
                    f"object {key} ended {end - start} bytes early while it was read",
                    kind=Kind.SHORT_READ,
                    object=key,
                )
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def _temporary(self, parts: Iterable[bytes]) -> Iterator[_Temporary]:
        with self._scratch_file() as (path, fd):
            for part in parts:
                self._write(fd, part)
            yield _Temporary(path, self._finish(fd))

    @contextmanager
    def _scratch_file(self) -> Iterator[tuple[str, int]]:
        """Yield a new file that no listing shows; it is gone afterwards, unless renamed."""
        path = f"{self._scratch}/{self._token}.{self.runtime.process_id()}.{next(self._serial)}"
        try:
            fd = self._files.create(path)
        except FileNotFoundError:  # the first write, or someone removed the directory
            self._durable.clear()
            self._ensure_directory(self._scratch)
            fd = self._files.create(path)
        try:
            yield path, fd
        finally:
            # A leftover is harmless, and must not turn a write that landed into an error.
            with suppress(OSError):
                self._files.close(fd)
            with suppress(OSError):
                self._files.unlink(path)

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._files.write(fd, rest) :]

    def _copy_bytes(self, source_fd: int, target_fd: int, size: int) -> None:
        while size:
            copied = self._files.copy_range(source_fd, target_fd, min(size, COPY_BYTES_MAX))
            if not copied:
                raise OSError(f"the source ended {size} bytes early while it was copied")
            size -= copied

    def _finish(self, fd: int) -> FileStat:
        self._files.set_mtime(fd, int(self.runtime.wall_s() * 1e9))
        self._files.sync(fd)
        return self._files.stat_open(fd)

    def _settle(self, folder: str, result: WriteResult) -> WriteResult:
        """Make a name durable; if that fails, nobody can say whether it will last."""
        try:
            self._files.sync_directory(folder)
        except OSError as error:
            return WriteResult(Outcome.UNKNOWN, cause=error)
        return result

    def _rename(self, temporary: str, key: str) -> None:
        with self._locked(key) as path:
            folder = self._ensure_directory(os.path.dirname(path))
            self._files.rename(temporary, path)
            self._files.sync_directory(folder)

    @contextmanager
    def _locked(self, key: str) -> Iterator[str]:
        """Exclude every other overwrite and delete of this key, in any process."""
        path = self._path(key)
        # Lock files stay for ever: a lock on a file that was removed excludes nobody.
        locks = self._ensure_directory(os.path.join(self._scratch, "locks"))
        shard = zlib.crc32(key.encode()) % LOCKS
        try:
            with self._files.locked(os.path.join(locks, f"{shard:02x}")):
                yield path
        except FileNotFoundError:
            self._durable.clear()  # someone removed a directory: make it again next time
            raise

    def _tag_at(self, path: str) -> str | None:
        try:
            return _tag(self._files.stat(path))
        except FileNotFoundError:
            return None

    # --- directories --------------------------------------------------------------
    def _ensure_directory(self, folder: str) -> str:
        """Make a directory whose whole chain of names is durable, from `/` down."""
        parent = os.path.dirname(folder)
        if folder not in self._durable and parent != folder:
            self._ensure_directory(parent)
            with suppress(FileExistsError):
                self._files.make_directory(folder)
            self._sync_above(parent)
            self._durable.add(folder)
        return folder

    def _sync_above(self, parent: str) -> None:
        try:
            self._files.sync_directory(parent)
        except PermissionError:
            if len(parent) >= len(self._root):
                raise
            # Above the root the directories are the administrator's, made long ago.

    def _check_root(self) -> None:
        with suppress(FileNotFoundError):
            if self._files.stat(self._root).is_directory:
                return
            raise NotADirectoryError(self._root)

    def _refuse_directory(self, key: str, path: str) -> None:
        if self._files.stat(path).is_directory:
            raise IsADirectoryError(key)


def _reopen(root: str, runtime: Runtime, files: Files) -> LocalStore:
    return LocalStore(root, runtime=runtime, files=files)


def _tag(stat: FileStat) -> str:
    return f'"{stat.mtime_ns:x}-{stat.inode:x}-{stat.size:x}"'


def _info(key: str, stat: FileStat) -> ObjectInfo:
    return ObjectInfo(key, stat.size, _tag(stat), stat.ctime_ns / 1e9)
