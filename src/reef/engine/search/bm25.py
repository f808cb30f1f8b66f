"""BM25: the k best rows for the terms of a query, over several text indexes at once.

    score(row) = Σ over the query's terms of  c · idf · f·(k1 + 1) / (f + k1·(1 - b + b·l/average))
    idf = ln(1 + (N - n + 0.5) / (n + 0.5)),   k1 = 1.2, b = 0.75

c: times that the term is in the query; f: frequency in the row; l: indexed tokens of the row; N, n
and average: documents, documents with the term, and tokens per document.

**Statistics.** N, n and average are sums over the indexed row versions of all sources: every
segment of the view with the rows that it has, and the unindexed tail. A version that a newer source
shadows counts until compaction drops it, as deleted documents do in Lucene: excluding it would mean
reading the keys of all newer segments for every posting of every term. So compaction can change a
score, though it changes no row; after a full compaction statistics are those of the live rows.
Shadowed, deleted and filtered rows are never returned: `allowed` and `matching` exclude them.
`exhaustive` and `top_k` take the same `Statistics`, so they return the same rows with the same
scores, bit for bit. Filters do not change statistics.

**Pruning** (MaxScore). Terms are processed in descending order of weight, c · idf. Rows of the
first terms become candidates. Once the other terms together cannot lift a new row above the k-th
best score so far, they are only looked up for candidates, and candidates that cannot get there
either are dropped. Rows of a block whose bound is too low never become candidates. Bounds are
compared with a margin above rounding errors. Contributions are added in the order of weights, which
are those of the query and not of a segment: equal rows have equal scores, wherever they are.

Sources of short postings are scored together, as one source with the rows of all of them: a pass
costs some 30 µs, however short its postings are.

**Ties.** Hits are ordered by score, then source, then ordinal, which within a segment is key order.
Rows that tie with the k-th hit are all returned, up to k per source: the caller, who knows the
keys, picks among them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from reef.engine.search.text_sources import SourceTerms
from reef.formats.postings import BLOCK_DOCUMENTS, Postings
from reef.formats.tokenize import TextQuery

K1, B = 1.2, 0.75
MARGIN = 1e-9
"""Relative; far above the rounding errors of a sum of `QUERY_TERMS_MAX` terms."""
GROWTH = 4
ROWS_MAX = 1 << 32
JOINED_MAX = 1 << 17
"""Postings of all terms and sources that are scored in one pass."""
JOINED_SHORT = 1 << 12
"""A term with at most so many postings is scored as a whole when any of them is needed."""
SEED_BLOCKS = 8
"""Blocks of the first term from which a first threshold comes."""
U32S = npt.NDArray[np.uint32]
F64S = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Allowed = Callable[[int, U32S], Mask]
"""Takes a source's number and ordinals; returns which may be in the result. Called for few rows
only."""
Matching = Sequence[Mask | None]
"""Per source: for each of its rows whether a filter matches; None for all."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the collection, summed over sources."""

    documents: int
    tokens: int
    frequencies: dict[str, int]
    """By term: documents that have it."""

    @classmethod
    def of(cls, sources: Sequence[SourceTerms]) -> "Statistics":
        frequencies: dict[str, int] = {}
        for source in sources:
            for term, postings in source.postings.items():
                frequencies[term] = frequencies.get(term, 0) + postings.documents
        directories = [source.source.directory for source in sources]
        documents = sum(directory.documents for directory in directories)
        return cls(documents, sum(directory.tokens for directory in directories), frequencies)


@dataclass(frozen=True, slots=True)
class Hits:
    """Rows by descending score, then source, then ordinal."""

    scores: F64S
    sources: npt.NDArray[np.int64]
    ordinals: U32S

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, places: npt.NDArray[np.int64] | Mask | slice) -> "Hits":
        return Hits(self.scores[places], self.sources[places], self.ordinals[places])


