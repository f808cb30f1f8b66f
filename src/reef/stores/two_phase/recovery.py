"""Recovery: finishes the records that nobody has finished.

It runs on every opening for writing, for the namespace that is opened, and for the whole bucket
by `reef store recover URL`. It may run at any time, beside writers and other recoveries: it does
what every loser of a race does (`reef.stores.two_phase.finishing`). A record whose bytes are
nowhere is reported, and stays.
"""

from dataclasses import asdict, dataclass
from typing import Any

from reef.stores.base import Store
from reef.stores.two_phase.finishing import Finish
from reef.stores.two_phase.record import Record
from reef.stores.two_phase.store import find_two_phase

__all__ = ["RecoveryReport", "recover"]


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery found unfinished, and what became of it: destinations."""

    finished: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    """Finished by somebody else meanwhile."""
    stuck: tuple[Record, ...] = ()
    """Their bytes are nowhere. Never deleted by itself."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    )
