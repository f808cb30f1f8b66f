"""The records of a bucket in its catalog: namespaces with their states, and running jobs.

**Namespaces** and their states are in the catalog at `catalog/`. The manifest of a namespace
decides whether it exists; the registry follows, so that a listing of ten thousand namespaces costs
a few requests. A process that creates, drops or undrops a namespace first adds an open change to
its entry, then publishes, then closes the change. Closing the last open change stores the state
that the manifest has by then. So an entry without open changes is right, and one with open changes
is looked up in its manifest; a process that dies in between leaves an entry that is looked up.

The first change in a bucket without a registry, or whose registry was lost, adds all listed
namespaces in the same transaction. While the registry is damaged no name is created or dropped,
because its entry could not be changed; `rebuild` replaces it. Repairs and rebuilds of namespaces
go ahead without it, and register a change like the others: they may bring a dropped name back.

**Running jobs** are read from two sources: the bucket itself, and a board in its catalog. Bulk
loads and compactors show in the bucket without registering. A bulk job is open from its begin in
the log to its end, holds a lease while its driver lives, and its staged segments are listed under
its name. A compactor's name is in the manifest while it has the role; its staged segments are
listed in the same way. So this part is right whichever process dies, and needs read access only.
Ages are by the store's clock (H30).

Folds, exports and rebuilds leave no trace in a namespace while they run. A job that takes longer
than a few seconds is reported on the board by a thread that renews the entry, and removed when it
ends; short jobs cost no request. Bulk loads and compactions are reported too, so that a list of all
jobs in a bucket of many namespaces reads only those on the board. A job whose process died shows by
its last heartbeat. Each new entry removes those that were silent for a day. The board is for
people: nothing depends on it, and no job fails because it cannot be reached.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from platform import node
from typing import TYPE_CHECKING, Any

from reef.engine.log.tail import read_unfolded
from reef.engine.stats import list_states, namespace_state
from reef.errors import CorruptionError, NotFoundError, ReefError
from reef.formats.manifest import NamespaceState, OpenJob
from reef.manifest.head import locate
from reef.manifest.roots import find_generation_leases, job_owner, staged_id
from reef.paths import Namespace
from reef.runtime import ConditionVariable, Task
from reef.stores import ObjectInfo, Store
from reef.stores.base import current_time_s

if TYPE_CHECKING:
    from reef.catalog import Catalog, WriteSession


BULK_LOAD = "bulk load"
NAMESPACES_READ_MAX = 100
"""Namespaces whose manifest and log are read for a list of all jobs."""
MARGIN_S = 2.0
"""A lease has expired only when its time is over by every clock of the bucket."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that runs, or that died before its end."""

    namespace: str
    kind: str
    """`bulk load`, `compact`, `fold`, `export`, `backup`, `restore` or `rebuild`."""
    id: str
    where: str
    """`machine:process`; empty if it is not known."""
    since_s: float | None
    """How long ago it began."""
    heartbeat_s: float | None
    """How long ago its process last reported."""
    is_stale: bool
    """Whether a heartbeat is overdue: its process has probably died."""
    progress: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def running_jobs(
    store: Store, board: "JobBoard | None", names: list[str], *, deep: bool = True
) -> list[RunningJob]:
    """Return the jobs of some namespaces: those on the board, and those that the bucket shows.

    Unless `deep`, of more than NAMESPACES_READ_MAX namespaces only those on the board are read: the
    requests do not grow with the namespaces.
    """
    on_board = [] if board is None else board.jobs(names)
    if not deep and board is not None and len(names) > NAMESPACES_READ_MAX:
        names = sorted({job.namespace for job in on_board})
    found = store.runtime.map(partial(_jobs_in_bucket, store), names)
    in_bucket = [job for jobs in found for job in jobs]
    # A compactor's entry on the board says more than its manifest, a load's says less than its log.
    known = {(job.namespace, job.kind) for job in on_board if job.kind == "compact"}
    loads = {job.id for job in in_bucket if job.kind == BULK_LOAD}
    own = [j for j in in_bucket if (j.namespace, j.kind) not in known]
    reported = [job for job in on_board if job.kind != BULK_LOAD or job.id not in loads]
    return sorted([*reported, *own], key=lambda job: (job.namespace, job.kind, job.id))


# --- in the bucket ------------------------------------------------------------------


