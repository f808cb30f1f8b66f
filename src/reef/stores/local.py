"""A directory as an object store, durable when a call returns.

A write goes to a temporary file below `.tmp/`, is synced, and gets its name by `link()`
(create-only: the kernel picks one winner) or `rename()`; then the directory that holds the name is
synced. So a reader sees a whole object or none, and a write that has returned survives a power
failure.

    create   temp: open, write, stamp, sync    link    sync directory    unlink temp
    put      temp: open, write, stamp, sync    rename  sync directory    (under the key's lock)

Four details that are easy to miss:

- A directory that another process has just made may not be durable yet. Before the first write
  into one, the whole chain of names above it is synced.
- A directory sync that the disk refuses leaves names that may or may not last. A later sync that
  succeeds proves nothing (the kernel may have dropped the dirty page), so this process never again
  reports names in such a directory as durable.
- `link()` and `rename()` that fail in an unusual way may have taken effect, on a network file
  system for one. Only some errors prove that nothing happened.
- Lock files are kept in `.locks/` and are never removed: a lock on a removed file excludes no other
  process.

Tags made of inode, size and the kernel's coarse mtime repeat (H5). The temporary file gets a
nanosecond stamp as its mtime; ages come from ctime, which is the file system's clock.

The directory is Reef's own: files whose names could not be keys, pipes, and links to other
directories are ignored.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.files import OS, File, FileStat, FileSystem, SyncFailed, error_kind, error_number
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
    short_read,
)

TEMPORARY = ".tmp"
LOCKS = ".locks"
RESERVED = (TEMPORARY, LOCKS)
LOCK_FILES = 256
COPY_BYTES_MAX = 1 << 30
OPEN_FILES_MAX = 64
KEPT_BYTES_MIN = 256 * 1024
CLASH = {errno.ENOTDIR, errno.EISDIR}
ABSENT = {errno.ENOENT, *CLASH}
PROOF_OF_NOTHING = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.ENOSPC, errno.EDQUOT, errno.EMLINK, errno.ENAMETOOLONG, errno.EROFS, errno.EXDEV),
    errno.ELOOP,
}
"""Errors of link() and rename() after which the name is certainly as it was."""

_suspects: set[tuple[str, int, int]] = set()
"""Directories, by path, device and inode, in which a sync has failed in this process."""


# --- the store ------------------------------------------------------------------------


class LocalStore(Store):
    """Objects are files; keys are their paths below the root."""

    # ctime moves in ticks of 4 to 10 ms.
    capabilities = Capabilities(clock_resolution_s=0.02, compose=True, many_ranges=True)

    def __init__(self, root: str, *, runtime: Runtime = REAL, files: FileSystem = OS) -> None:
        self._root = os.path.abspath(root)
        self.url = f"file://{self._root}"
        self.runtime = runtime
        self._files = files
        self._directory = _OpenDirectory(self._root, runtime, files)
        self._open_files: dict[str, OpenFile] = {}
        """Large objects whose ranges were read, by key."""
        self._check_root()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._root, self.runtime, self._files)

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with _read_errors(self.url, key), self._open(key) as file:
            stat = file.stat()
            return Tagged(_read(key, file, 0, stat.size), _tag(stat))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        return self.get_ranges(key, ((start, end),))[0]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        try:
            file, size = self._file_of(key)
            for start, end in ranges:
                if not 0 <= start < end <= size:
                    check_range(key, start, end)
                    raise past_the_end(key, end, size)
            bodies = file.read_ranges(ranges)
        except OSError as error:
            raise _read_error(self.url, key, error) from error
        for body, (start, end) in zip(bodies, ranges, strict=True):
            if len(body) < end - start:  # it was cut meanwhile
                raise short_read(key, len(body), end - start)
        return bodies

    def _file_of(self, key: str) -> tuple[File, int]:
        """Return the open file of an object, and its size; large ones stay open.

        An open file is used again only while the key still names it.
        """
        known = self._open_files.get(key)
        if known is not None:
            try:
                if self._files.identity(f"{self._root}/{key}") == known.identity:
                    return known.file, known.size
            except FileNotFoundError:  # opening it again raises that, too
                pass
            self._open_files.pop(key, None)
        path = self._path(key)
        self._stat(path)  # before opening: a pipe would wait for a writer
        file = self._files.open(path)
        stat = file.stat()
        if stat.size >= KEPT_BYTES_MIN:
            identity = self._files.identity_of(stat)
            self._open_files[key] = OpenFile(file, stat.size, identity, os.fsencode(path))
            self._drop_old_files()
        return file, stat.size

    @property
    def is_real(self) -> bool:
        """Whether its files are those of the operating system, and its clock is as well."""
        return self._files is OS and self.runtime is REAL

    def open_file(self, key: str) -> "OpenFile | None":
        """Return the open file of an object, if it is one of those that stay open.

        The caller checks whether the key still names it.
        """
        return self._open_files.get(key)

    def _drop_old_files(self) -> None:
        """Forget the files that were opened first; each is closed when its last read ends."""
        for key in list(islice(self._open_files, 2)):
            if len(self._open_files) > OPEN_FILES_MAX or not self._files.exists(
                f"{self._root}/{key}"
            ):
                self._open_files.pop(key, None)

    def head(self, key: str) -> ObjectInfo:
        with _read_errors(self.url, key):
            return _info(key, self._stat(self._path(key)))

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
        with _read_errors(self.url, folder), suppress(FileNotFoundError, NotADirectoryError):
            entries = self._files.scan(os.path.join(self._root, folder))
            names = (folder + name + "/" * is_directory for name, is_directory in entries)
            return sorted(name for name in names if _can_be_key(name))
        return []

    def _present(self, key: str) -> Iterator[ObjectInfo]:
        with suppress(OSError):  # deleted since the scan, or not an object
            yield _info(key, self._stat(self._path(key)))

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str:
        return _tag(self._put(key, [body]))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._put(key, parts).size

    def _put(self, key: str, parts: Iterable[bytes]) -> FileStat:
        path = self._path(key)
        try:
            with (
                _write_errors(self.url, key),
                _TemporaryFile(self._directory, parts) as temporary,
                self._directory.locked(key),
            ):
                self._directory.rename(temporary, path)
                return temporary.stat
        except _SourceFailed as failed:
            raise failed.error from None

    def create(self, key: str, body: bytes) -> WriteResult:
        path = self._path(key)
        with _write_errors(self.url, key), _TemporaryFile(self._directory, [body]) as temporary:
            try:
                won = self._directory.link(temporary, path)
            except _DurabilityUnknown as error:
                return WriteResult(Outcome.UNKNOWN, cause=error.cause)
            if won:
                date_s = self._linked_s(path)
                return WriteResult(Outcome.CREATED, _tag(temporary.stat), date_s=date_s)
            self._stat(path)  # a directory of that name is not an object
            return WriteResult(Outcome.EXISTS)

    def _linked_s(self, path: str) -> float | None:
        """Return when a name was created, by the file system's clock, which may be a server's."""
        with suppress(OSError):  # it was created, even if it is gone by now
            return self._files.stat(path).ctime_ns / 1e9
        return None

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        path = self._path(key)
        with (
            _write_errors(self.url, key),
            _TemporaryFile(self._directory, [body]) as temporary,
            self._directory.locked(key),
        ):
            if self._tag_at(path) != tag:
                return WriteResult(Outcome.CHANGED)
            try:
                self._directory.rename(temporary, path)
            except _DurabilityUnknown as error:
                return WriteResult(Outcome.UNKNOWN, cause=error.cause)
            return WriteResult(Outcome.REPLACED, _tag(temporary.stat))

    def copy(self, source: str, target: str) -> None:
        """Copy under the locks of both names: the copy of an object that was deleted meanwhile, by
        a process that waited for that, would bring it back (H23).
        """
        path = self._path(target)
        with (
            _read_errors(self.url, source),
            self._open(source) as source_file,
            _write_errors(self.url, target),
            self._directory.copied(source_file, source_file.stat().size) as temporary,
            self._directory.locked(source, target),
        ):
            with _read_errors(self.url, source):
                self._stat(self._path(source))
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
                _write_errors(self.url, key),
                self._directory.composed(pieces) as temporary,
                self._directory.locked(key),
            ):
                self._directory.rename(temporary, path)
                return temporary.stat.size

    def _piece(
        self, open_files: ExitStack, source: str, start: int, end: int
    ) -> tuple[File, int, int]:
        check_range(source, start, end)
        with _read_errors(self.url, source):
            file = open_files.enter_context(self._open(source))
            size = file.stat().size
        if end > size:
            raise past_the_end(source, end, size)
        return file, start, end

    def delete_many(self, keys: Sequence[str]) -> None:
        folders = {os.path.dirname(path) for path in map(self._path, keys) if self._delete(path)}
        for folder in sorted(folders):
            with _write_errors(self.url, folder):
                self._directory.sync_names(folder)

    def _delete(self, path: str) -> bool:
        """Remove a file, if it exists; a directory of that name is not an object."""
        key = os.path.relpath(path, self._root)
        with _write_errors(self.url, key), suppress(FileNotFoundError, NotADirectoryError):
            if self._files.stat(path).is_directory:
                return False
            self._open_files.pop(key, None)
            with self._directory.locked(key), suppress(FileNotFoundError):
                self._files.unlink(path)
                return True
        return False

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        with _write_errors(self.url, TEMPORARY), self._directory.scratch_file() as (_, file):
            return file.stat().ctime_ns / 1e9

    def abort_stale(self, older_than_s: float) -> int:
        oldest_ns = int((self.now() - older_than_s) * 1e9)
        removed = 0
        for name, is_directory in self._files.scan(self._directory.scratch):
            path = os.path.join(self._directory.scratch, name)
            # A missing file was renamed, or removed by another process.
            with _write_errors(self.url, f"{TEMPORARY}/{name}"), suppress(FileNotFoundError):
                if not is_directory and self._files.stat(path).ctime_ns <= oldest_ns:
                    self._files.unlink(path)
                    removed += 1
        return removed

    # --- files --------------------------------------------------------------------
    def _path(self, key: str) -> str:
        if check_key(key).split("/", 1)[0] in RESERVED:
            raise InvalidInputError(
                f"key {key!r} is reserved for unfinished writes and locks",
                kind=ErrorKind.INVALID_KEY,
                object=key,
            )
        return f"{self._root}/{key}"

    def _stat(self, path: str) -> FileStat:
        """Return the metadata of an object's file; OSError if it is not one."""
        stat = self._files.stat(path)
        if not stat.is_file:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return stat

    def _open(self, key: str) -> "_OpenFile":
        path = self._path(key)
        self._stat(path)  # before opening: a pipe would wait for a writer
        return _OpenFile(self._files.open(path))

    def _tag_at(self, path: str) -> str | None:
        try:
            return _tag(self._files.stat(path))
        except FileNotFoundError:
            return None

    def _check_root(self) -> None:
        with suppress(FileNotFoundError):
            if not self._files.stat(self._root).is_directory:
                raise NotADirectoryError(self._root)


