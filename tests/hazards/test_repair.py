"""H17, H18, H27: the damage table. Verify finds each, repair brings the namespace back.

Every kind of object, damaged in every section. After a repair a writer opens and commits, and
exactly the reported rows are lost.
"""

import random

import msgspec
import pytest

import reef
from reef.engine.context import NamespaceContext
from reef.errors import CorruptionError
from reef.formats.wal_object import WalObject
from reef.jobs import ProblemKind, Severity, fold, rebuild, repair, sweep, verify
from reef.jobs.repair.log import read_remains
from reef.manifest.edits import raise_writer_epoch
from reef.manifest.head import Publisher
from tests.support.damage import NAME, USERS, Copies, damage, flip, header_of

LOG = ["fence", "wal middle", "wal head", "begin", "ingest", "abort", "skip"]
BATCHES = ["wal middle", "wal head"]
SEGMENTS = ["segment", "bulk segment", "ingested segment", "old segment"]
MANIFESTS = ["manifest head", "old manifest", "pinned manifest"]
GONE = ["truncated", "emptied", "deleted"]
BLOCKS = ["magic", "version", "key block", "column block", "filter", "index", "footer", "tail"]

TABLE = [
    *((place, how) for place in LOG for how in ["magic", "version", "header", "footer", *GONE]),
    *((place, "record") for place in BATCHES),
    *((place, how) for place in SEGMENTS for how in [*BLOCKS, *GONE]),
    *((place, "tombstone block") for place in ("segment", "old segment")),
    *((place, how) for place in MANIFESTS for how in ["magic", "header", "body", "footer", *GONE]),
    *(("lease", how) for how in ["magic", "name", "text", "truncated", "emptied"]),
]
STILL_ELSEWHERE = {"segment", "old segment", "lease", *MANIFESTS}
"""What holds no row, or rows that the log still holds: nothing of the newest state is lost."""
UNTOLD = {("wal head", "deleted"), ("manifest head", "deleted")}
"""The last object of the log leaves no trace when it is gone; of the last manifest see below."""


@pytest.fixture(scope="module")
def copies():
    """Give the namespace that every test damages a copy of."""
    return Copies()


def lost_keys(sample, report):
    """Return the keys that a report says are lost with segments."""
    ranges = [r for s in report.lost.segments if s.is_loss for r in s.ranges]
    return {k for k in sample.rows() for r in ranges if r.first_key <= k <= r.last_key}


def expected(sample, report):
    """Return the rows that a report leaves."""
    lsns = {lost.lsn for lost in report.lost.lsns if lost.is_loss}
    return sample.rows(lsns, lost_keys(sample, report))


def in_service(sample, rows):
    """Check that a namespace can be written, read, folded and swept, and has these rows."""
    with sample.db.writer(NAME) as writer:
        assert dict(writer.scan()) == rows
        writer.put("next", b"works")
    fold(sample.db, NAME)
    sweep(sample.db, NAME, apply=True)
    assert dict(sample.db.reader(NAME).scan()) == {**rows, b"next": b"works"}
    assert not verify(sample.db, NAME, deep=True).problems


@pytest.mark.parametrize(
    ("place", "how"), [row for row in TABLE if row not in UNTOLD], ids=lambda word: word
)
def test_H17_H18_the_damage_table(copies, place, how):
    """H17, H18: found by verify, reported by a dry run, and repaired; the other rows are there."""
    sample = copies.fresh()
    key = sample.places[place]
    damage(sample.store, key, how)
    found = verify(sample.db, NAME, deep=True)
    assert {problem.object for problem in found.problems} == {key}
    before = sample.keys()
    dry = repair(sample.db, NAME)
    assert sample.keys() == before, "a dry run changes nothing"
    done = repair(sample.db, NAME, apply=True)
    assert (dry.applied, done.applied) == (False, True)
    assert (dry.lost, dry.problems) == (done.lost, done.problems)
    assert sorted(dry.actions) == sorted(done.actions)
    if how != "deleted":
        assert sample.store.get(USERS.quarantined(key)) == before[key]
    if place != "lease" and how != "deleted":
        assert sample.store.get(key) == before[key], "it stays where it is"
    assert not verify(sample.db, NAME, deep=True).problems
    again = repair(sample.db, NAME, apply=True)
    assert not again.problems
    assert not again.actions
    if place in STILL_ELSEWHERE:
        assert not done.lost.rows_of_the_newest_state
        assert expected(sample, done) == sample.rows()
    in_service(sample, expected(sample, done))


