"""A disk for the local log that remembers what was not synced, and shows every way to lose it.

`LogDisk` is a `reef.locallog.vfs.FileSystem` of one directory, in memory. It writes down each
change, each sync, and whatever marks the test sets. `crashes(trace)` then yields, for a power
failure after any number of those steps, the disks that it may leave. Of what was not synced:

- every write is kept, lost, or torn: at any byte if it is short, at chosen ones if it is long;
- of a torn write, its beginning may be there, or its end, or all but one byte, so that
  nothing is said of order;
- every name leads to what it led to at the last sync of the directory, or at any time since;
- a change of size is kept or lost.

A process may also die alone: `restart` lets go of its locks, and what it had not synced is still
seen, and still not durable.

All of it independently, write by write and name by name, which is what reordering amounts to:
two writes of the same bytes without a sync between them are refused, for there order would
matter beyond that.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from reef.runtime import REAL, Runtime, Task

__all__ = ["LaterRuntime", "LogDisk", "Step", "crashes", "random_crash"]

SHORT_BYTES = 512
TEARS_OF_LONG = (1, 8, 16, 17, 24, 40, 56, 72, 79, 80, 100)
"""Of pages: within and behind the header of a page and the body of a meta."""
Pick = Callable[[int], int]
"""Returns a number below the given one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened to a disk."""

    what: str
    node: int = -1
    name: str = ""
    offset: int = 0
    data: bytes = b""
    mark: Any = None


@dataclass(eq=False)
class _Node:
    number: int
    data: bytearray = field(default_factory=bytearray)
    locked: bool = False


class LogDisk:
    """Files of one directory, in memory, with a trace of all changes."""

    def __init__(self, content: Mapping[str, bytes] | None = None) -> None:
        self.trace: list[Step] = []
        self._nodes: list[_Node] = []
        self._names: dict[str, _Node] = {}
        self._folder = _Node(-1)
        self.start = dict(content or {})
        """What was durable in the beginning."""
        for name, data in self.start.items():
            self._names[name] = self._node(data)

    def _node(self, data: bytes = b"") -> _Node:
        node = _Node(len(self._nodes), bytearray(data))
        self._nodes.append(node)
        return node

    def mark(self, mark: Any) -> None:
        """Write down how far the test is."""
        self.trace.append(Step("mark", mark=mark))

    def restart(self) -> None:
        """Let the process die, and not the machine: another one may open the files."""
        for node in (*self._nodes, self._folder):
            node.locked = False

    def content(self) -> dict[str, bytes]:
        """Return all files as a running system sees them."""
        return {name: bytes(node.data) for name, node in self._names.items()}

    # --- the file system ----------------------------------------------------------
    def create(self, path: str) -> "_DiskFile":
        name = os.path.basename(path)
        if name in self._names:
            raise _error(errno.EEXIST, path)
        node = self._names[name] = self._node()
        self.trace.append(Step("name", node.number, name))
        return _DiskFile(self, node)

    def open(self, path: str, *, writable: bool) -> "_DiskFile":
        return _DiskFile(self, self._find(path))

    def open_directory(self, path: str) -> "_DiskFile":
        return _DiskFile(self, self._folder)

    def same_file(self, file: Any, path: str) -> bool:
        return bool(file.node is self._names.get(os.path.basename(path)))

    def exists(self, path: str) -> bool:
        return os.path.basename(path) in self._names

    def names(self, path: str) -> list[str]:
        return list(self._names)

    def make_directory(self, path: str) -> None:
        pass

    def rename(self, source: str, target: str) -> None:
        node = self._names[os.path.basename(target)] = self._find(source)
        del self._names[os.path.basename(source)]
        self.trace.append(Step("name", node.number, os.path.basename(target)))
        self.trace.append(Step("name", -1, os.path.basename(source)))

    def unlink(self, path: str) -> None:
        self._find(path)
        del self._names[os.path.basename(path)]
        self.trace.append(Step("name", -1, os.path.basename(path)))

    def sync_directory(self, path: str) -> None:
        self.trace.append(Step("sync names"))

    def _find(self, path: str) -> _Node:
        if os.path.basename(path) not in self._names:
            raise _error(errno.ENOENT, path)
        return self._names[os.path.basename(path)]


class _DiskFile:
    def __init__(self, disk: LogDisk, node: _Node) -> None:
        self._disk = disk
        self._holds_lock = False
        self.node = node

    def read(self, length: int, offset: int) -> bytes:
        return bytes(self.node.data[offset : offset + length])

    def write(self, data: bytes, offset: int) -> None:
        _put(self.node.data, data, offset)
        self._disk.trace.append(Step("write", self.node.number, offset=offset, data=data))

    def size(self) -> int:
        return len(self.node.data)

    def resize(self, size: int) -> None:
        _resize(self.node.data, size)
        self._disk.trace.append(Step("resize", self.node.number, offset=size))

    preallocate = resize

    def sync(self) -> None:
        self._disk.trace.append(Step("sync", self.node.number))

    sync_data = sync

    def try_lock(self) -> bool:
        if self.node.locked:
            return False
        self.node.locked = self._holds_lock = True
        return True

    def close(self) -> None:
        if self._holds_lock:
            self.node.locked = self._holds_lock = False


def _put(target: bytearray, data: bytes, offset: int) -> None:
    if len(target) < offset + len(data):
        _resize(target, offset + len(data))
    target[offset : offset + len(data)] = data


def _resize(target: bytearray, size: int) -> None:
    del target[size:]
    target.extend(bytes(size - len(target)))


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


# --- power failures -----------------------------------------------------------------


class _Pending:
    """What is durable at a step, and what is not yet."""

    def __init__(self, disk: LogDisk) -> None:
        self.durable = {number: data for number, data in enumerate(disk.start.values())}
        self.unsynced: dict[int, list[Step]] = {}
        self.names: dict[str, int] = {name: number for number, name in enumerate(disk.start)}
        self.renamed: dict[str, list[int]] = {}

    def take(self, step: Step) -> None:
        if step.what in ("write", "resize"):
            self._refuse_overlap(step)
            self.unsynced.setdefault(step.node, []).append(step)
        elif step.what == "sync":
            self.durable[step.node] = self.bytes_of(step.node)
            self.unsynced.pop(step.node, None)
        elif step.what == "name":
            self.renamed.setdefault(step.name, []).append(step.node)
        elif step.what == "sync names":
            for name, nodes in self.renamed.items():
                self.names[name] = nodes[-1]
            self.renamed.clear()

    def bytes_of(self, node: int) -> bytes:
        return _applied(self.durable.get(node, b""), self.unsynced.get(node, []))

    def _refuse_overlap(self, step: Step) -> None:
        for other in self.unsynced.get(step.node, []):
            if step.what == other.what == "write" and (
                step.offset < other.offset + len(other.data)
                and other.offset < step.offset + len(step.data)
            ):
                raise AssertionError(f"bytes at {step.offset} written twice without a sync")

    def name_choices(self) -> list[list[tuple[str, int]]]:
        names = sorted(self.names.keys() | self.renamed.keys())
        return [
            [(name, node) for node in {self.names.get(name, -1), *self.renamed.get(name, [])}]
            for name in names
        ]

    def states(self, node: int) -> list[bytes]:
        """Return all that a file may hold after a power failure."""
        steps, before = self.unsynced.get(node, []), self.durable.get(node, b"")
        states = {before}
        for kept in product((False, True), repeat=len(steps)):
            states.add(_applied(before, [s for s, keep in zip(steps, kept, strict=True) if keep]))
        for place, step in enumerate(steps):
            for torn in _torn(step):
                others = [*steps[:place], *steps[place + 1 :]]
                states.add(_applied(before, [torn]))
                states.add(_applied(before, [*others, torn]))
        return sorted(states)


def _applied(data: bytes, steps: list[Step]) -> bytes:
    result = bytearray(data)
    for step in steps:
        if step.what == "resize":
            _resize(result, step.offset)
        else:
            _put(result, step.data, step.offset)
    return bytes(result)


def _torn(step: Step) -> Iterator[Step]:
    """Yield the beginnings and the ends of a write, and short ones with a byte amiss."""
    data, short = step.data, len(step.data) <= SHORT_BYTES
    for cut in range(1, len(data)) if short else (*TEARS_OF_LONG, *range(512, len(data), 512)):
        if 0 < cut < len(data):
            yield Step("write", step.node, offset=step.offset, data=data[:cut])
            yield Step("write", step.node, offset=step.offset + cut, data=data[cut:])
    for place in range(len(data)) if short else ():
        if data[place]:
            hole = data[:place] + b"\0" + data[place + 1 :]
            yield Step("write", step.node, offset=step.offset, data=hole)


def crashes(disk: LogDisk, first: int = 0) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield every disk that a power failure may leave, with the steps that came before it.

    Failures within the `first` steps are left out.

    Where a step changes nothing that is not durable, the disks of the step before stand for
    its own too, so marks must be judged by the step that is yielded.
    """
    pending = _Pending(disk)
    for done in range(len(disk.trace) + 1):
        for chosen in product(*pending.name_choices()) if done >= first else ():
            names = {name: node for name, node in chosen if node >= 0}
            nodes = sorted(set(names.values()))
            for states in product(*(pending.states(node) for node in nodes)):
                held = dict(zip(nodes, states, strict=True))
                yield done, {name: held[node] for name, node in names.items()}
        if done < len(disk.trace):
            pending.take(disk.trace[done])


