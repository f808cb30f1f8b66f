"""Opening for writing: protocol section 3, step by step.

1. Read the head, write a lease on it, raise the writer epoch by CAS.
2. From the first open slot, PUT fences until M in a row are ours, stepping over whatever
   others have put there. A higher epoch there means fenced. After some losses to a quick
   writer, aim at more and more slots at once.
3. After the last fence's answer read the head again: the epoch must still be ours, and the
   lowest of the M fences at or above the floor. Otherwise back to 2 with that head.
4. Take segments, window, open jobs and floor from that one head, lease it, replay to the last
   fence, release the first lease.
5. Look at the head once more: if its floor has moved, back to 2 with that head.

Both checks of step 3 are needed: without either there is a split brain (H11, H12). The last look
is for a replay that outlasts its lease: the log is collected under it, and a slower opener of a
lower epoch puts its fence into an emptied slot, in the place of an acknowledged write. Found by
exploration (two openers, M = 2, under collection), not in the protocol as it was handed down.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from reef.engine.log import Log
from reef.engine.log_rules import Verdict, contiguous
from reef.engine.reading.segments import SegmentStore
from reef.engine.tail import Tail
from reef.errors import (
    CorruptionError,
    FencedError,
    InternalError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.edits import raise_writer_epoch
from reef.manifest.leases import Lease
from reef.manifest.publish import Publisher
from reef.manifest.streams import NO_STREAM, StreamClaim
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Outcome, Store, WriteResult

__all__ = ["Opened", "ReplayReport", "WriterOpening"]

ROUNDS_MAX = 100
RESENDS_MAX = 10
PATIENT_ROUNDS = 3
SALVO_MAX = 64


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What an opening read back."""

    first_lsn: int
    last_lsn: int
    applied: int
    voided: int
    ignored: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Opened:
    """The writer role, and everything that is known with it."""

    epoch: int
    writer_id: str
    fence_ids: tuple[str, ...]
    tail: Tail
    report: ReplayReport
    schema_id: int
    """Of the schema that its fences carry."""

    def grown_schema(self, schema_id: int, manifest: Manifest) -> Schema | None:
        """Return the schema of a batch if it is not the one that the fences carry."""
        if schema_id == self.schema_id:
            return None
        return next((schema for schema in manifest.schemas if schema.id == schema_id), None)


