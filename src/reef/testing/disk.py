"""A disk in memory that loses everything that was not synced.

`SimulatedDisk` is a `reef.files.FileSystem` with a trace of all changes and syncs, from which
`reef.testing.power_failures` derives the states in which a power failure may leave it.
`power_failure` puts the disk itself into one of them.

    disk = SimulatedDisk()
    log = LocalLog("/log", files=disk)                     a process without a simulation
    LocalStore("/data", files=SimulatedFiles(disk, node))  a process of a simulation

`SimulatedFiles` is the view of one simulated process: every call is a yield point at which that
process can die. Errors are those of Linux; the tests run the same calls on both.

A process may die without the machine: its locks are released, and its unsynced changes stay
visible and unsynced.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from reef.files import File, FileStat, FileSystem, SyncFailed
from reef.testing.power_failures import ABSENT, ROOT, DiskStep, DurableState, Pick, Unsynced
from reef.testing.power_failures import put as put_bytes
from reef.testing.power_failures import resize as resize_bytes
from reef.testing.simulation import Process

LOCK_POLL_S = 0.001
_devices = count(1 << 32)


@dataclass(eq=False)
class _Node:
    """A file or a directory."""

    number: int
    is_directory: bool
    data: bytearray = field(default_factory=bytearray)
    entries: "dict[str, _Node]" = field(default_factory=dict)
    mtime_ns: int = 0
    durable_mtime_ns: int = 0
    ctime_ns: int = 0
    holder: "_SimulatedFile | None" = None
    """The open file that has it locked."""


class SimulatedFiles(FileSystem):
    """A disk as one process of a simulation sees it."""

    def __init__(self, disk: "SimulatedDisk", process: Process | None) -> None:
        self.disk = disk
        self.process = process

    # --- names ----------------------------------------------------------------------
    def create(self, path: str, *, mode: int = 0o666) -> File:
        self._reach("create", path)
        folder, name = self.disk.parent(path)
        _reject_taken(folder, name)
        return _SimulatedFile(self, self._new_node(folder, name, is_directory=False), path, True)

    def open(self, path: str, *, writable: bool = False) -> File:
        self._reach("open", path)
        node = self.disk.find(path)
        if writable and node.is_directory:
            raise _error(errno.EISDIR, path)
        return _SimulatedFile(self, node, path, writable)

    def open_or_create(self, path: str) -> File:
        self._reach("lock", path)
        folder, name = self.disk.parent(path)
        node = folder.entries.get(name) or self._new_node(folder, name, is_directory=False)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        return _SimulatedFile(self, node, path, True)

    def stat(self, path: str) -> FileStat:
        self._reach("stat", path)
        return self.disk.stat_of(self.disk.find(path))

    def scan(self, path: str) -> list[tuple[str, bool]]:
        self._reach("scan", path)
        node = self.disk.find_directory(path)
        return [(name, child.is_directory) for name, child in node.entries.items()]

    def link(self, source: str, target: str) -> None:
        self._reach("link", target)
        node = self.disk.find(source)
        folder, name = self.disk.parent(target)
        _reject_taken(folder, name)
        if node.is_directory:
            raise _error(errno.EPERM, source)
        self._set_name(folder, name, node)
        self._renamed(node, folder)
        self._reach("link done", target)

    def rename(self, source: str, target: str) -> None:
        self._reach("rename", target)
        old_folder, old_name = self.disk.parent(source)
        node = self.disk.find(source)
        folder, name = self.disk.parent(target)
        replaced = folder.entries.get(name)
        if replaced is not node:  # two names of one file both stay, as POSIX specifies
            _reject_rename(node, source, replaced, target)
            self._set_name(folder, name, node)
            self._set_name(old_folder, old_name, None)
            self._renamed(node, folder, old_folder)
        self._reach("rename done", target)

    def unlink(self, path: str) -> None:
        self._reach("unlink", path)
        folder, name = self.disk.parent(path)
        node = self.disk.find(path)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        self._set_name(folder, name, None)
        self._renamed(node, folder)

    def make_directory(self, path: str, *, mode: int = 0o777) -> None:
        self._reach("mkdir", path)
        folder, name = self.disk.parent(path)
        _reject_taken(folder, name)
        self._new_node(folder, name, is_directory=True)

    def sync_directory(self, path: str) -> None:
        node = self.disk.find_directory(path)
        try:
            self._reach("syncdir", path)
        except OSError as error:
            self.disk.trace.append(DiskStep("sync names failed", node.number))
            raise SyncFailed(error.errno, error.strerror, path) from error
        node = self.disk.find_directory(path)  # others may have run at the yield_point
        self.disk.trace.append(DiskStep("sync names", node.number))
        self._reach("syncdir done", path)

    # --- inside ---------------------------------------------------------------------
    def _reach(self, call: str, path: str) -> None:
        """Pass a yield point: other fibers may run, and the call may fail or crash."""
        if self.disk.before is not None:
            self.disk.before(call, path)
        if self.process is not None:
            self.process.simulation.yield_point(self.process, "file", f"{call} {path}")

    def _new_node(self, folder: _Node, name: str, *, is_directory: bool) -> _Node:
        node = self.disk.new_node(is_directory)
        self._set_name(folder, name, node)
        self._changed(node, folder)
        return node

    def _set_name(self, folder: _Node, name: str, node: _Node | None) -> None:
        if node is None:
            del folder.entries[name]
        else:
            folder.entries[name] = node
        number = ABSENT if node is None else node.number
        self.disk.trace.append(DiskStep("name", number, folder.number, name))

    def _renamed(self, node: _Node, *folders: _Node) -> None:
        """Update timestamps: a new name changes a file's ctime, and its directory's content."""
        node.ctime_ns = self._now_ns()
        self._changed(*folders)

    def _changed(self, *nodes: _Node) -> None:
        for node in nodes:
            node.mtime_ns = node.ctime_ns = self._now_ns()

    def _now_ns(self) -> int:
        if self.process is None:
            return next(self.disk.ticks)
        return int(self.process.simulation.scheduler.now_s * 1e9)

    def wait_for_lock(self) -> None:
        """Let others run while a lock is held; an error where there are no others."""
        if self.process is None:
            raise _error(errno.EDEADLK)
        self.process.runtime.sleep(LOCK_POLL_S)


class SimulatedDisk(SimulatedFiles):
    """The disk of one machine, which several processes share, and lose together.

    Used as a file system, it is that of a process outside of any simulation.
    """

    def __init__(
        self, content: Mapping[str, bytes] | None = None, *, bytes_max: int | None = None
    ) -> None:
        """Start with durable files; their directories are created."""
        super().__init__(self, None)
        self.trace: list[DiskStep] = []
        self.before: Callable[[str, str], None] | None = None
        """Called with the name of each call and its path; may raise. If it raises OSError for
        `sync` or `syncdir`, the unsynced changes are never made durable by a later sync."""
        self.bytes_max = bytes_max
        """Writes beyond it fail with ENOSPC."""
        self.boot = 0
        """Counts power failures: an open file from before is invalid."""
        self.device = next(_devices)
        self.ticks = count(1)
        self._numbers = count(ROOT)
        self._root = _Node(next(self._numbers), is_directory=True)
        self._nodes = {ROOT: self._root}
        self.base = DurableState()
        """The durable state at the start of the trace."""
        for path, data in (content or {}).items():
            self._add_file(path, data)
        self.trace.clear()

    def _add_file(self, path: str, data: bytes) -> None:
        folder = self._root
        *folders, name = _parts(path)
        for part in folders:
            folder = folder.entries.get(part) or self._add(folder, part, is_directory=True)
        node = self._add(folder, name, is_directory=False)
        node.data[:] = data
        self.base.data[node.number] = bytes(data)

    def _add(self, folder: _Node, name: str, *, is_directory: bool) -> _Node:
        node = folder.entries[name] = self.new_node(is_directory)
        self.base.names[folder.number][name] = node.number
        if is_directory:
            self.base.names[node.number] = {}
        return node

    def mark(self, mark: Any) -> None:
        """Record how far the test is."""
        self.trace.append(DiskStep("mark", mark=mark))

    def content(self) -> dict[str, bytes]:
        """Return all files as running processes see them, by path."""
        return {path: bytes(node.data) for path, node in self._walk(self._root, "")}

    def _walk(self, folder: _Node, path: str) -> Iterator[tuple[str, _Node]]:
        for name, node in folder.entries.items():
            if node.is_directory:
                yield from self._walk(node, f"{path}/{name}")
            else:
                yield f"{path}/{name}", node

    def restart(self) -> None:
        """Let all processes die, but not the machine: their locks are released."""
        for node in self._nodes.values():
            node.holder = None

    def power_failure(self, pick: Pick) -> None:
        """Keep the synced state, and of the rest whatever `pick` keeps.

        No file that was open before can be used again.
        """
        self.boot += 1
        unsynced = Unsynced(self.base)
        for step in self.trace:
            unsynced.apply(step)
        self.base = unsynced.random_state(pick)
        self.trace.clear()
        for number, node in self._nodes.items():
            node.holder = None
            if node.is_directory:
                names = self.base.names.get(number, {})
                node.entries = {name: self._nodes[child] for name, child in names.items()}
            else:
                node.data = bytearray(self.base.data.get(number, b""))
                if node.mtime_ns != node.durable_mtime_ns and pick(2):
                    node.mtime_ns = node.durable_mtime_ns
                node.durable_mtime_ns = node.mtime_ns

    # --- for the views --------------------------------------------------------------
    def new_node(self, is_directory: bool) -> _Node:
        node = _Node(next(self._numbers), is_directory)
        self._nodes[node.number] = node
        if is_directory:
            self.trace.append(DiskStep("directory", node.number))
        return node

    def find(self, path: str) -> _Node:
        node = self._root
        for name in _parts(path):
            if not node.is_directory:
                raise _error(errno.ENOTDIR, path)
            if name not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def find_directory(self, path: str) -> _Node:
        node = self.find(path)
        if not node.is_directory:
            raise _error(errno.ENOTDIR, path)
        return node

    def parent(self, path: str) -> tuple[_Node, str]:
        return self.find_directory(os.path.dirname(path)), os.path.basename(path)

    def stat_of(self, node: _Node) -> FileStat:
        return FileStat(
            len(node.data),
            node.number,
            node.mtime_ns,
            node.ctime_ns,
            node.is_directory,
            not node.is_directory,
            self.device,
        )

    def reserve(self, node: _Node, end: int) -> None:
        """Raise ENOSPC if the disk has no room for a file that ends there."""
        if self.bytes_max is not None:
            used = sum(len(found.data) for _, found in self._walk(self._root, ""))
            if used + max(0, end - len(node.data)) > self.bytes_max:
                raise _error(errno.ENOSPC)


class _SimulatedFile(File):
    """An open file of one process."""

    def __init__(self, files: SimulatedFiles, node: _Node, path: str, writable: bool) -> None:
        self._files = files
        self._disk = files.disk
        self._node = node
        self._path = path
        self._is_writable = writable
        self._boot = self._disk.boot
        self._is_closed = False
        self._read_position = 0
        """Where the next copy from it starts. Linux has one position for both; no file is used
        both ways."""
        self._position = 0

    def read(self, length: int, offset: int) -> bytes:
        self._files._reach("read", self._path)
        return bytes(self._readable().data[offset : offset + length])

    def write(self, data: bytes, offset: int) -> None:
        self._files._reach("write", self._path)
        self._put(bytes(data), offset)

    def append(self, data: bytes | memoryview) -> None:
        self._files._reach("write", self._path)
        self._put(bytes(data), self._position)
        self._position += len(data)

    def copy_from(self, source: File, length: int, offset: int | None = None) -> int:
        self._files._reach("copy", self._path)
        if not isinstance(source, _SimulatedFile):
            raise _error(errno.EXDEV)
        node = source._readable()
        self._writable()
        first = source._read_position if offset is None else offset
        piece = bytes(node.data[first : first + length])
        source._read_position += len(piece) if offset is None else 0
        if piece:
            self._put(piece, self._position)
            self._position += len(piece)
        return len(piece)

    def _put(self, data: bytes, offset: int) -> None:
        node = self._writable()
        self._disk.reserve(node, offset + len(data))
        put_bytes(node.data, data, offset)
        self._files._changed(node)
        self._disk.trace.append(DiskStep("write", node.number, offset=offset, data=data))

    def stat(self) -> FileStat:
        return self._disk.stat_of(self._opened())

    def size(self) -> int:
        return len(self._opened().data)

    def set_mtime(self, mtime_ns: int) -> None:
        node = self._opened()
        self._files._changed(node)
        node.mtime_ns = mtime_ns

    def resize(self, size: int) -> None:
        self._files._reach("resize", self._path)
        self._resize(size)

    def preallocate(self, size: int) -> None:
        self._files._reach("preallocate", self._path)
        node = self._writable()
        self._disk.reserve(node, size)
        self._resize(max(size, len(node.data)))

    def _resize(self, size: int) -> None:
        node = self._writable()
        resize_bytes(node.data, size)
        self._files._changed(node)
        self._disk.trace.append(DiskStep("resize", node.number, offset=size))

    def sync(self) -> None:
        self._sync()
        node = self._opened()
        node.durable_mtime_ns = node.mtime_ns

    def sync_data(self) -> None:
        self._sync()

    def _sync(self) -> None:
        node = self._opened()
        try:
            self._files._reach("sync", self._path)
        except OSError:
            self._disk.trace.append(DiskStep("sync failed", node.number))
            raise
        self._disk.trace.append(DiskStep("sync", self._opened().number))
        self._files._reach("sync done", self._path)

    def lock(self) -> None:
        while not self.try_lock():
            self._files.wait_for_lock()

    def try_lock(self) -> bool:
        node = self._opened()
        if node.holder is not None and not node.holder.is_dead:
            return False
        node.holder = self
        return True

    @property
    def is_dead(self) -> bool:
        return self._files.process is not None and self._files.process.dead

    def close(self) -> None:
        self._is_closed = True
        if self._node.holder is self:
            self._node.holder = None

    def _opened(self) -> _Node:
        if self._is_closed or self._boot != self._disk.boot:
            raise _error(errno.EBADF)
        return self._node

    def _readable(self) -> _Node:
        if self._opened().is_directory:
            raise _error(errno.EISDIR)
        return self._node

    def _writable(self) -> _Node:
        if not self._is_writable:
            raise _error(errno.EBADF)
        return self._opened()


def _reject_taken(folder: _Node, name: str) -> None:
    if name in folder.entries:
        raise _error(errno.EEXIST, name)


def _reject_rename(node: _Node, source: str, replaced: _Node | None, target: str) -> None:
    """Raise the error of rename(2) if the target cannot be replaced by the source."""
    if _parts(target)[: len(_parts(source))] == _parts(source):
        raise _error(errno.EINVAL, target)  # a directory, into itself
    if replaced is None:
        return
    if replaced.is_directory != node.is_directory:
        raise _error(errno.EISDIR if replaced.is_directory else errno.ENOTDIR, target)
    if replaced.entries:
        raise _error(errno.ENOTEMPTY, target)


def _error(number: int, path: str | None = None) -> OSError:
    """Return the error of a system call; Python picks the class by the number."""
    return OSError(number, os.strerror(number), path)


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
