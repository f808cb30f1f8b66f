"""Bulk jobs: many rows become visible at one LSN, beside a live writer (protocol section 4).

    begin    in the log: from here on the job's segments have a root, whatever sweeps run (H28)
    stage    tasks, anywhere: sorted rows become segments named after the job and the attempt
    commit   one ingest in the log names the segments that count, all of them or none
    abort    in the log too; what was staged is then the sweep's

The ingest takes the next LSN like any batch, so its place among live writes is exact: newer
writes win over its rows, older ones lose. The rows' own LSN is stored as 0, since nobody knows
it while they are written. Old content of a range can go in the same commit (`replace`): each
segment has a range tombstone over its part, which sorts below its rows, or one segment
without rows has one over everything.

Segments of one job do not overlap, unless tasks could not choose their rows; then the commit
reads their keys to prove that none stands in two of them (`interleaved`, H38).

A job may make its namespace (`make`). If it is aborted, it takes that back, unless somebody else
has used it since: a load that fails leaves nothing that can be seen.

A job that fails in the middle is aborted; one whose driver died is reaped by the sweep when its
lease has lapsed. Only what was handed to `commit` counts (H39). Nothing is deleted here, least
of all after an answer that did not come: the log tells whether the commit has counted (H31).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import IngestSettings
from reef.engine.batch import check_idempotency_key
from reef.engine.database import Database
from reef.engine.history.held_lease import HeldLease
from reef.engine.rows import to_ops
from reef.errors import ConflictError, InvalidInputError, Kind, NotFoundError, ReefError
from reef.formats.batch import OpKind, Ops
from reef.formats.manifest import Manifest
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, JobSegment, WalKind
from reef.jobs.appending import Appender, JobState
from reef.jobs.disjoint import check_bounds, check_named, check_replaced, shared_keys
from reef.jobs.staging import ROW_SEQ, Staging
from reef.manifest.head import HeadFinder
from reef.manifest.leases import job_owner
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.stores import Store
from reef.telemetry import operation
from reef.types import KeyRange, Receipt

__all__ = ["BulkJob", "IngestReport", "JobHandle", "ingest", "sorted_rows", "staged_rows"]


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job that has begun, on its way to the process that ends it; picklable.

    Spark plans and commits a write in two short-lived processes, so that nobody beats for the
    job in between: its lease must be long enough, or its tasks hold one of their own.
    """

    db: Database
    namespace: Namespace
    id: str
    key: str
    schema: Schema
    replace: KeyRange | None
    settings: IngestSettings
    lease_id: str
    receipt: Receipt | None
    made: bool
    """Whether its namespace was made for it."""

    @property
    def store(self) -> Store:
        return self.db.store


