"""Verification of a catalog: every byte that is needed, and the consistency of all objects.

Head and plan decode, and no object has a number above the head's, which would mean that the head
was lost. Every checkpoint that was not discarded is read whole: its pairs match its set hash, and
the hash that it was updated from is that of the previous one. Every segment of the chain from the
oldest checkpoint to the head decodes and names its predecessor; applied to one checkpoint they
give exactly the next. Segments outside of the chain are counted as orphans, and are no problem.
Nothing is changed, and nothing is read from a cache.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from reef.catalog.checkpoints import CheckpointMeta, CheckpointStore, Pair, pair_hash
from reef.catalog.head import CatalogHead
from reef.catalog.segments import CatalogSegment, CatalogSegmentStore, ChainTip
from reef.catalog.snapshot import CatalogContext, apply_records
from reef.catalog.upkeep import load_plan
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError

T = TypeVar("T")
ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class CatalogProblem:
    """One problem of an object."""

    object: str
    message: str

    @property
    def what(self) -> str:
        """Deprecated name of `message`."""
        warnings.warn(
            "CatalogProblem.what is deprecated: use CatalogProblem.message",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.message


@dataclass(slots=True)
class CatalogReport:
    """Content of a catalog, and all its problems."""

    transactions: int = 0
    keys: int = 0
    segments: int = 0
    checkpoints: int = 0
    orphans: int = 0
    set_hash: str = ""
    problems: list[CatalogProblem] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self)

    def attempt(self, object: str, read: Callable[[], T]) -> T | None:
        """Return the result of a read, or None and record its problem."""
        try:
            return read()
        except (CorruptionError, NotFoundError, UnsupportedFormatError) as error:
            damaged = error.context.get("object", object)
            self.problems.append(CatalogProblem(str(damaged), error.message))
            return None

    def expect(self, object: str, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(CatalogProblem(object, problem))


def verify(context: CatalogContext) -> CatalogReport:
    """Check all objects that are needed, and report every problem.

    No lease pins them. If there is a problem and the head has changed meanwhile, an object may
    have been garbage-collected: then all is checked again.
    """
    for _ in range(ATTEMPTS_MAX):
        report = CatalogReport()
        newest = context.newest_seq()  # before the head, which is never behind its objects
        known = report.attempt(context.names.head, context.heads.load)
        plan = report.attempt(context.names.plan, partial(load_plan, context))
        if known is None:
            return report
        ends = known.head.last_segment_seq
        report.expect(
            context.names.head,
            newest <= ends + 1,
            f"the head ends with segment {ends}, but there are objects with number {newest}: "
            "it was lost or restored, or a recreation was not finished",
        )
        _verify(context, known.head, plan.plan.retained_from if plan else 0, report)
        if not report.problems or context.heads.load().head.revision == known.head.revision:
            return report
    return report


def _verify(
    context: CatalogContext, head: CatalogHead, retained_from: int, report: CatalogReport
) -> None:
    report.transactions = head.last_txn_id
    checkpoints = _checkpoints(context, head, retained_from, report)
    segments = _segments(context, head, checkpoints, report)
    _replay(context, head, checkpoints, segments, report)


Checked = tuple[CheckpointMeta, list[Pair]]


def _checkpoints(
    context: CatalogContext, head: CatalogHead, retained_from: int, report: CatalogReport
) -> list[Checked]:
    """Read those not discarded, oldest first; compare each with its hash and its predecessor."""
    store = CheckpointStore(context.store, context.names, None)
    retained = range(min(retained_from, head.checkpoint_seq), head.checkpoint_seq + 1)
    listed = [each for each in store.list_checkpoints() if each.seq in retained]
    if head.checkpoint_id is not None:
        name = context.names.checkpoint(head.checkpoint_id)
        exists = any(each.id == head.checkpoint_id for each in listed)
        report.expect(name, exists, f"object {name} is missing: the head needs it")
    checked: list[Checked] = []
    for each in listed:
        read = report.attempt(
            each.key,
            partial(_read_whole, store, each.id, needed=each.id == head.checkpoint_id),
        )
        if read is None:
            continue
        meta, pairs = read
        report.checkpoints += 1
        total = str(pair_hash(pairs))
        report.expect(
            each.key,
            (meta.set_hash, meta.key_count) == (total, len(pairs)),
            f"object {each.key} holds {len(pairs)} keys with the set hash {total}, "
            f"expected {meta.key_count} and {meta.set_hash}",
        )
        for before, _ in checked:
            report.expect(
                each.key,
                before.id != meta.previous_id or before.set_hash == meta.previous_set_hash,
                f"object {each.key} was updated from {meta.previous_set_hash}, "
                f"{before.id} has {before.set_hash}",
            )
        checked.append(read)
    return checked


def _read_whole(store: CheckpointStore, checkpoint_id: str, *, needed: bool) -> Checked | None:
    """Read a checkpoint; one that the head does not need may be deleted at any time."""
    try:
        return store.read_whole(checkpoint_id)
    except NotFoundError:
        if needed:
            raise
        return None


def _segments(
    context: CatalogContext, head: CatalogHead, checkpoints: list[Checked], report: CatalogReport
) -> list[CatalogSegment]:
    """Read the chain as far as it is needed, and the older part that still exists."""
    store = CatalogSegmentStore(context.store, context.names, None)
    tip = ChainTip(head.last_segment_seq, head.recent)
    listed = store.list_segments(0, head.last_segment_seq)
    needed = report.attempt(context.names.segments, lambda: store.chain(tip, head.checkpoint_seq))
    oldest = min([meta.last_segment_seq_at_ckpt for meta, _ in checkpoints], default=0)
    segments = needed or []
    if needed is not None and oldest < head.checkpoint_seq:
        try:
            segments = store.chain(tip, oldest)
        except NotFoundError:  # deleted: an unpublished checkpoint retains no segments
            segments = needed
        except CorruptionError as error:
            damaged = str(error.context.get("object", context.names.segments))
            report.expect(damaged, False, error.message)
    on_chain = {(each.seq, each.write_id) for each in segments}
    first = min((each.seq for each in segments), default=head.checkpoint_seq + 1)
    report.segments = len(segments)
    report.orphans = sum(
        (each.seq, each.write_id) not in on_chain for each in listed if each.seq >= first
    )
    return segments


def _history(head: CatalogHead, segments: list[CatalogSegment]) -> dict[int, str]:
    """Return the known write ids of the head's chain, by number."""
    history = dict(enumerate(head.recent, head.recent_from))
    for segment in segments:
        history |= {segment.seq - 1: segment.base_write_id, segment.seq: segment.write_id}
    return history


