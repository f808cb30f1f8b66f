"""What Reef can do today, in a minute: `make demo`.

A durable key-value store on a directory, with a writer that is fenced and a fold; create-only
writes that exclude; and the simulator that finds a planted bug and brings it back.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import reef
from reef import stores
from reef.jobs import fold
from reef.stores import Outcome, Wrapper, WriteResult, agree_on_cas
from reef.telemetry import RequestMeter
from reef.testing import Simulation, SimulationFailed, simulate


def key_value_store(root: str) -> None:
    """Write, be taken over, read, fold."""
    db = reef.open(root)
    first = db.writer("users")
    for number in range(1000):
        first.put(f"user-{number:04}", b"hello", wait=False)
    first.flush()
    second = db.writer("users")
    print(f"   the second writer replayed everything: {len(list(second.scan()))} rows")
    try:
        first.put("user-0000", b"by a zombie")
    except reef.FencedError as error:
        print(f"   the first one is fenced: {error}")
    print(f"   {fold(db, 'users')}")
    print(f"   and a reader sees user-0042 = {db.reader('users').get('user-0042')!r}")


def race_for_a_name(store: stores.Store) -> None:
    """32 threads want the same name; one gets it, and every other is told so."""
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda n: store.create("wal/1", b"writer %d" % n), range(32)))
    outcomes = [result.outcome.value for result in results]
    print(f"   created: {outcomes.count('created')}, exists: {outcomes.count('exists')}")
    print(f"   the winner's bytes: {store.get('wal/1').decode()}")


class CheckThenPut(Wrapper):
    """A bug that tests rarely find: create-only made of a look and a put."""

    def create(self, key: str, body: bytes) -> WriteResult:
        if any(info.key == key for info in self.inner.list(key)):
            return WriteResult(Outcome.EXISTS)
        self.inner.put(key, body)
        return WriteResult(Outcome.CREATED)


def two_writers(sim: Simulation) -> None:
    """Two simulated processes take the same slot; at most one may win."""
    winners = []
    for name in ("a", "b"):
        node = sim.process(name)
        store = CheckThenPut(node.store())

        def take(store: stores.Store = store, name: str = name) -> None:
            if store.create("wal/1", name.encode()).landed:
                winners.append(name)

        node.spawn(take)
    sim.run()
    assert len(winners) == 1, f"{len(winners)} writers were told that they won"


def main() -> None:
    """Run the tour."""
    meter = RequestMeter()
    with tempfile.TemporaryDirectory() as root:
        print("0. A durable key-value store on a directory:")
        key_value_store(f"{root}/data")
        store = stores.open(root, meter=meter)
        print("1. A directory becomes a bucket, after it has proved that create-only excludes:")
        print(f"   {agree_on_cas(store)}")
        print("2. 32 threads race for one name:")
        race_for_a_name(store)
        print("3. What that took in requests, and what it would cost at S3:")
        print(f"   {meter.requests()}, {meter.cost_usd('s3-standard'):.6f} USD")
    print("4. The simulator looks for a bug in a create-only that is none:")
    try:
        simulate(two_writers, range(1000))
    except SimulationFailed as failure:
        print("   " + "\n   ".join(str(failure).splitlines()))
        print(f"   … and seed {failure.seed} brings it back, every time.")


if __name__ == "__main__":
    main()
