"""`reef index`, `compact`, `gc`, `verify`, `repair`, `rebuild`, `import` and `export`."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reef
from reef.cli.options import CountingExecutor, ProgressMeter
from reef.paths import Namespace
from reef.runtime import REAL
from tests.cli.process import call_on_terminal

USERS = Namespace("users")


@pytest.fixture
def db(data):
    """Return a database with two segments and something in the log."""
    db = reef.open(str(data))
    with db.writer("users", background=False) as writer:
        for part in range(3):
            batch = reef.Batch()
            for number in range(20):
                batch.put(f"u{part}{number:02}", b"x")
            writer.write(batch)
            if part < 2:
                reef.jobs.fold(db, "users")
    return db


def objects(db):
    """Return the keys of all objects but the store's own."""
    return {info.key for info in db.store.list("namespaces/")}


def printed(ran):
    """Return the JSON output."""
    return json.loads(ran.out)


def damage(data, lsn):
    """Damage the record of an object of the log."""
    path = data / USERS.wal_object(lsn)
    body = bytearray(path.read_bytes())
    body[-100] ^= 1
    path.write_bytes(body)


# --- index, compact, gc -------------------------------------------------------------


@pytest.mark.parametrize("name", ["index", "fold"])
def test_index(cli, db, data, name):
    """The log becomes segments; once more there is nothing to do."""
    report = printed(cli(name, data, "users", "--output", "json"))
    assert (report["rows"], report["published"]) == (20, True)
    assert db.stats("users").log.objects == 0
    assert printed(cli(name, data, "users", "--output", "json"))["published"] is False


def test_settings(cli, db, data):
    """Numbers and words; a wrong one is an error that names those there are."""
    words = ("--set", "segment_bytes_max=200", "--set", "codec=none")
    assert printed(cli("index", data, "users", *words, "--output", "json"))["segments"] > 1
    ran = cli("index", data, "users", "--set", "nonsense=1")
    assert ran.code == 1
    assert "segment_bytes_max" in ran.err
    for wrong in ("codec", "=1"):
        assert cli("index", data, "users", "--set", wrong).code == 64
    assert cli("index", data, "users", "--set", "codec=none", "--set", "codec=lz4").code == 64


def test_compact(cli, db, data):
    """Segments are merged; the rows are the same."""
    before = dict(db.reader("users").scan())
    report = printed(cli("compact", data, "users", "--full", "--output", "json"))
    assert (report["inputs"], report["outputs"], report["published"]) == (2, 1, True)
    assert dict(db.reader("users").scan()) == before
    assert "idle" in cli("compact", data, "users", "--strategy", "leveled").out
    assert cli("compact", data, "users", "--strategy", "none").code == 64


@pytest.mark.parametrize("name", ["gc", "sweep"])
def test_gc_is_a_dry_run(cli, db, data, name):
    """Nothing is changed without --apply, and that is said."""
    cli("compact", data, "users", "--full")
    db.store.runtime.sleep(1.1)  # dates are certain to within a second
    before = objects(db)
    words = ("--set", "retain_generations_s=0")
    ran = cli(name, data, "users", *words)
    assert ran.code == 0
    assert "dry run" in ran.err
    assert objects(db) == before
    would = printed(cli(name, data, "users", *words, "--output", "json"))
    assert would["applied"] is False
    assert sum(one["objects"] for one in would["condemned"]) > 2
    assert db.stats("users").condemned == 0
    done = printed(cli(name, data, "users", *words, "--apply", "--output", "json"))
    assert done["applied"] is True
    assert db.stats("users").condemned >= sum(one["objects"] for one in would["condemned"])


# --- verify, repair, rebuild --------------------------------------------------------


def test_verify(cli, db, data):
    """All is well: exit code 0, and the checked objects."""
    report = printed(cli("verify", data, "users", "--deep", "--output", "json"))
    assert (report["problems"], report["segments"], report["deep"]) == ([], 2, True)
    assert cli("verify", data, "users").code == 0


def test_verify_names_every_problem(cli, db, data):
    """Exit code 2, in both forms."""
    damage(data, 4)
    (data / USERS.segments).joinpath(
        sorted(path.name for path in (data / USERS.segments).iterdir())[0]
    ).unlink()
    ran = cli("verify", data, "users", "--output", "json")
    assert ran.code == 2
    kinds = {problem["kind"] for problem in printed(ran)["problems"]}
    assert kinds == {"wal_damaged", "segment_missing"}
    ran = cli("verify", data, "users")
    assert ran.code == 2
    assert USERS.wal_object(4) in ran.out
    assert "segment_missing" in ran.out