def _reopen(root: str, runtime: Runtime, files: FileSystem) -> LocalStore:
    return LocalStore(root, runtime=runtime, files=files)


class OpenFile(NamedTuple):
    """A file that stays open."""

    file: File
    size: int
    identity: object
    """As of when it was opened."""
    path: bytes


class _OpenFile:
    """Closes a file. A class instead of a generator: every read uses it."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> File:
        return self._file

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _read(key: str, file: File, start: int, end: int) -> bytes:
    """Read a range that the file has by its size; UnavailableError if it was cut meanwhile."""
    data = file.read(end - start, start)
    if len(data) < end - start:
        raise short_read(key, len(data), end - start)
    return data


def _can_be_key(name: str) -> bool:
    """Whether a file of this name can be an object; foreign files are ignored."""
    try:
        check_key(name.removesuffix("/"))
    except (InvalidInputError, UnicodeEncodeError):
        return False
    return name.rstrip("/") not in RESERVED


def _tag(stat: FileStat) -> str:
    return f'"{stat.mtime_ns:x}-{stat.inode:x}-{stat.size:x}"'


def _info(key: str, stat: FileStat) -> ObjectInfo:
    return ObjectInfo(key, stat.size, _tag(stat), stat.ctime_ns / 1e9)


# --- durable names --------------------------------------------------------------------


class _DurabilityUnknown(OSError):
    """A name may or may not exist, or may not survive a power failure."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.errno or errno.EIO, str(cause))
        self.cause = cause


