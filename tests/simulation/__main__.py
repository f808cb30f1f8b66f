"""`make sim`: many seeds of every scenario, on several cores, or one seed again.

    make sim SEEDS=500                               500 seeds of every scenario
    make sim SCENARIO=folders_race SEED=17 SEEDS=1   one history again
    make sim STORE=two-phase                         on a bucket without conditional writes
    make sim RECORD=1 MINUTES=60                     the next seeds of the 20,000, into the ledger

The scenarios take turns, a chunk of seeds at a time, those with the fewest seeds first, so that a
run that is stopped has covered all of them alike. With RECORD, seeds that docs/evidence.md names
already are left out, and those that have run are added to it.
"""

import argparse
import sys
import time

from tests.simulation import ledger
from tests.simulation.runner import WORLDS, Report, plan, results
from tests.simulation.scenarios import SCENARIOS


def main() -> int:
    """Run the seeds; 1 if a history has failed, with its seed and its trace on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="one, not all")
    parser.add_argument("--store", choices=sorted(WORLDS), default="native")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--record", action="store_true", help="use and extend docs/evidence.md")
    arguments = parser.parse_args()
    report = Report(record=arguments.record)
    chunks = plan(
        arguments.store,
        [arguments.scenario] if arguments.scenario else SCENARIOS,
        range(arguments.seed, arguments.seed + arguments.seeds),
        ledger.read() if arguments.record else [],
    )
    deadline_s = time.monotonic() + 60 * arguments.minutes
    try:
        for result in results(chunks, arguments.jobs, deadline_s):
            report.add(result)
    finally:
        report.save()
    report.print_table()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
