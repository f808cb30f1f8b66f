"""The installed command as others see it: exit codes, pipes, signals, terminals."""

import json
import os
import signal
import subprocess
import sys

import pytest

import reef
from reef.cli.main import run
from tests.cli.process import REEF, call, call_on_terminal, heed_interrupts, start


@pytest.fixture
def users(data):
    """Return a bucket with some thousands of users."""
    with reef.open(str(data)).writer("users", background=False) as writer:
        writer.upsert({"id": [b"u%05d" % n for n in range(20_000)], "value": [b"x" * 20] * 20_000})
    return data


# --- the main path, as a person walks it --------------------------------------------


def test_a_first_session(tmp_path):
    """Put, get, scan, fold, inspect: each a process of its own, in one directory."""
    assert call("put", "--create", "./data", "users", "u1", "Ada", cwd=tmp_path)[0] == 0
    assert call("get", "./data", "users", "u1", cwd=tmp_path) == (0, "Ada\n", "")
    code, _, err = call("put", "./data", "uesrs", "u2", "Bob", cwd=tmp_path)
    assert code == 1
    assert "Did you mean users? --create creates uesrs" in err
    code, out, _ = call("put", "./data", "users", "u2", "Bob", cwd=tmp_path)
    assert (code, out) == (0, "committed at LSN 4: 1 operation in users\n")
    assert call("index", "./data", "users", cwd=tmp_path)[0] == 0
    assert call("scan", "./data", "users", cwd=tmp_path)[1] == "id  value\nu1  Ada\nu2  Bob\n"
    assert call("health", "./data", "users", cwd=tmp_path)[0] == 0


def test_a_value_from_stdin(data):
    """All of it, line breaks and all."""
    body = os.urandom(100_000)
    process = start("put", "--create", data, "users", "k", "--from", "-", stdin=subprocess.PIPE)
    process.communicate(body, timeout=240)
    assert process.returncode == 0
    assert reef.open(str(data)).reader("users").get("k") == body


def test_exit_codes(users, cli):
    """0 fine, 1 error, 2 problems found, 64 usage: of the process, and of each command."""
    assert call("get", users, "users", "u00001")[0] == 0
    assert call("scan", users, "unknown")[0] == 1
    assert call("scan", users)[0] == 64
    assert cli("get", users, "users", "unknown").code == 1
    assert cli("scan", users, "not/a/name").code == 1
    assert cli("scan", users, "users", "--limit", "many").code == 64
    path = users / "namespaces/users/wal/00000000000000000002.wal"
    path.write_bytes(path.read_bytes()[:-1])
    assert call("health", users, "users")[0] == 2
    assert cli("inspect", users, "users", "--lsn", 2).code == 2
    assert cli("verify", users, "users").code == 2
    code, out, err = cli("index", users, "users", "--output", "json")
    assert (code, out, json.loads(err)["kind"]) == (2, "", "corruption")


def test_logs_go_to_stderr(data):
    """With -v, events are logged; stdout has the result alone."""
    code, out, err = call("-v", "put", "--create", data, "users", "u1", "Ada", "--output", "json")
    assert code == 0
    assert json.loads(out)["lsn"] == 2
    assert "opened namespace='users'" in err
    assert call("get", data, "users", "u1")[2] == ""


def test_a_log_is_left_as_it_was(data, capsys):
    """-v of one run in a process does not make the next one talk."""
    import logging

    before = list(logging.getLogger("reef").handlers)
    run(["-v", "put", str(data), "users", "u1", "Ada"])
    assert logging.getLogger("reef").handlers == before


# --- pipes --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_has_enough(users, form):
    """`reef scan … | head` is quiet, and no failure even with pipefail."""
    command = f"set -o pipefail; {REEF} scan {users} users --output {form} | head -n 2"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


def test_a_reader_that_wants_nothing(users):
    """Also where all that is printed fits into a buffer, and meets the closed pipe at the end."""
    for words in (("get", users, "users", "u00001"), ("stats", users, "users"), ("--help",)):
        with start(*words) as process:
            process.stdout.close()
            assert process.stderr.read() == b"", words
            assert process.wait(timeout=240) == 0, words


# --- Ctrl-C -------------------------------------------------------------------------

HOLD = """
import sys, reef, reef.cli.main as cli
from reef.runtime import REAL
from reef.stores import Wrapper

class Slow(Wrapper):
    def create(self, key, body):
        if "/wal/" in key:
            print("waiting", file=sys.stderr, flush=True)
            REAL.sleep(pauses_s.pop() if pauses_s else 1.0)
        return self.inner.create(key, body)

pauses_s, opened = [120.0], reef.api.open  # the first one lasts until it is interrupted
def wrapped(url, **options):
    db = opened(url, **options)
    db.store = Slow(db.store)
    return db
reef.api.open = wrapped
cli.main(sys.argv[1:])
"""


def test_interrupted_while_writing(data):
    """Ctrl-C during a PUT: exit code 130, no traceback, and a bucket that is whole."""
    with reef.open(str(data)).writer("users", background=False) as writer:
        writer.put("u1", b"Ada")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, "put", str(data), "users", "u2", "Bob", "--take-over"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,  # noqa: PLW1509 - one call
    )
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    db = reef.open(str(data))
    assert list(db.store.list("namespaces/users/leases/")) == []
    with db.writer("users", background=False) as writer:  # opens, replays, continues
        assert writer.get("u1") == b"Ada"
        writer.put("u3", b"Eve")
    assert dict(db.reader("users").scan(prefix="u"))[b"u3"] == b"Eve"


def test_interrupted_while_reading(users):
    """A pinned scan that is not read to its end releases its lease."""
    reef.open(str(users)).snapshot("users", "now")
    process = start("scan", users, "users", "--snapshot", "now", "--output", "json")
    process.stdout.readline()  # it fills the pipe, and waits
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert list(reef.open(str(users)).store.list("namespaces/users/leases/")) == []


def test_interrupted_for_programs(monkeypatch, capsys):
    """With --output json, the last word is JSON too."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("reef.cli.store.probe", interrupt)
    assert run(["store", "probe", "memory://", "--output", "json"]) == 130
    assert json.loads(capsys.readouterr().err.strip().splitlines()[-1])["kind"] == "interrupted"


# --- terminals ----------------------------------------------------------------------


def test_colour_on_a_terminal_only(users):
    """A person gets bold titles; a pipe gets none."""
    code, seen = call_on_terminal("snapshot", "list", users, "users")
    assert code == 0
    assert "\x1b[1m" in seen
    assert "\x1b[" not in call("snapshot", "list", users, "users")[1]


def test_no_colour_for_programs_on_a_terminal(users):
    """JSON is JSON wherever it is printed."""
    code, seen = call_on_terminal("stats", users, "users", "--output", "json")
    assert code == 0
    assert json.loads(seen)["name"] == "users"


def test_a_picture_that_fits_the_screen(users):
    """On a narrow terminal the bars are narrower, and no line is broken."""
    call("index", users, "users")
    _, seen = call_on_terminal("stats", users, "users", width=80)
    (bar,) = [line for line in seen.splitlines() if "█" in line]
    assert 20 <= bar.count("█") <= 32


def test_progress_on_a_terminal(users):
    """A bar with rate and time left while it works; none if stderr is not a terminal."""
    code, seen = call_on_terminal("index", users, "users")
    assert code == 0
    assert "folding users" in seen
    assert "tasks/s" in seen
    assert call("index", users, "users")[2] == ""
