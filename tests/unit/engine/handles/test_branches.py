"""Branches: rows of a point in time, without a copy, whatever either side does afterwards."""

import msgspec
import pyarrow as pa
import pytest

import reef
from reef.engine.handles.database import Database
from reef.engine.namespaces import Namespaces
from reef.engine.registry import Registry
from reef.errors import ConflictError
from reef.formats.manifest import Recent, encode_manifest
from reef.jobs import ProblemKind, compact, fold, ingest, rebuild, sweep, verify
from reef.jobs.branches import ref_of
from reef.manifest.branching import let_origin_go
from reef.manifest.head import locate
from reef.stores import Wrapper, agree_on_cas
from reef.stores.memory import MemoryStore
from tests.property import branch_machine
from tests.support.requests import Requests
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, At, World

CHILD = "child"
HOUR_S = 3600.0


def rows_of(db, name, **options):
    """Return the rows that a new reader sees."""
    with db.reader(name, **options) as reader:
        return dict(reader.scan())


@pytest.fixture
def world():
    """Give a namespace with folded rows, a load, and rows in the log."""
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        writer.put("b", b"1")
        fold(world.db, NAME)
        writer.put("b", b"2")
        ingest(world.db, NAME, [{"id": b"c", "value": b"loaded"}])
        writer.delete("a")
    return world


BEFORE = {b"b": b"2", b"c": b"loaded"}


def sweep_out(world, *names, rounds=2):
    """Sweep namespaces until all that was condemned is deleted."""
    for _ in range(rounds):
        for name in names:
            world.run(
                lambda name=name: sweep(
                    world.db, name, apply=True, force=True, retain_generations_s=0.0
                )
            )
        world.advance(GRACE_S + 10)


def head_of(world, name):
    """Return the head of a namespace, dropped or not."""
    return locate(world.bucket, name, dropped=True).found.manifest


# --- rows -------------------------------------------------------------------------------


def test_both_sides_go_their_own_way(world):
    """Neither sees the writes of the other; the branch has the log of its origin too."""
    world.db.branch(NAME, CHILD)
    with world.db.writer(NAME, background=False) as origin:
        origin.put("b", b"origin")
    with world.db.writer(CHILD, background=False) as child:
        assert dict(child.scan()) == BEFORE
        child.put("mine", b"1")
        child.delete("c")
    assert rows_of(world.db, CHILD) == {b"b": b"2", b"mine": b"1"}
    assert rows_of(world.db, NAME) == {**BEFORE, b"b": b"origin"}
    for name in (NAME, CHILD):
        fold(world.db, name)
        assert verify(world.db, name, deep=True).problems == []
    assert rows_of(world.db, CHILD) == {b"b": b"2", b"mine": b"1"}


def test_branches_of_past_states(world):
    """By generation, LSN, snapshot and time."""
    pin = world.db.snapshot(NAME)
    lsn = world.db.reader(NAME, pin=True).last_lsn
    world.advance(10)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("later", b"1")
    world.db.branch(NAME, "by-lsn", at={"lsn": lsn})
    world.db.branch(NAME, "by-snapshot", at=pin)
    world.db.branch(NAME, "by-generation", at=pin.generation)
    for name in ("by-lsn", "by-snapshot", "by-generation"):
        assert rows_of(world.db, name) == BEFORE
        assert rows_of(world.db, name, as_of={"lsn": lsn}) == BEFORE
    assert b"later" in rows_of(world.db, NAME)


def test_an_lsn_that_is_not_written_yet_is_no_point_to_branch_from(world):
    """Nothing is pinned then."""
    with pytest.raises(reef.NotFoundError, match="not in the log"):
        world.db.branch(NAME, CHILD, at={"lsn": 10_000})
    assert not head_of(world, NAME).branches


def test_a_branch_of_a_branch_reads_two_logs(world):
    """Neither of them folded."""
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("mine", b"1")
    world.db.branch(CHILD, "grandchild")
    assert rows_of(world.db, "grandchild") == {**BEFORE, b"mine": b"1"}
    assert len(head_of(world, NAME).branches) == 2
    fold(world.db, "grandchild")
    compact(world.db, "grandchild", full=True)
    assert rows_of(world.db, "grandchild") == {**BEFORE, b"mine": b"1"}
    assert verify(world.db, "grandchild", deep=True).problems == []


