"""H26, H63: the disk under a local log runs full and recovers; uploads that are refused stop."""

import errno
import gc
import os
import threading
from contextlib import contextmanager, suppress

import msgspec
import pytest

from reef.engine.commit.completions import Completion
from reef.engine.handles.database import Database
from reef.engine.local import uploader
from reef.errors import ErrorKind, FencedError, InvalidInputError, ReefError
from reef.jobs import fold
from reef.locallog import LocalLog, LogEntry
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.runtime import REAL
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.testing.disk import SimulatedDisk

NAME = "users"
SEGMENT_BYTES = 8192
SETTINGS = {
    "durability": "local",
    "local_log": "/log",
    "background": False,
    "local_segment_bytes": SEGMENT_BYTES,
    "write_deadline_s": 30.0,
}
NEVER_MS = 1e9


def start(store, disk, **settings):
    """Return the writer of a machine with this disk."""
    db = Database(store)
    db._log_files = disk
    return db.writer(NAME, **SETTINGS, **settings)


def kill(writer):
    """Leave a writer as a killed process leaves it."""
    writer._uploader.stop()
    writer._closed = True


def segments(disk):
    """Return the names of a log's files."""
    return [name for name in disk.content() if name.endswith(".wal")]


def rows(store):
    """Return the keys that are in the bucket."""
    return {key.decode() for key, _ in Database(store).reader(NAME).scan()}


@pytest.mark.parametrize("interval_ms", [1.0, NEVER_MS])
def test_a_full_disk_recovers_with_the_next_opening(interval_ms):
    """Everything was uploaded, so the next life has room again; nothing acknowledged is lost."""
    store, disk, acknowledged = MemoryStore(), SimulatedDisk(bytes_max=128 << 10), []
    for life in range(6):
        writer = start(store, disk, upload_interval_ms=interval_ms)
        before = len(acknowledged)
        with suppress(ReefError):
            for number in range(100):
                key = f"{life}/{number:03}"
                writer.put(key, bytes(1000))
                acknowledged.append(key)
        assert len(acknowledged) >= before + 20, f"life {life} has no room"
        with suppress(ReefError):
            writer.close()
        disk.restart()
    assert rows(store) >= set(acknowledged)


def test_a_full_disk_recovers_when_its_tail_was_not_uploaded():
    """The bucket was away while the disk filled up, and the process died: the opening uploads the
    tail and releases its segments."""
    store, disk = MemoryStore(), SimulatedDisk(bytes_max=64 << 10)
    writer = start(store, disk, upload_interval_ms=NEVER_MS)
    written = 0
    with suppress(ReefError):
        for written in range(1000):
            writer.put(f"k{written:03}", bytes(1000))
    kill(writer)
    disk.restart()
    again = start(store, disk, upload_interval_ms=1.0)
    again.flush()
    assert len(rows(store)) >= written
    for number in range(100):  # more than the disk holds
        await_release(disk)
        again.put(f"more{number}", bytes(1000))
        again.flush()
    again.close()


def await_release(disk):
    """Wait until uploaded segments are released: that follows the upload, on another thread."""
    deadline = REAL.deadline(60)
    while len(segments(disk)) > 2 and not deadline.passed():
        REAL.sleep(0.005)


def test_opening_releases_segments_that_an_earlier_writer_uploaded():
    """The process died before its log had noted the upload, and this life uploads nothing."""
    store, disk = MemoryStore(), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS)
    writer._uploader._truncate = lambda: None
    for number in range(60):
        writer.put(f"k{number}", bytes(1000))
    writer.flush()
    kill(writer)
    assert len(segments(disk)) > 5
    disk = SimulatedDisk(disk.content())
    again = start(store, disk, upload_interval_ms=NEVER_MS)
    assert again.local_recovery.replayed == 0
    assert len(segments(disk)) <= 2
    assert again._buffer.log.last_index == 60, "its last entry keeps the numbers going"
    again.close()


def test_an_upload_releases_whole_segments_at_once(monkeypatch):
    """Neither a second nor 16 MiB have to pass first: a disk may be smaller than that."""
    monkeypatch.setattr(uploader, "TRUNCATE_S", 1e9)
    store, disk = MemoryStore(), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS)
    for number in range(60):
        writer.put(f"k{number}", bytes(1000))
    writer.flush()
    deadline = REAL.deadline(15)
    while len(segments(disk)) > 2:
        assert not deadline.passed(), f"{len(segments(disk))} files are left"
        REAL.sleep(0.01)
    writer.close()


