"""Two-phase stores in parts: names, unknown answers, what is left over, and what is freed."""

import pytest

from reef import stores
from reef.errors import CorruptionError, InvalidInputError, UnavailableError
from reef.stores import Fault, Faults, Outcome, ReadBack, Retry, RetryPolicy, Rule
from reef.stores.memory import MemoryStore
from reef.stores.two_phase import Register, TwoPhase, recover
from reef.stores.two_phase.record import destination_of, is_temporary, new_record
from reef.stores.two_phase.sqlite import SqliteRegister
from reef.telemetry import RequestMeter

AT_ONCE = RetryPolicy(attempts_max=2, first_delay_s=0.0)


def sqlite_register(tmp_path):
    """Return a register of the test's own."""
    return SqliteRegister(str(tmp_path / "register.db"), "bucket")


# --- names ------------------------------------------------------------------------------


def test_a_source_is_named_after_its_destination():
    """`<destination>.<uuid>.<checksum>`: no two alike, and equal bytes have equal checksums."""
    runtime = MemoryStore().runtime
    one, two = (new_record(runtime, "wal/1.wal", b"bytes") for _ in range(2))
    assert one.source != two.source
    assert one.checksum == two.checksum
    assert one.source.startswith("wal/1.wal.")
    assert one.source.endswith(f".{one.checksum}")
    assert destination_of(one.source) == "wal/1.wal"
    assert new_record(runtime, "wal/1.wal", b"other").checksum != one.checksum


def test_sources_are_hidden_and_their_names_reserved(tmp_path):
    """Nobody sees a source in a listing, or can write an object that looks like one."""
    plain = MemoryStore()
    store = TwoPhase(plain, sqlite_register(tmp_path))
    source = new_record(store.runtime, "wal/1", b"x").source
    plain.put(source, b"x")
    plain.put("wal/2", b"y")
    assert [info.key for info in store.list()] == ["wal/2"]
    calls = (
        lambda: store.create(source, b""),
        lambda: store.put(source, b""),
        lambda: store.upload(source, [b""]),
        lambda: store.copy("wal/2", source),
        lambda: store.compose(source, [b""]),
    )
    for call in calls:
        with pytest.raises(InvalidInputError, match="named like a temporary object"):
            call()


# --- create -----------------------------------------------------------------------------


class Scripted(Register):
    """A register that loses the next answers, before or after the statement took effect."""

    def __init__(self, inner):
        self.inner, self.scope = inner, inner.scope
        self.losses = []
        self.calls = []

    @property
    def name(self):
        return self.inner.name

    def _call(self, method, *args, **options):
        self.calls.append(method)
        loss = next((x for x in self.losses if x[0] == method), None)
        if loss is None:
            return getattr(self.inner, method)(*args, **options)
        self.losses.remove(loss)
        if loss[1] == "after":
            getattr(self.inner, method)(*args, **options)
        raise UnavailableError(f"no answer to {method}")

    def insert(self, record):
        return self._call("insert", record)

    def read(self, destinations):
        return self._call("read", destinations)

    def commit(self, record):
        self._call("commit", record)

    def incarnation(self):
        return self._call("incarnation")

    def holding(self, destination):
        return self._call("holding", destination)

    def commit_in(self, record, incarnation):
        return self._call("commit_in", record, incarnation)

    def delete(self, records):
        self._call("delete", records)

    def page(self, prefix, start_after, *, unfinished):
        return self._call("page", prefix, start_after, unfinished=unfinished)


@pytest.fixture
def parts(tmp_path):
    """A bucket, a register that can be silent, and the two-phase store made of them."""
    bucket, register = MemoryStore(), Scripted(sqlite_register(tmp_path))
    return bucket, register, TwoPhase(bucket, register, AT_ONCE)


def keys_of(bucket):
    """Return all names, those of sources too."""
    return [info.key for info in bucket.list()]


def test_a_creation_costs_five_requests_and_three_statements(parts):
    """HEAD, PUT, GET, COPY and DELETE; the first one of a process reads the incarnation, too."""
    _, register, _ = parts
    meter = RequestMeter()
    store = ReadBack(TwoPhase(Retry(stores.Meter(MemoryStore(), meter)), register))
    assert store.create("wal/1", b"one").outcome is Outcome.CREATED
    costs = {"head": 1, "put": 1, "get": 1, "copy": 1, "delete": 1}
    assert meter.requests() == costs
    assert register.calls == ["incarnation", "insert", "holding", "commit_in"]
    store.create("wal/2", b"two")
    assert register.calls[4:] == ["insert", "holding", "commit_in"]
    assert meter.requests() == {method: 2 * count for method, count in costs.items()}
    assert [info.key for info in store.inner.inner.list()] == ["wal/1", "wal/2"]


