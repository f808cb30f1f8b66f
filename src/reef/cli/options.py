"""Options that several commands share, and what they stand for.

Most commands act on one namespace: `reef COMMAND URL NAMESPACE …`. `on_namespace` gives a command
those two arguments and the store's options, and calls it with an open database.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click

from reef import api
from reef.cli.output import FORMS, Output
from reef.cli.values import Encoding, parse_bytes
from reef.engine.database import Database
from reef.engine.history.pinned import PinnedReader
from reef.engine.reader import Reader
from reef.engine.writer import Writer
from reef.errors import ConflictError, InvalidInputError, Kind
from reef.jobs.executor import Executor, LocalExecutor

__all__ = [
    "EXIT_PROBLEMS",
    "NUMBER",
    "ReefCommand",
    "asking_to_take_over",
    "encoding_option",
    "engine_options",
    "job",
    "make_executor",
    "moment_options",
    "on_bucket",
    "on_namespace",
    "open_reader",
    "open_writer",
    "parse_options",
    "parse_settings",
    "range_options",
    "settings_option",
    "store_options",
    "take_over_option",
]

F = TypeVar("F", bound=Callable[..., Any])
NOT_FOR_TEXT = {"runtime", "retry", "faults", "meter", "metrics"}
"""Arguments of `reef.stores.open` that only a program can give."""
NUMBER = click.IntRange(min=0, max=2**63 - 1)
"""What an LSN, a generation or a number of rows can be."""
EXIT_PROBLEMS = 2
"""What a command returns that has found problems in the data."""


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


# --- the bucket ---------------------------------------------------------------------


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
            why = "is given twice" if name in parsed else "cannot be given as text"
            raise InvalidInputError(f"option {name!r} {why}", kind=Kind.INVALID_OPTION)
        parsed[name] = value
    return parsed


def on_bucket(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `URL`; it is called with the output and the database."""

    @click.argument("url")
    @store_options
    @click.pass_obj
    @wraps(command)
    def run(output: Output, /, url: str, options: tuple[str, ...], **words: Any) -> Any:
        return command(output, api.open(url, **parse_options(options)), **words)

    return run


