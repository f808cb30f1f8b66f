"""The native reader: the same rows as the Python reader, whatever the history."""

import decimal
import gc
import random
import time as time_module
from datetime import UTC, datetime, time, timedelta

import pyarrow as pa
import pytest

import reef
import reef.jobs
from reef.formats import segment_writer
from reef.formats.segment import decode_footer

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int32()),
        ("big", pa.int64()),
        ("small", pa.uint8()),
        ("huge", pa.uint64()),
        ("x", pa.float32()),
        ("y", pa.float64()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("ns", "UTC")),
        ("local", pa.timestamp("s")),
        ("price", pa.decimal128(20, 3)),
        ("tags", pa.list_(pa.string())),
        ("vector", pa.list_(pa.float32(), 3)),
        ("opens", pa.time32("s")),
        ("clock", pa.time64("ns")),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("place", pa.struct([("city", pa.string()), ("at", pa.struct([("x", pa.float32())]))])),
        ("lines", pa.list_(pa.struct([("sku", pa.string()), ("sizes", pa.list_(pa.int8()))]))),
    ]
)
GROWN = {
    "n": pa.int64(),
    "small": pa.uint16(),
    "x": pa.float64(),
    "price": pa.decimal128(30, 3),
    "vector": pa.list_(pa.float64(), 3),
}
WIDE = pa.schema([pa.field(f.name, GROWN.get(f.name, f.type)) for f in SCHEMA]).append(
    pa.field("added", pa.string())
)
START = datetime(2026, 1, 1, tzinfo=UTC)


def row_of(choices, number):
    """Return a row with some nulls."""
    row = {
        "id": f"k{number:04}",
        "n": choices.randrange(-1000, 1000),
        "big": choices.randrange(-(2**62), 2**62),
        "small": choices.randrange(256),
        "huge": choices.randrange(2**64),
        "x": choices.randrange(100) / 4,
        "y": choices.random(),
        "flag": choices.random() < 0.5,
        "text": "ä" * choices.randrange(5),
        "raw": choices.randbytes(choices.randrange(6)),
        "day": (START + timedelta(days=choices.randrange(1000))).date(),
        "at": START + timedelta(seconds=choices.randrange(10**6)),
        "local": datetime(2026, 1, 1) + timedelta(seconds=choices.randrange(10**6)),
        "price": decimal.Decimal(choices.randrange(-(10**9), 10**9)) / 1000,
        "tags": [None if n == 2 else f"t{n}" for n in range(choices.randrange(4))],
        "vector": [float(n) for n in choices.sample(range(100), 3)],
        "opens": time(choices.randrange(24), choices.randrange(60), 59),
        "clock": time(choices.randrange(24), 0, 1, choices.randrange(10**6)),
        "counts": {f"c{n}": None if n == 1 else n for n in range(choices.randrange(3))},
        "place": {"city": choices.choice(["Rome", None]), "at": {"x": 0.5}},
        "lines": [{"sku": f"s{n}", "sizes": [n]} for n in range(choices.randrange(3))],
    }
    for name in list(row):
        if name != "id" and choices.random() < 0.15:
            row[name] = None
    return row


def some_keys(choices, count):
    """Return keys, some of which have rows."""
    return [f"k{number:04}" for number in choices.sample(range(400), count)]


def random_step(choices, db, writer, schema):
    """Change the namespace in one of the ways there are."""
    step = choices.choice(
        ["upsert", "upsert", "patch", "delete", "delete_range", "expire", "load", "fold", "compact"]
    )
    numbers = choices.sample(range(400), choices.randrange(1, 60))
    if step == "upsert":
        writer.upsert([row_of(choices, number) for number in numbers])
    elif step == "patch":
        names = choices.sample([name for name in SCHEMA.names if name != "id"], 3)
        full = [row_of(choices, number) for number in numbers]
        writer.patch([{name: row[name] for name in ("id", *names)} for row in full])
    elif step == "delete":
        batch = reef.Batch()
        for key in some_keys(choices, 10):
            batch.delete(key)
        writer.write(batch)
    elif step == "delete_range":
        start = choices.randrange(400)
        writer.delete_range(f"k{start:04}", f"k{start + choices.randrange(1, 40):04}")
    elif step == "expire":
        past = choices.random() < 0.5
        writer.upsert(
            [row_of(choices, number) for number in numbers[:10]], ttl_s=0.001 if past else 9999
        )
    elif step == "load":
        rows = [row_of(choices, number) for number in numbers]
        reef.jobs.ingest(db, "t", pa.Table.from_pylist(rows, schema=schema))
    elif step == "fold":
        codec = choices.choice(["zstd", "lz4", "none"])
        reef.jobs.fold(db, "t", group_bytes=2000, codec=codec)
    else:
        reef.jobs.compact(db, "t", full=choices.random() < 0.5)


