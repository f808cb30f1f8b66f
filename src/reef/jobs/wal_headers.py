"""Headers of WAL objects, read by an executor's tasks: of logs that may be very long."""

from collections.abc import Sequence

from reef.engine.wal_headers import HeaderTask, Peeked, run_header_task
from reef.jobs.executor import Executor
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["peek_headers"]

TASK_SLOTS = 256


def peek_headers(
    executor: Executor, store: Store, namespace: Namespace, slots: Sequence[tuple[int, int]]
) -> dict[int, Peeked]:
    """Return the headers of slots (LSN, size), fetched side by side."""
    chunks = [tuple(slots[at : at + TASK_SLOTS]) for at in range(0, len(slots), TASK_SLOTS)]
    tasks = [HeaderTask(store, namespace, chunk) for chunk in chunks]
    peeked = [header for part in executor.map(run_header_task, tasks) for header in part]
    return {lsn: header for (lsn, _), header in zip(slots, peeked, strict=True)}