def test_keys_of_the_origin_are_known_to_the_branch(world):
    """A batch that was committed before the branch is not applied again in it."""
    with world.db.writer(NAME, background=False) as writer:
        writer.write(reef.Batch().put("k", b"1"), idempotency_key="once")
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("k", b"2")
        assert writer.write(reef.Batch().put("k", b"1"), idempotency_key="once").replayed
    assert rows_of(world.db, CHILD)[b"k"] == b"2"


def test_changes_of_a_branch_begin_with_those_that_it_inherited(world):
    """Up to the branch they are those of the origin."""
    expected = [(c.op, c.key, c.lsn) for c in world.db.reader(NAME).changes(after_lsn=0)]
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        lsn = writer.put("mine", b"1").lsn
    found = [(c.op, c.key, c.lsn) for c in world.db.reader(CHILD).changes(after_lsn=3)]
    assert found == [*(c for c in expected if c[2] > 3), ("put", b"mine", lsn)]


def test_columns_that_were_added_are_inherited():
    """The schema of the branch is that of the point in time."""
    db = reef.open("memory://")
    db.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "a", "x": 1}])
    old = db.info(NAME).generation
    wide = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
    db.alter(NAME, wide)
    db.branch(NAME, "new")
    db.branch(NAME, "old", at=old)
    assert db.info("new").schema.names == ["id", "x", "y"]
    assert db.info("old").schema.names == ["id", "x"]


# --- names ------------------------------------------------------------------------------


def test_a_name_that_is_in_use_is_refused(world):
    """And nothing stays pinned."""
    world.db.create(CHILD)
    with pytest.raises(reef.ConflictError, match="exists"):
        world.db.branch(NAME, CHILD)
    assert not head_of(world, NAME).branches


def test_a_dropped_name_can_become_a_branch(world):
    """It is a new incarnation; the dropped one stays apart (H48, H65)."""
    with world.db.writer(CHILD, create=True, background=False) as writer:
        writer.put("old", b"1")
    world.db.drop(CHILD)
    world.db.branch(NAME, CHILD)
    assert rows_of(world.db, CHILD) == BEFORE
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("new", b"1")
    fold(world.db, CHILD)
    assert rows_of(world.db, CHILD) == {**BEFORE, b"new": b"1"}
    assert verify(world.db, CHILD, deep=True).problems == []


def test_the_origin_may_be_dropped_and_created_again(world):
    """The branch reads the objects of the incarnation that it was made of."""
    world.db.branch(NAME, CHILD)
    world.db.drop(NAME)
    world.advance(DAY_S + 60)
    sweep_out(world, NAME, rounds=3)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("other", b"1")
    sweep_out(world, NAME, rounds=3)
    assert rows_of(world.db, CHILD) == BEFORE
    assert rows_of(world.db, NAME) == {b"other": b"1"}


def test_a_renamed_namespace_can_be_branched(world):
    """Its objects stay in their folder."""
    world.db.rename(NAME, "people")
    world.db.branch("people", CHILD)
    world.db.rename(CHILD, "copy")
    assert rows_of(world.db, "copy") == BEFORE


# --- pins -------------------------------------------------------------------------------


def test_H42_a_branch_keeps_what_its_origin_has_superseded(world):
    """H42, H34: segments, log and manifest, through compactions and sweeps, and nothing else."""
    world.db.branch(NAME, CHILD)
    with world.db.writer(NAME, background=False) as writer:
        for number in range(20):
            writer.put("b", b"%d" % number)
            fold(world.db, NAME)
        compact(world.db, NAME, full=True)
    world.advance(2 * HOUR_S)
    sweep_out(world, NAME, rounds=3)
    assert rows_of(world.db, CHILD) == BEFORE
    pin = head_of(world, CHILD).origin
    fence = pin.last_lsn + 1
    assert [lsn for lsn in world.slots() if fence < lsn < 20] == [], "only up to the branch"
    assert len(world.keys("segments")) == 3, "one of the branch, its load, and one of the head"
    assert verify(world.db, CHILD, deep=True).problems == []


