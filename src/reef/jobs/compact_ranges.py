"""Range tombstones in a compaction: cut into fragments, clipped to a task, kept where needed.

Where several cover the same keys only the newest counts, since it hides all that the others
hide. A fragment stays only over those parts of its range where a segment that takes no part
in the merge may have something older: there, and nowhere else, it still hides a row (H34). All
cuts fall on keys, at which one fragment ends and the next one begins (H36).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reef.engine.reading.tombstones import fragments
from reef.formats.versions import RangeTombstone
from reef.types import KeyRange

__all__ = ["Other", "clipped", "fragments", "needed"]


@dataclass(frozen=True, slots=True)
class Other:
    """A segment that takes no part in a merge: which keys and LSNs it can have."""

    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int


def clipped(tombstones: Iterable[RangeTombstone], wanted: KeyRange) -> list[RangeTombstone]:
    """Return what of them lies in a range."""
    found = []
    for tombstone in tombstones:
        start = max(tombstone.start, wanted.start)
        end = tombstone.end if wanted.end is None else min(tombstone.end, wanted.end)
        if start < end:
            found.append(RangeTombstone(start, end, tombstone.lsn, tombstone.seq))
    return found


def needed(
    found: Iterable[RangeTombstone], others: Sequence[Other], hold_lsn: int
) -> list[RangeTombstone]:
    """Return what of the fragments may still hide something; all that are above `hold_lsn`."""
    kept: list[RangeTombstone] = []
    for fragment in found:
        if fragment.lsn > hold_lsn:
            kept.append(fragment)
            continue
        hidden = [other for other in others if other.lsn_min <= fragment.lsn]
        for other in sorted(hidden, key=lambda o: o.min_key):
            kept += clipped([fragment], KeyRange(other.min_key, other.max_key + b"\0"))
    return fragments(kept)
