"""`make explore`: openings through all orders, deaths and late requests.

    python -m tests.simulation.exploring                       all of them
    python -m tests.simulation.exploring --only "two openers"  those whose name says so
    python -m tests.simulation.exploring --docs                and put the table into the docs

Prints a table: for each instance how many states, runs and ends there were, how long it took, and
whether everything within the bounds was walked. Bounds are deaths, late requests and, where that
is said, switches: how often a process that could continue is preempted. An instance that has taken
`--minutes` is cut short, and the table says so. 1 at the first history that goes wrong, with its
script, and if a mutant is not found.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from reef.engine.commit import open_writer
from reef.testing import ExplorationFailed, explore_states
from tests.simulation.opening_explored import Case, chaos
from tests.simulation.opening_mutants import MUTANTS

MINUTES = 30.0
DOCS = Path(__file__).parents[2] / "docs/design/simulator.md"
HEAD = (
    "| instance | ack | bound | states | runs | ends | CPU s | walked |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


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
        return mock.patch.multiple(open_writer, PATIENT_ROUNDS=0, SALVO_MAX=self.salvo)

    @property
    def bound(self):
        """Describe the bounds of the exploration."""
        faults = ["a crash"] * (self.crashes > 0) + ["a late request"] * (self.late > 0)
        faults += ["a grace passes"] * self.case.time_passes
        if self.switches_max is not None:
            faults.append(f"{self.switches_max} switches")
        return " and ".join(faults) or "no faults"


def _both(name, case, **amounts):
    """In both orders of acknowledgement."""
    for ack in ("prefix", "independent"):
        yield name, Instance(replace(case, ack=ack), **amounts)


ONE = Case(in_flight=1, wanted=1, batches=1)
COLLECTED = Case(before=2, folds=True, collects=True)
TIMED = replace(COLLECTED, time_passes=True)
INSTANCES = [
    *_both("an opener", Case(), crashes=1, late=1),
    *_both("two openers, M = 1", replace(ONE, openers="ab"), crashes=1, late=1),
    *_both("M lowered from 2 to 1", Case(wanted=1), crashes=1, late=1),
    *_both("M raised from 1 to 2", replace(ONE, wanted=2), crashes=1, late=1),
    *_both("salvos of up to 3 slots, M = 1", replace(ONE, batches=3), crashes=1, late=1, salvo=3),
    *_both("salvos of two openers, M = 1", replace(ONE, openers="ab"), crashes=1, salvo=3),
    *_both("a fold and an opener", Case(before=2, folds=True)),
    *_both("collection, M = 1", replace(COLLECTED, in_flight=1, wanted=1, batches=1)),
    *_both("collection", COLLECTED),
    *_both("collection", TIMED, switches_max=1),
    *_both("two openers", Case("ab"), crashes=1, late=1),
    *_both("collection, two openers", replace(COLLECTED, openers="ab"), switches_max=3),
    *_both("collection, two openers", replace(TIMED, openers="ab"), switches_max=1),
]


def run(name, instance, minutes):
    """Explore one instance; return its row of the table."""
    start_s = time.process_time()

    def show(so_far):
        seconds = time.process_time() - start_s
        if sys.stderr.isatty():
            print(f"\r{name}: {so_far.states} states, {seconds:.0f} s ", end="", file=sys.stderr)
        return seconds > minutes * 60

    with instance.patched():
        done = explore_states(instance.case, progress=show, **instance.bounds)
    seconds = time.process_time() - start_s
    walked = "all" if done.complete else "cut short"
    counts = f"{done.states:,} | {done.histories:,} | {done.ends:,} | {seconds:.0f} | {walked}"
    return f"| {name} | `{instance.case.ack}` | {instance.bound} | {counts} |"


def run_mutant(name):
    """Explore the code with a protection taken out; True if that was found."""
    start_s = time.process_time()
    mutant, case = MUTANTS[name]
    try:
        with mutant():
            explore_states(case, footprint=case.footprint)
    except ExplorationFailed as failure:
        seconds = time.process_time() - start_s
        print(f"mutant {name}: found in {seconds:.0f} s, {failure.script}", flush=True)
        return True
    print(f"mutant {name}: not found", file=sys.stderr)
    return False


def put_into_docs(rows):
    """Replace the table in the docs."""
    text = DOCS.read_text()
    start = text.index(HEAD)
    end = text.index("\n\n", start)
    DOCS.write_text(text[:start] + HEAD + "\n".join(rows) + text[end:])


def main() -> int:
    """Run the instances, then the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    rows = []
    print(HEAD, end="", flush=True)
    for name, instance in INSTANCES:
        if arguments.only not in f"{name}, {instance.case.ack}, {instance.bound}":
            continue
        try:
            rows.append(run(name, instance, arguments.minutes))
        except ExplorationFailed as failure:
            print(f"{name}, {instance.case.ack}, {instance.bound}: {failure}", file=sys.stderr)
            return 1
        print(rows[-1], flush=True)
    if arguments.docs:
        put_into_docs(rows)
    found = [run_mutant(name) for name in MUTANTS if arguments.only in f"mutant {name}"]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
