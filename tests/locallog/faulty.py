"""A file system that writes down what is asked of it, and fails or stops when it is told to."""

import errno
import os

from reef.locallog.vfs import OS_FILES


class FaultyFiles:
    """A file system, with a list of calls, and a call before which something happens."""

    def __init__(self, inner=OS_FILES):
        self.inner = inner
        self.calls = []
        self.before = None
        """Called with the name of each call and the file's name; may raise."""

    def note(self, call, name):
        self.calls.append(f"{call} {name}")
        if self.before is not None:
            self.before(call, name)

    def create(self, path):
        self.note("create", os.path.basename(path))
        return FaultyFile(self, self.inner.create(path), os.path.basename(path))

    def open(self, path, *, writable):
        return FaultyFile(self, self.inner.open(path, writable=writable), os.path.basename(path))

    def same_file(self, file, path):
        return self.inner.same_file(file.inner, path)

    def rename(self, source, target):
        self.note("rename", os.path.basename(target))
        self.inner.rename(source, target)

    def unlink(self, path):
        self.note("unlink", os.path.basename(path))
        self.inner.unlink(path)

    def sync_directory(self, path):
        self.note("sync", "directory")
        self.inner.sync_directory(path)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class FaultyFile:
    """One open file of it."""

    def __init__(self, files, inner, name):
        self.files, self.inner, self.name = files, inner, name

    def write(self, data, offset):
        self.files.note("write", self.name)
        self.inner.write(data, offset)

    def resize(self, size):
        self.files.note("resize", self.name)
        self.inner.resize(size)

    def preallocate(self, size):
        self.files.note("preallocate", self.name)
        self.inner.preallocate(size)

    def sync(self):
        self.files.note("sync", self.name)
        self.inner.sync()

    def sync_data(self):
        self.files.note("sync", self.name)
        self.inner.sync_data()

    def __getattr__(self, name):
        return getattr(self.inner, name)


def failing(call, suffix, error=errno.EIO, after=0):
    """Return a `before` that fails such a call, once so many of them have passed."""
    left = [after]

    def before(found, name):
        if found == call and name.endswith(suffix):
            if left[0] == 0:
                raise OSError(error, os.strerror(error))
            left[0] -= 1

    return before


class Killed(BaseException):
    """The process is dead: whoever catches this has no more calls either."""


def killing(after):
    """Return a `before` that lets so many calls pass, and none behind them."""
    left = [after]

    def before(call, name):
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return before