def random_crash(disk: LogDisk, pick: Pick) -> tuple[int, dict[str, bytes]]:
    """Return one of those disks, by chance; bytes of a torn write may be garbage here, too."""
    pending = _Pending(disk)
    done = pick(len(disk.trace) + 1)
    for step in islice(disk.trace, done):
        pending.take(step)
    names = dict(choices[pick(len(choices))] for choices in pending.name_choices())
    content = {}
    for name, node in names.items():
        if node >= 0:
            data = pending.durable.get(node, b"")
            steps = pending.unsynced.get(node, [])
            content[name] = _applied(data, [s for step in steps for s in _fate(step, pick)])
    return done, content


def _fate(step: Step, pick: Pick) -> list[Step]:
    fate = pick(5)
    if fate == 0:
        return []
    if fate == 1 or step.what == "resize" or len(step.data) < 2:
        return [step]
    cut = 1 + pick(len(step.data) - 1)
    start = Step("write", step.node, offset=step.offset, data=step.data[:cut])
    end = Step("write", step.node, offset=step.offset + cut, data=step.data[cut:])
    if fate == 4:
        garbage = bytes(pick(256) for _ in range(min(len(end.data), 64)))
        return [start, Step("write", step.node, offset=end.offset, data=garbage)]
    return [start if fate == 2 else end]


# --- rotations, when the test wants them --------------------------------------------


class _Later:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def join(self, timeout_s: float | None = None) -> bool:
        call, self._call = self._call, None
        if call is not None:
            call()
        return True


class LaterRuntime(type(REAL)):  # type: ignore[misc]
    """Runs what is spawned when somebody waits for it: as late as it may be, and in order."""

    def spawn(self, call: Callable[[], object], *, name: str) -> Task:
        return _Later(call)


def later_runtime() -> Runtime:
    """Return a runtime for one history."""
    runtime: Runtime = LaterRuntime()
    return runtime
