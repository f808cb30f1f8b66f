"""What `LocalLog` promises its users."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from reef.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.files import OS
from reef.locallog import BinaryCodec, LocalLog, LogEntry
from reef.locallog.encoding import ENTRY_BYTES_MAX
from reef.testing.runtime import DeferredRuntime
from tests.support.faulty_files import FaultyFiles


def entries(first, count, size=100):
    """Return entries in a row."""
    return [
        LogEntry(index, 1, data=b"%d" % index * (size // 2))
        for index in range(first, first + count)
    ]


@pytest.fixture
def log(tmp_path):
    """Return an empty log with small segments."""
    with LocalLog(tmp_path / "log", 4096) as log:
        yield log


# --- entries ------------------------------------------------------------------------


def test_an_empty_log(log):
    """It has no first, no last, and nothing to give."""
    assert (log.first_index, log.last_index) == (0, 0)
    assert list(log.entries()) == []
    with pytest.raises(NotFoundError, match="it is empty"):
        log.get_log(1)
    with pytest.raises(NotFoundError):
        log.get_log(0)
    log.store_logs([])
    assert log.last_index == 0


def test_ranges(log):
    """Both bounds are included, across segments; a missing index is an error."""
    log.store_logs(entries(5, 1))
    for first in range(6, 206, 7):
        log.store_logs(entries(first, 7))
    assert (log.first_index, log.last_index) == (5, 208)
    assert len(log._view.sealed) > 4
    for low, high in ((5, 208), (5, 5), (100, 130), (207, 208)):
        assert [entry.index for entry in log.entries(low, high)] == list(range(low, high + 1))
    assert [entry.index for entry in log.entries(200)] == list(range(200, 209))
    assert list(log.entries(9, 8)) == []
    for bounds in ((4, 8), (200, 209)):
        with pytest.raises(NotFoundError, match="it has 5 to 208"):
            log.entries(*bounds)


def test_indexes_must_be_consecutive(log):
    """Gaps, repeats and zero are refused, and change nothing."""
    log.store_logs(entries(10, 2))
    for wrong in (entries(11, 1), entries(13, 1), [LogEntry(12), LogEntry(14)]):
        with pytest.raises(InvalidInputError):
            log.store_logs(wrong)
    with pytest.raises(InvalidInputError, match="start at 1"):
        log.store_log(LogEntry(0))
    log.store_log(LogEntry(12))
    assert log.last_index == 12


def test_limits(log, tmp_path):
    """An entry of more than 64 MiB is refused when it is written, not when it is read."""
    with pytest.raises(InvalidInputError, match="exceeds 67108864 bytes"):
        log.store_log(LogEntry(1, data=bytes(ENTRY_BYTES_MAX)))
    with pytest.raises(InvalidInputError):
        LocalLog(tmp_path / "other", 1 << 31)
    with pytest.raises(InvalidInputError):
        log.store_log(LogEntry(1, term=-1))
    with pytest.raises(InvalidInputError):
        log.store_log(LogEntry(1, term=1 << 64))
    log.store_log(LogEntry(1, term=(1 << 64) - 1, type=200, data=bytes(1 << 20)))
    assert log.get_log(1) == LogEntry(1, (1 << 64) - 1, 200, bytes(1 << 20))


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.delete_range(1, 4.0),
        lambda log: log.delete_range(4.5, 9),
        lambda log: log.set_uint64(b"number", 1.5),
        lambda log: log.set_uint64(b"number", "1"),
        lambda log: log.store_log(LogEntry(10.0)),
    ],
)
def test_numbers_that_are_not_whole(log, tmp_path, change):
    """They are refused at once: in the meta store they would keep the log from being opened."""
    log.store_logs(entries(1, 9))
    with pytest.raises(InvalidInputError):
        change(log)
    log.store_log(LogEntry(10))
    log.close()
    with LocalLog(tmp_path / "log") as again:
        assert (again.first_index, again.last_index) == (1, 10)


def test_a_segment_size_that_is_not_whole(tmp_path):
    """Before anything is made: the next to open it could not read the state."""
    with pytest.raises(InvalidInputError, match="must be an integer"):
        LocalLog(tmp_path / "log", 64e6)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("kind", [256, 300, -1])
@pytest.mark.parametrize("count", [1, 8])
def test_a_type_has_one_byte(log, kind, count):
    """Types are 0 to 255, as in the Go library, whether entries are encoded singly or by columns;
    another one is rejected, and does not end the log."""
    last = [LogEntry(n, type=255) for n in range(200, 200 + count)]
    log.store_logs(last)
    after = last[-1].index + 1
    with pytest.raises(InvalidInputError, match="expected 0 to 255"):
        log.store_logs([LogEntry(after + n, type=kind) for n in range(count)])
    log.store_log(LogEntry(after, type=1))
    assert [entry.type for entry in log.entries()] == [255] * count + [1]
    with pytest.raises(InvalidInputError, match="expected 0 to 255"):
        LogEntry(after, type=kind).encode()


def test_opening_does_not_read_preallocated_space(tmp_path):
    """The bytes that an opening reads do not grow with the size of its segments."""
    read = {}
    for mib in (1, 10, 100):
        with LocalLog(tmp_path / str(mib), mib << 20) as log:
            log.store_logs(entries(1, 50))
        lengths = []
        files = FaultyFiles()
        query = files.query

        def counted(call, path, act, *arguments, query=query, lengths=lengths, **options):
            result = query(call, path, act, *arguments, **options)
            if call == "read":
                lengths.append(len(result))
            return result

        files.query = counted
        LocalLog(tmp_path / str(mib), mib << 20, files=files).close()
        read[mib] = sum(lengths)
    assert read[1] == read[10] == read[100] < 200_000


def test_a_file_system_that_misreports_holes_loses_nothing(tmp_path, monkeypatch):
    """Entries after an end of the data that is wrong are found, and nothing is dropped."""
    with LocalLog(tmp_path / "log", 1 << 20) as log:
        log.store_logs(entries(1, 200))
    for end in (0, 4096, 8192):
        monkeypatch.setattr(type(OS.open(str(tmp_path))), "data_end", lambda file, end=end: end)
        with LocalLog(tmp_path / "log", 1 << 20) as log:
            assert log.last_index == 200
            assert log.recovery.dropped_bytes == 0


def test_numbers_of_other_types(tmp_path):
    """Any integer type of Python is accepted, and stored as an integer."""
    with LocalLog(tmp_path, np.int64(4096)) as log:
        log.store_logs([LogEntry(np.int64(index)) for index in range(7, 20)])
        log.delete_range(np.int64(0), np.uint64(9))
        log.set_uint64(b"number", np.uint64(9))
    with LocalLog(tmp_path) as log:
        assert [entry.index for entry in log.entries()] == list(range(10, 20))
        assert log.get_uint64(b"number") == 9


def test_paths(tmp_path, monkeypatch):
    """Of text or bytes; an empty one is a variable that was not set, not the current directory."""
    with LocalLog(os.fsencode(tmp_path / "log")) as log:
        log.store_log(LogEntry(1))
        assert log.path == str(tmp_path / "log")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="path of the log is empty"):
        LocalLog("")
    assert os.listdir(tmp_path) == ["log"]


@pytest.mark.parametrize("segment_bytes", [1, 31, 48])
def test_segments_that_no_entry_fits_into(tmp_path, segment_bytes):
    """Each takes one batch, whatever its size, and is sealed by it."""
    with LocalLog(tmp_path, segment_bytes) as log:
        for index in range(1, 4):
            log.store_log(LogEntry(index, data=bytes(100)))
    assert len(list(tmp_path.glob("*.wal"))) == 4
    with LocalLog(tmp_path, segment_bytes) as log:
        log.delete_range(3, 3)
        assert [entry.index for entry in log.entries()] == [1, 2]
    with pytest.raises(InvalidInputError):
        LocalLog(tmp_path / "other", 0)


def test_one_write_and_one_sync_for_a_batch(tmp_path):
    """Whatever its size; also the batch that seals. Rotation comes after the return."""
    files = FaultyFiles()
    with LocalLog(tmp_path, 1 << 20, files=files) as log:
        log.store_log(LogEntry(1))
        for batch in (entries(2, 1), entries(3, 500)):
            files.calls.clear()
            log.store_logs(batch)
            name = "00000000000000000001-0000000000000000.wal"
            assert files.calls == [f"write {name}", f"sync {name}"]
    with LocalLog(tmp_path / "sealing", 4096, files=files) as log:
        log.store_log(LogEntry(1))
        gate, passed = threading.Event(), threading.Event()

        def hold(call, name):
            if call == "write" and name.startswith("wal-meta.db"):
                passed.set()
                gate.wait(60)

        files.before = hold
        log.store_logs(entries(2, 100))
        assert log.last_index == 101
        assert passed.wait(60), "the rotation is in progress, and the append has returned"
        assert log.get_log(101).index == 101
        gate.set()
        log.store_log(LogEntry(102))
        assert log._view.tail.info.base_index == 102


# --- truncation ---------------------------------------------------------------------


def test_a_removed_index_fails_at_once(log):
    """Better than the Go library: also after a truncation of the head within the tail."""
    log.store_logs(entries(1, 10))
    log.delete_range(1, 4)
    assert (log.first_index, log.last_index) == (5, 10)
    with pytest.raises(NotFoundError, match="it has 5 to 10"):
        log.get_log(4)
    assert log.get_log(5).index == 5


def test_truncations_that_do_nothing(log):
    """Empty ranges, and ranges outside of the log."""
    log.delete_range(1, 10)
    log.store_logs(entries(5, 5))
    for bounds in ((9, 8), (1, 4), (10, 99)):
        log.delete_range(*bounds)
        assert (log.first_index, log.last_index) == (5, 9)
    with pytest.raises(InvalidInputError, match="from the middle of a log"):
        log.delete_range(6, 8)


def test_truncated_files_go(log, tmp_path):
    """Their names too; readers that are under way read on."""
    for first in range(1, 101, 5):
        log.store_logs(entries(first, 5, 200))
    reading = log.entries()
    assert next(reading).index == 1
    before = len(list((tmp_path / "log").glob("*.wal")))
    log.delete_range(1, 90)
    assert len(list((tmp_path / "log").glob("*.wal"))) < before
    assert [entry.index for entry in reading] == list(range(2, 101))
    log.delete_range(96, 100)
    log.store_logs([LogEntry(96, 2)])
    assert [entry.term for entry in log.entries(94)] == [1, 1, 2]


# --- stable values ------------------------------------------------------------------


def test_stable_values(log, tmp_path):
    """Bytes and numbers; None removes, empty is kept; an empty key is refused."""
    assert log.get(b"no") is None
    assert log.get_uint64(b"no") == 0
    log.set(b"empty", b"")
    assert log.get(b"empty") == b""
    assert log.get_uint64(b"empty") == 0
    log.set_uint64(b"term", (1 << 64) - 2)
    log.set(b"odd", b"123")
    with pytest.raises(InvalidInputError, match="3 bytes"):
        log.get_uint64(b"odd")
    for key in (b"", b"x" * 32769):
        with pytest.raises(InvalidInputError):
            log.set(key, b"x")
    with pytest.raises(InvalidInputError):
        log.set_uint64(b"term", 1 << 64)
    log.set(b"odd", None)
    log.set(b"never", None)
    log.close()
    with LocalLog(tmp_path / "log") as again:
        assert again.get_uint64(b"term") == (1 << 64) - 2
        assert (again.get(b"odd"), again.get(b"empty")) == (None, b"")


# --- owners and threads -------------------------------------------------------------


def test_one_owner(log, tmp_path):
    """Neither this process nor another opens it again; after close anyone may."""
    with pytest.raises(ConflictError, match="already open"):
        LocalLog(tmp_path / "log")
    program = f"from reef.locallog import LocalLog; LocalLog({str(tmp_path / 'log')!r})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "ConflictError" in done.stderr
    log.close()
    log.close()
    with pytest.raises(ClosedError):
        log.store_log(LogEntry(1))
    with pytest.raises(ClosedError):
        log.get_log(1)
    assert "closed" in repr(log)
    subprocess.run(command, timeout=240, check=True)


def test_waiting_for_the_lock(log, tmp_path):
    """With a timeout, the next owner waits for the one before."""
    timer = threading.Timer(0.3, log.close)
    timer.start()
    with LocalLog(tmp_path / "log", lock_timeout_s=240) as again:
        assert again.last_index == 0
    timer.join()


def test_a_forked_child_may_not_write(log, tmp_path):
    """Nor does it hold the lock beyond its parent's close (H43)."""
    log.store_log(LogEntry(1))
    context = multiprocessing.get_context("fork")
    pipe, continue_ = context.Pipe(), context.Event()

    def child():
        try:
            log.store_log(LogEntry(2))
        except ClosedError as error:
            pipe[1].send(error.kind)
        continue_.wait(240)

    process = context.Process(target=child)
    process.start()
    assert pipe[0].recv() == ErrorKind.FORKED
    log.close()
    with LocalLog(tmp_path / "log") as again:
        assert again.last_index == 1
    continue_.set()
    process.join()
    with pytest.raises(InvalidInputError, match="cannot be pickled"):
        pickle.dumps(log)


