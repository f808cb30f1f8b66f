"""Measures cases against each other: in turns, many times, with the spread.

Everything runs in one process and in alternation, so that a noisy neighbour hits all
cases alike; what is reported is the median of the ratios, round by round.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case and its peer, and what was promised."""

    name: str
    seconds: float
    peer: str
    peer_seconds: float
    goal: float | None
    """None: stated, without a promise."""
    ratio: float
    """The median of the rounds' ratios: each round times both under the same weather."""
    error: float
    """How far that median may be off: its standard error, from the spread of the rounds."""

    @property
    def met(self) -> bool:
        return self.goal is None or self.ratio <= self.goal

    def row(self) -> str:
        verdict, promised = "stated", ""
        if self.goal is not None:
            promised = f"≤ {self.goal:.3g}"
            verdict = "met" if self.met else f"missed by {self.ratio / self.goal - 1:.0%}"
        return (
            f"| {self.name} | {self.seconds * 1e6:,.0f} µs | {self.peer} | "
            f"{self.peer_seconds * 1e6:,.0f} µs | {self.ratio:.3g} ± {self.error:.1g} | "
            f"{promised} | {verdict} |"
        )


HEADER = "| what | Reef | peer | peer's | ratio | goal | |\n|---|---|---|---|---|---|---|"


def compare(
    name: str,
    case: Callable[[int], None],
    peer: str,
    peer_case: Callable[[int], None],
    *,
    goal: float | None,
    rounds: int = 30,
    calls: int = 20,
) -> Comparison:
    """Time `calls` calls of each in turns, `rounds` times; the argument counts up."""
    ours, theirs = [], []
    number = 0
    for round_number in range(rounds):
        pair = [(case, ours), (peer_case, theirs)]
        for call, times in pair if round_number % 2 else reversed(pair):
            start_s = time.perf_counter()
            for place in range(calls):
                call(number + place)
            times.append((time.perf_counter() - start_s) / calls)
        number += calls
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    half_spread = (ratios[int(len(ratios) * 0.84)] - ratios[int(len(ratios) * 0.16)]) / 2
    error = 1.25 * half_spread / len(ratios) ** 0.5  # of a median, for normal noise
    return Comparison(
        name,
        statistics.median(ours),
        peer,
        statistics.median(theirs),
        goal,
        statistics.median(ratios),
        error,
    )
