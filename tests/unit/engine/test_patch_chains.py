"""Many patches of one key: read in a few steps, and to the same row as one by one."""

from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reef
from reef.engine.reading import chains
from reef.engine.reading import memtable as module
from reef.engine.reading.memtable import Entry, Memtable
from reef.engine.reading.merge import newest_versions
from reef.engine.reading.view import resolve
from reef.engine.rows import to_ops
from reef.formats.batch import OpKind, Ops
from reef.formats.schema import Schema
from reef.formats.wal_object import Job, WalKind
from reef.jobs import fold
from reef.types import KeyRange
from tests.bulk import append
from tests.unit.engine.test_hot_paths import calls

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
    return memtable


def read(memtable, objects, floor=1):
    """Return the rows, laid over what lies in segments: ingests, and what is below the floor."""
    rows = {}
    below = truth(objects, floor - 1)
    for key in KEYS:
        versions = memtable.chain(key.encode()).entries
        for lsn, made in enumerate(objects, 1):
            if lsn >= floor and isinstance(made, tuple) and made[1] == key:
                versions.append(Entry(lsn, 0, OpKind.PUT, {1: made[2], 2: None}))
        if key in below:
            values = {1: below[key]["a"], 2: below[key]["b"]}
            versions.append(Entry(floor - 1, 1 << 30, OpKind.PUT, values))
        found = resolve(versions)
        if found is not None and found.kind == OpKind.PUT:
            rows[key] = {"a": found.values.get(1), "b": found.values.get(2)}
    return rows


@settings(max_examples=200, deadline=None)
@given(
    objects,
    st.dictionaries(st.integers(1, 20), st.lists(st.integers(1, 20), max_size=2), max_size=3),
    st.integers(1, 21),
    st.sampled_from([(18, 10_000), (2, 1), (3, 6)]),
)
def test_laying_patches_over_each_other_changes_no_row(objects, early, floor, pace):
    """Whatever comes between them, in or out of order, before and after a fold; all of a chain
    at once, or a few rows each time.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "CHAIN_MAX", 1)
        patched.setattr(chains, "STEPS", pace[0])
        patched.setattr(module, "SHORTENED_MAX", pace[1])
        memtable = filled(objects, early)
    assert read(memtable, objects) == truth(objects)
    floor = min(floor, len(objects) + 1)
    kept = memtable.drop_below(floor)
    assert read(kept, objects, floor) == truth(objects)
    lsns = kept.moment(KeyRange()).rows.lsns
    assert not len(lsns) or lsns.min() >= floor, "what is folded has left"


PUT, PATCH, GONE = ("put", "k", 1, 1), ("patch", "k", "a", 2), ("delete_range", ("j", "m"))
LATE = [[PUT], [PATCH], [PATCH], [("put", "k", 5, 5)], [("patch", "k", "b", 9)], [PATCH]]


@pytest.mark.parametrize(
    ("objects", "early"),
    [
        ([[PUT], [PATCH], [GONE], *[[PATCH]] * 4], {}),  # nothing is left to patch
        ([[PUT], *[[PATCH]] * 4, [PATCH, GONE, PATCH, PATCH, PATCH]], {}),
        ([[("put", "j", 1, 1), PUT, GONE, PATCH, PATCH, PATCH], [PATCH]], {}),
        (LATE, {2: [5], 3: [6]}),  # a put comes after the patches that lie over it
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
def test_what_lies_between_patches_keeps_them_apart(monkeypatch, objects, early):
    """Of each schedule the rows are those that one operation after the other gives."""
    monkeypatch.setattr(module, "CHAIN_MAX", 1)
    memtable = filled(objects, early)
    assert read(memtable, objects) == truth(objects)
    for floor in range(1, len(objects) + 2):
        kept = memtable.drop_below(floor)
        assert read(kept, objects, floor) == truth(objects)
        lsns = kept.moment(KeyRange()).rows.lsns
        assert not len(lsns) or lsns.min() >= floor, "what is folded has left"


@pytest.fixture
def table():
    """Give a database and a writer of a table."""
    db = reef.open("memory://")
    db.create(NAME, ARROW)
    with db.writer(NAME, row_cache_bytes=0) as writer:
        yield db, writer


def depth(writer, key=b"k"):
    """Return how many versions a read of a key goes through."""
    return len(writer._committer.tail.view().memtable.chain(key).entries)


def test_a_key_with_thousands_of_patches_is_read_in_a_few_steps(table):
    """A bound that does not grow with their number; over a row in memory, and over one that is
    folded.
    """
    db, writer = table
    writer.upsert([{"id": "k", "a": 0, "b": 0}])
    for number in range(1000):
        writer.patch([{"id": "k", "a": number}], wait=False)
    writer.patch([{"id": "k", "b": 7}])
    assert depth(writer) <= module.CHAIN_MAX + 2
    assert writer.get("k") == {"id": "k", "a": 999, "b": 7}
    fold(db, NAME)
    writer.refresh()
    for number in range(100):
        writer.patch([{"id": "k", "a": number}])
    assert depth(writer) <= module.CHAIN_MAX + 2
    reader = db.reader(NAME)
    assert writer.get("k") == reader.get("k") == {"id": "k", "a": 99, "b": 7}
    assert writer.get_many(["k"]).to_pylist() == reader.get_many(["k"]).to_pylist()
    assert dict(writer.scan()) == dict(reader.scan()) == {"k": {"id": "k", "a": 99, "b": 7}}


def test_nothing_is_laid_over_while_a_load_may_come_in_below(table):
    """A load with `live_wins` sorts at its begin: patches from before and after it stay apart."""
    db, writer = table
    append(db.store, NAME, WalKind.BEGIN, Job("j", live_wins=True))
    for number in range(3 * module.CHAIN_MAX):
        writer.patch([{"id": "k", "a": number}])
    assert depth(writer) == 3 * module.CHAIN_MAX
    append(db.store, NAME, WalKind.ABORT, Job("j"))
    writer.patch([{"id": "k", "a": 1}])
    writer.patch([{"id": "k", "a": 2}])
    assert depth(writer) <= module.CHAIN_MAX


# --- many keys at once --------------------------------------------------------------

MANY = [f"k{n:05}" for n in range(10_000)]


def patched(keys, column, values):
    """Return a table of patches as a batch's columns."""
    table = pa.table({"id": keys, column: pa.array(values, pa.int64())})
    return to_ops(table, SCHEMA, kind=OpKind.PATCH)


