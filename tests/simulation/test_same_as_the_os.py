"""The same file calls, on a real directory and on the simulated disk, come to the same end."""

import errno
import sys

import pytest

from reef.files import OS
from reef.testing import SimulatedDisk, SimulatedFiles, Simulation
from reef.testing.choices import SeededChoices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the errors are Linux's")


def _write(files, path, data=b"x"):
    """Make a file and leave it open for writing."""
    fd = files.create(path)
    files.write(fd, data)
    return fd


def _file(files, path, data=b"x"):
    files.close(_write(files, path, data))


def _reader(files, path, data=b"x"):
    _file(files, path, data)
    return files.open(path)


class Programs:
    """What each does stands in its name; what it returns or raises is compared."""

    def read_after_unlink(self, files, root):
        fd = _reader(files, f"{root}/a", b"abc")
        files.unlink(f"{root}/a")
        return files.read_at(fd, 1, 10), files.scan(root)

    def read_after_rename_over(self, files, root):
        fd = _reader(files, f"{root}/a", b"old")
        _file(files, f"{root}/b", b"longer")
        files.rename(f"{root}/b", f"{root}/a")
        return files.read_at(fd, 0, 10), files.stat(f"{root}/a").size, files.scan(root)

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
        files.close(fd)
        files.close(fd)

    def write_to_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        files.close(fd)
        files.write(fd, b"x")

    def stat_and_sync_unknown_handles(self, files, root):
        return [_end(call, 999_999) for call in (files.stat_open, files.sync, files.close)]

    def set_mtime_of_closed(self, files, root):
        fd = _write(files, f"{root}/a")
        files.close(fd)
        files.set_mtime(fd, 5)

    def read_what_is_open_for_writing(self, files, root):
        files.read_at(_write(files, f"{root}/a"), 0, 1)

    def write_to_what_is_open_for_reading(self, files, root):
        files.write(_reader(files, f"{root}/a"), b"x")

    def read_directory(self, files, root):
        files.read_at(files.open(root), 0, 1)

    def copy_in_pieces(self, files, root):
        source, target = _reader(files, f"{root}/a", b"abcdef"), files.create(f"{root}/b")
        copied = [files.copy_range(source, target, length) for length in (2, 10, 10)]
        return copied, files.stat_open(target).size

    def copy_from_what_is_open_for_writing(self, files, root):
        files.copy_range(_write(files, f"{root}/a"), files.create(f"{root}/b"), 1)

    def copy_to_what_is_open_for_reading(self, files, root):
        files.copy_range(_reader(files, f"{root}/a"), _reader(files, f"{root}/b"), 1)

    def copy_from_directory(self, files, root):
        files.copy_range(files.open(root), files.create(f"{root}/b"), 1)

    def stamps(self, files, root):
        fd = _write(files, f"{root}/a")
        files.set_mtime(fd, 5)
        files.link(f"{root}/a", f"{root}/b")
        set_to = files.stat_open(fd).mtime_ns
        files.write(fd, b"y")
        same = files.stat_open(fd).inode == files.stat(f"{root}/b").inode
        return set_to, files.stat_open(fd).mtime_ns == 5, same

    def directories_have_stamps(self, files, root):
        files.make_directory(f"{root}/d")
        found = files.stat(f"{root}/d")
        return found.is_directory, found.ctime_ns > 0, found.mtime_ns > 0

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
    disk = disk or SimulatedDisk(SeededChoices(0))
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
    """What was open before is of no use after; the file itself can be opened again."""
    disk = SimulatedDisk(SeededChoices(0))
    sim, files = _simulated(disk)
    writer, reader = _write(files, "/a"), _reader(files, "/b")
    for call in (lambda: files.sync(writer), lambda: files.sync_directory("/")):
        call()
    disk.power_failure()
    for call in (
        lambda: files.write(writer, b"y"),
        lambda: files.sync(writer),
        lambda: files.stat_open(writer),
        lambda: files.set_mtime(writer, 5),
        lambda: files.read_at(reader, 0, 1),
        lambda: files.close(reader),
    ):
        assert _end(call) == (OSError, "EBADF")
    assert files.read_at(files.open("/a"), 0, 1) == b"x"
    sim.close()
