"""Recovery of orphans: segments that are durable, and that nobody has published.

Their writer died, or was too slow, between its segment and the head. An orphan is adopted only
onto the very segment that it stands on, by a swap of the head that was read: what its session
read is still what there is. A writer that was slow rather than dead then finds itself on the
chain, and answers "committed"; one that was told "conflict" has seen the head past its base, and
its segment fits nowhere any more (H21). No marks are needed. While the writer's lease is alive
the segment is left to it: not for safety, but to spare both a race.
"""

from reef.catalog.commit import publish_segment
from reef.catalog.head import KnownHead
from reef.catalog.parts import Parts
from reef.catalog.segment_format import Segment
from reef.errors import CorruptionError, NotFoundError, OutcomeUnknownError

__all__ = ["recover_orphans"]

ADOPTED_MAX = 1000


def recover_orphans(parts: Parts) -> int:
    """Publish what was left behind the head; return how many segments."""
    began = parts.runtime.stopwatch()
    adopted = 0
    while adopted < ADOPTED_MAX:
        known = parts.heads.load()
        orphan = _orphan(parts, known)
        if orphan is None:
            break
        try:
            if publish_segment(parts, known, orphan) is None:
                adopted += 1
                parts.events.emit("catalog.adopted", seq=orphan.seq, write_id=orphan.write_id)
        except OutcomeUnknownError:
            break  # whoever comes next sees what became of it
    parts.metrics.counter("catalog.recovered_segments").add(adopted)
    parts.metrics.histogram("catalog.recovery_seconds").record(began.elapsed_s())
    return adopted


def _orphan(parts: Parts, known: KnownHead) -> Segment | None:
    """Return a segment that stands on the head's last one and whose writer has gone."""
    head = known.head
    found = parts.segments.found(head.last_segment_seq, head.last_segment_seq + 1)
    if not found:
        return None
    now_s = parts.store.now()
    alive = {lease.id for lease in parts.leases.find(now_s) if not lease.lapsed}
    for each in found:
        try:
            segment = parts.segments.read(each.seq, each.write_id)
        except CorruptionError as error:
            parts.events.emit("catalog.damaged_orphan", object=each.key, error=error.message)
            continue
        except NotFoundError:
            continue
        fits = segment.base_write_id == head.write_id and not segment.abandoned
        if fits and segment.lease_id not in alive:
            return segment
    return None
