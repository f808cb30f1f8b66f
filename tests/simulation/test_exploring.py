"""`explore` walks all histories: as many as the formula says, also after a wait."""

from math import comb

import pytest

from reef.errors import NotFoundError
from reef.testing import ExplorationFailed, SimulationFailed, explore, simulate


def _two_putters(puts, wait_s=None):
    """Two processes that put objects of their own, perhaps after a wait."""
    orders = set()

    def scenario(sim):
        def work(node):
            if wait_s is not None:
                node.runtime.sleep(wait_s)
            for number in range(puts):
                node.raw_store().put(f"{node.name}/{number}", b"")

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: work(node))
        sim.run()
        orders.add(tuple(step.what for step in sim.trace if step.seam == "store"))

    return scenario, orders


def _orders(pieces):
    """In how many ways two processes of so many pieces each can interleave."""
    return comb(2 * pieces, pieces)


@pytest.mark.parametrize("puts", [1, 2])
@pytest.mark.parametrize(
    ("wait_s", "histories"),
    [
        (None, _orders),
        (0.0, lambda pieces: _orders(pieces + 1)),  # it hands over: one piece more
        (1.0, lambda pieces: _orders(1) * _orders(pieces)),  # time passes once both sleep
    ],
    ids=["no wait", "sleep(0)", "sleep(1)"],
)
def test_the_number_of_histories_is_the_formulas(puts, wait_s, histories):
    """A put has two seams, so a process with n of them has 2n + 1 pieces."""
    scenario, orders = _two_putters(puts, wait_s)
    explored = explore(scenario)
    assert explored.complete
    assert explored.histories == histories(2 * puts + 1)
    assert len(orders) == _orders(2 * puts), "every order of the store's seams is among them"


def _check_then_put_after(wait_s):
    """The planted bug, behind a wait that ends for both at the same moment."""

    def scenario(sim):
        winners = []

        def work(node):
            store = node.raw_store()
            node.runtime.sleep(wait_s)
            try:
                store.head("slot")
            except NotFoundError:
                store.put("slot", node.name.encode())
                winners.append(node.name)

        for name in "ab":
            node = sim.process(name)
            node.spawn(lambda node=node: work(node))
        sim.run()
        assert len(winners) == 1

    return scenario


@pytest.mark.parametrize("wait_s", [0.0, 1e-9, 1.0])
def test_a_check_then_put_after_a_wait_is_found(wait_s):
    """Who is woken at the same moment is interleaved, in exploring and from seeds."""
    with pytest.raises(ExplorationFailed):
        explore(_check_then_put_after(wait_s))
    with pytest.raises(SimulationFailed):
        simulate(_check_then_put_after(wait_s), range(100))


def test_time_passes_only_when_nobody_can_go_on():
    """What explore does not enumerate: a sleep that ends while another is still busy."""

    def scenario(sim):
        node, order = sim.process("node"), []
        store = node.raw_store()
        node.spawn(lambda: (node.runtime.sleep(1), order.append("slept")), "sleeper")
        node.spawn(lambda: (store.put("k", b""), order.append("put")), "busy")
        sim.run()
        assert order == ["put", "slept"]

    assert explore(scenario).complete
