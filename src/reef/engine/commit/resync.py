"""After losing a slot: what a writer does before it sends again (protocol section 2, step 4).

Read the head and list the log from what this writer knows, never by probing from the lost
slot: its own void object may have been collected, and its slot would look free (H64). A fence
of a higher epoch in what is listed means fenced. The rest is taken in, in LSN order.
"""

from dataclasses import dataclass

from reef.engine.log import Log
from reef.engine.log_rules import Verdict, contiguous
from reef.engine.tail import Tail
from reef.errors import CorruptionError, FencedError, InternalError, UnavailableError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.telemetry import Events, Metrics

__all__ = ["Resync"]


LOOKS_MAX = 10


@dataclass(frozen=True, slots=True)
class Resync:
    """Brings one writer's tail up to what stands in the log."""

    namespace: Namespace
    log: Log
    heads: HeadFinder
    epoch: int
    writer_id: str
    metrics: Metrics
    events: Events

    def run(self, tail: Tail, lost_lsn: int | None = None) -> Tail:
        """Return the tail from which to go on; FencedError if a newer writer has fenced."""
        manifest, new = self._look(tail, lost_lsn)
        found = dict(zip(new, self.log.read_many(new), strict=True))
        for lsn in new:
            header = self._present(lsn, found[lsn]).header
            # Below the floor nothing counts (H67); a fence there still names a newer writer.
            if lsn >= manifest.wal_floor or header.kind is WalKind.FENCE:
                self._judge_writer(header)
        if manifest.wal_floor > tail.next_lsn:
            tail = tail.restarted(manifest)
        for lsn in contiguous(new, tail.next_lsn):
            judgement = tail.take(self._present(lsn, found[lsn]))
            if judgement.verdict is Verdict.VOID:
                self.metrics.counter("log.void").add()
        if tail.follows(manifest):
            tail.rebase(manifest)
        self.events.emit("resynced", namespace=self.namespace.name, last_lsn=tail.next_lsn - 1)
        return tail

    def _look(self, tail: Tail, lost_lsn: int | None) -> tuple[Manifest, list[int]]:
        """Return the head, and the slots that are filled behind what is known.

        The listing counts only while the head is fresh: after a stall in between, a hole where
        an own void object was swept would look like the first open slot (H10, H64). Nor does one
        count that lacks the slot that was lost: whoever believed it would send there forever (H9).
        """
        for _ in range(LOOKS_MAX):
            self.heads.forget()
            head = self.heads.find(dropped=True)  # the fences in its log say who ended us
            manifest = head.manifest
            # From whichever is lower: below the floor only batches are collected, so a fence
            # that was folded already is still found.
            listed = self.log.filled(min(tail.next_lsn, manifest.wal_floor))
            # What a repair has given up is not read: it is damaged, and stays in its slot.
            sound = [s.lsn for s in listed if s.lsn not in manifest.skipped_lsns]
            is_old = lost_lsn is not None and manifest.wal_floor <= lost_lsn
            if is_old and lost_lsn not in {slot.lsn for slot in listed}:
                self.log.runtime.sleep(self.log.runtime.uniform(0.01, 0.2))
            elif head.fresh():
                return manifest, [lsn for lsn in sound if lsn >= tail.next_lsn]
        raise UnavailableError(
            f"{self.namespace.name} cannot be looked at within half a grace period, "
            f"or listings of it lack what is there",
            hint="The store is too slow for this grace period, or something keeps old answers",
        )

    def _present(self, lsn: int, found: WalObject | None) -> WalObject:
        if found is None:
            raise UnavailableError(
                f"LSN {lsn} of {self.namespace.name} was listed and is gone",
                hint="Open the writer again",
            )
        return found

    def _judge_writer(self, header: WalHeader) -> None:
        """Another writer's object: a higher epoch ends us, a lower one is stepped over."""
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
