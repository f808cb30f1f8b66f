"""Which segments count: a choice by what they stand for. Pure.

Every segment stands for rectangles of LSNs and keys (`reef.formats.covers`). The segments of a
manifest never overlap, and leave nothing out that any segment in the bucket stands for, but
for what is still in the log. So a choice is right if it does both:

    no two of the chosen overlap
    what any segment there is stands for, is in the chosen or in the log behind them

Among the segments that are in the bucket there may be superseded ones that somebody pins,
outputs of a job that died before its publish, all of them or some, and outputs of rivals.
Whether a job was published cannot always be told, and need not be: every job gives out the rows
that it took in, so that a choice that takes its outputs and one that takes its inputs have the
same rows, as long as it is all of one and none of the other. Taking both would be wrong: a
merge drops a tombstone together with the rows below it, and an input that is left would bring
them back (H34, H49). Of two that claim the same the one that was planned on the later manifest
is taken: the other cannot have been published by then, and the compactor's epoch keeps it from
being so later. If that leaves a hole, because the later job died half-way or was overtaken, and
its rival's inputs were swept, it is taken back.

A part of a merge of which nothing was left has no segment. It is told by the siblings that are
named and missing: where no choice is without holes, what such a merge stands for is accepted.

A segment without covers (of an older writer) is judged by its ancestors alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from reef.formats.covers import Cover, without

__all__ = ["Candidate", "Choice", "choose"]

TRIES_MAX, TRIES_MIN = 1000, 64
"""How many choices are tried before it is told that none leaves no hole."""
ROUNDS_MAX = 300_000
"""Of all tries together, a look at one segment each: what is lost is told within seconds."""
EVERYWHERE = (b"", None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that may count."""

    id: str
    generation: int
    """On which its job was planned; that of a bulk job comes before all others."""
    covers: tuple[Cover, ...]
    ancestors: frozenset[str] = frozenset()
    unit: str = ""
    """Of those that were written together."""
    whole_keys: bool = False
    """Of a fold, whose pieces stand for all keys together."""
    lacks_siblings: bool = False
    """Of a merge, some of whose outputs are gone, or were never written."""

    def claims(self) -> tuple[Cover, ...]:
        """Return what must be somewhere, if this segment is there."""
        if not self.whole_keys:
            return self.covers
        return tuple(Cover(c.first, c.end, *EVERYWHERE) for c in self.covers)


@dataclass(frozen=True, slots=True)
class Choice:
    """What counts, and what that leaves out."""

    chosen: tuple[Candidate, ...]
    holes: tuple[Cover, ...] = ()
    """What some segment stands for, and nothing that was chosen: it is lost."""
    uncovered: tuple[Cover, ...] = ()
    """The holes, and those where a merge lacks outputs. Nothing was left of these once, in buckets
    of a release that wrote no empty segments; they overlap."""

    @property
    def end(self) -> int:
        """The first LSN above all that folds and merges stand for."""
        return _end(self.chosen)

    @property
    def merged(self) -> list[Cover]:
        """Between which LSNs merges took in what there was; of some of it nothing may be left."""
        merges = [c.covers for c in self.chosen if c.ancestors and c.covers]
        return [Cover(min(c.first for c in m), max(c.end for c in m)) for m in merges]


