"""Two-phase stores in parts: names, lost responses, leftovers, and freed names."""

import pytest

from reef import stores
from reef.errors import CorruptionError, InvalidInputError, UnavailableError
from reef.stores import Outcome, ReadBack, Retry, RetryPolicy
from reef.stores.memory import MemoryStore
from reef.stores.two_phase import Register, TwoPhase, collect, recover
from reef.stores.two_phase.register import (
    Holding,
    SqliteRegister,
    destination_of,
    is_temporary,
    new_record,
    withdrawal_of,
)
from reef.telemetry import RequestMeter
from reef.testing import Fault, Faults, Recorder, Rule

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
    """No listing shows a source, and no caller can write an object named like one."""
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
    """A register that loses the next responses, before or after the statement took effect."""

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
        raise UnavailableError(f"no response to {method}")

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
    """As the table of costs: the name is taken before the check, after it, or by a dead one."""
    bucket, register = MemoryStore(), Scripted(sqlite_register(tmp_path))
    rival = TwoPhase(bucket, register.inner, AT_ONCE)

    class Overtaken(stores.Wrapper):
        """Another creator is quicker between the check and the insert."""

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


def test_a_lost_response_to_an_insert_is_resolved_by_reading(parts):
    """Whether it took effect or not, the writer wins once, and says so."""
    bucket, register, store = parts
    for number, when in enumerate(("before", "after")):
        register.losses = [("insert", when)]
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


def test_a_read_back_resolves_an_unknown_outcome(parts):
    """Sent again, the same bytes find their own record, finish it, and count as created."""
    bucket, register, store = parts
    register.losses = [("insert", "after"), *[("read", "before")] * 2]
    register.losses += [("insert", "before"), *[("read", "before")] * 2]
    result = ReadBack(store, RetryPolicy(first_delay_s=0.0)).create("wal/1", b"mine")
    assert (result.outcome, result.doubt) == (Outcome.CREATED, True)
    assert bucket.get("wal/1") == b"mine"


class ChecksTooEarly(TwoPhase):
    """Has checked the destination before the winner's object was there."""

    checked = False

    def _is_there(self, key):
        checked, self.checked = self.checked, True
        return checked


@pytest.mark.parametrize("losses", [[], [("insert", "before")], [("insert", "after")]])
def test_a_loser_never_takes_the_winners_place(parts, losses):
    """A second insert is "exists", with or without a response, and the winner's bytes stay."""
    bucket, register, store = parts
    store.create("wal/1", b"first")
    winner = register.inner.read_one("wal/1")
    register.losses = losses
    late = ChecksTooEarly(bucket, register, AT_ONCE)
    assert late.create("wal/1", b"second").outcome is Outcome.EXISTS
    assert bucket.get("wal/1") == b"first"
    assert register.inner.read_one("wal/1") == winner


def test_a_copy_that_fails_is_unknown_and_finished_later(parts):
    """The record exists: the next process completes the object."""
    bucket, register, _ = parts
    rules = [Rule(Fault.FAIL_BEFORE, "copy", times=1)]
    store = TwoPhase(Faults(bucket, rules), register, AT_ONCE)
    assert store.create("wal/1", b"mine").outcome is Outcome.UNKNOWN
    assert store.create("wal/1", b"other").outcome is Outcome.EXISTS, "the loser helped"
    assert bucket.get("wal/1") == b"mine"
    assert recover(store).finished == ()


def test_a_commit_that_fails_does_not_remove_a_stored_object(parts):
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
    """It is reported by creators and by recovery, and never deleted (H23)."""
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
    calls = Recorder(bucket)
    store = TwoPhase(calls, register, AT_ONCE)
    store.create("wal/1", b"one")
    source = register.read_one("wal/1").source
    calls.calls.clear()
    register.calls.clear()
    store.delete("wal/1")
    assert [(c.method, c.key) for c in calls.calls] == [("delete", source), ("delete", "wal/1")]
    assert register.calls == ["read", "delete"]
    assert register.read_one("wal/1") is None


def test_deleting_an_unfinished_name_leaves_no_way_back(parts):
    """H23: committed first, so that no helper copies; then the source, so that no copy lands; then
    the object, and the record last: until then the name cannot be created again."""
    bucket, register, _ = parts
    steps = register.calls

    class Noting(stores.Wrapper):
        def delete_many(self, keys):
            steps.extend(keys)
            self.inner.delete_many(keys)

    record = new_record(bucket.runtime, "wal/1", b"one")
    bucket.put(record.source, b"one")
    register.insert(record)
    steps.clear()
    TwoPhase(Noting(bucket), register, AT_ONCE).delete("wal/1")
    assert steps == ["read", "commit", record.source, "wal/1", "delete"]


def test_leftovers_of_a_crashed_deletion_are_cleared_by_the_next_creation(parts):
    """A committed record without an object does not block the name."""
    bucket, _, store = parts
    store.create("wal/1", b"one")
    bucket.delete("wal/1")
    assert store.create("wal/1", b"two").outcome is Outcome.CREATED
    assert bucket.get("wal/1") == b"two"
    assert keys_of(bucket) == ["wal/1"]


