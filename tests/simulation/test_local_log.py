"""The scenario of the local log is worth its time: each of these bugs is found by it."""

import pytest

from reef.engine.handles import local_writer
from reef.engine.local import open as opening
from reef.engine.local import stream, uploader
from reef.engine.local.open import LocalOpening
from reef.engine.local.stream import UPLOADED
from reef.manifest import edits
from reef.manifest.dedup import StreamHistory
from reef.testing import SimulationFailed, simulate
from tests.simulation.copied_log_scenarios import copies_of_a_log
from tests.simulation.local_log_scenarios import a_machine_comes_back
from tests.simulation.scenarios import POWER_CUTS


def fold_forgets_marks(patch):
    """H63: a fold leaves out how far a local log was uploaded."""
    patch.setattr(edits, "advance_marks", lambda marks, found: dict(marks))


def uploads_without_marks(patch):
    """An upload does not say what of the local log is in it."""
    pending = uploader.Pending

    def without(*parts, mark, **words):
        return pending(*parts, **words)

    patch.setattr(uploader, "Pending", without)


def no_check_after_a_takeover(patch):
    """Apply pending batches, whether or not another process had the role meanwhile."""
    patch.setattr(LocalOpening, "_check_nothing_pending", lambda self, log, identity, found: None)


def notes_more_than_was_uploaded(patch):
    """The local log believes that all in it is in the bucket."""

    def truncate(front):
        front.log.set_uint64(UPLOADED, front.last_index)

    patch.setattr(uploader, "truncate", truncate)
    patch.setattr(local_writer, "truncate", truncate)
    patch.setattr(opening, "truncate", truncate)


@pytest.mark.parametrize(
    "bug",
    [
        fold_forgets_marks,
        uploads_without_marks,
        no_check_after_a_takeover,
        notes_more_than_was_uploaded,
    ],
)
def test_H63_a_missing_protection_is_found(monkeypatch, bug):
    """H63: some history within a hundred seeds loses a write, or has it twice, or over a rival."""
    bug(monkeypatch)
    with pytest.raises(SimulationFailed):
        simulate(a_machine_comes_back, range(2, 100), chaos=POWER_CUTS)


def marks_are_indexes(patch):
    """H71: a mark says how far, and not of which entries."""
    patch.setattr(StreamHistory, "is_proven", property(lambda self: False))


def a_shorter_log_is_committed(patch):
    """H71: a log that ends below the mark is taken for an older image without a check."""
    agrees = stream._agrees

    def or_short(entries, history):
        return next(iter(entries(history.mark)), None) is None or agrees(entries, history)

    patch.setattr(stream, "_agrees", or_short)


@pytest.mark.parametrize("bug", [marks_are_indexes, a_shorter_log_is_committed])
def test_H71_a_missing_protection_is_found(monkeypatch, bug):
    """H71: some history of copied logs loses an acknowledged write."""
    bug(monkeypatch)
    with pytest.raises(SimulationFailed):
        simulate(copies_of_a_log, range(100), chaos=POWER_CUTS)


def test_H71_copies_of_a_log_lose_nothing():
    """H71: copied and restored directories, uploads in flight, takeovers, power cuts, returns."""
    assert simulate(copies_of_a_log, range(12), chaos=POWER_CUTS) == 12
