"""Edges of compaction that one line each protects; every test here kills a mutant."""

import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.formats.manifest import OpenJob
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import OpKind
from reef.jobs import Compactor, compact
from reef.jobs.compact.job import CompactJob
from reef.jobs.compact.merge import Merger
from reef.jobs.compact.plan import CompactPlan, Other, needed
from reef.manifest import edits
from reef.manifest.head import Publisher
from tests.hazards.test_compaction import put
from tests.support.compaction import SMALL
from tests.support.sweep_world import NAME, USERS, At, World


def versions(*rows):
    """Return versions of keys: (key, LSN, sequence, kind)."""
    keys, lsns, seqs, kinds = zip(*rows, strict=True)
    values = [b"v" if kind is OpKind.PUT else None for kind in kinds]
    return Versions(
        pa.array(keys, pa.binary()),
        np.array(lsns, np.int64),
        np.array(seqs, np.uint32),
        np.array(kinds, np.uint8),
        {1: pa.array(values, pa.binary())},
    )


@pytest.mark.parametrize(("lsn_min", "kept"), [(4, 1), (5, 1), (6, 0)])
def test_H34_a_delete_stays_over_what_may_be_as_old(lsn_min, kept):
    """H34: within one LSN sequences decide, and bounds do not contain them."""
    merger = Merger(DEFAULT_SCHEMA, [Other(b"a", b"z", lsn_min, 9)])
    assert len(merger.merge([versions((b"k", 5, 0, OpKind.DELETE))])) == kept


def test_H36_a_range_delete_hides_rows_its_own_batch_wrote_before_it():
    """H36: a salvage merges the rows of one LSN with a range delete behind them."""
    merger = Merger(DEFAULT_SCHEMA, tombstones=[RangeTombstone(b"a", b"z", 5, 1)])
    rows = versions((b"k", 5, 0, OpKind.PUT), (b"l", 5, 2, OpKind.PUT))
    assert merger.merge([rows]).keys.to_pylist() == [b"l"]


def test_H36_a_range_delete_stays_over_a_segment_that_is_older_and_newer():
    """H36: what counts is the oldest that another segment may have."""
    fragment = RangeTombstone(b"a", b"z", 5, 0)
    assert needed([fragment], [Other(b"b", b"c", 4, 9)], 99) == [RangeTombstone(b"b", b"c\0", 5, 0)]
    assert needed([fragment], [Other(b"b", b"c", 6, 9)], 99) == []


@pytest.fixture
def world():
    """A namespace with two segments."""
    world = World()
    world.db.create(NAME)
    put(world, {"a": b"1"})
    put(world, {"a": b"2"})
    return world


def test_H35_a_role_that_was_lost_is_taken_again_with_another_epoch(world):
    """H35: otherwise its jobs would be published with the epoch of the one that has it."""
    compactor = Compactor(world.db, NAME, full=True, **SMALL)
    assert compactor.step().epoch == 1
    Publisher(world.bucket, USERS).publish(edits.raise_compactor_epoch)
    put(world, {"b": b"1"})
    put(world, {"b": b"2"})
    assert compactor.step(take_over=True).epoch == 3


def test_H35_a_job_is_planned_on_the_head_in_which_the_role_is_ours(world):
    """H35: another one may have compacted while the role was being taken."""
    rival = At(
        world.bucket,
        "create",
        "/manifest/",
        lambda: compact(world.db, NAME, full=True, **SMALL),
    )
    compactor = Compactor(reef.Database(rival), NAME, full=True, **SMALL)
    report = world.run(compactor.step)
    assert (report.outcome, report.inputs) == ("compacted", 1)
    world.run(compactor.close)
    assert world.rows() == {b"a": b"2"}


def test_H60_rows_of_an_open_load_may_come_in_from_its_begin_on(world):
    """H60: they sort at the begin, and a dropped row might have hidden them."""
    loading = (OpenJob("job", 2, None, live_wins=True),)
    manifest = world.publish(open_jobs=loading)
    settings = Compactor(world.db, NAME, **SMALL).settings
    job = CompactJob(world.db, USERS, settings, manifest, CompactPlan(1, ()))
    assert job.checked([]).oldest_lsn == 2


def test_H30_rows_expire_by_the_clock_that_is_behind(world, monkeypatch):
    """H30: readers go by theirs; a row that some of them still see stays."""
    settings = Compactor(world.db, NAME, **SMALL).settings
    behind_s = world.bucket.now()
    runtime = world.bucket.runtime
    for store_s, wall_s in ((behind_s, behind_s + 500), (behind_s + 500, behind_s)):
        with monkeypatch.context() as patched:
            patched.setattr(type(runtime), "wall_s", lambda self, s=wall_s: s)
            patched.setattr(type(world.bucket), "now", lambda self, s=store_s: s)
            job = CompactJob(world.db, USERS, settings, world.head(), CompactPlan(1, ()))
        expected_ms = int((behind_s - settings.expiry_margin_s) * 1000)
        assert job.expired_before_ms == max(0, expected_ms)