def test_a_log_opens_on_a_full_disk():
    """There is no room for a new tail: entries can be read and removed, and then appended."""
    disk = SimulatedDisk(bytes_max=1 << 20)
    log = LocalLog("/log", SEGMENT_BYTES, files=disk)
    for index in range(1, 30):
        log.store_log(LogEntry(index, data=bytes(1000)))
    log.close()
    content = disk.content()
    last = sorted(segments(disk))[-1]
    del content[last]  # the process died between the commit of the rotation and its new file
    full = SimulatedDisk(content, bytes_max=sum(map(len, content.values())))
    with LocalLog("/log", SEGMENT_BYTES, files=full) as again:
        assert again.recovery.created_tail
        assert again.last_index >= 20
        again.delete_range(1, again.last_index - 1)
        again.store_log(LogEntry(again.last_index + 1, data=bytes(1000)))


def test_the_meta_store_has_its_room_before_it_needs_it(tmp_path):
    """Commits reuse allocated pages, so that a log on a full disk can still be truncated."""
    LocalLog(tmp_path / "log", SEGMENT_BYTES).close()
    found = os.stat(tmp_path / "log" / "wal-meta.db")
    assert found.st_blocks * 512 >= found.st_size


def test_a_closed_log_holds_no_file(tmp_path):
    """The space of a removed segment is freed when the log is closed, even with a handle open."""
    log = LocalLog(tmp_path / "log", SEGMENT_BYTES)
    for index in range(1, 30):
        log.store_log(LogEntry(index, data=bytes(1000)))
    log.close()
    assert open_below(tmp_path) == []
    assert log.recovery is not None


def open_below(folder):
    """Return the names of the files that this process has open below a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in names if name.startswith(str(folder))]


@contextmanager
def no_garbage_collection():
    """Free objects by their reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fill_disk(patch, call):
    """Let one system call fail as on a full disk."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, call, full)


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("pwrite", lambda log: log.store_log(LogEntry(30, data=bytes(100)))),
        ("posix_fallocate", lambda log: log.store_log(LogEntry(30, data=bytes(SEGMENT_BYTES)))),
        ("unlink", lambda log: log.delete_range(1, 28)),
    ],
    ids=["append", "rotation", "truncation"],
)
def test_a_log_that_failed_and_was_closed_holds_no_file(tmp_path, monkeypatch, call, change):
    """Its errors may live on: their frames hold no segment, whose space would stay in use.

    Root: the failure that a log remembers held the frames of the failed change, and these the
    view. A process that opened the log again on the full disk never had the space of its segments
    back, although they were uploaded and removed.
    """
    errors = []
    log = LocalLog(tmp_path / "log", SEGMENT_BYTES)
    for index in range(1, 30):
        log.store_log(LogEntry(index, data=bytes(1000)))
    log.get_log(29)
    with no_garbage_collection():
        with monkeypatch.context() as patch:
            fill_disk(patch, call)
            for attempt in (change, lambda log: log.store_log(LogEntry(31, data=b"x"))):
                try:
                    attempt(log)
                except ReefError as error:
                    errors.append(error)
        assert errors, "nothing failed"
        log.close()
        assert open_below(tmp_path) == []


def test_a_writer_on_a_full_disk_holds_no_file_when_it_is_closed(tmp_path, monkeypatch):
    """The next writer of the same process has the space of all segments that were uploaded."""
    db = Database(MemoryStore())
    settings = SETTINGS | {"local_log": str(tmp_path / "log"), "upload_interval_ms": NEVER_MS}
    writer = db.writer(NAME, **settings)
    with no_garbage_collection():
        with monkeypatch.context() as patch, suppress(ReefError):
            fill_disk(patch, "posix_fallocate")
            for number in range(100):
                writer.put(f"k{number:03}", bytes(1000))
            pytest.fail("the disk was not full")
        with suppress(ReefError):
            writer.close()
        assert open_below(tmp_path) == []
        with db.writer(NAME, **settings) as again:
            assert again.local_recovery.replayed == 0
            assert len(os.listdir(tmp_path / "log")) <= 3
    assert len(rows(db.store)) >= 7


class Denying(Wrapper):
    """A store that denies one WAL object when its gate opens, and takes all others."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate = None
        self.denied = 0

    def create(self, key, body):
        gate = self.gate
        if gate is not None and "/wal/" in key:
            assert gate.wait(60)
            self.gate = None
            self.denied += 1
            raise InvalidInputError("no", kind=ErrorKind.ACCESS_DENIED)
        return self.inner.create(key, body)


def test_an_upload_that_is_refused_is_the_last_one():
    """Entries behind a refused one are not uploaded, since their marks would cover it; waiters get
    the store's own error, the uploader ends, and the next opening uploads all of them once."""
    inner = MemoryStore()
    store, disk = Denying(inner), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS, upload_bytes=2000)
    writer.put("first", b"1")
    writer.flush()
    gate = store.gate = threading.Event()
    receipts = [writer.put(f"k{number}", bytes(1500)) for number in range(6)]
    gate.set()
    with pytest.raises(InvalidInputError, match="no") as caught:
        receipts[-1].wait()
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    assert store.denied == 1
    assert writer._uploader._task.join(15), "the uploader is still running"
    assert rows(inner) == {"first"}
    assert (writer.pending.batches, writer.pending.first_index) == (6, 2)
    with pytest.raises(ReefError):
        writer.put("more", b"1")
    with pytest.raises(ReefError):
        writer.close()
    with start(inner, SimulatedDisk(disk.content()), upload_interval_ms=NEVER_MS) as again:
        assert again.local_recovery.replayed == 6
    changes = [change.key for change in Database(inner).reader(NAME).changes(after_lsn=0)]
    assert len(changes) == len(set(changes)) == 7


