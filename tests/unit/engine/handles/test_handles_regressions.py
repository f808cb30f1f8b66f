"""Mistakes that reviewers found, each kept from coming back."""

import datetime
import gc
import math

import pyarrow as pa
import pytest

import reef
from reef.engine.handles.transaction import Footprints
from reef.jobs import fold
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import ingest, make_with_window

NAME = "users"
TABLE = "events"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("i", pa.int32()),
        ("f", pa.float32()),
        ("d", pa.date32()),
        ("t", pa.timestamp("ms", tz="UTC")),
        ("l", pa.list_(pa.int64())),
        ("s", pa.string()),
    ]
)


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


@pytest.fixture
def events(db):
    """Give a writer of a table."""
    db.create(TABLE, SCHEMA)
    with db.writer(TABLE) as writer:
        yield writer


# --- rows that are kept -----------------------------------------------------------------


def test_a_get_during_a_resync_keeps_no_old_row(db):
    """The tail is replaced while others read: their rows of the old one are not cached."""
    writer = db.writer(NAME)
    writer.put("k", b"old")
    ingest(db.store, NAME, {b"k": b"loaded"})
    fold(db, NAME)
    db.events.subscribe(lambda event: event.name == "resynced" and writer.get("k"))
    writer.refresh()
    assert writer.get("k") == b"loaded" == dict(writer.scan())[b"k"]


def test_a_subscriber_that_raises_does_not_end_a_writer(db):
    """It is notified of a resync in the middle of it: the write that lost its slot continues."""
    writer = db.writer(NAME, background=False)
    writer.put("a", b"1")
    db.events.subscribe(lambda event: 1 / 0)
    ingest(db.store, NAME, {b"k": b"loaded"})
    assert writer.put("b", b"2").lsn == 5
    assert writer.is_open


def test_a_row_kept_before_a_schema_grew_is_forgotten(db, events):
    """Otherwise it would lack the new column for good."""
    events.put("a", {"i": 1})
    assert "note" not in events.get("a")
    db.alter(TABLE, SCHEMA.append(pa.field("note", pa.string())))
    events.refresh()
    assert events.get("a")["note"] is None


def test_lists_in_a_row_are_the_callers_own(events):
    """Changing what get returned changes no row, however deep."""
    events.put("a", {"l": [1, 2]})
    for _ in range(2):
        events.get("a")["l"].append(99)
    assert events.get("a")["l"] == [1, 2]


# --- conditions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("i", 5.5),
        ("f", 1e300),
        ("d", datetime.datetime(2024, 1, 2, 23, 59)),
        ("t", datetime.datetime(2024, 1, 2)),
        ("t", 17),
        ("l", [1.9]),
        ("s", b"x"),
    ],
)
def test_a_condition_is_as_exact_as_a_write(events, column, value):
    """A value that a column cannot hold is refused, not rounded until it is equal."""
    when = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    events.put("a", {"i": 5, "f": math.inf, "d": when.date(), "t": when, "l": [1], "s": "x"})
    with pytest.raises(reef.InvalidInputError, match=f"column {column}"):
        events.delete("a", when=[reef.equals("a", column, value)])
    assert events.get("a") is not None


def test_a_row_just_read_equals_itself(events):
    """NaN too, alone and in rows with everything."""
    events.put("a", {"f": math.nan, "l": [1, None], "i": 3})
    row = events.get("a")
    same = [reef.equals("a", column, row[column]) for column in ("f", "l", "i", "s")]
    assert events.patch([{"id": "a", "i": 4}], when=same).lsn


def test_one_condition_needs_no_list_and_nonsense_is_refused(events):
    """`when` accepts a condition or a list of them, and rejects anything else with a clear
    error."""
    events.put("a", {"i": 1}, when=reef.absent("a"))
    events.put("a", {"i": 2}, when=None)
    for nonsense in ("x", ["x"], 17):
        with pytest.raises(reef.InvalidInputError, match="condition"):
            events.put("a", {"i": 3}, when=nonsense)
    assert events.get("a")["i"] == 2


# --- batches ----------------------------------------------------------------------------


