"""Jobs that the bucket itself tells of: nobody has to register.

A bulk job is open from its begin in the log to its end; it keeps a lease while its driver lives,
and what it has staged is listed under its name. A compactor's name stands in the manifest while it
has the role, and what it has staged is listed in the same way. So this is right whoever dies, and
needs to read only. Ages are by the store's clock (H30).
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from reef.engine.unfolded import read_unfolded
from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import OpenJob
from reef.manifest.head import locate
from reef.manifest.leases import find_leases, job_owner
from reef.manifest.roots import staged_id
from reef.paths import Namespace
from reef.stores import ObjectInfo, Store
from reef.stores.dates import now_to_look

__all__ = ["RunningJob", "jobs_of"]

MARGIN_S = 2.0
"""A lease lapses only when its time is over by any clock of the bucket."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job at work, or one that died in the middle of it."""

    namespace: str
    kind: str
    """`bulk load`, `compact`, `fold`, `export` or `rebuild`."""
    id: str
    where: str
    """`machine:process`; empty if nobody knows."""
    since_s: float | None
    """How long ago it began."""
    heartbeat_s: float | None
    """How long ago it was last heard of."""
    is_stale: bool
    """Whether it should have been heard of since: its process has probably died."""
    progress: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def jobs_of(store: Store, name: str) -> list[RunningJob]:
    """Return the bulk jobs that are open in a namespace, and its compactor."""
    try:
        heads = locate(store, name, fallback=True)
        names, head = heads.names, heads.found.manifest
    except (CorruptionError, NotFoundError):  # for `verify` to tell; or dropped since it was listed
        return []
    jobs = read_unfolded(store, names, head, headers_max=sys.maxsize).open_jobs
    if not jobs and not head.compactor_job:
        return []
    look = _Look(store, names, now_to_look(store))
    compactor = [look.compactor(head.compactor_job)] if head.compactor_job else []
    return [*look.bulk_jobs(jobs), *compactor]


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at what jobs have left in the bucket."""

    store: Store
    names: Namespace
    now_s: float

    def bulk_jobs(self, jobs: tuple[OpenJob, ...]) -> Iterator[RunningJob]:
        leases = list(find_leases(self.store, self.names, self.now_s, MARGIN_S)) if jobs else []
        for job in jobs:
            held = next((lease for lease in leases if lease.owner == job_owner(job.id)), None)
            since_s, staged = self._begun_s(job), self._staged(job.id)
            yield RunningJob(
                namespace=self.names.name,
                kind="bulk load",
                id=job.id,
                where=held.where if held else "",
                since_s=since_s,
                heartbeat_s=self._age(held.renewed_s) if held else None,
                is_stale=held is None or held.lapsed,
                progress=_sizes(staged),
            )

    def compactor(self, job_id: str) -> RunningJob:
        """Nothing says that a compactor is there but what it stages: it is never called stale."""
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
