"""`ops` of a patch: rows that existed when it was applied, in whatever way it was sent."""

import datetime
import threading

import pyarrow as pa
import pytest

import reef
from reef.telemetry import RequestMeter

PAST = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture(params=["object", "local"])
def writer(request, tmp_path):
    """Give a writer of a namespace with columns, with either durability."""
    db = reef.open(str(tmp_path / "data"))
    db.create("events", SCHEMA)
    options = {"durability": request.param, "background": False}
    if request.param == "local":
        options["local_log"] = str(tmp_path / "log")
    with db.writer("events", **options) as writer:
        yield writer


def patch(*keys):
    """Return a batch that patches some keys."""
    return reef.Batch().patch([{"id": key, "n": -1} for key in keys])


def test_a_queued_write_before_the_patch_counts(writer):
    """Pipelined: a put, a delete, a range delete and a merge that are not durable yet decide."""
    writer.upsert([{"id": f"k{n}", "n": n} for n in range(3)])
    writes = [
        (writer.put("new", {"n": 1}, wait=False), 1),
        (writer.patch([{"id": "new", "n": 2}], wait=False), 1),
        (writer.delete("k0", wait=False), 1),
        (writer.patch([{"id": "k0", "n": 2}], wait=False), 0),
        (writer.delete_range("k1", "k2", wait=False), 1),
        (writer.patch([{"id": "k1", "n": 2}, {"id": "k2", "n": 2}], wait=False), 1),
        (writer.merge("k1", {"n": reef.add(1)}, wait=False), 1),
        (writer.patch([{"id": "k1", "n": 9}, {"id": "k9", "n": 9}], wait=False), 1),
        (writer.upsert([{"id": "k3", "n": 1, "_expires_at": PAST}], wait=False), 1),
        (writer.patch([{"id": "k3", "n": 9}], wait=False), 0),
    ]
    assert [future.result(60).ops for future, _ in writes] == [ops for _, ops in writes]
    assert writer.to_arrow().to_pydict() == {"id": ["k1", "k2", "new"], "n": [9, 2, 2]}


def test_a_patch_behind_objects_in_flight(tmp_path, monkeypatch):
    """Those that are sent and not applied yet decide as well."""
    db = reef.open(str(tmp_path))
    db.create("events", SCHEMA)
    create = type(db.store).create
    options = {"group_window_ms": 0, "group_bytes_max": 1, "max_parallel_writes": 4}
    with db.writer("events", background=False, **options) as writer:
        sent, opened = threading.Semaphore(0), threading.Event()

        def held(self, key, body):
            sent.release()
            opened.wait(60)
            return create(self, key, body)

        monkeypatch.setattr(type(db.store), "create", held)
        writes = [
            (writer.put, ("a", {"n": 1})),
            (writer.patch, ([{"id": "a", "n": 2}],)),
            (writer.delete, ("a",)),
            (writer.patch, ([{"id": "a", "n": 3}],)),
        ]
        futures = []
        for write, arguments in writes:
            futures.append(write(*arguments, wait=False))
            assert sent.acquire(timeout=60)
        opened.set()
        assert [future.result(60).ops for future in futures] == [1, 1, 1, 0]


def test_batches_and_transactions_count_the_same(writer):
    """And a put before a patch in the same batch makes its row."""
    writer.put("a", {"n": 1})
    assert writer.write(patch("missing")).ops == 0
    assert writer.write(patch("a", "missing").put("b", {"n": 1})).ops == 2
    assert writer.write(reef.Batch().put("c", {"n": 1}).patch([{"id": "c", "n": 2}])).ops == 2
    assert writer.write(reef.Batch().delete("c").patch([{"id": "c", "n": 2}])).ops == 1
    assert writer.write(patch("missing"), when=[reef.present("a")]).ops == 0
    with writer.transaction() as tx:
        tx.patch([{"id": "missing", "n": 1}])
        tx.patch([{"id": "a", "n": 5}])
        tx.put("d", {"n": 1})
        tx.patch([{"id": "d", "n": 2}])
    assert tx.receipt.ops == 3


def test_a_repeat_has_the_same_receipt(writer):
    """Of the queue, of the window, and of the window of the next writer after a fold."""
    first = writer.write(patch("missing"), idempotency_key="k", wait=False)
    again = writer.write(patch("missing"), idempotency_key="k", wait=False)
    assert (first.result(60).ops, again.result(60).ops) == (0, 0)
    writer.put("missing", {"n": 1})
    writer.flush()
    again = writer.write(patch("missing"), idempotency_key="k")
    assert (again.ops, again.replayed) == (0, True)


@pytest.mark.parametrize("folded", [False, True])
def test_a_repeat_by_the_next_writer_has_the_same_receipt(tmp_path, folded):
    """The count is in the log, and in the window of the manifest."""
    db = reef.open(str(tmp_path))
    db.create("events", SCHEMA)
    with db.writer("events", background=False) as writer:
        assert writer.write(patch("a"), idempotency_key="k").ops == 0
        assert writer.write(patch("a").put("b", {"n": 1}), idempotency_key="l").ops == 1
    if folded:
        reef.jobs.fold(db, "events")
    with db.writer("events", background=False) as writer:
        again = writer.write(patch("a"), idempotency_key="k")
        assert (again.ops, again.replayed) == (0, True)
        again = writer.write(patch("a").put("b", {"n": 1}), idempotency_key="l")
        assert (again.ops, again.replayed) == (1, True)


def test_a_repeat_looks_nothing_up():
    """Its receipt is known."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    db.create("events", SCHEMA)
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": f"e{n:06}", "n": n} for n in range(2000)])
        reef.jobs.fold(db, "events")
        writer.refresh()
        writer.write(patch("e000007"), idempotency_key="k")
    with db.writer("events", background=False) as writer:
        meter.reset()
        assert writer.write(patch("e000007"), idempotency_key="k").replayed
        assert meter.requests() == {}
