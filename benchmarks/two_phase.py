"""What two-phase compare-and-swap costs next to a store's own: `python -m benchmarks.two_phase`.

Creates objects of 1 KiB one after the other, in turns, on a directory, on SeaweedFS, and on a
store with the latency of S3, each without and with every register; prints milliseconds and
requests. The table in docs/operations/two-phase.md comes from here.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from reef import stores
from reef.telemetry import RequestMeter
from reef.testing import open_store
from tests.support.registers import REGISTERS, StartedServers, register_url

BODY = b"x" * 1024


def bucket_of(
    kind: str, servers: StartedServers, folder: Path, name: str
) -> tuple[str, dict[str, Any]]:
    """Return URL and options of a fresh bucket."""
    if kind == "seaweedfs":
        server = servers.use(kind)
        server.make_bucket("bench")
        return f"s3://bench/{name}", {**server.options(), "listing": "unsorted"}
    if kind == "s3-standard":
        return "memory://", {"latency": kind}
    return str(folder / name), {}


def measured(store: stores.Store, creates: int) -> list[float]:
    """Return the milliseconds of each creation, after some that do not count."""
    times = []
    for number in range(creates + 5):
        start = time.perf_counter()
        assert store.create(f"wal/{number:06}", BODY).landed
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times[5:])


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--creates", type=int, default=100)
    arguments = parser.parse_args()
    print(
        "| store | register | median ms | p99 ms | requests of a creation |\n|---|---|---|---|---|"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reef-bench-")))
        folder.chmod(0o711)
        servers = StartedServers(folder, stack)
        for kind in ("directory", "seaweedfs", "s3-standard"):
            for register in ("none", *REGISTERS):
                name = f"{kind}-{register}"
                url, options = bucket_of(kind, servers, folder, name)
                if register != "none":
                    (folder / f"of-{name}").mkdir()
                    options["cas"] = register_url(servers, register, folder / f"of-{name}")
                meter = RequestMeter()
                times = measured(open_store(url, meter=meter, **options), arguments.creates)
                each = {k: round(n / len(times)) for k, n in meter.requests().items()}
                sent = " ".join(f"{n} {name.upper()}" for name, n in sorted(each.items()))
                p99 = times[int(len(times) * 0.99) - 1]
                print(
                    f"| {kind} | {register} | {statistics.median(times):.1f} | {p99:.1f} | {sent} |"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
