"""H78: a writer that its program has dropped: its queue, its end, its role."""

import gc
import threading
import time
import weakref

import pytest

import reef
from reef.engine.local.buffer import LocalBuffer


def is_collected(writer):
    """Wait until a weak reference is dead, for up to a minute."""
    deadline = time.monotonic() + 60
    while writer() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return writer() is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("durability", ["object", "local"])
def test_H78_a_dropped_writer_lives_until_its_queue_is_empty(
    tmp_path, monkeypatch, durability, background
):
    """And no longer: then it is collected, with the threads of its background work."""
    db = reef.open(str(tmp_path / "data"))
    options = {"durability": durability, "background": background}
    if durability == "local":
        options["local_log"] = str(tmp_path / "log")
    writer = db.writer("users", **options)
    opened, target = threading.Event(), LocalBuffer if durability == "local" else type(db.store)
    method = "_write" if durability == "local" else "create"
    original = getattr(target, method)

    def held(self, *args, **kwargs):
        opened.wait(60)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(target, method, held)
    future = writer.put("a", b"1", wait=False)
    dropped = weakref.ref(writer)
    del writer
    gc.collect()
    assert dropped() is not None
    opened.set()
    assert future.result(60).ops == 1
    assert is_collected(dropped)


def test_H78_closing_a_database_releases_the_role_of_a_dropped_writer(tmp_path):
    """So it does for one that was opened and dropped again and again."""
    with reef.open(str(tmp_path)) as db:
        for n in range(3):
            db.writer("users", background=False).put(f"k{n}", b"1")
        gc.collect()
        with pytest.raises(reef.ConflictError):
            db.writer("users", take_over=False)
    with reef.open(str(tmp_path)).writer("users", take_over=False) as writer:
        assert writer.count() == 3


def test_H78_closing_a_database_leaves_a_role_that_another_writer_has(tmp_path):
    """The newer writer is at work: its role is not up for grabs."""
    with reef.open(str(tmp_path)) as db:
        db.writer("users", background=False).put("a", b"1")
        gc.collect()
        newer = reef.open(str(tmp_path)).writer("users", background=False)
        newer.put("b", b"2")
    with pytest.raises(reef.ConflictError):
        reef.open(str(tmp_path)).writer("users", take_over=False)
    newer.close()
