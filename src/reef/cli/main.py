"""The command `reef` and its exit codes.

0    success
1    error, reported on stderr
2    problems found in the data
64   usage error
130  interrupted

Ctrl-C ends a command at once; a write in progress is atomic, as after any crash (`reef_command`
handles Ctrl-C while modules are being imported). A closed pipe (`reef scan … | head`) is not an
error. A full disk is.
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
from reef.cli.backup import backup
from reef.cli.branch import branch, diff, history, rollback
from reef.cli.inspect import inspect, log
from reef.cli.maintenance import compact, fold, health, purge, rebuild, repair, sweep, verify
from reef.cli.options import EXIT_PROBLEMS
from reef.cli.output import FORMATS, Output, discard_stdout
from reef.cli.read import changes, cursors, export_command, get, scan, snapshot
from reef.cli.sql import indexes_command, search_command, sql_command
from reef.cli.store import catalog, namespaces, stats, store
from reef.cli.write import create, delete, drop, import_command, jobs, put, rename, undrop
from reef.errors import CorruptionError, ReefError, UnavailableError

EXIT_ERROR = 1
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
COMMANDS = (
    *(create, put, get, delete, scan, sql_command, import_command, export_command, drop, undrop),
    *(search_command, indexes_command),
    rename,
    *(fold, compact, sweep, purge, verify, repair, rebuild),
    *(inspect, stats, health, jobs, snapshot, cursors, changes),
    *(branch, diff, history, rollback, backup),
    *(namespaces, catalog, store, log),
)
ALIASES = {"index": fold, "gc": sweep}
"""Names of earlier releases."""


class _RootGroup(click.Group):
    """The commands, grouped by purpose instead of by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            discard_stdout()
            return 0


@click.group(cls=_RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reef", message="%(prog)s %(version)s")
@click.option(
    "--output",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    help="Print tables, or JSON.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log events to stderr.")
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
    """Return a command under another name, with that name in its help."""
    other = copy(command)
    other.help = (command.help or "").replace(f"reef {command.name}", f"reef {name}")
    other.short_help = f"Alias of {command.name}."
    other.name = name
    return other


for _command in COMMANDS:
    reef.add_command(_command)
for _name, _command in ALIASES.items():
    reef.add_command(_alias(_command, _name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _replace_closed_streams()
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # after the command has reported its result
        code = EXIT_INTERRUPTED
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Threads may still wait for the store; a second Ctrl-C ends them.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = reef.main(arguments, prog_name="reef", standalone_mode=False)
        return _flush_stdout(code if isinstance(code, int) else 0)
    except ReefError as error:
        _output(arguments).error(error)
        return EXIT_PROBLEMS if isinstance(error, CorruptionError) else EXIT_ERROR
    except SystemExit:  # raised by click if the pipe is closed before the help is printed
        discard_stdout()
        return 0
    except click.exceptions.Abort:
        _output(arguments).interrupted()
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        _output(arguments).usage(error)
        return EXIT_USAGE
    except OSError as error:  # not from a store: stdout cannot be written
        discard_stdout()
        _output(arguments).error(UnavailableError(f"cannot write the output: {error}"))
        return EXIT_ERROR


def _replace_closed_streams() -> None:
    """Replace a standard stream that the parent process closed by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


def _flush_stdout(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    return code


def _output(arguments: list[str]) -> Output:
    """Return an output in the requested format, even if parsing the arguments failed."""
    words = " ".join(arguments)
    return Output("json" if "--output json" in words or "--output=json" in words else "text")


if __name__ == "__main__":
    main()
