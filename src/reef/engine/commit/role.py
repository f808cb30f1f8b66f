"""Whether the writer role is free, for those who would not take it from someone.

Nobody registers as a writer: the log alone tells. Whoever has put a fence or batches there within
the last minute holds the role, as far as can be told. One that was closed since leaves no trace
and counts too; one that is open and has been silent for longer does not. So this keeps people
from accidents and excludes nobody: that two writers never both commit is for the fences to see to.

Ages go by the store's clock, which dates the objects (H30). A fold may already have passed what
was just committed, so the search goes on below the floor for as long as objects are that young.
"""

from collections.abc import Iterator

from reef.engine.log import Log
from reef.errors import ConflictError, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader
from reef.manifest.head import locate
from reef.paths import Namespace, number_of
from reef.stores import Store

__all__ = ["RECENT_S", "check_role_is_free"]

RECENT_S = 60.0
"""For how long after its last object a writer counts as one that is there."""


def check_role_is_free(store: Store, name: str) -> None:
    """Raise ConflictError if another writer has committed or fenced within the last minute.

    A namespace that does not exist has no writer. Nothing is put into the namespace.
    """
    try:
        heads = locate(store, name)
    except NotFoundError:
        return
    namespace, head = heads.names, heads.found.manifest
    found = _newest_writer(store, namespace, head)
    if found is None:
        return
    header, age_s = found
    raise ConflictError(
        f"writer {header.writer_id} of epoch {header.epoch} has written to {namespace.name} "
        f"{age_s:.0f} s ago, at LSN {header.lsn}",
        hint=f"Pass take_over=True to fence it, or wait until it was silent for {RECENT_S:.0f} s",
        namespace=namespace.name,
        writer_id=header.writer_id,
        epoch=header.epoch,
        age_s=age_s,
        lsn=header.lsn,
    )


def _newest_writer(
    store: Store, namespace: Namespace, head: Manifest
) -> tuple[WalHeader, float] | None:
    """Return the newest object of a writer that is young enough, and its age."""
    log = Log(store, namespace)
    for lsn, age_s in _young(store, namespace, head):
        if lsn in head.skipped_lsns:  # given up by a repair: it cannot be read
            continue
        found = log.read(lsn)
        if found is not None and found.header.kind.of_writer:
            return found.header, age_s
    return None


def _young(store: Store, namespace: Namespace, head: Manifest) -> Iterator[tuple[int, float]]:
    """Yield the LSNs that were filled within the last minute with their ages, the last first."""
    dates = _dates(store, namespace, head)
    first = next(dates, None)
    if first is None:
        return
    now_s = store.now()
    oldest_s = now_s - RECENT_S - store.capabilities.clock_resolution_s
    lsn, date_s = first
    while True:
        if date_s >= oldest_s:
            yield lsn, max(0.0, now_s - date_s)
        elif lsn < head.wal_floor:
            return  # what is below it is older still
        following = next(dates, None)
        if following is None:
            return
        lsn, date_s = following


def _dates(store: Store, namespace: Namespace, head: Manifest) -> Iterator[tuple[int, float]]:
    """Yield the filled slots with their dates, the last first: listed, then asked one by one."""
    listed = list(store.list(namespace.wal, namespace.wal_object(head.wal_floor - 1)))
    for info in reversed(listed):
        lsn = number_of(info.key)
        if lsn is not None:
            yield lsn, info.last_modified_s
    for lsn in range(head.wal_floor - 1, head.wal_base - 1, -1):
        try:
            yield lsn, store.head(namespace.wal_object(lsn)).last_modified_s
        except NotFoundError:  # swept, so it was older than a grace period
            return
