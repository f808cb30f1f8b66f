"""Sessions: reads, staged changes, conflicts and ends."""

import gc
import pickle
import warnings
from dataclasses import replace

import pytest

from reef import catalog as catalogs
from reef.catalog import JSON, Catalog, CatalogSnapshot
from reef.errors import ClosedError, ConflictError, ErrorKind, InvalidInputError, NotFoundError
from reef.stores.local import LocalStore
from tests.unit.catalog.conftest import AT_ONCE, put


def test_a_commit_becomes_visible_at_once(catalog):
    """All of it after the commit, nothing of it before."""
    with catalog.session_write() as session:
        session.put("user:1", b"alice")
        session.put(b"user:2", b"bob")
        assert catalog.scan_latest() == []
        receipt = session.commit()
    assert receipt.txn_id == 1
    assert catalog.get_latest("user:1") == b"alice"
    assert catalog.scan_latest() == [(b"user:1", b"alice"), (b"user:2", b"bob")]


def test_reads_include_staged_changes(catalog):
    """Staged puts and deletes override the snapshot; the local reads return staged changes only."""
    put(catalog, a=b"1", b=b"2", c=b"3")
    with catalog.session_write() as session:
        session.put("b", b"20")
        session.delete("c")
        session.put("d", b"4")
        assert [session.get(key) for key in "abcde"] == [b"1", b"20", None, b"4", None]
        assert session.scan() == [(b"a", b"1"), (b"b", b"20"), (b"d", b"4")]
        assert session.scan_range("b", "d") == [(b"b", b"20")]
        assert session.scan_range(prefix="d") == [(b"d", b"4")]
        assert session.get_local("a") is None
        assert session.get_local("b") == b"20"
        assert session.scan_local() == [(b"b", b"20"), (b"c", None), (b"d", b"4")]
        assert session.scan_local("c", "d") == [(b"c", None)]


def test_a_session_stays_at_its_snapshot(catalog):
    """What others commit is not seen, before and after a compaction."""
    put(catalog, a=b"1")
    with catalog.session_read() as session:
        put(catalog, a=b"2", b=b"3")
        catalog.compactor().compact_and_gc()
        put(catalog, a=None)
        assert session.get("a") == b"1"
        assert session.scan() == [(b"a", b"1")]
        assert session.snapshot.txn_id == 1


@pytest.mark.parametrize(
    ("read", "other", "conflicts"),
    [
        (lambda s: s.get("a"), "a", True),
        (lambda s: s.get("a"), "b", False),
        (lambda s: s.get("missing"), "missing", True),
        (lambda s: s.scan_range("a", "c"), "bb", True),
        (lambda s: s.scan_range("a", "c"), "c", False),
        (lambda s: s.scan_range(prefix="x/"), "x/1", True),
        (lambda s: s.scan(), "zzz", True),
        (lambda s: None, "mine", True),
    ],
)
def test_what_conflicts(catalog, read, other, conflicts):
    """A key that was read or written, or one in a range that was read, there or not."""
    put(catalog, a=b"1", b=b"2")
    with catalog.session_write() as session:
        read(session)
        session.put("mine", b"m")
        put(catalog, **{other: b"theirs"})
        if conflicts:
            with pytest.raises(ConflictError, match="transaction 2 changed"):
                session.commit()
        else:
            assert session.commit().txn_id == 3
    assert (catalog.get_latest("mine") == b"m") is not conflicts


@pytest.mark.parametrize("is_known", [False, True])
def test_a_compaction_is_no_conflict(catalog, is_known):
    """A commit that lost the head to a checkpoint keeps its segment and continues; also where the
    same process has compacted, and knows the head that is newer than its session's."""
    put(catalog, a=b"1")
    with catalog.session_write() as session:
        session.put("a", session.get("a") + b"+")
        other = catalog if is_known else Catalog(catalog.store)
        other.compactor().compact_once()
        session.commit()
    assert catalog.get_latest("a") == b"1+"
    assert catalog.verify().orphans == 0


