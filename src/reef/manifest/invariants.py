"""Invariants of manifests, as named predicates; checked before a publish and after a load.

One that is broken before a publish is a bug of the edit: nothing is published. One that is broken
in a loaded manifest means that the object was written by other software, or damaged in a way that
its checksum does not show: nothing may be served from it.

**Sums** account for every version in the segments by set hashes. Folds add the versions that they
write; compactions record those that they dropped and those that they made of patches. The sums
begin with the first compaction, and from then on the segments of every generation add up to
`added` − `dropped` + `made`. A job that loses a version breaks that, and `verify` reports it. A
repair that removes segments records them with `removed`.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import attrgetter, le

import msgspec

from reef.errors import ConflictError, CorruptionError, InternalError
from reef.formats.manifest import (
    CondemnedRange,
    Manifest,
    NamespaceState,
    SegmentEntry,
    Sums,
)
from reef.formats.segment import EMPTY, SetHash
from reef.paths import numbered_key

# A chain has thousands of entries to check: these are C functions.
MIN_KEY, MAX_KEY = attrgetter("min_key"), attrgetter("max_key")
LSN_MIN, LSN_MAX = attrgetter("lsn_min"), attrgetter("lsn_max")
VISIBLE = attrgetter("visible_lsn")

Rule = Callable[[Manifest], bool]
StepRule = Callable[[Manifest, Manifest], bool]

RULES: dict[str, Rule] = {
    "generations and LSNs start at 1": lambda m: m.generation >= 1 and m.wal_base >= 1,
    "the floor is at or above the base": lambda m: m.wal_floor >= m.wal_base,
    "at least one PUT may be in flight": lambda m: m.max_parallel_writes >= 1,
    "there is a schema, and their ids rise": lambda m: _rising([s.id for s in m.schemas]),
    "segments have distinct ids": lambda m: _distinct([s.id for s in m.segments]),
    "segments name a known schema": lambda m: (
        {s.schema_id for s in m.segments} <= {s.id for s in m.schemas}
    ),
    "segments are below the floor": lambda m: (
        max(map(LSN_MAX, m.segments), default=0) < m.wal_floor
        and max(map(VISIBLE, m.segments), default=0) < m.wal_floor
    ),
    "key and LSN bounds are in order": lambda m: (
        all(map(le, map(MIN_KEY, m.segments), map(MAX_KEY, m.segments)))
        and all(map(le, map(LSN_MIN, m.segments), map(LSN_MAX, m.segments)))
    ),
    "no live segment is condemned": lambda m: not _condemned_segments(m),
    "no slot from the one below the floor on is condemned": lambda m: not _condemned_slots(m),
    "no generation that is retained is condemned": lambda m: not _condemned_generations(m),
    "condemned ranges are in order and apart": lambda m: _are_apart(m.condemned_ranges),
    "the newest generation is retained": lambda m: m.oldest_retained <= m.generation,
    "snapshots have distinct ids": lambda m: _distinct([s.id for s in m.snapshots]),
    "a dropped namespace has the time of its drop": lambda m: (
        (m.state is NamespaceState.DROPPED) == (m.dropped is not None)
    ),
    "only a dropped namespace has a successor": lambda m: (
        m.successor is None or m.dropped is not None
    ),
    "a successor is the next incarnation, behind the log": lambda m: (
        m.successor is None
        or (
            m.successor.incarnation == m.incarnation + 1
            and (m.successor.origin is not None or m.successor.wal_base >= m.wal_floor)
            and m.incarnation in m.successor.predecessors
        )
    ),
    "the grace period is not negative": lambda m: m.grace_ms >= 0,
    "the last entry of recent is this manifest": lambda m: (
        bool(m.recent)
        and (m.recent[-1].generation, m.recent[-1].write_id) == (m.generation, m.write_id)
    ),
}

STEP_RULES: dict[str, StepRule] = {
    "generations follow each other": lambda a, b: (
        b.generation > a.generation
        and set(range(a.generation + 1, b.generation)) <= set(b.skipped_generations)
    ),
    "epochs never fall": lambda a, b: (
        b.writer_epoch >= a.writer_epoch and b.compactor_epoch >= a.compactor_epoch
    ),
    "the floor never falls": lambda a, b: b.wal_floor >= a.wal_floor,
    "the base never moves, unless re-created": lambda a, b: (
        b.wal_base == a.wal_base or _is_recreated(a, b) or a.alias is not None
    ),
    "the dedup window keeps its length": lambda a, b: (
        b.dedup_keys_max == a.dedup_keys_max or a.alias is not None
    ),
    "the last LSN seen never falls": lambda a, b: b.wal_id_last_seen >= a.wal_id_last_seen,
    "the oldest retained never falls": lambda a, b: b.oldest_retained >= a.oldest_retained,
    "schemas are only added": lambda a, b: (
        b.schemas[: len(a.schemas)] == a.schemas
        or (_is_recreated(a, b) and b.schemas[0].id > a.schemas[-1].id)
        or a.alias is not None
    ),
    "a cleared namespace stays cleared": lambda a, b: (
        a.dropped is None
        or not a.dropped.is_cleared
        or b.dropped == a.dropped
        or _is_recreated(a, b)
    ),
    "the incarnation never changes": lambda a, b: b.incarnation == a.incarnation,
    "a successor stays": lambda a, b: a.successor is None or b.successor == a.successor,
    "a namespace does not become an alias": lambda a, b: a.alias is not None or b.alias is None,
    "a write id is used once": lambda a, b: b.write_id not in {r.write_id for r in a.recent},
}


def check_loaded(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest; CorruptionError if it breaks an invariant."""
    for rule, holds in RULES.items():
        if not holds(manifest):
            raise CorruptionError(
                f"object {name} breaks the invariant {rule!r}", object=name, offset=0
            )
    return manifest


