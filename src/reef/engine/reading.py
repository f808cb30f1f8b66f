"""From versions to what a client sees, for the default schema: keys and bytes."""

from collections.abc import Iterator
from itertools import islice
from typing import cast

from reef.engine.memtable import Entry
from reef.engine.view import View
from reef.errors import InvalidInputError
from reef.types import KeyRange

__all__ = ["read_range", "row_of"]


def row_of(entry: Entry | None) -> bytes | None:
    """Return the value of a row."""
    return None if entry is None else cast(bytes, entry.values[0])


def read_range(
    view: View, wanted: KeyRange, now_ms: int, *, reverse: bool, limit: int | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a range, one by one."""
    if limit is not None and limit < 0:
        raise InvalidInputError(f"limit={limit} is negative")
    return islice(_rows(view, wanted, now_ms, reverse), limit)


def _rows(
    view: View, wanted: KeyRange, now_ms: int, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    number = view.manifest.schema.fields[0].number
    for rows in view.scan(wanted, now_ms, reverse=reverse):
        yield from zip(rows.keys.to_pylist(), rows.fields[number].to_pylist(), strict=True)
