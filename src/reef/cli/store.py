"""The bucket: `reef store`, `catalog`, `stats` and `namespaces`."""

import click
from rich.table import Table

from reef import catalog as catalogs
from reef import stores
from reef.cli.options import (
    EXIT_PROBLEMS,
    ReefCommand,
    encoding_option,
    on_bucket,
    on_namespace,
    parse_options,
    store_options,
)
from reef.cli.output import Output, level_lanes
from reef.engine.display import human_bytes
from reef.engine.handles.database import Database
from reef.engine.registry import REGISTRY, Registry
from reef.engine.stats import NamespaceStats
from reef.errors import ErrorKind, InvalidInputError
from reef.stores.probe import CasVerdict, agree_on_cas, check_cas, probe
from reef.stores.two_phase import after_restore, find_two_phase, recover


@click.group()
def store() -> None:
    """Check a bucket, and recover pending writes."""


@store.command("probe", cls=ReefCommand)
@click.argument("url")
@click.option("--remember", is_flag=True, help="Store the verdict in the bucket, as a writer does.")
@store_options
@click.pass_obj
def probe_command(output: Output, url: str, remember: bool, options: tuple[str, ...]) -> None:
    """Check by concurrent requests that conditional writes exclude each other.

    Write objects of up to 5 MiB below store/probe/, namespaces/_probe-… and catalog/_probe-…,
    16 MiB in all, and delete them. Exit with 1 and name the alternative if two writers can win.

    Example: reef store probe s3://bucket/prefix -o endpoint=http://127.0.0.1:9000
    """
    opened = stores.open(url, **parse_options(options))
    verdict = agree_on_cas(opened) if remember else probe(opened)
    output.record(f"{opened.url} supports conditional writes", _facts(opened, verdict))


@store.command("recover", cls=ReefCommand)
@click.argument("url")
@click.option(
    "--restored",
    is_flag=True,
    help="Recover after the register was restored from a backup; no writer may be open.",
)
@store_options
@click.pass_obj
def recover_command(output: Output, url: str, restored: bool, options: tuple[str, ...]) -> int:
    """Complete the pending writes of dead writers in a bucket with a register.

    Every writer does this for its namespace when it opens; this command does it for the whole
    bucket. Safe while writers are running. Exit with 2 if the bytes of a record are missing: the
    record is kept, and its name stays taken.

    After the register was restored from a backup, stop all writers and run this with --restored
    before they are started again: it also gives the register a new incarnation, and deletes
    temporary objects that the register does not know.

    Example: reef store recover ./shared -o cas=sqlite:///register.db
    """
    opened = stores.open(url, **parse_options(options))
    if find_two_phase(opened) is None:
        raise InvalidInputError(
            f"{opened.url} was opened without a register",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass the register of its writers: -o cas=<register URL>",
        )
    check_cas(opened)  # another register has no pending records
    report = after_restore(opened) if restored else recover(opened)
    output.record(f"{opened.url} was recovered", report.to_dict())
    return EXIT_PROBLEMS if report.stuck else 0


def _facts(opened: stores.Store, verdict: CasVerdict) -> dict[str, object]:
    return {
        "compare_and_swap": verdict.cas,
        "create_only_holds": True,
        "if_match_holds": verdict.if_match,
        "bytes_proved": verdict.bytes_proved,
        "clock_resolution_s": opened.capabilities.clock_resolution_s,
        "shared_between_processes": opened.capabilities.shared,
        "requests_of_this_probe": _meter(opened).meter.requests(),
    }


def _meter(opened: stores.Store) -> stores.Meter:
    """Find the meter among the wrappers of a store."""
    while not isinstance(opened, stores.Meter):
        assert isinstance(opened, stores.Wrapper)
        opened = opened.inner
    return opened


@click.group()
def catalog() -> None:
    """Verify or rebuild a catalog."""


