"""Search against brute force over a model: random histories of everything that moves rows."""

import numpy as np
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef.engine.where import parse
from reef.formats.schema import Schema
from reef.jobs import build_indexes, compact, fold, ingest, verify
from reef.stores.memory import MemoryStore
from tests.support.compaction import SMALL
from tests.support.search import SCHEMA, assert_same, found, indexes

NAME = "docs"
KEYS = st.integers(0, 23).map(lambda n: f"k{n:02}")
TIES = [[1, 0, 2, -1], [1, 0, 2, 0], [1, 0, 1, -1]]
VECTORS = st.one_of(
    st.none(), st.sampled_from(TIES), st.lists(st.integers(-3, 3), min_size=4, max_size=4)
)
TAGS, NUMBERS = st.sampled_from([None, "a", "b", "c"]), st.one_of(st.none(), st.integers(0, 9))
WORDS = ["reef", "coral", "fish", "the", "swimming"]
TEXTS = st.one_of(st.none(), st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join))
ROWS = st.fixed_dictionaries({"v": VECTORS, "tag": TAGS, "n": NUMBERS, "body": TEXTS})
QUERIES = st.lists(st.integers(-3, 3), min_size=4, max_size=4).filter(any)
FILTERS = st.sampled_from(
    [
        (None, lambda row: True),
        ("tag = 'a'", lambda row: row["tag"] == "a"),
        ("tag IN ('a', 'c') AND n < 5", lambda r: r["tag"] in ("a", "c") and _below(r["n"], 5)),
        ("NOT tag = 'a' OR n IS NULL", lambda r: r["tag"] not in ("a", None) or r["n"] is None),
        ("n >= 3 AND id < 'k12'", lambda r: r["n"] is not None and r["n"] >= 3 and r["id"] < "k12"),
    ]
)


def _below(value, bound):
    return value is not None and value < bound


