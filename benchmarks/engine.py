"""Reef's tables against RocksDB and SlateDB through their Python bindings, on the same disk.

Every case handles the same rows: 16-byte keys, 100-byte values. Peers are used as their own
documentation tells to be fast: raw bytes, write batches, iterators that return lists.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict
from slatedb.uniffi import DbBuilder, KeyRange, ObjectStore, WriteBatch

import reef
from benchmarks.directory_create import raw_create
from benchmarks.harness import Comparison, compare

ROWS = 100_000
BATCH = 1000
READS = 2000
MANY = 1000


def run(rounds: int = 7) -> list[Comparison]:
    """Return all lines of the table."""
    rows = _Rows()
    lines: list[Comparison] = []
    with tempfile.TemporaryDirectory(dir=".") as root:
        with _contest(f"{root}/writing") as contest:
            lines += _writes(rows, contest, rounds)
            lines += _single_puts(contest)
        with _contest(f"{root}/reading") as contest:
            _load(rows, contest)
            lines += _point_reads(rows, contest, rounds)
            lines += _scans(contest, rounds)
    return lines


class _Rows:
    """The data, in the form that each contestant likes best."""

    def __init__(self) -> None:
        order = np.random.default_rng(1).permutation(ROWS)
        self.keys = [b"user-%011d" % number for number in order.tolist()]
        self.values = [os.urandom(50) * 2 for _ in range(ROWS)]
        self.table = pa.table(
            {"id": pa.array(self.keys, pa.binary()), "value": pa.array(self.values, pa.binary())}
        )
        self.asked = self.keys[:READS]

    def pairs(self, start: int = 0, count: int = ROWS) -> Iterator[tuple[bytes, bytes]]:
        return itertools.islice(zip(self.keys, self.values, strict=True), start, start + count)


class _Slate:
    """SlateDB's binding is for asyncio; each call runs to its end."""

    def __init__(self, path: str) -> None:
        os.makedirs(path)
        self._loop = asyncio.new_event_loop()
        store = ObjectStore.resolve("file:///")
        builder = DbBuilder(os.path.abspath(path).lstrip("/"), store)
        self.db: Any = self._loop.run_until_complete(builder.build())

    def run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)

    def write(self, pairs: Any) -> None:
        batch = WriteBatch()
        for key, value in pairs:
            batch.put(key, value)
        self.run(self._durably(batch))

    async def _durably(self, batch: WriteBatch) -> None:
        await self.db.write(batch)
        await self.db.flush()

    async def scan(self) -> int:
        found = await self.db.scan(
            KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
        )
        count = 0
        while batch := await found.next_batch(BATCH):
            count += len(batch)
        return count

    def close(self) -> None:
        self.run(self.db.shutdown())
        self._loop.close()


@dataclass(frozen=True, slots=True)
class _Contest:
    """All contestants, on one disk."""

    root: str
    db: reef.Database
    ours: reef.Writer
    rocks: rocksdict.Rdict
    slate: _Slate


@contextmanager
def _contest(root: str) -> Iterator[_Contest]:
    os.makedirs(root)
    options = rocksdict.Options(raw_mode=True)
    rocks, slate = rocksdict.Rdict(f"{root}/rocks", options), _Slate(f"{root}/slate")
    db = reef.open(f"{root}/reef")
    # Upkeep is measured apart: a fold in the middle of a round would be in some and not in others.
    with db.writer("bench", unfolded_bytes_max=1 << 40, background=False) as ours:
        yield _Contest(root, db, ours, rocks, slate)
    rocks.close()
    slate.close()


def _rocks_write(rocks: rocksdict.Rdict, pairs: Any, *, sync: bool) -> None:
    batch = rocksdict.WriteBatch(raw_mode=True)
    for key, value in pairs:
        batch.put(key, value)
    options = rocksdict.WriteOptions()
    options.sync = sync
    rocks.write(batch, options)


def _load(rows: _Rows, contest: _Contest) -> None:
    contest.ours.upsert(rows.table)
    reef.jobs.fold(contest.db, "bench")
    contest.ours.refresh()
    _rocks_write(contest.rocks, rows.pairs(), sync=True)
    contest.rocks.flush()
    for start in range(0, ROWS, 10_000):
        contest.slate.write(rows.pairs(start, 10_000))


# --- writes ---------------------------------------------------------------------------


