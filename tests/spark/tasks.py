"""Tasks for the executor: what threads and Spark can both run."""

import os
from dataclasses import dataclass

import reef
from reef.stores import Store
from reef.telemetry import RequestKind


@dataclass(frozen=True)
class Touch:
    """Writes an object that names its process."""

    store: Store
    number: int


def touch(task):
    """Write under a name of this attempt; return the number, the process and its parent."""
    key = f"touched/{task.number}/{task.store.runtime.ulid()}"
    task.store.put(key, b"x" * 10)
    return task.number, os.getpid(), os.getppid()


def fail(number):
    """Fail with an error of Reef's, from the second task on."""
    if number >= 2:
        raise reef.ConflictError(f"task {number}", hint="Try again", number=number)
    return number


def fail_otherwise(number):
    """Fail with an error that is not Reef's."""
    raise ZeroDivisionError(f"task {number}")


class Unpicklable(Exception):
    """Cannot be sent: it takes two arguments, and pickling gives it one."""

    def __init__(self, first, second):
        super().__init__(first)


def fail_badly(number):
    """Fail with an error that does not pickle."""
    raise Unpicklable("odd", number)


def puts(executor):
    """Return how many PUTs an executor's tasks have sent."""
    return executor.meter.counts()[RequestKind.PUT].requests
