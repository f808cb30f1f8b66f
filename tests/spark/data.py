"""Namespaces for the tests of Spark, and reads of them without it, as its processes would do."""

import pickle
import random

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

import reef
from reef.spark import ReefSource

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("text", pa.string()),
        ("vector", pa.list_(pa.float32(), 3)),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)


def rows(first, last, text="x"):
    """Return rows with growing keys and numbers, and text that does not compress to nothing."""
    numbers = range(first, last)
    chance = random.Random(first)
    return pa.table(
        {
            "id": [f"k{n:07d}" for n in numbers],
            "n": list(numbers),
            "text": [f"{text}{chance.getrandbits(800):0200x}" for _ in numbers],
            "vector": [[n, 0.5, -1.0] for n in numbers],
            "at": [n * 1_000_000 for n in numbers],
        },
        schema=SCHEMA,
    )


def folded(db, name, count, parts=1, **settings):
    """Make a namespace whose rows are in segments, folded in some parts."""
    db.create(name, SCHEMA)
    for part in range(parts):
        with db.writer(name) as writer:
            writer.upsert(rows(count * part // parts, count * (part + 1) // parts))
        reef.jobs.fold(db, name, **{"segment_bytes_max": 1 << 20, "group_bytes": 16384} | settings)


def history(db, name, seed, steps=12):
    """Write at random, fold at random: overlapping segments, tombstones, patches and a log."""
    chance = random.Random(seed)
    db.create(name, SCHEMA)
    with db.writer(name) as writer:
        for step in range(steps):
            change(writer, chance, step)
            if chance.random() < 0.3:
                settings = {"segment_bytes_max": 8192, "group_bytes": 1024}
                reef.jobs.fold(db, name, **settings)
        return dict(writer.scan())


def change(writer, chance, step):
    """Write one batch of some kind."""
    first = chance.randrange(300)
    last = first + chance.randrange(1, 120)
    kind = chance.choice(["upsert", "upsert", "patch", "delete", "delete_range"])
    if kind == "upsert":
        writer.upsert(rows(first, last, text=f"{step}-"))
    elif kind == "patch":
        writer.patch([{"id": f"k{n:07d}", "n": -step} for n in range(first, last)])
    elif kind == "delete":
        writer.delete(f"k{first:07d}")
    else:
        writer.delete_range(f"k{first:07d}", f"k{last:07d}")


class Planned:
    """A read that was planned as Spark does it: pickled from one process to the next."""

    def __init__(self, url, namespace, *, between=lambda: None, **options):
        given = {"path": str(url), "namespace": namespace}
        given |= {name.lower(): str(value) for name, value in options.items()}
        source = ReefSource(given)
        self.schema = source.schema()
        source = pickle.loads(pickle.dumps(source))
        between()
        self.reader = source.reader(self.schema)
        self.shares = self.reader.partitions()

    def batches(self, share):
        """Return the batches of a share's task."""
        reader, share = pickle.loads(pickle.dumps((self.reader, share)))
        return list(reader.read(share))

    def tables(self):
        """Return the rows of each share."""
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        return [pa.Table.from_batches(self.batches(share), arrow) for share in self.shares]

    def table(self):
        """Return all rows, in the order of the shares."""
        return pa.concat_tables(self.tables())

    def rows(self):
        """Return all rows by key."""
        return {row["id"]: row for row in self.table().to_pylist()}
