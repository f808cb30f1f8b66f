"""From state to state: whose request takes effect next, and what becomes of it.

A state is a tuple of numbers: of the bucket, of each process as it stands, of the requests that
nobody waits for, and the counts. What a request makes of a bucket is looked up in `Buckets`, what
an answer makes of a process in its `Part`: both are worked out by the real code, once. What one
process can do depends on the bucket and itself alone, so that is worked out once for each pair,
too (`reef.testing.moves`); this module puts the processes together.

One step is: a request takes effect, and its process goes on until it has sent the next one. A late
request lands at any later step; so do those that a dying process had under way, each or not.
"""

from collections.abc import Callable, Iterator

from reef.testing.buckets import Answers, Buckets, Requests
from reef.testing.explored import ExploredSimulation
from reef.testing.moves import Actor, Counts, Move
from reef.testing.processes import Part, Repertoire
from reef.testing.scheduler import Deadlock
from reef.testing.simulation import Chaos
from reef.testing.states import Footprint

__all__ = ["State", "Walk"]

State = tuple[int, ...]
Way = tuple[tuple[int | None, Move], ...]
"""A step, and the deaths right after it."""
BUCKET, LATE, COUNTS, LAST, SWITCHES, LOCALS = range(6)


class Walk:
    """The graph of a scenario's states, worked out as it is asked for."""

    def __init__(
        self,
        scenario: Callable[[ExploredSimulation], object],
        *,
        chaos: Chaos,
        footprint: Footprint,
        switches_max: int | None = None,
        reduced: bool = True,
    ) -> None:
        self._bounded = switches_max is not None
        self._reduced = reduced
        self._repertoire = Repertoire(scenario, chaos)
        self._requests, self._answers = Requests(footprint), Answers()
        self._buckets = Buckets(self._requests, self._answers)
        self._late: list[tuple[int, ...]] = [()]
        self._late_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._begin(chaos, footprint, switches_max or 0)

    def _begin(self, chaos: Chaos, footprint: Footprint, switches: int) -> None:
        stage = self._repertoire.stage()
        sim = stage.sim
        self.forgets = sim.witness is not None
        deleter = footprint.deleter[0] if footprint.deleter else None
        names = [process.name for process in sim.processes]
        self._deleter = names.index(deleter) if deleter in names else None
        self._counts = Counts(chaos, stage.start_s, sim.passing_s)
        self.actors = [
            Actor(
                process.name,
                Part(self._repertoire, place, self._requests, self._answers),
                self._buckets,
                self._counts,
                mortal=sim.mortal(process),
                timed=process in sim.timed,
                deletes=process.name == deleter,
                forgets=self.forgets,
                reduced=self._reduced,
            )
            for place, process in enumerate(sim.processes)
        ]
        bucket = self._buckets.number(sim.bucket.objects)
        stage.close()
        roots = [actor.number(actor.part.root) for actor in self.actors]
        root = [bucket, 0, self._counts.start, len(self.actors), switches, *roots]
        self._settle(root)
        self.root: State = tuple(root)

    @property
    def runs(self) -> int:
        """How often a scenario was performed."""
        return self._repertoire.runs

    def close(self) -> None:
        for actor in self.actors:
            actor.part.close()

    # --- the graph ----------------------------------------------------------------
    def steps(self, state: State) -> list[State]:
        """Return the states that one step, and perhaps deaths right after it, lead to."""
        return [after for after, _ in self._steps(state)]

    def without_switches(self, state: State) -> tuple[State, int]:
        """Return a state without how many switches are left, and that."""
        if not self._bounded:
            return state, 0
        return (*state[:SWITCHES], *state[LOCALS:]), state[SWITCHES]

    def told(self, state: State, number: int) -> str:
        """Return what happens on the way to one of the states after this one."""
        moves = [
            f"{'bucket' if place is None else move.who or self.actors[place].name:<24} {move.told}"
            for place, move in self._steps(state)[number][1]
        ]
        return "\n".join(moves)

    def is_end(self, state: State) -> bool:
        """Whether everything has ended; the error, if something broke on the way here."""
        for actor, number in self._of(state):
            local = actor.locals[number]
            if local.node.error is not None:
                raise local.node.error
            if not local.ended:
                return False
        return state[LATE] == 0

    def end_key(self, state: State) -> object:
        """Return what tells the ends apart, for the scenario's checks."""
        nodes = [actor.locals[number].node for actor, number in self._of(state)]
        return state[BUCKET], *(node.witness if self.forgets else node for node in nodes)

    def check(self, state: State) -> None:
        """Let the scenario look at an end."""
        stage = self._repertoire.stage()
        try:
            ends = [(actor.part, actor.locals[number].node) for actor, number in self._of(state)]
            if stage.sim.recall is not None:
                stage.sim.recall([node.witness for _, node in ends])
            else:
                for part, node in ends:
                    part.perform(node, stage)
            stage.end(self._buckets.objects(state[BUCKET]), self._counts.now_s(state[COUNTS]))
        finally:
            stage.close()

    # --- inside -------------------------------------------------------------------
    def _of(self, state: State) -> Iterator[tuple[Actor, int]]:
        return zip(self.actors, state[LOCALS:], strict=True)

    def _steps(self, state: State) -> list[tuple[State, Way]]:
        everybody: list[tuple[int, int | None]] = [(n, None) for n in range(len(self.actors))]
        found: list[tuple[State, Way]] = []
        if state == self.root or not self._reduced:
            found += self._with_deaths(state, (), everybody)[1:]
        for place, move in self._moves(state):
            after, gone_on = self._after(state, place, move)
            found += self._with_deaths(after, ((place, move),), gone_on)
        return found

    def _with_deaths(
        self, state: State, way: Way, gone_on: list[tuple[int, int | None]]
    ) -> list[tuple[State, Way]]:
        """Return a state, and those in which some died of those who went on to come to it."""
        found = [(state, way)]
        if not self._counts.may_die(state[COUNTS]):
            return found
        for place, before in gone_on:
            for known, known_way in list(found):
                local, bucket, counts = known[LOCALS + place], known[BUCKET], known[COUNTS]
                for death in self.actors[place].deaths(local, bucket, counts, before):
                    after, _ = self._after(known, place, death)
                    found.append((after, (*known_way, (place, death))))
        return found

    def _moves(self, state: State) -> list[tuple[int | None, Move]]:
        """Return all that can happen next; the place is None where no process does it."""
        bucket, counts = state[BUCKET], state[COUNTS]
        found: list[tuple[int | None, Move]] = []
        for place, actor in enumerate(self.actors):
            moves = actor.moves(state[LOCALS + place], bucket, counts)
            if moves.first:
                return [(place, move) for move in moves.all]
            found += [(place, move) for move in moves.all]
        found += [(None, self._landing(state, request)) for request in self._late[state[LATE]]]
        if self._counts.may_pass(counts):
            passed = Move(bucket, 0, counts=self._counts.passed(counts), told="time passes")
            found.append((None, passed))
        if not found:
            names = [a.name for a, number in self._of(state) if not a.locals[number].ended]
            raise Deadlock(f"all wait for each other: {', '.join(names)}")
        if self._bounded and state[SWITCHES] <= 0:
            return [one for one in found if one[0] == state[LAST]] or found
        return found

    def _landing(self, state: State, request: int) -> Move:
        bucket, _ = self._buckets.apply(state[BUCKET], request, self._counts.now_s(state[COUNTS]))
        told = f"late   {self._requests.values[request].what}"
        return Move(bucket, 0, landed=request, counts=state[COUNTS], told=told)

    def _after(
        self, state: State, place: int | None, move: Move
    ) -> tuple[State, list[tuple[int, int | None]]]:
        """Return where a step leads, and who went on by it, from where."""
        after = list(state)
        after[BUCKET], after[COUNTS] = move.bucket, move.counts
        gone_on: list[tuple[int, int | None]] = []
        if place is not None:
            after[LOCALS + place] = move.local
            gone_on.append((place, state[LOCALS + place]))
        if move.late or move.landed is not None:
            late = [*self._late[state[LATE]], *move.late]
            if move.landed is not None:
                late.remove(move.landed)
            after[LATE] = self._late_number(late)
        if self._has_gone(place, move.local):
            after[BUCKET] = self._buckets.later(move.bucket)
        if after[BUCKET] != state[BUCKET] or move.late:
            gone_on += self._settle(after)
        if self._bounded and not move.free:
            self._count_switch(state, place, after)
        return tuple(after), gone_on

    def _has_gone(self, place: int | None, local: int) -> bool:
        """Whether this was the deleter's last step."""
        if place is None or place != self._deleter or not self._reduced:
            return False
        return self.actors[place].locals[local].gone

    def _settle(self, after: list[int]) -> list[tuple[int, int]]:
        """Take the steps of which there is just one to take, and that can come first.

        Returns who went on by it, from where.
        """
        gone_on: list[tuple[int, int]] = []
        if not self._reduced:
            return gone_on
        for place, actor in enumerate(self.actors):
            before = after[LOCALS + place]
            local, after[BUCKET] = actor.settled(before, after[BUCKET], after[COUNTS])
            if local != before:
                after[LOCALS + place] = local
                gone_on.append((place, before))
        if after[LATE]:
            late = self._late[after[LATE]]
            left = [one for one in late if not self._buckets.is_free(after[BUCKET], one)]
            if len(left) < len(late):
                after[LATE] = self._late_number(left)
        return gone_on

    def _late_number(self, requests: list[int]) -> int:
        late = tuple(sorted(requests))
        number = self._late_numbers.get(late)
        if number is None:
            number = self._late_numbers[late] = len(self._late)
            self._late.append(late)
        return number

    def _count_switch(self, state: State, place: int | None, after: list[int]) -> None:
        """Leaving a process that could go on is a switch; what the world does is one too."""
        last = state[LAST]
        if place != last and last < len(self.actors):
            after[SWITCHES] -= not self.actors[last].locals[state[LOCALS + last]].waits
        if place is not None:
            after[LAST] = place
