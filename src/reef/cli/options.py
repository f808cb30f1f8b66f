"""Arguments and options that several commands share, executors, and progress.

Most commands act on one namespace: `reef COMMAND URL NAMESPACE …`. `on_namespace` gives a command
these two arguments and the options of the store, and calls it with an open database.

Long commands show a bar on stderr with rate and remaining time. `CountingExecutor` counts the
finished tasks of a job; an import reports its rows. Nothing is shown if stderr is not a terminal,
or if the output is JSON.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from reef import api
from reef.cli.output import FORMATS, Encoding, Output, parse_bytes
from reef.engine.handles.database import Database
from reef.engine.handles.pinned import PinnedReader
from reef.engine.handles.reader import Reader
from reef.engine.handles.writer import Writer
from reef.errors import ClosedError, ConflictError, ErrorKind, InvalidInputError, NotFoundError
from reef.runtime import Executor, Runtime, leaf_lock

F = TypeVar("F", bound=Callable[..., Any])
NOT_FOR_TEXT = {"runtime", "retry", "meter", "metrics"}
"""Arguments of `reef.stores.open` that are not text."""
NUMBER = click.IntRange(min=0, max=2**63 - 1)
"""An LSN, a generation or a number of rows."""
EXIT_PROBLEMS = 2
"""Exit code of a command that has found problems in the data."""


class ReefCommand(click.Command):
    """A command that accepts `--output` after its name too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--output"],
                type=click.Choice(FORMATS),
                help="Print tables, or JSON.",
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
        help="Set an option of the store, such as endpoint=http://127.0.0.1:9000. Repeatable.",
    )(command)


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of `-o name=value` as a dictionary."""
    parsed = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidInputError(
                f"option {word!r} is not NAME=VALUE", kind=ErrorKind.INVALID_OPTION
            )
        if name in NOT_FOR_TEXT or name in parsed:
            why = "is given twice" if name in parsed else "cannot be given as text"
            raise InvalidInputError(f"option {name!r} {why}", kind=ErrorKind.INVALID_OPTION)
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
        with db._suggesting(namespace):
            return command(output, db, namespace, **words)

    return run


# --- bytes --------------------------------------------------------------------------


def encoding_option(command: F) -> F:
    """Give a command `--encoding`; it is kept in the output, and read from there."""
    return click.option(
        "--encoding",
        type=click.Choice([encoding.value for encoding in Encoding]),
        help="Read and print bytes in this encoding. Default: auto, which is UTF-8 if possible.",
        expose_value=False,
        callback=_choose_encoding,
    )(command)


def _choose_encoding(context: click.Context, _: click.Parameter, encoding: str | None) -> None:
    output = context.find_object(Output)
    if encoding is not None and output is not None:
        output.encoding = Encoding(encoding)


def range_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--start`, `--end` and `--prefix`; it is called with `bounds`, as bytes."""

    @click.option("--start", metavar="KEY", help="Start at this key.")
    @click.option("--end", metavar="KEY", help="Stop before this key.")
    @click.option("--prefix", metavar="KEY", help="Select keys with this prefix.")
    @wraps(command)
    def run(output: Output, *args: Any, **words: Any) -> Any:
        given = {name: words.pop(name) for name in ("start", "end", "prefix")}
        bounds = {
            name: None if text is None else parse_bytes(text, output.encoding, f"--{name}")
            for name, text in given.items()
        }
        return command(output, *args, bounds=bounds, **words)

    return run


# --- points in time -----------------------------------------------------------------


def as_of_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command options for a point in time; it is called with `as_of`."""

    @click.option("--generation", type=NUMBER, metavar="N", help="Read this generation.")
    @click.option("--lsn", type=NUMBER, metavar="N", help="Read as of this LSN.")
    @click.option(
        "--time",
        metavar="ISO",
        help="Read as of this time, such as 2026-01-31T12:00. Default: UTC.",
    )
    @click.option("--snapshot", metavar="NAME", help="Read this snapshot, by name or id.")
    @wraps(command)
    def run(*args: Any, **words: Any) -> Any:
        names = ("generation", "lsn", "time", "snapshot")
        given = {name: words.pop(name) for name in names}
        as_of = {name: value for name, value in given.items() if value is not None}
        if len(as_of) > 1:
            raise click.UsageError(f"--{' and --'.join(as_of)} exclude each other")
        if "time" in as_of:
            as_of["time"] = _time(as_of["time"])
        return command(*args, as_of=as_of, **words)

    return run


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time: {error}", param_hint="--time") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def open_reader(
    db: Database, namespace: str, as_of: dict[str, Any] | None = None
) -> Reader | PinnedReader:
    """Open the current state of a namespace, or pin a point in time."""
    opened: Reader | PinnedReader
    if not as_of:
        opened = db.reader(namespace)
    elif "snapshot" in as_of:
        opened = db.reader(namespace, snapshot=as_of["snapshot"])
    else:
        opened = db.reader(namespace, as_of=as_of)
    return opened


# --- writing ------------------------------------------------------------------------


def take_over_option(command: F) -> F:
    """Give a command `--take-over`."""
    return click.option(
        "--take-over",
        is_flag=True,
        help="Fence another writer that is active: its later writes are rejected.",
    )(command)


def create_option(command: F) -> F:
    """Give a command `--create`."""
    return click.option(
        "--create", is_flag=True, help="Create the namespace if it does not exist."
    )(command)


def open_writer(db: Database, namespace: str, take_over: bool, create: bool = False) -> Writer:
    """Acquire the writer role, without fencing an active writer by accident."""
    with suggesting_take_over():
        return db.writer(namespace, create=create, take_over=take_over, background=False)


@contextmanager
def suggesting_take_over() -> Iterator[None]:
    """Add the hint to pass --take-over to an error about another writer."""
    try:
        yield
    except ConflictError as error:
        if "writer_id" not in error.context:
            raise
        raise ConflictError(
            error.message,
            kind=error.kind,
            hint="Add --take-over to fence it",
            **error.context,
        ) from error


@contextmanager
def suggesting_create(namespace: str) -> Iterator[None]:
    """Add the hint to pass --create to an error about a missing namespace."""
    try:
        yield
    except NotFoundError as error:
        if error.context.get("namespace") != namespace:
            raise
        raise NotFoundError(
            error.message, kind=error.kind, hint=f"--create creates {namespace}", **error.context
        ) from error


# --- jobs ---------------------------------------------------------------------------


def settings_option(command: F) -> F:
    """Give a command `--set name=value`, a setting of its job."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a setting of the job, such as segment_bytes_max=1048576. Repeatable.",
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
    """Return a job by its name in `reef.jobs`, which is imported only if a job runs."""
    from reef import jobs

    found: Callable[..., Any] = getattr(jobs, name)
    return found


