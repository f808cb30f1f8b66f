"""A register inside the simulated bucket, so that the simulator sees every statement.

Its records are objects below `register/`. A statement takes effect in one step, as a transaction
does, and can be lost, late or the last thing that a process sends, as any request to the bucket.
`simulated_two_phase` gives the store that a simulated process works with; `TwoPhaseSimulation`
runs scenarios that were written for plain buckets on such stores, without a change to them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from reef.errors import NotFoundError
from reef.stores import Meter, ReadBack, Retry, RetryPolicy, WriteResult
from reef.stores.two_phase import Record, Register, TwoPhase, recover
from reef.stores.two_phase.register import PAGE, Holding, is_temporary
from reef.testing import ExploredSimulation, Process, Simulation
from reef.testing.explore.states import ExploredRequest
from reef.testing.simulation import SimulatedStore, WatchedBucket

RECORDS = "register/"
INCARNATION = "incarnation"
COPYING = "copying/"
"""Below it, processes whose check has passed and whose commit has not come yet."""
NEED_IF_MATCH = frozenset({"counting_with_replace", "counting_with_replace_late"})
"""Scenarios that need If-Match, which a store with a register lacks."""


@dataclass(frozen=True)
class Statement(ExploredRequest):
    """A call to the register, as data, like a request to the bucket."""

    @cached_property
    def writes(self):
        marks = self.method == "holding" and bool(self.arguments)
        return marks or self.method in ("insert", "commit", "commit_in", "erase", "restore")

    def apply(self, bucket):
        """Take effect, in one step."""
        return getattr(self, f"_{self.method}")(bucket)

    def _insert(self, bucket):
        (record,) = self.arguments
        return bucket.create(self.key, _encoded(record)).landed

    def _read(self, bucket):
        return [record for key in self.arguments if (record := _found(bucket, RECORDS + key))]

    def _commit(self, bucket):
        (record,) = self.arguments
        if self._is_there(bucket, record):
            bucket.put(self.key, _encoded(replace(record, committed=True)))

    def _holding(self, bucket):
        found = _found(bucket, self.key)
        for process in self.arguments:
            if found is not None and not found.committed:
                bucket.put(COPYING + process, b"")
        return Holding(found, _incarnation(bucket))

    def _commit_in(self, bucket):
        record, incarnation, *processes = self.arguments
        for process in processes:
            bucket.delete(COPYING + process)
        if _incarnation(bucket) != incarnation or not self._is_there(bucket, record):
            return False
        bucket.put(self.key, _encoded(replace(record, committed=True)))
        return True

    def _restore(self, bucket):
        """An empty backup takes the place of all records; the incarnation shows it, if asked."""
        shown, any_time = self.arguments
        if not any_time and list(bucket.list(COPYING)):
            return
        bucket.delete_many([info.key for info in list(bucket.list(RECORDS))])
        if shown:
            bucket.put(INCARNATION, b"2")

    def _erase(self, bucket):
        (record,) = self.arguments
        if self._is_there(bucket, record):
            bucket.delete(self.key)

    def _page(self, bucket):
        start_after, unfinished = self.arguments
        infos = bucket.list(self.key, start_after and RECORDS + start_after)
        records = (_found(bucket, info.key) for info in infos)
        return [record for record in records if not (unfinished and record.committed)][:PAGE]

    def _is_there(self, bucket, record):
        found = _found(bucket, self.key)
        return found is not None and found.source == record.source


def _incarnation(bucket):
    try:
        return bucket.get(INCARNATION).decode()
    except NotFoundError:
        return "1"


def _encoded(record):
    return msgspec.json.encode(record)


def _found(bucket, key):
    try:
        return msgspec.json.decode(bucket.get(key), type=Record)
    except NotFoundError:
        return None


class SimulatedRegister(Register):
    """The register as one process sees it; `send` carries its statements."""

    name = "simulated-1 for the bucket"
    scope = "the bucket"

    def __init__(self, send, process=()):
        self._send = send
        self._process = process
        """Its name, if it is to be known when a copy of it may be on its way."""

    def insert(self, record):
        return self._send(Statement("insert", RECORDS + record.destination, (record,)))

    def read(self, destinations):
        if not destinations:
            return []
        return self._send(Statement("read", RECORDS, tuple(destinations)))

    def commit(self, record):
        self._send(Statement("commit", RECORDS + record.destination, (record,)))

    def incarnation(self):
        return self.holding(INCARNATION).incarnation

    def holding(self, destination):
        return self._send(Statement("holding", RECORDS + destination, self._process))

    def commit_in(self, record, incarnation):
        arguments = (record, incarnation, *self._process)
        return self._send(Statement("commit_in", RECORDS + record.destination, arguments))

    def restore(self, *, shown, any_time):
        """Bring the register back to an empty backup; not while a copy may be on its way, or so."""
        self._send(Statement("restore", RECORDS, (shown, any_time)))

    def delete(self, records):
        for record in records:
            self._send(Statement("erase", RECORDS + record.destination, (record,)))

    def page(self, prefix, start_after, *, unfinished):
        return self._send(Statement("page", RECORDS + prefix, (start_after, unfinished)))


def _sender(sim, raw):
    """Return what carries the statements of the process that has this raw store."""
    if isinstance(sim, ExploredSimulation):

        def explored(statement):
            response = sim.send(statement)
            if isinstance(response, WriteResult) and response.cause is not None:
                raise response.cause
            return response

        return explored

    def simulated(statement):
        call = raw._write if statement.writes else raw._call
        return call(statement.method, statement.key, lambda: statement.apply(raw.inner))

    return simulated


def calm_two_phase(bucket):
    """Return the store of a process without faults."""
    return TwoPhase(bucket, SimulatedRegister(lambda statement: statement.apply(bucket)))


def simulated_two_phase(sim, raw, policy=None, process=()):
    """Return the store of a process, given its raw one, with the usual wrappers."""
    policy = policy or RetryPolicy()
    register = SimulatedRegister(_sender(sim, raw), process)
    return ReadBack(TwoPhase(Retry(Meter(raw), policy), register, policy), policy)


class _Process(Process):
    def store(self, policy=None):
        return simulated_two_phase(self.simulation, self.raw_store(), policy)


class TwoPhaseSimulation(Simulation):
    """A simulation whose processes, and whose hand from outside, create by a register.

    Conditional writes of the bucket itself are refused, to detect code that relies on one.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.appeared = lambda key, body: None
        """Called with every object that a copy of a source has made."""
        self.plain_bucket = _Copying(self)
        self.bucket = calm_two_phase(self.plain_bucket)

    def run(self, until_s=None):
        """At the end, finish the records of crashed processes, as every opening does.

        The checks of a scenario run outside of simulated time: they cannot wait, as the loser of
        a race with a dead writer's record does.
        """
        super().run(until_s)
        if until_s is None:
            recover(self.bucket)

    def process(self, name, *, skew_s=0.0):
        process = _Process(name, simulation=self)
        self.processes.append(process)
        process.runtime = self._make_runtime(process, skew_s)
        return process

    def store_of(self, process):
        return _Unconditional(self.plain_bucket, process)


class _Copying(WatchedBucket):
    """Reports objects that are created."""

    def __init__(self, sim):
        super().__init__("memory://simulated", runtime=sim.bucket.runtime)
        self._sim = sim
        self.held = sim.held

    def copy(self, source, target):
        super().copy(source, target)
        if is_temporary(source):
            self._sim.appeared(target, self.get(target))


class _Unconditional(SimulatedStore):
    """A bucket that has no conditional writes."""

    def create(self, key, body):
        raise AssertionError(f"create {key} without the register")

    def replace(self, key, body, tag):
        raise AssertionError(f"replace {key}, which the bucket has not")
