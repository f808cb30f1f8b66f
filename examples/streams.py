"""Streams into a namespace, and tables that follow it: a copy, Parquet files, sums per customer.

A shop keeps its orders in a namespace. Orders come in as files, which a stream of Spark writes, and
are changed and cancelled by a service at any time. Three more streams follow them, each with a
checkpoint of its own. Every few minutes all are run to their ends, as a scheduler would do; in
between they may be killed at any time.
"""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.window import Window

import reef
import reef.spark

SCHEMA = pa.schema([("id", pa.string()), ("customer", pa.string()), ("amount", pa.int64())])
COLUMNS = SCHEMA.names


def take_orders(spark: SparkSession, url: str, home: Path) -> StreamingQuery:
    """Write new files of orders, each exactly once; of several rows of an order the last counts."""
    files = spark.readStream.schema("id string, customer string, amount long, number long")
    return (
        files.json(str(home / "incoming"))
        .writeStream.format("reef")
        .options(namespace="orders", orderBy="number")
        .option("checkpointLocation", str(home / "checkpoints/orders"))
        .trigger(availableNow=True)
        .start(url)
    )


def keep_copy(spark: SparkSession, url: str, home: Path) -> StreamingQuery:
    """Keep a second namespace in step: all rows, then every change, in the order of the log."""
    changes = (
        spark.readStream.format("reef")
        .options(namespace="orders", starting="all", cursor="copy", maxBytesPerTrigger=8 << 20)
        .load(url)
    )
    return (
        changes.writeStream.format("reef")
        .options(namespace="orders-copy", key="id", applyChanges="true")
        .option("checkpointLocation", str(home / "checkpoints/copy"))
        .trigger(availableNow=True)
        .start(url)
    )


def keep_sums(spark: SparkSession, url: str, home: Path) -> StreamingQuery:
    """Keep the sum and the number of orders of each customer, from the rows around each change."""
    changes = (
        spark.readStream.format("reef")
        .options(namespace="orders", starting="all", cursor="sums", images="true")
        .load(url)
    )
    sides = [("_before", -1), ("_after", 1)]
    parts = [
        fn.struct(
            fn.col(f"{side}.customer").alias("id"),
            (fn.col(f"{side}.amount") * sign).alias("amount"),
            fn.lit(sign).alias("count"),
        )
        for side, sign in sides
    ]
    sums = (
        changes.select(fn.explode(fn.array(*parts)).alias("part"))
        .select("part.*")
        .where("id IS NOT NULL")
        .groupBy("id")
        .agg(fn.sum("amount").alias("amount"), fn.sum("count").alias("orders"))
        .withColumn("_op", fn.expr("IF(orders = 0, 'delete', 'put')"))
    )
    return (
        sums.writeStream.format("reef")
        .outputMode("update")
        .options(namespace="sums", key="id")
        .option("checkpointLocation", str(home / "checkpoints/sums"))
        .trigger(availableNow=True)
        .start(url)
    )


