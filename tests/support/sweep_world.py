"""A namespace on virtual time, for tests of the sweep."""

from dataclasses import replace

import msgspec

import reef
from reef.engine.handles.database import Database
from reef.jobs import fold, sweep
from reef.manifest.head import Publisher, locate, newest_incarnation
from reef.manifest.roots import take_lease
from reef.paths import Namespace, numbered_key
from reef.stores import Wrapper
from reef.testing import Simulation
from tests.support.segment_copies import copy_segment

NAME = "users"
USERS = Namespace(NAME)
GRACE_S = 15 * 60
DAY_S = 24 * 3600


def condemned_keys(manifest):
    """Return every condemned key of a manifest, ranges included, relative to the namespace."""
    ranges = [key for one in manifest.condemned_ranges for key in one.all_keys()]
    return [*(one.key for one in manifest.condemned), *ranges]


def garbage_keys(report):
    """Return every key that a sweep condemned."""
    keys = []
    for one in report.condemned:
        folder, first, last = one.numbers or ("", 0, -1)
        keys += [numbered_key(folder, number) for number in range(first, last + 1)] or [one.key]
    return keys


class World:
    """One bucket, one namespace, one clock."""

    def __init__(self, page=1000, simulation=Simulation):
        self.sim = simulation(0)
        self.bucket = self.sim.bucket
        self.bucket.page = page
        self.db = Database(self.bucket)
        self._clock = self.sim.process("clock")

    def advance(self, seconds):
        """Let time pass."""
        self.run(lambda: self._clock.runtime.sleep(seconds))

    def run(self, call):
        """Run a call that may wait in virtual time; return its result."""
        if self.sim.scheduler.current is not None:
            return call()
        outcome = []

        def run():
            try:
                outcome.append((call(), None))
            except reef.ReefError as error:
                outcome.append((None, error))

        self._clock.spawn(run)
        self.sim.run()
        ((result, error),) = outcome
        if error is not None:
            raise error
        return result

    def fold(self):
        """Fold, and advance the clock past the fold."""
        fold(self.db, NAME)
        self.advance(10)

    @property
    def names(self):
        """The names of the newest incarnation's objects."""
        return newest_incarnation(self.bucket, NAME)

    def head(self):
        return locate(self.bucket, NAME).found.manifest

    def publish(self, **changes):
        """Publish a manifest with some fields changed."""
        return Publisher(self.bucket, self.names).publish(
            lambda head: msgspec.structs.replace(head, **changes)
        )

    def lease(self, ttl_s=60.0, manifest=None):
        return take_lease(self.bucket, self.names, manifest or self.head(), owner="me", ttl_s=ttl_s)

    def compact(self):
        """Put copies in place of all segments, as a compaction does; return the old ids."""
        head = self.head()
        new = [copy_segment(self.bucket, self.names, entry) for entry in head.segments]
        self.publish(segments=tuple(new))
        return [entry.id for entry in head.segments]

    def sweep(self, db=None, **settings):
        """Condemn and delete; only the head is retained unless `settings` says otherwise."""
        wanted = {"apply": True, "retain_generations_s": 0.0, **settings}
        return self.run(lambda: sweep(db or self.db, NAME, **wanted))

    def sweep_twice(self, **settings):
        """Condemn, wait for the grace period, delete; return the deleted objects."""
        self.sweep(**settings)
        self.advance(GRACE_S + 10)
        return self.sweep(**settings).deleted

    def keys(self, folder):
        """Return the names in a folder of the newest incarnation, without the folder."""
        prefix = f"{self.names.root}/{folder}/"
        return [info.key.removeprefix(prefix) for info in self.bucket.list(prefix)]

    def slots(self):
        return [int(key.removesuffix(".wal")) for key in self.keys("wal")]

    def rows(self):
        """Return the rows of a new reader and a new writer, which must agree."""
        seen = dict(self.db.reader(NAME).scan())
        with self.db.writer(NAME) as writer:
            assert dict(writer.scan()) == seen
        return seen


class At(Wrapper):
    """Does something once, just before or after the first call of a kind on some key."""

    def __init__(self, inner, method, part, does, *, after=False):
        super().__init__(inner)
        self.armed = True
        call = getattr(inner, method)

        def called(key="", *rest):
            strikes = self.armed and part in key
            self.armed = self.armed and not strikes
            if strikes and not after:
                does()
            result = call(key, *rest)
            if strikes and after:
                result = list(result) if method == "list" else result
                does()
                result = iter(result) if method == "list" else result
            return result

        setattr(self, method, called)


class EachRequest(Wrapper):
    """Calls something before every request."""

    def __init__(self, inner, does):
        super().__init__(inner)
        self._does = does

    def get_tagged(self, key):
        self._does()
        return self.inner.get_tagged(key)

    def get_range(self, key, start, end):
        self._does()
        return self.inner.get_range(key, start, end)

    def list(self, prefix="", start_after=""):
        self._does()
        return self.inner.list(prefix, start_after)

    def create(self, key, body):
        self._does()
        return self.inner.create(key, body)

    def delete_many(self, keys):
        self._does()
        self.inner.delete_many(keys)


class WholeSeconds(Wrapper):
    """A bucket whose dates have whole seconds."""

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, clock_resolution_s=1.0)

    def list(self, prefix="", start_after=""):
        for info in self.inner.list(prefix, start_after):
            yield replace(info, last_modified_s=float(int(info.last_modified_s)))

    def now(self):
        return float(int(self.inner.now()))


def folded_world():
    """Return a namespace with five rows in the log, folded into one segment."""
    world = World()
    with world.db.writer(NAME) as writer:
        for number in range(5):
            writer.put(f"k{number}", b"v")
    world.fold()
    return world
