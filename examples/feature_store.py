"""A feature store: Spark loads all features every night, a service updates and reads them by key.

    python examples/feature_store.py [URL]

The load and the service know nothing of each other: each night is one commit, and the service's
writer keeps its role and its speed meanwhile.
"""

import sys
import tempfile
from typing import Any

from pyspark.sql import SparkSession

import reef
import reef.spark


def start_spark(url: str) -> Any:
    """Return a local session with the bucket as the catalog `reef`."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR")
    return reef.spark.configure(builder, url=url).getOrCreate()


def nightly_features(spark: Any, day: int) -> Any:
    """Compute all features; here they are made up, elsewhere this is your job."""
    return spark.range(5000).selectExpr(
        "format_string('u%05d', id) AS user",
        f"CAST(id % 7 + {day} AS BIGINT) AS purchases",
        "CAST(0 AS BIGINT) AS clicks_today",
        "transform(sequence(1, 4), n -> CAST(id % n AS FLOAT)) AS embedding",
    )


def load_night(spark: Any, url: str, day: int) -> reef.spark.BulkLoadReport:
    """Replace the features of all users at one LSN. A second run of the same night does nothing."""
    return reef.spark.bulk_load(
        nightly_features(spark, day),
        url,
        "features",
        key="user",
        vectors={"embedding": 4},
        idempotency_key=f"features-day-{day}",
    )


def count_click(writer: reef.Writer, user: str) -> None:
    """Add to one feature of one user, in a transaction: no click is lost to a concurrent write."""
    while True:
        try:
            with writer.transaction() as transaction:
                clicks = transaction.get(user)["clicks_today"]
                transaction.patch([{"user": user, "clicks_today": clicks + 1}])
            return
        except reef.ConflictError:
            continue


def features_of(reader: reef.Reader, users: list[str]) -> list[dict[str, Any]]:
    """Read the features of a request's users at once, as the model expects them."""
    table = reader.get_many(users, columns=["user", "purchases", "clicks_today", "embedding"])
    return [row for row in table.to_pylist() if row["_found"]]


def training_set(spark: Any, snapshot: str) -> Any:
    """Read all features as they were at a snapshot: the same rows in every epoch."""
    return spark.sql(
        f"SELECT user, purchases FROM reef.default.features VERSION AS OF '{snapshot}'"
    )


def main(url: str) -> None:
    """Two nights, with a day of clicks between them."""
    spark = start_spark(url)
    first = load_night(spark, url, day=1)
    print(f"night 1: {first.rows} users at LSN {first.lsn}")

    db = reef.open(url)
    with db.writer("features") as writer:
        for _ in range(3):
            count_click(writer, "u00007")
        with db.reader("features") as reader:
            row, other = features_of(reader, ["u00007", "nobody", "u00008"])
            print(f"serving: {row['user']} has {row['clicks_today']} clicks today")
            assert (row["clicks_today"], other["clicks_today"]) == (3, 0)

        db.snapshot("features", "training-1", ttl_s=7 * 86400)
        second = load_night(spark, url, day=2)  # the writer keeps its role
        again = load_night(spark, url, day=2)  # a scheduler that repeats the job
        print(f"night 2: {second.rows} users; repeated: {again.replayed}")
        assert again.replayed
        assert again.lsn == second.lsn
        count_click(writer, "u00007")
        assert writer.get("u00007") == {
            "user": "u00007",
            "purchases": 2,
            "clicks_today": 1,
            "embedding": [0.0, 1.0, 1.0, 3.0],
        }

    purchases = training_set(spark, "training-1").where("user = 'u00007'").first()["purchases"]
    print(f"training on day 1 still sees purchases = {purchases}")
    assert purchases == 1
    spark.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
