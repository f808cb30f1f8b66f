"""A backup to a real S3 server, and back."""

import os

import pytest

import reef
from reef import stores
from reef.jobs import backup, fold, restore, verify, verify_backup

NAME = "users"


@pytest.mark.timeout(600)
def test_a_directory_is_backed_up_to_a_bucket(ministack, tmp_path):
    """Segments larger than a part are sent as they are read; the rows come back."""
    ministack.make_bucket("backups")
    options = {**ministack.options(), "part_bytes": 5 << 20}
    target = stores.open("s3://backups/set", **options)
    db = reef.open(str(tmp_path / "data"))
    with db.writer(NAME, create=True, background=False) as writer:
        for number in range(1500):
            writer.put(f"k{number:05}", os.urandom(8000), wait=False)
        writer.flush()
        fold(db, NAME, codec="none")
        lsn = writer.put("k00000", b"in the log").lsn
        writer.put("k00001", b"later")
    report = backup(db, NAME, target)
    assert report.bytes_sent > 2 * options["part_bytes"]
    again = backup(db, NAME, target)
    assert (again.segments_sent, again.log_objects) == (0, 0)
    assert verify_backup(target, deep=True).problems == []
    other = reef.open("s3://backups/restored", **options)
    restore(target, other, NAME, lsn=lsn)
    expected = {
        **dict(db.reader(NAME).scan()),
        b"k00001": db.reader(NAME).as_of(lsn=lsn).get("k00001"),
    }
    assert dict(other.reader(NAME).scan()) == expected
    assert verify(other, NAME, deep=True).problems == []
