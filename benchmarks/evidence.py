"""`make evidence`: the full-size versions of what `make test` runs small; ONLY=… for some of them.

Each piece of evidence is a command that ends with 0 and a line that says what it showed.
The results go to docs/evidence.md, with commit and date: a ledger that only grows.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True, slots=True)
class Piece:
    """One claim, and the command that shows it."""

    claim: str
    command: tuple[str, ...]


KILLS = "tests/spark/test_stream_kills.py::test_H40_fifty_micro_batches_and_ten_kills"
PIECES = (
    Piece(
        "20,000 seeds of every scenario", ("-m", "tests.simulation", "--seeds", "20000", "--record")
    ),
    Piece(
        "2,000 writers killed while creating", ("-m", "tests.crash.kill_worker", "--check", "2000")
    ),
    Piece("races for names, full size", ("-m", "pytest", "-q", "tests/contract/test_races.py")),
    Piece(
        "50 micro-batches of two streams, 10 kills of drivers and executors, in a directory",
        ("-m", "pytest", "-q", "-m", "slow", f"{KILLS}[directory]"),
    ),
    Piece(
        "50 micro-batches of two streams, 10 kills of drivers and executors, on an S3 server",
        ("-m", "pytest", "-q", "-m", "slow", f"{KILLS}[s3]"),
    ),
    Piece(
        "micro-batches of 1,000, 100,000 and 1,000,000 rows against Parquet",
        ("-m", "benchmarks.streams", "--keep"),
    ),
    Piece(
        "20 minutes of 1,000 commits a second, the log bounded",
        ("-m", "tests.soak.commit_rate", "--url", "memory://"),
    ),
    Piece("reads and writes next to their goals", ("-m", "benchmarks")),
)


def main() -> int:
    """Run the pieces whose claims have a word of the command line; 1 if one of them failed."""
    if _dirty():
        print("commit first: evidence names the commit that it is for", file=sys.stderr)
        return 1
    words = sys.argv[1:] or [""]
    chosen = [piece for piece in PIECES if any(word in piece.claim for word in words)]
    if not chosen:
        print(f"no claim has {' or '.join(words)}", file=sys.stderr)
        return 1
    return max([_gather(piece) for piece in chosen])


def _gather(piece: Piece) -> int:
    print(f"{piece.claim} …", flush=True)
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *piece.command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    took_s = time.perf_counter() - start_s
    said = " ".join(done.stdout.split("\n")[-7:]).replace("|", " ").replace("=", " ").strip()
    result = "shown" if done.returncode == 0 else f"FAILED ({done.returncode})"
    row = f"| {datetime.now(UTC):%Y-%m-%d} | {_commit()} | {piece.claim} | {took_s:.0f} s | "
    with LEDGER.open("a") as ledger:
        ledger.write(row + f"{result}: {' '.join(said.split())[-400:]} |\n")
    print(f"  {result} in {took_s:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return int(done.returncode != 0)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _commit() -> str:
    return _git("rev-parse", "--short", "HEAD")


def _dirty() -> bool:
    changed = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    return any("docs/evidence.md" not in line and "docs/benchmarks" not in line for line in changed)


if __name__ == "__main__":
    sys.exit(main())
