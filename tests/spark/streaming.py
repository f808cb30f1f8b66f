"""Micro-batches as Spark's processes commit them, without Spark; and input for real queries."""

import json
import os
import pickle
from pathlib import Path

import pyarrow as pa

from reef.spark import ReefSource, stream_sink
from reef.spark.types import arrow_schema
from tests.spark.writing import TABLE

CHECKPOINT = "/checkpoints/q1"
FIRST_FILE_S = 1_700_000_000


class Query:
    """A query with a checkpoint: `write()` in tasks, `commit()` and `abort()` in other processes.

    Every process gets its own writer, from the options alone.
    """

    def __init__(self, url, namespace="t", schema=TABLE, *, query="q1", overwrite=False, **options):
        given = {"path": str(url), "namespace": namespace, "checkpointLocation": CHECKPOINT}
        given |= {name.replace("__", "."): str(value) for name, value in options.items()}
        self.options = {name.lower(): value for name, value in given.items()}
        self.schema, self.query, self.overwrite = schema, query, overwrite
        self.run_id = "run 1"

    @property
    def writer(self):
        """A writer of the driver, as Spark creates one for each micro-batch and each commit."""
        source = pickle.loads(pickle.dumps(ReefSource(self.options)))
        return source.streamWriter(self.schema, self.overwrite)

    def task(self, batch_id, rows, partition=0, attempt=0, writer=None):
        """Run a task; return its message as the driver gets it."""
        task = stream_sink.StreamTask(self.query, self.run_id, str(batch_id), partition, attempt)
        table = pa.Table.from_pylist(rows, schema=arrow_schema(self.schema))
        writer = pickle.loads(pickle.dumps(writer or self.writer))
        real = stream_sink.StreamTask.current
        stream_sink.StreamTask.current = lambda: task
        try:
            message = writer.write(iter(table.to_batches(max_chunksize=100)))
        finally:
            stream_sink.StreamTask.current = real
        return pickle.loads(pickle.dumps(message))

    def run(self, batch_id, *partitions):
        """Run all tasks and commit; abort if that raises, as Spark does."""
        messages, writer = [None] * len(partitions), self.writer
        try:
            for number, rows in enumerate(partitions):
                messages[number] = self.task(batch_id, rows, number, writer=writer)
            self.writer.commit(messages, batch_id)
        except BaseException:
            self.writer.abort(messages, batch_id)
            raise
        return messages


def numbered(*numbers, **more):
    """Return rows with these numbers."""
    return [{"id": f"k{n:04}", "n": n, "t": "x", **more} for n in numbers]


def write_files(folder, files, key=lambda n: f"k{n:05}"):
    """Write JSON files, each of which will be a micro-batch; return the rows of all, by key."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for number, numbers in enumerate(files):
        lines = [{"id": key(n), "n": n, "batch": number} for n in numbers]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path = folder / f"{number:05}.json"
        path.write_text(text)
        os.utime(path, (FIRST_FILE_S + number,) * 2)  # Spark reads the oldest first
        rows |= {line["id"]: line for line in lines}
    return rows


def read_files(spark, folder, files_at_once=1):
    """Return a stream of such files, in the order of their names."""
    source = spark.readStream.schema("id string, n long, batch long")
    return source.option("maxFilesPerTrigger", files_at_once).json(str(folder))


def start(df, url, namespace, checkpoint, *, mode="append", trigger=None, **options):
    """Start a query into a namespace; by default one that ends when all input is there."""
    writer = df.writeStream.format("reef").outputMode(mode).trigger(**trigger or AVAILABLE_NOW)
    given = {"namespace": namespace, "key": "id", "checkpointLocation": str(checkpoint)}
    return writer.options(**given, **options).start(str(url))


AVAILABLE_NOW = {"availableNow": True}


class Stream:
    """A stream of changes as Spark's driver runs it: offsets are logged before a micro-batch.

    After `crash` the next process replays the micro-batch that was logged and not committed.
    """

    def __init__(self, url, namespace="t", **options):
        given = {"path": str(url), "namespace": namespace, "pollMs": "0", "cursorSeconds": "0"}
        self.options = given | {name: str(value) for name, value in options.items()}
        self.schema = ReefSource(self.options).schema()
        self.offsets, self.committed = [], 0
        self.start()

    def start(self):
        """Start a process of the driver."""
        source = pickle.loads(pickle.dumps(ReefSource(self.options)))
        self.reader = source.streamReader(self.schema)

    def crash(self):
        """End the process, without notice."""
        self.start()

    def stop(self):
        """End the query in an orderly way."""
        self.reader.stop()
        self.start()

    def next(self, limit=None):
        """Run a micro-batch up to its commit; return its change rows, None if there is none."""
        if len(self.offsets) == self.committed:
            end = self.reader.latestOffset(
                self._start(), limit or self.reader.getDefaultReadLimit()
            )
            end = json.loads(json.dumps(end))
            if end == self._start():
                return None
            if self.offsets:
                self.reader.commit(self.offsets[-1])
            self.offsets.append(end)
        parts = self.reader.partitions(self._start(), self.offsets[-1])
        task, parts = pickle.loads(pickle.dumps((self.reader, parts)))
        self.parts = parts
        rows = [row for part in parts for batch in task.read(part) for row in batch.to_pylist()]
        return rows

    def _start(self):
        return self.offsets[self.committed - 1] if self.committed else self.reader.initialOffset()

    def done(self):
        """Commit the micro-batch, in Spark's checkpoint."""
        self.committed = len(self.offsets)

    def run(self, limit=None):
        """Run micro-batches to the end of the log; return all their rows."""
        found = []
        while (rows := self.next(limit)) is not None:
            found += rows
            self.done()
        return found


class Copy:
    """Rows that are kept by change rows."""

    def __init__(self):
        self.rows = {}

    def apply(self, changes):
        """Apply change rows, in the order of the log."""
        for change in sorted(changes, key=lambda change: (change["_lsn"], change["_seq"])):
            key, op = change["_key"].decode(), change["_op"]
            own = {name: value for name, value in change.items() if not name.startswith("_")}
            if op == "put":
                self.rows[key] = own
            elif op == "delete":
                self.rows.pop(key, None)
            elif op == "patch" and key in self.rows:
                self.rows[key] |= {name: own[name] for name in change["_touched"]}
            elif op == "merge":  # all of them add to n
                row = self.rows.setdefault(key, dict.fromkeys(own) | {"id": key})
                row["n"] = (row["n"] or 0) + own["n"]
            elif op == "delete_range":
                end = change["_end_key"]
                gone = [k for k in self.rows if key <= k and (end is None or k.encode() < end)]
                for name in gone:
                    del self.rows[name]
