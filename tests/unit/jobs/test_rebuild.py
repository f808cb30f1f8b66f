"""Rebuild: the choice among segments, the derived fields, and when it is published."""

import msgspec
import pyarrow as pa
import pytest

import reef
from reef.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError
from reef.formats.covers import Cover, clipped, overlap, tidied, without
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.segment import BlockRange, Footer, covers_of
from reef.jobs import fold, rebuild
from reef.jobs.evidence.gather import SegmentCandidate, choose
from reef.manifest.edits import new_namespace
from reef.manifest.head import Publisher
from tests.support.rebuild import (
    EVENTS,
    NAME,
    compact_these,
    head_of,
    open_mortal,
    rows_of,
    segment_ids,
)

NO_LOG = Cover(100, 100)
M = b"m"


# --- covers -----------------------------------------------------------------------------


def test_covers_are_cut_and_put_together():
    """The removed and the remaining ranges add up to the whole."""
    whole = Cover(1, 10)
    hole = Cover(3, 5, b"c", b"k")
    left = without([whole], [hole])
    assert not overlap(left, [hole])
    assert tidied([*left, hole]) == (whole,)
    assert without([whole], [whole]) == []
    assert without([hole], [whole]) == []


def test_covers_are_clipped_to_keys():
    """The outputs of a merge share the LSNs of its inputs, and leave none out."""
    inputs = [Cover(1, 5), Cover(5, 9, M), Cover(9, 12, b"", M)]
    low, high = clipped(inputs, b"", M), clipped(inputs, M, None)
    assert low == (Cover(1, 5, b"", M), Cover(9, 12, b"", M))
    assert high == (Cover(1, 9, M),)
    assert without(inputs, [*low, *high]) == []


def test_neighbours_of_an_ingest_do_not_overlap():
    """Where a range tombstone of one ends, the next one begins."""
    place = BlockRange(16, 8)
    footer = Footer(1, DEFAULT_SCHEMA, 0, 1, 0, b"a", b"c", 0, 0, "0" * 32, "w", 0, place, place)
    (alone,) = covers_of(footer, 7)
    (with_range,) = covers_of(msgspec.structs.replace(footer, range_tombstones=place), 7)
    assert alone == Cover(7, 8, b"a", b"c\0")
    assert with_range == Cover(7, 8, b"a", b"c")
    assert covers_of(msgspec.structs.replace(footer, covers=(Cover(1, 3),)), 0) == (Cover(1, 3),)


# --- the choice -------------------------------------------------------------------------


def chosen(*candidates, log=NO_LOG):
    """Return the chosen segments, by name, and the lost LSNs."""
    choice = choose(candidates, log)
    return {candidate.id for candidate in choice.chosen}, choice.holes


def piece(name, generation, *covers, unit=None, **given):
    """Return a candidate."""
    return SegmentCandidate(name, generation, covers, unit=unit or name, **given)


FOLDS = (
    piece("a", 1, Cover(1, 3), whole_keys=True),
    piece("b", 2, Cover(3, 5), whole_keys=True),
    piece("c", 3, Cover(5, 7), whole_keys=True),
)


def test_what_overlaps_nothing_counts():
    """Folds one after the other."""
    assert chosen(*FOLDS) == ({"a", "b", "c"}, ())


def test_a_merge_takes_the_place_of_its_inputs():
    """Whether they are there or not."""
    merge = piece("ab", 4, Cover(1, 5))
    assert chosen(*FOLDS, merge) == ({"ab", "c"}, ())
    assert chosen(FOLDS[2], merge) == ({"ab", "c"}, ())


def test_half_a_merge_counts_for_nothing():
    """If its inputs are there, they count."""
    half = piece("ab1", 4, Cover(1, 5, b"", M), unit="job", lacks_siblings=True)
    assert chosen(*FOLDS, half) == ({"a", "b", "c"}, ())


def test_many_jobs_may_have_died_half_way():
    """Each on its own: their inputs count, for all of them."""
    folds = [piece(f"f{n}", n + 1, Cover(n, n + 1), whole_keys=True) for n in range(1, 41)]
    halves = [
        piece(f"h{n}", 100 + n, Cover(n, n + 2, b"", M), lacks_siblings=True)
        for n in range(1, 40, 2)
    ]
    names, holes = chosen(*folds, *halves)
    assert (names, holes) == ({candidate.id for candidate in folds}, ())


