"""A pytest plugin that starts real servers when a test first asks for one.

    def test_something(ceph): ...             # or: servers.use("ceph")

Each server starts at most once in a session. One that cannot be had, or that does not start,
skips the test with the reason; where CI is set, it fails the test, so that a green build has
really seen every server. All are stopped at the end, also after Ctrl-C and SIGTERM.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import SERVERS, TOOLS, Server, ServerError
from tests.support.servers.base import one_line


class Servers:
    """The servers of one session: started when asked for, and what became of each."""

    def __init__(self) -> None:
        self.used: dict[str, Server] = {}
        self.refused: dict[str, str] = {}
        self._home: Path | None = None

    def use(self, name: str) -> Server:
        """The running server (or found tool) of that name; else the test is skipped or fails."""
        if name not in self.used and name not in self.refused:
            self._start(name)
        if reason := self.refused.get(name):
            skip_or_fail(f"{name} cannot be had: {reason}")
        return self.used[name]

    def stop(self) -> None:
        """Stop all of them, the last one first, and remove their data."""
        for server in reversed(self.used.values()):
            server.stop()
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def summary(self) -> list[str]:
        """One line for each server that was asked for."""
        lines = [describe(server) for server in self.used.values()]
        return lines + [f"{name}: not to be had: {why}" for name, why in self.refused.items()]

    def _start(self, name: str) -> None:
        server = (SERVERS | TOOLS)[name]
        if reason := server.available():
            self.refused[name] = reason
            return
        try:
            server.start(self._folder() / name)
        except ServerError as error:
            self.refused[name] = str(error)
        else:
            self.used[name] = server

    def _folder(self) -> Path:
        """Not below pytest's own: that is closed to the other users that some servers run as."""
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="reef-servers-"))
            self._home.chmod(0o711)
        return self._home


def skip_or_fail(reason: str) -> None:
    """Fail where every server must be there, skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason.splitlines()[0])


def describe(server: Server) -> str:
    """Name, version and start-up time."""
    version = server.version() or ""
    started = f", up in {server.start_s:.1f} s" if server.start_s else ""
    return f"{server.name} {version}".rstrip() + started


@contextlib.contextmanager
def sigterm_ends_the_session() -> Iterator[None]:
    """Turn SIGTERM into an orderly end of pytest, so that fixtures are torn down."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    owner_pid = os.getpid()

    def end_session(number: int, frame: object) -> None:
        if os.getpid() != owner_pid:  # a forked child of a test: it just dies, as it expects to
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        pytest.exit("SIGTERM", returncode=128 + number)

    previous = signal.signal(signal.SIGTERM, end_session)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


SERVERS_KEY = pytest.StashKey[Servers]()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """The session's servers, by name."""
    pool = Servers()
    request.config.stash[SERVERS_KEY] = pool
    with sigterm_ends_the_session():
        try:
            yield pool
        finally:
            pool.stop()


def _server_fixture(name: str):
    @pytest.fixture(scope="session", name=name)
    def server(servers: Servers) -> Server:
        return servers.use(name)

    server.__doc__ = f"The session's {name}."
    return server


ceph = _server_fixture("ceph")
seaweedfs = _server_fixture("seaweedfs")
ministack = _server_fixture("ministack")
rclone = _server_fixture("rclone")
moto = _server_fixture("moto")
azurite = _server_fixture("azurite")
dynalite = _server_fixture("dynalite")
postgresql = _server_fixture("postgresql")
mariadb = _server_fixture("mariadb")
java17 = _server_fixture("java17")
strace = _server_fixture("strace")


LINES_KEY = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist has no terminal: it sends home which servers it has seen."""
    pool = session.config.stash.get(SERVERS_KEY, None)
    worker_output = getattr(session.config, "workeroutput", None)
    if pool is not None and worker_output is not None:
        worker_output["servers"] = pool.summary()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the lines that a worker has sent."""
    lines = node.config.stash.setdefault(LINES_KEY, [])
    lines.extend(f"{line} ({node.gateway.id})" for line in node.workeroutput.get("servers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which servers the session has really seen."""
    stash = terminalreporter.config.stash
    pool = stash.get(SERVERS_KEY, None)
    lines = stash.get(LINES_KEY, []) + (pool.summary() if pool is not None else [])
    if not lines:
        return
    terminalreporter.section("servers")
    for line in sorted(lines):
        terminalreporter.line(one_line(line))
