"""Merges through the handles: counters, sets and maxima without a read before the write."""

import asyncio
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import reef
import reef.aio
from reef import InvalidInputError
from reef.engine.local.stream import LocalBatch, decode_entry, encode_entry
from reef.formats.wal_object import BatchHeader
from reef.jobs import compact, export, fold, ingest, rebuild, verify
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from tests.support.compaction import SMALL, head_of

NAME = "counters"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("small", pa.int32()),
        ("x", pa.float64()),
        ("last", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
    ]
)
DAY = datetime(2026, 1, 31, tzinfo=UTC)


class Clock(type(REAL)):
    """The machine's clocks, which can be put forward."""

    ahead_s = 0.0

    def wall_s(self):
        return super().wall_s() + self.ahead_s


@pytest.fixture
def clock():
    """A clock that a test puts forward."""
    return Clock()


@pytest.fixture
def db(clock):
    """A database with a namespace of counters."""
    database = reef.Database(MemoryStore(runtime=clock))
    database.create(NAME, SCHEMA)
    with database:
        yield database


@pytest.fixture
def writer(db):
    """A writer that does nothing by itself."""
    with db.writer(NAME, background=False) as opened:
        yield opened


def count(handle, key="k"):
    """Return one counter."""
    return handle.get(key)["n"]


def test_a_merge_makes_a_row_and_changes_it(writer):
    """Null columns take the operand; others are added, compared or united."""
    writer.merge("k", {"n": reef.add(2), "last": reef.max_(DAY), "tags": reef.union(["b", "a"])})
    writer.merge("k", {"n": reef.add(-5), "last": reef.min_(DAY), "tags": reef.union(["c", "a"])})
    row = writer.get("k")
    assert (row["n"], row["last"], row["tags"]) == (-3, DAY, ["a", "b", "c"])
    assert row["x"] is None


def test_a_batch_mixes_merges_with_other_operations_in_order(writer):
    """Operations of a batch apply in order, merges among them."""
    batch = reef.Batch().put("k", {"n": 1}).merge("k", {"n": reef.add(1)})
    batch.patch([{"id": "k", "x": 0.5}]).merge("k", {"n": reef.max_(7)})
    batch.merge_rows(pa.table({"id": ["k", "l"], "n": [1, 9]}), {"n": "add"}).delete("l")
    assert writer.write(batch).ops == 7
    assert (count(writer), writer.get("k")["x"], writer.get("l")) == (8, 0.5, None)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"n": 1}, "expected an operand, got 1"),
        ({"n": reef.add(None)}, "None is no operand"),
        ({"small": reef.add(1)}, "int64, uint64 or float64, not int32"),
        ({"tags": reef.max_(["a"])}, "single values"),
        ({"n": reef.union([1])}, "union takes a column of lists"),
        ({"n": reef.add(1.5)}, "expected int64, got 1.5"),
        ({"m": reef.add(1)}, "column m"),
        ({}, "a dict of columns and operands"),
    ],
)
def test_a_merge_is_checked_before_it_is_written(writer, columns, problem):
    """An error names the column, and nothing is written."""
    with pytest.raises(InvalidInputError, match=problem):
        writer.merge("k", columns)
    assert writer.get("k") is None


def test_rows_need_an_operator_for_each_column_and_an_operand_for_each_row(writer):
    """A null is no operand; a row without any is an error."""
    with pytest.raises(InvalidInputError, match="column x: a merge needs an operator"):
        writer.merge_rows([{"id": "k", "n": 1, "x": 1.0}], {"n": "add"})
    with pytest.raises(InvalidInputError, match="'sum' is no merge operator"):
        writer.merge_rows([{"id": "k", "n": 1}], {"n": "sum"})
    with pytest.raises(InvalidInputError, match="row 1: a merge without an operand"):
        writer.merge_rows([{"id": "k", "n": 1}, {"id": "l", "n": None}], {"n": "add"})
    with pytest.raises(InvalidInputError, match="union"):
        reef.union("abc")


def test_folds_of_another_process_count_no_merge_twice(db, writer):
    """A memtable joins no merges: a fold may end between any two of them."""
    for n in range(100):
        writer.merge("k", {"n": reef.add(1)})
        if n % 7 == 0:
            assert count(writer) == n + 1
        if n % 30 == 17:
            fold(db, NAME)  # the writer has not seen it when it continues
        if n % 30 == 25:
            writer.refresh()
    writer.refresh()
    assert count(writer) == 100


def test_a_retry_with_an_idempotency_key_counts_once(writer, clock):
    """The digest of a merge does not depend on the clock."""
    first = writer.merge("k", {"n": reef.add(1)}, idempotency_key="a")
    clock.ahead_s = 5
    again = writer.merge("k", {"n": reef.add(1)}, idempotency_key="a")
    assert (again.lsn, again.replayed, count(writer)) == (first.lsn, True, 1)
    with pytest.raises(InvalidInputError):
        writer.merge("k", {"n": reef.add(2)}, idempotency_key="a")


