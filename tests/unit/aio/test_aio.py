"""reef.aio: the same API, served from the loop where that is possible, never blocking it."""

import asyncio
import pickle
import threading
import time
from itertools import count, pairwise

import pyarrow as pa
import pytest

import reef
import reef.aio
from reef.errors import (
    ClosedError,
    ConditionFailedError,
    ConflictError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
)
from reef.jobs import fold
from reef.stores import Wrapper
from reef.telemetry import RequestMeter
from reef.testing import Latency, LatencyProfile
from tests.support.child_process import in_child

COLUMNS = pa.schema([("id", pa.string()), ("amount", pa.float64()), ("state", pa.string())])
names = count()


def url():
    """Return a bucket in memory that no other test has."""
    return f"memory://aio-{next(names)}"


def counting(db):
    """Count the calls handed to the threads of a database from now on."""
    calls = []
    submit = db._threads.submit

    def noted(call):
        calls.append(call)
        return submit(call)

    db._threads.submit = noted
    return calls


class Slow(Latency):
    """A store of 150 ms, which knows the threads that have waited for it."""

    def __init__(self, inner):
        super().__init__(inner, LatencyProfile((150, 160), (150, 160), (150, 160), 1e9))
        self.waited = set()

    def _wait(self, timing, size=0):
        self.waited.add(threading.get_ident())
        super()._wait(timing, size)


class Held(Wrapper):
    """A store whose reads wait until it is opened, and say that they are there."""

    def __init__(self, inner):
        super().__init__(inner)
        self.open, self.reached = threading.Event(), threading.Event()

    def get_tagged(self, key):
        self.reached.set()
        assert self.open.wait(120)
        return self.inner.get_tagged(key)


class Gate(Wrapper):
    """A store whose creations wait until it is opened, and say that they are there."""

    def __init__(self, inner):
        super().__init__(inner)
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def create(self, key, body):
        if "/wal/" in key:
            self.reached.set()
            assert self.open.wait(120)
        return self.inner.create(key, body)


def slowed(db, wrap):
    """Put a wrapper around the store of an open database."""
    db._sync.store = wrap(db._sync.store)
    return db._sync.store


async def ticks_during(work, sample=lambda: None):
    """Await something; return also what another task has seen, each time that it had a turn.

    Turns are counted, not timed: on a busy machine every one of them may be late.
    """
    seen, over = [], False

    async def tick():
        while not over:
            await asyncio.sleep(0.002)
            seen.append(sample())

    ticker = asyncio.create_task(tick())
    result = await work
    over = True
    await ticker
    return result, seen


# --- the face -----------------------------------------------------------------------