class SearchMachine(RuleBasedStateMachine):
    """Writes, jobs and schema changes; after each step every search equals brute force.

    All four lists are probed, and there are fewer rows than are reranked: so the index path may
    not miss a row either.
    """

    def __init__(self):
        super().__init__()
        self.db = reef.Database(MemoryStore())
        self.rows = {}
        self.snapshots = []

    @initialize(metric=st.sampled_from(["l2", "cosine", "dot"]))
    def start(self, metric):
        self.metric = metric
        self.all = indexes(metric, probes=4)
        self.db.create(NAME, SCHEMA, indexes=self.all)
        self.writer = self.db.writer(NAME, background=False)
        self.dropped = set()

    @rule(rows=st.dictionaries(KEYS, ROWS, min_size=1, max_size=8))
    def put(self, rows):
        batch = reef.Batch()
        for key, row in rows.items():
            batch.put(key, row)
            self.rows[key] = {"id": key, **row}
        self.writer.write(batch)

    @rule(keys=st.lists(KEYS, min_size=2, max_size=6, unique=True), row=ROWS)
    def replace(self, keys, row):
        """Rows that were replaced stay in the lists of older segments, as far as newer ones."""
        first, *others = keys
        for rows in (
            {first: TIES[0], **{key: [3, 3, -3, 3] for key in others}},
            {first: [3, 3, -3, 3], **dict.fromkeys(others, TIES[0])},
        ):
            self.put({key: {**row, "v": vector} for key, vector in rows.items()})
            self.fold()
            self.build()

    @rule(key=KEYS, row=ROWS, column=st.sampled_from(["v", "tag", "n", "body"]))
    def patch(self, key, row, column):
        self.writer.patch([{"id": key, column: row[column]}])
        if key in self.rows:
            self.rows[key] = {**self.rows[key], column: row[column]}

    @rule(key=KEYS, more=st.integers(1, 3))
    def merge(self, key, more):
        self.writer.merge(key, {"n": reef.add(more)})
        row = self.rows.get(key) or {"id": key, "v": None, "tag": None, "n": None, "body": None}
        self.rows[key] = {**row, "n": (row["n"] or 0) + more}

    @rule(key=KEYS)
    def delete(self, key):
        self.writer.delete(key)
        self.rows.pop(key, None)

    @rule(low=KEYS, high=KEYS)
    def delete_range(self, low, high):
        low, high = sorted((low, high))
        if low < high:
            self.writer.delete_range(low, high)
            self.rows = {k: r for k, r in self.rows.items() if not low <= k < high}

    @rule(rows=st.dictionaries(KEYS, ROWS, min_size=1, max_size=8))
    def load(self, rows):
        listed = [{"id": key, **row} for key, row in sorted(rows.items())]
        ingest(self.db, NAME, pa.Table.from_pylist(listed, SCHEMA))
        self.rows |= {row["id"]: row for row in listed}
        self.writer.refresh()

    @rule()
    def fold(self):
        fold(self.db, NAME)
        self.writer.refresh()

    @rule(full=st.booleans())
    def compact(self, full):
        compact(self.db, NAME, full=full, **SMALL)
        self.writer.refresh()

    @rule()
    def build(self):
        build_indexes(self.db, NAME)
        self.writer.refresh()

    @rule(number=st.integers(0, 3))
    def change_indexes(self, number):
        index = self.all[number]
        if number in self.dropped:
            self.db.alter(NAME, add_index=index)
            self.dropped.remove(number)
        else:
            self.db.alter(NAME, drop_index=index.column)
            self.dropped.add(number)
        self.writer.refresh()

    @rule()
    def take_snapshot(self):
        if len(self.snapshots) < 2:
            taken = self.db.snapshot(NAME)
            metric = "l2" if 0 in self.dropped else self.metric
            self.snapshots.append((taken, dict(self.rows), metric))

    @rule(query=QUERIES, k=st.integers(1, 30), condition=FILTERS, exact=st.booleans())
    def search(self, query, k, condition, exact):
        where, matches = condition
        metric = "l2" if 0 in self.dropped else self.metric
        with self.db.reader(NAME) as reader:
            for handle in (self.writer, reader):
                result = handle.search(
                    vector=("v", query), where=where, k=k, recall="exact" if exact else None
                )
                assert_same(found(result), self.rows, query, metric, k, matches)
                for row in result.drop_columns("_distance").to_pylist():
                    model = self.rows[row["id"]]
                    assert row == {**model, "v": [float(x) for x in model["v"]]}

    @rule(
        words=st.lists(st.sampled_from(["reef", "fish", "swim"]), min_size=1, max_size=3),
        k=st.sampled_from([1, 2, 30]),
        condition=FILTERS,
    )
    def search_text(self, words, k, condition):
        """All rows with a word of the query, by descending score; skipping blocks misses none."""
        where, matches = condition
        query = {"text": ("body", " ".join(words)), "where": where, "k": k}
        stems = {"swim": "swimming"} if 3 not in self.dropped else {}
        sought = {stems.get(word, word) for word in words}
        expected = {
            key
            for key, row in self.rows.items()
            if sought & set((row["body"] or "").split()) and matches(row)
        }
        with self.db.reader(NAME) as reader:
            for handle in (self.writer, reader):
                result = handle.search(**query)
                assert result.equals(handle.search(**query, recall="exact"))
                keys, scores = result["id"].to_pylist(), result["_score"].to_pylist()
                assert set(keys) <= expected
                assert len(keys) == len(set(keys)) == min(k, len(expected))
                assert [-score for score in scores] == sorted(-score for score in scores)

    @rule(query=QUERIES, word=st.sampled_from(["reef", "fish"]), condition=FILTERS)
    def search_both(self, query, word, condition):
        """A hybrid search fuses the ranks of the two rankings."""
        where, _ = condition
        one = self.writer.search(vector=("v", query), where=where, k=60, columns=[])
        other = self.writer.search(text=("body", word), where=where, k=60, columns=[])
        scores = {}
        for ranking, weight in ((one, 1.0), (other, 0.5)):
            for rank, key in enumerate(ranking["id"].to_pylist(), 1):
                scores[key] = scores.get(key, 0) + weight / (60 + rank)
        both = self.writer.search(
            vector=("v", query), text=("body", word), where=where, k=60, weights={"text": 0.5}
        )
        ranked = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
        assert both["id"].to_pylist() == [key for key, _ in ranked]

    @rule(query=QUERIES, k=st.integers(1, 5))
    def search_snapshots(self, query, k):
        for taken, rows, metric in self.snapshots:
            with self.db.reader(NAME, snapshot=taken) as reader:
                result = reader.search(vector=("v", query), k=k, columns=[])
                assert_same(found(result), rows, query, metric, k)

    @invariant()
    def nearest_to_one_query(self):
        if not hasattr(self, "metric"):
            return
        metric = "l2" if 0 in self.dropped else self.metric
        for k in (1, 5):
            result = self.writer.search(vector=("v", TIES[0]), k=k, columns=[])
            assert_same(found(result), self.rows, TIES[0], metric, k)

    def teardown(self):
        if hasattr(self, "writer"):
            self.writer.close()
            report = verify(self.db, NAME, deep=True)
            assert not [p for p in report.problems if p.severity != "info"], report.problems


