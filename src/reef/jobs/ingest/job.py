"""Bulk jobs: many rows become visible at one LSN, concurrently with a live writer (protocols §4).

    1  begin    in the log: from here on the job is a root for its segments in every sweep (H28)
    2  stage    tasks, anywhere: sorted rows become segments named after the job and the attempt
    3  commit   one ingest in the log names the segments that count, all of them or none
       abort    in the log too; a sweep then deletes the staged segments

The ingest takes the next LSN like any batch, so its position among live writes is exact: newer
writes win over its rows, older ones lose. With `live_wins` the rows become visible there too, but
sort at the begin: everything written since wins over them, as for a backfill. From the begin until
the fold of the ingest or abort, folds and compactions keep all that the rows may come below (H50,
H60). Rows store LSN 0, since their LSN is unknown while
they are written. The same commit can replace a key range (`replace`): each segment has a range
tombstone over its part, which sorts below its rows, or one segment without rows has one over
everything.

Segments of one job do not overlap, unless tasks could not choose their rows; then the commit reads
their keys to prove that none is in two of them (`interleaved`, H38).

A job may create its namespace (`make`). An aborted job drops it again, unless it was used since: a
load that fails leaves nothing visible.

A job that fails is aborted; a sweep reaps one whose driver died, when its lease has expired. Only
segments passed to `commit` count (H39). Nothing is deleted here, least of all after a missing
response: the log shows whether the commit has counted (H31).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from dataclasses import replace as dataclass_replace
from typing import Any, Literal, Self, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import IngestOptions, IngestSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.read.merge import combined_merges, sorted_places
from reef.engine.registry import BULK_LOAD
from reef.engine.rows.batch import check_idempotency_key, check_live_wins
from reef.engine.rows.input import to_ops
from reef.engine.rows.merges import merge_rows_ops
from reef.errors import ConflictError, ErrorKind, InvalidInputError, NotFoundError, ReefError
from reef.formats.manifest import DedupEntry, Manifest
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import JOB_DIGEST, Job, JobSegment, OpKind, Ops, WalKind, encode_ops
from reef.jobs.arguments import check_arguments
from reef.jobs.ingest.append import Appender, JobState, UnfoldedLog
from reef.jobs.ingest.condition import Unchanged
from reef.jobs.ingest.staging import (
    ROW_SEQ,
    Staging,
    check_bounds,
    check_named,
    check_replaced,
    shared_keys,
)
from reef.manifest.head import Publisher, locate
from reef.manifest.roots import GenerationLease, job_owner, take_lease
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.leases import HeldLease
from reef.telemetry import operation
from reef.types import KeyRange, Receipt


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A job that has begun, for the process that ends it; picklable.

    Spark plans and commits a write in two short-lived processes, and no process renews the lease in
    between: it must be long enough, or the tasks hold one of their own.
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
    """Whether its namespace was created for it."""
    live_wins: bool = False
    begin_lsn: int = 0

    @property
    def store(self) -> Store:
        return self.db.store

    def release(self) -> None:
        """Release the lease, if it still exists: another lease holds the job."""
        with suppress(ReefError):  # it expires by itself
            self.store.delete(self.namespace.lease(self.lease_id))


class BulkJob:
    """One bulk job, from its begin to its commit or abort. Lives on the driver."""

    def __init__(
        self,
        db: Database,
        namespace: str,
        *,
        idempotency_key: str | None = None,
        replace: KeyRange | None = None,
        live_wins: bool = False,
        make: Schema | None = None,
        job_id: str | None = None,
        digest: Callable[[Schema], str] | None = None,
        reported: bool = True,
        **settings: Unpack[IngestOptions],
    ) -> None:
        """Begin a job. Several processes may begin the same one, by its id: the tasks of Spark.

        If it is not `reported`, `Database.jobs` finds it in its namespace only.
        """
        check_live_wins(live_wins, replaces=replace is not None)
        self._settings = IngestSettings().changed(settings)
        check_idempotency_key(idempotency_key)
        db._prove_store()  # it writes into the log, as a writer does (H4)
        self._db, self._store = db, db.store
        self.id = self._store.runtime.ulid() if job_id is None else job_id
        publisher = self._enter(namespace, make)
        self._names = publisher.heads.names
        self._appender = Appender(self._store, self._names)
        manifest = publisher.heads.found.manifest
        self._made = manifest.made_for == self.id
        self.schema: Schema = manifest.schema
        self._indexes = manifest.indexes
        self.replace, self.live_wins = replace, live_wins
        self.begin_lsn = 0
        """Set once it has begun: where the rows of a job with `live_wins` sort."""
        # A job always has a key: below the floor only the dedup window proves its commit.
        self.key = self.id if idempotency_key is None else idempotency_key
        self._digest = "" if digest is None or idempotency_key is None else digest(self.schema)
        """Digest of the rows, if the caller knows all of them before it begins."""
        self._digest_of, self._schemas_before = digest, manifest.schemas[:-1]
        self.receipt: Receipt | None = None
        """The result of the commit; set from the start if the key was committed before."""
        self._lease = self._hold(manifest, self._settings.lease_ttl_s, reported=reported)
        try:
            self._begin()
        except BaseException:
            with suppress(ReefError):  # otherwise a sweep reaps it
                self.abort()
            raise

    @classmethod
    def resume(cls, handle: JobHandle) -> Self:
        """Continue a job that another process of the same driver has begun."""
        job = cls.__new__(cls)
        job._db, job._store, job._names = handle.db, handle.store, handle.namespace
        job._settings, job._made = handle.settings, handle.made
        job._appender = Appender(handle.store, handle.namespace)
        job.schema, job.replace = handle.schema, handle.replace
        job.id, job.key, job.receipt = handle.id, handle.key, handle.receipt
        job.live_wins, job.begin_lsn = handle.live_wins, handle.begin_lsn
        job._digest, job._digest_of, job._schemas_before = "", None, ()
        # Renewed from here on, so it need not be as long as one that is not.
        ttl_s = min(handle.settings.lease_ttl_s, IngestSettings().lease_ttl_s)
        manifest = (
            NamespaceContext(handle.store, handle.namespace).heads.find(renamed=True).manifest
        )
        job._indexes = manifest.indexes
        job._lease = job._hold(manifest, ttl_s)
        job._lease.renew_in_background()
        handle.release()  # only now: the job has a lease at all times
        return job

    @property
    def handle(self) -> JobHandle:
        """The facts that another process needs to `resume`; this one keeps renewing the lease."""
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
            self.live_wins,
            self.begin_lsn,
        )

    @property
    def log(self) -> UnfoldedLog | None:
        """The unfolded log, as the last step has read it."""
        return self._appender.seen

    def hand_over(self) -> JobHandle:
        """Leave the job and its lease to the process that will `resume` it.

        Nothing renews the lease in between, unless tasks do.
        """
        self._lease.hand_over()
        self._shown.__exit__(None, None, None)
        return self.handle

    @property
    def staging(self) -> Staging:
        """The facts that a task needs to stage segments: small and picklable."""
        return Staging(
            self._store, self._names, self.id, self.schema, self._settings, self._indexes
        )

    def stage(self, rows: object, *, ttl_s: float | None = None) -> tuple[JobSegment, ...]:
        """Write rows in any form that `upsert` takes as segments, for `commit`: as many as fit into
        memory. Of a repeated key the last row counts."""
        now_ms = int(self._store.runtime.wall_s() * 1000)
        ops = to_ops(rows, self.schema, kind=OpKind.PUT, ttl_s=ttl_s, now_ms=now_ms)
        return self.staging.stage([sorted_rows(staged_rows(ops))])

    def commit(
        self,
        staged: Sequence[JobSegment],
        *,
        interleaved: bool = False,
        unless: Unchanged | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> Receipt:
        """Make the segments visible, all at one LSN; ConflictError if the job was reaped.

        Overlapping segments are refused; with `interleaved` their keys are read instead, and a key
        in two of them is an InvalidInputError. So is a segment of another job, or a replaced range
        that was not staged as a whole. `unless` makes it conditional: ConflictError if keys that
        the job has read were written since. With `marks` it is the batch of a stream: if that was
        committed before, the job is aborted, and the receipt is `replayed`.
        """
        if self.receipt is not None:
            return self.receipt
        check_named(self.id, staged)
        check_replaced(self.replace, self.schema, staged)
        check_live_wins(self.live_wins, partial=any(segment.patches for segment in staged))
        if interleaved:
            self._check_keys(staged)
        else:
            check_bounds(staged)
        self._check_present(staged)
        self._store.runtime.reach("ingest staged")
        job = self._job(tuple(sorted(staged, key=lambda segment: segment.min_key)))
        state = self._appender.append(WalKind.INGEST, job, self.schema, unless, marks)
        if state.is_repeat:
            self.abort()
            self.receipt = Receipt(self._names.name, 0, 0, 0, "", 0, replayed=True)
            return self.receipt
        self._release()
        self.receipt = self._receipt(state, sum(segment.rows for segment in staged))
        return self.receipt

    def abort(self) -> None:
        """Abort the job. A sweep deletes its segments later; a commit that counted stays.

        A namespace that was created for it is dropped, unless it was used since.
        """
        try:
            if self.receipt is None:
                self._appender.append(WalKind.ABORT, self._job(), self.schema)
                self._drop_if_unused()
        finally:
            self._release()

    def let_go(self) -> None:
        """Release the lease without ending the job: another process will, or a sweep."""
        self._release()

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
    def _hold(
        self, manifest: Manifest, ttl_s: float, *, reported: bool = True
    ) -> HeldLease[GenerationLease]:
        owner = job_owner(self.id)
        lease = take_lease(self._store, self._names, manifest, owner=owner, ttl_s=ttl_s)
        shown = self._db._working(BULK_LOAD, self._names.name, self.id)
        self._shown: AbstractContextManager[object] = shown if reported else nullcontext()
        self._shown.__enter__()
        return HeldLease(lease)

    def _release(self) -> None:
        """Release the lease, and end the job's entry in `Database.jobs`."""
        self._lease.release()
        self._shown.__exit__(None, None, None)

    def _enter(self, name: str, make: Schema | None) -> Publisher:
        """Return the publisher of a namespace that no other job will drop."""
        if make is None:
            return self._db._namespaces.use(name)
        return self._db._namespaces.ensure(name, make, made_for=self.id)

    def _drop_if_unused(self) -> None:
        if not self._made:
            return
        with suppress(ReefError):  # it stays, without rows
            seen = self._appender.read_log()
            ours = seen.manifest.made_for == self.id
            over = not seen.open_jobs and not any(end.committed for end in seen.ended.values())
            if ours and over:
                self._db._namespaces.drop_if_unused(
                    self._names, self.id, seen.open_slot, seen.last_ids
                )

    def _begin(self) -> None:
        self._lease.renew_in_background()
        state = self._appender.append(WalKind.BEGIN, self._job(), self.schema)
        if state.known is not None:
            self._release()
            self.receipt = self._receipt(state, state.known.ops)
        elif not state.counts:
            raise self._reaped_error()
        else:
            self.begin_lsn = state.lsn

    def _job(self, staged: tuple[JobSegment, ...] = ()) -> Job:
        replaced = (self.replace.start, self.replace.end) if self.replace is not None else None
        return Job(
            self.id,
            key=self.key,
            live_wins=self.live_wins,
            begin_lsn=self.begin_lsn if self.live_wins else 0,
            replace=replaced,
            segments=staged,
            digest=self._digest,
        )

    def _receipt(self, state: JobState, rows: int) -> Receipt:
        if state.known is not None:
            _check_is_job(state.known, self.key, self._digest, self._digests_before())
            write_id, rows = state.known.write_id, state.known.ops
        elif state.counts:
            write_id = state.write_id
        else:
            raise self._reaped_error()
        replayed = state.known is not None
        return Receipt(self._names.name, state.lsn, 0, 0, write_id, rows, replayed, self.key)

    def _digests_before(self) -> Iterator[str]:
        """Yield the digests that the same rows had under earlier schemas: it may be a retry."""
        for schema in self._schemas_before:
            with suppress(InvalidInputError):  # a column or a value that it cannot have had
                if self._digest_of is not None:
                    yield self._digest_of(schema)

    def _reaped_error(self) -> ConflictError:
        return ConflictError(
            f"job {self.id} was aborted: its lease on {self._names.name} had expired",
            hint="Run it again, with the same idempotency key if it has one",
            namespace=self._names.name,
            job=self.id,
        )

    def _check_keys(self, staged: Sequence[JobSegment]) -> None:
        """Refuse overlapping segments if a key is in two of them (H38)."""
        shared = shared_keys(self._store, self._names, self.schema, staged)
        if shared is not None:
            examples = ", ".join(repr(key) for key in shared.examples)
            raise InvalidInputError(
                f"{shared.count} keys of this load occur more than once, in parts that were "
                f"staged apart: {examples}{', …' if shared.count > len(shared.examples) else ''}",
                kind=ErrorKind.INVALID_KEY,
                hint="Choose one row of each key, or name the column that decides (orderBy)",
                count=shared.count,
            )

    def _check_present(self, staged: Sequence[JobSegment]) -> None:
        """Check that all segments exist, with their size: readers trust the ingest (H29)."""

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

        self._store.runtime.map(check, staged)


