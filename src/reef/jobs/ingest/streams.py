"""Batches of streams: rows that count once, however often their batch is sent (H40).

A stream numbers its batches. A commit carries the number as the stream's mark, in the same WAL
object as the rows, and the rules of the log ignore every later object that does not move the mark.
So a batch that is replayed after a crash is skipped by its number, never by its content: a source
may return other rows at the second time.

Small batches go into the log as they are, one PUT each; large ones are staged by a bulk job, whose
ingest carries the mark. Neither needs the writer role, and neither disturbs a live writer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from reef.engine.handles.database import Database
from reef.formats.schema import Schema
from reef.formats.wal_object import AnyOps
from reef.jobs.ingest.append import Appender, UnfoldedLog
from reef.telemetry import operation
from reef.types import Receipt

__all__ = ["StreamAppender"]


class StreamAppender:
    """Appends batches of streams to the log of one namespace. Not for several threads at once."""

    def __init__(self, db: Database, namespace: str) -> None:
        db._prove_store()  # it writes into the log, as a writer does (H4)
        self._metrics = db.metrics
        heads = db._namespaces.use(namespace).heads
        self.schema: Schema = heads.found.manifest.schema
        self._name = namespace
        self._appender = Appender(db.store, heads.names)

    def marks(self) -> dict[str, int]:
        """Return how many batches of each stream were committed."""
        return self._appender.read_log().marks

    @property
    def log(self) -> UnfoldedLog | None:
        """The unfolded log, as the last call has read it."""
        return self._appender.seen

    def append(
        self,
        stream: str,
        number: int,
        batches: Sequence[AnyOps],
        *,
        schema: Schema | None = None,
        also: Collection[str] = (),
        check: Callable[[Mapping[str, int]], None] = lambda marks: None,
    ) -> Receipt:
        """Commit the rows as a stream's batch; the first one has number 1.

        The receipt is `replayed`, with LSN 0, if this batch or a later one was committed before.
        `schema` is that of the rows, if it may have grown since. `also` are further marks that the
        same commit moves to this number; `check` may refuse the batch by the marks of all streams.
        """
        marks = {name: number for name in (stream, *also)}
        with operation(self._metrics, "append"):
            state = self._appender.append_rows(marks, batches, schema or self.schema, check)
        ops = 0 if state.replayed else sum(map(len, batches))
        return Receipt(self._name, state.lsn, 0, 0, state.write_id, ops, state.replayed)
