"""The directory store where it is easy to be wrong: forks, foreign files, failing disks."""

import errno
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, UnavailableError
from reef.files import OS, SyncFailed
from reef.stores import Outcome, RetryPolicy
from reef.stores.local import LocalStore
from tests.support.child_process import in_child
from tests.support.faulty_files import FaultyFiles, FixedStat

QUICK = RetryPolicy(attempts_max=3, deadline_s=1.0, first_delay_s=0.001)
CHILD_S = 60
"""How long a forked child lives: longer than any put takes that does not wait for it."""


@pytest.fixture
def store(tmp_path):
    """Give a store in an empty directory."""
    return LocalStore(str(tmp_path))


class Scripted(type(OS)):
    """Real system calls, some of which fail as configured: {method: [error, …]}."""

    def __init__(self, **failures):
        self.failures = failures

    def _maybe(self, method):
        if self.failures.get(method):
            error = self.failures[method].pop(0)
            if error is not None:
                raise error

    def link(self, source, target):
        self._maybe("link")
        super().link(source, target)
        self._maybe("link_after")

    def rename(self, source, target):
        super().rename(source, target)
        self._maybe("rename_after")

    def sync_directory(self, path):
        self._maybe("sync_directory")
        super().sync_directory(path)


def eio():
    """Return the error of a failing disk."""
    return OSError(errno.EIO, "Input/output error")


def refused():
    """Return the error of a sync that the disk refused."""
    return SyncFailed(errno.EIO, "Input/output error")


def still_lives(child):
    """Return whether a child has not ended yet; it has afterwards."""
    has_not_ended = os.waitpid(child, os.WNOHANG) == (0, 0)
    if has_not_ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return has_not_ended


def test_H51_a_fork_while_a_lock_is_held_blocks_no_process(tmp_path):
    """H51: the child does not inherit the lock, and does not keep it from the parent."""
    held, let_go = threading.Event(), threading.Event()

    class Slow(type(OS)):
        def rename(self, source, target):
            held.set()
            let_go.wait(120)
            super().rename(source, target)

    slow = LocalStore(str(tmp_path), files=Slow())
    writer = threading.Thread(target=lambda: slow.put("k", b"slow"))
    writer.start()
    held.wait()
    child = os.fork()
    if child == 0:
        time.sleep(CHILD_S)
        os._exit(0)
    let_go.set()
    writer.join()
    LocalStore(str(tmp_path)).put("k", b"parent")
    assert still_lives(child), "the put has waited for it"


def test_H51_a_forked_child_can_acquire_a_lock_its_parent_held(tmp_path):
    """H51: in the child the lock has no owner."""
    store = LocalStore(str(tmp_path))
    store.put("k", b"old")
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with store._directory.locked("k"):
            held.set()
            let_go.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(0.5, let_go.set).start()
    code, _ = in_child(lambda: store.put("k", b"child"))
    thread.join()
    assert code == 0
    assert store.get("k") == b"child"


def test_a_clash_is_forgotten_when_it_is_gone(store):
    """`a/b` is refused while `a` is an object, and accepted once it is not."""
    store.create("a", b"object")
    with pytest.raises(InvalidInputError):
        store.create("a/b", b"x")
    store.delete("a")
    assert store.create("a/b", b"x").landed


def test_a_directory_that_vanished_is_made_again(store, tmp_path):
    """Between two creates someone removed the folder, and `.tmp`, and the locks."""
    store.create("wal/1", b"x")
    (tmp_path / "wal" / "1").unlink()
    (tmp_path / "wal").rmdir()
    assert store.create("wal/2", b"x").landed
    (tmp_path / ".tmp").rmdir()
    assert store.create("wal/3", b"x").landed
    store.put("k", b"x")
    for lock in (tmp_path / ".locks").iterdir():
        lock.unlink()
    (tmp_path / ".locks").rmdir()
    store.put("k", b"y")
    store.delete("k")
    assert [info.key for info in store.list()] == ["wal/2", "wal/3"]


def test_deleting_a_name_that_only_holds_others(store):
    """A directory is no object: deleting its name is like deleting nothing."""
    store.put("a/b", b"x")
    store.put("z", b"x")
    store.delete_many(["a", "a/b/c", "z"])
    assert [info.key for info in store.list()] == ["a/b"]


def test_foreign_files_do_not_break_a_listing(store, tmp_path):
    """Names that cannot be keys, pipes and links are passed over."""
    store.put("a/b", b"x")
    (tmp_path / "new\nline").write_text("x")
    (tmp_path / "back\\slash").write_text("x")
    (tmp_path / os.fsdecode(b"not-utf8-\xff")).write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "elsewhere").symlink_to("/etc")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert [info.key for info in store.list()] == ["a/b"]
    with pytest.raises(KeyError):
        store.get("pipe")
    assert list(store.list(".tmp/")) == []


