"""In the middle of a drop, of bringing it back, of making it anew; with and without a registry."""

from reef.engine.database import Database
from reef.engine.registry import Registry
from reef.jobs import fold
from tests.crash.operations import ABSENT, NAME, Operation


def _registered(hand):
    """Return the database with a registry, as `reef.open` makes it."""
    return Database(hand.db.store, registry=Registry(hand.db.store))


def _rows(hand):
    hand.put({b"a": b"1"})
    fold(hand.db, NAME)
    hand.put({b"b": b"2"})


def _drop(hand):
    if NAME in hand.db.namespaces():
        _registered(hand).drop(NAME)


def _drop_and_bring_back(hand):
    _drop(hand)
    _registered(hand).undrop(NAME)


def _bring_back(hand):
    """Whatever a death left of a drop, undrop is the way back; all rows are there."""
    if NAME in hand.db.namespaces(dropped=True):
        _registered(hand).undrop(NAME)


def _make_anew(hand):
    """Drop it and make it again: from the drop on the rows may be gone, and at the end they are."""
    for key in (b"a", b"b"):
        hand.ledger.sent(key, ABSENT)
    _drop(hand)
    _registered(hand).create(NAME)
    for key in (b"a", b"b"):
        hand.ledger.answered(key, ABSENT)


def _is_listed(hand):
    """The registry says what the manifests say."""
    assert _registered(hand).namespaces() == hand.db.namespaces()


def _finish(hand):
    """A name that a death left dropped is made anew by whoever opens it next."""
    if NAME in hand.db.namespaces(dropped=True):
        _registered(hand).create(NAME)


POINTS = ("drop fenced", "registry noted", "registry behind")
OPERATIONS = [
    Operation(
        "a drop and an undrop",
        _drop_and_bring_back,
        _rows,
        _bring_back,
        also=_is_listed,
        reaches=POINTS,
    ),
    Operation(
        "a namespace created again",
        _make_anew,
        _rows,
        _finish,
        also=_is_listed,
        reaches=(*POINTS, "successor announced", "successor recorded"),
    ),
]
