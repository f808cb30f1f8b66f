"""How soon a waiting reader sees a commit: with news of the directory, and by polling.

    python -m benchmarks.wake [ROUNDS]

Times run from the return of `put` to the return of `wait_for`. They may be
below zero: the name is there before the sync of its directory is.
"""

import statistics
import sys
import tempfile
import threading
import time

import reef
from reef.stores.notify import DirectoryNotifier


def wake_ms(path: str, rounds: int, *, notify: bool) -> list[float]:
    """Return the milliseconds of each round, sorted."""
    news = DirectoryNotifier(path) if notify else None
    db, times = reef.open(path), []
    with db.writer("wake", background=False) as writer, db.reader("wake", notify=news) as reader:
        for number in range(rounds):
            awake: list[float] = []
            lsn = reader.last_lsn + 1
            waiting = threading.Thread(target=_wait, args=(reader, lsn, awake))
            waiting.start()
            time.sleep(0.03)
            writer.put(f"k{number}", b"x")
            done_s = time.perf_counter()
            waiting.join()
            times.append((awake[0] - done_s) * 1000)
            reader.refresh()
    if news is not None:
        news.close()
    return sorted(times)


def _wait(reader: reef.Reader, lsn: int, awake: list[float]) -> None:
    reader.wait_for(lsn)
    awake.append(time.perf_counter())


def main() -> None:
    """Print median and 95th percentile."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for notify in (True, False):
        with tempfile.TemporaryDirectory() as path:
            times = wake_ms(path, rounds, notify=notify)
        way = "inotify" if notify else "polling"
        print(
            f"{way}: median {statistics.median(times):.1f} ms, p95 {times[rounds * 95 // 100]:.1f}"
        )


if __name__ == "__main__":
    main()
