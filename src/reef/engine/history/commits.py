"""The commits that the log still has: when, by whom, and how much each has written.

One header is read per object, in parallel, and no record. The rules of the log decide what counts,
from the floor of the oldest retained generation on. Older objects may have been collected, and
their slots filled again (H67).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from reef.engine.history.as_of import History, with_skipped
from reef.engine.log.log import LogRules, Slot, Verdict, replay_headers
from reef.engine.log.tail import HeaderTask, Missing, run_header_task
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError, ErrorKind, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader, WalKind
from reef.paths import Namespace
from reef.stores import Store

TRIES_MAX = 5


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that counts."""

    lsn: int
    committed_at: datetime
    """By the clock of the process that committed; a read as of this time includes it."""
    operation: str
    """`write`: batches of a writer; `append`: rows of a stream; `load`: a bulk load, or a statement
    of Spark; `replace`: a load that has also deleted a range of keys, such as an overwrite."""
    by: str
    """The writer, the stream or the job."""
    keys: tuple[str, ...]
    """Idempotency keys."""
    rows: int
    """Rows and deletes."""
    bytes: int
    """Stored bytes: of the object, or of the segments of a load."""


def list_commits(store: Store, namespace: Namespace) -> list[Commit]:
    """Return the commits of the retained log, oldest first."""
    history = History(store, namespace, SegmentStore(store, namespace, ByteCache(0)))
    for _ in range(TRIES_MAX):
        head = history.heads.find(renamed=True).manifest
        oldest = with_skipped(history.oldest(head), head)
        slots = history.log.filled(oldest.wal_floor)
        found = list(_commits(store, namespace, oldest, slots))
        history.heads.forget()
        if history.heads.find(renamed=True).manifest.oldest_retained <= oldest.generation:
            return found
    raise NotFoundError(
        f"the log of {namespace.name} was collected while its commits were listed",
        kind=ErrorKind.COLLECTED,
        hint="Try again, or raise the retention",
    )


def _commits(
    store: Store, namespace: Namespace, oldest: Manifest, slots: list[Slot]
) -> Iterator[Commit]:
    """Yield the commits of some slots; one that was collected meanwhile ends the log.

    A slot of the log that cannot be read is a CorruptionError: later ones may be void by its rules.
    """
    sizes = {slot.lsn: slot.size for slot in slots}
    peeked = run_header_task(HeaderTask(store, namespace, tuple(sizes.items())))
    found = dict(zip(sizes, peeked, strict=True))
    headers = {lsn: header for lsn, header in found.items() if isinstance(header, WalHeader)}
    rules = LogRules(oldest)
    for header, verdict in replay_headers(rules, headers):
        is_commit = header.kind.has_rows or header.kind is WalKind.INGEST
        if is_commit and verdict is Verdict.APPLIES:
            yield _commit(header, sizes[header.lsn])
    if found.get(rules.next_lsn) is Missing.UNREADABLE:
        raise CorruptionError(
            f"LSN {rules.next_lsn} of {namespace.name} cannot be read",
            hint="Run verify, then repair",
            object=namespace.wal_object(rules.next_lsn),
            offset=0,
        )


def _commit(header: WalHeader, size: int) -> Commit:
    at = datetime.fromtimestamp(header.created_at_ms / 1000, UTC)
    if header.job is None:
        operation = "append" if header.kind is WalKind.APPEND else "write"
        keys = tuple(batch.key for batch in header.batches if batch.key is not None)
        rows = sum(batch.ops for batch in header.batches)
        return Commit(header.lsn, at, operation, header.writer_id, keys, rows, size)
    job = header.job
    operation = "load" if job.replace is None else "replace"
    keys = () if job.key in (None, job.id) else (job.key,)
    rows = sum(segment.rows for segment in job.segments)
    stored = sum(segment.size for segment in job.segments)
    return Commit(header.lsn, at, operation, job.id, keys, rows, stored)
