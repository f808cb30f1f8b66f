"""Health: whether a namespace needs an operator, by a few measures and their limits.

Cheap enough to run every minute: it costs what `db.stats` costs, and writes nothing. It reports:

    damaged head     the newest manifest, or an object at either end of the log, cannot be read
    fold lag         in LSNs, in seconds since the oldest unfolded row, and in bytes
    sweep lag        for how long objects have been due for a sweep
    writer gone      no writer has written for longer than the caller expects

Damage in between is found by `verify`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from reef.config import _Settings
from reef.engine.handles.database import Database
from reef.engine.stats import NamespaceStats
from reef.errors import CorruptionError
from reef.jobs.arguments import check_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits(_Settings):
    """The limits of health. Zero tolerates nothing."""

    fold_lag_lsns: int = 10_000
    """Opening the namespace reads each of these objects: ten thousand GETs take seconds."""
    fold_lag_s: float = 3600.0
    """Background folds run within seconds: after an hour, none is running."""
    unfolded_bytes: int = 192 << 20
    """Three quarters of the bytes at which a writer makes its clients wait."""
    sweep_lag_s: float = 24 * 3600.0
    """One sweep a day is enough: later, unused space is paid for."""
    retain_s: float = 24 * 3600.0
    """How long sweeps keep generations; only older ones count as lag."""
    writer_silent_s: float = float("inf")
    """No limit: an idle writer writes nothing, and a table that is loaded by night has none by
    day. Set it if a process is known to write all the time."""


class HealthOptions(TypedDict, total=False):
    """`HealthLimits` as keyword arguments."""

    fold_lag_lsns: int
    fold_lag_s: float
    unfolded_bytes: int
    sweep_lag_s: float
    retain_s: float
    writer_silent_s: float


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """A measure that exceeds its limit."""

    name: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The problems and the measures of a namespace."""

    namespace: str
    problems: tuple[HealthProblem, ...]
    measures: dict[str, float | None]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


def health(db: Database, namespace: str, **limits: Unpack[HealthOptions]) -> HealthReport:
    """Compare a namespace with limits (see HealthLimits); NotFoundError if there is none."""
    check_arguments(db)
    changed = HealthLimits().changed(limits)
    try:
        stats = db.stats(namespace)
    except CorruptionError as error:  # not even an older manifest can be read
        problem = HealthProblem("damaged head", error.message, "Run repair, or rebuild")
        return HealthReport(namespace, (problem,), {})
    measures = _measures(stats, changed)
    return HealthReport(namespace, tuple(_problems(stats, measures, changed)), measures)


def _measures(stats: NamespaceStats, limits: HealthLimits) -> dict[str, float | None]:
    superseded_s = stats.oldest_superseded_s or 0.0
    return {
        "fold_lag_lsns": stats.log.objects,
        "fold_lag_s": stats.log.oldest_unfolded_s or 0.0,
        "unfolded_bytes": stats.log.bytes,
        "sweep_lag_s": max(stats.overdue_s, superseded_s - limits.retain_s, 0.0),
        "writer_silent_s": None if stats.writer is None else stats.writer.silent_s,
    }


def _problems(
    stats: NamespaceStats, measures: dict[str, float | None], limits: HealthLimits
) -> Iterator[HealthProblem]:
    for damage in stats.damage:
        yield HealthProblem("damaged head", damage, "Run verify, then repair")
    for name, message, hint in _RULES:
        measure, limit = measures[name], getattr(limits, name)
        if measure is None and limit != float("inf"):
            yield HealthProblem(
                "writer gone", "the namespace never had a writer", "Start the writer"
            )
        elif measure is not None and measure > limit:
            words = message.format(measure=measure, limit=limit, stats=stats)
            yield HealthProblem(_NAMES[name], words, hint)


_NAMES = {
    "fold_lag_lsns": "fold lag",
    "fold_lag_s": "fold lag",
    "unfolded_bytes": "unfolded bytes",
    "sweep_lag_s": "sweep lag",
    "writer_silent_s": "writer gone",
}
_FOLD = "Run fold (reef fold), or check why the background fold does not run"
_RULES = (
    (
        "fold_lag_lsns",
        "{measure:,} objects of the log are not folded, from LSN {stats.log.floor} to "
        "{stats.log.last_lsn}; the limit is {limit:,}",
        _FOLD,
    ),
    (
        "fold_lag_s",
        "rows have waited in the log for {measure:,.0f} s; the limit is {limit:,.0f} s",
        _FOLD,
    ),
    (
        "unfolded_bytes",
        "{measure:,} bytes of the log are not folded; the limit is {limit:,}",
        _FOLD,
    ),
    (
        "sweep_lag_s",
        "objects have been due for a sweep for {measure:,.0f} s; the limit is {limit:,.0f} s",
        "Run sweep (reef sweep --apply)",
    ),
    (
        "writer_silent_s",
        "the last writer, {stats.writer.id} of epoch {stats.writer.epoch}, has been silent for "
        "{measure:,.0f} s; the limit is {limit:,.0f} s",
        "Check whether it is still running",
    ),
)
"""Measure, message, hint."""