TOGETHER = [
    # The rows of an ingest count though its begin is gone, and is damaged itself.
    [("begin", "header"), ("ingested segment", "column block")],
    [("begin", "deleted"), ("ingested segment", "emptied"), ("manifest head", "body")],
    # Without its ingest a segment is only staged: nothing needs it.
    [("ingest", "deleted"), ("ingested segment", "emptied")],
    [("ingest", "truncated"), ("ingested segment", "column block")],
    # A damaged load that was never merged is none of the sources of a fold's segment.
    [("segment", "truncated"), ("bulk segment", "column block"), ("old segment", "truncated")],
    # Two holes in the log: rows acknowledged above the second must not be fenced away.
    [("fence", "deleted"), ("abort", "deleted")],
    [("fence", "deleted"), ("skip", "deleted"), ("manifest head", "footer")],
    # The generation that is made on the way names a damaged segment too: it was never anyone's.
    [("manifest head", "body"), ("segment", "key block")],
]
CHANCES = 4


def _several(seed):
    chance = random.Random(seed)
    rows = [row for row in TABLE if row not in UNTOLD]
    return list(dict(chance.choice(rows) for _ in range(chance.randint(2, 5))).items())


@pytest.mark.parametrize(
    "rows",
    [*TOGETHER, *map(_several, range(CHANCES))],
    ids=lambda rows: ", ".join(r[0] for r in rows),
)
def test_H17_H18_damage_in_several_places(copies, rows):
    """H17, H18: chosen, and at random: one repair mends all of it, and reports exactly the loss."""
    _mend_several(copies, rows)


@pytest.mark.slow
def test_H17_H18_damage_in_many_ways(copies):
    """H17, H18: the same for hundreds of combinations."""
    for seed in range(CHANCES, 300):
        _mend_several(copies, _several(seed))


def _mend_several(copies, rows):
    sample = copies.fresh()
    for place, how in rows:
        damage(sample.store, sample.places[place], how)
    expected_problems = {sample.places[place] for place, _ in rows} - _unnamed(sample)
    dry = repair(sample.db, NAME)
    done = repair(sample.db, NAME, apply=True)
    assert {p.object for p in done.problems} == expected_problems, rows
    assert (dry.problems, dry.lost) == (done.problems, done.lost), rows
    assert sorted(dry.actions) == sorted(done.actions), rows
    assert not verify(sample.db, NAME, deep=True).problems, rows
    assert not repair(sample.db, NAME, apply=True).actions, rows
    in_service(sample, expected(sample, done))


def _unnamed(sample):
    """Return the segment that nothing names, if not even the header of its ingest can be read.

    It is one of those that a job has staged and not committed, as far as the bucket shows.
    """
    key = sample.places["ingest"]
    lsn = int(key.rsplit("/", 1)[1].removesuffix(".wal"))
    left = read_remains(NamespaceContext(sample.store, USERS), [lsn], ())[lsn]
    return {sample.places["ingested segment"]} if left.header is None else set()


@pytest.mark.parametrize("place", LOG)
def test_H17_intact_parts_of_a_damaged_object_are_not_lost(copies, place):
    """H17: a wrong magic or footer takes nothing: the records' own checksums hold."""
    for how in ("magic", "version", "footer"):
        sample = copies.fresh()
        damage(sample.store, sample.places[place], how)
        report = repair(sample.db, NAME, apply=True)
        (lost,) = report.lost.lsns
        assert (lost.kind, lost.batches, lost.rows) == (
            header_of(copies.sample.store, sample.places[place]).kind.value,
            0,
            0,
        )
        assert not report.lost.rows_of_the_newest_state
        in_service(sample, sample.rows())


@pytest.mark.parametrize("place", BATCHES)
def test_H17_a_lost_batch_is_named(copies, place):
    """H17: LSN, kind, and how many batches and rows; only that LSN is missing afterwards."""
    sample = copies.fresh()
    lsn = header_of(sample.store, sample.places[place]).lsn
    damage(sample.store, sample.places[place], "record")
    report = repair(sample.db, NAME, apply=True)
    (lost,) = report.lost.lsns
    assert (lost.lsn, lost.kind, lost.batches, lost.rows) == (lsn, "batches", 1, 1)
    assert sample.rows([lsn]) != sample.rows()
    in_service(sample, sample.rows([lsn]))


def test_H17_an_unreadable_header_is_reported_as_unknown(copies):
    """H17: its content is unknown, and the report says so."""
    sample = copies.fresh()
    damage(sample.store, sample.places["fence"], "header")
    (lost,) = repair(sample.db, NAME, apply=True).lost.lsns
    assert (lost.kind, lost.batches, lost.rows, lost.is_loss) == (None, None, None, True)
    in_service(sample, sample.rows())


