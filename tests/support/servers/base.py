"""What every server of the harness shares: a free port, a way to wait, a life cycle.

A server is described once (`SERVERS` in the package) and started at most once at a time:

    reason = server.available()     # None, or why it cannot be had on this machine
    server.start(directory)         # returns when it responds, or raises ServerError
    server.address                  # "127.0.0.1:23456"
    server.stop()                   # leaves no process behind; the directory is the caller's

A subclass says how to find its programs (`available`), how to start (`bring_up`) and when it
responds (`is_ready`). Everything binds to 127.0.0.1 and writes below its directory only.
"""

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.support.servers.process import STOP_TIMEOUT_S, Child, as_user, die_with_parent, launch

__all__ = [
    "HOST",
    "REPOSITORY",
    "Child",
    "Server",
    "ServerError",
    "Tool",
    "free_port",
    "http_status",
    "launch",
    "one_line",
    "run",
    "tail",
    "wait_until",
]

HOST = "127.0.0.1"
REPOSITORY = Path(__file__).resolve().parents[3]
INSTALL_HINT = "run: python -m tests.support.servers.install"

Command = Sequence[str | Path]
Env = Mapping[str, str]
NONE: Env = {}

# Below the range that the kernel gives to outgoing connections (32768 and up), so that none of
# them takes a port after it is picked and before its server binds it.
PORTS = range(20_000, 32_000)
PORT_ATTEMPTS_MAX = 200
# Not the shared generator: a test that seeds it must not make two sessions pick the same ports.
_chance = random.SystemRandom()
_ports_given: set[int] = set()


class ServerError(Exception):
    """A server did not start; the message ends with the tail of its logs."""


class Server:
    """One real server: how to find, start, reach and stop it."""

    name = ""
    start_timeout_s = 120.0
    stop_signal = signal.SIGTERM
    stop_timeout_s = STOP_TIMEOUT_S

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._launched: list[Callable[[], Child]] = []
        self.directory: Path | None = None
        self.port = 0
        self.start_s: float | None = None

    def available(self) -> str | None:
        """Why this machine cannot run it, or None."""
        raise NotImplementedError

    def version(self) -> str | None:
        """Its version, where that is cheap to know."""
        return None

    def bring_up(self) -> None:
        """Launch the processes; `directory` and `port` are set."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it responds to requests."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it was started and none of its processes has ended since."""
        return bool(self.children) and not any(child.has_exited() for child in self.children)

    def start(self, directory: Path) -> None:
        """Start in an empty directory and return when the server responds."""
        if self.children:
            raise ServerError(f"{self.name} is running already")
        if reason := self.available():
            raise ServerError(f"{self.name}: {reason}")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port, began_s = directory, free_port(), time.monotonic()
        try:
            self.bring_up()
            self.wait_until(self.is_ready, self.start_timeout_s)
        except BaseException:  # Ctrl-C too: half a server is no server
            self.stop()
            raise
        self.start_s = time.monotonic() - began_s

    def restart(self) -> None:
        """Stop the processes and start them again, with their data and on the same ports."""
        commands, self._launched = self._launched, []
        self.stop()
        for command in commands:
            command()
        self.wait_until(self.is_ready, self.start_timeout_s)

    def stop(self) -> None:
        """Stop the processes, the last one started first."""
        while self.children:
            self.children[-1].stop(self.stop_signal, self.stop_timeout_s)
            self.children.pop()

    def launch(self, argv: Command, *, log: str = "server", env: Env = NONE, user=None) -> Child:
        """Start one process of this server, at home in its directory."""
        home = {"HOME": str(self.directory), **env}
        log_path = self.directory / f"{log}.log"
        child = launch(argv, home, log_path, cwd=self.directory, user=user)
        self.children.append(child)
        self._launched.append(lambda: self.launch(argv, log=log, env=env, user=user))
        return child

    def run(self, argv: Command, *, log: str = "setup", env: Env = NONE, user=None) -> None:
        """Run a preparing program to its end, at home in the server's directory."""
        home = {"HOME": str(self.directory), **env}
        log_path = self.directory / f"{log}.log"
        run(argv, home, log_path, cwd=self.directory, user=user, timeout_s=self.start_timeout_s)

    def wait_until(self, check: Callable[[], bool], timeout_s: float) -> None:
        """Wait for `check`; the error of a wait in vain carries the logs' tail."""
        wait_until(check, timeout_s, what=self.name, children=self.children, logs=self.logs)

    def logs(self) -> list[Path]:
        """The log files that exist by now."""
        return sorted(self.directory.glob("*.log")) if self.directory else []

    def log_tail(self) -> str:
        """The ends of all logs."""
        return tail(self.logs())


class Tool(Server):
    """A program that tests call: found in the same manner as a server, with nothing to start."""

    def path(self) -> Path | None:
        """Path of the program."""
        raise NotImplementedError

    def start(self, directory: Path) -> None:
        """Nothing to start."""
        self.start_s = 0.0


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on and that was not given out before."""
    for _ in range(PORT_ATTEMPTS_MAX):
        port = _chance.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port not in _ports_given:
                _ports_given.add(port)
                return port
    raise ServerError(f"no free port found in {PORTS.start}..{PORTS.stop}")


def wait_until(
    check: Callable[[], bool],
    timeout_s: float,
    *,
    what: str = "condition",
    children: Iterable[Child] = (),
    logs: Callable[[], Iterable[Path]] = tuple,
    interval_s: float = 0.05,
) -> None:
    """Return once `check()` is true; raise when time is up or a child has ended."""
    deadline_s = time.monotonic() + timeout_s
    while not check():
        if any(child.has_exited() for child in children):
            raise ServerError(f"{what}: a process ended while it was starting\n{tail(logs())}")
        if time.monotonic() > deadline_s:
            raise ServerError(f"{what}: no response within {timeout_s:g} s\n{tail(logs())}")
        time.sleep(interval_s)


def run(
    argv: Command, env: Env, log_path: Path, *, cwd: Path, user: str | None, timeout_s: float
) -> None:
    """Run a program to its end; its failure carries the tail of its output."""
    try:
        with log_path.open("ab") as log:
            subprocess.run(
                [str(word) for word in argv],
                env={**os.environ, **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=True,
                preexec_fn=die_with_parent(),
                **as_user(user),
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(f"{one_line(error)}\n{tail([log_path])}") from error


def tail(paths: Iterable[Path], lines_max: int = 20, line_chars_max: int = 300) -> str:
    """The last lines of each file, under its name."""
    parts = []
    for path in paths:
        lines = path.read_text(errors="replace").splitlines()[-lines_max:]
        parts += [f"--- end of {path.name}", *(line[:line_chars_max] for line in lines)]
    return "\n".join(parts)


def one_line(error: object) -> str:
    """An error's text on one line, short enough for a summary."""
    return " ".join(str(error).split())[:300]


def http_status(address: str, path: str = "/", timeout_s: float = 5.0) -> int | None:
    """The status of a plain GET, or None without a response. Never through a proxy."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return response.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