def test_a_branch_that_has_compacted_releases_its_origin(world):
    """Then the origin can be swept as if there were no branch."""
    world.db.branch(NAME, CHILD)
    fold(world.db, CHILD)
    compact(world.db, CHILD, full=True)
    compact(world.db, NAME, full=True)
    sweep_out(world, CHILD, rounds=3)
    assert not head_of(world, CHILD).pinned_homes
    assert not head_of(world, NAME).branches
    fold(world.db, NAME)
    compact(world.db, NAME, full=True)
    sweep_out(world, NAME, rounds=3)
    assert len(world.keys("segments")) == 1
    assert rows_of(world.db, CHILD) == BEFORE
    assert verify(world.db, CHILD, deep=True).problems == []


def test_a_fold_does_not_release_the_origin():
    """A branch of rows that were all in the log could not be merged after a fold and a sweep.

    It needed no object of its origin any more, and released the state that a merge compares with.
    """
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        writer.put("b", b"1")
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("a", b"2")
    for name in (CHILD, NAME):
        fold(world.db, name)
        compact(world.db, name)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert world.db.merge(CHILD, NAME).written == 1
    assert rows_of(world.db, NAME) == {b"a": b"2", b"b": b"1"}
    compact(world.db, CHILD, full=True)  # there is nothing left to rewrite
    sweep_out(world, CHILD, NAME, rounds=4)
    assert not head_of(world, CHILD).pinned_homes
    assert not head_of(world, NAME).branches


def test_a_branch_that_is_undropped_can_be_merged():
    """Until then it can be undropped, and merged."""
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("b", b"1")
    fold(world.db, CHILD)
    world.db.drop(CHILD)
    sweep_out(world, CHILD, NAME, rounds=3)
    assert head_of(world, NAME).branches
    world.db.undrop(CHILD)
    assert world.db.merge(CHILD, NAME).written == 1
    world.db.drop(CHILD)
    world.advance(2 * DAY_S)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert not head_of(world, NAME).branches


def test_a_partly_rewritten_branch_holds_its_origin(world):
    """A full compaction that was overtaken has not made the branch independent."""
    world.db.branch(NAME, CHILD)
    assert let_origin_go(head_of(world, CHILD)) is None
    assert let_origin_go(head_of(world, NAME)) is None


def test_a_snapshot_of_a_branch_holds_its_origin(world):
    """It names segments that the head does not name any more."""
    world.db.branch(NAME, CHILD)
    fold(world.db, CHILD)
    pin = world.db.snapshot(CHILD)
    compact(world.db, CHILD, full=True)
    fold(world.db, NAME)
    compact(world.db, NAME, full=True)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert rows_of(world.db, CHILD, snapshot=pin) == BEFORE
    pin.release()
    sweep_out(world, CHILD, NAME, rounds=4)
    assert not head_of(world, NAME).branches


def test_a_snapshot_of_a_branch_holds_the_log_of_its_origin():
    """A branch of rows that are in the log alone."""
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    world.db.branch(NAME, CHILD)
    pin = world.db.snapshot(CHILD)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("later", b"1")
    for name in (CHILD, NAME):
        fold(world.db, name)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert rows_of(world.db, CHILD, snapshot=pin) == {b"a": b"1"}


def test_a_pinned_reader_of_a_branch_holds_its_origin(world):
    """Its lease does, though no generation is retained."""
    world.db.branch(NAME, CHILD)
    reader = world.db.reader(CHILD, pin=True, lease_ttl_s=DAY_S)
    fold(world.db, CHILD)
    compact(world.db, CHILD, full=True)
    fold(world.db, NAME)
    compact(world.db, NAME, full=True)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert dict(reader.scan()) == BEFORE
    reader.close()


def test_a_dropped_branch_releases_its_origin_when_it_is_cleared(world):
    """Until then it can be undropped."""
    world.db.branch(NAME, CHILD)
    world.db.drop(CHILD)
    sweep_out(world, CHILD)
    world.db.undrop(CHILD)
    assert rows_of(world.db, CHILD) == BEFORE
    world.db.drop(CHILD)
    world.advance(DAY_S + 60)
    sweep_out(world, CHILD, rounds=4)
    assert not head_of(world, NAME).branches


class Stalled(Wrapper):
    """Runs a call before the first manifest of a namespace is created."""

    def __init__(self, inner, prefix, call):
        super().__init__(inner)
        self._prefix, self._call = prefix, call

    def create(self, key, body):
        if key.startswith(self._prefix) and self._call is not None:
            call, self._call = self._call, None
            call()
        return self.inner.create(key, body)


