"""Recovery: finishes the records that nobody has finished.

It runs on every opening for writing, for the namespace that is opened, and for the whole bucket
by `reef store recover URL`. It may run at any time, beside writers and other recoveries: it does
what every loser of a race does (`reef.stores.two_phase.finishing`). A record whose bytes are
nowhere is reported, and stays.

`after_restore` is for an operator who has restored the register from a backup (H72), with all
writers stopped:

    1  begin an incarnation    creations that began before the restore notice it at their commit
    2  delete the sources that no record names    a forgotten writer's COPY finds nothing to copy
    3  recover                 records of the backup are finished, or superseded by what is there
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from reef.stores.base import Store
from reef.stores.two_phase.finishing import Finish
from reef.stores.two_phase.record import Record, destination_of, same_attempt
from reef.stores.two_phase.store import find_two_phase

__all__ = ["RecoveryReport", "after_restore", "recover"]


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery found unfinished, and what became of it: destinations."""

    finished: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    """Finished by somebody else meanwhile."""
    stuck: tuple[Record, ...] = ()
    """Their bytes are nowhere. Never deleted by itself."""
    superseded: tuple[Record, ...] = ()
    """Their destinations have other bytes, of a creation that a restored register forgot."""
    sources_removed: tuple[str, ...] = ()
    """After a restore: temporary objects that no record names."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields; those that only a restore fills are left out while they are empty."""
        fields = asdict(self)
        restored = ("superseded", "sources_removed")
        return {name: value for name, value in fields.items() if value or name not in restored}


def recover(store: Store, prefix: str = "") -> RecoveryReport:
    """Finish all records below a prefix; does nothing on a store without a register."""
    two_phase = find_two_phase(store)
    if two_phase is None:
        return RecoveryReport()
    ended: dict[Finish, list[Record]] = {finish: [] for finish in Finish}
    for record in two_phase.register.all(prefix, unfinished=True):
        ended[two_phase.finisher.finish(record)].append(record)
    return RecoveryReport(
        tuple(record.destination for record in ended[Finish.FINISHED]),
        tuple(record.destination for record in ended[Finish.DONE]),
        tuple(ended[Finish.STUCK]),
        tuple(ended[Finish.SUPERSEDED]),
    )


def after_restore(store: Store) -> RecoveryReport:
    """Recover a bucket whose register was restored from a backup; no writer may be open."""
    two_phase = find_two_phase(store)
    if two_phase is None:
        return RecoveryReport()
    two_phase.register.begin_incarnation()
    sources = {
        info.key: destination
        for info in two_phase.inner.list()
        if (destination := destination_of(info.key)) is not None
    }
    records = two_phase.register.read(sorted(set(sources.values())))
    named = {record.destination: record.source for record in records}
    removed = tuple(
        source
        for source, destination in sources.items()
        if not same_attempt(named.get(destination, ""), source)
    )
    if removed:
        two_phase.inner.delete_many(removed)
    return replace(recover(store), sources_removed=removed)
