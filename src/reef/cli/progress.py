"""Progress of long work: a bar on stderr with rate and time left, where a person looks at it.

Jobs know nothing of this. They hand their tasks to an executor, and `CountingExecutor` counts
those that are done; an import tells its rows. Where stderr is no terminal, or the output is for
programs, nothing is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

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

from reef.cli.options import make_executor
from reef.cli.output import Output
from reef.engine.database import Database
from reef.errors import ClosedError
from reef.jobs.executor import Executor, LocalExecutor
from reef.runtime import Runtime, leaf_lock

__all__ = ["CountingExecutor", "Meter", "executing", "progress"]

In = TypeVar("In")
Out = TypeVar("Out")


class Meter:
    """What is done, out of what is known to be ahead."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self._changed: Callable[[], None] = lambda: None

    def expect(self, count: int) -> None:
        """Some more work is ahead."""
        self.total += count
        self._changed()

    def advance(self, count: int = 1) -> None:
        """Some of it is done."""
        self.done += count
        self._changed()

    def reach(self, done: int, total: int | None = None) -> None:
        """So much is done by now, and so much is all, if that is known."""
        self.done, self.total = done, total or self.total
        self._changed()

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed


@contextmanager
def progress(output: Output, label: str, unit: str) -> Iterator[Meter]:
    """Show a bar while the block runs."""
    meter = Meter()
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
    """Give a job the executor that was asked for, and show how far its tasks are.

    `at_once` bounds the tasks that run at a time in this process, where each needs memory.
    """
    executor = make_executor(db, engine, master)
    with progress(output, label, "tasks") as meter:
        if not isinstance(executor, LocalExecutor):
            yield executor
            return
        counting = CountingExecutor(executor, db.store.runtime, meter, at_once)
        try:
            yield counting
        except KeyboardInterrupt:
            counting.stop()
            raise


class CountingExecutor:
    """Runs tasks as another executor does, so many at a time, and counts them."""

    def __init__(
        self, inner: Executor, runtime: Runtime, meter: Meter, at_once: int | None = None
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
        """Begin no more tasks, and wait for those that run: nobody goes on behind our back."""
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
    """How many a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self._unit}/s" if speed else f"– {self._unit}/s")
