"""Reads and statements of the native reader side by side with Parquet, for benchmarks.spark.

Each case has the same rows on both sides: Parquet files that Spark has sorted by key, and a
namespace of the same rows. Results are compared in every round.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import reef
import reef.spark
from tests.support.registers import StartedServers

Run = Callable[[], Any]
OVERLAPPING = 6
KEYS = 100_000
COLUMNS = 12


class Reads:
    """Tables on both sides, made when a case needs them."""

    def __init__(self, spark: Any, source: Any, rows: int, path: Path) -> None:
        self.spark, self.source, self.rows, self.path = spark, source, rows, path
        self.url = str(path / "reef")
        self.small = max(1, rows // 5)

    def cases(self) -> Iterator[tuple[str, str, int, Run, Run]]:
        """Yield name, peer, rows, and the two sides of each case; tables are made just before."""
        sorted_rows = str(self.path / "sorted")
        yield self._scan("full scan", self.rows, "t1", sorted_rows)
        yield self._same("scan of a tenth of the keys", self.rows, _tenth, sorted_rows)
        yield self._same("key-range filter", self.rows, _narrow, sorted_rows)
        self._write_keys()
        yield self._same("join with 100,000 keys", self.rows, self._join, sorted_rows)
        yield self._same("count(*)", self.rows, lambda df: df.count(), sorted_rows)
        yield self._scan("compressible values", self.small, *self._make("text", self._texts()))
        wide = self._make("wide", self._wide())
        yield self._scan("two of twelve columns", self.small, *wide, columns=["c2", "c7"])
        yield self._same(
            "filter on a clustered column", self.small, self._clustered, wide[1], "wide"
        )
        yield self._scan("six overlapping segments", self.rows // 2, *self._overlapping())
        yield "MERGE of 100,000 rows", "rewriting Parquet", self.rows, *self._merges()

    def over_http(self, stack: ExitStack) -> tuple[str, str, int, Run, Run]:
        """Return the case of a local S3 server, which is started here."""
        server = StartedServers(self.path, stack).use("seaweedfs")
        server.make_bucket("bench")
        options = {**server.options(), "listing": "unsorted"}
        url, some = "s3://bench/reef", self.source.limit(self.small)
        reef.spark.bulk_load(some, url, "t", key="id", store_options=options)
        parquet = self._sorted("http", some)
        given = {f"store.{name}": str(value) for name, value in options.items()}

        def ours() -> None:
            reader = self.spark.read.format("reef").options(namespace="t", **given)
            _noop(reader.load(url))

        def theirs() -> None:
            _noop(self.spark.read.parquet(parquet))

        return "signed URLs of a local S3 server", "Parquet on the disk", self.small, ours, theirs

    # --- the two sides ------------------------------------------------------------------
    def table(self, name: str) -> Any:
        """Return a table of the catalog."""
        return self.spark.table(f"reef.default.{name}")

    def _scan(
        self, name: str, rows: int, table: str, parquet: str, columns: Any = ("*",)
    ) -> tuple[str, str, int, Run, Run]:
        def ours() -> None:
            _noop(self.table(table).select(*columns))

        def theirs() -> None:
            _noop(self.spark.read.parquet(parquet).select(*columns))

        return name, "Parquet", rows, ours, theirs

    def _same(
        self, name: str, rows: int, query: Callable[[Any], Any], parquet: str, table: str = "t1"
    ) -> tuple[str, str, int, Run, Run]:
        def ours() -> Any:
            return query(self.table(table))

        def theirs() -> Any:
            return query(self.spark.read.parquet(parquet))

        return name, "Parquet", rows, ours, theirs

    # --- tables -------------------------------------------------------------------------
    def _make(self, name: str, df: Any) -> tuple[str, str]:
        reef.spark.bulk_load(df, self.url, name, key="id", count=False)
        return name, self._sorted(name, df)

    def _sorted(self, name: str, df: Any) -> str:
        target = str(self.path / f"{name}-sorted")
        df.sort("id").write.parquet(target)
        return target

    def _texts(self) -> Any:
        words = "concat('Order ', id, ' of customer ', id % 5000, ', ', repeat('packed ', 9))"
        return self.spark.range(self.small).selectExpr("md5(string(id)) AS id", f"{words} AS value")

    def _wide(self) -> Any:
        numbers = [f"{'id' if n == 1 else f'xxhash64(id, {n})'} AS c{n}" for n in range(1, COLUMNS)]
        return self.spark.range(self.small).selectExpr("format_string('%012d', id) AS id", *numbers)

    def _overlapping(self) -> tuple[str, str]:
        from pyspark.sql import functions as fn

        half = self.source.limit(self.rows // 2).localCheckpoint()
        for part in range(OVERLAPPING):
            some = half.where(fn.pmod(fn.xxhash64("id"), fn.lit(OVERLAPPING)) == part)
            reef.spark.bulk_load(some, self.url, "six", key="id", count=False)
        return "six", self._sorted("six", half)

    def _write_keys(self) -> None:
        keys = self.source.select("id").limit(KEYS)
        keys.write.mode("overwrite").parquet(str(self.path / "keys"))

    def _join(self, df: Any) -> Any:
        from pyspark.sql import functions as fn

        keys = self.spark.read.parquet(str(self.path / "keys"))
        return tuple(df.join(keys, "id").agg(fn.count("id"), fn.sum(fn.length("value"))).first())

    def _clustered(self, df: Any) -> Any:
        first = self.small // 2
        some = df.where(f"c1 BETWEEN {first} AND {first + self.small // 100}")
        return tuple(some.selectExpr("count(c1)", "sum(c3 % 1000)").first())

    # --- MERGE --------------------------------------------------------------------------
    def _merges(self) -> tuple[Run, Run]:
        half = KEYS // 2
        changes = self.source.limit(half).unionByName(
            self.spark.range(half).selectExpr(
                "unhex(md5(concat('new', id))) AS id", "unhex(repeat('ab', 100)) AS value"
            )
        )
        changes.write.mode("overwrite").parquet(str(self.path / "changes"))
        self.spark.read.parquet(str(self.path / "changes")).createOrReplaceTempView("changes")
        return self._merge, self._rewrite

    def _merge(self) -> None:
        self.spark.sql(
            "MERGE INTO reef.default.t1 t USING changes c ON t.id = c.id "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )

    def _rewrite(self) -> None:
        changes = self.spark.table("changes")
        kept = self.spark.read.parquet(str(self.path / "sorted")).join(changes, "id", "left_anti")
        rewritten = kept.unionByName(changes).sort("id")
        rewritten.write.mode("overwrite").parquet(str(self.path / "rewritten"))


def _noop(df: Any) -> None:
    df.write.format("noop").mode("overwrite").save()


def _tenth(df: Any) -> Any:
    return tuple(df.where("id < X'19999999'").selectExpr("count(id)", "sum(length(value))").first())


def _narrow(df: Any) -> Any:
    some = df.where("id >= X'40000000' AND id < X'41000000'")
    return tuple(some.selectExpr("count(id)", "sum(length(value))").first())
