"""Backups on Spark: the same copies as with threads."""

import pytest

import reef
import reef.spark
from reef.errors import CorruptionError
from reef.jobs import backup, compact, fold, ingest, restore, verify_backup

NAME = "events"


@pytest.fixture
def db(tmp_path):
    """Return a bucket with several segments, a load and a log."""
    db = reef.open(str(tmp_path / "data"))
    with db.writer(NAME, create=True, background=False) as writer:
        for part in range(4):
            for number in range(20):
                writer.put(f"k{part}{number:02}", b"%d" % number)
            fold(db, NAME)
        writer.delete("k001")
    ingest(db, NAME, {"id": [b"loaded"], "value": [b"x"]})
    return db


def test_backup_and_restore_on_spark(spark, db, tmp_path):
    """Segments are copied by Spark tasks, whose requests are in the report; rows are equal."""
    executor = reef.spark.executor(spark)
    target = tmp_path / "backup"
    report = backup(db, NAME, target, executor=executor)
    assert report.segments_sent == 5
    assert report.requests["target"]["put"]["requests"] >= 5 + 3
    assert verify_backup(target, deep=True, executor=executor).problems == []
    compact(db, NAME, full=True)
    again = backup(db, NAME, target, executor=executor)
    assert again.segments_sent == 1
    other = reef.open(str(tmp_path / "other"))
    done = restore(target, other, NAME, executor=executor)
    assert done.segments_sent >= 1
    assert dict(other.reader(NAME).scan()) == dict(db.reader(NAME).scan())


def test_damage_is_named_by_a_task(spark, db, tmp_path):
    """The error of a task comes back with the name of the object."""
    target = tmp_path / "backup"
    backup(db, NAME, target)
    segment = next((target / "data" / "segments").iterdir())
    body = bytearray(segment.read_bytes())
    body[10] ^= 1
    segment.write_bytes(bytes(body))
    other = reef.open(str(tmp_path / "other"))
    with pytest.raises(CorruptionError, match=segment.name):
        restore(target, other, NAME, executor=reef.spark.executor(spark))
    assert other.namespaces() == []
