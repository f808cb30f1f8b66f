"""H78: queued writes at interpreter exit are flushed, within a bound, with a warning."""

import subprocess
import sys

import pytest

import reef

QUEUE = """
import sys
import time
import reef

db = reef.open(sys.argv[1])
writer = db.writer("users", background=False, **eval(sys.argv[2]))
create = type(db.store).create


def slow(self, key, body):
    # The 300 commits take longer than the program.
    time.sleep(0.05)
    return create(self, key, body)


type(db.store).create = slow
futures = [writer.put(f"k{n:04}", b"v" * 100, wait=False) for n in range(300)]
"""


def run(program, *words):
    """Run a program in an interpreter of its own; return the finished process."""
    command = [sys.executable, "-W", "default", "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('boom')"])
def test_H78_queued_writes_are_flushed_at_exit(tmp_path, end):
    """However the program ends, every queued write is durable, and a warning names the writer."""
    done = run(QUEUE + end, tmp_path / "data", {})
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1), done.stderr
    assert "ResourceWarning" in done.stderr
    assert "<Writer users" in done.stderr
    assert reef.open(str(tmp_path / "data")).reader("users").count() == 300


def test_H78_queued_writes_of_a_local_writer_are_flushed_at_exit(tmp_path):
    """They are on the local disk at least: the next writer uploads the rest."""
    log = {"durability": "local", "local_log": str(tmp_path / "log")}
    done = run(QUEUE, tmp_path / "data", log)
    assert done.returncode == 0, done.stderr
    with reef.open(str(tmp_path / "data")).writer("users", **log) as writer:
        assert writer.count() == 300


def test_H78_a_closed_writer_warns_of_nothing(tmp_path):
    """Nor does one whose futures are done, or one that was fenced."""
    for end in ("writer.close()", "writer.flush()", "[f.result() for f in futures]"):
        done = run(QUEUE + end, tmp_path / "data", {})
        assert (done.returncode, done.stderr) == (0, "")
    done = run(
        QUEUE + "writer.flush()\ndb.writer('users', background=False)", tmp_path / "data", {}
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKED = """
import os

if not (child := os.fork()):
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.flush()
"""


def test_H78_a_forked_child_flushes_nothing(tmp_path):
    """The queue is its parent's: the child says nothing, and the parent's writes are durable."""
    done = run(QUEUE + FORKED, tmp_path / "data", {})
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
    assert "lost" not in done.stderr
    assert reef.open(str(tmp_path / "data")).reader("users").count() == 300


STUCK = """
import time
from reef.engine.handles import writer as module

module.EXIT_FLUSH_S = 0.5
store = type(writer._committer.log._store)
store.create = lambda self, key, body: time.sleep(60)
"""


def test_H78_the_flush_at_exit_is_bounded(tmp_path):
    """A store that does not respond holds the process for no longer, and the loss is reported."""
    open_writer, put = QUEUE.rsplit("\n", 2)[0], QUEUE.rsplit("\n", 2)[1]
    done = run(f"{open_writer}\n{STUCK}\n{put}", tmp_path / "data", {})
    assert done.returncode == 0
    assert "queued writes to users were lost at exit" in done.stderr


DROPPED = """
import sys
import time
import reef

db = reef.open(sys.argv[1])


def load(db):
    writer = db.writer("users", **eval(sys.argv[2]))
    create = type(db.store).create

    def slow(self, key, body):
        # The commits take longer than the program.
        time.sleep(0.05)
        return create(self, key, body)

    type(db.store).create = slow
    return [writer.put(f"k{n:04}", b"v" * 100, wait=False) for n in range(300)]

"""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("end", ["load(db)", "load(db); del db", "load(db); sys.exit(3)"])
def test_H78_a_dropped_writer_is_flushed_at_exit(tmp_path, end, background):
    """The queue keeps it alive; its writes are durable, and a warning names it."""
    done = run(DROPPED + end, tmp_path / "data", {"background": background})
    assert done.returncode == (3 if "exit" in end else 0), done.stderr
    assert "ResourceWarning" in done.stderr
    assert "<Writer users" in done.stderr
    assert reef.open(str(tmp_path / "data")).reader("users").count() == 300


def test_H78_a_dropped_writer_with_a_local_log_is_flushed_at_exit(tmp_path):
    """Its queue is on the local disk at least."""
    log = {"durability": "local", "local_log": str(tmp_path / "log")}
    done = run(DROPPED + "load(db)", tmp_path / "data", log)
    assert done.returncode == 0, done.stderr
    with reef.open(str(tmp_path / "data")).writer("users", **log) as writer:
        assert writer.count() == 300


def test_H78_closing_a_database_flushes_dropped_writers(tmp_path):
    """Every future is done when `close` returns, and the role is released."""
    end = "with db: futures = load(db)\nprint(sum(f.done() for f in futures))"
    done = run(DROPPED + end, tmp_path / "data", {})
    assert (done.stdout.strip(), done.stderr) == ("300", "")
    reef.open(str(tmp_path / "data")).writer("users", take_over=False).close()


ENDS = {
    "open": "db = reef.open(sys.argv[1]); writer = db.writer('users'); writer.put('a', b'1')",
    "queued": "writer = reef.open(sys.argv[1]).writer('users'); writer.put('a', b'1', wait=False)",
    "dropped": "reef.open(sys.argv[1]).writer('users', background=False).put('a', b'1')",
}


@pytest.mark.parametrize("end", ENDS)
def test_H78_the_role_is_released_at_exit(tmp_path, end):
    """A program that ends without close() is no crash: the next one need not take over."""
    done = run("import sys, reef\n" + ENDS[end], tmp_path)
    assert done.returncode == 0, done.stderr
    with reef.open(str(tmp_path)).writer("users", take_over=False) as writer:
        assert writer.get("a") == b"1"


def test_H78_a_role_that_another_writer_has_is_not_released_at_exit(tmp_path):
    """Nor is the hint of the newer writer's close replaced."""
    end = f"""
with reef.open({str(tmp_path)!r}).writer("users") as newer:
    newer.put("b", b"2")
"""
    done = run(f"import sys, reef\n{ENDS['open']}{end}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    reef.open(str(tmp_path)).writer("users", take_over=False).close()


def test_H78_a_bucket_that_is_gone_is_not_made_again_at_exit(tmp_path):
    """The directory of a program that has removed it stays away."""
    bucket = tmp_path / "bucket"
    done = run(f"import sys, shutil, reef\n{ENDS['open']}\nshutil.rmtree({str(bucket)!r})", bucket)
    assert done.returncode == 0, done.stderr
    assert not bucket.exists()


REFUSED = """
import atexit

from reef.errors import InternalError


def refuse(self, key, body):
    raise InternalError("refused")


fail = lambda: setattr(type(writer._committer.log._store), "create", refuse)
writer._flush_queued = (lambda flush: lambda s: (fail(), flush(s)))(writer._flush_queued)
"""


def test_H78_a_queued_write_that_is_rejected_at_exit_is_reported(tmp_path):
    """The store refuses it during the flush: the error is printed, with the loss."""
    done = run(QUEUE + REFUSED, tmp_path / "data", {})
    assert done.returncode == 0
    assert "queued writes to users were lost at exit: " in done.stderr
