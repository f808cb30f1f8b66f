"""Reef and its peers behind one small interface, each used as its own documentation says.

An engine has the methods of those workloads that it can do: `load` rows, `get` one key, `get_many`,
`scan` from a key, `full` scan to its own rows, `columns` of all rows, `write` a batch durably,
`put` one row durably. Engines with a cache of their own get a tenth of the data, or room for all
of it; the page cache of the operating system is everyone's.
"""

import asyncio
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import duckdb
import lmdb
import pyarrow as pa
import pyarrow.parquet as pq
import rocksdict
from slatedb.uniffi import (
    DbBuilder,
    DbCache,
    FoyerCacheOptions,
    KeyRange,
    ObjectStore,
    WriteBatch,
)

import reef
from benchmarks.rows import Rows
from reef.telemetry import RequestMeter

NAME = "bench"
BATCH = 1000
LOAD_ROWS = 100_000


class Reef:
    """Reef over a directory: a writer, and a reader for what was folded."""

    name = "reef"

    def __init__(self, root: str, cache_bytes: int, **writer: Any) -> None:
        self.meter = RequestMeter()
        self.db = reef.open(f"{root}/reef", meter=self.meter)
        self._caches = {"cache_bytes": cache_bytes // 2, "row_cache_bytes": cache_bytes // 2}
        self._options = {**self._caches, **writer}
        self._writer: reef.Writer | None = None

    def create(self, rows: Rows) -> None:
        """Make an empty table, and open its writer."""
        if rows.wide:
            self.db.create(NAME, rows.table.schema)
        self.writer.refresh()

    @property
    def writer(self) -> Any:
        if self._writer is None:
            self._writer = self.db.writer(NAME, **self._options)
        return self._writer

    def load(self, rows: Rows) -> None:
        """Write, fold and merge all rows."""
        if rows.wide:
            self.db.create(NAME, rows.table.schema)
        limits = {"unfolded_bytes_max": 1 << 40, "background": False}
        with self.db.writer(NAME, **limits) as writer:
            for start in range(0, rows.count, LOAD_ROWS):
                writer.upsert(rows.slice(start, LOAD_ROWS))
        reef.jobs.fold(self.db, NAME)
        reef.jobs.compact(self.db, NAME, full=True)
        self.reader = self.db.reader(NAME, refresh_interval_ms=1e9, **self._caches)
        self.get, self.get_many = self.reader.get, self.reader.get_many

    def scan(self, start: bytes, count: int) -> int:
        return len(list(self.reader.scan(start=start, limit=count)))

    def full(self) -> int:
        return sum(batch.num_rows for batch in self.reader.scan_arrow())

    def columns(self, names: Sequence[str]) -> int:
        return sum(batch.num_rows for batch in self.reader.scan_arrow(columns=list(names)))

    def write(self, rows: Rows, start: int, count: int) -> None:
        self.writer.upsert(rows.slice(start, count))

    def put(self, key: bytes, value: bytes) -> None:
        self.writer.put(key, value)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Rocks:
    """RocksDB through rocksdict: raw bytes, a bloom filter, compacted to one level."""

    name = "rocksdict"

    def __init__(self, root: str, cache_bytes: int) -> None:
        options = rocksdict.Options(raw_mode=True)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(max(cache_bytes, 1 << 20)))
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self.db = rocksdict.Rdict(f"{root}/rocks", options)
        self.get = self.get_many = self.db.get
        self._synced = rocksdict.WriteOptions()
        self._synced.sync = True
        self.unsynced = rocksdict.WriteOptions()

    def load(self, rows: Rows) -> None:
        for start in range(0, rows.count, LOAD_ROWS):
            self.write(rows, start, LOAD_ROWS)
        self.db.flush()
        self.db.compact_range(None, None)

    def scan(self, start: bytes, count: int) -> int:
        return sum(1 for _ in itertools.islice(self.db.items(from_key=start), count))

    def full(self) -> int:
        return sum(1 for _ in self.db.items())

    def write(self, rows: Rows, start: int, count: int, options: Any = None) -> None:
        """Write durably; a large batch in parts of 1,000, as its documentation advises."""
        for first in range(start, start + count, BATCH):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in rows.pairs(first, min(BATCH, start + count - first)):
                batch.put(key, value)
            self.db.write(batch, options or self._synced)

    def put(self, key: bytes, value: bytes) -> None:
        self.db.put(key, value, write_opt=self._synced)

    def close(self) -> None:
        self.db.close()