def test_many_readers_during_appends(tmp_path):
    """Readers see whole entries up to the last one that was acknowledged, through rotations
    and truncations."""
    failures, done = [], threading.Event()
    with LocalLog(tmp_path, 8192) as log:
        log.store_logs(entries(1, 10))

        def read(number):
            while not done.is_set():
                last = log.last_index
                try:
                    assert log.get_log(last).data == b"%d" % last * 50
                    low = max(log.first_index, last - 50)
                    found = [entry.index for entry in log.entries(low)]
                    assert found[: last - low + 1] == list(range(low, last + 1))
                except NotFoundError:
                    assert log.first_index > 1, "only truncated entries may be missing"
                except BaseException as error:
                    failures.append(error)
                    return

        readers = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for reader in readers:
            reader.start()
        for first in range(11, 1011, 10):
            log.store_logs(entries(first, 10))
            if first % 200 == 11:
                log.delete_range(1, log.last_index - 100)
        done.set()
        for reader in readers:
            reader.join()
    assert not failures


# --- codecs -------------------------------------------------------------------------


class Reversed(BinaryCodec):
    """Writes everything backwards."""

    id = 1 << 20

    def encode(self, entry):
        return super().encode(entry)[::-1]

    def decode(self, data):
        return super().decode(data[::-1])


