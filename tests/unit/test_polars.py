"""`reef.polars.scan`: polars passes columns, filter and limit to Reef, and loses no row."""

import datetime as dt
import math
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pytest

import reef
import reef.polars
from reef.engine.handles.dataset import Scanner
from reef.jobs import fold

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("f", pa.float64()),
        ("single", pa.float32()),
        ("city", pa.string()),
        ("open", pa.bool_()),
        ("day", pa.date32()),
        ("seen", pa.timestamp("us", "UTC")),
        ("price", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.string())),
    ]
)


def row(n):
    """Return a row; some of its columns are null, or NaN."""
    values = {
        "n": n,
        "f": math.nan if n % 7 == 0 else n / 4,
        "single": n / 10,
        "city": f"city {n % 5}",
        "open": n % 2 == 0,
        "day": dt.date(2024, 1, 1) + dt.timedelta(days=n),
        "seen": dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=n),
        "price": Decimal(n) / 4,
        "tags": ["a"] * (n % 3),
    }
    nulls = {name: None for place, name in enumerate(values) if n % 11 == place}
    return {"id": f"k{n:03}", **values, **nulls}


@pytest.fixture(scope="module")
def reader():
    """A table in a segment and the log."""
    db = reef.open("memory://")
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert([row(n) for n in range(80)])
        fold(db, "t", group_bytes=500)
        writer.upsert([row(n) for n in range(70, 100)])
        yield db.reader("t")


@pytest.fixture
def scans(monkeypatch):
    """The scans that are made: columns that are read, and the filter."""
    seen = []
    original = Scanner.__init__

    def spy(self, *args):
        original(self, *args)
        projection = self._scan.projection
        seen.append((projection.columns, str(projection.where)))

    monkeypatch.setattr(Scanner, "__init__", spy)
    return seen


ZONED = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("predicate", "pushed"),
    [
        (pl.col("n") >= 80, "n >= 80"),
        (pl.lit(80) > pl.col("n"), "n < 80"),
        (pl.col("f") > 5, "NOT f <= 5.0"),
        (~(pl.col("f") > 5), "f <= 5.0"),
        (pl.col("f") != 5, "f != 5.0"),
        (pl.col("city") == "city 1", "city = 'city 1'"),
        (pl.col("city").is_in(["city 1", "city 2"]), "city IN ('city 1', 'city 2')"),
        (~pl.col("n").is_in([1, 2]), "n NOT IN (1, 2)"),
        (pl.col("city").str.starts_with("city 3"), "city LIKE 'city 3%'"),
        (pl.col("open") | (pl.col("n") < 9), "open = TRUE OR n < 9"),
        (~pl.col("open"), "open != TRUE"),
        ((pl.col("n") < 3) | (pl.col("n") > 90), "n < 3 OR n > 90"),
        (pl.col("n").is_between(10, 20), "n >= 10 AND n <= 20"),
        (pl.col("day") < dt.date(2024, 1, 5), "day < DATE '2024-01-05'"),
        (pl.col("seen") < ZONED, "seen < TIMESTAMP '2024-01-02 00:00:00+00:00'"),
        (pl.col("price") == Decimal("1.5"), "price = 1.50"),
        (pl.col("city").is_null() | pl.col("day").is_not_null(), "city IS NULL OR day IS NOT NULL"),
        ((pl.col("n") > 50) & (pl.col("n") % 2 == 0), "n > 50"),
        ((pl.col("n") > 50) | (pl.col("n") % 2 == 0), ""),
        (pl.col("single") > 0.1, ""),
        (pl.col("n") > 1e300, ""),
        (pl.col("n") == pl.col("f"), ""),
        (pl.col("tags").list.len() > 1, ""),
        (pl.col("f").is_nan(), ""),
    ],
    ids=str,
)  # fmt: skip
def test_filters_are_pushed_down(reader, scans, predicate, pushed):
    """The rows are those that polars finds by itself; Reef excludes groups by what it can."""
    expected = reader.to_polars().filter(predicate)
    found = reef.polars.scan(reader).filter(predicate).collect()
    assert found.equals(expected)
    assert [where for _, where in scans if where != "None"] == [pushed]


def test_only_columns_of_the_query_are_read(reader, scans):
    """Those that are selected, and those of the filter."""
    lazy = reef.polars.scan(reader)
    found = lazy.filter(pl.col("n") < 4).group_by("city").agg(pl.col("price").sum()).collect()
    assert len(found) == 3
    ((columns, where),) = scans
    assert set(columns) == {"n", "city", "price"}
    assert where == "n < 4"


def test_a_limit_ends_the_scan(reader, scans):
    """It counts rows before the filter that follows it, and after the one before it."""
    lazy = reef.polars.scan(reader)
    assert lazy.head(5).collect()["n"].to_list() == [None, 1, 2, 3, 4]
    assert lazy.head(5).filter(pl.col("n") > 2).collect()["n"].to_list() == [3, 4]
    assert lazy.filter(pl.col("n") > 2).head(2).collect()["n"].to_list() == [3, 4]
    assert lazy.select(pl.len()).collect().item() == 100


def test_a_lazy_frame_is_of_one_snapshot():
    """However often it is collected, whatever is written meanwhile."""
    db = reef.open("memory://")
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert([row(1)])
        lazy = reef.polars.scan(writer)
        writer.upsert([row(2)])
        assert lazy.select("n").collect()["n"].to_list() == [1]
        both = lazy.join(lazy, on="id").select(pl.len())
        assert both.collect().item() == 1


def test_anything_but_a_reader_is_rejected():
    """Such as the path of a database."""
    with pytest.raises(reef.InvalidInputError, match="takes a reader, got str"):
        reef.polars.scan("/tmp/db")
