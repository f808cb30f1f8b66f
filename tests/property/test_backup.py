"""Backups and restores in random histories."""

import pytest

from tests.property import backup_machine


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_of_backups(seed):
    """Whatever changes the source, every covered LSN and time is restored as it was (H48)."""
    assert backup_machine.run(seed) > 0
