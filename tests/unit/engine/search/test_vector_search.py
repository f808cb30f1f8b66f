"""Vector search: recall by kind of data and number of segments, rounds of requests, filters."""

import re

import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.errors import InvalidInputError
from reef.jobs import build_indexes, compact, fold, ingest
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from tests.support.search import clustered, hashed_words, recall, table_of

NAME = "docs"
ROWS = 8000


class SlowStore(MemoryStore):
    """Notes when each read begins and ends."""

    def __init__(self):
        super().__init__()
        self.reads = []
        self.delay_s = 0.0

    def get_tagged(self, key):
        return self._timed(key, super().get_tagged, key)

    def get_range(self, key, start, end):
        return self._timed(key, super().get_range, key, start, end)

    def get_ranges(self, key, ranges):
        """Read all ranges at once, as clients of buckets do; each of them is a request."""
        begun = REAL.monotonic_s()
        REAL.sleep(self.delay_s)
        bodies = [MemoryStore.get_range(self, key, *span) for span in ranges]
        ended = REAL.monotonic_s()
        self.reads += [(begun, ended, key, len(body)) for body in bodies]
        return bodies

    def _timed(self, key, call, *args):
        begun = REAL.monotonic_s()
        REAL.sleep(self.delay_s)
        result = call(*args)
        size = len(result) if isinstance(result, bytes) else len(result.body)
        self.reads.append((begun, REAL.monotonic_s(), key, size))
        return result

    def rounds(self):
        """Return the reads in rounds: each began before any of its round had ended."""
        rounds = []
        for read in sorted(self.reads):
            if rounds and read[0] < min(other[1] for other in rounds[-1]):
                rounds[-1].append(read)
            else:
                rounds.append([read])
        return rounds


def make(vectors, segments, metric="l2", store=None):
    """Return a database with the vectors in so many indexed segments."""
    db = reef.Database(store or MemoryStore())
    indexes = [reef.vector_index("v", metric=metric, rows_min=100), reef.filter_index("n")]
    table = table_of(vectors, range(len(vectors)))
    db.create(NAME, table.schema, indexes=indexes)
    shuffled = np.random.default_rng(5).permutation(len(vectors))
    for part in np.array_split(shuffled, segments):
        ingest(db, NAME, table_of(vectors, np.sort(part)))
    fold(db, NAME)
    build_indexes(db, NAME)
    return db


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("data", [clustered, hashed_words])
def test_recall_at_default_settings(data, metric):
    """At least 95 of 100 true neighbours are found, for clusters and for texts by hashed words."""
    vectors, queries = data(ROWS)
    with make(vectors, 1, metric).reader(NAME) as reader:
        assert recall(reader, vectors, queries, metric) >= 0.95
        plan = reader.search(vector=("v", queries[0]), explain=True)
        assert (plan["plan"], plan["segments_indexed"]) == ("indexed", 1)
        assert plan["candidates"] < ROWS


def test_recall_and_bytes_do_not_depend_on_the_number_of_segments():
    """With shared centroids 4 and 16 segments have the recall of one, and read as many bytes."""
    vectors, queries = clustered(ROWS)
    found = {}
    for segments in (1, 4, 16):
        with make(vectors, segments).reader(NAME) as reader:
            plans = [reader.search(vector=("v", q), probes=8, explain=True) for q in queries]
            assert plans[0]["segments_indexed"] == segments
            found[segments] = sum(plan["candidates"] for plan in plans)
            assert recall(reader, vectors, queries, "l2") >= 0.95
    assert found[16] <= 1.1 * found[1]
    assert found[4] <= 1.1 * found[1]


@pytest.mark.parametrize("where", ["n = 7", "n < 10", "n >= 50", "n != 3"])
def test_recall_with_filters(where):
    """Filters that leave 1 % to 99 % of the rows keep the recall."""
    vectors, queries = clustered(ROWS)
    numbers = np.arange(ROWS) % 100
    mask = {"n = 7": numbers == 7, "n < 10": numbers < 10, "n >= 50": numbers >= 50}.get(
        where, numbers != 3
    )
    with make(vectors, 4).reader(NAME) as reader:
        assert recall(reader, vectors, queries, "l2", mask, where=where) >= 0.95


def test_a_cold_query_takes_three_rounds_of_requests():
    """Tails and centroids, lists, rows; two rounds once the tails are cached; 8 reads of lists.

    One more if a newer segment's filter has the key of a result, which is wrong now and then.
    """
    vectors, queries = clustered(ROWS)
    store = SlowStore()
    db = make(vectors, 4, store=store)
    cold, warm = [], []
    for number, query in enumerate(queries[:5]):
        store.delay_s = 0.0
        with db.reader(NAME) as reader:
            store.delay_s = 0.15
            store.reads.clear()
            reader.search(vector=("v", query), columns=[])
            rounds = store.rounds()
            cold.append(len(rounds))
            assert len(rounds[0]) == 5  # four tails, one set of centroids
            lists = [key for _, _, key, _ in rounds[1]]
            assert max(lists.count(key) for key in lists) <= 8
            store.reads.clear()
            reader.search(vector=("v", queries[20 + number]), columns=[])
            warm.append(len(store.rounds()))
    assert (sorted(cold)[2], sorted(warm)[2]) == (3, 2)


