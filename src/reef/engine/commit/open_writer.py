"""Open a writer: acquire the role, fence, replay (protocols §3).

1. Acquire: read the head, lease it, raise the writer epoch by CAS.
2. Fence: from the first open slot, PUT fences until M in a row are ours, stepping over objects
   that others have put there. An object of a higher epoch means fenced. After a few losses to a
   fast writer, aim at growing runs of slots.
3. Confirm: after the response to the last fence, read the head again. The epoch must still be
   ours, and the lowest of the M fences at or above the floor; otherwise repeat from 2 with that
   head.
4. Replay: take segments, window, open jobs and floor from that one head, lease it, replay to the
   last fence, release the first lease.
5. Verify: read the head once more. If its floor has moved, repeat from 2 with that head.

Both checks of step 3 are needed: without either there is a split brain (H11, H12). Step 5 covers
a replay that outlasts its lease: the log is collected meanwhile, and a slower opener of a lower
epoch puts its fence into a collected slot, in the place of an acknowledged write.

`check_role_is_free` runs before all of this, for callers that must not fence an active writer.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from reef.config import WriterSettings
from reef.engine.context import NamespaceContext
from reef.engine.log.log import SlotGone, Verdict, contiguous, listed_slots
from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import (
    UNDECODABLE,
    ConflictError,
    CorruptionError,
    FencedError,
    InternalError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.dedup import NO_STREAM, StreamClaim
from reef.manifest.edits import lower_parallel_writes, raise_writer_epoch
from reef.manifest.head import Publisher, chain_has, locate
from reef.manifest.roots import take_lease
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Outcome, Store, WriteResult
from reef.telemetry import Events, Metrics, operation

ROUNDS_MAX = 100
RESENDS_MAX = 10
PATIENT_ROUNDS = 3
SALVO_MAX = 64


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The part of the log that an opening has replayed (H27)."""

    first_lsn: int
    last_lsn: int
    applied: int
    voided: int
    ignored: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OpenedWriter:
    """An acquired writer role, with the state that the replay has restored."""

    epoch: int
    writer_id: str
    fence_ids: tuple[str, ...]
    tail: Tail
    report: ReplayReport
    schema_id: int
    """Schema that its fences name."""

    def grown_schema(self, schema_id: int, manifest: Manifest) -> Schema | None:
        """Return the schema of a batch if it is newer than the one in the fences."""
        if schema_id == self.schema_id:
            return None
        return next((schema for schema in manifest.schemas if schema.id == schema_id), None)


def open_writer(
    store: Store,
    publisher: Publisher,
    settings: WriterSettings,
    metrics: Metrics,
    events: Events,
    *,
    claim: StreamClaim = NO_STREAM,
) -> OpenedWriter:
    """Acquire the writer role of a namespace; FencedError if a newer writer comes in between.

    `claim` names the local log for which the role is acquired, if any.
    """
    namespace, cache = publisher.heads.names, ByteCache(settings.cache_bytes, metrics)
    opening = WriterOpening(
        store,
        namespace,
        publisher,
        SegmentStore(store, namespace, cache),
        writer_id=store.runtime.ulid(),
        max_parallel_writes=settings.max_parallel_writes,
        lease_ttl_s=settings.lease_ttl_s,
        claim=claim,
    )
    with operation(metrics, "open_writer"):
        opened = opening.open()
    _record(opened, namespace, metrics, events)
    parallel = settings.max_parallel_writes
    if parallel < opened.tail.manifest.max_parallel_writes:
        # M is lowered only by a writer that has fenced with the old value (H56).
        publisher.publish(lambda head: lower_parallel_writes(head, opened.epoch, parallel))
    return opened


def _record(opened: OpenedWriter, namespace: Namespace, metrics: Metrics, events: Events) -> None:
    report = opened.report
    metrics.counter("open.fences").add(len(opened.fence_ids))
    metrics.counter("log.void").add(report.voided)
    metrics.histogram("open.replay_seconds").record(report.seconds)
    events.emit(
        "opened",
        namespace=namespace.name,
        epoch=opened.epoch,
        first_lsn=report.first_lsn,
        last_lsn=report.last_lsn,
        seconds=round(report.seconds, 3),
    )


