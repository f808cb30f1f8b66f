"""Runs seeds of scenarios on several cores, and reports them; see `__main__` for how to use it."""

import gc
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice

from reef.testing import Simulation, SimulationFailed, simulate
from tests.simulation import ledger
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.two_phase_register import NEED_IF_MATCH, TwoPhaseSimulation

WORLDS = {"native": Simulation, "two-phase": TwoPhaseSimulation}
CHUNK_SEEDS = 25
SAVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some seeds of one scenario."""

    store: str
    scenario: str
    seeds: range


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of a chunk."""

    chunk: Chunk
    cpu_s: float
    failures: dict[int, str]


def run_chunk(chunk: Chunk) -> ChunkResult:
    """Run the seeds of a chunk; a failure is kept, and the seeds behind it run too."""
    scenario, chaos = SCENARIOS[chunk.scenario]
    started_s, failures, seeds = time.process_time(), {}, chunk.seeds
    while seeds:
        try:
            simulate(scenario, seeds, chaos=chaos, world=WORLDS[chunk.store])
            break
        except SimulationFailed as failure:
            failures[failure.seed] = str(failure)
            seeds = range(failure.seed + 1, seeds.stop)
    return ChunkResult(chunk, time.process_time() - started_s, failures)


def plan(store, names, seeds, rows):
    """Return the chunks to run, none of them covered by the ledger's rows.

    By seed: scenarios of which the fewest have run come first, then all of them take turns.
    """
    chunks = []
    for name in names:
        if store == "two-phase" and name in NEED_IF_MATCH:
            continue
        chunks += [
            Chunk(store, name, gap[start : start + CHUNK_SEEDS])
            for gap in ledger.missing(rows, store, name, seeds)
            for start in range(0, len(gap), CHUNK_SEEDS)
        ]
    return sorted(chunks, key=lambda chunk: chunk.seeds.start)


class Report:
    """Prints results as they come, and adds them to the ledger."""

    def __init__(self, *, record: bool) -> None:
        self._commit = clean_commit() if record else None
        self._unsaved: list[ledger.Covered] = []
        self._saved_s = time.monotonic()
        self.seeds: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()
        self.failures = 0

    def add(self, result: ChunkResult) -> None:
        """Take the result of one chunk."""
        chunk, seeds = result.chunk, result.chunk.seeds
        self.seeds[chunk.scenario] += len(seeds)
        self.cpu_s[chunk.scenario] += result.cpu_s
        for seed, text in result.failures.items():
            again = f"make sim SCENARIO={chunk.scenario} SEED={seed} SEEDS=1 STORE={chunk.store}"
            print(f"{chunk.scenario}: {text}\nreplay: {again}", file=sys.stderr, flush=True)
            self.failures += 1
        if self._commit is not None:
            failed = tuple(sorted(result.failures))
            self._unsaved.append(
                ledger.Covered(
                    chunk.store, chunk.scenario, seeds[0], seeds[-1], self._commit, failed
                )
            )
            if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                self.save()

    def save(self) -> None:
        """Write the ranges that have run since the last time to the ledger."""
        if self._unsaved:
            ledger.add(self._unsaved)
        self._unsaved, self._saved_s = [], time.monotonic()

    def print_table(self) -> None:
        """Print seeds and seeds per second of processor time, scenario by scenario."""
        for name, count in self.seeds.items():
            rate = count / max(self.cpu_s[name], 1e-9)
            print(f"{name:<44} {count:>7} seeds  {self.cpu_s[name]:8.1f} s  {rate:8.1f} a second")


def clean_commit():
    """Return the commit whose files are checked out; the ledger may differ."""
    git = ["git", "-C", str(ledger.LEDGER.parent)]
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!evidence.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if changed:
        raise SystemExit("commit first: the ledger names the commit whose seeds have run")
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return head.stdout.strip()


def prepare_process():
    """Have the collections between histories pass over modules and caches."""
    gc.freeze()


def results(chunks, jobs, deadline_s):
    """Yield the results of chunks until the deadline; those under way then are waited for."""
    if jobs == 1:
        prepare_process()
        for chunk in chunks:
            if time.monotonic() > deadline_s:
                return
            yield run_chunk(chunk)
        return
    queue = iter(chunks)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawning, initializer=prepare_process) as pool:
        running = {pool.submit(run_chunk, chunk) for chunk in islice(queue, 2 * jobs)}
        while running:
            done = next(as_completed(running))
            running.remove(done)
            yield done.result()
            following = next(queue, None) if time.monotonic() < deadline_s else None
            if following is not None:
                running.add(pool.submit(run_chunk, following))
