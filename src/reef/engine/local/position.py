"""Where a log and its bucket agree: which entries are committed, and whether the log has forked.

A directory may be copied, or come back from an older image of its disk, and then every copy numbers
on from the same place (H71). The bucket has a lineage of the stream (`reef.manifest.streams`), the
log has the epoch and the digest of each entry. Compared above the index up to which the log has
noted its uploads, there are three cases:

    mark within the log, same digest      entries up to the mark are committed, the others are not
    mark behind the log's end, all of     the bucket is ahead: the end of this log was lost, or a
      its entries in the lineage          copy has continued; every entry here is committed
    anything else                         forked: entries above the last one in common are not
                                          committed, whatever their numbers are

The entries of a fork belong to a branch: a stream of their own, whose name follows from the first
entry that differs. So two copies of one fork have one branch, and whichever is re-applied second
finds the entries of the first there. A branch may fork in turn.

A mark without a lineage, from a release that does not know them, is compared by index alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from reef.engine.local.entries import point_of
from reef.engine.local.identity import stream_of
from reef.locallog import LogEntry
from reef.manifest.streams import StreamHistory

__all__ = ["EntriesFrom", "Position", "find_position"]

BRANCH_BYTES = 16

EntriesFrom = Callable[[int], Iterable[LogEntry]]
"""Returns the entries of a log from an index on."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a log is committed."""

    id: str
    """Names the log's stream, or the branch to which its other entries belong."""
    uploaded: int
    """Every entry up to here is committed; it may be behind the end of the log."""
    history: StreamHistory
    """Of that stream or branch."""
    forked_from: str = ""
    """The log's own id, if it has forked."""

    @property
    def stream(self) -> str:
        return stream_of(self.id)

    @property
    def is_forked(self) -> bool:
        return bool(self.forked_from)


def find_position(
    entries: EntriesFrom, history: Callable[[str], StreamHistory], log_id: str, noted: int
) -> Position:
    """Return where a log is that has noted its uploads up to `noted`."""
    branch_id, forked_from = log_id, ""
    while True:
        found = history(branch_id)
        fork = _find_fork(entries, found, noted)
        if fork is None:
            return Position(branch_id, max(found.mark, noted), found, forked_from)
        branch_id, noted, forked_from = _branch(branch_id, fork), fork.index - 1, log_id


def _find_fork(entries: EntriesFrom, history: StreamHistory, noted: int) -> LogEntry | None:
    """Return the first entry that is not the one which was committed with its number."""
    if not history.is_proven or _agrees(entries, history):
        return None
    for entry in entries(noted + 1):
        if entry.index > history.mark or not history.has_point(point_of(entry)):
            return entry
    return None


def _agrees(entries: EntriesFrom, history: StreamHistory) -> bool:
    """Whether the digest at the mark is the log's own, or nothing is left to compare it with."""
    entry = next(iter(entries(history.mark)), None)
    if entry is None:
        return False
    if entry.index == history.mark:
        return point_of(entry).digest == history.digest
    if entry.index == history.mark + 1 and entry.extensions:
        return entry.extensions == history.digest
    return True


def _branch(log_id: str, fork: LogEntry) -> str:
    point = msgspec.msgpack.encode((log_id, point_of(fork)))
    return blake2b(point, digest_size=BRANCH_BYTES).hexdigest()