def test_a_name_is_not_freed_while_a_copy_of_it_is_under_way(parts):
    """Root: `_freed` without its second check. A copy that lands before the source is gone counts.

    The record of an object that is there stays: a register that forgot it could not free it.
    """
    bucket, register, _ = parts
    record = new_record(bucket.runtime, "wal/1", b"first")
    bucket.put(record.source, b"first")
    register.insert(record)
    register.commit(record)  # by a deletion that died right behind it

    class HelperCopies(stores.Wrapper):
        """The copy of a helper lands just before the source is deleted."""

        def delete_many(self, keys):
            if record.source in keys and record.source in keys_of(bucket):
                bucket.copy(record.source, "wal/1")
            self.inner.delete_many(keys)

    store = TwoPhase(HelperCopies(bucket), register, AT_ONCE)
    assert store.create("wal/1", b"second").outcome is Outcome.EXISTS
    assert bucket.get("wal/1") == b"first"
    held = register.inner.read_one("wal/1")
    assert held is not None, "the record of an object that is there was removed"
    assert held.source == record.source
    assert keys_of(bucket) == ["wal/1"]


# --- inserts that land late -------------------------------------------------------------


class Overtaken(Register):
    """Sends nothing the first time; a rival wins meanwhile, and the insert is still on its way."""

    def __init__(self, inner, rival):
        self.inner, self.scope = inner, inner.scope
        self._rival = rival
        self.on_their_way = []
        self.silent = False

    @property
    def name(self):
        return self.inner.name

    def insert(self, record):
        if not self.on_their_way:
            self._rival()
        if self.silent or not self.on_their_way:
            self.on_their_way.append(record)
            raise UnavailableError("the connection was lost")
        return self.inner.insert(record)

    def read(self, destinations):
        if self.silent:
            raise UnavailableError("the connection was lost")
        return self.inner.read(destinations)

    def commit(self, record):
        self.inner.commit(record)

    def delete(self, records):
        self.inner.delete(records)

    def page(self, prefix, start_after, *, unfinished):
        return self.inner.page(prefix, start_after, unfinished=unfinished)


def late_landing(tmp_path, *, silent):
    """Return the stores of a rival and of a creator that got "exists", and its insert."""
    bucket, register = MemoryStore(), sqlite_register(tmp_path)
    rival = TwoPhase(bucket, register, AT_ONCE)
    overtaken = Overtaken(register, lambda: rival.create("wal/7", b"rival"))
    overtaken.silent = silent
    two_phase = TwoPhase(bucket, overtaken, AT_ONCE)
    if silent:
        assert two_phase.create("wal/7", b"mine").outcome is Outcome.UNKNOWN
        overtaken.silent = False
    result = ReadBack(two_phase, AT_ONCE).create("wal/7", b"mine")
    assert (result.outcome, result.winner) == (Outcome.EXISTS, b"rival")
    rival.delete("wal/7")
    return bucket, register, rival, overtaken.on_their_way


@pytest.mark.parametrize("silent", [False, True], ids=["settled at once", "sent again"])
def test_an_insert_reported_as_existing_does_not_appear_later(tmp_path, silent):
    """Root: an insert without a response landed after "exists" was reported and the rival deleted.

    It counts for nothing: recovery removes the record, and the name can be used.
    """
    bucket, register, rival, on_their_way = late_landing(tmp_path, silent=silent)
    for record in on_their_way:
        register.insert(record)
        report = recover(rival)
        assert (report.finished, report.stuck) == ((), ())
        assert register.read_one("wal/7") is None
    assert [key for key in keys_of(bucket) if not is_temporary(key)] == []
    assert rival.create("wal/7", b"next").outcome is Outcome.CREATED


def test_a_creator_removes_a_withdrawn_record(tmp_path):
    """Not only recovery: any creator that meets the late record takes the name."""
    bucket, register, rival, (late,) = late_landing(tmp_path, silent=False)
    register.insert(late)
    assert ReadBack(rival, AT_ONCE).create("wal/7", b"next").outcome is Outcome.CREATED
    assert bucket.get("wal/7") == b"next"


