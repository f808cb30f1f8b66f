"""`kill -9` at random while a directory is written: nothing torn, nothing acknowledged lost."""

import json
import subprocess
import sys

import pytest

from reef.stores.local import LocalStore
from tests.crash.kill_worker import check_directory


def _rounds(root, kills, seed):
    """Run the worker, which forks writers and kills them; return the acknowledgements."""
    command = [sys.executable, "-m", "tests.crash.kill_worker", root, str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_writers_tear_and_lose_nothing(tmp_path, seed):
    """H7: 200 writers are killed within at least as many creates, while a reader reads."""
    report = _rounds(str(tmp_path), kills=200, seed=seed)
    assert report["killed"] == 200, "some writers ended before they were killed"
    assert len(report["acknowledged"]) >= 200
    check_directory(str(tmp_path), report)


def test_leftovers_of_killed_writers_are_swept(tmp_path):
    """Temporary files of the dead are not listed, and abort_stale removes them."""
    _rounds(str(tmp_path), kills=40, seed=3)
    left = [p for p in (tmp_path / ".tmp").iterdir() if p.is_file()]
    store = LocalStore(str(tmp_path))
    before = [info.key for info in store.list()]
    assert store.abort_stale(3600) == 0, "young ones may belong to the living"
    assert store.abort_stale(0) == len(left)
    assert [p for p in (tmp_path / ".tmp").iterdir() if p.is_file()] == []
    assert [info.key for info in store.list()] == before
