"""A shop's orders from end to end on Spark and one bucket: `make demo`, `make demo STORE=s3`.

    python examples/demo.py [--store dir|s3] [--rows 2000000] [--path build/demo]

Spark loads two million orders in one commit while another process writes live orders, and a stream
upserts those of a web shop, file by file. The log is folded and the segments are compacted on
Spark, returns arrive late, rows are read by key and with SQL, now and as of a snapshot; the live
writer is killed with SIGKILL and replaced; one byte of the bucket is flipped, found and repaired.
Every step checks its result, and fails the demo if it is wrong.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from rich.console import Console
from rich.table import Table

import reef
from reef.jobs import compact, fold, repair, verify
from reef.telemetry import RequestKind, RequestMeter

ROOT = Path(__file__).parents[1]
ORDERS = pa.schema(
    [
        ("id", pa.string()),  # customer/order: the orders of a customer are neighbours
        ("customer", pa.string()),
        ("product", pa.string()),
        ("quantity", pa.int32()),
        ("amount", pa.float64()),
        ("state", pa.string()),
        ("revision", pa.int32()),
    ]
)
CORRECTED, RETURNED = 50, 40
"""One order in 50 is sent twice, the second time corrected; one in 40 is returned later."""
LIVE_ROWS, LIVE_PAUSE_S = 40, 0.1
WEB_FILES, WEB_ROWS, WEB_AGAIN = 8, 2500, 500
"""Files of the web shop, new orders in each, and how many of the file before come once more."""
PART_BYTES = 8 << 20
console = Console(highlight=False, width=110)


class Note(Protocol):
    """Prints a result of a step; the last number of rows is that of the step."""

    def __call__(self, result: str, counted: int = 0) -> None: ...


@dataclass
class Shop:
    """The bucket of the demo, and its figures."""

    url: str
    options: dict[str, Any]
    rows: int
    work: Path
    """Files that are no part of the bucket: the acknowledgements of the live writer."""
    spark: Any = None
    meter: RequestMeter = field(default_factory=RequestMeter)
    """Requests of this process and of Spark's tasks."""
    steps: list[tuple[str, int, float, int, float]] = field(default_factory=list)
    """Title, rows, seconds, requests, dollars."""

    def open(self) -> reef.Database:
        return reef.open(self.url, meter=self.meter, **self.options)

    @contextmanager
    def step(self, title: str) -> Iterator["Note"]:
        """Print a step and what it finds; note its rows, time, requests and their price."""
        console.print(f"\n[bold]{len(self.steps) + 1}. {title}[/bold]")
        rows = 0
        before, cost = sum(self.meter.requests().values()), self.meter.cost_usd("s3-standard")
        began_s = time.monotonic()

        def note(result: str, counted: int = 0) -> None:
            nonlocal rows
            rows = counted or rows
            console.print(f"   [dim]{time.monotonic() - began_s:5.1f} s[/dim]  {result}")

        with console.status("working"):
            yield note
        requests = sum(self.meter.requests().values()) - before
        cost = self.meter.cost_usd("s3-standard") - cost
        self.steps.append((title, rows, time.monotonic() - began_s, requests, cost))


# --- data -------------------------------------------------------------------------


def orders(spark: Any, rows: int) -> Any:
    """Return generated orders: few customers have most of them, and some come twice."""
    plain = spark.range(rows).selectExpr(
        "id AS number",
        # The fourth power of an even distribution: one customer in ten has half of the orders.
        "CAST(pow(pmod(xxhash64(id), 1000000) / 1e6, 4) * 20000 AS INT) AS customer_number",
        "CAST(1 + pmod(xxhash64(id, 2), 5) AS INT) AS quantity",
        "pmod(xxhash64(id, 3), 900) AS product_number",
        "1 AS revision",
    )
    late = plain.where(f"number % {CORRECTED} = 0").selectExpr(
        "number", "customer_number", "quantity + 1 AS quantity", "product_number", "2 AS revision"
    )
    return plain.unionByName(late).selectExpr(
        "format_string('c%05d/%08d', customer_number, number) AS id",
        "format_string('c%05d', customer_number) AS customer",
        "format_string('p%03d', product_number) AS product",
        "quantity",
        "quantity * (5.0D + product_number / 10) AS amount",
        "'paid' AS state",
        "CAST(revision AS INT) AS revision",
    )


