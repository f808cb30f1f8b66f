"""Write a golden bucket: `python tests/golden/write_bucket.py tests/golden/buckets/NAME.tar.xz`.

Runs on any release, with its public API only, and stores the rows that this release reads back.
Later releases must read the same (`test_buckets.py`). A release that adds a format, or a new kind
of object, adds a bucket; none is ever written again.
"""

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa

import reef
import reef.catalog
from reef.jobs import BulkJob, compact, fold, ingest, sweep

SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("x", pa.float64()), ("tags", pa.list_(pa.string()))]
)


def write_plain(db):
    """Keys and values: in segments and in the log; deletes, ranges, a keyed batch."""
    with db.writer("plain", background=False) as writer:
        for number in range(60):
            writer.put(f"k{number:03d}", b"first %d" % number)
        fold(db, "plain")
        writer.delete("k005")
        writer.delete_range("k010", "k015")
        fold(db, "plain")
        compact(db, "plain", full=True)
        db.snapshot("plain", "kept")
        writer.put("k020", b"second", idempotency_key="once")
        fold(db, "plain")
        db.cursor("plain", "follower").commit()
        writer.delete_range("k030", "k033")
        writer.put("k031", b"third")


def write_table(db):
    """Columns: upserts, patches, a later column, bulk loads; the last of all of them unfolded."""
    db.create("table", SCHEMA, key="id")
    with db.writer("table", background=False) as writer:
        writer.upsert(
            [{"id": f"r{n}", "n": n, "x": n / 2, "tags": ["a", str(n)]} for n in range(9)]
        )
        writer.patch([{"id": "r1", "n": 100}, {"id": "r2", "tags": None}])
        writer.patch([{"id": "missing", "n": 1}], idempotency_key="a count")
        fold(db, "table")
        writer.patch([{"id": "missing", "n": 2}, {"id": "r3", "n": 2}], idempotency_key="another")
        ingest(db, "table", [{"id": f"s{n}", "n": n} for n in range(5)], idempotency_key="load")
        fold(db, "table")
        db.alter("table", SCHEMA.append(pa.field("added", pa.bool_())))
        writer.patch([{"id": "r1", "added": True}])
        writer.upsert([{"id": "r8", "n": 8}])
        ingest(db, "table", [{"id": "t0", "n": 0, "added": False}])


def write_search(db):
    """Filter, vector and text indexes, with centroids; rows above them in the log."""
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("v", pa.list_(pa.float32(), 4)),
            ("n", pa.int64()),
            ("s", pa.string()),
            ("body", pa.string()),
        ]
    )
    db.create(
        "search",
        schema,
        indexes=[
            reef.vector_index("v", metric="cosine", rows_min=10, lists=8),
            reef.filter_index("n", rows_min=10),
            reef.filter_index("s", rows_min=10),
            reef.text_index("body", language="english", positions=True, rows_min=10),
        ],
    )
    words = ("coral", "reef", "fish", "swimming", "the", "sea")
    rows = [
        {
            "id": f"d{n:04d}",
            "v": [n % 7 - 3.0, n % 5 - 2.0, n % 3 - 1.0, 1.0],
            "n": n % 10 if n % 11 else None,
            "s": f"value {n * 7919 % 2003}",
            "body": " ".join(words[(n * k) % 6] for k in range(1, 2 + n % 5)),
        }
        for n in range(2000)
    ]
    ingest(db, "search", rows)
    fold(db, "search")
    reef.jobs.build_indexes(db, "search")
    with db.writer("search", background=False) as writer:
        writer.delete("d0003")
        writer.patch([{"id": "d0005", "v": [9.0, 9.0, 9.0, 9.0]}])
        writer.upsert([{"id": "new", "v": [1.0, 0.0, 0.0, 0.0], "body": "a new reef"}])