def read(spark, url, engine, **options):
    """Load the namespace with one of the readers."""
    reader = spark.read.format("reef").option("namespace", "t").option("engine", engine)
    return reader.options(**options).load(url)


def rows_by_key(df):
    """Return the rows of a DataFrame by their keys."""
    return {row["id"]: tuple(row) for row in df.collect()}


def test_random_histories_read_the_same(spark, db, url, monkeypatch):
    """Puts, patches, deletes, expiry, loads, folds, compactions and growth: both readers agree."""
    monkeypatch.setattr(segment_writer, "PAGE_BYTES", 60)  # a few rows, so that tasks cut segments
    choices = random.Random(0)
    db.create("t", SCHEMA)
    first = [row_of(choices, number) for number in range(0, 400, 3)]
    reef.jobs.ingest(db, "t", pa.Table.from_pylist(first, schema=SCHEMA))
    for schema in (SCHEMA, WIDE):
        db.alter("t", schema)
        with db.writer("t", background=False) as writer:
            for _ in range(choices.randrange(3, 9)):
                random_step(choices, db, writer, schema)
    native, python = read(spark, url, "jvm", splitBytes=3000), read(spark, url, "python")
    assert native.schema == python.schema
    expected = rows_by_key(python)
    assert rows_by_key(native) == expected
    assert native.rdd.getNumPartitions() > 2
    assert [row["id"] for row in native.collect()] == sorted(expected)
    assert native.count() == len(expected)
    narrow = native.where("n > 100 AND id >= 'k0100'").select("text", "id")
    assert {row["id"]: row["text"] for row in narrow.collect()} == {
        key: row[8]
        for key, row in expected.items()
        if row[1] is not None and row[1] > 100 and key >= "k0100"
    }


def test_a_grown_schema_reads_old_segments(spark, db, url):
    """Added columns are null and widened numbers keep their values, patched or not."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int16())]))
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": f"k{n}", "n": n} for n in range(50)])
        reef.jobs.fold(db, "t")
        wide = pa.schema([("id", pa.string()), ("n", pa.int64()), ("s", pa.string())])
        db.alter("t", wide)
    with db.writer("t", background=False) as writer:
        writer.patch([{"id": "k3", "s": "new"}])
        writer.upsert([{"id": "k4", "n": 2**40, "s": None}])
    assert rows_by_key(read(spark, url, "jvm")) == rows_by_key(read(spark, url, "python"))
    assert rows_by_key(read(spark, url, "jvm"))["k4"] == ("k4", 2**40, None)


def test_pushed_down_filters_are_shown_and_skip_pages(spark, db, url):
    """Explain names filters and columns; a filter on the key reads a fraction of the bytes."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64()), ("pad", pa.string())]))
    rows = [{"id": f"k{n:06}", "n": n, "pad": str(random.Random(n).random())} for n in range(20000)]
    reef.jobs.ingest(db, "t", pa.Table.from_pylist(rows))
    df = read(spark, url, "jvm").where("id BETWEEN 'k000100' AND 'k000110'").select("n")
    plan = df._jdf.queryExecution().toString()
    assert "(native)" in plan
    assert "PushedFilters: [id >= 'k000100', id <= 'k000110']" in plan
    assert sorted(row["n"] for row in df.collect()) == list(range(100, 111))
    metrics = scan_metrics(df)
    assert metrics["pagesRead"] <= 2
    assert metrics["bytesRead"] < 20_000


