"""Damaged and hostile segments in the native reader: an error, not a wrong row or a crash."""

import random
from pathlib import Path

import pytest

import reef
import reef.jobs
from reef.spark.options import ReadOptions
from reef.spark.planner import LOG_BYTES_MAX, _log
from reef.spark.read_plan import take_pin
from tests.spark.test_native import SCHEMA, row_of

ROUNDS = 3000


@pytest.fixture(scope="module")
def fuzz(java_program):
    """Return a call that reads damaged copies of a segment, in little memory."""
    run = java_program("SegmentFuzz")
    return lambda segment, tail_bytes, seed: run(segment, tail_bytes, "string", seed, ROUNDS)


def written(db, seed):
    """Make a namespace with puts, patches, deletes, range deletes and expiry in its log."""
    choices = random.Random(seed)
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert([row_of(choices, number) for number in range(150)])
        writer.patch([{"id": f"k{n:04}", "n": n, "text": "p"} for n in range(40, 60)])
        writer.upsert([row_of(choices, n) for n in range(20)], ttl_s=9999)
        writer.delete("k0030")
        writer.delete_range("k0100", "k0110")


@pytest.mark.parametrize("seed", range(2))
def test_an_uncompressed_segment_survives_any_bytes(db, url, fuzz, seed):
    """Lengths, offsets and counts of every structure are checked before they are used."""
    written(db, seed)
    options = ReadOptions.of({"path": url, "namespace": "t"})
    store = options.location.open()
    pin = take_pin(store, *options.target(store), 60, sent_bytes_max=LOG_BYTES_MAX)
    log = _log(pin)
    done = fuzz(log["file"], log["tail_bytes"], seed)
    Path(log["file"]).unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "errors" in done.stdout


def test_a_compressed_segment_survives_any_bytes(db, fuzz, tmp_path):
    """The same with blocks that are compressed: streams with false lengths."""
    written(db, 5)
    reef.jobs.fold(db, "t", group_bytes=2000)
    (info,) = db.store.list("namespaces/t/segments/")
    (entry,) = _entries(db)
    segment = tmp_path / "a.seg"
    segment.write_bytes(db.store.get(info.key))
    done = fuzz(segment, entry.tail_bytes, 5)
    assert done.returncode == 0, done.stderr[-3000:]


def _entries(db):
    """Return the segments that the manifest names."""
    from reef.manifest.head import locate

    return locate(db.store, "t").found.manifest.segments
