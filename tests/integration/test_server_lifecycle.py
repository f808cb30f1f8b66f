"""Servers start once, say why when they cannot, and never outlive the tests."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.servers import SERVERS
from tests.support.servers.base import (
    REPOSITORY,
    Server,
    ServerError,
    free_port,
    launch,
    wait_until,
)
from tests.support.servers.plugin import Servers
from tests.support.servers.proc import is_alive, processes_of

LAUNCHER = """
import sys, time
from pathlib import Path
from tests.support.servers.base import launch
user = sys.argv[2] or None
print(launch(["sleep", "600"], {}, Path(sys.argv[1]), user=user).pid, flush=True)
time.sleep(600)
"""

SESSION = """
import time
def test_waits(ministack, servers):
    print("PIDS", *[child.pid for child in ministack.children], ministack.directory, flush=True)
    time.sleep(600)
"""


class Absent(Server):
    """A server that no machine has."""

    name = "absent"

    def available(self):
        """Never."""
        return "it was never written"


class Broken(Server):
    """A server that says something and ends at once."""

    name = "broken"

    def available(self):
        """Always."""

    def bring_up(self):
        """A few last words."""
        self.launch(["sh", "-c", "echo the disk is on fire; exit 3"])

    def is_ready(self):
        """Never."""
        return False


class Stubborn(Broken):
    """A server that ignores polite signals and has a child that does so too."""

    def bring_up(self):
        """Two shells without ears."""
        deaf = "trap '' TERM; echo up; while :; do sleep 1; done"
        self.launch(["sh", "-c", f"(trap '' TERM; sleep 600) & {deaf}"])

    def is_ready(self):
        """As soon as it is deaf."""
        return "up" in self.log_tail()


@pytest.fixture
def home():
    """A directory that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="reef-servers-") as path:
        Path(path).chmod(0o711)
        yield Path(path)


def start_python(*argv):
    """A Python process whose output can be read line by line."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *argv]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=REPOSITORY,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 - no thread of ours runs here
    )


def _hear_interrupts():
    """A shell's background job ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("other_user", [False, True])
def test_child_dies_with_a_killed_parent(home, other_user):
    """kill -9 of the launching process ends the child too, also one that dropped root's rights."""
    if other_user and os.geteuid() != 0:
        pytest.skip("only root can start a child as another user")
    user = "nobody" if other_user else ""
    with start_python("-c", LAUNCHER, str(home / "log"), user) as parent:
        child_pid = int(parent.stdout.readline())
        assert is_alive(child_pid)
        parent.kill()
    wait_until(lambda: not is_alive(child_pid), 60, what="the orphan's end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_session_that_is_ended_leaves_no_server(tmp_path, number):
    """Whatever ends pytest, its servers end; their data goes too, where pytest has a say."""
    (tmp_path / "test_waits.py").write_text(SESSION)
    plugins = ["-p", "tests.support.servers.plugin", "-p", "no:cacheprovider"]
    argv = ["-m", "pytest", "-s", "-c", os.devnull, *plugins, str(tmp_path / "test_waits.py")]
    with start_python(*argv) as session:
        words = next(line for line in session.stdout if "PIDS" in line).split()
        pid, directory = int(words[-2]), Path(words[-1])
        session.send_signal(number)
        session.communicate(timeout=120)
    wait_until(lambda: not is_alive(pid), 60, what="the server's end")
    if number == signal.SIGKILL:
        shutil.rmtree(directory.parent)
    else:
        assert session.returncode == {signal.SIGTERM: 143, signal.SIGINT: 2}[number]
    assert not directory.parent.exists()


@pytest.mark.parametrize("name", ["seaweedfs", "rclone", "ministack", "postgresql", "azurite"])
def test_stop_leaves_no_process(home, servers, name):
    """After stop() nothing of the server runs, whichever sessions its processes opened."""
    servers.use(name)  # skips or fails where it cannot be had
    server = type(SERVERS[name])()
    server.start(home / name)
    leaders = [child.pid for child in server.children]
    assert server.running
    assert processes_of(home / name, leaders) >= set(leaders)
    server.stop()
    assert not server.running
    wait_until(
        lambda: not processes_of(home / name, leaders), 60, what="the end of the killed processes"
    )


def test_stop_kills_the_deaf(tmp_path):
    """A server that ignores SIGTERM is killed with its children, after a bounded wait."""
    server = Stubborn()
    server.stop_timeout_s = 0.2
    server.start(tmp_path / "stubborn")
    leaders = [child.pid for child in server.children]
    assert len(processes_of(tmp_path, leaders)) >= 2
    server.stop()
    wait_until(
        lambda: not processes_of(tmp_path, leaders), 60, what="the end of the killed processes"
    )


def test_failed_start_shows_the_log(tmp_path):
    """The error of a server that ends early carries its last words, and nothing stays."""
    server = Broken()
    with pytest.raises(ServerError, match=r"(?s)broken: a process ended.*the disk is on fire"):
        server.start(tmp_path / "broken")
    assert server.children == []


def test_waiting_is_bounded(tmp_path):
    """A condition that never comes true raises, with the end of the log."""
    log_path = tmp_path / "server.log"
    log_path.write_text("still thinking\n")
    with pytest.raises(ServerError, match=r"(?s)x: no response within 0.1 s.*still thinking"):
        wait_until(lambda: False, 0.1, what="x", logs=lambda: [log_path])


@pytest.mark.parametrize("kind", [Absent, Broken])
@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip), ("1", pytest.fail)])
def test_what_cannot_be_had_skips_or_fails(monkeypatch, kind, ci, outcome):
    """At a desk a missing server skips its tests; in CI it fails them. It is tried only once."""
    monkeypatch.setitem(SERVERS, kind.name, kind())
    monkeypatch.setenv("CI", ci)
    pool = Servers()
    for _ in range(2):
        with pytest.raises(outcome.Exception, match=f"{kind.name} cannot be had"):
            pool.use(kind.name)
    assert [line.split(":")[0] for line in pool.summary()] == [kind.name]
    pool.stop()


def test_ports_are_given_once():
    """No two servers of a session get the same port."""
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_threads_may_not_launch(tmp_path):
    """A child dies with the thread that started it, so that only the main thread may."""
    caught = []

    def try_it():
        try:
            launch(["true"], {}, tmp_path / "log")
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
