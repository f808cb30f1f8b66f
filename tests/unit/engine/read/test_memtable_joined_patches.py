"""Many patches of one key: few versions to read, and the same row as one by one."""

from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reef
from reef.engine.read import memtable as module
from reef.engine.read.memtable import Entry, Memtable
from reef.engine.read.merge import newest_versions
from reef.engine.read.view import resolve
from reef.engine.rows.input import to_ops
from reef.formats.schema import Schema
from reef.formats.wal_object import Job, OneOp, OpKind, Ops, WalKind
from reef.jobs import fold
from reef.types import KeyRange
from tests.support.bulk_jobs import append
from tests.unit.engine.handles.test_handles_hot_paths import calls

NAME = "t"
ARROW = pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.int64())])
SCHEMA = Schema.of(ARROW, "id")
KEYS = ["j", "k", "l"]

keys, values = st.sampled_from(["k", "k", "k", *KEYS]), st.one_of(st.none(), st.integers(0, 99))
patches = st.tuples(st.just("patch"), keys, st.sampled_from(["a", "b"]), values)
others = st.one_of(
    st.tuples(st.just("put"), keys, values, values),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("delete_range"), st.sampled_from([("j", "k"), ("k", "m"), ("j", "m")])),
)
batches = st.lists(st.one_of(patches, patches, patches, others), min_size=1, max_size=4)
objects = st.lists(
    st.one_of(batches, batches, batches, st.tuples(st.just("ingest"), keys, values)),
    min_size=6,
    max_size=20,
)
"""WAL objects: a list of operations, or an ingest of one row."""


def encoded(operation):
    """Return an operation as a batch's columns."""
    match operation:
        case ("patch", key, column, value):
            return to_ops([{"id": key, column: value}], SCHEMA, kind=OpKind.PATCH)
        case ("put", key, a, b):
            return to_ops([{"id": key, "a": a, "b": b}], SCHEMA, kind=OpKind.PUT)
        case ("delete", key):
            return _removal(OpKind.DELETE, key, None)
        case ("delete_range", (start, end)):
            return _removal(OpKind.DELETE_RANGE, start, pa.array([end.encode()], pa.binary()))


def _removal(kind, key, ends):
    return Ops(pa.array([key.encode()], pa.binary()), pa.array([int(kind)], pa.uint8()), ends)


def truth(objects, upto=None):
    """Return the rows after all that was done, one operation after the other."""
    rows = {}
    for made in objects[:upto]:
        for operation in [made] if isinstance(made, tuple) else made:
            match operation:
                case ("patch", key, column, value):
                    if key in rows:
                        rows[key] = {**rows[key], column: value}
                case ("put", key, a, b):
                    rows[key] = {"a": a, "b": b}
                case ("ingest", key, value):
                    rows[key] = {"a": value, "b": None}
                case ("delete", key):
                    rows.pop(key, None)
                case ("delete_range", (start, end)):
                    rows = {k: row for k, row in rows.items() if not start <= k < end}
    return rows


def filled(objects, early):
    """Return a memtable with these objects from LSN 1 on; some batches come before their turn."""
    memtable = Memtable(SCHEMA, 1)
    done = set()

    def apply(lsn):
        if lsn not in done:
            done.add(lsn)
            memtable.apply(lsn, [encoded(operation) for operation in objects[lsn - 1]])

    for lsn, made in enumerate(objects, 1):
        for ahead in early.get(lsn, ()):
            if lsn < ahead <= len(objects) and isinstance(objects[ahead - 1], list):
                apply(ahead)
        if isinstance(made, tuple):
            memtable.ingest(lsn, [])
        else:
            apply(lsn)
        memtable.pass_over(lsn)
        memtable.settle(lsn)
        memtable.tidy()
    return memtable


def read(memtable, objects, floor=1):
    """Return the rows merged with those of segments: ingests, and rows below the floor."""
    rows = {}
    below = truth(objects, floor - 1)
    for key in KEYS:
        versions = memtable.cut().versions(key.encode())
        for lsn, made in enumerate(objects, 1):
            if lsn >= floor and isinstance(made, tuple) and made[1] == key:
                versions.append(Entry(lsn, 0, OpKind.PUT, {1: made[2], 2: None}))
        if key in below:
            values = {1: below[key]["a"], 2: below[key]["b"]}
            versions.append(Entry(floor - 1, 1 << 30, OpKind.PUT, values))
        found = resolve(versions, SCHEMA)
        if found is not None and found.kind == OpKind.PUT:
            rows[key] = {"a": found.values.get(1), "b": found.values.get(2)}
    return rows


