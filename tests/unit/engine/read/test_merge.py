"""Merging: many sources with overlapping LSNs come down to one row a key, from either end."""

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.engine.read import merge
from reef.engine.read.merge import (
    RangeTombstones,
    drop_covered,
    drop_deleted,
    newest_versions,
    sorted_places,
)
from reef.engine.read.scan import Cursor, RowsCursor, merged
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.versions import Versions, concat_versions
from tests.unit.engine.model import few, keys, ranges, to_rows, to_versions, tombstone, values

version = st.tuples(keys, st.integers(1, 9), st.integers(0, 3), st.one_of(st.none(), values))
unique = st.lists(version, unique_by=lambda row: row[:3], max_size=20)
tombstones = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 3), ranges()).map(
        lambda t: tombstone(*t[:2], *t[2])
    ),
    max_size=4,
)
ROWS_PER_DELETE = (0, merge.ROWS_PER_DELETE)
"""The rows of each delete are searched, or the delete of each row."""


def newest(rows):
    """Return the newest version of each key."""
    found = {}
    for key, lsn, seq, value in sorted(rows, key=lambda row: row[:3]):
        found[key] = (lsn, seq, value)
    return found


def is_covered(key, lsn, seq, deletes):
    """Whether a newer range delete covers a version."""
    return any(t.start <= key < t.end and (t.lsn, t.seq) > (lsn, seq) for t in deletes)


def sets(deletes):
    """Return range deletes as those of two sources, in each of which they may overlap."""
    return [RangeTombstones.of(deletes[::2]), RangeTombstones.of(deletes[1::2])]


def parted(rows, data):
    """Split rows into sources, as segments of overlapping LSN ranges are."""
    parts = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for row in rows:
        parts[data.draw(st.integers(0, len(parts) - 1))].append(row)
    return [to_versions(part) for part in parts]


@few
@given(unique, tombstones, st.data())
def test_one_row_a_key_is_left(rows, deletes, data):
    """The newest of all sources, unless something newer deleted it."""
    parts = parted(rows, data)
    merged_rows = drop_deleted(newest_versions(parts, DEFAULT_SCHEMA, sets(deletes)), 0)
    expected = [
        (key, value)
        for key, (lsn, seq, value) in sorted(newest(rows).items())
        if value is not None and not is_covered(key, lsn, seq, deletes)
    ]
    assert (to_rows(merged_rows) if len(merged_rows) else []) == expected


@few
@given(unique, tombstones, st.sampled_from(ROWS_PER_DELETE))
def test_covered_versions_go(rows, deletes, rows_per_delete):
    """[start, end) and strictly newer: the edges are where it goes wrong."""
    versions = to_versions(rows)
    with patch.object(merge, "ROWS_PER_DELETE", rows_per_delete):
        left = drop_covered(versions, sets(deletes))
    expected = [
        row
        for row in zip(
            versions.keys.to_pylist(), versions.lsns.tolist(), versions.seqs.tolist(), strict=True
        )
        if not is_covered(*row, deletes)
    ]
    assert (
        list(zip(left.keys.to_pylist(), left.lsns.tolist(), left.seqs.tolist(), strict=True))
        == expected
    )


@pytest.mark.parametrize("rows_per_delete", ROWS_PER_DELETE)
def test_the_edges_of_a_range_tombstone(monkeypatch, rows_per_delete):
    """Its start is deleted, its end is not; the same version is not its own victim."""
    monkeypatch.setattr(merge, "ROWS_PER_DELETE", rows_per_delete)
    rows = to_versions([(b"a", 5, 0, b""), (b"b", 5, 0, b""), (b"c", 5, 0, b"")])
    assert drop_covered(rows, sets([tombstone(6, 0, b"a", b"c")])).keys.to_pylist() == [b"c"]
    assert len(drop_covered(rows, sets([tombstone(5, 0, b"a", b"c")]))) == 3
    assert len(drop_covered(rows, sets([tombstone(5, 1, b"a", b"a\0")]))) == 2
    assert len(drop_covered(rows, sets([tombstone(9, 9, b"a\0", b"b")]))) == 3


