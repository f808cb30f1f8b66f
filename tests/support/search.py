"""A namespace with search indexes next to a model in plain Python, and brute force over it."""

import numpy as np
import pyarrow as pa

import reef

DIMENSIONS = 4
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("v", pa.list_(pa.float32(), DIMENSIONS)),
        ("tag", pa.string()),
        ("n", pa.int64()),
        ("body", pa.string()),
    ]
)


def indexes(metric="l2", **options):
    """Return the indexes of all columns, of segments of any size, in four lists."""
    return [
        reef.vector_index("v", metric=metric, rows_min=1, lists=4, **options),
        reef.filter_index("tag", rows_min=1),
        reef.filter_index("n", rows_min=1),
        reef.text_index("body", language="english", rows_min=1),
    ]


def distance(vector, query, metric):
    """Return the distance of two vectors; None if there is none."""
    one, other = np.asarray(vector, np.float64), np.asarray(query, np.float64)
    if metric == "l2":
        return float(np.sqrt(((one - other) ** 2).sum()))
    if metric == "dot":
        return float(-(one @ other))
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(1 - one @ other / lengths) if lengths else None


def brute_force(rows, query, metric, k, matches=lambda row: True):
    """Return (key, distance) of the nearest rows, the nearest first, ties by key."""
    found = []
    for key, row in rows.items():
        if row.get("v") is not None and matches(row):
            far = distance(np.float32(row["v"]), np.float32(query), metric)
            if far is not None:
                found.append((far, key))
    return [(key, far) for far, key in sorted(found)[:k]]


def found(table):
    """Return (key, distance) of the rows of a result."""
    keys, far = table.column("id").to_pylist(), table.column("_distance").to_pylist()
    return list(zip(keys, far, strict=True))


def assert_same(result, rows, query, metric, k, matches=lambda row: True):
    """The k nearest rows, at their distances; which of those as far as the last does not matter."""
    everything = brute_force(rows, query, metric, len(rows), matches)
    expected = [(key, round(far, 4)) for key, far in everything]
    rounded = [(key, round(far, 4)) for key, far in result]
    assert [far for _, far in rounded] == [far for _, far in expected[:k]]
    assert len({key for key, _ in rounded}) == len(rounded)
    assert set(rounded) <= set(expected)


def clustered(count, dimensions=32, clusters=50, seed=0):
    """Return vectors in clusters, and queries near some of them."""
    rng = np.random.default_rng(seed)
    centers = 3 * rng.normal(size=(clusters, dimensions))
    vectors = centers[rng.integers(0, clusters, count)] + rng.normal(size=(count, dimensions))
    queries = vectors[rng.choice(count, 40)] + 0.3 * rng.normal(size=(40, dimensions))
    return vectors.astype("f4"), queries.astype("f4")


def hashed_words(count, dimensions=64, seed=1):
    """Return embeddings of texts by hashed words, and queries from other texts of the kind.

    Words have Zipf's distribution, texts have topics.
    """
    rng = np.random.default_rng(seed)
    signs = rng.normal(size=(5000, dimensions))
    weights = 1 / np.arange(1, 5001)
    topics = [rng.permutation(5000) for _ in range(30)]

    def text():
        words = topics[rng.integers(30)][rng.choice(5000, 40, p=weights / weights.sum())]
        return signs[words].sum(axis=0)

    return (
        np.array([text() for _ in range(count)], "f4"),
        np.array([text() for _ in range(40)], "f4"),
    )


def table_of(vectors, numbers):
    """Return rows with these vectors; their keys are their numbers."""
    dimensions = vectors.shape[1]
    return pa.table(
        {
            "id": [f"{number:06}" for number in numbers],
            "v": pa.FixedSizeListArray.from_arrays(pa.array(vectors[numbers].ravel()), dimensions),
            "n": pa.array(np.asarray(numbers) % 100, pa.int64()),
        }
    )


def nearest(vectors, query, metric, k, mask=None):
    """Return the keys of the true neighbours."""
    if metric == "l2":
        far = np.square(vectors - query).sum(axis=1)
    elif metric == "dot":
        far = -(vectors @ query)
    else:
        far = -(vectors @ query) / np.linalg.norm(vectors, axis=1)
    far = far if mask is None else np.where(mask, far, np.inf)
    return {f"{number:06}" for number in np.argsort(far)[:k]}


def recall(reader, vectors, queries, metric, mask=None, **search):
    """Return the share of the ten true neighbours that a search finds."""
    hits = 0
    for query in queries:
        result = reader.search(vector=("v", query), columns=[], **search)
        hits += len(nearest(vectors, query, metric, 10, mask) & set(result["id"].to_pylist()))
    return hits / (10 * len(queries))