def test_H17_of_a_group_only_the_damaged_batch_is_lost():
    """H17: three clients' batches in one object, one of them damaged: two are kept."""
    db = reef.open("memory://")
    with db.writer(NAME) as writer:
        lsns = [
            writer.put(f"k{n}", b"%d" % n * 50, idempotency_key=f"key {n}").lsn for n in range(3)
        ]
    keys = [USERS.wal_object(lsn) for lsn in lsns]
    joined = [WalObject.decode(db.store.get(key), key) for key in keys]
    header = msgspec.structs.replace(
        joined[0].header, batches=tuple(b for found in joined for b in found.header.batches)
    )
    db.store.delete_many(keys[1:])
    body = WalObject.encode(header, tuple(r for found in joined for r in found.records))
    db.store.put(keys[0], body)
    flip(db.store, keys[0], body.index(b"1" * 50))
    report = repair(db, NAME, apply=True)
    (lost,) = report.lost.lsns
    assert (lost.batches, lost.rows, lost.saved_rows) == (1, 1, 2)
    assert lost.idempotency_keys == ("key 1",)
    with db.writer(NAME) as writer:
        assert dict(writer.scan()) == {b"k0": b"0" * 50, b"k2": b"2" * 50}
        assert writer.put("k0", b"0" * 50, idempotency_key="key 0").replayed
        assert not writer.put("k1", b"1" * 50, idempotency_key="key 1").replayed
    assert len(dict(db.reader(NAME).scan())) == 3


def test_H17_the_error_of_a_writer_names_repair(copies):
    """H17: the error of an opening names the object, and the command that helps."""
    for place in ("wal middle", "manifest head"):
        sample = copies.fresh()
        damage(sample.store, sample.places[place], "footer")
        with pytest.raises(CorruptionError) as caught:
            sample.db.writer(NAME)
        assert "reef repair" in caught.value.hint
        assert caught.value.context["object"] == sample.places[place]


def test_H17_the_old_writer_is_fenced():
    """H17: a writer that was there when its log was damaged commits nothing after the repair."""
    db = reef.open("memory://")
    with db.writer(NAME) as old:
        lsn = old.put("a", b"1").lsn
        old.put("b", b"2")
        damage(db.store, USERS.wal_object(lsn), "record")
        repair(db, NAME, apply=True)
        with pytest.raises(reef.FencedError):
            old.put("c", b"3")
    assert dict(db.reader(NAME).scan()) == {b"b": b"2"}


def test_H17_a_slot_that_was_emptied_and_filled_again_is_found(copies):
    """H17: a writer that opens fences the empty slot; rows acknowledged behind it are back."""
    sample = copies.fresh()
    key = sample.places["wal middle"]
    lsn = header_of(sample.store, key).lsn
    sample.store.delete(key)
    with sample.db.writer(NAME) as writer:
        assert b"c2" not in dict(writer.scan()), "it counts for nothing now"
    (problem,) = verify(sample.db, NAME).problems
    assert (problem.object, problem.lsn) == (key, lsn)
    repair(sample.db, NAME, apply=True)
    in_service(sample, sample.rows([lsn]))


class Counting:
    """Records how many tasks run concurrently."""

    def __init__(self, runtime):
        self._runtime = runtime
        self.at_once = []

    def map(self, task, parts):
        self.at_once.append((task.__name__, len(parts)))
        return self._runtime.map(task, parts)


def test_H27_segments_are_salvaged_one_at_a_time(copies):
    """H27: a damaged segment is held in memory as a whole; many of them are not, here."""
    sample = copies.fresh()
    for place in SEGMENTS:
        damage(sample.store, sample.places[place], "column block")
    executor = Counting(sample.store.runtime)
    repair(sample.db, NAME, apply=True, executor=executor)
    salvages = [count for name, count in executor.at_once if name == "run_salvage_task"]
    assert salvages == [1] * len(SEGMENTS)


def test_H32_a_sweep_is_not_stopped_by_a_lease_that_is_no_text(copies):
    """H32: it pins all that it may pin, as every unreadable lease does."""
    sample = copies.fresh()
    damage(sample.store, sample.places["lease"], "text")
    report = sweep(sample.db, NAME, apply=True, retain_generations_s=0.0)
    assert (report.applied, report.leases) == (True, 1)
    assert rebuild(sample.db, NAME).rows_equal


# --- manifests --------------------------------------------------------------------------


def test_H18_nothing_moves_backwards(copies):
    """H18: epoch, floor, window and last LSN seen are at least those of the damaged head."""
    sample = copies.fresh()
    damaged = copies.sample.head()
    damage(sample.store, sample.places["manifest head"], "body")
    report = repair(sample.db, NAME, apply=True)
    head = sample.head()
    assert head.generation == damaged.generation + 1 == report.generation
    assert head.skipped_generations == (damaged.generation,)
    assert head.writer_epoch > damaged.writer_epoch
    assert head.compactor_epoch >= damaged.compactor_epoch
    assert head.wal_floor >= damaged.wal_floor
    assert head.wal_id_last_seen >= damaged.wal_id_last_seen
    assert {entry.key for entry in head.dedup} >= {entry.key for entry in damaged.dedup}
    assert report.lost.since_generation == damaged.generation - 1
    assert report.lost.generations == (damaged.generation,)