def deepest(memtable, keys):
    """Return how many versions a read of any of these keys goes through, at most."""
    return max(len(memtable.chain(key.encode()).entries) for key in keys)


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
        found = resolve(memtable.chain(key.encode()).entries + older)
        rows[key] = (found.kind, found.values if found.kind == OpKind.PUT else None)
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_many_keys_laid_over_at_once_give_the_rows_of_those_left_alone(monkeypatch, seed):
    """Against a memtable that is never settled: tables of patches over hundreds of keys, with
    deletes, range deletes, ingests and late objects in between, a part of the chains each time.
    """
    random, keys = Random(seed), MANY[:300]
    monkeypatch.setattr(module, "CHAIN_MAX", random.choice([1, 3, 8]))
    monkeypatch.setattr(module, "SHORTENED_MAX", random.choice([1, 100, 10_000]))
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
            # What is still to come is newer than what was settled.
            settled.settle(min((later for later, _ in late), default=lsn) - 1)
        late = []
        settled.settle(lsn)
    assert all_rows(settled, keys, segments) == all_rows(alone, keys, segments)
    lengths = [sum(len(m.chain(key.encode()).entries) for key in keys) for m in (settled, alone)]
    assert lengths[0] < lengths[1] - 1000, "chains were laid over each other"
    scanned = [newest_versions([m.moment(KeyRange()).rows], SCHEMA) for m in (settled, alone)]
    assert scanned[0].keys.equals(scanned[1].keys)


def long_chains(keys):
    """Return a memtable with long chains of all these keys, not settled yet, and its last LSN."""
    memtable = Memtable(SCHEMA, 1)
    for lsn in range(1, module.CHAIN_MAX + 4):
        memtable.apply(lsn, [patched(keys, "ab"[lsn % 2], range(lsn, lsn + len(keys)))])
    assert deepest(memtable, keys) > module.CHAIN_MAX
    return memtable, lsn


@pytest.mark.parametrize("deleted", [False, True], ids=["", "with range deletes"])
def test_10_000_long_chains_cost_no_work_per_key(monkeypatch, deleted):
    """Issue 4: they become short with as many calls as 100; where ranges were deleted, with a
    few for each key to find its own.
    """
    monkeypatch.setattr(module, "SHORTENED_MAX", 1_000_000)
    spent = []
    for keys in (MANY[:100], MANY):
        memtable, last = long_chains(keys)
        if deleted:
            memtable.apply(last + 1, [encoded(("delete_range", ("m", "n")))])
        with calls() as counted:
            memtable.settle(last + 1)
        spent.append(counted[0])
        assert deepest(memtable, keys) == 1
        entry = memtable.chain(keys[7].encode()).entries[0]
        assert (entry.lsn, entry.values) == (last, {1: last - 1 + 7, 2: last + 7})
    assert spent[1] < spent[0] + (5 * len(MANY) if deleted else 500)


def test_no_object_waits_for_more_than_a_part_of_the_long_chains():
    """Of many keys, and of one with very many patches, some rows each time, until all is done."""
    memtable, lsn = long_chains(MANY)
    many = ["x"] * 7 * module.SHORTENED_MAX
    memtable.apply(lsn + 1, [patched(many, "a", range(len(many)))])
    memtable.apply(lsn + 2, [patched(["y"], "a", [1])])
    settles = 0
    while memtable._long:
        links = len(memtable._under)
        memtable.settle(lsn + 2)
        assert 0 < links - len(memtable._under) <= 2.1 * module.SHORTENED_MAX
        settles += 1
    assert settles > 10
    assert deepest(memtable, [*MANY, "x"]) == 1
    assert memtable.chain(b"x").entries[0].values[1] == len(many) - 1


def test_shortening_keeps_up_with_what_comes_in(monkeypatch):
    """Objects much larger than what is shortened at least: chains stay short all the same."""
    monkeypatch.setattr(module, "SHORTENED_MAX", 100)
    memtable, keys = Memtable(SCHEMA, 1), MANY[:500]
    for lsn in range(1, 150):
        memtable.apply(lsn, [patched(keys, "a", range(lsn, lsn + len(keys)))])
        memtable.settle(lsn)
        if lsn % 10 == 0:
            assert deepest(memtable, keys) <= 2 * module.CHAIN_MAX
