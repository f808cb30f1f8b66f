"""What a scan is asked for: which columns, and which rows.

Knows which columns must be read; which groups need not be is for `skipping` to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from reef.engine.rows.out import arrow_schema, check_columns, known_columns, to_record_batch
from reef.engine.where import Where, parse
from reef.formats.schema import Schema
from reef.formats.versions import Versions

__all__ = ["EVERYTHING", "Projection"]


@dataclass(frozen=True, slots=True)
class Projection:
    """Columns and conditions, checked against a schema."""

    columns: tuple[str, ...] | None = None
    """In the order asked; None means all, the key first."""
    where: Where | None = None
    numbers: tuple[int, ...] | None = None
    """The columns that must be read; None means all."""

    @classmethod
    def of(cls, schema: Schema, columns: Sequence[str] | None, where: Any) -> "Projection":
        """Return what was asked for; InvalidInputError names what is not there."""
        conditions = parse(where, schema) if where is not None else None
        if columns is None:
            return cls(None, conditions, None)
        check_columns(schema, columns)
        by_name = known_columns(schema)
        used = {*columns, *(conditions.columns if conditions else ())}
        numbers = tuple(sorted(by_name[name] for name in used if by_name[name]))
        return cls(tuple(columns), conditions, numbers)

    def batch(self, rows: Versions, schema: Schema) -> pa.RecordBatch:
        """Return the rows that match, with the columns that were asked for."""
        if self.where is None:
            return to_record_batch(rows, schema, self.columns)
        asked = self.columns if self.columns is not None else schema.arrow().names
        needed = list(dict.fromkeys([*asked, *self.where.columns]))
        batch = to_record_batch(rows, schema, needed)
        return batch.filter(self.where.mask(batch)).select(list(asked))

    def arrow_schema(self, schema: Schema) -> pa.Schema:
        return arrow_schema(schema, self.columns)


EVERYTHING = Projection()
