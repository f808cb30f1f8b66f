"""The catalog on real S3 servers: the same semantics as in a directory."""

import threading
import uuid

import pytest

from reef import catalog as catalogs
from reef.errors import ConflictError
from tests.unit.catalog.conftest import AT_ONCE


def increment(session):
    """Raise the counter by one."""
    session.put("n", b"%d" % (int(session.get("n") or 0) + 1))


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("ministack", {}),
        ("ministack", {"if_match": "none"}),
        pytest.param("seaweedfs", {"listing": "unsorted"}, marks=pytest.mark.slow),
        pytest.param("ceph", {"if_match": "bare"}, marks=pytest.mark.slow),
    ],
    ids=["ministack", "without If-Match", "seaweedfs", "ceph"],
)
@pytest.mark.timeout(600)
def test_a_bucket_is_as_good_as_a_directory(servers, name, special):
    """Handles that know nothing of each other count, compact and collect on one bucket."""
    server = servers.use(name)
    server.make_bucket("catalogs")
    url, options = f"s3://catalogs/{uuid.uuid4().hex}", {**server.options(), **special}
    handles = [catalogs.open(url, retention=AT_ONCE, **options) for _ in range(3)]
    handles[0].transact(increment)
    threads = [
        threading.Thread(target=lambda each=each: [each.transact(increment) for _ in range(4)])
        for each in handles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handles[0].get_latest("n") == b"13"
    with handles[1].session_read() as session:
        handles[2].transact(increment)
        checkpoint, _ = handles[2].compactor().compact_and_gc()
        assert session.get("n") == b"13"
        session.heartbeat()
    handles[0].compactor().compact_and_gc()
    assert [info.key for info in handles[0].store.list("segments/")] == []
    assert handles[1].get_latest("n") == b"14"
    assert handles[1].snapshot().checkpoint_id == checkpoint
    assert catalogs.open(url, **options).verify().problems == []
    late = handles[0].session_write()
    increment(late)
    catalogs.open(url, **options).recreate(lambda: {"n": b"7"})
    with pytest.raises(ConflictError):
        late.commit()
    handles[1].transact(increment)
    assert handles[2].get_latest("n") == b"8"
    for kind in ("HEAD.json", "heads/", "segments/", "checkpoints/", "gc/"):
        handles[0].store.delete_many([info.key for info in handles[0].store.list(kind)])
    handles[1].transact(increment)
    assert [each.get_latest("n") for each in handles] == [b"1"] * 3
