"""A durable single put with a local log in front of the bucket, against one without.

Both write 100 bytes to a directory store on the same disk. The uploader works during the puts, as
it does in real life; so does whatever it costs them.
"""

import tempfile

import reef
from benchmarks.harness import Comparison, compare

VALUE = b"x" * 100


def run(rounds: int = 30) -> list[Comparison]:
    """One comparison: `local` against `object`."""
    with tempfile.TemporaryDirectory(dir=".") as root:
        db = reef.open(f"{root}/data")
        log = f"{root}/log"
        with (
            db.writer("near", durability="local", local_log=log, background=False) as near,
            db.writer("far", background=False) as far,
        ):
            return [
                compare(
                    'put, 100 bytes, durability="local"',
                    lambda n: _put(near, n),
                    'the same put, durability="object"',
                    lambda n: _put(far, n),
                    goal=None,
                    rounds=rounds,
                )
            ]


def _put(writer: reef.Writer, number: int) -> None:
    writer.put(f"key-{number:08}", VALUE)


if __name__ == "__main__":
    for comparison in run():
        print(comparison.row())
