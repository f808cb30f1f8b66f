"""First steps of a user: paths, completion in an editor, handles in a notebook, mistakes."""

import dataclasses
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mypy import api

import reef
import reef.aio
from reef import catalog, stores
from reef.config import CompactSettings
from reef.jobs import import_
from reef.stores.notify import DirectoryNotifier

ROOT = Path(__file__).parent.parent.parent
FOR_CHECKERS = """
import reef

reef.opne  # type: ignore[attr-defined]
reef.locallog.LocalLog(17)  # type: ignore[arg-type]
reef.errors.ErrorKind.NOT_FOUND
reef.aio.open("./data", threads_max="many")  # type: ignore[arg-type]
"""
COLUMNS = pa.schema([("id", pa.string()), ("amount", pa.float64())])


@pytest.fixture
def db():
    """Return an empty database."""
    return reef.open("memory://")


# --- locations ------------------------------------------------------------------------


def test_paths_are_directories(tmp_path):
    """Whatever opens a URL takes a `pathlib.Path`, as a directory."""
    reef.open(tmp_path).writer("users").put("k", b"v")
    assert reef.open(str(tmp_path)).reader("users").get("k") == b"v"
    assert stores.open(tmp_path).url == f"file://{tmp_path}"
    assert catalog.open(tmp_path / "own").store.url == f"file://{tmp_path}/own"


def test_a_path_that_was_a_url_is_refused():
    """`Path` makes one slash of two: rows must not go to a directory called s3:."""
    with pytest.raises(reef.InvalidInputError, match="'s3:/bucket/prefix' is a path") as caught:
        reef.open(Path("s3://bucket/prefix"))
    assert caught.value.kind == "invalid_url"


@pytest.mark.parametrize("url", [None, 17, "", b"./data"], ids=repr)
def test_an_invalid_url_is_shown(url):
    """The error shows the argument and the accepted forms."""
    with pytest.raises(reef.InvalidInputError) as caught:
        reef.open(url)
    assert repr(url) in caught.value.message
    assert "s3://" in caught.value.hint


def test_options_of_all_stores_are_named():
    """A directory has no options of its own, but it takes those of all stores."""
    with pytest.raises(reef.InvalidInputError, match="no option 'retries'") as caught:
        reef.open("./data", retries=3)
    own, _, common = caught.value.hint.partition("; all stores take ")
    assert own == "It takes none of its own"
    assert {*common.split(", ")} <= {*stores.open.__annotations__}


@pytest.mark.parametrize(
    ("name", "said"),
    [("allow_http", "true or false"), ("part_bytes", "a whole number"), ("timeout_s", "a number")],
)
def test_option_errors_name_the_expected_type(name, said):
    """In words of people, not in types of Python."""
    with pytest.raises(reef.InvalidInputError, match=f"option {name}='some' is not {said}"):
        stores.open("s3://bucket", **{name: "some"})


# --- names ----------------------------------------------------------------------------


def test_names_are_those_for_users():
    """`dir(reef)` lists the whole public API and none of the module's own imports."""
    names = dir(reef)
    assert {*reef.__all__, "aio", "spark", "testing"} <= {*names}
    assert not {"Any", "TYPE_CHECKING", "import_module", "_HOMES"} & {*names}
    assert all(getattr(reef, name) is not None for name in names if not name.startswith("__"))


def test_checkers_know_the_parts(tmp_path):
    """A misspelt name is an error to mypy, and parts have their types without an import."""
    path = tmp_path / "program.py"
    path.write_text(FOR_CHECKERS)
    settings = str(ROOT / "pyproject.toml")
    said, failed, code = api.run(["--strict", "--config-file", settings, str(path)])
    assert code == 0, said + failed


# --- handles in a notebook ------------------------------------------------------------


def test_a_batch_shows_how_much_it_is():
    """And not its content, which may be megabytes."""
    batch = reef.Batch().put("a", b"v" * 1000)
    assert repr(batch) == "<Batch, 1 operation>"
    assert repr(batch.delete("b")) == "<Batch, 2 operations>"