class WriterOpening:
    """Takes the writer role of one namespace."""

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
        self._log = Log(store, namespace)
        self._runtime: Runtime = store.runtime
        self._writer_id = writer_id
        self._wanted = max_parallel_writes
        self._ttl_s = lease_ttl_s
        self._claim = claim
        self._epoch = 0
        self._raised = ""
        """The write id of a manifest in which the epoch was ours."""
        self._fenced_schema_id = 0
        self._fence_ids: dict[int, str] = {}
        self._passes_damage = False
        self._given_up: frozenset[int] = frozenset()

    def open(self) -> Opened:
        """Run the protocol; FencedError if a newer writer came in between."""
        with self._leased(self._publisher.heads.find().manifest), _damage_asks_for_repair():
            manifest = self._raise_epoch()
            for _ in range(ROUNDS_MAX):
                manifest, fences = self._take_role(manifest)
                opened = self._opened(manifest, fences)
                floor, manifest = manifest.wal_floor, self._publisher.heads.find().manifest
                if manifest.wal_floor == floor:
                    return opened
        raise InternalError(f"the floor of {self._namespace.name} outran {ROUNDS_MAX} replays")

    def fence_off(
        self, given_up: frozenset[int] = frozenset(), raised: Manifest | None = None
    ) -> tuple[int, list[int]]:
        """Take the role without reading the log, which may be damaged; return epoch and fences.

        What a repair and a drop do. From then on every slot below the fences is filled for good,
        or given up. `given_up` are slots that were filled once and are about to be skipped: a fence
        in one of them would stop no writer. `raised` is a manifest of the caller's own that has
        raised the epoch already.
        """
        self._passes_damage, self._given_up = True, given_up
        with self._leased(self._publisher.heads.find().manifest):
            if raised is None:
                raised = self._raise_epoch()
            else:
                self._epoch, self._raised = raised.writer_epoch, raised.write_id
            _, fences = self._take_role(raised)
        return self._epoch, fences

    def _take_role(self, manifest: Manifest) -> tuple[Manifest, list[int]]:
        """Steps 2 and 3: return the head in which the role is ours, and the fences."""
        for _ in range(ROUNDS_MAX):
            fences = self._fence(manifest)
            # From scratch, not from the generation that we believe is ours: if its PUT had landed
            # in a slot that was swept, it would still look like the head (H14).
            self._publisher.heads.forget()
            manifest = self._publisher.heads.find().manifest
            self._check_epoch(manifest)
            if min(fences) >= manifest.wal_floor:
                return manifest, fences
        raise InternalError(f"the floor of {self._namespace.name} outran {ROUNDS_MAX} fences")

    def _opened(self, manifest: Manifest, fences: list[int]) -> Opened:
        with self._leased(manifest):
            tail, report = self._replay(manifest, max(fences))
        for lsn in fences:
            tail.rules.check_winner(lsn, self._fence_ids[lsn])
        ids = tail.rules.last_ids()[-len(fences) :]
        return Opened(self._epoch, self._writer_id, ids, tail, report, self._fenced_schema_id)

    @contextmanager
    def _leased(self, manifest: Manifest) -> Iterator[None]:
        """Keep what a manifest needs from being swept."""
        lease = Lease.take(
            self._store, self._namespace, manifest, owner=self._writer_id, ttl_s=self._ttl_s
        )
        try:
            yield
        finally:
            with suppress(ReefError):  # one that is left lapses by itself
                lease.release()

    def _raise_epoch(self) -> Manifest:
        """Step 1."""

        def edit(head: Manifest) -> Manifest:
            self._epoch = head.writer_epoch + 1
            return self._claim.made(raise_writer_epoch(head, self._wanted), before=head)

        manifest = self._publisher.publish(edit)
        self._raised = manifest.write_id
        return manifest

    # --- step 2 -------------------------------------------------------------------
    def _fence(self, manifest: Manifest) -> list[int]:
        """Return the LSNs of M fences in a row, all ours."""
        start = max(manifest.wal_floor, manifest.wal_base)
        filled = [slot.lsn for slot in self._log.filled(start)]
        # A slot that was given up counts for nothing, and so would a fence in it.
        lsn = start + len(contiguous([*filled, *manifest.skipped_lsns, *self._given_up], start))
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
        """How many slots to aim at: more and more, where a quick writer is always first.

        Its next slots are taken before it comes to them; every slot below the last fence is
        filled, by it or by us, so that nothing of what it was acknowledged is passed over.
        """
        if losses < PATIENT_ROUNDS:
            return missing
        return max(missing, min(2 << (losses - PATIENT_ROUNDS), SALVO_MAX))

    def _fill_all(self, slots: range, manifest: Manifest) -> list[WriteResult]:
        bodies = [(slot, self._fence_body(slot, manifest)) for slot in slots]
        return self._runtime.gather([lambda b=body: self._fill(*b) for body in bodies])  # type: ignore[misc]

    def _fence_body(self, lsn: int, manifest: Manifest) -> bytes:
        self._fenced_schema_id = manifest.schema.id  # one that grows meanwhile has a higher one
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
        """Send until the answer is definite: the same bytes each time."""
        for _ in range(RESENDS_MAX):
            result = self._log.fill(lsn, body)
            if result.outcome is not Outcome.UNKNOWN:
                return result
        raise OutcomeUnknownError(
            f"a fence at LSN {lsn} of {self._namespace.name} has no answer",
            hint="Open again: a new epoch fences this one too",
            namespace=self._namespace.name,
        )

    def _step_over(self, lsn: int, result: WriteResult) -> None:
        """The seed's outcomes 2 to 4: a lower epoch, our own, a higher one."""
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
        raise self._fenced(winner.epoch)

    # --- steps 3 and 4 ------------------------------------------------------------
    def _check_epoch(self, manifest: Manifest) -> None:
        is_ours = self._raised in {recent.write_id for recent in manifest.recent}
        if manifest.writer_epoch != self._epoch or not is_ours:
            raise self._fenced(manifest.writer_epoch)

    def _replay(self, manifest: Manifest, last: int) -> tuple[Tail, ReplayReport]:
        start_s = self._runtime.monotonic_s()
        tail = Tail(manifest, self._segments)
        verdicts = []
        lsns = [n for n in range(manifest.wal_floor, last + 1) if n not in manifest.skipped_lsns]
        found = dict(zip(lsns, self._log.read_many(lsns), strict=True))
        for lsn in range(manifest.wal_floor, last + 1):
            if lsn in found:
                verdicts.append(tail.take(self._present(lsn, found[lsn])).verdict)
            else:
                tail.skip()
        report = ReplayReport(
            manifest.wal_floor,
            last,
            verdicts.count(Verdict.APPLIES),
            verdicts.count(Verdict.VOID),
            verdicts.count(Verdict.IGNORED),
            self._runtime.monotonic_s() - start_s,
        )
        return tail, report

    def _present(self, lsn: int, found: WalObject | None) -> WalObject:
        """A missing object may mean that a newer writer has folded and swept (H16)."""
        if found is not None:
            return found
        self._publisher.heads.forget()
        manifest = self._publisher.heads.find().manifest
        self._check_epoch(manifest)
        if lsn < manifest.wal_floor:
            raise UnavailableError(
                f"LSN {lsn} of {self._namespace.name} was folded and swept during a replay that "
                f"outlasted its lease",
                hint="Open again",
                namespace=self._namespace.name,
            )
        raise CorruptionError(
            f"LSN {lsn} of {self._namespace.name} is missing from the log",
            hint="Run `reef verify`, then `reef repair`",
            object=self._namespace.wal_object(lsn),
            offset=0,
        )

    def _fenced(self, epoch: int) -> FencedError:
        return FencedError(
            f"a writer of epoch {epoch} took over {self._namespace.name} from epoch {self._epoch}",
            hint="Open again to take the role back",
            namespace=self._namespace.name,
            epoch=epoch,
        )


@contextmanager
def _damage_asks_for_repair() -> Iterator[None]:
    """Tell whoever runs into damage what to do about it (H17)."""
    try:
        yield
    except CorruptionError as error:
        if error.hint:
            raise
        raise CorruptionError(
            error.message, hint="Run `reef verify`, then `reef repair`", **error.context
        ) from error