def test_a_transaction_commits_its_staged_writes(events):
    """Not what became of the caller's objects since; a stream is read once."""
    rows = [{"id": "a", "i": 1}]
    table = pa.table({"id": ["b"], "i": pa.array([2], pa.int32())})
    with events.transaction() as tx:
        tx.upsert(rows)
        rows[0]["i"] = 99
        tx.upsert(table.to_reader())
        assert [tx.get(key)["i"] for key in "ab"] == [1, 2]
    assert [events.get(key)["i"] for key in "ab"] == [1, 2]


def test_a_batch_copies_its_input(events):
    """Rows that change later, and streams, can be written twice, by one idempotency key."""
    rows = [{"id": "a", "i": 1}]
    table = pa.table({"id": ["b"], "i": pa.array([2], pa.int32())})
    batch = reef.Batch().upsert(rows).upsert(table.to_reader())
    rows[0]["i"] = 99
    first = events.write(batch, idempotency_key="once")
    again = events.write(batch, idempotency_key="once")
    assert (again.lsn, again.replayed) == (first.lsn, True)
    assert events.get("a")["i"] == 1


def test_a_keyed_write_with_a_time_to_live_can_be_retried(db):
    """H19: the same call is the same batch, although the time of expiry differs."""
    with db.writer(NAME) as writer:
        for expected in (False, True):
            receipt = writer.put("k", b"v", ttl_s=60, idempotency_key="x")
            assert receipt.replayed is expected
            db.store.runtime.sleep(0.005)
        with pytest.raises(reef.InvalidInputError, match="another batch"):
            writer.put("k", b"v", ttl_s=61, idempotency_key="x")


def test_rows_that_are_no_rows(events):
    """Pairs are refused, and a row must not name another key than its own."""
    with pytest.raises(reef.InvalidInputError):
        events.upsert([("a", {"i": 1})])
    with pytest.raises(reef.InvalidInputError, match="has 'k2'"):
        events.put("k1", {"id": "k2"})
    assert events.put("k1", {"id": "k1", "i": 1}).lsn
    with pytest.raises(reef.InvalidInputError, match="not UTF-8"):
        events.get_many([b"\xff"])


# --- transactions that end badly -----------------------------------------------------------


def test_a_scan_of_a_transaction_that_is_over(events):
    """Its iterator says so."""
    events.upsert([{"id": f"k{n}", "i": n} for n in range(10)])
    with events.transaction() as tx:
        rows = tx.scan()
    with pytest.raises(reef.ClosedError, match="has ended"):
        list(rows)


def test_a_forgotten_transaction_holds_nothing(events):
    """One that is dropped without an end does not keep footprints for ever."""
    events.transaction().get("x")
    gc.collect()
    events.put("a", {"i": 1})
    assert not events._footprints._open
    assert not events._footprints._kept


def test_columns_that_change_under_a_transaction(db, events):
    """It has lost, and every read raises that error."""
    tx = events.transaction()
    tx.put("a", {"i": 1})
    db.alter(TABLE, SCHEMA.set(1, pa.field("i", pa.int64())))
    events.refresh()
    for read in (lambda: tx.get("a"), lambda: list(tx.scan()), lambda: tx.get_many(["a"])):
        with pytest.raises(reef.ConflictError, match="schema has changed"):
            read()


# --- the log ------------------------------------------------------------------------------


class LoadsFirst(Wrapper):
    """A bulk load takes a slot just before the writer's PUT arrives."""

    def __init__(self, inner, slot, load):
        super().__init__(inner)
        self.slot, self.load = slot, load

    def create(self, key, body):
        if self.load is not None and key == Namespace(NAME).wal_object(self.slot):
            load, self.load = self.load, None
            load()
        return self.inner.create(key, body)


def test_H46_a_key_is_checked_again_after_a_lost_slot(db):
    """H46, H57: a load with the same key was first: the batch gets its receipt, and is not applied
    again."""
    writer = db.writer(NAME)
    writer.put("other", b"1")
    slot = writer._committer.tail.next_lsn
    load = lambda: ingest(db.store, NAME, {b"k": b"bulk"}, key="job-7")  # noqa: E731
    writer._committer.log._store = LoadsFirst(writer._committer.log._store, slot, load)
    with pytest.raises(reef.InvalidInputError, match="job-7"):
        writer.put("k", b"live", idempotency_key="job-7")
    assert writer.get("k") == b"bulk"
    assert dict(db.reader(NAME).scan())[b"k"] == b"bulk"


