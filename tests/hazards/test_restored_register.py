"""H72: a register that is restored from a backup while writers are at work.

The backup is from before the name that is created here: the register forgets who won it. The
exploration (tests/simulation) goes through all orders with a register that it knows; here the
registers are real, and the restore falls between every two steps of one writer, or behind its
death. A rival creates the same name right after each restore.
"""

import os
import shutil
import sqlite3
from contextlib import closing, suppress

import pytest

import reef
from reef import stores
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.runtime import REAL
from reef.stores import Outcome, ReadBack, Retry, RetryPolicy, Wrapper
from reef.stores.local import LocalStore
from reef.stores.opening import open_register
from reef.stores.two_phase import (
    Register,
    RegisterRecovery,
    TwoPhase,
    after_restore,
    find_two_phase,
    recover,
)
from reef.stores.two_phase.register import SqliteRegister, is_temporary, new_record
from tests.support.registers import REGISTERS, register_url

AT_ONCE = RetryPolicy(attempts_max=2, first_delay_s=0.0)
KEY = "wal/7"
STEPS = ("head", "put", "insert", "get", "holding", "copy", "commit_in", "delete")
"""The requests of a creation, in this order; `head` is sent before the first step."""


class Died(BaseException):
    """The process is gone: nothing that it would do next is done."""


class Steps:
    """Runs something once, before or after a step."""

    def __init__(self, step, act, *, after=False):
        self.step, self.after = step, after
        self._act = act

    def take(self, step, call):
        if step != self.step:
            return call()
        self.step = None
        if not self.after:
            self._act()
            return call()
        try:
            return call()
        finally:
            self._act()


class SteppedStore(Wrapper):
    """The requests of a creation."""

    def __init__(self, inner, steps):
        super().__init__(inner)
        self._steps = steps

    def head(self, key):
        return self._steps.take("head", lambda: self.inner.head(key))

    def put(self, key, body):
        return self._steps.take("put", lambda: self.inner.put(key, body))

    def get_tagged(self, key):
        return self._steps.take("get", lambda: self.inner.get_tagged(key))

    def copy(self, source, target):
        return self._steps.take("copy", lambda: self.inner.copy(source, target))

    def delete_many(self, keys):
        return self._steps.take("delete", lambda: self.inner.delete_many(keys))


class SteppedRegister(Register):
    """The statements of a creation."""

    def __init__(self, inner, steps):
        self.inner, self._steps, self.scope = inner, steps, inner.scope

    @property
    def name(self):
        return self.inner.name

    def current_name(self):
        return self.inner.current_name()

    def incarnation(self):
        return self.inner.incarnation()

    def insert(self, record):
        return self._steps.take("insert", lambda: self.inner.insert(record))

    def holding(self, destination):
        return self._steps.take("holding", lambda: self.inner.holding(destination))

    def commit_in(self, record, incarnation):
        return self._steps.take("commit_in", lambda: self.inner.commit_in(record, incarnation))

    def commit(self, record):
        self.inner.commit(record)

    def read(self, destinations):
        return self.inner.read(destinations)

    def delete(self, records):
        self.inner.delete(records)

    def page(self, prefix, start_after, *, unfinished):
        return self.inner.page(prefix, start_after, unfinished=unfinished)


class World:
    """A bucket without conditions, a register, and a backup that knows of one older name."""

    def __init__(self, bucket, register, *, shown):
        self.bucket, self.register = bucket, register
        self._shown = shown
        self.rival = ReadBack(TwoPhase(bucket, register, AT_ONCE), AT_ONCE)
        assert self.rival.create("wal/6", b"older").landed
        self._backup = list(register.all())
        self.outcomes = {}

    def writer(self, steps):
        """Return the store of the writer that is interrupted."""
        store = SteppedStore(self.bucket, steps)
        return ReadBack(TwoPhase(store, SteppedRegister(self.register, steps), AT_ONCE), AT_ONCE)

    def restore(self):
        """Restore the records to their earlier state."""
        self.register.delete(list(self.register.all()))
        for record in self._backup:
            self.register.insert(record)
            if record.committed:
                self.register.commit(record)
        if self._shown:
            self.register.begin_incarnation()

    def restore_and_create(self):
        self.restore()
        self.create("rival", self.rival)

    def create(self, name, store):
        self.outcomes[name] = store.create(KEY, name.encode()).outcome
        self.seen = self.bucket.get(KEY)

    def check(self):
        """One won; its bytes are stored, and are the bytes read when the rival was done."""
        (winner,) = [name for name, outcome in self.outcomes.items() if outcome is Outcome.CREATED]
        assert set(self.outcomes.values()) <= {Outcome.CREATED, Outcome.EXISTS}, self.outcomes
        assert self.bucket.get(KEY) == winner.encode()
        assert not recover(self.rival).stuck
        assert self.bucket.get(KEY) == winner.encode(), "recovery copied over it"
        assert [info.key for info in self.bucket.list() if is_temporary(info.key)] == []
        assert list(self.register.all(unfinished=True)) == []


