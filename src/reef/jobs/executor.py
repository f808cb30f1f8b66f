"""Executors: where a job's tasks run.

A task is a picklable value and a function of the module that knows it. Threads here; Spark,
with the same functions, comes with `reef.spark`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from reef.runtime import Runtime

__all__ = ["Executor", "LocalExecutor"]

In = TypeVar("In")
Out = TypeVar("Out")


class Executor(Protocol):
    """Runs the same function over many tasks; results in order, or the first error."""

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]: ...


class LocalExecutor:
    """Bounded threads of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        return self._runtime.gather([lambda task=task: run(task) for task in tasks])  # type: ignore[misc]
