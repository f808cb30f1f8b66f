"""A file system that records its calls, and fails or stops at one of them."""

import errno
import os

from reef.files import OS


class FaultyFiles:
    """A file system with a list of calls, and hooks around each of them."""

    def __init__(self, inner=OS, before=None, after=None, before_query=None):
        self.inner = inner
        self.calls = []
        """The changes and syncs that were attempted."""
        self.before = before
        """Called before each of them with the name of the call and of its file; may raise."""
        self.after = after
        """The same, once the call has succeeded."""
        self.before_query = before_query
        """The same, before each call that changes neither bytes nor names."""

    def call(self, call, path, act, *arguments, **options):
        """Run one call, between its hooks."""
        name = "directory" if call == "sync directory" else os.path.basename(path)
        call = call.split()[0]
        self.calls.append(f"{call} {name}")
        if self.before is not None:
            self.before(call, name)
        result = act(*arguments, **options)
        if self.after is not None:
            self.after(call, name)
        return result

    def query(self, call, path, act, *arguments, **options):
        """Run a call that is not recorded."""
        if self.before_query is not None:
            self.before_query(call, os.path.basename(path))
        return act(*arguments, **options)

    def create(self, path, **options):
        return FaultyFile(self, self.call("create", path, self.inner.create, path, **options), path)

    def open(self, path, **options):
        return FaultyFile(self, self.query("open", path, self.inner.open, path, **options), path)

    def open_regular(self, path, **options):
        file = self.query("open", path, self.inner.open_regular, path, **options)
        return FaultyFile(self, file, path)

    def open_or_create(self, path):
        return FaultyFile(self, self.inner.open_or_create(path), path)

    def stat(self, path):
        return self.query("stat", path, self.inner.stat, path)

    def make_directory(self, path, **options):
        return self.query("make_directory", path, self.inner.make_directory, path, **options)

    def same_file(self, file, path):
        return self.inner.same_file(file.inner, path)

    def link(self, source, target):
        self.call("link", target, self.inner.link, source, target)

    def rename(self, source, target):
        self.call("rename", target, self.inner.rename, source, target)

    def unlink(self, path):
        self.call("unlink", path, self.inner.unlink, path)

    def sync_directory(self, path):
        self.call("sync directory", path, self.inner.sync_directory, path)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class FaultyFile:
    """One open file of it."""

    def __init__(self, files, inner, path):
        self.files, self.inner, self.path = files, inner, path

    def read(self, length, offset):
        return self.files.query("read", self.path, self.inner.read, length, offset)

    def stat(self):
        return self.files.query("stat of file", self.path, self.inner.stat)

    def set_mtime(self, mtime_ns):
        self.files.query("set_mtime", self.path, self.inner.set_mtime, mtime_ns)

    def write(self, data, offset):
        self.files.call("write", self.path, self.inner.write, data, offset)

    def append(self, data):
        self.files.call("append", self.path, self.inner.append, data)

    def copy_from(self, source, length, offset=None):
        inner = getattr(source, "inner", source)
        return self.files.call("copy", self.path, self.inner.copy_from, inner, length, offset)

    def resize(self, size):
        self.files.call("resize", self.path, self.inner.resize, size)

    def preallocate(self, size):
        self.files.call("preallocate", self.path, self.inner.preallocate, size)

    def sync(self):
        self.files.call("sync", self.path, self.inner.sync)

    def sync_data(self):
        self.files.call("sync", self.path, self.inner.sync_data)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class FixedStat:
    """An open file whose metadata does not change."""

    def __init__(self, inner, stat):
        self.inner, self._stat = inner, stat

    def stat(self):
        return self._stat

    def __getattr__(self, name):
        return getattr(self.inner, name)


def failing(call, suffix="", error=errno.EIO, after=0):
    """Return a hook that fails such a call, once so many of them have passed."""
    left = [after]

    def before(found, name):
        if found == call and name.endswith(suffix):
            if left[0] == 0:
                raise OSError(error, os.strerror(error))
            left[0] -= 1

    return before


class Killed(BaseException):
    """The process is dead: code that catches this can make no more calls either."""


def killing(after):
    """Return a hook that lets so many calls pass, and none after them."""
    left = [after]

    def before(call, name):
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return before
