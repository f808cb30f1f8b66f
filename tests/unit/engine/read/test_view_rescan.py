"""Reads that outlive their rows: a sweep and a new writer under an open reader."""

import msgspec
import pytest

import reef
from reef.errors import ErrorKind, NotFoundError
from reef.jobs import fold
from reef.manifest.head import Publisher
from reef.paths import Namespace
from tests.support.bulk_jobs import ingest
from tests.support.segment_copies import copy_segment

NAME = "users"
USERS = Namespace(NAME)
ROWS = {b"k%04d" % number: b"%d" % number * 20 for number in range(1000)}


@pytest.fixture
def db():
    """Give a database with a segment of many groups."""
    db = reef.open("memory://")
    batch = reef.Batch()
    for key, value in ROWS.items():
        batch.put(key, value)
    with db.writer(NAME) as writer:
        writer.write(batch)
    fold(db, NAME, group_bytes=2000)
    return db


def compact_and_sweep(db):
    """Put every segment under a new name, as a compaction does, and delete the old ones."""
    old = []

    def edit(head):
        old[:] = [entry.id for entry in head.segments]
        entries = [copy_segment(db.store, USERS, entry) for entry in head.segments]
        return msgspec.structs.replace(head, segments=tuple(entries))

    Publisher(db.store, USERS).publish(edit)
    for segment_id in old:
        db.store.delete(USERS.segment(segment_id))


def begun(db, reverse=False, **settings):
    """Open a scan and read a few rows; return the reader, the iterator and these rows."""
    reader = db.reader(NAME, refresh_interval_ms=1e9, **settings)
    scan = reader.scan(reverse=reverse)
    return reader, scan, [next(scan) for _ in range(10)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_continues_after_a_compaction_and_a_sweep(db, reverse):
    """The same rows under other names: nothing is missing, nothing comes twice."""
    _, scan, read = begun(db, reverse)
    compact_and_sweep(db)
    read += list(scan)
    assert read == sorted(ROWS.items(), reverse=reverse)


def test_a_scan_continues_after_several_sweeps(db):
    """Each time from where it was."""
    _, scan, read = begun(db, cache_bytes=0)
    for _ in range(3):
        compact_and_sweep(db)
        read += [next(scan) for _ in range(200)]
    assert [*read, *scan] == sorted(ROWS.items())


def test_a_new_writer_and_a_fold_change_no_row(db):
    """Fences and folds are no news: the scan continues."""
    _, scan, read = begun(db)
    with db.writer(NAME):
        pass
    fold(db, NAME)
    compact_and_sweep(db)
    assert [*read, *scan] == sorted(ROWS.items())


def test_news_elsewhere_does_not_matter(db):
    """A newer row before the position does not matter."""
    _, scan, read = begun(db)
    with db.writer(NAME) as writer:
        writer.put("k0000", b"newer")
        writer.delete("a")
    compact_and_sweep(db)
    assert [*read, *scan] == sorted(ROWS.items())


NEWS = {
    "put": lambda db, writer: writer.put("k0500", b"newer"),
    "delete": lambda db, writer: writer.delete("k0500"),
    "delete_range": lambda db, writer: writer.delete_range("k04", "k05"),
    "ingest": lambda db, writer: ingest(db.store, NAME, {b"k0500": b"newer"}),
    "folded": lambda db, writer: (writer.put("k0500", b"newer"), fold(db, NAME)),
}


@pytest.mark.parametrize("news", NEWS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_cannot_continue_exactly_raises(db, news, reverse):
    """A newer row is in the remaining range: NotFoundError of kind `collected`, never a mix."""
    with db.writer(NAME) as writer:
        _, scan, read = begun(db, reverse)
        NEWS[news](db, writer)
    compact_and_sweep(db)
    with pytest.raises(NotFoundError, match="the rest of this scan is gone") as caught:
        read.extend(scan)
    assert caught.value.kind is ErrorKind.COLLECTED
    assert "lsn" in caught.value.context
    assert read == sorted(ROWS.items(), reverse=reverse)[: len(read)], "what came was right"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_compaction_that_has_dropped_a_delete_is_news(db, reverse):
    """The rows and the delete that hid them are both gone: nothing newer is left to be seen, and
    an end without an error would be a state that never was."""
    _, scan, read = begun(db, reverse)
    with db.writer(NAME) as writer:
        writer.delete_range("k", "l")
    fold(db, NAME)

    def edit(head):
        return msgspec.structs.replace(head, segments=(), dropped_lsn=head.wal_floor - 1)

    Publisher(db.store, USERS).publish(edit)
    for info in list(db.store.list(USERS.segments)):
        db.store.delete(info.key)
    with pytest.raises(NotFoundError, match="the rest of this scan is gone") as caught:
        read.extend(scan)
    assert caught.value.kind is ErrorKind.COLLECTED


def skip_a_slot(db):
    """Publish as a repair that skips a damaged object of the log."""

    def edit(head):
        return msgspec.structs.replace(head, skipped_lsns=(head.wal_floor - 1,))

    Publisher(db.store, USERS).publish(edit)


def create_again(db):
    """Drop the namespace, and make another one of its name: it has no rows at all."""
    db.drop(NAME)
    db.create(NAME)
    for info in list(db.store.list(USERS.segments)):
        db.store.delete(info.key)


@pytest.mark.parametrize("change", [create_again, skip_a_slot])
@pytest.mark.parametrize("reverse", [False, True])
def test_H48_a_scan_does_not_end_early_where_rows_went_unseen(db, change, reverse):
    """H48: an empty namespace in the place of the old one has nothing newer, and is another."""
    _, scan, read = begun(db, reverse)
    change(db)
    if change is skip_a_slot:
        compact_and_sweep(db)
    with pytest.raises(NotFoundError, match="the rest of this scan is gone") as caught:
        read.extend(scan)
    assert caught.value.kind is ErrorKind.COLLECTED
    assert read == sorted(ROWS.items(), reverse=reverse)[: len(read)], "what came was right"


def test_news_that_need_no_swept_object_do_not_matter(db):
    """Nothing of the scan was swept: it ends as it began, whatever was written meanwhile."""
    with db.writer(NAME) as writer:
        _, scan, read = begun(db)
        writer.put("k0900", b"newer")
        writer.delete_range("k0", "k05")
    assert [*read, *scan] == sorted(ROWS.items())


def test_point_reads_start_again(db):
    """A get on an old view finds its segment swept, and is served from the head."""
    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=0)
    assert reader.get("k0500") == ROWS[b"k0500"]
    with db.writer(NAME) as writer:
        writer.put("k0501", b"newer")
    compact_and_sweep(db)
    assert reader.get("k0500") == ROWS[b"k0500"]
    assert reader.get("k0501") == b"newer"
    assert reader.damage is None


def test_a_reader_survives_a_sweep_and_a_new_writer_under_it(db):
    """Rows written, folded and swept under it, again and again: every read is a true state."""
    reader = db.reader(NAME, refresh_interval_ms=0)
    for turn in range(5):
        with db.writer(NAME) as writer:
            writer.put("turn", b"%d" % turn)
        fold(db, NAME)
        compact_and_sweep(db)
        assert reader.get("turn") == b"%d" % turn
        assert dict(reader.scan()) == {**ROWS, b"turn": b"%d" % turn}
