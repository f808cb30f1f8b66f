"""Fences slot by slot, and the leases that are held meanwhile (protocols §3)."""

import msgspec
import pytest

import reef
from reef.engine.log.log import Log
from reef.formats.wal_object import WalKind
from reef.manifest.roots import GenerationLease
from reef.stores import Wrapper
from tests.support.bulk_jobs import append
from tests.support.sweep_world import NAME, USERS, World


@pytest.fixture
def world():
    """A namespace with a row, whose writers have three PUTs in flight."""
    world = World()
    with world.db.writer(NAME, max_parallel_writes=3) as writer:
        writer.put("k", b"0")
    return world


def own_fences(world):
    """Return the LSNs of the fences of the current epoch."""
    log, epoch = Log(world.bucket, USERS), world.head().writer_epoch
    headers = [log.read(slot.lsn).header for slot in log.filled(1)]
    return [h.lsn for h in headers if h.kind is WalKind.FENCE and h.epoch == epoch]


@pytest.mark.parametrize("taken", [[0], [1], [2], [0, 2], [1, 4]])
def test_H11_the_fences_of_an_opening_are_in_a_row(world, taken):
    """H11: as many as may be in flight, without anything between them: a run that another
    object breaks begins again behind it.
    """
    first = max(world.slots()) + 1
    for offset in taken:
        append(world.bucket, NAME, WalKind.SKIP, lsn=first + offset)
    with world.db.writer(NAME, max_parallel_writes=3) as writer:
        last = own_fences(world)[-3:]
        assert last == list(range(last[0], last[0] + 3))
        assert writer.put("k", b"1").lsn == last[-1] + 1


def test_H12_all_fences_are_at_or_above_the_floor(world):
    """H12: a floor between them leaves fewer than there may be PUTs in flight."""

    class Folds(Wrapper):
        """Moves the floor over the first fence, as a fold may, once all three are put."""

        fences = 0

        def create(self, key, body):
            result = self.inner.create(key, body)
            if key.startswith(USERS.wal):
                self.fences += 1
                if self.fences == 3:
                    ids = [Log(self.inner, USERS).read(n).header.write_id for n in world.slots()]
                    floor = max(world.slots()) - 1
                    world.publish(wal_floor=floor, below_floor=tuple(ids[: floor - 1]))
            return result

    with reef.Database(Folds(world.bucket)).writer(NAME, max_parallel_writes=3):
        floor = world.head().wal_floor
        assert min(own_fences(world)[-3:]) >= floor
        assert len([lsn for lsn in own_fences(world) if lsn >= floor]) >= 3


def test_H16_an_opening_holds_leases_all_the_time(world):
    """H16: one on the head that it began with while it fences, and another one on the head whose
    log it replays, which may be long after.
    """

    class Notes(Wrapper):
        def __init__(self, inner):
            super().__init__(inner)
            self.fencing, self.reading = [], []

        def create(self, key, body):
            if key.startswith(USERS.wal):
                self.fencing.append(self.leased())
            return self.inner.create(key, body)

        def get_tagged(self, key):
            if key.startswith(USERS.wal):
                self.reading.append(self.leased())
            return self.inner.get_tagged(key)

        def leased(self):
            bodies = [self.inner.get(info.key) for info in self.inner.list(USERS.leases)]
            return {msgspec.json.decode(body, type=GenerationLease).generation for body in bodies}

    before = world.head().generation
    store = Notes(world.bucket)
    with reef.Database(store).writer(NAME, max_parallel_writes=3) as writer:
        assert writer.get("k") == b"0"
    assert store.fencing
    assert store.reading
    assert all(before in leased for leased in store.fencing)
    assert all(max(leased) > before for leased in store.reading)
    assert world.keys("leases") == []
