"""Writes: bulk, in batches, one by one, from many threads, pipelined; mixes of reads and writes.

Everything is durable when it returns, for every engine that can say so: a synced log, a committed
transaction, a flushed batch. Reef's background work is on: folds, compactions and sweeps are part
of the time.
"""

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.contest import CACHED, LARGE, Contest, Sizes, contest
from benchmarks.directory_create import raw_create
from benchmarks.engines import BATCH, NAME, Duck, Lmdb, Parquet, Reef, Rocks, Slate
from benchmarks.harness import Case, Result, measure
from benchmarks.rows import Rows, key

BULK = 100_000
THREADS = (1, 8, 64)
IN_FLIGHT = 64
VALUE = b"v" * 100
Work = Callable[[int], object]


def run(sizes: Sizes) -> list[Result]:
    """Measure bulk writes, batches and single puts."""
    results: list[Result] = []
    everyone = (Reef, Rocks, Lmdb, Slate, Duck, Parquet)
    with contest(Rows(sizes.rows), LARGE, everyone, sizes, load=False) as found:
        _bulk(found, goal=0.33)
        _batches(found)
    results += found.results
    with contest(
        Rows(sizes.wide_rows, wide=True),
        LARGE,
        (Reef, Rocks, Lmdb, Duck, Parquet),
        sizes,
        load=False,
    ) as found:
        _bulk(found, group="wide rows", goal=None)
    results += found.results
    with contest(Rows(BATCH), LARGE, (Reef, Rocks, Lmdb, Slate), sizes, load=False) as found:
        _puts(found)
    return results + found.results


def grow(sizes: Sizes) -> list[Result]:
    """Measure bulk writes of a quarter and of four times the rows."""
    results: list[Result] = []
    for factor in (0.25, 1, 4):
        rows = Rows(int(sizes.rows * factor))
        with contest(rows, LARGE, (Reef, Rocks), sizes, load=False) as found:
            found.size = f"{rows.count:,} rows"
            found.run(
                "growth",
                "durable upsert, per row",
                "write",
                lambda write, rows=rows: lambda n: _write_all(write, rows),
                units=rows.count,
                calls=1,
                rounds=3,
            )
        results += found.results
    return results


def _write_all(write: Callable[[Rows, int, int], None], rows: Rows) -> None:
    for start in range(0, rows.count, BULK):
        write(rows, start, min(BULK, rows.count - start))


def _bulk(found: Contest, group: str = "writes", goal: float | None = None) -> None:
    rows, count = found.rows, min(BULK, found.rows.count)
    found.run(
        group,
        f"durable upsert of {count:,}, per row",
        "write",
        lambda write: lambda n: write(rows, n * count, count),
        units=count,
        calls=1,
        without=("slatedb",),
        goals={"rocksdict": goal} if goal else {},
    )


def _batches(found: Contest) -> None:
    rows = found.rows
    found.run(
        "writes",
        "durable batch of 1,000",
        "write",
        lambda write: lambda n: write(rows, n * BATCH, BATCH),
        calls=10,
        goals={"rocksdict": 1.0},
    )


# --- one by one -----------------------------------------------------------------------


def _puts(found: Contest) -> None:
    reef, calls = found.reef, found.sizes.calls(100)
    raw, raw_synced = _raw_put(reef)
    works: dict[str, Work] = {name: _put_of(engine.put) for name, engine in found.engines.items()}
    works |= {"raw PUT": raw, "raw fsync": raw_synced}
    goals = {"raw PUT": 1.25}
    rounds = max(9, found.sizes.rounds)
    case = Case("puts", "durable put", works, calls=calls, rounds=rounds, goals=goals)
    found.results.append(measure(_metered(case, reef)))
    for threads in THREADS:
        _concurrent(found, threads)
    _pipelined(found)


def _metered(case: Case, reef: Reef) -> Case:
    return replace(case, meter=reef.meter)


def _put_of(put: Callable[[bytes, bytes], object]) -> Work:
    return lambda n: put(key(n), VALUE)


def _raw_put(reef: Reef) -> tuple[Work, Work]:
    """Return the limits: the file of a commit made by hand, and an append with an fsync."""
    receipt = reef.writer.put(key(0), VALUE)
    size = reef.db.store.head(f"namespaces/{NAME}/wal/{receipt.lsn:020}.wal").size
    body = os.urandom(size)
    # In the folder of the log: what a sync costs depends on where on the disk a folder is.
    root = f"{reef.db.store.url.removeprefix('file://')}/namespaces/{NAME}/raw"
    os.makedirs(f"{root}/wal")
    file = os.open(f"{root}/appended", os.O_WRONLY | os.O_CREAT)

    def append(_: int) -> None:
        os.write(file, body)
        os.fsync(file)

    return lambda n: raw_create(root, f"wal/{n:08}", body), append