def find_commit(db: Database, namespace: str, key: str) -> Receipt | None:
    """Return the receipt of the job that has committed an idempotency key; None if none has.

    For callers that can save work. It decides nothing: `BulkJob` checks the key when it begins.
    """
    try:
        names = locate(db.store, namespace).names
        entry = Appender(db.store, names).read_log().committed_as(key)
    except NotFoundError:
        return None
    if entry is None:
        return None
    _check_is_job(entry, key)
    return Receipt(namespace, entry.lsn, 0, 0, entry.write_id, entry.ops, True, key)


def _check_is_job(
    entry: DedupEntry, key: str, digest: str = "", before: Iterable[str] = ()
) -> None:
    """Raise unless a key was committed by a job, and with the same rows where both are known."""
    is_job = not entry.digest or entry.digest.startswith(JOB_DIGEST)
    expected = entry.digest.removeprefix(JOB_DIGEST)
    is_other = bool(digest and expected) and digest != expected and expected not in before
    if not is_job or is_other:
        raise InvalidInputError(
            f"idempotency key {key!r} was used at LSN {entry.lsn} for "
            f"{'another load' if is_job else 'a batch'}",
            hint="A key identifies one batch or job; use a new one",
            idempotency_key=key,
        )


# --- rows -----------------------------------------------------------------------------


