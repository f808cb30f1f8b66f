"""Hazards of the local log: disks that fail or forget, and damage that resembles a crash."""

import errno
import os
import threading

import pytest

from reef.cli.main import run
from reef.errors import (
    ClosedError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    OutcomeUnknownError,
    UnsupportedFormatError,
)
from reef.files import OS
from reef.locallog import LocalLog, LogEntry
from reef.locallog.encoding import frames
from reef.testing.disk import SimulatedDisk
from reef.testing.power_failures import crashes
from tests.support.faulty_files import FaultyFiles, failing
from tests.unit.locallog.histories import append, check_crash, play

TAIL = ".wal"
META = "wal-meta.db.tmp"  # as it was named when it was created


@pytest.fixture
def files():
    """Return a file system that fails on request."""
    return FaultyFiles()


@pytest.fixture
def log(tmp_path, files):
    """Return a log of three entries, in segments of 4 KiB."""
    with LocalLog(tmp_path, 4096, files=files) as log:
        log.store_logs([LogEntry(n, data=b"kept") for n in (1, 2, 3)])
        yield log


# --- H7 -----------------------------------------------------------------------------


def test_H7_order_of_system_calls(tmp_path, files):
    """H7: whole file, sync, rename, directory; pages before metas; bytes before completions; names
    before the first completion; a meta commit before files are made or deleted."""
    with LocalLog(tmp_path, 4096, files=files) as log:
        made = list(files.calls)
        files.calls.clear()
        log.store_log(LogEntry(1))
        first = list(files.calls)
        files.calls.clear()
        log.store_log(LogEntry(2))
        second = list(files.calls)
        log.store_logs([LogEntry(n, data=bytes(50)) for n in range(3, 80)])
        log.set(b"wait", b"for the rotation")
        files.calls.clear()
        log.delete_range(1, 79)
        removed = list(files.calls)
    renamed = made.index("rename wal-meta.db")
    assert made[renamed - 1] == f"sync {META}"
    assert made[renamed + 1] == "sync directory"
    assert not any(call.startswith("create 0") for call in made[:renamed])
    commit = [f"write {META}", f"sync {META}", f"write {META}", f"sync {META}"]
    made_tail = made.index("create 00000000000000000001-0000000000000000.wal")
    assert made[made_tail - 4 : made_tail] == commit
    name = "00000000000000000001-0000000000000000.wal"
    assert first == [f"write {name}", f"sync {name}", "sync directory"]
    assert second == [f"write {name}", f"sync {name}"]
    new = "00000000000000000080-0000000000000002.wal"
    files_after = [call for call in removed if META not in call]
    assert removed[-len(files_after) :] == files_after
    assert files_after[:2] == [f"create {new}", f"preallocate {new}"]
    assert files_after[-1] == "sync directory"
    assert {call.split()[0] for call in files_after[2:-1]} == {"unlink"}


class SyncedDirectories(type(OS)):
    """Writes down which directories were synced."""

    def __init__(self):
        self.synced = []

    def sync_directory(self, path):
        self.synced.append(path)
        super().sync_directory(path)


def test_H7_new_directories_are_durable(tmp_path):
    """H7: each directory that is made has its name synced; also if its maker died before."""
    files = SyncedDirectories()
    LocalLog(tmp_path / "a" / "b", files=files).close()
    made = (tmp_path, tmp_path / "a", tmp_path / "a/b")
    places = [files.synced.index(str(path)) for path in made]
    assert places == sorted(places)
    (tmp_path / "c").mkdir()
    files.synced.clear()
    LocalLog(tmp_path / "c", files=files).close()
    assert files.synced[0] == str(tmp_path)
    files.synced.clear()
    LocalLog(tmp_path / "c", files=files).close()
    assert files.synced == [str(tmp_path / "c")]


