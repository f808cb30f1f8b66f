"""The installed command as a process of its own, with pipes, signals and terminals."""

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

REEF = Path(sys.executable).parent / "reef"


def call(*words, **options):
    """Run the installed command; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [REEF, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


def start(*words, **options):
    """Start the installed command, with pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [REEF, *map(str, words)]
    return subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes)  # noqa: PLW1509 - one call


def heed_interrupts():
    """A shell's background job ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def call_on_terminal(*words, width=120):
    """Run the installed command on a terminal; return its exit code and output."""
    main, terminal = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width)}
    environ.pop("NO_COLOR", None)
    process = start(
        *words, stdin=terminal, stdout=terminal, stderr=terminal, env=environ, close_fds=True
    )
    os.close(terminal)
    seen = b""
    while True:
        ready, _, _ = select.select([main], [], [], 240)
        assert ready, "nothing came for four minutes"
        try:
            piece = os.read(main, 65536)
        except OSError:  # the last one has closed it
            break
        if not piece:
            break
        seen += piece
    os.close(main)
    return process.wait(timeout=240), seen.decode()