class _SourceFailed(Exception):
    """The caller's own iterator raised; its error is raised to the caller unchanged."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Temporary:
    """A synced file that has no name in the bucket yet."""

    path: str
    stat: FileStat


class _OpenDirectory:
    """The files below one root, and the durability of their names."""

    def __init__(self, root: str, runtime: Runtime, files: FileSystem) -> None:
        self.root = root
        self.files = files
        self.scratch = os.path.join(root, TEMPORARY)
        self._runtime = runtime
        self._durable: set[str] = set()
        self._token = runtime.ulid()  # unique together with the process id and a serial number
        self._serial = count()

    # --- bytes --------------------------------------------------------------------
    @contextmanager
    def copied(self, source: File, size: int) -> Iterator[_Temporary]:
        """Write and sync a file with the bytes of another, without passing them through Python."""
        with self.scratch_file() as (path, file):
            while size:
                copied = file.copy_from(source, min(size, COPY_BYTES_MAX))
                if not copied:
                    raise OSError(f"the source ended {size} bytes early while it was copied")
                size -= copied
            yield _Temporary(path, self.finish(file))

    @contextmanager
    def composed(self, pieces: Iterable[bytes | tuple[File, int, int]]) -> Iterator[_Temporary]:
        """Write and sync a file of new bytes and of ranges of open files: file, start, end."""
        with self.scratch_file() as (path, file):
            for piece in pieces:
                if isinstance(piece, tuple):
                    self._copy_range(file, *piece)
                else:
                    file.append(piece)
            yield _Temporary(path, self.finish(file))

    def _copy_range(self, file: File, source: File, start: int, end: int) -> None:
        while start < end:
            copied = file.copy_from(source, min(end - start, COPY_BYTES_MAX), start)
            if not copied:
                raise OSError(f"the source ended {end - start} bytes early while it was copied")
            start += copied

    @contextmanager
    def scratch_file(self) -> Iterator[tuple[str, File]]:
        """Yield a new file that no listing shows."""
        path, file = self.new_scratch()
        try:
            yield path, file
        finally:
            self.drop_scratch(path, file)

    def new_scratch(self) -> tuple[str, File]:
        path = f"{self.scratch}/{self._token}.{self._runtime.process_id()}.{next(self._serial)}"
        try:
            return path, self.files.create(path)
        except FileNotFoundError:  # the first write, or the directory was removed
            self._durable.clear()
            self.ensure(self.scratch)
            return path, self.files.create(path)

    def drop_scratch(self, path: str, file: File) -> None:
        """A leftover is harmless, and must not turn a write that landed into an error."""
        try:  # noqa: SIM105 - every small write comes here, and suppress() is three calls
            file.close()
        except OSError:
            pass
        try:  # noqa: SIM105 - as above
            self.files.unlink(path)
        except OSError:
            pass

    def finish(self, file: File) -> FileStat:
        file.set_mtime(self._runtime.wall_ns())
        file.sync()
        return file.stat()

    # --- names --------------------------------------------------------------------
    def link(self, temporary: _Temporary, path: str) -> bool:
        """Name a file where there is none; False if the name is taken.

        Raises _DurabilityUnknown if the name may or may not exist, or may not be durable.
        """
        folder = os.path.dirname(path)
        try:
            self._name(self.files.link, temporary, path, folder)
            won = True
        except FileExistsError:
            won = self._is_named(temporary, path)  # a network may send twice and respond once
        self.sync_names(folder)  # for the loser too: its caller acts on it
        return won

    def rename(self, temporary: _Temporary, path: str) -> None:
        """Name a file, replacing the one that had the name. Raises as `link` does."""
        folder = os.path.dirname(path)
        self._name(self.files.rename, temporary, path, folder)
        self.sync_names(folder)

    def _name(
        self, call: Callable[[str, str], None], temporary: _Temporary, path: str, folder: str
    ) -> None:
        """Call link() or rename(); an OSError proves that nothing happened."""
        if folder not in self._durable:
            self.ensure(folder)
        for is_retry in (False, True):
            try:
                call(temporary.path, path)
                return
            except OSError as error:
                if error.errno not in PROOF_OF_NOTHING:
                    raise _DurabilityUnknown(error) from error
                if is_retry or not isinstance(error, FileNotFoundError):
                    raise
                if self._is_named(temporary, path):
                    return
                # The directory was removed since it was made: create it again.
                self._durable.clear()
                self.ensure(folder)

    def _is_named(self, temporary: _Temporary, path: str) -> bool:
        with suppress(OSError):
            return self.files.stat(path).inode == temporary.stat.inode
        return False

    def sync_names(self, folder: str) -> None:
        """Make the names in a directory durable, or raise _DurabilityUnknown."""
        try:
            self._sync(folder)
        except OSError as error:
            raise _DurabilityUnknown(error) from error

    def _sync(self, folder: str) -> None:
        if _suspects and self._identity(folder) in _suspects:
            raise SyncFailed(errno.EIO, "an earlier sync failed", folder)
        try:
            self.files.sync_directory(folder)
        except SyncFailed:
            with suppress(OSError):
                _suspects.add(self._identity(folder))
            raise

    def _identity(self, folder: str) -> tuple[str, int, int]:
        stat = self.files.stat(folder)
        return folder, stat.device, stat.inode

    @contextmanager
    def locked(self, *keys: str) -> Iterator[None]:
        """Exclude every other overwrite and delete of these keys, in any process."""
        locks = self.ensure(os.path.join(self.root, LOCKS))
        shards = {zlib.crc32(key.encode()) % LOCK_FILES for key in keys}
        with ExitStack() as held:
            for shard in sorted(shards):  # in one order, so that there is no deadlock
                path = os.path.join(locks, f"{shard:02x}")
                try:
                    held.enter_context(self.files.locked(path))
                except FileNotFoundError:  # the directory was removed: create it again
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


class _TemporaryFile:
    """Writes and syncs a file; it is removed at the end, unless it was renamed.

    A class instead of a generator: every small write uses it.
    """

    __slots__ = ("_directory", "_file", "_parts", "_path")

    _path: str
    _file: File

    def __init__(self, directory: _OpenDirectory, parts: Iterable[bytes]) -> None:
        self._directory, self._parts = directory, parts

    def __enter__(self) -> _Temporary:
        directory, parts = self._directory, self._parts
        self._path, self._file = directory.new_scratch()
        try:
            for part in parts if isinstance(parts, list) else _guard_source(parts):
                self._file.append(part)
            return _Temporary(self._path, directory.finish(self._file))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._directory.drop_scratch(self._path, self._file)


def _guard_source(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Keep the caller's errors apart from those of the disk."""
    iterator = iter(parts)
    while True:
        try:
            part = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _SourceFailed(error) from error
        yield part


