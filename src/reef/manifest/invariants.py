"""What must hold of every manifest, by name; checked before a publish and after a load.

A broken one on the way in is a bug of the edit, and nothing is published. A broken one on
the way out means that the object was written by something else, or damaged in a way that
its checksum does not show: nothing may be served from it.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

from reef.errors import ConflictError, CorruptionError, InternalError
from reef.formats.manifest import Manifest, NamespaceState

__all__ = ["broken_steps", "check_loaded", "check_next", "refuse_condemned"]

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
    "segments lie below the floor": lambda m: all(s.lsn_max < m.wal_floor for s in m.segments),
    "key and LSN bounds are in order": lambda m: all(
        s.min_key <= s.max_key and s.lsn_min <= s.lsn_max for s in m.segments
    ),
    "no live segment is condemned": lambda m: not _condemned_segments(m),
    "no slot from the one below the floor on is condemned": lambda m: not _condemned_slots(m),
    "no generation that is retained is condemned": lambda m: not _condemned_generations(m),
    "the newest generation is retained": lambda m: m.oldest_retained <= m.generation,
    "snapshots have distinct ids": lambda m: _distinct([s.id for s in m.snapshots]),
    "what is dropped says when": lambda m: (
        (m.state is NamespaceState.DROPPED) == (m.dropped is not None)
    ),
    "only a dropped namespace has a successor": lambda m: (
        m.successor is None or m.dropped is not None
    ),
    "a successor is the next incarnation, behind the log": lambda m: (
        m.successor is None
        or (
            m.successor.incarnation == m.incarnation + 1
            and m.successor.wal_base >= m.wal_floor
            and m.incarnation in m.successor.predecessors
        )
    ),
    "the grace period is not negative": lambda m: m.grace_ms >= 0,
    "the last of the recent is this one": lambda m: (
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
    "the base never moves, unless anew": lambda a, b: b.wal_base == a.wal_base or _anew(a, b),
    "the dedup window keeps its length": lambda a, b: b.dedup_keys_max == a.dedup_keys_max,
    "what was last seen never falls": lambda a, b: b.wal_id_last_seen >= a.wal_id_last_seen,
    "the oldest retained never falls": lambda a, b: b.oldest_retained >= a.oldest_retained,
    "schemas are only added": lambda a, b: (
        b.schemas[: len(a.schemas)] == a.schemas
        or (_anew(a, b) and b.schemas[0].id > a.schemas[-1].id)
    ),
    "a cleared namespace stays cleared": lambda a, b: (
        a.dropped is None or not a.dropped.is_cleared or b.dropped == a.dropped or _anew(a, b)
    ),
    "the incarnation never changes": lambda a, b: b.incarnation == a.incarnation,
    "a successor stays": lambda a, b: a.successor is None or b.successor == a.successor,
    "a write id is used once": lambda a, b: b.write_id not in {r.write_id for r in a.recent},
}


def check_loaded(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest, or raise if it contradicts itself."""
    for rule, holds in RULES.items():
        if not holds(manifest):
            raise CorruptionError(f"object {name}: {rule}, but not here", object=name, offset=0)
    return manifest


def check_next(before: Manifest | None, after: Manifest) -> Manifest:
    """Return the next manifest, or raise if the edit that made it is wrong."""
    broken = [rule for rule, holds in RULES.items() if not holds(after)]
    if before is not None:
        known = {segment.id for segment in before.segments}
        refuse_condemned(before, [s.id for s in after.segments if s.id not in known])
        broken += broken_steps(before, after)
    if broken:
        raise InternalError(f"generation {after.generation} breaks: {'; '.join(broken)}")
    return after


def broken_steps(before: Manifest, after: Manifest) -> list[str]:
    """Return the rules that do not hold from one generation to the next."""
    return [rule for rule, holds in STEP_RULES.items() if not holds(before, after)]


def refuse_condemned(head: Manifest, segment_ids: Iterable[str]) -> None:
    """Raise if an edit is about to name a segment that a sweep has condemned (H55).

    No bug: whoever wrote it took longer than the grace period, and starts again.
    """
    condemned = {condemned.key for condemned in head.condemned}
    for segment_id in segment_ids:
        if _segment_key(segment_id) in condemned:
            raise ConflictError(
                f"segment {segment_id} waited longer than the grace period to be published, "
                f"and was condemned",
                hint="Run the job again",
                segment=segment_id,
            )


def _anew(before: Manifest, after: Manifest) -> bool:
    """Whether a release before incarnations re-created a namespace in the same chain (H48)."""
    ended = before.dropped
    return ended is not None and after.dropped is None and after.wal_base == ended.end_lsn


def _distinct(ids: list[str]) -> bool:
    return len(set(ids)) == len(ids)


def _rising(ids: list[int]) -> bool:
    return bool(ids) and all(a < b for a, b in pairwise(ids))


def _condemned_segments(manifest: Manifest) -> set[str]:
    condemned = {condemned.key for condemned in manifest.condemned}
    return {s.id for s in manifest.segments if _segment_key(s.id) in condemned and not s.home}


def _condemned_slots(manifest: Manifest) -> list[str]:
    """Numbers have 20 digits: names sort as numbers do."""
    needed = f"wal/{manifest.wal_floor - 1:020}.wal"
    return [c.key for c in manifest.condemned if c.key.startswith("wal/0") and c.key >= needed]


def _condemned_generations(manifest: Manifest) -> list[str]:
    retained = f"manifest/{manifest.oldest_retained:020}."
    return [c.key for c in manifest.condemned if c.key.startswith("manifest/") and c.key > retained]


def _segment_key(segment_id: str) -> str:
    return f"segments/{segment_id}.seg"
