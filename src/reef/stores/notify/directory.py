"""Events of a directory on this machine, from the kernel (inotify, Linux).

The store gives a file its name when its bytes are durable, by link or rename: that is the event.
Folders are watched one by one, each with those above it up to the root, so that one that does not
exist yet, or is moved away, is noticed when it is created. Files that it has by then were missed,
so every subscription is signaled.

The kernel reports the changes of this machine only. Files that another machine writes over a
network are not reported: there readers poll at intervals.
"""

import ctypes
import errno
import os
import select
import struct
import sys
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.notify.base import Notifier

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE_SELF = 0x40, 0x80, 0x100, 0x400
IN_Q_OVERFLOW, IN_IGNORED, IN_ISDIR = 0x4000, 0x8000, 0x40000000
IN_ONLYDIR = 0x01000000
WATCHED = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE_SELF | IN_ONLYDIR
EVENT = struct.Struct("iIII")
READ_BYTES = 1 << 16


class DirectoryNotifier(Notifier):
    """Watches a directory, given by its path or by the URL of the store in it."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = REAL) -> None:
        super().__init__(runtime)
        self._root = os.path.abspath(_path_of(os.fspath(path)))
        self._inotify = _Inotify()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._folders: dict[int, str] = {}
        self._watched_folders: set[str] = set()
        self._arming = leaf_lock()
        self._is_open = True

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._inotify.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._closed:
                poll.poll()
                self._receive_events()
        finally:
            self._close_files()

    def _receive_events(self) -> None:
        moved = False
        keys = []
        for watch, mask, name in self._inotify.read():
            folder = self._folders.get(watch, self._root)
            if mask & IN_IGNORED:  # the folder is gone, and the number is not used again
                self._folders.pop(watch, None)
            if mask & (IN_Q_OVERFLOW | IN_ISDIR | IN_DELETE_SELF | IN_IGNORED):
                moved = True
            elif mask & (IN_CREATE | IN_MOVED_TO):
                keys.append(os.path.relpath(os.path.join(folder, name), self._root))
        if moved:  # folders came or went, or there were too many events: the watches are renewed
            self._arm()
            self.notify_all()
        self.notify(keys)

    def _on_subscribe(self, prefixes: tuple[str, ...]) -> None:
        with self._arming:
            self._watched_folders.update(
                os.path.join(self._root, prefix).rstrip("/") for prefix in prefixes
            )
        self._arm()

    def _arm(self) -> None:
        with self._arming:
            for folder in sorted(self._watched_folders) if self._is_open else ():
                self._watch(folder)

    def _watch(self, folder: str) -> bool:
        """Watch a folder and its existing parents, up to and including the root."""
        parent = os.path.dirname(folder)
        is_top = len(folder) <= len(self._root) and self._try(folder)
        if is_top or parent == folder:
            return is_top
        # Its parent first: a folder created between the two calls is reported there.
        return self._watch(parent) and self._try(folder)

    def _try(self, folder: str) -> bool:
        watch = self._inotify.watch(folder)
        if watch is not None:
            self._folders[watch] = folder
        return watch is not None

    def _stop(self) -> None:
        if self._listener is None:
            self._close_files()
            return
        with self._arming:
            if self._is_open:  # else it has ended by itself
                os.eventfd_write(self._wake, 1)

    def _close_files(self) -> None:
        """Close under the lock: the descriptor may be reused by another file right away."""
        with self._arming:
            self._is_open = False
            os.close(self._wake)
            self._inotify.close()


class _Inotify:
    """The kernel's interface, through the C library."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise InvalidInputError(
                "directories are watched on Linux only",
                kind=ErrorKind.UNSUPPORTED_BY_STORE,
                hint="Readers poll at intervals: set refresh_interval_ms",
            )
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise _watch_error("watching a directory", ctypes.get_errno())

    def watch(self, folder: str) -> int | None:
        """Return the number of the watch; None if the folder is not there."""
        watch: int = self._libc.inotify_add_watch(self.fd, os.fsencode(folder), WATCHED)
        if watch >= 0:
            return watch
        error = ctypes.get_errno()
        if error in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise _watch_error(f"watching {folder}", error)

    def read(self) -> Iterator[tuple[int, int, str]]:
        """Yield watch, mask and name of each pending event."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            watch, mask, _, length = EVENT.unpack_from(data, at)
            at += EVENT.size
            yield watch, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length

    def close(self) -> None:
        os.close(self.fd)


def _path_of(url: str) -> str:
    """Return the path as the store resolves it: a watch on another path would never fire."""
    if "://" not in url:
        return os.path.expanduser(url)
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "file":
        raise InvalidInputError(
            f"{url.split('?', 1)[0]!r} is not a directory",
            kind=ErrorKind.INVALID_URL,
            hint="Use QueueNotifier or PushNotifier for a bucket",
        )
    return unquote(parts.path)


def _watch_error(action: str, error: int) -> UnavailableError:
    limits = error in (errno.ENOSPC, errno.EMFILE)
    return UnavailableError(
        f"{action} failed: {os.strerror(error)}",
        hint="Raise fs.inotify.max_user_watches or max_user_instances" if limits else "",
    )