@pytest.fixture(params=REGISTERS)
def register(request, servers, tmp_path):
    """A register of each kind, with nothing in its scope."""
    return open_register(register_url(servers, request.param, tmp_path), "memory://x")


@pytest.fixture
def bucket(tmp_path):
    """A directory, whose copies need their source to the last."""
    return LocalStore(str(tmp_path / "bucket"))


@pytest.mark.parametrize("shown", [False, True], ids=["silent", "shown"])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "copy"])
def test_H72_a_restore_before_each_step(register, bucket, step, shown):
    """H72: a writer stalls before a step; restore, and a rival: one of them wins, for good.

    Root: an INSERT that won was trusted from then on, though the register had forgotten it; and
    the destination was only checked before the INSERT.
    """
    world = World(bucket, register, shown=shown)
    world.create("stalled", world.writer(Steps(step, world.restore_and_create)))
    world.check()


@pytest.mark.parametrize("shown", [False, True], ids=["silent", "shown"])
def test_H72_a_copy_on_its_way_is_reported(register, bucket, shown):
    """H72: what remains: restore and rival fall between check and COPY. The writer says so.

    It does not get "created": the error names the object and both checksums.
    """
    world = World(bucket, register, shown=shown)
    with pytest.raises(CorruptionError) as caught:
        world.create("stalled", world.writer(Steps("copy", world.restore_and_create)))
    assert caught.value.kind is ErrorKind.REGISTER_RESTORED
    assert caught.value.context["object"] == KEY
    assert world.outcomes == {"rival": Outcome.CREATED}


def test_H72_a_copy_is_checked_again_before_it_is_sent_again(register, bucket):
    """H72: a COPY without a response; restore and rival before the next try, which is not made.

    Root: the retrying store below sent it again, for as long as half a minute, unchecked.
    """
    world = World(bucket, register, shown=False)

    class Unanswered(Wrapper):
        copies = 0

        def copy(self, source, target):
            self.copies += 1
            world.restore_and_create()
            raise UnavailableError("no response to a copy")

    silent = Unanswered(bucket)
    store = ReadBack(TwoPhase(Retry(silent, AT_ONCE), register, AT_ONCE), AT_ONCE)
    world.create("stalled", store)
    assert silent.copies == 1
    world.check()


def test_H72_a_restore_that_is_taken_back(register, bucket):
    """H72: an old backup, a rival that wins, then a newer backup with the writer's record in it.

    Only the incarnation shows that: the record is unchanged.
    """
    world = World(bucket, register, shown=True)

    def restore_twice():
        mine = register.read_one(KEY)
        world.restore_and_create()
        register.delete([register.read_one(KEY)])
        register.insert(mine)
        register.begin_incarnation()

    world.create("stalled", world.writer(Steps("holding", restore_twice)))
    assert world.outcomes == {"rival": Outcome.CREATED, "stalled": Outcome.EXISTS}
    world.check()


def test_H72_a_commit_in_another_incarnation_checks_the_object_again(register, bucket):
    """H72: the record is unchanged, and the object is another's by now: the name is not won.

    Root: DynamoDB commits before it compares the incarnation. The record that was committed so was
    taken for one that another process had finished, whatever the object was.
    """
    world = World(bucket, register, shown=True)

    def replace_object():
        bucket.put(KEY, b"rival")
        register.begin_incarnation()

    writer = world.writer(Steps("commit_in", replace_object))
    assert writer.create(KEY, b"stalled").outcome is Outcome.EXISTS
    assert not recover(world.rival).stuck
    assert bucket.get(KEY) == b"rival"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_H72_a_death_at_each_step_and_a_restore(register, bucket, step, after):
    """H72: the register forgets a dead writer; a stored object stays, else the rival wins."""
    world = World(bucket, register, shown=False)

    def die():
        raise Died(step)

    with pytest.raises(Died):
        world.create("dead", world.writer(Steps(step, die, after=after)))
    try:
        left = bucket.get(KEY)
    except NotFoundError:
        left = None
    world.restore_and_create()
    assert world.outcomes["rival"] is (Outcome.CREATED if left is None else Outcome.EXISTS)
    assert bucket.get(KEY) == (left or b"rival")
    assert not recover(world.rival).stuck
    assert bucket.get(KEY) == (left or b"rival")


