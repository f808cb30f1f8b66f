"""Differences between two states as a DataFrame, compared by Spark's tasks.

    reef.spark.diff(spark, url, "orders", "experiment")
    reef.spark.diff(spark, url, "orders", "orders", a_at=12)

    plan   pin both states with leases that tasks renew; cut the keys into ranges by the segments
           that only one of them has
    tasks  one per range: the keys of these segments and of the log, looked up on both sides
    rows   op (insert, update, delete: from a to b), key, a, b; `a` and `b` are rows as structs, or
           the bytes of a plain namespace, and null where there is no row

The pins are taken when the DataFrame is made, and held as those of a read (`reef.spark.read_plan`).
To merge on Spark: `db.merge(child, parent, executor=reef.spark.executor(spark))`.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.cloudpickle import dumps
from pyspark.sql import types as st

from reef.engine.history.as_of import ReadTarget, read_target
from reef.engine.history.diff import DifferingRows, Side, SideRef, differing
from reef.formats.schema import Schema
from reef.jobs.branches import split
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.spark.options import TableLocation
from reef.spark.read_plan import take_pin
from reef.spark.session import check_running
from reef.spark.spark_executor import executor
from reef.spark.types import arrow_schema, spark_schema, to_spark
from reef.stores import Store
from reef.stores.leases import SharedLease
from reef.types import KeyRange

LEASE_S = 3600.0
Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class DiffTask:
    """A key range to compare. Picklable."""

    a: SideRef
    b: SideRef
    leases: tuple[SharedLease, SharedLease]
    bounds: KeyRange


def diff(
    spark: Any,
    url: str,
    a: str,
    b: str,
    *,
    a_at: Any = None,
    b_at: Any = None,
    lease_s: float = LEASE_S,
    **store_options: Any,
) -> Any:
    """Return the rows that differ between two namespaces, or points in time, as a DataFrame.

    Columns: `op`, `key`, `a`, `b`, as `db.diff` yields them. `a_at` and `b_at` are a generation, a
    datetime, ISO 8601 text or `{"lsn": 12}`; by default the newest state is read. Tasks renew the
    pins; without a task for `lease_s` seconds they expire, and a later action is an error of the
    kind `collected`.
    """
    check_running(spark)
    store = TableLocation(str(url), Namespace(a), store_options).open()
    (ref_a, lease_a), (ref_b, lease_b) = (
        _pin_point(store, *one, lease_s) for one in ((a, a_at), (b, b_at))
    )
    side_a, side_b = ref_a.open(), ref_b.open()
    ranges = split(side_a, side_b, executor(spark))
    tasks = [DiffTask(ref_a, ref_b, (lease_a, lease_b), bounds) for bounds in ranges]
    packed = [dumps(task) for task in tasks]  # type: ignore[no-untyped-call]
    given = spark.createDataFrame(list(enumerate(packed)), "place int, task binary")
    schema = diff_schema(side_a.schema, side_b.schema)
    rows = given.repartitionById(len(packed), "place")
    return rows.mapInArrow(_comparing(schema), schema)


def _pin_point(store: Store, name: str, at: Any, lease_s: float) -> tuple[SideRef, SharedLease]:
    target = ReadTarget() if at is None else read_target(at)
    pin = take_pin(store, locate(store, name), target, lease_s)
    now_ms = int(store.runtime.wall_s() * 1000)
    generation = pin.manifest.generation
    return SideRef(store, pin.namespace, generation, pin.last_lsn, now_ms), pin.lease


def diff_schema(a: Schema, b: Schema) -> st.StructType:
    """Return the columns of differences."""
    return st.StructType(
        [
            st.StructField("op", st.StringType(), False),
            st.StructField("key", spark_schema(b)[b.key.name].dataType, False),
            st.StructField("a", _row_type(a), True),
            st.StructField("b", _row_type(b), True),
        ]
    )


def _row_type(schema: Schema) -> st.DataType:
    return st.BinaryType() if schema.is_plain else spark_schema(schema)


# --- in tasks ---------------------------------------------------------------------------


def _comparing(schema: st.StructType) -> Callable[[Batches], Batches]:
    target = arrow_schema(schema)

    def run(batches: Batches) -> Batches:
        for batch in batches:
            for packed in batch.column(1).to_pylist():
                yield from compare(pickle.loads(packed), target)

    return run


def compare(task: DiffTask, target: pa.Schema) -> Batches:
    """Yield the differences in a task's range."""
    a, b = task.a.open(), task.b.open()
    for rows in differing(a, b, task.bounds):
        for lease in task.leases:
            lease.check()
        yield to_spark(_as_batch(rows, a, b), target)


def _as_batch(rows: DifferingRows, a: Side, b: Side) -> pa.RecordBatch:
    in_a, in_b = (table.column("_found").combine_chunks() for table in (rows.a, rows.b))
    ops = pc.if_else(in_a, pc.if_else(in_b, "update", "delete"), "insert")
    key = rows.keys.cast(b.schema.key.arrow)
    return pa.RecordBatch.from_arrays(
        [ops, key, _rows(rows.keys, rows.a, a), _rows(rows.keys, rows.b, b)],
        names=["op", "key", "a", "b"],
    )


def _rows(keys: pa.Array, table: pa.Table, side: Side) -> pa.Array:
    """Return the rows of one side: bytes, or structs with the key; null where there is none."""
    schema, found = side.schema, table.column("_found").combine_chunks()
    columns = {
        field.name: table.column(field.name).combine_chunks().cast(field.arrow)
        for field in schema.fields
    }
    if schema.is_plain:
        return columns[schema.fields[0].name]
    columns = {schema.key.name: keys.cast(schema.key.arrow), **columns}
    batch = to_spark(pa.RecordBatch.from_pydict(columns), arrow_schema(spark_schema(schema)))
    return pa.StructArray.from_arrays(
        batch.columns, fields=list(batch.schema), mask=pc.invert(found)
    )