def test_repair(cli, db, data):
    """A dry run finds it and changes nothing; --apply repairs it, and nothing is left to do."""
    damage(data, 4)
    before = objects(db)
    ran = cli("repair", data, "users")
    assert ran.code == 2
    assert "dry run" in ran.err
    assert objects(db) == before
    ran = cli("repair", data, "users", "--apply", "--output", "json")
    assert ran.code == 0
    assert [lost["lsn"] for lost in printed(ran)["lost"]["lsns"]] == [4]
    assert cli("verify", data, "users").code == 0
    assert cli("repair", data, "users").code == 0
    assert len(dict(db.reader("users").scan())) == 40


def test_a_repair_for_people(cli, db, data):
    """Losses are in a table of their own."""
    damage(data, 4)
    out = cli("repair", data, "users").out
    assert "lost lsns" in out
    assert USERS.wal_object(4) in out


def test_rebuild(cli, db, data):
    """Compares; publishes only where there is none, and then the rows are those from before."""
    before = dict(db.reader("users").scan())
    ran = cli("rebuild", data, "users", "--output", "json")
    assert (ran.code, printed(ran)["rows_equal"], printed(ran)["applied"]) == (0, True, False)
    for path in (data / USERS.manifests).iterdir():
        path.unlink()
    assert cli("scan", data, "users").code == 1
    assert cli("rebuild", data, "users").code == 0
    assert cli("scan", data, "users").code == 1
    assert cli("rebuild", data, "users", "--apply").code == 0
    assert dict(reef.open(str(data)).reader("users").scan()) == before


@pytest.mark.parametrize(
    "words", [("index",), ("compact",), ("verify",), ("rebuild",), ("export", "there")]
)
def test_engines(cli, db, data, tmp_path, words):
    """--master is for Spark alone; tests/spark runs these commands there."""
    command, *rest = words
    rest = [tmp_path / word for word in rest]
    before = objects(db)
    assert cli(command, data, "users", *rest, "--master", "local[2]").code == 64
    assert objects(db) == before


def test_a_spark_that_does_not_start(cli, data, monkeypatch):
    """A wrong master, or no Java: an error like any other, not Spark's traceback."""
    pytest.importorskip("pyspark")

    def fails(builder, master):
        raise RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited\nat Some.java")

    monkeypatch.setattr("reef.spark.session._start_session", fails)
    found = cli("index", data, "users", "--engine", "spark", "--master", "bogus://x")
    assert found.code == 1
    assert "Spark did not start on bogus://x: [JAVA_GATEWAY_EXITED]" in found.err
    assert "Some.java" not in found.err


@pytest.mark.parametrize(
    "command", ["index", "compact", "gc", "verify", "repair", "stats", "inspect"]
)
def test_a_namespace_that_is_not_there(cli, data, command):
    """Is an error, and is not made."""
    ran = cli(command, data, "unknown", "--output", "json")
    assert (ran.code, json.loads(ran.err)["kind"]) == (1, "not_found")
    assert reef.open(str(data)).namespaces() == []


# --- export and import --------------------------------------------------------------


@pytest.fixture
def people(data, tmp_path):
    """Return a file of people."""
    path = tmp_path / "people.parquet"
    ids = [f"p{number:04}" for number in range(1000)]
    pq.write_table(pa.table({"id": ids, "age": list(range(1000))}), path)
    return path


def test_there_and_back(cli, data, tmp_path, people):
    """Exported rows can be imported again, unchanged."""
    ran = cli("import", "--create", data, "people", people, "--create", "--output", "json")
    assert (ran.code, printed(ran)["rows"]) == (0, 1000), ran.err
    ran = cli(
        "export", data, "people", tmp_path / "out", "--rows-per-file", 300, "--output", "json"
    )
    assert (ran.code, printed(ran)["rows"]) == (0, 1000), ran.err
    assert len(printed(ran)["files"]) >= 4
    assert cli("import", "--create", data, "copies", tmp_path / "out", "--create").code == 0
    db = reef.open(str(data))
    assert dict(db.reader("copies").scan()) == dict(db.reader("people").scan())


