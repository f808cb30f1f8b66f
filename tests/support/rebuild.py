"""Helpers of the tests of rebuild: jobs that die, hours that pass, buckets without manifests."""

from contextlib import suppress
from itertools import combinations

import reef
from reef import stores
from reef.formats.covers import overlap
from reef.formats.segment import covers_of, decode_tail
from reef.jobs import compact, rebuild, sweep
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.manifest.head import locate, newest_incarnation
from reef.paths import Namespace
from reef.stores import Wrapper
from tests.support.compaction import SMALL

NAME = "events"
EVENTS = Namespace(NAME)
HOUR_S = 3600.0


class Died(Exception):
    """The process was killed here."""


class Mortal(Wrapper):
    """A bucket with a clock that tests advance, whose users crash before some publish."""

    def __init__(self, inner):
        super().__init__(inner)
        self.ahead_s = 0.0
        self.publishes_left = None

    def now(self):
        return self.inner.now() + self.ahead_s

    def create(self, key, body):
        if self.publishes_left is not None and "/manifest/" in key:
            if not self.publishes_left:
                raise Died(key)
            self.publishes_left -= 1
        return self.inner.create(key, body)


def mortal(db):
    """Return the bucket of a database, below whatever it was wrapped in."""
    store = db.store
    while not isinstance(store, Mortal):
        store = store.inner
    return store


def open_mortal():
    """Return an empty database."""
    return reef.Database(Mortal(stores.open("memory://")))


def head_of(db):
    """Return the newest manifest."""
    return locate(db.store, NAME).found.manifest


def names_of(db):
    """Return the names of the objects of the newest incarnation."""
    return newest_incarnation(db.store, NAME)


def segment_ids(db):
    """Return the segments that are in the bucket."""
    folder = names_of(db).segments
    return {info.key.removeprefix(folder)[:-4] for info in db.store.list(folder)}


def dying(db, job, publishes=0):
    """Run a job that crashes after some publishes; return the segments that it wrote."""
    before = segment_ids(db)
    mortal(db).publishes_left = publishes
    try:
        with suppress(Died):
            job()
    finally:
        mortal(db).publishes_left = None
    return segment_ids(db) - before


def compact_these(db, pick, *, level=1, bytes_each=10_000, name=NAME):
    """Merge the segments that are picked, contiguous or not."""
    STRATEGIES["chosen"] = lambda segments, _: CompactPlan(
        level, tuple(s for s in segments if pick(s))
    )
    sizes = {
        "segment_bytes": bytes_each,
        "segment_bytes_min": 1,
        "segment_bytes_max": 2 * bytes_each,
        "rounds_max": 1,
    }
    try:
        return compact(db, name, strategy="chosen", **{**SMALL, **sizes})
    finally:
        del STRATEGIES["chosen"]


def sweep_now(db, **settings):
    """Condemn and delete all unneeded objects, with an hour before each step."""
    for _ in range(2):
        mortal(db).ahead_s += HOUR_S
        sweep(db, NAME, apply=True, force=True, retain_generations_s=0.0, **settings)


def without_manifests(db):
    """Return a copy of the bucket that has lost every manifest and lease."""
    copy = Mortal(stores.open("memory://"))
    copy.ahead_s = mortal(db).ahead_s
    for info in db.store.list():
        if "/manifest/" not in info.key and "/leases/" not in info.key:
            copy.put(info.key, db.store.get(info.key))
    return reef.Database(copy)


def rebuilt(db):
    """Return a database rebuilt from a copy without manifests, and the report."""
    copy = without_manifests(db)
    return copy, rebuild(copy, NAME, apply=True)


def rows_of(db, **as_of):
    """Return all rows, as a new reader sees them."""
    with db.reader(NAME, **as_of) as reader:
        return [row for _, row in reader.scan()]


def claimed_twice(db):
    """Return the segments of the head whose covers overlap those of another one."""
    segments = head_of(db).segments
    covers = {entry.id: _covers(db, entry) for entry in segments}
    pairs = combinations(sorted(covers), 2)
    return [pair for pair in pairs if overlap(covers[pair[0]], covers[pair[1]])]


def _covers(db, entry):
    key = names_of(db).segment(entry.id)
    body = db.store.get(key)
    return covers_of(decode_tail(body, len(body), key).footer, entry.visible_lsn)
