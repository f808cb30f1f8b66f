"""Compaction: its peak memory, and its speed compared with pyarrow's read, sort and write.

    python -m benchmarks.compaction --memory --mb 2048    prints MB at rest, MB at the peak, rows
    python -m benchmarks.compaction --speed --mb 512      prints rounds and the ratio

The rows have keys of 16 bytes and values of 100, half of them noise, in eight sorted runs that
overlap everywhere; every tenth key is in two of them. The peer reads the same runs from Arrow
files, puts them together, sorts them by key and writes them again, compressed in the same way. It
does so in memory, and drops nothing.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

import reef
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.jobs import compact
from reef.jobs.compact.merge import entry_of
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace

NAME = "rows"
RUNS = 8
ROW_BYTES = 116
PIECE = 50_000
KEY_BYTES, VALUE_BYTES = 16, 100


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--prepare", metavar="DIR")
    parser.add_argument("--measure", metavar="DIR")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.prepare:
        prepare(Path(asked.prepare), asked.mb)
    elif asked.measure:
        measure(Path(asked.measure))
    elif asked.memory:
        memory(asked.mb)
    elif asked.speed:
        speed(asked.mb, asked.rounds)
    return 0


# --- memory ---------------------------------------------------------------------------


def memory(mb: int) -> None:
    """Make the rows in one process, and merge them in another one."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        for step in (["--prepare", folder, "--mb", str(mb)], ["--measure", folder]):
            subprocess.run([sys.executable, "-m", "benchmarks.compaction", *step], check=True)


def measure(folder: Path) -> None:
    """Print the memory at rest, the peak, and the rows that were merged."""
    db = reef.open(str(folder))
    db.info(NAME)
    before = _status("VmRSS")
    report = compact(db, NAME, full=True)
    print(before // 1024, _status("VmHWM") // 1024, report.rows_read)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(field)


# --- speed ----------------------------------------------------------------------------


def speed(mb: int, rounds: int) -> None:
    """Print seconds of both, in turns, and the median of the rounds' ratios."""
    folder = Path(tempfile.mkdtemp(dir=Path.home()))
    try:
        prepare(folder / "bucket", mb)
        runs = [_run(number, mb) for number in range(RUNS)]
        for number, run in enumerate(runs):
            _write_arrow(folder / f"{number}.arrow", _table(run))
        del runs
        ratios = []
        for number in range(rounds):
            shutil.copytree(folder / "bucket", folder / f"bucket{number}")
            db = reef.open(str(folder / f"bucket{number}"))
            ours = _timed(lambda db=db: compact(db, NAME, full=True))
            theirs = _timed(lambda: _peer(folder))
            shutil.rmtree(folder / f"bucket{number}")
            ratios.append(theirs / ours)
            print(f"reef {ours:.2f} s, pyarrow {theirs:.2f} s, speed ratio {ratios[-1]:.2f}")
        print(f"median speed ratio {statistics.median(ratios):.2f} of {rounds} rounds, goal 0.5")
    finally:
        shutil.rmtree(folder)


def _peer(folder: Path) -> None:
    tables = [pa.ipc.open_file(pa.memory_map(str(f))).read_all() for f in folder.glob("?.arrow")]
    table = pa.concat_tables(tables)
    _write_arrow(
        folder / "sorted.out", table.sort_by([("key", "ascending"), ("lsn", "descending")])
    )


def _write_arrow(path: Path, table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as out,
    ):
        out.write_table(table, max_chunksize=65_536)


def _table(run: Versions) -> pa.Table:
    return pa.table({"key": run.keys, "lsn": run.lsns, "value": run.fields[1]})


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


# --- rows -----------------------------------------------------------------------------


def prepare(folder: Path, mb: int) -> None:
    """Make a namespace of eight sorted segments that overlap everywhere."""
    db = reef.open(str(folder))
    db.create(NAME)
    names = Namespace(NAME)
    entries = []
    for number in range(RUNS):
        run = _run(number, mb)
        segment_id = f"run-{number}"
        writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage(segment_id, 0))
        pieces = (run.slice(at, min(at + PIECE, len(run))) for at in range(0, len(run), PIECE))
        db.store.upload(names.segment(segment_id), writer.write(pieces))
        entries.append(entry_of(segment_id, writer.summary))
    Publisher(db.store, names).publish(
        lambda head: msgspec.structs.replace(
            head, segments=tuple(entries), wal_floor=RUNS + 1, wal_id_last_seen=RUNS
        )
    )
    assert len(HeadFinder(db.store, names).find().manifest.segments) == RUNS


def _run(number: int, mb: int) -> Versions:
    count = mb * (1 << 20) // ROW_BYTES // RUNS
    chance = np.random.default_rng(number)
    numbers = chance.integers(0, 2**63, count, np.uint64)
    shared = np.random.default_rng(99).integers(0, 2**63, count, np.uint64)
    tenth = slice((number % 2) * (count // 20), (number % 2 + 1) * (count // 20) + count // 20)
    numbers[tenth] = shared[tenth]
    numbers = np.unique(numbers)
    keys = np.zeros((len(numbers), KEY_BYTES), np.uint8)
    keys[:, :8] = np.frombuffer(b"customer", np.uint8)
    keys[:, 8:] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    values = np.full((len(numbers), VALUE_BYTES), ord("x"), np.uint8)
    values[:, : VALUE_BYTES // 2] = chance.integers(
        0, 256, (len(numbers), VALUE_BYTES // 2), np.uint8
    )
    return Versions(
        _binary(keys),
        np.full(len(numbers), number + 1, np.int64),
        np.arange(len(numbers), dtype=np.uint32),
        np.zeros(len(numbers), np.uint8),
        {1: _binary(values)},
    )


def _binary(table: np.ndarray) -> pa.Array:
    offsets = np.arange(len(table) + 1, dtype=np.int32) * np.int32(table.shape[1])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(table.ravel())]
    return pa.Array.from_buffers(pa.binary(), len(table), buffers)


if __name__ == "__main__":
    sys.exit(main())
