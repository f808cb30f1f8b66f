"""A disk that forgets what was not synced.

Files and directories live in memory in two versions: what a running system sees, and what
is durable. `SimulatedDisk.power_failure()` throws the first away: of every name and every
byte that was not synced, the choices decide whether it survived, was lost, or was torn.
Names and bytes are independent, as file systems only promise what was asked of them.

`SimulatedFiles` is one process's view: each call is a seam at which it can die. It
refuses what Linux refuses, with the same errors; the tests run the same calls on both.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from reef.files import Files, FileStat
from reef.testing.choices import Choices
from reef.testing.simulation import Process

__all__ = ["SimulatedDisk", "SimulatedFiles"]


@dataclass(eq=False)
class _Node:
    """A file or a directory."""

    number: int
    is_directory: bool
    seen: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    entries: "dict[str, _Node]" = field(default_factory=dict)
    durable_entries: "dict[str, _Node]" = field(default_factory=dict)
    mtime_ns: int = 0
    ctime_ns: int = 0
    holder: "Process | None" = None
    """Who has it locked."""


@dataclass(eq=False)
class _Handle:
    """An open file, as one process holds it."""

    node: _Node
    writable: bool
    """Either this or readable, never both: `Files` opens in no other way."""
    boot: int
    position: int = 0


class SimulatedDisk:
    """What several processes of one machine share, and lose together."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._numbers = count(2)
        self.boot = 0
        """How often the power has failed: a handle from before is none."""
        self.root = _Node(1, is_directory=True)

    def new(self, is_directory: bool) -> _Node:
        return _Node(next(self._numbers), is_directory)

    def find(self, path: str) -> _Node:
        node = self.root
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

    def power_failure(self) -> None:
        """Keep what was synced, and of the rest whatever the choices keep.

        No handle that was open before works again.
        """
        self.boot += 1
        self._settle(self.root, set())

    def _settle(self, node: _Node, done: set[int]) -> None:
        if node.number in done:
            return
        done.add(node.number)
        node.holder = None
        if not node.is_directory:
            node.durable = self._torn(node)
            node.seen = bytearray(node.durable)
            return
        for name in sorted(node.entries.keys() | node.durable_entries.keys()):
            self._settle_name(node, name)
        node.durable_entries = dict(node.entries)
        for child in node.entries.values():
            self._settle(child, done)

    def _settle_name(self, node: _Node, name: str) -> None:
        seen, durable = node.entries.get(name), node.durable_entries.get(name)
        kept = durable if seen is not durable and self._choices.pick(2) else seen
        if kept is None:
            node.entries.pop(name, None)
        else:
            node.entries[name] = kept

    def _torn(self, node: _Node) -> bytes:
        """Return what is left of a file: nothing new, a part of it, or all."""
        if bytes(node.seen) == node.durable:
            return node.durable
        fate = self._choices.pick(3)
        if fate == 1 and len(node.seen) > len(node.durable):
            kept = self._choices.pick(len(node.seen) - len(node.durable))
            return bytes(node.seen[: len(node.durable) + kept])
        return bytes(node.seen) if fate == 2 else node.durable