def keep_parquet(spark: SparkSession, url: str, home: Path) -> StreamingQuery:
    """Keep a table of Parquet files in step; a numbered log names the files of each version."""
    table = home / "parquet"

    def apply(batch: DataFrame, number: int) -> None:
        if (table / f"_log/{number}.json").exists():  # a replay: this version is there
            return
        names = [] if number == 0 else version(table)
        order = Window.partitionBy("_key").orderBy(fn.desc("_lsn"), fn.desc("_seq"))
        ranges = batch.where("_op = 'delete_range'").selectExpr(
            "_key AS low", "_end_key AS high", "_lsn AS range_lsn", "_seq AS range_seq"
        )
        covered = "_key >= low AND (high IS NULL OR _key < high)"
        newest = (
            batch.where("_op != 'delete_range'")
            .withColumn("place", fn.row_number().over(order))
            .where("place = 1")
        )
        later = "(range_lsn, range_seq) > (_lsn, _seq)"
        changed = newest.join(ranges, fn.expr(f"{covered} AND {later}"), "left_anti")
        rows = changed.where("_after IS NOT NULL").select("_after.*")
        for name in names:
            old = spark.read.parquet(str(table / name)).withColumn(
                "_key", fn.col("id").cast("binary")
            )
            kept = old.join(newest.select("_key"), "_key", "left_anti")
            kept = kept.join(ranges, fn.expr(covered), "left_anti")
            rows = rows.unionByName(kept.select(COLUMNS))
        rows.write.mode("overwrite").parquet(str(table / f"version-{number}"))
        (table / "_log").mkdir(exist_ok=True)
        (table / f"_log/{number}.json").write_text(json.dumps([f"version-{number}"]))

    changes = (
        spark.readStream.format("reef")
        .options(namespace="orders", starting="all", cursor="parquet", images="true")
        .load(url)
    )
    return (
        changes.writeStream.foreachBatch(apply)
        .option("checkpointLocation", str(home / "checkpoints/parquet"))
        .trigger(availableNow=True)
        .start()
    )


def version(table: Path) -> list[str]:
    """Return the files of the newest version of a table."""
    numbers = [int(path.stem) for path in (table / "_log").glob("*.json")]
    names: list[str] = json.loads((table / f"_log/{max(numbers)}.json").read_text())
    return names


def business(db: reef.Database, home: Path, chance: random.Random) -> None:
    """Receive a file of orders; change some, cancel some, and load a file of old ones."""

    def order() -> dict[str, object]:
        customer, amount = f"c{chance.randrange(9)}", chance.randrange(100)
        return {"id": f"o{chance.randrange(200):03}", "customer": customer, "amount": amount}

    incoming = [{**order(), "number": number} for number in range(60)]
    (home / "incoming").mkdir(parents=True, exist_ok=True)
    path = home / f"incoming/{chance.getrandbits(64):x}.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in incoming))
    with db.writer("orders") as writer:
        writer.upsert([order() for _ in range(20)])
        writer.patch([{"id": order()["id"], "amount": 0} for _ in range(5)])
        for _ in range(8):
            writer.delete(str(order()["id"]))
    old = {row["id"]: row for row in (order() for _ in range(60))}
    reef.jobs.ingest(db, "orders", list(old.values()))


def check(spark: SparkSession, db: reef.Database, home: Path) -> int:
    """Compare all three with the orders; return how many there are."""
    orders = {row["id"]: row for row in db.reader("orders").to_arrow().to_pylist()}
    assert {row["id"]: row for row in db.reader("orders-copy").to_arrow().to_pylist()} == orders
    files = [str(home / "parquet" / name) for name in version(home / "parquet")]
    assert {row["id"]: row.asDict() for row in spark.read.parquet(*files).collect()} == orders
    expected: dict[str, tuple[int, int]] = {}
    for row in orders.values():
        amount, count = expected.get(row["customer"], (0, 0))
        expected[row["customer"]] = amount + row["amount"], count + 1
    sums = db.reader("sums").to_arrow().to_pylist()
    assert {row["id"]: (row["amount"], row["orders"]) for row in sums} == expected
    return len(orders)


def main(stops: int = 3) -> None:
    """Let the shop run, stop now and then, and check that everything is in step."""
    home = Path("shop").absolute()
    builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    spark = reef.spark.configure(builder).getOrCreate()
    url, chance = str(home / "bucket"), random.Random(7)
    db = reef.open(url)
    db.create("orders", SCHEMA)
    for stop in range(stops):
        business(db, home, chance)
        for stream in (take_orders, keep_copy, keep_sums, keep_parquet):
            stream(spark, url, home).awaitTermination()
        print(f"stop {stop}: {check(spark, db, home)} orders, all in step")
    print("cursors:", sorted(db.cursors("orders")))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
