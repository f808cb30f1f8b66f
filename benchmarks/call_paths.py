"""Count files, calls and stack depth of single operations: `python -m benchmarks.call_paths`.

A short call path is a design goal, so it is measured like speed. Only files of the package count;
the operation runs once to warm up, and is measured the second time.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import reef
import reef.jobs

PACKAGE = str(Path(reef.__file__).parent)
ROWS = 1000


class Profile:
    """Counts calls, files and depth of every thread while it is active."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls = 0
        self.depth = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.calls += 1
        self.files.add(frame.f_code.co_filename)
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(PACKAGE)
            outer = outer.f_back
        self.depth = max(self.depth, depth)


def measure(call: Callable[[], object]) -> Profile:
    """Profile one call, in this thread and in those that it starts."""
    profile = Profile()
    threading.setprofile(profile)  # of threads that start from now on
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return profile


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        db = reef.open(folder)
        writer = db.writer("paths", background=False)
        writer.put("warm", b"up")
        print(f"{'operation':<22}{'files':>7}{'calls':>9}{'depth':>7}")
        report("put", measure(lambda: writer.put("k", b"v")))
        keys = [f"{n:08d}".encode() for n in range(ROWS)]
        columns = {name: pa.array(keys, pa.binary()) for name in ("id", "value")}
        writer.upsert(pa.table(columns))
        reef.jobs.fold(db, "paths")
        writer.put("again", b"x")
        report("fold", measure(lambda: reef.jobs.fold(db, "paths")))
        writer.close()
        reef.open(folder).reader("paths").get(keys[3])
        cold = reef.open(folder).reader("paths")
        report("get, cold", measure(lambda: cold.get(keys[7])))
        report("get, warm", measure(lambda: cold.get(keys[8])))
        cold.scan_arrow().read_all()
        report("scan_arrow", measure(lambda: cold.scan_arrow().read_all()))
        spark_read(folder)
        report("Spark read", measure(lambda: spark_read(folder)))


def spark_read(folder: str) -> int:
    """Plan a read of the Python data source and run its tasks, in this process."""
    from reef.spark import ReefSource

    source = ReefSource({"path": folder, "namespace": "paths"})
    reader = source.reader(source.schema())
    return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))


def report(name: str, profile: Profile) -> None:
    """Print one line."""
    print(f"{name:<22}{len(profile.files):>7}{profile.calls:>9}{profile.depth:>7}")


if __name__ == "__main__":
    main()
