"""In the middle of a fold, a compaction, a sweep and of building an index, and after a publish."""

import pyarrow as pa

import reef
from reef.config import BackgroundSettings
from reef.jobs import build_indexes, compact, fold, sweep
from reef.jobs.background import Background
from reef.manifest.invariants import is_balanced
from tests.crash.operations import ABSENT, NAME, Operation
from tests.support.bulk_jobs import ingest, stage
from tests.support.compaction import SMALL, head_of

TINY = {**SMALL, "segment_bytes_min": 20, "segment_bytes": 40, "segment_bytes_max": 60}
DAY_S = 24 * 3600.0
TABLE = pa.schema([("id", pa.string()), ("n", pa.int64()), ("word", pa.string())])


def _log(hand):
    """Leave all kinds of writes and a bulk load in the log, above a segment."""
    hand.put({b"k%d" % n: b"old %d" % n for n in range(3)})
    fold(hand.db, NAME)
    hand.put({b"k0": b"newer", b"k1": ABSENT, b"k3": b"3"})
    ingest(hand.db.store, NAME, {b"bulk": b"loaded"})
    hand.ledger.noted({b"bulk": b"loaded"})
    with hand.db.writer(NAME, background=False) as writer:
        writer.delete_range("k2", "k3")
        hand.ledger.noted({b"k2": ABSENT})


def _patched_log(hand):
    """Leave a patch in the log whose row is in a segment."""
    hand.db.create(NAME, TABLE)
    with hand.db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": key, "n": 1, "word": "one"} for key in "xy"])
        fold(hand.db, NAME)
        writer.patch([{"id": "x", "n": 2}])
    one = {"id": "y", "n": 1, "word": "one"}
    hand.ledger.noted({"x": {"id": "x", "n": 2, "word": "one"}, "y": one})


def _fold(hand):
    fold(hand.db, NAME, group_bytes=60)


def _segments(hand):
    """Leave segments that overlap, with deletes in them, and a snapshot of the past."""
    rows = {b"k%d" % n: b"x" * 30 for n in range(6)}
    for value in (b"old", b"x" * 30):
        hand.put({**dict.fromkeys(rows, value), b"gone": b"soon"})
        fold(hand.db, NAME, group_bytes=60)
    hand.db.snapshot(NAME, name="before", ttl_s=3600.0)
    with hand.db.writer(NAME, background=False) as writer:
        hand.write(writer, {b"gone": ABSENT})
        writer.put("short", b"lived", ttl_s=0.001)
    hand.sleep(1.0)
    hand.ledger.noted({b"short": ABSENT})
    fold(hand.db, NAME, group_bytes=60)


def _past_is_there(hand):
    """Check that the snapshot shows the same rows, and that the set hash is conserved."""
    with hand.db.reader(NAME, snapshot="before") as reader:
        seen = dict(reader.scan())
    assert seen == {**{b"k%d" % n: b"x" * 30 for n in range(6)}, b"gone": b"soon"}
    assert is_balanced(head_of(hand.db, NAME))


def _apart(hand):
    """Leave segments that have no key in common: they can be moved, and then joined."""
    for first in (0, 4, 8):
        hand.put({b"k%02d" % n: b"%d" % n * 20 for n in range(first, first + 3)})
        fold(hand.db, NAME, group_bytes=60)


def _compacts(**settings):
    def work(hand):
        compact(hand.db, NAME, **settings)

    return work


def _moved(hand):
    _apart(hand)
    moved = compact(hand.db, NAME, strategy="leveled", **{**SMALL, "level0_bytes": 1})
    assert moved.moved


def _joins(hand):
    """Neighbours of level 1 are too small by these settings."""
    report = compact(hand.db, NAME, strategy="leveled", **JOINING)
    assert hand.facts.setdefault("joined", report.joined), "this is about joins"


JOINING = {**SMALL, "segment_bytes_min": 2000, "segment_bytes": 3000, "segment_bytes_max": 4000}


def _leftovers(hand):
    """Leave something of every kind that a sweep takes: replaced, folded, orphaned, expired."""
    _segments(hand)
    compact(hand.db, NAME, full=True, **SMALL)
    stage(hand.db.store, NAME, {b"never": b"seen"}, "nobodys")
    hand.db.reader(NAME, pin=True)  # not closed: it expires
    hand.sleep(3 * DAY_S)
    hand.put({b"k0": b"later"})
    hand.sleep(3600.0)


def _condemned(hand):
    _leftovers(hand)
    sweep(hand.db, NAME, apply=True, force=True, retain_generations_s=0.0)
    hand.sleep(DAY_S)


def _sweeps(hand):
    sweep(hand.db, NAME, apply=True, force=True, retain_generations_s=0.0)


VECTORS = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), 2))])


def _unindexed(hand):
    """Leave segments without the vector index that the namespace should have."""
    hand.db.create(NAME, VECTORS, indexes=[reef.vector_index("v", rows_min=10)])
    rows = [{"id": f"k{n:02}", "v": [float(n), float(n % 7)]} for n in range(40)]
    with hand.db.writer(NAME, background=False) as writer:
        writer.upsert(rows)
    fold(hand.db, NAME)
    hand.ledger.noted({row["id"]: row for row in rows})


def _indexes(hand):
    build_indexes(hand.db, NAME)


def _neighbours_are_found(hand):
    with hand.db.reader(NAME) as reader:
        assert reader.search(vector=("v", [8.0, 1.0]), k=1)["id"].to_pylist() == ["k08"]


def _background(hand):
    """Everything, as it runs behind a writer: its steps, one behind the other."""
    settings = BackgroundSettings(
        fold_interval_s=0.0, sweep_interval_s=0.0, retain_generations_s=0.0
    )
    with hand.db.writer(NAME, background=False) as writer:
        hand.write(writer, {b"k0": b"from behind"})
        worker = Background(hand.db, writer, settings)
        worker._compactor.settings = worker._compactor.settings.changed(SMALL)
        steps = [worker.step() for _ in range(3)]
        worker.stop()
    hand.facts.setdefault("steps", [step and step.job for step in steps])
    assert hand.facts["steps"] == ["fold", "compact", "sweep"]


OPERATIONS = [
    Operation("a fold", _fold, _log, reaches=("fold staged",)),
    Operation("a fold of patches", _fold, _patched_log, reaches=("fold staged",)),
    Operation(
        "a full compaction",
        _compacts(full=True, **TINY),
        _segments,
        also=_past_is_there,
        reaches=("compact staged",),
    ),
    Operation(
        "a tiered compaction",
        _compacts(**SMALL),
        _segments,
        also=_past_is_there,
        reaches=("compact staged",),
    ),
    Operation(
        "a leveled compaction",
        _compacts(strategy="leveled", **{**SMALL, "level0_bytes": 1}),
        _segments,
        also=_past_is_there,
        reaches=("compact staged",),
    ),
    Operation(
        "a move down",
        _compacts(strategy="leveled", **{**SMALL, "level0_bytes": 1}),
        _apart,
        reaches=("compact staged",),
    ),
    Operation("a join of neighbours", _joins, _moved, reaches=("compact staged",)),
    Operation("a sweep that condemns", _sweeps, _leftovers, reaches=("sweep condemned",)),
    Operation("a sweep that deletes", _sweeps, _condemned, reaches=("sweep deleted",)),
    Operation(
        "an index of vectors",
        _indexes,
        _unindexed,
        also=_neighbours_are_found,
        reaches=("centroids stored",),
    ),
    Operation(
        "background work",
        _background,
        _segments,
        reaches=("fold staged", "compact staged", "sweep condemned"),
    ),
]