def test_the_callers_own_error_comes_out_of_an_upload(store):
    """An OSError of the source is the caller's, not the store's."""

    def parts():
        yield b"x"
        raise FileNotFoundError("the source")

    with pytest.raises(FileNotFoundError, match="the source"):
        store.upload("k", parts())
    assert list(store.list()) == []


@pytest.mark.parametrize("when", ["link", "link_after"])
def test_a_link_that_fails_oddly_is_an_unknown_outcome(tmp_path, when):
    """On a network file system it may have taken effect; the full stack then settles it."""
    store = LocalStore(str(tmp_path), files=Scripted(**{when: [eio()]}))
    assert store.create("k", b"x").outcome is Outcome.UNKNOWN
    retried = stores.ReadBack(store).create("k", b"x")
    assert retried.outcome is Outcome.CREATED
    assert store.get("k") == b"x"


def test_a_rename_that_fails_oddly_is_an_unknown_outcome(tmp_path):
    """The same for If-Match."""
    tag = LocalStore(str(tmp_path)).put("k", b"old")
    store = LocalStore(str(tmp_path), files=Scripted(rename_after=[eio()]))
    assert store.replace("k", b"new", tag).outcome is Outcome.UNKNOWN
    assert store.get("k") == b"new"


def test_a_directory_whose_sync_failed_is_never_vouched_for_again(tmp_path):
    """After a failed fsync a later success proves nothing: the outcome stays unknown."""
    LocalStore(str(tmp_path)).create("wal/0", b"x")
    files = Scripted(sync_directory=[])
    store = LocalStore(str(tmp_path), files=files)
    store.create("wal/1", b"x")
    files.failures["sync_directory"] = [refused()]
    assert store.create("wal/2", b"x").outcome is Outcome.UNKNOWN
    assert store.create("wal/2", b"x").outcome is Outcome.UNKNOWN
    assert store.create("wal/3", b"x").outcome is Outcome.UNKNOWN
    assert LocalStore(str(tmp_path)).create("wal/3", b"x").outcome is Outcome.UNKNOWN
    assert store.create("other/1", b"x").outcome is Outcome.CREATED


def test_a_directory_that_was_recreated_is_trusted_again(tmp_path):
    """The refusal belongs to the old directory, not to its name."""
    files = Scripted()
    store = LocalStore(str(tmp_path), files=files)
    store.create("wal/1", b"x")
    files.failures["sync_directory"] = [refused()]
    assert store.create("wal/2", b"x").outcome is Outcome.UNKNOWN
    (tmp_path / "elsewhere").mkdir()  # takes the next inode, so that the old one is not reused
    for name in ("1", "2"):
        (tmp_path / "wal" / name).unlink()
    (tmp_path / "wal").rename(tmp_path / "old")
    assert store.create("wal/3", b"x").outcome is Outcome.CREATED


def test_a_sync_that_was_not_even_tried_poisons_nothing(tmp_path):
    """Too many open files: this outcome is unknown, the next one is not."""
    files = Scripted()
    store = LocalStore(str(tmp_path), files=files)
    store.create("wal/1", b"x")
    files.failures["sync_directory"] = [OSError(errno.EMFILE, "Too many open files")]
    assert store.create("wal/2", b"x").outcome is Outcome.UNKNOWN
    assert store.create("wal/3", b"x").outcome is Outcome.CREATED


def test_a_refused_sync_of_a_new_directorys_parent_is_final(tmp_path):
    """The directory's own name may not last, so nothing below it is vouched for."""
    LocalStore(str(tmp_path)).create("k", b"x")
    files = Scripted()
    store = LocalStore(str(tmp_path), files=files)
    store.create("k2", b"x")
    files.failures["sync_directory"] = [refused()]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            store.create("wal/1", b"x")
    assert stores.ReadBack(store, QUICK).create("k3", b"x").outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("method", ["put", "upload"])
def test_what_may_not_last_is_not_acknowledged(tmp_path, method):
    """The object is visible with its full size; that proves nothing, and raises."""
    files = Scripted()
    store = LocalStore(str(tmp_path), files=files)
    store.put("seg/0", b"x")
    files.failures["sync_directory"] = [refused()]
    full = stores.ReadBack(stores.Retry(store, QUICK), QUICK)
    body = b"abc" if method == "put" else [b"abc"]
    with pytest.raises(UnavailableError) as caught:
        getattr(full, method)("seg/1", body)
    assert caught.value.kind is ErrorKind.NOT_DURABLE


def test_a_link_that_a_network_asked_for_twice_is_ours(tmp_path):
    """The first try landed, the second says "exists": the inode shows that it is our own."""

    class Twice(type(OS)):
        def link(self, source, target):
            super().link(source, target)
            super().link(source, target)

        def rename(self, source, target):
            super().rename(source, target)
            super().rename(source, target)

    store = LocalStore(str(tmp_path), files=Twice())
    assert store.create("k", b"x").outcome is Outcome.CREATED
    tag = store.get_tagged("k").tag
    assert store.replace("k", b"y", tag).outcome is Outcome.REPLACED
    assert LocalStore(str(tmp_path)).create("k", b"z").outcome is Outcome.EXISTS


