"""Every place at which a process can die, found by running it.

A crash point is not registered by hand: it is a seam that the code passes. New code that
makes a store call, reads a clock or names a point is covered the day it is written.

    for point in crash_points(scenario, victim="writer"):
        ...   # a Simulation in which the writer died at just this point, and went no further
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reef.testing.simulation import CrashAt, Simulation

__all__ = ["CrashPoint", "crash_points"]


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One death, and the world that it left behind."""

    number: int
    what: str
    simulation: Simulation


def crash_points(
    scenario: Callable[[Simulation], object], victim: str, *, seed: int = 0
) -> Iterator[CrashPoint]:
    """Run `scenario` once for each seam that `victim` passes, and kill it there.

    The scenario starts processes and calls `sim.run()`. After each death the simulation
    is handed out, so that new processes can be started on what is left. A victim that
    the scenario starts again under its name is killed in its later lives too.
    """
    total = _count_seams(scenario, victim, seed)
    for number in range(1, total + 1):
        sim = Simulation(seed, crash_at=CrashAt(victim, number))
        try:
            scenario(sim)
            if sim.crash_seam is None:
                raise AssertionError(f"{victim} did not die: the scenario is not deterministic")
            yield CrashPoint(number, sim.crash_seam, sim)
        finally:
            sim.close()


def _count_seams(scenario: Callable[[Simulation], object], victim: str, seed: int) -> int:
    sim = Simulation(seed)
    try:
        scenario(sim)
        return sim.seams.get(victim, 0)
    finally:
        sim.close()
