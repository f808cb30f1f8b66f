"""Several real processes on one directory: serializable, and nothing is counted twice."""

from reef import catalog as catalogs
from tests.simulation.transaction_scenarios import apply, assert_reads, no_circle
from tests.unit.catalog.worker import count, in_processes, transact_at_random


class Committed:
    """A transaction as its process reports it."""

    def __init__(self, place, reads, writes):
        self.name = f"transaction {place}"
        self.place = place
        self.reads = [(tuple(bounds), seen, written) for bounds, seen, written in reads]
        self.writes = writes


def test_eight_processes_count_with_lost_responses(tmp_path):
    """The counter ends at exactly the number of acknowledged increments."""
    url = str(tmp_path / "bucket")
    catalogs.open(url).transact(lambda session: session.put("n", b"0"))
    acknowledged = in_processes([lambda: count(url, 4)] * 8)
    assert acknowledged == [4] * 8
    catalog = catalogs.open(url)
    assert catalog.get_latest("n") == b"32"
    assert catalog.verify().problems == []


def test_processes_are_serializable(tmp_path):
    """Reads and writes of four processes follow the order of the chain, without a cycle."""
    url = str(tmp_path / "bucket")
    catalogs.open(url).transact(lambda session: session.put("a", b"start"))
    reported = in_processes([lambda n=n: transact_at_random(url, f"p{n}", 12) for n in range(4)])
    committed = [Committed(1, [], {"a": "start"})]
    committed += [Committed(*each) for process in reported for each in process]
    committed.sort(key=lambda each: each.place)
    assert [each.place for each in committed] == list(range(1, len(committed) + 1))
    state = {}
    for each in committed:
        assert_reads(each, state)
        state = apply(state, each.writes)
    assert no_circle(committed)
    catalog = catalogs.open(url)
    assert {k.decode(): v.decode() for k, v in catalog.scan_latest()} == state
    assert catalog.verify().problems == []
    assert len(committed) > 15