class SimulatedFiles(Files):
    """One process's system calls on a simulated disk."""

    def __init__(self, disk: SimulatedDisk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._open: dict[int, _Handle] = {}
        self._numbers = count(3)

    # --- open files -----------------------------------------------------------------
    def create(self, path: str) -> int:
        self._seam("create", path)
        folder, name = self._disk.parent(path)
        self._refuse_taken(folder, name)
        return self._new_handle(self._new_node(folder, name, is_directory=False), writable=True)

    def open(self, path: str) -> int:
        self._seam("open", path)
        return self._new_handle(self._disk.find(path), writable=False)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._seam("write", str(fd))
        node = self._writable(fd).node
        node.seen += data
        self._changed(node)
        return len(data)

    def read_at(self, fd: int, start: int, length: int) -> bytes:
        self._seam("read", str(fd))
        return bytes(self._readable(fd).node.seen[start : start + length])

    def copy_range(
        self, source_fd: int, target_fd: int, length: int, start: int | None = None
    ) -> int:
        self._seam("copy", str(target_fd))
        source, target = self._readable(source_fd), self._writable(target_fd)
        first = source.position if start is None else start
        piece = source.node.seen[first : first + length]
        source.position += len(piece) if start is None else 0
        target.node.seen += piece
        self._changed(target.node)
        return len(piece)

    def set_mtime(self, fd: int, mtime_ns: int) -> None:
        node = self._handle(fd).node
        self._changed(node)
        node.mtime_ns = mtime_ns

    def stat_open(self, fd: int) -> FileStat:
        return _stat(self._handle(fd).node)

    def sync(self, fd: int) -> None:
        self._seam("sync", str(fd))
        _make_durable(self._handle(fd).node)
        self._seam("sync done", str(fd))

    def close(self, fd: int) -> None:
        self._handle(fd)
        del self._open[fd]

    # --- names ----------------------------------------------------------------------
    def stat(self, path: str) -> FileStat:
        self._seam("stat", path)
        return _stat(self._disk.find(path))

    def link(self, source: str, target: str) -> None:
        self._seam("link", target)
        node = self._disk.find(source)
        folder, name = self._disk.parent(target)
        self._refuse_taken(folder, name)
        if node.is_directory:
            raise _error(errno.EPERM, source)
        folder.entries[name] = node
        self._renamed(node, folder)
        self._seam("link done", target)

    def rename(self, source: str, target: str) -> None:
        self._seam("rename", target)
        old_folder, old_name = self._disk.parent(source)
        node = self._disk.find(source)
        folder, name = self._disk.parent(target)
        replaced = folder.entries.get(name)
        if replaced is not node:  # two names of one file: both stay, as POSIX has it
            _refuse_rename(node, source, replaced, target)
            folder.entries[name] = node
            del old_folder.entries[old_name]
            self._renamed(node, folder, old_folder)
        self._seam("rename done", target)

    def unlink(self, path: str) -> None:
        self._seam("unlink", path)
        folder, name = self._disk.parent(path)
        node = self._disk.find(path)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        del folder.entries[name]
        self._renamed(node, folder)

    def make_directory(self, path: str) -> None:
        self._seam("mkdir", path)
        folder, name = self._disk.parent(path)
        self._refuse_taken(folder, name)
        self._new_node(folder, name, is_directory=True)

    def sync_directory(self, path: str) -> None:
        self._seam("syncdir", path)
        _make_durable(self._disk.find_directory(path))
        self._seam("syncdir done", path)

    def scan(self, path: str) -> list[tuple[str, bool]]:
        self._seam("scan", path)
        node = self._disk.find_directory(path)
        return [(name, child.is_directory) for name, child in node.entries.items()]

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        self._seam("lock", path)
        folder, name = self._disk.parent(path)
        node = folder.entries.get(name) or self._new_node(folder, name, is_directory=False)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        while node.holder is not None and not node.holder.dead:
            self._process.runtime.sleep(0.001)
        node.holder = self._process
        try:
            yield
        finally:
            node.holder = None

    # --- inside ---------------------------------------------------------------------
    def _seam(self, call: str, path: str) -> None:
        self._process.simulation.seam(self._process, "file", f"{call} {path}")

    def _new_handle(self, node: _Node, *, writable: bool) -> int:
        fd = next(self._numbers)
        self._open[fd] = _Handle(node, writable, self._disk.boot)
        return fd

    def _handle(self, fd: int) -> _Handle:
        handle = self._open.get(fd)
        if handle is None or handle.boot != self._disk.boot:
            raise _error(errno.EBADF)
        return handle

    def _writable(self, fd: int) -> _Handle:
        handle = self._handle(fd)
        if not handle.writable:
            raise _error(errno.EBADF)
        return handle

    def _readable(self, fd: int) -> _Handle:
        handle = self._handle(fd)
        if handle.writable:
            raise _error(errno.EBADF)
        if handle.node.is_directory:
            raise _error(errno.EISDIR)
        return handle

    def _new_node(self, folder: _Node, name: str, *, is_directory: bool) -> _Node:
        node = folder.entries[name] = self._disk.new(is_directory)
        self._changed(node, folder)
        return node

    def _renamed(self, node: _Node, *folders: _Node) -> None:
        """A new name changes a file's ctime only; for the directories it is content."""
        node.ctime_ns = self._now_ns()
        self._changed(*folders)

    def _changed(self, *nodes: _Node) -> None:
        for node in nodes:
            node.mtime_ns = node.ctime_ns = self._now_ns()

    def _now_ns(self) -> int:
        return int(self._process.simulation.scheduler.now_s * 1e9)

    def _refuse_taken(self, folder: _Node, name: str) -> None:
        if name in folder.entries:
            raise _error(errno.EEXIST, name)


def _refuse_rename(node: _Node, source: str, replaced: _Node | None, target: str) -> None:
    """Raise what rename(2) raises when one thing cannot stand in for the other."""
    if _parts(target)[: len(_parts(source))] == _parts(source):
        raise _error(errno.EINVAL, target)  # a directory, into itself
    if replaced is None:
        return
    if replaced.is_directory != node.is_directory:
        raise _error(errno.EISDIR if replaced.is_directory else errno.ENOTDIR, target)
    if replaced.entries:
        raise _error(errno.ENOTEMPTY, target)


def _make_durable(node: _Node) -> None:
    node.durable = bytes(node.seen)
    node.durable_entries = dict(node.entries)


def _error(number: int, path: str | None = None) -> OSError:
    """Return the error of a system call; Python picks the class by the number."""
    return OSError(number, os.strerror(number), path)


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _stat(node: _Node) -> FileStat:
    return FileStat(
        len(node.seen), node.number, node.mtime_ns, node.ctime_ns, is_directory=node.is_directory
    )