@pytest.mark.parametrize("ending", ["no response", "refused", "rival unfinished"])
def test_a_source_stays_while_its_insert_may_land(tmp_path, ending):
    """Root: a source dropped while in doubt. Its record would be stuck, and block its name."""
    bucket, register = MemoryStore(), sqlite_register(tmp_path)
    rules = [Rule(Fault.FAIL_BEFORE, "copy", times=1)]
    dead = TwoPhase(Faults(bucket, rules), register, AT_ONCE)

    def meanwhile():
        if ending == "rival unfinished":
            assert dead.create("wal/7", b"rival").outcome is Outcome.UNKNOWN

    overtaken = Overtaken(register, meanwhile)
    overtaken.silent = ending == "no response"
    rules = [Rule(Fault.FAIL_BEFORE, "copy")]
    store = TwoPhase(Faults(bucket, rules), overtaken, AT_ONCE)
    if ending == "refused":
        overtaken.inner = Refusing(register)
    assert store.create("wal/7", b"mine").outcome is Outcome.UNKNOWN
    late = overtaken.on_their_way[0]
    calm = TwoPhase(bucket, register, AT_ONCE)
    if ending == "rival unfinished":
        assert recover(calm).finished == ("wal/7",)
        calm.delete("wal/7")
    assert register.insert(late)
    report = recover(calm)
    assert (report.finished, report.stuck) == (("wal/7",), ())
    assert bucket.get("wal/7") == b"mine"


class Refusing(Overtaken):
    """A register that refuses for good, its credentials having expired."""

    def __init__(self, inner):
        super().__init__(inner, lambda: None)

    def insert(self, record):
        raise InvalidInputError("the register refuses")


def test_a_withdrawal_comes_before_the_source_goes(tmp_path):
    """A crash in between leaves a record that differs from one whose bytes are lost."""
    bucket, register = MemoryStore(), sqlite_register(tmp_path)
    rival = TwoPhase(bucket, register, AT_ONCE)
    calls = Recorder(bucket)
    store = TwoPhase(calls, Overtaken(register, lambda: rival.create("wal/7", b"rival")), AT_ONCE)
    assert store.create("wal/7", b"mine").outcome is Outcome.EXISTS
    source = next(call.key for call in calls.calls if call.method == "put")
    written = [(c.method, c.key) for c in calls.calls if c.method in ("put", "delete")]
    assert written == [
        ("put", source),
        ("put", withdrawal_of(source)),
        ("delete", source),
    ]


def test_a_withdrawal_that_fails_leaves_the_outcome_unknown(tmp_path):
    """As long as the insert could count, "exists" is not reported."""
    bucket, register = MemoryStore(), sqlite_register(tmp_path)
    rival = TwoPhase(bucket, register, AT_ONCE)
    overtaken = Overtaken(register, lambda: rival.create("wal/7", b"rival"))
    rules = [Rule(Fault.FAIL_BEFORE, "put", key="*.00000000000000000000000000000000", times=1)]
    store = TwoPhase(Faults(bucket, rules), overtaken, AT_ONCE)
    assert store.create("wal/7", b"mine").outcome is Outcome.UNKNOWN
    assert store.create("wal/7", b"mine").outcome is Outcome.EXISTS
    rival.delete("wal/7")
    register.insert(overtaken.on_their_way[0])
    assert recover(rival).finished == ()


def test_withdrawals_are_collected_when_they_are_old(tmp_path):
    """As sources are: when the name is decided for another, or is below the boundary."""
    bucket, register, rival, (late,) = late_landing(tmp_path, silent=False)

    def sweep(*, below):
        return collect(
            rival, "wal/", is_below=lambda _: below, older_than_s=-1.0, apply=True
        ).temporaries

    assert keys_of(bucket) == [withdrawal_of(late.source)]
    assert sweep(below=False) == (), "the name is open"
    register.insert(late)
    assert sweep(below=False) == (), "its record has landed, and is not removed yet"
    assert recover(rival).done == ("wal/7",)
    assert sweep(below=True) == (withdrawal_of(late.source),)
    assert keys_of(bucket) == []


def test_the_source_of_a_record_that_is_not_finished_stays(parts):
    """H23: however old it is: the process that completes the record copies from it."""
    bucket, register, store = parts
    winner, loser = (new_record(bucket.runtime, "wal/7", body) for body in (b"won", b"lost"))
    for record in (winner, loser):
        bucket.put(record.source, b"")
    register.insert(winner)

    def sweep():
        return collect(store, "wal/", is_below=lambda _: False, older_than_s=-1.0, apply=True)

    assert sweep().temporaries == (loser.source,)
    register.commit(winner)
    assert sweep().temporaries == (winner.source,)


class TakingTurns(Scripted):
    """A register behind a balancer: each statement is taken by another server."""

    turns = 0

    def incarnation(self):
        self.turns += 1
        return f"server {self.turns}"

    def holding(self, destination):
        return Holding(self.read_one(destination), self.incarnation())

    def commit_in(self, record, incarnation):
        return Register.commit_in(self, record, incarnation)


def test_servers_that_take_turns_stop_no_writer(tmp_path):
    """An incarnation that never stays the same is no reason to refuse, or to check for ever."""
    bucket, register = MemoryStore(), TakingTurns(sqlite_register(tmp_path))
    store = TwoPhase(bucket, register, AT_ONCE)
    assert store.create("wal/1", b"one").outcome is Outcome.CREATED
    assert store.create("wal/1", b"two").outcome is Outcome.EXISTS
    assert register.read_one("wal/1").committed
    assert keys_of(bucket) == ["wal/1"]
