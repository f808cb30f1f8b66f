"""Bulk jobs at their edges: leases at every request, pieces that touch, overlaps of three."""

import numpy as np
import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.errors import ConflictError, InvalidInputError
from reef.formats.versions import Versions
from reef.formats.wal_object import Job, WalKind, WalObject
from reef.jobs import BulkJob
from reef.jobs.ingest.append import Appender
from reef.jobs.ingest.staging import shared_keys
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.types import KeyRange

NAMES = Namespace("t")


class Watched(Wrapper):
    """A bucket that notes how many leases there are before deletes and PUTs into the log."""

    def __init__(self, inner):
        super().__init__(inner)
        self.leases = []
        self.after_put = None

    def delete(self, key):
        self.delete_many([key])

    def delete_many(self, keys):
        self._note("delete")
        self.inner.delete_many(keys)

    def create(self, key, body):
        if not key.startswith(NAMES.wal):
            return self.inner.create(key, body)
        header = WalObject.decode(body, key).header
        self._note(header.kind)
        result = self.inner.create(key, body)
        if self.after_put is not None:
            self.after_put(header)
        return result

    def _note(self, request):
        self.leases.append((request, len(list(self.inner.list(NAMES.leases)))))


@pytest.fixture
def store():
    """A bucket."""
    return Watched(stores.open("memory://"))


@pytest.fixture
def db(store):
    """A namespace of plain keys and values."""
    found = reef.Database(store)
    found.create("t")
    store.leases.clear()
    return found


def plain(*keys):
    """Return rows to be staged."""
    return Versions(
        pa.array(keys, pa.binary()),
        np.zeros(len(keys), np.int64),
        np.ones(len(keys), np.uint32),
        np.zeros(len(keys), np.uint8),
        {1: pa.array([b"v"] * len(keys), pa.binary())},
    )


def test_a_job_holds_its_lease_until_its_ingest_is_stored(db, store):
    """Without it a sweep may abort the job while the PUT is on its way (H28)."""
    with BulkJob(db, "t") as job:
        job.commit(job.staging.stage([plain(b"a")]))
    assert (WalKind.INGEST, 1) in store.leases
    assert list(store.list(NAMES.leases)) == []


def test_a_resumed_job_has_a_lease_at_every_request(db, store):
    """The new lease is stored before the old one is deleted (H28)."""
    handle = BulkJob(db, "t").handle
    store.leases.clear()
    job = BulkJob.resume(handle)
    assert ("delete", 2) in store.leases
    assert min(count for _, count in store.leases) > 0
    job.abort()


def test_a_job_that_was_reaped_while_it_began_does_not_start(db, store):
    """Its begin is stored and aborted before it is checked: nothing is staged in vain."""

    def abort(begin):
        if begin.kind is WalKind.BEGIN:
            job = Job(begin.job.id, key=begin.job.key)
            Appender(store.inner, NAMES).append(WalKind.ABORT, job, begin.schema)

    store.after_put = abort
    with pytest.raises(ConflictError, match="was aborted"):
        BulkJob(db, "t")


def test_pieces_that_share_a_key_are_refused(db):
    """The last key of a piece is not the first one of the next: one of two rows would be lost."""
    with BulkJob(db, "t") as job, pytest.raises(InvalidInputError, match="repeat a key"):
        job.staging.stage([plain(b"a", b"b"), plain(b"b", b"c")])


@pytest.mark.parametrize("keys", [(b"a", b"c"), (b"c", b"n"), (b"a", b"n")])
def test_rows_outside_of_the_replaced_range_are_refused(db, keys):
    """At either end: such a row would be stored without the tombstone that it needs."""
    with (
        BulkJob(db, "t") as job,
        pytest.raises(InvalidInputError, match="outside of the replaced range"),
    ):
        job.staging.stage([plain(*keys)], KeyRange(b"b", b"m"))


def test_a_long_segment_overlaps_all_that_are_within_it(db, store):
    """A short segment between two with a common key does not end their overlap (H38)."""
    with BulkJob(db, "t") as job:
        parts = [plain(b"a", b"m", b"z"), plain(b"b", b"c"), plain(b"d", b"m")]
        staged = [segment for part in parts for segment in job.staging.stage([part])]
        shared = shared_keys(store, NAMES, job.schema, staged)
        assert shared is not None
        assert shared.examples == (b"m",)