def test_H7_opening_syncs_the_files_first(tmp_path, files):
    """H7: the last writer may have been killed before its syncs, and the power may fail next."""
    with LocalLog(tmp_path) as log:
        log.store_log(LogEntry(1))
    files.calls.clear()
    LocalLog(tmp_path, files=files).close()
    tail = "00000000000000000001-0000000000000000.wal"
    assert files.calls == ["sync wal-meta.db", "sync directory", f"sync {tail}"]


def test_H7_a_reopened_tail_gets_its_name_synced(tmp_path, files):
    """H7: the Go library forgets it for a tail that was made, not written, and reopened."""
    LocalLog(tmp_path).close()
    with LocalLog(tmp_path, files=files) as log:
        files.calls.clear()
        log.store_log(LogEntry(1))
        assert files.calls[-1] == "sync directory"


def test_H7_a_rotated_tail_gets_its_name_synced(tmp_path, files):
    """H7: the first append to the tail that a rotation has made syncs the directory before it
    returns; the next one does not have to."""
    with LocalLog(tmp_path, 4096, files=files) as log:
        log.store_logs([LogEntry(n, data=bytes(50)) for n in range(1, 80)])
        log.set(b"wait", b"for the rotation")
        files.calls.clear()
        log.store_log(LogEntry(80))
        tail = "00000000000000000080-0000000000000001.wal"
        assert files.calls == [f"write {tail}", f"sync {tail}", "sync directory"]
        files.calls.clear()
        log.store_log(LogEntry(81))
        assert files.calls == [f"write {tail}", f"sync {tail}"]


def test_H7_readers_never_see_short_bytes(tmp_path):
    """H7: a reader concurrent with the appender gets whole entries or none."""
    wrong, done = [], threading.Event()
    with LocalLog(tmp_path, 1 << 16) as log:
        log.store_log(LogEntry(1, data=b"1" * 3000))

        def read():
            while not done.is_set():
                last = log.last_index
                if log.get_log(last).data != b"%d" % (last % 10) * 3000:
                    wrong.append(last)

        reader = threading.Thread(target=read)
        reader.start()
        for index in range(2, 400):
            log.store_log(LogEntry(index, data=b"%d" % (index % 10) * 3000))
        done.set()
        reader.join()
    assert wrong == []


# --- H26 ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_H26_a_failed_append_poisons_the_handle(log, files, tmp_path, call, error):
    """H26: unacknowledged entries are never shown, no more are accepted, reads continue;
    opening again recovers, and the log continues."""
    files.before = failing(call, TAIL, error)
    with pytest.raises(OutcomeUnknownError, match="the disk failed") as caught:
        log.store_log(LogEntry(4, data=b"lost or not"))
    assert caught.value.kind == (
        ErrorKind.DISK_FULL if error == errno.ENOSPC else ErrorKind.NOT_DURABLE
    )
    files.before = None
    assert log.last_index == 3
    assert [entry.data for entry in log.entries()] == [b"kept"] * 3
    for change in (
        lambda: log.store_log(LogEntry(4)),
        lambda: log.delete_range(1, 1),
        lambda: log.set(b"k", b"v"),
    ):
        with pytest.raises(ClosedError, match="earlier change of the log failed"):
            change()
    log.close()
    with LocalLog(tmp_path) as again:
        assert again.last_index == (3 if call == "write" else 4)
        again.store_log(LogEntry(again.last_index + 1))


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("after", [0, 1])
def test_H26_a_failed_meta_commit_poisons_the_handle(log, files, tmp_path, call, after):
    """H26: the same for values and truncations, at every step of the commit."""
    files.before = failing(call, META, after=after)
    with pytest.raises(OutcomeUnknownError):
        log.delete_range(1, 1)
    files.before = None
    with pytest.raises(ClosedError):
        log.set(b"k", b"v")
    log.close()
    with LocalLog(tmp_path) as again:
        assert again.first_index in (1, 2)
        assert again.last_index == 3