def test_half_a_merge_counts_where_an_input_is_gone():
    """Then it was published, and nothing was left of its other half."""
    half = piece("ab1", 4, Cover(1, 5, b"", M), unit="job", lacks_siblings=True)
    assert chosen(FOLDS[0], FOLDS[2], half) == ({"ab1", "c"}, ())


def test_of_rivals_the_later_counts_unless_that_leaves_a_hole():
    """Each alone is right, both together are not."""
    early, late = piece("ab", 4, Cover(1, 5)), piece("bc", 5, Cover(3, 7))
    assert chosen(*FOLDS, early, late) == ({"a", "bc"}, ())
    assert chosen(FOLDS[2], early, late) == ({"ab", "c"}, ())  # without a, bc would lose it
    assert chosen(FOLDS[0], late, early) == ({"a", "bc"}, ())


def test_half_a_fold_counts_for_nothing_if_the_log_has_it():
    """And for its own LSNs, if the log has not; then the rest is lost."""
    half = piece("d1", 4, Cover(7, 9, b"", M), whole_keys=True)
    assert chosen(*FOLDS, half, log=Cover(7, 12)) == ({"a", "b", "c"}, ())
    names, holes = chosen(*FOLDS, half, log=Cover(9, 12))
    assert names == {"a", "b", "c", "d1"}
    assert holes == (Cover(7, 9, M),)


def test_lost_lsns_are_reported():
    """No choice is without a hole: the one that loses least is taken."""
    early, late = piece("ab", 4, Cover(1, 5)), piece("bc", 5, Cover(3, 7))
    names, holes = chosen(early, late)
    assert names in ({"ab"}, {"bc"})
    assert sum(hole.end - hole.first for hole in holes) == 2


def test_segments_without_covers_go_by_their_ancestors():
    """As written by a release that did not know them."""
    merge = SegmentCandidate("ab", 4, (), frozenset({"a", "b"}), "ab")
    assert chosen(*FOLDS, merge) == ({"ab", "c"}, ())


def test_an_ingest_is_never_in_doubt():
    """A merge that has it replaces it; where there is none, it counts."""
    ingest = piece("i", 0, Cover(3, 4, b"a", b"c"))
    fold_of = piece("f", 2, Cover(1, 3), Cover(4, 6), whole_keys=True)
    merge = piece("m", 3, Cover(1, 3), Cover(3, 4, b"a", b"c"), Cover(4, 6))
    assert chosen(ingest, fold_of) == ({"i", "f"}, ())
    assert chosen(ingest, fold_of, merge) == ({"m"}, ())


def test_the_floor_is_behind_folds_and_not_behind_ingests():
    """An ingest stays in the log for ever, and says nothing of how far that was folded."""
    choice = choose([*FOLDS, piece("i", 0, Cover(20, 21))], Cover(7, 30))
    assert choice.end == 7


# --- derived fields ---------------------------------------------------------------------


@pytest.fixture
def db():
    """A namespace with two columns and a row in the log."""
    found = open_mortal()
    found.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int32())]))
    with found.writer(NAME, background=False, max_parallel_writes=3) as writer:
        writer.upsert([{"id": "a", "x": 1}], idempotency_key="first")
    return found


def lose_manifests(db):
    """Delete every manifest there is."""
    db.store.delete_many([info.key for info in db.store.list(EVENTS.manifests)])


def test_the_state_is_that_of_the_head(db):
    """Epoch, floor, schemas, parallel writes, window and write ids, from log and footers."""
    db.alter(NAME, pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.string())]))
    with db.writer(NAME, background=False, max_parallel_writes=3) as writer:
        writer.upsert([{"id": "b", "x": 2**40, "y": "z"}], idempotency_key="second")
    fold(db, NAME)
    before = head_of(db)
    lose_manifests(db)
    report = rebuild(db, NAME, apply=True)
    after = head_of(db)
    assert (report.applied, report.generation) == (True, after.generation)
    for field in (
        "schemas",
        "segments",
        "wal_floor",
        "dedup",
        "below_floor",
        "max_parallel_writes",
    ):
        assert getattr(after, field) == getattr(before, field), field
    assert after.writer_epoch > before.writer_epoch
    assert after.generation > before.generation
    assert after.oldest_retained == after.generation
    with db.writer(NAME, background=False) as writer:  # a repeated batch is known
        assert writer.upsert([{"id": "a", "x": 1}], idempotency_key="second-2").replayed is False
        again = writer.upsert([{"id": "b", "x": 2**40, "y": "z"}], idempotency_key="second")
        assert again.replayed


