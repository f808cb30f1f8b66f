"""What `import reef` gives, and what handles say and survive."""

import pickle

import pytest

import reef


@pytest.mark.parametrize("name", ["Condition", "NamespaceInfo", "Transaction"])
def test_what_calls_give_has_a_public_name(name):
    """So that programs can write it into their own type hints."""
    assert name in reef.__all__
    assert getattr(reef, name).__name__ == name


def test_a_transaction_shows_its_state():
    """Where, in which state, with how much."""
    with reef.open("memory://").writer("users") as users:
        with users.transaction() as tx:
            tx.put("a", b"1")
            tx.delete("b")
            assert repr(tx) == "<Transaction on users, open, 2 operations>"
        assert repr(tx) == "<Transaction on users, committed at LSN 2, 2 operations>"
        tx = users.transaction()
        tx.rollback()
        assert repr(tx) == "<Transaction on users, ended, 0 operations>"


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("where", ["memory://", "directory"])
def test_a_database_can_be_pickled(where, proved, tmp_path):
    """The copy opens the same bucket; its metrics and events are its own."""
    db = reef.open(where if "://" in where else str(tmp_path))
    if proved:
        db.writer("users").put("k", b"v")
    copy = pickle.loads(pickle.dumps(db))
    assert copy.store.url == db.store.url
    assert copy.metrics is not db.metrics
    assert copy.events is not db.events
    with copy.writer("users") as users:
        assert users.get("k") == (b"v" if proved else None)
        users.put("l", b"w")
    assert db.reader("users").get("l") == b"w"