def test_another_codec(tmp_path):
    """It is called for every entry, its id is in the log, and no other one opens it."""
    with LocalLog(tmp_path, 4096, codec=Reversed()) as log:
        log.store_logs(entries(1, 100))
    (first, *_) = sorted(tmp_path.glob("*.wal"))
    assert first.read_bytes()[24:32] == (1 << 20).to_bytes(8, "little")
    assert b"100100" in b"".join(file.read_bytes() for file in tmp_path.glob("*.wal"))[::-1]
    with pytest.raises(InvalidInputError, match="written with codec 1048576, not 1"):
        LocalLog(tmp_path)
    with LocalLog(tmp_path, codec=Reversed()) as log:
        assert list(log.entries()) == entries(1, 100)


class Failing(BinaryCodec):
    """Raises what Reef has never heard of."""

    def decode(self, data):
        raise ZeroDivisionError("of the codec's own")


def test_a_codec_that_raises_is_damage(tmp_path):
    """An error of a codec names the entry."""
    with LocalLog(tmp_path, codec=Failing()) as log:
        log.store_logs(entries(1, 3))
        with pytest.raises(CorruptionError, match=r"entry 2: .*ZeroDivisionError"):
            log.get_log(2)


# --- damage -------------------------------------------------------------------------


def sealed_log(path):
    """Make a log with some sealed segments; return their files."""
    with LocalLog(path, 4096) as log:
        for first in range(1, 101, 5):
            log.store_logs(entries(first, 5))
    return sorted(path.glob("*.wal"))[:-1]


