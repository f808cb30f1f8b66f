"""The entry point of the command `reef`: handles Ctrl-C while modules are being imported.

Importing the engine takes up to a second. A KeyboardInterrupt in the middle would surface as a
traceback, or as the failed import of an intact package. This module imports nothing of Reef, so it
is outside of the package. Until the command runs there is nothing to clean up, and an interrupt
ends the process.
"""

import os
import signal
import sys

EXIT_INTERRUPTED = 130
AS_JSON = '{"error": "Interrupted", "kind": "interrupted", "message": "interrupted", "hint": ""}'


def main() -> None:
    """Import the command line and run it."""
    # The background job of a shell ignores SIGINT; that is not changed.
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
