"""The engine under the simulator: everything that can meet on one namespace.

The invariants are in `client_log`: observations of clients, against the whole log. Where a scenario
has a sweep, the grace period is a few seconds and only the head is retained, so that every stall is
longer than both.
"""

from tests.simulation.actors import (
    GRACE_S,
    World,
    fold_some,
    follow_changes,
    hold_leases,
    keep_house,
    load_some,
    read_some,
    retry_keyed,
    sweep_some,
    write,
    write_pipelined,
)


def writer_takeovers(sim):
    """Two writers, one after the other and overlapping, with folds and a reader."""
    world = World(sim)
    world.start("w1", write, 5)
    world.start("w2", write, 5, after_s=3.0)
    world.start("folder", fold_some, 2)
    world.start("reader", read_some, 3)
    world.start("stream", follow_changes, 2)
    world.finish()


def pipelined_writer_takeovers(sim, **settings):
    """The same with three PUTs in flight; a writer's own batches never swap."""
    world = World(sim, in_order=settings.get("ack") != "independent")
    settings = {"max_parallel_writes": 3, "group_bytes_max": 100, **settings}
    world.start("w1", write_pipelined, 8, **settings)
    world.start("w2", write_pipelined, 8, after_s=3.0, **settings)
    world.start("folder", fold_some, 2)
    world.finish()


def independent_writer_takeovers(sim):
    """The same where each object is acknowledged as it lands."""
    pipelined_writer_takeovers(sim, ack="independent")


def zombies_and_sweeps(sim):
    """Writers that are frozen for longer than every grace, while others fold and sweep."""
    world = World(sim, grace_s=GRACE_S)
    nodes = [
        world.start("w1", write, 2, nap_s=(10.0, 60.0)),
        world.start("w2", write, 4, nap_s=(10.0, 60.0), after_s=8.0),
        world.start("house", keep_house, 5),
        world.start("reader", read_some, 3, 30.0),
    ]
    world.suspend_some(nodes, 1, (1.0, 40.0))
    world.finish()


def openers_stall(sim):
    """Three that open and write a little, each request of which may take longer than a grace."""
    world = World(sim, grace_s=GRACE_S)
    world.start("w1", write, 2)
    world.start("w2", write, 2, after_s=8.0)
    world.start("w3", write, 2, after_s=16.0)
    world.start("house", keep_house, 5)
    world.finish()


def keyed_batches_again(sim):
    """Two clients send the same keyed batches until each is acknowledged; folds and sweeps."""
    world = World(sim, grace_s=GRACE_S)
    parallel = 1 + sim.choices.pick(2)
    world.start("c1", retry_keyed, 3, 3, max_parallel_writes=parallel)
    world.start("c2", retry_keyed, 3, 3, max_parallel_writes=parallel, after_s=10.0)
    world.start("house", keep_house, 2)
    world.finish()


def bulk_loads_and_writers(sim):
    """Loads take slots between those of a pipelining writer, in either order of acks."""
    parallel = 1 + sim.choices.pick(3)
    ack = ("prefix", "independent")[sim.choices.pick(2)]
    world = World(sim, in_order=ack == "prefix")
    settings = {"max_parallel_writes": parallel, "group_bytes_max": 100, "ack": ack}
    world.start("w1", write_pipelined, 6, **settings)
    world.start("w2", write_pipelined, 3, after_s=3.0, **settings)
    world.start("j1", load_some, 1)
    world.start("j2", load_some, 1, key="load", after_s=2.0)
    world.start("j3", load_some, 1, key="load", after_s=2.0)
    world.start("stream", follow_changes, 2)
    world.start("folder", fold_some, 2)
    world.finish()


def folders_race(sim):
    """Two concurrent folds and two sweeps, with writers, a load and a reader."""
    world = World(sim, grace_s=GRACE_S)
    world.start("w1", write, 4, pause_s=2.0)
    world.start("j1", load_some, 1, after_s=3.0)
    world.start("f1", fold_some, 2, 2.0)
    world.start("f2", fold_some, 2, 2.0)
    world.start("s1", sweep_some, 2)
    world.start("stream", follow_changes, 3)
    world.start("house", keep_house, 2, after_s=5.0)
    world.finish()


def outcomes_are_resolved(sim):
    """Writers with short deadlines that resolve unknown outcomes later."""
    world = World(sim, grace_s=GRACE_S)
    settings = {"max_parallel_writes": 2, "group_bytes_max": 100, "commit_deadline_s": 1.0}
    world.start("w1", write_pipelined, 4, resolve=True, **settings)
    world.start("w2", write_pipelined, 4, resolve=True, after_s=6.0, **settings)
    world.start("house", keep_house, 1, after_s=5.0)
    world.finish()


def leases_hold(sim):
    """Processes pin the head and check it, with concurrent folds, loads and stalled sweeps."""
    world = World(sim, grace_s=GRACE_S)
    world.start("w1", write, 5, pause_s=12.0, calm=True)
    world.start("l1", hold_leases, 2, 7, calm=True)
    world.start("l2", hold_leases, 1, 3)
    world.start("folder", fold_some, 10, 6.0, calm=True)
    world.start("sweeper", sweep_some, 3, 2.0)
    world.finish()
