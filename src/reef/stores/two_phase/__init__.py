"""Two-phase compare-and-swap: create-only writes on any store, with a register next to it.

A store without conditional PUT cannot say who came first. A transactional register can: a small
table with one record for each name that was ever created. Of several writers of one name, one
inserts the record; the object follows by a copy, made by that writer or by the next process.

    register    records, and the interface of a register: `sqlite`, `sql` and `dynamodb` are some
    store       `TwoPhase`, the store: creating and deleting
    finishing   makes a record's object appear: for losers of a race, and after crashes
    recovery    finishes all unfinished records; removes the leftovers of crashes
"""

from reef.stores.two_phase.register import Record, Register
from reef.stores.two_phase.store import (
    Leftovers,
    RegisterRecovery,
    TwoPhase,
    after_restore,
    collect,
    find_two_phase,
    recover,
)

__all__ = [
    "Leftovers",
    "Record",
    "Register",
    "RegisterRecovery",
    "TwoPhase",
    "after_restore",
    "collect",
    "find_two_phase",
    "recover",
]
