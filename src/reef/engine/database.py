"""A database: the namespaces of one bucket. Wires the parts together; no algorithms."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from logging import ERROR
from typing import Any, Literal, Self, Unpack, overload

import pyarrow as pa

from reef.config import (
    BackgroundSettings,
    ReaderOptions,
    ReaderSettings,
    WriterOptions,
    WriterSettings,
)
from reef.engine.commit.committer import Committer
from reef.engine.commit.outcomes import Outcomes
from reef.engine.commit.role import check_role_is_free
from reef.engine.commit.taking import RoleTaking
from reef.engine.display import html_table
from reef.engine.history.changes import check_lsn
from reef.engine.history.cursor import ChangeCursor, register_cursor
from reef.engine.history.moments import AsOf, Wanted
from reef.engine.history.pinned import PinnedReader
from reef.engine.history.snapshots import Snapshot, list_snapshots, resolve_snapshot, take_snapshot
from reef.engine.info import Info
from reef.engine.job_board import Working, running_jobs
from reef.engine.jobs_seen import RunningJob
from reef.engine.local.durability import LocalDurability
from reef.engine.local.writer import LocalWriter
from reef.engine.namespaces import Namespaces
from reef.engine.reader import Reader
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.engine.registry import Registry
from reef.engine.stats import NamespaceStats, namespace_stats
from reef.engine.unfolded import read_unfolded
from reef.engine.worker import Worker, background_settings
from reef.engine.writer import Writer
from reef.errors import ConflictError, InvalidInputError, Kind
from reef.formats.manifest import Manifest, NamespaceState
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.locallog.vfs import OS_FILES, FileSystem
from reef.manifest.edits import grow_schema
from reef.manifest.head import HeadFinder, locate
from reef.manifest.snapshots import drop_cursor
from reef.manifest.streams import NO_STREAM, StreamClaim
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store, agree_on_cas
from reef.stores.notify.base import Notifier, check_notifier
from reef.stores.probe import as_proved
from reef.stores.two_phase import recover
from reef.telemetry import Events, Metrics, operation

__all__ = ["Database", "StartWorker"]

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
        """What works behind a writer; engines have none of their own, `reef.open` brings it."""
        self._registry, self._board = registry, None if registry is None else registry.board
        """Follows which namespaces there are; without one they are listed."""
        self._runtime: Runtime = store.runtime
        self._proved = False
        self.log_files: FileSystem = OS_FILES
        """Where local logs lie; the simulator brings disks of its own."""

    def create(self, name: str, schema: pa.Schema | None = None, *, key: str = "id") -> Info:
        """Make a namespace with these columns, or a plain one; return what it is.

        One that is there already with the same columns is left as it is; with others, it is a
        ConflictError, and `alter` is the way.
        """
        wanted = DEFAULT_SCHEMA if schema is None else Schema.of(schema, key)
        self._prove_store()
        manifest = self._namespaces.ensure(name, wanted).heads.find().manifest
        if manifest.schema.fingerprint != wanted.fingerprint:
            raise ConflictError(
                f"namespace {name} is there already, with other columns: "
                f"{', '.join(manifest.schema.arrow().names)}",
                hint="Change them with alter(), or choose another name",
                namespace=name,
            )
        return Info.of(name, manifest)

    def alter(self, name: str, schema: pa.Schema) -> Info:
        """Let the columns of a namespace grow: new ones, or wider numbers. Nothing is rewritten.

        Rows from before have null in a new column. A change that would lose data is refused.
        """
        self._prove_store()
        publisher = self._namespaces.publisher(name)

        def grow(head: Manifest) -> Manifest | None:
            return grow_schema(head, head.schema.grown(schema))

        return Info.of(name, publisher.publish(grow))

    def info(self, name: str) -> Info:
        """Return what a namespace is, as of its newest manifest."""
        heads = locate(self.store, name)
        head = heads.found.manifest
        return Info.of(name, head, read_unfolded(self.store, heads.names, head).ingested)

    def namespaces(self, *, dropped: bool = False) -> list[str]:
        """Return the names of the namespaces that are in the bucket, in order.

        With `dropped`, of those that were dropped instead.
        """
        return self._namespaces.names(NamespaceState.DROPPED if dropped else NamespaceState.LIVE)

    def drop(self, name: str) -> None:
        """Drop a namespace. Its writer is fenced, and whoever opens it finds nothing.

        `undrop` brings it back until a sweep, a day later, takes what was in it.
        """
        self._prove_store()
        self._namespaces.drop(name)

    def undrop(self, name: str) -> Info:
        """Bring back a dropped namespace, as it was; NotFoundError if a sweep has taken it."""
        self._prove_store()
        return Info.of(name, self._namespaces.undrop(name))

    def stats(self, name: str) -> NamespaceStats:
        """Return what a namespace holds and how it is doing: levels, log, pins, its writer."""
        return namespace_stats(self.store, name)

    def jobs(self, namespace: str | None = None) -> list[RunningJob]:
        """Return what runs in the bucket, or in one namespace: where, since when, how far."""
        return running_jobs(
            self.store, self._board, [namespace] if namespace else self.namespaces()
        )

    def working(self, kind: str, namespace: str) -> AbstractContextManager[Working]:
        """Show a job that takes long to `jobs`, wherever that is asked, while the block runs."""
        return Working(self._board, kind, namespace)

    def over(self, store: Store) -> "Database":
        """Return the same database through another way to its bucket; it counts into the same
        metrics, and its writers do nothing in the background.
        """
        other = Database(store, registry=self._registry)
        other.metrics, other.events = self.metrics, self.events
        other._proved = self._proved
        return other

    @overload
    def writer(
        self,
        name: str,
        *,
        durability: Literal["local"],
        local_log: str | os.PathLike[str],
        reapply: bool = False,
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> LocalWriter: ...

    @overload
    def writer(
        self,
        name: str,
        *,
        durability: Literal["object"] = "object",
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> Writer: ...

    def writer(
        self,
        name: str,
        *,
        durability: Literal["object", "local"] = "object",
        local_log: str | os.PathLike[str] | None = None,
        reapply: bool = False,
        take_over: bool = True,
        background: bool | BackgroundSettings = True,
        **settings: Unpack[WriterOptions],
    ) -> Writer:
        """Take the writer role of a namespace, which is made if there is none.

        Any older writer is fenced: it acknowledges nothing more. With `take_over=False` it is a
        ConflictError, and nothing is changed, if one has committed or opened within the last
        minute, by the store's clock; one that was closed since cannot be told apart from it.

        With `durability="local"` a write is acknowledged when it is in `local_log`, a directory
        of this namespace's own, and uploaded soon after: until then it is on one disk only. What
        an earlier writer left there is uploaded too; if another one took over meanwhile, only
        with `reapply=True`.

        Behind it a thread folds, compacts and sweeps; `background=False` leaves that to others.
        """
        wanted = WriterSettings().changed(settings)
        work = background_settings(background)
        if not take_over:
            check_role_is_free(self.store, name)
        local = LocalDurability.of(durability, local_log, reapply=reapply, files=self.log_files)
        if local is not None:
            wanted = local.settings(wanted)
        writer = self._open_writer(Namespace(name), wanted, local)
        if background and self._start_worker is not None:
            writer.background = self._start_worker(self, writer, work)
        return writer

    def _open_writer(
        self, namespace: Namespace, wanted: WriterSettings, local: LocalDurability | None
    ) -> Writer:
        self._prove_store()
        self._recover_store(namespace)

        def take(claim: StreamClaim = NO_STREAM) -> tuple[Committer, Outcomes]:
            publisher = self._namespaces.ensure(namespace.name, DEFAULT_SCHEMA)
            names = publisher.heads.names
            role = RoleTaking(self.store, names, publisher, wanted, self.metrics, self.events)
            return role.take(claim)

        if local is not None:  # which looks whose log it is before anything is made
            return local.open(self.store, namespace, wanted, take)
        committer, outcomes = take()
        return Writer(committer.namespace, committer, outcomes, wanted, self._runtime)

    @overload
    def reader(
        self,
        name: str,
        *,
        as_of: AsOf | datetime | int | dict[str, Any],
        **settings: Unpack[ReaderOptions],
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, name: str, *, snapshot: Snapshot | str, **settings: Unpack[ReaderOptions]
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, name: str, *, pin: Literal[True], **settings: Unpack[ReaderOptions]
    ) -> PinnedReader: ...

    @overload
    def reader(
        self, name: str, *, notify: Notifier | None = None, **settings: Unpack[ReaderOptions]
    ) -> Reader: ...

    def reader(
        self,
        name: str,
        *,
        as_of: Any = None,
        snapshot: Any = None,
        pin: bool = False,
        notify: Notifier | None = None,
        **settings: Unpack[ReaderOptions],
    ) -> Reader | PinnedReader:
        """Open a namespace for reading; NotFoundError if there is none.

        `as_of` (a generation, a datetime, or an AsOf), `snapshot` (itself, its id or its name) and
        `pin=True` (now) open one moment, which a lease keeps until it is closed. `notify` tells of
        new commits, so that they are seen at once and not after the next look.
        """
        wanted = ReaderSettings().changed(settings)
        metrics, events = self.metrics, self.events
        with operation(self.metrics, "open_reader"):
            follows = as_of is None and snapshot is None and not pin
            check_notifier(notify, follows=follows)
            if follows:
                heads = locate(self.store, name, fallback=True)
                return Reader(
                    self.store,
                    heads.names,
                    wanted,
                    metrics=metrics,
                    events=events,
                    notify=notify,
                    heads=heads,
                )
            heads, moment = self._moment(name, as_of, snapshot)
            return PinnedReader(
                self.store,
                heads.names,
                wanted,
                moment,
                pin=True,
                metrics=metrics,
                heads=heads,
                dropped=heads.found.manifest.successor is not None,
            )

    # --- views in time ------------------------------------------------------------
    def snapshot(
        self,
        namespace: str,
        name: str | None = None,
        *,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> Snapshot:
        """Keep everything that is committed now, until it is released or `ttl_s` has passed.

        With `generation`, keep that one, which must still be active; several may share one.
        """
        self._prove_store()
        with operation(self.metrics, "snapshot"):
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

    def snapshots(self, namespace: str) -> list[Snapshot]:
        """Return the snapshots of a namespace that have not expired, the oldest first.

        Snapshots of earlier incarnations of the name are among them: they can be read and
        released after a drop.
        """
        return list_snapshots(self.store, namespace)

    def cursor(self, namespace: str, name: str, after_lsn: int | None = None) -> ChangeCursor:
        """Read changes by a cursor that has a name, and for which the log is kept.

        A new one begins after an LSN, or at the end of the log; one that is there goes on from
        where it was last committed.
        """
        if after_lsn is not None:
            check_lsn(after_lsn, "after_lsn")
        self._prove_store()
        publisher = self._namespaces.publisher(namespace)
        names = publisher.heads.names
        segments = self._segments(names)
        register_cursor(self.store, names, name, after_lsn, segments=segments, publisher=publisher)
        return ChangeCursor(self.store, names, name, segments, publisher)

    def cursors(self, namespace: str) -> dict[str, int]:
        """Return the registered cursors, and up to which LSN each has committed."""
        head = self._head(namespace)
        return {name: entry.lsn for name, entry in sorted(head.cursors.items())}

    def drop_cursor(self, namespace: str, name: str) -> None:
        """Let the sweep take what was kept for a cursor; one that is not there is fine."""
        self._prove_store()
        publisher = self._namespaces.publisher(namespace)
        publisher.publish(lambda head: drop_cursor(head, name))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy counts and tells for itself.
        return Database, (self.store, self._start_worker, self._registry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __repr__(self) -> str:
        return f"<Database {self.store.url}>"

    def _repr_html_(self) -> str:
        proved = "proved" if self._proved else "not tried yet"
        return html_table("Database", {"store": self.store.url, "create-only writes": proved})

    def _moment(self, name: str, as_of: Any, snapshot: Any) -> tuple[HeadFinder, Wanted]:
        if as_of is not None and snapshot is not None:
            raise InvalidInputError(
                "as_of= and snapshot= both name a point in time", kind=Kind.INVALID_OPTION
            )
        if snapshot is not None:
            heads, entry = resolve_snapshot(self.store, name, snapshot)
            return heads, Wanted(entry.generation)
        wanted = Wanted() if as_of is None else AsOf.of(as_of).wanted()
        return locate(self.store, name), wanted

    def _head(self, name: str) -> Manifest:
        """Return the newest manifest of the current incarnation of a name."""
        return locate(self.store, name).found.manifest

    def _segments(self, namespace: Namespace) -> SegmentStore:
        cache = ByteCache(ReaderSettings().cache_bytes, self.metrics)
        return SegmentStore(self.store, namespace, cache)

    def _prove_store(self) -> None:
        """Whoever publishes is a writer: a job or an alteration as much as one with the role (H4,
        H23). One GET, the first time.
        """
        if not self._proved:
            self.store = as_proved(self.store, agree_on_cas(self.store))
            self._proved = True

    def _recover_store(self, namespace: Namespace) -> None:
        """Finish what dead writers left in a two-phase store; other stores leave nothing (H23)."""
        report = recover(self.store, f"{namespace.base}/")
        for key in report.finished:
            self.events.emit("two_phase.finished", namespace=namespace.name, object=key)
        for end, records in (("stuck", report.stuck), ("superseded", report.superseded)):
            for record in records:
                told = {"object": record.destination, "source": record.source}
                self.events.emit(f"two_phase.{end}", level=ERROR, namespace=namespace.name, **told)

    @property
    def _namespaces(self) -> Namespaces:
        return Namespaces(self.store, self.metrics, self._registry)
