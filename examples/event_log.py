"""An event log: events expire by themselves, and a consumer counts each of them exactly once.

    python examples/event_log.py [URL]

The consumer crashes on purpose after its results are durable and before it has said so; the next
one starts where the results end, not where the crashed one said it was.
"""

import sys
import tempfile
from collections import Counter
from typing import Any

import pyarrow as pa

import reef

EVENTS = pa.schema([("id", pa.string()), ("kind", pa.string()), ("amount", pa.float64())])
TOTALS = pa.schema([("id", pa.string()), ("count", pa.int64())])
DAY_S = 86400.0
POSITION = "_position"
"""The row of `totals` with the LSN up to which they count."""


def append(events: reef.Writer, kind: str, ids: list[str]) -> None:
    """Append events that expire after a week; a producer that retries sends the same ids."""
    rows = [{"id": event, "kind": kind, "amount": 1.0} for event in ids]
    events.upsert(rows, ttl_s=7 * DAY_S, idempotency_key=f"{kind}/{ids[0]}")


def consume(db: reef.Database, *, crash: bool = False) -> int:
    """Count new events by kind. Counts and position are one batch, so they never disagree."""
    with db.cursor("events", "totals", after_lsn=0) as cursor, db.writer("totals") as totals:
        counted_lsn = (totals.get(POSITION) or {"count": 0})["count"]
        new = Counter(
            change.row["kind"]
            for change in cursor
            if change.op == "put" and change.lsn > counted_lsn  # delivered again: counted before
        )
        rows: list[dict[str, Any]] = [
            {"id": kind, "count": (totals.get(kind) or {"count": 0})["count"] + count}
            for kind, count in new.items()
        ]
        totals.upsert([*rows, {"id": POSITION, "count": cursor.position}])
        if crash:
            raise RuntimeError("crashed after the results, before the cursor was committed")
        cursor.commit()  # the log before this position may be collected
    return new.total()


def main(url: str) -> None:
    """Produce, consume, crash, consume."""
    with reef.open(url) as db:
        db.create("events", EVENTS)
        db.create("totals", TOTALS)
        with db.writer("events") as events:
            append(events, "view", ["e1", "e2", "e3"])
            print("counted", consume(db), "events")
            append(events, "view", ["e4"])
            append(events, "sale", ["e5"])
            append(events, "sale", ["e5"])  # a retry: the log has it once
        try:
            consume(db, crash=True)
        except RuntimeError as error:
            print(error)
        print("counted", consume(db), "events after the crash: they are in the totals already")
        with db.reader("totals") as totals:
            counts = {key: row["count"] for key, row in totals.scan() if key != POSITION}
        print("totals:", counts)
        assert counts == {"view": 4, "sale": 1}
        with db.reader("events") as events:
            row = events.get("e5", columns=["kind", "_expires_at"])
        print("e5 expires in a week:", row["_expires_at"] is not None)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
