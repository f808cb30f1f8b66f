"""A bucket as slow as S3 Standard, with real waiting.

The store is in memory, behind the latency profile `s3-standard`: reads 18 ms, writes 35 ms in the
median, 90 MB/s for each request.

The peers are the raw requests over the same store: what a commit, a cold read and a scan cannot do
without.
"""

from typing import Any

import reef
from benchmarks.contest import Sizes
from benchmarks.engines import NAME
from benchmarks.harness import Case, Result, measure
from benchmarks.rows import Rows, key
from reef.stores import Meter
from reef.telemetry import RequestMeter
from reef.testing import open_store

PROFILE = "s3-standard"
GROUP = "s3-standard"
PAGE_BYTES = 16 * 1024
SCAN_ROWS = 200_000


def run(sizes: Sizes) -> list[Result]:
    """Measure a commit, a cold read and a scan next to their requests."""
    meter = RequestMeter()
    store = Meter(open_store("memory://", latency=PROFILE), meter)
    db = reef.Database(store)
    rows = Rows(SCAN_ROWS)
    with db.writer(NAME, unfolded_bytes_max=1 << 40, background=False) as writer:
        writer.upsert(rows.table)
        reef.jobs.fold(db, NAME)
        results = [_commit(writer, store, sizes, meter)]
    segment = max(store.list(f"namespaces/{NAME}/segments/"), key=lambda info: info.size)
    return [*results, _cold_read(db, store, segment, sizes), _scan(db, store, rows, sizes)]


def _commit(writer: reef.Writer, store: Any, sizes: Sizes, meter: RequestMeter) -> Result:
    value = b"v" * 100
    works = {
        "reef": lambda n: writer.put(key(n), value),
        "raw PUT": lambda n: store.create(f"raw/{n:08}", value * 4),
    }
    calls, goals = sizes.calls(40), {"raw PUT": 1.25}
    case = Case(GROUP, "commit", works, calls=calls, rounds=sizes.rounds, goals=goals, meter=meter)
    return measure(case)


def _cold_read(db: reef.Database, store: Any, segment: Any, sizes: Sizes) -> Result:
    """Read a key whose page is in no cache; the index of its segment is."""
    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=4 << 20, row_cache_bytes=0)
    reader.get(key(0))
    pages = segment.size // PAGE_BYTES - 1
    works = {
        "reef": lambda n: reader.get(key(1000 + n * 7919 % 15_000)),
        "raw GET": lambda n: store.get_range(
            segment.key, n % pages * PAGE_BYTES, (n % pages + 1) * PAGE_BYTES
        ),
    }
    calls = sizes.calls(40)
    return measure(Case(GROUP, "cold read", works, calls=calls, rounds=sizes.rounds))


def _scan(db: reef.Database, store: Any, rows: Rows, sizes: Sizes) -> Result:
    """Scan all rows by an open reader whose cache holds the index and hardly more."""
    segments = list(store.list(f"namespaces/{NAME}/segments/"))
    stored = sum(info.size for info in segments)

    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=2 << 20)
    reader.get(key(0))

    def scan(_: int) -> None:
        found = sum(batch.num_rows for batch in reader.scan_arrow())
        if found < rows.count:
            raise AssertionError(f"{found} rows, {rows.count} were written")

    works = {"reef": scan, "raw GET": lambda _: [store.get(info.key) for info in segments]}
    return measure(
        Case(GROUP, "full scan, per stored MB", works, units=max(1, stored // 1_000_000), calls=1)
    )
