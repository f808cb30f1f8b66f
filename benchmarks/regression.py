"""Compare a run with an earlier one: `make bench-compare BASE=…`, a file or a commit.

    python -m benchmarks.regression BASE [NEW]

Ratios to the peers are compared, by CPU time, where both runs have them: the peers have not
changed, so that the machine and its other tenants cancel out. Ends with 1 if one became worse by
more than a third.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.report import FIGURES, ROOT, Run

WORSE = 4 / 3


def main() -> int:
    """Print all changes, the worst first."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    base, new = _load(sys.argv[1]), _load(sys.argv[2] if len(sys.argv) > 2 else str(FIGURES))
    found = changes(base, new)
    for change, name in found:
        print(f"{'WORSE' if change > WORSE else '':6}{change:6.2f} ×  {name}")
    return int(any(change > WORSE for change, _ in found))


def changes(base: dict[str, float], new: dict[str, float]) -> list[tuple[float, str]]:
    """Return by which factor each figure grew, the worst first."""
    both = [name for name in base.keys() & new.keys() if base[name] and new[name]]
    return sorted(((new[name] / base[name], name) for name in both), reverse=True)


def ratios(run: Run) -> dict[str, float]:
    """Return the ratios of a run by case and peer, and the requests of each case."""
    found: dict[str, float] = {}
    for result in run.results:
        name = f"{result.group}: {result.name}, {result.size}"
        found |= {f"{name} / {peer}": ratio[2] for peer, ratio in result.ratios.items()}
        found[f"{name}, requests"] = result.figures["reef"].requests
    return found


def _load(source: str) -> dict[str, float]:
    """Return the figures of a file, or of those that a commit has."""
    if Path(source).exists():
        return ratios(Run.of(Path(source).read_text()))
    words = ["git", "show", f"{source}:{FIGURES.relative_to(ROOT)}"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return ratios(Run.of(shown.stdout))


if __name__ == "__main__":
    sys.exit(main())