def _writes(rows: _Rows, contest: _Contest, rounds: int) -> list[Comparison]:
    ours, rocks, slate = contest.ours, contest.rocks, contest.slate

    def upsert(_: int) -> None:
        ours.upsert(rows.table)

    def batch_of_1000(number: int) -> None:
        start = number * BATCH % ROWS
        ours.upsert(rows.table.slice(start, BATCH))

    def rocks_all(_: int, sync: bool = True) -> None:
        for start in range(0, ROWS, BATCH):
            _rocks_write(rocks, rows.pairs(start, BATCH), sync=sync)

    def rocks_batch(number: int) -> None:
        _rocks_write(rocks, rows.pairs(number * BATCH % ROWS, BATCH), sync=True)

    def slate_tenth(_: int) -> None:
        for start in range(0, ROWS // 10, BATCH):
            slate.write(rows.pairs(start, BATCH))

    def upsert_tenth(_: int) -> None:
        ours.upsert(rows.table.slice(0, ROWS // 10))

    return [
        _line(
            "Arrow upsert of 100,000 rows",
            upsert,
            "rocksdict, batches of 1,000, sync",
            rocks_all,
            1 / 5,
            rounds,
        ),
        _line(
            "Arrow upsert of 100,000 rows",
            upsert,
            "rocksdict, batches of 1,000, no sync",
            lambda n: rocks_all(n, sync=False),
            1.0,
            rounds,
        ),
        _line(
            "Arrow upsert of 10,000 rows",
            upsert_tenth,
            "slatedb, batches of 1,000",
            slate_tenth,
            1 / 50,
            5,
        ),
        _line(
            "a batch of 1,000 rows, durable",
            batch_of_1000,
            "rocksdict, sync",
            rocks_batch,
            1.0,
            rounds,
            calls=5,
        ),
    ]


def _single_puts(contest: _Contest) -> list[Comparison]:
    ours, value = contest.ours, os.urandom(100)
    # Beside the log: what a sync costs depends on where on the disk a folder lies.
    root = f"{contest.root}/reef/namespaces/bench/raw"
    os.makedirs(f"{root}/wal")
    key = f"namespaces/bench/wal/{ours.put('k', value).lsn:020}.wal"
    body = os.urandom(contest.db.store.head(key).size)
    return [
        _line(
            "durable put of 100 bytes",
            lambda n: ours.put(b"k%d" % n, value),
            "raw create-only PUT of the same bytes",
            lambda n: raw_create(root, f"wal/{n:08}", body),
            1.25,
            60,
            calls=10,
        )
    ]


# --- reads ----------------------------------------------------------------------------


def _point_reads(rows: _Rows, contest: _Contest, rounds: int) -> list[Comparison]:
    ours, rocks, slate = contest.ours, contest.rocks, contest.slate

    def each(get: Callable[[bytes], Any]) -> Callable[[int], None]:
        def read(_: int) -> None:
            for key in rows.asked:
                get(key)

        return read

    def cold(_: int) -> None:
        with contest.db.reader("bench", refresh_interval_ms=1e9) as reader:
            for key in rows.asked[:100]:
                reader.get(key)

    def rocks_cold(_: int) -> None:
        for key in rows.asked[:100]:
            rocks.get(key)

    many = rows.keys[:MANY]
    each(ours.get)(0)
    return [
        _line("2,000 warm gets", each(ours.get), "rocksdict", each(rocks.get), 1.0, rounds),
        _line("100 cold gets, one reader", cold, "rocksdict, warm", rocks_cold, None, rounds),
        _line(
            "get_many of 1,000",
            lambda _: ours.get_many(many),
            "rocksdict, one list",
            lambda _: rocks.get(many),
            None,
            rounds,
        ),
        _line(
            "2,000 warm gets",
            each(ours.get),
            "slatedb",
            each(lambda key: slate.run(slate.db.get(key))),
            1.0,
            3,
        ),
    ]


def _scans(contest: _Contest, rounds: int) -> list[Comparison]:
    ours, rocks, slate = contest.ours, contest.rocks, contest.slate

    def to_arrow(_: int) -> None:
        _same(sum(batch.num_rows for batch in ours.scan_arrow()))

    def cold_to_arrow(_: int) -> None:
        with contest.db.reader("bench") as reader:
            _same(sum(batch.num_rows for batch in reader.scan_arrow()))

    def to_python(_: int) -> None:
        _same(sum(1 for _ in ours.scan()))

    def rocks_scan(_: int) -> None:
        _same(sum(1 for _ in rocks.items()))

    def slate_scan(_: int) -> None:
        _same(slate.run(slate.scan()))

    to_arrow(0)
    return [
        _line(
            "full scan to Arrow, warm", to_arrow, "rocksdict, items()", rocks_scan, 1 / 5, rounds
        ),
        _line(
            "full scan to Arrow, cold",
            cold_to_arrow,
            "rocksdict, items(), warm",
            rocks_scan,
            1 / 5,
            rounds,
        ),
        _line("full scan to Python", to_python, "rocksdict, items()", rocks_scan, 1.0, rounds),
        _line("full scan to Arrow, warm", to_arrow, "slatedb", slate_scan, 1 / 50, 3),
    ]


def _same(count: int) -> None:
    if count != ROWS:
        raise AssertionError(f"{count} rows, {ROWS} were written")


def _line(
    name: str,
    case: Callable[[int], Any],
    peer: str,
    peer_case: Callable[[int], Any],
    goal: float | None,
    rounds: int,
    *,
    calls: int = 1,
) -> Comparison:
    return compare(name, case, peer, peer_case, goal=goal, rounds=max(5, rounds), calls=calls)