def test_a_lost_meta_store_is_not_a_new_log(tmp_path):
    """Better than the Go library, which would delete all segments."""
    before = sealed_log(tmp_path)
    os.unlink(tmp_path / "wal-meta.db")
    with pytest.raises(CorruptionError, match=r"wal-meta.db is missing, but there are"):
        LocalLog(tmp_path)
    assert all(file.exists() for file in before)


def test_a_lost_tail_that_was_truncated(tmp_path):
    """Entries removed from its head do not count for entries that come after its loss."""
    with LocalLog(tmp_path) as log:
        log.store_logs(entries(1, 9))
        log.delete_range(1, 5)
    (file,) = tmp_path.glob("*.wal")
    file.unlink()
    with LocalLog(tmp_path) as log:
        assert log.recovery.created_tail
        assert (log.first_index, log.last_index) == (0, 0)
        log.store_logs(entries(1, 2))
        assert (log.first_index, log.last_index) == (1, 2)


def test_no_thread_for_a_rotation(log):
    """The append that fills a segment has succeeded: then it turns to the next one by itself."""

    class Threadless(DeferredRuntime):
        def spawn(self, call, *, name):
            raise RuntimeError("can't start new thread")

    log._runtime = Threadless()
    log.store_logs(entries(1, 200))
    log.store_log(LogEntry(201))
    assert log._view.tail.info.base_index == 201
    assert [entry.index for entry in log.entries()] == list(range(1, 202))


def test_text_keys_are_utf8(log):
    """As keys are everywhere else."""
    log.set("Größe", b"1")
    log.set_uint64("term", 7)
    assert (log.get("Größe".encode()), log.get(b"term")) == (b"1", (7).to_bytes(8, "little"))
    assert log.get_uint64("term") == 7
    log.set(b"other", memoryview(b"bytes"))
    assert log.get("other") == b"bytes"


