"""Work in a forked child, with a time limit."""

import os
import signal


def in_child(work):
    """Run `work` in a forked child with a time limit; return its exit code and output."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a stalled machine is no hang
        code = 1
        try:
            os.write(writing, repr(work()).encode())
            code = 0
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        output = stream.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output