class Weights:
    """The factors of each term's contribution, from the statistics; heaviest terms first."""

    def __init__(self, query: TextQuery, statistics: Statistics) -> None:
        documents, frequencies = statistics.documents, statistics.frequencies
        average = statistics.tokens / documents if documents else 1.0
        self.base, self.slope = K1 * (1 - B), K1 * B / average
        weighed = [
            (count * (K1 + 1) * _idf(documents, frequencies[term]), term)
            for term, count in query.terms.items()
            if term in frequencies
        ]
        weighed.sort(key=itemgetter(0), reverse=True)
        self.terms = weighed

    def bounds(self, weight: float, postings: Postings) -> F64S:
        """Return per block the most that a term adds to a row."""
        highest, lowest = postings.bounds
        bounds: F64S = weight / (1 + self.base / highest + self.slope * lowest)
        return bounds

    def present(self, source: SourceTerms) -> "list[_Term]":
        """Return the terms that a source has."""
        return [
            self._term(source.postings[term], weight)
            for weight, term in self.terms
            if term in source.postings
        ]

    def joined(self, sources: Sequence[SourceTerms], firsts: Sequence[int]) -> "list[_Term]":
        """Return the terms of all sources, whose rows are numbered from `firsts` on."""
        found = []
        for weight, term in self.terms:
            parts = [
                (first, source.postings[term])
                for first, source in zip(firsts, sources, strict=True)
                if term in source.postings
            ]
            found.append(self._term(_JoinedPostings(parts), weight))
        return found

    def _term(self, postings: "Postings | _JoinedPostings", weight: float) -> "_Term":
        highest, lowest = postings.bound
        most = weight / (1 + self.base / highest + self.slope * lowest)
        return _Term(self, postings, weight, most)


class _JoinedPostings:
    """Postings of one term in several sources, whose rows follow each other."""

    def __init__(self, parts: Sequence[tuple[int, Postings]]) -> None:
        self._parts = [postings for _, postings in parts]
        self.documents = sum(postings.documents for postings in self._parts)
        self.ordinals: U32S = np.concatenate(
            [postings.ordinals + np.uint32(first) for first, postings in parts]
        )
        bounds = [postings.bound for postings in self._parts]
        self.bound = max(bound[0] for bound in bounds), min(bound[1] for bound in bounds)

    def saturation(self, base: float, slope: float) -> F64S:
        return np.concatenate([postings.saturation(base, slope) for postings in self._parts])

    def saturation_at(self, places: Places, base: float, slope: float) -> F64S:
        if self.documents <= JOINED_SHORT:
            return self.saturation(base, slope)[places]
        ends = np.array(list(accumulate(part.documents for part in self._parts)), np.int64)
        numbers = np.searchsorted(ends, places, "right")
        found = np.empty(len(places))
        for number, part in enumerate(self._parts):
            ours = np.flatnonzero(numbers == number)
            if len(ours):
                within = places[ours] - (ends[number] - part.documents)
                found[ours] = part.saturation_at(within, base, slope)
        return found


class _Term:
    """A term of the query in one source, or in several that are joined."""

    __slots__ = ("_weights", "most", "postings", "weight")

    def __init__(
        self, weights: Weights, postings: Postings | _JoinedPostings, weight: float, most: float
    ) -> None:
        self._weights, self.postings, self.weight = weights, postings, weight
        self.most = most
        """That it adds to a row."""

    def contributions(self, places: Places | None = None) -> F64S:
        """Return the contributions to the rows of all postings, or of those at places."""
        base, slope = self._weights.base, self._weights.slope
        if places is None:
            return self.postings.saturation(base, slope) * self.weight
        return self.postings.saturation_at(places, base, slope) * self.weight

    def block_bounds(self) -> F64S | None:
        """Return the largest contribution of each block; None if there is only one block."""
        if isinstance(self.postings, _JoinedPostings) or self.postings.blocks == 1:
            return None
        return self._weights.bounds(self.weight, self.postings)


def _idf(documents: int, frequency: int) -> float:
    return math.log1p((documents - frequency + 0.5) / (frequency + 0.5))


def top_k(
    sources: Sequence[SourceTerms],
    query: TextQuery,
    statistics: Statistics,
    k: int,
    *,
    allowed: Allowed | None = None,
    matching: Matching | None = None,
) -> Hits:
    """Return the k best rows and those that tie with the last of them."""
    weights = Weights(query, statistics)
    hits_max, rows = k, sum(source.source.directory.rows for source in sources)
    while True:
        search = _TermSearch(sources, query, weights, hits_max, matching)
        hits = search.run()
        if allowed is not None:
            hits = hits.take(_allowed_mask(hits, allowed))
        if search.suffices(hits, k) or hits_max >= rows:
            return _cut(hits, k)
        hits_max = min(GROWTH * hits_max, rows)


def exhaustive(
    sources: Sequence[SourceTerms],
    query: TextQuery,
    statistics: Statistics,
    k: int,
    *,
    allowed: Allowed | None = None,
    matching: Matching | None = None,
) -> Hits:
    """Return the same by scoring every row that has a term of the query."""
    weights = Weights(query, statistics)
    hits = []
    for number, source in enumerate(sources):
        scores = np.zeros(source.source.directory.rows)
        for term in weights.present(source):
            scores[term.postings.ordinals] += term.contributions()
        ordinals = np.flatnonzero(scores).astype(np.uint32)
        if query.phrases:
            ordinals = source.phrase_rows(query.phrases)
        if matching is not None and (mask := matching[number]) is not None:
            ordinals = ordinals[mask[ordinals]]
        if allowed is not None:
            ordinals = ordinals[allowed(number, ordinals)]
        hits.append(_best(number, scores[ordinals], ordinals, k))
    return _cut(_merge_hits(hits), k)