def test_H72_recovery_copies_over_nothing(register, bucket):
    """H72: a record of the backup, unfinished then, whose name was created again since."""
    world = World(bucket, register, shown=False)
    record = new_record(bucket.runtime, KEY, b"forgotten")
    bucket.put(record.source, b"forgotten")
    register.insert(record)
    bucket.put(KEY, b"first")
    report = recover(world.rival)
    assert report.superseded == (record,)
    assert bucket.get(KEY) == b"first"
    assert register.read_one(KEY) is None
    assert recover(world.rival) == type(report)()
    assert world.rival.create(KEY, b"next").outcome is Outcome.EXISTS


def test_H72_an_opening_reports_a_superseded_record(tmp_path):
    """H72: the event names the object; the stored object stays, and the writer works."""
    db = reef.open(str(tmp_path / "bucket"), cas=f"sqlite:///{tmp_path}/register.db")
    with db.writer("users", background=False) as writer:
        writer.put("k", b"v")
    two_phase = find_two_phase(db.store)
    newest = max(
        record.destination for record in two_phase.register.all() if "/wal/" in record.destination
    )
    body = two_phase.get(newest)
    two_phase.register.delete([two_phase.register.read_one(newest)])
    forgotten = new_record(two_phase.runtime, newest, b"forgotten")
    two_phase.inner.put(forgotten.source, b"forgotten")
    two_phase.register.insert(forgotten)
    heard = []
    db.events.subscribe(heard.append)
    with db.writer("users", background=False) as writer:
        assert writer.get("k") == b"v"
    named = [event.fields["object"] for event in heard if event.name == "two_phase.superseded"]
    assert named == [newest]
    assert two_phase.get(newest) == body


def test_H72_a_damaged_copy_is_not_taken_for_another_s_object(bucket, tmp_path):
    """H72: copies that come out wrong are an alarm: neither the source nor the record goes."""

    class Garbling(Wrapper):
        def copy(self, source, target):
            self.inner.put(target, b"garbled")

    register = SqliteRegister(str(tmp_path / "register.db"), "bucket")
    record = new_record(bucket.runtime, KEY, b"bytes")
    bucket.put(record.source, b"bytes")
    register.insert(record)
    assert recover(TwoPhase(Garbling(bucket), register, AT_ONCE)).stuck == (record,)
    assert bucket.get(record.source) == b"bytes"
    assert register.read_one(KEY) == record


def test_H72_after_a_restore_forgotten_writers_find_nothing_to_copy(register, bucket):
    """H72: `recover --restored` closes what remains, also for a writer that was not stopped."""
    world = World(bucket, register, shown=False)

    def restore_as_documented():
        world.restore()
        assert len(after_restore(world.rival).sources_removed) == 1
        world.create("rival", world.rival)

    world.create("stalled", world.writer(Steps("copy", restore_as_documented)))
    assert world.outcomes == {"rival": Outcome.CREATED, "stalled": Outcome.EXISTS}
    world.check()


def test_H72_after_a_restore_records_of_the_backup_are_finished(register, bucket):
    """H72: their sources are named, and stay; a second run finds nothing."""
    world = World(bucket, register, shown=False)
    record = new_record(bucket.runtime, KEY, b"inserted")
    lost = new_record(bucket.runtime, "wal/8", b"forgotten")
    for one, body in ((record, b"inserted"), (lost, b"forgotten")):
        bucket.put(one.source, body)
    register.insert(record)
    before = register.incarnation()
    report = after_restore(world.rival)
    assert (report.finished, report.sources_removed) == ((KEY,), (lost.source,))
    assert register.incarnation() != before
    assert not after_restore(world.rival).to_dict().keys() & {"superseded", "sources_removed"}