def test_the_note_of_uploads_is_used_where_the_bucket_has_forgotten_the_log():
    """After a rebuild, or 10,000 other logs, only the log's own note records the uploaded position:
    nothing is written twice."""
    store, disk = MemoryStore(), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS)
    for number in range(3):
        writer.put(f"k{number}", b"1")
    writer.flush()
    uploader.truncate(writer._buffer)  # which notes it
    writer.put("tail", b"1")
    kill(writer)
    with Database(store).writer(NAME, background=False) as rival:
        rival.put("k0", b"newer")
    fold(Database(store), NAME)
    Publisher(store, Namespace(NAME)).publish(
        lambda head: msgspec.structs.replace(head, stream_marks={}, stream_lineages={})
    )
    with start(
        store, SimulatedDisk(disk.content()), upload_interval_ms=NEVER_MS, reapply=True
    ) as again:
        assert again.local_recovery.uploaded_index == 3
        assert again.local_recovery.replayed == 1
    reader = Database(store).reader(NAME)
    assert (reader.get("k0"), reader.get("tail")) == (b"newer", b"1")


def test_the_note_covers_uploaded_entries_only():
    """Entries that are acknowledged and not uploaded when the note is written come back: the
    opening reads them from the disk, and uploads them."""
    store, disk = MemoryStore(), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS)
    writer.put("uploaded", b"1")
    writer.flush()
    writer.put("acknowledged", b"1")
    writer.put("acknowledged too", b"1")
    uploader.truncate(writer._buffer)
    kill(writer)
    assert rows(store) == {"uploaded"}
    with start(store, SimulatedDisk(disk.content()), upload_interval_ms=NEVER_MS) as again:
        assert (again.local_recovery.uploaded_index, again.local_recovery.replayed) == (1, 2)
    assert rows(store) == {"uploaded", "acknowledged", "acknowledged too"}


def test_a_fenced_uploader_ends_with_its_writer():
    """Another writer has the role: the upload ends once, waiters and later writes are refused."""
    store, disk = MemoryStore(), SimulatedDisk()
    writer = start(store, disk, upload_interval_ms=NEVER_MS, commit_deadline_s=10.0)
    receipt = writer.put("a", b"1")
    with Database(store).writer(NAME, background=False) as rival:
        rival.put("b", b"1")
    with pytest.raises(FencedError, match="batches"):
        receipt.wait()
    assert writer._uploader._task.join(15), "the uploader runs on"
    with pytest.raises(FencedError):
        writer.put("c", b"1")
    with pytest.raises(FencedError):
        writer.close()
    assert rows(store) == {"b"}


def test_an_upload_out_of_order_is_an_error():
    """Marks are indexes: a batch that is noted before another one would cover it."""
    writer = start(MemoryStore(), SimulatedDisk(), upload_interval_ms=NEVER_MS)
    receipts = [writer.put("a", b"1"), writer.put("b", b"2")]
    writer._uploader.stop()
    first, second = writer._buffer.backlog.next_upload(1 << 20)
    with writer._buffer.changed, pytest.raises(ValueError, match="out of order"):
        writer._buffer.note_uploaded(second, receipts[1])
    assert writer._buffer.uploaded == 0
    assert first.index < second.index
    with pytest.raises(ReefError):
        writer.close()


def test_nothing_behind_a_refused_batch_is_noted_as_uploaded(monkeypatch):
    """Even if a later one were committed: the note and the disk would lose the refused one."""
    writer = start(MemoryStore(), SimulatedDisk(), upload_interval_ms=NEVER_MS)
    receipts = [writer.put("a", b"1"), writer.put("b", b"2")]
    writer._uploader.stop()
    front, refusal = writer._buffer, InvalidInputError("no")
    items = front.backlog.next_upload(1 << 20)
    sent = [
        (items[0], Completion(result=refusal)),
        (items[1], Completion(result=receipts[1])),
    ]
    monkeypatch.setattr(writer._uploader, "_submit", lambda _: sent)
    monkeypatch.setattr(writer._committer, "drive", lambda _: None)
    writer._uploader._upload(items)
    assert front.upload_error is refusal
    assert (front.uploaded, writer.pending.batches) == (0, 2)
    with pytest.raises(ReefError):
        writer.close()