@pytest.mark.parametrize("segments", [4, 16])
@pytest.mark.parametrize("where", ["n < 50", "n = 7", "n >= 5 AND price < 900"])
def test_a_condition_costs_one_round_more_for_any_number_of_segments(segments, where):
    """Tails and centroids, filters of all segments and columns, lists, rows."""
    vectors, queries = clustered(ROWS)
    table = table_of(vectors, range(ROWS))
    table = table.append_column("price", pa.array(np.arange(ROWS) % 1500, pa.int64()))
    store, shuffled = SlowStore(), np.random.default_rng(5).permutation(ROWS)
    db = reef.Database(store)
    indexes = [reef.vector_index("v", rows_min=100)]
    indexes += [reef.filter_index(column, rows_min=100) for column in ("n", "price")]
    db.create(NAME, table.schema, indexes=indexes)
    for part in np.array_split(shuffled, segments):
        ingest(db, NAME, table.take(np.sort(part)))
    fold(db, NAME)
    build_indexes(db, NAME)
    rounds = []
    for query in queries[:3]:
        store.delay_s = 0.0
        with db.reader(NAME) as reader:
            store.delay_s = 0.15
            store.reads.clear()
            reader.search(vector=("v", query), where=where, columns=[])
            rounds.append(len(store.rounds()))
    assert sorted(rounds)[1] <= 4


def test_a_row_is_found_by_the_next_query_and_a_deleted_one_never():
    """Memory, overwrites, patches, deletes and range deletes count at once, above any index."""
    vectors, _ = clustered(2000)
    db = make(vectors, 2)
    with db.writer(NAME, background=False) as writer:
        query = vectors[10].tolist()

        def first():
            return writer.search(vector=("v", query), k=1)["id"].to_pylist()

        assert first() == ["000010"]
        writer.delete("000010")
        assert first() != ["000010"]
        writer.put("new", {"v": query, "n": 1})
        assert first() == ["new"]
        writer.put("new", {"v": [9.0] * 32, "n": 1})
        assert first() != ["new"]
        writer.patch([{"id": "000500", "v": query}])
        assert first() == ["000500"]
        writer.delete_range("000500", "000501")
        assert first() != ["000500"]
        writer.put("soon", {"v": query, "n": 1}, ttl_s=0.001)
        REAL.sleep(0.05)
        assert first() != ["soon"]


def test_overwritten_rows_do_not_crowd_out_current_ones():
    """Candidates that were replaced give way to the next best, as many as it takes."""
    vectors, queries = clustered(3000)
    db = make(vectors, 1)
    with db.writer(NAME, background=False) as writer:
        order = np.argsort(np.square(vectors - queries[0]).sum(axis=1))
        for number in order[:400]:
            writer.put(f"{number:06}", {"v": None, "n": 0})
        expected = [f"{number:06}" for number in order[400:410]]
        result = writer.search(vector=("v", queries[0]), columns=[])
        assert len(set(expected) & set(result["id"].to_pylist())) >= 9


def test_compaction_keeps_the_indexes_and_joins_nothing():
    """The outputs of a compaction have indexes; searches stay on them."""
    vectors, queries = clustered(4000)
    db = make(vectors, 4)
    compact(db, NAME, full=True)
    with db.reader(NAME) as reader:
        plan = reader.search(vector=("v", queries[0]), explain=True)
        assert plan["segments_exhaustive"] == 0
        assert plan["segments_indexed"] >= 1
        assert recall(reader, vectors, queries, "l2") >= 0.95


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "needs vector"),
        ({"vector": ("v", [1.0])}, "expected 32 values, found 1"),
        ({"vector": ("v", [float("nan")] * 32)}, "NaN"),
        ({"vector": ("v", "abc")}, "not numbers"),
        ({"vector": ("n", [1.0])}, "no column of vectors named 'n'"),
        ({"vector": ("v", [0.0] * 32), "k": 0}, "k=0"),
        ({"vector": ("v", [0.0] * 32), "k": True}, "k=True"),
        ({"vector": ("v", [0.0] * 32), "recall": 0.9}, "recall=0.9"),
        ({"vector": ("v", [0.0] * 32), "columns": ["_distance"]}, "_distance"),
        ({"vector": ("v", [0.0] * 32), "columns": "n"}, "columns='n'"),
        ({"vector": ("v", [0.0] * 32), "weights": {"text": 1}}, "weights="),
        ({"text": ("v", "reef")}, "no column of text named 'v'"),
        ({"text": ("v", b"reef")}, "is not (column, query)"),
        ({"text": ("v", "reef"), "probes": 3}, "probes="),
    ],
)
def test_wrong_arguments(arguments, problem):
    """The error names the argument, the expected and the actual value."""
    vectors, _ = clustered(10)
    db = reef.Database(MemoryStore())
    db.create(NAME, table_of(vectors, range(10)).schema)
    with db.reader(NAME) as reader, pytest.raises(InvalidInputError, match=re.escape(problem)):
        reader.search(**arguments)


