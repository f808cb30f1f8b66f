"""Runs the strands of one process as far as they come without an answer of the store.

Nothing happens in the world meanwhile: a strand that sends a request stands still until it is
given an answer, by whoever works out what the answer is (`reef.testing.walk`). A strand that was
started or woken goes on at once: until its next request it touches its process's memory only. With
several threads in a process this is a bound: how the machine shares its time among woken threads
is not explored; in which order answers come to them is.

No wait ends by its timeout: nothing takes time here.
"""

from collections.abc import Callable
from typing import Any

from reef.testing.choices import ScriptedChoices
from reef.testing.scheduler import Owner, Scheduler, Strand, TooManySteps
from reef.testing.states import Chain, Request, Track, summary

__all__ = ["ExploredScheduler"]


class ExploredScheduler(Scheduler):
    """Strands that stop at requests, and the chains of what they were told."""

    def __init__(self, steps_max: int) -> None:
        super().__init__(ScriptedChoices(), steps_max)
        self.tracks: dict[Strand, Track] = {}
        self.chains: dict[Owner, Chain] = {}
        self._spawned: dict[Owner, int] = {}

    def spawn(
        self, owner: Owner, call: Callable[[], object], name: str, *, daemon: bool = False
    ) -> Strand:
        strand = super().spawn(owner, call, name, daemon=daemon)
        number = self._spawned[owner] = self._spawned.get(owner, -1) + 1
        self.tracks[strand] = Track(f"{name}:{number}".encode(), self.chain_of(owner))
        return strand

    def spawn_alone(
        self, owner: Owner, call: Callable[[], object], chain: Chain, gather: str
    ) -> Strand:
        """Start one call of a gather."""
        strand = super().spawn(owner, call, f"{owner.name}/gather", daemon=True)
        self.tracks[strand] = Track(chain.name.encode(), chain, gather)
        return strand

    def chain_of(self, owner: Owner) -> Chain:
        if owner not in self.chains:
            self.chains[owner] = Chain(f"{len(self.chains)}-{owner.name}")
        return self.chains[owner]

    # --- called from strands ------------------------------------------------------
    def note_clock(self) -> None:
        """Remember that a strand has read a clock."""
        if self.current is not None:
            self.tracks[self.current].chain.absorb(b"clock", str(self.now_s).encode())

    def ask(self, strand: Strand, request: Request) -> Any:
        """Stand still until the answer is given; return it, or raise it."""
        track = self.tracks[strand]
        track.request = request
        self._switch_out(strand)
        answer, track.answer = track.answer, None
        if isinstance(answer, Exception):
            answer.__context__ = None
            raise answer.with_traceback(None)
        return answer

    # --- called from outside ------------------------------------------------------
    def asking(self, owner: Owner) -> list[Strand]:
        """Return the strands of a process that stand still."""
        return [s for s, track in self.tracks.items() if track.request and s.owner is owner]

    def is_done(self, owner: Owner) -> bool:
        """Whether nothing is left of a process that a run must see through."""
        return all(s.finished or s.daemon for s in self.tracks if s.owner is owner)

    def answer(self, strand: Strand, answer: Any) -> None:
        """Give a strand its answer, and let its process come as far as it can."""
        track = self.tracks[strand]
        track.chain.absorb(track.name, summary(answer))
        track.request, track.answer = None, answer
        self._go_on(strand)
        self.settle(strand.owner)

    def settle(self, owner: Owner) -> None:
        """Let all strands of a process come as far as they can."""
        while woken := [strand for strand in self._ready if strand.owner is owner]:
            strand = woken[0]
            self._ready.remove(strand)
            track = self.tracks[strand]
            how = b"timed out" if strand.timed_out else b"on"
            track.chain.absorb(track.name, how)
            self._go_on(strand)

    def _go_on(self, strand: Strand) -> None:
        self.steps += 1
        if self.steps > self.steps_max:
            raise TooManySteps(f"not at an end after {self.steps_max} steps")
        self.current = strand
        strand.body.switch()
        self.current = None
        if strand.error is not None:
            raise strand.error
