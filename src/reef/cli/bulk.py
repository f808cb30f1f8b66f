"""`reef import` and `export`: many rows, from and to files."""

from typing import Any

import click

from reef.cli.options import (
    ReefCommand,
    asking_to_take_over,
    encoding_option,
    engine_options,
    job,
    moment_options,
    on_namespace,
    range_options,
    take_over_option,
)
from reef.cli.output import Output
from reef.cli.progress import CountingExecutor, executing, progress
from reef.engine.database import Database
from reef.jobs.executor import Executor
from reef.jobs.export import SEAL, SUFFIXES, TASKS_AT_ONCE, open_files
from reef.jobs.imports import ImportProgress

__all__ = ["export_command", "import_command"]


@click.command("import", cls=ReefCommand)
@on_namespace
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--key", metavar="NAME", help="The column that is the key.")
@click.option(
    "--mode",
    type=click.Choice(["upsert", "patch"]),
    default="upsert",
    show_default=True,
    help="Whole rows, or only the columns that the files have.",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    metavar="N",
    help="Rows that are committed together.",
)
@click.option(
    "--create/--no-create",
    default=True,
    help="Make a namespace that is not there, with the files' columns; so by default.",
)
@take_over_option
def import_command(
    output: Output, db: Database, namespace: str, *, sources: tuple[str, ...], **how: Any
) -> None:
    """Write the rows of Parquet or Arrow files into a namespace.

    A source is a file, or a directory or URL of files. Each batch is committed once: an import
    that was interrupted goes on where it was when it is run again. Options of a source's store
    stand in its URL, such as s3://bucket/in?region=eu-west-1; --option is for the first one.

    Example: reef import ./data people people.parquet
    """
    with progress(output, f"importing into {namespace}", "rows") as meter:

        def tell(at: ImportProgress) -> None:
            """All rows are known at the end; before, by the files that are done."""
            meter.reach(at.rows, at.rows * at.files // at.files_done if at.files_done else None)

        try:
            with asking_to_take_over():
                report = job("import_files")(db, namespace, list(sources), progress=tell, **how)
        except KeyboardInterrupt:
            output.note(f"{meter.done} rows were committed; run it again to go on")
            raise
    output.report(f"imported into {namespace}", report)


@click.command("export", cls=ReefCommand)
@on_namespace
@range_options
@moment_options
@click.argument("target")
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "arrow"]),
    default="parquet",
    show_default=True,
    help="Of the files.",
)
@click.option("--columns", metavar="A,B", help="Only these, in this order.")
@click.option("--where", metavar="TEXT", help="For instance \"amount > 5 AND state = 'open'\".")
@click.option("--rows-per-file", type=click.IntRange(min=1), metavar="N", help="At most.")
@engine_options
@encoding_option
def export_command(
    output: Output,
    db: Database,
    namespace: str,
    *,
    target: str,
    form: str,
    bounds: dict[str, bytes | None],
    moment: dict[str, Any],
    columns: str | None,
    engine: str,
    master: str | None,
    **how: Any,
) -> None:
    """Write rows to Parquet or Arrow files.

    They go to a directory or bucket that holds none yet, in the order of their keys. _export.json,
    written last, names them all: without it, an export is not whole. Options of a target's store
    stand in its URL, such as s3://bucket/out?region=eu-west-1; --option is for the first one.

    Example: reef export ./data users ./exported
    """
    given = {name: value for name, value in (how | bounds).items() if value is not None}
    if "snapshot" in moment:
        given["snapshot"] = moment["snapshot"]
    elif moment:
        given["as_of"] = moment
    if columns is not None:
        given["columns"] = [name.strip() for name in columns.split(",")]
    executor: Executor | None = None
    try:
        with executing(
            output,
            db,
            f"exporting {namespace}",
            engine=engine,
            master=master,
            at_once=TASKS_AT_ONCE,
        ) as executor:
            report = job("export")(db, namespace, target, format=form, executor=executor, **given)
    except KeyboardInterrupt:
        _remove(target, executor)
        raise
    output.report(f"exported {namespace}", report)


def _remove(target: str, executor: Executor | None) -> None:
    """Remove what an interrupted export has written: it would be in the next one's way.

    The job has seen that there were no such files before it began its tasks, and removes by
    itself what a failure leaves.
    """
    if isinstance(executor, CountingExecutor) and executor.has_begun:
        files = open_files(target)
        written = [info.key for info in files.list()]
        if SEAL not in written:  # with it, the export is whole
            files.delete_many([key for key in written if key.endswith(SUFFIXES)])