def test_H26_a_failed_rotation_fails_the_next_append(log, files, tmp_path):
    """H26: the append that filled the segment is durable, and stays acknowledged."""
    files.before = failing("create", TAIL, errno.ENOSPC)
    log.store_logs([LogEntry(n, data=bytes(100)) for n in range(4, 50)])
    assert log.last_index == 49
    with pytest.raises(ClosedError, match="No space left"):
        log.store_log(LogEntry(50))
    assert log.get_log(49).index == 49
    log.close()
    with LocalLog(tmp_path) as again:
        again.store_log(LogEntry(50))


def test_H26_an_interrupt_in_the_middle(log, files, tmp_path):
    """H26: a Ctrl-C between write and sync leaves a handle that refuses further appends."""

    def interrupt(call, name):
        if call == "sync":
            raise KeyboardInterrupt

    files.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        log.store_log(LogEntry(4))
    files.before = None
    assert log.last_index == 3
    with pytest.raises(ClosedError):
        log.store_log(LogEntry(4))


def test_H26_a_refused_append_does_not_poison(log):
    """H26: what never reached the disk leaves the handle as it was, whatever was wrong with it."""
    for wrong in ({"data": "text"}, {"appended_at": None}, {"term": "1"}, {"type": None}):
        with pytest.raises(InvalidInputError):
            log.store_log(LogEntry(4, **wrong))
        with pytest.raises(InvalidInputError):
            log.store_logs([LogEntry(n, **wrong) for n in range(200, 210)])
    for key, value in ((b"k", "text"), (b"k", 7), (7, b"v"), ("", b"v"), (b"", b"v")):
        with pytest.raises(InvalidInputError):
            log.set(key, value)
    with pytest.raises(InvalidInputError):
        log.store_log(LogEntry(9))
    with pytest.raises(InvalidInputError):
        log.store_logs([LogEntry(4), LogEntry(5, term=-1)])
    with pytest.raises(InvalidInputError):
        log.set(b"", b"v")
    log.store_log(LogEntry(4))


def test_H26_waiters_wake(log, files):
    """H26: an append that waits for another one's failure raises and does not hang."""
    entered, gate = threading.Event(), threading.Event()

    def fail(call, name):
        if call == "sync":
            entered.set()
            gate.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    files.before = fail
    raised = []

    def append_one(index):
        try:
            log.store_log(LogEntry(index))
        except (OutcomeUnknownError, ClosedError) as error:
            raised.append(type(error).__name__)

    first = threading.Thread(target=append_one, args=(4,))
    first.start()
    assert entered.wait(60)
    second = threading.Thread(target=append_one, args=(4,))
    second.start()
    gate.set()
    first.join(60)
    second.join(60)
    assert sorted(raised) == ["ClosedError", "OutcomeUnknownError"]


# --- H27 ----------------------------------------------------------------------------


def test_H27_a_corrupt_length_in_a_sealed_segment_is_fatal(tmp_path):
    """H27: neither skipped over nor cut short: the read fails, and names entry and segment."""
    with LocalLog(tmp_path, 4096) as log:
        log.store_logs([LogEntry(n, data=bytes(100)) for n in range(1, 60)])
        log.store_log(LogEntry(60))
    file = min(tmp_path.glob("*.wal"))
    data = bytearray(file.read_bytes())
    data[36:40] = (1 << 30).to_bytes(4, "little")
    file.write_bytes(data)
    with LocalLog(tmp_path) as log:
        with pytest.raises(CorruptionError, match=rf"{file.name}, entry 1"):
            list(log.entries())
        assert log.last_index == 60


def test_H27_damage_in_the_middle_of_the_tail_is_reported(tmp_path):
    """H27: batches behind a damaged one are not dropped, and the report names the damage."""
    with LocalLog(tmp_path, 4096) as log:
        for index in range(1, 6):
            log.store_log(LogEntry(index, data=b"x" * 50))
    (file,) = tmp_path.glob("*.wal")
    data = bytearray(file.read_bytes())
    data[data.index(b"x" * 50, 200)] ^= 1
    file.write_bytes(data)
    with LocalLog(tmp_path) as log:
        assert log.last_index == 5
        assert len(log.recovery.damaged) == 1
        assert log.recovery.dropped_bytes == 0


