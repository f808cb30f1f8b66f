"""The part of the log that no fold has passed yet, read by its headers alone.

    slots     one listing, from the floor of the head
    headers   one ranged GET for each slot, in parallel, HEADERS_MAX at most

Used where a namespace is described and not read: for statistics, and for jobs that are open. Where
the log is longer than that, only its beginning is known. An overview has to stay cheap; a log of
that length wants a fold first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reef.engine.log import Log, Slot
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.tail import ingested_segments
from reef.engine.wal_headers import HeaderTask, run_header_task
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.wal_object import WalHeader, WalKind
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["HEADERS_MAX", "Unfolded", "read_unfolded"]

HEADERS_MAX = 1000
"""As many as one page of a listing: about a second of requests."""


@dataclass(frozen=True, slots=True)
class Unfolded:
    """The log behind a head, up to a gap, to damage, or to the bound."""

    open_jobs: tuple[OpenJob, ...]
    ingested: tuple[SegmentEntry, ...]
    """The segments of loads that count."""
    headers: dict[int, WalHeader] = field(default_factory=dict)
    """By LSN: all that could be read, behind a gap too."""


def read_unfolded(
    store: Store,
    names: Namespace,
    head: Manifest,
    slots: Sequence[Slot] | None = None,
    headers_max: int = HEADERS_MAX,
) -> Unfolded:
    """Pass the headers of the log through the rules; without `slots` they are listed."""
    if slots is None:
        slots = Log(store, names).filled(head.wal_floor)
    sizes = [(slot.lsn, slot.size) for slot in slots[:headers_max]]
    read = run_header_task(HeaderTask(store, names, tuple(sizes)))
    found = {lsn: h for (lsn, _), h in zip(sizes, read, strict=True) if isinstance(h, WalHeader)}
    rules, ingested = LogReader(head), []
    for lsn in contiguous([*found, *head.skipped_lsns], head.wal_floor):
        if lsn in head.skipped_lsns:
            rules.skip()
            continue
        verdict = rules.judge(found[lsn]).verdict
        if verdict is Verdict.APPLIES and found[lsn].kind is WalKind.INGEST:
            ingested += ingested_segments(found[lsn], head.schema)
    return Unfolded(rules.open_jobs, tuple(ingested), found)