def _jobs_in_bucket(store: Store, name: str) -> list[RunningJob]:
    """Return the open bulk jobs of a namespace, and its compactor."""
    try:
        heads = locate(store, name, fallback=True, probe=False)
        names, head = heads.names, heads.found.manifest
    except (CorruptionError, NotFoundError):  # reported by `verify`; or dropped since it was listed
        return []
    jobs = read_unfolded(store, names, head, headers_max=sys.maxsize).open_jobs
    if not jobs and not head.compactor_job:
        return []
    found = _JobsInBucket(store, names, current_time_s(store))
    compactor = [found.compactor(head.compactor_job)] if head.compactor_job else []
    return [*found.bulk_jobs(jobs), *compactor]


@dataclass(frozen=True, slots=True)
class _JobsInBucket:
    """Describes jobs of one namespace by their leases and staged segments."""

    store: Store
    names: Namespace
    now_s: float

    def bulk_jobs(self, jobs: tuple[OpenJob, ...]) -> Iterator[RunningJob]:
        leases = (
            find_generation_leases(self.store, self.names, self.now_s, MARGIN_S) if jobs else []
        )
        for job in jobs:
            held = next((lease for lease in leases if lease.owner == job_owner(job.id)), None)
            since_s, staged = self._begun_s(job), self._staged(job.id)
            yield RunningJob(
                namespace=self.names.name,
                kind=BULK_LOAD,
                id=job.id,
                where=held.record.where if held else "",
                since_s=since_s,
                heartbeat_s=self._age(held.renewed_s) if held else None,
                is_stale=held is None or held.expired,
                progress=_sizes(staged)
                | ({"live_wins_lsn": job.begin_lsn} if job.live_wins else {}),
            )

    def compactor(self, job_id: str) -> RunningJob:
        """Describe the compactor; without a lease only its segments show that it is alive."""
        staged = self._staged(job_id)
        dates = [info.last_modified_s for info in staged]
        return RunningJob(
            namespace=self.names.name,
            kind="compact",
            id=job_id,
            where="",
            since_s=self._age(min(dates)) if dates else None,
            heartbeat_s=self._age(max(dates)) if dates else None,
            is_stale=False,
            progress=_sizes(staged),
        )

    def _staged(self, job_id: str) -> list[ObjectInfo]:
        return list(self.store.list(f"{self.names.segments}{staged_id(job_id, '')}"))

    def _begun_s(self, job: OpenJob) -> float | None:
        try:
            info = self.store.head(self.names.wal_object(job.begin_lsn))
        except NotFoundError:
            return None
        return self._age(info.last_modified_s)

    def _age(self, date_s: float) -> float:
        return max(0.0, self.now_s - date_s)


def _sizes(staged: list[ObjectInfo]) -> dict[str, int]:
    return {"segments": len(staged), "bytes": sum(info.size for info in staged)}


# --- on the board -------------------------------------------------------------------

JOBS_PREFIX = "job/"
START_S = 5.0
"""How long a job runs before it is reported."""
BEAT_S = 30.0
STALE_S = 120.0
"""A job whose last heartbeat is older than this has probably died."""
FORGET_MS = 24 * 3600 * 1000
STOP_S = 5.0
COMPACT_AFTER = 16


class JobBoard:
    """The reported jobs of one bucket."""

    def __init__(self, catalog: "Catalog") -> None:
        self.catalog = catalog

    def jobs(self, namespaces: list[str]) -> list[RunningJob]:
        """Return the reported jobs of some namespaces, oldest first."""
        try:
            entries = [(k.decode(), v) for k, v in self.catalog.scan_latest(prefix=JOBS_PREFIX)]
        except CorruptionError:  # the jobs that the bucket shows are still returned
            return []
        if not entries:
            return []
        now_ms = int(current_time_s(self.catalog.store) * 1000)
        jobs = [_reported_job(key, entry, now_ms) for key, entry in entries]
        return [job for job in jobs if job.namespace in namespaces]

    def report(self, job_id: str, entry: dict[str, Any]) -> None:
        """Add a job or renew its heartbeat; a new one removes those that were silent for a day."""
        now_ms = int(self.catalog.store.now() * 1000)

        def put(session: "WriteSession") -> None:
            known = session.get(JOBS_PREFIX + job_id)
            if known is None:
                _remove_silent(session, now_ms - FORGET_MS)
            since_ms = now_ms if known is None else known["since_ms"]
            stamped = {**entry, "since_ms": since_ms, "beat_ms": now_ms}
            session.put(JOBS_PREFIX + job_id, stamped)

        self.catalog.transact(put)
        compact_if_due(self.catalog)

    def remove(self, job_id: str) -> None:
        """Remove a job that has ended."""
        self.catalog.transact(lambda session: session.delete(JOBS_PREFIX + job_id))


