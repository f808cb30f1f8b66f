"""Opening a writer with a local log, step by step.

1. Open the log; it is ours alone. Check whose it is, and read the batches in it.
2. If it has batches that are not known to be in the bucket: no other writer may have had the role
   since, and no copy of this log. If one has, read the bucket's log: batches that are not there are
   not applied without being asked for, but stay on the disk, and FencedError says so; of kind
   `log_forked` if a copy has committed other entries with the same numbers (H71). A bucket that
   does not know the log is another one, or has forgotten it: then its batches are applied only on
   request, and only to the bucket that it was last used with.
3. Note a new life in the log, and take the role with it. The same publish makes the log's stream
   known to the namespace, and checks again that no other writer came in between.
4. Note in the log that it is known. Only then does it take batches.
5. After the fences nothing of an earlier life can land any more. So the position that the replay
   has found is exact: entries up to it are in the bucket, entries above are not (H63). The latter
   are loaded, shown, and uploaded. But for keyed batches that their client has sent again, to
   another writer meanwhile: those are in the bucket, and a key counts once (H19).
6. Release the segments of the log that are in the bucket as a whole: the disk may be full.

On request (`reapply`) the entries of a fork are applied too: under the name of their branch
(`position`), which the log has from then on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.outcomes import Outcomes
from reef.engine.local import words
from reef.engine.local.backlog import Item, Left
from reef.engine.local.entries import LocalBatch, decode_entry, point_of
from reef.engine.local.front import LocalFront
from reef.engine.local.identity import LogIdentity, own_log, stream_of
from reef.engine.local.marks import read_marks
from reef.engine.local.position import Position, find_position
from reef.engine.local.uploader import truncate
from reef.engine.log import Log
from reef.engine.log_rules import LogReader
from reef.errors import FencedError, NotFoundError
from reef.formats.batch import decode_ops
from reef.formats.manifest import Manifest
from reef.formats.streams import StreamPoint
from reef.locallog import LocalLog, LogEntry, RecoveryReport
from reef.manifest.head import locate
from reef.manifest.streams import StreamClaim, StreamHistory, extend_lineage
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
        loaded = _load(log, identity.noted(log))
        head = self._head(log, identity)
        claim = StreamClaim(identity.stream, life=runtime.ulid(), lives=identity.lives)
        if head is not None:
            claim = self._checked(claim, log, identity, head)
        identity = identity.born(claim.life, held=head.writer_life if head else "")
        identity.write(log)
        committer, outcomes = take_role(claim)
        runtime.reach("local log claimed")
        position = self._position(log, identity, committer.tail.rules, claim.stream)
        identity = self._known(log, identity, position)
        if 0 < log.last_index < position.uploaded:  # the bucket is ahead: its numbers go on
            log.delete_range(log.first_index, log.last_index)
        front = LocalFront(log, identity, committer, self.settings, runtime, position=position)
        replayed, repeated = self._replay(front, loaded)
        truncate(front)
        recovery = LocalRecovery(log.recovery, position.uploaded, replayed, repeated)
        return front, outcomes, recovery

    # --- step 2 -------------------------------------------------------------------
    def _head(self, log: LocalLog, identity: LogIdentity) -> Manifest | None:
        """Return the head of the namespace to which a log belongs; None if it is new."""
        if not identity.is_known:
            return None
        try:
            return locate(self.store, self.namespace.name).found.manifest
        except NotFoundError:
            raise words.foreign(identity, log.path, self.store.url) from None

    def _checked(
        self, claim: StreamClaim, log: LocalLog, identity: LogIdentity, head: Manifest
    ) -> StreamClaim:
        """Return the claim with its conditions; raise if the head does not meet them."""
        if self.reapply and self._was_forgotten(identity, head):
            return claim
        noted = identity.noted(log)
        known = replace(
            claim,
            is_known=True,
            unknown=words.foreign(identity, log.path, self.store.url),
            taken_over=self._taken_over(log, identity, noted),
        )
        known.check(head)
        if log.last_index <= noted:
            return known
        if known.is_held(head) and not self.reapply:
            return replace(known, must_hold=True)
        names = self.namespace.at(head.incarnation)
        rules = read_marks(Log(self.store, names), head)
        position = _position_of(log, identity, rules)
        if not self.reapply:
            self._check_nothing_left(log, identity, position)
        return replace(claim, stream=position.stream) if position.is_forked else known

    def _was_forgotten(self, identity: LogIdentity, head: Manifest) -> bool:
        """Whether this is the log's bucket, and it has lost the mark: by a rebuild, say. Then the
        log's own note tells how far it was uploaded, or a little less."""
        return identity.stream not in head.stream_marks and identity.url == self.store.url

    def _check_nothing_left(self, log: LocalLog, identity: LogIdentity, position: Position) -> None:
        if position.is_forked:
            raise words.forked(identity, left_above(log, position.uploaded), log.path)
        if log.last_index > position.uploaded:
            raise self._taken_over(log, identity, position.uploaded)

    def _taken_over(self, log: LocalLog, identity: LogIdentity, mark: int) -> FencedError:
        cause = f"another writer has taken over {self.namespace.name} since this log was used"
        return words.fenced(cause, identity, left_above(log, mark), log.path)

    # --- steps 4 and 5 ------------------------------------------------------------
    def _position(
        self, log: LocalLog, identity: LogIdentity, rules: LogReader, claimed: str
    ) -> Position:
        """Return the position of a log whose role was taken: from now on it is exact."""
        position = _position_of(log, identity, rules)
        if position.stream != claimed:  # a copy has uploaded since we have checked
            raise words.forked(identity, left_above(log, position.uploaded), log.path)
        return position

    def _known(self, log: LocalLog, identity: LogIdentity, position: Position) -> LogIdentity:
        """Note that the namespace knows the stream, and where the bucket was last found."""
        known = msgspec.structs.replace(identity, id=position.id, is_known=True, url=self.store.url)
        if position.is_forked:
            known = msgspec.structs.replace(
                known, base=position.uploaded, lives=identity.lives[-1:]
            )
        known.write(log)
        return known

    def _replay(self, front: LocalFront, loaded: "list[_Loaded]") -> tuple[int, int]:
        """Restore batches that are not in the bucket; return how many, and how many were there."""
        path, mark = front.log.path, front.uploaded
        schemas = {schema.id: schema for schema in front.committer.tail.manifest.schemas}
        replayed = repeated = 0
        for point, batch in loaded:
            if point.index <= mark:
                continue
            if _is_committed(front, batch):
                _pass_over(front, point)
                repeated += 1
                continue
            schema = schemas.get(batch.schema_id)
            if schema is None:
                raise words.no_schema(point.index, batch.schema_id, front.identity, path)
            ops = decode_ops(batch.record, schema, f"entry {point.index} of {path}")
            item = Item(batch, ops, front.runtime.stopwatch())
            item.set_point(point)
            front.restore(item)
            replayed += 1
        return replayed, repeated


