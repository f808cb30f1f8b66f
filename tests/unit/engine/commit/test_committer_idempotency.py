"""Idempotency keys between batches and loads: found in window, log and queue (H46, H57)."""

import pyarrow as pa
import pytest

import reef
from reef import jobs
from reef.errors import InvalidInputError, NotFoundError
from reef.formats.manifest import DedupEntry
from reef.jobs import fold
from reef.manifest.dedup import DedupWindow
from tests.support.bulk_jobs import ingest

NAME = "users"


@pytest.fixture
def db():
    """Give a database in memory."""
    return reef.open("memory://")


def test_H57_the_key_of_a_load_is_resolved_before_and_after_a_fold(db):
    """A load is resolved by its key, like a batch."""
    writer = db.writer(NAME)
    writer.put("k", b"1", idempotency_key="batch")
    ingest(db.store, NAME, {b"k": b"bulk"}, key="load")
    ingest(db.store, NAME, {b"k": b"none"}, key="aborted", abort=True)
    for _ in range(2):
        outcomes = {key: writer.resolve(key) for key in ("batch", "load", "aborted", "never")}
        assert outcomes == {
            "batch": "committed",
            "load": "committed",
            "aborted": "unknown",
            "never": "unknown",
        }
        fold(db, NAME)


@pytest.mark.parametrize("depends_on", ["k", "other"])
def test_H46_the_key_of_a_batch_that_is_being_decided_is_checked_again(db, depends_on):
    """H46: a segment is gone while it is decided; the refresh finds its key committed."""
    writer = db.writer(NAME)
    evaluate = writer._evaluate

    def swept(conditions):
        writer._evaluate = evaluate
        ingest(db.store, NAME, {b"k": b"bulk"}, key="job-7")
        raise NotFoundError("a segment was swept")

    writer._evaluate = swept
    batch = reef.Batch().put("k", b"live")
    with pytest.raises(InvalidInputError, match="job-7"):
        writer.write(batch, when=[reef.absent(depends_on)], idempotency_key="job-7")
    assert writer.get("k") == b"bulk" == dict(db.reader(NAME).scan())[b"k"]
    assert writer.put("k", b"later").lsn


def test_a_window_that_is_too_long_is_trimmed():
    """A manifest of an older release may have more keys than the window holds: the last count."""
    entries = [DedupEntry(f"{n}", "", n, 0, 1, 1, "id", 0) for n in range(5)]
    window = DedupWindow(entries, 2)
    assert [entry.key for entry in window.entries()] == ["3", "4"]
    assert len(window) == 2


# --- the same rule for batches, loads and transactions --------------------------------