class JobHeartbeat:
    """Reports a job to the board while it runs, from a thread of its own."""

    def __init__(
        self, board: JobBoard | None, kind: str, namespace: str, job_id: str | None = None
    ) -> None:
        self.progress: dict[str, int] = {}
        """Set by the job as it proceeds."""
        self._board, self._id = board, job_id or ""
        self._entry = {"kind": kind, "namespace": namespace}
        self._is_over = False
        self._is_reported = False
        self._wake: ConditionVariable | None = None
        self._task: Task | None = None

    def __enter__(self) -> "JobHeartbeat":
        if self._board is not None:
            runtime = self._board.catalog.store.runtime
            self._id = self._id or runtime.ulid()
            self._entry["where"] = f"{node()}:{runtime.process_id()}"
            self._wake = runtime.condition()
            self._task = runtime.spawn(self._beat, name="job-board")
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is None or self._wake is None or self._task is None:
            return
        with self._wake:
            self._is_over = True
            self._wake.notify_all()
        if self._task.join(STOP_S) and self._is_reported:
            with suppress(ReefError):  # it becomes stale, and is removed later
                self._board.remove(self._id)

    def _beat(self) -> None:
        pause_s = START_S
        while self._board is not None and self._wait(pause_s):
            self._is_reported = True
            with suppress(ReefError):
                self._board.report(self._id, {**self._entry, "progress": self.progress})
            pause_s = BEAT_S

    def _wait(self, seconds: float) -> bool:
        """Wait; whether the job still runs."""
        if self._wake is None:
            return False
        with self._wake:
            if not self._is_over:
                self._wake.wait(seconds)
            return not self._is_over


def compact_if_due(catalog: "Catalog") -> None:
    """Compact and collect the bucket's catalog after COMPACT_AFTER segments; otherwise one GET.

    A process that has just started reads every segment since the last checkpoint, one GET each.
    """
    snapshot = catalog.snapshot()
    if snapshot.last_segment_seq - snapshot.floor >= COMPACT_AFTER:
        catalog.compactor().compact_and_gc()


def _reported_job(key: str, entry: dict[str, Any], now_ms: int) -> RunningJob:
    heartbeat_s = max(0, now_ms - entry["beat_ms"]) / 1000
    return RunningJob(
        namespace=entry["namespace"],
        kind=entry["kind"],
        id=key.removeprefix(JOBS_PREFIX),
        where=entry["where"],
        since_s=max(0, now_ms - entry["since_ms"]) / 1000,
        heartbeat_s=heartbeat_s,
        is_stale=heartbeat_s > STALE_S,
        progress=entry["progress"],
    )


def _remove_silent(session: "WriteSession", before_ms: int) -> None:
    for key, entry in session.scan_range(prefix=JOBS_PREFIX):
        if entry["beat_ms"] < before_ms:
            session.delete(key)


REGISTRY = "catalog"
"""Its prefix in a bucket."""
COMPLETE = "registry"
"""The key that is present once all namespaces are registered."""
PREFIX = "namespace/"
STALE_MS = 3600 * 1000
"""A rebuild closes changes that were opened longer ago than this: their process is gone."""

Entry = dict[str, Any]