@catalog.command("verify", cls=ReefCommand)
@click.argument("url")
@click.option(
    "--prefix",
    default=REGISTRY,
    show_default=True,
    help="Use the catalog below this prefix; empty for a catalog at the URL itself.",
)
@store_options
@click.pass_obj
def verify_command(output: Output, url: str, prefix: str, options: tuple[str, ...]) -> int:
    """Check a catalog and print every problem.

    Read the head, every checkpoint and every segment, and prove that the set hash of the state is
    conserved from checkpoint to checkpoint. Change nothing. Exit with 2 if there is a problem.

    Example: reef catalog verify ./data
    """
    store = stores.open(url, **parse_options(options))
    report = catalogs.Catalog(store, prefix=prefix).verify()
    shown = url.partition("?")[0]  # the query may contain a password
    output.report(f"verified {shown}" + (f"/{prefix}" if prefix else ""), report)
    return EXIT_PROBLEMS if report.problems else 0


@catalog.command("rebuild", cls=ReefCommand)
@on_bucket
def rebuild_command(output: Output, db: Database) -> None:
    """Rebuild the registry of a bucket from its namespaces.

    For a bucket whose `catalog/` is lost, damaged or older than its namespaces. Costs one LIST and
    one GET per namespace; safe while other processes are running.

    Example: reef catalog rebuild ./data
    """
    states = Registry(db.store).rebuild()
    rows = [{"namespace": name, "state": str(state)} for name, state in sorted(states.items())]
    output.table(f"registry of {db.store.url}", ("namespace", "state"), rows)


PICTURE_WIDTH = 60
KEY_WIDTH = 20
FIGURES_WIDTH = 50
"""The width of the columns to the left of the bars."""


@click.command(cls=ReefCommand)
@on_namespace
@encoding_option
def stats(output: Output, db: Database, namespace: str) -> None:
    """Show levels, log, pins and the writer of a namespace.

    Draw one bar per segment, over its key range.

    Example: reef stats ./data users
    """
    found = db.stats(namespace)
    if output.is_json:
        output.json(found)
        return
    output.record(f"namespace {namespace}", {**found.facts(), "columns": found.columns})
    if found.levels:
        _levels(output, found)
    for name, pins in (("snapshots", found.snapshots), ("cursors", found.cursors)):
        if pins:
            output.record(name, pins)
    for damage in found.damage:
        output.line(f"damaged: {damage}", style="bold red")


def _levels(output: Output, found: NamespaceStats) -> None:
    width = max(KEY_WIDTH, min(PICTURE_WIDTH, output.console.width - FIGURES_WIDTH))
    lanes = level_lanes(found.levels, width)
    table = Table(box=None, pad_edge=False)
    for name in ("level", "segments", "bytes", "rows", "tombstones"):
        table.add_column(name, justify="right", vertical="top")
    table.add_column("keys", no_wrap=True)
    for level in found.levels:
        table.add_row(
            str(level.level),
            f"{len(level.segments):,}",
            human_bytes(level.bytes),
            f"{level.rows:,}",
            f"{level.tombstones:,}",
            "\n".join(lanes[level.level]),
        )
    first = min(level.min_key for level in found.levels)
    last = max(level.max_key for level in found.levels)
    table.add_row(*[""] * 5, _scale(output, first, last, width))
    output.line("")
    output.console.print(table, markup=False)


def _scale(output: Output, first: bytes, last: bytes, width: int) -> str:
    left, right = (output.cell(key)[: width // 2 - 1] for key in (first, last))
    return left + right.rjust(width - len(left))


@click.command(cls=ReefCommand)
@on_bucket
@click.option("--dropped", is_flag=True, help="List the dropped ones instead.")
def namespaces(output: Output, db: Database, *, dropped: bool) -> None:
    """List the namespaces of a bucket.

    Example: reef namespaces ./data
    """
    output.table(
        f"namespaces of {db.store.url}",
        ("namespace",),
        [{"namespace": name} for name in db.namespaces(dropped=dropped)],
    )
