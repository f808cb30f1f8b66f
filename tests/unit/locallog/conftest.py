"""The golden directories, unpacked once for each run of the tests."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[2] / "golden" / "local-log" / "cases.tar.xz"


class Case:
    """One golden directory, and its content as the Go library reads it."""

    def __init__(self, path):
        self.path = path
        self.expected = json.loads((path / "expected.json").read_text())

    def copy(self, target):
        """Return a copy that may be changed."""
        return Path(shutil.copytree(self.path / "wal", target))

    def segments(self):
        """Return the meta store's record of each segment."""
        return self.expected["meta_before"]["Segments"]


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """Return all golden cases by name."""
    target = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(target, filter="data")
    return {path.name: Case(path) for path in sorted(target.iterdir())}
