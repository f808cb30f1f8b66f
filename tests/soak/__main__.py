"""`make soak`: ten minutes on a real S3 server; says what it saw, fails if something is wrong."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.servers import SERVERS
from tests.soak.run import Soak


def main() -> int:
    """Start the server, soak, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--server", default="seaweedfs")
    arguments = parser.parse_args()
    server = SERVERS[arguments.server]
    with tempfile.TemporaryDirectory(prefix="reef-soak-") as folder:
        Path(folder).chmod(0o711)
        server.start(Path(folder) / "server")
        try:
            server.make_bucket("soak")
            notes = Path(folder) / "notes"
            notes.mkdir()
            quirks = {"seaweedfs": {"listing": "unsorted"}, "ceph": {"if_match": "bare"}}
            options = {**server.options(), **quirks.get(arguments.server, {})}
            soak = Soak("s3://soak/run", options, notes, arguments.seconds)
            print(json.dumps(soak.run(), indent=2))
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
