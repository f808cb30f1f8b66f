"""A writer with a local log crashes: by `kill -9` on a real disk, or at any simulated yield point.

All acknowledged writes are in the bucket after the next opening, once.
"""

import json
import subprocess
import sys

import pytest

from reef.engine.handles.database import Database
from reef.testing.disk import SimulatedDisk
from reef.testing.simulation import CrashAt, Simulation
from tests.simulation.actors import Calm, World
from tests.simulation.local_log_scenarios import SETTINGS

NAME = "users"


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_writers_lose_no_acknowledged_put(tmp_path, kills):
    """H7: writers of one log are killed at random; all acknowledged writes are in the bucket."""
    words = [str(tmp_path), str(kills), "1"]
    command = [sys.executable, "-m", "tests.crash.local_front_worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert len(report["acknowledged"]) >= kills
    for key in report["acknowledged"]:
        assert report["rows"].get(key) == key * 10, f"{key} was acknowledged and is lost"
    assert len(report["changes"]) == len(set(report["changes"])), "a put was applied twice"
    for writer in range(kills):  # in the order in which they were put
        own = [key for key in report["changes"] if key.startswith(f"writer-{writer}/")]
        assert own == sorted(own)
    assert report["files"] <= 3, "the local log never lost its head"


def machine_writes(sim, run):
    """A machine whose two lives write, flush and close; the disk is what outlives them."""
    world = World(sim)
    node = sim.process("machine")
    run.update(disk=SimulatedDisk(), acknowledged=[], world=world, writers=[])

    def live():
        db = Database(Calm(world, node))
        for turn in range(2):
            db._log_files = run["disk"] = SimulatedDisk(run["disk"].content())
            writer = db.writer(NAME, **SETTINGS)
            run["writers"].append(writer)
            for number in range(2):
                writer.put(f"k{turn}{number}", f"v{turn}{number}".encode())
                run["acknowledged"].append(f"v{turn}{number}".encode())
            writer.close()

    node.spawn(live)
    sim.run()


def come_back(sim, run):
    """Open the log that is left, and read all rows."""
    node, content = sim.process("again"), run["disk"].content()

    def live():
        db = Database(Calm(run["world"], node))
        db._log_files = SimulatedDisk(content)
        with db.writer(NAME, **SETTINGS) as writer:
            run["rows"] = {value for _, value in writer.scan()}

    node.spawn(live)
    sim.run()


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_H15_death_at_every_seam_of_open_put_upload_and_close(stride):
    """H15: wherever a machine crashes, its acknowledged writes are there once after a restart."""
    run, points = {}, set()
    calm = Simulation(0)
    machine_writes(calm, run)
    assert len(run["acknowledged"]) == 4
    for number in range(1, calm.yield_counts["machine"] + 1, stride):
        sim = Simulation(0, crash_at=CrashAt("machine", number))
        machine_writes(sim, run)
        points.add(sim.crash_site)
        come_back(sim, run)
        applied = run["world"].oracle.evaluate().applied
        for value in run["acknowledged"]:
            assert value in applied, f"{sim.crash_site}: {value} is lost"
            assert value in run["rows"], f"{sim.crash_site}: {value} is not seen"
        assert all(len(lsns) == 1 for lsns in applied.values()), f"{sim.crash_site}: {applied}"
        sim.close()
    calm.close()
    assert len(points) >= 4
    if stride == 1:
        assert {"point local synced", "point uploaded", "point local log claimed"} <= points
