"""A long log is folded in stretches: memory is bounded, and every stretch is published."""

from reef.engine.handles.database import Database
from reef.engine.log.log import Slot
from reef.formats.manifest import Manifest
from reef.jobs import fold
from reef.jobs.fold.job import plan_fold
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores.memory import MemoryStore

NAME = "users"


def plan(sizes, bytes_max, **manifest):
    """Plan a fold of objects of these sizes, from LSN 1 on."""
    head = Manifest(generation=1, write_id="", published_at_ms=0, **manifest)
    return plan_fold(head, [Slot(n, size) for n, size in sizes.items()], bytes_max)


def test_a_plan_takes_no_more_than_it_may():
    """But one object at least, and nothing behind a gap."""
    sizes = {1: 10, 2: 10, 3: 10, 5: 10}
    assert (plan(sizes, 25).lsns, plan(sizes, 25).more) == ((1, 2), True)
    assert (plan(sizes, 1).lsns, plan(sizes, 1).more) == ((1,), True)
    assert (plan(sizes, 99).lsns, plan(sizes, 99).more) == ((1, 2, 3), False)
    assert plan(sizes, 99, skipped_lsns=(4,)).lsns == (1, 2, 3, 4, 5)
    assert plan({}, 99).lsns == ()


def test_a_fold_continues_until_all_is_folded():
    """One report for all stretches; the rows are those that were written."""
    db = Database(MemoryStore())
    writer = db.writer(NAME)
    for number in range(20):
        writer.put(f"k{number:02}", b"v" * 100)
    before = db.info(NAME).generation
    report = fold(db, NAME, log_bytes=600)
    head = HeadFinder(db.store, Namespace(NAME)).find().manifest
    assert head.generation - before > 3, "every stretch is published"
    assert (report.first_lsn, report.last_lsn, report.rows, report.objects) == (1, 21, 20, 21)
    assert head.wal_floor == 22
    assert report.segments == len(head.segments) > 3
    assert report.published
    assert [key for key, _ in db.reader(NAME).scan()] == [b"k%02d" % n for n in range(20)]
