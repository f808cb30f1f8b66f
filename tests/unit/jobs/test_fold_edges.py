"""Folds at their edges: sequences of a group, newer schemas, void objects, marks of streams."""

import pyarrow as pa
import pytest

import reef
from reef.engine.log.log import Log
from reef.engine.rows.batch import encode_batch
from reef.errors import ConflictError, NotFoundError
from reef.formats.manifest import StreamPoint
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import BatchHeader, WalHeader, WalKind, WalObject
from reef.jobs import fold, rebuild
from reef.jobs.fold.job import _missing_object_error
from reef.manifest import edits
from reef.manifest.head import Publisher
from reef.paths import Namespace
from tests.support.bulk_jobs import append
from tests.support.rebuild import NAME, head_of, open_mortal, without_manifests
from tests.support.sweep_world import At

NAMES = Namespace(NAME)


def put_object(db, lsn, *batches, after=None):
    """Put an object of a writer into the log, with several batches in one group."""
    records = tuple(encode_batch(batch, DEFAULT_SCHEMA, 1000).record for batch in batches)
    header = WalHeader(
        lsn=lsn,
        kind=WalKind.BATCHES,
        epoch=1,
        writer_id="w",
        write_id=db.store.runtime.ulid(),
        created_at_ms=1000,
        after=after,
        schema_id=1,
        batches=tuple(BatchHeader(len(batch)) for batch in batches),
    )
    assert Log(db.store, NAMES).fill(lsn, WalObject.encode(header, records)).landed


def test_the_last_batch_of_a_group_wins():
    """Sequences continue from one batch of an object to the next, also in a segment."""
    db = open_mortal()
    db.create(NAME)
    put_object(db, 1, reef.Batch().put("x", b"0").put("a", b"1"), reef.Batch().put("a", b"2"))
    fold(db, NAME)
    assert dict(db.reader(NAME).scan()) == {b"a": b"2", b"x": b"0"}


def test_a_fold_ends_before_rows_of_a_newer_schema():
    """Another process adds a column after the fold has read the head: the next fold has it."""
    db = open_mortal()
    columns = pa.schema([("id", pa.string()), ("x", pa.int64())])
    db.create(NAME, columns)

    def grow():
        db.alter(NAME, columns.append(pa.field("y", pa.int64())))
        with db.writer(NAME, background=False) as writer:
            writer.upsert([{"id": "b", "x": 2, "y": 3}])

    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "a", "x": 1}])
    fold(reef.Database(At(db.store, "list", "/wal/", grow)), NAME)
    fold(db, NAME)
    assert dict(db.reader(NAME).scan())["b"] == {"id": "b", "x": 2, "y": 3}


def test_a_fold_of_void_objects_leaves_a_segment():
    """H49: without manifests it could not be distinguished from a lost segment."""
    db = open_mortal()
    db.create(NAME)
    for _ in range(2):
        append(db.store, NAME, WalKind.SKIP)
    first = Log(db.store, NAMES).read(1).header.write_id
    put_object(db, 3, reef.Batch().put("a", b"1"), after=(first, "another write"))
    fold(db, NAME)
    (trace,) = head_of(db).segments
    assert trace.rows == 0
    db.store.delete(NAMES.wal_object(3))
    report = rebuild(without_manifests(db), NAME)
    assert report.problems == ()


def test_a_fold_that_was_overtaken_is_no_damage():
    """The floor has moved past its plan, and its objects are gone: a conflict, though the
    generation of the plan is retained."""
    db = open_mortal()
    db.create(NAME)
    old = head_of(db)
    put_object(db, 1, reef.Batch().put("a", b"1"))
    fold(db, NAME)
    error = _missing_object_error(
        Publisher(db.store, NAMES), old, NotFoundError("LSN 1 is gone"), None
    )
    assert isinstance(error, ConflictError)


@pytest.mark.parametrize("field", ["stream_marks", "stream_lineages"])
def test_a_fold_moves_the_marks_of_streams(field):
    """H63, H71: the objects of a stream are collected; the manifest knows how far it is, and which
    entry that was."""
    point = StreamPoint(1, 5, b"digest")
    expected = {"stream_marks": {"s": 5}, "stream_lineages": {"s": (point,)}}
    before = edits.new_namespace(DEFAULT_SCHEMA)
    result = edits.FoldResult(
        before.wal_floor, before.wal_floor + 1, (), (), (), (), {"s": 5}, {"s": (point,)}
    )
    assert getattr(edits.fold(before, result), field) == expected[field]
