"""Rebuild against a plain dict: at every stage of a random history, without any manifest.

Puts, deletes, range deletes, patches, expired rows; bulk loads that commit, that are left open and
that are aborted; folds and merges of any segments, which are published or die before that, whole
or half-way; their leftovers, which come back late; sweeps when the grace period is over, snapshots
that pin superseded segments, namespaces that are used after a rebuild, and names that are dropped,
undropped and created again.
"""

import datetime
import os

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reef.engine.rows.input import to_ops
from reef.errors import ConflictError
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, fold, ingest, rebuild
from reef.jobs.ingest.job import sorted_rows, staged_rows
from tests.support.rebuild import (
    NAME,
    claimed_twice,
    compact_these,
    dying,
    head_of,
    names_of,
    open_mortal,
    rebuilt,
    rows_of,
    segment_ids,
    sweep_now,
)

KEYS = st.sampled_from(["a", "b", "c", "d"])
"""Few: what matters is what happens to one key, again and again."""
NUMBERS = st.one_of(st.none(), st.integers(0, 9))
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, NUMBERS, st.sampled_from([False, False, True])),
        st.tuples(st.just("patch"), KEYS, st.sampled_from("xy"), NUMBERS),
        st.tuples(st.just("delete"), KEYS),
        st.sampled_from([("delete_range", *ends) for ends in ("ac", "be", "bc", "cz")]),
    ),
    min_size=1,
    max_size=4,
)
PAST = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
EXAMPLES = int(os.environ.get("REEF_REBUILD_EXAMPLES", "10"))
"""Some seconds for everyday use; hundreds for a long run."""
SIZES = st.sampled_from([50, 200, 10_000])