def test_a_key_value_store():
    """Opening, writing and reading mirror the synchronous API."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            receipt = await users.put("u1", b"Ada")
            assert isinstance(receipt, reef.Receipt)
            assert await users.get("u1") == b"Ada"
            assert await users.get(b"missing") is None
            batch = reef.Batch().put("u2", b"Grace").delete("u1")
            first = await users.write(batch, idempotency_key="job-1")
            again = await users.write(batch, idempotency_key="job-1")
            assert (again.lsn, again.replayed) == (first.lsn, True)
            await users.put("u3", b"Edsger", ttl_s=3600)
            assert [row async for row in users.scan(prefix="u", reverse=True)] == [
                (b"u3", b"Edsger"),
                (b"u2", b"Grace"),
            ]
            assert [key async for key, _ in users.scan(limit=1)] == [b"u2"]
            await users.delete_range("u", "v")
            assert [row async for row in users.scan()] == []
            assert await users.resolve(receipt) == "committed"
            await users.flush()
            await users.refresh()
            assert users.recovery.last_lsn >= 1
            assert (await users.schema()).names == ["id", "value"]
            assert "aio.Writer users" in repr(users)

    asyncio.run(main())


def test_a_table():
    """Columns, Arrow both ways, patches, conditions and get_many."""

    async def main():
        db = await reef.aio.open(url())
        info = await db.create("events", COLUMNS)
        assert info == await db.info("events")
        async with db.writer("events") as events:
            await events.upsert(pa.table({"id": ["a", "b"], "amount": [1.0, 2.0]}))
            await events.patch([{"id": "a", "state": "open"}])
            assert await events.get("a") == {"id": "a", "amount": 1.0, "state": "open"}
            (await events.get("a"))["state"] = "changed by the caller"
            assert (await events.get("a"))["state"] == "open"
            await events.put("c", {"amount": 3.0}, when=[reef.equals("a", "state", "open")])
            with pytest.raises(ConditionFailedError):
                await events.delete("a", when=[reef.absent("c")])
            table = await events.get_many(["c", "x", "a"], columns=["amount"])
            assert table.column("amount").to_pylist() == [3.0, None, 1.0]
            batches = [b async for b in events.scan_arrow(columns=["id"], where="amount > 1.5")]
            assert pa.Table.from_batches(batches).to_pydict() == {"id": ["b", "c"]}
            assert [key async for key, row in events.scan("b")] == ["b", "c"]
        grown = COLUMNS.append(pa.field("note", pa.string()))
        assert (await db.alter("events", grown)).schema.names[-1] == "note"
        await db.close()

    asyncio.run(main())


def test_readers_and_views_in_time():
    """Readers, pinned views, snapshots, changes and cursors."""

    async def main():
        async with reef.aio.open(url()) as db:
            async with db.writer("users") as users, db.reader("users") as reader:
                receipts = [await users.put(f"k{n}", b"v") for n in range(3)]
                assert await reader.wait_for(receipts[-1].lsn, timeout_s=60)
                assert not await reader.wait_for(receipts[-1].lsn + 1, timeout_s=0.05)
                await reader.refresh()
                assert (await reader.get("k2"), reader.last_lsn) == (b"v", receipts[-1].lsn)
                assert reader.damage is None
                assert (await db.run(fold, "users")).rows == 3
                monday = await db.snapshot("users", "monday", ttl_s=60)
                await users.put("k0", b"tuesday")
                async with db.reader("users", snapshot=monday) as then:
                    assert (await then.get("k0"), then.pinned) == (b"v", True)
                async with reader.as_of(lsn=receipts[0].lsn) as then:
                    assert [key async for key, _ in then.scan()] == [b"k0"]
                assert [s.name for s in await db.snapshots("users")] == ["monday"]
                await monday.extend(120)
                await monday.release()
                assert await db.snapshots("users") == []
                changes = [(c.op, c.key) async for c in reader.changes(after_lsn=receipts[0].lsn)]
                assert changes == [("put", b"k1"), ("put", b"k2"), ("put", b"k0")]
                arrow = pa.Table.from_batches([b async for b in reader.changes_arrow()])
                assert len(arrow) == 4
            await a_cursor(db)

    async def a_cursor(db):
        async with db.cursor("users", "copy", after_lsn=0) as copy:
            assert (copy.name, copy.namespace) == ("copy", "users")
            async for change in copy:
                if change.key == b"k1":
                    break
            assert copy.position == change.lsn - 1, "prefetched changes do not count"
            assert await copy.commit() == copy.committed == change.lsn - 1
            for wrong in (change.lsn, 0, -1, "2"):
                with pytest.raises(InvalidInputError, match="upto_lsn"):
                    await copy.commit(wrong)
            rest = [c.key async for c in copy.follow(timeout_s=0.01)]
            assert rest == [b"k2", b"k0"]
            assert await copy.commit(upto_lsn=change.lsn) == copy.committed == change.lsn
        assert await db.cursors("users") == {"copy": change.lsn}
        await db.drop_cursor("users", "copy")

    asyncio.run(main())


def test_a_stream_that_follows_the_log():
    """It waits in the loop for the next change, and ends when none comes."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            reader = await db.reader("users")
            stream = reader.changes(follow=True)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
            await users.put("k", b"v")
            assert (await waiting).key == b"k"
            stream.follow(True, timeout_s=0.01)
            assert [change async for change in stream] == []
            with pytest.raises(InvalidInputError, match="follow=True"):
                await anext(reader.changes(timeout_s=1.0))

    asyncio.run(main())


