"""Processes that share a catalog in a directory, for the tests: forked, and listened to.

Each begins when all are there, works, and writes its results as one JSON document.
"""

import json
import os
import random
import signal
from contextlib import suppress

from reef import stores
from reef.catalog import Catalog, Retention
from reef.errors import ConflictError, ReefError
from reef.stores import RetryPolicy
from reef.testing import Fault, Rule, open_store

KEYS = ("a", "b", "c", "d", "e", "f")
SHORT = Retention(checkpoints_last=1, checkpoints_min_age_s=0.0, grace_s=0.0, lease_ttl_s=20.0)
PATIENT = RetryPolicy(attempts_max=200, deadline_s=100.0, first_delay_s=0.002, delay_max_s=0.1)
LIMIT_S = 120


def lost_responses():
    """Return rules by which every sixth response to a conditional write is lost."""
    return [
        Rule(Fault.FAIL_AFTER, "replace", "HEAD.json", chance=0.17),
        Rule(Fault.FAIL_AFTER, "create", "segments/*", chance=0.17),
    ]


def in_processes(works):
    """Run each in a forked process; return their results, in order."""
    gate_out, gate_in = os.pipe()
    running = [_fork(work, gate_out, gate_in) for work in works]
    os.close(gate_in)  # all are there: the gate opens
    results = []
    for child, reading in running:
        with os.fdopen(reading, "rb") as stream:
            output = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"a process ended with {code}: {output.decode()}"
        results.append(json.loads(output))
    os.close(gate_out)
    return results


def _fork(work, gate_out, gate_in):
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    signal.alarm(LIMIT_S)
    code = 1
    try:
        os.close(gate_in)
        os.read(gate_out, 1)
        _send(writing, json.dumps(work()).encode())
        code = 0
    except BaseException as error:
        _send(writing, repr(error).encode())
    finally:
        os._exit(code)


def _send(writing, body):
    while body:
        body = body[os.write(writing, body) :]


def count(url, times):
    """Increment a counter through `transact`, with lost responses; return how many succeeded."""
    store = open_store(url, faults=lost_responses(), retry=RetryPolicy(first_delay_s=0.002))
    catalog = Catalog(store, backoff=PATIENT, retention=SHORT)

    def increment(session):
        session.put("n", b"%d" % (int(session.get("n") or 0) + 1))

    acknowledged = 0
    for turn in range(times):
        catalog.transact(increment)
        acknowledged += 1
        if turn % 3 == 0:
            with suppress(ConflictError):  # of the compaction: busy, another time
                catalog.compactor().compact_and_gc()
    return acknowledged


def transact_at_random(url, name, times):
    """Run random transactions; return each that committed: its place, its reads and its writes."""
    chance = random.Random(name)
    catalog = Catalog(stores.open(url), backoff=PATIENT, retention=SHORT)
    done = []
    for turn in range(times):
        reads, writes = [], {}
        session = catalog.session_write()
        with session, suppress(ConflictError):
            for step in range(chance.randrange(1, 5)):
                _step(session, f"{name}.{turn}.{step}", chance, reads, writes)
            place = session.commit().seq
            if writes:
                done.append([place, reads, writes])
        if chance.random() < 0.2:
            with suppress(ReefError):
                catalog.compactor(compact_after=4).run_once()
    return done


def _step(session, value, chance, reads, writes):
    key = chance.choice(KEYS)
    before = dict(writes)
    match chance.randrange(4):
        case 0:
            found = session.get(key)
            reads.append([[key, key + "\0"], {key: found and found.decode()}, before])
        case 1:
            start, end = sorted((key, chance.choice(KEYS)))
            pairs = session.scan_range(start, end + "\0")
            reads.append([[start, end + "\0"], {k.decode(): v.decode() for k, v in pairs}, before])
        case 2:
            session.delete(key)
            writes[key] = None
        case _:
            session.put(key, value.encode())
            writes[key] = value
