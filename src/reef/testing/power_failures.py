"""Every state in which a power failure may leave a disk.

`reef.testing.disk.SimulatedDisk` records a trace of changes and syncs. `crashes(disk)` yields
the content of every disk that a power failure may leave after any number of those steps;
`random_crash` returns one of them. Of everything that was not synced:

- every write is kept, lost or torn: at any byte if it is short, at chosen ones if it is long;
- of a torn write, the beginning may be stored, or the end, or all but one byte; `random_crash`
  also stores garbage;
- a change of size is kept or lost;
- every name leads to the file of the last sync of its directory, or to any file since.

All of these are independent, write by write and name by name, which covers every reordering.
Two writes of the same bytes without a sync in between are rejected, because their order would
matter beyond that.

A sync that fails is final: the kernel may have marked the pages clean, so a later sync that
succeeds does not make their content durable. Only another write of the same bytes does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reef.testing.disk import SimulatedDisk


SHORT_BYTES = 512
TEARS_OF_LONG = (1, 8, 16, 17, 24, 40, 56, 72, 79, 80, 100)
"""Within and behind the header of a bbolt page and the body of a meta page."""
ROOT = 1
ABSENT = 0
"""Node number of a name that does not exist."""
Pick = Callable[[int], int]
"""Returns a number below the given one."""


@dataclass(frozen=True, slots=True)
class DiskStep:
    """One change or sync of a disk, or a mark that a test has set."""

    kind: str
    node: int = ABSENT
    """File or directory that a name leads to from here on."""
    folder: int = ABSENT
    name: str = ""
    offset: int = 0
    """Offset of a write; new size of a resize."""
    data: bytes = b""
    mark: Any = None

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(slots=True)
class DurableState:
    """Bytes of files and names in directories, by node number."""

    data: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def copy(self) -> "DurableState":
        return DurableState(dict(self.data), {n: dict(names) for n, names in self.names.items()})

    def content(self) -> dict[str, bytes]:
        """Return the files that can be reached from the root, by path."""
        return dict(self._walk(ROOT, ""))

    def _walk(self, folder: int, path: str) -> Iterator[tuple[str, bytes]]:
        for name, node in self.names[folder].items():
            if node in self.names:
                yield from self._walk(node, f"{path}/{name}")
            else:
                yield f"{path}/{name}", self.data.get(node, b"")


class Unsynced:
    """The durable state at a step, and the changes since that a power failure may take."""

    def __init__(self, durable: DurableState) -> None:
        self.durable = durable.copy()
        self._changes: dict[int, list[DiskStep]] = {}
        self._names: dict[int, dict[str, list[int]]] = {}
        self._dropped: dict[int, list[DiskStep]] = {}
        """Changes whose sync has failed: later syncs skip them."""
        self._dropped_names: dict[int, dict[str, list[int]]] = {}

    def apply(self, step: DiskStep) -> None:
        """Advance by one step."""
        match step.kind:
            case "write" | "resize":
                self._change(step)
            case "sync":
                self.durable.data[step.node] = applied(
                    self.durable.data.get(step.node, b""), self._changes.pop(step.node, [])
                )
            case "sync failed":
                changes = self._changes.pop(step.node, [])
                self._dropped.setdefault(step.node, []).extend(changes)
            case "directory":
                self.durable.names.setdefault(step.node, {})
            case "name":
                changed = self._names.setdefault(step.folder, {})
                changed.setdefault(step.name, []).append(step.node)
            case "sync names":
                self._sync_names(step.node)
            case "sync names failed":
                dropped = self._dropped_names.setdefault(step.node, {})
                for name, nodes in self._names.pop(step.node, {}).items():
                    dropped.setdefault(name, []).extend(nodes)

    def _change(self, step: DiskStep) -> None:
        for other in self._changes.get(step.node, []):
            if step.kind == other.kind == "write" and (
                step.offset < other.end and other.offset < step.end
            ):
                raise AssertionError(f"bytes at {step.offset} written twice without a sync")
        if step.node in self._dropped and step.kind == "write":
            self._dropped[step.node] = [
                left for other in self._dropped[step.node] for left in _outside(other, step)
            ]
        self._changes.setdefault(step.node, []).append(step)

    def _sync_names(self, folder: int) -> None:
        names = self.durable.names[folder]
        for name, nodes in self._names.pop(folder, {}).items():
            self._dropped_names.get(folder, {}).pop(name, None)
            names.pop(name, None)
            if nodes[-1] != ABSENT:
                names[name] = nodes[-1]

    def changes(self, node: int) -> list[DiskStep]:
        """Return the changes of a file that may be lost, in order."""
        return [*self._dropped.get(node, []), *self._changes.get(node, [])]

    def name_choices(self) -> list[list[tuple[int, str, int]]]:
        """Return for each name the files that it may lead to: directory, name, node."""
        return [
            [(folder, name, node) for node in sorted(self._nodes_of(folder, name))]
            for folder in sorted(self.durable.names)
            for name in sorted(
                self.durable.names[folder].keys()
                | self._names.get(folder, {}).keys()
                | self._dropped_names.get(folder, {}).keys()
            )
        ]

    def _nodes_of(self, folder: int, name: str) -> set[int]:
        return {
            self.durable.names[folder].get(name, ABSENT),
            *self._dropped_names.get(folder, {}).get(name, ()),
            *self._names.get(folder, {}).get(name, ()),
        }

    def named(self, chosen: Iterator[tuple[int, str, int]]) -> DurableState:
        """Return a state with these names, and the durable bytes."""
        state = DurableState(dict(self.durable.data), {n: {} for n in self.durable.names})
        for folder, name, node in chosen:
            if node != ABSENT:
                state.names[folder][name] = node
        return state

    def states(self, node: int) -> list[bytes]:
        """Return everything that a file may hold after a power failure."""
        steps, before = self.changes(node), self.durable.data.get(node, b"")
        states = {before}
        for kept in product((False, True), repeat=len(steps)):
            states.add(applied(before, [s for s, keep in zip(steps, kept, strict=True) if keep]))
        for place, step in enumerate(steps):
            for torn in _torn(step):
                others = [*steps[:place], *steps[place + 1 :]]
                states.add(applied(before, [torn]))
                states.add(applied(before, [*others, torn]))
        return sorted(states)

    def random_state(self, pick: Pick) -> DurableState:
        """Return one of the states, by chance; bytes of a torn write may be garbage."""
        chosen = (choices[pick(len(choices))] for choices in self.name_choices())
        state = self.named(chosen)
        for node in sorted(_reachable(state)):
            steps = [s for step in self.changes(node) for s in _fate(step, pick)]
            state.data[node] = applied(state.data.get(node, b""), steps)
        return state


def crashes(disk: "SimulatedDisk", first: int = 0) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield the content of every disk that a power failure may leave, after how many steps.

    Failures within the `first` steps are omitted.
    """
    unsynced = Unsynced(disk.base)
    for done in range(len(disk.trace) + 1):
        for chosen in product(*unsynced.name_choices()) if done >= first else ():
            state = unsynced.named(iter(chosen))
            nodes = sorted(_reachable(state))
            for held in product(*(unsynced.states(node) for node in nodes)):
                state.data.update(zip(nodes, held, strict=True))
                yield done, state.content()
        if done < len(disk.trace):
            unsynced.apply(disk.trace[done])


