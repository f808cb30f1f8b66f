"""Caches ranges of segments on a local disk, so that reading them again costs no request.

Only immutable bytes are cached: ranges of segments, whose names are never used twice. Logs,
manifests, leases, listings, whole objects, and "not found" always come from the store inside
(H9). Each requested range is an entry of its own, independent of the ranges it was read with.

    get_ranges   a b c d        requested
                 a   c          on disk, checked
                   b   d        one call of the store inside; then cached

The disk is optional: damage and errors are counted and read past, and after some failures in a row
nothing is written for a while.

    disk_cache.hits, .misses       ranges found, and not
    disk_cache.bytes               the whole directory, as of the last write by this process
    disk_cache.evicted             entries removed to make room
    disk_cache.skipped             ranges not cached: too large, too many at once, or paused
    disk_cache.damaged, .errors    entries dropped, and calls of the file system that failed

The directory is bounded, checked, and shared by the processes of a machine:

    <path>/usage                              its lock is the right to write; its size in bytes
    <path>/unfinished                         the entry that is being written
    <path>/<2 digits>/<30 digits>.range       entries; the digits are a hash of the identity

    0       8         12              16              24         24+n     28+n
    +-------+---------+---------------+---------------+----------+--------+---------+
    | magic | version | identity size | payload bytes | identity | crc32c | payload |
    +-------+---------+---------------+---------------+----------+--------+---------+

The identity is the bucket's URL, the key, start and end, with NUL between them. A reader knows all
fields but the checksum and the payload, and the checksum (little-endian, as all numbers here) is
the payload's. So any damage is detected, and a file with a wrong name counts as damaged. Nothing is
synced: an entry that a power failure has torn is dropped when it is next read.

Readers take no lock. A file that is removed while it is open can be read to its end. Writers
exclude each other by the lock of `usage`, and none waits for it: ranges that cannot be written now
are left to the next writer of the same process, up to a few MiB. Under the lock:

    1  usage + entry > bytes_max?   count all entries, remove the least recently used
    2  write the new usage
    3  write `unfinished`, rename it

A process that crashes in between leaves a usage that is too high, never too low, which the next
count corrects, and one unfinished file, which the next writer replaces. After a restart of the
machine the usage may be older than the entries; it carries the boot's id, and is counted again.
Sizes are whole blocks of 4 KiB, as a file system uses them.

The order of use is kept in the files' mtime, set here: file systems often do not keep atime.
"""

import errno
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import google_crc32c
from xxhash import xxh3_128_hexdigest

from reef.files import OS, File, FileStat, FileSystem
from reef.runtime import Deadline, Runtime, leaf_lock
from reef.stores.base import Store, check_range
from reef.stores.wrappers.base import Wrapper
from reef.telemetry import Metrics

# --- the directory ----------------------------------------------------------------


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
"""Less than one read(2) returns at most."""
ENTRIES_MIN = 8
"""A range that would evict more than an eighth of the cache is not cached."""
FREED_SHARE = 10
"""A count frees a tenth, so that it is rare: it reads the size of every file."""
TOUCH_INTERVAL_NS = 1_000_000_000
"""An entry in constant use is marked so once a second, not at every read."""
QUEUED_BYTES_MAX = 8 << 20
"""Bytes that a process queues while another one writes, apart from one range of any size."""


class DamagedCacheEntry(Exception):
    """A file that differs from the entry of its name."""


class CacheEntry:
    """One range: the name of its file, and the bytes that the file begins with."""

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
class CacheWrite:
    """The result of an attempt to cache some ranges."""

    usage: int | None = None
    """Bytes in the directory, all processes' together; None if another is writing."""
    evicted: int = 0
    skipped: int = 0
    """Ranges for which there was no room, on disk or in the queue."""


