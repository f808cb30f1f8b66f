"""A board for jobs that leave no trace in a namespace while they run: folds, exports, rebuilds.

A job that takes longer than some seconds is put on the board, in the bucket's catalog, by a
thread that goes on to renew its entry; when the job ends the entry goes. So short ones cost no
request, and one that died is seen by its last heartbeat. Whoever puts up a job takes down what has
been silent for a day. The board is for people: nothing depends on it, and no job fails because it
cannot be reached.
"""

from contextlib import suppress
from functools import partial
from platform import node
from types import TracebackType
from typing import Any

from reef.catalog import Catalog, WriteSession
from reef.engine.jobs_seen import RunningJob, jobs_of
from reef.engine.registry_upkeep import keep_short
from reef.errors import CorruptionError, ReefError
from reef.runtime import Condition, Task
from reef.stores import Store
from reef.stores.dates import now_to_look

__all__ = ["JobBoard", "Working", "running_jobs"]

PREFIX = "job/"
START_S = 5.0
"""How long a job runs before it is put up."""
BEAT_S = 30.0
STALE_S = 120.0
"""Heard of longer ago than this, a job has probably died."""
FORGET_MS = 24 * 3600 * 1000
STOP_S = 5.0


class JobBoard:
    """The jobs of one bucket that say that they run."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def jobs(self, namespaces: list[str]) -> list[RunningJob]:
        """Return what is on the board for some namespaces, the oldest first."""
        try:
            found = [(k.decode(), v) for k, v in self.catalog.scan_latest(prefix=PREFIX)]
        except CorruptionError:  # what the bucket itself tells of is there
            return []
        if not found:
            return []
        now_ms = int(now_to_look(self.catalog.store) * 1000)
        jobs = [_job(key, entry, now_ms) for key, entry in found]
        return [job for job in jobs if job.namespace in namespaces]

    def put_up(self, job_id: str, entry: dict[str, Any]) -> None:
        """Put up a job, or its heartbeat, and take down those that have long been silent."""
        now_ms = int(self.catalog.store.now() * 1000)

        def put(session: WriteSession) -> None:
            known = session.get(PREFIX + job_id)
            if known is None:
                _forget(session, now_ms - FORGET_MS)
            since_ms = now_ms if known is None else known["since_ms"]
            stamped = {**entry, "since_ms": since_ms, "beat_ms": now_ms}
            session.put(PREFIX + job_id, stamped)

        self.catalog.transact(put)
        keep_short(self.catalog)

    def take_down(self, job_id: str) -> None:
        """Remove a job that has ended."""
        self.catalog.transact(lambda session: session.delete(PREFIX + job_id))


class Working:
    """A job while it works: it tells how far it is, and a thread of its own tells the board."""

    def __init__(self, board: JobBoard | None, kind: str, namespace: str) -> None:
        self.progress: dict[str, int] = {}
        """How far it is; set by the job as it goes on."""
        self._board = board
        self._entry = {"kind": kind, "namespace": namespace}
        self._is_over = False
        self._is_up = False
        self._wake: Condition | None = None
        self._task: Task | None = None

    def __enter__(self) -> "Working":
        if self._board is not None:
            runtime = self._board.catalog.store.runtime
            self._id = runtime.ulid()
            self._entry["where"] = f"{node()}:{runtime.process_id()}"
            self._wake = runtime.condition()
            self._task = runtime.spawn(self._beat, name="job-board")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._board is None or self._wake is None or self._task is None:
            return
        with self._wake:
            self._is_over = True
            self._wake.notify_all()
        if self._task.join(STOP_S) and self._is_up:
            with suppress(ReefError):  # it is seen as stale, and taken down later
                self._board.take_down(self._id)

    def _beat(self) -> None:
        pause_s = START_S
        while self._board is not None and self._wait(pause_s):
            self._is_up = True
            with suppress(ReefError):
                self._board.put_up(self._id, {**self._entry, "progress": self.progress})
            pause_s = BEAT_S

    def _wait(self, seconds: float) -> bool:
        """Wait; whether the job goes on."""
        if self._wake is None:
            return False
        with self._wake:
            if not self._is_over:
                self._wake.wait(seconds)
            return not self._is_over


def running_jobs(store: Store, board: JobBoard | None, names: list[str]) -> list[RunningJob]:
    """Return the jobs of some namespaces: those on the board, and those that the bucket shows."""
    looks = [partial(jobs_of, store, name) for name in names]
    seen = [job for jobs in store.runtime.gather(looks) for job in jobs]
    return _merged([] if board is None else board.jobs(names), seen)


def _merged(board: list[RunningJob], seen: list[RunningJob]) -> list[RunningJob]:
    """Return all jobs once: a compactor on the board knows more of itself than its manifest."""
    known = {(job.namespace, job.kind) for job in board}
    own = [j for j in seen if j.kind != "compact" or (j.namespace, j.kind) not in known]
    return sorted([*board, *own], key=lambda job: (job.namespace, job.kind, job.id))


def _job(key: str, entry: dict[str, Any], now_ms: int) -> RunningJob:
    heartbeat_s = max(0, now_ms - entry["beat_ms"]) / 1000
    return RunningJob(
        namespace=entry["namespace"],
        kind=entry["kind"],
        id=key.removeprefix(PREFIX),
        where=entry["where"],
        since_s=max(0, now_ms - entry["since_ms"]) / 1000,
        heartbeat_s=heartbeat_s,
        is_stale=heartbeat_s > STALE_S,
        progress=entry["progress"],
    )


def _forget(session: WriteSession, before_ms: int) -> None:
    for key, entry in session.scan_range(prefix=PREFIX):
        if entry["beat_ms"] < before_ms:
            session.delete(key)
