"""The manifest chain: every generation that a reader may open, checked in order.

From the newest manifest down to the oldest retained one, and those that snapshots, branches and
cursors pin. Each must load, hold the invariants, follow from the one before it, and have the write
id that the head remembers. A damaged manifest is recorded and passed, so that one survey finds all
damage. A segment is named by an interval of generations, since a dropped one does not come back:
two numbers say which generations need it. Only a forced rebuild may name one again; then the
interval includes the generations in between, which is more than need it, and never less.

Problems have a kind, a severity and a position. An *error* is an object that is needed and damaged
or missing. A *warning* is damage that no reader notices, and that a repair removes. *Info* is for
operators: orphans, condemned keys, slots that an earlier repair skipped. Only the first two are
problems.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from reef.engine.context import NamespaceContext
from reef.errors import CorruptionError, NotFoundError, ReefError, UnavailableError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.manifest.head import HeadFinder, locate, without_manifest
from reef.manifest.invariants import broken_steps, is_balanced
from reef.manifest.roots import branch_points, log_generations, pinned_generations
from reef.paths import Namespace, number_of


class Severity(StrEnum):
    """How serious a problem is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ProblemKind(StrEnum):
    """The kind of a problem, as a stable word. Append only."""

    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_DISAGREES = "manifest_disagrees"
    """Intact, but inconsistent with the manifests around it."""
    WAL_DAMAGED = "wal_damaged"
    WAL_MISSING = "wal_missing"
    SEGMENT_DAMAGED = "segment_damaged"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_DISAGREES = "segment_disagrees"
    """Intact, but inconsistent with its entry in the manifest."""
    LEASE_DAMAGED = "lease_damaged"
    UNSUPPORTED = "unsupported"
    """Written by a newer release: it cannot be checked."""
    LEASE_EXPIRED = "lease_expired"
    ORPHAN = "orphan"
    CONDEMNED = "condemned"
    SKIPPED = "skipped"
    """Damaged, and skipped by an earlier repair."""
    INDEX_DAMAGED = "index_damaged"
    """A search index, or its centroids. Derived: no row is lost, and searches do without it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged, missing or notable object."""

    kind: ProblemKind
    object: str
    message: str
    severity: Severity = Severity.ERROR
    offset: int | None = None
    lsn: int | None = None
    generation: int | None = None
    segment: str | None = None

    @property
    def is_missing(self) -> bool:
        """Whether an object was missing: it may have been swept, so it is checked twice."""
        return self.kind in (
            ProblemKind.MANIFEST_MISSING,
            ProblemKind.WAL_MISSING,
            ProblemKind.SEGMENT_MISSING,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def problem_of(kind: ProblemKind, error: ReefError, key: str, **where: Any) -> Problem:
    """Return an error as a problem."""
    offset = error.context.get("offset")
    return Problem(kind, key, error.message, offset=offset, **where)


LOADS_AT_ONCE = 16
LISTINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class Roots:
    """The generations that a head retains: whole, or only for the log behind them."""

    head: int
    oldest: int
    pinned: frozenset[int]
    logs: frozenset[int]
    skipped: frozenset[int]
    branched: frozenset[int] = frozenset()
    """Generations that only branches pin: their manifests are checked here, the rest by the
    branches."""

    @classmethod
    def of(cls, head: Manifest, now_ms: int) -> "Roots":
        return cls(
            head.generation,
            head.oldest_retained,
            pinned_generations(head, now_ms),
            log_generations(head),
            frozenset(head.skipped_generations),
            frozenset(generation for generation, _ in branch_points(head) if generation),
        )

    def keep(self, generation: int) -> bool:
        """Whether a generation can be read."""
        retained = self.oldest <= generation <= self.head or generation in self.pinned
        return retained and generation not in self.skipped

    def keep_log(self, generation: int) -> bool:
        """Whether the log from a generation's floor on is needed."""
        return generation in self.logs or self.keep(generation)

    def keep_manifest(self, generation: int) -> bool:
        """Whether the manifest of a generation is needed."""
        return generation in self.branched or self.keep_log(generation)

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
class ManifestChain:
    """The manifests of a namespace, combined."""

    head: Manifest
    """The newest intact one."""
    newest: int
    """The newest generation, intact or not."""
    roots: Roots
    floors: dict[int, int] = field(default_factory=dict)
    """The floor of each loaded generation."""
    lowest: Manifest | None = None
    """The manifest with the lowest floor."""
    named: dict[str, NamedSegment] = field(default_factory=dict)
    lost: dict[int, Problem] = field(default_factory=dict)
    """Retained generations that cannot be read."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def start(self) -> Manifest:
        """The generation from whose floor on the log is needed."""
        return self.lowest or self.head

    @property
    def head_is_damaged(self) -> bool:
        return self.newest > self.head.generation


def read_chain(context: NamespaceContext, heads: HeadFinder, now_ms: int) -> ManifestChain:
    """Read all retained manifests; NotFoundError if there is no namespace."""
    chain = _read_head(context, heads, now_ms)
    recent = {r.generation: r.write_id for r in chain.head.recent}
    before: Manifest | None = None
    ids: frozenset[str] = frozenset()
    for generation, found in _load_all(heads, context, chain):
        if isinstance(found, Problem):
            chain.lost[generation] = found
            chain.problems.append(found)
            continue
        chain.problems += _check_step(context.names, before, found, recent.get(generation))
        ids = _add(chain, context.names, ids, before, found)
        before = found
    for generation in sorted(chain.roots.branched - {*chain.floors, *chain.lost}):
        pinned = load(heads, context.names, generation)
        if isinstance(pinned, Problem):
            chain.lost[generation] = pinned
            chain.problems.append(pinned)
    if not is_balanced(chain.head):
        message = "the set hashes of the segments do not add up to the rows added and dropped"
        key = context.names.manifest(chain.head.generation)
        chain.problems.append(_disagrees(key, chain.head, message))
    return chain


def _read_head(context: NamespaceContext, heads: HeadFinder, now_ms: int) -> ManifestChain:
    """Find the newest intact manifest; those above it are lost."""
    for _ in range(LISTINGS_MAX):
        numbers = [number_of(info.key) for info in context.store.list(context.names.manifests)]
        generations = sorted(number for number in numbers if number)
        if not generations:
            raise without_manifest(context.store, context.names)
        lost: dict[int, Problem] = {}
        for generation in reversed(generations):
            found = load(heads, context.names, generation)
            if isinstance(found, Manifest):
                return _chain(found, generations[-1], lost, now_ms)
            if found.is_missing:
                break  # listed and swept: there are newer ones
            lost[generation] = found
        else:
            raise CorruptionError(
                f"all {len(lost)} manifests of {context.names.name} are damaged",
                hint="Run rebuild: it derives a manifest from the segments and the log",
                object=context.names.manifest(generations[-1]),
                offset=0,
            )
    raise UnavailableError(
        f"manifests of {context.names.name} are swept faster than they can be read"
    )


def _chain(head: Manifest, newest: int, lost: dict[int, Problem], now_ms: int) -> ManifestChain:
    chain = ManifestChain(head, newest, Roots.of(head, now_ms), lost=lost)
    chain.problems += [lost[generation] for generation in sorted(lost)]
    return chain


def load(heads: HeadFinder, names: Namespace, generation: int) -> Manifest | Problem:
    """Return a manifest, or why it cannot be read."""
    key = names.manifest(generation)
    try:
        return heads.load(generation)
    except CorruptionError as error:
        return problem_of(ProblemKind.MANIFEST_DAMAGED, error, key, generation=generation)
    except NotFoundError:
        return Problem(
            ProblemKind.MANIFEST_MISSING,
            key,
            f"object {key} is missing, though generation {generation} is retained",
            generation=generation,
        )


def _load_all(
    heads: HeadFinder, context: NamespaceContext, chain: ManifestChain
) -> Iterator[tuple[int, Manifest | Problem]]:
    """Load a few at a time, in order: there may be hundreds, each with many segments."""
    generations = [g for g in chain.roots.all() if g != chain.head.generation]
    for at in range(0, len(generations), LOADS_AT_ONCE):
        chunk = generations[at : at + LOADS_AT_ONCE]
        found = context.runtime.map(partial(load, heads, context.names), chunk)
        yield from zip(chunk, found, strict=True)
    yield chain.head.generation, chain.head


def _check_step(
    names: Namespace, before: Manifest | None, after: Manifest, known_id: str | None
) -> Iterator[Problem]:
    key = names.manifest(after.generation)
    if known_id is not None and known_id != after.write_id:
        yield _disagrees(key, after, f"write id {after.write_id}, the head expects {known_id}")
    if before is None:
        return
    between = set(range(before.generation + 1, after.generation))
    if between <= set(after.skipped_generations):
        for rule in broken_steps(before, after):
            yield _disagrees(key, after, f"broken since generation {before.generation}: {rule}")


def _add(
    chain: ManifestChain,
    names: Namespace,
    ids: frozenset[str],
    before: Manifest | None,
    found: Manifest,
) -> frozenset[str]:
    """Record floors and segments; only differences to the generation before cost time."""
    chain.floors[found.generation] = found.wal_floor
    if chain.lowest is None or found.wal_floor < chain.lowest.wal_floor:
        chain.lowest = found
    if not chain.roots.keep(found.generation):
        return ids  # of a cursor, which needs the log behind it and none of its segments
    if before and chain.roots.keep(before.generation) and found.segments is before.segments:
        return ids  # most generations differ in other fields, and share their segments
    now = frozenset(s.id for s in found.segments)
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
    chosen = set(ids)
    return (s for s in segments if s.id in chosen)


def _facts(entry: SegmentEntry) -> SegmentEntry:
    """Return an entry without the level, which a move changes."""
    return msgspec.structs.replace(entry, level=0)


def _disagrees(key: str, manifest: Manifest, message: str) -> Problem:
    return Problem(
        ProblemKind.MANIFEST_DISAGREES,
        key,
        f"object {key}: {message}",
        generation=manifest.generation,
    )


def check_opened(context: NamespaceContext) -> list[Problem]:
    """Return the problems that lead readers to an earlier incarnation than the newest one."""
    try:
        opened = locate(context.store, context.names.name, fallback=True, dropped=True).names
    except (CorruptionError, NotFoundError):
        key = context.names.successor(context.names.incarnation)
        message = f"object {key} is missing, and no manifest leads to this incarnation"
        return [Problem(ProblemKind.MANIFEST_MISSING, key, message)]
    if opened.incarnation >= context.names.incarnation:
        return []
    message = (
        f"the last manifests of incarnation {opened.incarnation} are lost: readers and writers "
        f"open it, though it was dropped, and incarnation {context.names.incarnation} is current"
    )
    return [Problem(ProblemKind.MANIFEST_MISSING, opened.manifests, message)]
