"""A durable single put over a real S3 server, against obstore's bare create-only PUT.

The peer sends the same bytes over the same client library to the same server, with nothing
around it: no checks, no deadline, no retry by Reef.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

import reef
from benchmarks.harness import Comparison, compare
from tests.support.registers import StartedServers

GOAL = 1.25
SERVER = "seaweedfs"
BUCKET = "put"


def run(rounds: int = 60) -> list[Comparison]:
    """One comparison: a put against the PUT that it needs."""
    value = os.urandom(100)
    with (
        _bucket() as (options, bare),
        reef.open(f"s3://{BUCKET}/reef", **options) as db,
        db.writer("bench", background=False) as ours,
    ):
        key = f"namespaces/bench/wal/{ours.put('k', value).lsn:020}.wal"
        body = os.urandom(db.store.head(key).size)
        return [
            compare(
                f"durable put of 100 bytes, {SERVER}",
                lambda n: ours.put(b"k%d" % n, value),
                "obstore's create-only PUT of the same bytes",
                lambda n: obstore.put(bare, f"raw/wal/{n:08}", body, mode="create"),
                goal=GOAL,
                rounds=rounds,
                calls=10,
            )
        ]


@contextmanager
def _bucket() -> Iterator[tuple[dict[str, Any], S3Store]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        server = StartedServers(folder.absolute(), stack).use(SERVER)
        server.make_bucket(BUCKET)
        bare = S3Store(
            BUCKET,
            endpoint=server.endpoint,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            region=server.region,
            client_options={"allow_http": True},
        )
        yield {**server.options(), "listing": "unsorted"}, bare


if __name__ == "__main__":
    for comparison in run():
        print(comparison.row())