def check_next(before: Manifest | None, after: Manifest) -> Manifest:
    """Return the next manifest; InternalError if the edit that made it is wrong."""
    broken = [rule for rule, holds in RULES.items() if not holds(after)]
    if before is not None:
        known = {segment.id for segment in before.segments}
        refuse_condemned(before, [s.id for s in after.segments if s.id not in known])
        broken += broken_steps(before, after)
    if broken:
        raise InternalError(
            f"generation {after.generation} breaks the invariants: {'; '.join(broken)}"
        )
    return after


def broken_steps(before: Manifest, after: Manifest) -> list[str]:
    """Return the names of the rules that do not hold from one generation to the next."""
    return [rule for rule, holds in STEP_RULES.items() if not holds(before, after)]


def refuse_condemned(head: Manifest, segment_ids: Iterable[str]) -> None:
    """Raise if an edit is about to name a segment that a sweep has condemned (H55).

    That is no bug: the job that wrote the segment took longer than the grace period.
    """
    refuse_condemned_keys(head, map(_segment_key, segment_ids))


def refuse_condemned_keys(head: Manifest, keys: Iterable[str]) -> None:
    """Raise the same for keys of objects, relative to the namespace."""
    condemned = {condemned.key for condemned in head.condemned}
    for key in keys:
        if key in condemned:
            segment_id = key.removeprefix("segments/").removesuffix(".seg")
            raise ConflictError(
                f"segment {segment_id} waited longer than the grace period to be published, "
                f"and was condemned",
                hint="Run the job again",
                segment=segment_id,
            )


def _is_recreated(before: Manifest, after: Manifest) -> bool:
    """Whether a release before incarnations re-created a namespace in the same chain (H48)."""
    ended = before.dropped
    return ended is not None and after.dropped is None and after.wal_base == ended.end_lsn


def _distinct(ids: list[str]) -> bool:
    return len(set(ids)) == len(ids)


def _rising(ids: list[int]) -> bool:
    return bool(ids) and all(a < b for a, b in pairwise(ids))


def _condemned_segments(manifest: Manifest) -> set[str]:
    condemned = {
        condemned.key.removeprefix("segments/").removesuffix(".seg")
        for condemned in manifest.condemned
        if condemned.key.startswith("segments/")
    }
    return manifest.own_objects & condemned


def _condemned_slots(manifest: Manifest) -> list[str]:
    """Return condemned slots that are needed: the last folded one, and all behind it."""
    needed = f"wal/{manifest.wal_floor - 1:020}.wal"
    keys = [c.key for c in manifest.condemned if c.key.startswith("wal/0") and c.key >= needed]
    return keys + _condemned_from(manifest, "wal", manifest.wal_floor - 1)


def _condemned_generations(manifest: Manifest) -> list[str]:
    retained = f"manifest/{manifest.oldest_retained:020}."
    keys = [c.key for c in manifest.condemned if c.key.startswith("manifest/") and c.key > retained]
    return keys + _condemned_from(manifest, "manifest", manifest.oldest_retained)


def _condemned_from(manifest: Manifest, folder: str, number: int) -> list[str]:
    ranges = [r for r in manifest.condemned_ranges if r.folder == folder and r.last >= number]
    return [numbered_key(folder, one.last) for one in ranges]


def _are_apart(ranges: tuple[CondemnedRange, ...]) -> bool:
    ordered = sorted(ranges, key=lambda one: (one.folder, one.first))
    return all(one.folder in ("wal", "manifest") and one.first <= one.last for one in ordered) and (
        all(a.folder != b.folder or a.last < b.first for a, b in pairwise(ordered))
    )


def _segment_key(segment_id: str) -> str:
    return f"segments/{segment_id}.seg"


def total(segments: Iterable[SegmentEntry]) -> SetHash:
    """Return the sum of the set hashes of segments."""
    return sum((SetHash.parse(segment.set_hash) for segment in segments), EMPTY)


def added(manifest: Manifest, segments: Iterable[SegmentEntry]) -> Sums | None:
    """Return the sums after segments were added; None while there are no sums."""
    if manifest.sums is None:
        return None
    came = SetHash.parse(manifest.sums.added) + total(segments)
    return msgspec.structs.replace(manifest.sums, added=str(came))


def compacted(manifest: Manifest, dropped: SetHash, made: SetHash) -> Sums:
    """Return the sums after a compaction; the first one begins them."""
    sums = manifest.sums or Sums(str(total(manifest.segments)), str(EMPTY), str(EMPTY))
    return Sums(
        sums.added,
        str(SetHash.parse(sums.dropped) + dropped),
        str(SetHash.parse(sums.made) + made),
    )


def removed(manifest: Manifest, segments: Iterable[SegmentEntry]) -> Sums | None:
    """Return the sums after a repair has removed segments."""
    return None if manifest.sums is None else compacted(manifest, total(segments), EMPTY)


def is_balanced(manifest: Manifest) -> bool:
    """Whether the segments add up to the sums; True while there are no sums."""
    if manifest.sums is None:
        return True
    came, dropped, made = map(SetHash.parse, msgspec.structs.astuple(manifest.sums))
    return total(manifest.segments) == came - dropped + made
