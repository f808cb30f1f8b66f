"""The manifest chain: every generation that somebody may read, looked at in order.

From the newest manifest down to the oldest that is retained, and those that snapshots, branches
and cursors pin. Each must load, hold the invariants, follow from the one before it, and be the
one that the head remembers. What is damaged is noted and passed over, so that one look finds all
of it. A segment is named by an interval of generations, since one that was dropped does not come
back: two numbers say who needs it. Only a rebuild by force may name one again; then the interval
includes the generations in between, which is more than need it, and never less.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.errors import CorruptionError, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.jobs.verify_problems import Problem, ProblemKind, problem_of
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import broken_steps
from reef.manifest.roots import log_generations, pinned_generations
from reef.manifest.sums import is_balanced
from reef.paths import Namespace, number_of
from reef.stores import Store

__all__ = ["Chain", "NamedSegment", "Roots", "read_chain"]

LOADS_AT_ONCE = 16
LISTINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class Roots:
    """Which generations a head keeps: whole, or only for the log behind them."""

    head: int
    oldest: int
    pinned: frozenset[int]
    logs: frozenset[int]
    skipped: frozenset[int]

    @classmethod
    def of(cls, head: Manifest, now_ms: int) -> "Roots":
        return cls(
            head.generation,
            head.oldest_retained,
            pinned_generations(head, now_ms),
            log_generations(head),
            frozenset(head.skipped_generations),
        )

    def keep(self, generation: int) -> bool:
        """Whether a generation can be read."""
        retained = self.oldest <= generation <= self.head or generation in self.pinned
        return retained and generation not in self.skipped

    def keep_log(self, generation: int) -> bool:
        """Whether the log from a generation's floor on is needed."""
        return generation in self.logs or self.keep(generation)

    def all(self) -> list[int]:
        whole = {*range(self.oldest, self.head + 1), *self.pinned} - self.skipped
        return sorted(g for g in whole | self.logs if 0 < g <= self.head)


@dataclass(slots=True)
class NamedSegment:
    """A segment, and the first and the last generation that name it."""

    entry: SegmentEntry
    first: int
    last: int

    def needed_by(self, roots: Roots) -> bool:
        """Whether some generation that is kept names it."""
        if self.last >= roots.oldest:
            return True
        return any(self.first <= g <= self.last and roots.keep(g) for g in roots.pinned)