# --- the register's identity ------------------------------------------------------------


def test_H72_an_incarnation_is_one_for_all_and_changes_on_request(register):
    """H72: equal for every process; a commit in an older one does not take effect."""
    again = type(register).__reduce__(register)
    again = again[0](*again[1])
    before = register.incarnation()
    assert again.incarnation() == before
    record = new_record(LocalStore("/tmp").runtime, KEY, b"x")
    register.insert(record)
    assert register.holding(KEY).record == record
    assert register.holding("none").record is None
    after = again.begin_incarnation()
    assert register.incarnation() == after != before
    assert not register.commit_in(record, before)
    assert register.commit_in(record, after)
    assert register.commit_in(record, after), "said again"
    assert register.read_one(KEY).committed
    assert not register.commit_in(new_record(LocalStore("/tmp").runtime, KEY, b"x"), after)


def forget_incarnation(register):
    """Turn a register into one of an older release: without an incarnation."""
    if isinstance(register, SqliteRegister):
        with register._connected() as connection:
            connection.execute("DELETE FROM reef_records WHERE scope = 'reef-register'")
        return
    with register._session() as session:
        if hasattr(session, "delete_item"):
            key = {"scope": {"S": "reef-register"}, "destination": {"S": "incarnation"}}
            session.delete_item(TableName=register.table, Key=key)
        else:
            session.exec_driver_sql("DELETE FROM reef_records WHERE scope = 'reef-register'")


def test_H72_a_register_of_an_older_release_gets_an_incarnation(register, bucket):
    """H72: its id and its records stay; writers that are open while it happens continue."""
    world = World(bucket, register, shown=False)
    name = register.name
    forget_incarnation(register)
    world.create("old", world.rival)
    upgraded = type(register).__reduce__(register)
    upgraded = upgraded[0](*upgraded[1])
    assert upgraded.name == name
    assert upgraded.read_one("wal/6") is not None
    drawn = upgraded.incarnation()
    assert drawn == register.incarnation()
    assert world.rival.create("wal/8", b"x").outcome is Outcome.CREATED
    store = ReadBack(TwoPhase(bucket, upgraded, AT_ONCE), AT_ONCE)
    assert store.create("wal/9", b"x").outcome is Outcome.CREATED
    assert store.create(KEY, b"x").outcome is Outcome.EXISTS


def test_H72_an_incarnation_that_is_missing_begins_on_request(register):
    """H72: a backup of an older release, restored while processes have the register open."""
    assert register.incarnation()
    forget_incarnation(register)
    before = register.incarnation()
    after = register.begin_incarnation()
    assert after == register.incarnation() != before
    assert register.begin_incarnation() != after


def test_H72_the_scope_of_the_register_itself_is_refused(tmp_path):
    """H72: its records are no objects of a bucket."""
    with pytest.raises(InvalidInputError, match="register's own"):
        stores.open(str(tmp_path / "b"), cas=f"sqlite:///{tmp_path}/r.db?scope=reef-register")


RESTORES = {
    "postgresql": (
        "CREATE TEMPORARY TABLE kept AS SELECT * FROM reef_records",
        "TRUNCATE reef_records",
        "INSERT INTO reef_records SELECT * FROM kept",
        "DROP TABLE kept",
    ),
    "mariadb": (
        "CREATE TABLE restored LIKE reef_records",
        "INSERT INTO restored SELECT * FROM reef_records",
        "RENAME TABLE reef_records TO replaced, restored TO reef_records",
        "DROP TABLE replaced",
    ),
}
"""Bring the same rows back in another table, or in another file of it."""


@pytest.mark.parametrize("kind", RESTORES)
def test_H72_a_restore_by_the_server_s_own_means_is_noticed(servers, tmp_path, kind):
    """H72: PostgreSQL and MariaDB show a table that was made again, without anybody's help."""
    register = open_register(register_url(servers, kind, tmp_path), "memory://x")
    record = new_record(LocalStore("/tmp").runtime, KEY, b"x")
    assert register.insert(record)
    before = register.incarnation()
    REAL.sleep(1.1)  # MariaDB shows seconds
    with register._session() as connection:
        for words in RESTORES[kind]:
            connection.exec_driver_sql(words)
    assert register.incarnation() != before
    assert register.incarnation().split("/")[0] == before.split("/")[0], "the same records"
    assert not register.commit_in(record, before)
    assert register.read_one(KEY) == record