def random_crash(
    disk: "SimulatedDisk", pick: Pick, done: int | None = None
) -> tuple[int, dict[str, bytes]]:
    """Return one of those contents, by chance: after `done` steps, or after any number."""
    unsynced = Unsynced(disk.base)
    done = pick(len(disk.trace) + 1) if done is None else done
    for step in islice(disk.trace, done):
        unsynced.apply(step)
    return done, unsynced.random_state(pick).content()


def _reachable(state: DurableState) -> set[int]:
    """Return the files that have a name below the root."""
    files: set[int] = set()
    folders = [ROOT]
    while folders:
        for node in state.names[folders.pop()].values():
            (folders.append if node in state.names else files.add)(node)
    return files


# --- bytes --------------------------------------------------------------------------


def put(target: bytearray, data: bytes, offset: int) -> None:
    """Write bytes at an offset; the target grows by zeros as needed."""
    if len(target) < offset + len(data):
        resize(target, offset + len(data))
    target[offset : offset + len(data)] = data


def resize(target: bytearray, size: int) -> None:
    """Cut the target, or extend it by zeros."""
    del target[size:]
    target.extend(bytes(size - len(target)))


def applied(data: bytes, steps: list[DiskStep]) -> bytes:
    """Return bytes after some changes."""
    result = bytearray(data)
    for step in steps:
        if step.kind == "resize":
            resize(result, step.offset)
        else:
            put(result, step.data, step.offset)
    return bytes(result)


def _write(step: DiskStep, offset: int, data: bytes) -> DiskStep:
    return DiskStep("write", step.node, offset=offset, data=data)


def _outside(step: DiskStep, cover: DiskStep) -> Iterator[DiskStep]:
    """Yield the parts of a change that another write does not overwrite."""
    if step.kind != "write" or step.end <= cover.offset or cover.end <= step.offset:
        yield step
        return
    if step.offset < cover.offset:
        yield _write(step, step.offset, step.data[: cover.offset - step.offset])
    if cover.end < step.end:
        yield _write(step, cover.end, step.data[cover.end - step.offset :])


def _torn(step: DiskStep) -> Iterator[DiskStep]:
    """Yield the beginnings and the ends of a write, and short ones without one of their bytes."""
    data, short = step.data, len(step.data) <= SHORT_BYTES
    for cut in range(1, len(data)) if short else (*TEARS_OF_LONG, *range(512, len(data), 512)):
        if 0 < cut < len(data):
            yield _write(step, step.offset, data[:cut])
            yield _write(step, step.offset + cut, data[cut:])
    for place in range(len(data)) if short else ():
        if data[place]:
            yield _write(step, step.offset, data[:place] + b"\0" + data[place + 1 :])


def _fate(step: DiskStep, pick: Pick) -> list[DiskStep]:
    fate = pick(5)
    if fate == 0:
        return []
    if fate == 1 or step.kind == "resize" or len(step.data) < 2:
        return [step]
    cut = 1 + pick(len(step.data) - 1)
    start = _write(step, step.offset, step.data[:cut])
    end = _write(step, step.offset + cut, step.data[cut:])
    if fate == 4:
        garbage = bytes(pick(256) for _ in range(min(len(end.data), 64)))
        return [start, _write(step, end.offset, garbage)]
    return [start if fate == 2 else end]
