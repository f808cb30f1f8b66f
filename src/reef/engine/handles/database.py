"""A database: the namespaces of one bucket. Wires the parts together; no algorithms.

The first argument of every method that acts on a namespace is `namespace`, its name. Earlier
releases called it `name` in some methods; as a keyword that still works, with a warning
(`renamed_keyword`).
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from functools import wraps
from importlib import import_module
from logging import ERROR
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, overload
from warnings import warn

import pyarrow as pa

from reef.config import (
    BackgroundSettings,
    ReaderOptions,
    ReaderSettings,
    WriterOptions,
    WriterSettings,
)
from reef.engine.commit.committer import Committer
from reef.engine.commit.open_writer import UnclosedRole, check_role_is_free, open_writer
from reef.engine.commit.resync import Outcomes
from reef.engine.display import html_table
from reef.engine.handles.branches import Difference, differences, make_branch
from reef.engine.handles.bucket_snapshots import (
    BucketSnapshot,
    find_all,
    list_all,
    release_all,
    take_all,
)
from reef.engine.handles.pinned import PinnedReader
from reef.engine.handles.reader import Reader
from reef.engine.handles.writer import (
    Worker,
    Writer,
    background_settings,
    note_unclosed,
    release_unclosed,
)
from reef.engine.history.as_of import AsOf, ReadTarget, read_target
from reef.engine.history.changes import (
    ChangeCursor,
    check_cursor_name,
    check_lsn,
    register_cursor,
)
from reef.engine.history.snapshots import (
    GenerationRecord,
    Snapshot,
    generation_records,
    list_snapshots,
    resolve_snapshot,
    take_snapshot,
)
from reef.engine.log.tail import read_unfolded
from reef.engine.namespaces import Namespaces, similar_name
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.engine.registry import JobBoard, JobHeartbeat, Registry, RunningJob, running_jobs
from reef.engine.search.specs import (
    IndexDefinition,
    check_same_indexes,
    resolve,
    resolve_all,
)
from reef.engine.stats import NamespaceInfo, NamespaceStats, namespace_info, namespace_stats
from reef.errors import (
    ClosedError,
    ConflictError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    ReefError,
)
from reef.files import OS, FileSystem
from reef.formats.manifest import Manifest, NamespaceState
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.manifest.dedup import NO_STREAM, StreamClaim
from reef.manifest.edits import add_index as add_index_spec
from reef.manifest.edits import drop_cursor, drop_indexes, grow_schema
from reef.manifest.head import HeadFinder, home_of, locate
from reef.paths import Namespace
from reef.runtime import Executor, Runtime
from reef.stores import Store, agree_on_cas
from reef.stores.notify.base import Notifier, check_notifier
from reef.stores.probe import as_proved
from reef.stores.two_phase import recover
from reef.telemetry import Events, Metrics, operation

if TYPE_CHECKING:
    from reef.engine.handles.local_writer import LocalWriter
    from reef.engine.handles.sql import SqlResult
    from reef.engine.local.open import LocalDurability

P = ParamSpec("P")
T = TypeVar("T")


def renamed_keyword(**renamed: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept old keywords of a method: `@renamed_keyword(name="namespace")`."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if renamed.keys().isdisjoint(kwargs):
                return method(*args, **kwargs)
            return method(*args, **_translate_keywords(method.__name__, kwargs))

        return call

    def _translate_keywords(method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        for old in renamed.keys() & kwargs.keys():
            new = renamed[old]
            warn(f"{method}({old}=) is now {method}({new}=)", DeprecationWarning, stacklevel=3)
            kwargs = {**kwargs, new: kwargs[old]}
            del kwargs[old]
        return kwargs

    return decorate


JOBS = {
    "build_indexes": "reef.jobs.indexes",
    "merge_branch": "reef.jobs.branches",
    "rollback": "reef.jobs.branches",
}
"""The methods of a database that are jobs. Jobs are built on databases, so this is the one place
where the engine names the layer above it."""


def load_job(name: str) -> Callable[..., Any]:
    """Return one of `JOBS`; its module is imported on first use."""
    job: Callable[..., Any] = getattr(import_module(JOBS[name]), name)
    return job


def _column(schema: Schema, name: str) -> tuple[int, str]:
    """Return the number and the name of a column; NotFoundError if there is none."""
    for column in schema.fields:
        if column.name == name:
            return column.number, name
    raise NotFoundError(f"there is no column {name!r}, and no index of it", column=name)


StartWorker = Callable[["Database", Writer, BackgroundSettings], Worker]


class Database:
    """The namespaces of one bucket."""

    def __init__(
        self,
        store: Store,
        start_worker: StartWorker | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.store = store
        self.metrics = Metrics()
        self.events = Events()
        self._start_worker = start_worker
        """Starts the background jobs of a writer; passed in by `reef.open`, a layer above."""
        self._registry = registry
        """The registry of namespaces; without one they are listed."""
        self._runtime: Runtime = store.runtime
        self._proved = False
        self._log_files: FileSystem = OS
        """The file system of local logs; the simulator replaces it."""
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()
        """Open writers and readers, which `close` closes. A writer that the program has dropped is
        alive while batches are queued."""
        self._unclosed: deque[UnclosedRole] = deque()
        """Roles of writers that were dropped without a close, which `close` releases."""
        self._closed = False

    # --- namespaces ---------------------------------------------------------------
    @renamed_keyword(name="namespace")
    def create(
        self,
        namespace: str,
        schema: pa.Schema | None = None,
        *,
        key: str = "id",
        indexes: Sequence[IndexDefinition] = (),
    ) -> NamespaceInfo:
        """Create a namespace with these columns, or a plain one, and search indexes.

        An existing namespace with the same columns and indexes is left unchanged. With others it is
        a ConflictError; use `alter` to add columns and indexes.
        """
        columns = DEFAULT_SCHEMA if schema is None else Schema.of(schema, key)
        specs = resolve_all(indexes, columns)
        self._prove_store()
        publisher = self._namespaces.ensure(namespace, columns, indexes=specs)
        manifest = publisher.heads.find().manifest
        if manifest.schema.fingerprint != columns.fingerprint:
            raise ConflictError(
                f"namespace {namespace} exists with other columns: "
                f"{', '.join(manifest.schema.arrow().names)}",
                hint="Change them with alter(), or choose another name",
                namespace=namespace,
            )
        if specs:
            check_same_indexes(namespace, manifest.indexes, specs, columns)
        return namespace_info(namespace, manifest)

    @renamed_keyword(name="namespace")
    def alter(
        self,
        namespace: str,
        schema: pa.Schema | None = None,
        *,
        add_index: IndexDefinition | None = None,
        drop_index: str | None = None,
        build: bool = True,
    ) -> NamespaceInfo:
        """Change the columns or the search indexes of a namespace.

        `schema` adds nullable columns, or widens numbers. No row is rewritten: earlier rows have
        null in a new column. A change that would lose data is rejected.

        `add_index` adds a search index, and builds it for the segments that exist, while writers
        and readers continue; with `build=False` that is left to `reef.jobs.build_indexes`, to the
        background work of a writer, and to compactions. Searches are right at any time, and become
        faster as segments get the index. `drop_index` drops the indexes of a column.
        """
        if schema is None and add_index is None and drop_index is None:
            raise InvalidInputError(
                "alter() was called without a change",
                kind=ErrorKind.INVALID_OPTION,
                hint="Pass a schema, add_index= or drop_index=",
            )
        self._prove_store()
        publisher = self._namespaces.publisher(namespace)

        def edit(head: Manifest) -> Manifest | None:
            after = head
            if schema is not None:
                after = grow_schema(after, after.schema.grown(schema)) or after
            if drop_index is not None:
                after = drop_indexes(after, *_column(after.schema, drop_index))
            if add_index is not None:
                after = add_index_spec(after, resolve(add_index, after.schema)) or after
            return None if after is head else after

        changed = publisher.publish(edit)
        if add_index is not None and build:
            load_job("build_indexes")(self, namespace)
            changed = publisher.heads.find().manifest
        return namespace_info(namespace, changed)

    @renamed_keyword(name="namespace")
    def info(self, namespace: str) -> NamespaceInfo:
        """Return the columns, size and log position of a namespace."""
        self._check_open()
        with self._suggesting(namespace):
            heads = locate(self.store, namespace)
        head = heads.found.manifest
        unfolded = read_unfolded(self.store, heads.names, head)
        return namespace_info(namespace, head, unfolded.ingested)

    def namespaces(self, *, dropped: bool = False) -> list[str]:
        """Return the names of all namespaces, sorted; with `dropped`, of the dropped ones."""
        self._check_open()
        return self._namespaces.names(NamespaceState.DROPPED if dropped else NamespaceState.LIVE)

    @renamed_keyword(name="namespace")
    def drop(self, namespace: str) -> None:
        """Drop a namespace: fence its writer, and make it invisible.

        `undrop` restores it until a sweep, a day later, deletes its data.
        """
        self._prove_store()
        with self._suggesting(namespace):
            self._namespaces.drop(namespace)

    @renamed_keyword(name="namespace")
    def undrop(self, namespace: str) -> NamespaceInfo:
        """Restore a dropped namespace.

        NotFoundError if it is not dropped, or if its data was swept.
        """
        self._prove_store()
        return namespace_info(namespace, self._namespaces.undrop(namespace))

    def rename(self, namespace: str, to: str) -> NamespaceInfo:
        """Give a namespace another name, which is not in use; its objects stay where they are.

        Its writer is fenced. Opening the former name is a NotFoundError that has the new one, and
        the former name cannot be created again unless the namespace is renamed back. Snapshots,
        cursors and pinned readers stay valid. Can be repeated after an interruption.
        """
        self._prove_store()
        with self._suggesting(namespace):
            info = namespace_info(to, self._namespaces.rename(namespace, to))
        self.events.emit("namespace.renamed", namespace=namespace, to=to)
        return info

    @renamed_keyword(name="namespace")
    def stats(self, namespace: str) -> NamespaceStats:
        """Return statistics of a namespace: levels, log, pins, its writer."""
        self._check_open()
        with self._suggesting(namespace):
            return namespace_stats(self.store, namespace)

    def jobs(self, namespace: str | None = None, *, deep: bool = False) -> list[RunningJob]:
        """Return the jobs that run in the bucket or in one namespace, with their progress.

        In a bucket of more than 100 namespaces, jobs that have run for some seconds and reported
        themselves; with `deep`, or for one namespace, all that its manifest and log show: three
        requests for each.
        """
        self._check_open()
        names = [namespace] if namespace else self.namespaces()
        return running_jobs(self.store, self._board, names, deep=deep or namespace is not None)

    @property
    def _board(self) -> JobBoard | None:
        return None if self._registry is None else self._registry.board

    def _working(
        self, kind: str, namespace: str, job_id: str | None = None
    ) -> AbstractContextManager[JobHeartbeat]:
        """List a long job in `jobs`, for every process, while the block runs."""
        return JobHeartbeat(self._board, kind, namespace, job_id)

    def _over(self, store: Store) -> "Database":
        """Return this database over another store: same metrics, no background work."""
        other = Database(store, registry=self._registry)
        other.metrics, other.events = self.metrics, self.events
        other._proved = self._proved
        return other

    # --- handles ------------------------------------------------------------------
    @overload
    def writer(
        self,
        namespace: str,
        *,
        create: bool | None = None,
        durability: Literal["local"],
        local_log: str | os.PathLike[str],
        reapply: bool = False,
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> "LocalWriter": ...

    @overload
    def writer(
        self,
        namespace: str,
        *,
        create: bool | None = None,
        durability: Literal["object"] = "object",
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> Writer: ...

    @renamed_keyword(name="namespace")
    def writer(
        self,
        namespace: str,
        *,
        create: bool | None = None,
        durability: Literal["object", "local"] = "object",
        local_log: str | os.PathLike[str] | None = None,
        reapply: bool = False,
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> Writer:
        """Acquire the writer role of a namespace.

        `create` decides about a namespace that does not exist: True creates a plain one, False
        raises NotFoundError. None creates it unless another namespace has a similar name, since
        that is likely a typo; then it is a NotFoundError with the similar name.

        Any older writer is fenced: it acknowledges no further write. With `take_over=False`, raise
        ConflictError and change nothing if another writer has committed or opened within the last
        minute, by the store's clock, and has not been closed.

        With `durability="local"` a write is acknowledged when it is in `local_log`, a directory
        for this namespace only, and uploaded soon after: until then it is on one disk only.
        Batches that an earlier writer left there are uploaded too; if another writer has taken
        over meanwhile, only with `reapply=True`.

        A background thread folds, compacts and sweeps; `background=False` leaves that to others.
        """
        changed = WriterSettings().changed(settings)
        work = background_settings(background)
        self._check_open()
        if not take_over:
            check_role_is_free(self.store, namespace)
        local = self._local_durability(durability, local_log, reapply=reapply)
        if local is not None:
            changed = local.adjust(changed)
        writer = self._open_writer(Namespace(namespace), changed, local, create)
        if background and self._start_worker is not None:
            writer.background = self._start_worker(self, writer, work)
        self._handles.add(writer)
        note_unclosed(writer, self._unclosed)
        return writer

    def _local_durability(
        self, durability: str, local_log: str | os.PathLike[str] | None, *, reapply: bool
    ) -> "LocalDurability | None":
        """Check the arguments of `writer`; the modules of local logs are loaded for one only."""
        if durability == "object" and local_log is None and not reapply:
            return None
        from reef.engine.local.open import LocalDurability

        return LocalDurability.of(durability, local_log, reapply=reapply, files=self._log_files)

    def _open_writer(
        self,
        namespace: Namespace,
        settings: WriterSettings,
        local: "LocalDurability | None",
        create: bool | None,
    ) -> Writer:
        self._prove_store()
        self._recover_store(namespace)

        def acquire_role(claim: StreamClaim = NO_STREAM) -> tuple[Committer, Outcomes]:
            publisher = self._namespaces.ensure(
                namespace.name,
                DEFAULT_SCHEMA,
                before_create=lambda: self._before_create(namespace.name, create),
            )
            if publisher.heads.names.home:
                self._recover_store(publisher.heads.names)
            opened = open_writer(
                self.store, publisher, settings, self.metrics, self.events, claim=claim
            )
            heads = publisher.heads
            committer = Committer(
                self.store, heads, opened, settings, metrics=self.metrics, events=self.events
            )
            return committer, Outcomes(committer.log, heads)

        if local is not None:  # checks the owner of the log before anything is created
            from reef.engine.handles.local_writer import LocalWriter

            home = home_of(self.store, namespace.name)
            return local.open(self.store, home, settings, acquire_role, LocalWriter)
        committer, outcomes = acquire_role()
        return Writer(committer.namespace, committer, outcomes, settings, self._runtime)

    def _before_create(self, namespace: str, create: bool | None) -> None:
        """Raise NotFoundError if a writer must not create a missing namespace."""
        if create is None:
            self._refuse_former_name(namespace)
            similar = similar_name(namespace, self.namespaces())
            if similar is not None:
                raise NotFoundError(
                    f"there is no namespace {namespace} in {self.store.url}",
                    hint=f"Did you mean {similar}? create=True creates {namespace}",
                    namespace=namespace,
                    similar=similar,
                )
        elif not create:
            raise NotFoundError(
                f"there is no namespace {namespace} in {self.store.url}",
                hint=f"create=True creates {namespace}",
                namespace=namespace,
            )
        self.events.emit("namespace.created", namespace=namespace)

    def _refuse_former_name(self, namespace: str) -> None:
        """Raise NotFoundError with the current name, if a namespace had this one before."""
        try:
            locate(self.store, namespace)
        except NotFoundError as error:
            if error.kind is ErrorKind.RENAMED:
                raise

    @overload
    def reader(
        self,
        namespace: str,
        *,
        as_of: AsOf | datetime | str | int | dict[str, Any],
        **settings: Unpack[ReaderOptions],
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, namespace: str, *, snapshot: Snapshot | str, **settings: Unpack[ReaderOptions]
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, namespace: str, *, pin: Literal[True], **settings: Unpack[ReaderOptions]
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, namespace: str, *, notify: Notifier | None = None, **settings: Unpack[ReaderOptions]
    ) -> Reader: ...

    @renamed_keyword(name="namespace")
    def reader(
        self,
        namespace: str,
        *,
        as_of: Any = None,
        snapshot: Any = None,
        pin: bool = False,
        notify: Notifier | None = None,
        **settings: Unpack[ReaderOptions],
    ) -> Reader | PinnedReader:
        """Open a namespace for reading; NotFoundError if it does not exist.

        `as_of` (a generation, a datetime or date, ISO 8601 text, or an AsOf), `snapshot` (a
        Snapshot, its id or its name) and `pin=True` (the current state) open one point in time,
        which a lease protects until the reader is closed. `notify` reports new commits, so that
        they are visible at once and not after the next refresh.
        """
        changed = ReaderSettings().changed(settings)
        self._check_open()
        with operation(self.metrics, "open_reader"), self._suggesting(namespace):
            follows = as_of is None and snapshot is None and not pin
            check_notifier(notify, follows=follows)
            reader: Reader | PinnedReader
            if follows:
                reader = self._open_reader(namespace, changed, notify)
            else:
                reader = self._open_pinned(namespace, changed, as_of, snapshot)
        self._handles.add(reader)
        return reader

    def _open_reader(
        self, namespace: str, settings: ReaderSettings, notify: Notifier | None
    ) -> Reader:
        heads = locate(self.store, namespace, fallback=True)
        return Reader(
            self.store,
            heads.names,
            settings,
            metrics=self.metrics,
            events=self.events,
            notify=notify,
            heads=heads,
        )

    def _open_pinned(
        self, namespace: str, settings: ReaderSettings, as_of: Any, snapshot: Any
    ) -> PinnedReader:
        heads, target = self._resolve_target(namespace, as_of, snapshot)
        return PinnedReader(
            self.store,
            heads.names,
            settings,
            target,
            pin=True,
            metrics=self.metrics,
            heads=heads,
            dropped=heads.found.manifest.dropped is not None,
        )

    # --- SQL ----------------------------------------------------------------------
    def sql(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> pa.Table:
        """Run a query of DuckDB over the namespaces, each of them a view; return its rows.

        Past states are views too: `"users@12"` or `users AS OF 12` (a generation), `users AS OF
        'nightly'` (a snapshot), `users AS OF TIMESTAMP '2026-01-31 12:00'`. `parameters` are the
        values of `?` or `$name` in the query. Only queries are accepted. Needs the extra `sql`.
        """
        with self.sql_stream(query, parameters) as result:
            return result.to_arrow()

    def sql_stream(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> "SqlResult":
        """Run a query as `sql` does, and return its rows as a stream.

        The namespaces that the query names are pinned until the stream was read or closed.
        """
        from reef.engine.handles.sql import run_sql

        self._check_open()
        result = run_sql(self, query, parameters)
        self._handles.add(result)
        return result

    # --- snapshots and cursors ----------------------------------------------------
    def snapshot(
        self,
        namespace: str,
        name: str | None = None,
        *,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> Snapshot:
        """Pin everything that is committed now, until it is released or `ttl_s` has passed.

        With `generation`, pin that one, which must still be active. Several snapshots may pin the
        same generation.
        """
        self._prove_store()
        with operation(self.metrics, "snapshot"), self._suggesting(namespace):
            publisher = self._namespaces.publisher(namespace)
            names = publisher.heads.names
            return take_snapshot(
                self.store,
                publisher,
                self._segments(names),
                names,
                name=name,
                ttl_s=ttl_s,
                generation=generation,
            )

    def snapshot_all(self, name: str, *, ttl_s: float | None = None) -> dict[str, Snapshot]:
        """Pin every namespace of the bucket, each at its own LSN, under one name.

        The snapshots are recorded together in the catalog, in one serializable commit, and returned
        by namespace; `snapshots_all(name)` finds them again. A snapshot can be read, branched,
        backed up and released like any other. ConflictError if there is one of that name; the name
        is free again when all of its snapshots were released or have expired.
        """
        self._prove_store()
        return take_all(self, name, ttl_s)

    def snapshots_all(self, name: str) -> dict[str, Snapshot]:
        """Return the snapshots that `snapshot_all(name)` has taken and that are still there."""
        self._check_open()
        return find_all(self, name)

    def bucket_snapshots(self) -> list[BucketSnapshot]:
        """Return the snapshots of the whole bucket by name, as `snapshot_all` has recorded them.

        One that is not complete is being taken, or its process has died: `release_snapshot_all`
        releases what it has pinned.
        """
        self._check_open()
        return list_all(self)

    def release_snapshot_all(self, name: str) -> None:
        """Release all snapshots that `snapshot_all(name)` has taken, and free the name.

        NotFoundError if there is none of that name.
        """
        self._prove_store()
        release_all(self, name)

    @renamed_keyword(name="namespace")
    def branch(self, source: str, namespace: str, at: Any = None) -> NamespaceInfo:
        """Create a namespace with the rows that another one has now, or had at a point in time.

        No row is copied, and the number of requests does not depend on the size. Both can be
        written from then on, and neither sees the other's writes. `at` is a generation, a Snapshot,
        a datetime, ISO 8601 text, or `{"lsn": 12}`. Objects that the branch shares are retained in
        the source until the branch is dropped, or has compacted its rows into its own.
        ConflictError if the name is in use.
        """
        self._prove_store()
        with operation(self.metrics, "branch"):
            made = make_branch(self._namespaces, source, namespace, at)
        self.events.emit("namespace.branched", namespace=namespace, source=source)
        return namespace_info(namespace, made)

    def diff(
        self, a: str | Snapshot | PinnedReader, b: str | Snapshot | PinnedReader
    ) -> Iterator[Difference]:
        """Yield the keys whose rows differ between two states, in key order.

        A state is the newest one of a namespace, by its name, a Snapshot, or an open pinned view
        (`db.reader("orders", as_of=12)`). Segments and groups that both share are not
        read. Each difference has `op` (`insert`, `update` or `delete`, from a to b), `key`, and the
        rows `a` and `b`.
        """
        return differences(self, a, b)

    def merge(
        self,
        child: str,
        parent: str,
        on_conflict: str | Callable[..., Any] = "error",
        *,
        executor: Executor | None = None,
    ) -> Any:
        """Apply the changes of a branch since it was made to another namespace, in one commit.

        Rows that both sides have changed, each in its own way, are conflicts: "error" raises
        ConflictError and changes nothing, "ours" keeps the parent's rows, "theirs" takes the
        branch's, and a function of (key, base, ours, theirs) returns the row, or None to delete it.
        Returns a report with `lsn`, `written`, `deleted` and `conflicts`. The writer of the parent
        is not disturbed. With `executor=reef.spark.executor(spark)` Spark compares key ranges.
        """
        self._prove_store()
        return load_job("merge_branch")(self, child, parent, on_conflict, executor)

    def history(self, namespace: str) -> list[GenerationRecord]:
        """Return the retained generations, newest first: when, up to which LSN, what changed.

        Each can be read with `as_of=`, branched, compared and rolled back to.
        """
        self._check_open()
        with self._suggesting(namespace):
            return generation_records(self.store, namespace)

    @renamed_keyword(name="namespace")
    def rollback(self, namespace: str, to: Any) -> Any:
        """Give a namespace the rows that it had at a point in time, as a new generation.

        `to` is a generation, a Snapshot, a datetime, ISO 8601 text, or `{"lsn": 12}`. It is one
        commit, which readers and change streams see as such; the history stays. Returns a report.
        """
        self._prove_store()
        return load_job("rollback")(self, namespace, to)

    def snapshots(self, namespace: str) -> list[Snapshot]:
        """Return the unexpired snapshots of a namespace, oldest first.

        Snapshots of earlier incarnations of the name are included: they can be read and released
        after a drop, and while the name is dropped.
        """
        self._check_open()
        return list_snapshots(self.store, namespace)

    def cursor(self, namespace: str, name: str, after_lsn: int | None = None) -> ChangeCursor:
        """Open a registered cursor, for which the log is retained.

        A new cursor starts after `after_lsn`, or at the end of the log; an existing one resumes
        at its committed position.
        """
        if after_lsn is not None:
            check_lsn(after_lsn, "after_lsn")
        self._prove_store()
        with self._suggesting(namespace):
            publisher = self._namespaces.publisher(namespace)
        names = publisher.heads.names
        segments = self._segments(names)
        register_cursor(self.store, names, name, after_lsn, segments=segments, publisher=publisher)
        return ChangeCursor(self.store, names, name, segments, publisher)

    def cursors(self, namespace: str) -> dict[str, int]:
        """Return the registered cursors with their committed LSNs."""
        self._check_open()
        head = locate(self.store, namespace).found.manifest
        return {name: entry.lsn for name, entry in sorted(head.cursors.items())}

    def drop_cursor(self, namespace: str, name: str) -> None:
        """Unregister a cursor, so that the log is no longer retained for it; missing is fine."""
        self._prove_store()
        check_cursor_name(name)
        publisher = self._namespaces.publisher(namespace)
        publisher.publish(lambda head: drop_cursor(head, name))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has its own metrics and events.
        return Database, (self.store, self._start_worker, self._registry)

    # --- lifecycle ----------------------------------------------------------------
    def close(self) -> None:
        """Close the writers and readers that were opened here; the writers release their roles.

        Writers that the program holds no reference to any more are flushed and release theirs, too.
        All of them are closed even if one fails; then its error is raised.
        """
        self._closed = True
        with ExitStack() as stack:
            stack.callback(release_unclosed, self._unclosed)
            for handle in list(self._handles):
                stack.callback(handle.close)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"the database {self.store.url} is closed", hint="Open it again with reef.open"
            )

    def __repr__(self) -> str:
        return f"<Database {self.store.url}>"

    def _repr_html_(self) -> str:
        proved = "proved" if self._proved else "not tried yet"
        return html_table("Database", {"store": self.store.url, "create-only writes": proved})

    def _resolve_target(
        self, namespace: str, as_of: Any, snapshot: Any
    ) -> tuple[HeadFinder, ReadTarget]:
        if as_of is not None and snapshot is not None:
            raise InvalidInputError(
                "as_of= and snapshot= both name a point in time", kind=ErrorKind.INVALID_OPTION
            )
        if snapshot is not None:
            heads, entry = resolve_snapshot(self.store, namespace, snapshot)
            return heads, ReadTarget(entry.generation)
        target = ReadTarget() if as_of is None else read_target(as_of)
        return locate(self.store, namespace), target

    @contextmanager
    def _suggesting(self, namespace: str) -> Iterator[None]:
        """Name in a NotFoundError the namespace that was probably meant, at the cost of a LIST."""
        try:
            yield
        except NotFoundError as error:
            if error.hint or error.kind is not ErrorKind.NOT_FOUND:
                raise
            with suppress(ReefError):
                names = self.namespaces()
                similar = None if namespace in names else similar_name(namespace, names)
                if similar is not None:
                    error.hint = f"Did you mean {similar}?"
            raise

    def _segments(self, namespace: Namespace) -> SegmentStore:
        cache = ByteCache(ReaderSettings().cache_bytes, self.metrics)
        return SegmentStore(self.store, namespace, cache)

    def _prove_store(self) -> None:
        """Prove once that conditional writes exclude, before anything is published (H4, H23).

        Costs one GET the first time.
        """
        self._check_open()
        if not self._proved:
            self.store = as_proved(self.store, agree_on_cas(self.store))
            self._proved = True

    def _recover_store(self, namespace: Namespace) -> None:
        """Complete the pending records of dead writers in a two-phase store (H23)."""
        report = recover(self.store, f"{namespace.base}/")
        for key in report.finished:
            self.events.emit("two_phase.finished", namespace=namespace.name, object=key)
        for end, records in (("stuck", report.stuck), ("superseded", report.superseded)):
            for record in records:
                context = {"object": record.destination, "source": record.source}
                self.events.emit(
                    f"two_phase.{end}", level=ERROR, namespace=namespace.name, **context
                )

    @property
    def _namespaces(self) -> Namespaces:
        return Namespaces(self.store, self.metrics, self._registry)