def test_a_dry_run_writes_nothing(db):
    """It only reports the manifest it would publish and the fields it cannot derive."""
    lose_manifests(db)
    before = {info.key for info in db.store.list()}
    report = rebuild(db, NAME)
    assert {info.key for info in db.store.list()} == before
    assert (report.applied, report.generation, report.rows_equal) == (False, 0, None)
    listed = " ".join(report.not_derivable)
    for word in ("idempotency keys", "stream marks", "snapshots", "cursors", "grace", "schema"):
        assert word in listed
    assert report.to_dict()["rows"] == 1


def test_an_intact_head_is_left_alone(db):
    """With the same rows there is nothing to do, by force or not."""
    for force in (False, True):
        with pytest.raises(InvalidInputError, match="same rows"):
            rebuild(db, NAME, apply=True, force=force)


def damaged_head(db):
    """Publish a head that has lost its segments."""
    fold(db, NAME)
    Publisher(db.store, EVENTS).publish(lambda head: msgspec.structs.replace(head, segments=()))


def test_a_head_with_other_rows_is_replaced_by_force_only(db):
    """And keeps what only it knows."""
    snapshot = db.snapshot(NAME, name="kept")
    damaged_head(db)
    assert rows_of(db) == []
    report = rebuild(db, NAME)
    assert (report.rows_equal, report.rows) == (False, 1)
    assert any("but not published" in difference for difference in report.differences)
    with pytest.raises(InvalidInputError, match="shows other rows"):
        rebuild(db, NAME, apply=True)
    epoch = head_of(db).writer_epoch
    report = rebuild(db, NAME, apply=True, force=True)
    assert report.generation == head_of(db).generation
    assert rows_of(db) == [{"id": "a", "x": 1}]
    assert [kept.id for kept in head_of(db).snapshots] == [snapshot.id]
    assert head_of(db).writer_epoch > epoch
    assert rebuild(db, NAME).rows_equal


def test_a_rebuild_does_not_continue_from_a_head_that_was_made_afterwards(db):
    """An older release made a new namespace over a log without manifests."""
    for _ in range(3):
        with db.writer(NAME, background=False) as writer:
            writer.upsert([{"id": "b", "x": 2}])
        fold(db, NAME)
    lose_manifests(db)
    narrower = Schema.of(pa.schema([("id", pa.string()), ("x", pa.int32())]), "id")
    Publisher(db.store, EVENTS).create(new_namespace(narrower))
    with pytest.raises(ConflictError, match="traces of generation"):
        rebuild(db, NAME, apply=True, force=True)
    lose_manifests(db)
    rebuild(db, NAME, apply=True)
    assert [row["id"] for row in rows_of(db)] == ["a", "b"]


def test_a_damaged_head_is_for_repair(db):
    """Rebuild takes its place only when no manifest is left."""
    db.store.put(EVENTS.manifest(head_of(db).generation), b"{}")
    with pytest.raises(CorruptionError, match="damaged") as raised:
        rebuild(db, NAME, apply=True)
    assert "repair" in raised.value.hint
    lose_manifests(db)
    assert rebuild(db, NAME, apply=True).rows == 1


def test_nothing_is_rebuilt_from_nothing(db):
    """A namespace of which there was never more than a manifest leaves no trace."""
    db.create("other")
    for name in ("other", "never"):
        with pytest.raises(NotFoundError, match="neither a log nor a segment"):
            rebuild(db, name, apply=True)