def _damaged(change):
    """Yield logs of ten entries, each with another byte of an older batch changed."""
    disk = SimulatedDisk()
    with LocalLog("/log", 4096, files=disk) as log:
        for index in range(1, 11, 2):
            before = log._view.tail._end
            log.store_logs([LogEntry(index, data=b"x" * 30), LogEntry(index + 1, data=b"y" * 9)])
    content = disk.content()
    (name,) = [name for name in content if name.endswith(".wal")]
    commits = {frame.offset for frame in frames_of(content[name]) if frame.type == 3}
    for offset in range(before):
        data = bytearray(content[name])
        data[offset] = change(data[offset])
        ignored = any(offset - n in commits for n in (1, 2, 3))  # no checksum covers these
        if data != content[name] and not ignored:
            yield offset, SimulatedDisk({**content, name: bytes(data)})


def frames_of(data):
    """Return the frames of a segment."""
    data = bytes(data)
    return list(frames(lambda length, offset: data[offset : offset + length], len(data)))


@pytest.mark.parametrize("change", [lambda byte: byte ^ 0xFF, lambda byte: byte ^ 1, lambda _: 0])
def test_H27_no_byte_of_an_older_batch_is_lost_in_silence(change):
    """H27: a length, a type, a checksum, a payload, the header: either the log still has all of
    its entries and reports the damage, or it does not open, and nothing was touched."""
    fatal = 0
    for offset, disk in _damaged(change):
        before = disk.content()
        try:
            log = LocalLog("/log", 4096, files=disk)
        except (CorruptionError, UnsupportedFormatError):
            assert disk.content() == before
            fatal += 1
            continue
        assert log.last_index == 10, f"byte {offset}"
        assert log.recovery.damaged, f"byte {offset}"
        log.close()
    assert fatal > 20


