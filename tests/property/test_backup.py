"""Backups and restores in random histories."""

import random
import threading
import time
from datetime import UTC, datetime

import pytest

import reef
from reef.jobs import backup, fold, ingest, restore
from reef.stores.memory import MemoryStore
from tests.property import backup_machine

NAME = "orders"
POINTS = 20


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_of_backups(seed):
    """Whatever changes the source, every covered LSN and time is restored as it was (H48)."""
    assert backup_machine.run(seed) > 0


def write_on(db, writer, rows, chance):
    """Commit one change, in one of several ways, and return its LSN; fold now and then."""
    key, value = f"k{chance.randrange(12)}", b"%d" % chance.randrange(1000)
    kind = chance.choice(["put", "put", "delete", "range", "load"])
    if kind == "put":
        done = writer.put(key, value)
    elif kind == "delete":
        done = writer.delete(key)
    elif kind == "range":
        done = writer.delete_range(key, key + "~")
    else:
        done = ingest(db, NAME, [{"id": key, "value": value}])
        writer.refresh()
    rows.pop(key.encode(), None)
    rows |= {key.encode(): value} if kind in ("put", "load") else {}
    if chance.random() < 0.1:
        fold(db, NAME)
    return done.lsn


def test_points_of_a_backup_that_was_taken_during_writes():
    """Twenty random LSNs and times of a followed log are restored as the model has them."""
    db, target, chance = reef.open("memory://"), MemoryStore(), random.Random(1)
    rows, points, over = {}, [], threading.Event()
    with db.writer(NAME, create=True, background=False) as writer:
        first = threading.Thread(target=backup, args=(db, NAME, target))
        first.start()
        for number in range(120):
            lsn = write_on(db, writer, rows, chance)
            time.sleep(0.003)
            points.append((lsn, datetime.now(UTC), dict(rows)))
            time.sleep(0.003)
            if number == 40:
                first.join()
                follower = threading.Thread(target=lambda: follow(db, target, over))
                follower.start()
    over.set()
    follower.join()
    for lsn, at, expected in chance.sample(points, POINTS):
        where = {"lsn": lsn} if chance.random() < 0.5 else {"time": at}
        restore(target, db, f"at-{lsn}", namespace=NAME, **where)
        with db.reader(f"at-{lsn}") as reader:
            assert dict(reader.scan()) == expected, where


def follow(db, target, over):
    """Ship the log until the writer has ended, and what it has written last."""
    while not over.is_set():
        backup(db, NAME, target, follow=True, seconds=0.1, interval_s=0.02)
    backup(db, NAME, target)
