"""The command `reef`, and what its exit codes mean.

0    fine
1    an error, told on stderr
2    problems were found in the data
64   the command line was wrong
130  interrupted

Ctrl-C ends a command at once: what is on its way to the bucket is whole or not there, as with
any other death of a process (`reef_command` hears it while all this is loaded). A closed pipe
(`reef scan … | head`) is no error: its reader has what it wanted. A full disk is.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from copy import copy
from typing import Any

import click

from reef import __version__
from reef.cli.bulk import export_command, import_command
from reef.cli.catalog_commands import catalog
from reef.cli.changes import changes
from reef.cli.checks import rebuild, repair, verify
from reef.cli.cursors import cursors
from reef.cli.dropping import drop, jobs, undrop
from reef.cli.health import health
from reef.cli.inspect import inspect
from reef.cli.log_commands import log
from reef.cli.maintenance import compact, gc, index
from reef.cli.options import EXIT_PROBLEMS
from reef.cli.output import FORMS, Output, give_up_stdout
from reef.cli.reading import get, scan
from reef.cli.snapshots import snapshot
from reef.cli.stats import namespaces, stats
from reef.cli.store import store
from reef.cli.writing import create, delete, put
from reef.errors import CorruptionError, ReefError, UnavailableError

__all__ = ["main"]

EXIT_ERROR = 1
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
COMMANDS = (
    *(create, put, get, delete, scan, import_command, export_command, drop, undrop),
    *(index, compact, gc, verify, repair, rebuild),
    *(inspect, stats, health, jobs, snapshot, cursors, changes),
    *(namespaces, catalog, store, log),
)
ALIASES = {"fold": index, "sweep": gc}
"""By the words of the library."""


class _Root(click.Group):
    """The commands in the order in which people meet them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            give_up_stdout()
            return 0


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reef", message="%(prog)s %(version)s")
@click.option(
    "--output",
    "form",
    type=click.Choice(FORMS),
    default="text",
    help="Tables for people, or JSON for programs.",
)
@click.option("-v", "--verbose", is_flag=True, help="Tell on stderr what happens.")
@click.pass_context
def reef(context: click.Context, form: str, verbose: bool) -> None:
    """Reef: a storage engine whose only durable state is a bucket."""
    context.obj = Output(form)
    if verbose:
        _log_to_stderr(context)


def _log_to_stderr(context: click.Context) -> None:
    handler, log = logging.StreamHandler(), logging.getLogger("reef")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    context.call_on_close(lambda: log.removeHandler(handler))
    context.call_on_close(lambda: log.setLevel(before))


def _alias(command: click.Command, name: str) -> click.Command:
    """Return the same command under another name, with its help in that name."""
    other = copy(command)
    other.help = (command.help or "").replace(f"reef {command.name}", f"reef {name}")
    other.short_help = f"The same as {command.name}."
    other.name = name
    return other


for _command in COMMANDS:
    reef.add_command(_command)
for _name, _command in ALIASES.items():
    reef.add_command(_alias(_command, _name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and leave with an exit code."""
    _replace_closed_streams()
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # at the last moment: what was to be told is told
        code = EXIT_INTERRUPTED
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Threads may still wait for the store; whoever has no patience asks once more.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = reef.main(arguments, prog_name="reef", standalone_mode=False)
        return _flushed(code if isinstance(code, int) else 0)
    except ReefError as error:
        _output(arguments).error(error)
        return EXIT_PROBLEMS if isinstance(error, CorruptionError) else EXIT_ERROR
    except SystemExit:  # click's answer to a pipe that was closed before the help was printed
        give_up_stdout()
        return 0
    except click.exceptions.Abort:
        _output(arguments).interrupted()
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        _output(arguments).usage(error)
        return EXIT_USAGE
    except OSError as error:  # of the system, not of a store: what is printed has no place to go
        give_up_stdout()
        _output(arguments).error(UnavailableError(f"the system says: {error}"))
        return EXIT_ERROR


def _replace_closed_streams() -> None:
    """Let a stream that was closed before we began lead nowhere, and not to another one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we run


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_stdout()
    return code


def _output(arguments: list[str]) -> Output:
    """An error is told in the form that was asked for, even if parsing went no further."""
    words = " ".join(arguments)
    return Output("json" if "--output json" in words or "--output=json" in words else "text")


if __name__ == "__main__":
    main()
