"""Who goes next in an exploration: one question per step, none where it makes no difference.

Two steps that commute are not tried in both orders (sleep sets, Godefroid 1996): what was tried
at a decision stays asleep behind the later options there, until a step is taken that it does not
commute with. Steps commute if they belong to different processes, do not touch the same object
with a write among them, and are not both mishaps, of which there are only so many. A state that
was seen is cut only if no more was asleep when it was seen. A bound on switches counts orders that
come to the same, so with such a bound nothing sleeps.

Deaths come first among the options. One that could have been died before, with the same left
behind, was an option then, and is none again: what the others did in between, they did after it.
"""

from collections.abc import Callable, Iterator
from itertools import chain as chained
from itertools import combinations
from typing import TYPE_CHECKING

from reef.testing.scheduler import Owner, Scheduler, Strand
from reef.testing.states import Chain, Cut, Fate, Track, digest

if TYPE_CHECKING:
    from reef.testing.explored import ExploredSimulation

__all__ = ["Death", "ExploredScheduler"]

Death = tuple[Strand, ...]
"""The requests of a dying process that will land all the same."""
Option = tuple[Strand, Fate | Death]


class ExploredScheduler(Scheduler):
    """Asks once per step: whose request, and what becomes of it."""

    def __init__(self, world: "ExploredSimulation", steps_max: int) -> None:
        super().__init__(world.choices, steps_max)
        self._explored = world
        self.tracks: dict[Strand, Track] = {}
        self.chains: dict[Owner, Chain] = {}
        self._last: Owner | None = None
        self._settling = False
        self._offered: set[tuple[object, ...]] = set()
        self._asleep: dict[bytes, Option] = {}

    def spawn(
        self, owner: Owner, call: Callable[[], object], name: str, *, daemon: bool = False
    ) -> Strand:
        strand = super().spawn(owner, call, name, daemon=daemon)
        number = sum(other.owner is owner for other in self.tracks)
        self.tracks[strand] = Track(f"{name}:{number}".encode(), self.chain_of(owner))
        return strand

    def spawn_alone(
        self, owner: Owner, call: Callable[[], object], chain: Chain, gather: object
    ) -> Strand:
        """Start one call of a gather."""
        strand = super().spawn(owner, call, f"{owner.name}/gather", daemon=True)
        self.tracks[strand] = Track(chain.name.encode(), chain, gather)
        return strand

    def chain_of(self, owner: Owner) -> Chain:
        if owner not in self.chains:
            self.chains[owner] = Chain(f"{len(self.chains)}-{owner.name}")
        return self.chains[owner]

    def settle(self) -> None:
        """Let everybody come as far as its first request, in the order of their starts."""
        self._settling = True
        while any(self._goes_unasked(strand) for strand in self._ready):
            self._step(None)
        self._settling = False

    def others_ready(self, strand: Strand) -> bool:
        return any(other.owner is strand.owner for other in self._ready)

    def _next(self) -> Strand | None:
        options = self._options()
        awake = [option for option in options if self._name(option) not in self._asleep]
        if not awake:
            raise Cut
        place = 0
        if len(options) > 1:
            self._explored.look(self._last, frozenset(self._asleep))
            place = self.choices.pick(len(awake)) if len(awake) > 1 else 0
        self._fall_asleep(awake, place)
        strand, fate = awake[place]
        self._note_switch(strand, options)
        if not isinstance(fate, Fate):
            self._explored.die(strand.owner, fate)
            return None
        self._ready.remove(strand)
        track = self.tracks[strand]
        track.fate = fate
        if track.request is None and not track.answer:
            how = b"timed out" if strand.timed_out else b"on"
            track.chain.absorb(track.name, how, self._explored.clock())
        return strand

    def _options(self) -> list[Option]:
        unasked = self._unasked()
        if unasked:
            return [(strand, Fate.OK) for strand in unasked[: 1 if self._settling else None]]
        strands = self._within_bound()
        deaths: list[Option] = []
        asked: set[Owner] = set()
        for strand in strands:
            if strand.owner not in asked and self.tracks[strand].request is not None:
                asked.add(strand.owner)
                deaths += [(strand, death) for death in self._deaths(strand.owner)]
        return deaths + [
            (strand, fate)
            for strand in strands
            for fate in self._explored.fates(self.tracks[strand])
        ]

    # --- what need not be tried again ---------------------------------------------
    def _fall_asleep(self, awake: list[Option], place: int) -> None:
        if self._explored.bounded or self._settling:
            return
        tried = {self._name(option): option for option in awake[:place]}
        self._asleep = {
            name: option
            for name, option in {**self._asleep, **tried}.items()
            if self._commute(option, awake[place])
        }

    def _name(self, option: Option) -> bytes:
        strand, fate = option
        track = self.tracks[strand]
        own = strand.owner is not self._explored.world or track.request is None
        name = track.name if own or track.request is None else track.request.identity
        if isinstance(fate, Fate):
            return digest(strand.owner.name.encode(), name, fate.name.encode())
        landing = [self.tracks[other].name for other in fate]
        return digest(strand.owner.name.encode(), b"dies", *landing)

    def _commute(self, one: Option, other: Option) -> bool:
        (strand, fate), (another, another_fate) = one, other
        if strand.owner is another.owner and (
            strand is another or strand.owner is not self._explored.world
        ):
            return False
        if fate is not Fate.OK and another_fate is not Fate.OK:
            return False
        if not isinstance(fate, Fate) or not isinstance(another_fate, Fate):
            return True
        request, another_request = self.tracks[strand].request, self.tracks[another].request
        if request is None or another_request is None:
            return True
        return not request.meets(another_request)

    def _unasked(self) -> list[Strand]:
        """Return strands among which alone the order matters now, if there are such."""
        if self._settling:
            return [strand for strand in self._ready if self._goes_unasked(strand)]
        by_owner: dict[Owner, list[Strand]] = {}
        for strand in self._ready:
            track = self.tracks[strand]
            woken = track.request is None and not track.answer
            if self._goes_unasked(strand) and (track.alone or woken):
                return [strand]
            by_owner.setdefault(strand.owner, []).append(strand)
        for strands in by_owner.values():
            if all(self._goes_unasked(strand) for strand in strands):
                return strands
        return []

    def _goes_unasked(self, strand: Strand) -> bool:
        track = self.tracks[strand]
        if track.answer and self._explored.feels_time(strand.owner):
            return False
        return track.request is None or self._explored.is_free(track.request)

    def _deaths(self, owner: Owner) -> Iterator[Death]:
        if not self._explored.may_die(owner):
            return iter(())
        sent = [s for s in self._ready if s.owner is owner and self._is_write(s)]
        deaths = chained.from_iterable(combinations(sent, n) for n in range(len(sent) + 1))
        return (death for death in deaths if self._is_new(owner, death))

    def _is_new(self, owner: Owner, death: Death) -> bool:
        """Whether this process could not have died like this before, with the same left behind.

        If it could, that death was offered then, and the others did the same after it.
        """
        landing = frozenset(self.tracks[strand].request for strand in death)
        left = (owner, self._explored.left_by(owner), landing)
        is_new = left not in self._offered
        self._offered.add(left)
        return is_new

    def _is_write(self, strand: Strand) -> bool:
        request = self.tracks[strand].request
        return request is not None and request.writes

    # --- a bound on switches ------------------------------------------------------
    def _within_bound(self) -> list[Strand]:
        ready = self._without_later_reads()
        if self._explored.switches_left > 0:
            return ready
        return [s for s in ready if s.owner is self._last] or ready

    def _without_later_reads(self) -> list[Strand]:
        """Leave out reads of a gather before which another one of it must come."""
        gathers: set[int] = set()
        ready = []
        for strand in sorted(self._ready, key=lambda strand: self.tracks[strand].name):
            track = self.tracks[strand]
            if track.alone and track.reads:
                if id(track.gather) in gathers:
                    continue
                gathers.add(id(track.gather))
            ready.append(strand)
        return ready

    def _note_switch(self, strand: Strand, options: list[Option]) -> None:
        """Leaving a process that could go on is a switch; what the world does is one too."""
        if self._goes_unasked(strand):
            return
        left = any(option[0].owner is self._last for option in options)
        if left and strand.owner is not self._last:
            self._explored.switches_left -= 1
        if strand.owner is not self._explored.world:
            self._last = strand.owner
