"""BM25 over several text indexes: pruned search returns what exhaustive scoring does."""

import math
from itertools import count

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.engine.read.caches import ByteCache
from reef.engine.search import bm25
from reef.engine.search.bm25 import K1, B, Statistics, exhaustive, top_k
from reef.engine.search.text_sources import TextSource, collect, index_cached, index_in_memory
from reef.errors import CorruptionError, InvalidInputError
from reef.formats.text_index import TextDirectory, TextIndexBuilder
from reef.formats.tokenize import Analyzer, TextOptions

PLAIN = Analyzer(TextOptions())
WORDS = [f"t{number}" for number in range(12)]
TEXTS = st.one_of(st.none(), st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join))


def sources_of(collections, **options):
    """Index each list of texts in memory."""
    return [
        index_in_memory(pa.array(texts, pa.string()), np.ones(len(texts), bool), options, f"s{n}")
        for n, texts in enumerate(collections)
    ]


def no_reads(requests):
    """Fail: indexes in memory are read without requests."""
    raise AssertionError(f"{len(requests)} requests of indexes in memory")


def search(collections, text, k, scored=top_k, options=None, **filters):
    """Return (score, source, ordinal) of the hits of a query."""
    options = options or {}
    query = Analyzer(TextOptions.parse(options)).query(text)
    found = collect(sources_of(collections, **options), query, no_reads)
    return rows_of(scored(found, query, Statistics.of(found), k, **filters))


def rows_of(hits):
    """Return hits as (score, source, ordinal)."""
    return list(
        zip(hits.scores.tolist(), hits.sources.tolist(), hits.ordinals.tolist(), strict=True)
    )


def plain_scores(collections, terms, returned):
    """Score all rows by the formula, without an index; in the order of hits."""
    rows = [
        (source, ordinal, text.split())
        for source, texts in enumerate(collections)
        for ordinal, text in enumerate(texts)
        if text
    ]
    average = sum(len(words) for *_, words in rows) / len(rows) if rows else 1
    weights = {}
    for term, times in terms.items():
        having = sum(term in words for *_, words in rows)
        idf = math.log1p((len(rows) - having + 0.5) / (having + 0.5))
        weights[term] = times * (K1 + 1) * idf
    scored = []
    for source, ordinal, words in rows:
        score = 0.0
        for term in sorted(weights, key=weights.get, reverse=True):
            frequency = words.count(term)
            damping = len(words) * (K1 * B / average) + K1 * (1 - B)
            if frequency:
                score += frequency / (damping + frequency) * weights[term]
        if score and returned(source, ordinal):
            scored.append((score, source, ordinal))
    return sorted(scored, key=lambda row: (-row[0], *row[1:]))


def with_ties(scored, k):
    """Return the first k rows and those that tie with the last, at most k of each source."""
    seen, kept = {}, []
    for row in scored:
        if len(scored) > k and row[0] < scored[k - 1][0]:
            break
        seen[row[1]] = seen.get(row[1], 0) + 1
        if seen[row[1]] <= k:
            kept.append(row)
    return kept


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(TEXTS, max_size=30), min_size=1, max_size=4),
    st.lists(st.sampled_from([*WORDS, "absent"]), min_size=1, max_size=5),
    st.integers(1, 12),
    st.data(),
)
def test_hits_are_those_of_the_formula(collections, words, k, data):
    """Pruned and exhaustive search return the rows of a plain implementation, with equal scores.

    Ties, rows that are not allowed and filters included; sources joined or one by one.
    """

    def masks(share):
        return [np.array([data.draw(share) for _ in texts], bool) for texts in collections]

    kept = masks(st.booleans()) if data.draw(st.booleans()) else None
    matching = masks(st.booleans()) if data.draw(st.booleans()) else None
    filters = {
        "allowed": None if kept is None else lambda number, ordinals: kept[number][ordinals],
        "matching": matching,
    }
    pruned = search(collections, " ".join(words), k, **filters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "JOINED_MAX", 0)
        assert search(collections, " ".join(words), k, **filters) == pruned
    assert pruned == search(collections, " ".join(words), k, exhaustive, **filters)

    def returned(source, ordinal):
        return all(mask is None or mask[source][ordinal] for mask in (kept, matching))

    terms = PLAIN.query(" ".join(words)).terms
    assert pruned == with_ties(plain_scores(collections, terms, returned), k)


