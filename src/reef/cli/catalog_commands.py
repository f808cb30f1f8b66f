"""`reef catalog …`: the registry of a bucket, or a catalog of one's own."""

import click

from reef import catalog as catalogs
from reef import stores
from reef.cli.options import EXIT_PROBLEMS, ReefCommand, on_bucket, parse_options, store_options
from reef.cli.output import Output
from reef.engine.database import Database
from reef.engine.registry import REGISTRY, Registry

__all__ = ["catalog"]


@click.group()
def catalog() -> None:
    """The registry of a bucket, or a catalog of your own."""


@catalog.command("verify", cls=ReefCommand)
@click.argument("url")
@click.option(
    "--prefix",
    default=REGISTRY,
    show_default=True,
    help="Where the catalog lies below the URL; empty for one that was opened at the URL itself.",
)
@store_options
@click.pass_obj
def verify_command(output: Output, url: str, prefix: str, options: tuple[str, ...]) -> int:
    """Print every problem of a catalog.

    Reads the head, every checkpoint and every segment that is there, and proves that the set hash
    of the state was carried on from checkpoint to checkpoint. Changes nothing. Exits with 2 if
    there is a problem.

    Example: reef catalog verify ./data
    """
    store = stores.open(url, **parse_options(options))
    report = catalogs.Catalog(store, prefix=prefix).verify()
    shown = url.partition("?")[0]  # what follows may hold a password
    output.report(f"verified {shown}" + (f"/{prefix}" if prefix else ""), report)
    return EXIT_PROBLEMS if report.problems else 0


@catalog.command("rebuild", cls=ReefCommand)
@on_bucket
def rebuild_command(output: Output, db: Database) -> None:
    """Make the registry of a bucket from its namespaces.

    For a bucket whose `catalog/` is lost or damaged, or that is older than its registry. One LIST
    per namespace, and its newest manifest; safe beside everything else.

    Example: reef catalog rebuild ./data
    """
    states = Registry(db.store).rebuild()
    rows = [{"namespace": name, "state": str(state)} for name, state in sorted(states.items())]
    output.table(f"registered, of {db.store.url}", ("namespace", "state"), rows)
