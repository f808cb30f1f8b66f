"""Intact objects under wrong names: their checksums match, and their headers do not."""

import pyarrow as pa
import pytest

import reef
from reef.formats.segment import decode_footer
from reef.jobs import compact, ingest, rebuild, repair, verify
from tests.support.sweep_world import NAME, World

KEYS = [b"a", b"b"]


def load(world, values):
    """Load a value for each key."""
    rows = pa.table({"id": KEYS, "value": values})
    world.run(lambda: ingest(world.db, NAME, rows))


def swap(world, first, second):
    """Store the body of each of two segments under the name of the other."""
    one, other = (world.names.segment(i) for i in (first, second))
    bodies = world.bucket.get(one), world.bucket.get(other)
    world.bucket.put(one, bodies[1])
    world.bucket.put(other, bodies[0])


@pytest.fixture
def world():
    """Two loads of the same keys, of the same length, with the bodies of their segments swapped."""
    world = World()
    world.db.create(NAME)
    load(world, [b"old1", b"old2"])
    load(world, [b"new1", b"new2"])
    world.fold()
    swap(world, *(segment.id for segment in world.head().segments))
    return world


def test_a_swapped_segment_is_damage_to_readers(world):
    """A segment in another one's object is a CorruptionError, not its rows.

    Root: nothing compared a footer with the name of its object. Two loads of the same keys have the
    same set hash, as that is of keys, sequences and kinds: a reader showed the older rows.
    """
    with world.db.reader(NAME) as reader:
        for read in (lambda: reader.get(b"a"), lambda: list(reader.scan())):
            with pytest.raises(reef.CorruptionError, match="holds segment"):
                world.run(read)


def test_a_swapped_segment_is_found_by_a_shallow_verify(world):
    """Verify names both objects, without reading their blocks."""
    problems = world.run(lambda: verify(world.db, NAME)).problems
    assert {p.segment for p in problems} == {s.id for s in world.head().segments}


def test_a_swapped_segment_is_not_compacted(world):
    """A merge does not take the rows of another segment for those of its input."""
    with pytest.raises(reef.CorruptionError, match="holds segment"):
        world.run(lambda: compact(world.db, NAME, full=True))


def test_repair_does_not_save_rows_of_another_segment(world):
    """The rows of a segment's object are only salvaged if they are that segment's.

    Root: salvage took "whole" by the number of rows and the set hash, and groups from any body.
    """
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert [lost.saved_rows for lost in done.lost.segments] == [0, 0]
    assert [(r.first_key, r.last_key) for s in done.lost.segments for r in s.ranges] == [
        (b"a", b"b"),
        (b"a", b"b"),
    ]
    assert world.rows() == {}


@pytest.mark.parametrize("is_tail_left", [True, False])
def test_repair_does_not_save_groups_of_another_segment(is_tail_left):
    """Without a footer, rows outside of a segment's bounds show that the object is another one's.

    A load stores LSN 0; a segment that a fold wrote does not.
    """
    world = World()
    world.db.create(NAME)
    with world.db.writer(NAME) as writer:
        writer.write(reef.Batch().put(b"a", b"old1").put(b"b", b"old2"))
    world.fold()
    load(world, [b"new1", b"new2"])
    world.fold()
    (folded,) = (s for s in world.head().segments if not s.visible_lsn)
    (loaded,) = (s.id for s in world.head().segments if s.visible_lsn)
    body = world.bucket.get(world.names.segment(folded.id))
    footer = decode_footer(body, len(body), "")
    cut = body[:-30] if is_tail_left else body[: footer.pages.offset]
    world.bucket.put(world.names.segment(loaded), cut)
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    (lost,) = done.lost.segments
    assert (lost.saved_rows, lost.is_loss) == (0, True)
    assert world.rows() == {b"a": b"old1", b"b": b"old2"}


def test_rebuild_does_not_take_a_segment_under_another_name(world):
    """A rebuild reports both segments, and shows none of their rows, not those of the other one."""
    for info in list(world.bucket.list(world.names.manifests)):
        world.bucket.delete(info.key)
    report = world.run(lambda: rebuild(world.db, NAME))
    assert sum(problem.startswith("segment ") for problem in report.problems) == 2
    world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    world.run(lambda: repair(world.db, NAME, apply=True))
    assert world.rows() == {}