def test_a_transaction():
    """It reads its own writes, commits at the end of its block, and rolls back on an exception."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            await users.put("a", b"1")
            async with users.transaction() as tx:
                assert await tx.get("a") == b"1"
                await asyncio.gather(*(tx.put(f"k{n}", b"%d" % n) for n in range(20)))
                found = await asyncio.gather(*(tx.get(f"k{n}") for n in range(20)))
                assert found == [b"%d" % n for n in range(20)]
                await tx.delete("a")
                await tx.delete_range("k1", "k2")
                assert [key async for key, _ in tx.scan(limit=2)] == [b"k0", b"k2"]
                assert (await tx.get_many(["a"])).column("_found").to_pylist() == [False]
            assert tx.receipt.lsn
            with pytest.raises(InvalidInputError):
                async with users.transaction() as tx:
                    await asyncio.gather(tx.put("b", b"1"), tx.put("", b"refused"))
            assert (await users.get("b"), tx.receipt) == (None, None)
            other = await users.transaction()
            await other.rollback()
            with pytest.raises(ClosedError):
                await other.get("a")

    asyncio.run(main())


def test_a_transaction_that_loses():
    """Of two that read and write the same row, the second gets ConflictError."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            await users.put("n", b"1")

            async def add():
                async with users.transaction() as tx:
                    before = int(await tx.get("n"))
                    await meet.wait()
                    await tx.put("n", b"%d" % (before + 1))

            meet = asyncio.Barrier(2)
            ends = await asyncio.gather(add(), add(), return_exceptions=True)
            assert sorted(map(type, ends), key=str) == [type(None), ConflictError]
            assert await users.get("n") == b"2"

    asyncio.run(main())


# --- the loop stays free ------------------------------------------------------------


def test_a_thousand_puts_share_a_few_objects():
    """Group commit: no thread and no request for each; order is that of asking."""

    async def main():
        meter = RequestMeter()
        async with reef.aio.open(url(), meter=meter) as db:
            gate = slowed(db, Gate)
            async with db.writer("users") as users:
                meter.reset()
                gate.open.clear()
                puts = [asyncio.create_task(users.put("k", b"%d" % n)) for n in range(1000)]
                before = threading.active_count()
                while len(users._sync._committer.pending()) < 1000:
                    await asyncio.sleep(0.01)
                assert threading.active_count() <= before + 2
                gate.open.set()
                receipts = await asyncio.gather(*puts)
                assert meter.requests() == {"put": 2}
                places = [(receipt.lsn, receipt.index) for receipt in receipts]
                assert places == sorted(places)
                assert await users.get("k") == b"999"

    asyncio.run(main())


def test_a_warm_get_does_not_leave_the_loop():
    """A row that was read before costs no thread: for writers, readers and pinned views."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            await users.put("k", b"v")
            settings = {"refresh_interval_ms": 1e9}
            for handle in (
                users,
                await db.reader("users", **settings),
                await db.reader("users", pin=True, **settings),
            ):
                await handle.get("k")
                await handle.get("nothing")
                calls = counting(db)
                assert await handle.get("k") == await handle.get(b"k") == b"v"
                assert await handle.get("nothing") is None
                assert calls == []
                assert await handle.get("other") is None
                assert len(calls) == 1

    asyncio.run(main())


def test_a_reader_that_is_due_leaves_the_loop_to_refresh():
    """Rows in memory are not served past the refresh interval."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:
            await users.put("k", b"1")
            reader = await db.reader("users", refresh_interval_ms=20)
            assert await reader.get("k") == b"1"
            await users.put("k", b"2")
            await asyncio.sleep(0.05)
            assert await reader.get("k") == b"2"

    asyncio.run(main())


