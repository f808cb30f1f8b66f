"""H78: a full disk rejects writes at once; they succeed again when there is space."""

import errno
import logging
import time

import pytest

import reef
from reef.errors import ErrorKind, OutcomeUnknownError, UnavailableError
from reef.stores.local import LocalStore
from tests.support.faulty_files import FaultyFiles
from tests.support.proven_buckets import remember_probe

NAME = "users"


class Disk:
    """A file system that is full while `is_full`; small files may still fit."""

    def __init__(self):
        self.is_full = False
        self.fits = 0
        """How many files can be written although it is full."""
        self.files = FaultyFiles(before=self.check)

    def check(self, call, name):
        """Fail as the kernel does when a file grows."""
        if call == "append" and self.is_full:
            if self.fits:
                self.fits -= 1
            else:
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk():
    """Give a disk with space."""
    return Disk()


@pytest.fixture
def db(tmp_path, disk):
    """Give a database on that disk."""
    return open_on(disk, tmp_path)


def open_on(disk, path):
    """Open a bucket on a disk whose conditional writes are known to exclude."""
    store = LocalStore(str(path), files=disk.files)
    remember_probe(store)
    return reef.Database(store)


def test_H78_a_put_on_a_full_disk_fails_fast(db, disk, caplog):
    """It does not wait for the commit deadline, and there is a line in the log."""
    writer = db.writer(NAME, background=False, commit_deadline_s=30.0)
    writer.put("a", b"1")
    disk.is_full = True
    started_s = time.monotonic()
    with caplog.at_level(logging.ERROR, "reef"):
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                writer.put("b", b"2")
    assert time.monotonic() - started_s < 25
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert sum("commit.disk_full" in record.getMessage() for record in caplog.records) == 2
    assert writer.is_open
    assert dict(writer.scan()) == {b"a": b"1"}


@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H78_the_writer_recovers_when_there_is_space(db, disk, ack):
    """The same writer commits again, and the rejected rows never appear."""
    writer = db.writer(NAME, background=False, max_parallel_writes=4, ack=ack)
    for full in range(3):
        writer.put("a", b"%d" % full)
        disk.is_full = True
        with pytest.raises(UnavailableError):
            writer.put("rejected", b"x", idempotency_key=f"key-{full}")
        disk.is_full = False
    assert writer.put("c", b"3", idempotency_key="key-0").ops == 1
    expected = {b"a": b"2", b"c": b"3"}
    assert dict(writer.scan()) == dict(db.reader(NAME).scan()) == expected
    writer.close()
    with db.writer(NAME, background=False) as after:
        assert dict(after.scan()) == expected


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H78_writes_behind_a_rejected_one(db, disk, ack, fits):
    """Each future has a result that is true of the log, whichever of the writes found space."""
    writer = db.writer(
        NAME, background=False, max_parallel_writes=4, ack=ack, group_window_ms=0, group_bytes_max=1
    )
    writer.put("first", b"0")
    disk.is_full, disk.fits = True, fits
    futures = {f"k{n}": writer.put(f"k{n}", b"%d" % n, wait=False) for n in range(12)}
    errors = {key: future.exception(60) for key, future in futures.items()}
    failed = {key for key, error in errors.items() if error is not None}
    assert failed
    # A write that landed behind an open slot: it is decided when the slot is filled.
    unknown = {key for key in failed if isinstance(errors[key], OutcomeUnknownError)}
    assert all(errors[key].kind is ErrorKind.DISK_FULL for key in failed - unknown)
    assert len(unknown) <= fits
    assert writer.is_open
    with pytest.raises(UnavailableError):
        writer.put("rejected", b"")
    disk.is_full = False
    writer.put("last", b"9")
    committed = {"first", "last", *futures} - failed
    committed |= {key for key in unknown if writer.resolve(errors[key]) == "committed"}
    assert {key.decode() for key, _ in writer.scan()} == committed
    assert {key.decode() for key, _ in db.reader(NAME).scan()} == committed
    if ack == "prefix":  # no write counts without those before it
        done = [key in committed for key in futures]
        assert done == sorted(done, reverse=True)


def test_H78_a_gap_in_the_log_is_filled(db, disk):
    """A write that found space behind one that did not is void, and the log stays contiguous."""
    writer = db.writer(NAME, background=False, max_parallel_writes=2, group_window_ms=0)
    committer = writer._committer
    send, held = committer._sender.log.fill, []

    def second_lands(lsn, body):
        if not held:
            held.append(lsn)
            deadline = time.monotonic() + 60
            while len(committer._inflight) < 2 or committer._inflight[1].response is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            raise UnavailableError("no space", kind=ErrorKind.DISK_FULL)
        return send(lsn, body)

    object.__setattr__(committer._sender, "log", _Log(committer.log, second_lands))
    first = writer.put("a", b"1", wait=False)
    while not held:
        time.sleep(0.001)
    second = writer.put("b", b"2", wait=False)
    for future in (first, second):
        with pytest.raises(UnavailableError):
            future.result(60)
    assert writer.put("c", b"3").lsn == held[0] + 2
    assert dict(writer.scan()) == dict(db.reader(NAME).scan()) == {b"c": b"3"}
    kinds = [entry.header.kind.value for entry in committer.log.read_many([held[0], held[0] + 1])]
    assert kinds == ["skip", "batches"]


class _Log:
    """The log, with another `fill`."""

    def __init__(self, log, fill):
        self._log, self.fill = log, fill

    def __getattr__(self, name):
        return getattr(self._log, name)


def test_H78_uploads_of_a_local_log_wait_for_space(tmp_path, disk):
    """Acknowledged writes are on the local disk: the upload continues when the bucket has space."""
    db = open_on(disk, tmp_path / "bucket")
    writer = db.writer(
        NAME,
        background=False,
        durability="local",
        local_log=tmp_path / "log",
        upload_interval_ms=1,
    )
    disk.is_full = True
    receipt = writer.put("a", b"1")
    time.sleep(0.3)
    assert writer.pending.batches == 1
    disk.is_full = False
    assert receipt.wait(60)
    writer.close()
    assert dict(db.reader(NAME).scan()) == {b"a": b"1"}
