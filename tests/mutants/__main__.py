"""Plant mutants one by one and run their tests: `python -m tests.mutants [AREA | AREA/ID …]`.

    --jobs N        so many at a time (2)
    --seconds S     the longest that one mutant's tests may take (120)
    --baseline      run the named tests once on the sources as they are: all must pass

Prints a line for each, and the survivors at the end; exits 1 if there are any.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import ROOT, SOURCES, Mutant, load_all

FAILED = 1
"""How pytest exits if a test has failed; other codes are mistakes of the list."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    verdict: str
    seconds: float
    output: str = ""

    @property
    def is_fine(self) -> bool:
        return self.verdict == "killed"


def run_tests(sources: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Return pytest's exit code over some sources, None after too long, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, f"--timeout={seconds:.0f}", "-m", "slow or not slow", *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds + 30,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error.stdout or "")
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant, seconds: float) -> Outcome:
    """Plant one, run its tests, and say whether they noticed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reef-mutant-") as folder:
        sources = Path(folder) / "src"
        try:
            mutant.plant(sources)
            compile((sources / mutant.path).read_text(), str(mutant.path), "exec")
        except (ValueError, SyntaxError, OSError) as error:
            return Outcome(mutant, "broken", time.monotonic() - start, str(error))
        code, output = run_tests(sources, mutant.killed_by, seconds)
    verdicts = {0: "SURVIVED", FAILED: "killed", None: "too slow"}
    verdict = verdicts.get(code, f"broken (pytest exits {code})")
    return Outcome(mutant, verdict, time.monotonic() - start, output)


def chosen(wanted: Sequence[str]) -> list[Mutant]:
    """Return the mutants that are asked for: all, or those of some areas or names."""
    every = load_all()
    known = {mutant.area for mutant in every} | {mutant.name for mutant in every}
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise SystemExit(f"there is no mutant or area {', '.join(unknown)}")
    return [m for m in every if not wanted or m.area in wanted or m.name in wanted]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("wanted", nargs="*", metavar="AREA | AREA/ID")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--baseline", action="store_true")
    options = parser.parse_args()
    mutants = chosen(options.wanted)
    if options.baseline:
        tests = sorted({test for mutant in mutants for test in mutant.killed_by})
        code, output = run_tests(SOURCES, tests, 3600.0)
        print(output[-2000:])
        return code or 0
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda m: try_mutant(m, options.seconds), mutants):
            outcomes.append(outcome)
            place = f"{len(outcomes):4}/{len(mutants)}"
            print(f"{place} {outcome.verdict:9} {outcome.seconds:6.1f} s  {outcome.mutant.name}")
            sys.stdout.flush()
    bad = [outcome for outcome in outcomes if not outcome.is_fine]
    for outcome in bad:
        print(f"\n{outcome.mutant.name}: {outcome.verdict}\n{outcome.output[-1500:]}")
    print(f"\n{len(outcomes) - len(bad)} killed, {len(bad)} not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
