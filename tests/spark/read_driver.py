"""A driver in a process of its own: only one kind of session fits into one.

    python -m tests.spark.read_driver MASTER INPUT.json OUTPUT.json

Runs the checks that the input names for each bucket, and writes down what they returned, or how
they failed. MASTER is Spark's, or `connect` for a local server of Spark Connect.
"""

import json
import os
import sys
from pathlib import Path

import reef
import reef.spark
from tests.spark import logs, tasks
from tests.support.spark_sessions import configured


def main(master, given, output):
    """Run all checks; never raise, so that each test sees its own failure."""
    spark = session(master)
    found = {}
    for name, bucket in json.loads(Path(given).read_text()).items():
        for check in [globals()[word] for word in bucket["checks"]]:
            try:
                found[f"{name} {check.__name__}"] = check(spark, bucket)
            except Exception as error:
                found[f"{name} {check.__name__}"] = f"{type(error).__name__}: {error}"
    found["driver"] = os.getpid()
    Path(output).write_text(json.dumps(found))
    spark.stop()


def session(master):
    """Return a session of the kind that is asked for."""
    from pyspark.sql import SparkSession

    kind = SparkSession.builder
    if master == "connect":
        os.environ["SPARK_TESTING"] = "1"  # any free port: 15002 may be taken
        kind = kind.remote("local[2]")
    else:
        kind = kind.master(master)
    return reef.spark.configure(configured(kind)).getOrCreate()


def opened(bucket):
    """Return the database of a bucket."""
    return reef.open(bucket["url"], **bucket["options"])


def table(spark, bucket, namespace="events"):
    """Return a table of a bucket, with its options."""
    return reef.spark.table(spark, bucket["url"], namespace, **bucket["options"])


def read_rows(spark, bucket):
    """All rows, read by several tasks."""
    df = table(spark, bucket).option(splitBytes=20_000).select("id", "n").df()
    return sorted([row["id"], row["n"]] for row in df.collect())


def read_native(spark, bucket):
    """All rows, read in the JVM: of files, or of signed URLs."""
    given = {f"store.{name}": str(value) for name, value in bucket["options"].items()}
    reader = spark.read.format("reef").options(namespace="events", engine="jvm", **given)
    df = reader.option("splitBytes", 2_000).load(bucket["url"])  # of the columns that are read
    rows = df.selectExpr("id", "n", "spark_partition_id() AS task").collect()
    tasks_used = len({row["task"] for row in rows})
    if tasks_used < 2:
        return f"one task only: {tasks_used}"
    return sorted([row["id"], row["n"]] for row in rows)


def read_some(spark, bucket):
    """A range, a condition and one of Spark's own."""
    df = table(spark, bucket).range("k0000100", "k0000200").where("n >= 150").df()
    return sorted(row["n"] for row in df.filter("n % 2 = 0").collect())


def refuse(spark, bucket):
    """The message of a namespace that is not there."""
    try:
        table(spark, bucket, "nope").df().count()
    except Exception as error:
        return str(error)
    return "nothing was refused"


def run_tasks(spark, bucket):
    """The processes that ran the tasks, and the counts."""
    executor = reef.spark.executor(spark)
    store = opened(bucket).store
    found = executor.map(tasks.touch, [tasks.Touch(store, n) for n in range(4)])
    return {
        "numbers": [number for number, _, _ in found],
        "processes": [process for _, process, _ in found],
        "parents": [parent for _, _, parent in found],
        "puts": tasks.puts(executor),
    }


def fail_tasks(spark, bucket):
    """The error of a task, as it came back."""
    try:
        reef.spark.executor(spark).map(tasks.fail, [0, 1, 2, 3])
    except reef.ConflictError as error:
        return [error.message, error.hint, error.context]
    return "nothing failed"


def fold_log(spark, bucket):
    """A fold by Spark's shuffle, and the rows after it."""
    db = opened(bucket)
    executor = reef.spark.executor(spark)
    report = reef.jobs.fold(db, "events", executor=executor, shuffle_bytes_min=0)
    return {"published": report.published, "rows": read_rows(spark, bucket)}


def fold_alike(spark, bucket):
    """A random log, folded by threads and by Spark's shuffle; raises where they differ."""
    home = Path(bucket["url"]).with_name("twins")
    threads, shuffled = logs.twins(home, seed=21)
    executor = reef.spark.executor(spark)
    report = logs.check_fold(threads, shuffled, executor, segment_bytes_max=40_000)
    return {"segments": report.segments, "voided": report.voided}


if __name__ == "__main__":
    main(*sys.argv[1:])