def test_a_file_system_that_cannot_copy(tmp_path, monkeypatch):
    """The bytes go through Python then."""

    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "copy_file_range", cannot)
    store = LocalStore(str(tmp_path))
    store.put("a", bytes(range(256)) * 10_000)
    store.copy("a", "b")
    assert store.get("b") == store.get("a")


def test_H51_a_fork_between_opening_and_noting_a_lock(tmp_path, monkeypatch):
    """H51: the child shares a file that was not registered; the lock is released all the same."""
    store = LocalStore(str(tmp_path))
    store.put("k", b"old")
    children = []
    really_open = os.open

    def open_and_fork(path, *arguments, **options):
        fd = really_open(path, *arguments, **options)
        if "/.locks/" in str(path) and not children:
            children.append(os.fork())
            if children[0] == 0:
                time.sleep(CHILD_S)
                os._exit(0)
        return fd

    monkeypatch.setattr(os, "open", open_and_fork)
    store.put("k", b"first")
    store.put("k", b"second")
    assert still_lives(children[0]), "the second put has waited for it"


def test_a_lock_that_cannot_be_had_leaves_no_open_file(tmp_path, monkeypatch):
    """An error of flock() does not use up file numbers."""
    import fcntl

    store = LocalStore(str(tmp_path))
    store.put("k", b"x")
    before = open_below(tmp_path)
    really_lock = fcntl.flock

    def fails(fd, how):
        if how == fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, "No locks available")
        return really_lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", fails)
    for _ in range(5):
        with pytest.raises(UnavailableError):
            store.put("k", b"y")
    assert open_below(tmp_path) == before


def open_below(folder):
    """Return the paths below a folder that this process has open."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, or one that another thread has closed
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in paths if path.startswith(str(folder)))


def test_a_short_file_raises(tmp_path):
    """H8: a file that ends while it is read is an error, not a short object."""

    path = tmp_path / "k"

    class Shrinking(type(OS)):
        def open(self, path, **options):
            file = super().open(path, **options)
            stat = file.stat()
            os.truncate(path, 8)
            return FixedStat(file, stat)

    LocalStore(str(tmp_path)).put("k", bytes(100))
    with pytest.raises(UnavailableError, match="expected 100 bytes, received 8"):
        LocalStore(str(tmp_path), files=Shrinking()).get("k")
    assert path.stat().st_size == 8


def test_deletes_and_replaces_exclude_each_other(tmp_path):
    """A delete during a replace waits, and then deletes the new object."""
    renaming = threading.Event()

    class Slow(type(OS)):
        def rename(self, source, target):
            renaming.set()
            time.sleep(0.3)
            super().rename(source, target)

    store = LocalStore(str(tmp_path))
    tag = store.put("k", b"old")
    slow = LocalStore(str(tmp_path), files=Slow())
    replacing = threading.Thread(target=lambda: slow.replace("k", b"new", tag))
    replacing.start()
    renaming.wait()
    store.delete("k")
    replacing.join()
    assert list(store.list()) == [], "the replace brought a deleted object back"


def test_H51_a_parent_that_is_killed_leaves_no_lock_to_its_child(tmp_path):
    """H51: a child that was forked while its parent held a lock does not keep it for the dead."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        held = threading.Event()

        def hold():
            with LocalStore(str(tmp_path))._directory.locked("k"):
                held.set()
                time.sleep(3 * CHILD_S)

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            time.sleep(CHILD_S)
            os._exit(0)
        os.write(writing, f"{child}".encode())
        time.sleep(3 * CHILD_S)
    os.close(writing)
    child = int(os.read(reading, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    LocalStore(str(tmp_path)).put("k", b"next")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # at its end if the child, and so the put, had waited
        os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.close(reading)


def test_an_object_deleted_during_its_copy_is_not_copied(tmp_path):
    """A copy that lands after the source is gone would bring back an object that was deleted."""

    def delete(call, name):
        if call == "copy":
            LocalStore(str(tmp_path)).delete("source")

    plain = LocalStore(str(tmp_path))
    plain.put("source", b"bytes")
    with pytest.raises(NotFoundError) as caught:
        LocalStore(str(tmp_path), files=FaultyFiles(after=delete)).copy("source", "target")
    assert caught.value.context["object"] == "source"
    assert list(plain.list()) == []


def test_a_lock_file_that_was_removed_before_it_was_locked_is_void(tmp_path):
    """The holder of a removed file excludes no other process, so the path is opened again."""
    path = tmp_path / "lock"

    class Removing(type(OS)):
        opened = 0

        def open_or_create(self, path):
            file = super().open_or_create(path)
            self.opened += 1
            if self.opened == 1:
                os.unlink(path)
            return file

    files = Removing()
    with files.locked(str(path)):
        other = OS.open(str(path))
        assert not other.try_lock()
    assert other.try_lock()
    assert files.opened == 2
