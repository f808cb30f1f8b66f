"""`reef.aio`: the same API for asyncio, as a thin layer over the synchronous engine.

    async with reef.aio.open("./data") as db, db.writer("users") as users:
        await users.put("u1", b"Ada")
        async for key, value in users.scan(prefix="u"): ...

A cached row is returned in the event loop. A call that needs a request runs in a thread of the
database's bounded pool; nothing blocks the loop. Writes are submitted in the order of the calls,
without a thread for each, so that thousands of them share a few group commits. Errors are those of
the synchronous API.

A cancelled task stops waiting; its call may continue. A submitted write is committed all the same
(H26).
"""

from reef.aio.bridge import Opening
from reef.aio.handles import (
    ChangeCursor,
    Changes,
    Database,
    LocalWriter,
    PinnedReader,
    Reader,
    Snapshot,
    Transaction,
    Writer,
    open,
)

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