def test_losses_are_reported_and_need_force(db):
    """A damaged object of the log, or a segment that is gone, is named."""
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "b", "x": 2}])
        last = writer.upsert([{"id": "c", "x": 3}]).lsn
    key = EVENTS.wal_object(last - 1)
    db.store.put(key, b"x" * 100)
    lose_manifests(db)
    report = rebuild(db, NAME)
    assert report.problems == (f"LSN {last - 1} cannot be read, and no segment covers it",)
    with pytest.raises(InvalidInputError, match=f"LSN {last - 1} cannot be read"):
        rebuild(db, NAME, apply=True)
    assert rebuild(db, NAME, apply=True, force=True).applied
    assert [row["id"] for row in rows_of(db)] == ["a", "c"]
    assert head_of(db).skipped_lsns == (last - 1,)


def test_slots_that_a_repair_voided_are_skipped_silently(db):
    """Its copy is in quarantine: that was decided before."""
    with db.writer(NAME, background=False) as writer:
        lsn = writer.upsert([{"id": "b", "x": 2}]).lsn
    db.store.put(EVENTS.wal_object(lsn), b"x" * 100)
    db.store.put(EVENTS.quarantined(EVENTS.wal_object(lsn)), b"x" * 100)
    lose_manifests(db)
    report = rebuild(db, NAME, apply=True)
    assert report.problems == ()
    assert head_of(db).skipped_lsns == (lsn,)
    assert [row["id"] for row in rows_of(db)] == ["a"]


def test_a_segment_that_is_lost_is_named(db):
    """One output of a fold is gone, and its rows with it."""
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": key, "x": 1} for key in "bcdefgh"])
        fold(db, NAME, segment_bytes_max=40)
        for _ in range(3):
            writer.upsert([{"id": "z", "x": 1}])
        fold(db, NAME)
    gone = head_of(db).segments[-1].id
    db.store.delete(EVENTS.segment(gone))
    for lsn in range(1, head_of(db).wal_floor - 1):
        db.store.delete(EVENTS.wal_object(lsn))
    report = rebuild(db, NAME)
    assert any(problem.startswith("no object has LSN") for problem in report.problems)
    db.store.put(EVENTS.segment(gone), b"no segment at all")
    report = rebuild(db, NAME)
    assert f"segment {gone} cannot be read" in report.problems


def test_two_rebuilds_at_once(db):
    """One of them publishes; the other gets a conflict."""
    lose_manifests(db)
    inner = db.store.create
    raced = []

    def create(key, body):
        if "/manifest/" in key and not raced:
            raced.append(key)
            rebuild(reef.Database(db.store), NAME, apply=True)
        return inner(key, body)

    db.store.create = create
    with pytest.raises(ConflictError, match="another rebuild"):
        rebuild(db, NAME, apply=True)
    assert [row["id"] for row in rows_of(db)] == ["a"]


def test_generations_that_leases_name_count_too(db):
    """A reader that was pinned on a lost generation raises."""
    for _ in range(5):
        db.snapshot(NAME)
    with db.reader(NAME, pin=True) as pinned:
        lose_manifests(db)
        report = rebuild(db, NAME, apply=True)
        assert report.generation == pinned.generation + 1_000_000


def test_the_cost_in_requests(db):
    """A segment that does not count costs one GET, for its footer."""
    with db.writer(NAME, background=False) as writer:
        for number in range(4):
            writer.upsert([{"id": f"k{number}", "x": 1}])
            fold(db, NAME)
    compact_these(db, lambda segment: True)
    lose_manifests(db)
    calls = []
    inner = db.store.get_range

    def get_range(key, start, end):
        calls.append(key)
        return inner(key, start, end)

    db.store.get_range = get_range
    report = rebuild(db, NAME)
    assert len(segment_ids(db)) == 5
    assert len(report.segments) == 1
    left_out = [call for call in calls if any(i in call for i in report.left_out)]
    assert len(left_out) == len(report.left_out)


def test_an_executor_may_run_the_tasks(db):
    """The three kinds that there are."""
    fold(db, NAME)
    sent = []

    class Sending:
        def map(self, run, tasks):
            sent.extend(run.__name__ for _ in tasks)
            return [run(task) for task in tasks]

    assert rebuild(db, NAME, executor=Sending()).rows_equal
    assert set(sent) == {"run_footer_task", "run_header_task", "run_checksum_task"}
