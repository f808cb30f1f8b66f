"""Histories: drawn from a seed, shortened when they fail."""

import random
import re
from dataclasses import dataclass

from tests.lives.machine import DAY_S, KEYS, NAMES, WHERES, HistoryFailed, Machine, run

STEPS = 30
RUNS_MAX = 250
"""How often a history is run again to shorten it."""
NEEDS_DROPPED = {"undrop"}
ALWAYS = {"undrop", "create", "sleep", "zombie_put", "sweep", "end_job"}


@dataclass(frozen=True)
class Step:
    """A call of the machine, as data."""

    name: str
    args: dict[str, object]
    picks: tuple[int, ...] = ()
    """Which past states are read afterwards."""

    def run(self, machine):
        """Run it, unless the namespace is dropped and the step needs it."""
        dropped = machine.is_dropped
        if (dropped and self.name not in ALWAYS) or (not dropped and self.name in NEEDS_DROPPED):
            return
        getattr(machine, self.name)(**self.args)

    def __str__(self):
        args = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.name}({args})"


def some_keys(rng):
    """Return one to three keys."""
    return rng.sample(KEYS, rng.randint(1, 3))


def some_range(rng):
    """Return the arguments of a range delete."""
    start, end = sorted(rng.sample([*KEYS, "z"], 2))
    return {"start": start, "end": end}


def some_sweep(rng):
    """Return the settings of a sweep."""
    return {
        "wait_s": rng.choice([0.0, 3600.0, DAY_S, 2 * DAY_S]),
        "retained_s": rng.choice([0.0, 0.0, DAY_S]),
    }


DRAWN = {
    "put": (8, lambda r: {"key": r.choice(KEYS), "x": r.randint(0, 9), "y": r.randint(0, 9)}),
    "upsert": (3, lambda r: {"keys": some_keys(r), "x": r.randint(0, 9)}),
    "patch": (
        5,
        lambda r: {"key": r.choice(KEYS), "column": r.choice("xy"), "value": r.randint(10, 99)},
    ),
    "delete": (3, lambda r: {"key": r.choice(KEYS)}),
    "delete_range": (2, some_range),
    "put_keyed": (3, lambda r: {"key": r.choice(KEYS)}),
    "update_where": (
        3,
        lambda r: {
            "column": r.choice("xy"),
            "value": r.randint(0, 99),
            "where": r.choice(sorted(WHERES)),
        },
    ),
    "delete_where": (2, lambda r: {"where": r.choice(sorted(WHERES))}),
    "transact": (
        2,
        lambda r: {
            "key": r.choice(KEYS),
            "other": r.choice(KEYS),
            "x": r.randint(0, 9),
            "meets": r.random() < 0.3,
        },
    ),
    "load": (
        6,
        lambda r: {
            "keys": some_keys(r),
            "x": r.randint(100, 999),
            "replace": r.random() < 0.15,
            "name": r.choice([None, None, "p", "q"]),
            "op": r.choice(["put", "put", "patch"]),
            "again": r.random() < 0.5,
        },
    ),
    "begin_job": (1, lambda r: {"keys": some_keys(r), "x": r.randint(100, 999)}),
    "begin_backfill": (3, lambda r: {"keys": some_keys(r), "x": r.randint(100, 999)}),
    "end_job": (3, lambda r: {"commits": r.random() < 0.8}),
    "fold": (6, lambda r: {}),
    "compact": (
        5,
        lambda r: {"strategy": r.choice(["tiered", "leveled"]), "full": r.random() < 0.5},
    ),
    "sweep": (4, some_sweep),
    "sleep": (1, lambda r: {"seconds": r.choice([60.0, 3600.0, DAY_S])}),
    "snapshot": (4, lambda r: {"name": r.choice("stu")}),
    "release": (2, lambda r: {"name": r.choice("stu")}),
    "pin": (1, lambda r: {}),
    "cursor": (2, lambda r: {"name": r.choice("vw"), "commits": r.random() < 0.6}),
    "reopen": (2, lambda r: {"parallel": r.choice([1, 1, 3])}),
    "close": (2, lambda r: {}),
    "rename": (3, lambda r: {"to": r.choice(NAMES)}),
    "follow": (1, lambda r: {}),
    "zombie_put": (1, lambda r: {"key": r.choice(KEYS)}),
    "drop": (5, lambda r: {}),
    "undrop": (3, lambda r: {}),
    "create": (10, lambda r: {"wide": r.random() < 0.3}),
}
"""By name: the weight of a step, and its arguments."""


def draw(seed, length=STEPS):
    """Return the history of a seed."""
    rng = random.Random(seed)
    names, weights = list(DRAWN), [weight for weight, _ in DRAWN.values()]
    steps = []
    for name in rng.choices(names, weights, k=rng.randint(length // 3, length)):
        picks = tuple(rng.randrange(1000) for _ in range(2))
        steps.append(Step(name, DRAWN[name][1](rng), picks))
    return steps


def play(seed, length=STEPS):
    """Run the history of a seed; HistoryFailed, with a shortened one, if it goes wrong."""
    try:
        return run(draw(seed, length))
    except HistoryFailed as failure:
        short = shorten(failure)
        raise HistoryFailed(short.steps, short.number, short.cause, seed) from short.cause


def shorten(failure):
    """Return the failure of a history with as few steps as it takes for the same failure."""
    kind, runs = kind_of(failure), 0
    best = failure
    size = max(1, len(best.steps) // 2)
    while size and runs < RUNS_MAX:
        place, shrunk = 0, False
        while place < len(best.steps) and runs < RUNS_MAX:
            shorter = _fails(best.steps[:place] + best.steps[place + size :], kind)
            runs += 1
            if shorter is None:
                place += size
            else:
                best, shrunk = shorter, True
        size = size if shrunk and size == 1 else size // 2
    return best


def _fails(steps, kind):
    try:
        run(steps)
    except HistoryFailed as failure:
        if kind_of(failure) == kind:
            return HistoryFailed(steps, failure.number, failure.cause)
    return None


def kind_of(failure):
    """Return the message of a failure without its values, to group failures by cause."""
    words = re.sub(r"shows .*|[0-9A-Z]{26}|\d+|\[.*?\]", "#", str(failure.cause))
    return f"{type(failure.cause).__name__}: {words[:90]}"


assert all(hasattr(Machine, name) for name in DRAWN)
