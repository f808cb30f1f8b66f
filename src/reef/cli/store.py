"""`reef store …`: the bucket itself, whatever is in it."""

import click

from reef import stores
from reef.cli.options import EXIT_PROBLEMS, ReefCommand, parse_options, store_options
from reef.cli.output import Output
from reef.errors import InvalidInputError, Kind
from reef.stores.probe import Verdict, agree_on_cas, check_cas, probe
from reef.stores.two_phase import after_restore, find_two_phase, recover

__all__ = ["store"]


@click.group()
def store() -> None:
    """Whether a bucket can be trusted, and what its writers left unfinished."""


@store.command("probe", cls=ReefCommand)
@click.argument("url")
@click.option("--remember", is_flag=True, help="Keep the verdict in the bucket, as a writer would.")
@store_options
@click.pass_obj
def probe_command(output: Output, url: str, remember: bool, options: tuple[str, ...]) -> None:
    """Prove by racing that conditional writes exclude.

    Writes objects of up to 5 MiB below store/probe/, namespaces/_probe-… and catalog/_probe-…,
    16 MiB in all, and removes them again. Exits with 1,
    and names the alternative, if the store lets two writers win.

    Example: reef store probe s3://bucket/prefix -o endpoint=http://127.0.0.1:9000
    """
    opened = stores.open(url, **parse_options(options))
    verdict = agree_on_cas(opened) if remember else probe(opened)
    output.record(f"{opened.url} can be written to", _facts(opened, verdict))


@store.command("recover", cls=ReefCommand)
@click.argument("url")
@click.option(
    "--restored",
    is_flag=True,
    help="The register was restored from a backup, and no writer is open.",
)
@store_options
@click.pass_obj
def recover_command(output: Output, url: str, restored: bool, options: tuple[str, ...]) -> int:
    """Finish what dead writers left in a bucket with a register.

    Every writer does this for its namespace when it opens; here it is done for the whole
    bucket. Safe at any time, beside writers. Exits with 2 if the bytes of a record are nowhere:
    such a record is kept, and its name stays taken.

    After the register was restored from a backup, stop all writers and run it with --restored
    before they are started again: it also gives the register a new incarnation, and removes
    temporary objects that the register does not know.

    Example: reef store recover ./shared -o cas=sqlite:///register.db
    """
    opened = stores.open(url, **parse_options(options))
    if find_two_phase(opened) is None:
        raise InvalidInputError(
            f"{opened.url} was opened without a register",
            kind=Kind.INVALID_OPTION,
            hint="Name the one that its writers use: -o cas=<register URL>",
        )
    check_cas(opened)  # with another register there would be nothing to find
    report = after_restore(opened) if restored else recover(opened)
    output.record(f"{opened.url} was recovered", report.to_dict())
    return EXIT_PROBLEMS if report.stuck else 0


def _facts(opened: stores.Store, verdict: Verdict) -> dict[str, object]:
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
    """Find the meter among the wrappers that `stores.open` put around the backend."""
    while not isinstance(opened, stores.Meter):
        assert isinstance(opened, stores.Wrapper)
        opened = opened.inner
    return opened
