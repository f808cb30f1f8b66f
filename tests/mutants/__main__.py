"""Plant mutants one by one and run their tests: `python -m tests.mutants [AREA | AREA/ID …]`.

    --jobs N        workers, each with its own copy of the sources (2)
    --seconds S     CPU time that one mutant's tests may take (60)
    --wall S        wall time that they may take, for tests that block (600)
    --baseline      only the first step

First all named tests run on the sources as they are: a test that fails there kills nothing, and
its mutants are reported. Then every mutant is planted. Prints a line for each, the entries that
are not killed with their output, and a table of the areas; exits 1 unless all are killed. An entry
whose line is not in the sources (exactly once) is an error that names it.
"""

import argparse
import contextlib
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from tests.mutants.catalogue import Mutant, load_all
from tests.mutants.worker import FOREIGN_SOURCES, Run, Worker

T = TypeVar("T")
R = TypeVar("R")

PASSED, FAILED = 0, 1
"""How pytest exits; other codes are mistakes of the list."""

KILLED = "killed"
VERDICTS = {
    PASSED: "SURVIVED",
    FAILED: KILLED,
    None: "TOO SLOW",
    FOREIGN_SOURCES: "BROKEN (tests ran on other sources)",
}
BASELINE_FACTOR = 10
"""A file's tests run together on the sources as they are, so they may take longer than one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one mutant."""

    mutant: Mutant
    verdict: str
    cpu_s: float = 0.0
    output: str = ""

    @property
    def is_fine(self) -> bool:
        return self.verdict == KILLED


class Workers:
    """A pool of workers; a thread borrows one for each run."""

    def __init__(self, folder: Path, jobs: int, cpu_s: float, wall_s: float) -> None:
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all = []
        self._threads = ThreadPoolExecutor(jobs)
        for number in range(jobs):
            home = folder / str(number)
            home.mkdir()
            self._all.append(Worker(home, cpu_s, wall_s))
            self._idle.put(self._all[-1])

    def each(self, step: Callable[[Worker, T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield step(worker, item) for all items, as they complete."""
        for future in as_completed([self._threads.submit(self._lend, step, i) for i in items]):
            yield future.result()

    def close(self) -> None:
        """End all of them, also in the middle of a run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.close()
        self._threads.shutdown()

    def _lend(self, step: Callable[[Worker, T], R], item: T) -> R:
        worker = self._idle.get()
        try:
            return step(worker, item)
        finally:
            self._idle.put(worker)


def check_tests(workers: Workers, mutants: Iterable[Mutant]) -> dict[str, Run]:
    """Run the named tests, file by file, on the sources as they are: the files that do not pass."""
    tests = sorted({test for mutant in mutants for test in mutant.killed_by})
    files = [list(group) for _, group in groupby(tests, file_of)]
    start, failed = time.monotonic(), {}

    def step(worker: Worker, group: list[str]) -> tuple[str, Run]:
        return file_of(group[0]), worker.run(group, times=BASELINE_FACTOR)

    for file, run in workers.each(step, files):
        if run.code != PASSED:
            failed[file] = run
            print(f"{file} does not pass (exit code {run.code})\n{run.output[-3000:]}")
    seconds = time.monotonic() - start
    print(f"{len(tests)} tests in {len(files)} files on the sources as they are: {seconds:.0f} s")
    return failed


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def try_mutant(worker: Worker, mutant: Mutant) -> Outcome:
    """Plant one, run its tests, and classify the result."""
    try:
        with worker.planted(mutant):
            run = worker.run(mutant.killed_by, "-x")
    except (ValueError, SyntaxError, OSError) as error:
        return Outcome(mutant, "BROKEN (cannot be planted)", output=f"{error}")
    verdict = VERDICTS.get(run.code, f"BROKEN (pytest exits {run.code})")
    return Outcome(mutant, verdict, run.cpu_s, run.output)


def chosen(wanted: Sequence[str]) -> list[Mutant]:
    """Return the mutants that are asked for: all, or those of some areas or names."""
    every = load_all()
    known = {mutant.area for mutant in every} | {mutant.name for mutant in every}
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise SystemExit(f"there is no mutant or area {', '.join(unknown)}")
    return [m for m in every if not wanted or m.area in wanted or m.name in wanted]


def run_all(workers: Workers, mutants: Sequence[Mutant]) -> list[Outcome]:
    """Check the tests, then try every mutant; prints the progress."""
    failed = check_tests(workers, mutants)
    outcomes: list[Outcome] = []

    def step(worker: Worker, mutant: Mutant) -> Outcome:
        if failed.keys() & {file_of(test) for test in mutant.killed_by}:
            return Outcome(mutant, "BROKEN (its tests fail without it)")
        return try_mutant(worker, mutant)

    for outcome in workers.each(step, mutants):
        outcomes.append(outcome)
        place = f"{len(outcomes):4}/{len(mutants)}"
        print(f"{place} {outcome.verdict:9} {outcome.cpu_s:6.1f} s  {outcome.mutant.name}")
        sys.stdout.flush()
    return outcomes


def report(outcomes: Sequence[Outcome], seconds: float) -> bool:
    """Print the entries that are not killed and the table of the areas; whether all are killed."""
    bad = [outcome for outcome in outcomes if not outcome.is_fine]
    for outcome in bad:
        print(f"\n{outcome.mutant.name}: {outcome.verdict}\n{outcome.output[-1500:]}")
    print(f"\n{'area':14} {'mutants':>8} {'killed':>8} {'not':>6} {'CPU s':>8} {'longest':>8}")
    for area in sorted({outcome.mutant.area for outcome in outcomes}):
        print(table_row(area, [o for o in outcomes if o.mutant.area == area]))
    print(table_row("all", outcomes))
    for outcome in bad:
        print(f"{outcome.verdict}: {outcome.mutant.name}")
    print(f"{len(outcomes) - len(bad)} killed, {len(bad)} not, in {seconds / 60:.1f} minutes")
    return not bad


def table_row(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return one row of the table of the areas."""
    killed = sum(outcome.is_fine for outcome in outcomes)
    cpu_s = [outcome.cpu_s for outcome in outcomes]
    return (
        f"{title:14} {len(outcomes):8} {killed:8} {len(outcomes) - killed:6}"
        f" {sum(cpu_s):8.0f} {max(cpu_s, default=0.0):8.1f}"
    )


def main() -> int:
    """Run the mutants of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("wanted", nargs="*", metavar="AREA | AREA/ID")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--wall", type=float, default=600.0)
    parser.add_argument("--baseline", action="store_true")
    options = parser.parse_args()
    mutants = chosen(options.wanted)
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="reef-mutants-") as folder,
        contextlib.closing(
            Workers(Path(folder), options.jobs, options.seconds, options.wall)
        ) as workers,
    ):
        if options.baseline:
            return 1 if check_tests(workers, mutants) else 0
        outcomes = run_all(workers, mutants)
    return 0 if report(outcomes, time.monotonic() - start) else 1


if __name__ == "__main__":
    sys.exit(main())
