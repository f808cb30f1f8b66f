"""What a command prints: tables for people, JSON for programs.

A command hands its result to `Output` once, as plain values; what it looks like is
decided here. Colour only on a terminal; logs and errors go to stderr.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reef.errors import ReefError

__all__ = ["FORMS", "Output"]

FORMS = ("text", "json")


class Output:
    """Text or JSON, by the user's choice."""

    def __init__(self, form: str = "text") -> None:
        self.form = form
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def record(self, title: str, values: Mapping[str, Any]) -> None:
        """Print one thing and its properties."""
        if self.form == "json":
            self._print_json(values)
            return
        table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
        for name, value in values.items():
            table.add_row(f"[bold]{escape(name.replace('_', ' '))}[/bold]", escape(_text(value)))
        self._console.print(table)

    def error(self, error: ReefError) -> None:
        """Print an error to stderr: what happened, and what to do."""
        if self.form == "json":
            facts = {"error": type(error).__name__, "kind": error.kind, "message": error.message}
            print(json.dumps({**facts, "hint": error.hint}), file=sys.stderr)
            return
        self._errors.print(f"[bold red]error[/bold red]: {escape(error.message)}")
        if error.hint:
            self._errors.print(f"[bold]hint[/bold]: {escape(error.hint)}")

    def _print_json(self, values: Mapping[str, Any]) -> None:
        print(json.dumps(values, default=str))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)
