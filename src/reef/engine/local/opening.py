"""Opening a writer with a local log, step by step.

1. Open the log; it is ours alone. Check whose it is.
2. If it has batches that are not known to be in the bucket: nobody else may have had the writer
   role since. If somebody has, look at the bucket; what is left of them is not applied by itself,
   but stays on the disk, and FencedError says so. A bucket that does not know the log is another
   one, or has forgotten it: then only whoever asks for it has it applied, and only to the bucket
   that it was last used with.
3. Take the role. The same publish makes the log's stream known to the namespace, and checks again
   that nobody came in between.
4. Note in the log that it is known. Only then does it take batches.
5. After the fences nothing of an earlier life can land any more. So the mark that the replay has
   found is exact: what lies at or below it is in the bucket, what lies above is not (H63). The
   latter is taken up, shown, and uploaded. But for keyed batches that their client has sent again,
   to whoever had the role meanwhile: those are in the bucket, and a key counts once (H19).
"""

from collections.abc import Callable
from dataclasses import dataclass

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.outcomes import Outcomes
from reef.engine.local import words
from reef.engine.local.backlog import Item, Left
from reef.engine.local.entries import LocalBatch, decode_entry
from reef.engine.local.front import LocalFront
from reef.engine.local.identity import UPLOADED, LogIdentity, mark_known, own_log
from reef.engine.local.marks import mark_now
from reef.engine.log import Log
from reef.errors import FencedError, NotFoundError
from reef.formats.batch import decode_ops
from reef.formats.manifest import Manifest
from reef.locallog import LocalLog, RecoveryReport
from reef.manifest.head import locate
from reef.manifest.streams import StreamClaim
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["LocalOpening", "LocalRecovery", "left_above"]

TakeRole = Callable[[StreamClaim], tuple[Committer, Outcomes]]


@dataclass(frozen=True, slots=True)
class LocalRecovery:
    """What an opening took up from a local log (H27)."""

    log: RecoveryReport
    """What the log itself found on its disk."""
    uploaded_index: int
    """Up to which entry all was in the bucket already."""
    replayed: int
    """Batches that were on the disk only: they are shown, and uploaded now."""
    repeated: int = 0
    """Batches whose keys another writer has committed meanwhile: they are not written again."""


@dataclass(frozen=True, slots=True)
class LocalOpening:
    """Opens one namespace's front."""

    store: Store
    namespace: Namespace
    settings: WriterSettings
    reapply: bool = False
    """Whether to apply what is left although another writer has taken over."""

    def open(
        self, log: LocalLog, take_role: TakeRole
    ) -> tuple[LocalFront, Outcomes, LocalRecovery]:
        """Run the protocol on a log that is open."""
        runtime = self.store.runtime
        identity = own_log(log, self.namespace.name, self.store.url, runtime)
        committer, outcomes = take_role(self._claim(log, identity))
        runtime.reach("local log claimed")
        identity = mark_known(log, identity, self.store.url)
        mark = max(committer.tail.rules.marks.get(identity.stream, 0), log.get_uint64(UPLOADED))
        if 0 < log.last_index < mark:  # its end was lost: numbers go on behind what was uploaded
            log.delete_range(log.first_index, log.last_index)
        front = LocalFront(log, identity, committer, self.settings, runtime, uploaded=mark)
        replayed, repeated = self._replay(front)
        return front, outcomes, LocalRecovery(log.recovery, mark, replayed, repeated)

    # --- step 2 -------------------------------------------------------------------
    def _claim(self, log: LocalLog, identity: LogIdentity) -> StreamClaim:
        foreign = words.foreign(identity, log.path, self.store.url)
        if not identity.is_known:
            return StreamClaim(identity.stream)
        try:
            heads = locate(self.store, self.namespace.name)
        except NotFoundError:
            raise foreign from None
        head = heads.found.manifest
        if self.reapply and self._was_forgotten(identity, head):
            return StreamClaim(identity.stream)
        StreamClaim(identity.stream, is_known=True, unknown=foreign).check(head)
        must_hold = False
        if not self.reapply and log.last_index > log.get_uint64(UPLOADED):
            must_hold = head.writer_stream == identity.stream
            if not must_hold:
                mark = mark_now(Log(self.store, heads.names), head, identity.stream)
                self._check_nothing_left(log, identity, mark)
        return StreamClaim(
            identity.stream,
            is_known=True,
            must_hold=must_hold,
            unknown=foreign,
            taken_over=self._taken_over(log, identity, log.get_uint64(UPLOADED)),
        )

    def _was_forgotten(self, identity: LogIdentity, head: Manifest) -> bool:
        """Whether this is the log's bucket, and it has lost the mark: by a rebuild, say. Then the
        log's own note tells how far it was uploaded, or a little less."""
        return identity.stream not in head.stream_marks and identity.url == self.store.url

    def _check_nothing_left(self, log: LocalLog, identity: LogIdentity, mark: int) -> None:
        if log.last_index > mark:
            raise self._taken_over(log, identity, mark)

    def _taken_over(self, log: LocalLog, identity: LogIdentity, mark: int) -> FencedError:
        cause = f"another writer has taken over {self.namespace.name} since this log was used"
        return words.fenced(cause, identity, left_above(log, mark), log.path)

    # --- step 5 -------------------------------------------------------------------
    def _replay(self, front: LocalFront) -> tuple[int, int]:
        """Take up what is not in the bucket; return how many batches, and how many were there."""
        log, mark = front.log, front.uploaded
        if log.last_index <= mark:
            return 0, 0
        schemas = {schema.id: schema for schema in front.committer.tail.manifest.schemas}
        replayed = repeated = 0
        for entry in log.entries(max(mark + 1, log.first_index)):
            batch = decode_entry(entry, log.path)
            if _is_committed(front, batch):
                _pass_over(front, entry.index)
                repeated += 1
                continue
            schema = schemas.get(batch.schema_id)
            if schema is None:
                raise words.no_schema(entry.index, batch.schema_id, front.identity, log.path)
            ops = decode_ops(batch.record, schema, f"entry {entry.index} of {log.path}")
            watch = front.runtime.stopwatch()
            front.restore(Item(batch, ops, watch, index=entry.index))
            replayed += 1
        if front.uploaded > mark:  # no upload will say so
            log.set_uint64(UPLOADED, front.uploaded)
        return replayed, repeated


def _is_committed(front: LocalFront, batch: LocalBatch) -> bool:
    """Whether the same batch is in the bucket, under the same key. One with another body is not:
    both were acknowledged."""
    key = batch.header.key
    found = front.committer.tail.dedup.get(key) if key is not None else None
    return found is not None and found.digest == batch.header.digest


def _pass_over(front: LocalFront, index: int) -> None:
    """Note that an entry is in the bucket: at once, or when all before it is."""
    if front.backlog.waiting:
        front.backlog.waiting[-1].passed_index = index
    else:
        front.uploaded = index


def left_above(log: LocalLog, index: int) -> Left:
    """Return what a log has above an index."""
    if log.last_index <= index:
        return Left(0, 0, 0, 0)
    first = max(index + 1, log.first_index)
    size = sum(len(entry.data) for entry in log.entries(first))
    return Left(log.last_index - first + 1, size, first, log.last_index)
