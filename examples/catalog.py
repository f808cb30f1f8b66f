"""A catalog from end to end: sessions, snapshots, conflicts, maintenance.

    python examples/catalog.py                        a directory that is removed again
    python examples/catalog.py s3://bucket/prefix     a bucket; its credentials as usual

Any number of processes share it through its URL alone.
"""

import sys
import tempfile

import reef.catalog
from reef.catalog import CatalogSnapshot, Retention, WriteSession
from reef.errors import ConflictError


def main(url: str) -> None:
    """Run it at a URL."""
    catalog = reef.catalog.open(url, retention=Retention(lease_ttl_s=30.0))

    with catalog.session_write() as write:
        write.put("user:1", b"alice")
        write.put("user:2", b"bob")
        write.commit()

    snapshot = catalog.snapshot()
    with catalog.session_at(snapshot) as reader:
        value = reader.get("user:1")
    print(f"user:1 is {value.decode()} in the snapshot of transaction {snapshot.txn_id}")
    assert value == b"alice"

    latest = catalog.get_latest("user:2")
    print(f"user:2 is {latest.decode()} now")
    assert latest == b"bob"

    show_conflicts(catalog)
    show_transact(catalog)
    show_snapshot(url, snapshot)
    show_maintenance(catalog)


def show_conflicts(catalog: reef.catalog.Catalog) -> None:
    """Transactions on different keys both commit; one whose reads have changed raises."""
    with catalog.session_write() as first, catalog.session_write() as second:
        first.put("user:1", b"Alice")
        second.put("user:3", b"carol")
        first.commit()
        second.commit()
    print("two that touched nothing in common both committed")
    with catalog.session_write() as late:
        names = late.scan_range(prefix="user:")
        catalog.transact(lambda session: session.put("user:4", b"dave"))
        late.put("count", b"%d" % len(names))
        try:
            late.commit()
        except ConflictError as error:
            print(f"conflict: {error.message}")


def show_transact(catalog: reef.catalog.Catalog) -> None:
    """`transact` retries after a conflict, and never applies the changes twice."""

    def count(session: WriteSession) -> int:
        users = len(session.scan_range(prefix="user:"))
        session.put("count", b"%d" % users)
        return users

    print(f"counted {catalog.transact(count)} users")


def show_snapshot(url: str, snapshot: CatalogSnapshot) -> None:
    """A snapshot is plain data: another process reads the same state."""
    message = snapshot.to_dict()
    elsewhere = reef.catalog.open(url)
    with (
        elsewhere.session_at(CatalogSnapshot.from_dict(message)) as reader,
        reader.start_lease_keeper(),  # renews the lease of a long read
    ):
        pairs = reader.scan()
    print(f"elsewhere, transaction {message['txn_id']} still has {len(pairs)} users")


def show_maintenance(catalog: reef.catalog.Catalog) -> None:
    """Compact, collect garbage and verify; any process may, at any time."""
    compactor = catalog.compactor()
    checkpoint, _ = compactor.compact_and_gc()
    report = catalog.verify()
    print(f"checkpoint {checkpoint}: {report.keys} keys, {len(report.problems)} problems")
    commits = catalog.metrics.to_dict()["catalog.commit_seconds"]
    print(f"{commits['count']:.0f} commits, half of them within {commits['p50'] * 1000:.1f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
