"""Bulk jobs: from the begin to the ingest or the abort, by their driver or by the sweep."""

from reef.engine.rows.input import to_ops
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, ingest, sweep
from reef.jobs.ingest.append import Appender
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.head import newest_incarnation
from tests.crash.operations import ABSENT, NAME, Operation
from tests.crash.operations.writing import OLD, rows_before

DAY_S = 24 * 3600.0


def _loads(**options):
    """All rows of the load are visible, or none."""

    def work(hand):
        rows = {b"a": b"loaded", b"z": b"loaded"}
        gone = dict.fromkeys(set(OLD) - set(rows), ABSENT) if options.get("replace") else {}
        for key, value in {**rows, **gone}.items():
            hand.ledger.sent(key, value)
        table = [{"id": key, "value": value} for key, value in rows.items()]
        ingest(hand.db, NAME, table, idempotency_key="load", **options)
        for key, value in {**rows, **gone}.items():
            hand.ledger.acknowledged(key, value)

    return work


def _append(hand, place, value):
    names = newest_incarnation(hand.db.store, NAME)
    ops = to_ops([{"id": b"s", "value": value}], DEFAULT_SCHEMA, kind=OpKind.PUT)
    Appender(hand.db.store, names).append_rows({"stream": place}, [ops], DEFAULT_SCHEMA)


def _appends(hand):
    """Two batches of a stream."""
    for place, value in enumerate((b"first", b"second"), 1):
        hand.ledger.sent(b"s", value)
        _append(hand, place, value)
        hand.ledger.acknowledged(b"s", value)


def _appends_again(hand):
    """Repeat the first batch: it counts only if it, and all behind it, did not land before."""
    if hand.ledger.rows().get(b"s") is None:
        hand.ledger.noted({b"s": b"first"})
    _append(hand, 1, b"first")


def _aborts(hand):
    """A job that has staged something, and is aborted by its driver."""
    job = BulkJob(hand.db, NAME)
    job.staging.stage([_one_row(job)])
    job.abort()


def _one_row(job):
    ops = to_ops([{"id": b"never", "value": b"seen"}], job.schema, kind=OpKind.PUT)
    return sorted_rows(staged_rows(ops))


def _abandoned(hand):
    """A job whose driver is gone for long."""
    rows_before(hand)
    job = BulkJob(hand.db, NAME)
    job.staging.stage([_one_row(job)])
    job.let_go()
    hand.sleep(2 * DAY_S)


def _reaps(hand):
    sweep(hand.db, NAME, apply=True, force=True)


OPERATIONS = [
    Operation(
        "a bulk load",
        _loads(),
        rows_before,
        reaches=("begin sent", "ingest staged", "ingest sent"),
    ),
    Operation(
        "batches of a stream",
        _appends,
        rows_before,
        again=_appends_again,
        reaches=("append sent",),
    ),
    Operation("a load that replaces all", _loads(replace=True), rows_before),
    Operation("a load that is aborted", _aborts, rows_before, reaches=("abort sent",)),
    Operation("a sweep that reaps a job", _reaps, _abandoned, reaches=("abort sent",)),
]