def test_H42_a_creator_that_stalls_after_its_pin_finds_its_name_taken(world):
    """H42: the collector of the origin drops the name first, and only then unpins."""

    def collect():
        world.advance(2 * HOUR_S)
        sweep_out(world, NAME)

    db = Database(Stalled(world.bucket, f"namespaces/{CHILD}/manifest/", collect))
    with pytest.raises(reef.ConflictError, match="exists"):
        world.run(lambda: db.branch(NAME, CHILD))
    assert CHILD not in world.db.namespaces()
    assert not head_of(world, NAME).branches
    world.db.branch(NAME, CHILD)
    assert rows_of(world.db, CHILD) == BEFORE


def test_the_pin_of_a_creator_that_lost_is_removed(world):
    """Whether it removes it itself, or died before."""

    def rival():
        world.db.branch(NAME, CHILD)

    db = Database(Stalled(world.bucket, f"namespaces/{CHILD}/manifest/", rival))
    with pytest.raises(reef.ConflictError):
        db.branch(NAME, CHILD)
    assert len(head_of(world, NAME).branches) == 1
    (pin,) = head_of(world, NAME).branches.values()
    world.publish(branches={**head_of(world, NAME).branches, "lost": pin})
    world.advance(2 * HOUR_S)
    sweep_out(world, NAME)
    assert list(head_of(world, NAME).branches) == [head_of(world, CHILD).origin.id]


def test_a_released_generation_cannot_be_branched(world):
    """A branch of an old generation of a branch, after its origin was released."""
    world.db.branch(NAME, CHILD)
    old = head_of(world, CHILD).generation
    fold(world.db, CHILD)
    compact(world.db, CHILD, full=True)
    sweep_out(world, CHILD, rounds=3)
    with pytest.raises(reef.NotFoundError) as raised:
        world.db.branch(CHILD, "late", at=old)
    assert raised.value.kind == "collected"


def test_a_rebuilt_origin_still_knows_its_branches(world):
    """H42, H49: its manifests are lost; the branch is found by its own, and loses nothing."""
    world.db.branch(NAME, CHILD)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("b", b"later")
    for info in list(world.bucket.list(world.names.manifests)):
        world.bucket.delete(info.key)
    rebuild(world.db, NAME, apply=True)
    assert list(head_of(world, NAME).branches) == [head_of(world, CHILD).origin.id]
    fold(world.db, NAME)
    compact(world.db, NAME, full=True)
    world.advance(2 * HOUR_S)
    sweep_out(world, NAME, rounds=3)
    assert rows_of(world.db, CHILD) == BEFORE
    fold(world.db, CHILD)
    compact(world.db, CHILD, full=True)
    sweep_out(world, CHILD, NAME, rounds=4)
    assert not head_of(world, NAME).branches
    assert len(world.keys("segments")) == 1, "nothing is held any more"


# --- cost -------------------------------------------------------------------------------


def with_segments(world, count):
    """Publish a manifest that names one object under many ids."""
    with world.db.writer(NAME, background=False) as writer:
        writer.put("k", b"1")
    fold(world.db, NAME)
    head = world.head()
    (entry,) = head.segments
    ids = [f"copy-{number:05}" for number in range(count)]
    copies = [msgspec.structs.replace(entry, id=segment_id) for segment_id in ids]
    following = msgspec.structs.replace(
        head,
        generation=head.generation + 1,
        write_id="many",
        segments=tuple(copies),
        sums=None,
        recent=(*head.recent, Recent(head.generation + 1, "many", head.published_at_ms)),
    )
    world.bucket.create(world.names.manifest(following.generation), encode_manifest(following))


def test_a_branch_costs_the_same_at_any_size():
    """Of an empty namespace, and of one with 10,000 segments."""
    costs = []
    for count in (0, 10_000):
        world = World()
        world.db.create(NAME)
        if count:
            with_segments(world, count)
        counted = Requests(world.bucket)
        db = Database(counted)
        db._proved = True
        costs.append(counted.cost(lambda db=db: db.branch(NAME, CHILD)))
        assert len(head_of(world, CHILD).segments) == count
    assert costs[0] == costs[1]
    assert 5 <= costs[0] <= 13


