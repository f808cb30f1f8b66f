"""A `LocalLog` as the journal of PySyncObj, a Raft library for Python.

    conf = SyncObjConf(journalFile=journal_at("./node1"))

PySyncObj's own journal is a memory-mapped file that is never synced, so that a power failure
can lose entries that were acknowledged to a majority. This one is durable at each `add`, and so
are term and vote before a message contains them. The commit index is stored once a second: it
only shortens the restart of a node.

PySyncObj creates its journal from a path with a function of its own. `journal_at` returns a
marked path, and replaces that function by one that recognizes the mark.
"""

import _socket
import socket
from typing import Any

import msgspec
import pysyncobj.journal
import pysyncobj.syncobj

from reef.locallog.encoding import LogEntry
from reef.locallog.log import LocalLog

# PySyncObj replaces this function on all systems with one that works on Windows only.
socket.inet_ntop = _socket.inet_ntop

VOTE_KEY = b"pysyncobj.vote"
COMMIT_KEY = b"pysyncobj.commit"
COMMIT_AT_FIRST = 1
"""PySyncObj's commit index of a new journal."""

Record = tuple[bytes, int, int]
"""PySyncObj's entry: command, index, term."""


class _Vote(msgspec.Struct, frozen=True):
    term: int = 0
    voted_for: str | None = None


class LocalLogJournal(pysyncobj.journal.Journal):  # type: ignore[misc]
    """PySyncObj's view of a log: a list of records, which may start at any index."""

    def __init__(self, log: LocalLog) -> None:
        self._log = log
        encoded = log.get(VOTE_KEY)
        self._vote = msgspec.json.decode(encoded, type=_Vote) if encoded else _Vote()
        self._commit_index = log.get_uint64(COMMIT_KEY) or COMMIT_AT_FIRST
        self._commit_index_kept = self._commit_index

    # --- records ------------------------------------------------------------------
    def add(self, command: bytes, idx: int, term: int) -> None:
        self._log.store_log(LogEntry(idx, term, data=bytes(command)))

    def clear(self) -> None:
        self.deleteEntriesTo(len(self))

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803 - PySyncObj's names
        """Remove the records from a position on."""
        self._log.delete_range(self._log.first_index + entryFrom, self._log.last_index)

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        """Remove the records before a position."""
        self._log.delete_range(self._log.first_index, self._log.first_index + entryTo - 1)

    def __len__(self) -> int:
        first = self._log.first_index
        return self._log.last_index - first + 1 if first else 0

    def __getitem__(self, item: int | slice) -> Record | list[Record]:
        first = self._log.first_index
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self))
            return [_record(entry) for entry in self._log.entries(first + start, first + stop - 1)]
        place = item + len(self) if item < 0 else item
        if not 0 <= place < len(self):
            raise IndexError(f"record {item} of {len(self)}")
        return _record(self._log.get_log(first + place))

    # --- stable values ------------------------------------------------------------
    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        """Store term and vote, durably before a message contains them."""
        vote = _Vote(term, votedForNodeId)
        if vote != self._vote:
            self._log.set(VOTE_KEY, msgspec.json.encode(vote))
            self._vote = vote

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._vote.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._vote.voted_for

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        """Set the commit index in memory; `onOneSecondTimer` stores it."""
        self._commit_index = raftCommitIndex

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._commit_index

    def onOneSecondTimer(self) -> None:  # noqa: N802
        if self._commit_index != self._commit_index_kept:
            self._log.set_uint64(COMMIT_KEY, self._commit_index)
            self._commit_index_kept = self._commit_index

    def _destroy(self) -> None:
        self._log.close()


def _record(entry: LogEntry) -> Record:
    return entry.data, entry.index, entry.term


class _LogDirectory(str):
    """The path of a log, in place of PySyncObj's path of a file."""

    __slots__ = ("options",)
    options: dict[str, Any]


def journal_at(path: str, **options: Any) -> str:
    """Return PySyncObj's `journalFile` for a log; `options` are those of `LocalLog`."""
    marked = _LogDirectory(path)
    marked.options = options
    pysyncobj.syncobj.createJournal = _create_journal
    return marked


_create_other_journal = pysyncobj.journal.createJournal


def _create_journal(path: str | None = None) -> Any:
    if isinstance(path, _LogDirectory):
        return LocalLogJournal(LocalLog(str(path), **path.options))
    return _create_other_journal(path)
