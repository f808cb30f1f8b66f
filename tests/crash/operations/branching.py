"""Crashes within a merge, a rollback, the drop of a branch with its release, and a purge."""

from reef.jobs import compact, fold, purge, sweep
from tests.crash.operations import ABSENT, NAME, Operation
from tests.support.compaction import head_of

CHILD = "child"
HOUR_S = 3600.0
AT_BRANCH = {b"a": b"1", b"b": b"2", b"c": b"3"}


def _branched(hand):
    """Leave a branch with changes of its own, and an origin that has moved on."""
    hand.put({b"a": b"1", b"b": b"2"})
    fold(hand.db, NAME)
    hand.put({b"c": b"3"})
    hand.facts["lsn"] = hand.db.reader(NAME).last_lsn
    hand.db.branch(NAME, CHILD)
    with hand.db.writer(CHILD, background=False) as writer:
        writer.put("a", b"of the branch")
        writer.delete("b")
        writer.put("d", b"of the branch")
    hand.put({b"c": b"of the origin"})
    hand.sleep(10.0)


def _becomes(hand, rows, work):
    """Run a commit that changes rows, all of them or none."""
    for key, value in rows.items():
        hand.ledger.sent(key, value)
    work()
    for key, value in rows.items():
        hand.ledger.acknowledged(key, value)


MERGED = {b"a": b"of the branch", b"b": ABSENT, b"d": b"of the branch"}
BEFORE_MERGE = {b"a": b"1", b"b": b"2", b"d": ABSENT}


def _merge(hand):
    """Merge; run again after a crash, it does nothing or all of it."""
    _becomes(hand, MERGED, lambda: hand.db.merge(CHILD, NAME))


def _merged_whole(hand):
    """Check that a merge is visible as a whole or not at all, and the branch is unchanged."""
    rows = dict(hand.db.reader(NAME).scan())
    seen = {key: rows.get(key) for key in MERGED}
    assert seen in (MERGED, BEFORE_MERGE)
    own = {b"a": b"of the branch", b"c": b"3", b"d": b"of the branch"}
    assert dict(hand.db.reader(CHILD).scan()) == own


def _roll_back(hand):
    """Return to the rows at which the branch was made."""
    rows = {b"a": b"1", b"b": b"2", b"c": b"3", b"d": ABSENT}
    _becomes(hand, rows, lambda: hand.db.rollback(NAME, {"lsn": hand.facts["lsn"]}))


def _drop_branch(hand):
    """Drop the branch, and sweep both sides until its pin is removed."""
    if CHILD in hand.db.namespaces():
        hand.db.drop(CHILD)
    for _ in range(8):
        for name in (CHILD, NAME):
            sweep(hand.db, name, apply=True, force=True, retain_generations_s=0.0, dropped_s=HOUR_S)
        hand.sleep(HOUR_S)
    assert not head_of(hand.db, NAME).branches


def _then_drop(work):
    """Return an operation that is run again, after which the branch is dropped."""

    def again(hand):
        work(hand)
        _drop_branch(hand)

    return again


def _history(hand):
    """Leave versions of a key in the log, in segments, and in a retained generation."""
    hand.put({b"a": b"1", b"secret": b"first", b"z": b"1"})
    fold(hand.db, NAME)
    hand.put({b"secret": b"second"})
    fold(hand.db, NAME)
    compact(hand.db, NAME, full=True)
    hand.put({b"secret": b"third", b"m": b"1"})
    hand.sleep(10.0)


def _purge(hand):
    """Erase a key; after a crash the next run finishes."""
    hand.ledger.sent(b"secret", ABSENT)
    report = purge(hand.db, NAME, ["secret"], apply=True, wait_s=4 * HOUR_S)
    assert report.erased
    hand.ledger.acknowledged(b"secret", ABSENT)


def _two_namespaces(hand):
    """Leave another namespace, whose rows are not looked at."""
    hand.put({b"a": b"1"})
    hand.db.create("other")


def _snapshot_all(hand):
    """Take a snapshot of both."""
    hand.db.snapshot_all("nightly")


def _snapshot_again(hand):
    """Release what the crash has left; then the name is free, and no pin is left behind."""
    for one in hand.db.bucket_snapshots():
        hand.db.release_snapshot_all(one.name)
    assert [hand.db.snapshots(name) for name in (NAME, "other")] == [[], []]
    assert sorted(hand.db.snapshot_all("nightly")) == sorted([NAME, "other"])
    hand.db.release_snapshot_all("nightly")


OPERATIONS = [
    Operation(
        "a snapshot of all namespaces",
        _snapshot_all,
        _two_namespaces,
        again=_snapshot_again,
        reaches=("snapshots recorded", "snapshots pinned"),
    ),
    Operation(
        "a merge of a branch", _merge, _branched, also=_merged_whole, again=_then_drop(_merge)
    ),
    Operation("a rollback", _roll_back, _branched, again=_then_drop(_roll_back)),
    Operation("the drop of a branch", _drop_branch, _branched),
    Operation(
        "a purge", _purge, _history, reaches=("purge rewritten", "append sent", "compact staged")
    ),
]