def searched(db):
    """Return results of searches by index."""
    with db.reader("search") as reader:
        near = {"vector": ("v", [1.0, 0.5, 0.0, 0.2]), "columns": []}
        found = [
            reader.search(**near, k=5),
            reader.search(**near, where="n = 4 AND s > 'value 1'", k=5),
            reader.search(text=("body", "reef swim"), columns=[], k=5),
            reader.search(text=("body", '"coral reef"'), columns=[], k=5),
        ]
        plan = reader.search(**near, explain=True)["plan"]
    return {"plan": plan, "keys": [table["id"].to_pylist() for table in found]}


def write_names(db):
    """A namespace that was swept, one that is dropped, and one that was created again."""
    for name in ("swept", "dropped", "again"):
        with db.writer(name, background=False) as writer:
            writer.put("old", name.encode())
        fold(db, name)
    compact(db, "swept", full=True)
    sweep(db, "swept", apply=True)
    db.drop("dropped")
    db.drop("again")
    db.create("again")
    with db.writer("again", background=False) as writer:
        writer.put("new", b"life")


def write_backfills(db):
    """Loads with `live_wins`: one that is folded, one in the log, and one that is open."""
    db.create("backfilled", SCHEMA, key="id")
    with db.writer("backfilled", background=False) as writer:
        first = BulkJob(db, "backfilled", live_wins=True)
        writer.upsert([{"id": "put", "n": 1}])
        writer.delete("deleted")
        writer.patch([{"id": "patched", "n": 7}])
        fold(db, "backfilled")
        second = BulkJob(db, "backfilled", live_wins=True)
        writer.refresh()
        keys = ("deleted", "new", "patched", "put")
        first.commit(first.stage([{"id": key, "n": 5, "x": 0.5} for key in keys]))
        fold(db, "backfilled")
        writer.refresh()
        writer.delete("new")
        BulkJob(db, "backfilled", live_wins=True).let_go()
        second.commit(second.stage([{"id": key, "n": 6} for key in ("new", "newer")]))


def write_catalog(url):
    """Transactions before and after a checkpoint."""
    catalog = reef.catalog.open(url)
    for number in range(4):
        catalog.transact(lambda session, number=number: session.put(f"c{number}", b"%d" % number))
    catalog.compactor().compact_once()
    catalog.transact(lambda session: session.delete("c1"))
    catalog.transact(lambda session: session.put("c9", b"9"))


def shown(db, url):
    """Return all that can be read, as JSON values; also called by the test."""
    names = sorted(db.namespaces())
    found = {"namespaces": names, "dropped": sorted(db.namespaces(dropped=True)), "rows": {}}
    for name in names:
        with db.reader(name) as reader:
            table = reader.scan_arrow().read_all()
            found["rows"][name] = plain(table.to_pylist())
            found.setdefault("schema", {})[name] = str(table.schema.remove_metadata())
            found.setdefault("last_lsn", {})[name] = reader.last_lsn
    with db.reader("plain", snapshot="kept") as reader:
        found["snapshot"] = plain(reader.scan_arrow().read_all().to_pylist())
    found["cursors"] = db.cursors("plain")
    catalog = reef.catalog.open(url)
    found["catalog"] = plain(list(catalog.scan_latest()))
    found["transactions"] = catalog.snapshot().txn_id
    if "search" in names:
        found["searched"] = searched(db)
    return found


def plain(value):
    """Return a value as JSON has it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def main(target):
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        root, url = Path(folder) / "bucket", str(Path(folder) / "bucket" / "own-catalog")
        db = reef.open(str(root))
        write_plain(db)
        write_table(db)
        write_search(db)
        write_names(db)
        write_backfills(db)
        write_catalog(url)
        expected = json.dumps(shown(db, url), indent=1, sort_keys=True).encode()
        with tarfile.open(target, "w:xz") as archive:
            archive.add(root, "bucket")
            entry = tarfile.TarInfo("expected.json")
            entry.size = len(expected)
            archive.addfile(entry, io.BytesIO(expected))


if __name__ == "__main__":
    main(sys.argv[1])
