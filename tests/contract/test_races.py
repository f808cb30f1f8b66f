"""Create-only excludes: threads and processes race for names, and one wins each time."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.stores.probe import agree_on_cas, probe, remembered
from reef.stores.wrappers import Wrapper
from reef.telemetry import RequestMeter


def race(store, racers, rounds):
    """Let `racers` threads create each name at once; return the winners of each round."""
    barrier = Barrier(racers)

    def run(racer):
        won = []
        for number in range(rounds):
            barrier.wait()
            result = store.create(f"race/{number:04}", f"{racer}".encode() * 100)
            if result.landed:
                won.append(number)
        return won

    with ThreadPoolExecutor(racers) as pool:
        wins = list(pool.map(run, range(racers)))
    winners = [[] for _ in range(rounds)]
    for racer, numbers in enumerate(wins):
        for number in numbers:
            winners[number].append(racer)
    return winners


def check_winners(store, winners):
    """Exactly one a round, and its bytes are there."""
    for number, names in enumerate(winners):
        assert len(names) == 1, f"round {number} was won by {names}"
        assert store.get(f"race/{number:04}") == f"{names[0]}".encode() * 100


def test_64_threads_on_memory():
    """500 rounds, one winner in each."""
    store = MemoryStore()
    check_winners(store, race(store, racers=64, rounds=500))


def test_64_threads_on_a_directory(tmp_path):
    """500 rounds, one winner in each, whole objects, and no temporary file left."""
    store = LocalStore(str(tmp_path))
    check_winners(store, race(store, racers=64, rounds=500))
    assert [p for p in (tmp_path / ".tmp").iterdir() if p.is_file()] == []


def test_16_clients_on_ceph(ceph):
    """100 rounds on a production server."""
    ceph.make_bucket("races")
    store = stores.open("s3://races/sixteen", **ceph.options())
    check_winners(store, race(store, racers=16, rounds=100))


def test_2_clients_on_seaweedfs(seaweedfs):
    """100 rounds on another one; more clients than two would wait for seconds there."""
    seaweedfs.make_bucket("races")
    store = stores.open("s3://races/two", **seaweedfs.options(), listing="unsorted")
    check_winners(store, race(store, racers=2, rounds=100))


def _race_in_process(root, racer, start, rounds, wins):
    store = LocalStore(root)
    start.wait()
    for number in range(rounds):
        if store.create(f"race/{number:04}", f"{racer}".encode() * 100).landed:
            wins.put((number, racer))
    wins.put(None)


def test_4_processes_on_a_directory(tmp_path):
    """500 rounds between processes: the kernel's link() decides."""
    spawn = multiprocessing.get_context("spawn")
    start, wins = spawn.Barrier(4), spawn.Queue()
    processes = [
        spawn.Process(target=_race_in_process, args=(str(tmp_path), n, start, 500, wins))
        for n in range(4)
    ]
    for process in processes:
        process.start()
    winners, done = [[] for _ in range(500)], 0
    while done < 4:
        win = wins.get(timeout=120)
        if win is None:
            done += 1
        else:
            winners[win[0]].append(win[1])
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    check_winners(LocalStore(str(tmp_path)), winners)


def _increment_in_process(root, count):
    store = LocalStore(root)
    done = 0
    while done < count:
        found = store.get_tagged("counter")
        body = f"{int(found.body.split()[0]) + 1} {os.getpid()}.{done}".encode()
        done += store.replace("counter", body, found.tag).landed


def test_if_match_between_processes_loses_no_increment(tmp_path):
    """4 processes count to 4 × 100 by compare-and-swap on one object in a directory."""
    store = LocalStore(str(tmp_path))
    store.put("counter", b"0 start")
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_increment_in_process, args=(str(tmp_path), 100)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert store.get("counter").split()[0] == b"400"