def staged_rows(ops: Ops) -> Versions:
    """Return a batch's rows as a job stages them, unsorted."""
    count = len(ops)
    return Versions(
        ops.keys,
        np.zeros(count, np.int64),
        np.full(count, ROW_SEQ, np.uint32),
        ops.kinds.to_numpy(zero_copy_only=False).astype(np.uint8),
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
        merged_at_ms=ops.merged_at_ms,
    )


def batch_of(rows: Versions) -> Ops:
    """Return staged rows as a batch: the inverse of `staged_rows`."""
    kinds = pa.array(rows.kinds, pa.uint8())
    fields, touched = dict(rows.fields), dict(rows.touched)
    return Ops(
        rows.keys, kinds, None, rows.expires_at_ms, fields, touched or None, rows.merged_at_ms
    )


def sorted_merges(rows: Versions, schema: Schema) -> Versions:
    """Return merges sorted by key; those of a repeated key as one."""
    numbered = dataclass_replace(rows, seqs=np.arange(len(rows), dtype=np.uint32))
    ones = combined_merges(numbered.take(sorted_places(numbered)), schema)
    return dataclass_replace(ones, seqs=np.full(len(ones), ROW_SEQ, np.uint32))


def sorted_rows(rows: Versions) -> Versions:
    """Return the rows sorted by key; of a repeated key the last one, as an upsert does."""
    places = pc.sort_indices(rows.keys).to_numpy().astype(np.int64)  # stable
    keys = rows.keys.take(pa.array(places))
    last = np.ones(len(places), bool)
    if len(places) > 1:
        last[:-1] = pc.not_equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    return rows.take(places[last])


