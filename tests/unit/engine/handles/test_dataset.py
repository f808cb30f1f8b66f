"""`reader.dataset()`: a snapshot that DuckDB, polars and pyarrow push columns and filters into."""

import datetime as dt

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import reef
from reef.engine.handles.dataset import Scanner
from reef.jobs import fold

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("x", pa.float64()),
        ("y", pa.int64()),
        ("z", pa.string()),
        ("seen", pa.timestamp("us", "UTC")),
        ("price", pa.decimal128(10, 2)),
    ]
)
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def rows(first, last, **changed):
    """Return rows with keys of a range."""
    return [
        {
            "id": f"k{n:04}",
            "x": n / 2,
            "y": n,
            "z": f"g{n % 3}",
            "seen": START + dt.timedelta(hours=n),
            "price": f"{n}.50",
            **changed,
        }
        for n in range(first, last)
    ]


@pytest.fixture
def db():
    """A table with rows in a segment and newer ones in the log."""
    db = reef.open("memory://")
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(pa.Table.from_pylist(typed(rows(0, 1000)), SCHEMA))
        fold(db, "t", group_bytes=2000)
        writer.upsert(pa.Table.from_pylist(typed(rows(990, 1010, x=None)), SCHEMA))
    return db


def typed(rows):
    """Return the rows with decimals."""
    from decimal import Decimal

    return [{**row, "price": Decimal(row["price"])} for row in rows]


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


def test_it_is_a_dataset_of_pyarrow(db):
    """Programs recognize it by its class; all methods that read give the same rows."""
    reader = db.reader("t")
    dataset, table = reader.dataset(), reader.to_arrow()
    assert isinstance(dataset, ds.Dataset)
    assert isinstance(dataset.scanner(), ds.Scanner)
    assert dataset.schema == SCHEMA
    assert dataset.to_table().equals(table)
    assert pa.Table.from_batches(dataset.to_batches()).equals(table)
    assert pa.table(dataset).equals(table)
    assert pa.table(dataset.scanner()).equals(table)
    assert dataset.head(5, columns=["y"]).to_pydict() == {"y": [0, 1, 2, 3, 4]}
    assert dataset.take([7, 3], columns=["y"]).to_pydict() == {"y": [7, 3]}
    assert dataset.count_rows() == 1010
    assert dataset.count_rows(filter=pc.field("y") >= 1000) == 10
    assert dataset.partition_expression.equals(pc.scalar(True))
    assert "t" in repr(dataset)


def test_columns_and_filters_of_its_own_scans(db):
    """Names in any order, expressions by name, filters as text, and filters of filters."""
    dataset = db.reader("t").dataset()
    table = dataset.to_table(columns=["z", "y"], filter=pc.field("y") < 3)
    assert table.to_pydict() == {"z": ["g0", "g1", "g2"], "y": [0, 1, 2]}
    table = dataset.to_table(columns={"twice": pc.field("y") * 2}, filter="y BETWEEN 4 AND 5")
    assert table.to_pydict() == {"twice": [8, 10]}
    few = dataset.filter(pc.field("y") < 6).filter("z = 'g1'")
    assert few.to_table(columns=["y"]).to_pydict() == {"y": [1, 4]}
    assert few.to_table(columns=["y"], filter="y > 1").to_pydict() == {"y": [4]}
    batches = list(dataset.to_batches(columns=[], batch_size=300, filter="y < 700"))
    assert [len(batch) for batch in batches] == [300, 300, 100]
    scanner = dataset.scanner(columns=["y"], filter="x IS NULL")
    assert scanner.projected_schema.names == ["y"]
    assert scanner.dataset_schema == SCHEMA
    assert sum(len(tagged.record_batch) for tagged in scanner.scan_batches()) == 20
    assert scanner.count_rows() == 20


def test_errors_before_anything_is_read(db):
    """Unknown columns are named; methods without a meaning here say so."""
    dataset = db.reader("t").dataset()
    with pytest.raises(reef.InvalidInputError, match="column yy"):
        dataset.scanner(columns=["yy"])
    with pytest.raises(reef.InvalidInputError, match="'yy'"):
        dataset.scanner(filter=pc.field("yy") > 1)
    for method in ("get_fragments", "join", "join_asof", "sort_by"):
        with pytest.raises(reef.InvalidInputError, match=method):
            getattr(dataset, method)()
    with pytest.raises(TypeError, match="not pickled"):
        dataset.__reduce__()


def test_all_scans_read_one_snapshot(db):
    """Rows written, folded and deleted after `dataset()` do not change it."""
    dataset = db.reader("t").dataset()
    with db.writer("t", background=False) as writer:
        writer.delete_range("k0000", "k0500")
        writer.upsert(pa.Table.from_pylist(typed(rows(2000, 2010)), SCHEMA))
        fold(db, "t")
    assert dataset.count_rows() == 1010
    assert dataset.count_rows(filter="y < 500") == 500
    assert db.reader("t").count() == 520


def test_a_closed_handle_ends_its_datasets(db):
    """A pinned view that was closed protects its segments no longer."""
    with db.reader("t", pin=True) as view:
        dataset = view.dataset()
        assert dataset.count_rows() == 1010
    with pytest.raises(reef.ClosedError):
        dataset.to_table()


def test_duckdb_pushes_columns_and_filters(db, scans):
    """Only the columns of the query are read, and its filters exclude groups."""
    t = db.reader("t").dataset()
    query = "SELECT z, sum(y) FROM t WHERE y >= 990 AND price < 1000 GROUP BY z ORDER BY z"
    with duckdb.connect() as connection:
        connection.register("t", t)
        found = connection.execute(query).fetchall()
        assert found == [
            ("g0", 990 + 993 + 996 + 999),
            ("g1", 991 + 994 + 997),
            ("g2", 992 + 995 + 998),
        ]
        ((columns, where),) = scans
        assert set(columns) <= {"z", "y", "price"}
        assert where == "y >= 990 AND price < 1000.00"
        scans.clear()
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (1010,)
        assert scans == [(("id",), "")], "a count reads no value column"
        scans.clear()
        sql = "SELECT id FROM t WHERE seen < '2024-01-01 02:00:00+00' OR x = 250 ORDER BY id"
        assert connection.execute(sql).fetchall() == [("k0000",), ("k0001",), ("k0500",)]


def test_polars_pushes_columns_and_filters(db, scans):
    """`scan_pyarrow_dataset` reads the columns that a query needs, of the rows that match."""
    lazy = pl.scan_pyarrow_dataset(db.reader("t").dataset())
    few = lazy.filter((pl.col("y") >= 990) & (pl.col("z") == "g0")).select("y").collect()
    assert few["y"].to_list() == [990, 993, 996, 999, 1002, 1005, 1008]
    ((columns, where),) = scans
    assert set(columns) == {"y", "z"}
    assert where == "y >= 990 AND z = 'g0'"