def test_H72_a_table_that_was_restored_draws_again(servers, tmp_path):
    """H72: DynamoDB restores to another table: the first process that opens it sees that."""
    url = register_url(servers, "dynalite", tmp_path).replace("//reef?", "//restored?")
    register = open_register(url, "memory://x")
    before, name = register.incarnation(), register.name
    with register._session() as client:
        items = client.scan(TableName="restored")["Items"]
        client.delete_table(TableName="restored")
        client.get_waiter("table_not_exists").wait(TableName="restored")
    register._make(register._connect())
    with register._session() as client:
        for item in items:
            client.put_item(TableName="restored", Item=item)
    restored = open_register(url, "memory://x")
    assert restored.incarnation() != before
    assert restored.name == name


# --- SQLite's file ----------------------------------------------------------------------


def copy_database(source, target):
    """Copy a live database, as `sqlite3 .backup` and `.restore` do."""
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)


@pytest.mark.parametrize("how", ["in place", "moved"])
def test_H72_a_file_that_was_restored_is_another_incarnation(tmp_path, how):
    """H72: copied into the live file, or put in its place; an open connection follows it.

    Root: a process that had the file open wrote on to a file that no other process saw.
    """
    path, backup = str(tmp_path / "register.db"), str(tmp_path / "backup.db")
    register = SqliteRegister(path, "bucket")
    record = new_record(LocalStore(str(tmp_path)).runtime, KEY, b"x")
    before = register.incarnation()
    copy_database(path, backup)
    assert register.insert(record)
    if how == "in place":
        copy_database(backup, path)
    else:
        os.replace(backup, path)
        for rest in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(path + rest)
    assert register.read_one(KEY) is None
    assert register.incarnation() != before
    assert not register.commit_in(record, before)
    assert register.insert(record)
    assert SqliteRegister(path, "bucket").read_one(KEY) == record, "all see one file"


@pytest.mark.parametrize("when", ["at the first use", "at a later one"])
def test_H72_a_file_that_is_replaced_while_it_is_opened(tmp_path, monkeypatch, when):
    """H72: a restore between the open and the stat of a file: no statement goes to the old one.

    Root: the inode was read after the connection was open, so that a connection to a replaced
    file was taken for one to the file in its place, and its inserts were seen by no one else.
    """
    path, backup = str(tmp_path / "register.db"), str(tmp_path / "backup.db")
    SqliteRegister(path, "bucket").incarnation()
    copy_database(path, backup)
    register = SqliteRegister(path, "bucket")
    if when == "at a later one":
        register.incarnation()
        register._process_id = -1  # it opens the file again, as a forked child does
    opened = register._connect

    def replaced():
        connection = opened()
        monkeypatch.setattr(register, "_connect", opened)
        os.replace(backup, path)
        for rest in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(path + rest)
        return connection

    monkeypatch.setattr(register, "_connect", replaced)
    record = new_record(REAL, KEY, b"x")
    assert register.insert(record)
    assert SqliteRegister(path, "bucket").read_one(KEY) == record, "all see one file"


def test_H72_a_file_that_is_gone_is_not_made_again_by_its_users(tmp_path):
    """H72: a process that has the register open waits for it, and makes no empty one."""
    store = stores.open(
        str(tmp_path / "bucket"), cas=f"sqlite:///{tmp_path}/register.db", retry=AT_ONCE
    )
    store.create("wal/1", b"x")
    os.rename(tmp_path / "register.db", tmp_path / "away.db")
    with pytest.raises(UnavailableError, match="removed while it is in use"):
        store.delete("wal/1")
    assert store.create("wal/2", b"x").outcome is Outcome.UNKNOWN
    assert not (tmp_path / "register.db").exists()


def test_H72_a_register_made_again_is_refused_by_open_writers(tmp_path):
    """H72: not only when a writer opens: an empty register in the place of the lost one."""
    path, other = str(tmp_path / "register.db"), str(tmp_path / "other.db")
    store = stores.open(str(tmp_path / "bucket"), cas=f"sqlite:///{path}", retry=AT_ONCE)
    assert store.create("wal/1", b"x").landed
    assert SqliteRegister(other, store.url).name
    shutil.copy(other, str(tmp_path / "fresh.db"))
    copy_database(other, str(tmp_path / "fresh.db"))
    os.replace(tmp_path / "fresh.db", path)
    for rest in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(path + rest)
    result = store.create("wal/2", b"x")
    assert result.outcome is Outcome.UNKNOWN
    assert result.cause.kind is ErrorKind.OTHER_CAS
    assert "wal/2" not in {info.key for info in store.list()}