@dataclass(slots=True)
class Chain:
    """What the manifests say, taken together."""

    head: Manifest
    """The newest sound one."""
    newest: int
    """The newest there is, sound or not."""
    roots: Roots
    floors: dict[int, int] = field(default_factory=dict)
    """Of the generations that were loaded."""
    lowest: Manifest | None = None
    """The one whose log reaches back furthest."""
    named: dict[str, NamedSegment] = field(default_factory=dict)
    lost: dict[int, Problem] = field(default_factory=dict)
    """Generations that are kept and cannot be read."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def start(self) -> Manifest:
        """The generation from whose floor on the log is needed."""
        return self.lowest or self.head

    @property
    def head_is_damaged(self) -> bool:
        return self.newest > self.head.generation


def read_chain(store: Store, names: Namespace, heads: HeadFinder, now_ms: int) -> Chain:
    """Read all manifests that are needed; NotFoundError if there is no namespace."""
    chain = _read_head(store, names, heads, now_ms)
    recent = {r.generation: r.write_id for r in chain.head.recent}
    before: Manifest | None = None
    ids: frozenset[str] = frozenset()
    for generation, found in _load_all(heads, store, names, chain):
        if isinstance(found, Problem):
            chain.lost[generation] = found
            chain.problems.append(found)
            continue
        chain.problems += _check_step(names, before, found, recent.get(generation))
        ids = _take_in(chain, names, ids, before, found)
        before = found
    if not is_balanced(chain.head):
        what = "the segments do not add up to what came in, less what jobs dropped"
        key = names.manifest(chain.head.generation)
        chain.problems.append(_disagrees(key, chain.head, what))
    return chain


def _read_head(store: Store, names: Namespace, heads: HeadFinder, now_ms: int) -> Chain:
    """Find the newest sound manifest; those above it are lost."""
    for _ in range(LISTINGS_MAX):
        numbers = [number_of(info.key) for info in store.list(names.manifests)]
        generations = sorted(number for number in numbers if number)
        if not generations:
            raise NotFoundError(
                f"there is no namespace {names.name} in {store.url}", namespace=names.name
            )
        lost: dict[int, Problem] = {}
        for generation in reversed(generations):
            found = _load(heads, names, generation)
            if isinstance(found, Manifest):
                return _chain(found, generations[-1], lost, now_ms)
            if found.is_missing:
                break  # listed and swept: there are newer ones
            lost[generation] = found
        else:
            raise CorruptionError(
                f"all {len(lost)} manifests of {names.name} are damaged",
                hint="Run rebuild: it makes one from the segments and the log",
                object=names.manifest(generations[-1]),
                offset=0,
            )
    raise UnavailableError(f"manifests of {names.name} are swept faster than they can be read")


def _chain(head: Manifest, newest: int, lost: dict[int, Problem], now_ms: int) -> Chain:
    chain = Chain(head, newest, Roots.of(head, now_ms), lost=lost)
    chain.problems += [lost[generation] for generation in sorted(lost)]
    return chain


def _load(heads: HeadFinder, names: Namespace, generation: int) -> Manifest | Problem:
    key = names.manifest(generation)
    try:
        return heads.load(generation)
    except CorruptionError as error:
        return problem_of(ProblemKind.MANIFEST_DAMAGED, error, key, generation=generation)
    except NotFoundError:
        return Problem(
            ProblemKind.MANIFEST_MISSING,
            key,
            f"there is no object {key}, though generation {generation} is kept",
            generation=generation,
        )


def _load_all(
    heads: HeadFinder, store: Store, names: Namespace, chain: Chain
) -> Iterator[tuple[int, Manifest | Problem]]:
    """A few at a time, in order: there may be hundreds, each with many segments."""
    wanted = [g for g in chain.roots.all() if g != chain.head.generation]
    for at in range(0, len(wanted), LOADS_AT_ONCE):
        chunk = wanted[at : at + LOADS_AT_ONCE]
        found = store.runtime.gather([lambda g=g: _load(heads, names, g) for g in chunk])  # type: ignore[misc]
        yield from zip(chunk, found, strict=True)
    yield chain.head.generation, chain.head


def _check_step(
    names: Namespace, before: Manifest | None, after: Manifest, known_id: str | None
) -> Iterator[Problem]:
    key = names.manifest(after.generation)
    if known_id is not None and known_id != after.write_id:
        yield _disagrees(
            key, after, f"write id {after.write_id}, the head remembers {known_id} here"
        )
    if before is None:
        return
    between = set(range(before.generation + 1, after.generation))
    if between <= set(after.skipped_generations):
        for rule in broken_steps(before, after):
            yield _disagrees(key, after, f"{rule}, but not from {before.generation} to this one")


def _take_in(
    chain: Chain,
    names: Namespace,
    ids: frozenset[str],
    before: Manifest | None,
    found: Manifest,
) -> frozenset[str]:
    """Note floors and segments; only what differs from the generation before costs time."""
    chain.floors[found.generation] = found.wal_floor
    if chain.lowest is None or found.wal_floor < chain.lowest.wal_floor:
        chain.lowest = found
    if not chain.roots.keep(found.generation):
        return ids  # a cursor's: it needs the log behind it, and none of its segments
    now = frozenset(s.id for s in found.segments if s.home is None)
    for segment_id in ids - now:
        chain.named[segment_id].last = before.generation if before else 0
    for entry in _of(found.segments, now - ids):
        known = chain.named.get(entry.id)
        if known is None:
            chain.named[entry.id] = NamedSegment(entry, found.generation, chain.head.generation)
            continue
        known.last = chain.head.generation
        if _facts(known.entry) != _facts(entry):
            key = names.manifest(found.generation)
            chain.problems.append(_disagrees(key, found, f"segment {entry.id} changed"))
    return now


def _of(segments: Sequence[SegmentEntry], ids: Iterable[str]) -> Iterator[SegmentEntry]:
    wanted = set(ids)
    return (s for s in segments if s.id in wanted)


def _facts(entry: SegmentEntry) -> SegmentEntry:
    """All but the level, which a move changes."""
    return msgspec.structs.replace(entry, level=0)


def _disagrees(key: str, manifest: Manifest, what: str) -> Problem:
    return Problem(
        ProblemKind.MANIFEST_DISAGREES,
        key,
        f"object {key}: {what}",
        generation=manifest.generation,
    )