@pytest.mark.parametrize("number", [-1, (1 << 64) - 1, 1 << 64, 65537.0])
def test_codecs_whose_number_cannot_be_written(tmp_path, number):
    """Before anything is made."""
    codec = Reversed()
    codec.id = number
    with pytest.raises(InvalidInputError, match=r"codec id .* is out of range"):
        LocalLog(tmp_path / "log", codec=codec)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_an_opening_that_fails_lets_go(tmp_path, is_new):
    """A caller that keeps the error, to retry, does not keep the lock with it."""
    if not is_new:
        LocalLog(tmp_path).close()
    files = FaultyFiles()

    def fail(call, name):
        if (call, name) == ("sync", "directory"):
            raise OSError("the disk is away")

    files.before = fail
    with pytest.raises(UnavailableError) as kept:
        LocalLog(tmp_path, files=files)
    with LocalLog(tmp_path) as log:
        log.store_log(LogEntry(1))
    assert "the disk is away" in str(kept.value)


def test_a_closed_log_takes_nothing(log):
    """Not even no entries at all: who appends to it has lost track."""
    log.close()
    for taken in ([], entries(1, 1)):
        with pytest.raises(ClosedError):
            log.store_logs(taken)


def test_errors_of_the_system_are_reported(tmp_path):
    """A directory that cannot be one, and a read that fails, are errors of Reef's own."""
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="Not a directory"):
        LocalLog(tmp_path / "file" / "log")
    with LocalLog(tmp_path / "log") as log:
        log.store_log(LogEntry(1))
        log._view.tail.file.close()
        with pytest.raises(UnavailableError, match="Bad file descriptor"):
            log.get_log(1)
        with pytest.raises(UnavailableError, match="Bad file descriptor"):
            list(log.entries())


def test_a_missing_or_strange_segment_is_damage(tmp_path):
    """A sealed segment must be there; a name that is none stops the opening."""
    files = sealed_log(tmp_path)
    (tmp_path / "x.wal").touch()
    with pytest.raises(CorruptionError, match=r"x\.wal is not the name"):
        LocalLog(tmp_path)
    os.unlink(tmp_path / "x.wal")
    hidden = files[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match="is missing"):
        LocalLog(tmp_path)
    hidden.rename(files[1].with_name("00000000000000000002-" + files[1].name[21:]))
    with pytest.raises(CorruptionError, match="is named"):
        LocalLog(tmp_path)


@pytest.mark.parametrize("offset", [0, 8, 16, 24])
def test_a_damaged_header_of_a_sealed_segment(tmp_path, offset):
    """The opening compares it with the meta store."""
    file = sealed_log(tmp_path)[1]
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=file.name):
        LocalLog(tmp_path)


def test_reads_check_type_bounds_and_index(tmp_path):
    """A frame that is no entry, is too long, or is another entry, is never returned."""
    file = sealed_log(tmp_path)[0]
    whole = file.read_bytes()
    for offset, value in ((32, 3), (36, 200), (38, 1), (40, 9)):
        data = bytearray(whole)
        data[offset] = value
        file.write_bytes(data)
        with LocalLog(tmp_path) as log:
            with pytest.raises(CorruptionError, match="entry 1:"):
                log.get_log(1)
            with pytest.raises(CorruptionError, match="entry 1:"):
                list(log.entries())
            assert log.get_log(2).index == 2
    file.write_bytes(whole)


def test_a_newer_version_is_not_damage(tmp_path):
    """A segment of a later format raises an error with the hint to upgrade."""
    from reef.errors import UnsupportedFormatError

    file = sealed_log(tmp_path)[0]
    data = bytearray(file.read_bytes())
    data[7] = 1
    file.write_bytes(data)
    with pytest.raises(UnsupportedFormatError):
        LocalLog(tmp_path)


@pytest.mark.parametrize("which", ["sealed", "tail", "meta"])
def test_a_fifo_in_the_place_of_a_file_is_an_error(tmp_path, which):
    """Neither opening nor inspecting waits for the other end of a FIFO.

    Root: the open of a FIFO blocks without O_NONBLOCK, and a handle that holds the log's lock with
    it.
    """
    path = tmp_path / "log"
    with LocalLog(path, 4096) as log:
        log.store_logs(entries(1, 60))
        log.store_logs(entries(61, 1))
    segments = sorted(path.glob("*.wal"))
    target = {"sealed": segments[0], "tail": segments[-1], "meta": path / "wal-meta.db"}[which]
    target.unlink()
    os.mkfifo(target)
    code = (
        "import sys, reef.locallog, reef.errors\n"
        "try: reef.locallog.LocalLog(sys.argv[1])\n"
        "except reef.errors.UnavailableError as error: print(error)"
    )
    opened = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "not a regular file" in opened.stdout
    assert target.name in opened.stdout
    verified = subprocess.run(
        [sys.executable, "-m", "reef", "log", "verify", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert verified.returncode != 0
    assert "not a regular file" in verified.stderr
