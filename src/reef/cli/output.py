"""The text of commands: keys and values from arguments, results as tables or JSON.

`--encoding` selects how bytes are written as text, for input and output:

    auto     input is UTF-8; output is UTF-8 if possible, else 0x… in text and
             {"base64": "…"} in JSON
    utf8     always UTF-8; invalid bytes are printed as \\x…
    hex      hexadecimal digits
    base64   the standard alphabet, with padding

Printed text never contains control characters: a value must not move the cursor.

A command passes its result to `Output` as plain values. As JSON, a record is one object, a list is
an array, and a stream, such as a scan, is one object per line, printed as it is read. Colours only
on a terminal; logs, errors and progress go to stderr.

`level_lanes` draws the key ranges of segments as bars, by level:

    level 0  ████████████████████
                     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    level 1  ██████████▓▓▓▓▓▓▓▓▓▓██████████
             a                             z

Bytes have no meaningful distance, so the scale is by rank: the bounds of all segments, in order,
evenly spread. Overlapping segments of a level are on separate lines; neighbours on a line have
different shades.
"""

import base64
import binascii
import json
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain, islice
from typing import IO, Any, NoReturn

import click
import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from reef.engine.rows.json_values import encode_bytes, from_json, parse_object, to_json
from reef.engine.stats import LevelStats, SegmentStats
from reef.errors import ErrorKind, InvalidInputError, ReefError

FORMATS = ("text", "json")
WIDTHS_FROM_ROWS = 100
"""The widths of the columns of a stream are computed from its first rows."""
WIDTH_MAX = 60
WIDTH_OF_FILES = 10_000
"""Not on a terminal, nothing is truncated."""
LISTED_MAX = 100
"""Items of a list that a text report shows."""


class Encoding(StrEnum):
    """How bytes are written as text."""

    AUTO = "auto"
    UTF8 = "utf8"
    HEX = "hex"
    BASE64 = "base64"


# --- arguments to values --------------------------------------------------------------


def parse_bytes(text: str, encoding: Encoding, label: str = "the value") -> bytes:
    """Decode text to bytes; InvalidInputError if it is not in that encoding."""
    try:
        if encoding is Encoding.HEX:
            return bytes.fromhex(text.removeprefix("0x"))
        if encoding is Encoding.BASE64:
            return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidInputError(
            f"{label} {text[:80]!r} is not {encoding}: {error}", kind=ErrorKind.INVALID_INPUT
        ) from error
    return text.encode(errors="surrogateescape")  # the bytes of the argument