class CacheDirectory:
    """The directory, created by the first write. No file stays open between calls."""

    def __init__(self, path: str, bytes_max: int, runtime: Runtime, files: FileSystem = OS) -> None:
        self.path = path
        self.bytes_max = bytes_max
        self.files = files
        self._runtime = runtime
        self._queued: list[tuple[CacheEntry, bytes]] = []
        self._queued_bytes = 0
        self._queue_lock = leaf_lock()

    def has_room_for(self, size: int) -> bool:
        """Whether a range of this size can be cached."""
        return size <= min(self.bytes_max // ENTRIES_MIN - BLOCK_BYTES, ENTRY_BYTES_MAX)

    # --- one entry ------------------------------------------------------------------
    def read(self, entry: CacheEntry) -> bytes | None:
        """Return a range; None if it is not cached, DamagedCacheEntry if its file is wrong."""
        try:
            file = self.files.open(self._path(entry.name))
        except FileNotFoundError:
            return None
        try:
            found = file.stat()
            if not found.is_file:  # a FIFO, a device: reading it may never end
                raise DamagedCacheEntry(f"{entry.name}: it is not a regular file")
            payload = self._check_entry(entry, file, found.size)
            self._mark_used(file, found)
            return payload
        finally:
            file.close()

    def drop(self, entry: CacheEntry) -> None:
        """Remove an entry. The usage stays as it is: too high, until the next count."""
        self._remove(self._path(entry.name))

    def _check_entry(self, entry: CacheEntry, file: File, size: int) -> bytes:
        if size != entry.file_bytes:
            raise DamagedCacheEntry(f"{entry.name}: {size} bytes instead of {entry.file_bytes}")
        begins = len(entry.head) + CHECKSUM.size
        start = file.read(begins, 0)
        if start[: len(entry.head)] != entry.head:
            raise DamagedCacheEntry(f"{entry.name}: it holds another range")
        payload = file.read(entry.bytes, begins)
        if start[len(entry.head) :] != CHECKSUM.pack(google_crc32c.value(payload)):
            raise DamagedCacheEntry(f"{entry.name}: its checksum does not fit its bytes")
        return payload

    def _mark_used(self, file: File, found: FileStat) -> None:
        now_ns = self._runtime.wall_ns()
        if abs(now_ns - found.mtime_ns) >= TOUCH_INTERVAL_NS:
            # Another user's file, or a read-only disk: only the order of use suffers.
            with suppress(OSError):
                file.set_mtime(now_ns)

    # --- writing --------------------------------------------------------------------
    def write(self, ranges: Sequence[tuple[CacheEntry, bytes]]) -> CacheWrite:
        """Write ranges, or queue them if another process is writing."""
        kept = CacheWrite(skipped=self._enqueue(ranges))
        with self._lock() as usage:
            if usage is not None:
                self._write_all(usage, self._drain_queue(), kept)
        return kept

    def _enqueue(self, ranges: Sequence[tuple[CacheEntry, bytes]]) -> int:
        """Add ranges to the queue; return how many do not fit."""
        with self._queue_lock:
            for number, (entry, payload) in enumerate(ranges):
                if self._queued and self._queued_bytes + entry.bytes > QUEUED_BYTES_MAX:
                    return len(ranges) - number
                self._queued.append((entry, payload))
                self._queued_bytes += entry.bytes
        return 0

    def _drain_queue(self) -> list[tuple[CacheEntry, bytes]]:
        with self._queue_lock:
            queued, self._queued = self._queued, []
            self._queued_bytes = 0
        return queued

    def _write_all(
        self, usage_file: File, ranges: list[tuple[CacheEntry, bytes]], kept: CacheWrite
    ) -> None:
        """Write as much as there is room for after one count."""
        kept.usage = _read_usage(usage_file)
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
            _write_usage(usage_file, kept.usage + entry.disk_bytes)
            self._put(usage_file, kept.usage, entry, payload)
            kept.usage += entry.disk_bytes

    def _fits(self, usage: int | None, entry: CacheEntry) -> bool:
        return usage is not None and usage + entry.disk_bytes <= self.bytes_max

    def _exists(self, entry: CacheEntry) -> bool:
        """Whether another process has written it meanwhile."""
        try:
            return self.files.stat(self._path(entry.name)).is_file
        except FileNotFoundError:
            return False

    def _put(self, usage_file: File, usage: int, entry: CacheEntry, payload: bytes) -> None:
        """Write an entry, or leave neither a file nor a higher usage behind."""
        unfinished = self._path(UNFINISHED)
        try:
            self._remove(unfinished)  # of a process that died
            self._write_file(unfinished, entry, payload)
            self._rename(unfinished, entry)
        except OSError:
            with suppress(OSError):
                self._remove(unfinished)
                _write_usage(usage_file, usage)
            raise

    def _write_file(self, path: str, entry: CacheEntry, payload: bytes) -> None:
        file = self.files.create(path)
        try:
            for part in (entry.head + CHECKSUM.pack(google_crc32c.value(payload)), payload):
                file.append(part)
            file.set_mtime(self._runtime.wall_ns())
        finally:
            file.close()

    def _rename(self, unfinished: str, entry: CacheEntry) -> None:
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
                        yield from self._file_sizes(self._path(f"{folder}/{name}"))

    def _file_sizes(self, path: str) -> Iterator[tuple[int, int, str]]:
        with suppress(FileNotFoundError):  # dropped by a reader since the scan
            found = self.files.stat(path)
            yield found.mtime_ns, _in_blocks(found.size), path

    @contextmanager
    def _lock(self) -> Iterator[File | None]:
        """Open and lock `usage`; None if another writer has it."""
        file = self._open_usage()
        try:
            yield file if file.try_lock() else None
        finally:
            file.close()

    def _open_usage(self) -> File:
        path = self._path(USAGE)
        try:
            file = self.files.open_or_create(path)
        except FileNotFoundError:
            self._make_directory(self.path, mode=0o700)  # it holds the bucket's data
            file = self.files.open_or_create(path)
        if not file.stat().is_file:
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file

    def _make_directory(self, path: str, *, mode: int = 0o777) -> None:
        """Create a directory and its missing parents; not durably, as nothing here is."""
        try:
            self.files.make_directory(path, mode=mode)
        except FileNotFoundError:
            self._make_directory(os.path.dirname(path))
            self._make_directory(path, mode=mode)
        except FileExistsError:
            if not self.files.stat(path).is_directory:
                raise

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(path)

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}"


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _read_usage(file: File) -> int | None:
    """Return the bytes in use; None if they were not written since the machine started."""
    match = USAGE_LINE.fullmatch(file.read(100, 0))
    return int(match[2]) if match and match[1] == _boot_id() else None


