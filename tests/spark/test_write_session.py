"""Writing with a real session: types, modes, errors on the driver, a real S3 server."""

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

import reef
from benchmarks.spark_profile import cpu_seconds
from tests.spark.writing import (
    kinds_of,
    leases_of,
    named_segments,
    numbers_of,
    sweep_everything,
)

NOON = datetime.datetime(2024, 5, 6, 12, 30, 15, 123456, tzinfo=datetime.UTC)
EVERYTHING = pa.schema(
    [
        ("id", pa.string()),
        ("flag", pa.bool_()),
        *[(f"i{bits}", getattr(pa, f"int{bits}")()) for bits in (8, 16, 32, 64)],
        *[(f"u{bits}", getattr(pa, f"uint{bits}")()) for bits in (8, 16, 32, 64)],
        ("f32", pa.float32()),
        ("f64", pa.float64()),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("s", pa.timestamp("s", "UTC")),
        ("us", pa.timestamp("us", "Europe/Berlin")),
        ("local", pa.timestamp("us")),
        ("money", pa.decimal128(20, 4)),
        ("tags", pa.list_(pa.string())),
        ("vector", pa.list_(pa.float32(), 3)),
    ]
)
ROWS = [
    {
        "id": "all",
        "flag": True,
        **{f"i{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)},
        **{f"u{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)},
        "f32": 1.5,
        "f64": -1e300,
        "text": "ümläut\0",
        "bytes": b"\x00\xff",
        "day": datetime.date(1969, 12, 31),
        "s": NOON.replace(microsecond=0),
        "us": NOON,
        "local": NOON.replace(tzinfo=None),
        "money": Decimal("-1234567890123456.7891"),
        "tags": ["a", None, ""],
        "vector": [1.0, -2.0, 0.5],
    },
    {"id": "nothing"},
]


def write(df, url, mode="append", **options):
    """Write a DataFrame."""
    df.write.format("reef").options(namespace="t", **options).mode(mode).save(url)


def read(spark, url, namespace="t"):
    """Read a namespace with Spark."""
    return spark.read.format("reef").option("namespace", namespace).load(url)


def test_every_type_goes_through_spark_and_back(spark, db, url):
    """A table read as a DataFrame and written again is the same, to the last bit."""
    for name in ("t", "copy"):
        db.create(name, EVERYTHING)
    with db.writer("t", background=False) as writer:
        writer.upsert(ROWS)
    read(spark, url).write.format("reef").option("namespace", "copy").mode("append").save(url)
    copied = db.reader("copy").scan_arrow().read_all()
    assert copied.schema == EVERYTHING
    assert copied.equals(db.reader("t").scan_arrow().read_all())
    assert copied.num_rows == 2


def test_a_namespace_made_by_spark_has_its_types(spark, db, url):
    """Created from the DataFrame, read back by Spark as the same DataFrame."""
    df = spark.sql(
        """SELECT 'k' || id AS id, id AS n, CAST(id AS DECIMAL(9, 2)) AS d,
           TIMESTAMP '2024-01-02 03:04:05.678901' AS at, DATE '2024-01-02' AS day,
           TIMESTAMP_NTZ '2024-01-02 03:04:05' AS local, CAST(id AS TINYINT) AS small,
           array(CAST(id AS FLOAT), 0.5F) AS v, X'00FF' AS b, id % 2 = 0 AS even,
           IF(id % 3 = 0, NULL, 'x') AS maybe FROM range(100)"""
    )
    write(df.repartition(3), url, key="id", vectors="v=2")
    assert db.info("t").schema.field("v").type == pa.list_(pa.float32(), 2)
    found = read(spark, url)
    assert found.exceptAll(df).count() == 0
    assert df.exceptAll(found).count() == 0


def test_append_overwrite_delete_and_again(spark, db, url):
    """The modes of a DataFrame's writer; a rerun with the same key changes nothing."""
    numbers = spark.range(60).selectExpr("'k' || id AS id", "id AS n")
    for _ in range(2):
        write(numbers, url, key="id", idempotencyKey="first")
    write(numbers.where("n < 10").selectExpr("id"), url, op="delete")
    write(numbers.where("n = 20").selectExpr("id", "-n AS n"), url, op="patch")
    expected = {f"k{n}": -20 if n == 20 else n for n in range(10, 60)}
    assert numbers_of(db) == expected
    write(numbers.where("n > 50").repartition(4), url, "overwrite")
    assert numbers_of(db) == {f"k{n}": n for n in range(51, 60)}
    assert kinds_of(db) == ["begin", "ingest"] * 4
    assert leases_of(db) == []
    assert read(spark, url).count() == 9


def test_errors_reach_the_driver_and_leave_nothing(spark, db, url):
    """An unknown namespace, a schema that does not fit, a null key, a key twice: H38."""
    numbers = spark.range(30, numPartitions=3).selectExpr("'k' || id AS id", "id AS n")
    with pytest.raises(Exception, match="there is no namespace t"):
        write(numbers, url)
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with pytest.raises(Exception, match="column m: there is no such column"):
        write(numbers.withColumnRenamed("n", "m"), url)
    assert kinds_of(db) == []
    with pytest.raises(Exception, match="a key cannot be null"):
        write(numbers.selectExpr("nullif(id, 'k7') AS id", "n"), url)
    with pytest.raises(Exception, match="keys of this load occur more than once"):
        write(numbers.union(numbers.where("n = 3")), url)
    with pytest.raises(Exception, match=r"divided by zero|DIVIDE_BY_ZERO"):
        write(numbers.selectExpr("id", "CAST(n / (n - 15) AS BIGINT) AS n"), url)
    assert kinds_of(db) == ["begin", "abort"] * 3
    assert numbers_of(db) == {}
    assert leases_of(db) == []
    assert sweep_everything(db) == set()


def test_over_a_real_s3_server(spark, seaweedfs):
    """Executors reach the bucket through Reef's own stores, by options of the write."""
    seaweedfs.make_bucket("spark-writes")
    options = {**seaweedfs.options(), "listing": "unsorted"}
    words = {f"store.{name}": str(value).lower() for name, value in options.items()}
    words |= {"store.endpoint": options["endpoint"]}
    url = "s3://spark-writes/one"
    numbers = spark.range(500, numPartitions=2).selectExpr("'k' || id AS id", "id AS n")
    write(numbers, url, key="id", **words)
    write(numbers.where("n < 100"), url, "overwrite", **words)
    db = reef.open(url, **options)
    assert numbers_of(db) == {f"k{n}": n for n in range(100)}
    report = reef.spark.bulk_load(numbers, url, "t", partitions=2, store_options=options)
    assert report.rows == 500
    assert numbers_of(db) == {f"k{n}": n for n in range(500)}
    assert len(named_segments(db)) == 2 + (1 + 1) + 2, "one partition has none of the 100"


def test_a_write_of_ten_rows_takes_little_cpu(spark, url):
    """A quarter of a second, of Spark and its Python workers together; it was 2.6 to 4.3."""
    df = spark.createDataFrame([(f"k{n}", n) for n in range(10)], "id string, n long").coalesce(1)

    def write():
        before = cpu_seconds()
        df.write.format("reef").options(namespace="t", key="id").mode("append").save(url)
        return cpu_seconds() - before

    write()  # starts workers
    assert min(write() for _ in range(3)) < 1.3
