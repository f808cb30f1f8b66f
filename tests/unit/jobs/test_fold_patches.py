"""Patches that were ingested on top of rows in the log: a fold keeps the rows below them."""

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.formats.wal_object import OpKind
from reef.jobs import fold
from reef.stores.memory import MemoryStore
from reef.testing import Recorder
from tests.support.compaction import ingest_rows

NAME = "events"


@pytest.mark.parametrize("after", [None, {"id": "k", "x": 6}], ids=["on top", "in between"])
def test_a_row_below_an_ingested_patch_is_folded(after):
    """The ingest's segment has only the patch: the row it changes is the fold's to write."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "k", "x": 1, "y": 1}])
        writer.patch([{"id": "k", "x": 5}])
        ingest_rows(db, NAME, [(b"k", OpKind.PATCH, {2: 8})])
        ingest_rows(db, NAME, [(b"k", OpKind.PATCH, {2: 9})])
        writer.refresh()
        if after is not None:
            writer.patch([after])
    before = db.reader(NAME).get("k")
    assert before == {"id": "k", "x": 5 if after is None else 6, "y": 9}
    fold(db, NAME)
    assert db.reader(NAME).get("k") == before


def test_an_ingested_patch_applies_to_the_row_in_the_log_not_to_an_older_one():
    """Below the ingest there is a newer row in the log than in the segments."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "k", "x": 1, "y": 1}])
        fold(db, NAME)
        writer.upsert([{"id": "k", "x": 2, "y": 2}])
        ingest_rows(db, NAME, [(b"k", OpKind.PATCH, {})])
        writer.refresh()
        writer.patch([{"id": "k", "y": 3}])
    fold(db, NAME)
    assert db.reader(NAME).get("k") == {"id": "k", "x": 2, "y": 3}


def test_a_patch_above_an_ingested_range_delete_does_nothing():
    """The row that it would change was deleted by the ingest: it does not come back."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "k", "x": 1, "y": 1}])
        ingest_rows(db, NAME, [(b"k", OpKind.PATCH, {1: 5})], [(b"a", b"z")])
        writer.refresh()
        writer.patch([{"id": "k", "y": 3}])
    assert db.reader(NAME).get("k") is None
    fold(db, NAME)
    assert db.reader(NAME).get("k") is None


@pytest.mark.parametrize("segments", [4, 40])
def test_a_patch_opens_only_segments_with_its_key(segments):
    """Two patched keys at both ends cost the same requests, however many segments are between."""
    recorder = Recorder(MemoryStore(), calls_max=1_000_000)
    db = reef.Database(recorder)
    db.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        for number in range(segments):
            writer.upsert([{"id": f"k{number:03}", "x": 1, "y": 1}])
            writer.delete_range(f"k{number:03}a", f"k{number:03}b")  # to be checked by reads
            fold(db, NAME)
        writer.refresh()
        writer.patch([{"id": "k000", "x": 2}, {"id": f"k{segments - 1:03}", "x": 3}])
    recorder.calls.clear()
    fold(db, NAME)
    opened = {c.key for c in recorder.calls if "/segments/" in c.key and c.method.startswith("get")}
    assert len(opened) == 2
    assert db.reader(NAME).get("k000") == {"id": "k000", "x": 2, "y": 1}
