"""`reef verify`, `repair` and `rebuild`: is it all there, and what to do where it is not."""

import click

from reef.cli.options import (
    EXIT_PROBLEMS,
    ReefCommand,
    encoding_option,
    engine_options,
    job,
    on_namespace,
)
from reef.cli.output import Output
from reef.cli.progress import executing
from reef.engine.database import Database

__all__ = ["rebuild", "repair", "verify"]

DRY_RUN = "dry run: nothing was changed; add --apply to do it"


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--deep", is_flag=True, help="Read every block of every segment too.")
@engine_options
@encoding_option
def verify(
    output: Output, db: Database, namespace: str, *, deep: bool, engine: str, master: str | None
) -> int:
    """Print every problem of everything that is needed.

    Changes nothing. Exits with 2 if there is a problem.

    Example: reef verify ./data users --deep
    """
    with executing(output, db, f"verifying {namespace}", engine=engine, master=master) as executor:
        report = job("verify")(db, namespace, deep=deep, executor=executor)
    output.report(f"verified {namespace}", report)
    return EXIT_PROBLEMS if report.problems else 0


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--apply", is_flag=True, help="Do it; without, only say what would be done.")
def repair(output: Output, db: Database, namespace: str, *, apply: bool) -> int:
    """Bring a damaged namespace back to service.

    A dry run, unless it is applied. Damaged objects go to quarantine, never away, and the report
    says exactly what is lost. Exits with 2 if a dry run finds damage, or if some is left.

    Example: reef repair ./data users --apply
    """
    with executing(output, db, f"repairing {namespace}") as executor:
        report = job("repair")(db, namespace, apply=apply, executor=executor)
    output.report(f"repair of {namespace}", report)
    if not apply:
        output.note(DRY_RUN)
    left = report.unrepaired if apply else report.problems
    return EXIT_PROBLEMS if left else 0


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--apply", is_flag=True, help="Publish it; without, only compare.")
@click.option(
    "--force", is_flag=True, help="In place of a manifest that differs, whatever is lost."
)
@engine_options
def rebuild(
    output: Output,
    db: Database,
    namespace: str,
    *,
    apply: bool,
    force: bool,
    engine: str,
    master: str | None,
) -> int:
    """Make a manifest again, from what lies in the bucket.

    Nothing but segments and log is needed. What comes out is compared with what is published, if
    that can be read. The report says what cannot be derived, such as snapshots and cursors. With
    --apply it is published where there is no manifest. Exits with 2 if rows differ or are lost.

    Example: reef rebuild ./data users
    """
    with executing(output, db, f"rebuilding {namespace}", engine=engine, master=master) as executor:
        report = job("rebuild")(db, namespace, apply=apply, force=force, executor=executor)
    output.report(f"rebuild of {namespace}", report)
    if not apply:
        output.note(DRY_RUN)
    differs = report.rows_equal is False and not report.applied
    return EXIT_PROBLEMS if report.problems or differs else 0
