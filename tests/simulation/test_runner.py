"""The ledger of seeds that have run, and the plan of those that have not."""

import pytest

from tests.simulation import ledger
from tests.simulation.ledger import Covered, merged, missing
from tests.simulation.runner import CHUNK_SEEDS, Chunk, Report, plan, run_chunk
from tests.simulation.scenarios import ROUGH, SCENARIOS, racing_creators_with_a_bug


def test_rows_of_one_commit_that_touch_become_one():
    """Failed seeds are kept; rows of another commit or scenario stay apart."""
    rows = [
        Covered("native", "a", 100, 199, "c1", (150,)),
        Covered("native", "a", 0, 99, "c1", (7,)),
        Covered("native", "a", 200, 299, "c2"),
        Covered("native", "b", 200, 299, "c1"),
        Covered("native", "a", 201, 210, "c1"),
    ]
    assert merged(rows) == [
        Covered("native", "a", 0, 199, "c1", (7, 150)),
        Covered("native", "a", 201, 210, "c1"),
        Covered("native", "a", 200, 299, "c2"),
        Covered("native", "b", 200, 299, "c1"),
    ]


def test_missing_seeds_are_those_of_no_row():
    """Whatever the commit; rows of another store or scenario do not count."""
    rows = [
        Covered("native", "a", 5, 9, "c1"),
        Covered("native", "a", 8, 12, "c2"),
        Covered("native", "a", 30, 40, "c1"),
        Covered("two-phase", "a", 0, 99, "c1"),
        Covered("native", "b", 0, 99, "c1"),
    ]
    assert missing(rows, "native", "a", range(35)) == [range(5), range(13, 30)]
    assert missing(rows, "native", "a", range(6, 12)) == []
    assert missing(rows, "native", "c", range(3)) == [range(3)]


def test_the_ledger_is_read_as_it_was_written(tmp_path):
    """Text around the table stays as it is."""
    path = tmp_path / "evidence.md"
    path.write_text(f"before\n\n{ledger.HEADING}\n\ntext\n\n{ledger.COLUMNS}\nafter\n")
    first = Covered("native", "a", 0, 99, "c1", (3, 17))
    ledger.add([first], path)
    ledger.add([Covered("two-phase", "a", 0, 9, "c1")], path)
    assert ledger.read(path) == [first, Covered("two-phase", "a", 0, 9, "c1")]
    text = path.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith("|\n\nafter\n")


def test_the_committed_ledger_can_be_read():
    """Every row of docs/evidence.md is of a known store and scenario."""
    text = ledger.LEDGER.read_text()
    section = text[text.index(ledger.HEADING) :].partition("\n## ")[0]
    rows = ledger.read()
    assert len(rows) == section.count("\n| native") + section.count("\n| two-phase")
    assert {row.scenario for row in rows} <= SCENARIOS.keys()


def test_scenarios_take_turns():
    """The one with the fewest seeds catches up first; covered seeds are left out."""
    rows = [Covered("native", "folders_race", 0, CHUNK_SEEDS - 1, "c1")]
    names = ["folders_race", "racing_creators"]
    chunks = plan("native", names, range(3 * CHUNK_SEEDS), rows)
    first, second, third = (
        range(start, start + CHUNK_SEEDS) for start in range(0, 3 * CHUNK_SEEDS, CHUNK_SEEDS)
    )
    assert chunks == [
        Chunk("native", "racing_creators", first),
        Chunk("native", "folders_race", second),
        Chunk("native", "racing_creators", second),
        Chunk("native", "folders_race", third),
        Chunk("native", "racing_creators", third),
    ]


def test_a_failure_is_reported_with_its_seed(monkeypatch, capsys):
    """The seeds after it run too."""
    monkeypatch.setitem(SCENARIOS, "planted", (racing_creators_with_a_bug, ROUGH))
    result = run_chunk(Chunk("native", "planted", range(200)))
    assert len(result.failures) > 1
    report = Report(record=False)
    report.add(result)
    assert report.failures == len(result.failures)
    printed = capsys.readouterr().err
    for seed in result.failures:
        assert f"SCENARIO=planted SEED={seed} SEEDS=1 " in printed


@pytest.mark.parametrize("store", ["native", "two-phase"])
def test_a_chunk_runs_all_its_seeds(store):
    """Without failures, on either kind of store."""
    result = run_chunk(Chunk(store, "racing_creators", range(20)))
    assert result.failures == {}
    assert result.cpu_s > 0
