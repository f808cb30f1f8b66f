"""Crashes within drop, undrop, re-creation, branch and rename; with and without a registry."""

from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.jobs import fold, sweep
from tests.crash.operations import ABSENT, NAME, Operation
from tests.support.compaction import head_of

OTHER = "others"


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


def _recreate(hand):
    """Drop it and make it again: from the drop on the rows may be gone, and at the end they are."""
    for key in (b"a", b"b"):
        hand.ledger.sent(key, ABSENT)
    _drop(hand)
    _registered(hand).create(NAME)
    for key in (b"a", b"b"):
        hand.ledger.acknowledged(key, ABSENT)


def _is_listed(hand):
    """Check that registry and manifests agree."""
    assert _registered(hand).namespaces() == hand.db.namespaces()


def _finish(hand):
    """Re-create a name that a crash has left dropped, by opening it."""
    if NAME in hand.db.namespaces(dropped=True):
        _registered(hand).create(NAME)


def _branch_twice(hand):
    """Branch it, and the branch; a crash leaves a branch whole, or none."""
    _registered(hand).branch(NAME, OTHER)
    _registered(hand).branch(OTHER, "copies")


def _branch_again(hand):
    """Make the branches that are missing; drop all, and sweep until no pin is left."""
    for source, name in ((NAME, OTHER), (OTHER, "copies")):
        if name not in hand.db.namespaces():
            _registered(hand).branch(source, name)
    _branches_are_whole(hand)
    for name in ("copies", OTHER):
        _registered(hand).drop(name)
    hand.sleep(26 * 3600.0)
    for _ in range(6):
        for name in ("copies", OTHER, NAME):
            sweep(hand.db, name, apply=True, force=True, retain_generations_s=0.0)
            hand.sleep(3600.0)
    assert not head_of(hand.db, NAME).branches


def _branches_are_whole(hand):
    """Check that every branch that is there has all rows."""
    for name in {OTHER, "copies"} & set(hand.db.namespaces()):
        with hand.db.reader(name) as reader:
            assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}


def _rename_and_back(hand):
    """Rename it, and back: repeating both finishes whatever a crash interrupted."""
    db = _registered(hand)
    if NAME in hand.db.namespaces():
        db.rename(NAME, OTHER)
    db.rename(OTHER, NAME)


def _rename_back(hand):
    """Whichever name the crash left, all rows are there under one of them."""
    if OTHER in hand.db.namespaces():
        _registered(hand).rename(OTHER, NAME)


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
        _recreate,
        _rows,
        _finish,
        also=_is_listed,
        reaches=(*POINTS, "successor announced", "successor recorded"),
    ),
    Operation(
        "a branch, and a branch of it",
        _branch_twice,
        _rows,
        also=_branches_are_whole,
        again=_branch_again,
        reaches=("branch pinned",),
    ),
    Operation(
        "a rename and back",
        _rename_and_back,
        _rows,
        _rename_back,
        also=_is_listed,
        reaches=("rename announced", "rename reserved", "rename fenced"),
    ),
]
