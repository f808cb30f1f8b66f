"""Maintenance: `reef fold`, `compact`, `sweep`, `purge`, `health`, `verify`, `repair`, `rebuild`.

Writers fold, compact and sweep in the background; these commands run the same jobs at a chosen time
or on another machine. All are safe while writers, readers and other jobs are running.
"""

from collections.abc import Callable, Iterator
from typing import IO, Any, ClassVar, TypeVar

import click

from reef.cli.options import (
    EXIT_PROBLEMS,
    ReefCommand,
    encoding_option,
    engine_options,
    executing,
    job,
    on_namespace,
    parse_settings,
    settings_option,
)
from reef.cli.output import Output, parse_bytes
from reef.config import CompactSettings
from reef.engine.handles.database import Database
from reef.jobs.health import HealthLimits

F = TypeVar("F", bound=Callable[..., Any])
DEFAULTS = HealthLimits()
DRY_RUN = "dry run: nothing was changed; add --apply to apply it"


@click.command(cls=ReefCommand)
@on_namespace
@engine_options
@settings_option
def fold(
    output: Output,
    db: Database,
    namespace: str,
    *,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
) -> None:
    """Fold the log into segments, which makes opening faster.

    Settings: segment_bytes_max, group_bytes, codec (zstd, lz4, none), log_bytes, stretches_max,
    shuffle_bytes_min.

    Example: reef fold ./data users
    """
    options = parse_settings(settings)
    with executing(output, db, f"folding {namespace}", engine=engine, master=master) as executor:
        report = job("fold")(db, namespace, executor=executor, **options)
    output.report(f"folded {namespace}", report)


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--strategy",
    type=click.Choice(["tiered", "leveled"]),
    default="tiered",
    show_default=True,
    help="Choose fewer rewrites (tiered) or fewer overlaps (leveled).",
)
@click.option("--full", is_flag=True, help="Merge all segments once.")
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
    """Merge segments, which makes reads faster.

    Repeat until no compaction is due. Takes the compactor role: a background compaction in another
    process stops.

    Example: reef compact ./data users --strategy leveled
    """
    options = parse_settings(settings)
    at_once = CompactSettings().changed(options).tasks_max  # each task holds rows in memory
    label = f"compacting {namespace}"
    with executing(output, db, label, engine=engine, master=master, at_once=at_once) as executor:
        report = job("compact")(
            db, namespace, strategy=strategy, full=full, executor=executor, **options
        )
    output.report(f"compacted {namespace}", report)


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--apply", is_flag=True, help="Apply the changes instead of printing them.")
@click.option("--force", is_flag=True, help="Allow deleting more than half of all bytes.")
@settings_option
def sweep(
    output: Output,
    db: Database,
    namespace: str,
    *,
    apply: bool,
    force: bool,
    settings: tuple[str, ...],
) -> None:
    """Delete unreferenced objects.

    Dry run by default. Objects that no generation, snapshot, lease, cursor or job needs are
    condemned by one call, and deleted by a later one after the grace period. Settings:
    retain_generations_s, dropped_s, retain_generations_max, condemned_max, deletes_max, share_max,
    share_bytes_min, stale_upload_s, silent_job_s, silent_compactor_s.

    Example: reef sweep ./data users --apply
    """
    options: dict[str, Any] = parse_settings(settings)
    report = job("sweep")(db, namespace, apply=apply, force=force, **options)
    output.report(f"swept {namespace}" if apply else f"sweep of {namespace}, dry run", report)
    if not apply:
        output.note(DRY_RUN)


def _limit(name: str, typed: type, meaning: str) -> Callable[[F], F]:
    """Return the option of a limit; the unit of seconds is in its metavar, not in its name."""
    default = getattr(DEFAULTS, name)
    unit = "SECONDS" if name.endswith("_s") else "N"
    shown = "no limit" if default == float("inf") else f"{default:,.0f}"
    option = "--" + name.removesuffix("_s").replace("_", "-")
    return click.option(
        option, name, type=typed, metavar=unit, help=f"Limit {meaning}. Default: {shown}."
    )


@click.command(cls=ReefCommand)
@on_namespace
@_limit("fold_lag_lsns", int, "the number of unfolded WAL objects")
@_limit("fold_lag_s", float, "the age of the oldest unfolded row")
@_limit("unfolded_bytes", int, "the size of the unfolded log")
@_limit("sweep_lag_s", float, "the time since objects became deletable")
@_limit("retain_s", float, "the time that sweeps retain generations")
@_limit("writer_silent_s", float, "the time since the last write")
def health(output: Output, db: Database, namespace: str, **limits: Any) -> int:
    """Check limits; exit with 0 if the namespace is healthy, with 2 if not.

    Check the newest manifest, both ends of the log, the lag of folds and sweeps, and the last
    write. Cheap enough for a probe every minute; `verify` checks everything.

    Example: reef health ./data users --fold-lag 600 --writer-silent 3600
    """
    given = {name: limit for name, limit in limits.items() if limit is not None}
    report = job("health")(db, namespace, **given)
    if output.is_json:
        output.json(report)
    elif report.healthy:
        output.line(f"{namespace} is healthy", style="green")
        measures = {n: m if m is None else round(m, 1) for n, m in report.measures.items()}
        output.record("", measures)
    else:
        output.line(f"{namespace} is not healthy", style="bold red")
        for problem in report.problems:
            output.line(f"  {problem.name}: {problem.message}. {problem.hint}")
    return 0 if report.healthy else EXIT_PROBLEMS


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--deep", is_flag=True, help="Also read every block of every segment.")
@click.option(
    "--indexes",
    type=click.Choice(["sample", "all"]),
    default="sample",
    help="With --deep: which rows are compared with search indexes.",
)
@engine_options
@encoding_option
def verify(
    output: Output,
    db: Database,
    namespace: str,
    *,
    deep: bool,
    indexes: str,
    engine: str,
    master: str | None,
) -> int:
    """Check the objects of a namespace and print every problem.

    Change nothing. Exit with 2 if there is a problem.

    Example: reef verify ./data users --deep
    """
    with executing(output, db, f"verifying {namespace}", engine=engine, master=master) as executor:
        report = job("verify")(db, namespace, deep=deep, indexes=indexes, executor=executor)
    output.report(f"verified {namespace}", report if output.is_json else _Verified(report))
    return EXIT_PROBLEMS if report.problems else 0


