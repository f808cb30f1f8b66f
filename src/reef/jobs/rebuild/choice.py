"""Which segments are live: a choice by their covers. Pure.

Every segment covers rectangles of LSNs and keys (`reef.formats.covers`). The segments of a manifest
never overlap, and cover everything that any segment in the bucket covers, but for the part that is
still in the log. So a choice is right if

    no two chosen segments overlap, and
    whatever any segment covers is covered by the chosen ones or is in the log behind them.

    1  sort candidates by the generation on which their job was planned, newest first
    2  choose each that overlaps no chosen one
    3  if that leaves a hole, refuse one job whose outputs are near it, and start again; continue
       from the attempt with the fewest holes

The bucket may hold superseded segments that a pin retains, outputs of jobs that died before their
publish, all of them or some, and outputs of rivals. Whether a job was published is not always
known, and need not be: its outputs have the rows of its inputs, so a choice of all outputs and one
of all inputs show the same rows. A mixture would be wrong: a merge drops a tombstone together with
the rows below it, and an input that is left would bring them back (H34, H49). Of two jobs with the
same covers the one planned on the later manifest is chosen: the other was not published by then,
and the compactor's epoch keeps it from being published later. A hole remains if the later job died
half-way or was overtaken and its rival's inputs were swept; then it is refused.

A part of a merge without rows has no segment. Missing siblings show that: if no choice is without
holes, the covers of such a merge are accepted.

A segment without covers (of an older writer) is chosen by its ancestors alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from reef.formats.covers import Cover, without

TRIES_MAX, TRIES_MIN = 1000, 64
"""How many choices are tried before holes are reported."""
ROUNDS_MAX = 300_000
"""Segments checked in all tries together, so that the search takes seconds."""
EVERYWHERE = (b"", None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that may be live."""

    id: str
    generation: int
    """Of the manifest that its job was planned on; 0 for a bulk job."""
    covers: tuple[Cover, ...]
    ancestors: frozenset[str] = frozenset()
    unit: str = ""
    """Common to segments that were written together."""
    whole_keys: bool = False
    """Whether it is of a fold, whose pieces cover all keys together."""
    lacks_siblings: bool = False
    """Whether it is of a merge with outputs that are gone or were never written."""

    def claims(self) -> tuple[Cover, ...]:
        """Return the covers that must be somewhere, given that this segment exists."""
        if not self.whole_keys:
            return self.covers
        return tuple(Cover(c.first, c.end, *EVERYWHERE) for c in self.covers)


@dataclass(frozen=True, slots=True)
class Choice:
    """The live segments, and the holes between them."""

    chosen: tuple[Candidate, ...]
    holes: tuple[Cover, ...] = ()
    """Covers of segments that no chosen one has: their rows are lost."""
    uncovered: tuple[Cover, ...] = ()
    """The holes, and those where a merge lacks outputs, which may have had no rows: older releases
    wrote no empty segments. They overlap."""

    @property
    def end(self) -> int:
        """The first LSN above the covers of folds and merges."""
        return _end(self.chosen)

    @property
    def merged(self) -> list[Cover]:
        """The LSN ranges of merges; some of their keys may have no rows left."""
        merges = [c.covers for c in self.chosen if c.ancestors and c.covers]
        return [Cover(min(c.first for c in m), max(c.end for c in m)) for m in merges]


def choose(candidates: Iterable[Candidate], log: Cover) -> Choice:
    """Return a choice without holes, or the one with the fewest.

    If the first attempt has holes, jobs near them are refused one by one, continuing from the
    attempt with the fewest holes.
    """
    ordered = sorted(candidates, key=lambda c: (-c.generation, c.id))
    tries_max = min(TRIES_MAX, max(TRIES_MIN, ROUNDS_MAX // max(1, len(ordered))))
    tried: set[frozenset[str]] = set()
    waiting: list[tuple[int, int, frozenset[str], list[str]]] = [(0, 0, frozenset(), [""])]
    best = Choice(())
    least: tuple[int, int] | None = None  # holes, and how many jobs were refused
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
            if len(holes) < before:  # continue from here; the others may wait
                heappush(waiting, (before, order, refused, culprits[place + 1 :]))
                break
    return best


@dataclass
class _Attempt:
    """One choice: newest first, each candidate that overlaps no chosen one."""

    ordered: Sequence[Candidate]
    refused: frozenset[str]
    log: Cover
    chosen: list[Candidate] = field(default_factory=list)
    culprits: list[str] = field(default_factory=list)
    """Jobs whose refusal may close a hole."""

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
        """Return the covers that are missing; the log has those behind the last chosen one."""
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
        """Return the holes outside of merges that may have had outputs without rows."""
        return tuple(without(holes, _emptied(self.chosen)))

    def _suspect(self, near: Iterable[Candidate]) -> None:
        known = set(self.culprits)
        for other in near:
            if other.generation and other.unit not in known:  # an ingest always counts
                self.culprits.append(other.unit)
                known.add(other.unit)


class _Index:
    """Covers of chosen segments, indexed by LSN."""

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
        """Return the candidates that overlap any of these covers."""
        found: dict[str, Candidate] = {}
        count = len(self._covers)
        for one in covers:
            shares = (self._first[:count] < one.end) & (self._end[:count] > one.first)
            for at in np.flatnonzero(shares).tolist():
                cover, candidate = self._covers[at]
                if cover.both(one) is not None:
                    found[candidate.id] = candidate
        return list(found.values())


def _emptied(chosen: Iterable[Candidate]) -> list[Cover]:
    merges = [candidate for candidate in chosen if candidate.lacks_siblings]
    return [Cover(cover.first, cover.end) for merge in merges for cover in merge.covers]


def _end(chosen: Iterable[Candidate]) -> int:
    """Return the end of the covers, without ingests, which do not show how far a fold came."""
    return max((cover.end for c in chosen if c.generation for cover in c.covers), default=1)