@settings(max_examples=200, deadline=None)
@given(
    objects,
    st.dictionaries(st.integers(1, 20), st.lists(st.integers(1, 20), max_size=2), max_size=3),
    st.integers(1, 21),
    st.sampled_from([(2, 0, 10_000), (2, 1, 1), (3, 2, 3), (1000, 0, 2)]),
)
def test_joining_patches_changes_no_row(objects, early, floor, pace):
    """Whatever comes between them, in or out of order, before and after a fold; all runs at once,
    or a few rows each time.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name, value in zip(("SMALL_RUNS", "RUNS_MAX", "PART_ROWS"), pace, strict=True):
            patched.setattr(module, name, value)
        memtable = filled(objects, early)
    assert read(memtable, objects) == truth(objects)
    floor = min(floor, len(objects) + 1)
    kept = memtable.drop_below(floor)
    assert read(kept, objects, floor) == truth(objects)
    lsns = kept.cut().rows(KeyRange()).lsns
    assert not len(lsns) or lsns.min() >= floor, "folded rows have left"


PUT, PATCH, GONE = ("put", "k", 1, 1), ("patch", "k", "a", 2), ("delete_range", ("j", "m"))
LATE = [[PUT], [PATCH], [PATCH], [("put", "k", 5, 5)], [("patch", "k", "b", 9)], [PATCH]]


@pytest.mark.parametrize(
    ("objects", "early"),
    [
        ([[PUT], [PATCH], [GONE], *[[PATCH]] * 4], {}),  # nothing is left to patch
        ([[PUT], *[[PATCH]] * 4, [PATCH, GONE, PATCH, PATCH, PATCH]], {}),
        ([[("put", "j", 1, 1), PUT, GONE, PATCH, PATCH, PATCH], [PATCH]], {}),
        (LATE, {2: [5], 3: [6]}),  # a put comes after the patches that are above it
        ([[PUT], *[[PATCH]] * 3, [GONE], *[[PATCH]] * 3], {2: [6, 7, 8]}),
        ([[PUT], *[[PATCH]] * 3, ("ingest", "k", 7), *[[("patch", "k", "b", 3)]] * 3], {}),
    ],
    ids=[
        "range delete",
        "within an object",
        "all in one object",
        "late put",
        "late range delete",
        "ingest",
    ],
)
def test_versions_between_patches_keep_them_apart(monkeypatch, objects, early):
    """Of each schedule the rows are those that one operation after the other gives."""
    monkeypatch.setattr(module, "SMALL_RUNS", 2)
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable = filled(objects, early)
    assert read(memtable, objects) == truth(objects)
    for floor in range(1, len(objects) + 2):
        kept = memtable.drop_below(floor)
        assert read(kept, objects, floor) == truth(objects)
        lsns = kept.cut().rows(KeyRange()).lsns
        assert not len(lsns) or lsns.min() >= floor, "folded rows have left"


def test_a_version_in_an_older_run_keeps_patches_apart(monkeypatch):
    """LSN 2 landed first, with many rows that are not merged again: LSN 1 and 3 stay two."""
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable = Memtable(SCHEMA, 1)
    memtable.apply(2, [patched(["k", *MANY[:100]], "a", range(101))], is_early=True)
    memtable.apply(1, [encoded(("put", "k", 7, 7))])
    memtable.apply(3, [encoded(("patch", "k", "b", 9))])
    memtable.settle(3)
    memtable.tidy()
    assert [run.count for run in memtable.cut().runs] == [101, 2]
    assert resolve(memtable.cut().versions(b"k"), SCHEMA).values == {1: 0, 2: 9}


def test_a_version_in_a_newer_run_keeps_patches_apart(monkeypatch):
    """LSN 3 landed before LSN 2, whose many rows are not merged with the small runs before."""
    memtable = Memtable(SCHEMA, 1)
    memtable.apply(1, [encoded(("put", "k", 1, 1))])
    memtable.apply(3, [encoded(("patch", "k", "a", 3))], is_early=True)
    memtable.apply(2, [patched(["k", *MANY[:100]], "b", range(101))])
    memtable.settle(3)
    for name, value in {"RUNS_MAX": 0, "SMALL_RUNS": 2, "PART_ROWS": 50}.items():
        monkeypatch.setattr(module, name, value)
    memtable._merge_next()
    assert [run.count for run in memtable.cut().runs] == [2, 101]
    assert resolve(memtable.cut().versions(b"k"), SCHEMA).values == {1: 3, 2: 0}


def test_a_row_in_the_head_keeps_patches_apart(monkeypatch):
    """A delete that was written alone comes between two tables of patches."""
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    memtable = Memtable(SCHEMA, 1)
    memtable.apply(1, [encoded(("put", "k", 1, 1))])
    memtable.apply(2, [encoded(("patch", "k", "a", 2))])
    memtable.apply(3, [OneOp(b"k", 1, None)])
    memtable.apply(4, [encoded(("patch", "k", "b", 4))])
    memtable.settle(4)
    memtable.tidy()
    assert resolve(memtable.cut().versions(b"k"), SCHEMA).kind == OpKind.DELETE


@pytest.fixture
def table():
    """Give a database and a writer of a table."""
    db = reef.open("memory://")
    db.create(NAME, ARROW)
    with db.writer(NAME, row_cache_bytes=0) as writer:
        yield db, writer


def depth(writer, key=b"k"):
    """Return how many versions of a key a read resolves."""
    return len(writer._committer.tail.view()._cut().versions(key))


def test_a_key_with_thousands_of_patches_has_few_versions(table):
    """A bound that does not grow with their number; over a row in memory, and over one that is
    folded.
    """
    db, writer = table
    writer.upsert([{"id": "k", "a": 0, "b": 0}])
    for number in range(1000):
        writer.patch([{"id": "k", "a": number}], wait=False)
    writer.patch([{"id": "k", "b": 7}])
    assert depth(writer) <= module.SMALL_RUNS
    assert writer.get("k") == {"id": "k", "a": 999, "b": 7}
    fold(db, NAME)
    writer.refresh()
    for number in range(100):
        writer.patch([{"id": "k", "a": number}])
    assert depth(writer) <= module.SMALL_RUNS
    reader = db.reader(NAME)
    assert writer.get("k") == reader.get("k") == {"id": "k", "a": 99, "b": 7}
    assert writer.get_many(["k"]).to_pylist() == reader.get_many(["k"]).to_pylist()
    assert dict(writer.scan()) == dict(reader.scan()) == {"k": {"id": "k", "a": 99, "b": 7}}


def test_nothing_is_joined_while_a_load_may_be_applied_below(table):
    """A load with `live_wins` sorts at its begin: patches from before and after it stay apart."""
    db, writer = table
    append(db.store, NAME, WalKind.BEGIN, Job("j", live_wins=True))
    for number in range(3 * module.SMALL_RUNS):
        writer.patch([{"id": "k", "a": number}])
    assert depth(writer) == 3 * module.SMALL_RUNS
    append(db.store, NAME, WalKind.ABORT, Job("j"))
    writer.patch([{"id": "k", "a": 1}])
    writer.patch([{"id": "k", "a": 2}])
    assert depth(writer) <= module.SMALL_RUNS


# --- many keys at once --------------------------------------------------------------

MANY = [f"k{n:05}" for n in range(10_000)]


def patched(keys, column, values):
    """Return a table of patches as a batch's columns."""
    table = pa.table({"id": keys, column: pa.array(values, pa.int64())})
    return to_ops(table, SCHEMA, kind=OpKind.PATCH)