def large_collections(seed, segments=3, rows=4000):
    """Return texts whose commonest words are in most rows."""
    rng = np.random.default_rng(seed)
    return [
        [
            " ".join(f"w{n}" for n in rng.zipf(1.25, length) % 3000)
            for length in rng.integers(1, 80, rows)
        ]
        for _ in range(segments)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("joined_max", [0, 1 << 17])
def test_blocks_are_skipped_without_changing_a_hit(seed, joined_max, monkeypatch):
    """Long postings of many blocks, over segments: the same hits with the same scores."""
    monkeypatch.setattr(bm25, "JOINED_MAX", joined_max)
    collections = large_collections(seed)
    sources = sources_of(collections)
    rng = np.random.default_rng(seed)
    denied = [rng.random(4000) < 0.97 for _ in collections]
    for _ in range(40):
        words = " ".join(f"w{n}" for n in rng.zipf(1.2, rng.integers(1, 5)) % 3000)
        query = PLAIN.query(words)
        found = collect(sources, query, no_reads)
        statistics = Statistics.of(found)
        for allowed in (None, lambda number, ordinals: ~denied[number][ordinals]):
            pruned = top_k(found, query, statistics, 10, allowed=allowed)
            complete = exhaustive(found, query, statistics, 10, allowed=allowed)
            assert rows_of(pruned) == rows_of(complete), words


def test_few_rows_are_asked_for_permission():
    """The callback, which may have to read keys, gets the best rows only, not all postings."""
    collections = large_collections(7)
    asked = count()

    def allowed(number, ordinals):
        for _ in ordinals:
            next(asked)
        return ordinals % 2 == 0

    assert len(search(collections, "w1 w2", 10, allowed=allowed)) == 10
    assert next(asked) < 200


def test_statistics_are_sums_over_sources():
    """Splitting rows over sources changes no score."""
    texts = ["red fish", "blue fish fish", "red", "green bird sings", "fish"]
    whole = search([texts], "red fish", 5)
    parts = search([texts[:2], texts[2:3], [], texts[3:]], "red fish", 5)
    first = [0, 2, 3, 3]
    assert [(score, first[source] + row) for score, source, row in parts] == [
        (score, row) for score, _, row in whole
    ]


def test_shadowed_versions_count_in_statistics_only():
    """A row that is not allowed is not returned, and weighs in the statistics all the same."""
    current, old = ["red fish", "blue fish"], ["red red red"]
    everything = search([current, old], "red", 3)
    live = search(
        [current, old], "red", 3, allowed=lambda number, rows: np.full(len(rows), number == 0)
    )
    assert [row[1:] for row in everything] == [(1, 0), (0, 0)]
    assert live == everything[1:]


def test_ties_are_returned_for_the_caller_to_order():
    """Equal rows beyond the k-th come along, at most k of each source, the first ones."""
    hits = search([["x"] * 5, ["x"], ["x y"]], "x", 2)
    assert [row[1:] for row in hits] == [(0, 0), (0, 1), (1, 0)]


def test_ties_behind_rows_that_are_not_allowed_are_found():
    """Denied rows make room for later ones that tie."""
    denied = np.array([True] * 40 + [False] * 10)
    hits = search(
        [["x"] * 50, ["x"] * 5],
        "x",
        2,
        allowed=lambda number, rows: ~denied[rows] if number == 0 else rows >= 0,
    )
    assert [row[1:] for row in hits] == [(0, 40), (0, 41), (1, 0), (1, 1)]


def test_phrases_restrict_the_rows():
    """A quoted phrase must be in a row, its words in this order and at these distances."""
    texts = ["new york city", "york new", "new the york", "city of new york", "new yorks york"]
    for scored in (top_k, exhaustive):
        options = {"positions": True}
        hits = search([texts, texts[:1]], '"new york" city', 10, scored, options)
        assert sorted(row[1:] for row in hits) == [(0, 0), (0, 3), (1, 0)]
        assert search([texts], '"york city of"', 10, scored, options) == []
        assert [r[2] for r in search([texts], '"new york" "city of"', 10, scored, options)] == [3]
        assert [r[2] for r in search([texts], 'new "yorks"', 10, scored)] == [4]
        denied = {"allowed": lambda number, rows: rows != 0}
        hits = search([texts], '"new york" city', 1, scored, options, **denied)
        assert [row[2] for row in hits] == [3]
        matched = search([texts], '"new york"', 9, scored, options, matching=[np.arange(5) > 1])
        assert [row[2] for row in matched] == [3]


@given(st.lists(TEXTS, max_size=25), st.lists(st.sampled_from(WORDS), min_size=2, max_size=3))
def test_phrases_are_those_of_the_texts(texts, words):
    """A row matches a phrase if and only if its words have it as a run."""
    phrase = " ".join(words)
    hits = search([texts], f'"{phrase}"', 100, options={"positions": True})
    expected = [n for n, text in enumerate(texts) if f" {phrase} " in f" {text} "]
    assert sorted(row[2] for row in hits) == expected


def test_phrases_need_positions():
    """An index without positions rejects a phrase, and says what to do."""
    with pytest.raises(InvalidInputError, match=r'phrase "new york".*positions=True'):
        search([["new york"]], '"new york"', 1)


def test_queries_without_known_terms_find_nothing():
    """Words that no row has, stop words, and no words at all."""
    for text in ("absent", "", "!?", '""'):
        assert search([["red fish"], []], text, 3) == []
    assert search([], "red", 3) == []


class StoredIndex:
    """An index in a store: counts rounds and ranges, and can damage one."""

    def __init__(self, texts, **options):
        builder = TextIndexBuilder(options)
        builder.add(0, pa.array(texts), np.ones(len(texts), bool))
        parts = builder.finish()
        self.data = b"".join(parts.data)
        self.source = TextSource(TextDirectory.decode(parts.directory, "ns/1.seg", 0), base=64)
        self.rounds = []

    def read(self, requests):
        self.rounds.append(len(requests))
        return [self.data[r.offset : r.offset + r.length] for r in requests]


def test_a_cold_query_takes_two_rounds_and_a_warm_one_none():
    """Dictionary blocks, then postings; both from the cache afterwards."""
    stored = StoredIndex(
        ["common word5", *(f"common x{n * 2654435761 % 2**64:x}" for n in range(9000))]
    )
    cache = ByteCache(1 << 20)
    query = PLAIN.query("common word5 nothing")
    found = collect([stored.source], query, stored.read, cache)
    assert len(stored.rounds) == 2
    assert stored.rounds[0] <= 3
    assert stored.rounds[1] == 1
    again = collect([stored.source], query, stored.read, cache)
    assert len(stored.rounds) == 2
    assert [*again[0].postings] == [*found[0].postings] == ["common", "word5"]


def test_damage_is_an_error_that_names_the_object():
    """The caller can fall back to an exhaustive search of the segment's rows."""
    stored = StoredIndex(["red fish"] * 1000)
    stored.data = bytes(len(stored.data))
    with pytest.raises(CorruptionError, match=r"ns/1\.seg"):
        collect([stored.source], PLAIN.query("fish"), stored.read)


def test_rows_in_memory_are_indexed_once():
    """The same texts give the same index; other texts, nulls, cuts and options give another."""
    cache = ByteCache(1 << 20)
    texts = pa.array(["x", "red fish", None, "", "blue"])
    first = index_cached(texts[1:], {}, cache)
    assert index_cached(pa.array(["red fish", None, "", "blue"]), {}, cache) is first
    others = [["red fish", "", "", "blue"], ["red ", None, "fish", "blue"], ["red fish", None]]
    sources = [index_cached(pa.array(other, pa.string()), {}, cache) for other in [*others, []]]
    sources.append(index_cached(texts[1:], {"positions": True}, cache))
    assert len({id(source) for source in (first, *sources)}) == 6
    query = PLAIN.query("fish")
    both = collect([first, sources[1]], query, no_reads, cache)
    assert [len(found.postings["fish"].ordinals) for found in both] == [1, 1]
    again = collect([first, sources[1]], query, no_reads, cache)
    assert again[0].postings["fish"] is both[0].postings["fish"]
    assert again[0].postings["fish"] is not again[1].postings["fish"]


def test_rows_in_memory_are_cached_by_the_options_of_their_index():
    """The terms of one index are not those of another one of the same texts."""
    cache, texts = ByteCache(1 << 20), pa.array(["swim", "swims", "swimming"])
    query = PLAIN.query("swim")
    for options, rows in (({}, 1), ({"language": "english"}, 3), ({}, 1)):
        [found] = collect([index_cached(texts, options, cache)], query, no_reads, cache)
        assert found.postings["swim"].documents == rows