class _Loaded(NamedTuple):
    point: StreamPoint
    batch: LocalBatch


def _load(log: LocalLog, noted: int) -> list[_Loaded]:
    """Read the batches that may have to be uploaded: a log that is damaged takes no role."""
    entries = log.entries(max(noted + 1, log.first_index))
    return [_Loaded(point_of(entry), decode_entry(entry, log.path)) for entry in entries]


def _is_committed(front: LocalFront, batch: LocalBatch) -> bool:
    """Whether the same batch is in the bucket, under the same key. One with another body is not:
    both were acknowledged."""
    key = batch.header.key
    found = front.committer.tail.dedup.get(key) if key is not None else None
    return found is not None and found.digest == batch.header.digest


def _pass_over(front: LocalFront, point: StreamPoint) -> None:
    """Note that an entry is in the bucket: at once, or when all before it is."""
    if front.backlog.waiting:
        item = front.backlog.waiting[-1]
        item.points = extend_lineage(item.points, (point,))
    else:
        front.uploaded = point.index


def _position_of(log: LocalLog, identity: LogIdentity, rules: LogReader) -> Position:
    def entries(first: int) -> Iterator[LogEntry]:
        return log.entries(max(first, log.first_index))

    def history(name: str) -> StreamHistory:
        return rules.history(stream_of(name))

    return find_position(entries, history, identity.id, identity.noted(log))


def left_above(log: LocalLog, index: int) -> Left:
    """Return what a log has above an index."""
    if log.last_index <= index:
        return Left(0, 0, 0, 0)
    first = max(index + 1, log.first_index)
    size = sum(len(entry.data) for entry in log.entries(first))
    return Left(log.last_index - first + 1, size, first, log.last_index)