def test_conditions_and_transactions_see_merges(writer):
    """A condition is decided on the merged row; blind merges do not conflict."""
    writer.merge("k", {"n": reef.add(3)})
    with pytest.raises(reef.ConditionFailedError):
        writer.merge("k", {"n": reef.add(1)}, when=[reef.equals("k", "n", 2)])
    writer.merge("k", {"n": reef.add(1)}, when=[reef.equals("k", "n", 3)])
    one, two = writer.transaction(), writer.transaction()
    one.merge("k", {"n": reef.add(10)})
    two.merge("k", {"n": reef.add(100)})
    assert one.commit()
    assert two.commit()
    assert count(writer) == 114
    reading = writer.transaction()
    assert reading.get("k")["n"] == 114
    reading.merge("k", {"n": reef.add(1)})
    writer.merge("k", {"n": reef.add(1)})
    with pytest.raises(reef.ConflictError):
        reading.commit()


def test_asyncio_has_merges(db):
    """`reef.aio` mirrors them, also in transactions."""

    async def run():
        async with reef.aio.open("memory://") as database:
            await database.create(NAME, SCHEMA)
            async with database.writer(NAME) as writer:
                await writer.merge("k", {"n": reef.add(1)})
                await writer.merge_rows([{"id": "k", "n": 2}], {"n": "add"})
                async with writer.transaction() as tx:
                    await tx.merge("k", {"n": reef.add(4)})
                    await tx.merge_rows([{"id": "k", "n": 8}], {"n": "add"})
                return (await writer.get("k"))["n"]

    assert asyncio.run(run()) == 15


def test_a_local_writer_uploads_merges_once(tmp_path):
    """Merges of a local log count once, before and after their upload."""
    with reef.open(tmp_path / "bucket") as db:
        db.create(NAME, SCHEMA)
        with db.writer(NAME, durability="local", local_log=tmp_path / "log") as writer:
            for _ in range(50):
                writer.merge("k", {"n": reef.add(1)})
            assert count(writer) == 50
            writer.flush()
            assert count(writer) == 50
        with db.reader(NAME) as reader:
            assert count(reader) == 50


def test_sums_are_found_by_filters(db, writer):
    """No group is skipped by the bounds of operands, or of the rows below them."""
    writer.upsert([{"id": f"k{n}", "n": n} for n in range(5)])
    fold(db, NAME)
    writer.refresh()
    writer.merge("k3", {"n": reef.add(100)})
    assert [key for key, _ in writer.scan(where="n = 103")] == ["k3"]
    ingest(db, NAME, [{"id": "k1", "n": 1000}], op="merge", operators={"n": "add"})
    writer.refresh()
    fold(db, NAME)
    writer.refresh()
    assert any(segment.patches for segment in head_of(db, NAME).segments)
    assert [key for key, _ in writer.scan(where="n = 1001")] == ["k1"]
    assert [key for key, _ in writer.scan(where="n > 50")] == ["k1", "k3"]
    assert writer.dataset().to_table(filter=pc.field("n") > 50).num_rows == 2


def test_a_row_that_had_expired_counts_as_absent(db, writer, clock):
    """The clock of the writer decides, whenever the merge is applied."""
    writer.put("k", {"n": 5}, ttl_s=60)
    writer.merge("k", {"n": reef.add(1)}, ttl_s=30)
    assert count(writer) == 6
    clock.ahead_s = 31
    assert writer.get("k") is None
    writer.merge("k", {"n": reef.add(1)})
    assert count(writer) == 1
    fold(db, NAME)
    writer.refresh()
    assert count(writer) == 1


@pytest.mark.parametrize("where", ["log", "segment"])
def test_a_compaction_keeps_an_expired_row_below_an_older_merge(db, writer, clock, where):
    """A merge that had found the row has made it permanent; without the row it would be another."""
    writer.put("k", {"n": 5}, ttl_s=60)
    writer.put("l", {"n": 5})
    fold(db, NAME)
    writer.put("m", {"n": 1})
    fold(db, NAME)
    writer.refresh()
    if where == "log":
        writer.merge("k", {"n": reef.add(1)})
    else:
        ingest(db, NAME, [{"id": "k", "n": 1}], op="merge", operators={"n": "add"})
        fold(db, NAME)
    clock.ahead_s = 100_000
    inputs = [s.id for s in head_of(db, NAME).segments if not s.patches]
    merge_only(db, inputs)
    writer.refresh()
    assert count(writer) == 6


def merge_only(db, inputs):
    """Compact some segments by name."""

    def plan(segments, settings):
        chosen = tuple(s for s in segments if s.id in inputs)
        return CompactPlan(1, chosen) if len(chosen) > 1 else None

    STRATEGIES["chosen"] = plan
    try:
        compact(db, NAME, strategy="chosen", **SMALL)
    finally:
        del STRATEGIES["chosen"]