def test_H72_a_commit_that_meets_another_register_leaves_the_outcome_unknown(bucket, tmp_path):
    """H72: a register that does not respond leaves CREATED as it is; another register does not,
    even if it has the record: it may have given the name away before."""
    path, other = str(tmp_path / "register.db"), str(tmp_path / "other.db")

    def replace_register():
        copy_database(path, other)
        with closing(sqlite3.connect(other)) as connection, connection:
            connection.execute("UPDATE reef_register SET id = 'another'")
        os.replace(other, path)
        for rest in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(path + rest)

    steps = Steps("commit_in", replace_register)
    register = SteppedRegister(SqliteRegister(path, bucket.url), steps)
    result = TwoPhase(SteppedStore(bucket, steps), register, AT_ONCE).create(KEY, b"x")
    assert bucket.get(KEY) == b"x"
    assert result.outcome is Outcome.UNKNOWN
    assert result.cause.kind is ErrorKind.OTHER_CAS


# --- many buckets, many clocks ----------------------------------------------------------


def test_H72_two_buckets_share_one_register(servers, tmp_path):
    """H72: the same names in both; deaths, deletions and recovery of one are not the other's."""
    for kind in REGISTERS:
        base = register_url(servers, kind, tmp_path).partition("scope=")[0].rstrip("?&")
        buckets = [LocalStore(str(tmp_path / f"{kind}-{n}")) for n in (1, 2)]
        registers = [open_register(base, bucket.url) for bucket in buckets]
        one, two = (TwoPhase(b, r, AT_ONCE) for b, r in zip(buckets, registers, strict=True))
        assert one.create(KEY, b"one").landed
        assert two.create(KEY, b"two").landed
        dead = new_record(buckets[0].runtime, "wal/8", b"dead")
        buckets[0].put(dead.source, b"dead")
        registers[0].insert(dead)
        assert recover(two) == RegisterRecovery()
        assert two.create("wal/8", b"two").landed
        assert [len(list(r.all())) for r in registers] == [2, 2]
        one.delete(KEY)
        assert two.create(KEY, b"again").outcome is Outcome.EXISTS
        assert after_restore(two).sources_removed == ()
        assert recover(one).finished == ("wal/8",)
        assert one.create(KEY, b"again").landed, "an incarnation that another bucket began"
        got = [(b.get(KEY), b.get("wal/8")) for b in buckets]
        assert got == [(b"again", b"dead"), (b"two", b"two")]


class Skewed(Wrapper):
    """A process whose clock is wrong, though the store's is right."""

    def __init__(self, inner, skew_s):
        super().__init__(inner)
        runtime = type(inner.runtime)()
        runtime.wall_s = lambda: inner.runtime.wall_s() + skew_s
        self.runtime = runtime


@pytest.mark.parametrize("skew_s", [-86_400.0 * 400, 86_400.0 * 400])
def test_H72_clocks_decide_nothing(register, bucket, skew_s):
    """H72: clocks of writers a year off: one winner, recovery, restore and collection as ever."""
    wrong = TwoPhase(Skewed(bucket, skew_s), register, AT_ONCE)
    right = TwoPhase(bucket, register, AT_ONCE)
    assert wrong.create("wal/1", b"wrong").landed
    assert right.create("wal/1", b"right").outcome is Outcome.EXISTS
    assert right.create("wal/2", b"right").landed
    assert wrong.create("wal/2", b"wrong").outcome is Outcome.EXISTS
    young = new_record(bucket.runtime, "wal/1", b"lost the race")
    bucket.put(young.source, b"lost the race")
    collected = stores.two_phase.collect(
        wrong, "wal/", is_below=lambda _: False, older_than_s=3600.0, apply=True
    )
    assert collected.temporaries == (), "age is measured by the store's clock"
    assert bucket.get(young.source) == b"lost the race"
    register.begin_incarnation()
    assert wrong.create("wal/3", b"wrong").landed
    assert find_two_phase(right).create("wal/3", b"right").outcome is Outcome.EXISTS