class Registry:
    """The namespaces of one bucket, by name. Safe for threads, and picklable with its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def catalog(self) -> "Catalog":
        """The catalog that holds it."""
        from reef.catalog import JSON, Catalog

        return Catalog(self._store, prefix=REGISTRY, codec=JSON)

    @cached_property
    def board(self) -> JobBoard:
        """The jobs that run in this bucket."""
        return JobBoard(self.catalog)

    def __reduce__(self) -> tuple[Any, ...]:
        return Registry, (self._store,)

    # --- reading ------------------------------------------------------------------
    def names(self, state: NamespaceState) -> list[str] | None:
        """Return the names in a state; None if there is no complete, intact registry."""
        try:
            stored = {key.decode(): value for key, value in self.catalog.scan_latest()}
        except CorruptionError:  # the caller lists the bucket instead
            return None
        if COMPLETE not in stored:
            return None
        entries = {k.removeprefix(PREFIX): v for k, v in stored.items() if k.startswith(PREFIX)}
        return sorted(name for name, e in entries.items() if self._state(name, e) == state)

    def _state(self, name: str, entry: Entry) -> str | None:
        return namespace_state(self._store, name) if entry["changes"] else entry["state"]

    def has_drop(self, name: str) -> bool:
        """Whether a namespace is registered as dropped, without reading its manifests.

        Where those are lost this is the only trace of the drop.
        """
        try:
            entry = self.catalog.get_latest(PREFIX + name)
        except CorruptionError:
            return False
        return bool(entry) and not entry["changes"] and entry["state"] == NamespaceState.DROPPED

    # --- changing -----------------------------------------------------------------
    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Register a change of a namespace before the block, and its new state after it.

        If the block fails, its publish may still land: the change stays open.
        """
        change = self._store.runtime.ulid()
        self._open_change(name, change)
        self._store.runtime.reach("registry noted")
        yield
        self._store.runtime.reach("registry behind")
        with suppress(ReefError):  # the change is published; until closed, the entry is looked up
            self._close_change(name, change)
            compact_if_due(self.catalog)

    @contextmanager
    def recovering(self, name: str) -> Iterator[None]:
        """Register a change like `changing`, for a repair or rebuild.

        A damaged registry does not stop it: `rebuild` derives that from the manifests.
        """
        change = self._store.runtime.ulid()
        try:
            self._open_change(name, change)
        except CorruptionError:
            yield
            return
        self._store.runtime.reach("registry noted")
        yield
        self._store.runtime.reach("registry behind")
        with suppress(ReefError):
            self._close_change(name, change)

    def _open_change(self, name: str, change: str) -> None:
        try:
            is_missing = self.catalog.get_latest(COMPLETE) is None
            listed = list_states(self._store) if is_missing else {}  # long, so before the session
            now_ms = int(self._store.now() * 1000)
            self.catalog.transact(lambda session: self._note(session, name, change, now_ms, listed))
        except CorruptionError as error:
            raise CorruptionError(
                f"the registry of namespaces is damaged: {error.message}",
                hint="Rebuild it from the namespaces: reef catalog rebuild URL",
                **error.context,
            ) from error

    def _note(
        self,
        session: "WriteSession",
        name: str,
        change: str,
        now_ms: int,
        listed: dict[str, NamespaceState],
    ) -> None:
        if session.get(COMPLETE) is None:  # if it was present above, it was lost since
            listed = listed or list_states(self._store)
            self._add_missing(session, listed, self._entries(session))
        entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
        entry["changes"][change] = now_ms
        session.put(PREFIX + name, entry)

    def _close_change(self, name: str, change: str) -> None:
        def close(session: "WriteSession") -> None:
            entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
            entry["changes"].pop(change, None)
            if not entry["changes"]:
                # Read after the session began: all changes that it does not show are published.
                entry["state"] = namespace_state(self._store, name)
            _put(session, name, entry)

        self.catalog.transact(close)

    def _add_missing(
        self,
        session: "WriteSession",
        listed: dict[str, NamespaceState],
        known: dict[str, Entry],
    ) -> None:
        """Add listed namespaces that have no entry: an entry may be newer than the listing."""
        new = {name: state for name, state in listed.items() if name not in known}
        for key, entry in _entries_of(new).items():
            session.put(key, entry)

    def _entries(self, session: "WriteSession") -> dict[str, Entry]:
        stored = session.scan_range(prefix=PREFIX)
        return {key.decode().removeprefix(PREFIX): entry for key, entry in stored}

    # --- rebuilding ---------------------------------------------------------------
    def rebuild(self) -> dict[str, NamespaceState]:
        """Rebuild the registry from the namespaces of the bucket; return them.

        An intact registry is corrected. A damaged one is replaced, without the jobs on its board.
        """
        if self.catalog.verify().problems:
            with suppress(CorruptionError):  # UnsupportedFormatError: written by a newer release
                self.catalog.scan_latest()
            self.catalog.recreate(lambda: _entries_of(list_states(self._store)))
        listed = list_states(self._store)
        stale_ms = int(self._store.now() * 1000) - STALE_MS

        def rebuild(session: "WriteSession") -> None:
            known = self._entries(session)
            self._add_missing(session, listed, known)
            for name, entry in known.items():
                if not entry["changes"] and entry["state"] == listed.get(name):
                    continue
                # The listing may be older than the entry: only the manifest decides.
                young = {c: at for c, at in entry["changes"].items() if at > stale_ms}
                state = namespace_state(self._store, name)
                _put(session, name, {"state": state, "changes": young})

        self.catalog.transact(rebuild)
        return listed


def _entries_of(listed: dict[str, NamespaceState]) -> dict[str, Entry]:
    entries = {PREFIX + name: {"state": state, "changes": {}} for name, state in listed.items()}
    return {COMPLETE: {"format": 1}, **entries}


def _put(session: "WriteSession", name: str, entry: Entry) -> None:
    """Store an entry; a namespace that does not exist and is not being changed needs none."""
    if entry["changes"] or entry["state"] is not None:
        session.put(PREFIX + name, entry)
    else:
        session.delete(PREFIX + name)