# --- executors ----------------------------------------------------------------------


def engine_options(command: F) -> F:
    """Give a command `--engine` and `--master`; `make_executor` takes both."""
    for option in (
        click.option(
            "--master",
            metavar="URL",
            help="Run --engine spark here, such as local[2] or sc://host.",
        ),
        click.option(
            "--engine",
            type=click.Choice(["local", "spark"]),
            default="local",
            show_default=True,
            help="Run the tasks in threads of this process, or on Spark.",
        ),
    ):
        command = option(command)
    return command


def make_executor(db: Database, engine: str, master: str | None) -> Executor:
    """Return the chosen executor."""
    if engine == "spark":
        return _spark_executor(master)
    if master is not None:
        raise click.UsageError("--master requires --engine spark")
    return db.store.runtime


def _spark_executor(master: str | None) -> Executor:
    try:
        from reef.spark import executor
        from reef.spark.session import start_session
    except ImportError as error:
        raise InvalidInputError(
            f"--engine spark needs PySpark: {error}",
            kind=ErrorKind.INVALID_OPTION,
            hint="pip install 'reef[spark]', or omit --engine to run the tasks in threads",
        ) from error
    return executor(start_session(master))


In = TypeVar("In")
Out = TypeVar("Out")


class ProgressMeter:
    """Finished work, and the total as far as it is known."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self._changed: Callable[[], None] = lambda: None

    def expect(self, count: int) -> None:
        """Increase the total."""
        self.total += count
        self._changed()

    def advance(self, count: int = 1) -> None:
        """Increase the finished work."""
        self.done += count
        self._changed()

    def reach(self, done: int, total: int | None = None) -> None:
        """Set the finished work, and the total if it is known."""
        self.done, self.total = done, total or self.total
        self._changed()

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed


@contextmanager
def progress(output: Output, label: str, unit: str) -> Iterator[ProgressMeter]:
    """Show a bar while the block runs."""
    meter = ProgressMeter()
    if output.is_json or not output.errors.is_terminal:
        yield meter
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.errors, transient=True) as shown:
        task = shown.add_task(label, total=None)
        meter.watch(lambda: shown.update(task, completed=meter.done, total=meter.total or None))
        yield meter


@contextmanager
def executing(
    output: Output,
    db: Database,
    label: str,
    *,
    engine: str = "local",
    master: str | None = None,
    at_once: int | None = None,
) -> Iterator[Executor]:
    """Yield the chosen executor, and show the progress of its tasks.

    `at_once` bounds the tasks that run at a time in this process, since each needs memory.
    """
    executor = make_executor(db, engine, master)
    with progress(output, label, "tasks") as meter:
        if not isinstance(executor, Runtime):
            yield executor
            return
        counting = CountingExecutor(executor, db.store.runtime, meter, at_once)
        try:
            yield counting
        except KeyboardInterrupt:
            counting.stop()
            raise


class CountingExecutor:
    """Runs tasks on another executor, a bounded number at a time, and counts them."""

    def __init__(
        self, inner: Executor, runtime: Runtime, meter: ProgressMeter, at_once: int | None = None
    ) -> None:
        self._inner = inner
        self._runtime = runtime
        self._meter = meter
        self._at_once = at_once
        self._guard = leaf_lock()
        self._running = 0
        self._stopped = False
        self.has_begun = False

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        self._meter.expect(len(tasks))
        step = self._at_once or max(1, len(tasks))
        results: list[Out] = []
        for at in range(0, len(tasks), step):
            results += self._inner.map(lambda task: self._run(run, task), tasks[at : at + step])
        return results

    def stop(self) -> None:
        """Start no more tasks, and wait for those that are running."""
        self._stopped = True
        while self._running:
            self._runtime.sleep(0.02)

    def _run(self, run: Callable[[In], Out], task: In) -> Out:
        with self._guard:
            if self._stopped:
                raise ClosedError("interrupted before this task began")
            self._running += 1
            self.has_begun = True
        try:
            result = run(task)
            self._meter.advance()
            return result
        finally:
            with self._guard:
                self._running -= 1


class _Rate(ProgressColumn):
    """The rate per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self._unit}/s" if speed else f"– {self._unit}/s")