def test_operations_cost_the_same_among_many_namespaces_and_branches():
    """200 namespaces and 1,000 branches in one bucket, with the registry that `reef.open` gives."""
    counted = Requests(MemoryStore())
    agree_on_cas(counted)
    db = Database(counted, registry=Registry(counted))
    db._proved = True

    def make(name):
        with db.writer(name, create=True, background=False) as writer:
            writer.put("a", b"1")

    def read(name):
        with db.reader(name) as reader:
            assert reader.get("a") == b"1"

    def costs(suffix):
        """Return the cost of each operation on names that are new to this process."""
        source, name = f"source-{suffix}", f"branch-{suffix}"
        return {
            "create and put": counted.cost(lambda: make(source)),
            "branch": counted.cost(lambda: db.branch(source, name)),
            "read": counted.cost(lambda: read(name)),
            "diff": counted.cost(lambda: list(db.diff(source, name))),
            "merge": counted.cost(lambda: db.merge(name, source)),
            "sweep": counted.cost(lambda: sweep(db, source, apply=True)),
            "drop": counted.cost(lambda: db.drop(name)),
        }

    make("before")  # the first one makes the registry
    alone = costs("first")
    for number in range(200):
        make(f"ns{number}")
    for number in range(1000):
        db.branch(f"ns{number % 200}", f"b{number}")
    assert costs("last") == alone
    assert len(db.namespaces()) == 1203


def test_objects_that_a_branch_shares_are_no_orphans(world):
    """The origin has compacted them away, and its verify reports nothing of them."""
    fold(world.db, NAME)
    world.db.branch(NAME, CHILD)
    compact(world.db, NAME, full=True)
    world.advance(DAY_S)
    sweep_out(world, NAME)
    assert len(world.keys("segments")) > 1
    kinds = {note.kind for note in verify(world.db, NAME, deep=True).notes}
    assert kinds <= {ProblemKind.CONDEMNED}


def test_H42_a_branch_whose_pin_was_published_slowly_has_the_rows_of_its_pin(world):
    """H42: the head that a slow publish finds is a later one; its objects are not pinned."""

    def meanwhile():
        with world.db.writer(NAME, background=False) as writer:
            writer.put("late", b"1")
        fold(world.db, NAME)
        world.advance(GRACE_S)

    slow = At(world.bucket, "create", "users/manifest/", meanwhile, after=True)
    db = Database(slow)
    db._proved = True
    world.run(lambda: db.branch(NAME, CHILD))
    assert b"late" in rows_of(world.db, NAME)
    assert rows_of(world.db, CHILD) == BEFORE
    (pin,) = head_of(world, NAME).branches.values()
    assert pin.generation == head_of(world, CHILD).origin.generation
    compact(world.db, NAME, full=True)
    world.advance(DAY_S)
    sweep_out(world, NAME, CHILD)
    assert rows_of(world.db, CHILD) == BEFORE


def test_H42_a_sweep_that_a_branch_overtakes_plans_its_slots_again(world):
    """H42: slots that were garbage before are needed by a branch of a past generation."""
    fold(world.db, NAME)
    world.advance(10)
    overtaken = At(
        world.bucket,
        "create",
        "users/manifest/",
        lambda: world.db.branch(NAME, CHILD, at={"lsn": 4}),
    )
    db = Database(overtaken)
    db._proved = True
    options = {"apply": True, "force": True, "retain_generations_s": 0.0}
    world.run(lambda: sweep(db, NAME, **options))
    assert not overtaken.armed
    expected = {b"a": b"1", b"b": b"2"}
    assert rows_of(world.db, CHILD) == expected
    world.advance(GRACE_S + 10)
    sweep_out(world, NAME)
    assert rows_of(world.db, CHILD) == expected
    assert verify(world.db, CHILD, deep=True).problems == []


# --- histories --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_of_branches(seed):
    """Every namespace has the rows of its model, whatever the others do (H34, H42, H48)."""
    branch_machine.run(seed, steps=20)


def test_H42_a_name_that_was_taken_while_the_branch_was_pinned(world, monkeypatch):
    """H42, H14: another process has created it and swept its first manifest: the slot is free.
    Found by seeds 29 and 210 of branches_come_and_go_late.
    """
    pin = Namespaces._pin_branch

    def slowly(*arguments):
        pinned = pin(*arguments)
        world.db.create(CHILD)
        with world.db.writer(CHILD, background=False) as writer:
            writer.put("x", b"theirs")
        fold(world.db, CHILD)
        for _ in range(2):
            world.advance(2 * DAY_S)
            sweep(world.db, CHILD, apply=True, force=True)
        assert locate(world.db.store, CHILD).found.manifest.oldest_retained > 1
        return pinned

    monkeypatch.setattr(Namespaces, "_pin_branch", slowly)
    with pytest.raises(ConflictError, match="exists"):
        world.db.branch(NAME, CHILD)
    assert rows_of(world.db, CHILD) == {b"x": b"theirs"}
    assert world.head().branches == {}


