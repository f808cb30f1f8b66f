"""A small `create` on the directory store against the same system calls by hand."""

import os
import tempfile

from benchmarks.harness import Comparison, compare
from reef import stores
from reef.stores.local import LocalStore

GOAL = 1.25


def run(rounds: int = 30) -> list[Comparison]:
    """Compare both the bare store and the stack that users get."""
    body = os.urandom(1024)
    comparisons = []
    for name in ("LocalStore.create, 1 KiB", "reef.stores.open(…).create, 1 KiB"):
        with tempfile.TemporaryDirectory(dir=".") as root:
            bare = name.startswith("LocalStore")
            store = LocalStore(f"{root}/reef") if bare else stores.open(f"{root}/reef")
            os.makedirs(f"{root}/raw/wal")
            comparisons.append(
                compare(
                    name,
                    lambda n, store=store: _check(store.create(f"wal/{n:08}", body).landed),
                    "open, write, fsync, link, directory fsync",
                    lambda n, root=root: raw_create(f"{root}/raw", f"wal/{n:08}", body),
                    goal=GOAL,
                    rounds=rounds,
                )
            )
    return comparisons


def raw_create(root: str, key: str, body: bytes) -> None:
    """Write the same bytes as durably, by plain system calls."""
    temporary, path = f"{root}/temporary", f"{root}/{key}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, body)
    os.fsync(fd)
    os.close(fd)
    os.link(temporary, path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    os.unlink(temporary)


def _check(landed: bool) -> None:
    if not landed:
        raise AssertionError("a create in a fresh directory must land")
