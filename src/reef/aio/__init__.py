"""`reef.aio`: the same face for asyncio, as a thin layer over the one engine.

    async with reef.aio.open("./data") as db, db.writer("users") as users:
        await users.put("u1", b"Ada")
        async for key, value in users.scan(prefix="u"): ...

A row that is at hand is answered in the event loop. What takes a request goes to a thread of the
database's own pool, which is bounded; nothing ever waits in the loop. Writes are handed over in
the order in which they were asked for, without a thread for each, so that thousands of them
share a few group commits. Errors come out unchanged.

A task that is cancelled stops waiting; what it asked for may go on. A write that was handed over
is committed all the same (H26).
"""

from reef.aio.database import Database, open
from reef.aio.handle import Opening
from reef.aio.reading import PinnedReader, Reader
from reef.aio.views import ChangeCursor, Changes, Snapshot
from reef.aio.writing import LocalWriter, Transaction, Writer

__all__ = [
    "ChangeCursor",
    "Changes",
    "Database",
    "LocalWriter",
    "Opening",
    "PinnedReader",
    "Reader",
    "Snapshot",
    "Transaction",
    "Writer",
    "open",
]