def test_changes_have_operands_that_can_be_applied_elsewhere(db, writer):
    """A change stream keeps a copy up to date with the same calls."""
    writer.merge("k", {"n": reef.add(1), "tags": reef.union(["a"])})
    writer.put("l", {"n": 1})
    writer.merge("l", {"n": reef.max_(4)})
    ingest(db, NAME, [{"id": "l", "n": 6}], op="merge", operators={"n": "add"})
    db.create("copy", SCHEMA)
    with db.reader(NAME) as reader, db.writer("copy", background=False) as copy:
        for change in reader.changes(after_lsn=0):
            if change.op == "merge":
                copy.merge(change.key, change.row)
            else:
                copy.put(change.key, {k: v for k, v in change.row.items() if k != "id"})
        assert list(copy.scan()) == list(reader.scan())
        assert [change.op for change in reader.changes(after_lsn=0)].count("merge") == 3


def test_jobs_handle_segments_with_merges(db, writer, tmp_path):
    """Verification, rebuild and export read merges that are not applied yet."""
    writer.upsert([{"id": "k", "n": 1, "x": 0.5}])
    fold(db, NAME)
    for _ in range(2):
        ingest(
            db,
            NAME,
            [{"id": "k", "n": 1, "x": 0.1}],
            op="merge",
            operators={"n": "add", "x": "add"},
        )
        fold(db, NAME)
    writer.refresh()
    rows = list(writer.scan())
    assert rows[0][1]["n"] == 3
    assert not verify(db, NAME, deep=True).problems
    export(db, NAME, tmp_path / "out")
    exported = pq.read_table(tmp_path / "out").select(SCHEMA.names)
    assert exported.to_pylist() == [row for _, row in rows]
    writer.close()
    for info in list(db.store.list(f"namespaces/{NAME}/manifest/")):
        db.store.delete(info.key)
    rebuild(db, NAME, apply=True, force=True)
    with db.reader(NAME) as reader:
        assert list(reader.scan()) == rows
    compact(db, NAME, full=True)
    with db.reader(NAME) as reader:
        assert list(reader.scan()) == rows
    assert not any(segment.patches for segment in head_of(db, NAME).segments)


def test_an_earlier_release_refuses_merges(db, writer, monkeypatch):
    """WAL objects, segments and entries of local logs with merges have a newer version."""
    writer.put("k", {"n": 1})
    writer.merge("k", {"n": reef.add(1)})
    ingest(db, NAME, [{"id": "l", "n": 6}], op="merge", operators={"n": "add"})
    monkeypatch.setattr("reef.formats.wal_object.VERSION", 2)
    with pytest.raises(reef.UnsupportedFormatError, match="WAL object of format 3"):
        db.reader(NAME).get("k")
    monkeypatch.undo()
    fold(db, NAME)
    monkeypatch.setattr("reef.formats.segment.VERSION", 2)
    with pytest.raises(reef.UnsupportedFormatError, match="segment of format 3"):
        db.reader(NAME).get("l")
    monkeypatch.undo()
    batch = LocalBatch(b"", BatchHeader(1, merges=True), 1)
    entry = encode_entry(1, 1, batch, 0, b"")
    assert decode_entry(entry, "log").header.merges
    monkeypatch.setattr("reef.engine.local.stream.VERSION", 1)
    with pytest.raises(reef.UnsupportedFormatError, match="version 2"):
        decode_entry(entry, "log")


def test_a_compaction_joins_merges_whose_row_is_elsewhere(db, writer):
    """Of two merges in two segments one is left, and the row below is unchanged."""
    writer.put("k", {"n": 5})
    fold(db, NAME)
    for n in (1, 2):
        ingest(db, NAME, [{"id": "k", "n": n}], op="merge", operators={"n": "add"})
    fold(db, NAME)
    merge_only(db, [s.id for s in head_of(db, NAME).segments if s.patches])
    writer.refresh()
    assert [s.patches for s in head_of(db, NAME).segments if s.patches] == [1]
    assert count(writer) == 8


def test_sums_of_floats_are_the_same_whatever_is_compacted(db, writer):
    """Operands are added to the row one by one: 1e16 + 1 + 1 is not 1e16 + 2."""
    writer.put("k", {"x": 1e16})
    fold(db, NAME)
    for _ in range(2):
        ingest(db, NAME, [{"id": "k", "x": 1.0}], op="merge", operators={"x": "add"})
    fold(db, NAME)
    writer.refresh()
    assert writer.get("k")["x"] == 1e16
    merge_only(db, [s.id for s in head_of(db, NAME).segments if s.patches])
    writer.refresh()
    assert [s.patches for s in head_of(db, NAME).segments if s.patches] == [2]
    assert writer.get("k")["x"] == 1e16
    writer.put("zero", {"n": 1})
    writer.merge("zero", {"x": reef.add(-0.0)})
    assert str(writer.get("zero")["x"]) == "-0.0"


def test_a_load_of_merges_counts_repeated_keys(db, writer):
    """All rows of a key count, as one operand."""
    rows = [{"id": "k", "n": 1, "x": 0.5}, {"id": "k", "n": 2, "x": None}, {"id": "l", "n": 4}]
    report = ingest(db, NAME, rows, op="merge", operators={"n": "add", "x": "max"})
    writer.refresh()
    assert report.rows == 2
    assert (count(writer), writer.get("k")["x"], count(writer, "l")) == (3, 0.5, 4)
    with pytest.raises(InvalidInputError, match="a merge needs an operator"):
        ingest(db, NAME, rows, op="merge")
