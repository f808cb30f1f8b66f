"""A small shop, typed throughout: what an editor knows of Reef's whole public face.

Every `assert_type` is checked by strict mypy in the tests, and the program is run there too. Rows
are `Any` on purpose: bytes in a plain namespace, a dict where there are columns.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal, assert_type

import pyarrow as pa

import reef
import reef.aio
from reef import keys
from reef.engine.handles.transaction import Transaction
from reef.jobs import fold

ORDERS = pa.schema([("id", pa.string()), ("customer", pa.string()), ("total", pa.float64())])


def write(users: reef.Writer) -> reef.Receipt:
    """Each write is a receipt; with `wait=False` a future of one."""
    receipt = users.put("u1", b"Ada")
    assert_type(receipt, reef.Receipt)
    assert_type(receipt.lsn, int | None)
    later = users.put("u2", b"Grace", wait=False, idempotency_key="import/2")
    assert_type(later, Future[reef.Receipt])
    assert_type(later.result(), reef.Receipt)
    batch = reef.Batch().put("u3", b"Edsger", ttl_s=3600).delete("u1")
    assert_type(batch, reef.Batch)
    assert_type(users.write(batch, when=[reef.absent("u3"), reef.present("u1")]), reef.Receipt)
    assert_type(users.write(reef.Batch().delete("u9"), wait=False), Future[reef.Receipt])
    assert_type(users.delete("u9"), reef.Receipt)
    assert_type(users.delete_range("x", "y", wait=False), Future[reef.Receipt])
    users.flush()
    return receipt


def read(users: reef.Writer | reef.Reader) -> None:
    """Rows by key and by range."""
    assert_type(users.get("u2"), Any)
    rows = users.scan(prefix="u", reverse=True, limit=10)
    assert_type(rows, Iterator[tuple[Any, Any]])
    print("users:", [key for key, _ in rows])


def resolve(users: reef.Writer, receipt: reef.Receipt) -> None:
    """What became of a write is one of three words."""
    outcome = users.resolve(receipt)
    assert_type(outcome, Literal["committed", "rejected", "unknown"])
    try:
        users.put("u2", b"again", when=[reef.absent("u2")])
    except reef.ConditionFailedError as error:
        assert_type(error.kind, reef.ErrorKind)
        print("refused:", error.kind, error.hint)


def orders(db: reef.Database) -> None:
    """A namespace with columns, and a transaction on it."""
    info = db.create("orders", ORDERS)
    print(info.name, info.generation, info.schema.names)
    with db.writer("orders", group_window_ms=2.0) as writer:
        assert_type(writer, reef.Writer)
        assert_type(writer.upsert([{"id": "o1", "customer": "u2", "total": 9.5}]), reef.Receipt)
        assert_type(writer.upsert({"id": ["o2"]}, wait=False), Future[reef.Receipt])
        assert_type(writer.patch([{"id": "o2", "total": 1.0}]), reef.Receipt)
        with writer.transaction() as tx:
            assert_type(tx, Transaction)
            order = tx.get("o1")
            tx.put("o1", {**order, "total": order["total"] + 1})
        assert_type(tx.receipt, reef.Receipt | None)
        print(writer.get_many(["o1", "o3"]).column("_found").to_pylist())


def views(db: reef.Database) -> None:
    """Readers, and snapshots that are retained."""
    print(fold(db, "orders"))
    with db.reader("orders") as now:
        assert_type(now, reef.Reader)
        assert_type(now.wait_for(1, timeout_s=5.0), bool)
        assert_type(now.last_lsn, int)
        with now.as_of(lsn=now.last_lsn) as pinned:
            assert_type(pinned, reef.PinnedReader)
        for change in now.changes(after_lsn=0):
            assert_type(change, reef.Change)
            assert_type((change.op, change.lsn), tuple[str, int])
    snapshot = db.snapshot("orders", "monday", ttl_s=60)
    assert_type(snapshot, reef.Snapshot)
    for pinned in (
        db.reader("orders", snapshot=snapshot),
        db.reader("orders", as_of=snapshot.generation),
        db.reader("orders", pin=True),
    ):
        assert_type(pinned, reef.PinnedReader)
        print(pinned.get("o1"))
        pinned.close()
    assert_type(db.snapshots("orders"), list[reef.Snapshot])
    snapshot.release()
    with db.cursor("orders", "audit", after_lsn=0) as cursor:
        assert_type(cursor, reef.ChangeCursor)
        print(len(list(cursor)), "changes, up to", cursor.commit())


def composite_keys() -> None:
    """Tuples whose bytes sort as the tuples do."""
    key = keys.pack(("user", 42))
    assert_type(key, bytes)
    print(keys.unpack(key))


async def serve(url: str) -> None:
    """The same, for asyncio."""
    async with reef.aio.open(url) as db, db.writer("users") as users:
        assert_type(db, reef.aio.Database)
        assert_type(users, reef.aio.Writer)
        receipts = await asyncio.gather(*(users.put(f"w{n}", b"v") for n in range(100)))
        assert_type(receipts, list[reef.Receipt])
        assert_type(await users.get("w1"), Any)
        async for row in users.scan(prefix="w", limit=2):
            assert_type(row, tuple[Any, Any])
        async with users.transaction() as tx:
            assert_type(tx, reef.aio.Transaction)
            assert_type(await tx.put("w1", b"again"), None)
        assert_type(tx.receipt, reef.Receipt | None)
        reader = await db.reader("users")
        assert_type(reader, reef.aio.Reader)
        assert_type(await reader.wait_for(1), bool)
        async for change in reader.changes():
            assert_type(change, reef.Change)
        async with db.reader("users", pin=True) as pinned:
            assert_type(pinned, reef.aio.PinnedReader)
        assert_type(await users.resolve(receipts[0]), Literal["committed", "rejected", "unknown"])
        assert_type((await db.run(fold, "users")).rows, int)
        assert_type(await db.cursors("users"), dict[str, int])
        print("served", len(receipts))


def main(url: str = "memory://shop") -> None:
    """Run all of it."""
    with reef.open(url) as db:
        assert_type(db, reef.Database)
        with db.writer("users") as users:
            receipt = write(users)
            read(users)
            resolve(users, receipt)
        orders(db)
        views(db)
    composite_keys()
    asyncio.run(serve(url))


if __name__ == "__main__":
    main()