def _write_usage(file: File, usage: int) -> None:
    file.write(b"%s %020d\n" % (_boot_id(), usage), 0)


@cache
def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(64).strip() or b"unknown"
    except OSError:  # not Linux
        return b"unknown"


# --- the store --------------------------------------------------------------------


DISK_CACHE_BYTES = 1 << 30
FAILURES_MAX = 3
PAUSE_S = 60.0

Span = tuple[int, int]


def is_segment(key: str) -> bool:
    """Whether a key names a segment: written once, under a name that is never used again."""
    folder, _, name = key.rpartition("/")
    return name.endswith(".seg") and folder.rpartition("/")[2] == "segments"


class DiskCache(Wrapper):
    """Sits outermost: a hit costs no request, and is neither delayed nor retried."""

    def __init__(
        self,
        inner: Store,
        path: str,
        bytes_max: int = DISK_CACHE_BYTES,
        *,
        metrics: Metrics | None = None,
        is_immutable: Callable[[str], bool] = is_segment,
        files: FileSystem = OS,
    ) -> None:
        super().__init__(inner)
        self._directory = CacheDirectory(os.path.abspath(path), bytes_max, inner.runtime, files)
        self._is_immutable = is_immutable
        self._failures = 0
        self._rest: Deadline | None = None
        metrics = metrics or Metrics()
        self._hits = metrics.counter("disk_cache.hits")
        self._misses = metrics.counter("disk_cache.misses")
        self._bytes = metrics.gauge("disk_cache.bytes")
        self._evicted = metrics.counter("disk_cache.evicted")
        self._skipped = metrics.counter("disk_cache.skipped")
        self._damaged = metrics.counter("disk_cache.damaged")
        self._errors = metrics.counter("disk_cache.errors")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process shares the directory and counts for itself."""
        directory = self._directory
        place = (directory.path, directory.bytes_max, self._is_immutable, directory.files)
        return _reopen, (self.inner, *place)

    # --- reads ----------------------------------------------------------------------
    def get_range(self, key: str, start: int, end: int) -> bytes:
        if not self._is_immutable(key):
            return self.inner.get_range(key, start, end)
        check_range(key, start, end)
        body = self._find(key, (start, end))
        if body is None:
            body = self.inner.get_range(key, start, end)
            self._keep(key, {(start, end): body})
        return body

    def get_ranges(self, key: str, ranges: Sequence[Span]) -> list[bytes]:
        if not self._is_immutable(key):
            return self.inner.get_ranges(key, ranges)
        for start, end in ranges:
            check_range(key, start, end)
        requested = dict.fromkeys((start, end) for start, end in ranges)
        bodies = {span: body for span in requested if (body := self._find(key, span)) is not None}
        missing = [span for span in requested if span not in bodies]
        if missing:
            fetched = dict(zip(missing, self.inner.get_ranges(key, missing), strict=True))
            self._keep(key, fetched)
            bodies.update(fetched)
        return [bodies[start, end] for start, end in ranges]

    def forget(self, key: str, ranges: Iterable[Span]) -> None:
        """Drop ranges whose bytes turned out to be wrong when they were decoded.

        The checksum of an entry covers the bytes as received, which may have been wrong.
        """
        for span in filter(self._takes, ranges):
            self._drop(CacheEntry(self.url, key, *span))

    # --- the disk -------------------------------------------------------------------
    def _find(self, key: str, span: Span) -> bytes | None:
        """Return a range from disk; None if the store must be read."""
        body = self._read(key, span) if self._takes(span) else None
        (self._misses if body is None else self._hits).add()
        return body

    def _read(self, key: str, span: Span) -> bytes | None:
        entry = CacheEntry(self.url, key, *span)
        try:
            return self._directory.read(entry)
        except DamagedCacheEntry:
            self._damaged.add()
            self._drop(entry)
        except OSError:
            self._errors.add()
        return None

    def _drop(self, entry: CacheEntry) -> None:
        try:
            self._directory.drop(entry)
        except OSError:
            self._errors.add()

    def _keep(self, key: str, bodies: Mapping[Span, bytes]) -> None:
        """Write the complete ranges that fit."""
        ranges = [
            (CacheEntry(self.url, key, *span), body)
            for span, body in bodies.items()
            if self._takes(span) and len(body) == span[1] - span[0]
        ]
        self._skipped.add(len(bodies) - len(ranges))
        if ranges:
            self._write(ranges)

    def _write(self, ranges: Sequence[tuple[CacheEntry, bytes]]) -> None:
        if self._rest is not None and not self._rest.passed():
            self._skipped.add(len(ranges))
            return
        try:
            kept = self._directory.write(ranges)
        except OSError:
            self._errors.add()
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                self._rest = self.runtime.deadline(PAUSE_S)
            return
        self._failures = 0
        self._evicted.add(kept.evicted)
        self._skipped.add(kept.skipped)
        if kept.usage is not None:
            self._bytes.set(kept.usage)

    def _takes(self, span: Span) -> bool:
        return self._directory.has_room_for(span[1] - span[0])


def _reopen(
    inner: Store, path: str, bytes_max: int, is_immutable: Callable[[str], bool], files: FileSystem
) -> DiskCache:
    return DiskCache(inner, path, bytes_max, is_immutable=is_immutable, files=files)
