"""Repair and rebuild: killed anywhere and run again, they have lost nothing more."""

from reef.jobs import fold, rebuild, repair, verify
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from tests.crash.operations import ABSENT, NAME, Operation
from tests.support.bulk_jobs import ingest
from tests.support.damage import damage

USERS = Namespace(NAME)


def _sample(hand):
    """Rows in a segment, in the log and in a bulk load; return the objects by kind."""
    db = hand.db
    with db.writer(NAME, background=False) as writer:
        hand.write(writer, {b"a": b"1", b"b": b"2"})
        fold(db, NAME)
        lsn = writer.put("c", b"3").lsn
        bulk = ingest(db.store, NAME, {b"bulk": b"loaded"})
        hand.write(writer, {b"d": b"4"})
    hand.ledger.noted({b"c": b"3", b"bulk": b"loaded"})
    head = HeadFinder(db.store, USERS).find().manifest
    return {
        "wal": USERS.wal_object(lsn),
        "begin": USERS.wal_object(bulk - 1),
        "segment": USERS.segment(head.segments[0].id),
        "manifest": USERS.manifest(head.generation),
    }


def _damaged(hows, lost=()):
    """Damage the namespace; keys in `lost` cannot be recovered."""

    def prepare(hand):
        places = _sample(hand)
        for what, how in hows.items():
            damage(hand.db.store, places[what], how)
        hand.ledger.noted(dict.fromkeys(lost, ABSENT))

    return prepare


def _repairs(hand):
    repair(hand.db, NAME, apply=True)
    assert verify(hand.db, NAME, deep=True).ok


def _without_manifests(hand):
    _sample(hand)
    keys = [info.key for info in hand.db.store.list(USERS.manifests)]
    hand.db.store.delete_many(keys)


def _rebuilds(hand):
    if not list(hand.db.store.list(USERS.manifests)):
        rebuild(hand.db, NAME, apply=True)
    assert rebuild(hand.db, NAME).rows_equal


OPERATIONS = [
    Operation(
        "a repair of log and segment",
        _repairs,
        _damaged({"wal": "header", "segment": "column block"}, lost=[b"c"]),
        _repairs,
        reaches=("repair fenced", "repair staged", "repair published"),
    ),
    Operation(
        "a repair that saves intact rows",
        _repairs,
        _damaged({"wal": "footer", "begin": "magic"}),
        _repairs,
        reaches=("repair fenced", "repair staged", "repair published"),
    ),
    Operation(
        "a repair of the head and a hole",
        _repairs,
        _damaged({"manifest": "body", "begin": "deleted"}),
        _repairs,
        reaches=("repair restarted", "repair fenced", "repair staged", "repair published"),
    ),
    Operation(
        "a rebuild without manifests",
        _rebuilds,
        _without_manifests,
        _rebuilds,
        reaches=("rebuild staged",),
    ),
]
