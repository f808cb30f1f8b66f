"""The command `reef` without its start-up: a forked copy of a process that has imported it.

The documentation calls `reef` some 280 times, and importing the engine takes longer than most
of these commands do. Each call is still a process of its own, with the directory, environment
and streams of its caller; only a terminal's signals do not reach it. `tests/cli` runs the
installed command.

`python -m tests.support.forked_commands FOLDER DESCRIPTOR` serves; `FOLDER/reef` is the caller,
and the descriptor receives "ready".
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

STREAMS = 3
MESSAGE_BYTES_MAX = 1 << 20
CALLER = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
call = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(call).to_bytes(4, "big")], [0, 1, 2])
server.sendall(call)
code = server.recv(1)
sys.exit(code[0] if code else "the command ended without a code")
"""
PRELOADED = (
    *("duckdb", "pyarrow.compute", "pyarrow.csv", "pyarrow.dataset", "pyarrow.json"),
    *("pyarrow.parquet", "reef.cli.main", "reef.jobs", "reef.stores"),
)


@contextlib.contextmanager
def forked_commands(folder):
    """Serve `reef` in a folder to put in front of PATH."""
    reading, writing = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_commands", str(folder), str(writing)],
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            assert ready.read() == "ready", "the server of commands did not start"
        yield folder
    finally:
        server.terminate()
        server.wait()


def serve(folder, ready):
    """Fork for every caller, until terminated."""
    for name in PRELOADED:
        import_module(name)
    assert threading.active_count() == 1, "a fork would lose threads"
    path = folder / "socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(16)
    caller = folder / "reef"
    caller.write_text(CALLER.format(python=sys.executable, socket=str(path)))
    caller.chmod(0o755)
    os.write(ready, b"ready")
    os.close(ready)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _handle(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _handle(connection):
    """Run the command of one caller in a child, and send its code."""
    head, streams, _, _ = socket.recv_fds(connection, 4, STREAMS)
    call = b""
    while len(call) < int.from_bytes(head, "big"):
        call += connection.recv(MESSAGE_BYTES_MAX)
    command = os.fork()
    if command == 0:
        connection.close()
        _run(streams, *json.loads(call))
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(bytes([code % 256]))
    os._exit(0)


def _run(streams, arguments, folder, environ):
    """Become the command: with the caller's streams, directory, environment and arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - of the process
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = arguments
    code = 1
    try:
        import_module("reef_command").main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
