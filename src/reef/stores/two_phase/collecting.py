"""Collection: what deaths left beside the log, for the sweep (H23, H24).

- A temporary object goes when it is old and its destination is decided: the record there names
  another source, or is committed. A source that no record names stays while its destination is
  open, however old it is: its writer may only be standing still, and its insert may yet win.
  Below the collected boundary nobody can win any more, and it goes.
- A record goes when its destination lies below the collected boundary and has no object. A record
  without an object above the boundary is either under way or an alarm; one with an object keeps
  the name taken. Deleting an object deletes its record, so these are what a death in between left.

The caller knows the boundary: which numbers of the log, and which generations, no root needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reef.stores.base import ObjectInfo, Store
from reef.stores.two_phase.record import Record, destination_of, same_attempt
from reef.stores.two_phase.store import TwoPhase, find_two_phase

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be."""

    temporaries: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    """Their destinations."""


def collect(
    store: Store,
    prefix: str,
    *,
    is_below: Callable[[str], bool],
    older_than_s: float,
    apply: bool,
) -> Collected:
    """Remove leftovers below a prefix; nothing on a store without a register.

    `is_below` tells whether a destination lies below the collected boundary.
    """
    two_phase = find_two_phase(store)
    if two_phase is None:
        return Collected()
    # Records before objects: what is recorded and finished by now is in the listing.
    records = {record.destination: record for record in two_phase.register.all(prefix)}
    infos = list(two_phase.inner.list(prefix))
    sources = tuple(_old_sources(two_phase, infos, is_below, older_than_s))
    there = {info.key for info in infos}
    gone = tuple(key for key in records if key not in there and is_below(key))
    if apply:
        two_phase.inner.delete_many(sources)
        two_phase.delete_many(gone)
    return Collected(sources, gone)


def _old_sources(
    two_phase: TwoPhase,
    infos: list[ObjectInfo],
    is_below: Callable[[str], bool],
    older_than_s: float,
) -> Iterator[str]:
    temporary = {i.key: key for i in infos if (key := destination_of(i.key)) is not None}
    if not temporary:
        return
    latest_s = two_phase.now() - older_than_s - two_phase.capabilities.clock_resolution_s
    old = [info.key for info in infos if info.key in temporary and info.last_modified_s < latest_s]
    # Read now: decided once is decided for ever.
    destinations = sorted({temporary[key] for key in old})
    records = {record.destination: record for record in two_phase.register.read(destinations)}
    for source in old:
        destination = temporary[source]
        if _is_useless(source, records.get(destination), below=is_below(destination)):
            yield source


def _is_useless(source: str, record: Record | None, *, below: bool) -> bool:
    """Whether nobody will ever copy from a source."""
    if record is None:
        return below
    return not same_attempt(record.source, source) or record.committed