@pytest.mark.parametrize("winner", ["before", "done", "dead"])
def test_what_losing_costs(tmp_path, winner):
    """As the table of costs says: the name is taken before the look, after it, or by a dead one."""
    bucket, register = MemoryStore(), Scripted(sqlite_register(tmp_path))
    rival = TwoPhase(bucket, register.inner, AT_ONCE)

    class Overtaken(stores.Wrapper):
        """Somebody else is quicker between the look and the insert."""

        def put(self, key, body):
            if winner == "dead":
                record = new_record(self.runtime, "wal/1", b"first")
                bucket.put(record.source, b"first")
                register.inner.insert(record)
            elif winner == "done":
                rival.create("wal/1", b"first")
            return self.inner.put(key, body)

    if winner == "before":
        rival.create("wal/1", b"first")
    meter = RequestMeter()
    store = ReadBack(TwoPhase(Overtaken(Retry(stores.Meter(bucket, meter))), register, AT_ONCE))
    store.inner.finisher.prepare()
    register.calls.clear()
    result = store.create("wal/1", b"second")
    assert (result.outcome, result.winner) == (Outcome.EXISTS, b"first")
    costs = {
        "before": ({"head": 1, "get": 1}, []),
        "done": ({"head": 2, "put": 1, "delete": 1, "get": 1}, ["insert", "read"]),
        "dead": (
            {"head": 1, "put": 1, "delete": 2, "get": 4, "copy": 1},
            ["insert", "read", "holding", "commit_in"],
        ),
    }
    assert (meter.requests(), register.calls) == costs[winner]
    assert keys_of(bucket) == ["wal/1"]


def test_a_lost_answer_to_an_insert_is_settled_by_reading(parts):
    """Whether it took effect or not, the writer wins once, and says so."""
    bucket, register, store = parts
    for number, moment in enumerate(("before", "after")):
        register.losses = [("insert", moment)]
        key = f"wal/{number}"
        assert store.create(key, b"mine").outcome is Outcome.CREATED
        assert store.create(key, b"other").outcome is Outcome.EXISTS
        assert bucket.get(key) == b"mine"


def test_an_insert_that_stays_unanswered_is_unknown(parts):
    """Neither "created" nor "exists"; the source stays, so that recovery can finish it."""
    bucket, register, store = parts
    register.losses = [("insert", "after"), ("read", "before"), ("read", "before")]
    register.losses += [("insert", "before"), ("read", "before"), ("read", "before")]
    assert store.create("wal/1", b"mine").outcome is Outcome.UNKNOWN
    (left,) = keys_of(bucket)
    assert is_temporary(left)
    assert recover(store).finished == ("wal/1",)
    assert keys_of(bucket) == ["wal/1"]
    assert bucket.get("wal/1") == b"mine"


def test_a_read_back_settles_what_was_unknown(parts):
    """Sent again, the same bytes find their own record, finish it, and count as created."""
    bucket, register, store = parts
    register.losses = [("insert", "after"), *[("read", "before")] * 2]
    register.losses += [("insert", "before"), *[("read", "before")] * 2]
    result = ReadBack(store, RetryPolicy(first_delay_s=0.0)).create("wal/1", b"mine")
    assert (result.outcome, result.doubt) == (Outcome.CREATED, True)
    assert bucket.get("wal/1") == b"mine"


class LooksTooEarly(TwoPhase):
    """Has looked at the destination before the winner's object was there."""

    looked = False

    def _is_there(self, key):
        looked, self.looked = self.looked, True
        return looked


@pytest.mark.parametrize("losses", [[], [("insert", "before")], [("insert", "after")]])
def test_a_loser_never_takes_the_winners_place(parts, losses):
    """An insert that comes second is "exists", answered or not, and the winner's bytes stay."""
    bucket, register, store = parts
    store.create("wal/1", b"first")
    winner = register.inner.read_one("wal/1")
    register.losses = losses
    late = LooksTooEarly(bucket, register, AT_ONCE)
    assert late.create("wal/1", b"second").outcome is Outcome.EXISTS
    assert bucket.get("wal/1") == b"first"
    assert register.inner.read_one("wal/1") == winner


