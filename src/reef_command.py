"""The command `reef`, from its first moment on: Ctrl-C is heard before anything is loaded.

To load the engine takes up to a second. An interrupt in the middle of that would surface wherever
an import happens to be: as a traceback, or as the failure of a package that is sound. This module
loads nothing, so it stands outside of the package; until the command has begun there is nothing to
clean up, and an interrupt just ends the process.
"""

import os
import signal
import sys

__all__ = ["main"]

EXIT_INTERRUPTED = 130
AS_JSON = '{"error": "Interrupted", "kind": "interrupted", "message": "interrupted", "hint": ""}'


def main() -> None:
    """Load the command line and run it."""
    # A shell's background job ignores interrupts, and goes on doing so.
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:
        signal.signal(signal.SIGINT, _leave)
    from reef.cli.main import main as run

    if heeds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(*_: object) -> None:
    words = " ".join(sys.argv)
    as_json = "--output json" in words or "--output=json" in words
    os.write(2, f"{AS_JSON if as_json else 'interrupted'}\n".encode())
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
