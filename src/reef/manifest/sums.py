"""The set hash over time: what came into a namespace, what jobs dropped, what they made.

Folds add what they write, compactions say what they dropped and what they made of patches. The
sums begin with the first compaction, with what the segments hold then, and from there on the
segments of every generation add up to `added` − `dropped` + `made`. A job that lost a version
on the way would break that, for `verify` to see. Whoever takes segments out for another reason,
as a repair does, says so with `removed`.
"""

from collections.abc import Iterable

import msgspec

from reef.formats.manifest import Manifest, SegmentEntry, Sums
from reef.formats.set_hash import EMPTY, SetHash

__all__ = ["added", "compacted", "is_balanced", "removed", "total"]


def total(segments: Iterable[SegmentEntry]) -> SetHash:
    """Return what segments add up to."""
    return sum((SetHash.parse(segment.set_hash) for segment in segments), EMPTY)


def added(manifest: Manifest, segments: Iterable[SegmentEntry]) -> Sums | None:
    """Return the sums after new segments came in; None while none are kept."""
    if manifest.sums is None:
        return None
    came = SetHash.parse(manifest.sums.added) + total(segments)
    return msgspec.structs.replace(manifest.sums, added=str(came))


def compacted(manifest: Manifest, dropped: SetHash, made: SetHash) -> Sums:
    """Return the sums after a compaction; with the first one they begin."""
    sums = manifest.sums or Sums(str(total(manifest.segments)), str(EMPTY), str(EMPTY))
    return Sums(
        sums.added,
        str(SetHash.parse(sums.dropped) + dropped),
        str(SetHash.parse(sums.made) + made),
    )


def removed(manifest: Manifest, segments: Iterable[SegmentEntry]) -> Sums | None:
    """Return the sums after segments were taken out, as a repair does."""
    return None if manifest.sums is None else compacted(manifest, total(segments), EMPTY)


def is_balanced(manifest: Manifest) -> bool:
    """Whether the segments hold what they must; True while no sums are kept."""
    if manifest.sums is None:
        return True
    came, dropped, made = map(SetHash.parse, msgspec.structs.astuple(manifest.sums))
    return total(manifest.segments) == came - dropped + made