def on_namespace(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `URL NAMESPACE`; it is called with the output, the database and the name."""

    @on_bucket
    @click.argument("namespace")
    @wraps(command)
    def run(output: Output, db: Database, namespace: str, **words: Any) -> Any:
        return command(output, db, namespace, **words)

    return run


# --- bytes --------------------------------------------------------------------------


def encoding_option(command: F) -> F:
    """Give a command `--encoding`; it is kept in the output, and read from there."""
    return click.option(
        "--encoding",
        type=click.Choice([encoding.value for encoding in Encoding]),
        help="How bytes stand for text, given and printed: auto is UTF-8 where it can be.",
        expose_value=False,
        callback=_choose_encoding,
    )(command)


def _choose_encoding(context: click.Context, _: click.Parameter, encoding: str | None) -> None:
    output = context.find_object(Output)
    if encoding is not None and output is not None:
        output.encoding = Encoding(encoding)


def range_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--start`, `--end` and `--prefix`; it is called with `bounds`, as bytes."""

    @click.option("--start", metavar="KEY", help="From this key on.")
    @click.option("--end", metavar="KEY", help="Up to this key, itself not included.")
    @click.option("--prefix", metavar="KEY", help="Only keys that begin so.")
    @wraps(command)
    def run(output: Output, *args: Any, **words: Any) -> Any:
        given = {name: words.pop(name) for name in ("start", "end", "prefix")}
        bounds = {
            name: None if text is None else parse_bytes(text, output.encoding, f"--{name}")
            for name, text in given.items()
        }
        return command(output, *args, bounds=bounds, **words)

    return run


# --- moments ------------------------------------------------------------------------


def moment_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a past moment to read at; it is called with `moment`."""

    @click.option("--generation", type=NUMBER, metavar="N", help="As of this manifest.")
    @click.option("--lsn", type=NUMBER, metavar="N", help="As of this LSN.")
    @click.option("--time", metavar="ISO", help="As of this time: 2026-01-31T12:00, UTC if unsaid.")
    @click.option("--snapshot", metavar="NAME", help="As of this snapshot, by name or id.")
    @wraps(command)
    def run(*args: Any, **words: Any) -> Any:
        names = ("generation", "lsn", "time", "snapshot")
        given = {name: words.pop(name) for name in names}
        moment = {name: value for name, value in given.items() if value is not None}
        if len(moment) > 1:
            raise click.UsageError(f"--{' and --'.join(moment)} each name a moment")
        if "time" in moment:
            moment["time"] = _time(moment["time"])
        return command(*args, moment=moment, **words)

    return run


def _time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time: {error}", param_hint="--time") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def open_reader(
    db: Database, namespace: str, moment: dict[str, Any] | None = None
) -> Reader | PinnedReader:
    """Open a namespace now, or at the moment that was asked for; the latter is pinned."""
    opened: Reader | PinnedReader
    if not moment:
        opened = db.reader(namespace)
    elif "snapshot" in moment:
        opened = db.reader(namespace, snapshot=moment["snapshot"])
    else:
        opened = db.reader(namespace, as_of=moment)
    return opened


# --- writing ------------------------------------------------------------------------


def take_over_option(command: F) -> F:
    """Give a command `--take-over`."""
    return click.option(
        "--take-over",
        is_flag=True,
        help="Write even if another writer did within the last minute. It is fenced: what it "
        "writes from then on is refused.",
    )(command)


def open_writer(db: Database, namespace: str, take_over: bool) -> Writer:
    """Take the writer role, never by accident."""
    with asking_to_take_over():
        return db.writer(namespace, take_over=take_over, background=False)


@contextmanager
def asking_to_take_over() -> Iterator[None]:
    """Tell whoever meets another writer what to add to the command line."""
    try:
        yield
    except ConflictError as error:
        if "writer_id" not in error.context:
            raise
        raise ConflictError(
            error.message,
            kind=error.kind,
            hint="Add --take-over if that one is done, or is to be fenced",
            **error.context,
        ) from error


# --- jobs ---------------------------------------------------------------------------


def settings_option(command: F) -> F:
    """Give a command `--set name=value`, a setting of its job."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting of the job, such as segment_bytes_max=1048576. Repeatable.",
    )(command)


def parse_settings(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of `--set name=value`, numbers as numbers."""
    parsed: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or name in parsed:
            raise click.BadParameter(f"{word!r} is not NAME=VALUE, once", param_hint="--set")
        parsed[name] = _number(value)
    return parsed


def _number(text: str) -> int | float | str:
    for typed in (int, float):
        try:
            return typed(text.replace("_", ""))
        except ValueError:
            continue
    return text


def job(name: str) -> Callable[..., Any]:
    """Return a job by its name in `reef.jobs`: loaded only by the commands that run one."""
    from reef import jobs

    found: Callable[..., Any] = getattr(jobs, name)
    return found


# --- where a job's tasks run --------------------------------------------------------


def engine_options(command: F) -> F:
    """Give a command `--engine` and `--master`; `make_executor` takes both."""
    for option in (
        click.option(
            "--master",
            metavar="URL",
            help="Of --engine spark: where it runs, such as local[2] or sc://host.",
        ),
        click.option(
            "--engine",
            type=click.Choice(["local", "spark"]),
            default="local",
            show_default=True,
            help="Where the tasks run: threads of this process, or Spark.",
        ),
    ):
        command = option(command)
    return command


def make_executor(db: Database, engine: str, master: str | None) -> Executor:
    """Return the executor that was asked for."""
    if engine == "spark":
        return _spark_executor(master)
    if master is not None:
        raise click.UsageError("--master is for --engine spark")
    return LocalExecutor(db.store.runtime)


def _spark_executor(master: str | None) -> Executor:
    try:
        from reef.spark import executor
        from reef.spark.session import start_session
    except ImportError as error:
        raise InvalidInputError(
            f"--engine spark needs PySpark: {error}",
            kind=Kind.INVALID_OPTION,
            hint="pip install 'reef[spark]', or leave it out: the same tasks run in threads",
        ) from error
    return executor(start_session(master))