def test_a_copy_that_fails_is_unknown_and_finished_later(parts):
    """The record stands: the next one who comes by makes the object appear."""
    bucket, register, _ = parts
    rules = [Rule(Fault.FAIL_BEFORE, "copy", times=1)]
    store = TwoPhase(Faults(bucket, rules), register, AT_ONCE)
    assert store.create("wal/1", b"mine").outcome is Outcome.UNKNOWN
    assert store.create("wal/1", b"other").outcome is Outcome.EXISTS, "the loser helped"
    assert bucket.get("wal/1") == b"mine"
    assert recover(store).finished == ()


def test_a_commit_that_fails_does_not_take_back_what_is_there(parts):
    """Readable is created; recovery sets the flag and removes the source."""
    bucket, register, store = parts
    register.losses = [("commit_in", "before")] * 2
    assert store.create("wal/1", b"mine").outcome is Outcome.CREATED
    assert len(keys_of(bucket)) == 2
    assert recover(store).finished == ("wal/1",)
    assert keys_of(bucket) == ["wal/1"]


def test_an_object_that_the_register_does_not_know_is_never_written_over(parts):
    """A register that was lost, or an object from before there was one: it exists."""
    bucket, register, store = parts
    bucket.put("wal/1", b"old")
    assert store.create("wal/1", b"new").outcome is Outcome.EXISTS
    assert bucket.get("wal/1") == b"old"
    assert "insert" not in register.calls


def test_a_source_that_was_removed_is_put_again_by_its_writer(parts):
    """As long as the winner lives, its bytes cannot get lost."""
    bucket, register, _ = parts

    class Vanishing(stores.Wrapper):
        def put(self, key, body):
            tag = self.inner.put(key, body)
            if is_temporary(key) and not hasattr(self, "once"):
                self.once = self.inner.delete(key)
            return tag

    store = TwoPhase(Vanishing(bucket), register, AT_ONCE)
    assert store.create("wal/1", b"mine").outcome is Outcome.CREATED
    assert bucket.get("wal/1") == b"mine"


def test_a_record_whose_bytes_are_nowhere_is_an_alarm(parts):
    """It is told by creators and by recovery, and never deleted (H23)."""
    bucket, register, store = parts
    record = new_record(store.runtime, "wal/1", b"lost")
    register.insert(record)
    for _ in range(2):
        assert recover(store).stuck == (record,)
    with pytest.raises(CorruptionError, match="neither it nor its source") as caught:
        store.create("wal/1", b"mine")
    assert caught.value.context["object"] == "wal/1"
    assert register.read_one("wal/1") == record
    assert keys_of(bucket) == []


def test_a_wrong_source_is_not_taken_for_the_object(parts):
    """Bytes that do not have the record's checksum are never called finished."""
    bucket, register, store = parts
    record = new_record(store.runtime, "wal/1", b"right")
    bucket.put(record.source, b"wrong")
    register.insert(record)
    assert recover(store).stuck == (record,)
    assert not register.read_one("wal/1").committed
    bucket.put(record.source, b"right")
    assert recover(store).finished == ("wal/1",)
    assert bucket.get("wal/1") == b"right"


# --- delete -----------------------------------------------------------------------------


def test_deleting_frees_the_name_in_order(parts):
    """The source, the object, the record: a death in between leaves nothing that blocks."""
    bucket, register, store = parts
    calls = stores.Recorder(bucket)
    store = TwoPhase(calls, register, AT_ONCE)
    store.create("wal/1", b"one")
    source = register.read_one("wal/1").source
    calls.calls.clear()
    register.calls.clear()
    store.delete("wal/1")
    assert [(c.method, c.key) for c in calls.calls] == [("delete", source), ("delete", "wal/1")]
    assert register.calls == ["read", "delete"]
    assert register.read_one("wal/1") is None


def test_what_a_death_left_of_a_deletion_is_cleared_by_the_next_creation(parts):
    """A committed record without an object does not block the name."""
    bucket, _, store = parts
    store.create("wal/1", b"one")
    bucket.delete("wal/1")
    assert store.create("wal/1", b"two").outcome is Outcome.CREATED
    assert bucket.get("wal/1") == b"two"
    assert keys_of(bucket) == ["wal/1"]
