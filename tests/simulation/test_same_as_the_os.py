"""The same file calls, on a real directory and on the simulated disk, come to the same end."""

import errno
import sys

import pytest

from reef.files import OS
from reef.testing import SimulatedDisk, SimulatedFiles, Simulation
from reef.testing.runtime import SeededChoices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the errors are Linux's")


def _write(files, path, data=b"x"):
    """Make a file and leave it open for writing."""
    fd = files.create(path)
    fd.append(data)
    return fd


def _file(files, path, data=b"x"):
    _write(files, path, data).close()


def _reader(files, path, data=b"x"):
    _file(files, path, data)
    return files.open(path)


class Programs:
    """Small programs, named by their purpose; their results and errors are compared."""

    def read_after_unlink(self, files, root):
        fd = _reader(files, f"{root}/a", b"abc")
        files.unlink(f"{root}/a")
        return fd.read(10, 1), files.scan(root)

    def read_after_rename_over(self, files, root):
        fd = _reader(files, f"{root}/a", b"old")
        _file(files, f"{root}/b", b"longer")
        files.rename(f"{root}/b", f"{root}/a")
        return fd.read(10, 0), files.stat(f"{root}/a").size, files.scan(root)

    def rename_between_two_names_of_one_file(self, files, root):
        _file(files, f"{root}/a")
        files.link(f"{root}/a", f"{root}/b")
        files.rename(f"{root}/a", f"{root}/b")
        return sorted(files.scan(root))

    def rename_onto_itself(self, files, root):
        _file(files, f"{root}/a")
        files.rename(f"{root}/a", f"{root}/a")
        return files.scan(root)

    def rename_file_onto_directory(self, files, root):
        files.make_directory(f"{root}/d")
        _file(files, f"{root}/a")
        files.rename(f"{root}/a", f"{root}/d")

    def rename_directory_onto_file(self, files, root):
        files.make_directory(f"{root}/d")
        _file(files, f"{root}/a")
        files.rename(f"{root}/d", f"{root}/a")

    def rename_directory_onto_full_one(self, files, root):
        files.make_directory(f"{root}/d")
        files.make_directory(f"{root}/e")
        _file(files, f"{root}/e/a")
        files.rename(f"{root}/d", f"{root}/e")

    def rename_directory_onto_empty_one(self, files, root):
        files.make_directory(f"{root}/d")
        files.make_directory(f"{root}/e")
        _file(files, f"{root}/d/a")
        files.rename(f"{root}/d", f"{root}/e")
        return files.scan(root), files.scan(f"{root}/e")

    def rename_directory_into_itself(self, files, root):
        files.make_directory(f"{root}/d")
        files.rename(f"{root}/d", f"{root}/d/e")

    def rename_missing(self, files, root):
        files.rename(f"{root}/a", f"{root}/b")

    def rename_into_missing_directory(self, files, root):
        _file(files, f"{root}/a")
        files.rename(f"{root}/a", f"{root}/d/a")

    def unlink_directory(self, files, root):
        files.make_directory(f"{root}/d")
        files.unlink(f"{root}/d")

    def unlink_directory_erases_nothing(self, files, root):
        files.make_directory(f"{root}/d")
        with pytest.raises(IsADirectoryError):
            files.unlink(f"{root}/d")
        return files.scan(root)

    def unlink_missing(self, files, root):
        files.unlink(f"{root}/a")

    def link_directory(self, files, root):
        files.make_directory(f"{root}/d")
        files.link(f"{root}/d", f"{root}/e")

    def link_missing(self, files, root):
        files.link(f"{root}/a", f"{root}/b")

    def link_onto_taken_name(self, files, root):
        _file(files, f"{root}/a")
        _file(files, f"{root}/b")
        files.link(f"{root}/a", f"{root}/b")

    def link_below_file(self, files, root):
        _file(files, f"{root}/a")
        files.link(f"{root}/a", f"{root}/a/b")

    def create_taken(self, files, root):
        _file(files, f"{root}/a")
        files.create(f"{root}/a")

    def open_missing(self, files, root):
        files.open(f"{root}/a")

    def stat_below_file(self, files, root):
        _file(files, f"{root}/a")
        files.stat(f"{root}/a/b")

    def make_directory_on_taken_name(self, files, root):
        _file(files, f"{root}/a")
        files.make_directory(f"{root}/a")

    def make_directory_below_missing(self, files, root):
        files.make_directory(f"{root}/d/e")

    def scan_file(self, files, root):
        _file(files, f"{root}/a")
        files.scan(f"{root}/a")

    def scan_missing(self, files, root):
        files.scan(f"{root}/a")

    def sync_directory_of_file(self, files, root):
        _file(files, f"{root}/a")
        files.sync_directory(f"{root}/a")

    def sync_directory_missing(self, files, root):
        files.sync_directory(f"{root}/a")

    def close_twice(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.close()
        fd.close()

    def write_to_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.close()
        fd.append(b"x")

    def stat_and_sync_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.close()
        return [_end(call) for call in (fd.stat, fd.size, fd.sync, fd.sync_data, fd.close)]

    def read_resize_and_lock_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.close()
        calls = (lambda: fd.read(1, 0), lambda: fd.resize(5), lambda: fd.preallocate(5))
        return [_end(call) for call in (*calls, fd.try_lock)]

    def set_mtime_of_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.close()
        fd.set_mtime(5)

    def read_a_file_open_for_writing(self, files, root):
        return _write(files, f"{root}/a").read(1, 0)

    def write_to_a_file_open_for_reading(self, files, root):
        _reader(files, f"{root}/a").append(b"x")

    def read_directory(self, files, root):
        files.open(root).read(1, 0)

    def copy_in_pieces(self, files, root):
        source, target = _reader(files, f"{root}/a", b"abcdef"), files.create(f"{root}/b")
        copied = [target.copy_from(source, length) for length in (2, 10, 10)]
        return copied, target.stat().size

    def copy_from_a_file_open_for_writing(self, files, root):
        return files.create(f"{root}/b").copy_from(_write(files, f"{root}/a"), 1, 0)

    def copy_to_a_file_open_for_reading(self, files, root):
        _reader(files, f"{root}/b").copy_from(_reader(files, f"{root}/a"), 1)

    def copy_from_directory(self, files, root):
        files.create(f"{root}/b").copy_from(files.open(root), 1)

    def stamps(self, files, root):
        fd = _write(files, f"{root}/a")
        fd.set_mtime(5)
        files.link(f"{root}/a", f"{root}/b")
        set_to = fd.stat().mtime_ns
        fd.append(b"y")
        same = fd.stat().inode == files.stat(f"{root}/b").inode
        return set_to, fd.stat().mtime_ns == 5, same

    def directories_have_stamps(self, files, root):
        files.make_directory(f"{root}/d")
        found = files.stat(f"{root}/d")
        return found.is_directory, found.ctime_ns > 0, found.mtime_ns > 0

    def write_at_offsets(self, files, root):
        fd = _write(files, f"{root}/a", b"abc")
        fd.write(b"XY", 1)
        fd.write(b"Z", 6)
        fd.append(b"d")  # where the last append ended
        return fd.read(100, 0), fd.size()

    def read_past_the_end(self, files, root):
        fd = _write(files, f"{root}/a", b"abc")
        return fd.read(10, 1), fd.read(10, 3), fd.read(10, 50), fd.read(0, 0)

    def resize_both_ways(self, files, root):
        fd = _write(files, f"{root}/a", b"abcdef")
        fd.resize(3)
        fd.resize(5)
        return fd.read(100, 0), files.stat(f"{root}/a").size

    def preallocate_never_shrinks(self, files, root):
        fd = _write(files, f"{root}/a", b"abc")
        fd.preallocate(2)
        fd.preallocate(6)
        return fd.read(100, 0)

    def write_at_a_file_open_for_reading(self, files, root):
        _reader(files, f"{root}/a").write(b"x", 0)

    def resize_a_file_open_for_reading(self, files, root):
        return _end(_reader(files, f"{root}/a").resize, 1) is not None

    def open_directory_for_writing(self, files, root):
        files.open(root, writable=True)

    def open_for_writing_and_reading(self, files, root):
        _file(files, f"{root}/a", b"abc")
        fd = files.open(f"{root}/a", writable=True)
        fd.write(b"X", 1)
        return fd.read(10, 0)

    def open_or_create_twice(self, files, root):
        files.open_or_create(f"{root}/a").append(b"abc")
        return files.open_or_create(f"{root}/a").read(10, 0), files.scan(root)

    def same_file_after_rename_over(self, files, root):
        fd = _write(files, f"{root}/a")
        _file(files, f"{root}/b")
        before = files.same_file(fd, f"{root}/a")
        files.rename(f"{root}/b", f"{root}/a")
        return before, files.same_file(fd, f"{root}/a"), files.same_file(fd, f"{root}/c")

    def make_directories_twice(self, files, root):
        for _ in range(2):
            files.make_directories(f"{root}/d/e/f")
        return files.scan(f"{root}/d/e"), files.exists(f"{root}/d"), files.exists(f"{root}/x")

    def make_directories_on_file(self, files, root):
        _file(files, f"{root}/a")
        files.make_directories(f"{root}/a")

    def try_lock_of_two_open_files(self, files, root):
        first, second = _write(files, f"{root}/a"), files.open(f"{root}/a")
        locked = [first.try_lock(), second.try_lock()]
        first.close()
        return [*locked, second.try_lock()]

    def lock_of_an_open_directory(self, files, root):
        first, second = files.open(root), files.open(root)
        return first.try_lock(), second.try_lock()

    def lock_below_missing(self, files, root):
        with files.locked(f"{root}/d/lock"):
            pass

    def lock_directory(self, files, root):
        files.make_directory(f"{root}/d")
        with files.locked(f"{root}/d"):
            pass

    def lock_makes_a_file(self, files, root):
        for _ in range(2):
            with files.locked(f"{root}/lock"):
                pass
        return files.scan(root)


def _end(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return type(error), errno.errorcode[error.errno]


def _simulated(disk=None):
    sim = Simulation(0)
    disk = disk or SimulatedDisk()
    return sim, SimulatedFiles(disk, sim.process("node"))


@pytest.mark.parametrize("name", [name for name in vars(Programs) if name[0] != "_"])
def test_the_simulated_disk_behaves_like_linux(name, tmp_path):
    """Equal results, or the same error."""
    program = getattr(Programs(), name)
    sim, files = _simulated()
    files.make_directory("/root")
    simulated = _end(program, files, "/root")
    sim.close()
    assert simulated == _end(program, OS, str(tmp_path))


def test_no_handle_survives_a_power_failure():
    """Handles from before cannot be used; the file can be opened again."""
    disk = SimulatedDisk()
    sim, files = _simulated(disk)
    writer, reader = _write(files, "/a"), _reader(files, "/b")
    for call in (writer.sync, lambda: files.sync_directory("/")):
        call()
    disk.power_failure(SeededChoices(0).pick)
    for call in (
        lambda: writer.append(b"y"),
        lambda: writer.write(b"y", 0),
        writer.sync,
        writer.sync_data,
        writer.stat,
        writer.size,
        writer.try_lock,
        lambda: writer.set_mtime(5),
        lambda: writer.resize(5),
        lambda: reader.read(1, 0),
    ):
        assert _end(call) == (OSError, "EBADF")
    assert files.open("/a").read(1, 0) == b"x"
    sim.close()