class WriterOpening:
    """One run of the opening protocol."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        publisher: Publisher,
        segments: SegmentStore,
        *,
        writer_id: str,
        max_parallel_writes: int,
        lease_ttl_s: float,
        claim: StreamClaim = NO_STREAM,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._publisher = publisher
        self._segments = segments
        self._log = NamespaceContext(store, namespace).log
        self._runtime: Runtime = store.runtime
        self._writer_id = writer_id
        self._max_parallel_writes = max_parallel_writes
        self._ttl_s = lease_ttl_s
        self._claim = claim
        self._epoch = 0
        self._raised: Manifest | None = None
        """A manifest in which the epoch was ours."""
        self._fenced_schema_id = 0
        self._fence_ids: dict[int, str] = {}
        self._passes_damage = False
        self._skipped: frozenset[int] = frozenset()

    def open(self) -> OpenedWriter:
        """Run all steps; FencedError if a newer writer comes in between."""
        # 1. Acquire.
        with self._hold_lease(self._publisher.heads.find().manifest), _hint_at_repair():
            manifest = self._raise_epoch()
            for _ in range(ROUNDS_MAX):
                # 2. and 3. Fence, and confirm by a head that the fences are in force.
                manifest, fences = self._fence_and_confirm(manifest)
                # 4. Replay everything below the last fence: it cannot change any more.
                opened = self._load_writer(manifest, fences)
                # 5. Verify that nothing was collected during the replay.
                floor, manifest = manifest.wal_floor, self._publisher.heads.find().manifest
                if manifest.wal_floor == floor:
                    return opened
        raise InternalError(f"the floor of {self._namespace.name} outran {ROUNDS_MAX} replays")

    def fence_off(
        self, skipped: frozenset[int] = frozenset(), raised: Manifest | None = None
    ) -> tuple[int, list[int]]:
        """Run steps 1 to 3 only, for repair and drop: the log may be damaged and is not read.

        Return the epoch and the fences. From then on every slot below the fences is filled for
        good, or skipped. `skipped` are slots that were filled once and are about to be skipped:
        a fence in one of them would stop no writer. `raised` is a manifest of the caller that has
        raised the epoch already.
        """
        self._passes_damage, self._skipped = True, skipped
        with self._hold_lease(self._publisher.heads.find().manifest):
            if raised is None:
                raised = self._raise_epoch()
            else:
                self._epoch, self._raised = raised.writer_epoch, raised
            _, fences = self._fence_and_confirm(raised)
        return self._epoch, fences

    # --- 1. acquire ---------------------------------------------------------------
    @contextmanager
    def _hold_lease(self, manifest: Manifest) -> Iterator[None]:
        """Protect the objects of a manifest from the sweep."""
        lease = take_lease(
            self._store, self._namespace, manifest, owner=self._writer_id, ttl_s=self._ttl_s
        )
        try:
            yield
        finally:
            with suppress(ReefError):  # an abandoned lease expires
                lease.release()

    def _raise_epoch(self) -> Manifest:
        """Publish a manifest with the next epoch, which is ours."""

        def edit(head: Manifest) -> Manifest:
            self._epoch = head.writer_epoch + 1
            return self._claim.register(
                raise_writer_epoch(head, self._max_parallel_writes), before=head
            )

        manifest = self._publisher.publish(edit)
        self._raised = manifest
        return manifest

    # --- 2. fence -----------------------------------------------------------------
    def _fence_and_confirm(self, manifest: Manifest) -> tuple[Manifest, list[int]]:
        """Steps 2 and 3: return the head that confirms the role, and the LSNs of the fences."""
        for _ in range(ROUNDS_MAX):
            fences = self._fence(manifest)
            # List from scratch, not from the generation that we believe is ours: if its PUT
            # landed in a slot that was swept, it would still appear to be the head (H14).
            self._publisher.heads.forget()
            manifest = self._publisher.heads.find().manifest
            self._check_epoch(manifest)
            if min(fences) >= manifest.wal_floor:
                return manifest, fences
        raise InternalError(f"the floor of {self._namespace.name} outran {ROUNDS_MAX} fences")

    def _fence(self, manifest: Manifest) -> list[int]:
        """Return the LSNs of M fences in a row, all ours."""
        start = max(manifest.wal_floor, manifest.wal_base)
        filled = [slot.lsn for slot in self._log.filled(start)]
        # A skipped slot never counts, and neither would a fence in it.
        lsn = start + len(contiguous([*filled, *manifest.skipped_lsns, *self._skipped], start))
        run: list[int] = []
        losses = 0
        while len(run) < manifest.max_parallel_writes:
            self._runtime.reach("fence")
            slots = range(lsn, lsn + self._salvo(manifest.max_parallel_writes - len(run), losses))
            results = self._fill_all(slots, manifest)
            for slot, result in zip(slots, results, strict=True):
                if result.outcome is Outcome.CREATED:
                    run.append(slot)
                else:
                    self._step_over(slot, result)
                    run = []
            losses += any(result.outcome is not Outcome.CREATED for result in results)
            lsn = slots.stop
        return run

    def _salvo(self, missing: int, losses: int) -> int:
        """Return the number of slots to aim at, which grows while a fast writer wins them.

        The run reaches ahead of that writer. Every slot below the last fence is filled, by it or
        by us, so no acknowledged write is missed.
        """
        if losses < PATIENT_ROUNDS:
            return missing
        return max(missing, min(2 << (losses - PATIENT_ROUNDS), SALVO_MAX))

    def _fill_all(self, slots: range, manifest: Manifest) -> list[WriteResult]:
        bodies = [(slot, self._fence_body(slot, manifest)) for slot in slots]
        return self._runtime.map(lambda body: self._fill(*body), bodies)

    def _fence_body(self, lsn: int, manifest: Manifest) -> bytes:
        self._fenced_schema_id = manifest.schema.id  # a later one has a higher id
        self._fence_ids[lsn] = self._runtime.ulid()
        return WalObject.encode(
            WalHeader(
                lsn=lsn,
                kind=WalKind.FENCE,
                epoch=self._epoch,
                writer_id=self._writer_id,
                write_id=self._fence_ids[lsn],
                created_at_ms=int(self._runtime.wall_s() * 1000),
                schema_id=manifest.schema.id,
                schema=manifest.schema,
                max_parallel_writes=manifest.max_parallel_writes,
            )
        )

    def _fill(self, lsn: int, body: bytes) -> WriteResult:
        """Send the same bytes until the response is definite."""
        for _ in range(RESENDS_MAX):
            result = self._log.fill(lsn, body)
            if result.outcome is not Outcome.UNKNOWN:
                return result
        raise OutcomeUnknownError(
            f"a fence at LSN {lsn} of {self._namespace.name} has no response",
            hint="Open again: a new epoch fences this one too",
            namespace=self._namespace.name,
        )

    def _step_over(self, lsn: int, result: WriteResult) -> None:
        """Read the object that won a slot: a higher epoch fences us, any other is passed."""
        try:
            winner = self._log.winner(lsn, result).header
        except CorruptionError:
            if self._passes_damage:  # a higher epoch would show in the head, in step 3
                return
            raise
        if not winner.kind.of_writer or winner.epoch < self._epoch:
            return
        if winner.epoch == self._epoch:
            raise InternalError(f"LSN {lsn} holds another write of our own epoch {self._epoch}")
        raise self._fenced_error(winner.epoch)

    # --- 3. confirm ---------------------------------------------------------------
    def _check_epoch(self, manifest: Manifest) -> None:
        is_ours = self._raised is not None and chain_has(manifest, self._raised)
        if manifest.writer_epoch != self._epoch or is_ours is False:
            raise self._fenced_error(manifest.writer_epoch)
        if is_ours is None:
            raise UnavailableError(
                f"{self._namespace.name} was published {len(manifest.recent)} times or more while "
                f"its writer was opened: the head does not prove epoch {self._epoch} any more",
                hint="Open again",
                namespace=self._namespace.name,
            )

    # --- 4. replay ----------------------------------------------------------------
    def _load_writer(self, manifest: Manifest, fences: list[int]) -> OpenedWriter:
        with self._hold_lease(manifest):
            tail, report = self._replay(manifest, max(fences))
        for lsn in fences:
            tail.rules.check_winner(lsn, self._fence_ids[lsn])
        ids = tail.rules.last_ids()[-len(fences) :]
        return OpenedWriter(self._epoch, self._writer_id, ids, tail, report, self._fenced_schema_id)

    def _replay(self, manifest: Manifest, last: int) -> tuple[Tail, ReplayReport]:
        start_s = self._runtime.monotonic_s()
        tail = Tail(manifest, self._segments)
        slots = self._log.scan(manifest.wal_floor, tail.rules.skipped, last + 1)
        try:
            verdicts = [tail.apply(slot) for slot in slots]
        except SlotGone as gone:
            raise self._missing_object_error(gone.lsn) from gone
        report = ReplayReport(
            manifest.wal_floor,
            last,
            verdicts.count(Verdict.APPLIES),
            verdicts.count(Verdict.VOID),
            verdicts.count(Verdict.IGNORED),
            self._runtime.monotonic_s() - start_s,
        )
        return tail, report

    def _missing_object_error(self, lsn: int) -> ReefError:
        """Separate damage from an object that a newer writer has folded and swept (H16)."""
        self._publisher.heads.forget()
        manifest = self._publisher.heads.find().manifest
        self._check_epoch(manifest)
        if lsn < manifest.wal_floor:
            return UnavailableError(
                f"LSN {lsn} of {self._namespace.name} was folded and swept during a replay that "
                f"outlasted its lease",
                hint="Open again",
                namespace=self._namespace.name,
            )
        return CorruptionError(
            f"LSN {lsn} of {self._namespace.name} is missing from the log",
            hint="Run `reef verify`, then `reef repair`",
            object=self._namespace.wal_object(lsn),
            offset=0,
        )

    def _fenced_error(self, epoch: int) -> FencedError:
        return FencedError(
            f"a writer of epoch {epoch} took over {self._namespace.name} from epoch {self._epoch}",
            hint="Open again to take the role back",
            namespace=self._namespace.name,
            epoch=epoch,
        )


@contextmanager
def _hint_at_repair() -> Iterator[None]:
    """Add to an error about damage the hint to run repair (H17)."""
    try:
        yield
    except CorruptionError as error:
        if error.hint:
            raise
        raise CorruptionError(
            error.message, hint="Run `reef verify`, then `reef repair`", **error.context
        ) from error


# --- before opening -----------------------------------------------------------------
RECENT_S = 60.0
"""A writer counts as active for this long after its last object."""


def release_role(store: Store, namespace: Namespace, opened: "OpenedWriter | UnclosedRole") -> None:
    """Record that a writer was closed cleanly: its role can be acquired without taking over.

    One object per namespace, overwritten by each writer that closes. It is only a hint for
    `check_role_is_free`: if it is lost, or a fenced writer overwrites it, the check refuses for
    a minute as after a crash. No protocol depends on it.
    """
    body = msgspec.json.encode({"epoch": opened.epoch, "writer_id": opened.writer_id})
    with suppress(ReefError):
        store.put(namespace.released, body)


@dataclass(frozen=True, slots=True)
class UnclosedRole:
    """The role of a writer that was not closed and will write no more."""

    store: Store
    namespace: Namespace
    epoch: int
    writer_id: str

    def release(self) -> None:
        """Release the role as a clean close does, if no other writer has acquired it since."""
        with suppress(ReefError):
            heads = locate(self.store, self.namespace.name)
            newest = _newest_writer(self.store, heads.names, heads.found.manifest)
            if newest is not None and newest[0].writer_id == self.writer_id:
                release_role(self.store, heads.names, self)


def _is_released(store: Store, namespace: Namespace, header: WalHeader) -> bool:
    """Return whether the writer of an object was closed cleanly."""
    try:
        released = msgspec.json.decode(store.get(namespace.released))
    except (NotFoundError, *UNDECODABLE):
        return False
    return bool(released == {"epoch": header.epoch, "writer_id": header.writer_id})


def check_role_is_free(store: Store, name: str) -> None:
    """Raise ConflictError if another writer has committed or fenced within the last minute.

    Writers do not register: only the log shows them. A writer that was closed cleanly does not
    count, and neither does one that is open but idle for longer. So this check prevents accidents
    and excludes no process; exclusion is the fences' task.

    Ages are measured by the store's clock, which dates the objects (H30). A fold may have passed
    the newest objects already, so the search continues below the floor while objects are young.

    A namespace that does not exist has no writer. Nothing is written.
    """
    try:
        heads = locate(store, name)
    except NotFoundError:
        return
    namespace, head = heads.names, heads.found.manifest
    newest = _newest_writer(store, namespace, head)
    if newest is None:
        return
    header, age_s = newest
    if _is_released(store, namespace, header):
        return
    raise ConflictError(
        f"writer {header.writer_id} of epoch {header.epoch} wrote to {namespace.name} "
        f"{age_s:.0f} s ago, at LSN {header.lsn}",
        hint=f"Pass take_over=True to fence it, or wait until it was silent for {RECENT_S:.0f} s",
        namespace=namespace.name,
        writer_id=header.writer_id,
        epoch=header.epoch,
        age_s=age_s,
        lsn=header.lsn,
    )


def _newest_writer(
    store: Store, namespace: Namespace, head: Manifest
) -> tuple[WalHeader, float] | None:
    """Return the newest object that a writer put within the last minute, and its age."""
    log = NamespaceContext(store, namespace).log
    for lsn, age_s in _recent_slots(store, namespace, head):
        if lsn in head.skipped_lsns:  # skipped by a repair: it cannot be read
            continue
        wal_object = log.read(lsn)
        if wal_object is not None and wal_object.header.kind.of_writer:
            return wal_object.header, age_s
    return None


def _recent_slots(
    store: Store, namespace: Namespace, head: Manifest
) -> Iterator[tuple[int, float]]:
    """Yield the LSNs that were filled within the last minute with their ages, newest first."""
    dates = _slot_dates(store, namespace, head)
    first = next(dates, None)
    if first is None:
        return
    now_s = store.now()
    oldest_s = now_s - RECENT_S - store.capabilities.clock_resolution_s
    lsn, date_s = first
    while True:
        if date_s >= oldest_s:
            yield lsn, max(0.0, now_s - date_s)
        elif lsn < head.wal_floor:
            return  # older ones follow
        following = next(dates, None)
        if following is None:
            return
        lsn, date_s = following


def _slot_dates(store: Store, namespace: Namespace, head: Manifest) -> Iterator[tuple[int, float]]:
    """Yield the filled slots with their dates, newest first: by LIST, below the floor by HEAD.

    Of a branch only its own: the writers of its origin have no role in it.
    """
    own = namespace.first_own_lsn
    for lsn, info in reversed(list(listed_slots(store, namespace, max(head.wal_floor, own)))):
        yield lsn, info.last_modified_s
    for lsn in range(head.wal_floor - 1, max(head.wal_base, own) - 1, -1):
        try:
            yield lsn, store.head(namespace.wal_object(lsn)).last_modified_s
        except NotFoundError:  # swept, so older than a grace period
            return
