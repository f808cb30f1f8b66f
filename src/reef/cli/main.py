"""The command `reef`, and what its exit codes mean.

0    fine
1    an error, told on stderr
2    problems were found in the data
64   the command line was wrong
130  interrupted
"""

import sys
from collections.abc import Sequence

import click

from reef import __version__
from reef.cli.output import FORMS, Output
from reef.cli.store import store
from reef.errors import ReefError

__all__ = ["main"]

EXIT_ERROR = 1
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reef", message="%(prog)s %(version)s")
@click.option(
    "--output",
    "form",
    type=click.Choice(FORMS),
    default="text",
    help="Tables for people, or JSON for programs.",
)
@click.pass_context
def reef(context: click.Context, form: str) -> None:
    """Reef: a storage engine whose only durable state is a bucket."""
    context.obj = Output(form)


reef.add_command(store)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and leave with an exit code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = reef.main(arguments, prog_name="reef", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except ReefError as error:
        _output(arguments).error(error)
        return EXIT_ERROR
    except click.exceptions.Abort:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE


def _output(arguments: list[str]) -> Output:
    """An error is told in the form that was asked for, even if parsing went no further."""
    words = " ".join(arguments)
    return Output("json" if "--output json" in words or "--output=json" in words else "text")


if __name__ == "__main__":
    main()
