"""Two-phase compare-and-swap: create-only writes on any store, with a register beside it.

A store without conditional PUT cannot say who came first. A transactional register can: a small
table with one record for each name that was ever created. Of several writers of one name, one
inserts the record; the object follows by a copy, made by that writer or by whoever comes next.

    record      the record, and the names of temporary objects
    register    what Reef asks of a register; `sqlite`, `sql` and `dynamodb` are registers
    store       `TwoPhase`, the store: creating and deleting
    finishing   what makes a record's object appear: for losers of a race, and after crashes
    recovery    finishes everything that is unfinished; what to do after a restore
    collecting  removes what crashes left: old temporary objects, and records of what was deleted
    opening     from the URL of a register to the register
"""

from reef.stores.two_phase.collecting import Collected, collect
from reef.stores.two_phase.opening import open_register
from reef.stores.two_phase.record import Record
from reef.stores.two_phase.recovery import RecoveryReport, after_restore, recover
from reef.stores.two_phase.register import Register
from reef.stores.two_phase.store import TwoPhase, find_two_phase

__all__ = [
    "Collected",
    "Record",
    "RecoveryReport",
    "Register",
    "TwoPhase",
    "after_restore",
    "collect",
    "find_two_phase",
    "open_register",
    "recover",
]
