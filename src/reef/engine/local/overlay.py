"""The overlay: rows that are on the local disk and not yet in the bucket's log.

It lies over everything that the bucket has, since all of it will be committed after that. Rows
come in when they are locally durable, never before, and leave when their upload was applied below:
for a moment they are in both, which shows the same rows. Leaving makes a new table; whoever
reads the old one keeps what it began with.
"""

from reef.engine.reading.memtable import Memtable
from reef.formats.batch import AnyOps
from reef.formats.schema import Schema

__all__ = ["FIRST_LSN", "Overlay"]

FIRST_LSN = 1 << 61
"""Above every LSN of a log, and below what a transaction stages."""


class Overlay:
    """Changed under the front's lock, read without it."""

    def __init__(self, schema: Schema, next_index: int) -> None:
        self.table = Memtable(schema, FIRST_LSN + next_index)

    def apply(self, index: int, ops: AnyOps, schema: Schema) -> None:
        """Show a batch."""
        self.follow(schema)
        self.table.apply(FIRST_LSN + index, [ops])

    def drop_to(self, index: int, *, is_last: bool) -> None:
        """Let go of everything up to an index; `is_last` if there is nothing behind it."""
        if is_last:
            self.table = Memtable(self.table.schema, FIRST_LSN + index + 1)
        else:
            self.table = self.table.drop_below(FIRST_LSN + index + 1)

    def follow(self, schema: Schema) -> None:
        """Take over the columns of a schema that has grown."""
        if schema.id != self.table.schema.id:
            self.table = self.table.drop_below(self.table.first_lsn, schema)
