"""Names with several lives (H65): a sample of `python -m tests.lives`, and the machine itself."""

import pytest

from reef.engine.history import as_of
from tests.lives import histories
from tests.lives.histories import Step, draw, play, shorten
from tests.lives.machine import HistoryFailed, run


@pytest.mark.parametrize("seed", range(8))
def test_H65_every_life_of_a_name_is_as_its_model_says(seed):
    """Whatever is written, loaded, folded, compacted, swept, dropped, undropped and created again:
    the newest rows, those at every LSN, generation and time, snapshots and changes are those of
    one life, and a rebuild without manifests shows the newest."""
    play(seed)


def test_histories_create_names_again_and_read_them():
    """The drawn histories have several lives, loads and sweeps."""
    machine = run([
        Step("put", {"key": "a", "x": 1, "y": 2}),
        Step("snapshot", {"name": "s"}),
        Step("drop", {}),
        Step("create", {"wide": True}),
        Step("load", {"keys": ["a"], "x": 7, "replace": False, "name": None, "op": "put"}),
        Step("sweep", {"wait_s": 3600.0, "retained_s": 0.0}),
    ])  # fmt: skip
    assert machine.life.number == 2
    assert machine.life.rows == {"a": {"id": "a", "x": 7, "y": None, "z": None}}
    names = [{step.name for step in draw(seed)} for seed in range(50)]
    assert sum({"drop", "create", "load"} <= drawn for drawn in names) > 10


def test_a_wrong_read_is_found_and_its_history_is_short(monkeypatch):
    """A bug is planted: an as-of read replays one object too few."""
    original = as_of.PointInTime.includes

    def one_too_few(self, slot):
        return original(self, slot) and slot.lsn != self.last_lsn

    monkeypatch.setattr(as_of.PointInTime, "includes", one_too_few)
    with pytest.raises(HistoryFailed) as found:
        [play(seed) for seed in range(10)]
    assert len(found.value.steps) <= 3
    assert "as of LSN" in str(found.value)


def test_shortening_keeps_the_failure(monkeypatch):
    """Steps that are not needed go; those that are stay."""

    def fake(steps):
        names = [step.name for step in steps]
        if "drop" in names and "create" in names:
            raise HistoryFailed(steps, len(steps) - 1, AssertionError("LSN 7 is wrong"))

    monkeypatch.setattr(histories, "run", fake)
    steps = [Step(name, {}) for name in ("put", "drop", "fold", "fold", "create", "put")]
    with pytest.raises(HistoryFailed) as failed:
        fake(steps)
    assert [step.name for step in shorten(failed.value).steps] == ["drop", "create"]