def test_repr_of_handles(db, tmp_path):
    """By their own names, with where and in which state."""
    with db.writer("users", durability="local", local_log=tmp_path / "log") as local:
        assert repr(local).startswith("<LocalWriter users, epoch 1, LSN ")
        assert repr(local.background) == "<Background of users, running>"
        local.background.pause()
        assert repr(local.background) == "<Background of users, paused>"
    assert repr(local.background) == "<Background of users, stopped>"
    assert repr(db.reader("users").changes()) == "<Changes of users, after LSN 0>"
    assert "commit.seconds" in repr(db.metrics)
    with catalog.open("memory://").session_write() as session:
        assert repr(session) == "<WriteSession at transaction 0, open>"
    assert repr(session) == "<WriteSession at transaction 0, ended>"


def test_a_transaction_is_not_pickled(db):
    """It belongs to its writer, and says so."""
    with db.writer("users") as users, users.transaction() as tx:
        with pytest.raises(reef.InvalidInputError, match="Transaction cannot be pickled") as caught:
            pickle.dumps(tx)
        assert caught.value.kind == "not_picklable"


# --- slips ----------------------------------------------------------------------------


def test_many_rows_one_by_one(db):
    """Rows that are put into a batch one by one are gathered in one list, not copied each time."""
    batch = reef.Batch()
    for number in range(3):
        batch.put(f"k{number}", {"amount": float(number)})
    (piece,) = batch._pieces
    gathered = piece.data
    batch.put("k3", {"amount": 3.0})
    assert batch._pieces[0].data is gathered
    db.create("events", COLUMNS)
    with db.writer("events") as events:
        events.write(batch)
        assert [row["amount"] for _, row in events.scan()] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("keys", [None, 17])
def test_keys_that_are_no_list(db, keys):
    """An error of ours, as for a single text."""
    with db.writer("users") as users, pytest.raises(reef.InvalidInputError, match="must be a list"):
        users.get_many(keys)


def test_an_lsn_far_ahead_is_named(db):
    """The last LSN of the log and the requested one."""
    db.writer("users").put("k", b"v")
    with pytest.raises(reef.NotFoundError, match=r"LSN 3 is not .* yet .requested: LSN 9"):
        db.reader("users").as_of(lsn=9)


def test_notifiers_are_for_readers_that_follow(tmp_path):
    """A snapshot never changes, so waiting for changes on one is refused at once."""
    db = reef.open(tmp_path)
    db.writer("users").close()
    with DirectoryNotifier(tmp_path) as news:
        db.reader("users", notify=news).close()
        with pytest.raises(reef.InvalidInputError, match="this one is pinned"):
            db.reader("users", pin=True, notify=news)
    with pytest.raises(reef.InvalidInputError, match="notify='news' is not a notifier"):
        db.reader("users", notify="news")


def test_sizes_that_exclude_each_other():
    """The error has both."""
    with pytest.raises(reef.InvalidInputError, match=r"min=7 is not at most half of .*_max=10"):
        CompactSettings().changed({"segment_bytes_min": 7, "segment_bytes_max": 10})


def test_files_of_another_kind_are_not_taken_for_directories(db, tmp_path):
    """A file is known by the end of its name, and the error lists the ends there are."""
    (tmp_path / "people.xlsx").write_text("id,age\n")
    with pytest.raises(
        reef.InvalidInputError, match=r"people\.xlsx is not a file of rows"
    ) as caught:
        import_(db, "people", tmp_path / "people.xlsx")
    assert ".parquet" in caught.value.hint
    assert ".csv" in caught.value.hint


def test_a_file_by_its_url(db, tmp_path):
    """Options of its store follow its name."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": ["p1"]}), tmp_path / "in" / "people.parquet")
    register = f"cas=sqlite:///{tmp_path}/register.db"
    report = import_(db, "people", f"file://{tmp_path}/in/people.parquet?{register}")
    assert report.rows == 1


def test_every_receipt_can_be_waited_for(db):
    """So that code does not change with `durability`; values that are unknown raise."""
    receipt = db.writer("users").put("k", b"v")
    assert receipt.wait() == receipt.wait(timeout_s=0) == receipt.lsn
    with pytest.raises(reef.InvalidInputError, match="users"):
        dataclasses.replace(receipt, lsn=None).wait()
