"""A whole database on Azure's emulator, and on Google's service as documented."""

import pytest

import reef
from reef.errors import FencedError
from reef.jobs import compact, fold, sweep, verify
from tests.support.gcs_service import GcsService

NAME = "users"


@pytest.fixture(params=["az", "gs"])
def db(request):
    """Give a database in an empty bucket of each."""
    if request.param == "az":
        azurite = request.getfixturevalue("servers").use("azurite")
        azurite.make_container("databases")
        yield reef.open("az://databases/here", **azurite.options())
        return
    service = GcsService()
    yield reef.open("gs://bucket/here", **service.options)
    service.close()


def test_a_database_lives_there(db):
    """Commits, folds, a compaction, a sweep, deep verification, and a reader of it all."""
    expected = {}
    with db.writer(NAME, background=False) as writer:
        for part in range(3):
            for number in range(5):
                key = b"%d-%d" % (number, part)
                expected[key] = b"v" * 100
                writer.put(key, expected[key])
            writer.delete(b"0-%d" % part)
            expected.pop(b"0-%d" % part)
            fold(db, NAME)
        with db.reader(NAME) as reader:
            assert dict(reader.scan()) == expected
        assert compact(db, NAME, full=True).inputs == 3
    sweep(db, NAME, apply=True)
    assert verify(db, NAME, deep=True).problems == []
    with db.reader(NAME) as reader:
        assert dict(reader.scan()) == expected
        assert reader.get(b"0-1") is None


def test_a_second_writer_fences_the_first(db):
    """Exclusion holds over the conditions of each service."""
    first = db.writer(NAME, background=False)
    first.put("k", b"1")
    with db.writer(NAME, background=False) as second:
        second.put("k", b"2")
        with pytest.raises(FencedError):
            first.put("k", b"3")
        assert second.get("k") == b"2"
    first.close()
