"""H23: each register on a bad wire, and with processes that are killed at any time.

The exploration (tests/simulation) goes through every order with a register that it knows; here the
registers are real servers. Whatever is lost on the way to them, one creator of a name gets
"created", its bytes are stored, and every creator that gets "exists" reads them.
"""

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from urllib.parse import quote

import pytest

from reef import stores
from reef.stores import Outcome, RetryPolicy
from reef.stores.two_phase import find_two_phase, recover
from tests.support.http_proxy import Forwarding, proxy
from tests.support.registers import register_url

PATIENT = RetryPolicy(attempts_max=12, deadline_s=60.0, first_delay_s=0.002, delay_max_s=0.05)
SHARE = 0.3
"""Of the statements that are lost: half of them before and half after they took effect."""
STATEMENTS = (b"INSERT INTO reef_records", b"UPDATE reef_records", b"SELECT reef_records")


class CuttingWire:
    """Carries a database's connections, and cuts some of them around a statement."""

    def __init__(self, host, port):
        self.target = (host, port)
        self.cut = Counter()
        self._chance = random.Random(7)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        mute = threading.Event()
        with client, socket.create_connection(self.target) as server:
            back = threading.Thread(target=self._respond, args=(client, server, mute), daemon=True)
            back.start()
            self._ask(client, server, mute)
            back.join()

    def _ask(self, client, server, mute):
        """Before a statement reaches the server, or after it did: both are silence."""
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if any(words in data for words in STATEMENTS):
                    chance = self._chance.random()
                    if chance < SHARE / 2:
                        self.cut["before"] += 1
                        break
                    if chance < SHARE:
                        self.cut["after"] += 1
                        mute.set()
                server.sendall(data)
        _hang_up(client, server)

    def _respond(self, client, server, mute):
        with suppress(OSError):
            while (data := server.recv(1 << 16)) and not mute.is_set():
                client.sendall(data)
        _hang_up(client, server)


def _hang_up(*sockets):
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class CuttingHttp(Forwarding):
    """The same for DynamoDB's requests."""

    def respond(self, method, path, body):
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        is_ours = target in ("PutItem", "UpdateItem", "BatchGetItem")
        chance = self.server.chance.random() if is_ours else 1.0
        if chance >= SHARE:
            self.send(*self.forward(method, path, body))
            return
        self.server.cut["before" if chance < SHARE / 2 else "after"] += 1
        if chance >= SHARE / 2:
            self.forward(method, path, body)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_register(servers, name, tmp_path):
    """Yield the URL of a register whose wire loses one statement in three, and the losses."""
    url = register_url(servers, name, tmp_path)
    server = servers.use(name)
    if name == "dynalite":
        with proxy(CuttingHttp, server.address) as wire:
            wire.cut, wire.chance = Counter(), random.Random(7)
            yield url.replace(quote(server.endpoint, ""), quote(wire.endpoint, "")), wire.cut
        return
    host, port = server.address.split(":")
    wire = CuttingWire(host, int(port))
    try:
        yield url.replace(f":{port}/", f":{wire.port}/"), wire.cut
    finally:
        wire.close()


