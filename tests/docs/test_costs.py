"""The costs in requests that docs/design/protocols.md states match the requests of the code."""

from pathlib import Path

import pytest

import reef
from reef import stores
from reef.jobs import fold, ingest
from reef.telemetry import RequestMeter

PAGE = (Path(__file__).parents[2] / "docs" / "design" / "protocols.md").read_text()
ROWS = 10


@pytest.fixture
def meter():
    """Count requests."""
    return RequestMeter()


@pytest.fixture
def db(meter):
    """A bucket without a registry, whose store is proved, with one namespace."""
    db = reef.Database(stores.open("memory://", meter=meter))
    db.create("users")
    return db


def sent(meter, call):
    """Return the requests of a call, by kind."""
    meter.reset()
    call()
    return dict(meter.requests())


def test_requests_of_a_writer(db, meter):
    """To open, with k objects in the log and M = 1; then one PUT for each commit."""
    assert "3 LIST, 7 + k GET, 3 + M PUT, 2 DELETE" in PAGE
    with db.writer("users", background=False) as users:
        for number in range(ROWS):
            users.put(f"k{number}", b"v")
    k = 1 + ROWS + 1  # both writers' fences are in the log
    cost = {"list": 3, "get": 7 + k, "put": 3 + 1, "delete": 2}
    writers = []
    assert sent(meter, lambda: writers.append(db.writer("users", background=False))) == cost
    (users,) = writers
    assert "1 PUT per group in the steady state" in PAGE
    assert sent(meter, lambda: users.put("k0", b"w")) == {"put": 1}
    when = [reef.equals("k0", "value", b"w")]
    assert sent(meter, lambda: users.put("k0", b"x", when=when)) == {"put": 1}
    users.close()


def test_requests_of_a_reader(db, meter):
    """To open, and to refresh when nothing is new."""
    assert "opening 2 LIST, 2 + k GET; refreshing 2 GET" in PAGE
    with db.writer("users", background=False) as users:
        for number in range(ROWS):
            users.put(f"k{number}", b"v")
    readers = []
    cost = {"list": 2, "get": 2 + 1 + ROWS}
    assert sent(meter, lambda: readers.append(db.reader("users"))) == cost
    assert sent(meter, readers[0].refresh) == {"get": 2}


def test_requests_of_a_fold(db, meter):
    """A fold that is not the writer's reads each slot once."""
    assert "a fold is 2 LIST, 4 GET for manifests, one GET per slot, a PUT and a HEAD per" in PAGE
    with db.writer("users", background=False) as users:
        users.put("k", b"v")
    manifests, slots = 4, 2  # a fence and a batch
    cost = {"list": 2, "get": manifests + slots, "head": 1, "put": 2}
    assert sent(meter, lambda: fold(db, "users")) == cost


def test_requests_of_a_small_load(db, meter):
    """Lease, begin, segment and ingest; head and log are read before and after each append."""
    assert "a small load is 9 LIST,\n4 PUT, 1 HEAD, 1 DELETE" in PAGE
    found = sent(meter, lambda: ingest(db, "users", [{"id": b"q", "value": b"1"}]))
    found.pop("get")
    assert found == {"list": 9, "put": 4, "head": 1, "delete": 1}
