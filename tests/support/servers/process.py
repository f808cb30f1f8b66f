"""Child processes that cannot outlive the tests.

Three nets, each for children that the one before it misses:

1. `Child.stop()`: a polite signal, a bounded wait, then SIGKILL for the whole process group.
2. `atexit`: the same for every child that was not stopped.
3. The kernel's parent-death signal, for the day when the test process itself is killed with -9.

A child leads its own session, so that Ctrl-C in the terminal reaches the tests only, and they
stop their servers in order.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.02

# Loaded before any fork: between fork and exec a child must not take the loader's locks.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_OWNER_PID = os.getpid()
_running: list["Child"] = []


class Child:
    """One started process and the group that it leads."""

    def __init__(self, process: subprocess.Popen, log_path: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.log_path = log_path

    def has_exited(self) -> bool:
        """Whether the process has ended.

        It is polled, not reaped: until `stop()` reaps it, the kernel gives its pid to no
        other process, so that a signal to the group cannot hit a stranger.
        """
        if self._process.returncode is not None:
            return True
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, options) is not None
        except ChildProcessError:
            return True

    def stop(self, stop_signal: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the process and everything in its group. To stop twice is harmless."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, stop_signal)
            self._wait_for_exit(timeout_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(ValueError):
            _running.remove(self)

    def _wait_for_exit(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.has_exited() and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)


def launch(
    argv: Sequence[str | Path],
    env: Mapping[str, str],
    log_path: Path,
    *,
    cwd: Path | None = None,
    user: str | None = None,
) -> Child:
    """Start a child with `env` added to the environment and its output appended to a file.

    `user` drops root's rights. It is done by Python and not by setpriv or runuser, because a
    change of user clears the parent-death signal: it has to be set after the change.
    """
    if threading.current_thread() is not threading.main_thread():
        # The parent-death signal follows the thread that forked, not the process.
        raise RuntimeError("servers are started from the main thread: they die with the thread")
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [str(word) for word in argv],
            env={**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (it makes two calls, no locks)
            **as_user(user),
        )
    child = Child(process, log_path)
    _running.append(child)
    return child


def die_with_parent():
    """Return a pre-exec function that has the kernel kill the child when this process ends."""
    parent_pid = os.getpid()

    def bind_to_parent() -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent_pid:  # the parent died before the signal was set
            os.kill(os.getpid(), signal.SIGKILL)

    return bind_to_parent


def as_user(user: str | None) -> dict:
    """Popen's keywords that run a child as `user`, with that user's groups only."""
    if user is None:
        return {}
    import pwd

    entry = pwd.getpwnam(user)
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


@atexit.register
def stop_everything() -> None:
    """Stop all running children, newest first. A forked copy of the tests owns nothing."""
    if os.getpid() != _OWNER_PID:
        return
    for child in list(reversed(_running)):
        child.stop()
