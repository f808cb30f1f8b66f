"""Measures engines against each other: in turns, many times, each operation by itself.

A `Case` is one piece of work and the engines that can do it. Its rounds alternate between them in
one process, so that a noisy neighbour hits all of them alike; a ratio is the median of the ratios
of the rounds, each by its median operation. CPU time of the process is measured as well: on a
shared machine it is the steadier figure, though it leaves out all waiting.

`compare` is the same for two functions, as the smaller benchmarks use it.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reef.telemetry import RequestMeter

__all__ = ["HEADER", "Case", "Comparison", "Figures", "Result", "compare", "measure"]

OURS = "reef"
Work = Callable[[int], object]
"""One operation; the argument counts up from round to round."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, by the engines that can do it."""

    group: str
    name: str
    works: Mapping[str, Work]
    units: int = 1
    """Rows or keys in one operation: times are those of one of them."""
    calls: int = 100
    """Operations in a round."""
    rounds: int = 5
    size: str = ""
    """`cached`, `10 × caches` or a number of rows."""
    goals: Mapping[str, float] = field(default_factory=dict)
    """The largest ratio to a peer that is promised."""
    meter: RequestMeter | None = None
    """Of the requests that Reef sends."""
    mixed: bool = False
    """Whether operations differ, so that a round is judged by their mean, not by the median."""


@dataclass(slots=True)
class Figures:
    """What one engine needed for a unit of a case."""

    seconds: float
    cpu_seconds: float
    p50: float
    p95: float
    p99: float
    slowest: float
    peak_mb: float
    """Memory of the process at its peak, above that before the rounds of this engine."""
    requests: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class Result:
    """A case with its figures."""

    group: str
    name: str
    size: str
    units: int
    figures: dict[str, Figures]
    ratios: dict[str, tuple[float, float, float]]
    """By peer: of wall time, its standard error, and of CPU time."""
    goals: dict[str, float]


class _Rounds:
    """The samples of one engine."""

    def __init__(self, case: Case, name: str) -> None:
        self._case, self._work = case, case.works[name]
        self._meter = case.meter if name == OURS else None
        self._number = 0
        self._sent = (0, 0)
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.samples: list[float] = []
        self.peak_mb = 0.0

    def run(self) -> None:
        """Time one round."""
        before_mb, clock, samples = _reset_peak(), time.perf_counter, []
        counted, cpu_s = self._counted(), time.process_time()
        for number in range(self._number, self._number + self._case.calls):
            start_s = clock()
            self._work(number)
            samples.append(clock() - start_s)
        units = self._case.calls * self._case.units
        self.cpus.append((time.process_time() - cpu_s) / units)
        typical = statistics.fmean if self._case.mixed else statistics.median
        self.walls.append(typical(samples) / self._case.units)
        self.samples += samples
        self._number += self._case.calls
        after = self._counted()
        self._sent = (self._sent[0] + after[0] - counted[0], self._sent[1] + after[1] - counted[1])
        self.peak_mb = max(self.peak_mb, status_mb("VmHWM") - before_mb)

    def figures(self) -> Figures:
        """Sum up."""
        units = self._case.units
        ordered = sorted(sample / units for sample in self.samples)
        p50, p95, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.95, 0.99))
        total = units * len(ordered)
        return Figures(
            statistics.median(self.walls),
            statistics.median(self.cpus),
            *(p50, p95, p99, ordered[-1]),
            self.peak_mb,
            self._sent[0] / total,
            self._sent[1] / total,
        )

    def _counted(self) -> tuple[int, int]:
        if self._meter is None:
            return 0, 0
        counts = self._meter.to_dict().values()
        return sum(c["requests"] for c in counts), sum(c["bytes"] for c in counts)


def measure(case: Case) -> Result:
    """Run the engines of a case in turns."""
    rounds = {name: _Rounds(case, name) for name in case.works}
    for number in range(case.rounds):
        order = list(rounds.values())
        for engine in order if number % 2 else reversed(order):
            engine.run()
    ours = rounds[OURS]
    ratios = {
        name: (*_ratio(ours.walls, peer.walls), _ratio(ours.cpus, peer.cpus)[0])
        for name, peer in rounds.items()
        if name != OURS
    }
    figures = {name: engine.figures() for name, engine in rounds.items()}
    return Result(case.group, case.name, case.size, case.units, figures, ratios, dict(case.goals))


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the median of the rounds' ratios, and its standard error."""
    ratios = sorted(a / max(b, 1e-12) for a, b in zip(ours, theirs, strict=True))
    half_spread = (ratios[int(len(ratios) * 0.84)] - ratios[int(len(ratios) * 0.16)]) / 2
    return statistics.median(ratios), 1.25 * half_spread / len(ratios) ** 0.5


def status_mb(name: str) -> float:
    """Return a line of this process's status in megabytes; 0 where there is none."""
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return 0.0


def _reset_peak() -> float:
    """Forget the largest memory so far; return the current one."""
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:
        pass
    return status_mb("VmRSS")


# --- two functions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case and its peer, and what was promised."""

    name: str
    seconds: float
    peer: str
    peer_seconds: float
    goal: float | None
    """None: stated, without a promise."""
    ratio: float
    error: float

    @property
    def met(self) -> bool:
        return self.goal is None or self.ratio <= self.goal

    def row(self) -> str:
        verdict, promised = "stated", ""
        if self.goal is not None:
            promised = f"≤ {self.goal:.3g}"
            verdict = "met" if self.met else f"missed by {self.ratio / self.goal - 1:.0%}"
        return (
            f"| {self.name} | {self.seconds * 1e6:,.0f} µs | {self.peer} | "
            f"{self.peer_seconds * 1e6:,.0f} µs | {self.ratio:.3g} ± {self.error:.1g} | "
            f"{promised} | {verdict} |"
        )


HEADER = "| what | Reef | peer | peer's | ratio | goal | |\n|---|---|---|---|---|---|---|"


def compare(
    name: str,
    work: Work,
    peer: str,
    peer_work: Work,
    *,
    goal: float | None,
    rounds: int = 30,
    calls: int = 20,
) -> Comparison:
    """Time `calls` calls of each in turns, `rounds` times."""
    case = Case("", name, {OURS: work, peer: peer_work}, calls=calls, rounds=rounds)
    result = measure(case)
    ratio, error, _ = result.ratios[peer]
    figures = result.figures
    return Comparison(name, figures[OURS].seconds, peer, figures[peer].seconds, goal, ratio, error)
