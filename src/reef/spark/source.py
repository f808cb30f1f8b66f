"""The data source `reef`: what Spark calls, and in which order.

    schema()      while the DataFrame is made; pins a moment, and checks all that was asked for
    reader()      before the first task, in another process: goes on from that pin
    partitions()  plans; once for each DataFrame
    read()        in the tasks

Spark sends the source from one process to the next by pickling it, so the pin stays on it. Where
the user gives a schema, Spark does not ask for one, and `reader` takes the pin instead. Spark's
own `pushFilters` gives wrong answers and is not used (a test watches it): ranges, columns and
conditions are options, and `reef.spark.table` makes them pleasant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from reef.engine.reading.projection import Projection
from reef.engine.where import Where, parse
from reef.errors import InvalidInputError, Kind, ReefError
from reef.formats.schema import Schema
from reef.spark.counts import Counts, counts_of
from reef.spark.options import ReadOptions
from reef.spark.pin import Pin, take_pin
from reef.spark.plainly import plainly
from reef.spark.scan import Reading, ReefReader
from reef.spark.schema import arrow_schema, check_same, spark_schema

if TYPE_CHECKING:
    from reef.spark.sink import ReefWriter

__all__ = ["ReefSource", "register"]


class ReefSource(DataSource):
    """A namespace as a table of Spark."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._pin: Pin | None = None
        self._asked: Counts = {}

    @classmethod
    def name(cls) -> str:
        return "reef"

    @plainly
    def schema(self) -> StructType:
        """Return the columns of the moment that is read."""
        wanted = ReadOptions.of(self.options)
        with self._pinned(wanted) as pin:
            schema = pin.manifest.schema
            _projection(schema, wanted, wanted.columns)
            self._asked = counts_of(pin.store, "planning.")
            return spark_schema(schema, wanted.columns)

    @plainly
    def reader(self, schema: StructType) -> ReefReader:
        """Return what plans and reads; `schema` may be one that the user gave."""
        wanted = ReadOptions.of(self.options)
        with self._pinned(wanted) as pin:
            ours = pin.manifest.schema
            if not schema.names:  # rows without columns cannot be counted by Spark
                raise InvalidInputError("the given schema has no columns", kind=Kind.INVALID_OPTION)
            check_same(schema, spark_schema(ours, schema.names))
            projection = _projection(ours, wanted, schema.names)
        keys = wanted.range
        if projection.where is not None:
            keys = keys.both(projection.where.key_range())
        return ReefReader(
            Reading(
                pin,
                projection,
                keys,
                arrow_schema(schema),
                int(pin.store.runtime.wall_s() * 1000),
                wanted.split_bytes,
                wanted.meter,
                self._asked,
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> "ReefWriter":
        """Return what stages and commits a write; the job has begun then."""
        from reef.spark.sink import ReefWriter  # tasks that read need no jobs

        return ReefWriter(self.options, schema, overwrite)

    @contextmanager
    def _pinned(self, wanted: ReadOptions) -> Iterator[Pin]:
        """Have the pin; a read that is refused after all gives its lease back."""
        if self._pin is None:
            store = wanted.place.open()
            heads, moment = wanted.wanted(store)
            self._pin = take_pin(store, heads, moment, wanted.lease_s)
        try:
            yield self._pin
        except ReefError:
            self._pin.lease.release()
            raise


def register(spark: Any) -> None:
    """Make `format("reef")` known to a session, where Spark does not find it by itself.

    Also in a thread: to write, Spark looks for Python sources in the session that is active in
    the thread, and only the thread that has made the session has one.
    """
    spark.dataSource.register(ReefSource)
    spark.createDataFrame([], "id string")  # makes the session the active one


def _projection(schema: Schema, wanted: ReadOptions, columns: Any) -> Projection:
    """Return columns and conditions, checked; keys are a condition like any other."""
    projection = Projection.of(schema, columns, wanted.where)
    if wanted.keys is None:
        return projection
    keys = parse([(schema.key.name, "in", list(wanted.keys))], schema)
    known = projection.where.conditions if projection.where is not None else ()
    return Projection(projection.columns, Where((*known, *keys.conditions)), projection.numbers)
