"""Options that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from reef.cli.output import FORMS, Output
from reef.errors import InvalidInputError, Kind

__all__ = ["ReefCommand", "parse_options", "store_options"]

F = TypeVar("F", bound=Callable[..., Any])
NOT_FOR_TEXT = {"runtime", "retry", "faults", "meter", "metrics"}
"""Arguments of `reef.stores.open` that only a program can give."""


class ReefCommand(click.Command):
    """A command that takes `--output` behind its own name too, where people write it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--output"],
                type=click.Choice(FORMS),
                help="Tables for people, or JSON for programs.",
                expose_value=False,
                callback=_choose_form,
            )
        )


def _choose_form(context: click.Context, _: click.Parameter, form: str | None) -> None:
    output = context.find_object(Output)
    if form is not None and output is not None:
        output.form = form


def store_options(command: F) -> F:
    """Give a command `--option name=value`, passed on to the store."""
    return click.option(
        "-o",
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the store, such as endpoint=http://127.0.0.1:9000. Repeatable.",
    )(command)


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of `-o name=value` as a dictionary."""
    parsed = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidInputError(f"option {word!r} is not NAME=VALUE", kind=Kind.INVALID_OPTION)
        if name in NOT_FOR_TEXT or name in parsed:
            raise InvalidInputError(
                f"option {name!r} is given twice or cannot be given as text",
                kind=Kind.INVALID_OPTION,
            )
        parsed[name] = value
    return parsed
