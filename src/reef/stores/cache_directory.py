"""A directory of byte ranges: bounded, checked, shared by the processes of a machine.

    <path>/usage                              its lock is the right to write; how full it is
    <path>/unfinished                         the entry that is being written
    <path>/<2 digits>/<30 digits>.range       entries; the digits are a hash of what they hold

    0       8         12              16              24         24+n     28+n
    +-------+---------+---------------+---------------+----------+--------+---------+
    | magic | version | identity size | payload bytes | identity | crc32c | payload |
    +-------+---------+---------------+---------------+----------+--------+---------+

The identity is the bucket's URL, the key, start and end, with NUL between them. Whoever reads
an entry knows what all of it but checksum and payload must be, and the checksum (little-endian,
as all numbers here) is the payload's. So any damage is seen, and a file that got a wrong name
is as bad as a damaged one. Nothing is synced: what a power failure tears is dropped when it
is next read.

Readers take no lock. A file that is removed while it is open can be read to its end. Writers
exclude each other by the lock of `usage`, and nobody waits for it: what cannot be written now
is left to the next writer of the same process, up to a few MiB. Under the lock:

    1  usage + entry > bytes_max?   count all entries, remove those unused for longest
    2  write the new usage
    3  write `unfinished`, rename it

A process that dies in between leaves a usage that is too high, never too low, which the next
count puts right, and one unfinished file, which the next writer replaces. After a restart of
the machine the usage may be older than the entries; it carries the boot's id, and is counted
anew. Sizes are whole blocks of 4 KiB, as a file system uses them.

The order of use is kept in the files' mtime, set here: file systems often do not keep atime.
"""

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import google_crc32c
from xxhash import xxh3_128_hexdigest

from reef.files import NO_WAIT, OS, Files, FileStat
from reef.runtime import Runtime, leaf_lock

__all__ = ["CacheDirectory", "DamagedEntry", "Entry", "Kept"]

MAGIC = b"RFRANGE\0"
VERSION = 1
HEAD = struct.Struct("<8sIIQ")
CHECKSUM = struct.Struct("<I")
USAGE = "usage"
USAGE_LINE = re.compile(rb"(.{1,64}) (\d{20})\n")
UNFINISHED = "unfinished"
FOLDER = re.compile(r"[0-9a-f]{2}")
FILE = re.compile(r"[0-9a-f]{30}\.range")
BLOCK_BYTES = 4096
ENTRY_BYTES_MAX = 1 << 30
"""What one read(2) returns in one piece, with room to spare."""
ENTRIES_MIN = 8
"""A range that would push out more than an eighth of everything is not worth it."""
FREED_SHARE = 10
"""A count frees a tenth, so that it is rare: it looks at every file."""
TOUCH_INTERVAL_NS = 1_000_000_000
"""An entry in constant use is marked so once a second, not at every read."""
WAITING_BYTES_MAX = 8 << 20
"""What a process holds in memory while another is writing, beside one range of any size."""


class DamagedEntry(Exception):
    """A file that is not what was written under its name."""


class Entry:
    """One range: where it is kept, and how its file must begin."""

    __slots__ = ("bytes", "head", "name")

    def __init__(self, url: str, key: str, start: int, end: int) -> None:
        identity = "\0".join((url, key, str(start), str(end))).encode(errors="surrogatepass")
        self.bytes = end - start
        self.head = HEAD.pack(MAGIC, VERSION, len(identity), self.bytes) + identity
        digits = xxh3_128_hexdigest(self.head)
        self.name = f"{digits[:2]}/{digits[2:]}.range"

    @property
    def file_bytes(self) -> int:
        return len(self.head) + CHECKSUM.size + self.bytes

    @property
    def disk_bytes(self) -> int:
        return _in_blocks(self.file_bytes)


@dataclass(slots=True)
class Kept:
    """What came of an attempt to keep some ranges."""

    usage: int | None = None
    """Bytes in the directory, all processes' together; None if another is writing."""
    evicted: int = 0
    skipped: int = 0
    """Ranges that found no room, on disk or among those that wait."""


