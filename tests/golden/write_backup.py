"""Write a golden backup set: `python tests/golden/write_backup.py NAME.tar.xz`, in `backups`.

The archive has a set, a bucket in which a dropped name was restored from it, and the rows of both.
A release that changes their format adds one; none is ever written again.
"""

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import reef
from reef.jobs import backup, fold, ingest, restore


def write(root):
    """Write a set and a bucket; return the rows of the namespace at some LSNs."""
    db, target, rows = reef.open(str(root / "bucket")), root / "set", {}
    with db.writer("users", create=True, background=False) as writer:
        for number in range(40):
            writer.put(f"k{number:02d}", b"%d" % number)
        fold(db, "users")
        backup(db, "users", target)
        lsn = writer.delete("k05").lsn
        rows[lsn] = shown(db)
        writer.delete_range("k10", "k15")
        ingest(db, "users", [{"id": b"load", "value": b"ed"}])
        writer.refresh()
        lsn = writer.put("k20", b"later").lsn
        rows[lsn] = shown(db)
    backup(db, "users", target)
    db.drop("users")
    restore(target, db, "users")
    return rows


def shown(db):
    """Return all rows, as text."""
    with db.reader("users") as reader:
        return {key.decode(): value.decode() for key, value in reader.scan()}


def main(target):
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        expected = json.dumps(write(Path(folder)), sort_keys=True).encode()
        with tarfile.open(target, "w:xz") as archive:
            for name in ("bucket", "set"):
                archive.add(Path(folder) / name, name)
            entry = tarfile.TarInfo("expected.json")
            entry.size = len(expected)
            archive.addfile(entry, io.BytesIO(expected))


if __name__ == "__main__":
    main(sys.argv[1])
