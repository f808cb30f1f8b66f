"""A short soak at a steady rate of commits; `python -m tests.soak.commit_rate` has the long one."""

from reef.config import BackgroundSettings
from tests.soak.commit_rate import RateSoak


def test_H75_the_fold_keeps_up_with_the_commits():
    """H75: the unfolded log is bounded, though background work is limited to few requests."""
    background = BackgroundSettings(poll_interval_s=0.05, requests_per_s=20)
    figures = RateSoak("memory://", 500, 4.0, background).run()
    assert figures["puts"] >= 500
    assert figures["unfolded_objects_max"] < 1500, figures
    assert figures["background_failures"] == 0