def scan_metrics(df):
    """Return the metrics of the scan of a DataFrame that has been collected."""
    plan = df._jdf.queryExecution().executedPlan()
    leaves = plan.collectLeaves()
    found = {}
    for place in range(leaves.size()):
        metrics = leaves.apply(place).metrics()
        for name in ("pagesRead", "bytesRead", "requests"):
            if metrics.contains(name):
                found[name] = metrics.apply(name).value()
    return found


def test_damage_is_an_error_that_names_object_and_offset(spark, db, url):
    """A flipped byte in a page is never a wrong row."""
    db.create("t", pa.schema([("id", pa.string()), ("s", pa.string())]))
    rows = [{"id": f"k{n:04}", "s": f"value {n}"} for n in range(2000)]
    reef.jobs.ingest(db, "t", pa.Table.from_pylist(rows))
    (info,) = db.store.list("namespaces/t/segments/")
    body = bytearray(db.store.get(info.key))
    unread = decode_footer(bytes(body), len(body), info.key).filter
    for offset in range(40, len(body), len(body) // 12):
        if unread.offset <= offset < unread.offset + unread.length:
            continue  # scans do not use the filter
        damaged = bytearray(body)
        damaged[offset] ^= 0x10
        db.store.put(info.key, bytes(damaged))
        with pytest.raises(Exception, match="offset") as caught:
            read(spark, url, "jvm").collect()
        assert info.key in str(caught.value)
    db.store.put(info.key, bytes(body))
    assert len(rows_by_key(read(spark, url, "jvm"))) == 2000


def test_a_load_without_an_action_takes_no_lease(spark, db, url):
    """Only a scan pins: a DataFrame that is never read holds nothing back (H74)."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "a", "n": 1}])
    df = read(spark, url, "jvm")
    assert not list(db.store.list("namespaces/t/leases/"))
    df.collect()
    assert len(list(db.store.list("namespaces/t/leases/"))) == 1


def test_a_small_table_is_broadcast(spark, db, url):
    """Statistics let Spark choose a broadcast join for ten rows."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    reef.jobs.ingest(db, "t", pa.table({"id": [f"k{n}" for n in range(10)], "n": list(range(10))}))
    numbers = spark.range(100_000).selectExpr("concat('k', id) AS id", "id AS m")
    joined = numbers.join(read(spark, url, "jvm"), "id")
    assert "BroadcastHashJoin" in joined._jdf.queryExecution().executedPlan().toString()
    assert joined.count() == 10


def test_queries_share_a_pinned_state_until_it_changes(spark, db, url):
    """The second query takes no lease of its own; a write is visible to the next one."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "a", "n": 1}])
        assert rows_by_key(read(spark, url, "jvm")) == {"a": ("a", 1)}
        (lease,) = (info.key for info in db.store.list("namespaces/t/leases/"))
        assert read(spark, url, "jvm").where("n > 0").count() == 1
        assert [info.key for info in db.store.list("namespaces/t/leases/")] == [lease]
        writer.upsert([{"id": "b", "n": 2}])
        assert len(rows_by_key(read(spark, url, "jvm"))) == 2
    while lease in (info.key for info in db.store.list("namespaces/t/leases/")):
        gc.collect()  # DataFrames of the state before, on both sides
        spark.sparkContext._jvm.System.gc()
        time_module.sleep(0.05)
    db.alter("t", pa.schema([("id", pa.string()), ("n", pa.int64()), ("s", pa.string())]))
    assert read(spark, url, "jvm").columns == ["id", "n", "s"]


def test_the_driver_renews_the_lease_of_a_dataframe(spark, db, url):
    """A third of its term after it was written: what takes three seconds here."""
    db.create("t", pa.schema([("id", pa.string())]))
    df = read(spark, url, "jvm", leaseSeconds=9)
    assert df.count() == 0
    (lease,) = db.store.list("namespaces/t/leases/")
    while db.store.head(lease.key).last_modified_s == lease.last_modified_s:
        time_module.sleep(0.1)
    assert df.count() == 0