class BulkJob:
    """One bulk job, from its begin to its commit or abort. Lives on the driver."""

    def __init__(
        self,
        db: Database,
        namespace: str,
        *,
        idempotency_key: str | None = None,
        replace: KeyRange | None = None,
        make: Schema | None = None,
        **settings: Any,
    ) -> None:
        self._settings = IngestSettings().changed(settings)
        check_idempotency_key(idempotency_key)
        db._prove_store()  # it writes into the log, as a writer does (H4)
        self._db, self._store = db, db.store
        self.id = self._store.runtime.ulid()
        publisher = self._enter(namespace, make)
        self._names = publisher.heads.names
        self._appender = Appender(self._store, self._names)
        manifest = publisher.heads.found.manifest
        self._made = manifest.made_for == self.id
        self.schema: Schema = manifest.schema
        self.replace = replace
        # A job always has a key: below the floor only the window tells whether it has counted.
        self.key = self.id if idempotency_key is None else idempotency_key
        self.receipt: Receipt | None = None
        """What the commit returned; from the first, if the key was committed before."""
        self._lease = self._hold(manifest, self._settings.lease_ttl_s)
        try:
            self._begin()
        except BaseException:
            with suppress(ReefError):  # a sweep reaps what may have begun
                self.abort()
            raise

    @classmethod
    def resume(cls, handle: JobHandle) -> Self:
        """Go on with a job that another process of the same driver has begun."""
        job = cls.__new__(cls)
        job._db, job._store, job._names = handle.db, handle.store, handle.namespace
        job._settings, job._made = handle.settings, handle.made
        job._appender = Appender(handle.store, handle.namespace)
        job.schema, job.replace = handle.schema, handle.replace
        job.id, job.key, job.receipt = handle.id, handle.key, handle.receipt
        # Beaten from here on, so it need not be as long as one that nobody beats.
        ttl_s = min(handle.settings.lease_ttl_s, IngestSettings().lease_ttl_s)
        manifest = HeadFinder(handle.store, handle.namespace).find().manifest
        job._lease = job._hold(manifest, ttl_s)
        job._lease.beat_in_background()
        # Only now: at every moment the job has a lease.
        with suppress(ReefError):  # it lapses by itself
            handle.store.delete(handle.namespace.lease(handle.lease_id))
        return job

    @property
    def handle(self) -> JobHandle:
        """What another process needs to `resume`; this one beats as long as it has the job."""
        return JobHandle(
            self._db,
            self._names,
            self.id,
            self.key,
            self.schema,
            self.replace,
            self._settings,
            self._lease.id,
            self.receipt,
            self._made,
        )

    @property
    def staging(self) -> Staging:
        """What a task needs to stage segments: small and picklable."""
        return Staging(self._store, self._names, self.id, self.schema, self._settings)

    def commit(self, staged: Sequence[JobSegment], *, interleaved: bool = False) -> Receipt:
        """Make the segments visible, all at one LSN; ConflictError if the job was reaped.

        Segments whose ranges overlap are refused, or, if they may be `interleaved`, their keys
        are read: one that stands in two of them is an InvalidInputError, and so is a segment of
        another job, or a replaced range that was not staged as a whole.
        """
        if self.receipt is not None:
            return self.receipt
        check_named(self.id, staged)
        check_replaced(self.replace, self.schema, staged)
        if interleaved:
            self._check_keys(staged)
        else:
            check_bounds(staged)
        self._check_present(staged)
        self._store.runtime.reach("ingest staged")
        job = self._job(tuple(sorted(staged, key=lambda segment: segment.min_key)))
        state = self._appender.append(WalKind.INGEST, job, self.schema)
        self._lease.release()
        self.receipt = self._receipt(state, sum(segment.rows for segment in staged))
        return self.receipt

    def abort(self) -> None:
        """Give the job up. What it has staged is swept later; a commit that counted stays.

        A namespace that was made for it goes too, unless somebody else has used it.
        """
        try:
            if self.receipt is None:
                self._appender.append(WalKind.ABORT, self._job(), self.schema)
                self._take_back()
        finally:
            self._lease.release()

    def let_go(self) -> None:
        """Hold the job no longer, without ending it: another process will, or a sweep."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.receipt is None:
            try:
                self.abort()
            except ReefError:
                if error is None:
                    raise

    # --- steps --------------------------------------------------------------------
    def _hold(self, manifest: Manifest, ttl_s: float) -> HeldLease:
        owner = job_owner(self.id)
        return HeldLease(self._store, self._names, manifest, owner=owner, ttl_s=ttl_s)

    def _enter(self, name: str, make: Schema | None) -> Publisher:
        """Return the publisher of a namespace that no other job takes back."""
        if make is None:
            return self._db._namespaces.use(name)
        return self._db._namespaces.ensure(name, make, made_for=self.id)

    def _take_back(self) -> None:
        if not self._made:
            return
        with suppress(ReefError):  # it stays, without rows
            seen = self._appender.look()
            ours = seen.manifest.made_for == self.id
            over = not seen.open_jobs and not any(end.committed for end in seen.ended.values())
            if ours and over:
                self._db._namespaces.take_back(self._names, self.id, seen.open_slot, seen.last_ids)

    def _begin(self) -> None:
        self._lease.beat_in_background()
        state = self._appender.append(WalKind.BEGIN, self._job(), self.schema)
        if state.known is not None:
            self._lease.release()
            self.receipt = self._receipt(state, state.known.ops)
        elif not state.counts:
            raise self._reaped()

    def _job(self, staged: tuple[JobSegment, ...] = ()) -> Job:
        replaced = (self.replace.start, self.replace.end) if self.replace is not None else None
        return Job(self.id, key=self.key, replace=replaced, segments=staged)

    def _receipt(self, state: JobState, rows: int) -> Receipt:
        if state.known is not None:
            if state.known.digest:
                raise InvalidInputError(
                    f"idempotency key {self.key!r} was used at LSN {state.lsn} for a batch",
                    hint="A key stands for one batch or job; use a new one",
                    idempotency_key=self.key,
                )
            write_id, rows = state.known.write_id, state.known.ops
        elif state.counts:
            write_id = state.write_id
        else:
            raise self._reaped()
        replayed = state.known is not None
        return Receipt(self._names.name, state.lsn, 0, 0, write_id, rows, replayed, self.key)

    def _reaped(self) -> ConflictError:
        return ConflictError(
            f"job {self.id} was aborted: its lease on {self._names.name} had lapsed",
            hint="Run it again, with the same idempotency key if it has one",
            namespace=self._names.name,
            job=self.id,
        )

    def _check_keys(self, staged: Sequence[JobSegment]) -> None:
        """Overlap is fine where no key stands in two segments, and only there (H38)."""
        shared = shared_keys(self._store, self._names, self.schema, staged)
        if shared is not None:
            told = ", ".join(repr(key) for key in shared.examples)
            raise InvalidInputError(
                f"{shared.count} keys of this load come more than once, in parts that were "
                f"staged apart: {told}{', …' if shared.count > len(shared.examples) else ''}",
                kind=Kind.INVALID_KEY,
                hint="Choose one row of each key, or name the column that decides (orderColumn)",
                count=shared.count,
            )

    def _check_present(self, staged: Sequence[JobSegment]) -> None:
        """What a commit names must be there, whole: readers will not look before the fold (H29)."""

        def check(segment: JobSegment) -> None:
            key = self._names.segment(segment.id)
            try:
                size = self._store.head(key).size
            except NotFoundError as error:
                raise ConflictError(
                    f"segment {segment.id} was staged and is gone", object=key
                ) from error
            if size != segment.size:
                raise ConflictError(
                    f"segment {segment.id} has {size} bytes, {segment.size} were staged", object=key
                )

        self._store.runtime.gather([lambda s=segment: check(s) for segment in staged])  # type: ignore[misc]


# --- rows -----------------------------------------------------------------------------


def staged_rows(ops: Ops) -> Versions:
    """Return a batch's rows as a job stages them, in their own order."""
    count = len(ops)
    return Versions(
        ops.keys,
        np.zeros(count, np.int64),
        np.full(count, ROW_SEQ, np.uint32),
        ops.kinds.to_numpy(zero_copy_only=False).astype(np.uint8),
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
    )


