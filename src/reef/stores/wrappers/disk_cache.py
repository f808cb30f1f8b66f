"""Keeps ranges of segments on a local disk, so that reading them again costs no request.

Only what never changes is kept: ranges of segments, whose names are never used twice. Logs,
manifests, leases, listings, whole objects, and "not found" always come from the store inside
(H9). Each range that is asked for is an entry of its own, so it does not matter which others
it was read with.

    get_ranges   a b c d        asked for
                 a   c          on disk, checked
                   b   d        one call of the store inside; then kept

The disk is a help and never a condition: damage and errors are counted and read past, and
after some failures in a row nothing is written for a while. `reef.stores.cache_directory` has
the layout, the bound, and how processes share it.

    disk_cache.hits, .misses       ranges found, and not
    disk_cache.bytes               the whole directory, as of the last write by this process
    disk_cache.evicted             entries removed to make room
    disk_cache.skipped             ranges not kept: too large, too many at once, or resting
    disk_cache.damaged, .errors    entries dropped, and calls of the file system that failed
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reef.files import OS, Files
from reef.runtime import Deadline
from reef.stores.base import Store, check_range
from reef.stores.cache_directory import CacheDirectory, DamagedEntry, Entry
from reef.stores.wrappers.base import Wrapper
from reef.telemetry import Metrics

__all__ = ["DISK_CACHE_BYTES", "DiskCache", "is_segment"]

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
        files: Files = OS,
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
        asked = dict.fromkeys((start, end) for start, end in ranges)
        bodies = {span: body for span in asked if (body := self._find(key, span)) is not None}
        missing = [span for span in asked if span not in bodies]
        if missing:
            fetched = dict(zip(missing, self.inner.get_ranges(key, missing), strict=True))
            self._keep(key, fetched)
            bodies.update(fetched)
        return [bodies[start, end] for start, end in ranges]

    def forget(self, key: str, ranges: Iterable[Span]) -> None:
        """Drop ranges whose bytes turned out to be wrong when they were decoded.

        A checksum says that they are as they came, not that they came as they should.
        """
        for span in filter(self._takes, ranges):
            self._drop(Entry(self.url, key, *span))

    # --- the disk -------------------------------------------------------------------
    def _find(self, key: str, span: Span) -> bytes | None:
        """Return a range from disk; None if the store must be asked, for whatever reason."""
        body = self._read(key, span) if self._takes(span) else None
        (self._misses if body is None else self._hits).add()
        return body

    def _read(self, key: str, span: Span) -> bytes | None:
        entry = Entry(self.url, key, *span)
        try:
            return self._directory.read(entry)
        except DamagedEntry:
            self._damaged.add()
            self._drop(entry)
        except OSError:
            self._errors.add()
        return None

    def _drop(self, entry: Entry) -> None:
        try:
            self._directory.drop(entry)
        except OSError:
            self._errors.add()

    def _keep(self, key: str, bodies: Mapping[Span, bytes]) -> None:
        """Write what came, as far as it is whole and the disk takes it."""
        ranges = [
            (Entry(self.url, key, *span), body)
            for span, body in bodies.items()
            if self._takes(span) and len(body) == span[1] - span[0]
        ]
        self._skipped.add(len(bodies) - len(ranges))
        if ranges:
            self._write(ranges)

    def _write(self, ranges: Sequence[tuple[Entry, bytes]]) -> None:
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
    inner: Store, path: str, bytes_max: int, is_immutable: Callable[[str], bool], files: Files
) -> DiskCache:
    return DiskCache(inner, path, bytes_max, is_immutable=is_immutable, files=files)
