"""What one process can do next, given the bucket.

Some steps are not tried in all orders, because their order makes no difference (`Footprint` says
where). `reduced=False` tries them all; the tests compare the ends.

- A call of a gather shares no memory with anybody until it ends: if its request is private, or asks
  for what cannot change any more, it goes first. So does a process of which that is true of all
  strands: whatever others do, before or after, comes to the same.
- Of reads in one gather, the first takes effect first: they commute with each other, and whoever
  deletes does so in order too.
- The answer is taken in together with the effect if no other request of the process is under way:
  in between, others could do nothing that either side would notice. If another answer waits to be
  taken in, that happens before (and may as well happen at once) or after.
- A late request for a slot that is filled for good has landed: it changes nothing whenever it does.
- A process dies only right after a step of its own, and only if something is left that an earlier
  death would not have left: a promise (the witness has changed), or a request that it has just sent
  and that lands. All that others did between that step and a later death, they would have done
  after it; and a write that took effect before the death is one that lands after it. To die between
  two promises, without a step in between that others could notice, leaves the same bucket and
  fewer promises than to die after both, and is not tried.

Reads have no faults of their own: a read whose answer is lost is asked again, and so is a read that
comes later. Nor have private writes: nobody else would notice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

from reef.errors import UnavailableError
from reef.stores.base import Outcome, WriteResult
from reef.testing.buckets import Buckets
from reef.testing.processes import Asked, Node, Part
from reef.testing.simulation import Chaos
from reef.testing.states import Fate

__all__ = ["Actor", "Counts", "Local", "Move", "Moves"]

FAULT, CRASH = 2, 2 << 10
"""The counts of a state are one number: whether time has passed, faults, crashes."""


class Counts:
    """How much has gone wrong, how much may, and what time it is."""

    def __init__(self, chaos: Chaos, start_s: float, passing_s: float) -> None:
        self._times = (start_s, start_s + passing_s)
        self.start = int(passing_s == 0)
        self.fates = [
            *([Fate.LOST] if chaos.lost_answer else []),
            *([Fate.FAILED] if chaos.fail_before else []),
            *([Fate.LATE] if chaos.late else []),
            *([Fate.CONFLICT] if chaos.conflict else []),
        ]
        self._faults_max = chaos.faults_max if self.fates else 0
        self._crashes_max = chaos.crashes_max if chaos.crash else 0

    def now_s(self, counts: int) -> float:
        return self._times[counts & 1]

    def may_pass(self, counts: int) -> bool:
        """Whether time has still to pass."""
        return not counts & 1

    def passed(self, counts: int) -> int:
        return counts | 1

    def may_fail(self, counts: int) -> bool:
        return counts // FAULT % (CRASH // FAULT) < self._faults_max

    def may_die(self, counts: int) -> bool:
        return counts // CRASH < self._crashes_max

    def context(self, counts: int) -> int:
        """Return what of the counts decides what a process can do."""
        return counts & 1 | self.may_fail(counts) << 1 | self.may_die(counts) << 2


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A process as it stands: a node, and answers that it has not taken in."""

    node: Node
    untaken: tuple[tuple[Asked, int], ...]
    asked: tuple[Asked, ...]
    ended: bool
    """Whether a run need not wait for it."""
    gone: bool

    @property
    def waits(self) -> bool:
        """Whether it has nothing to do."""
        return not self.asked and not self.untaken