def test_a_slow_store_does_not_hold_up_the_loop():
    """Opening, writing, reading and closing over a store of 150 ms: others run on."""

    async def main():
        async with reef.aio.open(url()) as db:
            await (await db.writer("users")).close()
            store = slowed(db, Slow)

            async def work():
                async with db.writer("users") as users:
                    await asyncio.gather(*(users.put(f"k{n}", b"v") for n in range(10)))
                    await db.run(fold, "users")
                    await users.refresh()
                    reader = await db.reader("users")
                    return [key async for key, _ in reader.scan()]

            keys, ticks = await ticks_during(work())
            assert len(keys) == 10
            assert store.waited
            assert threading.get_ident() not in store.waited
            assert len(ticks) > 50, "all of it takes several seconds"

    asyncio.run(main())


def test_no_room_does_not_hold_up_the_loop():
    """Writers wait for room outside of the loop, and get an error when there is none."""

    async def main():
        async with reef.aio.open(url()) as db:
            room = {"unfolded_bytes_max": 2000, "write_deadline_s": 1.0}
            async with db.writer("users", **room) as users:
                waited, door = set(), users._sync._committer
                really_wait = door._claim_refresh_or_wait

                def wait(*given):
                    waited.add(threading.get_ident())
                    really_wait(*given)

                door._claim_refresh_or_wait = wait

                async def fill():
                    for n in range(50):
                        await users.put(f"k{n}", bytes(100))

                with pytest.raises(reef.UnavailableError, match="write queue is full"):
                    await asyncio.wait_for(fill(), 120)
                with pytest.raises(reef.UnavailableError, match="write queue is full"):
                    await users.put("more", b"v")
                assert waited
                assert threading.get_ident() not in waited
                await db.run(fold, "users")
                await users.refresh()
                await users.put("more", b"v")

    asyncio.run(main())


def test_scanning_many_rows_leaves_the_loop_free():
    """50,000 rows come in pieces, and others run between them."""
    rows = pa.table({"id": [f"{n:06}" for n in range(50_000)], "amount": [1.5] * 50_000})

    async def main():
        async with reef.aio.open(url()) as db:
            await db.create("events", COLUMNS)
            async with db.writer("events") as events:
                await events.upsert(rows)
                assert (await events.get("000001"))["amount"] == 1.5

                keys = []

                async def scan():
                    async for key, _ in events.scan():
                        keys.append(key)

                _, seen = await ticks_during(scan(), lambda: len(keys))
                assert keys == rows.column("id").to_pylist()
                steps = [after - before for before, after in pairwise([0, *seen])]
                assert max(steps) <= 25_000, "others had no turn for so many rows"
                assert sum([len(batch) async for batch in events.scan_arrow()]) == 50_000

    asyncio.run(main())


# --- cancellation -------------------------------------------------------------------


def test_H26_a_cancelled_put_lands_all_the_same():
    """H26: the task stops waiting at once; a batch that was handed over is committed."""

    async def main():
        async with reef.aio.open(url()) as db:
            gate = slowed(db, Gate)
            async with db.writer("users") as users:
                gate.open.clear()
                gate.reached.clear()
                put = asyncio.create_task(users.put("k", b"v"))
                behind = asyncio.create_task(users.put("l", b"v"))
                await asyncio.to_thread(gate.reached.wait, 60)
                put.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await put
                gate.open.set()
                await behind
                assert await users.get("k") == b"v"

    asyncio.run(main())


def test_a_cancelled_open_leaves_nothing_behind():
    """A handle whose open was cancelled is closed, with its lease."""

    async def main():
        async with reef.aio.open(url()) as db:
            await (await db.writer("users")).close()
            held = slowed(db, Held)
            calls = counting(db)
            opening = asyncio.create_task(opened(db.reader("users", pin=True)))
            await asyncio.to_thread(held.reached.wait, 60)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            held.open.set()
            while len(calls) < 2:  # opening it, and closing it
                await asyncio.sleep(0.05)
            await db.close()
            assert not [info for info in db._sync.store.inner.list() if "/leases/" in info.key]

    async def opened(opening):
        return await opening

    asyncio.run(main())


