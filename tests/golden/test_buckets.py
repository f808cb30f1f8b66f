"""Buckets that earlier releases wrote: read, checked, continued and rebuilt by this one."""

import json
import tarfile
from pathlib import Path

import pytest

import reef
import reef.catalog
from reef.jobs import compact, fold, rebuild, sweep, verify
from tests.golden.write_bucket import plain, shown

BUCKETS = sorted((Path(__file__).parent / "buckets").glob("*.tar.xz"))


@pytest.fixture(params=BUCKETS, ids=lambda path: path.name.partition(".")[0])
def golden(request, tmp_path):
    """Return a copy of the bucket, opened, its catalog's URL, and the rows that its writer read."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "bucket"
    return (
        reef.open(root),
        str(root / "own-catalog"),
        json.loads((tmp_path / "expected.json").read_text()),
    )


def test_every_row_is_read_as_it_was_written(golden):
    """Namespaces, schemas, LSNs, rows, snapshot, cursor and catalog are those of the writer."""
    db, url, expected = golden
    assert json.loads(json.dumps(shown(db, url))) == expected


def test_verify_finds_no_problem(golden):
    """Every checksum, invariant and reference of the older release holds, in every block."""
    db, url, _ = golden
    for name in db.namespaces():
        assert verify(db, name, deep=True).problems == []
    assert list(reef.catalog.open(url).verify().problems) == []


def test_the_log_is_read_from_its_first_change(golden):
    """The changes of a namespace that was never folded past are those of its rows."""
    db, _, _ = golden
    with db.reader("again") as reader:
        assert [(c.op, c.key) for c in reader.changes(after_lsn=0)] == [("put", b"new")]


def test_work_continues(golden):
    """A writer replays the log, keys stay in the dedup window, and all jobs run on old objects."""
    db, url, expected = golden
    with db.writer("plain", background=False) as writer:
        again = writer.put("k020", b"second", idempotency_key="once")
        assert again.replayed
        writer.put("later", b"row")
    db.undrop("dropped")
    for name in db.namespaces():
        fold(db, name)
        compact(db, name, full=True)
        sweep(db, name, apply=True)
        assert verify(db, name, deep=True).problems == []
    with db.reader("plain") as reader:
        rows = plain(reader.scan_arrow().read_all().to_pylist())
    assert rows == sorted([*expected["rows"]["plain"], {"id": "later", "value": "row"}], key=id_of)
    for name in expected["namespaces"]:
        with db.reader(name) as reader:
            rows = plain(reader.scan_arrow().read_all().to_pylist())
        assert name == "plain" or rows == expected["rows"][name]
    with db.reader("dropped") as reader:
        assert reader.get("old") == b"dropped"
    catalog = reef.catalog.open(url)
    catalog.transact(lambda session: session.put("c1", b"back"))
    assert catalog.get_latest("c1") == b"back"


def test_a_rebuild_derives_the_same_rows(golden):
    """From segments and log alone: footers, covers and headers of older releases suffice."""
    db, _, _ = golden
    for name in {"plain", "table", "backfilled"} & set(db.namespaces()):
        report = rebuild(db, name)
        assert report.rows_equal, report
        assert report.problems == ()


def id_of(row):
    """Return the key of a row."""
    return row["id"]
