"""Forks writers on a directory store and kills each at a random time.

    python -m tests.crash.kill_worker ROOT KILLS SEED     print the acknowledged keys, as JSON
    python -m tests.crash.kill_worker --check KILLS       in a fresh directory, and check it

A writer creates objects whose bytes follow from their names, and writes a name to a pipe
once its create was acknowledged. A concurrent reader lists and reads without pause.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time

from reef.errors import NotFoundError
from reef.stores.local import LocalStore


def body_of(key):
    """Return bytes that anyone can check against the name."""
    seed = hashlib.sha256(key.encode()).digest()
    return seed * (1 + seed[0] * 32)


def write_until_killed(root, prefix, pipe):
    """Create objects in a few directories; acknowledge each on the pipe."""
    store = LocalStore(root)
    for number in range(10_000):
        key = f"{prefix}/{number % 3}/{number:05}"
        if store.create(key, body_of(key)).landed:
            os.write(pipe, f"{key}\n".encode())


def read_until_killed(root, pipe):
    """Read everything again and again; complain of an object that is not whole."""
    store = LocalStore(root)
    while True:
        for info in store.list():
            try:
                if store.get(info.key) != body_of(info.key):
                    os.write(pipe, f"{info.key}\n".encode())
            except NotFoundError:
                os.write(pipe, f"{info.key}\n".encode())


def fork(work, *arguments):
    """Start `work` in a child; return its process id and the pipe it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(*arguments, writing)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def end(child):
    """Kill a child of ours; whether it was alive until then."""
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def drain(pipe, first=b""):
    """Return the lines that came whole."""
    with os.fdopen(pipe, "rb") as stream:
        lines = (first + stream.read()).splitlines(keepends=True)
    return [line[:-1].decode() for line in lines if line.endswith(b"\n")]


def kill_writers(root, kills, seed):
    """Kill `kills` writers, one after another; return the acknowledgements and the reads."""
    chance = random.Random(seed)
    reader, complaints = fork(read_until_killed, root)
    acknowledged, killed = [], 0
    for number in range(kills):
        writer, pipe = fork(write_until_killed, root, f"writer-{number}")
        first = os.read(pipe, 4096)  # it is at work: whatever the machine's load, it has begun
        time.sleep(chance.uniform(0.0, 0.02))
        killed += end(writer)
        acknowledged += drain(pipe, first)
    end(reader)
    return {
        "acknowledged": acknowledged,
        "killed": killed,
        "short_reads": len(drain(complaints)),
    }


def check_directory(root, report):
    """Raise unless all that was acknowledged is there, and all that is there is whole."""
    store = LocalStore(root)
    listed = {info.key: info.size for info in store.list()}
    for key in report["acknowledged"]:
        assert key in listed, f"{key} was acknowledged and is lost"
    for key, size in listed.items():
        body = store.get(key)
        assert len(body) == size
        assert body == body_of(key), f"{key} is torn"
    assert not any(key.startswith(".tmp") for key in listed)
    assert report["short_reads"] == 0, "a reader saw a short object"


def main(words):
    """Kill writers, and either report or check."""
    if words[0] != "--check":
        json.dump(kill_writers(words[0], int(words[1]), int(words[2])), sys.stdout)
        return
    with tempfile.TemporaryDirectory() as root:
        report = kill_writers(root, int(words[1]), seed=0)
        check_directory(root, report)
    print(f"{report['killed']} killed, {len(report['acknowledged'])} acknowledged, none lost")


if __name__ == "__main__":
    main(sys.argv[1:])
