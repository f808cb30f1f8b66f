"""A directory as an object store, durable when a call returns.

A write goes to a temporary file below `.tmp/`, is synced, and gets its name by `link()`
(create-only: the kernel picks one winner) or `rename()`; then the directory that holds the
name is synced. So a reader sees a whole object or none, and what was answered survives a
power failure.

    create   temp: open, write, stamp, sync    link    sync directory    unlink temp
    put      temp: open, write, stamp, sync    rename  sync directory    (under the key's lock)

Tags made of inode, size and the kernel's coarse mtime repeat (H5). The temp file gets a
nanosecond stamp as its mtime; ages come from ctime, which is the file system's clock.

The directory is Reef's own: files whose names could not be keys, pipes, and links to other
directories are passed over.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from reef.errors import InvalidInputError, Kind, UnavailableError
from reef.files import OS, Files, FileStat
from reef.runtime import REAL, Runtime
from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Part,
    Store,
    Tagged,
    WriteResult,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
)
from reef.stores.directory import LOCKS, TEMPORARY, Directory, SourceFailed
from reef.stores.os_errors import Doubt, read_errors, write_errors

__all__ = ["LocalStore"]

RESERVED = (TEMPORARY, LOCKS)


class LocalStore(Store):
    """Objects are files; keys are their paths below the root."""

    # ctime moves in ticks of 4 to 10 ms.
    capabilities = Capabilities(clock_resolution_s=0.02, compose=True)

    def __init__(self, root: str, *, runtime: Runtime = REAL, files: Files = OS) -> None:
        self._root = os.path.abspath(root)
        self.url = f"file://{self._root}"
        self.runtime = runtime
        self._files = files
        self._directory = Directory(self._root, runtime, files)
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
        with read_errors(self.url, key):
            return _info(key, self._stat(key))

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
        if folder.split("/", 1)[0] in RESERVED:
            return []
        with read_errors(self.url, folder), suppress(FileNotFoundError, NotADirectoryError):
            entries = self._files.scan(os.path.join(self._root, folder))
            names = (folder + name + "/" * is_directory for name, is_directory in entries)
            return sorted(name for name in names if _can_be_key(name))
        return []

    def _present(self, key: str) -> Iterator[ObjectInfo]:
        with suppress(OSError):  # deleted since the scan, or no object
            yield _info(key, self._stat(key))

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str:
        return _tag(self._put(key, [body]))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._put(key, parts).size

    def _put(self, key: str, parts: Iterable[bytes]) -> FileStat:
        path = self._path(key)
        try:
            with (
                write_errors(self.url, key),
                self._directory.temporary(parts) as temporary,
                self._directory.locked(key),
            ):
                self._directory.rename(temporary, path)
                return temporary.stat
        except SourceFailed as failed:
            raise failed.error from None

    def create(self, key: str, body: bytes) -> WriteResult:
        path = self._path(key)
        with write_errors(self.url, key), self._directory.temporary([body]) as temporary:
            try:
                won = self._directory.link(temporary, path)
            except Doubt as doubt:
                return WriteResult(Outcome.UNKNOWN, cause=doubt.cause)
            if won:
                return WriteResult(
                    Outcome.CREATED, _tag(temporary.stat), date_s=self._linked_s(path)
                )
            self._stat(key)  # a directory of that name is no object
            return WriteResult(Outcome.EXISTS)

    def _linked_s(self, path: str) -> float | None:
        """Return when a name was made, by the file system's clock, which may be a server's."""
        with suppress(OSError):  # it was made, whatever happens to it now
            return self._files.stat(path).ctime_ns / 1e9
        return None

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        path = self._path(key)
        with (
            write_errors(self.url, key),
            self._directory.temporary([body]) as temporary,
            self._directory.locked(key),
        ):
            if self._tag_at(path) != tag:
                return WriteResult(Outcome.CHANGED)
            try:
                self._directory.rename(temporary, path)
            except Doubt as doubt:
                return WriteResult(Outcome.UNKNOWN, cause=doubt.cause)
            return WriteResult(Outcome.REPLACED, _tag(temporary.stat))

    def copy(self, source: str, target: str) -> None:
        """Both names are locked when the new one is given: a copy of what was deleted meanwhile,
        by somebody who waited for that, would bring it back (H23).
        """
        path = self._path(target)
        with (
            self._opened(source) as (source_fd, stat),
            write_errors(self.url, target),
            self._directory.copied(source_fd, stat.size) as temporary,
            self._directory.locked(source, target),
        ):
            with read_errors(self.url, source):
                self._stat(source)
            self._directory.rename(temporary, path)

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Where the file system can, it shares the bytes instead of copying them."""
        path = self._path(key)
        with ExitStack() as open_files:
            pieces = [
                part if isinstance(part, bytes) else self._piece(open_files, *part)
                for part in parts
            ]
            with (
                write_errors(self.url, key),
                self._directory.composed(pieces) as temporary,
                self._directory.locked(key),
            ):
                self._directory.rename(temporary, path)
                return temporary.stat.size

    def _piece(
        self, open_files: ExitStack, source: str, start: int, end: int
    ) -> tuple[int, int, int]:
        check_range(source, start, end)
        fd, stat = open_files.enter_context(self._opened(source))
        if end > stat.size:
            raise past_the_end(source, end, stat.size)
        return fd, start, end

    def delete_many(self, keys: Sequence[str]) -> None:
        folders = {os.path.dirname(path) for path in map(self._path, keys) if self._delete(path)}
        for folder in sorted(folders):
            with write_errors(self.url, folder):
                self._directory.sync_names(folder)

    def _delete(self, path: str) -> bool:
        """Remove a file, if it is there; a directory of that name is no object."""
        key = os.path.relpath(path, self._root)
        with write_errors(self.url, key), suppress(FileNotFoundError, NotADirectoryError):
            if self._files.stat(path).is_directory:
                return False
            with self._directory.locked(key), suppress(FileNotFoundError):
                self._files.unlink(path)
                return True
        return False

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        with write_errors(self.url, TEMPORARY), self._directory.scratch_file() as (_, fd):
            return self._files.stat_open(fd).ctime_ns / 1e9

    def abort_stale(self, older_than_s: float) -> int:
        oldest_ns = int((self.now() - older_than_s) * 1e9)
        removed = 0
        for name, is_directory in self._files.scan(self._directory.scratch):
            path = os.path.join(self._directory.scratch, name)
            # What is missing was finished, or removed by another.
            with write_errors(self.url, f"{TEMPORARY}/{name}"), suppress(FileNotFoundError):
                if not is_directory and self._files.stat(path).ctime_ns <= oldest_ns:
                    self._files.unlink(path)
                    removed += 1
        return removed

    # --- files --------------------------------------------------------------------
    def _path(self, key: str) -> str:
        if check_key(key).split("/", 1)[0] in RESERVED:
            raise InvalidInputError(
                f"key {key!r} lies where unfinished writes and locks are kept",
                kind=Kind.INVALID_KEY,
                object=key,
            )
        return f"{self._root}/{key}"

    def _stat(self, key: str) -> FileStat:
        """Return what is known of an object's file; an OSError if it is none."""
        stat = self._files.stat(self._path(key))
        if not stat.is_file:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
        return stat

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, FileStat]]:
        with read_errors(self.url, key):
            self._stat(key)  # before opening: a pipe would wait for a writer
            fd = self._files.open(self._path(key))
            try:
                yield fd, self._files.stat_open(fd)
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

    def _tag_at(self, path: str) -> str | None:
        try:
            return _tag(self._files.stat(path))
        except FileNotFoundError:
            return None

    def _check_root(self) -> None:
        with suppress(FileNotFoundError):
            if not self._files.stat(self._root).is_directory:
                raise NotADirectoryError(self._root)


def _reopen(root: str, runtime: Runtime, files: Files) -> LocalStore:
    return LocalStore(root, runtime=runtime, files=files)


def _can_be_key(name: str) -> bool:
    """Whether a file of this name can be an object; foreign files are passed over."""
    try:
        check_key(name.removesuffix("/"))
    except (InvalidInputError, UnicodeEncodeError):
        return False
    return name.rstrip("/") not in RESERVED


def _tag(stat: FileStat) -> str:
    return f'"{stat.mtime_ns:x}-{stat.inode:x}-{stat.size:x}"'


def _info(key: str, stat: FileStat) -> ObjectInfo:
    return ObjectInfo(key, stat.size, _tag(stat), stat.ctime_ns / 1e9)
