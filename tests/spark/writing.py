"""A write as Spark's processes do it, without Spark; and the bucket as tests of writes read it."""

import pickle

import pyarrow as pa
from pyspark.sql import types as st

from reef.engine.handles.database import Database
from reef.engine.log.log import Log
from reef.jobs import sweep
from reef.manifest.head import HeadFinder, newest_incarnation
from reef.manifest.roots import find_generation_leases
from reef.paths import Namespace
from reef.spark import ReefSource
from reef.spark.types import arrow_schema
from reef.stores import Wrapper

TABLE = st.StructType(
    [
        st.StructField("id", st.StringType()),
        st.StructField("n", st.LongType()),
        st.StructField("t", st.StringType()),
    ]
)


def struct(**types):
    """Return a schema of Spark's."""
    return st.StructType([st.StructField(name, typed) for name, typed in types.items()])


class Write:
    """One write: `writer()` in one process, `write()` in tasks, `commit()` in another."""

    def __init__(self, url, namespace="t", schema=TABLE, *, overwrite=False, **options):
        given = {"path": str(url), "namespace": namespace}
        given |= {name.replace("__", ".").lower(): str(v) for name, v in options.items()}
        source = pickle.loads(pickle.dumps(ReefSource(given)))
        self.schema = schema
        self._pickled = pickle.dumps(source.writer(schema, overwrite))

    @property
    def writer(self):
        """The writer, as each process gets it."""
        return pickle.loads(self._pickled)

    def task(self, rows, batch_rows=100):
        """Run a task; return its message as the driver gets it."""
        table = pa.Table.from_pylist(rows, schema=arrow_schema(self.schema))
        message = self.writer.write(iter(table.to_batches(max_chunksize=batch_rows)))
        return pickle.loads(pickle.dumps(message))

    def run(self, *partitions):
        """Run all tasks and commit; abort if that raises, as Spark does."""
        messages = []
        try:
            for rows in partitions:
                messages.append(self.task(rows))
            self.writer.commit(messages)
        except BaseException:
            self.writer.abort(messages)
            raise
        return messages


def rows_of(db, namespace="t"):
    """Return all rows as a reader sees them, without their key."""
    found = {}
    for key, row in db.reader(namespace).scan():
        found[key] = {name: value for name, value in row.items() if name != "id"}
    return found


def numbers_of(db, namespace="t"):
    """Return the column n of all rows."""
    return {key: row["n"] for key, row in db.reader(namespace).scan()}


def kinds_of(db, namespace="t"):
    """Return the content of the log."""
    log = Log(db.store, newest_incarnation(db.store, namespace))
    return [str(log.read(slot.lsn).header.kind) for slot in log.filled(1)]


def leases_of(db, namespace="t"):
    """Return the leases there are."""
    names = newest_incarnation(db.store, namespace)
    return list(find_generation_leases(db.store, names, db.store.now(), 0.0))


def segments_of(db, namespace="t"):
    """Return the ids of the segments in the bucket, named by anything or not."""
    prefix = Namespace(namespace).segments
    return {i.key.removeprefix(prefix).removesuffix(".seg") for i in db.store.list(prefix)}


class Later(Wrapper):
    """A bucket some days from now, by its own clock, which is what ages are counted by."""

    def __init__(self, inner, days):
        super().__init__(inner)
        self._days = days

    def now(self):
        """Report the time."""
        return self.inner.now() + self._days * 24 * 3600


def sweep_everything(db, namespace="t"):
    """Sweep again and again, days apart; return the segments that are left."""
    for days in (2, 4, 6):
        sweep(Database(Later(db.store, days)), namespace, apply=True, retain_generations_s=0)
    return segments_of(db, namespace)


def named_segments(db, namespace="t"):
    """Return the ids of the segments that the manifest and ingests in the log name."""
    names = Namespace(namespace)
    head = HeadFinder(db.store, names).find().manifest
    view = db.reader(namespace)._tail.view()
    ingested = view.memtable.ingested
    return {s.id for s in head.segments} | {s.id for s in ingested}
