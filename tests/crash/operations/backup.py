"""Backups and restores, with the set in the same bucket: one crash leaves both as they are."""

from contextlib import suppress

from reef.errors import ConflictError
from reef.jobs import backup, fold, list_backups, restore, verify_backup
from tests.crash.operations import ABSENT, NAME, Operation
from tests.support.bulk_jobs import ingest
from tests.support.prefixed import Prefixed

COPY = "copy"


def _set(hand):
    return Prefixed(hand.db.store)


def _rows(hand):
    """Leave segments, a load that is not folded, and rows in the log."""
    hand.put({b"k%d" % n: b"old %d" % n for n in range(3)})
    fold(hand.db, NAME)
    ingest(hand.db.store, NAME, {b"bulk": b"loaded"})
    hand.ledger.noted({b"bulk": b"loaded"})
    hand.put({b"k0": b"newer", b"k1": ABSENT})


def _backed_up(hand):
    _rows(hand)
    backup(hand.db, NAME, _set(hand))


def _back_up(hand):
    backup(hand.db, NAME, _set(hand))


def _second(hand):
    """An earlier backup, and more of everything since."""
    _backed_up(hand)
    fold(hand.db, NAME)
    hand.put({b"k2": b"newest"})


def _only_complete_ones(hand):
    """Every descriptor that is there is that of a backup which can be restored."""
    found = list_backups(_set(hand))
    assert verify_backup(_set(hand), deep=True).problems == []
    if found:
        name = f"check-{len(found)}"
        restore(_set(hand), hand.db, name, namespace=NAME, backup=found[-1].id)
        hand.db.drop(name)


def _restore(hand):
    restore(_set(hand), hand.db, COPY, namespace=NAME)


def _restore_again(hand):
    with suppress(ConflictError):  # the first one had finished
        _restore(hand)
    assert _rows_of(hand, COPY) == _rows_of(hand, NAME)


def _not_there_or_whole(hand):
    """The restored namespace is visible with all of its rows, or not at all."""
    if COPY in hand.db.namespaces():
        assert _rows_of(hand, COPY) == _rows_of(hand, NAME)


def _rows_of(hand, name):
    with hand.db.reader(name) as reader:
        return dict(reader.scan())


def _dropped_copy(hand):
    """The name of the restored namespace was used before."""
    _backed_up(hand)
    with hand.db.writer(COPY, create=True, background=False) as writer:
        writer.put("other", b"rows")
    hand.db.drop(COPY)


OPERATIONS = [
    Operation("a backup", _back_up, _rows, also=_only_complete_ones, reaches=("backup copied",)),
    Operation("a second backup", _back_up, _second, also=_only_complete_ones),
    Operation(
        "a restore",
        _restore,
        _backed_up,
        also=_not_there_or_whole,
        again=_restore_again,
        reaches=("restore copied",),
    ),
    Operation(
        "a restore over a dropped name",
        _restore,
        _dropped_copy,
        also=_not_there_or_whole,
        again=_restore_again,
        reaches=("restore prepared", "successor announced", "successor recorded"),
    ),
]