class _Verified:
    """A report as text shows it: rows that are not folded yet are in the log."""

    NAMES: ClassVar = {"objects": "objects_of_the_log", "rows": "rows_of_segments"}

    def __init__(self, report: Any) -> None:
        self._report = report

    def to_dict(self) -> dict[str, Any]:
        facts = self._report.to_dict()
        return {self.NAMES.get(name, name): value for name, value in facts.items()}


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--apply", is_flag=True, help="Apply the changes instead of printing them.")
def repair(output: Output, db: Database, namespace: str, *, apply: bool) -> int:
    """Restore a damaged namespace to service.

    Dry run by default. Damaged objects are copied to quarantine, not deleted, and the report lists
    all losses. Exit with 2 if a dry run finds damage, or if damage remains.

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
@click.option("--apply", is_flag=True, help="Publish the manifest instead of comparing it.")
@click.option("--force", is_flag=True, help="Replace a manifest that differs, whatever is lost.")
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
    """Rebuild the manifest from segments and log.

    Compare the result with the published manifest, if that can be read. The report lists state
    that cannot be derived, such as snapshots and cursors. With --apply, publish the result if there
    is no manifest. Exit with 2 if rows differ or are lost.

    Example: reef rebuild ./data users
    """
    with executing(output, db, f"rebuilding {namespace}", engine=engine, master=master) as executor:
        report = job("rebuild")(db, namespace, apply=apply, force=force, executor=executor)
    output.report(f"rebuild of {namespace}", report)
    if not apply:
        output.note(DRY_RUN)
    differs = report.rows_equal is False and not report.applied
    return EXIT_PROBLEMS if report.problems or differs else 0


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("keys", nargs=-1, metavar="[KEY]…")
@click.option(
    "--keys-file",
    type=click.File("r", encoding="utf-8", errors="surrogateescape"),
    help="Read the keys from this file, one per line; - is stdin.",
)
@click.option(
    "--apply/--dry-run",
    default=True,
    help="Erase, or only print the objects that hold rows of the keys. Default: erase.",
)
@click.option(
    "--release-snapshots", is_flag=True, help="Release the snapshots that pin rows of the keys."
)
@click.option(
    "--include-branches",
    is_flag=True,
    help="Erase the rows from branches too, and copy the rows that they share.",
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Wait for grace periods, for this time at most. Default: 0.",
)
@engine_options
@settings_option
@encoding_option
def purge(
    output: Output,
    db: Database,
    namespace: str,
    *,
    keys: tuple[str, ...],
    keys_file: IO[str] | None,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
    **how: Any,
) -> int:
    """Erase the rows of some keys from every object, and prove it by a scan.

    Delete the rows, rewrite the segments that hold them, and sweep. Objects are deleted after the
    grace period: run the command again then, or use --wait. With --dry-run, only print the objects
    that hold rows of the keys, and what pins them. Exit with 2 while an object holds a row of the
    keys.

    Settings are those of `reef compact`, such as codec.

    Example: reef purge ./data users --keys-file keys.txt
    """
    if not keys and keys_file is None:
        raise click.UsageError("pass a KEY, or --keys-file")
    named = [parse_bytes(key, output.encoding, "the key") for key in keys]
    named += _keys(keys_file, output) if keys_file is not None else ()
    with executing(output, db, f"purging {namespace}", engine=engine, master=master) as executor:
        report = job("purge")(
            db, namespace, named, executor=executor, **how, **parse_settings(settings)
        )
    title = f"purged {namespace}" if report.applied else f"purge of {namespace}, dry run"
    output.report(title, report if output.is_json else _Shown(report))
    return 0 if report.erased else EXIT_PROBLEMS


def _keys(lines: IO[str], output: Output) -> Iterator[bytes]:
    """Yield the keys of a file; empty lines are no keys."""
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if text:
            yield parse_bytes(text, output.encoding, f"line {number}")


class _Shown:
    """A report as a table shows it: the pins of an object in one cell."""

    def __init__(self, report: Any) -> None:
        self._report = report

    def to_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._report.to_dict()
        facts["remaining"] = [
            {"object": one.object, "rows": one.rows, "pinned by": "; ".join(map(_text, one.pins))}
            for one in self._report.remaining
        ]
        return facts


def _text(pin: Any) -> str:
    return f"{pin.kind} {pin.name}" + (f" until {pin.until}" if pin.until else "")