def test_fewer_rows_than_deletes_between_them():
    """The rows are looked up one by one then, by the same rule: strictly newer, end excluded."""
    rows = to_versions([(b"a", 5, 0, b""), (b"d", 5, 0, b"")])
    bounds = [(b"a", b"a\0"), (b"b", b"ba"), (b"bb", b"c"), (b"ca", b"d")]
    for seq, left in ((0, [b"a", b"d"]), (1, [b"d"])):
        deletes = [RangeTombstones.of(tombstone(5, seq, *each) for each in bounds)]
        assert drop_covered(rows, deletes).keys.to_pylist() == left


def test_expired_rows_are_not_there():
    """Decided by the reader's clock; at the very millisecond it is over."""
    rows = to_versions([(b"a", 1, 0, b""), (b"b", 1, 0, b""), (b"c", 1, 0, b"")])
    rows = Versions(
        rows.keys, rows.lsns, rows.seqs, rows.kinds, rows.fields, pa.array([99, 100, None])
    )
    assert drop_deleted(rows, 99).keys.to_pylist() == [b"b", b"c"]


@few
@given(unique)
def test_sorting_is_by_key_and_newest_first(rows):
    """Whatever the order was before."""
    versions = to_versions(rows)
    shuffled = versions.take(np.arange(len(rows) - 1, -1, -1))
    order = shuffled.take(sorted_places(shuffled))
    assert order.keys.equals(versions.keys)
    assert order.lsns.tolist() == versions.lsns.tolist()


class Pieces(Cursor):
    """A source that is handed out piece by piece, some of them empty, as groups of a segment."""

    def __init__(self, rows, size, reverse):
        super().__init__()
        pieces = [rows.slice(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]
        pieces.insert(len(pieces) // 2, rows.slice(0, 0))
        self._pieces = iter(pieces[::-1] if reverse else pieces)

    def _next(self):
        return next(self._pieces, None)


def scanned(sources, sizes, deletes, reverse):
    """Merge sources as a scan does; return the rows in the order of reading."""
    cursors = [Pieces(rows, size, reverse) for rows, size in zip(sources, sizes, strict=True)]
    out = []
    for piece in merged([*cursors, RowsCursor(iter([to_versions([])]))], reverse):
        rows = drop_deleted(newest_versions(piece, DEFAULT_SCHEMA, sets(deletes)), 0)
        found = to_rows(rows) if len(rows) else []
        out += found[::-1] if reverse else found
    return out


@few
@given(unique, tombstones, st.data())
def test_reading_backwards_is_reading_forwards_backwards(rows, deletes, data):
    """Group by group from either end: the same rows, each once, in order."""
    latest = {(row[0], part): row for part in range(3) for row in sorted(rows, key=lambda r: r[:3])
              if row[1] % 3 == part}  # fmt: skip
    sources = [
        to_versions([row for (_, at), row in latest.items() if at == part]) for part in range(3)
    ]
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    forward = scanned(sources, sizes, deletes, reverse=False)
    assert forward == sorted(forward)
    assert len({key for key, _ in forward}) == len(forward)
    assert scanned(sources, sizes, deletes, reverse=True) == forward[::-1]
    whole = drop_deleted(newest_versions(sources, DEFAULT_SCHEMA, sets(deletes)), 0)
    assert forward == (to_rows(whole) if len(whole) else [])


def test_no_source_at_all():
    """Nothing in, nothing out."""
    assert list(merged([], reverse=False)) == []
    assert len(newest_versions([to_versions([])], DEFAULT_SCHEMA)) == 0
    assert len(concat_versions([to_versions([])], DEFAULT_SCHEMA)) == 0
