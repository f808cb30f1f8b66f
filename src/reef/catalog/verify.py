"""Verification of a catalog: every byte that is needed, and whether it all adds up.

The head and the plan decode, and no object has a number behind those of the head, which would
have been lost then. Every checkpoint that is not given up is read whole: its pairs sum up to its
set hash, and the hash that it carried on is that of the one before. Every segment of the chain from
the oldest checkpoint to the head decodes and stands on its predecessor; applied to one checkpoint
they give exactly the next. Segments that are in nobody's chain are counted as orphans, and are no
problem. Nothing is changed, and nothing comes from a cache.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from reef.catalog.checkpoint_format import CheckpointMeta, Pair, pair_hash
from reef.catalog.checkpoints import CheckpointStore
from reef.catalog.head import Head
from reef.catalog.parts import Parts
from reef.catalog.segment_format import Segment
from reef.catalog.segments import Chain, SegmentStore
from reef.catalog.view import laid_over
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.types import KeyRange

__all__ = ["CatalogProblem", "CatalogReport", "verify"]

T = TypeVar("T")
ALL = KeyRange()
LOOKS_MAX = 5


@dataclass(frozen=True, slots=True)
class CatalogProblem:
    """Something that is not as it must be."""

    object: str
    what: str


@dataclass(slots=True)
class CatalogReport:
    """What was read, and what is wrong with it."""

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
        """Return what is read, or note what is wrong."""
        try:
            return read()
        except (CorruptionError, NotFoundError, UnsupportedFormatError) as error:
            found = error.context.get("object", object)
            self.problems.append(CatalogProblem(str(found), error.message))
            return None

    def expect(self, object: str, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(CatalogProblem(object, what))


def verify(parts: Parts) -> CatalogReport:
    """Return every problem of everything that is needed.

    No lease holds what is read here. If something was amiss and the head has moved on meanwhile,
    it may have been collected: then all is looked at again.
    """
    for _ in range(LOOKS_MAX):
        report = CatalogReport()
        newest = parts.newest_number()  # before the head: it is never behind what there is
        known = report.attempt(parts.names.head, parts.heads.load)
        plan = report.attempt(parts.names.plan, parts.plans.load)
        if known is None:
            return report
        ends = known.head.last_segment_seq
        report.expect(
            parts.names.head,
            newest <= ends + 1,
            f"the head ends with segment {ends}, and there are objects of number {newest}: "
            "it was lost or put back, or a new beginning was not finished",
        )
        _verify(parts, known.head, plan.plan.retained_from if plan else 0, report)
        if not report.problems or parts.heads.load().head.revision == known.head.revision:
            return report
    return report


def _verify(parts: Parts, head: Head, retained_from: int, report: CatalogReport) -> None:
    report.transactions = head.last_txn_id
    checkpoints = _checkpoints(parts, head, retained_from, report)
    segments = _segments(parts, head, checkpoints, report)
    _replay(parts, head, checkpoints, segments, report)


Checked = tuple[CheckpointMeta, list[Pair]]


def _checkpoints(
    parts: Parts, head: Head, retained_from: int, report: CatalogReport
) -> list[Checked]:
    """Read those not given up, oldest first; compare each with its own sum and the one before."""
    store = CheckpointStore(parts.store, parts.names, None)
    wanted = range(min(retained_from, head.checkpoint_seq), head.checkpoint_seq + 1)
    found = [each for each in store.found() if each.seq in wanted]
    if head.checkpoint_id is not None:
        name = parts.names.checkpoint(head.checkpoint_id)
        there = any(each.id == head.checkpoint_id for each in found)
        report.expect(name, there, f"object {name} is missing: the head needs it")
    checked: list[Checked] = []
    for each in found:
        read = report.attempt(
            each.key,
            lambda each=each: _read_whole(store, each.id, needed=each.id == head.checkpoint_id),  # type: ignore[misc]
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
            f"it says {meta.key_count} and {meta.set_hash}",
        )
        for before, _ in checked:
            report.expect(
                each.key,
                before.id != meta.previous_id or before.set_hash == meta.previous_set_hash,
                f"object {each.key} carried on {meta.previous_set_hash}, "
                f"{before.id} has {before.set_hash}",
            )
        checked.append(read)
    return checked


def _read_whole(store: CheckpointStore, checkpoint_id: str, *, needed: bool) -> Checked | None:
    """Return a checkpoint; one that the head does not need may be collected at any moment."""
    try:
        return store.read_whole(checkpoint_id)
    except NotFoundError:
        if needed:
            raise
        return None


def _segments(
    parts: Parts, head: Head, checkpoints: list[Checked], report: CatalogReport
) -> list[Segment]:
    """Read the chain as far back as it is needed, and whatever older part is still there."""
    store = SegmentStore(parts.store, parts.names, None)
    chain = Chain(head.last_segment_seq, head.recent)
    listed = store.found(0, head.last_segment_seq)
    needed = report.attempt(parts.names.segments, lambda: store.chain(chain, head.checkpoint_seq))
    oldest = min([meta.last_segment_seq_at_ckpt for meta, _ in checkpoints], default=0)
    segments = needed or []
    if needed is not None and oldest < head.checkpoint_seq:
        try:
            segments = store.chain(chain, oldest)
        except NotFoundError:  # collected: an unpublished checkpoint keeps no segments
            segments = needed
        except CorruptionError as error:
            damaged = str(error.context.get("object", parts.names.segments))
            report.expect(damaged, False, error.message)
    on_chain = {(each.seq, each.write_id) for each in segments}
    first = min((each.seq for each in segments), default=head.checkpoint_seq + 1)
    report.segments = len(segments)
    report.orphans = sum(
        (each.seq, each.write_id) not in on_chain for each in listed if each.seq >= first
    )
    return segments


def _history(head: Head, segments: list[Segment]) -> dict[int, str]:
    """Return by number the write ids that are known to be on the head's chain."""
    history = dict(enumerate(head.recent, head.recent_from))
    for segment in segments:
        history |= {segment.seq - 1: segment.base_write_id, segment.seq: segment.write_id}
    return history


def _replay(
    parts: Parts,
    head: Head,
    checkpoints: list[Checked],
    segments: list[Segment],
    report: CatalogReport,
) -> None:
    """Apply segments to each checkpoint: they must give the next one, and at last the state."""
    state: dict[bytes, bytes] | None = {} if not checkpoints else None
    at, by_seq = 0, {segment.seq: segment for segment in segments}
    history = _history(head, segments)
    for meta, pairs in checkpoints:
        seq, name = meta.last_segment_seq_at_ckpt, parts.names.checkpoint(meta.id)
        if meta.id != head.checkpoint_id and history.get(seq, meta.write_id) != meta.write_id:
            continue  # of a new beginning that came to nothing: it belongs to no history
        if state is not None and all(number in by_seq for number in range(at + 1, seq + 1)):
            for number in range(at + 1, seq + 1):
                laid_over(state, by_seq[number].records, ALL)
            report.expect(
                name,
                state == dict(pairs),
                f"object {name} is not what its segments make of the checkpoint before",
            )
        state, at = dict(pairs), seq
        after = by_seq.get(seq + 1)
        report.expect(
            name,
            after is None or after.base_write_id == meta.write_id,
            f"object {name} ends with {meta.write_id}, the next segment stands on another",
        )
    if state is None:
        return
    for segment in segments:
        if segment.seq > at:
            laid_over(state, segment.records, ALL)
    report.keys = len(state)
    report.set_hash = str(pair_hash(state.items()))
