"""Range deletes, one by one and very many of them: which covers a key, and the cost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reef
from reef.engine.read.merge import RangeTombstones
from tests.support.cpu_time import processor_s
from tests.unit.engine.model import KEYS, LAST, few, ranges, tombstone

NAME = "users"
MANY = 30_000

deletes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 3), ranges()), unique_by=lambda t: t[:2], max_size=8
).map(lambda found: [tombstone(*stamp, *bounds) for *stamp, bounds in found])


@few
@given(deletes)
def test_H36_the_newest_delete_that_covers_a_key_is_found(found):
    """One by one or all at once: fragments do not overlap, and end where some range does."""
    one_by_one = RangeTombstones()
    for each in found:
        one_by_one.add(each)
    at_once = RangeTombstones.of(found)
    for key in [*KEYS, LAST]:
        covering = [t for t in found if t.start <= key < t.end]
        newest = max(((t.lsn, t.seq) for t in covering), default=None)
        for made in (one_by_one, at_once):
            cover = made.covering(key)
            assert (cover and (cover.lsn, cover.seq)) == newest
    for made in (one_by_one, at_once):
        pieces = list(made)
        assert all(one.end <= other.start for one, other in pairwise(pieces))
        edges = {edge for each in found for edge in (each.start, each.end)}
        assert {edge for piece in pieces for edge in (piece.start, piece.end)} <= edges


def key(number):
    """Return one of many keys in order."""
    return b"%08d" % number


@pytest.fixture(scope="module")
def deleted():
    """Give a database with many range deletes, one in two of its keys under one of them."""
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        writer.upsert({"id": list(map(key, range(MANY))), "value": [b"v"] * MANY})
        for start in range(0, MANY, 10_000):
            batch = reef.Batch()
            for number in range(start, start + 10_000, 2):
                batch.delete_range(key(number), key(number + 1))
            writer.write(batch)
    return db


@pytest.mark.quiet
def test_many_range_deletes_are_replayed_and_read_in_time(deleted):
    """The time for each does not grow with their number: not at a replay, nor in any read."""
    expected = [key(number) for number in range(1, MANY, 2)]

    def read():
        with deleted.writer(NAME, background=False) as writer:
            assert [k for k, _ in writer.scan()] == expected
            assert all(writer.get(key(number)) is None for number in range(0, 2000, 2))
            assert writer.get_many([key(0), key(1)])["_found"].to_pylist() == [False, True]

    assert processor_s(read) < 2, (
        "half a second here; more than three if each one copied all others"
    )


@pytest.mark.quiet
def test_many_range_deletes_in_segments_are_read_in_time(deleted):
    """Each piece of a scan, and each key, reads only the deletes that touch it (H36)."""
    expected = [key(number) for number in range(1, MANY, 2)]
    reef.jobs.fold(deleted, NAME, group_bytes=1000)

    def read():
        with deleted.reader(NAME, row_cache_bytes=0) as reader:
            assert [k for k, _ in reader.scan()] == expected
            assert [k for k, _ in reader.scan(reverse=True, limit=3)] == expected[:-4:-1]
            assert all(reader.get(key(number)) is None for number in range(0, 2000, 2))
            assert reader.get_many([key(0), key(1)])["_found"].to_pylist() == [False, True]

    assert processor_s(read) < 2, "half a second here; more than four if each piece read all"
