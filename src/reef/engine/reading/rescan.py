"""Scans that outlive what they read: they go on exactly, or not at all.

A plain reader holds no lease, so a sweep may take a segment that an open iterator still
needs. It then plans again from the current head. What was there at its LSN is still there,
under other names, unless something newer has replaced it: newer versions take the place of
older ones in segments. So it goes on only if nothing in the rest of its range is newer than
its LSN, and no compaction has dropped a delete that is: apart from that, a fold or a
compaction changes no row. Otherwise the rest of that moment is gone.
"""

from collections.abc import Callable, Iterator

from reef.engine.reading.memtable import Moment
from reef.engine.reading.view import Scan, View
from reef.errors import Kind, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.types import KeyRange

__all__ = ["Replan", "go_on_after_sweeps"]

Replan = Callable[[int, NotFoundError], View]
"""Returns a view on a newer generation than the given one, in which an object was missing."""


def go_on_after_sweeps(scan: Scan, replan: Replan) -> Iterator[Versions]:
    """Yield what a scan yields; where an object was swept, the same rows from elsewhere."""
    lsn, *staged = (moment.last_lsn for moment in scan.moments)
    while True:
        left = scan.wanted
        try:
            for rows in scan:
                yield rows
                left = _rest(left, rows.keys[-1].as_py(), scan.reverse)
            return
        except NotFoundError as error:
            before, view = scan.manifest, replan(scan.manifest.generation, error)
            scan = view.scan(left, scan.now_ms, reverse=scan.reverse, projection=scan.projection)
            grew = any(map(_is_above, scan.moments[1:], staged))
            other = _is_another(before, scan.manifest)
            if other or scan.moments[0].last_lsn < lsn or grew or _is_newer(scan, lsn):
                raise _collected(lsn, error) from error


def _rest(wanted: KeyRange, last_key: bytes, reverse: bool) -> KeyRange:
    """Return what lies behind a key, in the direction of reading."""
    if reverse:
        return KeyRange(wanted.start, last_key)
    return KeyRange(last_key + b"\0", wanted.end)


def _is_another(before: Manifest, after: Manifest) -> bool:
    """Whether rows went without being replaced: a repair gave some up, or the namespace was
    dropped and made anew (H48). An empty one has nothing newer, and would look like the end.
    """
    return (before.wal_base, before.skipped_lsns) != (after.wal_base, after.skipped_lsns)


def _is_above(moment: Moment, lsn: int) -> bool:
    """Whether what lies over a namespace has grown within a range."""
    return bool((moment.rows.lsns > lsn).any()) or any(t.lsn > lsn for t in moment.range_tombstones)


def _is_newer(scan: Scan, lsn: int) -> bool:
    """Whether some source of a scan may have a version above an LSN."""
    moment, wanted, head = scan.moments[0], scan.wanted, scan.manifest
    return (
        # A compaction may have dropped a delete, or an expired row, with all that it hid.
        head.dropped_lsn > lsn
        or head.dropped_expired_ms > scan.now_ms
        or bool((moment.rows.lsns > lsn).any())
        or any(entry.lsn_max > lsn for entry in scan.overlapping())
        or any(t.lsn > lsn and wanted.touches(t.start, t.end) for t in moment.range_tombstones)
    )


def _collected(lsn: int, error: NotFoundError) -> NotFoundError:
    return NotFoundError(
        f"the rest of this scan is gone: {error.message}, and rows were changed since LSN {lsn}",
        kind=Kind.COLLECTED,
        hint="Scan again, or read a snapshot, which holds what it needs",
        **{**error.context, "lsn": lsn},
    )