@pytest.mark.parametrize("register", ["postgresql", "mariadb", "dynalite"])
def test_H23_a_wire_that_loses_responses(servers, tmp_path, register):
    """H23: statements are lost before and after they took effect; names have one winner each."""
    racers, names = 3, [f"wal/{number:03}" for number in range(5)]
    results = []

    def run(number, cas):
        store = stores.open(str(tmp_path / "bucket"), cas=cas, retry=PATIENT)
        for name in names:
            body = f"{name} by {number}".encode()
            result = store.create(name, body)
            seen = None
            if result.outcome in (Outcome.CREATED, Outcome.EXISTS):
                seen = store.get(name)
            results.append((name, result.outcome, body, seen))

    # The tables are made without faults: this test is about creation.
    calm = stores.open(str(tmp_path / "bucket"), cas=register_url(servers, register, tmp_path))
    assert find_two_phase(calm).register.name
    with cut_register(servers, register, tmp_path) as (cas, cut):
        threads = [threading.Thread(target=run, args=(n, cas)) for n in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert min(cut["before"], cut["after"]) > 0, cut
    assert not recover(calm).stuck
    assert len(results) == racers * len(names)
    check(calm, results)


def check(store, results):
    """At most one won each name, and every creator with a response saw its bytes."""
    for name in {one[0] for one in results}:
        mine = [one for one in results if one[0] == name]
        winners = [body for _, outcome, body, _ in mine if outcome == Outcome.CREATED]
        readings = [seen for _, outcome, _, seen in mine if outcome != Outcome.UNKNOWN]
        assert len(winners) <= 1, f"{name} was won by {winners}"
        if readings:
            assert {*readings, *winners} == {store.get(name)}, name


# --- deaths -----------------------------------------------------------------------------
WORKERS, DEATHS, NAMES = 3, 25, 150
DEATHS_MAX, CREATED_MIN = 8 * DEATHS, 20
"""More die where little is created between two deaths: on a busy machine, by a slow register."""


def work(store, acks, seed):
    """Create names until the end, and record each result with a single write."""
    chance = random.Random(seed)
    while True:
        name = f"wal/{chance.randrange(NAMES):03}"
        if chance.random() < 0.05:
            recover(store)
        body = f"{name} by {os.getpid()}.{chance.getrandbits(40)}".encode()
        outcome = store.create(name, body).outcome
        if outcome is not Outcome.UNKNOWN:
            record = [name.encode(), str(outcome).encode(), body, store.get(name)]
            os.write(acks, b"|".join(record) + b"\n")


def forked(store, acks, seed):
    """Start a worker; it opens its own connections, and ends only by being killed."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work(store, acks, seed)
        os._exit(1)
    return child


@contextmanager
def sturdy_register(servers, name, tmp_path):
    """Yield the URL of a register; dynalite, which ends when a client hangs up, is shielded."""
    url = register_url(servers, name, tmp_path)
    if name != "dynalite":
        yield url
        return
    server = servers.use(name)
    with proxy(Forwarding, server.address) as wire:
        yield url.replace(quote(server.endpoint, ""), quote(wire.endpoint, ""))


@pytest.mark.slow
@pytest.mark.parametrize("register", ["sqlite", "postgresql", "mariadb", "dynalite"])
def test_H23_processes_that_are_killed(servers, tmp_path, register):
    """H23: three creators, one of which dies all the time; acknowledged objects are stored."""
    with sturdy_register(servers, register, tmp_path) as cas:
        run_and_kill(stores.open(str(tmp_path / "bucket"), cas=cas, retry=PATIENT), tmp_path)


def run_and_kill(store, tmp_path):
    """Let workers create and die, recover, and check."""
    store.create("warm", b"")
    chance = random.Random(23)
    path = tmp_path / "acks"
    acks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    workers = [forked(store, acks, number) for number in range(WORKERS)]
    codes = []
    while len(codes) < DEATHS or (created_in(path) <= CREATED_MIN and len(codes) < DEATHS_MAX):
        time.sleep(chance.uniform(0.1, 0.8))
        victim = workers.pop(chance.randrange(WORKERS))
        os.kill(victim, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]))
        workers.append(forked(store, acks, WORKERS + len(codes)))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    os.close(acks)
    assert codes == [-signal.SIGKILL] * len(codes), "no creator ended with an error"
    assert not recover(store).stuck
    lines = [line.split(b"|") for line in path.read_bytes().splitlines()]
    results = [(name.decode(), outcome.decode(), body, seen) for name, outcome, body, seen in lines]
    check(store, results)
    assert Counter(outcome for _, outcome, _, _ in results)["created"] > CREATED_MIN


def created_in(path):
    """Return how many creations have been written down."""
    return path.read_bytes().count(b"|created|")