class CacheDirectory:
    """The directory, made on the first write. Holds nothing open between calls."""

    def __init__(self, path: str, bytes_max: int, runtime: Runtime, files: Files = OS) -> None:
        self.path = path
        self.bytes_max = bytes_max
        self.files = files
        self._runtime = runtime
        self._waiting: list[tuple[Entry, bytes]] = []
        self._waiting_bytes = 0
        self._queue = leaf_lock()

    def has_room_for(self, size: int) -> bool:
        """Whether a range of this size is kept at all."""
        return size <= min(self.bytes_max // ENTRIES_MIN - BLOCK_BYTES, ENTRY_BYTES_MAX)

    # --- one entry ------------------------------------------------------------------
    def read(self, entry: Entry) -> bytes | None:
        """Return a range; None if it is not here, DamagedEntry if its file is wrong."""
        try:
            fd = self.files.open(self._path(entry.name))
        except FileNotFoundError:
            return None
        try:
            found = self.files.stat_open(fd)
            if not found.is_file:  # a FIFO, a device: reading it may never end
                raise DamagedEntry(f"{entry.name}: it is not a regular file")
            payload = self._checked(entry, fd, found.size)
            self._mark_used(fd, found)
            return payload
        finally:
            self.files.close(fd)

    def drop(self, entry: Entry) -> None:
        """Remove an entry. The usage stays as it is: too high, until the next count."""
        self._remove(self._path(entry.name))

    def _checked(self, entry: Entry, fd: int, size: int) -> bytes:
        if size != entry.file_bytes:
            raise DamagedEntry(f"{entry.name}: {size} bytes instead of {entry.file_bytes}")
        begins = len(entry.head) + CHECKSUM.size
        start = self.files.read_at(fd, 0, begins)
        if start[: len(entry.head)] != entry.head:
            raise DamagedEntry(f"{entry.name}: it is not the range that was asked for")
        payload = self.files.read_at(fd, begins, entry.bytes)
        if start[len(entry.head) :] != CHECKSUM.pack(google_crc32c.value(payload)):
            raise DamagedEntry(f"{entry.name}: its checksum does not fit its bytes")
        return payload

    def _mark_used(self, fd: int, found: FileStat) -> None:
        now_ns = self._runtime.wall_ns()
        if abs(now_ns - found.mtime_ns) >= TOUCH_INTERVAL_NS:
            # Another user's file, or a read-only disk: only the order of use suffers.
            with suppress(OSError):
                self.files.set_mtime(fd, now_ns)

    # --- writing --------------------------------------------------------------------
    def write(self, ranges: Sequence[tuple[Entry, bytes]]) -> Kept:
        """Keep ranges, or let them wait if another writer is at work."""
        kept = Kept(skipped=self._let_wait(ranges))
        with self._lock() as usage_fd:
            if usage_fd is not None:
                self._write_all(usage_fd, self._take_waiting(), kept)
        return kept

    def _let_wait(self, ranges: Sequence[tuple[Entry, bytes]]) -> int:
        """Add to those that wait; return how many are too many."""
        with self._queue:
            for number, (entry, payload) in enumerate(ranges):
                if self._waiting and self._waiting_bytes + entry.bytes > WAITING_BYTES_MAX:
                    return len(ranges) - number
                self._waiting.append((entry, payload))
                self._waiting_bytes += entry.bytes
        return 0

    def _take_waiting(self) -> list[tuple[Entry, bytes]]:
        with self._queue:
            waiting, self._waiting = self._waiting, []
            self._waiting_bytes = 0
        return waiting

    def _write_all(self, usage_fd: int, ranges: list[tuple[Entry, bytes]], kept: Kept) -> None:
        """Write as much as there is room for after one count."""
        kept.usage = _read_usage(usage_fd)
        counted = False
        for entry, payload in ranges:
            if self._exists(entry):
                continue
            if not counted and not self._fits(kept.usage, entry):
                kept.usage, kept.evicted = self._evict(entry.disk_bytes)
                counted = True
            if kept.usage is None or not self._fits(kept.usage, entry):
                kept.skipped += 1
                continue
            _write_usage(usage_fd, kept.usage + entry.disk_bytes)
            self._put(usage_fd, kept.usage, entry, payload)
            kept.usage += entry.disk_bytes

    def _fits(self, usage: int | None, entry: Entry) -> bool:
        return usage is not None and usage + entry.disk_bytes <= self.bytes_max

    def _exists(self, entry: Entry) -> bool:
        """Whether another process was faster."""
        try:
            return self.files.stat(self._path(entry.name)).is_file
        except FileNotFoundError:
            return False

    def _put(self, usage_fd: int, usage: int, entry: Entry, payload: bytes) -> None:
        """Write an entry, or leave neither a file nor a higher usage behind."""
        unfinished = self._path(UNFINISHED)
        try:
            self._remove(unfinished)  # of a process that died
            self._write_file(unfinished, entry, payload)
            self._rename(unfinished, entry)
        except OSError:
            with suppress(OSError):
                self._remove(unfinished)
                _write_usage(usage_fd, usage)
            raise

    def _write_file(self, path: str, entry: Entry, payload: bytes) -> None:
        fd = self.files.create(path)
        try:
            for part in (entry.head + CHECKSUM.pack(google_crc32c.value(payload)), payload):
                left = memoryview(part)
                while left:
                    left = left[self.files.write(fd, left) :]
            self.files.set_mtime(fd, self._runtime.wall_ns())
        finally:
            self.files.close(fd)

    def _rename(self, unfinished: str, entry: Entry) -> None:
        target = self._path(entry.name)
        try:
            self.files.rename(unfinished, target)
        except FileNotFoundError:
            self.files.make_directory(os.path.dirname(target))
            self.files.rename(unfinished, target)

    # --- the bound ------------------------------------------------------------------
    def _evict(self, needed: int) -> tuple[int, int]:
        """Count all entries, remove the least recently used; return usage and number removed."""
        entries = sorted(self._entries())
        usage = sum(size for _, size, _ in entries)
        target = self.bytes_max - max(needed, self.bytes_max // FREED_SHARE)
        if usage + needed <= self.bytes_max:
            return usage, 0
        for number, (_, size, path) in enumerate(entries):
            if usage <= target:
                return usage, number
            self._remove(path)
            usage -= size
        return usage, len(entries)

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """Yield mtime, size and path of every entry; foreign files are not touched."""
        for folder, is_directory in self.files.scan(self.path):
            if is_directory and FOLDER.fullmatch(folder):
                for name, _ in self.files.scan(self._path(folder)):
                    if FILE.fullmatch(name):
                        yield from self._sized(self._path(f"{folder}/{name}"))

    def _sized(self, path: str) -> Iterator[tuple[int, int, str]]:
        with suppress(FileNotFoundError):  # dropped by a reader since the scan
            found = self.files.stat(path)
            yield found.mtime_ns, _in_blocks(found.size), path

    @contextmanager
    def _lock(self) -> Iterator[int | None]:
        """Open and lock `usage`; None if another writer has it."""
        fd = self._open_usage()
        _held_locks.add(fd)
        try:
            yield fd if _try_lock(fd) else None
        finally:
            # By word, not only by closing: a child forked just now shares the open file.
            fcntl.flock(fd, fcntl.LOCK_UN)
            _held_locks.discard(fd)
            os.close(fd)

    def _open_usage(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | NO_WAIT
        try:
            fd = os.open(self._path(USAGE), flags, 0o666)
        except FileNotFoundError:
            os.makedirs(self.path, mode=0o700, exist_ok=True)  # it holds what is in the bucket
            fd = os.open(self._path(USAGE), flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", self._path(USAGE))
        return fd

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(path)

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}"


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_usage(fd: int) -> int | None:
    """Return the bytes in use; None if nobody wrote them since the machine started."""
    match = USAGE_LINE.fullmatch(os.pread(fd, 100, 0))
    return int(match[2]) if match and match[1] == _boot_id() else None


def _write_usage(fd: int, usage: int) -> None:
    os.pwrite(fd, b"%s %020d\n" % (_boot_id(), usage), 0)


@cache
def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(64).strip() or b"unknown"
    except OSError:  # not Linux
        return b"unknown"


_held_locks: set[int] = set()


def _close_locks_in_child() -> None:
    """A child would keep its parent's locks for as long as it lives."""
    for fd in list(_held_locks):
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
