"""Read the log to find out which writes count: resync a writer, resolve an unknown outcome.

**Resync** follows a lost slot, before a writer sends again (protocols §2, step 4). Read the head
and list the log from the writer's next LSN, never by probing from the lost slot: the writer's own
void object may have been collected there, and its slot would appear open (H64). A fence of a higher
epoch in the listing means fenced. The rest is applied in LSN order.

**Resolve** decides the outcome of a write, by the rules of every reader:

committed   the object is in its slot and counts, or its key is in the window
rejected    the slot holds another object, or the object is void, or another object has committed
            its key
unknown     the slot is still open, or was collected: the object may land, or may have counted

Both trust only reads made while the head was fresh: after a longer pause a slot may have been
collected, and filled again by a stalled process (H10, H67).
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from reef.engine.log.log import Log, LogRules, SlotGone, Verdict, contiguous
from reef.engine.log.tail import Tail
from reef.errors import (
    CorruptionError,
    FencedError,
    InternalError,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.telemetry import Events, Metrics
from reef.types import Receipt

ATTEMPTS_MAX = 10
"""How often head and log are read again, if that took longer than half a grace."""

ResolvedOutcome = Literal["committed", "rejected", "unknown"]


@dataclass(frozen=True, slots=True)
class Resync:
    """Brings the tail of one writer up to the end of the log."""

    namespace: Namespace
    log: Log
    heads: HeadFinder
    epoch: int
    writer_id: str
    metrics: Metrics
    events: Events

    def run(self, tail: Tail, lost_lsn: int | None = None) -> Tail:
        """Return the tail from which to continue; FencedError if a newer writer has fenced."""
        manifest, new = self._list_new(tail, lost_lsn)
        objects = dict(zip(new, self.log.read_many(new), strict=True))
        for lsn in new:
            header = self._present(lsn, objects[lsn]).header
            # Below the floor nothing counts (H67); a fence there still names a newer writer.
            if lsn >= manifest.wal_floor or header.kind is WalKind.FENCE:
                self._check_writer(header)
        if manifest.wal_floor > tail.next_lsn:
            tail = tail.restarted(manifest)
        for lsn in contiguous(new, tail.next_lsn):
            if tail.apply_object(self._present(lsn, objects[lsn])) is Verdict.VOID:
                self.metrics.counter("log.void").add()
        if tail.follows(manifest):
            tail.rebase(manifest)
        self.events.emit("resynced", namespace=self.namespace.name, last_lsn=tail.next_lsn - 1)
        return tail

    def _list_new(self, tail: Tail, lost_lsn: int | None) -> tuple[Manifest, list[int]]:
        """Return the head, and the filled slots from the tail's next LSN on.

        The listing counts only while the head is fresh: after a stall in between, a hole where
        an own void object was swept would appear to be the first open slot (H10, H64). A listing
        that lacks the lost slot does not count either: the writer would send there forever (H9).
        """
        for _ in range(ATTEMPTS_MAX):
            self.heads.forget()
            head = self.heads.find(dropped=True)  # the fences in its log name the newer writer
            manifest = head.manifest
            # From whichever is lower: below the floor only batches are collected, so a fence
            # that was folded already is still found.
            listed = self.log.filled(min(tail.next_lsn, manifest.wal_floor))
            # A slot that a repair has skipped is not read: its object is damaged, and stays.
            intact = [s.lsn for s in listed if s.lsn not in manifest.skipped_lsns]
            is_old = lost_lsn is not None and manifest.wal_floor <= lost_lsn
            if is_old and lost_lsn not in {slot.lsn for slot in listed}:
                self.log.runtime.sleep(self.log.runtime.uniform(0.01, 0.2))
            elif head.fresh():
                return manifest, [lsn for lsn in intact if lsn >= tail.next_lsn]
        raise UnavailableError(
            f"the log of {self.namespace.name} was not listed within half a grace period, "
            f"or its listings lack objects that exist",
            hint="The store is too slow for this grace period, or a cache serves old listings",
        )

    def _present(self, lsn: int, wal_object: WalObject | None) -> WalObject:
        if wal_object is None:
            raise UnavailableError(
                f"LSN {lsn} of {self.namespace.name} was listed and is gone",
                hint="Open the writer again",
            )
        return wal_object

    def _check_writer(self, header: WalHeader) -> None:
        """Raise FencedError if the object is of a newer writer; a lower epoch is stepped over."""
        if not header.kind.of_writer or header.writer_id == self.writer_id:
            return
        if header.epoch > self.epoch:
            self.metrics.counter("commit.fenced").add()
            self.events.emit("fenced", namespace=self.namespace.name, epoch=header.epoch)
            raise FencedError(
                f"a writer of epoch {header.epoch} took over {self.namespace.name} "
                f"from epoch {self.epoch}",
                hint="Open again to take the role back",
                namespace=self.namespace.name,
                epoch=header.epoch,
            )
        if header.epoch == self.epoch:
            raise InternalError(f"LSN {header.lsn} holds another writer's object of our epoch")
        if header.kind is WalKind.BATCHES and header.after is None:
            raise CorruptionError(
                f"LSN {header.lsn} of {self.namespace.name} is a batch of epoch {header.epoch} "
                f"behind the fence of epoch {self.epoch}",
                object=self.namespace.wal_object(header.lsn),
                offset=0,
            )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Resolves receipts and idempotency keys of one namespace."""

    log: Log
    heads: HeadFinder

    def resolve(self, write: OutcomeUnknownError | Receipt | str) -> ResolvedOutcome:
        """Return the outcome of a write, given as its error, receipt or idempotency key."""
        if isinstance(write, OutcomeUnknownError):
            write = write.receipt
        if not isinstance(write, Receipt | str):
            raise InvalidInputError(
                f"resolve() takes an error, a receipt or an idempotency key, "
                f"got {type(write).__name__}"
            )
        for _ in range(ATTEMPTS_MAX):
            self.heads.forget()
            head = self.heads.find()
            outcome = self._resolve(write, head.manifest)
            if head.fresh():  # otherwise a slot may have been collected and filled again (H67)
                return outcome
        return "unknown"

    def _resolve(self, write: Receipt | str, manifest: Manifest) -> ResolvedOutcome:
        key = write if isinstance(write, str) else write.idempotency_key
        window = DedupWindow.of(manifest)
        entry = window.get(key) if key is not None else None
        if entry is not None:
            if isinstance(write, str) or entry.write_id == write.write_id:
                return "committed"
            # A key counts once while it is in the window: this object never did, nor ever will.
            if window.reaches_back_to(write.lsn or 0):
                return "rejected"
        log = self._replay(manifest)
        if isinstance(write, str):
            return "committed" if write in log.keys else "unknown"
        return self._of_receipt(write, manifest, log)

    def _of_receipt(
        self, receipt: Receipt, manifest: Manifest, log: "_ReplayedLog"
    ) -> ResolvedOutcome:
        lsn = receipt.lsn or 0
        if lsn < manifest.wal_floor:
            return "unknown"
        if lsn not in log.verdicts:
            return "unknown"
        write_id, verdict = log.verdicts[lsn]
        if write_id != receipt.write_id:
            return "rejected"
        return "committed" if verdict is Verdict.APPLIES else "rejected"

    def _replay(self, manifest: Manifest) -> "_ReplayedLog":
        log = _ReplayedLog()
        with suppress(SlotGone):  # swept meanwhile: the head is not fresh any more
            for slot in self.log.replay(LogRules(manifest)):
                if slot.object is not None:
                    log.verdicts[slot.lsn] = (slot.object.header.write_id, slot.verdict)
                    if slot.verdict is Verdict.APPLIES:
                        log.keys.update(_keys_of(slot.object.header))
        return log


@dataclass(frozen=True, slots=True)
class _ReplayedLog:
    verdicts: dict[int, tuple[str, Verdict]] = field(default_factory=dict)
    """Write id and verdict, by LSN."""
    keys: set[str] = field(default_factory=set)
    """Idempotency keys of the objects that apply."""


def _keys_of(header: WalHeader) -> set[str]:
    """Return the idempotency keys that an object commits: its batches', or its ingest's."""
    keys = [batch.key for batch in header.batches]
    if header.job is not None:
        keys.append(header.job.key)
    return {key for key in keys if key is not None}
