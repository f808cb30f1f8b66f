"""A request without a response may take effect later."""

import pytest

from reef.errors import NotFoundError, UnavailableError
from reef.stores import Outcome, WriteResult
from reef.testing import Chaos, Simulation, explore

LATE = Chaos(late=1.0, faults_max=1, stall_s=(60.0, 60.0), latency_s=(0.0, 0.0))

WRITES = {
    "put": lambda store: store.put("new", b"late"),
    "upload": lambda store: store.upload("new", [b"la", b"te"]),
    "copy": lambda store: store.copy("source", "new"),
    "create": lambda store: store.create("new", b"late"),
    "delete": lambda store: store.delete("old"),
}
READS = {
    "get": lambda store: store.get("old"),
    "get_range": lambda store: store.get_range("old", 0, 1),
    "head": lambda store: store.head("old"),
    "list": lambda store: list(store.list()),
    "now": lambda store: store.now(),
    "abort_stale": lambda store: store.abort_stale(0.0),
}


def _simulation(chaos=LATE):
    sim = Simulation(0, chaos=chaos)
    sim.bucket.put("source", b"late")
    sim.bucket.put("old", b"old")
    return sim


def _objects(sim):
    return {info.key: sim.bucket.get(info.key) for info in sim.bucket.list()}


def _response(call, store):
    try:
        return call(store)
    except UnavailableError:
        return UnavailableError


@pytest.mark.parametrize("write", WRITES)
def test_a_write_lands_after_its_caller_has_timed_out(write):
    """Nothing now and no response; the effect later, and a line in the trace."""
    sim, seen = _simulation(), []
    before = _objects(sim)
    node = sim.process("node")

    def work():
        response = _response(WRITES[write], node.raw_store())
        seen.extend([response, _objects(sim)])

    node.spawn(work)
    sim.run()
    sim.close()
    response = seen[0].outcome if isinstance(seen[0], WriteResult) else seen[0]
    assert response is (Outcome.UNKNOWN if write == "create" else UnavailableError)
    assert seen[1] == before
    changed = {"source": b"late"} if write == "delete" else {**before, "new": b"late"}
    assert _objects(sim) == changed
    landed = [step for step in sim.trace if step.kind == "late"]
    assert [step.source for step in landed] == ["bucket"]
    assert landed[0].detail.startswith(write)


def test_a_replace_lands_late_or_finds_that_it_was_overtaken():
    """Its condition is evaluated when it lands."""
    for overtaken in (False, True):
        sim = _simulation()
        node, tag = sim.process("node"), sim.bucket.get_tagged("old").tag
        outcomes = []

        def work(node=node, tag=tag, outcomes=outcomes, overtaken=overtaken):
            store = node.raw_store()
            outcomes.append(store.replace("old", b"late", tag).outcome)
            if overtaken:
                store.put("old", b"newer")

        node.spawn(work)
        sim.run()
        sim.close()
        assert outcomes == [Outcome.UNKNOWN]
        assert sim.bucket.get("old") == (b"newer" if overtaken else b"late")
        assert sim.trace[-1].detail == f"replace old {'changed' if overtaken else 'replaced'}"


@pytest.mark.parametrize("read", READS)
def test_reads_are_never_late(read):
    """There is nothing that could land."""
    sim, responses = _simulation(), []
    node = sim.process("node")
    node.spawn(lambda: responses.append(_response(READS[read], node.raw_store())))
    sim.run()
    sim.close()
    assert responses != [UnavailableError]
    assert sim.faults == 0


def test_a_late_write_outlives_its_process():
    """The request is on its way; the death of who sent it does not stop it."""
    sim = _simulation()
    node = sim.process("node")
    node.spawn(lambda: (node.raw_store().create("new", b"late"), node.crash()))
    sim.run()
    sim.close()
    assert sim.bucket.get("new") == b"late"
    assert [step.kind for step in sim.trace] == ["store", "chaos", "death", "late"]


def test_a_late_write_that_is_refused_has_no_effect():
    """A copy whose source is gone by then comes to nothing."""
    sim = _simulation()
    node = sim.process("node")

    def work():
        store = node.raw_store()
        with pytest.raises(UnavailableError):
            store.copy("source", "new")
        store.delete("source")

    node.spawn(work)
    sim.run()
    sim.close()
    with pytest.raises(NotFoundError):
        sim.bucket.get("new")


def test_late_writes_are_bounded_like_all_mishaps():
    """After `faults_max` of them, responses arrive."""
    sim, outcomes = _simulation(Chaos(late=1.0, faults_max=2, latency_s=(0.0, 0.0))), []
    store = sim.process("node").raw_store()
    work = [lambda n=n: outcomes.append(store.create(f"{n}", b"").outcome) for n in range(4)]
    sim.processes[0].spawn(lambda: [call() for call in work])
    sim.run()
    sim.close()
    assert outcomes == [Outcome.UNKNOWN] * 2 + [Outcome.CREATED] * 2


def test_read_back_is_right_about_a_create_that_lands_late():
    """In all histories: "created" is there, "exists" never becomes ours."""
    seen = set()

    def scenario(sim):
        reported = {}

        def take(node):
            reported[node.name] = node.store().create("slot", node.name.encode()).outcome

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: take(node))
        sim.run()
        owner = sim.bucket.get("slot").decode()
        for name, outcome in reported.items():
            assert outcome in (Outcome.UNKNOWN, Outcome.CREATED if name == owner else "exists")
        seen.add((owner, *sorted(reported.items())))

    chaos = Chaos(late=0.5, faults_max=1, latency_s=(0.0, 0.0))
    assert explore(scenario, chaos=chaos).complete
    assert {owner for owner, *_ in seen} == {"a", "b"}
