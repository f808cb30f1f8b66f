"""SQL over a live table and over Parquet: the same queries of DuckDB, in CPU seconds.

    make bench                                           as one of its parts
    python -m benchmarks.dataframes                      2 million rows, prints the table
    python -m benchmarks.dataframes --dir /tmp/frames    keeps the data for another run

The table has 12 columns, one of them a vector of 64 floats, and is bulk-loaded. Each round opens
the database and a reader again, so nothing is cached but what the operating system has, and runs
the query in DuckDB through `reader.dataset()`; the peer reads the same rows from one Parquet file
(Snappy). CPU time of the process is compared, all threads together: the wall time of either depends
on the number of cores.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import reef
from benchmarks.harness import HEADER, Comparison
from reef.jobs import fold, ingest

ROWS = 2_000_000
VECTOR = 64
PIECE = 100_000
ROUNDS = 5
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("x", pa.float64()),
        ("y", pa.int32()),
        ("z", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("count", pa.int64()),
        ("ratio", pa.float32()),
        ("open", pa.bool_()),
        ("day", pa.date32()),
        ("seen", pa.timestamp("us", "UTC")),
        ("note", pa.string()),
        ("embedding", pa.list_(pa.float32(), VECTOR)),
    ]
)
AGGREGATE = "SELECT z, avg(x) FROM {} WHERE y >= 80 GROUP BY z ORDER BY z"
COUNT = "SELECT count(*) FROM {}"


def pieces(rows: int) -> Iterator[pa.Table]:
    """Yield random rows in the order of their keys."""
    rng = np.random.default_rng(7)
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        numbers = np.arange(start, start + count)
        vectors = pa.array(rng.random(count * VECTOR, np.float32))
        amounts = pa.array(rng.integers(0, 10**6, count), pa.int32()).cast(pa.decimal128(10))
        columns = {
            "id": pa.array([f"user-{number:09}" for number in numbers.tolist()]),
            "x": rng.random(count),
            "y": pa.array(rng.integers(0, 100, count), pa.int32()),
            "z": pa.array([f"city-{n}" for n in rng.integers(0, 50, count).tolist()]),
            "amount": amounts.cast(pa.decimal128(12, 2)),
            "count": rng.integers(0, 1000, count),
            "ratio": pa.array(rng.random(count, np.float32)),
            "open": rng.random(count) < 0.5,
            "day": pa.array((numbers % 3650).astype(np.int32), pa.date32()),
            "seen": pa.array(1_700_000_000_000_000 + numbers * 1000, SCHEMA.field("seen").type),
            "note": pa.array([f"note {n}" for n in rng.integers(0, 10**5, count).tolist()]),
            "embedding": pa.FixedSizeListArray.from_arrays(vectors, VECTOR),
        }
        yield pa.table(columns, schema=SCHEMA)


def prepare(folder: Path, rows: int) -> None:
    """Write the rows as a namespace and as a Parquet file, unless both are there."""
    if (folder / "ready").exists():
        return
    db = reef.open(folder / "reef")
    db.create("rows", SCHEMA)
    with pq.ParquetWriter(folder / "rows.parquet", SCHEMA) as file:
        for table in pieces(rows):
            file.write_table(table)
    stream = pa.RecordBatchReader.from_batches(
        SCHEMA, (batch for table in pieces(rows) for batch in table.to_batches())
    )
    ingest(db, "rows", stream)
    fold(db, "rows")
    (folder / "ready").touch()


def query_reef(folder: Path, sql: str) -> list[tuple[object, ...]]:
    """Run a query on a cold reader."""
    with reef.open(folder / "reef") as db, duckdb.connect() as connection:
        connection.register("rows", db.reader("rows").dataset())
        return connection.execute(sql.format("rows")).fetchall()


def query_parquet(folder: Path, sql: str) -> list[tuple[object, ...]]:
    """Run the same query on the Parquet file."""
    with duckdb.connect() as connection:
        return connection.execute(sql.format(f"'{folder / 'rows.parquet'}'")).fetchall()


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, in all threads."""
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def compare_cpu(name: str, folder: Path, sql: str, goal: float | None) -> Comparison:
    """Run both in turns; the ratio is the median of the rounds."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(cpu_s(lambda: query_reef(folder, sql)))
        theirs.append(cpu_s(lambda: query_parquet(folder, sql)))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Comparison(
        name,
        statistics.median(ours),
        "DuckDB on Parquet",
        statistics.median(theirs),
        goal,
        statistics.median(ratios),
        statistics.stdev(ratios) / len(ratios) ** 0.5,
    )


def run(rows: int = ROWS, folder: str | os.PathLike[str] | None = None) -> list[Comparison]:
    """Run all comparisons; results must be equal before times mean anything."""
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(folder or temporary)
        target.mkdir(parents=True, exist_ok=True)
        prepare(target, rows)
        theirs = query_parquet(target, AGGREGATE)
        for (city, ours), (other, value) in zip(query_reef(target, AGGREGATE), theirs, strict=True):
            if city != other or abs(ours - value) > 1e-9:
                raise AssertionError(f"{city}: {ours}, and {other}: {value} from Parquet")
        what = f"CPU, cold, {rows:,} rows of {len(SCHEMA)} columns"
        return [
            compare_cpu(f"avg … where … group by, {what}", target, AGGREGATE, 3),
            compare_cpu(f"count(*), {what}", target, COUNT, None),
        ]


def main() -> int:
    """Print the table; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dir", help="keep the data here")
    given = parser.parse_args()
    comparisons = run(given.rows, given.dir)
    print("\n".join([HEADER, *(comparison.row() for comparison in comparisons)]))
    return 0 if all(comparison.met for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