def parse_row(text: str, schema: pa.Schema, encoding: Encoding) -> dict[str, Any]:
    """Parse a JSON object into columns of their types."""
    try:
        row = parse_object(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the row {text[:80]!r} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidInputError(
            f"the row {text[:80]!r} is not a JSON object", hint='For instance {"amount": 7.0}'
        )
    return {name: _convert_value(name, value, schema, encoding) for name, value in row.items()}


def _convert_value(name: str, value: Any, schema: pa.Schema, encoding: Encoding) -> Any:
    """Convert a JSON value to its column's type."""
    at = schema.get_field_index(name)
    if at < 0 or value is None:
        return value  # an unknown column is reported by the engine
    return from_json(
        name,
        value,
        schema.field(at).type,
        lambda text: parse_bytes(text, encoding, f"column {name}:"),
    )


# --- values to text -----------------------------------------------------------------


def printable(data: bytes, encoding: Encoding, *, lines: bool = False) -> str:
    """Format bytes as printable text; with `lines`, line breaks are kept."""
    if encoding is Encoding.HEX:
        return data.hex()
    if encoding is Encoding.BASE64:
        return base64.b64encode(data).decode()
    try:
        text = data.decode(errors="strict" if encoding is Encoding.AUTO else "backslashreplace")
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
    kept = "\n\t" if lines else ""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_bytes(data: bytes, encoding: Encoding) -> Any:
    """Return bytes as JSON, in an encoding."""
    if encoding is Encoding.AUTO:
        return encode_bytes(data)
    if encoding is Encoding.UTF8:
        return data.decode(errors="backslashreplace")
    return printable(data, encoding)


# --- output --------------------------------------------------------------------------


class _Console(Console):
    """A console that leaves a closed pipe to `reef.cli.main`."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class Output:
    """Text or JSON, by the user's choice."""

    def __init__(self, form: str = "text") -> None:
        self.form = form
        self.encoding = Encoding.AUTO
        """How bytes are printed."""
        self.console = _console(sys.stdout)
        self.errors = _console(sys.stderr)

    @property
    def is_json(self) -> bool:
        return self.form == "json"

    # --- results ------------------------------------------------------------------
    def record(self, title: str, values: Mapping[str, Any]) -> None:
        """Print a record: a title, and values by name."""
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
        """Print rows as a table with these columns."""
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
            self.line(_align(texts, widths, right))

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
                first.append(texts)  # one by one, so that rows before an error are printed
        except ReefError as error:
            trouble = error
        widths = [
            min(WIDTH_MAX, max(map(len, texts))) for texts in zip(columns, *first, strict=True)
        ]
        if first:
            self.line(_align(columns, widths), style="bold")
        for texts in chain(first, lines):
            self.line(_align(texts, widths))
        if trouble is not None:
            raise trouble

    def report(self, title: str, report: Any) -> None:
        """Print the report of a job: its figures, and a table for each list."""
        facts = report.to_dict()
        if self.is_json:
            self.json(facts)
            return
        facts = _flat(facts)
        lists = {name: value for name, value in facts.items() if _is_list(value)}
        figures = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in facts.items()
            if name not in lists and value not in (None, "", {})
        }
        self.record(title, {**figures, **{name: len(value) for name, value in lists.items()}})
        for name, rows in lists.items():
            self._print_list(name.replace("_", " "), rows)

    def _print_list(self, title: str, rows: Sequence[Any]) -> None:
        shown = rows[:LISTED_MAX]
        if not shown:
            return
        self.line("")
        if isinstance(shown[0], Mapping):
            columns = [name for name in shown[0] if any(row.get(name) is not None for row in shown)]
            self.table(title, columns, shown)
        else:  # a table of one column would repeat the title as its heading
            self.line(title, style="bold")
            for row in shown:
                self.line(self.cell(row))
        if len(rows) > len(shown):
            self.line(f"… and {len(rows) - len(shown)} more; --output json has all")

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line of text."""
        if style is None:  # a scan has many of them
            print(text)
        else:
            self.console.print(text, style=style, markup=False, emoji=False)

    def flush(self) -> None:
        """Flush stdout."""
        sys.stdout.flush()

    def json(self, values: Any) -> None:
        """Print one JSON value on a line."""
        encode = partial(_json_bytes, encoding=self.encoding)
        print(json.dumps(to_json(values, encode), ensure_ascii=False))

    def raw(self, body: bytes) -> None:
        """Print bytes unchanged."""
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        sys.stdout.flush()

    def cell(self, value: Any) -> str:
        """Format a value for a table."""
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {self._inner(item)}" for name, item in value.items())
        if isinstance(value, list | tuple):
            return ", ".join(map(self.cell, value))
        if isinstance(value, bytes):
            return printable(value, self.encoding)
        return _plain(value)

    def _inner(self, value: Any) -> str:
        text = self.cell(value)
        return f"({text})" if isinstance(value, Mapping) else text

    # --- stderr -------------------------------------------------------------------
    def note(self, text: str) -> None:
        """Print a note to stderr; not with JSON output."""
        if not self.is_json:
            self.errors.print(text, style="yellow", markup=False, emoji=False)

    def error(self, error: ReefError) -> None:
        """Print an error and its hint to stderr."""
        if self.is_json:
            _print_json_error(type(error).__name__, error.kind, error.message, error.hint)
            return
        self.errors.print(f"[bold red]error[/bold red]: {escape(error.message)}")
        if error.hint:
            self.errors.print(f"[bold]hint[/bold]: {escape(error.hint)}")

    def usage(self, error: click.ClickException) -> None:
        """Print a usage error to stderr."""
        if not self.is_json:
            error.show()
            return
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "reef"
        _print_json_error("UsageError", "usage", error.format_message(), f"See {command} --help")

    def interrupted(self) -> None:
        """Print that the command was interrupted."""
        if self.is_json:
            _print_json_error("Interrupted", "interrupted", "interrupted", "")
        else:
            print("interrupted", file=sys.stderr)


def _print_json_error(error: str, kind: str, message: str, hint: str | None) -> None:
    facts = {"error": error, "kind": kind, "message": message, "hint": hint}
    print(json.dumps(facts), file=sys.stderr)


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at exit cannot fail."""
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


def _align(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool] = ()) -> str:
    sides = right or [False] * len(widths)
    padded = (
        text.rjust(width) if number else text.ljust(width)
        for text, width, number in zip(texts, widths, sides, strict=True)
    )
    return "  ".join(padded).rstrip()


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with nested lists on the top level: `lost_segments`."""
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


SHADES = "█▓"
LANES_MAX = 8


def level_lanes(levels: Sequence[LevelStats], width: int) -> dict[int, list[str]]:
    """Return the lines of each level, `width` characters wide."""
    segments = [segment for level in levels for segment in level.segments]
    bounds = sorted({key for s in segments for key in (s.min_key, s.max_key)})
    return {level.level: _drawn(level.segments, bounds, width) for level in levels}


def _drawn(segments: Iterable[SegmentStats], bounds: list[bytes], width: int) -> list[str]:
    lanes: list[list[SegmentStats]] = []
    for segment in segments:  # ordered by first key: any free lane is suitable
        free = (lane for lane in lanes if lane[-1].max_key < segment.min_key)
        lane = next(free, None)
        if lane is None:
            lanes.append([segment])
        else:
            lane.append(segment)
    lines = [_line(lane, bounds, width) for lane in lanes[:LANES_MAX]]
    left = sum(len(lane) for lane in lanes[LANES_MAX:])
    return [*lines, f"… and {left} more segments"] if left else lines


def _line(lane: list[SegmentStats], bounds: list[bytes], width: int) -> str:
    line = [" "] * width
    for number, segment in enumerate(lane):
        start, end = (_place(key, bounds, width) for key in (segment.min_key, segment.max_key))
        start = min(start, width - 1)
        stop = max(start + 1, end)
        line[start:stop] = SHADES[number % 2] * (stop - start)
    return "".join(line).rstrip()


def _place(key: bytes, bounds: list[bytes], width: int) -> int:
    steps = len(bounds) - 1
    return round(bisect_left(bounds, key) / steps * width) if steps else 0