class _TermSearch:
    """One pass over all sources for the best rows, whether allowed or not."""

    def __init__(
        self,
        sources: Sequence[SourceTerms],
        query: TextQuery,
        weights: Weights,
        k: int,
        matching: Matching | None,
    ) -> None:
        self._sources, self._query, self._weights, self._k = sources, query, weights, k
        self._matching = matching
        self._threshold = 0.0
        """No row below it can be among the k best: that many rows have at least this score."""
        self._best: F64S = np.empty(0)
        self._truncated: set[int] = set()

    def run(self) -> Hits:
        firsts = self._joined_from()
        if firsts is not None:
            return self._run_joined(firsts)
        found = []
        for number, source in enumerate(self._sources):
            mask = None if self._matching is None else self._matching[number]
            terms = self._weights.present(source)
            if self._query.phrases:
                rows = source.phrase_rows(self._query.phrases)
                candidates = _Candidates.of(rows if mask is None else rows[mask[rows]], terms)
            else:
                candidates = self._candidates(terms, mask)
            hits = _best(number, candidates.scores, candidates.ordinals, self._k)
            if len(hits) < len(candidates.ordinals):
                self._truncated.add(number)
            self._keep(hits.scores)
            found.append(hits)
        return _merge_hits(found)

    def _joined_from(self) -> list[int] | None:
        """Return the first row of each source in the rows of all; None if they are not joined."""
        if self._query.phrases or self._matching is not None or len(self._sources) < 2:
            return None
        postings = [p.documents for source in self._sources for p in source.postings.values()]
        rows = [source.source.directory.rows for source in self._sources]
        if not postings or sum(postings) > JOINED_MAX or sum(rows) > ROWS_MAX:
            return None
        return [0, *accumulate(rows[:-1])]

    def _run_joined(self, firsts: list[int]) -> Hits:
        """Score the rows of all sources in one pass."""
        terms = self._weights.joined(self._sources, firsts)
        candidates = self._candidates(terms, None)
        starts = np.array(firsts, np.int64)
        numbers = np.searchsorted(starts, candidates.ordinals, "right") - 1
        order = np.lexsort((candidates.ordinals, -candidates.scores))
        ordinals = (candidates.ordinals - starts[numbers]).astype(np.uint32)
        hits = Hits(candidates.scores, numbers, ordinals).take(order)
        self._keep(hits.scores[: self._k])
        kept = _first_of_each(hits, self._k)
        self._truncated = set(hits.sources[~kept].tolist())
        return hits.take(kept)

    def suffices(self, hits: Hits, k: int) -> bool:
        """Whether no row that was left out can be among the k best of the rows that remain.

        Rows were left out before those that are not allowed were removed: for a score below the
        threshold, or at the threshold for k better rows of the same source.
        """
        if len(hits) < k:
            return not self._truncated and not self._threshold
        if hits.scores[k - 1] != self._threshold:
            return bool(hits.scores[k - 1] > self._threshold)
        return all(np.count_nonzero(hits.sources == number) >= k for number in self._truncated)

    def _candidates(self, terms: list[_Term], mask: Mask | None) -> "_Candidates":
        """Return the rows of a source that can be among the k best, and few others."""
        rest = sum(term.most for term in terms)
        candidates = _Candidates(mask)
        for term in terms:
            least = self._threshold * (1 - MARGIN)
            after = rest - term.most
            if rest < least:
                candidates.keep_from(least - rest)
                if not len(candidates.ordinals):
                    break
                candidates.look_up(term)
            else:
                self._extend(candidates, term, after)
            rest = after
        candidates.keep_from(self._threshold * (1 - MARGIN))
        return candidates

    def _extend(self, candidates: "_Candidates", term: _Term, after: float) -> None:
        """Add the rows of a term whose blocks can have one of the k best."""
        chosen, bounds = None, term.block_bounds()
        if bounds is not None:
            if len(bounds) > 2 * SEED_BLOCKS and not self._threshold:
                seeds = _Candidates(candidates.mask)
                seeds.add(term, np.argpartition(bounds, -SEED_BLOCKS)[-SEED_BLOCKS:])
                self._raise_threshold(seeds.scores)
            blocks = np.flatnonzero(bounds + after >= self._threshold * (1 - MARGIN))
            chosen = blocks if len(blocks) < len(bounds) else None
        candidates.add(term, chosen)
        self._raise_threshold(candidates.scores)

    def _raise_threshold(self, scores: F64S) -> None:
        """Raise the threshold to the k-th of the best scores of earlier sources and these."""
        if len(self._best):
            scores = np.concatenate((self._best, scores))
        place = len(scores) - self._k
        if place >= 0:
            self._threshold = max(self._threshold, float(np.partition(scores, place)[place]))

    def _keep(self, scores: F64S) -> None:
        """Keep the best scores of a source, which are in descending order."""
        if len(self._best):
            scores = np.sort(np.concatenate((self._best, scores)))[::-1]
        self._best = scores[: self._k]
        if len(self._best) == self._k:
            self._threshold = max(self._threshold, float(self._best[-1]))