def test_H27_a_corrupt_length_in_the_tail_is_fatal(tmp_path, capsys):
    """H27: whole batches behind it prove that no crash did that; `verify` and `dump` report it."""
    with LocalLog(tmp_path, 1 << 16) as log:
        for index in range(1, 51):
            log.store_log(LogEntry(index, data=b"payload %d" % index))
    (file,) = tmp_path.glob("*.wal")
    data = bytearray(file.read_bytes())
    damaged = [frame.offset for frame in frames_of(data) if frame.type == 1][10]
    data[damaged + 4] = 0x7F
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="entry 11 cannot be read, and a whole batch follows"):
        LocalLog(tmp_path)
    assert file.read_bytes() == data
    for word in ("verify", "inspect"):
        assert run(["log", word, str(tmp_path)]) == 2
        assert "a whole batch follows" in capsys.readouterr().out
    assert run(["log", "dump", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "payload 10" in out
    assert "a whole batch follows" in err


@pytest.mark.parametrize("first", [2, 10, 300])
@pytest.mark.parametrize("cut", [8, 200, 5000])
def test_H27_a_log_within_a_torn_batch_is_no_proof(first, cut):
    """H27: its batches are whole and at offsets where commits may be, but belong elsewhere."""
    inner = SimulatedDisk()
    with LocalLog("/log", 1 << 16, files=inner) as log:
        for index in range(first, first + 400):
            log.store_log(LogEntry(index, data=b"inner"))
    image = max(inner.content().values(), key=lambda data: data.count(b"inner"))
    payload = bytes(2) + image.rstrip(b"\0")  # behind 6 bytes of numbers
    disk = SimulatedDisk()
    with LocalLog("/log", 1 << 20, files=disk) as log:
        log.store_logs([LogEntry(index) for index in range(1, 4)])
        log.store_log(LogEntry(4, data=payload))
    content = disk.content()
    (name,) = [name for name in content if name.endswith(".wal")]
    assert content[name].index(image[:4], 100) % 8 == 0
    end = len(content[name].rstrip(b"\0"))
    content[name] = content[name][: end - cut].ljust(1 << 20, b"\0")
    with LocalLog("/log", files=SimulatedDisk(content)) as log:
        assert log.last_index == 3
        assert log.recovery.dropped_bytes > 10000


def test_H27_recovery_reports_the_entries_it_drops():
    """H27: a torn batch is dropped, and the report says so in entries and bytes."""
    run = play([append(20), append(30, 30)])
    dropped = 0
    for done, content in crashes(run.disk):
        check_crash(run, done, content)
        log = LocalLog("/log", 400, files=SimulatedDisk(content))
        dropped += log.recovery.dropped_entries > 0 and log.recovery.dropped_bytes > 0
        log.close()
    assert dropped > 20


# --- a torn batch with another log in its payload -------------------------------------


def _batches(path, first, count):
    """Return the bytes of a log's batches from its second on: each is whole by itself."""
    with LocalLog(path, 1 << 20) as other:
        other.store_logs([LogEntry(first - 1)])
        start = other._current_view().tail._end
        for index in range(first, first + count):
            other.store_log(LogEntry(index, data=b"of another log"))
        end, name = other._current_view().tail._end, other._current_view().tail.info.name
    return (path / name).read_bytes()[start:end]


def _torn(path, entries):
    """Append entries to a log of ten, and return its tail's file, and where that batch is."""
    with LocalLog(path, 1 << 20) as log:
        log.store_logs([LogEntry(n, data=b"kept") for n in range(1, 11)])
        start = log._current_view().tail._end
        log.store_logs(entries)
        tail = log._current_view().tail
        return path / tail.info.name, start, tail._end


@pytest.mark.parametrize("extensions", [b"", bytes(range(16))], ids=["plain", "extensions"])
@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_H27_a_torn_payload_may_be_a_log_with_plausible_indexes(tmp_path, before, extensions):
    """H27: wherever a crash cuts the last batch, the log opens with every acknowledged entry,
    although the payload of an entry has whole batches whose indexes could be the next ones."""
    inside = _batches(tmp_path / "other", 12, 5)
    entries = [LogEntry(11 + n, data=b"small", extensions=extensions) for n in range(before)]
    entries.append(LogEntry(11 + before, data=bytes(3) + inside, extensions=extensions))
    file, start, end = _torn(tmp_path / "log", entries)
    image = file.read_bytes()
    at = image.index(inside, start)
    assert at % 8 == 0, "the batches inside are where commits may be"
    for cut in range(at + 8, end):
        file.write_bytes(image[:cut].ljust(len(image), b"\0"))
        with LocalLog(tmp_path / "log", 1 << 20) as log:
            assert log.last_index == 10
            assert log.recovery.dropped_bytes > 0
            assert [entry.data for entry in log.entries()] == [b"kept"] * 10


def test_H27_a_damaged_length_over_whole_batches_is_still_found(tmp_path):
    """H27: a length that was damaged to span the batches behind it is not taken for a payload."""
    path = tmp_path / "log"
    with LocalLog(path, 1 << 20) as log:
        log.store_logs([LogEntry(n, data=b"kept") for n in range(1, 11)])
        start = log._current_view().tail._end
        for index in range(11, 15):
            log.store_log(LogEntry(index, data=b"acknowledged"))
        tail = log._current_view().tail
        file, end = path / tail.info.name, tail._end
    image, raised = bytearray(file.read_bytes()), 0
    for length in range(end - start):
        damaged = image.copy()
        damaged[start + 4 : start + 8] = length.to_bytes(4, "little")
        if damaged != image:
            file.write_bytes(damaged)
            raised += _opens_whole_or_not(path, last_index=14)
    assert raised > 20


def _opens_whole_or_not(path, last_index):
    """Open a damaged log; return whether that raises, and check the log if it does not."""
    try:
        log = LocalLog(path, 1 << 20)
    except CorruptionError as error:
        return "whole batch follows" in error.message
    with log:
        assert log.last_index == last_index
        assert log.recovery.damaged
    return False