def test_a_part_is_exported(cli, db, data, tmp_path):
    """A range, columns, a point in time, another format."""
    words = ("--prefix", "u0", "--columns", "id", "--format", "arrow", "--lsn", 3)
    ran = cli("export", data, "users", tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    (path,) = (tmp_path / "out").glob("*.arrow")
    table = pa.ipc.open_file(path).read_all()
    assert table.column_names == ["id"]
    assert len(table) == 20


def test_an_export_does_not_mix(cli, db, data, tmp_path):
    """A target that holds files is refused, and left as it is."""
    target = tmp_path / "out"
    assert cli("export", data, "users", target).code == 0
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert cli("export", data, "users", target).code == 1
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [reef.UnavailableError("the disk is full"), KeyboardInterrupt()])
def test_an_unfinished_export_is_removed(cli, db, data, tmp_path, monkeypatch, error):
    """Whether it fails or is interrupted: else it would be in the way of the next one."""
    from reef.jobs import export as job
    from reef.jobs.transfer.export import Exported, run_export_task

    done = []

    def failing(task):
        result = run_export_task(task)
        done.append(task)
        if len(done) < 2:
            return result
        if isinstance(error, KeyboardInterrupt):
            raise error
        return Exported(result.files, error)

    monkeypatch.setitem(job.__globals__, "run_export_task", failing)
    monkeypatch.setattr("reef.cli.read.TASKS_AT_ONCE", 1)
    target = tmp_path / "out"
    ran = cli("export", data, "users", target, "--rows-per-file", 10)
    assert ran.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert len(done) == 2
    assert list(target.glob("*.parquet")) == []


def test_import_does_not_take_the_role_by_accident(cli, data, people):
    """As put and delete do not."""
    db = reef.open(str(data))
    db.create("people", pa.schema([("id", pa.string()), ("age", pa.int64())]))
    with db.writer("people", background=False) as writer:
        writer.put("p", {"age": 1})
        ran = cli("import", "--create", data, "people", people)
        assert ran.code == 1
        assert "--take-over" in ran.err
        assert len(list(db.reader("people").scan())) == 1
    assert cli("import", "--create", data, "people", people, "--take-over").code == 0
    assert len(list(db.reader("people").scan())) == 1001


def test_import_of_missing_files(cli, data, tmp_path):
    """No file, no namespace, no key: each is an error."""
    assert (
        cli("import", "--create", data, "people", tmp_path / "none.parquet", "--create").code == 1
    )
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    assert cli("import", "--create", data, "people", tmp_path / "bad.parquet", "--create").code in (
        1,
        2,
    )


def test_import_shows_its_progress(data, people):
    """Rows, and how many a second."""
    code, seen = call_on_terminal("import", "--create", data, "people", people, "--create")
    assert code == 0, seen
    assert "importing into people" in seen
    assert "rows/s" in seen


# --- counting -----------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
def test_tasks_are_counted(at_once):
    """The results in order, whatever the number at a time."""
    meter = ProgressMeter()
    executor = CountingExecutor(REAL, REAL, meter, at_once)
    assert executor.map(lambda n: n * n, list(range(10))) == [n * n for n in range(10)]
    assert (meter.done, meter.total) == (10, 10)
    assert executor.map(lambda n: n, []) == []


def test_stopping():
    """What runs is waited for, and nothing more begins."""
    begun, ended = [], []
    executor = CountingExecutor(REAL, REAL, ProgressMeter())

    def task(number):
        begun.append(number)
        if number == 0:
            raise KeyboardInterrupt
        REAL.sleep(0.2)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        executor.map(task, [0, 1])
    executor.stop()
    assert sorted(begun)[1:] == ended
    with pytest.raises(reef.ClosedError):
        executor.map(task, [2])
    assert 2 not in begun


def test_no_more_tasks_than_allowed_at_once():
    """Each of them holds memory."""
    import threading

    running, most, guard = 0, 0, threading.Lock()
    two = threading.Barrier(2)  # each waits for another, so that two do run at once

    def task(_):
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        two.wait(60)
        REAL.sleep(0.01)
        with guard:
            running -= 1

    CountingExecutor(REAL, REAL, ProgressMeter(), 2).map(task, list(range(10)))
    assert most == 2