class Lmdb:
    """LMDB: a mapped B+tree; its cache is the operating system's."""

    name = "lmdb"

    def __init__(self, root: str, cache_bytes: int) -> None:
        self.env = lmdb.open(f"{root}/lmdb", map_size=8 << 30, subdir=True)

    def load(self, rows: Rows) -> None:
        self.write(rows, 0, rows.count)

    def get(self, key: bytes) -> bytes | None:
        with self.env.begin() as transaction:
            found: bytes | None = transaction.get(key)
            return found

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            return list(cursor.getmulti(keys))

    def scan(self, start: bytes, count: int) -> int:
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            cursor.set_range(start)
            return sum(1 for _ in itertools.islice(cursor, count))

    def full(self) -> int:
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            return sum(1 for _ in cursor)

    def write(self, rows: Rows, start: int, count: int) -> None:
        with self.env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(rows.pairs(start, count))

    def put(self, key: bytes, value: bytes) -> None:
        with self.env.begin(write=True) as transaction:
            transaction.put(key, value)

    def close(self) -> None:
        self.env.close()


class Slate:
    """SlateDB over a directory; its binding is for asyncio, each call runs to its end."""

    name = "slatedb"

    def __init__(self, root: str, cache_bytes: int) -> None:
        os.makedirs(f"{root}/slate")
        self._loop = asyncio.new_event_loop()
        builder = DbBuilder(
            os.path.abspath(f"{root}/slate").lstrip("/"), ObjectStore.resolve("file:///")
        )
        cache = FoyerCacheOptions(max_capacity=max(cache_bytes, 1 << 20), shards=8)
        builder.with_db_cache(DbCache.new_foyer_cache(cache), 1)
        self.db: Any = self._run(builder.build())

    def _run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)

    def load(self, rows: Rows) -> None:
        for start in range(0, rows.count, 10 * BATCH):
            self.write(rows, start, 10 * BATCH)

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._run(self.db.get(key))
        return found

    def full(self) -> int:
        whole = KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
        return self._count(whole, None)

    def scan(self, start: bytes, count: int) -> int:
        rest = KeyRange(start=start, start_inclusive=True, end=None, end_inclusive=False)
        return self._count(rest, count)

    def _count(self, keys: Any, count: int | None) -> int:
        async def scan() -> int:
            found, total = await self.db.scan(keys), 0
            while batch := await found.next_batch(min(BATCH, count or BATCH)):
                total += len(batch)
                if count is not None and total >= count:
                    break
            return total

        total: int = self._run(scan())
        return total

    def write(self, rows: Rows, start: int, count: int) -> None:
        self._write(rows.pairs(start, count))

    def put(self, key: bytes, value: bytes) -> None:
        self._write([(key, value)])

    def _write(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        async def durably(batch: WriteBatch) -> None:
            await self.db.write(batch)
            await self.db.flush()

        batch = WriteBatch()
        for key, value in pairs:
            batch.put(key, value)
        self._run(durably(batch))

    def close(self) -> None:
        self._run(self.db.shutdown())
        self._loop.close()


class Duck:
    """DuckDB: a table with a primary key."""

    name = "duckdb"

    def __init__(self, root: str, cache_bytes: int) -> None:
        self.db = duckdb.connect(f"{root}/rows.duckdb")

    def load(self, rows: Rows) -> None:
        loaded = rows.table  # noqa: F841 - DuckDB finds it by its name
        self.db.execute("CREATE TABLE stored AS SELECT * FROM loaded ORDER BY id")
        self.db.execute("CHECKPOINT")

    def get_many(self, keys: Sequence[bytes]) -> int:
        asked = pa.table({"id": pa.array(keys, pa.binary())})  # noqa: F841 - as above
        return len(
            self.db.sql("SELECT stored.* FROM asked JOIN stored USING (id)").to_arrow_table()
        )

    def full(self) -> int:
        return len(self.db.sql("SELECT * FROM stored").to_arrow_table())

    def columns(self, names: Sequence[str]) -> int:
        return len(self.db.sql(f"SELECT {', '.join(names)} FROM stored").to_arrow_table())

    def write(self, rows: Rows, start: int, count: int) -> None:
        part = rows.slice(start, count)  # noqa: F841 - as above
        if not self.db.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'w'").fetchall():
            self.db.execute("CREATE TABLE w AS SELECT * FROM part LIMIT 0")
        self.db.execute("INSERT INTO w SELECT * FROM part")

    def close(self) -> None:
        self.db.close()


class Parquet:
    """One sorted Parquet file: the limit of scans."""

    name = "parquet"

    def __init__(self, root: str, cache_bytes: int) -> None:
        self.path, self._parts = f"{root}/rows.parquet", itertools.count()

    def load(self, rows: Rows) -> None:
        pq.write_table(rows.table.sort_by("id"), self.path, compression="zstd")

    def full(self) -> int:
        return len(pq.read_table(self.path))

    def columns(self, names: Sequence[str]) -> int:
        return len(pq.read_table(self.path, columns=list(names)))

    def write(self, rows: Rows, start: int, count: int) -> None:
        """Write a file of its own, and sync it."""
        path = f"{self.path}.{next(self._parts)}"
        pq.write_table(rows.slice(start, count), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        pass


EVERYONE = (Reef, Rocks, Lmdb, Slate, Duck, Parquet)