@pytest.mark.parametrize(
    ("make_index", "problem"),
    [
        (lambda: reef.vector_index("n"), "needs vectors"),
        (lambda: reef.vector_index("v", metric="hamming"), "metric='hamming'"),
        (lambda: reef.vector_index("v", lists=0), "lists=0"),
        (lambda: reef.filter_index("v"), "cannot compare"),
        (lambda: reef.filter_index("id"), "is the key"),
        (lambda: reef.filter_index("x"), "no column 'x'"),
        (lambda: reef.filter_index(5), "5 is not the name"),
        (lambda: reef.text_index("n"), "needs string"),
        (lambda: reef.text_index("n", language="latin"), "language: expected one of"),
        (lambda: "v", "'v' is not an index"),
    ],
)
def test_wrong_indexes(make_index, problem):
    """A definition is checked against the schema before anything is created."""
    db = reef.Database(MemoryStore())
    schema = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), 2)), ("n", pa.int64())])
    with pytest.raises(InvalidInputError, match=re.escape(problem)):
        db.create(NAME, schema, indexes=[make_index()])
    assert db.namespaces() == []


def small(value_type, rows, metric="l2"):
    """Return a database with an indexed segment for each list of vectors of two components."""
    schema = pa.schema([("id", pa.string()), ("v", pa.list_(value_type, 2)), ("n", pa.int64())])
    db = reef.Database(MemoryStore())
    index = reef.vector_index("v", metric=metric, rows_min=1, lists=4, probes=4)
    db.create(NAME, schema, indexes=[index, reef.filter_index("n", rows_min=1)])
    for letter, vectors in zip("abc", rows, strict=False):
        listed = [{"id": f"{letter}{n:02}", "v": v, "n": n} for n, v in enumerate(vectors)]
        ingest(db, NAME, pa.Table.from_pylist(listed, schema))
        fold(db, NAME)
        build_indexes(db, NAME)
    return db


def test_a_segment_without_any_vector_has_no_result():
    """With a condition, which its filter index serves, as without one."""
    db = small(pa.float32(), [[[float(n), 1.0] for n in range(50)], [None] * 50])
    with db.reader(NAME) as reader:
        for where in (None, "n < 30"):
            result = reader.search(vector=("v", [1, 1]), k=3, where=where, columns=[])
            assert result["id"].to_pylist() == ["a01", "a00", "a02"]


@pytest.mark.parametrize("recall", [None, "exact"])
def test_distances_of_float64_vectors_are_computed_in_float64(recall):
    """Rows that float32 cannot distinguish are ranked by their stored values."""
    db = small(pa.float64(), [[[1e8 + 2, 0.0], [1e8 + 1, 0.0]]])
    with db.reader(NAME) as reader:
        result = reader.search(vector=("v", [1e8, 0]), k=2, columns=[], recall=recall)
    assert result.to_pylist() == [{"id": "a01", "_distance": 1.0}, {"id": "a00", "_distance": 2.0}]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize(
    ("value_type", "scale"),
    [(pa.float32(), 1e37), (pa.float32(), 1e-30), (pa.float64(), 1e150), (pa.float64(), 1e-200)],
)
def test_very_large_and_small_vectors_are_searched_without_overflow(value_type, scale, metric):
    """An index ranks them, and their distances are finite, equal those of `recall="exact"`."""
    vectors = [[scale * (n + 1), scale * (20 - n)] for n in range(20)]
    db = small(value_type, [vectors], metric)
    with db.reader(NAME) as reader:
        query = {"vector": ("v", vectors[3]), "k": 20}
        assert reader.search(**query, explain=True)["plan"] == "indexed"
        result = reader.search(**query)
        assert result.equals(reader.search(**query, recall="exact"))
        far = result["_distance"].to_pylist()
        assert len(far) == 20
        if metric == "l2":
            assert result["id"].to_pylist()[0] == "a03"
            assert far[0] == 0
            assert scale < 1e-100 or far[1] == pytest.approx(scale * 2**0.5)
