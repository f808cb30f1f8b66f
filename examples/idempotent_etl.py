"""ETL that may be killed anywhere and run again: every file counts once, and totals are right.

    python examples/idempotent_etl.py [URL]

Runs the job in processes that kill themselves with SIGKILL at the worst places, and then once more.
Three rules make it safe: an idempotency key names the input, never the attempt; a file is one
commit; what is derived from other rows is replaced, not incremented.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import reef

SALES = pa.schema([("id", pa.string()), ("shop", pa.string()), ("amount", pa.int64())])
TOTALS = pa.schema([("shop", pa.string()), ("amount", pa.int64())])


def extract(path: Path) -> list[dict[str, object]]:
    """Read one file; its rows get the same ids in every attempt."""
    sales = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"id": f"{path.stem}/{n:06}", **sale} for n, sale in enumerate(sales)]


def load(db: reef.Database, path: Path) -> bool:
    """Load one file in one commit; return whether an earlier run had done so."""
    report = reef.jobs.ingest(db, "sales", extract(path), idempotency_key=f"sales/{path.name}")
    return report.replayed


def derive(db: reef.Database) -> None:
    """Replace all totals by the sums over all sales, in one commit."""
    with db.reader("sales", pin=True) as sales:
        table = sales.scan_arrow(columns=["shop", "amount"]).read_all()
    sums = table.group_by("shop").aggregate([("amount", "sum")])
    rows = sums.rename_columns({"amount_sum": "amount"})
    reef.jobs.ingest(db, "totals", rows, replace=True)


def run(url: str, source: Path, die_at: str = "") -> None:
    """Run the whole job, whatever earlier runs have done."""
    with reef.open(url) as db:
        db.create("sales", SALES)
        db.create("totals", TOTALS, key="shop")
        for path in sorted(source.glob("*.jsonl")):
            replayed = load(db, path)
            print(f"  {path.name}: {'loaded by an earlier run' if replayed else 'loaded'}")
            if die_at == path.name:
                os.kill(os.getpid(), signal.SIGKILL)
        if die_at == "totals":
            os.kill(os.getpid(), signal.SIGKILL)
        derive(db)


def main(url: str) -> None:
    """Let two runs die, and a third one finish."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        for day in (1, 2, 3):
            sales = [{"shop": f"s{n % 3}", "amount": day} for n in range(300)]
            (source / f"day-{day}.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in sales))
        for die_at in ("day-2.jsonl", "totals"):
            command = [sys.executable, __file__, "--die", die_at, url, folder]
            status = subprocess.run(command, check=False).returncode
            print(f"killed at {die_at}: exit status {status}")
        run(url, source)
    with reef.open(url).reader("totals") as totals:
        amounts = {shop: row["amount"] for shop, row in totals.scan()}
    print("totals:", amounts)
    assert amounts == {"s0": 600, "s1": 600, "s2": 600}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--die"]:
        run(sys.argv[3], Path(sys.argv[4]), die_at=sys.argv[2])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(f"{directory}/bucket")
