"""Upkeep: opening by the length of the log and the number of segments; jobs by the row.

Reef alone: the question is how each of them grows.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import reef
from benchmarks.contest import Sizes
from benchmarks.engines import NAME
from benchmarks.harness import Case, Result, measure
from benchmarks.rows import Rows, key
from reef.telemetry import RequestMeter

LOGS = (10, 100, 1000)
"""Objects in an unfolded log."""
SEGMENTS = (1, 10, 100)
UNBOUNDED = {"unfolded_bytes_max": 1 << 40, "background": False}
GROUP = "upkeep"


def run(sizes: Sizes) -> list[Result]:
    """Measure opening, and the jobs."""
    results = [_open_log(count, sizes) for count in LOGS]
    results += [found for count in SEGMENTS for found in _open_segments(count, sizes)]
    for factor in (0.25, 1, 4):
        results += _jobs(Rows(int(sizes.rows * factor) // 4))
    return results


@contextmanager
def _database(**options: Any) -> Iterator[tuple[reef.Database, RequestMeter]]:
    meter = RequestMeter()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as root:
        yield reef.open(root, meter=meter, **options), meter


def _alone(name: str, size: str, work: Callable[[int], object], **options: Any) -> Result:
    return measure(Case(GROUP, name, {"reef": work}, size=size, **options))


def _open_log(count: int, sizes: Sizes) -> Result:
    """Open a writer over a log that its predecessor has left unfolded: the recovery."""
    with _database() as (db, meter):
        with db.writer(NAME, **UNBOUNDED) as writer:
            futures = [writer.put(key(n), b"v" * 100, wait=False) for n in range(3 * count)]
            for future in futures:
                future.result()
            while writer.unfolded.objects < count:
                writer.put(key(writer.unfolded.objects), b"v" * 100)

        def open_writer(_: int) -> None:
            with db.writer(NAME, **UNBOUNDED):
                pass

        size = f"{writer.unfolded.objects:,} objects in the log"
        calls, rounds = sizes.calls(10), sizes.rounds
        name = "open a writer (recovery)"
        return _alone(name, size, open_writer, calls=calls, rounds=rounds, meter=meter)


def _open_segments(count: int, sizes: Sizes) -> list[Result]:
    """Open a reader over segments that do not overlap, and read one key."""
    rows = Rows(count * 200)
    with _database() as (db, meter):
        with db.writer(NAME, **UNBOUNDED) as writer:
            ordered = rows.table.sort_by("id")
            for part in range(count):
                writer.upsert(ordered.slice(part * 200, 200))
                reef.jobs.fold(db, NAME)

        def open_reader(_: int) -> None:
            with db.reader(NAME) as reader:
                reader.get(key(rows.count // 2))

        size = f"{count:,} segments"
        options = {"calls": sizes.calls(10), "rounds": sizes.rounds, "meter": meter}
        return [_alone("open a reader, one get", size, open_reader, **options)]


def _jobs(rows: Rows) -> list[Result]:
    """Fold, compact and sweep once each, by the row."""
    size = f"{rows.count:,} rows"
    with _database() as (db, meter):
        with db.writer(NAME, **UNBOUNDED) as writer:
            for start in range(0, rows.count, rows.count // 8):
                writer.upsert(rows.slice(start, rows.count // 8))
        once = {"units": rows.count, "calls": 1, "rounds": 1, "meter": meter}
        return [
            _alone("fold, per row", size, lambda _: reef.jobs.fold(db, NAME), **once),
            _alone(
                "compaction, per row",
                size,
                lambda _: reef.jobs.compact(db, NAME, full=True),
                **once,
            ),
            _alone(
                "sweep, per row",
                size,
                lambda _: reef.jobs.sweep(
                    db, NAME, apply=True, force=True, retain_generations_s=0.0
                ),
                **once,
            ),
        ]
