"""Rows from the blocks of pages: which blocks a read needs, where they are, how they decode."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pyarrow as pa

from reef.engine.read.memtable import NO_CHANGES, Entry, changes_at
from reef.engine.rows.convert import to_python
from reef.formats.coding import (
    BlockKind,
    Buffer,
    decode_block,
    decode_blocks,
)
from reef.formats.manifest import SegmentEntry
from reef.formats.pages import KeyPage
from reef.formats.segment import SegmentTail
from reef.formats.segment_index import KEYS, of_pages
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind

KEY_KIND, COLUMN_KIND = BlockKind.KEYS, BlockKind.COLUMN


DELETE = int(OpKind.DELETE)


Part = tuple[int, Sequence[int]]
"""The number of a column, or `KEYS`, and pages whose blocks of it are read."""


def select_blocks(
    tail: SegmentTail, pages: Sequence[int], columns: Sequence[int] | None
) -> list[Part]:
    """Return the blocks of these pages' keys and columns, column by column."""
    table, parts = tail.index.pages, [(KEYS, pages)]
    lengths, complete = table.lengths, table.complete
    for number in sorted(tail.fields if columns is None else columns):
        if number in complete:
            parts.append((number, pages))
            continue
        of_column = lengths.get(number)
        if of_column is None:
            continue
        present = of_pages(of_column, pages) > 0
        if present.all():
            parts.append((number, pages))
        elif present.any():
            mask = present.tolist()
            parts.append((number, [page for page, there in zip(pages, mask, strict=True) if there]))
    return parts


def block_spans(tail: SegmentTail, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return the first byte of each block, and the byte after its last."""
    spans: list[tuple[int, int]] = []
    for number, pages in parts:
        starts, ends = tail.index.page_spans(number)
        spans += zip(of_pages(starts, pages).tolist(), of_pages(ends, pages).tolist(), strict=True)
    return spans


def block_kinds(parts: Sequence[Part]) -> bytes:
    """Return the kind of each block, a byte for each."""
    return b"".join(
        bytes((KEY_KIND if number == KEYS else COLUMN_KIND,)) * len(pages)
        for number, pages in parts
    )


def decode_spans(
    bodies: Sequence[Buffer],
    ranges: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
    kinds: bytes,
    key: str,
) -> list[Buffer]:
    """Return the payloads of the blocks that are at these spans of an object."""
    payloads = decode_blocks(list(bodies), ranges, spans, kinds)
    if None not in payloads:
        return payloads  # type: ignore[return-value]
    data = bodies if ranges == spans else cut_spans(bodies, ranges, spans)
    blocks = zip(payloads, data, kinds, spans, strict=True)
    return [
        decode_block(body, BlockKind(kind), key, start) if payload is None else payload
        for payload, body, kind, (start, _) in blocks
    ]


def assemble_rows(
    tail: SegmentTail, pages: Sequence[int], parts: Sequence[Part], payloads: Sequence[Buffer]
) -> Versions:
    """Return the rows of pages from the payloads of their blocks."""
    rows, start = tail.key_rows(pages, payloads[: len(pages)]), len(pages)
    columns: list[pa.Array] = []
    for number, present in parts[1:]:
        end = start + len(present)
        columns.append(tail.column(present, number, payloads[start:end]))
        start = end
    return add_columns(tail, pages, parts, rows, columns)


def add_columns(
    tail: SegmentTail,
    pages: Sequence[int],
    parts: Sequence[Part],
    rows: Versions,
    columns: Sequence[pa.Array],
) -> Versions:
    """Return rows with their columns, null in pages that have no block of one."""
    fields = {
        number: array if len(present) == len(pages) else _spread(tail, pages, present, array)
        for (number, present), array in zip(parts[1:], columns, strict=True)
    }
    return Versions(
        rows.keys,
        rows.lsns,
        rows.seqs,
        rows.kinds,
        fields,
        rows.expires_at_ms,
        rows.touched,
        tail.is_distinct(pages),
        rows.merged_at_ms,
    )


def cut_spans(
    bodies: Sequence[Buffer],
    ranges: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
) -> list[Buffer]:
    """Return the bytes of spans, each of which is in one of the sorted ranges."""
    starts, views = [start for start, _ in ranges], [memoryview(body) for body in bodies]
    cut: list[Buffer] = []
    for start, end in spans:
        place = bisect_right(starts, start) - 1
        base = starts[place]
        cut.append(views[place][start - base : end - base])
    return cut


def _spread(
    tail: SegmentTail, pages: Sequence[int], present: Sequence[int], array: pa.Array
) -> pa.Array:
    """Return a column for all pages, null in those that have no block of it."""
    rows, own = tail.index.pages.rows, set(present)
    parts: list[pa.Array] = []
    start = 0
    for page in pages:
        count = int(rows[page])
        parts.append(array[start : start + count] if page in own else pa.nulls(count, array.type))
        start += count if page in own else 0
    return pa.concat_arrays(parts)


def entry_at(  # noqa: PLR0917 - each get comes here
    tail: SegmentTail,
    page: int,
    source: KeyPage | Versions,
    row: int,
    columns: Iterable[tuple[int, Buffer]],
    entry: SegmentEntry,
) -> Entry:
    """Return one version as Python values."""
    changes, merged_at_ms = NO_CHANGES, None
    expires_at_ms = None
    if type(source) is KeyPage:
        lsn, seq, kind = source.stamp(row)
    else:
        rows = cast(Versions, source)
        lsn, seq, kind = int(rows.lsns[row]), int(rows.seqs[row]), int(rows.kinds[row])
        if rows.expires_at_ms is not None:
            expires_at_ms = rows.expires_at_ms[row].as_py()
        changes, merged_at_ms = changes_at(rows, row, kind)
    values = {} if kind == DELETE else values_at(tail, page, row, columns)
    lsn = entry.rows_lsn or lsn
    return Entry(lsn, seq, kind, values, changes, expires_at_ms, merged_at_ms)


def values_at(
    tail: SegmentTail, page: int, row: int, columns: Iterable[tuple[int, Buffer]]
) -> dict[int, Any]:
    """Return the values of a row by column, as Python has them."""
    return {
        number: value_at(tail, page, number, payload, row)
        for number, payload in columns
        if number != KEYS
    }


def value_at(tail: SegmentTail, page: int, number: int, payload: Buffer, row: int) -> Any:
    """Return a value as Python has it; None in a page without a block of the column."""
    if not payload:
        return None
    value = tail.value(page, number, payload, row)
    return to_python(value) if isinstance(value, pa.Scalar) else value