@pytest.fixture
def events(db):
    """Give a namespace with columns."""
    db.create("events", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    return db


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_a_load_with_a_used_key_and_other_rows_is_refused(events, folded, ttl_s):
    """As with `upsert`: the same rows are a replay, other rows an InvalidInputError."""
    rows = pa.table({"id": ["a", "b"], "n": [1, 2]})
    first = jobs.ingest(events, "events", rows, idempotency_key="load", ttl_s=ttl_s)
    if folded:
        fold(events, "events")
    reader = rows.to_reader()
    again = jobs.ingest(events, "events", reader, idempotency_key="load", ttl_s=ttl_s)
    assert (again.lsn, again.rows, again.replayed) == (first.lsn, 2, True)
    for other in (
        {"rows": {"id": ["a", "b"], "n": [1, 3]}},
        {"rows": rows, "replace": True},
        *([{"rows": rows, "op": "patch"}] if ttl_s is None else []),
    ):
        with pytest.raises(InvalidInputError, match=r"'load' was used at LSN .* for another load"):
            jobs.ingest(events, "events", **other, idempotency_key="load", ttl_s=ttl_s)
    assert events.reader("events").count() == 2
    assert events.stats("events").open_jobs == 0


def test_a_load_of_an_earlier_release_is_replayed(events):
    """Its record has no digest, so that its rows are not compared."""
    ingest(events.store, "events", {b"a": b"1"}, key="load")
    assert jobs.ingest(events, "events", {"id": ["x"]}, idempotency_key="load").replayed


def test_keys_of_loads_and_batches_differ(events):
    """A key of a load is not free for a batch, nor for a transaction, nor the other way round."""
    rows = {"id": ["a"], "n": [1]}
    jobs.ingest(events, "events", rows, idempotency_key="load")
    with events.writer("events", background=False) as writer:
        with pytest.raises(InvalidInputError, match="was used at LSN"):
            writer.upsert(rows, idempotency_key="load")
        with (
            pytest.raises(InvalidInputError, match="was used at LSN"),
            writer.transaction(idempotency_key="load") as tx,
        ):
            tx.upsert(rows)
        writer.upsert(rows, idempotency_key="batch")
    with pytest.raises(InvalidInputError, match="for a batch"):
        jobs.ingest(events, "events", rows, idempotency_key="batch")


@pytest.mark.parametrize("restart", [False, True])
def test_a_transaction_with_a_key_commits_once(db, restart):
    """A repeat with the same operations returns the first receipt, also after a restart."""

    def transfer(writer):
        with writer.transaction(idempotency_key="transfer-1") as tx:
            tx.put("a", b"1", ttl_s=60)
            tx.delete("b")
        return tx.receipt

    writer = db.writer(NAME, background=False)
    writer.put("b", b"0")
    first = transfer(writer)
    assert not first.replayed
    assert first.idempotency_key == "transfer-1"
    writer.put("b", b"2")
    if restart:
        writer = db.writer(NAME, background=False)
    again = transfer(writer)
    assert (again.lsn, again.ops, again.replayed) == (first.lsn, 2, True)
    assert writer.get("b") == b"2"
    assert writer.resolve("transfer-1") == "committed"


def test_a_repeated_transaction_knows_it_from_the_start(db):
    """`receipt` is set, so that a block that reads and writes can be skipped."""
    writer = db.writer(NAME, background=False)
    for _ in range(2):
        with writer.transaction(idempotency_key="add") as tx:
            if tx.receipt is None:
                tx.put("n", bytes([*(tx.get("n") or b""), 1]))
    assert tx.receipt.replayed
    assert writer.get("n") == b"\x01"
    with (
        pytest.raises(InvalidInputError, match=r"'add' was used at LSN .* for another batch"),
        writer.transaction(idempotency_key="add") as tx,
    ):
        tx.put("n", b"other")
    assert writer.get("n") == b"\x01"


def test_a_transaction_with_a_key_still_conflicts(db):
    """A key that was not committed saves nothing: a conflict is raised, and the key stays free."""
    writer = db.writer(NAME, background=False)
    tx = writer.transaction(idempotency_key="t")
    tx.get("a")
    writer.put("a", b"1")
    tx.put("a", b"2")
    with pytest.raises(reef.ConflictError):
        tx.commit()
    assert writer.resolve("t") == "unknown"
    with writer.transaction(idempotency_key="t") as tx:
        tx.put("a", b"2")
    assert not tx.receipt.replayed
    with pytest.raises(InvalidInputError, match="must be str"):
        writer.transaction(idempotency_key=7)


NARROW = pa.schema([("id", pa.string()), ("n", pa.int32())])
WIDE = pa.schema([("id", pa.string()), ("n", pa.int64()), ("more", pa.string())])


@pytest.mark.parametrize("where", ["log", "window", "local"])
@pytest.mark.parametrize("ttl_s", [None, 3600])
def test_a_retry_after_a_column_was_widened_is_a_replay(db, tmp_path, where, ttl_s):
    """The digest of a batch depends on the types of its columns. A retry is compared with its first
    commit under the schemas that the namespace had before, too.
    """
    db.create(NAME, NARROW)
    local = {"durability": "local", "local_log": tmp_path / "log"} if where == "local" else {}
    rows = [{"id": "a", "n": 1}]
    with db.writer(NAME, background=False, **local) as writer:
        first = writer.upsert(rows, ttl_s=ttl_s, idempotency_key="k")
    if where == "window":
        fold(db, NAME)
    db.alter(NAME, WIDE)
    with db.writer(NAME, background=False, **local) as writer:
        again = writer.upsert(rows, ttl_s=ttl_s, idempotency_key="k")
        assert (again.replayed, again.lsn) == (True, first.lsn or again.lsn)
        for other in (
            {"id": "a", "n": 2},
            {"id": "a", "n": 1, "more": ""},
            {"id": "a", "n": 2**40},
        ):
            with pytest.raises(InvalidInputError, match="another batch"):
                writer.upsert([other], ttl_s=ttl_s, idempotency_key="k")


def test_a_load_that_is_repeated_after_a_column_was_widened_is_a_replay(db):
    """Its rows are compared under earlier schemas, too."""
    db.create(NAME, NARROW)
    rows = [{"id": "a", "n": 1}]
    first = jobs.ingest(db, NAME, rows, idempotency_key="load")
    db.alter(NAME, WIDE)
    again = jobs.ingest(db, NAME, rows, idempotency_key="load")
    assert (again.lsn, again.replayed) == (first.lsn, True)
    for other in ({"id": "a", "n": 2}, {"id": "a", "n": 1, "more": ""}):
        with pytest.raises(InvalidInputError, match="another load"):
            jobs.ingest(db, NAME, [other], idempotency_key="load")
