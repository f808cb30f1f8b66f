"""`python -m tests.lives --seeds N`: random histories of a name with several lives."""

import argparse
import sys
import time
from collections import defaultdict

from tests.lives.histories import STEPS, draw, kind_of, play
from tests.lives.machine import HistoryFailed, run


def main() -> int:
    """Run the seeds; 1 if any failed, each kind of failure with its shortest history."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    failed: dict[str, list[int]] = defaultdict(list)
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            run(draw(seed, arguments.steps))
        except HistoryFailed as failure:
            failed[kind_of(failure)].append(seed)
    took_s = time.perf_counter() - start_s
    count = sum(map(len, failed.values()))
    print(f"{arguments.seeds} histories, {took_s:.0f} s, {count} failed")
    for kind, seeds in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(seeds)} x {kind}\n  seeds {seeds[:10]}", file=sys.stderr)
        try:
            play(seeds[0], arguments.steps)
        except HistoryFailed as failure:
            print(failure, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
