"""Appends of bulk jobs: lost slots, lost responses, skipped slots, and rivals with the same job."""

import msgspec
import pytest

import reef
from reef import stores
from reef.errors import ConflictError, InvalidInputError, NotFoundError, OutcomeUnknownError
from reef.formats.manifest import Recent, encode_manifest
from reef.formats.wal_object import Job, WalKind, WalObject
from reef.jobs.ingest.append import LOSSES_BEFORE_AIMING, Appender
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace, number_of
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.bulk_jobs import append

NAMES = Namespace("t")
JOB = Job("job", key="load-1")


class Scripted(Wrapper):
    """A bucket whose PUTs into the log go through a function, if there is one."""

    def __init__(self, inner):
        super().__init__(inner)
        self.put_wal = None
        self.sent = []
        """LSN, kind and outcome of every PUT into the log."""

    def create(self, key, body):
        if not key.startswith(NAMES.wal):
            return self.inner.create(key, body)
        lsn = number_of(key)
        result = (self.put_wal or (lambda _, put: put()))(lsn, lambda: self.inner.create(key, body))
        kind = WalObject.decode(body, key).header.kind
        self.sent.append((lsn, kind, result.outcome))
        return result


@pytest.fixture
def store():
    """A namespace with three rows in the log."""
    found = Scripted(stores.open("memory://"))
    db = reef.Database(found)
    db.create("t")
    with db.writer("t", background=False) as writer:
        for key in ("a", "b", "c"):
            writer.put(key, b"1")
    found.sent.clear()
    return found


@pytest.fixture
def appender(store):
    """The appends of one job."""
    return Appender(store, NAMES)


def schema_of(store):
    """Return the current schema."""
    return HeadFinder(store, NAMES).find().manifest.schema


def edit_head(store, **fields):
    """Publish a head with other fields."""
    Publisher(store, NAMES).publish(lambda head: msgspec.structs.replace(head, **fields))


def taken_by_a_rival(store, times):
    """Fill the target slot of so many PUTs before they arrive."""
    lost = []

    def put_wal(lsn, put):
        if len(lost) < times:
            lost.append(lsn)
            append(store.inner, "t", WalKind.SKIP, lsn=lsn)
        return put()

    store.put_wal = put_wal
    return lost


def test_a_begin_has_its_schema(store, appender):
    """Rebuild finds the columns of a load there, where no manifest and no segment has them."""
    schema = schema_of(store)
    lsn = appender.append(WalKind.BEGIN, JOB, schema).lsn
    key = NAMES.wal_object(lsn)
    assert WalObject.decode(store.get(key), key).header.schema == schema


def test_an_ingest_by_another_process_of_the_job_is_not_its_own(store, appender):
    """A resumed job commits: the earlier process gets the rival's commit, and not a receipt."""
    schema, rival = schema_of(store), Appender(store, NAMES)
    appender.append(WalKind.BEGIN, JOB, schema)
    theirs = rival.append(WalKind.INGEST, JOB, schema)
    ours = appender.append(WalKind.INGEST, JOB, schema)
    assert theirs.counts
    assert not ours.counts
    assert ours.known is not None
    assert ours.known.lsn == theirs.lsn


def test_no_gap_is_filled_below_a_slot_that_was_lost(store, appender):
    """A skip takes a slot from a writer: it is sent only below an object that may be stored."""
    lost = taken_by_a_rival(store, LOSSES_BEFORE_AIMING + 2)
    state = appender.append(WalKind.BEGIN, JOB, schema_of(store))
    assert state.counts
    assert max(lost) >= min(lost) + len(lost), "some were ahead of the open slot"
    for (lsn, _, outcome), (_, kind, _) in zip(store.sent, store.sent[1:], strict=False):
        if outcome is Outcome.EXISTS:
            assert kind is WalKind.BEGIN, f"a skip was sent after LSN {lsn} was lost"


def test_a_lost_response_is_not_a_lost_slot(store, appender):
    """An object sent ahead may be stored: the gap below it is filled, and it is not sent again."""
    lost = taken_by_a_rival(store, LOSSES_BEFORE_AIMING)
    rivals, lost_responses = store.put_wal, []

    def put_wal(lsn, put):
        if lsn in lost_responses:
            return WriteResult(Outcome.EXISTS)
        if len(lost) == LOSSES_BEFORE_AIMING and not lost_responses:
            lost_responses.append(lsn)
            put()
            return WriteResult(Outcome.UNKNOWN)
        return rivals(lsn, put)

    store.put_wal = put_wal
    state = appender.append(WalKind.BEGIN, JOB, schema_of(store))
    assert (state.counts, state.lsn) == (True, lost_responses[0])
    begins = [lsn for lsn, kind, _ in store.sent if kind is WalKind.BEGIN]
    assert begins == [*lost, state.lsn, state.lsn], "sent again to the same slot only"


def test_a_refusal_after_a_lost_response_leaves_the_outcome_unknown(store, appender):
    """The first PUT of an ingest may count, whatever the store says to the second."""
    schema = schema_of(store)
    appender.append(WalKind.BEGIN, JOB, schema)
    results = iter([WriteResult(Outcome.UNKNOWN)])

    def put_wal(lsn, put):
        put()
        for result in results:
            return result
        raise InvalidInputError("access is denied from now on")

    store.put_wal = put_wal
    with pytest.raises(OutcomeUnknownError):
        appender.append(WalKind.INGEST, JOB, schema)


def test_a_skipped_slot_is_not_aimed_at(store, appender):
    """Nothing counts in a slot that a repair voided, though no object is there."""
    open_slot = appender.read_log().open_slot + LOSSES_BEFORE_AIMING
    edit_head(store, skipped_lsns=(open_slot + 1,))
    taken_by_a_rival(store, LOSSES_BEFORE_AIMING)
    state = appender.append(WalKind.BEGIN, JOB, schema_of(store))
    assert (state.counts, state.lsn) == (True, open_slot + 2)
    assert open_slot + 1 not in {lsn for lsn, _, _ in store.sent}


def test_a_log_is_listed_again_if_a_slot_is_gone(store, appender):
    """A sweep that deletes a listed object has a newer head: the old one does not count."""
    lsn, real = appender.read_log().open_slot - 1, store.inner.get_range
    gone = [NAMES.wal_object(lsn)]

    def get_range(key, start, end):
        if key in gone:
            gone.remove(key)
            raise NotFoundError(key)
        return real(key, start, end)

    store.get_range = get_range
    assert Appender(store, NAMES).read_log().open_slot == lsn + 1
    assert gone == []


def test_a_job_with_columns_from_before_the_namespace_is_refused(store, appender):
    """A job is resumed in a chain that an older release continued after a drop: its schema is
    older than all that the namespace has now."""
    head = HeadFinder(store, NAMES).find().manifest
    newer = msgspec.structs.replace(head.schema, id=head.schema.id + 1)
    following = head.generation + 1
    manifest = msgspec.structs.replace(
        head,
        generation=following,
        schemas=(newer,),
        recent=(*head.recent, Recent(following, head.write_id, head.published_at_ms)),
    )
    store.put(NAMES.manifest(manifest.generation), encode_manifest(manifest))
    with pytest.raises(ConflictError, match="dropped"):
        appender.append(WalKind.BEGIN, JOB, head.schema)
    assert store.sent == []
