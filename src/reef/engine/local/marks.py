"""How far a local log was uploaded, asked of the bucket without taking any role.

The manifest has the marks up to its floor, the log behind it has the rest.
"""

from reef.engine.log import Log
from reef.engine.log_rules import LogReader, contiguous
from reef.errors import UnavailableError
from reef.formats.manifest import Manifest

__all__ = ["mark_now"]


def mark_now(log: Log, manifest: Manifest, stream: str) -> int:
    """Return up to which place a stream is committed, as of what stands in the log now."""
    rules = LogReader(manifest)
    skipped = set(manifest.skipped_lsns)
    listed = [slot.lsn for slot in log.filled(manifest.wal_floor)]
    for lsn in contiguous([*listed, *skipped], manifest.wal_floor):
        if lsn in skipped:
            rules.skip()
            continue
        found = log.read(lsn)
        if found is None:
            raise UnavailableError(f"LSN {lsn} was swept while the log was read", hint="Try again")
        rules.judge(found.header)
    return rules.marks.get(stream, 0)