def test_H18_an_epoch_without_any_fence_is_never_given_out_again(copies):
    """H18: a writer that raised its epoch and died left no trace but the damaged manifest."""
    sample = copies.fresh()
    publisher = Publisher(sample.store, USERS)
    for _ in range(3):
        lost = publisher.publish(lambda head: raise_writer_epoch(head, 1))
    for generation in range(lost.generation - 2, lost.generation + 1):
        flip(sample.store, USERS.manifest(generation), 40)
    repair(sample.db, NAME, apply=True)
    assert sample.head().writer_epoch > lost.writer_epoch
    assert len(sample.head().skipped_generations) == 3
    in_service(sample, sample.rows())


def test_H18_a_missing_head_is_detected_from_the_log(copies):
    """H18: the log has a writer of an epoch that no manifest knows any more."""
    sample = copies.fresh()
    head = copies.sample.head()
    sample.store.delete(USERS.manifest(head.generation))
    (problem,) = verify(sample.db, NAME).problems
    assert (problem.kind, problem.generation) == (ProblemKind.MANIFEST_MISSING, head.generation)
    repair(sample.db, NAME, apply=True)
    assert sample.head().writer_epoch > head.writer_epoch
    in_service(sample, sample.rows())


def test_H18_all_manifests_damaged_asks_for_rebuild(copies):
    """H18: there is no manifest to start from, and the error names rebuild."""
    sample = copies.fresh()
    for info in list(sample.store.list(USERS.manifests)):
        flip(sample.store, info.key, 40)
    for call in (verify, repair):
        with pytest.raises(CorruptionError) as caught:
            call(sample.db, NAME)
        assert "rebuild" in caught.value.hint


# --- losses in old views only -------------------------------------------------------------


def test_H17_the_log_below_the_floor_is_lost_to_old_views_only(copies):
    """H17: a folded object is in a segment; the head has its rows, a snapshot may lack them."""
    sample = copies.fresh()
    lsn = max(n for n in sample.written if n < sample.head().wal_floor - 3)
    damage(sample.store, USERS.wal_object(lsn), "record")
    report = repair(sample.db, NAME, apply=True)
    (lost,) = report.lost.lsns
    assert (lost.lsn, lost.history_only, lost.is_loss) == (lsn, True, False)
    assert sample.head().skipped_lsns == (lsn,)
    in_service(sample, sample.rows())


def test_a_snapshot_that_needs_no_lost_object_is_kept(copies):
    """Damage elsewhere leaves it as it is, to the row."""
    sample = copies.fresh()
    damage(sample.store, sample.places["segment"], "key block")
    damage(sample.store, sample.places["wal middle"], "record")
    before = dict(copies.sample.db.reader(NAME, snapshot="first").scan())
    repair(sample.db, NAME, apply=True)
    assert dict(sample.db.reader(NAME, snapshot="first").scan()) == before


def test_a_snapshot_of_a_damaged_segment_is_released_and_named(copies):
    """Its rows cannot be read as they were; the report names the snapshot."""
    sample = copies.fresh()
    damage(sample.store, sample.places["old segment"], "deleted")
    report = repair(sample.db, NAME, apply=True)
    assert report.lost.snapshots == ("first",)
    assert not report.lost.rows_of_the_newest_state
    assert sample.db.snapshots(NAME) == []


# --- unreferenced objects -------------------------------------------------------------------


def test_damage_to_unreferenced_objects_is_no_problem(copies):
    """An orphan, and the log below every floor, may hold anything."""
    sample = copies.fresh()
    sample.store.put(USERS.segment("ORPHAN"), b"nonsense")
    report = verify(sample.db, NAME, deep=True)
    assert report.ok
    (note,) = report.notes
    assert (note.kind, note.segment, note.severity) == (ProblemKind.ORPHAN, "ORPHAN", Severity.INFO)
    assert not repair(sample.db, NAME).actions


def test_the_remains_of_nonsense_are_nothing(copies):
    """Bytes that are no object of the log are read as such, whatever they are."""
    sample = copies.fresh()
    for number, body in enumerate((b"", b"\0" * 100, b"\xff" * 100, bytes(range(256)))):
        sample.store.put(USERS.wal_object(1000 + number), body)
    found = read_remains(
        NamespaceContext(sample.store, USERS), range(1000, 1004), sample.head().schemas
    )
    assert all(left.header is None and not left.has_contents for left in found.values())