TestSearch = SearchMachine.TestCase
TestSearch.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_filters_agree_with_scans_on_values_of_all_types():
    """A filter index finds exactly the rows that a scan with the same condition finds."""
    rng = np.random.default_rng(3)
    count = 3000
    table = pa.table(
        {
            "id": [f"{i:05}" for i in range(count)],
            "v": pa.FixedSizeListArray.from_arrays(
                pa.array(rng.normal(size=count * 4).astype("f4")), 4
            ),
            "f": pa.array(
                np.where(rng.random(count) < 0.1, np.nan, rng.normal(size=count).round(3)),
                mask=rng.random(count) < 0.1,
            ),
            "i": pa.array(rng.integers(-50_000, 50_000, count), mask=rng.random(count) < 0.1),
            "s": pa.array([f"x{int(n)}" for n in rng.integers(0, 40_000, count)]),
            "b": pa.array(rng.random(count) < 0.5, mask=rng.random(count) < 0.1),
            "d": pa.array(rng.integers(0, 20, count).astype("datetime64[D]")),
        }
    )
    db = reef.Database(MemoryStore())
    columns = ("f", "i", "s", "b", "d")
    db.create(
        NAME,
        table.schema,
        indexes=[reef.vector_index("v"), *(reef.filter_index(c) for c in columns)],
    )
    ingest(db, NAME, table)
    fold(db, NAME)
    build_indexes(db, NAME)
    conditions = [
        *("f > 0.5", "f <= -1", "NOT f > 0.5", "f != 0", "f IS NULL", "f IS NOT NULL"),
        *("i < 0", "i BETWEEN 10 AND 900", "i IN (1, 2, 3)", "NOT i < 40000", "i > 5.5"),
        *("s LIKE 'x12%'", "s = 'x77'", "NOT s LIKE 'x1%'", "s >= 'x5' AND i > 0", "s < 'x2'"),
        *("b = TRUE", "b != TRUE", "b IS NULL", "d >= DATE '1970-01-10'", "d < DATE '1970-01-02'"),
        *("b = TRUE OR f > 1", "NOT (b = TRUE OR f > 1)", "i > 0 OR id < '00100'"),
    ]
    with db.reader(NAME) as reader:
        rows = reader.to_arrow().combine_chunks().to_batches()[0]
        schema = Schema.of(table.schema)
        for where in conditions:
            mask = parse(where, schema).mask(rows)
            expected = set(rows.filter(mask).column("id").to_pylist())
            scanned = reader.to_arrow(columns=["id"], where=where).column("id").to_pylist()
            assert (set(scanned), reader.count(where)) == (expected, len(expected)), where
            query = {"vector": ("v", [0, 0, 0, 0]), "k": count, "columns": [], "where": where}
            assert set(reader.search(**query).column("id").to_pylist()) == expected, where
            plan = reader.search(**query, explain=True)["plan"]
            assert plan == ("exhaustive" if "id <" in where else "indexed"), where
