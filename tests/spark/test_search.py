"""Search on Spark: many queries, and indexes that executors build."""

import pyarrow as pa
import pytest

import reef
import reef.spark
from reef.errors import InvalidInputError
from reef.jobs import build_indexes
from tests.support.search import clustered, table_of

VECTORS, QUERIES = clustered(3000, dimensions=8)


def test_queries_of_a_frame_and_indexes_built_by_tasks(spark, db, url):
    """A bulk load and a job on executors build indexes; each query has its own ranks."""
    db.create(
        "docs",
        table_of(VECTORS, range(1)).schema,
        indexes=[reef.vector_index("v", rows_min=100), reef.filter_index("n", rows_min=100)],
    )
    rows = table_of(VECTORS, range(3000)).to_pylist()
    frame = spark.createDataFrame(rows, "id string, v array<float>, n bigint")
    reef.spark.bulk_load(frame, url, "docs")
    reef.jobs.fold(db, "docs")
    build_indexes(db, "docs", executor=reef.spark.executor(spark))
    with db.reader("docs") as reader:
        plan = reader.search(vector=("v", QUERIES[0]), where="n < 50", explain=True)
        assert (plan["plan"], plan["segments_exhaustive"]) == ("indexed", 0)
        queries = spark.createDataFrame(
            [(f"q{number}", QUERIES[number].tolist()) for number in range(6)],
            "query string, near array<float>",
        )
        found = reef.spark.search(
            queries, url, "docs", vector=("v", "near"), where="n < 50", k=3, columns=["n"]
        )
        assert found.columns == ["query", "near", "_rank", "id", "n", "_distance"]
        by_query = {}
        for row in found.orderBy("query", "_rank").collect():
            by_query.setdefault(row["query"], []).append((row["id"], row["n"]))
        for number in range(6):
            expected = reader.search(vector=("v", QUERIES[number]), where="n < 50", k=3)
            pairs = zip(expected["id"].to_pylist(), expected["n"].to_pylist(), strict=True)
            assert by_query[f"q{number}"] == list(pairs)


def test_wrong_queries(spark, db, url):
    """Columns that do not exist, or exist twice, are reported before a task runs."""
    db.create("docs", pa.schema([("id", pa.string()), ("body", pa.string())]))
    queries = spark.createDataFrame([("reef",)], "id string")
    with pytest.raises(InvalidInputError, match="column of the queries"):
        reef.spark.search(queries, url, "docs", text=("body", "words"))
    with pytest.raises(InvalidInputError, match="column id is in the queries and in the results"):
        reef.spark.search(queries, url, "docs", text=("body", "id"))
    with pytest.raises(InvalidInputError, match="needs vector"):
        reef.spark.search(queries, url, "docs")
