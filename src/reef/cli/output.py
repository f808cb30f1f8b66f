"""What a command prints: tables for people, JSON for programs.

A command hands its result to `Output` once, as plain values; what it looks like is
decided here. One thing is one JSON object; a list is a JSON array; a stream, such as a scan,
is one JSON object per line, printed as it comes. Colour only on a terminal; logs, errors and
progress go to stderr.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import IO, Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape

from reef.cli.values import Encoding, printable, to_json
from reef.errors import ReefError

__all__ = ["FORMS", "Output", "give_up_stdout"]

FORMS = ("text", "json")
WIDTHS_FROM_ROWS = 100
"""Rows that are looked at for the widths of columns: a stream cannot be seen whole."""
WIDTH_MAX = 60
WIDTH_OF_FILES = 10_000
"""Where nobody looks, nothing is cut."""
LISTED_MAX = 100
"""Things of a report that people are shown."""


class _Console(Console):
    """A console that leaves a closed pipe to `reef.cli.main`."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class Output:
    """Text or JSON, by the user's choice."""

    def __init__(self, form: str = "text") -> None:
        self.form = form
        self.encoding = Encoding.AUTO
        """How bytes are told."""
        self.console = _console(sys.stdout)
        self.errors = _console(sys.stderr)

    @property
    def is_json(self) -> bool:
        return self.form == "json"

    # --- results ------------------------------------------------------------------
    def record(self, title: str, values: Mapping[str, Any]) -> None:
        """Print one thing and its properties."""
        if self.is_json:
            self.json(values)
            return
        if title:
            self.line(title, style="bold")
        names = {name: name.replace("_", " ") for name in values}
        width = max(map(len, names.values()), default=0)
        for name, value in values.items():
            self.line(f"{names[name].ljust(width)}  {self.cell(value)}".rstrip())

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Print a list of things that all have these properties."""
        found = list(rows)
        if self.is_json:
            self.json(found)
            return
        self.line(title if found else f"{title}: none", style="bold")
        cells = [[self.cell(row.get(name)) for name in columns] for row in found]
        names = [name.replace("_", " ") for name in columns]
        widths = [max(map(len, texts)) for texts in zip(names, *cells, strict=True)]
        right = [_is_number(found, name) for name in columns]
        for texts in (names, *cells) if found else ():
            self.line(_aligned(texts, widths, right))

    def stream(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows as they come, one per line."""
        if self.is_json:
            for row in rows:
                self.json(row)
            return
        lines = ([self.cell(row.get(name)) for name in columns] for row in rows)
        first: list[list[str]] = []
        trouble: ReefError | None = None
        try:
            for texts in islice(lines, WIDTHS_FROM_ROWS):
                first.append(texts)  # one by one: what came before an error is printed
        except ReefError as error:
            trouble = error
        widths = [
            min(WIDTH_MAX, max(map(len, texts))) for texts in zip(columns, *first, strict=True)
        ]
        if first:
            self.line(_aligned(columns, widths), style="bold")
        for texts in chain(first, lines):
            self.line(_aligned(texts, widths))
        if trouble is not None:
            raise trouble

    def report(self, title: str, report: Any) -> None:
        """Print what a job did: its figures, and a table of each list of things."""
        facts = report.to_dict()
        if self.is_json:
            self.json(facts)
            return
        facts = _flat(facts)
        lists = {name: value for name, value in facts.items() if _is_list(value)}
        figures = {name: value for name, value in facts.items() if name not in lists}
        self.record(title, {**figures, **{name: len(value) for name, value in lists.items()}})
        for name, rows in lists.items():
            self._listed(name.replace("_", " "), rows)

    def _listed(self, title: str, rows: Sequence[Any]) -> None:
        shown = rows[:LISTED_MAX]
        if not shown:
            return
        self.line("")
        if isinstance(shown[0], Mapping):
            columns = [name for name in shown[0] if any(row.get(name) is not None for row in shown)]
            self.table(title, columns, shown)
        else:  # a table of one column would have the title as its heading once more
            self.line(title, style="bold")
            for row in shown:
                self.line(self.cell(row))
        if len(rows) > len(shown):
            self.line(f"… and {len(rows) - len(shown)} more; --output json has all")

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line of text as it is."""
        if style is None:  # a scan has many of them
            print(text)
        else:
            self.console.print(text, style=style, markup=False, emoji=False)

    def flush(self) -> None:
        """Let whoever reads see what was printed so far."""
        sys.stdout.flush()

    def json(self, values: Any) -> None:
        """Print one JSON value on a line."""
        print(json.dumps(to_json(values, self.encoding), ensure_ascii=False))

    def raw(self, body: bytes) -> None:
        """Print bytes as they are."""
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        sys.stdout.flush()

    def cell(self, value: Any) -> str:
        """Return a value as it stands in a table."""
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {self.cell(item)}" for name, item in value.items())
        if isinstance(value, list | tuple):
            return ", ".join(map(self.cell, value))
        if isinstance(value, bytes):
            return printable(value, self.encoding)
        return _plain(value)

    # --- beside the result --------------------------------------------------------
    def note(self, text: str) -> None:
        """Say something that is not the result, on stderr; programs are not told."""
        if not self.is_json:
            self.errors.print(text, style="yellow", markup=False, emoji=False)

    def error(self, error: ReefError) -> None:
        """Print an error to stderr: what happened, and what to do."""
        if self.is_json:
            _tell_program(type(error).__name__, error.kind, error.message, error.hint)
            return
        self.errors.print(f"[bold red]error[/bold red]: {escape(error.message)}")
        if error.hint:
            self.errors.print(f"[bold]hint[/bold]: {escape(error.hint)}")

    def usage(self, error: click.ClickException) -> None:
        """Say what is wrong with the command line."""
        if not self.is_json:
            error.show()
            return
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "reef"
        _tell_program("UsageError", "usage", error.format_message(), f"See {command} --help")

    def interrupted(self) -> None:
        """Say that Ctrl-C was heard."""
        if self.is_json:
            _tell_program("Interrupted", "interrupted", "interrupted", "")
        else:
            print("interrupted", file=sys.stderr)


def _tell_program(error: str, kind: str, message: str, hint: str | None) -> None:
    facts = {"error": error, "kind": kind, "message": message, "hint": hint}
    print(json.dumps(facts), file=sys.stderr)


def give_up_stdout() -> None:
    """Let nothing more be written where nobody reads: the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console(file: IO[str]) -> Console:
    """Colour and the width of the screen on a terminal; elsewhere neither."""
    console = _Console(file=file, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    return console


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value).encode(errors="surrogateescape"), Encoding.UTF8)


def _aligned(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool] = ()) -> str:
    sides = right or [False] * len(widths)
    padded = (
        text.rjust(width) if number else text.ljust(width)
        for text, width, number in zip(texts, widths, sides, strict=True)
    )
    return "  ".join(padded).rstrip()


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with the lists of a group of them beside the others: `lost segments`."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and any(map(_is_list, value.values())):
            flat |= {f"{name}_{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_number(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(isinstance(row.get(name), int | float) for row in rows)