def test_a_cancelled_wait_for_rows_loses_none():
    """A scan whose consumer timed out resumes where it was."""

    async def main():
        async with reef.aio.open(url()) as db:
            async with db.writer("users") as users:
                batch = reef.Batch()
                for n in range(3000):
                    batch.put(f"{n:05}", b"v")
                await users.write(batch)
            await db.run(fold, "users")
            reader = await db.reader("users", refresh_interval_ms=1e9)
            scan, changes = reader.scan(), reader.changes()
            slow = Slow(db._sync.store)
            reader._sync._store = reader._sync._segments._store = slow
            for stream, total in ((scan, 3000), (changes, 3000)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.001)
                keys = [row[0] if stream is scan else row.key async for row in stream]
                assert keys == [b"%05d" % n for n in range(total)]

    asyncio.run(main())


def test_a_cancelled_transaction_is_forgotten():
    """Nothing of it is committed, and others do not wait for it."""

    async def main():
        async with reef.aio.open(url()) as db, db.writer("users") as users:

            async def work():
                async with users.transaction() as tx:
                    await tx.put("k", b"v")
                    staged.set()
                    await asyncio.sleep(600)

            staged = asyncio.Event()
            task = asyncio.create_task(work())
            await staged.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await users.get("k") is None

    asyncio.run(main())


# --- ends ---------------------------------------------------------------------------


