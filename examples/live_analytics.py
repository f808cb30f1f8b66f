"""Analytics on a table that is being written: each query sees one state, and writers never wait.

    python examples/live_analytics.py [URL]

A thread moves money between accounts, two rows in one batch. Whichever state a query sees, the
sum of all accounts is the same.
"""

import sys
import tempfile
import threading

import duckdb
import polars
import pyarrow as pa

import reef
import reef.polars

ACCOUNTS = pa.schema([("id", pa.string()), ("region", pa.string()), ("balance", pa.int64())])
COUNT, EACH = 1000, 100


def move_money(writer: reef.Writer, stop: threading.Event) -> int:
    """Move 1 from account to account until stopped; return how often."""
    moves = 0
    while not stop.is_set():
        source, target = (f"a{(moves * step) % COUNT:04}" for step in (7, 13))
        if source != target:
            rows = writer.get_many([source, target]).select(["id", "balance"]).to_pylist()
            rows[0]["balance"] -= 1
            rows[1]["balance"] += 1
            writer.patch(rows)  # both rows or none
        moves += 1
    return moves


def by_region(reader: reef.Reader) -> list[tuple[str, int]]:
    """Query one state with DuckDB, which reads only the columns and rows that it needs."""
    accounts = reader.dataset()  # noqa: F841 - DuckDB finds it by its name
    query = "SELECT region, sum(balance) FROM accounts GROUP BY ALL ORDER BY 1"
    return duckdb.sql(query).fetchall()


def poorest(reader: reef.Reader) -> polars.DataFrame:
    """Query it with polars; columns, filter and limit are pushed down."""
    accounts = reef.polars.scan(reader)
    return accounts.filter(polars.col("balance") < EACH).sort("balance").head(3).collect()


def main(url: str) -> None:
    """Query while money moves."""
    db = reef.open(url)
    db.create("accounts", ACCOUNTS)
    with db.writer("accounts") as writer:
        regions = ("east", "north", "south", "west")
        writer.upsert(
            [{"id": f"a{n:04}", "region": regions[n % 4], "balance": EACH} for n in range(COUNT)]
        )
        db.snapshot("accounts", "opening", ttl_s=86400)
        stop = threading.Event()
        mover = threading.Thread(target=move_money, args=(writer, stop))
        mover.start()
        try:
            for _ in range(5):
                with db.reader("accounts", pin=True) as reader:  # one state for both queries
                    sums = by_region(reader)
                    assert sum(total for _, total in sums) == COUNT * EACH
                    fewest = poorest(reader)
                    assert all(balance < EACH for balance in fewest["balance"])
            total = sum(total for _, total in sums)  # the sum of a region depends on the time
            print("now:", total, "in", len(sums), "regions, while money moves")
        finally:
            stop.set()
            mover.join()
    with db.reader("accounts", snapshot="opening") as opening:
        print("at the opening:", dict(by_region(opening)))
        assert {total for _, total in by_region(opening)} == {COUNT * EACH // 4}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
