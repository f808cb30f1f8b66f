"""`db.stats`, `db.namespaces`, their commands, and the picture of the levels."""

import json

import pytest

import reef
from reef.cli.output import level_lanes
from reef.engine.stats import LevelStats, SegmentStats
from reef.jobs import sweep
from reef.paths import Namespace
from tests.support.bulk_jobs import ingest
from tests.support.sweep_world import GRACE_S, NAME, World


@pytest.fixture
def db(data):
    """Return a database with two overlapping segments and something in the log."""
    db = reef.open(str(data))
    with db.writer("users", background=False) as writer:
        for first in ("a", "c"):
            batch = reef.Batch()
            for letter in range(ord(first), ord(first) + 10):
                batch.put(chr(letter), b"x")
            writer.write(batch)
            reef.jobs.fold(db, "users")
        writer.delete("a")
        writer.put("late", b"1")
    return db


# --- stats --------------------------------------------------------------------------


def test_levels_and_log(db):
    """Counts, bytes, rows and key ranges by level, and the unfolded log."""
    stats = db.stats("users")
    (level,) = stats.levels
    assert (level.level, level.rows, len(level.segments)) == (0, 20, 2)
    assert (level.min_key, level.max_key) == (b"a", b"l")
    assert level.bytes == stats.bytes == db.info("users").bytes
    assert [(s.min_key, s.max_key) for s in level.segments] == [(b"a", b"j"), (b"c", b"l")]
    sizes = [info.size for info in db.store.list("namespaces/users/wal/")]
    assert (stats.log.floor, stats.log.last_lsn, stats.log.objects) == (4, 5, 2)
    assert stats.log.bytes == sum(sizes[-2:])
    assert 0 <= stats.log.oldest_unfolded_s < 60


def test_who_wrote_last(db, data):
    """By the log, also when all of it was folded."""
    with db.writer("users", background=False) as writer:
        writer_id = writer._committer.opened.writer_id
        lsn = writer.put("k", b"v").lsn
    assert (db.stats("users").writer.id, db.stats("users").writer.lsn) == (writer_id, lsn)
    reef.jobs.fold(db, "users")
    stats = db.stats("users")
    assert (stats.writer.id, stats.writer.epoch, stats.log.objects) == (writer_id, 2, 0)
    ingest(db.store, "users", {b"z": b"1"})
    assert db.stats("users").writer.id == writer_id


def test_no_writer_has_written(db):
    """A namespace that was only made has no writer, no levels and no log."""
    db.create("new")
    stats = db.stats("new")
    assert (stats.writer, stats.levels, stats.log.objects) == (None, (), 0)
    assert (stats.generation, stats.generations, stats.oldest_superseded_s) == (1, 1, None)


def test_fences_alone_wait_for_no_fold(db):
    """A namespace that was only opened has nothing to fold."""
    with db.writer("new", background=False):
        pass
    assert db.stats("new").log.objects == 1
    assert db.stats("new").log.oldest_unfolded_s is None


def test_pins(db):
    """Snapshots that are not over, cursors, leases."""
    snapshot = db.snapshot("users", "monday")
    db.snapshot("users", ttl_s=0.001)
    db.store.runtime.sleep(0.05)
    db.cursor("users", "billing", after_lsn=4)
    with db.reader("users", pin=True):
        stats = db.stats("users")
    assert stats.snapshots == {"monday": snapshot.generation}
    assert (stats.cursors, stats.leases) == ({"billing": 4}, 1)
    assert db.stats("users").leases == 0


def test_deletions_that_a_sweep_left():
    """Condemned objects, and since when they could be gone."""
    world = World()
    with world.run(lambda: world.db.writer(NAME)) as writer:
        world.run(lambda: writer.put("k", b"v"))
    world.advance(100)
    world.fold()
    superseded_s = world.run(lambda: world.db.stats(NAME)).oldest_superseded_s
    assert 100 < superseded_s < 120
    world.run(lambda: sweep(world.db, NAME, apply=True, retain_generations_s=50))
    stats = world.run(lambda: world.db.stats(NAME))
    assert (stats.condemned, stats.overdue_s) == (1, 0.0)  # generation 1, within its grace
    world.advance(GRACE_S + 500)
    assert 490 < world.run(lambda: world.db.stats(NAME)).overdue_s < 520


