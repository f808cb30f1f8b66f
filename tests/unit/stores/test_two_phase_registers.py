"""Registers of two-phase stores: their URLs, without secrets, and their statements."""

import builtins
import gc
import json
import logging
import os
import pickle
import sys
import time
import traceback
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from reef import stores
from reef.errors import CorruptionError, ErrorKind, InvalidInputError, UnavailableError
from reef.stores import RetryPolicy
from reef.stores.local import LocalStore
from reef.stores.opening import open_register
from reef.stores.two_phase import Record, find_two_phase
from reef.stores.two_phase.register import SqliteRegister
from tests.support.http_proxy import Forwarding, proxy
from tests.support.registers import REGISTERS, register_url

AT_ONCE = RetryPolicy(attempts_max=2, first_delay_s=0.0)


def record_of(name, number=1, *, committed=False):
    """Return a record whose source has a number."""
    return Record(name, f"{name}.source-{number}", "c" * 32, committed)


# --- URLs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cas", "message"),
    [
        ("redis://host", "unknown scheme 'redis'"),
        ("register.db", "not the URL of a register"),
        ("", "not the URL of a register"),
        ("sqlite://", "names no file"),
        ("sqlite://host/x.db", "names no file"),
        ("sqlite:///x.db?mode=ro", "no option 'mode'"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://ada:geheim[@host/x", "not the URL of a register"),
        ("dynamodb://", "names no table"),
        ("dynamodb://reef?zone=1", "no option 'zone'"),
        ("postgresql://user:geheim@host:port/x", "not a URL that SQLAlchemy understands"),
    ],
)
def test_a_bad_register_raises_at_once(tmp_path, cas, message):
    """The message names the mistake in the option, and shows no secret."""
    with pytest.raises(InvalidInputError, match=message) as caught:
        stores.open(str(tmp_path), cas=cas)
    assert caught.value.kind is ErrorKind.INVALID_OPTION
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("cas", "package", "extra"),
    [
        ("postgresql://host/db", "sqlalchemy", "reef[sql]"),
        ("mysql://host/db", "pymysql", "reef[sql]"),
        ("dynamodb://reef", "boto3", "reef[s3]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, cas, package, extra):
    """A missing driver raises an error that says how to install it."""
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return original(name, *args, **kwargs)

    for module in ("sql", "dynamodb"):
        monkeypatch.delitem(sys.modules, f"reef.stores.two_phase.{module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInputError) as caught:
        stores.open(str(tmp_path), cas=cas)
    assert package in caught.value.message.lower()
    assert extra in caught.value.hint


def test_a_register_may_be_given_in_the_url_of_any_store(tmp_path, monkeypatch):
    """Behind a path, behind a scheme with options of its own, or as an option; not twice."""
    monkeypatch.chdir(tmp_path)
    for url in ("./data?cas=sqlite:///r.db", f"file://{tmp_path}/data?cas=sqlite:///r.db"):
        assert find_two_phase(stores.open(url)).register.inner.path == str(tmp_path / "r.db")
    paged = find_two_phase(stores.open("memory://?page=2&cas=sqlite:///r.db"))
    assert paged.capabilities.list_page == 2
    assert find_two_phase(stores.open("./data")) is None
    with pytest.raises(InvalidInputError, match="given twice"):
        stores.open("./data?cas=sqlite:///r.db", cas="sqlite:///r.db")


def test_a_register_in_a_url_keeps_its_plus_signs(tmp_path):
    """A driver's name and a password have some; only the bucket's own options are form data."""
    cas = "postgresql+psycopg://ada:a+b%25c@host/reef?host=one:1&host=two:2&scope=x"
    register = find_two_phase(stores.open(str(tmp_path), cas=cas)).register.inner
    in_url = f"{tmp_path}?cas={cas.replace('%', '%25').replace('&', '%26')}"
    assert find_two_phase(stores.open(in_url)).register.inner._url == register._url
    assert make_url(register._url).password == "a+b%c"
    assert make_url(register._url).query == {"host": ("one:1", "two:2")}
    assert register.scope == "x"


def test_an_invalid_url_raises(tmp_path):
    """Brackets that hold no address, and an option that is given twice."""
    with pytest.raises(InvalidInputError, match="is not a URL"):
        stores.open("s3://[bucket/prefix")
    with pytest.raises(InvalidInputError, match="'region' is given twice"):
        stores.open("s3://bucket/prefix?region=a&region=b")


def test_a_register_inside_of_the_store_is_refused(tmp_path):
    """It would be listed as an object, and swept as one."""
    with pytest.raises(InvalidInputError, match="is inside the store"):
        stores.open(str(tmp_path), cas=f"sqlite:///{tmp_path}/register.db")


def test_a_file_that_cannot_be_created_raises(tmp_path):
    """With its path and the missing directory."""
    store = stores.open(str(tmp_path / "b"), cas=f"sqlite:///{tmp_path}/none/register.db")
    with pytest.raises(InvalidInputError, match="there is no directory"):
        store.create("a", b"1")


UNUSABLE = ["text", "directory", "damaged"]
if os.geteuid() != 0:  # who may write to everything
    UNUSABLE.append("read only")


@pytest.mark.parametrize("found", UNUSABLE)
def test_a_file_that_is_no_register_raises_at_once(tmp_path, found):
    """It is not retried: the file will not become one."""
    path = tmp_path / "register.db"
    if found == "text":
        path.write_text("This is not a database. " * 100)
    elif found == "directory":
        path.mkdir()
    else:
        assert SqliteRegister(str(path), "bucket").insert(record_of("wal/1"))
        gc.collect()  # and is closed
    if found == "read only":
        path.write_bytes(path.read_bytes())
        path.chmod(0o444)
    if found == "damaged":
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(data)
    policy = RetryPolicy(attempts_max=5, first_delay_s=30.0, deadline_s=600.0)
    store = stores.open(str(tmp_path / "b"), cas=f"sqlite:///{path}", retry=policy)
    began_s = time.monotonic()
    kind = CorruptionError if found == "damaged" else InvalidInputError
    with pytest.raises(kind, match=r"register\.db cannot be used"):
        store.create("wal/1", b"mine")
    assert time.monotonic() - began_s < 20
    assert list(LocalStore(str(tmp_path / "b")).list()) == [], "the source was taken back"


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_no_secret_is_ever_shown(tmp_path, caplog, scheme):
    """Not in a repr, not in an error or its causes, not in the log."""
    caplog.set_level(logging.DEBUG)
    cas = f"{scheme}://ada:geheim@127.0.0.1:1/reef?connect_timeout=2"
    store = stores.open(str(tmp_path), cas=cas, retry=AT_ONCE)
    with pytest.raises(UnavailableError) as caught:
        _ = store.cas
    report = "".join(traceback.format_exception(caught.value))
    inner = find_two_phase(store)
    shown = [repr(store), repr(inner), repr(inner.register), repr(inner.register.inner), store.url]
    assert "geheim" not in " ".join([*shown, report, caplog.text])
    assert "127.0.0.1" in report
    again = pickle.loads(pickle.dumps(store))
    assert find_two_phase(again).register.inner._url == cas, "it travels all the same"


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_password_in_a_server_s_words_is_hidden(scheme):
    """A driver may quote the connection string; its words are shown, without the password."""
    register = open_register(f"{scheme}://ada:geheim@127.0.0.1:1/reef", "memory://x")
    original = RuntimeError("cannot connect with 'ada:geheim@127.0.0.1': no route")
    shown = register._translate_error(sa.exc.OperationalError("SELECT 1", {}, original))
    assert isinstance(shown, UnavailableError)
    assert "no route" in shown.message
    assert "geheim" not in shown.message


@pytest.mark.parametrize("wrong", ["password", "database"])
def test_a_refusal_is_raised_at_once(servers, tmp_path, wrong):
    """A wrong password or database will be wrong tomorrow: no waiting, and no secret shown."""
    name, part = {"password": ("mariadb", ":reef@"), "database": ("postgresql", "/postgres")}[wrong]
    cas = servers.use(name).url.replace(part, {":reef@": ":geheim@"}.get(part, "/none"))
    with pytest.raises(InvalidInputError, match="refuses") as caught:
        _ = stores.open(str(tmp_path), cas=cas).cas
    assert caught.value.kind is ErrorKind.REFUSED_BY_STORE
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


def test_a_table_without_a_region_raises_at_once(tmp_path, monkeypatch):
    """What boto cannot guess is named."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="region"):
        _ = stores.open(str(tmp_path), cas="dynamodb://reef").cas


# --- registers --------------------------------------------------------------------------


@pytest.fixture(params=REGISTERS)
def register(request, servers, tmp_path):
    """A register of each kind, with nothing in its scope."""
    return open_register(register_url(servers, request.param, tmp_path), "memory://x")


def test_one_record_for_each_destination(register):
    """The first insert wins; names differ by every byte."""
    names = ["wal/a", "wal/A", "wal/a ", "wal/ä", "wal/a\u0301"]
    assert [register.insert(record_of(name)) for name in names] == [True] * 5
    assert not register.insert(record_of("wal/a", 2))
    assert not register.insert(record_of("wal/a")), "our own is in the way, too"
    assert register.read_one("wal/a") == record_of("wal/a")
    assert register.read_one("wal/b") is None
    found = register.read([*names, "missing"])
    assert sorted(r.destination for r in found) == sorted(names)
    assert register.read([]) == []


def test_only_the_same_record_is_committed_or_deleted(register):
    """A caller with an old record changes nothing."""
    register.insert(record_of("wal/1"))
    register.commit(record_of("wal/1", 2))
    register.commit(record_of("missing"))
    assert register.read_one("wal/1") == record_of("wal/1")
    register.commit(record_of("wal/1"))
    register.commit(record_of("wal/1"))
    assert register.read_one("wal/1") == record_of("wal/1", committed=True)
    register.delete([record_of("wal/1", 2), record_of("missing")])
    assert register.read_one("wal/1") is not None
    register.delete([record_of("wal/1")])
    assert register.read_one("wal/1") is None
    assert register.insert(record_of("wal/1", 3)), "the name is free"


def test_records_come_in_order_and_by_prefix(register, monkeypatch):
    """By the bytes of their names, page by page, all or only those that are not committed."""
    for module in ("register", "sql", "dynamodb"):
        monkeypatch.setattr(f"reef.stores.two_phase.{module}.PAGE", 2)
    names = ["a/1", "b/10", "b/2", "b/é", "b/Z", "bb", "c"]
    for name in names:
        register.insert(record_of(name))
    register.commit(record_of("b/2"))
    assert [r.destination for r in register.all()] == sorted(names)
    assert [r.destination for r in register.all("b/")] == ["b/10", "b/2", "b/Z", "b/é"]
    unfinished = [r.destination for r in register.all("b/", unfinished=True)]
    assert unfinished == ["b/10", "b/Z", "b/é"]
    assert list(register.all("d")) == []


def test_a_register_keeps_buckets_apart_and_its_name(servers, tmp_path):
    """Two buckets may use the same names; a register has one name for each, wherever opened."""
    for kind in REGISTERS:
        url = register_url(servers, kind, tmp_path).partition("scope=")[0].rstrip("?&")
        one, other = (open_register(url, f"{tmp_path}-{n}") for n in (1, 2))
        assert one.insert(record_of("wal/1"))
        assert other.insert(record_of("wal/1", 2))
        assert one.read_one("wal/1") == record_of("wal/1")
        assert one.name != other.name
        assert pickle.loads(pickle.dumps(one)).name == one.name
    files = [SqliteRegister(str(tmp_path / name), "bucket") for name in ("register.db", "other.db")]
    assert files[0].name != files[1].name


class Overloaded(Forwarding):
    """A DynamoDB that gives only the first `room` of the records asked for, and none if 0."""

    def respond(self, method, path, body):
        if not self.headers.get("X-Amz-Target", "").endswith("BatchGetItem"):
            self.send(*self.forward(method, path, body))
            return
        self.server.requests.append(body)
        (asked,) = json.loads(body)["RequestItems"].items()
        table, wanted = asked
        room, keys = self.server.room, wanted["Keys"]
        response = {"Responses": {}}
        if room:
            some = json.dumps({"RequestItems": {table: {**wanted, "Keys": keys[:room]}}}).encode()
            self.headers.replace_header("Content-Length", str(len(some)))
            response = json.loads(self.forward(method, path, some)[2])
        left = {table: {**wanted, "Keys": keys[room:]}} if keys[room:] else {}
        body = json.dumps({**response, "UnprocessedKeys": left}).encode()
        self.send(200, [("Content-Type", "application/x-amz-json-1.0")], body)


def test_a_table_without_room_for_reads_is_throttled(servers, tmp_path):
    """Unprocessed keys are requested again while there is progress; else it backs off."""
    url = register_url(servers, "dynalite", tmp_path)
    open_register(url, "memory://x").insert(record_of("wal/2"))
    with proxy(Overloaded, servers.use("dynalite").address) as wire:
        old, new = (quote(e, safe="") for e in (servers.use("dynalite").endpoint, wire.endpoint))
        register = open_register(url.replace(old, new), "memory://x")
        wire.room = 1
        assert register.read(["wal/1", "wal/2", "wal/3"]) == [record_of("wal/2")]
        assert len(wire.requests) == 3
        wire.room = 0
        with pytest.raises(UnavailableError) as caught:
            register.read(["wal/1"])
        assert caught.value.kind is ErrorKind.THROTTLED
        assert len(wire.requests) == 4


class Recording(Forwarding):
    """A DynamoDB whose requests are kept: operation and body."""

    def respond(self, method, path, body):
        operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        self.server.requests.append((operation, json.loads(body)))
        self.send(*self.forward(method, path, body))


def test_every_read_of_a_table_is_consistent(servers, tmp_path):
    """An eventually consistent read may miss a record that has just won, or an incarnation."""
    url = register_url(servers, "dynalite", tmp_path)
    with proxy(Recording, servers.use("dynalite").address) as wire:
        old, new = (quote(e, safe="") for e in (servers.use("dynalite").endpoint, wire.endpoint))
        register = open_register(url.replace(old, new), "memory://x")
        assert register.current_name() == register.name
        register.insert(record_of("wal/1"))
        register.holding("wal/1")
        register.read(["wal/1"])
        list(register.all())
        list(register.all(unfinished=True))
        register._connect().close()
    reads = []
    for operation, body in wire.requests:
        if operation in ("GetItem", "Query"):
            reads.append((operation, body.get("ConsistentRead")))
        if operation == "BatchGetItem":
            reads += [(operation, t.get("ConsistentRead")) for t in body["RequestItems"].values()]
    assert {operation for operation, _ in reads} == {"GetItem", "Query", "BatchGetItem"}
    assert {is_consistent for _, is_consistent in reads} == {True}


def set_id(register, words):
    """Make a register another one, as if it had been lost and made again."""
    if isinstance(register, SqliteRegister):
        with register._connected() as connection:
            connection.execute("UPDATE reef_register SET id = ?", (words,))
        return
    with register._session() as session:
        if hasattr(session, "put_item"):
            key = {"scope": {"S": "reef-register"}, "destination": {"S": "id"}}
            session.put_item(TableName=register.table, Item={**key, "id": {"S": words}})
        else:
            session.exec_driver_sql(f"UPDATE reef_register SET id = '{words}'")


@pytest.mark.parametrize("kind", REGISTERS)
def test_a_register_that_was_made_again_has_another_name_at_once(servers, tmp_path, kind):
    """`name` is remembered, for every create asks for it; `current_name` is read each time."""
    url = register_url(servers, kind, tmp_path)
    register = open_register(url, "memory://x")
    name, scope = register.name, register.scope
    set_id(register, "another")
    try:
        assert register.name == name
        assert register.current_name() == f"{name.partition('-')[0]}-another for {scope}"
        assert open_register(url, "memory://x").name == register.current_name()
    finally:  # other tests share the server
        set_id(register, name.partition("-")[2].partition(" for ")[0])
    assert register.current_name() == name


def test_the_incarnation_of_postgresql_has_the_start_of_the_server(servers, tmp_path):
    """H72: every physical restore and every failover starts a server."""
    register = open_register(register_url(servers, "postgresql", tmp_path), "memory://x")
    asked = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
    with register._session() as connection:
        started = connection.exec_driver_sql(asked).scalar_one()
    assert started in register.incarnation().split("/")


class ShortPages(Forwarding):
    """A DynamoDB that reads two records for each page, whether or not the filter keeps them."""

    def respond(self, method, path, body):
        if self.headers.get("X-Amz-Target", "").endswith(".Query"):
            body = json.dumps({**json.loads(body), "Limit": 2}).encode()
            self.headers.replace_header("Content-Length", str(len(body)))
        self.send(*self.forward(method, path, body))


def test_a_page_without_an_unfinished_record_is_not_the_last(servers, tmp_path):
    """DynamoDB filters a page after reading it: an empty page is not the end of the table."""
    url = register_url(servers, "dynalite", tmp_path)
    with proxy(ShortPages, servers.use("dynalite").address) as wire:
        old, new = (quote(e, safe="") for e in (servers.use("dynalite").endpoint, wire.endpoint))
        register = open_register(url.replace(old, new), "memory://x")
        records = [record_of(f"wal/{number}") for number in range(8)]
        for record in records:
            register.insert(record)
        for record in [*records[:5], records[6]]:
            register.commit(record)
        assert list(register.all(unfinished=True)) == [records[5], records[7]]
        register._connect().close()


class Interrupted(Forwarding):
    """A DynamoDB that responds 500 to some of the requests of one kind."""

    def respond(self, method, path, body):
        if self.headers.get("X-Amz-Target", "").endswith(self.server.kind) and self.server.left:
            self.server.left -= 1
            self.send(500, [], b"{}")
            return
        self.send(*self.forward(method, path, body))


@pytest.mark.parametrize("kind", ["PutItem", "UpdateItem"])
def test_a_table_that_was_half_made_is_completed(servers, kind):
    """A table without an id, or without an incarnation: the next statement creates it.

    Root: the register counted as made before its id was drawn. If that failed, every later
    statement of the process raised a KeyError, or found no incarnation.
    """
    server = servers.use("dynalite")
    words = f"region={server.region}&access_key_id=a&secret_access_key=b&scope=x"
    with proxy(Interrupted, server.address) as wire:
        wire.kind, wire.left = kind, 3  # as often as the client tries
        cas = f"dynamodb://half-made-{kind}?{words}&endpoint={quote(wire.endpoint, safe='')}"
        register = open_register(cas, "memory://x")
        with pytest.raises(UnavailableError):
            _ = register.name
        assert register.name.startswith("dynamodb-01")
        assert register.incarnation()
        assert register.insert(record_of("wal/1"))
        register._connect().close()


def test_a_statement_is_all_that_is_sent_to_mariadb(servers, tmp_path):
    """Every statement is a transaction of its own: none is rolled back behind it."""
    register = open_register(register_url(servers, "mariadb", tmp_path), "memory://x")
    assert register.name
    asked = sa.text("SHOW GLOBAL STATUS LIKE 'Com_rollback'")
    engine = sa.create_engine(servers.use("mariadb").url)
    with engine.connect() as connection:
        before = int(connection.execute(asked).one()[1])
        for number in range(5):
            register.insert(record_of(f"wal/{number}"))
        assert int(connection.execute(asked).one()[1]) == before
    engine.dispose()


def test_one_database_has_one_name_by_whatever_scheme(servers, tmp_path):
    """mysql:// and mariadb:// reach the same records: who comes with the other is no stranger."""
    url = register_url(servers, "mariadb", tmp_path).partition("://")[2]
    names = {open_register(f"{kind}://{url}", "memory://x").name for kind in ("mysql", "mariadb")}
    assert len(names) == 1


def test_no_statement_is_prepared_on_postgresql(servers, tmp_path):
    """A pooler may send the next one to another session, which would not know it."""
    register = open_register(register_url(servers, "postgresql", tmp_path), "memory://x")
    for _ in range(12):  # the driver prepares a statement at its fifth use
        register.read(["wal/1"])
    with register._session() as connection:
        assert (
            connection.execute(sa.text("SELECT count(*) FROM pg_prepared_statements")).scalar() == 0
        )


def test_a_sqlite_register_syncs_every_statement(tmp_path):
    """Root: synchronous=NORMAL, which in write-ahead mode loses statements in a power failure.

    On the connection that is used, and again on the one that a forked or restored file opens.
    """
    register = SqliteRegister(str(tmp_path / "register.db"), "bucket")
    for _ in range(2):
        assert register.insert(record_of(f"wal/{_}"))
        with register._connected() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        register._process_id = -1
