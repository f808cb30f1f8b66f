"""H69: reads that race writes at every line; and the checks would notice a torn view."""

from types import SimpleNamespace

import pytest

from reef.engine.local.buffer import LocalBuffer
from reef.engine.read.view import View
from reef.testing import Chaos, Simulation, simulate
from reef.testing.disk import SimulatedDisk
from tests.simulation import reading_scenarios as reading

SEEDS = range(8)
"""Of each scenario; `make sim` runs more."""
BUSY = Chaos(latency_s=(0.001, 0.05))
LINES_MAX = 400
FEW = 13
"""Every so many lines where there is little time; `make slow` takes all of them."""


@pytest.mark.parametrize(
    "scenario",
    [
        reading.reads_race_writes,
        reading.readers_race_refreshes,
        reading.local_reads_race_uploads,
    ],
)
def test_H69_a_read_shows_one_state(scenario):
    """H69: each read equals the rows at one LSN between its beginning and its end.

    The root was a view whose parts were read at two instants: rows first, ingested segments later.
    """
    assert simulate(scenario, SEEDS, chaos=BUSY) == len(SEEDS)


def at_every_line(read, first, script, *, step=1, **settings):
    """Run a script at each line of a read in turn, or at some; return how many lines it has."""
    for line in range(1, LINES_MAX, step):
        sim = Simulation(line)
        try:
            if "durability" in settings:
                settings["disk"] = SimulatedDisk({})
            if not reading.changes_at_a_line(sim, read, line, first, script, **settings):
                return line - 1
        finally:
            sim.close()
    raise AssertionError("a read without end")


@pytest.mark.parametrize("step", [FEW, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("read", dict.fromkeys(reading.READS), ids=lambda read: read.__name__)
def test_H69_a_change_at_every_line_of_a_read(read, step):
    """H69: whatever is committed, loaded and folded between two lines, a read shows one state."""
    for script in reading.SCRIPTS.values():
        assert at_every_line(read, reading.FIRST, script, step=step) > 15


@pytest.mark.parametrize("step", [FEW, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("read", [reading.get, reading.get_many], ids=lambda read: read.__name__)
def test_H69_an_upload_at_every_line_of_a_read(read, step):
    """H69: rows leave the local log for the bucket between two lines; a read shows one state."""
    for script in reading.LOCAL_SCRIPTS.values():
        settings = {**reading.LOCAL, "upload_interval_ms": 1e6}
        assert at_every_line(read, reading.LOCAL_FIRST, script, step=step, **settings) > 15


def torn_newest(self, key, columns=None):
    """Read the memtable twice, as it was before."""
    entries = self._cut().versions(key)
    cut = self._cut()
    torn = SimpleNamespace(view=cut.view, tables=cut.tables, versions=lambda _: entries)
    return self._newest_in(key, torn, columns)


def test_H69_a_torn_view_is_found(monkeypatch):
    """Where rows and ingested segments are read one after the other, some line shows it."""
    code = torn_newest.__code__.replace(co_filename=View.newest.__code__.co_filename)
    monkeypatch.setattr(torn_newest, "__code__", code)
    monkeypatch.setattr(View, "newest", torn_newest)
    script = reading.SCRIPTS["delete, patched by a load"]
    with pytest.raises(AssertionError, match="what='get'"):
        at_every_line(reading.get, reading.FIRST, script)


def test_H69_a_replaced_overlay_is_found(monkeypatch):
    """Where a local writer's tables are read at two instants, some line shows it.

    Either check would do here: that no table was replaced, and that uploaded rows are left out.
    """
    monkeypatch.setattr(LocalBuffer, "is_newest", lambda self, view: True)
    monkeypatch.setattr(LocalBuffer, "first_lsn", lambda self, memtable: 0)
    settings = {**reading.LOCAL, "upload_interval_ms": 1e6}
    script = reading.LOCAL_SCRIPTS["uploaded, replaced, uploaded"]
    with pytest.raises(AssertionError, match="what='get'"):
        at_every_line(reading.get, reading.LOCAL_FIRST, script, **settings)