def test_a_session_that_changed_nothing_commits_nothing(catalog):
    """Only reads: nothing is written, and nothing can conflict."""
    put(catalog, a=b"1")
    with catalog.session_write() as session:
        session.get("a")
        put(catalog, a=b"2")
        assert session.commit().txn_id == 1
    assert catalog.snapshot().txn_id == 2


def test_end_drops_staged_changes(catalog):
    """Neither end() nor leaving the block commits."""
    with catalog.session_write() as session:
        session.put("a", b"1")
    assert catalog.get_latest("a") is None
    with pytest.raises(ClosedError):
        session.put("a", b"1")
    with pytest.raises(ClosedError):
        session.commit()
    session.end()  # twice is fine


def test_a_leaked_session_warns(catalog):
    """Who drops a session without ending it hears of it."""
    held = [catalog.session_write()]
    with pytest.warns(ResourceWarning, match="WriteSession of a catalog was dropped"):
        held.clear()
    ended = catalog.session_read()
    ended.end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ended
        gc.collect()


def test_a_snapshot_travels(catalog, store):
    """As plain values to another process, which reads the same state."""
    put(catalog, a=b"1")
    put(catalog, b=b"2")
    named = catalog.snapshot().to_dict()
    assert {"head_tag", "txn_id", "last_segment_seq", "checkpoint_seq", "checkpoint_id"} <= set(
        named
    )
    put(catalog, a=b"3")
    with Catalog(store).session_at(CatalogSnapshot.from_dict(named)) as session:
        assert session.scan() == [(b"a", b"1"), (b"b", b"2")]
    with pytest.raises(InvalidInputError):
        CatalogSnapshot.from_dict({"txn_id": "many"})


def test_a_collected_snapshot_is_refused(catalog):
    """A discarded state is rejected when the session begins."""
    put(catalog, a=b"1")
    old = catalog.snapshot()
    put(catalog, a=b"2")
    catalog.compactor().compact_and_gc()
    with pytest.raises(NotFoundError) as refused:
        catalog.session_at(old)
    assert refused.value.kind is ErrorKind.COLLECTED
    assert list(catalog.store.list("leases/")) == []


def test_transact_returns_and_retries(catalog):
    """The function runs again after a conflict, and its result is returned."""
    put(catalog, n=b"1")
    calls = []

    def change(session):
        value = int(session.get("n"))
        calls.append(value)
        if len(calls) == 1:
            put(catalog, n=b"10")
        session.put("n", b"%d" % (value + 1))
        return value

    assert catalog.transact(change) == 10
    assert calls == [1, 10]
    assert catalog.get_latest("n") == b"11"


def test_transact_does_not_commit_an_ended_session(catalog):
    """A function that commits or ends the session itself is called once."""

    def commit(session):
        session.put("a", b"%d" % (int(session.get("a") or 0) + 1))
        session.commit()
        return "done"

    assert catalog.transact(commit) == "done"
    assert catalog.transact(lambda session: session.put("a", b"x") or session.end()) is None
    assert catalog.get_latest("a") == b"1"


def test_transact_passes_other_errors_on(catalog):
    """An error of the function is raised, and nothing is committed."""

    def change(session):
        session.put("a", b"1")
        raise KeyError("no")

    with pytest.raises(KeyError):
        catalog.transact(change)
    assert catalog.get_latest("a") is None


def test_json_values(store):
    """With the JSON codec values are what JSON can say; without, they are bytes."""
    catalog = Catalog(store, codec=JSON)
    catalog.transact(lambda s: s.put("a", {"x": [1, None]}))
    assert catalog.get_latest("a") == {"x": [1, None]}
    assert catalog.scan_latest() == [(b"a", {"x": [1, None]})]
    with catalog.session_write() as session:
        with pytest.raises(InvalidInputError):
            session.put("b", {1, object()})
        session.put("b", 1)
        assert session.scan_local() == [(b"b", 1)]
    with Catalog(store).session_write() as session, pytest.raises(InvalidInputError):
        session.put("a", "text")


@pytest.mark.parametrize("key", ["", b"", "x" * 65_536, 7, "\ud800"])
def test_keys_that_cannot_be(catalog, key):
    """A key has 1 to 65,535 bytes; text is UTF-8."""
    with catalog.session_write() as session, pytest.raises(InvalidInputError):
        session.put(key, b"")


