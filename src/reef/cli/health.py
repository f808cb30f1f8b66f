"""`reef health`: whether a namespace needs somebody, as an exit code and the reason."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from reef.cli.options import EXIT_PROBLEMS, ReefCommand, job, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.jobs.health import HealthLimits

__all__ = ["health"]

F = TypeVar("F", bound=Callable[..., Any])
DEFAULTS = HealthLimits()


def _limit(name: str, typed: type, what: str) -> Callable[[F], F]:
    """Return the option of one limit: seconds lose their unit, which the help says."""
    default = getattr(DEFAULTS, name)
    unit = "SECONDS" if name.endswith("_s") else "N"
    told = "no limit" if default == float("inf") else f"{default:,.0f}"
    option = "--" + name.removesuffix("_s").replace("_", "-")
    return click.option(option, name, type=typed, metavar=unit, help=f"{what}; {told}.")


@click.command(cls=ReefCommand)
@on_namespace
@_limit("fold_lag_lsns", int, "Objects of the log that are not folded")
@_limit("fold_lag_s", float, "Since when rows have waited to be folded")
@_limit("unfolded_bytes", int, "Bytes of the log that are not folded")
@_limit("sweep_lag_s", float, "Since when there is something to sweep")
@_limit("retain_s", float, "How long sweeps keep generations")
@_limit("writer_silent_s", float, "Since when nobody has written")
def health(output: Output, db: Database, namespace: str, **limits: Any) -> int:
    """Exit with 0 if all is well, with 2 if not; say why.

    Looks at the newest manifest, at both ends of the log, at how far folds and sweeps are behind
    and at who wrote last. Each option is a limit, past which it is not well. Cheap enough for a
    probe every minute; `verify` looks at everything.

    Example: reef health ./data users --fold-lag 600 --writer-silent 3600
    """
    given = {name: limit for name, limit in limits.items() if limit is not None}
    report = job("health")(db, namespace, **given)
    if output.is_json:
        output.json(report)
    elif report.healthy:
        output.line(f"{namespace} is well", style="green")
        measures = {n: m if m is None else round(m, 1) for n, m in report.measures.items()}
        output.record("", measures)
    else:
        output.line(f"{namespace} is not well", style="bold red")
        for problem in report.problems:
            output.line(f"  {problem.name}: {problem.message}. {problem.hint}")
    return 0 if report.healthy else EXIT_PROBLEMS
