"""`make soak`: ten minutes on a real S3 server; prints a report, fails if a check does.

`STORE=two-phase` soaks a server that ignores every condition, with a register.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.soak.run import Soak
from tests.support.registers import REGISTERS, StartedServers, register_url, unconditional_bucket

BUCKET = "soak"


def main() -> int:
    """Start the server, soak, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--server", default="seaweedfs")
    parser.add_argument("--store", choices=("native", "two-phase"), default="native")
    parser.add_argument("--register", choices=REGISTERS, default="sqlite")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reef-soak-")))
        folder.chmod(0o711)
        servers = StartedServers(folder, stack)
        if arguments.store == "native":
            options = native_options(servers.use(arguments.server))
        else:
            options = unconditional_bucket(servers, BUCKET)
            options["cas"] = register_url(servers, arguments.register, folder)
        notes = folder / "notes"
        notes.mkdir()
        soak = Soak(f"s3://{BUCKET}/run", options, notes, arguments.seconds)
        print(json.dumps(soak.run(), indent=2))
    return 0


def native_options(server) -> dict:
    """Make the bucket on a server with conditions of its own; return how to open it."""
    server.make_bucket(BUCKET)
    quirks = {"seaweedfs": {"listing": "unsorted"}, "ceph": {"if_match": "bare"}}
    return {**server.options(), **quirks.get(server.name, {})}


if __name__ == "__main__":
    sys.exit(main())