def test_a_segment_has_a_bound(catalog, monkeypatch):
    """Staging too much raises before anything is written."""
    monkeypatch.setattr("reef.catalog.catalog.SEGMENT_BYTES_MAX", 100)
    with catalog.session_write() as session, pytest.raises(InvalidInputError, match="stages"):
        session.put("a", b"x" * 100)


def test_a_key_that_is_staged_twice_counts_once(catalog, monkeypatch):
    """The bound is for what would be written."""
    monkeypatch.setattr("reef.catalog.catalog.SEGMENT_BYTES_MAX", 1000)
    with catalog.session_write() as session:
        for number in range(10):
            session.put("a", b"%d" % number * 500)
        with pytest.raises(InvalidInputError):
            session.put("b", b"x" * 500)
        session.delete("a")
        session.put("b", b"x" * 500)
        session.commit()
    assert catalog.scan_latest() == [(b"b", b"x" * 500)]


def test_prefixes_are_catalogs_of_their_own(store):
    """Two catalogs in one bucket know nothing of each other."""
    one, other = Catalog(store, prefix="catalog"), Catalog(store, prefix="mine/")
    put(one, a=b"1")
    put(other, a=b"2")
    assert (one.get_latest("a"), other.get_latest("a")) == (b"1", b"2")
    assert {info.key.split("/")[0] for info in store.list()} == {"catalog", "mine", "store"}


def test_a_catalog_is_sent_to_another_process(tmp_path):
    """It travels with its store and its settings, and its cache stays behind."""
    catalog = catalogs.open(str(tmp_path / "bucket"), codec=JSON, cache=1000)
    catalog.transact(lambda s: s.put("a", 1))
    other = pickle.loads(pickle.dumps(catalog))
    assert other.get_latest("a") == 1
    assert other.cache.bytes_max == 1000


def test_a_bucket_with_a_register(tmp_path):
    """Where a register decides creates, heads and plans are numbered, and all is the same."""
    options = {"cas": f"sqlite:///{tmp_path / 'register.db'}", "retention": AT_ONCE}
    one, other = (catalogs.open(str(tmp_path / "bucket"), **options) for _ in range(2))
    for number in range(3):
        put(one, n=b"%d" % number)
        put(other, m=b"%d" % number)
    with one.session_read() as session:
        put(other, n=None)
        other.compactor().compact_and_gc()
        session.heartbeat()
        assert session.scan() == [(b"m", b"2"), (b"n", b"2")]
    one.compactor().compact_and_gc()
    assert list(one.store.list("segments/")) == []
    assert one.scan_latest() == [(b"m", b"2")]
    assert other.verify().problems == []


def test_a_bucket_without_a_catalog_is_an_empty_one(store):
    """Reads write nothing, and return nothing."""
    catalog = Catalog(store)
    assert catalog.get_latest("a") is None
    assert catalog.scan_latest() == []
    assert catalog.snapshot().txn_id == 0
    assert catalog.verify().problems == []
    assert list(store.list()) == []


@pytest.mark.parametrize("numbered", [False, True], ids=["If-Match", "numbered"])
def test_the_registry_of_a_bucket_is_a_catalog_at_its_url(tmp_path, numbered):
    """`<root>/catalog` can be opened like any other: read, without writing, and written."""
    root = tmp_path / "bucket"
    store = LocalStore(root)
    if numbered:
        store.capabilities = replace(store.capabilities, if_match=False)
    put(Catalog(store, prefix="catalog"), a=b"1")
    inner = LocalStore(root / "catalog")
    before = sorted(info.key for info in store.list())
    with Catalog(inner) as catalog:
        assert catalog.get_latest("a") == b"1"
        assert catalog.snapshot().txn_id == 1
        assert catalog.verify().keys == 1
        assert sorted(info.key for info in store.list()) == before
        if not numbered:
            put(catalog, b=b"2")
            assert Catalog(store, prefix="catalog").get_latest("b") == b"2"
            assert catalog.get_latest("b") == b"2"