# --- on one machine -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The LSN of a bulk job, and its counts."""

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
    op: Literal["put", "patch", "merge"] = "put",
    operators: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    replace: bool = False,
    live_wins: bool = False,
    ttl_s: float | None = None,
    **settings: Unpack[IngestOptions],
) -> IngestReport:
    """Load rows in any form that `upsert` takes, at one LSN, without the writer role.

    For as many rows as fit into memory; `reef.spark.bulk_load` is for more. With `replace` the
    namespace has exactly these rows afterwards. With `live_wins` everything that is written from
    the begin of the load on wins over its rows: for backfills, with op="put" only. Of a repeated
    key the last row counts, or all of them with op="merge", which takes an operator for each
    column: `operators={"count": "add"}`. An idempotency key that was committed with other rows is
    an InvalidInputError.
    """
    check_arguments(db)
    if op not in ("put", "patch", "merge"):
        raise InvalidInputError(
            f"op={op!r:.80} is not one of 'put', 'patch', 'merge'", kind=ErrorKind.INVALID_OPTION
        )
    check_live_wins(live_wins, replaces=replace, partial=op != "put")
    now_ms = int(db.store.runtime.wall_s() * 1000)
    everything = KeyRange() if replace else None
    if isinstance(rows, pa.RecordBatchReader):  # read twice: for the digest, and for the segments
        rows = rows.read_all()

    def as_ops(schema: Schema, now_ms: int) -> Ops:
        if op == "merge":
            return merge_rows_ops(rows, operators or {}, schema, ttl_s=ttl_s, now_ms=now_ms)
        return to_ops(rows, schema, kind=OpKind[op.upper()], ttl_s=ttl_s, now_ms=now_ms)

    def digest(schema: Schema) -> str:
        relative = encode_ops(as_ops(schema, 0))
        person = b"replace" if replace else b"live_wins" if live_wins else b""
        return hashlib.blake2b(relative, digest_size=12, person=person).hexdigest()

    with (
        operation(db.metrics, "ingest"),
        BulkJob(
            db,
            namespace,
            idempotency_key=idempotency_key,
            replace=everything,
            live_wins=live_wins,
            digest=digest,
            **settings,
        ) as job,
    ):
        staged: tuple[JobSegment, ...] = ()
        if job.receipt is None:
            loaded = staged_rows(as_ops(job.schema, now_ms))
            is_merge = op == "merge"
            loaded = sorted_merges(loaded, job.schema) if is_merge else sorted_rows(loaded)
            staged = job.staging.stage([loaded], everything)
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