def returns(spark: Any, rows: int) -> Any:
    """Return one order in RETURNED: only the columns that change."""
    returned = orders(spark, rows).where(
        f"revision = 1 AND CAST(right(id, 8) AS INT) % {RETURNED} = 7"
    )
    return returned.selectExpr("id", "'returned' AS state")


def write_web_orders(folder: Path) -> None:
    """Write the files of a web shop: new orders, and newer revisions of the file before."""
    folder.mkdir()
    for file in range(WEB_FILES):
        first = file * WEB_ROWS
        again = range(max(0, first - WEB_AGAIN), first)
        rows = [web_order(number, 2) for number in again]
        rows += [web_order(number, 1) for number in range(first, first + WEB_ROWS)]
        path = folder / f"{file:03}.json"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def web_order(number: int, revision: int) -> dict[str, Any]:
    """Return a row of the web shop."""
    return order(f"web/{number:08}", "web", revision)


def order(key: str, customer: str, revision: int) -> dict[str, Any]:
    """Return a row of one article."""
    facts = {"product": "p001", "quantity": 1, "amount": 20.0 + revision, "state": "paid"}
    return {"id": key, "customer": customer, **facts, "revision": revision}


# --- the live writer, a process of its own ----------------------------------------


def live_writer(url: str, options: dict[str, Any], acknowledged: Path) -> None:
    """Write new orders and newer revisions of earlier ones, until killed; note what is durable."""
    meter = RequestMeter()
    db = reef.open(url, meter=meter, **options)
    db.create("orders", ORDERS)
    revisions: dict[str, int] = {}
    chance = random.Random(7)
    with db.writer("orders", background=False) as writer, acknowledged.open("a") as notes:
        while True:
            again = chance.sample(sorted(revisions), min(len(revisions), LIVE_ROWS // 4))
            new = [f"live/{len(revisions) + number:08}" for number in range(LIVE_ROWS)]
            batch = {key: revisions.get(key, 0) + 1 for key in [*new, *again]}
            writer.upsert([order(key, "live", revision) for key, revision in batch.items()])
            revisions |= batch
            notes.write(json.dumps({"rows": batch, "requests": meter.requests()}) + "\n")
            notes.flush()
            time.sleep(LIVE_PAUSE_S)


def acknowledgements(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the acknowledged revision of each live order, and the requests of the writer."""
    revisions: dict[str, int] = {}
    requests: dict[str, int] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):  # the process may have been killed within the last line
            note = json.loads(line)
            revisions, requests = revisions | note["rows"], note["requests"]
    return revisions, requests


@contextmanager
def running_live_writer(shop: Shop) -> Iterator[subprocess.Popen[bytes]]:
    """Run the live writer until the block ends; wait for its first commit."""
    path = shop.work / "acknowledged.jsonl"
    command = [sys.executable, __file__, "--live", json.dumps([shop.url, shop.options, str(path)])]
    process = subprocess.Popen(command)
    try:
        while not acknowledgements(path)[0]:
            check(process.poll() is None, "the live writer runs")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


# --- the steps --------------------------------------------------------------------


def start_spark(shop: Shop) -> None:
    """Start Spark with the native reader and the bucket as the catalog `reef`."""
    from pyspark.sql import SparkSession

    import reef.spark

    with shop.step("Start Spark on two local cores") as note:
        quiet = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "2",
        }
        builder = SparkSession.builder.master("local[2]").appName("reef demo")
        for name, value in quiet.items():
            builder = builder.config(name, value)
        builder = reef.spark.configure(builder, url=shop.url, **shop.options)
        with stderr_to(shop.work / "spark.log"):  # the JVM inherits it
            shop.spark = builder.getOrCreate()
        note(f"Spark {shop.spark.version}; the bucket is {shop.url}")


def bulk_load(shop: Shop) -> None:
    """Load all orders in one commit while the live writer writes."""
    import reef.spark

    path = shop.work / "acknowledged.jsonl"
    sent = shop.rows + (shop.rows + CORRECTED - 1) // CORRECTED
    with shop.step(f"Load {sent:,} rows on Spark while a live writer updates") as note:
        before = len(acknowledgements(path)[0])
        seen = {0}

        def progress(event: Any) -> None:
            if event.stage == "checked":
                note(f"checked {event.checks.rows:,} keys before anything is written")
            if event.stage == "staging" and event.segments not in seen:
                seen.add(event.segments)
                note(f"segments staged: {event.segments}, {event.bytes / 1e6:.0f} MB")

        report = reef.spark.bulk_load(
            orders(shop.spark, shop.rows),
            shop.url,
            "orders",
            order_by="revision",  # of an order that comes twice, the correction counts
            idempotency_key="initial-load",
            segment_bytes=16 << 20,
            progress=progress,
            store_options={**shop.options, "meter": shop.meter},
        )
        shop.meter.count(RequestKind.PUT, requests=upload_requests(report.bytes, report.segments))
        check(report.rows == shop.rows, f"{report.rows} rows were loaded")
        during = len(acknowledgements(path)[0]) - before
        check(during > 0, "the live writer continued during the load")
        note(
            f"{report.rows:,} orders visible at LSN {report.lsn}, {report.duplicates:,} of them "
            f"corrected; {during:,} live orders meanwhile",
            report.rows,
        )


def upload_requests(size: int, segments: int) -> int:
    """Return the PUTs of the uploads of Spark's tasks: parts of 8 MiB, and two for each upload."""
    return segments if size <= segments * PART_BYTES else 2 * segments + -(-size // PART_BYTES)


def stream_orders(shop: Shop) -> None:
    """Upsert the files of a web shop with a stream, each exactly once; run the stream again."""
    with shop.step("Upsert the orders of a web shop with a stream") as note:
        write_web_orders(shop.work / "web")
        query = start_stream(shop)
        shown, ended = 0, False
        while not ended:
            ended = query.awaitTermination(0.2)
            for progress in query.recentProgress[shown:]:
                note(f"micro-batch {progress.batchId}: {progress.numInputRows:,} rows")
                shown += 1
        note(f"{shown} micro-batches, each one commit next to the live writer")
        repeated = start_stream(shop)  # as after a crash: it continues from its checkpoint
        repeated.awaitTermination()
        read = sum(progress.numInputRows for progress in repeated.recentProgress)
        check(read == 0, f"{read} rows are read twice")
        with shop.open().reader("orders") as reader:
            rows = reader.scan_arrow(prefix="web/", columns=["revision"]).read_all()
        revised = rows["revision"].to_pylist().count(2)
        check(rows.num_rows == WEB_FILES * WEB_ROWS, f"{rows.num_rows} orders of the web shop")
        check(revised == (WEB_FILES - 1) * WEB_AGAIN, f"{revised} orders are revised")
        note(
            f"{rows.num_rows:,} orders, {revised:,} of them revised, each exactly once",
            rows.num_rows,
        )


def start_stream(shop: Shop) -> Any:
    """Start the stream: it reads the files that are there, two at a time, and ends."""
    columns = "id string, customer string, product string, quantity int, amount double, "
    files = shop.spark.readStream.schema(columns + "state string, revision int")
    names = {f"store.{name}": str(value) for name, value in shop.options.items()}
    return (
        files.option("maxFilesPerTrigger", 2)
        .json(str(shop.work / "web"))
        .writeStream.format("reef")
        .options(namespace="orders", orderBy="revision", **names)
        .option("checkpointLocation", str(shop.work / "checkpoint"))
        .trigger(availableNow=True)
        .start(shop.url)
    )


def maintain(shop: Shop) -> None:
    """Fold the log and merge the segments on Spark, next to the live writer."""
    with (
        shop.step("Fold the log and compact the segments on Spark") as note,
        spark_jobs(shop) as on,
    ):
        db = shop.open()
        folded = fold(db, "orders", executor=on)
        note(f"folded {folded.objects} objects of the log: {folded.rows:,} rows")
        done = compact(db, "orders", full=True, executor=on, segment_bytes=64 << 20)
        rows = db.info("orders").rows
        note(f"{done.inputs} segments became {done.outputs}; {rows:,} rows", rows)


def take_returns(shop: Shop) -> None:
    """Take a snapshot, then patch the returned orders in one commit."""
    with shop.step("Returns arrive late: a snapshot, then a patch from Spark") as note:
        shop.open().snapshot("orders", "before-returns", ttl_s=7 * 86400)
        note("snapshot before-returns pins the state of now for a week")
        writing = returns(shop.spark, shop.rows).write.format("reef").mode("append")
        names = {f"store.{name}": str(value) for name, value in shop.options.items()}
        writing.options(namespace="orders", op="patch", **names).save(shop.url)
        with shop.open().reader("orders") as reader:
            returned = sum(
                batch.num_rows
                for batch in reader.scan_arrow(columns=["id"], where="state = 'returned'")
            )
        check(returned == expected_returns(shop.rows), f"{returned} orders are returned")
        note(f"{returned:,} orders are patched: state = 'returned'", returned)


def expected_returns(rows: int) -> int:
    """Return how many of the loaded orders are returned."""
    return len(range(7, rows, RETURNED))


def read_by_key(shop: Shop) -> None:
    """Point reads, a multi-get, and all orders of the largest customer."""
    with shop.step("Read by key") as note, shop.open().reader("orders") as reader:
        keys = [row["id"] for row in orders(shop.spark, shop.rows).limit(1000).collect()]
        check(reader.get(keys[0])["id"] == keys[0], "the first order is there")
        few = keys[1:101]
        took_s = timed(lambda: [reader.get(key) for key in few])
        note(f"{len(few)} point reads, {took_s / len(few) * 1000:.2f} ms each")
        found = reader.get_many(keys)
        check(all(found["_found"].to_pylist()), f"all {len(keys)} keys are found")
        took_s = timed(lambda: reader.get_many(keys))
        note(f"get_many of {len(keys):,} keys: {took_s * 1000:.0f} ms", len(keys))
        took_s = timed(lambda: reader.scan_arrow(prefix="c00000/").read_all())
        largest = reader.scan_arrow(prefix="c00000/").read_all().num_rows
        note(f"the largest customer's {largest:,} orders: {took_s * 1000:.0f} ms")


def query(shop: Shop) -> None:
    """Query with SQL: Spark's, now and as of the snapshot, and DuckDB's without Spark."""
    sql = """
        SELECT count(*), sum(amount), sum(CASE state WHEN 'returned' THEN amount ELSE 0 END)
        FROM reef.default.orders {when} WHERE customer NOT IN ('live', 'web')
    """
    with shop.step("Query with SQL, now and as of the snapshot") as note:
        rows, _, returned = shop.spark.sql(sql.format(when="")).first()
        check(rows == shop.rows, f"{rows} orders")
        then = shop.spark.sql(sql.format(when="VERSION AS OF 'before-returns'")).first()
        check(then[0] == shop.rows and then[2] == 0, "nothing was returned before the returns")
        note(
            f"Spark: {returned:,.0f} of goods are returned; as of before-returns {then[2]:,.0f}",
            rows,
        )
        with shop.open() as db:
            top = db.sql(
                "SELECT product, round(sum(amount)) AS turnover FROM orders "
                "WHERE state = 'paid' AND customer NOT IN ('live', 'web') "
                "GROUP BY ALL ORDER BY 2 DESC LIMIT 3"
            ).to_pylist()
        best = ", ".join(f"{row['product']} {row['turnover']:,.0f}" for row in top)
        note(f"db.sql, without Spark: the best sellers are {best}")


def kill_the_writer(shop: Shop, process: subprocess.Popen[bytes]) -> None:
    """Kill the live writer in the middle of its work, and open another."""
    with shop.step("Kill the live writer with kill -9, and recover") as note:
        path = shop.work / "acknowledged.jsonl"
        before = len(acknowledgements(path)[0])
        while len(acknowledgements(path)[0]) < before + LIVE_ROWS:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        revisions, requests = acknowledgements(path)
        for kind, count in requests.items():
            shop.meter.count(RequestKind(kind), requests=count)
        began_s = time.monotonic()
        with shop.open().writer("orders", background=False) as writer:
            note(f"another writer has the role after {time.monotonic() - began_s:.2f} s")
            rows = writer.get_many(sorted(revisions))
            stored = dict(zip(rows["id"].to_pylist(), rows["revision"].to_pylist(), strict=True))
            lost = [key for key, revision in revisions.items() if (stored[key] or 0) < revision]
            check(not lost, f"{len(lost)} acknowledged orders are lost")
            note(
                f"all {len(revisions):,} acknowledged live orders are there, none is lost",
                len(revisions),
            )


def flip_a_byte(shop: Shop) -> None:
    """Damage one byte of a segment as a bad disk would; find it, and repair it."""
    with shop.step("Flip one byte in the bucket; find it, and repair it") as note:
        db = shop.open()
        before = segment_keys(db)
        fold(db, "orders")
        damaged = min(segment_keys(db) - before)
        body = bytearray(db.store.get(damaged))
        body[len(body) // 3] ^= 1
        db.store.put(damaged, bytes(body))
        note(f"one bit of {damaged.rpartition('/')[2]} is flipped")
        with spark_jobs(shop) as on:
            problems = verify(db, "orders", deep=True, executor=on).problems
        check({problem.object for problem in problems} == {damaged}, f"{problems}")
        note(f"verify --deep: {problems[0].message.partition(': ')[2]}")
        repaired = repair(db, "orders", apply=True)
        check(not repaired.lost.rows_of_the_newest_state, f"{repaired.lost}")
        check(not repaired.unrepaired, f"{repaired.unrepaired}")
        note("repaired from the log: no row is lost")


def verify_all(shop: Shop) -> None:
    """Read every block of every segment on Spark, and count all rows."""
    with shop.step("Verify everything") as note, spark_jobs(shop) as on:
        db = shop.open()
        report = verify(db, "orders", deep=True, executor=on)
        check(report.ok, f"{report.problems}")
        live = len(acknowledgements(shop.work / "acknowledged.jsonl")[0])
        count = shop.spark.sql("SELECT count(*) FROM reef.default.orders").first()[0]
        check(count >= shop.rows + live + WEB_FILES * WEB_ROWS, f"{count} rows")
        note(
            f"{report.segments} segments, {report.rows:,} versions intact; {count:,} orders", count
        )


# --- small parts ------------------------------------------------------------------


@contextmanager
def spark_jobs(shop: Shop) -> Iterator[Any]:
    """Return an executor for jobs; its tasks' requests count for the shop."""
    import reef.spark

    executor = reef.spark.executor(shop.spark)
    yield executor
    for kind, counted in executor.meter.counts().items():
        shop.meter.count(kind, requests=counted.requests, bytes=counted.bytes)


def segment_keys(db: reef.Database) -> set[str]:
    """Return the names of all segments."""
    return {info.key for info in db.store.list("namespaces/orders/segments/")}


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Send what processes that start in the block print to stderr to a file."""
    kept = os.dup(2)
    with path.open("w") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check(condition: bool, message: str) -> None:
    """Fail the demo: a step without its effect is a failure."""
    if not condition:
        raise SystemExit(f"the demo failed: {message}")


def timed(work: Callable[[], object]) -> float:
    """Return how long a call took."""
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def summarize(shop: Shop) -> None:
    """Print the table of all steps."""
    table = Table(title=f"\nWhat the demo did, on {shop.url}", title_justify="left")
    table.add_column("step")
    for name in ("rows", "seconds", "requests", "USD on S3"):
        table.add_column(name, justify="right")
    for title, rows, seconds, requests, cost in shop.steps:
        table.add_row(
            title, f"{rows:,}" if rows else "", f"{seconds:.1f}", f"{requests:,}", f"{cost:.5f}"
        )
    seconds, cost = sum(step[2] for step in shop.steps), shop.meter.cost_usd("s3-standard")
    requests = sum(shop.meter.requests().values())
    table.add_section()
    table.add_row("all", f"{shop.steps[-1][1]:,}", f"{seconds:.1f}", f"{requests:,}", f"{cost:.5f}")
    console.print(table)
    console.print(
        "[dim]Requests of this process, of the live writer (counted when it is killed) and of "
        "Reef's jobs on Spark;\nthose of Spark's SQL and streams are in Spark's UI.[/dim]"
    )


def explore(shop: Shop) -> None:
    """Print commands for the data that the demo leaves."""
    reef_command = "reef" if shutil.which("reef") else ".venv/bin/reef"
    options = "".join(f" -o {name}={value}" for name, value in shop.options.items())
    console.print("\n[bold]Explore further[/bold]")
    for command in (
        f"{reef_command} stats {shop.url} orders{options}",
        f"{reef_command} scan {shop.url} orders --prefix c00000/ --limit 5{options}",
        f'{reef_command} sql {shop.url} "SELECT state, count(*) FROM orders GROUP BY 1"{options}',
        f"{reef_command} snapshot list {shop.url} orders{options}",
        f"{reef_command} verify {shop.url} orders --deep{options}",
    ):
        console.print(f"   {command}", soft_wrap=True)
    if shop.options and sys.stdin.isatty():
        input("\nThe S3 server runs until you press Enter. ")


@contextmanager
def bucket(store: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the URL and options of an empty bucket: a directory, or one of a local S3 server."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    if store != "s3":
        yield str(path / "bucket"), {}
        return
    sys.path.insert(0, str(ROOT))
    from tests.support.servers import SERVERS

    server = SERVERS["seaweedfs"]
    server.start(path / "server")
    try:
        server.make_bucket("shop")  # type: ignore[attr-defined]
        yield "s3://shop/demo", {**server.options(), "listing": "unsorted"}  # type: ignore[attr-defined]
    finally:
        server.stop()


def run(store: str, rows: int, path: Path) -> Shop:
    """Run all steps."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with ExitStack() as stack:
        url, options = stack.enter_context(bucket(store, path))
        shop = Shop(url, options, rows, path)
        start_spark(shop)
        stack.callback(shop.spark.stop)
        with running_live_writer(shop) as process:
            for step in (bulk_load, stream_orders, maintain, take_returns, read_by_key, query):
                step(shop)
            kill_the_writer(shop, process)
        flip_a_byte(shop)
        verify_all(shop)
        summarize(shop)
        explore(shop)
        return shop


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=("dir", "s3"), default="dir")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--path", type=Path, default=Path("build/demo"))
    parser.add_argument("--live", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.live:
        url, options, acknowledged = json.loads(arguments.live)
        live_writer(url, options, Path(acknowledged))
    else:
        run(arguments.store, arguments.rows, arguments.path)


if __name__ == "__main__":
    main()
