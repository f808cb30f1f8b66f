"""Backup sets that earlier releases wrote: verified, restored and continued by this one."""

import json
import tarfile
from pathlib import Path

import pytest

import reef
from reef.jobs import backup, restore, verify, verify_backup
from tests.golden.write_backup import shown

SETS = sorted((Path(__file__).parent / "backups").glob("*.tar.xz"))


@pytest.fixture(params=SETS, ids=lambda path: path.name.partition(".")[0])
def golden(request, tmp_path):
    """Return the folder of a set and a bucket, and the rows of some LSNs."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path, json.loads((tmp_path / "expected.json").read_text())


def test_a_set_of_an_earlier_release_is_restored(golden):
    """Every object is intact, and every recorded LSN has the rows that its writer read."""
    root, expected = golden
    assert verify_backup(root / "set", deep=True).problems == []
    for lsn, rows in expected.items():
        db = reef.open(str(root / f"restored-{lsn}"))
        restore(root / "set", db, "users", lsn=int(lsn))
        assert shown(db) == rows


def test_a_bucket_with_a_restored_namespace_is_read(golden):
    """Also one that replaced a dropped namespace; its backups go to the same set."""
    root, expected = golden
    db = reef.open(str(root / "bucket"))
    assert shown(db) == expected[max(expected, key=int)]
    assert verify(db, "users", deep=True).problems == []
    with db.writer("users", background=False) as writer:
        writer.put("next", b"works")
    backup(db, "users", root / "set")
    assert verify_backup(root / "set", deep=True).problems == []
