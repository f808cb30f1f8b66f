"""Export and import round-trip: every type, every edge, during concurrent work."""

import datetime
import json
import pickle
import subprocess
import sys
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reef
from reef import stores
from reef.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.jobs import export, fold, import_, sweep
from reef.stores import Wrapper
from reef.testing import Fault, Faults, Rule
from tests.support.rows import EDGES, edges, table_of

TYPES = [
    *EDGES,
    *(getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(pa.timestamp(unit, zone) for unit in ("ms", "us", "ns") for zone in (None, "UTC")),
    pa.timestamp("us", "Europe/Berlin"),
]
FORMATS = ["parquet", "arrow", "jsonl"]


@pytest.fixture
def db():
    """An empty bucket."""
    return reef.Database(stores.open("memory://"))


def filled(db, count=100, name="events"):
    """Make a namespace of numbered rows, half of them folded."""
    db.create(name, pa.schema([("id", pa.string()), ("x", pa.int64()), ("t", pa.string())]))
    with db.writer(name, background=False) as writer:
        rows = [{"id": f"k{n:05}", "x": n, "t": None if n % 7 else f"t{n}"} for n in range(count)]
        writer.upsert(rows[::2])
        fold(db, name, group_bytes=200)
        writer.upsert(rows[1::2])
    return rows


class OneByOne:
    """An executor without threads."""

    def map(self, run, tasks):
        return [run(task) for task in tasks]


def rows_of(db, name="events"):
    """Return all rows as Arrow."""
    with db.reader(name) as reader:
        return reader.scan_arrow().read_all()


def names(place):
    """Return the files of a directory, in order."""
    return sorted(path.name for path in place.iterdir() if not path.name.startswith("."))


# --- there and back -------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_every_type_comes_back(db, tmp_path, kind, data_type):
    """With nulls, NaN and the ends of its range, and as the same type."""
    table = table_of(edges(data_type))
    if kind == "jsonl" and _is_timestamp(data_type):  # text has years of four digits
        table = table_of(_years(table["c"].type))
    db.create("there", table.schema)
    with db.writer("there", background=False) as writer:
        writer.upsert(table)
    export(db, "there", tmp_path / "out", format=kind)
    report = import_(db, "back", tmp_path / "out")
    assert (report.rows, report.created) == (len(table), True)
    there, back = rows_of(db, "there"), rows_of(db, "back")
    assert back.schema.equals(there.schema, check_metadata=True)
    assert repr(back.to_pydict() if not _is_timestamp(data_type) else _counts(back)) == repr(
        there.to_pydict() if not _is_timestamp(data_type) else _counts(there)
    )


def _is_timestamp(data_type):
    return pa.types.is_timestamp(data_type)


def _years(data_type):
    first, last = (1678, 2262) if data_type.unit == "ns" else (1, 9999)
    every = [datetime.datetime(year, 1, 1, 2, 3, 4, 567_000) for year in (first, 1885, last)]
    return pa.array([None, *every], pa.timestamp(data_type.unit)).cast(data_type)


def _counts(table):
    return table["c"].combine_chunks().view(pa.int64()).to_pylist()


def test_timestamps_that_parquet_cannot_hold_raise(db, tmp_path):
    """Seconds become milliseconds in Parquet: some do not fit, and arrow takes them."""
    table = table_of(edges(pa.timestamp("s")))
    db.create("there", table.schema)
    with db.writer("there", background=False) as writer:
        writer.upsert(table)
    with pytest.raises(InvalidInputError, match=r"parquet cannot hold.*timestamp"):
        export(db, "there", tmp_path / "out")
    assert names(tmp_path / "out") == []
    export(db, "there", tmp_path / "out", format="arrow")
    import_(db, "back", tmp_path / "out")
    assert _counts(rows_of(db, "back")) == _counts(rows_of(db, "there"))


def test_times_that_json_lines_cannot_hold_raise(db, tmp_path):
    """Text has years of four digits."""
    table = table_of(edges(pa.timestamp("us")))
    db.create("there", table.schema)
    with db.writer("there", background=False) as writer:
        writer.upsert(table)
    with pytest.raises(InvalidInputError, match=r"jsonl cannot hold.*column c.*years 1 to 9999"):
        export(db, "there", tmp_path / "out", format="jsonl")
    assert names(tmp_path / "out") == []


def test_seconds_that_parquet_can_hold_come_back_as_seconds(db, tmp_path):
    """The type is that of the namespace, not that of the file."""
    table = pa.table({"id": ["a"], "c": pa.array([7], pa.timestamp("s"))})
    db.create("there", table.schema)
    with db.writer("there", background=False) as writer:
        writer.upsert(table)
    export(db, "there", tmp_path / "out")
    import_(db, "back", tmp_path / "out")
    assert rows_of(db, "back").equals(rows_of(db, "there"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plain_namespace_comes_back_plain(db, tmp_path, kind):
    """Keys and values are bytes, of any kind."""
    with db.writer("there", background=False) as writer:
        for key, value in {b"\x00": b"", b"\xff\xfe": b"\xff" * 9, b"k": b"v"}.items():
            writer.put(key, value)
    export(db, "there", tmp_path / "out", format=kind)
    import_(db, "back", tmp_path / "out")
    with db.reader("there") as there, db.reader("back") as back:
        assert dict(back.scan()) == dict(there.scan())
    assert db.info("back").schema == db.info("there").schema


@pytest.mark.parametrize("kind", FORMATS)
def test_expiry_comes_back(db, tmp_path, kind):
    """Rows keep their expiry time; expired rows are not exported."""
    db.create("there", pa.schema([("id", pa.string())]))
    later = datetime.datetime(2900, 1, 1, 0, 0, 0, 123000, tzinfo=datetime.UTC)
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    with db.writer("there", background=False) as writer:
        writer.upsert([{"id": "a", "_expires_at": later}, {"id": "b"}])
        writer.upsert([{"id": "c", "_expires_at": past}])
    export(db, "there", tmp_path / "out", format=kind)
    import_(db, "back", tmp_path / "out")
    export(db, "back", tmp_path / "again", format="parquet")
    again = pq.read_table(tmp_path / "again" / "part-00000-00000.parquet")
    assert again.to_pylist() == [
        {"id": "a", "_expires_at": later},
        {"id": "b", "_expires_at": None},
    ]


def test_an_empty_namespace_comes_back(db, tmp_path):
    """There is no file, and yet the columns are known."""
    db.create("there", pa.schema([("id", pa.string()), ("x", pa.int8())]))
    report = export(db, "there", tmp_path / "out")
    assert (report.rows, names(tmp_path / "out")) == (0, ["_export.json"])
    assert import_(db, "back", tmp_path / "out").created
    assert rows_of(db, "back").schema == rows_of(db, "there").schema


# --- export -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_are_in_order_and_do_not_overlap(db, tmp_path, kind):
    """By name as by key; each as large as asked, and the seal names them all."""
    rows = filled(db, 1000)
    report = export(db, "events", tmp_path, format=kind, rows_per_file=64)
    seal = json.loads((tmp_path / "_export.json").read_text())
    assert names(tmp_path) == sorted(["_export.json", *(file["name"] for file in seal["files"])])
    bounds = [(file["first_key"], file["last_key"]) for file in seal["files"]]
    assert bounds == sorted(bounds)
    assert all(low <= high for low, high in bounds)
    assert all(one[1] < other[0] for one, other in pairwise(bounds))
    assert max(file["rows"] for file in seal["files"]) == 64
    assert len(report.files) < 2 * 1000 / 64
    assert (seal["rows"], report.rows) == (1000, 1000)
    assert seal["generation"] == report.generation
    read = [
        row
        for name in names(tmp_path)[1:]
        for row in (
            pq.read_table(tmp_path / name)
            if kind == "parquet"
            else pa.ipc.open_file(tmp_path / name).read_all()
        ).to_pylist()
    ]
    assert [{k: row[k] for k in ("id", "x", "t")} for row in read] == rows


def test_columns_bounds_and_conditions(db, tmp_path):
    """The same rows that a scan with the same words gives."""
    filled(db, 200)
    asked = {"start": "k00020", "end": "k00150", "where": "x >= 30"}
    export(db, "events", tmp_path, columns=["t", "id"], rows_per_file=50, **asked)
    found = pa.concat_tables(pq.read_table(tmp_path / n) for n in names(tmp_path)[1:])
    with db.reader("events") as reader:
        expected = reader.scan_arrow(columns=["t", "id"], **asked).read_all()
    assert len(expected) == 120
    assert found.equals(expected)


def test_a_column_that_is_not_the_key_alone(db, tmp_path):
    """The key need not be among the columns."""
    rows = filled(db, 10)
    export(db, "events", tmp_path, columns=["x"])
    found = pq.read_table(tmp_path / "part-00000-00000.parquet")
    assert found.to_pydict() == {"x": [row["x"] for row in rows]}


def test_an_export_is_one_snapshot_during_concurrent_work(db, tmp_path):
    """Writers, folds and sweeps between two files change nothing of it."""
    rows = filled(db, 300)

    class Busy(Wrapper):
        def upload(self, key, parts):
            with db.writer("events", background=False) as writer:
                writer.delete_range("a", "z")
                writer.upsert([{"id": key, "x": 1, "t": "new"}])
            fold(db, "events")
            sweep(db, "events", apply=True, force=True, retain_generations_s=0.0)
            return self.inner.upload(key, parts)

    target = Busy(stores.open(str(tmp_path)))
    report = export(db, "events", target, rows_per_file=50, executor=OneByOne())
    assert len(report.files) > 3
    found = pa.concat_tables(pq.read_table(tmp_path / file.name) for file in report.files)
    assert found["id"].to_pylist() == [row["id"] for row in rows]
    assert len(rows_of(db)) > 0


def test_files_stream_out(db, tmp_path):
    """A file is sent in pieces of a row group; none of them holds all of it."""
    filled(db, 300_000)
    parts = []

    class Counting(Wrapper):
        def upload(self, key, pieces):
            def counted():
                for piece in pieces:
                    parts.append(len(piece))
                    yield piece

            return self.inner.upload(key, counted())

    report = export(db, "events", Counting(stores.open(str(tmp_path))))
    assert len(report.files) == 1
    assert max(parts) < report.bytes / 3


def test_a_past_generation_and_a_snapshot(db, tmp_path):
    """As a reader would see them."""
    filled(db, 10)
    snapshot = db.snapshot("events", name="monday")
    with db.writer("events", background=False) as writer:
        writer.delete_range("a", "z")
    assert export(db, "events", tmp_path / "now").rows == 0
    assert export(db, "events", tmp_path / "named", snapshot="monday").rows == 10
    report = export(db, "events", tmp_path / "of", as_of=snapshot.generation)
    assert (report.rows, report.generation) == (10, snapshot.generation)
    with pytest.raises(InvalidInputError, match="both name a point in time"):
        export(db, "events", tmp_path / "x", as_of=1, snapshot="monday")


def test_a_target_that_is_in_use_is_refused(db, tmp_path):
    """Files that are there already would be taken for a part of the export."""
    filled(db, 3)
    export(db, "events", tmp_path)
    with pytest.raises(ConflictError, match=r"holds _export\.json already"):
        export(db, "events", tmp_path)


def test_an_export_that_fails_leaves_nothing(db, tmp_path):
    """Neither a part of a file nor files without a seal."""
    filled(db, 300)
    inner = stores.open(str(tmp_path))
    flaky = Faults(inner, [Rule(Fault.FAIL_BEFORE, "upload", skip=2)])
    with pytest.raises(UnavailableError):
        export(db, "events", flaky, rows_per_file=50)
    assert names(tmp_path) == []


def test_options_are_checked(db, tmp_path):
    """Before anything is written."""
    filled(db, 3)
    for wrong in (
        {"format": "csv"},
        {"format": "jsonl", "compression": "zstd"},
        {"compression": "zip"},
        {"rows_per_file": 0},
        {"rows_per_file": 1.5},
        {"columns": []},
        {"columns": 1},
        {"columns": ["y"]},
        {"executor": "local[2]"},
    ):
        with pytest.raises(InvalidInputError):
            export(db, "events", tmp_path / "out", **wrong)
    with pytest.raises(NotFoundError):
        export(db, "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_json_lines_are_what_a_person_expects(db, tmp_path):
    """An object a line, text as it is, no expiry where there is none; compressed on request."""
    db.create("there", pa.schema([("id", pa.string()), ("n", pa.map_(pa.string(), pa.int64()))]))
    with db.writer("there", background=False) as writer:
        writer.upsert([{"id": "ä", "n": {"x": 1}}, {"id": "b"}])
    (file,) = export(db, "there", tmp_path / "out", format="jsonl").files
    lines = (tmp_path / "out" / file.name).read_text().splitlines()
    assert lines == ['{"id": "b", "n": null}', '{"id": "ä", "n": {"x": 1}}']
    (packed,) = export(db, "there", tmp_path / "packed", format="jsonl", compression="gzip").files
    assert packed.name.endswith(".jsonl.gz")
    import_(db, "back", tmp_path / "packed")
    assert rows_of(db, "back").equals(rows_of(db, "there"))


def test_tasks_run_elsewhere(tmp_path):
    """An executor may send them to other processes: they are small, and bring a lease along."""
    db = reef.open(str(tmp_path / "db"))
    filled(db, 100)

    class Elsewhere:
        def map(self, run, tasks):
            program = "import pickle, sys; run, task = pickle.load(sys.stdin.buffer); " + (
                "sys.stdout.buffer.write(pickle.dumps(run(task)))"
            )
            done = []
            for task in tasks:
                body = pickle.dumps((run, task))
                assert len(body) < 10_000
                found = subprocess.run(
                    [sys.executable, "-c", program], input=body, capture_output=True, check=True
                )
                done.append(pickle.loads(found.stdout))
            return done

    report = export(db, "events", tmp_path / "out", rows_per_file=40, executor=Elsewhere())
    assert (report.rows, len(report.files) > 1) == (100, True)
    back = reef.Database(stores.open("memory://"))
    import_(back, "events", tmp_path / "out")
    assert rows_of(back).equals(rows_of(db))


# --- import -------------------------------------------------------------------------------


def written(path, table, kind):
    """Write a table as a file of some kind."""
    if kind == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=7)
        return path.with_suffix(".parquet")
    opener = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with opener(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path.with_suffix(".arrow")


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_files_of_others_are_read(db, tmp_path, kind):
    """Any layout of a type that Reef has; a namespace is made with the file's columns."""
    table = pa.table(
        {
            "name": pa.array(["b", "a", "c"] * 10).dictionary_encode(),
            "n": pa.array(range(30), pa.int32()),
            "big": pa.array(["x"] * 30, pa.large_string()),
        }
    )
    path = written(tmp_path / "rows", table, kind)
    report = import_(db, "events", path, key="name", batch_rows=8)
    assert (report.rows, report.batches, report.files) == (30, 4, 1)
    assert rows_of(db).to_pydict() == {"name": ["a", "b", "c"], "n": [28, 27, 29], "big": ["x"] * 3}


def test_a_second_run_applies_nothing_twice(db, tmp_path):
    """Not even over rows written since: batches are known by the file and their number."""
    table = pa.table({"id": [f"k{n:03}" for n in range(100)], "x": list(range(100))})
    path = written(tmp_path / "rows", table, "parquet")
    import_(db, "events", path, batch_rows=10)
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": "k005", "x": -1}])
    path = path.rename(tmp_path / "other.parquet")
    report = import_(db, "events", path, batch_rows=10, take_over=True)
    assert (report.batches, report.replayed) == (10, 10)
    assert db.reader("events").get("k005")["x"] == -1


@pytest.mark.parametrize("dies_at", [1, 4, 9])
def test_a_run_that_died_is_finished_by_the_next(tmp_path, dies_at):
    """Wherever it died, and though the response to its last batch was lost."""
    table = pa.table({"id": [f"k{n:03}" for n in range(100)], "x": list(range(100))})
    path = written(tmp_path / "rows", table, "parquet")
    db = reef.Database(stores.open("memory://"))
    seen = []

    def die(progress):
        seen.append(progress.rows)
        if len(seen) == dies_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_(db, "events", path, batch_rows=10, progress=die)
    report = import_(db, "events", path, batch_rows=10, take_over=True)
    assert (report.rows, report.replayed) == (100, dies_at)
    assert rows_of(db).equals(table)
    log = [change for change in db.reader("events").changes(after_lsn=0)]
    assert len(log) == 100


def test_progress_is_reported(db, tmp_path):
    """File by file and batch by batch."""
    table = pa.table({"id": [f"k{n}" for n in range(6)]})
    paths = [written(tmp_path / name, table, "parquet") for name in ("one", "two")]
    progress = []
    import_(db, "events", paths, batch_rows=4, progress=progress.append)
    assert [(p.files_done, p.files, p.rows) for p in progress] == [
        (0, 2, 4),
        (0, 2, 6),
        (1, 2, 6),
        (1, 2, 10),
        (1, 2, 12),
        (2, 2, 12),
    ]


def test_the_writer_role_is_not_taken_by_accident(db, tmp_path):
    """A writer that is at work is not fenced, unless requested; or it can be passed in."""
    path = written(tmp_path / "rows", pa.table({"id": ["a"], "x": [1]}), "parquet")
    db.create("events", pa.schema([("id", pa.string()), ("x", pa.int64())]))
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": "b", "x": 2}])
        with pytest.raises(ConflictError, match="wrote to events"):
            import_(db, "events", path)
        assert import_(db, "events", path, writer=writer).rows == 1
        writer.upsert([{"id": "c", "x": 3}])
    assert rows_of(db)["id"].to_pylist() == ["a", "b", "c"]


def test_patches(db, tmp_path):
    """Only the columns that a file has change, and only of rows that are there."""
    db.create("events", pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())]))
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": "a", "x": 1, "y": 1}])
        path = written(tmp_path / "p", pa.table({"id": ["a", "b"], "y": [9, 9]}), "parquet")
        import_(db, "events", path, mode="patch", writer=writer)
    assert rows_of(db).to_pylist() == [{"id": "a", "x": 1, "y": 9}]


def test_a_batch_above_the_limit_goes_in_halves(db, tmp_path):
    """As often as needed, and the same way each time."""
    table = pa.table({"id": [f"k{n}" for n in range(8)], "v": [b"x" * 1000] * 8})
    path = written(tmp_path / "rows", table, "parquet")
    db.create("events", table.schema)
    with db.writer("events", background=False, batch_bytes_max=3000) as writer:
        report = import_(db, "events", path, writer=writer)
        assert (report.rows, report.batches) == (8, 4)
        assert import_(db, "events", path, writer=writer).replayed == 4


def test_bad_rows_are_named(db, tmp_path):
    """The file, the row by its place in the file, and the column."""
    db.create("events", pa.schema([("id", pa.string()), ("x", pa.int8())]))
    table = pa.table({"id": [f"k{n}" for n in range(20)], "x": [*range(17), 1000, 1, 2]})
    path = written(tmp_path / "rows", table, "parquet")
    with pytest.raises(
        InvalidInputError, match=r"rows\.parquet, row 17, column x: .*1000"
    ) as raised:
        import_(db, "events", path, batch_rows=5)
    assert (raised.value.context["row"], raised.value.context["object"]) == (17, "rows.parquet")
    table = pa.table({"id": ["a", None]})
    path = written(tmp_path / "nulls", table, "stream")
    with pytest.raises(InvalidInputError, match=r"nulls\.arrow, row 1, column id: a key cannot"):
        import_(db, "events", path, take_over=True)
    path = written(tmp_path / "more", pa.table({"id": ["a"], "z": [1]}), "file")
    with pytest.raises(InvalidInputError, match=r"more\.arrow, rows from 0 on: column z: there is"):
        import_(db, "events", path, take_over=True)


def test_files_that_are_none_are_named(db, tmp_path):
    """Whatever is wrong with them."""
    for name in ("rows.parquet", "rows.arrow"):
        (tmp_path / name).write_bytes(b"not rows at all")
        with pytest.raises(InvalidInputError, match=rf"{name} cannot be read"):
            import_(db, "events", tmp_path / name)
    with pytest.raises(NotFoundError):
        import_(db, "events", tmp_path / "missing.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no file of rows"):
        import_(db, "events", tmp_path / "empty")
    table = pa.table({"id": [str(n) for n in range(1000)], "x": [str(n) for n in range(1000)]})
    path = written(tmp_path / "cut", table, "parquet")
    body = path.read_bytes()
    path.write_bytes(body[:100] + bytes(100) + body[200:])
    with pytest.raises(InvalidInputError, match=r"cut\.parquet"):
        import_(db, "events", path, take_over=True)


def test_an_export_of_which_a_file_is_missing_is_refused(db, tmp_path):
    """The seal detects it: a part of the rows is not the whole export."""
    filled(db, 100)
    export(db, "events", tmp_path, rows_per_file=30)
    (tmp_path / "part-00001-00000.parquet").unlink()
    with pytest.raises(CorruptionError, match=r"names part-00001-00000\.parquet"):
        import_(db, "back", tmp_path)


def test_requirements_on_the_target_namespace(db, tmp_path):
    """It is made only if that is wanted, and with a key that the file has."""
    path = written(tmp_path / "rows", pa.table({"name": ["a"]}), "parquet")
    with pytest.raises(NotFoundError):
        import_(db, "events", path, create=False)
    with pytest.raises(InvalidInputError, match=r"rows\.parquet, column id: there is no such"):
        import_(db, "events", path)
    import_(db, "events", path, key="name")
    with pytest.raises(InvalidInputError, match="the key column of events is 'name'"):
        import_(db, "events", path, key="id", take_over=True)
    for wrong in ({"mode": "insert"}, {"batch_rows": 0}):
        with pytest.raises(InvalidInputError):
            import_(db, "events", path, **wrong)
