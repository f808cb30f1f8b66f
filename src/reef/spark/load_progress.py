"""How far a load is: the stages of the driver, and what its tasks have staged so far.

Spark Connect has no listener of tasks, but the bucket knows: segments of a job have its id in
front of their names. A thread lists them now and then, only where somebody wants to know.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from reef.errors import ReefError
from reef.paths import Namespace
from reef.runtime import Condition
from reef.spark.checks import Preflight
from reef.stores import Store

__all__ = ["LoadProgress", "StagedSoFar", "watch"]

INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of a load: check, checked, begin, stage, staging (again and again), commit,
    committed.
    """

    stage: str
    segments: int = 0
    bytes: int = 0
    checks: Preflight | None = None
    """From `checked` on: what was found before anything was written."""


@dataclass(frozen=True, slots=True)
class StagedSoFar:
    """What stands in the bucket, of all attempts."""

    segments: int
    bytes: int


@contextmanager
def watch(
    store: Store, namespace: Namespace, job_id: str, tell: Callable[[StagedSoFar], None] | None
) -> Iterator[None]:
    """Tell every now and then what a job has staged, until the block ends.

    What `tell` raises ends the telling, and is raised behind the block, as at any other stage.
    """
    if tell is None:
        yield
        return
    wake: Condition = store.runtime.condition()
    over, refused = False, None

    def look() -> None:
        nonlocal refused
        while True:
            with wake:
                if not over:
                    wake.wait(INTERVAL_S)
                if over:
                    return
            with suppress(ReefError):  # it is only for show
                found = list(store.list(f"{namespace.segments}{job_id}-"))
                try:
                    tell(StagedSoFar(len(found), sum(info.size for info in found)))
                except BaseException as error:
                    refused = error
                    return

    watching = store.runtime.spawn(look, name="load progress")
    try:
        yield
    finally:
        with wake:
            over = True
            wake.notify_all()
        watching.join()
    if refused is not None:
        raise refused