class _Candidates:
    """Rows with the sums of the contributions so far; in no order."""

    def __init__(self, mask: Mask | None) -> None:
        self.mask = mask
        self.ordinals: U32S = np.empty(0, np.uint32)
        self.scores: F64S = np.empty(0)

    @classmethod
    def of(cls, ordinals: U32S, terms: list[_Term]) -> "_Candidates":
        """Return given rows with their scores."""
        candidates = cls(None)
        candidates.ordinals, candidates.scores = ordinals, np.zeros(len(ordinals))
        for term in terms:
            candidates.look_up(term)
        return candidates

    def keep_from(self, least: float) -> None:
        kept = self.scores >= least
        self.ordinals, self.scores = self.ordinals[kept], self.scores[kept]

    def look_up(self, term: _Term) -> Places:
        """Add a term's contributions to candidates that have it; return their postings."""
        ordinals = term.postings.ordinals
        places: Places = ordinals.searchsorted(self.ordinals)
        hit = (
            ordinals.take(places, mode="clip") == self.ordinals
        )  # a row after the last has no equal
        places = places[hit]
        self.scores[hit] += term.contributions(places)
        return places

    def add(self, term: _Term, blocks: Places | None) -> None:
        """Add the rows of some blocks of a term; None for all."""
        postings = term.postings
        places = None if blocks is None else _postings_of(blocks, postings.documents)
        if len(self.ordinals):
            taken = self.look_up(term)
            if len(taken):
                fresh = np.ones(postings.documents, bool)
                fresh[taken] = False
                places = fresh.nonzero()[0] if places is None else places[fresh[places]]
        if self.mask is not None:
            places = np.arange(postings.documents) if places is None else places
            places = places[self.mask[postings.ordinals[places]]]
        ordinals = postings.ordinals if places is None else postings.ordinals[places]
        scores = term.contributions(places)
        if len(self.ordinals):
            ordinals = np.concatenate((self.ordinals, ordinals))
            scores = np.concatenate((self.scores, scores))
        self.ordinals, self.scores = ordinals, scores


def _postings_of(blocks: Places, documents: int) -> Places:
    """Return the places of all postings of some blocks."""
    places = (blocks[:, None] * BLOCK_DOCUMENTS + np.arange(BLOCK_DOCUMENTS)).reshape(-1)
    return places[places < documents]


def _best(number: int, scores: F64S, ordinals: U32S, k: int) -> Hits:
    """Return the k best rows of one source, the first ones among equals."""
    order = np.lexsort((ordinals, -scores))[:k]
    return Hits(scores[order], np.full(len(order), number), ordinals[order])


def _merge_hits(hits: Sequence[Hits]) -> Hits:
    if len(hits) == 1:
        return hits[0]
    scores = np.concatenate([np.empty(0), *(part.scores for part in hits)])
    sources = np.concatenate([np.empty(0, np.int64), *(part.sources for part in hits)])
    ordinals = np.concatenate([np.empty(0, np.uint32), *(part.ordinals for part in hits)])
    return Hits(scores, sources, ordinals).take(np.lexsort((ordinals, sources, -scores)))


def _cut(hits: Hits, k: int) -> Hits:
    """Return the first k hits and those that tie with the last of them, k per source at most."""
    if len(hits) <= k:
        return hits
    hits = hits.take(slice(0, int(np.searchsorted(-hits.scores, -hits.scores[k - 1], "right"))))
    return hits.take(_first_of_each(hits, k))


def _first_of_each(hits: Hits, k: int) -> Mask:
    """Return which hits are among the first k of their source."""
    kept = np.ones(len(hits), bool)
    if len(hits) > k:
        for number in np.unique(hits.sources):
            kept[np.flatnonzero(hits.sources == number)[k:]] = False
    return kept


def _allowed_mask(hits: Hits, allowed: Allowed) -> Mask:
    mask = np.zeros(len(hits), bool)
    for number in np.unique(hits.sources):
        ours = np.flatnonzero(hits.sources == number)
        mask[ours] = allowed(int(number), hits.ordinals[ours])
    return mask
