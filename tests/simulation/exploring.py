"""`make explore`: openings through all orders, deaths and late requests; minutes each.

    python -m tests.simulation.exploring                      all of them
    python -m tests.simulation.exploring --only "two openers"  those whose name says so

Prints for each how many states and runs there were, the time, and whether everything within the
bounds was walked. Bounds are deaths, late requests and, where that is said, switches: how often a
process is left that could go on. 1 at the first history that goes wrong, with its script.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from unittest import mock

from reef.engine.commit import opening
from reef.testing import ExplorationFailed, explore_states
from tests.simulation.opening_explored import Case, chaos
from tests.simulation.opening_mutants import MUTANTS

RUNS_MAX = 200_000


@dataclass(frozen=True)
class Instance:
    """A case, and how much goes wrong in it."""

    case: Case
    crashes: int = 0
    late: int = 0
    switches_max: int | None = None
    salvo: int = 0
    """If not 0: aim at several slots from the first round on, at so many at most."""
    bounds: dict = field(init=False)

    def __post_init__(self):
        bounds = {
            "chaos": chaos(self.crashes, self.late),
            "footprint": self.case.footprint,
            "switches_max": self.switches_max,
        }
        object.__setattr__(self, "bounds", bounds)

    def patched(self):
        """Make the constants of the salvo rule small."""
        if not self.salvo:
            return nullcontext()
        return mock.patch.multiple(opening, PATIENT_ROUNDS=0, SALVO_MAX=self.salvo)


def _both(name, case, **amounts):
    """In both orders of acknowledgement."""
    for ack in ("prefix", "independent"):
        yield f"{name}, {ack}", Instance(replace(case, ack=ack), **amounts)


ONE = Case(in_flight=1, wanted=1, batches=1)
COLLECTED = Case(before=3, folds=True, collects=True)
INSTANCES = dict(
    [
        *_both("an opener, a death and a late request", Case(), crashes=1, late=1),
        *_both("two openers", Case("ab")),
        *_both("two openers, M = 1, a death", replace(ONE, openers="ab"), crashes=1),
        *_both("two openers, M = 1, a late request", replace(ONE, openers="ab"), late=1),
        *_both("lowered from 2 to 1, a death", Case(wanted=1), crashes=1),
        *_both("raised from 1 to 2, a death", replace(ONE, wanted=2), crashes=1),
        *_both("salvos", replace(ONE, batches=3), crashes=1, late=1, salvo=3),
        *_both("salvos of two openers", replace(ONE, openers="ab"), salvo=3),
        ("a fold", Instance(Case(before=2, folds=True))),
        ("collection, M = 1", Instance(replace(COLLECTED, in_flight=1, wanted=1, batches=1))),
        (
            "collection, M = 1, time passes",
            Instance(
                replace(COLLECTED, in_flight=1, wanted=1, batches=1, time_passes=True),
                switches_max=2,
            ),
        ),
        *_both("collection, M = 2", COLLECTED, switches_max=2),
        *_both("collection, M = 2, two openers", replace(COLLECTED, openers="ab"), switches_max=1),
        (
            "collection, M = 2, two openers, time passes",
            Instance(replace(COLLECTED, openers="ab", time_passes=True), switches_max=1),
        ),
        *_both("two openers, a death, few switches", Case("ab"), crashes=1, switches_max=1),
        *_both("two openers, a late request, few switches", Case("ab"), late=1, switches_max=1),
        *_both("an opener, two of each, few switches", Case(), crashes=2, late=2, switches_max=1),
    ]
)


def _seconds(start_s):
    return f"{time.perf_counter() - start_s:7.0f} s"


def run(name, instance, runs_max):
    """Explore one instance; True if nothing went wrong."""
    start_s = time.perf_counter()

    def show(so_far):
        if sys.stderr.isatty():
            told = f"{name:<52} {so_far.states:>9} states {so_far.histories:>9} runs"
            print(f"\r{told} {_seconds(start_s)}", end="", file=sys.stderr)

    try:
        with instance.patched():
            done = explore_states(
                instance.case, runs_max=runs_max, progress=show, **instance.bounds
            )
    except ExplorationFailed as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        return False
    how = "all" if done.complete else "CUT SHORT"
    if instance.switches_max is not None:
        how += f" within {instance.switches_max} switches"
    told = f"{name:<52} {done.states:>9} states {done.histories:>9} runs"
    print(f"{told} {_seconds(start_s)}  {how}", flush=True)
    return True


def run_mutant(name, runs_max):
    """Explore the code with a protection taken out; True if that was found."""
    start_s = time.perf_counter()
    mutant, case = MUTANTS[name]
    try:
        with mutant():
            explore_states(case, footprint=case.footprint, runs_max=runs_max)
    except ExplorationFailed as failure:
        print(f"{'mutant ' + name:<52} {'found':>9} {_seconds(start_s)}  {failure.script}")
        return True
    print(f"mutant {name}: not found", file=sys.stderr)
    return False


def main() -> int:
    """Run the instances, then the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--runs-max", type=int, default=RUNS_MAX)
    arguments = parser.parse_args()
    for name, instance in INSTANCES.items():
        if arguments.only in name and not run(name, instance, arguments.runs_max):
            return 1
    for name in MUTANTS:
        if arguments.only in f"mutant {name}" and not run_mutant(name, arguments.runs_max):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