def test_closing_with_work_under_way():
    """Earlier calls finish; later calls are refused."""

    async def main():
        db = await reef.aio.open(url())
        gate = slowed(db, Gate)
        users = await db.writer("users")
        reader = await db.reader("users")
        gate.open.clear()
        puts = [asyncio.create_task(users.put(f"k{n}", b"v")) for n in range(100)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(db.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        gate.open.set()
        await closing
        assert all(receipt.lsn for receipt in await asyncio.gather(*puts))
        for call in (
            lambda: users.put("k", b"v"),
            lambda: users.get("k0"),
            lambda: reader.get("k0"),
            lambda: db.info("users"),
            lambda: anext(reader.scan()),
        ):
            with pytest.raises(ClosedError):
                await call()
        await users.close()
        await db.close()

    asyncio.run(main())


def test_calls_queued_when_the_threads_are_closed_raise():
    """A pool of one thread, busy; the queue behind it gets ClosedError, no caller hangs."""

    async def main():
        db = await reef.aio.open(url(), threads_max=1)
        begun, busy = threading.Event(), threading.Event()
        first = asyncio.create_task(db.run(lambda _: begun.set() or busy.wait(120)))
        await asyncio.to_thread(begun.wait, 60)
        later = [asyncio.create_task(db.info("users")) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in later)
        closing = asyncio.create_task(db.close())
        await asyncio.wait(later)  # completed while the thread is busy
        assert not first.done()
        busy.set()
        await closing
        assert await first is True
        for task in later:
            with pytest.raises(ClosedError):
                await task

    asyncio.run(main())


def test_a_loop_that_ends_in_the_middle_does_no_harm(caplog):
    """A program that just stops: batches handed over land, and nothing is logged."""
    where = url()

    async def main():
        db = await reef.aio.open(where)
        gate = slowed(db, Gate)
        users = await db.writer("users")
        gate.open.clear()
        gate.reached.clear()
        asyncio.get_running_loop().create_task(users.put("k", b"v"))
        await asyncio.to_thread(gate.reached.wait, 60)
        return gate

    asyncio.run(main()).open.set()
    for _ in range(3000):
        if reef.open(where).reader("users").get("k") == b"v":
            break
        time.sleep(0.02)
    else:
        raise AssertionError("the put did not land")
    assert caplog.records == []


def test_errors_come_out_unchanged():
    """The same classes, kinds and messages as in the synchronous face."""

    async def main():
        with pytest.raises(InvalidInputError, match="unknown scheme"):
            await reef.aio.open("ftp://somewhere")
        async with reef.aio.open(url()) as db:
            with pytest.raises(NotFoundError, match="no namespace users"):
                async with db.reader("users"):
                    pass
            with pytest.raises(InvalidInputError, match="no setting"):
                await db.writer("users", colour=1)
            first, second = await db.writer("users"), await db.writer("users")
            for _ in range(2):
                with pytest.raises(FencedError, match="epoch 2"):
                    await first.put("k", b"v")
            for bad in (17, "", "\ud800", []):
                with pytest.raises(InvalidInputError):
                    await second.put(bad, b"v")
                with pytest.raises(InvalidInputError):
                    await second.get(bad)
            with pytest.raises(InvalidInputError, match="limit=-1"):
                await anext(second.scan(limit=-1))
            with pytest.raises(InvalidInputError) as caught:
                pickle.dumps(second)
            assert caught.value.kind is ErrorKind.NOT_PICKLABLE

    asyncio.run(main())


def test_H51_a_forked_copy_refuses(tmp_path):
    """H51: threads do not survive a fork, so a copy says so instead of waiting for ever."""

    async def main():
        async with reef.aio.open(str(tmp_path)) as db, db.writer("users") as users:
            await users.put("k", b"v")
            reader = await db.reader("users")
            assert await users.get("k") == await reader.get("k") == b"v"
            for call in (
                lambda: users.put("k", b"w"),
                lambda: users.get("k"),
                lambda: reader.get("k"),
                lambda: db.info("users"),
                users.close,
                db.close,
            ):
                code, said = in_child(lambda call=call: drive(call()))
                assert (code, "belongs to process" in said) == (1, True), said
            assert await users.get("k") == b"v"

    def drive(coroutine):
        """Run what never waits, without a loop: the parent's is not for the child."""
        coroutine.send(None)

    asyncio.run(main())


def test_several_loops_one_after_the_other():
    """A database is bound to a process, not to a loop."""
    where = url()

    async def first():
        db = await reef.aio.open(where)
        users = await db.writer("users")
        await users.put("k", b"v")
        return db, users

    async def second(db, users):
        assert await users.get("k") == b"v"
        await db.close()

    asyncio.run(second(*asyncio.run(first())))


def test_sql_returns_a_table_or_streams_rows():
    """`await db.sql(…)` is an Arrow table, `async for row in db.sql_stream(…)` yields dicts."""

    async def program():
        async with reef.aio.open("memory://") as db:
            async with db.writer("users") as users:
                for number in range(3):
                    await users.put(f"k{number}", b"v")
            query = "SELECT count(*) AS n FROM users"
            assert (await db.sql(query)).to_pylist() == [{"n": 3}]
            rows = [row async for row in db.sql_stream("SELECT id FROM users ORDER BY id")]
            assert rows == [{"id": b"k0"}, {"id": b"k1"}, {"id": b"k2"}]

    asyncio.run(program())


def test_states_are_compared():
    """By name, by snapshot and as open views, as `reef.Database.diff` does."""

    async def main():
        async with await reef.aio.open("memory://") as db:
            async with db.writer("t") as writer:
                await writer.put("a", b"1")
                taken = await db.snapshot("t")
                await writer.put("a", b"2")
            async with db.reader("t", snapshot=taken) as view:
                return [
                    [(one.key, one.a, one.b) async for one in db.diff(before, "t")]
                    for before in (taken, view)
                ]

    assert asyncio.run(main()) == [[(b"a", b"1", b"2")]] * 2


def test_every_method_of_the_engine_is_there():
    """Every method of a synchronous handle exists on its asyncio counterpart."""
    from reef.engine.handles.transaction import Transaction

    sync = [reef.Database, reef.Writer, reef.Reader, reef.PinnedReader, Transaction]
    sync += [reef.Snapshot, reef.ChangeCursor, reef.LocalWriter]
    for engine in sync:
        face = getattr(reef.aio, engine.__name__)
        public = {name for name in dir(engine) if not name.startswith("_")}
        assert public <= set(dir(face)), engine.__name__