def choose(candidates: Iterable[Candidate], log: Cover) -> Choice:
    """Return a choice that leaves no hole, or the one with the fewest holes.

    Where the first attempt leaves some, those that stand in the way are taken back one by one,
    going on from the attempt that has the fewest holes left.
    """
    ordered = sorted(candidates, key=lambda c: (-c.generation, c.id))
    tries_max = min(TRIES_MAX, max(TRIES_MIN, ROUNDS_MAX // max(1, len(ordered))))
    tried: set[frozenset[str]] = set()
    waiting: list[tuple[int, int, frozenset[str], list[str]]] = [(0, 0, frozenset(), [""])]
    best = Choice(())
    least: tuple[int, int] | None = None  # holes, and how many were taken back for them
    while waiting:
        before, order, refused, culprits = heappop(waiting)
        for place, unit in enumerate(culprits):
            now = refused | {unit} if unit else refused
            if now in tried or len(tried) >= tries_max:
                continue
            tried.add(now)
            attempt = _Attempt(ordered, now, log)
            holes = attempt.holes()
            if not holes:
                return Choice(tuple(attempt.chosen))
            left = attempt.not_emptied(holes)
            if least is None or (len(left), len(now)) < least:
                best, least = Choice(tuple(attempt.chosen), left, holes), (len(left), len(now))
            heappush(waiting, (len(holes), len(tried), now, attempt.culprits))
            if len(holes) < before:  # go on from here; the others may wait
                heappush(waiting, (before, order, refused, culprits[place + 1 :]))
                break
    return best


@dataclass
class _Attempt:
    """The later ones first, each if nothing that was taken before it overlaps it."""

    ordered: Sequence[Candidate]
    refused: frozenset[str]
    log: Cover
    chosen: list[Candidate] = field(default_factory=list)
    culprits: list[str] = field(default_factory=list)
    """Those that may have to go, so that nothing is left out."""

    def __post_init__(self) -> None:
        self._taken = _Index(sum(len(c.covers) for c in self.ordered))
        superseded: set[str] = set()
        for candidate in self.ordered:
            if candidate.unit in self.refused or candidate.id in superseded:
                continue
            if not self._taken.overlapping(candidate.covers):
                self._taken.add(candidate)
                self.chosen.append(candidate)
                superseded |= candidate.ancestors if not candidate.covers else set()
        self._by_ancestors = superseded

    def holes(self) -> tuple[Cover, ...]:
        """Return what is left out; the log has what is behind the last of the chosen."""
        end = max(_end(self.chosen), self.log.first)
        log = [Cover(end, self.log.end)] if end < self.log.end else []
        found: list[Cover] = []
        for candidate in self.ordered:
            if candidate.id in self._by_ancestors:
                continue
            claims = candidate.claims()
            near = self._taken.overlapping(claims)
            left = without(claims, [cover for other in near for cover in other.covers] + log)
            if left:
                found += left
                self._suspect(near)
        return tuple(found)

    def not_emptied(self, holes: Iterable[Cover]) -> tuple[Cover, ...]:
        """Return the holes that are no part of a merge of which nothing may have been left."""
        return tuple(without(holes, _emptied(self.chosen)))

    def _suspect(self, near: Iterable[Candidate]) -> None:
        known = set(self.culprits)
        for other in near:
            if other.generation and other.unit not in known:  # an ingest is never in doubt
                self.culprits.append(other.unit)
                known.add(other.unit)


class _Index:
    """Covers that were taken, to be found by their LSNs."""

    def __init__(self, room: int) -> None:
        self._first = np.zeros(room, np.int64)
        self._end = np.zeros(room, np.int64)
        self._covers: list[tuple[Cover, Candidate]] = []

    def add(self, candidate: Candidate) -> None:
        for cover in candidate.covers:
            at = len(self._covers)
            self._first[at], self._end[at] = cover.first, cover.end
            self._covers.append((cover, candidate))

    def overlapping(self, covers: Iterable[Cover]) -> list[Candidate]:
        """Return those that share something with any of these."""
        found: dict[str, Candidate] = {}
        count = len(self._covers)
        for wanted in covers:
            shares = (self._first[:count] < wanted.end) & (self._end[:count] > wanted.first)
            for at in np.flatnonzero(shares).tolist():
                cover, candidate = self._covers[at]
                if cover.both(wanted) is not None:
                    found[candidate.id] = candidate
        return list(found.values())


def _emptied(chosen: Iterable[Candidate]) -> list[Cover]:
    merges = [candidate for candidate in chosen if candidate.lacks_siblings]
    return [Cover(cover.first, cover.end) for merge in merges for cover in merge.covers]


def _end(chosen: Iterable[Candidate]) -> int:
    """Ingests are in the log for ever, and say nothing of how far it was folded."""
    return max((cover.end for c in chosen if c.generation for cover in c.covers), default=1)