# --- columns and names that came later ----------------------------------------------------


NARROW = pa.schema([("id", pa.string()), ("x", pa.int64())])
WIDE = NARROW.append(pa.field("z", pa.int64()))
ALTERED = {"a": {"id": "a", "x": 1, "z": None}, "b": {"id": "b", "x": 1, "z": 5}}


@pytest.fixture
def altered():
    """Give a world whose only generation below an LSN was published before `alter`, and the LSN."""
    world = World()
    world.db.create(CHILD, NARROW)
    with world.db.writer(CHILD, background=False) as writer:
        writer.upsert([{"id": "a", "x": 1}])
    world.db.snapshot(CHILD, "narrow")
    world.db.alter(CHILD, WIDE)
    with world.db.writer(CHILD, background=False) as writer:
        lsn = writer.upsert([{"id": "b", "x": 1, "z": 5}]).lsn
        writer.upsert([{"id": "c", "x": 1, "z": 6}])
    fold(world.db, CHILD)
    sweep_out(world, CHILD)
    return world, lsn


def test_a_view_has_the_columns_of_the_log_that_it_replays(altered):
    """A replay knew the schemas of its generation only, and not those that the log named since."""
    world, lsn = altered
    assert rows_of(world.db, CHILD, as_of={"lsn": lsn}) == ALTERED
    assert rows_of(world.db, CHILD, snapshot="narrow") == {"a": {"id": "a", "x": 1}}
    before = {key: row for key, row in ALTERED.items() if key == "a"}
    assert rows_of(world.db, CHILD, as_of={"lsn": lsn - 1}).keys() == before.keys()
    world.db.rollback(CHILD, {"lsn": lsn})
    assert rows_of(world.db, CHILD) == ALTERED


def test_a_task_reads_a_view_with_its_columns(altered):
    """Columns that are added after the view was opened are not in the copy of a task either."""
    world, lsn = altered
    with world.db.reader(CHILD, as_of={"lsn": lsn}) as view:
        world.db.alter(CHILD, WIDE.append(pa.field("later", pa.int64())))
        assert ref_of(view).open().schema.fields == view._view().manifest.schema.fields


def test_a_branch_has_the_columns_of_the_log_that_it_inherits(altered):
    """Its first manifest had the schemas of the generation only: no reader could open it."""
    world, lsn = altered
    world.db.branch(CHILD, "old", at={"lsn": lsn})
    assert rows_of(world.db, "old") == ALTERED
    assert [d.key for d in world.db.diff(CHILD, "old")] == ["c"]
    with world.db.writer("old", background=False) as writer:
        writer.upsert([{"id": "d", "x": 2, "z": 7}])
    fold(world.db, "old")
    assert verify(world.db, "old", deep=True).problems == []
    assert rows_of(world.db, "old") == {**ALTERED, "d": {"id": "d", "x": 2, "z": 7}}


def test_a_branch_at_a_generation_has_the_columns_of_that(altered):
    """The log that it inherits was written before them."""
    world, _ = altered
    [pin] = world.db.snapshots(CHILD)
    world.db.branch(CHILD, "old", at=pin)
    assert rows_of(world.db, "old") == {"a": {"id": "a", "x": 1}}


@pytest.mark.parametrize("folded", [False, True])
def test_a_branch_takes_a_name_that_a_namespace_had_for_a_while(world, folded):
    """The alias is replaced by a manifest with another base, which was refused as a mistake."""
    if folded:
        fold(world.db, NAME)
    world.db.rename(NAME, CHILD)
    world.db.rename(CHILD, NAME)
    world.db.branch(NAME, CHILD)
    assert rows_of(world.db, CHILD) == BEFORE
    fold(world.db, CHILD)
    assert verify(world.db, CHILD, deep=True).problems == []
    assert sorted(world.db.namespaces()) == sorted([NAME, CHILD])
