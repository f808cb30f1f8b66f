"""A segment stored under the name of another one, with and without its footer (H68).

A block has a checksum and no name: only the footer says which segment an object is. Salvage of an
object without a footer checks its layout against the manifest, and reports every row that it
cannot recover.
"""

from importlib import import_module

import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.formats.segment import decode_tail
from reef.jobs import fold, ingest, repair, verify
from reef.jobs.repair.segments import SegmentRemains, segment_remains
from tests.hazards.test_salvage import head_of, row
from tests.support.sweep_world import NAME, USERS

SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])


def loads(*batches):
    """Return a table with one folded load for each batch, and the segments in that order."""
    db = reef.open("memory://")
    db.create(NAME, schema=SCHEMA)
    for rows in batches:
        ingest(db, NAME, [{"id": key, "x": x, "y": x} for key, x in rows.items()])
        fold(db, NAME)
    return db, sorted(head_of(db).segments, key=lambda segment: segment.visible_lsn)


def without_footer(db, segment):
    """Return the bytes of a segment up to its footer: blocks, filter and index are whole."""
    body = db.store.get(USERS.segment(segment.id))
    index = decode_tail(body[segment.size - segment.tail_bytes :], segment.size, "").footer.index
    return body[: index.offset + index.length]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"c5": 1}, "fewer rows"),
        ({"b": 1, "b5": 1}, "the same layout, other bounds"),
        ({"b": 1, "c": 1, "c5": 1}, "more rows"),
    ],
)
def test_H68_another_segment_without_a_footer_is_not_taken_for_a_lost_one(other, what):
    """H68: its blocks are intact and within the bounds of the lost segment, and an intact index
    says that no group is missing. So a load was lost, one row of it replaced by that of another
    load, and the report said that nothing is lost. Root: an index was trusted without a check that
    it is that of the segment. Seed 1424 of the damage machine with merges, twice.
    """
    db, (stranger, lost) = loads(other, {"b": 1009, "c5": 1010})
    db.store.put(USERS.segment(lost.id), without_footer(db, stranger))
    report = repair(db, NAME, apply=True)
    (segment,) = report.lost.segments
    assert (segment.is_loss, segment.saved_rows, segment.rows_lost) == (True, 0, 2), what
    assert [(r.first_key, r.last_key) for r in segment.ranges] == [(b"b", b"c5")]
    for key in ("b", "c5"):  # the load is gone; the other one is still there
        expected = {"id": key, "x": 1, "y": 1} if key in other else None
        assert row(db, key) == expected
    assert not verify(db, NAME, deep=True).problems


def test_H68_a_segment_without_its_footer_is_recognized_by_its_layout():
    """H68: the check of the layout must not reject the blocks of the segment itself."""
    db, (_, lost) = loads({"c": 1}, {"b": 1009, "c": 1010})
    db.store.put(USERS.segment(lost.id), without_footer(db, lost))
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert row(db, "c") == {"id": "c", "x": 1010, "y": 1010}


def test_H68_blocks_of_another_segment_that_are_in_the_wrong_place_do_not_count():
    """H68: without an index the offsets decide: groups end where the entry's tail begins."""
    db, (stranger, lost) = loads({"b": 1, "b" * 100: 2}, {"b": 1009, "c": 1010})
    body = without_footer(db, stranger)[: stranger.size - stranger.tail_bytes + 64]
    schema = head_of(db).schema
    assert len(body) > lost.size - lost.tail_bytes
    left = segment_remains(body, lost, schema, "")
    assert (left.groups, left.lost) == ([], [])
    assert len(segment_remains(body, stranger, schema, "").groups) == 1


def test_H68_a_salvage_that_is_not_whole_names_a_range(monkeypatch):
    """H68: rows that are missing by number are reported, even if no group is known as lost."""
    db, (_, lost) = loads({"z": 1}, {"b": 1009, "c": 1010})
    body = bytearray(db.store.get(USERS.segment(lost.id)))
    body[-1] ^= 1
    db.store.put(USERS.segment(lost.id), bytes(body))

    def one_of_two_rows(*args):
        found = segment_remains(*args)
        return SegmentRemains([group.take(np.array([0])) for group in found.groups])

    segments = import_module("reef.jobs.repair.segments")  # `reef.jobs.repair` is a function
    monkeypatch.setattr(segments, "segment_remains", one_of_two_rows)
    (report,) = repair(db, NAME).lost.segments
    assert report.is_loss
    assert [(r.first_key, r.last_key) for r in report.ranges] == [(b"b", b"c")]
