"""A disk that forgets what was not synced.

Files and directories live in memory in two versions: what a running system sees, and what
is durable. `SimulatedDisk.power_failure()` throws the first away: of every name and every
byte that was not synced, the choices decide whether it survived, was lost, or was torn.
Names and bytes are independent, as file systems only promise what was asked of them.

`SimulatedFiles` is one process's view: each call is a seam at which it can die.
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


class SimulatedDisk:
    """What several processes of one machine share, and lose together."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._numbers = count(2)
        self.root = _Node(1, is_directory=True)

    def new(self, is_directory: bool) -> _Node:
        return _Node(next(self._numbers), is_directory)

    def find(self, path: str) -> _Node:
        node = self.root
        for name in _parts(path):
            if not node.is_directory:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.entries[name]
        return node

    def parent(self, path: str) -> tuple[_Node, str]:
        folder = self.find(os.path.dirname(path))
        if not folder.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, os.path.basename(path)

    def power_failure(self) -> None:
        """Keep what was synced, and of the rest whatever the choices keep."""
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
        self._open: dict[int, tuple[_Node, list[int]]] = {}
        self._numbers = count(3)

    def create(self, path: str) -> int:
        self._seam("create", path)
        folder, name = self._disk.parent(path)
        self._refuse_taken(folder, name)
        node = folder.entries[name] = self._disk.new(is_directory=False)
        self._touch(node, folder)
        return self._handle(node)

    def open(self, path: str) -> int:
        self._seam("open", path)
        return self._handle(self._disk.find(path))

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._seam("write", str(fd))
        node, _ = self._open[fd]
        node.seen += data
        self._touch(node)
        return len(data)

    def read_at(self, fd: int, start: int, length: int) -> bytes:
        self._seam("read", str(fd))
        node, _ = self._open[fd]
        return bytes(node.seen[start : start + length])

    def copy_range(self, source_fd: int, target_fd: int, length: int) -> int:
        self._seam("copy", str(target_fd))
        source, position = self._open[source_fd]
        piece = source.seen[position[0] : position[0] + length]
        position[0] += len(piece)
        self._open[target_fd][0].seen += piece
        return len(piece)

    def set_mtime(self, fd: int, mtime_ns: int) -> None:
        self._open[fd][0].mtime_ns = mtime_ns

    def stat_open(self, fd: int) -> FileStat:
        return _stat(self._open[fd][0])

    def sync(self, fd: int) -> None:
        self._seam("sync", str(fd))
        node, _ = self._open[fd]
        node.durable = bytes(node.seen)
        self._seam("sync done", str(fd))

    def close(self, fd: int) -> None:
        del self._open[fd]

    def stat(self, path: str) -> FileStat:
        self._seam("stat", path)
        return _stat(self._disk.find(path))

    def link(self, source: str, target: str) -> None:
        self._seam("link", target)
        node = self._disk.find(source)
        folder, name = self._disk.parent(target)
        self._refuse_taken(folder, name)
        folder.entries[name] = node
        self._touch(node, folder)
        self._seam("link done", target)

    def rename(self, source: str, target: str) -> None:
        self._seam("rename", target)
        old_folder, old_name = self._disk.parent(source)
        node = self._disk.find(source)
        folder, name = self._disk.parent(target)
        if name in folder.entries and folder.entries[name].is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        folder.entries[name] = node
        del old_folder.entries[old_name]
        self._touch(node, folder)
        self._seam("rename done", target)

    def unlink(self, path: str) -> None:
        self._seam("unlink", path)
        folder, name = self._disk.parent(path)
        if name not in folder.entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del folder.entries[name]

    def make_directory(self, path: str) -> None:
        self._seam("mkdir", path)
        folder, name = self._disk.parent(path)
        self._refuse_taken(folder, name)
        folder.entries[name] = self._disk.new(is_directory=True)

    def sync_directory(self, path: str) -> None:
        self._seam("syncdir", path)
        node = self._disk.find(path)
        node.durable_entries = dict(node.entries)
        self._seam("syncdir done", path)

    def scan(self, path: str) -> list[tuple[str, bool]]:
        self._seam("scan", path)
        node = self._disk.find(path)
        if not node.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return [(name, child.is_directory) for name, child in node.entries.items()]

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        self._seam("lock", path)
        folder, name = self._disk.parent(path)
        node = folder.entries.setdefault(name, self._disk.new(is_directory=False))
        while node.holder is not None and not node.holder.dead:
            self._process.runtime.sleep(0.001)
        node.holder = self._process
        try:
            yield
        finally:
            node.holder = None

    def _seam(self, call: str, path: str) -> None:
        self._process.simulation.seam(self._process, "file", f"{call} {path}")

    def _handle(self, node: _Node) -> int:
        fd = next(self._numbers)
        self._open[fd] = (node, [0])
        return fd

    def _touch(self, *nodes: _Node) -> None:
        for node in nodes:
            node.ctime_ns = int(self._process.simulation.scheduler.now_s * 1e9)

    def _refuse_taken(self, folder: _Node, name: str) -> None:
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _stat(node: _Node) -> FileStat:
    return FileStat(
        len(node.seen), node.number, node.mtime_ns, node.ctime_ns, is_directory=node.is_directory
    )
