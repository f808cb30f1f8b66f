"""One process of the soak; it is killed without warning, again and again.

    python -m tests.soak.worker ROLE URL OPTIONS-JSON FOLDER

writer    writes, with background work; records attempts and acknowledgements
reader    reads for ever: nothing acknowledged before it opened is missing, no value goes back
jobs      folds, compacts and sweeps, concurrently with the writer's own background work
loader    runs bulk jobs, each with keys of its own

Notes go to a file of the folder, which outlives the process: a line before each write, and one
after its response. A process that finds an error records it as a failure, and ends.
"""

import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import reef
from reef.config import BackgroundSettings
from reef.jobs import compact, fold, ingest, sweep

NAME = "soak"
KEYS = 400
VALUE_BYTES = 2000
GRACE_S = 15.0
RETAIN_S = 10.0
SMALL = {"tier_bytes": 1 << 20, "tier_segments_min": 3}
"""Compaction on the scale of the soak."""
PASSING = (reef.UnavailableError, reef.ConflictError, reef.OutcomeUnknownError)
"""What may happen to anyone on a busy bucket."""


def value_of(number):
    """Return the value of a write: its number, and enough bytes to make work."""
    return b"%020d" % number + random.Random(number).randbytes(VALUE_BYTES)


def number_of(value):
    """Return the number of the write that a value is of; AssertionError if it is torn."""
    number = int(value[:20])
    assert value == value_of(number), f"the value of write {number} is torn"
    return number


def acknowledged(folder):
    """Return the last acknowledged write of each key."""
    last = {}
    for path in [*Path(folder).glob("writer-*.jsonl"), *Path(folder).glob("loader-*.jsonl")]:
        tried = {}
        for line in path.read_text().splitlines():
            if not line.endswith("]"):
                continue  # it was killed while it wrote
            what, number, *keys = json.loads(line)
            if what == "try":
                tried[number] = keys
            else:
                for key in tried[number]:
                    last[key] = max(number, last.get(key, 0))
    return last


def write(db, note):
    """Write some keys at a time, until killed or fenced."""
    number = time.time_ns()  # so that later writers have larger numbers
    settings = BackgroundSettings(
        fold_bytes=1 << 19,
        fold_interval_s=2.0,
        sweep_interval_s=5.0,
        retain_generations_s=RETAIN_S,
        poll_interval_s=0.1,
    )
    with db.writer(NAME, background=settings, max_parallel_writes=4) as writer:
        while True:
            number += 1
            keys = [
                f"k{key:04}" for key in random.sample(range(KEYS), random.choice([1, 1, 5, 20]))
            ]
            batch = reef.Batch()
            for key in keys:
                batch.put(key, value_of(number))
            note(["try", number, *keys])
            try:
                writer.write(batch)
            except PASSING:
                continue
            except reef.FencedError:
                return
            note(["ack", number])


def fail_on_background_errors(db):
    """Whatever fails in the background must be something that passes."""
    known = tuple(kind.__name__ for kind in (*PASSING, reef.FencedError, reef.ClosedError))

    def heard(event):
        if event.name == "background_failed" and not event.fields["error"].startswith(known):
            Path(sys.argv[4], f"failed-background-{os.getpid()}").write_text(str(event))

    db.events.subscribe(heard)


def load(db, note):
    """Run bulk jobs, one after the other."""
    while True:
        number = time.time_ns()
        keys = [f"load-{number}-{place}" for place in range(5)]
        note(["try", number, *keys])
        with suppress(*PASSING):
            ingest(db, NAME, {"id": keys, "value": [value_of(number)] * len(keys)})
            note(["ack", number])
        time.sleep(random.uniform(0, 2.0))


def read(db, folder):
    """Open, check all rows, follow for a while, open again."""
    while True:
        before = acknowledged(folder)
        try:
            _follow(db, before)
        except PASSING:
            time.sleep(0.2)


def _follow(db, seen):
    with db.reader(NAME, refresh_interval_ms=200) as reader:
        for _ in range(random.randrange(1, 20)):
            for key, value in reader.scan(reverse=random.random() < 0.5):
                _check(seen, key.decode(), value)
            missing = [key for key in seen if reader.get(key) is None]
            assert not missing, f"{missing[:3]} were acknowledged and are missing"
            for key in random.sample(sorted(seen), min(20, len(seen))):
                _check(seen, key, reader.get(key))
            reader.refresh()


def _check(seen, key, value):
    number = number_of(value)
    assert number >= seen.get(key, 0), f"{key} is at write {number}, {seen[key]} was seen before"
    seen[key] = number


def work(db):
    """Run all jobs, in any order."""
    jobs = [
        lambda: fold(db, NAME),
        lambda: compact(db, NAME, strategy="tiered", **SMALL),
        lambda: sweep(db, NAME, apply=True, force=True, retain_generations_s=RETAIN_S),
    ]
    while True:
        with suppress(*PASSING):
            random.choice(jobs)()
        time.sleep(random.uniform(0, 1.0))


def main(role, url, options, folder):
    """Play a role until killed."""
    db = reef.open(url, **json.loads(options))
    with open(f"{folder}/{role}-{os.getpid()}.jsonl", "a", buffering=1) as journal:
        try:
            if role == "writer":
                fail_on_background_errors(db)
                write(db, lambda line: journal.write(json.dumps(line) + "\n"))
            elif role == "loader":
                load(db, lambda line: journal.write(json.dumps(line) + "\n"))
            elif role == "reader":
                read(db, folder)
            else:
                work(db)
        except BaseException as error:
            Path(f"{folder}/failed-{role}-{os.getpid()}").write_text(f"{type(error)}: {error}")
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
