"""Text search against the formula over a model: the same rows, scores and order in every state.

Statistics count stored versions, so a test takes them from `explain`; with them the scores of the
model are exact. After a full compaction they are those of the live rows.
"""

import math

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import reef
from reef.formats.tokenize import Analyzer, TextOptions
from reef.jobs import build_indexes, compact, fold, ingest
from reef.stores.memory import MemoryStore
from tests.support.compaction import SMALL

NAME = "texts"
SCHEMA = pa.schema([("id", pa.string()), ("tag", pa.string()), ("body", pa.string())])
KEYS = st.integers(0, 40).map(lambda number: f"k{number:02}")
WORDS = ["the", "coral", "reef", "reefs", "swims", "swimming", "über", "東京", "x-ray"]
TEXTS = st.one_of(st.none(), st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join))
ROWS = st.fixed_dictionaries({"tag": st.sampled_from([None, "a", "b"]), "body": TEXTS})
QUERIES = st.lists(st.sampled_from([*WORDS, "absent"]), min_size=1, max_size=4).map(" ".join)
K1, B = 1.2, 0.75


class TextMachine(RuleBasedStateMachine):
    """Writes and jobs; every search has the rows, scores and order of the formula."""

    def __init__(self):
        super().__init__()
        self.db = reef.Database(MemoryStore())
        self.rows, self.snapshots = {}, []

    @initialize(
        language=st.sampled_from(["", "english"]),
        tokenizer=st.sampled_from(["unicode", "whitespace"]),
        rows_min=st.sampled_from([1, 6]),
    )
    def start(self, language, tokenizer, rows_min):
        how = {"language": language, "tokenizer": tokenizer, "positions": True}
        self.analyzer = Analyzer(TextOptions.parse(how))
        index = reef.text_index("body", rows_min=rows_min, **how)
        tags = reef.filter_index("tag", rows_min=rows_min)
        self.db.create(NAME, SCHEMA, indexes=[index, tags])
        self.writer = self.db.writer(NAME, background=False)

    @rule(rows=st.dictionaries(KEYS, ROWS, min_size=1, max_size=12))
    def put(self, rows):
        batch = reef.Batch()
        for key, row in rows.items():
            batch.put(key, row)
            self.rows[key] = row
        self.writer.write(batch)

    @rule(key=KEYS, body=TEXTS)
    def patch(self, key, body):
        self.writer.patch([{"id": key, "body": body}])
        if key in self.rows:
            self.rows[key] = {**self.rows[key], "body": body}

    @rule(key=KEYS)
    def delete(self, key):
        self.writer.delete(key)
        self.rows.pop(key, None)

    @rule(rows=st.dictionaries(KEYS, ROWS, min_size=1, max_size=12))
    def load(self, rows):
        listed = [{"id": key, **row} for key, row in sorted(rows.items())]
        ingest(self.db, NAME, pa.Table.from_pylist(listed, SCHEMA))
        self.rows |= rows
        self.writer.refresh()

    @rule()
    def fold(self):
        fold(self.db, NAME)
        self.writer.refresh()

    @rule()
    def compact(self):
        compact(self.db, NAME, **SMALL)
        build_indexes(self.db, NAME)
        self.writer.refresh()

    @rule()
    def take_snapshot(self):
        if len(self.snapshots) < 2:
            self.snapshots.append((self.db.snapshot(NAME), dict(self.rows)))

    @rule(text=QUERIES, quoted=QUERIES, k=st.sampled_from([1, 3, 100]), tag=st.booleans())
    def search(self, text, quoted, k, tag):
        """On writers, readers and snapshots; with phrases and conditions."""
        where = "tag = 'a'" if tag else None
        for query in (text, f'{text} "{quoted}"'):
            with self.db.reader(NAME) as reader:
                for handle in (self.writer, reader):
                    self.compare(handle, self.rows, query, k, where)
            for taken, rows in self.snapshots:
                with self.db.reader(NAME, snapshot=taken) as reader:
                    self.compare(reader, rows, query, k, where)

    @rule(text=QUERIES)
    def statistics_after_a_full_compaction(self, text):
        """They are those of the live rows, as if every row had been written once."""
        fold(self.db, NAME)
        compact(self.db, NAME, full=True, **SMALL)
        self.writer.refresh()
        report = self.writer.search(text=("body", text), explain=True)
        lengths = [length for row in self.rows.values() if (length := len(self.terms(row)))]
        if report["terms"]:
            assert (report["documents"], report["tokens"]) == (len(lengths), sum(lengths))
        for term, count in report["terms"].items():
            having = sum(term in [t for t, _ in self.terms(row)] for row in self.rows.values())
            assert count == having

    def terms(self, row):
        """Return the terms of a row with their positions."""
        return self.analyzer._place_terms(row["body"] or "")

    def compare(self, handle, rows, text, k, where):
        """Compare a search, pruned and exhaustive, with the formula."""
        arguments = {"text": ("body", text), "k": k, "where": where}
        result = handle.search(**arguments)
        assert result.equals(handle.search(**arguments, recall="exact"))
        report = handle.search(**arguments, explain=True)
        matching = {key: row for key, row in rows.items() if where is None or row["tag"] == "a"}
        expected = self.ranked(matching, self.analyzer.query(text), report)[:k]
        found = zip(result["_score"].to_pylist(), result["id"].to_pylist(), strict=True)
        assert [(-score, key) for score, key in found] == expected
        for row in result.drop_columns("_score").to_pylist():
            assert row == {"id": row["id"], **rows[row["id"]]}

    def ranked(self, rows, query, report):
        """Return (minus the score, key) of all rows that match, the best first."""
        documents, average = report["documents"], report["tokens"] / (report["documents"] or 1)
        weights = {
            term: count * (K1 + 1) * math.log1p((documents - n + 0.5) / (n + 0.5))
            for term, count in query.terms.items()
            if (n := report["terms"].get(term, 0))
        }
        found = []
        for key, row in rows.items():
            placed = self.terms(row)
            if not all(has_phrase(placed, phrase) for phrase in query.phrases):
                continue
            score = 0.0
            for term in sorted(weights, key=weights.get, reverse=True):
                if count := sum(other == term for other, _ in placed):
                    damping = len(placed) * (K1 * B / average) + K1 * (1 - B)
                    score += count / (damping + count) * weights[term]
            if score:
                found.append((-score, key))
        return sorted(found)

    def teardown(self):
        if hasattr(self, "writer"):
            self.writer.close()


def has_phrase(placed, phrase):
    """Whether terms with positions have a phrase."""
    there = set(placed)
    return any(
        all((term, start + distance) in there for term, distance in phrase.terms)
        for _, start in placed
    )


TestTextSearch = TextMachine.TestCase
TestTextSearch.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
