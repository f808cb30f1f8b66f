"""How far local logs were uploaded, asked of the bucket without taking any role.

The manifest has the marks up to its floor, the log behind it has the rest.
"""

from reef.engine.log import Log
from reef.engine.log_rules import LogReader, contiguous
from reef.errors import UnavailableError
from reef.formats.manifest import Manifest

__all__ = ["read_marks"]


def read_marks(log: Log, manifest: Manifest) -> LogReader:
    """Return the rules of the log at its present end: they have the history of every stream."""
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
    return rules