def sorted_rows(rows: Versions) -> Versions:
    """Return the rows by key; of a key that comes twice the last one, as an upsert does."""
    places = pc.sort_indices(rows.keys).to_numpy().astype(np.int64)  # stable
    keys = rows.keys.take(pa.array(places))
    last = np.ones(len(places), bool)
    if len(places) > 1:
        last[:-1] = pc.not_equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    return rows.take(places[last])


# --- on one machine -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What a bulk job wrote, and where in the log it stands."""

    namespace: str
    job: str
    lsn: int
    rows: int
    bytes: int
    segments: int
    replayed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ingest(
    db: Database,
    namespace: str,
    rows: object,
    *,
    op: Literal["put", "patch"] = "put",
    idempotency_key: str | None = None,
    replace: bool = False,
    ttl_s: float | None = None,
    **settings: Any,
) -> IngestReport:
    """Load rows in any form that `upsert` takes, at one LSN, without the writer role.

    For as many rows as fit into memory; `reef.spark.bulk_load` is for more. With `replace` the
    namespace has exactly these rows afterwards. Of a key that comes twice the last row counts.
    """
    now_ms = int(db.store.runtime.wall_s() * 1000)
    everything = KeyRange() if replace else None
    with (
        operation(db.metrics, "ingest"),
        BulkJob(
            db, namespace, idempotency_key=idempotency_key, replace=everything, **settings
        ) as job,
    ):
        staged: tuple[JobSegment, ...] = ()
        if job.receipt is None:
            ops = to_ops(rows, job.schema, kind=OpKind[op.upper()], ttl_s=ttl_s, now_ms=now_ms)
            staged = job.staging.stage([sorted_rows(staged_rows(ops))], everything)
        receipt = job.commit(staged)
    return IngestReport(
        namespace,
        job.id,
        receipt.lsn or 0,
        receipt.ops,
        sum(segment.size for segment in staged),
        len(staged),
        receipt.replayed,
    )