# --- the probe --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ceph", "seaweedfs", "ministack"])
def test_the_probe_accepts_real_exclusion(servers, name):
    """Servers that honour the conditions pass, and the bucket remembers it."""
    options = {"ceph": {"if_match": "bare"}, "seaweedfs": {"listing": "unsorted"}}.get(name, {})
    server = servers.use(name)
    server.make_bucket("probed")
    store = stores.open("s3://probed/here", **server.options(), **options)
    verdict = agree_on_cas(store)
    assert (verdict.cas, verdict.if_match) == ("native", True)
    assert remembered(store) == verdict
    assert [info.key for info in store.list("store/probe/")] == []


def test_old_ceph_without_the_option_is_used_without_if_match(ceph):
    """Ceph 16 refuses quoted tags: create-only still holds, and the verdict says the rest."""
    ceph.make_bucket("probed")
    verdict = probe(stores.open("s3://probed/quoted", **ceph.options()))
    assert not verdict.if_match


def test_seaweedfs_without_the_option_is_refused(seaweedfs):
    """Its listings put folders before names: reading them as sorted would skip objects."""
    seaweedfs.make_bucket("probed")
    store = stores.open("s3://probed/sorted", **seaweedfs.options())
    with pytest.raises(InvalidInputError, match="listing='unsorted'"):
        probe(store)


class IgnoresConditions(Wrapper):
    """A server that responds 200 whatever the condition is."""

    def create(self, key, body):
        self.inner.put(key, body)
        return stores.WriteResult(stores.Outcome.CREATED)


def test_h4_rclone_is_refused(rclone):
    """H4: rclone's S3 server ignores the conditions; the refusal names the two-phase option."""
    rclone.make_bucket("refused")
    store = stores.open("s3://refused/here", **rclone.options())
    with pytest.raises(InvalidInputError, match=r"cas=<register URL>") as caught:
        agree_on_cas(store)
    assert caught.value.kind is ErrorKind.NOT_EXCLUSIVE
    assert remembered(store) is None
    assert [info.key for info in store.list("store/probe/")] == []


def test_h4_a_store_that_ignores_the_header_is_refused():
    """H4: the same, with a wrapper that forgets the condition."""
    with pytest.raises(InvalidInputError, match="took effect"):
        probe(IgnoresConditions(MemoryStore()))


class RacyCreate(Wrapper):
    """Right when called one after another, wrong in a race: a check, then a put."""

    def __init__(self, inner):
        super().__init__(inner)
        self.all_checked = Barrier(4)

    def create(self, key, body):
        exists = any(info.key == key for info in self.inner.list(key))
        if "create-" in key:
            self.all_checked.wait(60)
        if exists:
            return stores.WriteResult(stores.Outcome.EXISTS)
        self.inner.put(key, body)
        return stores.WriteResult(stores.Outcome.CREATED)


def test_h4_a_store_that_excludes_only_one_after_another_is_refused():
    """H4: creating twice in a row passes; the race detects it."""
    with pytest.raises(InvalidInputError, match="or more than one"):
        probe(RacyCreate(MemoryStore()))


def test_a_writer_with_another_way_is_refused(tmp_path):
    """The bucket remembers the way of compare-and-swap; all writers must share it."""
    store = stores.open(str(tmp_path))
    agree_on_cas(store, "native")
    with pytest.raises(InvalidInputError, match=r"'native'.*'sqlite-1'") as caught:
        agree_on_cas(store, "sqlite-1")
    assert caught.value.kind is ErrorKind.OTHER_CAS


def test_a_bucket_that_knows_costs_one_get(tmp_path):
    """After the first time, opening for writing costs one request."""
    agree_on_cas(stores.open(str(tmp_path)))
    meter = RequestMeter()
    agree_on_cas(stores.open(str(tmp_path), meter=meter))
    assert meter.requests() == {"get": 1}


def test_many_first_writers_agree(tmp_path):
    """Processes that open a new store together probe concurrently and store one verdict."""
    opened = [stores.open(str(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(agree_on_cas, opened))
    assert len(set(verdicts)) == 1