def test_H46_batches_behind_a_lost_slot_are_checked_too(db):
    """H46: a keyed batch in the queue was decided before the load with its key was known."""
    writer = db.writer(NAME)
    writer.put("other", b"1")
    slot = writer._committer.tail.next_lsn
    waiting = []

    def load():
        waiting.append(writer.put("k", b"live", idempotency_key="job-7", wait=False))
        ingest(db.store, NAME, {b"k": b"bulk"}, key="job-7")

    writer._committer.log._store = LoadsFirst(writer._committer.log._store, slot, load)
    writer.put("first", b"1")
    assert isinstance(waiting[0].exception(30), reef.InvalidInputError)
    assert writer.get("k") == b"bulk" == dict(db.reader(NAME).scan())[b"k"]
    assert writer.get("first") == b"1"


@pytest.mark.parametrize("keys_max", [1, 2])
@pytest.mark.parametrize("seen", [True, False], ids=["fold seen", "fold not seen"])
def test_handles_of_any_age_classify_a_load_alike(db, keys_max, seen):
    """Whether a key is still in the window follows from the log, not from which fold was seen."""
    make_with_window(db, NAME, keys_max)
    writer = db.writer(NAME)
    reader = db.reader(NAME, refresh_interval_ms=0)
    writer.put("k", b"first", idempotency_key="load")
    writer.put("x", b"1", idempotency_key="newer")
    fold(db, NAME)
    if seen:
        writer.refresh()
        reader.refresh()
    ingest(db.store, NAME, {b"k": b"loaded"}, key="load")
    writer.refresh()
    handles = [h.get("k") for h in (writer, reader, db.reader(NAME))]
    assert handles == [b"loaded" if keys_max == 1 else b"first"] * 3
    assert len(writer._committer.tail.dedup) == keys_max, "memory does not grow for ever"
    fold(db, NAME)
    assert db.reader(NAME).get("k") == handles[0]
    loads = [c.row for c in db.reader(NAME).changes(after_lsn=0) if c.key == b"k"]
    assert loads == [b"first", b"loaded"][: 3 - keys_max]


def test_flush_raises_refused_writes(db):
    """A fenced write that no caller waited for is not ignored silently."""
    old = db.writer(NAME)
    db.writer(NAME)
    future = old.put("k", b"zombie", wait=False)
    with pytest.raises(reef.FencedError):
        old.flush()
    assert isinstance(future.exception(5), reef.FencedError)
    old.close()


def test_unfolded_bytes_count_after_reopening(db):
    """The bound includes replayed rows, not only those written by this process."""
    with db.writer(NAME) as writer:
        for number in range(10):
            writer.put(f"k{number}", bytes(1000))
    with db.writer(NAME, unfolded_bytes_max=5000, write_deadline_s=0.1) as again:
        assert again._committer.tail.bytes >= 10_000
        with pytest.raises(reef.UnavailableError, match="write queue is full"):
            again.put("k", b"v")


def test_a_mistake_costs_no_request(db):
    """A batch that is too large, or of the wrong type, is refused without a request."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    with db.writer(NAME, batch_bytes_max=1000) as writer:
        meter.reset()
        for _ in range(5):
            with pytest.raises(reef.InvalidInputError):
                writer.put("k", bytes(2000))
        assert meter.requests() == {}


def test_an_error_raised_many_times_does_not_grow(db):
    """A fenced writer raises the same error to each caller, with a traceback of that call alone."""
    old = db.writer(NAME)
    db.writer(NAME)
    depths = []
    for _ in range(20):
        with pytest.raises(reef.FencedError) as caught:
            old.put("k", b"v")
        depths.append(len(caught.traceback))
    assert depths[-1] <= depths[1] + 1


def test_a_transaction_may_be_collected_at_any_time():
    """The collector may strike while the footprints are locked: nothing waits for itself."""
    footprints = Footprints(1000)
    number = footprints.begin()
    with footprints._lock:
        footprints.drop(number)
    footprints.applying([])
    assert not footprints._open