def _replay(
    context: CatalogContext,
    head: CatalogHead,
    checkpoints: list[Checked],
    segments: list[CatalogSegment],
    report: CatalogReport,
) -> None:
    """Apply segments to each checkpoint: they must give the next one, and finally the state."""
    state: dict[bytes, bytes] | None = {} if not checkpoints else None
    at, by_seq = 0, {segment.seq: segment for segment in segments}
    history = _history(head, segments)
    for meta, pairs in checkpoints:
        seq, name = meta.last_segment_seq_at_ckpt, context.names.checkpoint(meta.id)
        if meta.id != head.checkpoint_id and history.get(seq, meta.write_id) != meta.write_id:
            continue  # of a recreation that was not published: it belongs to no history
        if state is not None and all(number in by_seq for number in range(at + 1, seq + 1)):
            for number in range(at + 1, seq + 1):
                apply_records(state, by_seq[number].records)
            report.expect(
                name,
                state == dict(pairs),
                f"object {name} does not match the previous checkpoint and its segments",
            )
        state, at = dict(pairs), seq
        after = by_seq.get(seq + 1)
        report.expect(
            name,
            after is None or after.base_write_id == meta.write_id,
            f"object {name} ends with {meta.write_id}, the next segment has another base",
        )
    if state is None:
        return
    for segment in segments:
        if segment.seq > at:
            apply_records(state, segment.records)
    report.keys = len(state)
    report.set_hash = str(pair_hash(state.items()))