def _concurrent(found: Contest, threads: int) -> None:
    """Let threads put at once; slatedb's binding has one event loop and is left out."""
    each = max(2, found.sizes.calls(64) // threads)
    with ThreadPoolExecutor(threads) as pool:

        def bind(put: Callable[[bytes, bytes], object]) -> Work:
            def work(n: int) -> None:
                futures = [
                    pool.submit(lambda t: [put(key(t * each + i), VALUE) for i in range(each)], t)
                    for t in range(threads)
                ]
                for future in futures:
                    future.result()

            return work

        name = f"durable puts, {threads} threads, per put"
        units, without = threads * each, ("slatedb",)
        found.run("puts", name, "put", bind, units=units, calls=5, without=without)


def _pipelined(found: Contest) -> None:
    """Send puts without waiting for each; as many are in flight as threads were above."""
    writer = found.reef.writer

    def pipelined(n: int) -> None:
        futures = [writer.put(key(i), VALUE, wait=False) for i in range(IN_FLIGHT)]
        for future in futures:
            future.result()

    def one_by_one(n: int) -> None:
        for i in range(IN_FLIGHT):
            found.engines["rocksdict"].put(key(i), VALUE)

    works = {"reef": pipelined, "rocksdict": one_by_one}
    case = Case("puts", f"{IN_FLIGHT} pipelined puts, per put", works, units=IN_FLIGHT, calls=5)
    found.results.append(measure(_metered(case, found.reef)))


# --- mixes ----------------------------------------------------------------------------

MIXES: dict[str, dict[str, float]] = {
    "overwrite-heavy: 90 % puts of 1 % of the keys": {"hot put": 0.9, "read": 0.1},
    "YCSB A: half reads, half updates": {"read": 0.5, "put": 0.5},
    "YCSB B: 95 % reads": {"read": 0.95, "put": 0.05},
    "YCSB C: reads only": {"read": 1.0},
    "YCSB D: reads of the newest": {"newest": 0.95, "insert": 0.05},
    "YCSB E: short scans": {"scan": 0.95, "insert": 0.05},
    "YCSB F: read, change, write": {"read": 0.5, "change": 0.5},
}


def mixes(sizes: Sizes) -> list[Result]:
    """Measure mixes of Zipf reads and durable single writes, by a writer that reads its own."""
    rows, results = Rows(sizes.rows // 4), list[Result]()
    for size in (CACHED, LARGE):
        with contest(rows, size, (Reef, Rocks, Lmdb), sizes) as found:
            found.reef.get = found.reef.writer.get
            found.reef.reader = found.reef.writer
            results += [_mix(found, name, mix) for name, mix in MIXES.items()]
    return results


def _mix(found: Contest, name: str, mix: dict[str, float]) -> Result:
    rows, sizes = found.rows, found.sizes
    works = {engine: _mixed(found.engines[engine], rows, mix) for engine in found.engines}
    case = Case("mixes", name, works, size=found.size, calls=sizes.calls(200), mixed=True)
    return measure(_metered(replace(case, rounds=sizes.rounds), found.reef))


def _mixed(engine: Any, rows: Rows, mix: dict[str, float]) -> Work:
    """Return a work that does one operation of a mix; each engine gets the same ones."""
    chance, zipf = random.Random(1), iter(rows.zipf(100_000))
    kinds, weights = list(mix), list(mix.values())
    inserted: Iterator[int] = iter(range(rows.count, 1 << 40))
    newest = [key(rows.count - 1)]

    def insert() -> None:
        newest.append(key(next(inserted)))
        engine.put(newest[-1], VALUE)

    def change(asked: bytes) -> None:
        engine.put(asked, (engine.get(asked) or b"")[::-1])

    operations: dict[str, Callable[[], object]] = {
        "read": lambda: engine.get(next(zipf)),
        "put": lambda: engine.put(next(zipf), VALUE),
        "hot put": lambda: engine.put(rows.keys[chance.randrange(rows.count // 100)], VALUE),
        "newest": lambda: engine.get(
            newest[-1 - min(int(chance.expovariate(0.5)), len(newest) - 1)]
        ),
        "insert": insert,
        "scan": lambda: engine.scan(next(zipf), chance.randint(1, 100)),
        "change": lambda: change(next(zipf)),
    }
    return lambda _: operations[chance.choices(kinds, weights)[0]]()
