"""Leftovers of crashes in a catalog on a two-phase store are removed by its collection (H23)."""

import pytest

from reef.catalog import Catalog
from reef.catalog import upkeep as leftovers
from reef.paths import CatalogNames
from reef.stores import ReadBack
from reef.stores.memory import MemoryStore
from reef.stores.two_phase import TwoPhase
from reef.stores.two_phase.register import SqliteRegister, is_temporary, new_record
from tests.unit.catalog.conftest import AT_ONCE, put

NAMES = CatalogNames("")


@pytest.fixture
def parts(tmp_path):
    """A bucket, its register, and a catalog in it that has a checkpoint."""
    bucket = MemoryStore()
    register = SqliteRegister(str(tmp_path / "register.db"), "bucket")
    catalog = Catalog(ReadBack(TwoPhase(bucket, register)), retention=AT_ONCE)
    for number in range(3):
        put(catalog, **{f"k{number}": b"v"})
    catalog.compactor().compact_once()
    return bucket, register, catalog


def leave(bucket, name):
    """Leave the source of a process that crashed before its insert."""
    source = new_record(bucket.runtime, name, b"never inserted").source
    bucket.put(source, b"never inserted")
    return source


def test_h23_old_sources_and_records_of_decided_names_are_removed(parts, monkeypatch):
    """Of segments up to the checkpoint, of heads and plans up to the newest; others stay."""
    bucket, register, catalog = parts
    decided = [
        leave(bucket, NAMES.segment(2, bucket.runtime.ulid())),
        leave(bucket, f"{NAMES.heads}{1:020}"),
    ]
    opened = [
        leave(bucket, NAMES.segment(99, bucket.runtime.ulid())),
        leave(bucket, f"{NAMES.heads}{99:020}"),
    ]
    gone = new_record(bucket.runtime, NAMES.segment(1, bucket.runtime.ulid()), b"deleted")
    register.insert(gone)
    register.commit(gone)

    def left():
        return {info.key for info in bucket.list() if is_temporary(info.key)}

    catalog.compactor().compact_and_gc()
    assert left() == {*decided, *opened}, "they are young"
    monkeypatch.setattr(leftovers, "LEFTOVER_MIN_AGE_S", -10.0)
    catalog.compactor().gc_delete_and_reset()
    assert left() == set(opened)
    assert register.read_one(gone.destination) is None
    assert catalog.get_latest("k1") == b"v"
    recorded = {record.destination for record in register.all()}
    assert recorded <= {info.key for info in bucket.list()}
