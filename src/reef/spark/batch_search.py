"""Many searches on Spark: each row of a DataFrame is a query.

    queries = spark.createDataFrame([("q1", [0.1, 0.9])], "query string, near array<float>")
    reef.spark.search(queries, url, "docs", vector=("embedding", "near"), k=5, columns=["title"])

All queries see one snapshot, which the driver takes and which expires by itself. Each task opens it
once, and keeps the tails and lists that it has read in memory from query to query.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as st

from reef.engine.search.request import DISTANCE, SCORE
from reef.errors import ErrorKind, InvalidInputError
from reef.paths import Namespace
from reef.spark.options import TableLocation
from reef.spark.session import check_dataframe, error_boundary, in_error_boundary
from reef.spark.types import arrow_schema, spark_schema, to_spark

RANK = "_rank"
SNAPSHOT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SearchTask:
    """The facts that a task needs: small and picklable."""

    location: TableLocation
    snapshot: str
    vector: tuple[str, str] | None
    text: tuple[str, str] | None
    arguments: Mapping[str, Any]
    results: tuple[str, ...]
    """The columns of the result behind those of the query and the rank."""
    schema: str
    """Schema of the rows that it yields, as Spark's JSON."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield for each query its columns, a rank from 1 on, and the columns of the result."""
        return in_error_boundary(self._rows(batches))

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        target = arrow_schema(st.StructType.fromJson(_json(self.schema)))
        name = self.location.namespace.name
        with self.location.database() as db, db.reader(name, snapshot=self.snapshot) as reader:
            for batch in batches:
                found = [self._search(reader, batch, row) for row in range(len(batch))]
                counts = [len(table) for table in found]
                if not sum(counts):
                    continue
                queries = batch.take(pa.array(np.repeat(np.arange(len(batch)), counts)))
                ranks = np.concatenate([np.arange(1, count + 1) for count in counts])
                tables = pa.concat_tables([table for table in found if len(table)])
                columns = tables.combine_chunks().to_batches()[0].columns
                arrays = [*queries.columns, pa.array(ranks.astype(np.int32)), *columns]
                names = [*queries.schema.names, RANK, *self.results]
                yield to_spark(pa.record_batch(arrays, names), target)

    def _search(self, reader: Any, batch: pa.RecordBatch, row: int) -> pa.Table:
        queries = {}
        for kind, pair in (("vector", self.vector), ("text", self.text)):
            if pair is not None:
                queries[kind] = (pair[0], batch.column(pair[1])[row].as_py())
        return reader.search(**queries, **self.arguments)


def _json(text: str) -> Any:
    from json import loads

    return loads(text)


@error_boundary
def search(
    queries: Any,
    url: str,
    namespace: str,
    *,
    vector: tuple[str, str] | None = None,
    text: tuple[str, str] | None = None,
    where: str | None = None,
    k: int = 10,
    columns: Sequence[str] | None = None,
    recall: str | None = None,
    probes: int | None = None,
    weights: Mapping[str, float] | None = None,
    snapshot_s: float = SNAPSHOT_S,
    **store_options: Any,
) -> Any:
    """Return the results of many searches as a DataFrame, up to `k` rows for each query.

    `vector` and `text` are (column of the table, column of `queries`); the other arguments are
    those of `Reader.search`. Each row has the columns of its query, `_rank` from 1 on, the key and
    `columns` of the row that was found, and `_distance` or `_score`. All see one snapshot, taken
    now and kept for `snapshot_s` seconds: the DataFrame has to be consumed within that time.
    """
    check_dataframe(queries)
    words = {name: _word(value) for name, value in store_options.items()}
    location = TableLocation(str(url), Namespace(namespace), words)
    arguments = {
        "where": where,
        "k": k,
        "columns": None if columns is None else list(columns),
        "recall": recall,
        "probes": probes,
        "weights": None if weights is None else dict(weights),
    }
    _check_queries(queries, vector, text)
    with location.database() as db:
        taken = db.snapshot(namespace, ttl_s=snapshot_s)
        with db.reader(namespace, snapshot=taken) as reader:
            schema = reader._view().manifest.schema
    asked = schema.arrow().names if columns is None else columns
    names = list(dict.fromkeys([schema.key.name, *asked]))
    value = DISTANCE if text is None else SCORE
    results = spark_schema(schema, names).add(value, st.DoubleType(), False)
    clashing = set(queries.columns) & {RANK, *results.names}
    if clashing:
        raise InvalidInputError(
            f"column {min(clashing)} is in the queries and in the results",
            kind=ErrorKind.INVALID_OPTION,
            hint="Rename it with withColumnRenamed",
        )
    rank = st.StructField(RANK, st.IntegerType(), False)
    target = st.StructType([*queries.schema.fields, rank, *results.fields])
    task = SearchTask(
        location, taken.id, vector, text, arguments, tuple(results.names), target.json()
    )
    return queries.mapInArrow(task.run, target)


def _check_queries(queries: Any, vector: Any, text: Any) -> None:
    """Raise unless the queries have the columns that are named."""
    if vector is None and text is None:
        raise InvalidInputError(
            "search() needs vector=(column, query column), text=(column, query column) or both",
            kind=ErrorKind.INVALID_OPTION,
        )
    for kind, pair in (("vector", vector), ("text", text)):
        if pair is not None and (len(pair) != 2 or pair[1] not in queries.columns):
            raise InvalidInputError(
                f"{kind}={pair!r} is not (column of the table, column of the queries)",
                kind=ErrorKind.INVALID_OPTION,
                hint=f"The queries have {', '.join(queries.columns)}",
            )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
