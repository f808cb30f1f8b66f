"""Erasure: `reef purge`."""

from collections.abc import Iterator
from typing import IO, Any

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
from reef.engine.handles.database import Database


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--keys-file",
    type=click.File("r", encoding="utf-8", errors="surrogateescape"),
    required=True,
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
    keys_file: IO[str],
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
    keys = list(_keys(keys_file, output))
    with executing(output, db, f"purging {namespace}", engine=engine, master=master) as executor:
        report = job("purge")(
            db, namespace, keys, executor=executor, **how, **parse_settings(settings)
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