class Rebuilding(RuleBasedStateMachine):
    """Whatever leaves objects in a bucket."""

    @initialize()
    def open(self):
        self.db = open_mortal()
        self.db.create(NAME, SCHEMA)
        self.writer = self.db.writer(NAME, background=False)
        self.model = {}
        self.leftovers = {}
        self.jobs = []

    # --- writing ----------------------------------------------------------------------
    @rule(ops=OPS)
    def write(self, ops):
        for name, *given in ops:
            getattr(self, name)(*given)

    @rule(ops=OPS, size=SIZES, pin=st.booleans())
    def write_and_fold(self, ops, size, pin):
        self.write(ops)
        self.fold(size)
        if pin:
            self.db.snapshot(NAME)

    def put(self, key, x, expired):
        row = {"id": key, "x": x, "y": x}
        self.writer.upsert([row | {"_expires_at": PAST} if expired else row])
        self.model[key] = row
        if expired:
            del self.model[key]

    def patch(self, key, column, value):
        self.writer.patch([{"id": key, column: value}])
        if key in self.model:
            self.model[key] = {**self.model[key], column: value}

    def delete(self, key):
        self.writer.delete(key)
        self.model.pop(key, None)

    def delete_range(self, start, end):
        self.writer.delete_range(start, end)
        self._forget(start, end)

    @rule()
    def open_again(self):
        """A new fence, of a higher epoch."""
        self.writer.close()
        self.writer = self.db.writer(NAME, background=False)

    # --- bulk jobs --------------------------------------------------------------------
    @rule(keys=st.sets(KEYS, min_size=1), x=NUMBERS, replace=st.booleans(), size=SIZES)
    def ingest(self, keys, x, replace, size):
        rows = [{"id": key, "x": x, "y": 5} for key in sorted(keys)]
        ingest(self.db, NAME, rows, replace=replace, segment_bytes=size, group_bytes=size)
        self.writer.refresh()
        self._take(rows, replace)

    @rule(keys=st.sets(KEYS, min_size=1), x=NUMBERS)
    def stage(self, keys, x):
        """Begun and written, and not committed yet."""
        rows = [{"id": key, "x": x, "y": 6} for key in sorted(keys)]
        job = BulkJob(self.db, NAME)
        ops = to_ops(rows, job.schema, kind=OpKind.PUT)
        self.jobs.append((job, job.staging.stage([sorted_rows(staged_rows(ops))]), rows))
        self.writer.refresh()

    @rule(commits=st.booleans())
    def finish(self, commits):
        """Commit or abort a staged job; a sweep may have aborted it before."""
        if not self.jobs:
            return
        job, staged, rows = self.jobs.pop(0)
        try:
            if commits:
                job.commit(staged)
                self._take(rows)
            else:
                job.abort()
        except ConflictError:
            job.abort()
        self.writer.refresh()

    # --- jobs -------------------------------------------------------------------------
    def fold(self, size):
        fold(self.db, NAME, segment_bytes_max=size, group_bytes=60)
        self.writer.refresh()

    @rule(size=SIZES, half=st.booleans())
    def fold_that_dies(self, size, half):
        left = dying(self.db, lambda: fold(self.db, NAME, segment_bytes_max=size))
        self._leave(left, half)

    @rule(chosen=st.integers(1, 63), size=SIZES, dies=st.booleans(), half=st.booleans())
    def compact(self, chosen, size, dies, half):
        """Merge any segments, by their places, contiguous or not."""
        present = head_of(self.db).segments
        ids = {s.id for place, s in enumerate(present) if chosen >> place % 6 & 1}
        if not ids:
            return

        def job():
            compact_these(self.db, lambda s: s.id in ids, bytes_each=size)

        if dies:
            self._leave(dying(self.db, job, publishes=1), half)
        else:
            job()
        self.writer.refresh()

    @rule(size=SIZES, sweeps=st.booleans())
    def compact_all(self, size, sweeps):
        """All of it: every delete goes, and with a sweep the deleted rows, except for pins."""
        compact_these(self.db, lambda _: True, bytes_each=size)
        self.writer.refresh()
        if sweeps:
            self.sweep()

    @rule(key=KEYS, size=SIZES)
    def delete_for_good(self, key, size):
        """The row is pinned, its delete is dropped and swept: only covers show the deletion."""
        self.write_and_fold([("put", key, 1, False)], size, pin=True)
        self.write_and_fold([("delete", key)], size, pin=False)
        self.compact_all(size, sweeps=True)

    @rule()
    def come_back(self):
        """A job that was thought dead has only been slow: its objects arrive now."""
        for segment_id, body in self.leftovers.items():
            if segment_id not in segment_ids(self.db):
                self.db.store.put(names_of(self.db).segment(segment_id), body)

    @rule()
    def sweep(self):
        sweep_now(self.db)
        self.writer.refresh()

    @rule()
    def release(self):
        for snapshot in self.db.snapshots(NAME)[:1]:
            snapshot.release()

    @rule(creates=st.booleans())
    def drop(self, creates):
        """It comes back as it was, or is created again: older rows never show."""
        self.writer.close()
        for job, _, _ in self.jobs:
            job.abort()
        self.jobs = []
        self.db.drop(NAME)
        if creates:
            self.db.create(NAME, SCHEMA)
            self.model, self.leftovers = {}, {}
        else:
            self.db.undrop(NAME)
        self.writer = self.db.writer(NAME, background=False)

    @rule()
    def continue_after_a_rebuild(self):
        """The manifests are lost for good, and the namespace lives on."""
        self.writer.close()
        for job, _, _ in self.jobs:
            job.abort()
        self.jobs = []
        self.db, _ = rebuilt(self.db)
        self.writer = self.db.writer(NAME, background=False)

    # --- reading ----------------------------------------------------------------------
    @invariant()
    def rebuild_shows_the_same_rows(self):
        """Without any manifest as with it; nothing is lost, nothing comes back."""
        if not hasattr(self, "db"):
            return
        expected = [self.model[key] for key in sorted(self.model)]
        assert rows_of(self.db) == expected
        report = rebuild(self.db, NAME)
        assert (report.rows_equal, report.problems) == (True, ())
        copy, report = rebuilt(self.db)
        assert rows_of(copy) == expected
        assert (report.rows, report.problems) == (len(expected), ())
        assert not claimed_twice(copy)

    def teardown(self):
        if hasattr(self, "db"):
            self.writer.close()
            for job, _, _ in self.jobs:
                job.abort()

    def _leave(self, left, half):
        """Keep the segments of a crashed job, to restore them; or all but one."""
        for segment_id in sorted(left)[1:] if half else left:
            self.leftovers[segment_id] = self.db.store.get(names_of(self.db).segment(segment_id))
        for segment_id in left - self.leftovers.keys():
            self.db.store.delete(names_of(self.db).segment(segment_id))

    def _take(self, rows, replace=False):
        if replace:
            self.model.clear()
        self.model |= {row["id"]: row for row in rows}

    def _forget(self, start, end):
        for key in [key for key in self.model if start <= key < end]:
            del self.model[key]


TestRebuilding = Rebuilding.TestCase
TestRebuilding.settings = settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None)


def test_H49_a_part_of_which_nothing_was_left_is_not_missed_two_merges_later():
    """Found by the machine above: the first merge left a hole, and its inputs were swept."""
    state = Rebuilding()
    state.open()
    state.write_and_fold(ops=[("delete", "a")], pin=True, size=50)
    state.ingest(keys={"a", "b", "c", "d"}, replace=True, size=50, x=None)
    state.write_and_fold(ops=[("put", "a", None, False), ("delete", "a")], pin=False, size=50)
    state.compact_all(size=200, sweeps=True)
    state.compact_all(size=10000, sweeps=True)
    state.write_and_fold(ops=[("put", "d", None, False)], pin=False, size=10000)
    state.rebuild_shows_the_same_rows()
    state.teardown()
