"""Forks writers with a local log on a directory store, and kills each at a random time.

    python -m tests.crash.local_front_worker ROOT KILLS SEED     print the results, as JSON

Every writer opens the same local log, and so recovers the pending batches of the one before it. It
writes a key to a pipe once its put was acknowledged. The last writer is not killed.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from reef import api  # before the forks: loading it takes longer than a writer lives
from tests.crash.kill_worker import drain, end, fork


def open_writer(root):
    """Open the one namespace there is."""
    log = {"durability": "local", "local_log": f"{root}/log", "local_segment_bytes": 16384}
    db = api.open(f"{root}/data")
    return db.writer("users", background=False, upload_interval_ms=5.0, **log)


def write_until_killed(root, prefix, pipe):
    """Put keys of one's own; acknowledge each on the pipe. Now and then wait for the bucket."""
    writer = open_writer(root)
    for number in range(100_000):
        key = f"{prefix}/{number:05}"
        writer.put(key, key.encode() * 10)
        os.write(pipe, f"{key}\n".encode())
        if number % 50 == 49:
            writer.flush()


def kill_writers(root, kills, seed):
    """Kill `kills` writers, one after another; return their output, and the rows."""
    chance, acknowledged, killed = random.Random(seed), [], 0
    for number in range(kills):
        child, pipe = fork(write_until_killed, root, f"writer-{number}")
        first = os.read(pipe, 4096)
        time.sleep(chance.uniform(0.0, 0.15))
        killed += end(child)
        acknowledged += drain(pipe, first)
    with open_writer(root) as writer:
        replayed = writer.local_recovery.replayed
        writer.flush()
    with api.open(f"{root}/data").reader("users") as reader:
        rows = {key.decode(): value.decode() for key, value in reader.scan()}
        changes = [change.key.decode() for change in reader.changes(after_lsn=0)]
    files = len(list(Path(root, "log").glob("*.wal")))
    return {
        "acknowledged": acknowledged,
        "killed": killed,
        "rows": rows,
        "changes": changes,
        "replayed": replayed,
        "files": files,
    }


if __name__ == "__main__":
    json.dump(kill_writers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
