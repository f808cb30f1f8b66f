"""Ranges of files: large ones stay open, and are never read under a name that is not theirs."""

import os

import pytest

from reef.errors import InvalidInputError, NotFoundError
from reef.stores.local import OPEN_FILES_MAX, LocalStore

SIZE = 300_000


def open_paths():
    """Return the paths of the files that this process has open."""
    folder = "/proc/self/fd"
    paths = []
    for name in os.listdir(folder):
        try:
            paths.append(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
    return paths


def test_a_replaced_object_is_read_again(tmp_path):
    """Another file under the same name: its bytes are read, not those of the open one."""
    store = LocalStore(str(tmp_path))
    store.put("a", b"1" * SIZE)
    assert store.get_ranges("a", [(0, 2), (SIZE - 1, SIZE)]) == [b"11", b"1"]
    store.put("a", b"2" * SIZE)
    assert store.get_range("a", 0, 2) == b"22"
    other = tmp_path / "other"
    other.write_bytes(b"3" * SIZE)
    os.rename(other, tmp_path / "a")
    assert store.get_range("a", 0, 2) == b"33"


def test_a_deleted_object_is_missing(tmp_path):
    """By this process or by another one, and its file is closed."""
    store = LocalStore(str(tmp_path))
    for delete in (lambda: store.delete("a"), lambda: os.unlink(tmp_path / "a")):
        store.put("a", b"1" * SIZE)
        assert store.get_range("a", 5, 6) == b"1"
        delete()
        with pytest.raises(NotFoundError):
            store.get_range("a", 0, 2)
        with pytest.raises(NotFoundError):
            store.get_ranges("a", [(0, 2)])
    assert not [path for path in open_paths() if str(tmp_path) in path]


def test_a_truncated_object_ends_early(tmp_path):
    """Its size is checked at every read."""
    store = LocalStore(str(tmp_path))
    store.put("a", b"1" * SIZE)
    assert store.get_range("a", SIZE - 2, SIZE) == b"11"
    os.truncate(tmp_path / "a", 1000)
    with pytest.raises(InvalidInputError):
        store.get_range("a", SIZE - 2, SIZE)
    assert store.get_range("a", 0, 3) == b"111"


def test_few_files_stay_open(tmp_path):
    """Those that were opened first are closed."""
    store = LocalStore(str(tmp_path))
    for number in range(OPEN_FILES_MAX + 20):
        store.put(f"o{number}", b"1" * SIZE)
        assert store.get_range(f"o{number}", 0, 1) == b"1"
    assert len([path for path in open_paths() if str(tmp_path) in path]) <= OPEN_FILES_MAX