def test_a_damaged_head_is_reported(db, data):
    """The manifest before it is shown, and the damage (H18)."""
    generation = db.stats("users").generation
    path = data / Namespace("users").manifest(generation)
    path.write_bytes(b"{}")
    stats = db.stats("users")
    assert stats.generation == generation - 1
    assert path.name in stats.damage[0]


def test_it_is_read_only(db):
    """`stats` writes nothing."""
    before = {info.key for info in db.store.list()}
    db.stats("users")
    assert {info.key for info in db.store.list()} - before <= {"store/clock"}


def test_stats_for_programs(cli, db, data):
    """All of it as JSON."""
    report = json.loads(cli("stats", data, "users", "--output", "json").out)
    assert report["levels"][0]["segments"][1]["max_key"] == "l"
    assert (report["rows"], report["segments"]) == (20, 2)
    assert report["writer"]["epoch"] == 1


def test_stats_for_people(cli, db, data):
    """Figures, and a bar for each segment over the keys that it spans."""
    db.snapshot("users", "monday")
    ran = cli("stats", data, "users")
    assert ran.code == 0
    bars = [line for line in ran.out.splitlines() if "█" in line]
    assert len(bars) == 2
    assert bars[0].index("█") < bars[1].index("█")
    assert ran.out.count("monday") == 1
    assert "LSN 4 to 5" in ran.out


# --- the picture --------------------------------------------------------------------


def level(number, *ranges):
    """Return a level with segments over these keys."""
    segments = tuple(
        SegmentStats(f"s{place}", first.encode(), last.encode(), 1, 1)
        for place, (first, last) in enumerate(ranges)
    )
    return LevelStats(number, segments, segments[0].min_key, segments[-1].max_key, 1, 0, 0, 1)


def test_neighbours_share_a_line():
    """Segments that do not overlap are next to one another, in two shades."""
    lanes = level_lanes([level(1, ("a", "b"), ("c", "d"), ("e", "f"))], 10)
    assert lanes == {1: ["██  ▓▓  ██"]}


def test_overlapping_segments_are_on_separate_lines():
    """Each line has segments that do not overlap."""
    lanes = level_lanes([level(0, ("a", "c"), ("b", "d")), level(1, ("a", "d"))], 9)
    assert lanes == {0: ["██████", "   ██████"], 1: ["█████████"]}


def test_a_single_key_is_seen():
    """However small, a segment is a mark."""
    assert level_lanes([level(0, ("a", "a"))], 5) == {0: ["█"]}
    assert level_lanes([level(0, ("a", "b"), ("c", "c"))], 8) == {0: ["████   ▓"]}


def test_many_overlaps_are_counted():
    """A picture of a hundred lines is none."""
    lanes = level_lanes([level(0, *[("a", "b")] * 100)], 5)
    assert lanes[0][-1] == "… and 92 more segments"
    assert len(lanes[0]) == 9


# --- namespaces ---------------------------------------------------------------------


def test_namespaces(cli, data):
    """In order, also where a name begins as another one does; other folders are not listed."""
    names = ["users", "users-1", "users.old", "users0", "a", "Z"]
    db = reef.open(str(data))
    for name in names:
        db.create(name)
    db.writer("users", background=False).close()  # so that it has more than manifests
    db.store.put("namespaces/.hidden/x", b"")
    db.store.put("namespaces/empty/wal/00000000000000000001.wal", b"")
    assert db.namespaces() == sorted(names)
    report = json.loads(cli("namespaces", data, "--output", "json").out)
    assert [row["namespace"] for row in report] == sorted(names)


def test_no_namespaces(cli, data):
    """An empty bucket has none."""
    assert cli("namespaces", data).out.endswith(": none\n")