# --- errors ---------------------------------------------------------------------------


class _read_errors:  # noqa: N801 - used like a function; a generator would cost each call more
    """Translate the errors of a read: a missing file is a missing object."""

    __slots__ = ("_key", "_url")

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise self._translate(error) from error

    def _translate(self, error: OSError) -> ReefError:
        return _read_error(self._url, self._key, error)


def _read_error(url: str, key: str, error: OSError) -> ReefError:
    if error_number(error) in ABSENT:
        return NotFoundError(f"no object {key} in {url}", object=key)
    return _to_reef_error(error, url, key)


class _write_errors(_read_errors):  # noqa: N801 - as above
    """Translate the errors of a write: a missing file means that another process removed it."""

    __slots__ = ()

    def _translate(self, error: OSError) -> ReefError:
        if error_number(error) in CLASH:
            return InvalidInputError(
                f"key {self._key} clashes with another object or directory in {self._url}",
                kind=ErrorKind.INVALID_KEY,
                hint="A directory cannot hold both an object and others below its name",
                object=self._key,
            )
        return _to_reef_error(error, self._url, self._key)


def _to_reef_error(error: OSError, url: str, key: str) -> ReefError:
    kind = error_kind(error)
    if kind is ErrorKind.ACCESS_DENIED:
        return InvalidInputError(
            f"no permission for {key} in {url}: {error.strerror}", kind=kind, object=key
        )
    if error_number(error) == errno.ENAMETOOLONG:
        return InvalidInputError(
            f"a part of key {key[:80]}… is longer than the file system allows",
            kind=ErrorKind.INVALID_KEY,
            object=key,
        )
    if isinstance(error, _DurabilityUnknown):
        kind = ErrorKind.NOT_DURABLE  # the object may be visible, which proves nothing
    return UnavailableError(f"{key} in {url}: {error}", kind=kind, object=key)
