"""`reef store …`: the bucket itself, whatever is in it."""

import click

from reef import stores
from reef.cli.options import ReefCommand, parse_options, store_options
from reef.cli.output import Output
from reef.stores.probe import Verdict, agree_on_cas, probe

__all__ = ["store"]


@click.group()
def store() -> None:
    """Whether a bucket can be trusted."""


@store.command("probe", cls=ReefCommand)
@click.argument("url")
@click.option("--remember", is_flag=True, help="Keep the verdict in the bucket, as a writer would.")
@store_options
@click.pass_obj
def probe_command(output: Output, url: str, remember: bool, options: tuple[str, ...]) -> None:
    """Prove by racing that conditional writes exclude.

    Writes a few small objects below store/probe/ and removes them again. Exits with 1,
    and names the alternative, if the store lets two writers win.

    Example: reef store probe s3://bucket/prefix -o endpoint=http://127.0.0.1:9000
    """
    opened = stores.open(url, **parse_options(options))
    verdict = agree_on_cas(opened) if remember else probe(opened)
    output.record(f"{opened.url} can be written to", _facts(opened, verdict))


def _facts(opened: stores.Store, verdict: Verdict) -> dict[str, object]:
    return {
        "compare_and_swap": verdict.cas,
        "create_only_holds": True,
        "if_match_holds": verdict.if_match,
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