def deepest(memtable, keys):
    """Return the largest number of versions that any of these keys has."""
    cut = memtable.cut()
    return max(len(cut.versions(key.encode())) for key in keys)


def merge_all(memtable):
    """Let reads merge until there is nothing left to merge."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "RUNS_MAX", 0)
        while memtable._planned_merge() is not None:
            memtable.tidy()


def some_object(random, keys):
    """Return a WAL object that changes many keys: tables of patches above all."""
    some = random.sample(keys, random.randrange(len(keys) // 2, len(keys)))
    values = [random.choice([None, *range(99)]) for _ in some]
    start = random.randrange(len(keys) - 5)
    match random.randrange(12):
        case 0:
            puts = pa.table({"id": some[:20], "a": values[:20], "b": values[:20]}, ARROW)
            return [to_ops(puts, SCHEMA, kind=OpKind.PUT)]
        case 1:
            return [_removal(OpKind.DELETE, key, None) for key in some[:5]]
        case 2:
            end = pa.array([keys[start + 5].encode()], pa.binary())
            return [_removal(OpKind.DELETE_RANGE, keys[start], end), patched(some, "b", values)]
        case 3:
            return [patched(some * 2, "b", values + values[::-1])]  # each key twice
        case _:
            return [patched(some, random.choice("ab"), values)]


def all_rows(memtable, keys, segments):
    """Return the rows of keys, laid over those of segments: by LSN, for each key a value."""
    rows = {}
    for key in keys:
        older = [Entry(lsn, 0, OpKind.PUT, {1: n, 2: n}) for lsn, n in segments.items()]
        found = resolve(memtable.cut().versions(key.encode()) + older, SCHEMA)
        rows[key] = (found.kind, found.values if found.kind == OpKind.PUT else None)
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_patches_of_many_keys_joined_at_once_give_the_rows_of_those_left_alone(monkeypatch, seed):
    """Against a memtable that is never settled: tables of patches over hundreds of keys, with
    deletes, range deletes, ingests and late objects in between, some of the rows each time.
    """
    random, keys = Random(seed), MANY[:300]
    monkeypatch.setattr(module, "SMALL_RUNS", random.choice([2, 4, 16]))
    monkeypatch.setattr(module, "RUNS_MAX", random.choice([0, 4]))
    monkeypatch.setattr(module, "PART_ROWS", random.choice([1, 100, 10_000]))
    settled, alone, segments = Memtable(SCHEMA, 1), Memtable(SCHEMA, 1), {0: -1}
    late = []
    for lsn in range(1, 41):
        if random.random() < 0.05:
            segments[lsn] = lsn
            for memtable in (settled, alone):
                memtable.ingest(lsn, [])
        else:
            late.append((lsn, some_object(random, keys)))
        if random.random() < 0.3:
            continue  # those that follow come first
        random.shuffle(late)
        for at, batches in late:
            for memtable in (settled, alone):
                memtable.apply(at, batches)
            # Later operations are newer than settled ones.
            settled.settle(min((later for later, _ in late), default=lsn) - 1)
        late = []
        settled.settle(lsn)
        settled.tidy()
    assert all_rows(settled, keys, segments) == all_rows(alone, keys, segments)
    merge_all(settled)
    assert all_rows(settled, keys, segments) == all_rows(alone, keys, segments)
    cuts = settled.cut(), alone.cut()
    lengths = [sum(len(cut.versions(key.encode())) for key in keys) for cut in cuts]
    assert lengths[0] < lengths[1] - 1000, "patches were joined"
    scanned = [
        newest_versions([cut.rows(KeyRange())], SCHEMA, [cut.range_tombstones]) for cut in cuts
    ]
    assert scanned[0].keys.equals(scanned[1].keys)


def many_patches(keys, objects=19):
    """Return a memtable with so many patches of each key, and its last LSN."""
    memtable = Memtable(SCHEMA, 1)
    for lsn in range(1, objects + 1):
        memtable.apply(lsn, [patched(keys, "ab"[lsn % 2], range(lsn, lsn + len(keys)))])
    assert deepest(memtable, keys) == objects
    return memtable, lsn


@pytest.mark.parametrize("deleted", [False, True], ids=["", "with range deletes"])
def test_patches_of_10_000_keys_are_joined_without_work_per_key(monkeypatch, deleted):
    """Nineteen patches of each become one with as many calls as those of 100 keys."""
    monkeypatch.setattr(module, "PART_ROWS", 1_000_000)
    monkeypatch.setattr(module, "SMALL_RUNS", 1000)
    monkeypatch.setattr(module, "RUNS_MAX", 0)
    spent = []
    for keys in (MANY[:100], MANY):
        memtable, last = many_patches(keys)
        if deleted:
            memtable.apply(last + 1, [encoded(("delete_range", ("m", "n")))])
        memtable.settle(last + 1)
        with calls() as counted:
            memtable.tidy()
        spent.append(counted[0])
        assert deepest(memtable, keys) == 1
        entry = memtable.cut().versions(keys[7].encode())[0]
        assert (entry.lsn, entry.values) == (last, {1: last - 1 + 7, 2: last + 7})
    assert spent[1] < spent[0] + 500


def test_no_read_merges_more_than_a_part(monkeypatch):
    """Of many keys, and of one with very many patches: some rows each time, until all is done."""
    monkeypatch.setattr(module, "PART_ROWS", 10_000)
    memtable, lsn = many_patches(MANY, 8)
    many = ["x"] * 7 * module.PART_ROWS
    memtable.apply(lsn + 1, [patched(many, "a", range(len(many)))])
    memtable.settle(lsn + 1)
    merged, merge_part = [], Memtable._merge_part

    def counted(self, merge, runs, tombstones):
        before = sum(run.count for run in runs)
        result = merge_part(self, merge, runs, tombstones)
        merged.append(before - sum(run.count for run in (*result.rest, *result.done)))
        return result

    monkeypatch.setattr(Memtable, "_merge_part", counted)
    merge_all(memtable)
    assert len(merged) > 8
    # The versions of one key are merged together, however many they are.
    assert sorted(merged)[-2] <= 1.5 * module.PART_ROWS
    assert deepest(memtable, [*MANY, "x"]) == 1
    assert memtable.cut().versions(b"x")[0].values[1] == len(many) - 1


@pytest.mark.parametrize("count", [20, 500])
def test_joining_keeps_up_with_commits(count):
    """Patches of the same keys again and again: few versions of each. Commits alone join small
    batches, and a read all of them.
    """
    memtable, keys = Memtable(SCHEMA, 1), MANY[:count]
    for lsn in range(1, 150):
        memtable.apply(lsn, [patched(keys, "a", range(lsn, lsn + len(keys)))])
        memtable.settle(lsn)
        if lsn % 50 == 0:
            if count > 100:
                memtable.tidy()
            assert deepest(memtable, keys) <= 2 * module.SMALL_RUNS
