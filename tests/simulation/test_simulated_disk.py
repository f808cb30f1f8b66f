"""The simulated disk is as nasty as a real one: everything unsynced can be lost, in any part."""

import errno
import random

import pytest

from reef.testing.disk import SimulatedDisk
from reef.testing.power_failures import crashes, random_crash


def contents(disk, done=None):
    """Return the contents of file /a that a power failure may leave, after all steps or some."""
    found = {}
    for step, content in crashes(disk):
        found.setdefault(step, set()).add(content.get("/a"))
    return found[len(disk.trace) if done is None else done]


def named_file(data=b""):
    """Return a disk with a durable file /a, open for writing."""
    disk = SimulatedDisk({"/a": data})
    return disk, disk.open("/a", writable=True)


def test_a_synced_file_without_a_synced_name_can_be_lost():
    """Bytes and names are made durable by different calls."""
    disk = SimulatedDisk()
    file = disk.create("/a")
    file.append(b"abc")
    file.sync()
    assert contents(disk) == {None, b"abc"}
    disk.sync_directory("/")
    assert contents(disk) == {b"abc"}


def test_a_durable_name_without_durable_bytes():
    """The name leads to a file of which every part can be missing."""
    disk = SimulatedDisk()
    file = disk.create("/a")
    disk.sync_directory("/")
    file.append(b"abc")
    kept = {b"", b"a", b"ab", b"abc", b"\0bc", b"\0\0c", b"a\0c", b"ab\0"}
    assert contents(disk) == kept
    file.sync_data()
    assert contents(disk) == {b"abc"}


def test_writes_are_reordered():
    """The second write can be durable without the first; a new size with or without either."""
    disk, file = named_file()
    file.resize(3)
    file.write(b"x", 0)
    file.write(b"y", 1)
    assert contents(disk) >= {b"", b"\0\0\0", b"x", b"\0y", b"\0y\0", b"xy\0"}


def test_a_rename_is_not_atomic_before_the_sync():
    """Each of its two names is kept or lost alone; after the sync only the new one is left."""
    disk = SimulatedDisk({"/a": b"old", "/b": b"new"})
    disk.rename("/b", "/a")
    left = {tuple(sorted(content.items())) for done, content in crashes(disk) if done == 2}
    assert left == {
        (("/a", b"new"), ("/b", b"new")),
        (("/a", b"new"),),
        (("/a", b"old"), ("/b", b"new")),
        (("/a", b"old"),),
    }
    disk.sync_directory("/")
    assert {tuple(content) for done, content in crashes(disk) if done == 3} == {("/a",)}


def test_a_directory_can_lose_its_own_name():
    """Files below it are then lost, although they and their names were synced."""
    disk = SimulatedDisk()
    disk.make_directory("/d")
    file = disk.create("/d/a")
    file.append(b"abc")
    file.sync()
    disk.sync_directory("/d")
    last = len(disk.trace)
    assert [content for done, content in crashes(disk, last)] == [{}, {"/d/a": b"abc"}]
    disk.make_directories("/d")
    assert any(step.kind == "sync names" for step in disk.trace)


def test_an_unlinked_name_comes_back_before_the_sync():
    """A removal is a change of a directory like any other."""
    disk = SimulatedDisk({"/a": b"abc"})
    disk.unlink("/a")
    assert contents(disk) == {None, b"abc"}
    disk.sync_directory("/")
    assert contents(disk) == {None}


def fail(*calls):
    """Return a hook under which these calls fail."""

    def before(call, path):
        if call in calls:
            raise OSError(errno.EIO, "Input/output error")

    return before


def test_a_sync_that_succeeds_after_a_failed_one_proves_nothing():
    """The kernel marks the pages clean when a sync fails: only writing them again helps."""
    disk, file = named_file()
    file.write(b"ab", 0)
    disk.before = fail("sync")
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    disk.before = None
    file.sync()
    assert file.read(2, 0) == b"ab"
    assert contents(disk) == {b"", b"a", b"a\0", b"\0b", b"ab"}
    file.write(b"b", 1)
    file.sync()
    assert contents(disk) == {b"\0b", b"ab"}
    file.write(b"a", 0)
    file.sync()
    assert contents(disk) == {b"ab"}


def test_names_whose_sync_failed_can_be_lost_after_a_later_sync():
    """The same for names; a name that is written again is durable with its next sync."""
    disk, _ = named_file(b"old")
    file = disk.create("/new")
    file.append(b"new")
    file.sync()
    disk.rename("/new", "/a")
    disk.before = fail("syncdir")
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_directory("/")
    disk.before = None
    disk.sync_directory("/")
    assert contents(disk) == {b"old", b"new"}
    disk.unlink("/a")
    disk.sync_directory("/")
    assert contents(disk) == {None}


def test_random_crashes_are_among_all_crashes_and_garbage():
    """Each step is kept, lost or torn; the bytes of a torn one may be garbage."""
    disk, file = named_file(b"0000")
    file.write(b"12", 0)
    file.write(b"34", 2)
    rng, everything = random.Random(1), contents(disk)
    found = {random_crash(disk, rng.randrange, len(disk.trace))[1]["/a"] for _ in range(300)}
    assert len(found & everything) > 6
    assert found - everything, "no garbage"
    assert {data[:2] for data in found} >= {b"00", b"12", b"10", b"02"}


def test_a_power_failure_keeps_synced_state_and_ends_all_locks():
    """The disk itself is put into one of the states; the trace starts again from there."""
    disk, file = named_file(b"abc")
    assert file.try_lock()
    file.write(b"X", 0)
    file.sync()
    file.write(b"Y", 1)
    disk.power_failure(lambda _: 0)
    assert disk.content() == {"/a": b"Xbc"}
    assert disk.trace == []
    again = disk.open("/a", writable=True)
    assert again.try_lock()
    again.write(b"Z", 2)
    assert contents(disk) == {b"Xbc", b"XbZ", b"Xb\0"}


def test_an_mtime_is_durable_with_a_sync_of_all_metadata_only():
    """sync_data leaves out the timestamps, as fdatasync(2) does."""
    for sync, kept in (("sync", 5), ("sync_data", 0)):
        disk, file = named_file(b"abc")
        file.set_mtime(5)
        getattr(file, sync)()
        disk.power_failure(lambda count: count - 1)
        assert disk.stat("/a").mtime_ns == kept


def test_a_full_disk():
    """Writes, appends and reservations fail with ENOSPC; bytes that have their room do not."""
    disk = SimulatedDisk({"/a": b"abc"}, bytes_max=5)
    file = disk.open("/a", writable=True)
    file.write(b"XYZ", 0)
    file.preallocate(5)
    file.write(b"12", 3)
    other = disk.create("/b")
    for call in (
        lambda: file.write(b"1", 5),
        lambda: file.preallocate(6),
        lambda: other.append(b"1"),
        lambda: other.copy_from(file, 1),
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    disk.unlink("/a")
    other.append(b"12345")
    assert disk.content() == {"/b": b"12345"}
