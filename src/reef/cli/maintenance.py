"""`reef index` (also `fold`), `compact` and `gc` (also `sweep`): what keeps a namespace quick.

Writers do all of this in the background; these commands are for those who would rather choose the
moment, or the machine. All are safe beside writers, readers and one another.
"""

from typing import Any

import click

from reef.cli.options import (
    ReefCommand,
    engine_options,
    job,
    on_namespace,
    parse_settings,
    settings_option,
)
from reef.cli.output import Output
from reef.cli.progress import executing
from reef.config import CompactSettings
from reef.engine.database import Database

__all__ = ["compact", "gc", "index"]


@click.command(cls=ReefCommand)
@on_namespace
@engine_options
@settings_option
def index(
    output: Output,
    db: Database,
    namespace: str,
    *,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
) -> None:
    """Fold the log into segments, so that opening is quick.

    Settings: segment_bytes_max, group_bytes, codec (zstd, lz4, none), log_bytes, stretches_max,
    shuffle_bytes_min.

    Example: reef index ./data users
    """
    wanted = parse_settings(settings)
    with executing(output, db, f"folding {namespace}", engine=engine, master=master) as executor:
        report = job("fold")(db, namespace, executor=executor, **wanted)
    output.report(f"folded {namespace}", report)


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--strategy",
    type=click.Choice(["tiered", "leveled"]),
    default="tiered",
    show_default=True,
    help="Few rewrites, or few overlaps.",
)
@click.option("--full", is_flag=True, help="Merge all there is, once.")
@engine_options
@settings_option
def compact(
    output: Output,
    db: Database,
    namespace: str,
    *,
    strategy: str,
    full: bool,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
) -> None:
    """Merge segments, so that reads look at fewer of them.

    Does what is due, until nothing is. Takes the compactor role: a compaction that runs in the
    background elsewhere steps down.

    Example: reef compact ./data users --strategy leveled
    """
    wanted = parse_settings(settings)
    at_once = CompactSettings().changed(wanted).tasks_max  # each holds rows in memory
    label = f"compacting {namespace}"
    with executing(output, db, label, engine=engine, master=master, at_once=at_once) as executor:
        report = job("compact")(
            db, namespace, strategy=strategy, full=full, executor=executor, **wanted
        )
    output.report(f"compacted {namespace}", report)


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--apply", is_flag=True, help="Do it; without, only say what would be done.")
@click.option("--force", is_flag=True, help="Even if it is more than half of all bytes.")
@settings_option
def gc(
    output: Output,
    db: Database,
    namespace: str,
    *,
    apply: bool,
    force: bool,
    settings: tuple[str, ...],
) -> None:
    """Delete what nobody needs any more.

    A dry run, unless it is applied. What no generation, snapshot, lease, cursor or job needs is
    condemned by one call, and deleted by a later one, when the grace period has passed. Settings:
    retain_generations_s, dropped_s, retain_generations_max, condemned_max, deletes_max, share_max,
    share_bytes_min, stale_upload_s, silent_job_s, silent_compactor_s.

    Example: reef gc ./data users --apply
    """
    wanted: dict[str, Any] = parse_settings(settings)
    report = job("sweep")(db, namespace, apply=apply, force=force, **wanted)
    output.report(f"swept {namespace}" if apply else f"a sweep of {namespace} would", report)
    if not apply:
        output.note("dry run: nothing was changed; add --apply to do it")
