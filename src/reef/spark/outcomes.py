"""Outcomes: what becomes of a task of Reef's in a task of Spark's.

An error of Reef's comes back to the driver as itself. What another attempt may mend (a store
that cannot be reached, or an error that is not Reef's) is left to Spark for as long as it tries
again: it is raised, and this attempt counts for nothing.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from pyspark import TaskContext

from reef.errors import InternalError, ReefError, UnavailableError
from reef.spark.counts import Counts, counts_of
from reef.stores import Store

__all__ = ["Failed", "Outcome", "counted", "guarded", "stores_of"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: its result or its error, and what it asked of the bucket."""

    result: Any = None
    error: BaseException | None = None
    counts: Counts | None = None


@dataclass(slots=True)
class Failed:
    """Whether a block has failed for good."""

    error: Exception | None = None


@contextmanager
def guarded(attempts: int) -> Iterator[Failed]:
    """Keep the error of a block, unless another attempt of this task may do better."""
    failed = Failed()
    try:
        yield failed
    except Exception as error:
        if not _is_final(error) and _attempt() + 1 < attempts:
            raise
        failed.error = _sendable(error)


def counted(outcome: Outcome, task: Any) -> Outcome:
    """Return the outcome with what the stores of a task have counted."""
    counts: Counts = {}
    for store in stores_of(task):
        counts |= counts_of(store)
    return replace(outcome, counts=counts)


def stores_of(task: Any, depth: int = 2) -> list[Store]:
    """Return the stores in a task, or in what it is made of."""
    if isinstance(task, Store):
        return [task]
    if not is_dataclass(task) or not depth:
        return []
    held = (getattr(task, field.name) for field in fields(task))
    return [store for value in held for store in stores_of(value, depth - 1)]


def _is_final(error: Exception) -> bool:
    """Whether another attempt would meet the same."""
    return isinstance(error, ReefError) and not isinstance(error, UnavailableError)


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _sendable(error: Exception) -> Exception:
    """Return the error itself, or what is left of one that does not pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return InternalError(f"{type(error).__name__} in a task: {error}")
    return error