@dataclass(frozen=True, slots=True)
class Move:
    """One step, and where it leads."""

    bucket: int
    local: int
    counts: int
    late: tuple[int, ...] = ()
    """Requests that will land later."""
    landed: int | None = None
    """The late request that lands by this step."""
    free: bool = False
    """Whether it makes no difference when it is taken."""
    who: str = ""
    told: str = ""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a process can do; `first` if that may come before what the others do."""

    all: tuple[Move, ...]
    first: bool


class Actor:
    """One process: where it can stand, by number, and what it can do there."""

    def __init__(
        self,
        name: str,
        part: Part,
        buckets: Buckets,
        counts: Counts,
        *,
        mortal: bool,
        timed: bool,
        deletes: bool,
        forgets: bool,
        reduced: bool,
    ) -> None:
        self.name = name
        self.part = part
        self._buckets = buckets
        self._counts = counts
        self._mortal = mortal
        self._timed = timed
        """Whether time may pass between an effect and its answer."""
        self._deletes = deletes
        self._forgets = forgets
        self._reduced = reduced
        self.locals: list[Local] = []
        self._numbers: dict[object, int] = {}
        self._moves: dict[tuple[int, int, int], Moves] = {}
        self._settled: dict[tuple[int, int, int], tuple[int, int]] = {}

    # --- where it stands ----------------------------------------------------------
    def number(self, node: Node, untaken: tuple[tuple[Asked, int], ...] = ()) -> int:
        """Return the number of a process at a node; of one that has ended, by what it told."""
        if node.done and not node.asked:
            return self._gone(node)
        key = (node, untaken)
        number = self._numbers.get(key)
        if number is None:
            arrived = {asked.name for asked, _ in untaken}
            asked = tuple(one for one in node.asked if one.name not in arrived)
            number = self._add(key, Local(node, untaken, asked, node.done, gone=False))
        return number

    def _gone(self, node: Node) -> int:
        """Return the number of a process that does nothing any more."""
        key = ("told", node.witness) if self._forgets and node.error is None else (node, "gone")
        number = self._numbers.get(key)
        return self._add(key, Local(node, (), (), True, gone=True)) if number is None else number

    def _add(self, key: object, local: Local) -> int:
        self._numbers[key] = len(self.locals)
        self.locals.append(local)
        return len(self.locals) - 1

    # --- what it can do -----------------------------------------------------------
    def moves(self, number: int, bucket: int, counts: int) -> Moves:
        """Return what the process can do."""
        # Counts are part of what a move leads to, so they are part of the key as a whole.
        key = (number, bucket, counts)
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = self._all(number, bucket, counts)
        return moves

    def settled(self, number: int, bucket: int, counts: int) -> tuple[int, int]:
        """Return where the process and the bucket come to without a decision."""
        key = (number, bucket, self._counts.context(counts))
        settled = self._settled.get(key)
        if settled is None:
            settled = self._settled[key] = self._settle(number, bucket, counts)
        return settled

    def deaths(
        self, number: int, bucket: int, counts: int, before: int | None = None
    ) -> Iterator[Move]:
        """Yield what the process leaves if it dies now, where it could not have left it before."""
        local = self.locals[number]
        if not (self._mortal and self._counts.may_die(counts)):
            return
        if local.gone or local.node.error is not None:
            return
        sent = [one.request for one in local.asked if one.writes]
        sent = [request for request in sent if not self._is_free(bucket, request)]
        fresh = None
        if before is not None and self.locals[before].node.witness == local.node.witness:
            fresh = set(sent) - {one.request for one in self.locals[before].asked}
        gone = self._gone(local.node)
        for landing in chain.from_iterable(combinations(sent, n) for n in range(len(sent) + 1)):
            if fresh is None or not fresh.isdisjoint(landing):
                told = f"death  crash, {len(landing)} requests under way"
                yield Move(bucket, gone, counts + CRASH, landing, told=told)

    # --- inside -------------------------------------------------------------------
    def _all(self, number: int, bucket: int, counts: int) -> Moves:
        local = self.locals[number]
        if local.gone:
            return Moves((), first=False)
        if not self._reduced:
            return Moves(tuple(self._each(local, bucket, counts)), first=False)
        first = self._first(local, bucket, counts)
        moves = first or self._each(local, bucket, counts)
        return Moves(tuple(self._on(move) for move in moves), first=bool(first))

    def _on(self, move: Move) -> Move:
        """Go on from where a step leads as far as there is nothing to decide."""
        local, bucket = self.settled(move.local, move.bucket, move.counts)
        return replace(move, local=local, bucket=bucket)

    def _settle(self, number: int, bucket: int, counts: int) -> tuple[int, int]:
        while True:
            first = self._first(self.locals[number], bucket, counts)
            if len(first) != 1:
                return number, bucket
            number, bucket = first[0].local, first[0].bucket

    def _first(self, local: Local, bucket: int, counts: int) -> list[Move]:
        """Return steps that can come before everything that others do, if there are such."""
        free = [one for one in local.asked if self._is_free(bucket, one.request)]
        for one in free:
            if one.gather:
                return self._met(local, one, bucket, counts)
        feels_time = self._timed and self._counts.may_pass(counts)
        if len(free) < len(local.asked) or (local.untaken and feels_time):
            return []
        return self._each(local, bucket, counts)

    def _each(self, local: Local, bucket: int, counts: int) -> list[Move]:
        gathers: set[str] = set()
        moves: list[Move] = []
        for one in local.asked:
            if one.gather and not one.writes and self._reduced:
                if one.gather in gathers:
                    continue  # an earlier read of the same gather comes first
                gathers.add(one.gather)
            moves += self._met(local, one, bucket, counts)
        for one, answer in local.untaken:
            rest = tuple(other for other in local.untaken if other[0] is not one)
            number = self._taken(local, one, answer, rest, counts)
            told = f"hears  {self._buckets.what(one.request)}"
            moves.append(Move(bucket, number, counts, free=True, who=one.name.decode(), told=told))
        return moves

    def _met(self, local: Local, one: Asked, bucket: int, counts: int) -> list[Move]:
        """Return what can become of a request."""
        fates = [Fate.OK]
        private = self._buckets.private(bucket, one.request)
        if one.writes and not private and self._counts.may_fail(counts):
            fates += self._counts.fates
        return [self._befall(local, one, bucket, counts, fate) for fate in fates]

    def _befall(self, local: Local, one: Asked, bucket: int, counts: int, fate: Fate) -> Move:
        now_s = self._counts.now_s(counts)
        free = self._is_free(bucket, one.request)
        after, answer = bucket, -1
        if fate in (Fate.OK, Fate.LOST):
            after, answer = self._buckets.apply(bucket, one.request, now_s)
        if fate is Fate.CONFLICT:
            answer = self._buckets.answer(WriteResult(self._buckets.conflict(one.request)))
        elif fate is not Fate.OK:
            cause = UnavailableError(f"no answer: {self._buckets.what(one.request)}")
            answer = self._buckets.answer(WriteResult(Outcome.UNKNOWN, cause=cause))
        if self._is_apart(local, one, counts):
            untaken = sorted((*local.untaken, (one, answer)), key=lambda u: u[0].name)
            number = self.number(local.node, tuple(untaken))
        else:
            number = self._taken(local, one, answer, local.untaken, counts)
        late = (one.request,) if fate is Fate.LATE else ()
        told = f"store  {self._buckets.what(one.request)} {fate.value}"
        faults = counts + FAULT * (fate is not Fate.OK)
        return Move(after, number, faults, late, None, free, one.name.decode(), told)

    def _is_free(self, bucket: int, request: int) -> bool:
        return self._buckets.is_free(bucket, request, deleter=self._deletes)

    def _is_apart(self, local: Local, one: Asked, counts: int) -> bool:
        """Whether the answer is taken in by a step of its own."""
        if not self._reduced or (self._timed and self._counts.may_pass(counts)):
            return True
        return not one.gather and len(local.asked) > 1

    def _taken(
        self,
        local: Local,
        one: Asked,
        answer: int,
        untaken: tuple[tuple[Asked, int], ...],
        counts: int,
    ) -> int:
        edge = (one.name, answer, self._counts.now_s(counts))
        return self.number(self.part.after(local.node, edge), untaken)
