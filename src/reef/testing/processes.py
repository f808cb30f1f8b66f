"""What a process asks for next, for everything that it can have been told.

A process is a function of what it was told, so that what it does is found out once for each
history of its own, however many histories of the whole that one is part of. It is found out by
running the real code: a scenario is performed, of which only this process goes on, and it is given
the answers of its history one by one. That gives a node, with the requests that the process has
sent and that have no answer. From then on the node stands for the process.

Nodes are told apart by chains (see `reef.testing.states`), so that one node can be come to in
several ways, where calls of a gather got their answers in different orders.

A performance that has come to a node is kept for the next answer; few are kept, and where there is
none the history is performed from the start.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from reef.testing.buckets import Answers, Requests
from reef.testing.explored import ExploredSimulation, Stage
from reef.testing.simulation import Chaos

__all__ = ["Asked", "Edge", "Node", "Part", "Repertoire"]

KEPT = 200

Edge = tuple[bytes, int, float]
"""A strand is given an answer, by its number, at some time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a strand has sent."""

    name: bytes
    request: int
    writes: bool
    gather: str
    """Of a call of a gather: which."""


@dataclass(slots=True, eq=False)
class Node:
    """A process after some history of its own."""

    asked: tuple[Asked, ...]
    done: bool
    """Whether a run need not wait for it."""
    witness: Hashable
    error: BaseException | None = None
    before: "tuple[Node, Edge] | None" = None
    """One way to come here."""
    after: "dict[Edge, Node]" = field(default_factory=dict)

    def history(self) -> list[Edge]:
        edges: list[Edge] = []
        node = self
        while node.before is not None:
            node, edge = node.before
            edges.append(edge)
        return edges[::-1]


class Repertoire:
    """Performances of a scenario, and what all its processes have in common."""

    def __init__(self, scenario: Callable[[ExploredSimulation], object], chaos: Chaos) -> None:
        self._scenario = scenario
        self._chaos = chaos
        self.runs = 0

    def stage(self) -> Stage:
        self.runs += 1
        return Stage(self._scenario, self._chaos)


class Part:
    """One process, as a graph that grows as it is asked for."""

    def __init__(
        self, repertoire: Repertoire, place: int, requests: Requests, answers: Answers
    ) -> None:
        self._repertoire = repertoire
        self._place = place
        self._requests = requests
        self._answers = answers
        self._nodes: dict[bytes, Node] = {}
        self._kept: dict[Node, Stage] = {}
        self.root = self._begin()

    def __len__(self) -> int:
        return len(self._nodes)

    def after(self, node: Node, edge: Edge) -> Node:
        """Return the node that an answer leads to."""
        found = node.after.get(edge)
        if found is None:
            stage = self._kept.pop(node, None) or self.perform(node)
            found = node.after[edge] = self._look(stage, (node, edge))
        return found

    def perform(self, node: Node, stage: Stage | None = None) -> Stage:
        """Bring the process to a node, in a new performance or a given one."""
        if stage is None:
            stage = self._repertoire.stage()
        stage.start(stage.sim.processes[self._place])
        for edge in node.history():
            self._give(stage, edge)
        return stage

    def close(self) -> None:
        for stage in self._kept.values():
            stage.close()
        self._kept.clear()

    # --- inside -------------------------------------------------------------------
    def _begin(self) -> Node:
        stage = self._repertoire.stage()
        return self._look(stage, None)

    def _give(self, stage: Stage, edge: Edge) -> None:
        name, answer, now_s = edge
        stage.give(stage.sim.processes[self._place], name, self._answers.values[answer], now_s)

    def _look(self, stage: Stage, before: tuple[Node, Edge] | None) -> Node:
        error: BaseException | None = None
        owner = stage.sim.processes[self._place]
        try:
            if before is None:
                stage.start(owner)
            else:
                self._give(stage, before[1])
        except Exception as caught:
            error = caught.with_traceback(None)
        key = stage.sim.scheduler.chain_of(owner).whole()
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = self._node(stage, error, before)
        self._keep(node, stage)
        return node

    def _node(
        self, stage: Stage, error: BaseException | None, before: tuple[Node, Edge] | None
    ) -> Node:
        sim, owner = stage.sim, stage.sim.processes[self._place]
        tracks = [sim.scheduler.tracks[strand] for strand in sim.scheduler.asking(owner)]
        asked = [
            Asked(track.name, self._requests.number(sent), sent.writes, track.gather)
            for track in sorted(tracks, key=lambda track: track.name)
            if (sent := track.request) is not None
        ]
        witness = None if sim.witness is None else sim.witness()
        return Node(tuple(asked), sim.scheduler.is_done(owner), witness, error, before)

    def _keep(self, node: Node, stage: Stage) -> None:
        if node in self._kept or node.error is not None or not node.asked:
            stage.close()
            return
        self._kept[node] = stage
        if len(self._kept) > KEPT:
            self._kept.pop(next(iter(self._kept))).close()
