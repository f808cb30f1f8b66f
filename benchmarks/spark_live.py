"""A live writer during a bulk load: the result is compared with a model, row by row.

The writer has several batches in flight all the time. Half of its keys are keys of the load, so
that for each of them the order of LSNs decides: what was written before the load's LSN has lost
against it, what was written after has won. The writer must never be fenced, and its own batches
must come in the order in which they were sent.
"""

import hashlib
import itertools
import random
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import reef
import reef.spark

__all__ = ["check_live"]

NAME = "live"
IN_FLIGHT = 8
BATCH_ROWS = 50
SHARED_KEYS = 5000
BATCHES_AFTER = 200
"""Written when the load is done: they win over it."""


class LiveWriter:
    """Writes until it is stopped; records which batch was acknowledged at which LSN."""

    def __init__(self, db: reef.Database) -> None:
        self.db = db
        self.acknowledged: list[tuple[int, int, list[bytes], bytes]] = []
        """LSN, place in its group, keys and their value, in the order of sending."""
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Let it write some more, and wait for its end; raise what went wrong."""
        goal = len(self.acknowledged) + BATCHES_AFTER
        while self._thread.is_alive() and len(self.acknowledged) < goal:
            self._thread.join(0.01)
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise SystemExit(f"the live writer was stopped: {self.error!r}")

    def _run(self) -> None:
        try:
            with self.db.writer(NAME, max_parallel_writes=4) as writer:
                self._write(writer)
        except BaseException as error:  # set by `stop`, in the other thread
            self.error = error

    def _write(self, writer: Any) -> None:
        chance, flying = random.Random(2), deque[Any]()
        for number in itertools.count():
            if self._over.is_set():
                break
            keys = list(dict.fromkeys(_key(chance) for _ in range(BATCH_ROWS)))
            mark = b"live %d" % number
            rows = pa.table({"id": keys, "value": [mark] * len(keys)})
            flying.append((writer.upsert(rows, wait=False), keys, mark))
            if len(flying) >= IN_FLIGHT:
                self._settle(*flying.popleft())
        while flying:
            self._settle(*flying.popleft())

    def _settle(self, future: Any, keys: list[bytes], mark: bytes) -> None:
        receipt = future.result()
        self.acknowledged.append((receipt.lsn, receipt.index, keys, mark))


def _key(chance: random.Random) -> bytes:
    """Return a key of the load, or one that only the writer has."""
    number = chance.randrange(2 * SHARED_KEYS)
    text = str(number) if number < SHARED_KEYS else f"own {number}"
    return hashlib.md5(text.encode(), usedforsecurity=False).digest()


def check_live(source: Any, parquet: Path, url: str) -> str:
    """Load while a writer is at work; raise unless every row is the one that it must be."""
    db = reef.open(url)
    db.create(NAME)
    live = LiveWriter(db)
    try:
        report = reef.spark.bulk_load(source, url, NAME)
    finally:
        live.stop()
    places = [(lsn, index) for lsn, index, _, _ in live.acknowledged]
    if places != sorted(set(places)):
        raise SystemExit("the writer's own batches have changed places")
    before = [write for write in live.acknowledged if write[0] < report.lsn]
    after = [write for write in live.acknowledged if write[0] > report.lsn]
    table = pq.read_table(parquet)
    expected = {key: mark for _, _, keys, mark in before for key in keys}
    lost = len(expected)
    expected |= dict(zip(table["id"].to_pylist(), table["value"].to_pylist(), strict=True))
    for _, _, keys, mark in after:
        expected |= dict.fromkeys(keys, mark)
    seen = _compare(db, expected)
    return (
        f"Live rows: {len(live.acknowledged):,} batches during a load of {table.num_rows:,} rows, "
        f"{len(before):,} before its LSN (over {lost:,} keys) and {len(after):,} after it; all "
        f"{seen:,} rows equal the model, and no batch was refused or changed its place."
    )


def _compare(db: reef.Database, expected: dict[bytes, bytes]) -> int:
    """Return how many rows there are; raise at the first that differs."""
    seen = 0
    for batch in db.reader(NAME).scan_arrow():
        for key, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if expected.pop(key, None) != value:
                raise SystemExit(f"{key!r} has {value!r}")
            seen += 1
    if expected:
        raise SystemExit(f"{len(expected)} rows are missing, such as {next(iter(expected))!r}")
    return seen
